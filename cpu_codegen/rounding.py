"""Cheaper forms found in a body.

Fused multiply-adds: a b + c is rounded once instead of twice.

Rounding conversions: cast(clamp(round(x) + zero)) to integers is one conversion instruction that rounds.

That is what quantization looks like. Clamping first is the same, since rounding is monotone and the bounds are integers. Between bounds
the sum is exact, and may be one of integers; without them it is rounded, or what it adds to is no integer of the type.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import frexp

from ..graph.types import DType, f32, f64, u8
from ..platforms.target import Target
from ..stitch.elementwise import MAGIC
from ..stitch.loops import Body, Node, is_whole
from . import convert, elementwise
from .builder import I8, I16, I32, Function, Ty, Val, const
from .scopes import Scopes
from .slots import Slots

_AVX512 = ("avx512f", "avx512bw", "avx512vl")
_EXTREMES = {"gt": "maximum", "lt": "minimum"}


@dataclass(frozen=True)
class Chain:
    """Round node to an integer, add the value of node `zero` (-1: nothing), clamp the sum by these in this order.

    With a zero there are clamps on both sides, one of which takes NaN.
    """

    node: int
    clamps: tuple[Clamp, ...]
    zero: int = -1
    natural: bool = True
    """Whether what is added is known not to be below 0."""


class Zero:
    """What a chain adds. node: a constant, a number of the kernel, or None for nothing."""

    def __init__(self, fn: Function, slots: Slots, scopes: Scopes, node: Node | None) -> None:
        self._fn, self._slots, self._scopes, self._node = fn, slots, scopes, node

    @property
    def _number(self) -> int | None:
        """Which number of the kernel it is."""
        return int(self._node.value) if self._node is not None and self._node.op == "param" else None

    @property
    def _value(self) -> int:
        return 0 if self._node is None else int(self._node.value)

    def integer(self, ty: Ty) -> Val:
        """It as integers."""
        if self._number is None:
            return const(ty, self._value)
        return self._once(("zero", ty), self._number, ty.lanes, lambda zero: convert.round_to_int(self._fn, zero, ty.bits))

    def before(self, bound: int, ty: Ty) -> Val:
        """What a bound of the sum is before the addition, as floats."""
        if self._number is None:
            return const(ty, bound - self._value)
        return self._once(("before", bound, ty), self._number, ty.lanes, lambda zero: self._fn.sub(const(ty, bound), zero))

    def _once(self, key: tuple[Hashable, ...], number: int, lanes: int, make: Callable[[Val], Val]) -> Val:
        """What is made of a number of the kernel, in the entry block."""
        zero = self._slots.number(number, lanes)
        with self._scopes.entry():
            return self._scopes.find((*key, number)) or self._scopes.put((*key, number), make(zero))


@dataclass(frozen=True)
class Clamp:
    """op: maximum or minimum. takes_nan: whether NaN becomes the bound."""

    op: str
    bound: int
    takes_nan: bool


def never_nan(nodes: Sequence[Node], n: int) -> bool:
    """Whether a value is known to be a number: constants, parameters and what comes from integers."""
    node = nodes[n]
    if node.op == "const":
        return node.value == node.value
    if node.op == "cast":
        return not nodes[node.args[0]].dtype.is_float
    return node.op == "param"


def chains(body: Body) -> dict[int, Chain]:
    """The chain that ends in each cast that has one."""
    found = ((n, rounded_chain(body.nodes, node)) for n, node in enumerate(body.nodes) if node.op == "cast")
    return {n: chain for n, chain in found if chain is not None}


def rounded_chain(nodes: Sequence[Node], cast: Node) -> Chain | None:
    """The chain that ends in this cast, or None."""
    n = cast.args[0]
    if cast.dtype.kind not in ("int", "uint") or nodes[n].dtype not in (f32, f64):
        return None
    clamps: list[Clamp] = []
    while (bounded := _bounded(nodes, n)) is not None:
        n, clamp = bounded
        clamps.insert(0, clamp)
    zero = -1
    if nodes[n].op == "add":
        split = next(((a, b) for a, b in (nodes[n].args, nodes[n].args[::-1]) if _is_zero(nodes[b])), None)
        if split is None:
            return None
        n, zero = split
        if {each.op for each in clamps} != {"maximum", "minimum"}:
            return None
        if not any(each.takes_nan for each in clamps):
            # Its conversion is some integer, to which the zero would be added.
            clamps = [replace(each, takes_nan=each.op == "maximum") for each in clamps]
    if nodes[n].op != "round":
        return None
    natural = zero < 0 or nodes[zero].kind == "natural" or (nodes[zero].op == "const" and nodes[zero].value >= 0)
    return Chain(nodes[n].args[0], tuple(clamps), zero, natural)


def contracts(nodes: Sequence[Node], node: Node) -> bool:
    """Whether a product and the sum it goes into may be rounded once, by a fused multiply-add.

    Not a b + c d: rounding one of the two products only, a b - a b would not be 0, nor b b - 4 a c where it is for PyTorch. Nor a product
    less the greatest of such products, which has been rounded: the weights of a softmax would be of numbers above 0, or all far below.
    """
    if node.dtype != f32 or node.op not in ("mul", "add", "sub") or node.kind == "exact":
        return False
    return node.op == "mul" or not all(nodes[n].op == "mul" for n in node.args)


def exact_inverse(divisor: Node) -> float | None:
    """1 / divisor where multiplying by it is exactly the division: constant powers of two."""
    if divisor.op != "const" or divisor.dtype not in (f32, f64) or divisor.value != divisor.value:
        return None
    fraction, exponent = frexp(divisor.value)
    return 1.0 / divisor.value if abs(fraction) == 0.5 and abs(exponent) < 120 else None


def _bounded(nodes: Sequence[Node], n: int) -> tuple[int, Clamp] | None:
    """What a node clamps to one side, by a whole number, and how: `x > bound ? x : bound` gives the bound for NaN."""
    node = nodes[n]
    if node.op == "relu":
        return node.args[0], Clamp("maximum", 0, False)
    if node.op in ("maximum", "minimum"):
        split = _with_integer(nodes, n)
        return None if split is None else (split[0], Clamp(node.op, split[1], False))
    if node.op != "where" or nodes[node.args[0]].op not in _EXTREMES or nodes[node.args[0]].args != node.args[1:]:
        return None
    x, bound = node.args[1:]
    return (x, Clamp(_EXTREMES[nodes[node.args[0]].op], int(nodes[bound].value), True)) if _is_integer(nodes[bound]) else None


def _with_integer(nodes: Sequence[Node], n: int) -> tuple[int, int] | None:
    """(other operand, number) when one operand of a binary operation is a constant whole number that floats hold exactly."""
    for at, other in ((1, 0), (0, 1)):
        operand = nodes[nodes[n].args[at]]
        if _is_integer(operand):
            return nodes[n].args[other], int(operand.value)
    return None


def _is_integer(node: Node) -> bool:
    return node.op == "const" and is_whole(node.value)


def _is_zero(node: Node) -> bool:
    return _is_integer(node) or (node.op == "param" and node.kind in ("natural", "whole"))


def emit(fn: Function, target: Target, chain: Chain, zero: Zero, x: Val, dtype: DType) -> Val:
    """The chain applied to the value of its node."""
    narrows = dtype == u8 and x.ty.lanes > 0 and _bounds(chain) == (0, 255) and _nan(chain) == 0 and target.has(*_AVX512)
    if not narrows:
        whole = _whole(fn, target, chain, zero, chain.clamps, x, dtype)
        return whole if dtype.bits == whole.ty.bits else _cut(fn, target, whole, dtype)
    # VPMOVUSDB does for the upper bound. What it narrows is not below 0, or what the conversion gives for numbers that no integer holds:
    # the least one, which is greater than all others without a sign.
    least = tuple(replace(each, takes_nan=True) for each in chain.clamps if each.op == "maximum")
    whole = _whole(fn, target, chain, zero, least, x, dtype)
    return fn.convert("trunc", fn.intrinsic("umin", whole.ty, [whole, const(whole.ty, 255)]), whole.ty.of("i8"))


def _cut(fn: Function, target: Target, whole: Val, dtype: DType) -> Val:
    """The low bits of integers."""
    if dtype.bits != 8 or whole.ty != I32.vec(16) or not target.has("avx512_vbmi"):
        return fn.convert("trunc", whole, whole.ty.of(f"i{dtype.bits}"))
    # VPERMB is one micro-operation, VPMOVDB two (uops.info).
    data = fn.convert("bitcast", whole, I8.vec(64))
    places = fn.table(I8.vec(64), [4 * n % 64 for n in range(64)])
    moved = fn.call("llvm.x86.avx512.permvar.qi.512", I8.vec(64), [data, places])
    return fn.shuffle(moved, moved, range(16))


def emit_joined(fn: Function, target: Target, chain: Chain, zero: Zero, xs: Sequence[Val], dtype: DType) -> Val:
    """The chain applied to vectors beside each other, in one vector."""
    if dtype.bits != 8 or len(xs) != 4 or not target.has("avx2") or xs[0].ty.lanes != target.lanes(32):
        return fn.concatenate([emit(fn, target, chain, zero, x, dtype) for x in xs])
    (low, high), bounds, clamps = _range(dtype), _bounds(chain), chain.clamps
    # Packing gives the lowest for a NaN that no clamp has taken, cutting off its bits 0.
    numbers = _nan(chain) == low or any(each.takes_nan for each in clamps)
    inside = bounds is not None and low <= bounds[0] and bounds[1] <= high and numbers
    if saturates(chain, dtype):
        # Packing saturates. Only numbers that no integer holds would come out on the wrong side, the least integer, if they are large.
        clamps = tuple(replace(each, takes_nan=False) for each in clamps if each.op == "minimum")
    wholes = [_whole(fn, target, chain, zero, clamps, x, dtype) for x in xs]
    if not inside:
        wholes = [fn.and_(whole, const(whole.ty, 255)) for whole in wholes]
    return _packed(fn, target, wholes, inside and dtype != u8)


def saturates(chain: Chain, dtype: DType) -> bool:
    """Whether packing integers of 32 bits as bytes does for the lower bound, too, and for what NaN becomes."""
    bounds, (low, high) = _bounds(chain), _range(dtype)
    return bounds is not None and bounds[1] <= high and bounds[0] == low == _nan(chain) and chain.natural


def _range(dtype: DType) -> tuple[int, int]:
    """The numbers of a byte."""
    return (0, 255) if dtype == u8 else (-128, 127)


def _packed(fn: Function, target: Target, wholes: Sequence[Val], signed: bool) -> Val:
    """Four vectors of i32 as one of i8, saturated."""
    bits, lanes = target.vector_bits, wholes[0].ty.lanes
    prefix, suffix = ("llvm.x86.avx512", f".{bits}") if bits == 512 else ("llvm.x86.avx2", "")
    halves = [fn.call(f"{prefix}.packssdw{suffix}", I16.vec(2 * lanes), pair) for pair in (wholes[:2], wholes[2:])]
    packed = fn.call(f"{prefix}.{'packsswb' if signed else 'packuswb'}{suffix}", I8.vec(4 * lanes), halves)
    # Each part of 128 bits holds those of the four vectors, 32 bits of each.
    parts = bits // 128
    words = fn.convert("bitcast", packed, I32.vec(lanes))
    words = fn.shuffle(words, words, [4 * part + vector for vector in range(4) for part in range(parts)])
    return fn.convert("bitcast", words, packed.ty)


def _whole(fn: Function, target: Target, chain: Chain, zero: Zero, clamps: Sequence[Clamp], x: Val, dtype: DType) -> Val:
    """The integers of a chain, of 32 bits and more, with these clamps."""
    for clamp in clamps:
        bound = zero.before(clamp.bound, x.ty)
        if clamp.takes_nan:
            x = fn.select(fn.fcmp("ogt" if clamp.op == "maximum" else "olt", x, bound), x, bound)
        else:
            x = elementwise.extreme(fn, target, clamp.op, x, bound, (False, True))
    if target.has("neon"):
        whole = _whole_neon(fn, chain, x, dtype)
    else:
        whole = convert.round_to_int(fn, x, max(32, dtype.bits))
    return whole if chain.zero < 0 else fn.add(whole, zero.integer(whole.ty))


def _whole_neon(fn: Function, chain: Chain, x: Val, dtype: DType) -> Val:
    """Conversions have a quarter of the rate of sums in LLVM's models of Neoverse N1 and N2, and LLVM makes two of `lrint`."""
    if x.ty.bits == 32 and dtype.bits == 8 and _bounds(chain) is not None and any(each.takes_nan for each in chain.clamps):
        return fn.convert("bitcast", fn.add(x, const(x.ty, MAGIC)), x.ty.of("i32"))  # its low bits are those of the integer
    to = x.ty.of(f"i{max(32, dtype.bits)}")
    if to.bits == x.ty.bits and x.ty.bits * x.ty.lanes in (0, 64, 128):
        return fn.call(f"llvm.aarch64.neon.fcvtns.{to.mangled}.{x.ty.mangled}", to, [x])
    return convert.round_to_int(fn, x, to.bits)


def _bounds(chain: Chain) -> tuple[int, int] | None:
    """The least and the greatest integer of a chain that has one clamp on each side."""
    bounds = {each.op: each.bound for each in chain.clamps}
    return (bounds["maximum"], bounds["minimum"]) if len(chain.clamps) == len(bounds) == 2 else None


def _nan(chain: Chain) -> int:
    """The integer that NaN becomes on x86: its conversion gives one with no low bits where no clamp takes it."""
    return next((each.bound for each in chain.clamps if each.takes_nan), 0)
