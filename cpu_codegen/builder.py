"""A small writer of LLVM IR text: typed values, structured loops, one module of functions.

Text rather than llvmlite.ir because bfloat and scalable vectors exist only there, and because it is several times faster.
`Function` methods append one instruction and return its `Val`; scalar and vector values go through the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .turns import CHAINS, in_turn
from .values import BF16, F16, F32, F64, I1, I8, I16, I32, I64, PTR, VOID, Module, Ty, Val, const, const_vec, i64

__all__ = [
    "BF16", "F16", "F32", "F64", "I1", "I8", "I16", "I32", "I64", "PTR", "VOID",
    "Function", "Module", "Ty", "Val", "const", "const_vec", "i64",
]

Result = TypeVar("Result")
LoopBody = Callable[[Val, list[Val]], Sequence[Val]]


def _numbers(a: Val, b: Val) -> tuple[int, int] | None:
    """Two numbers of 64 bits that are known, neither negative: what follows from them LLVM finds out within a block alone."""
    return (int(a.ref), int(b.ref)) if a.ty == b.ty == I64 and a.ref.isdigit() and b.ref.isdigit() else None


class Function:
    """One function under construction; `finish()` adds it to the module.

    f = Function(module, "axpy", VOID, [PTR, I64]); ...; f.ret(); f.finish()
    """

    def __init__(self, module: Module, name: str, ret: Ty, params: Sequence[Ty | str], *, internal: bool = False) -> None:
        self.module, self.name = module, name
        types = [p if isinstance(p, Ty) else Ty(p.split()[0]) for p in params]
        self.args = [Val(ty, f"%a{i}") for i, ty in enumerate(types)]
        signature = ", ".join(f"{p} %a{i}" for i, p in enumerate(params))
        self._head = f"define {'internal ' if internal else ''}{ret} @{name}({signature}) nounwind {{"
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._tables: dict[tuple[Ty, tuple[float | int, ...]], Val] = {}
        self._count = 0
        self._block, self._entry_block = "begin", "entry"  # what the next instruction is in, here and on entry

    # -- plumbing -----------------------------------------------------------------------------------------------
    def _fresh(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def emit(self, ty: Ty, text: str) -> Val:
        """Append `%new = text`."""
        ref = self._fresh()
        self._lines.append(f"  {ref} = {text}")
        return Val(ty, ref)

    def effect(self, text: str) -> None:
        """Append an instruction without a result."""
        self._lines.append(f"  {text}")

    def side_by_side(self, parts: Sequence[Callable[[], Result]], count: int = CHAINS) -> list[Result]:
        """Emits parts that need nothing of one another but values, an instruction of each of `count` in turn (`turns.py`)."""
        lines, results = self._lines, list[Result]()
        for first in range(0, len(parts), count):
            emitted: list[list[str]] = []
            for part in parts[first : first + count]:
                self._lines = []
                results.append(part())
                emitted.append(self._lines)
            lines += in_turn(emitted)
        self._lines = lines
        return results

    def _label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name

    def finish(self) -> None:
        assert self.name not in self.module.functions, f"{self.name} defined twice"
        lines = [self._head, "entry:", *self._entry, "  br label %begin", "begin:", *self._lines, "}", ""]
        self.module.functions[self.name] = "\n".join(lines)

    def ret(self, value: Val | None = None) -> None:
        self.effect("ret void" if value is None else f"ret {value.ty} {value.ref}")

    def call(self, name: str, ret: Ty, args: Sequence[Val], *, params: Sequence[Ty | str] | None = None, attributes: str = "") -> Val:
        """Call a function or intrinsic, declaring it on first use. `params` overrides declared types, e.g. "i32 immarg"."""
        self.module.declare(name, ret, params if params is not None else [a.ty for a in args], attributes)
        text = f"call {ret} @{name}({', '.join(f'{a.ty} {a.ref}' for a in args)})"
        if ret == VOID:
            self.effect(text)
            return Val(VOID, "")
        return self.emit(ret, text)

    def call_pointer(self, pointer: Val, ret: Ty, args: Sequence[Val]) -> Val:
        text = f"call {ret} {pointer.ref}({', '.join(f'{a.ty} {a.ref}' for a in args)})"
        if ret == VOID:
            self.effect(text)
            return Val(VOID, "")
        return self.emit(ret, text)

    def intrinsic(self, name: str, ret: Ty, args: Sequence[Val]) -> Val:
        """Overloaded LLVM intrinsic: `intrinsic("fma", ty, [a, b, c])` calls llvm.fma.<ty>, overloaded on the result type."""
        return self.call(f"llvm.{name}.{ret.mangled}", ret, args)

    # -- arithmetic ---------------------------------------------------------------------------------------------
    def _binary(self, integer: str, floating: str, a: Val, b: Val) -> Val:
        assert a.ty == b.ty, f"{integer}: {a.ty} and {b.ty}"
        return self.emit(a.ty, f"{floating if a.ty.is_float else integer} {a.ty} {a.ref}, {b.ref}")

    def add(self, a: Val, b: Val) -> Val:
        if a.ty == I64:
            if a.ref == "0":
                return b
            if b.ref == "0":
                return a
        known = _numbers(a, b)
        if known is not None:
            return i64(known[0] + known[1])
        return self._binary("add", "fadd", a, b)

    def sub(self, a: Val, b: Val) -> Val:
        known = _numbers(a, b)
        return self._binary("sub", "fsub", a, b) if known is None else i64(known[0] - known[1])

    def mul(self, a: Val, b: Val) -> Val:
        if a.ty == I64:
            if a.ref == "1":
                return b
            if b.ref == "1":
                return a
        known = _numbers(a, b)
        if known is not None:
            return i64(known[0] * known[1])
        return self._binary("mul", "fmul", a, b)

    def div(self, a: Val, b: Val) -> Val:
        """Float division, or signed integer division that truncates."""
        return self._binary("sdiv", "fdiv", a, b)

    def rem(self, a: Val, b: Val) -> Val:
        return self._binary("srem", "frem", a, b)

    def udiv(self, a: Val, b: Val) -> Val:
        known = _numbers(a, b)
        if known is not None and known[1]:
            return i64(known[0] // known[1])
        return self._binary("udiv", "fdiv", a, b)

    def urem(self, a: Val, b: Val) -> Val:
        return self._binary("urem", "frem", a, b)

    def contracted(self, op: str, a: Val, b: Val) -> Val:
        """Float add, sub or mul that may become part of a fused multiply-add where its product is used once."""
        assert a.ty == b.ty, f"{op}: {a.ty} and {b.ty}"
        return self.emit(a.ty, f"f{op} contract {a.ty} {a.ref}, {b.ref}")

    def freeze(self, a: Val) -> Val:
        """The same value, some number where it is poison; LLVM's analysis of loops (scalar evolution) does not look behind it."""
        return self.emit(a.ty, f"freeze {a.ty} {a.ref}")

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        return self.intrinsic("fma", a.ty, [a, b, c])

    def neg(self, a: Val) -> Val:
        return self.emit(a.ty, f"fneg {a.ty} {a.ref}") if a.ty.is_float else self.sub(const(a.ty, 0), a)

    def and_(self, a: Val, b: Val) -> Val:
        return self._binary("and", "and", a, b)

    def or_(self, a: Val, b: Val) -> Val:
        return self._binary("or", "or", a, b)

    def xor(self, a: Val, b: Val) -> Val:
        return self._binary("xor", "xor", a, b)

    def shl(self, a: Val, b: Val) -> Val:
        return self._binary("shl", "shl", a, b)

    def lshr(self, a: Val, b: Val) -> Val:
        return self._binary("lshr", "lshr", a, b)

    def ashr(self, a: Val, b: Val) -> Val:
        return self._binary("ashr", "ashr", a, b)

    def icmp(self, predicate: str, a: Val, b: Val) -> Val:
        """predicate: eq ne slt sle sgt sge ult ule ugt uge"""
        return self.emit(a.ty.of("i1"), f"icmp {predicate} {a.ty} {a.ref}, {b.ref}")

    def fcmp(self, predicate: str, a: Val, b: Val) -> Val:
        """predicate: oeq une olt ole ogt oge uno ord ..."""
        return self.emit(a.ty.of("i1"), f"fcmp {predicate} {a.ty} {a.ref}, {b.ref}")

    def select(self, condition: Val, a: Val, b: Val) -> Val:
        assert a.ty == b.ty
        return self.emit(a.ty, f"select {condition.ty} {condition.ref}, {a.ty} {a.ref}, {b.ty} {b.ref}")

    def smin(self, a: Val, b: Val) -> Val:
        known = _numbers(a, b)
        return self.intrinsic("smin", a.ty, [a, b]) if known is None else i64(min(known))

    def smax(self, a: Val, b: Val) -> Val:
        known = _numbers(a, b)
        return self.intrinsic("smax", a.ty, [a, b]) if known is None else i64(max(known))

    # -- conversion and lanes -----------------------------------------------------------------------------------
    def convert(self, op: str, a: Val, to: Ty) -> Val:
        """op: sext zext trunc fpext fptrunc sitofp uitofp fptosi fptoui bitcast ptrtoint inttoptr"""
        return a if op == "bitcast" and a.ty == to else self.emit(to, f"{op} {a.ty} {a.ref} to {to}")

    def splat(self, a: Val, lanes: int) -> Val:
        """Every lane equal to a scalar; lanes 0 gives the scalar itself."""
        if not lanes:
            return a
        ty = a.ty.vec(lanes)
        if not a.ref.startswith("%"):
            return Val(ty, f"splat ({a.ty} {a.ref})")
        if a.ty == I1:
            # Of a masked load by vectors of i1 that are one shuffled bit and partly false, LLVM 22 reads for AVX2 what is masked off.
            return self.icmp("slt", self.splat(self.convert("sext", a, I8), lanes), const(I8.vec(lanes), 0))
        first = self.emit(ty, f"insertelement {ty} poison, {a.ty} {a.ref}, i64 0")
        return self.shuffle(first, first, [0] * lanes)

    def shuffle(self, a: Val, b: Val, lanes: Sequence[int]) -> Val:
        mask = ", ".join(f"i32 {lane}" if lane >= 0 else "i32 poison" for lane in lanes)
        return self.emit(a.ty.vec(len(lanes)), f"shufflevector {a.ty} {a.ref}, {b.ty} {b.ref}, <{len(lanes)} x i32> <{mask}>")

    def concatenate(self, parts: Sequence[Val]) -> Val:
        """The lanes of a power of two of equal vectors, one after the other."""
        while len(parts) > 1:
            parts = [self.shuffle(a, b, range(2 * a.ty.lanes)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def extract(self, a: Val, lane: int) -> Val:
        if a.ty == I1.vec(a.ty.lanes) and a.ty.lanes > 1:
            # As a byte: bits of comparisons with 0 LLVM 22.1.0 takes for AVX-512 by MOVMSK, which cannot name the upper 16 registers.
            return self.icmp("ne", self.extract(self.convert("zext", a, I8.vec(a.ty.lanes)), lane), const(I8, 0))
        return self.emit(Ty(a.ty.scalar), f"extractelement {a.ty} {a.ref}, i64 {lane}")

    def insert(self, a: Val, b: Val, lane: int) -> Val:
        return self.emit(a.ty, f"insertelement {a.ty} {a.ref}, {b.ty} {b.ref}, i64 {lane}")

    def lane_ids(self, ty: Ty) -> Val:
        """0, 1, 2, ... in an integer vector type."""
        return const_vec(ty, range(ty.lanes))

    # -- memory -------------------------------------------------------------------------------------------------
    def gep(self, pointer: Val, index: Val, ty: Ty | None = None, *, scale: int = 0) -> Val:
        """pointer + index elements of `ty` (default bytes; or of `scale` bytes)."""
        element = f"[{scale} x i8]" if scale else str(ty or I8)
        return self.emit(PTR, f"getelementptr {element}, ptr {pointer.ref}, {index.ty} {index.ref}")

    def load(self, ty: Ty, pointer: Val, align: int = 0) -> Val:
        """Load; align 0 means the element's own alignment (vectors in memory are rarely better aligned)."""
        return self.emit(ty, f"load {ty}, ptr {pointer.ref}, align {align or max(1, ty.bits // 8)}")

    def store(self, value: Val, pointer: Val, align: int = 0) -> None:
        self.effect(f"store {value.ty} {value.ref}, ptr {pointer.ref}, align {align or max(1, value.ty.bits // 8)}")

    def stream(self, value: Val, pointer: Val) -> None:
        """Stores a vector around the caches; the pointer is a multiple of its size. `intrinsics.stores_done` before others read it."""
        size = value.ty.bits * value.ty.lanes // 8
        once = self.module.note("{i32 1}")
        self.effect(f"store {value.ty} {value.ref}, ptr {pointer.ref}, align {size}, !nontemporal {once}")

    def masked_load(self, ty: Ty, pointer: Val, mask: Val, other: Val) -> Val:
        name = f"llvm.masked.load.{ty.mangled}.p0"
        self.module.declare(name, ty, ["ptr", "i32 immarg", f"<{ty.lanes} x i1>", str(ty)])
        align = max(1, ty.bits // 8)
        return self.emit(ty, f"call {ty} @{name}(ptr {pointer.ref}, i32 {align}, {mask.ty} {mask.ref}, {ty} {other.ref})")

    def masked_store(self, value: Val, pointer: Val, mask: Val) -> None:
        name = f"llvm.masked.store.{value.ty.mangled}.p0"
        self.module.declare(name, VOID, [str(value.ty), "ptr", "i32 immarg", f"<{value.ty.lanes} x i1>"])
        align = max(1, value.ty.bits // 8)
        self.effect(f"call void @{name}({value.ty} {value.ref}, ptr {pointer.ref}, i32 {align}, {mask.ty} {mask.ref})")

    def alloca(self, size_bytes: int, align: int = 64) -> Val:
        """Static scratch on the stack, allocated once on entry: before any branch there."""
        ref = self._fresh()
        self._entry.insert(0, f"  {ref} = alloca [{size_bytes} x i8], align {align}")
        return Val(PTR, ref)

    def at_entry(self, ty: Ty, text: str) -> Val:
        """An instruction in the entry block, before everything else: values that do not change during the call."""
        ref = self._fresh()
        self._entry.append(f"  {ref} = {text}")
        return Val(ty, ref)

    def table(self, ty: Ty, values: Sequence[float | int]) -> Val:
        """A vector with these lanes, loaded once on entry."""
        key = ty, tuple(values)
        if key not in self._tables:
            address = self.module.table(Ty(ty.scalar), values)
            self._tables[key] = self.at_entry(ty, f"load {ty}, ptr {address.ref}, align 64")
        return self._tables[key]

    # -- control ------------------------------------------------------------------------------------------------
    def loop(self, start: Val, stop: Val, step: int | Val, initial: Sequence[Val], body: LoopBody) -> list[Val]:
        """for (i = start; i < stop; i += step) carried = body(i, carried); returns the final carried values."""
        self._count += 1
        tag = f"L{self._count}"
        before = self._block
        self.effect(f"br label %{tag}.head")
        self._label(f"{tag}.head")
        at = len(self._lines)
        index = Val(I64, f"%{tag}.i")
        carried = [Val(v.ty, f"%{tag}.c{n}") for n, v in enumerate(initial)]
        more = self.icmp("slt", index, stop)
        self.effect(f"br i1 {more.ref}, label %{tag}.body, label %{tag}.exit")
        self._label(f"{tag}.body")
        results = list(body(index, carried))
        assert [r.ty for r in results] == [c.ty for c in carried], "a loop's carried values keep their types"
        following = self.add(index, i64(step) if isinstance(step, int) else step)
        latch = self._block
        self.effect(f"br label %{tag}.head")
        phis = [f"  {index.ref} = phi i64 [ {start.ref}, %{before} ], [ {following.ref}, %{latch} ]"]
        for c, first, last in zip(carried, initial, results):
            phis.append(f"  {c.ref} = phi {c.ty} [ {first.ref}, %{before} ], [ {last.ref}, %{latch} ]")
        self._lines[at:at] = phis
        self._label(f"{tag}.exit")
        return carried

    def until(self, body: Callable[[], Val]) -> None:
        """do body() until it gives true."""
        self._count += 1
        tag = f"U{self._count}"
        self.effect(f"br label %{tag}.head")
        self._label(f"{tag}.head")
        done = body()
        self.effect(f"br i1 {done.ref}, label %{tag}.exit, label %{tag}.head")
        self._label(f"{tag}.exit")

    def branch(self, condition: Val, then: Callable[[], Sequence[Val]], otherwise: Callable[[], Sequence[Val]] | None = None) -> list[Val]:
        """if/else that may give values (phi nodes); both sides give the same types."""
        self._count += 1
        tag = f"B{self._count}"
        self.effect(f"br i1 {condition.ref}, label %{tag}.then, label %{tag}.else")
        self._label(f"{tag}.then")
        yes = list(then())
        yes_block = self._block
        self.effect(f"br label %{tag}.end")
        self._label(f"{tag}.else")
        no = list(otherwise()) if otherwise else []
        no_block = self._block
        self.effect(f"br label %{tag}.end")
        self._label(f"{tag}.end")
        return [self.emit(a.ty, f"phi {a.ty} [ {a.ref}, %{yes_block} ], [ {b.ref}, %{no_block} ]") for a, b in zip(yes, no, strict=True)]
