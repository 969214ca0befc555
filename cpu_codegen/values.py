"""Types, values and modules of LLVM IR text."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_FLOATS = ("half", "bfloat", "float", "double")
_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}


@dataclass(frozen=True, slots=True)
class Ty:
    """`scalar` is an LLVM scalar type (i1, i8, ..., float, ptr); lanes 0 is the scalar itself, n >= 1 the vector <n x scalar>."""

    scalar: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.scalar}>" if self.lanes else self.scalar

    @property
    def is_float(self) -> bool:
        return self.scalar in _FLOATS

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return _BITS[self.scalar] if self.scalar in _BITS else int(self.scalar[1:])

    def vec(self, lanes: int) -> Ty:
        return Ty(self.scalar, lanes)

    def of(self, scalar: str) -> Ty:
        """The type with the same lanes and another scalar."""
        return Ty(scalar, self.lanes)

    @property
    def mangled(self) -> str:
        """Spelling in the name of an overloaded intrinsic."""
        scalar = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64", "ptr": "p0"}.get(self.scalar, self.scalar)
        return f"v{self.lanes}{scalar}" if self.lanes else scalar


I1, I8, I16, I32, I64 = Ty("i1"), Ty("i8"), Ty("i16"), Ty("i32"), Ty("i64")
F16, BF16, F32, F64 = Ty("half"), Ty("bfloat"), Ty("float"), Ty("double")
PTR, VOID = Ty("ptr"), Ty("void")


@dataclass(frozen=True, slots=True)
class Val:
    """An SSA value or constant: its type and its spelling."""

    ty: Ty
    ref: str


def _scalar_literal(ty: Ty, value: float | int | bool) -> str:
    if ty.scalar == "i1":
        return "true" if value else "false"
    if not ty.is_float:
        return str(int(value))
    number = float(value)
    if ty.scalar == "double":
        bits = struct.unpack("<Q", struct.pack("<d", number))[0]
        return f"0x{bits:016X}"
    if ty.scalar == "half":
        try:
            packed = struct.pack("<e", number)
        except OverflowError:
            packed = struct.pack("<e", float("inf") if number > 0 else float("-inf"))
        return f"0xH{struct.unpack('<H', packed)[0]:04X}"
    try:
        packed = struct.pack("<f", number)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if number > 0 else float("-inf"))
    if ty.scalar == "bfloat":
        word = struct.unpack("<I", packed)[0]
        rounded = word >> 16 if number != number else (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        return f"0xR{rounded & 0xFFFF:04X}"
    bits = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", packed)[0]))[0]
    return f"0x{bits:016X}"  # LLVM spells a float constant by the bits of the equal double


def const(ty: Ty, value: float | int | bool) -> Val:
    """A constant; vectors are splats."""
    literal = _scalar_literal(Ty(ty.scalar), value)
    if not ty.lanes:
        return Val(ty, literal)
    return Val(ty, f"splat ({ty.scalar} {literal})")


def const_vec(ty: Ty, values: Sequence[float | int | bool]) -> Val:
    """A vector constant with one value for each lane."""
    assert ty.lanes == len(values)
    return Val(ty, "<" + ", ".join(f"{ty.scalar} {_scalar_literal(Ty(ty.scalar), v)}" for v in values) + ">")


def i64(value: int) -> Val:
    return const(I64, value)


@dataclass
class Module:
    """Functions, declarations and constants that become one object file. Names of functions are unique. made: the functions that serve
    again, by what they were made of."""

    functions: dict[str, str] = field(default_factory=dict)
    declarations: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)
    made: dict[Hashable, str] = field(default_factory=dict)

    def declare(self, name: str, ret: Ty, params: Sequence[Ty | str], attributes: str = "") -> None:
        text = f"declare {ret} @{name}({', '.join(str(p) for p in params)}) {attributes}".rstrip()
        assert self.declarations.setdefault(name, text) == text, f"{name} declared twice with different types"

    def table(self, ty: Ty, values: Sequence[float | int]) -> Val:
        """Pointer to a read-only, 64-byte aligned array of scalars."""
        body = ", ".join(f"{ty.scalar} {_scalar_literal(ty, v)}" for v in values)
        text = f"private unnamed_addr constant [{len(values)} x {ty.scalar}] [{body}], align 64"
        name = self.constants.setdefault(text, f"table.{len(self.constants)}")
        return Val(PTR, f"@{name}")

    def note(self, body: str) -> str:
        """The name of a metadata node, for what instructions say about themselves."""
        if body not in self.metadata:
            self.metadata.append(body)
        return f"!{self.metadata.index(body)}"

    def text(self) -> str:
        constants = [f"@{name} = {body}" for body, name in self.constants.items()]
        external = [d for n, d in self.declarations.items() if n not in self.functions]
        notes = [f"!{n} = !{body}" for n, body in enumerate(self.metadata)]
        return "\n".join([*constants, *external, *self.functions.values(), *notes, ""])
