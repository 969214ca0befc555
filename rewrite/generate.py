"""Random graphs that match a pattern, made from the pattern: how every rule is tested without anyone writing a test for it.

Generation runs from the root down: each node is asked for a value of a wanted type and asks its operands for the types that lead
there. A choice that turns out impossible (a repeated name in two shapes, say) is thrown away and drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..diagnostics.errors import InvalidGraph
from ..graph import attrs as A
from ..graph import build as b
from ..graph.dims import Dim, Shape, product, symbol
from ..graph.ir import Value
from ..graph.ops import BINARY, COMPARE, FLOAT_ONLY, OPS, PREDICATES, UNARY, infer, make
from ..graph.types import BY_NAME, DType, QParams, TensorType, bf16, boolean, f32, f64, i8, i32, u8
from .pattern import GROUPS, Argument, Bound, Either, NumberLiteral, NumberVariable, Operation, Optional, Pattern, Rest, walk
from .template import full

SYMBOLS = {"n": 3, "m": 2}
_SYMBOLIC: tuple[Dim, ...] = tuple(symbol(name, 1, 64) for name in SYMBOLS)
_NUMBERS = (0.5, 2.0, -1.0, 3.0, 0.125, 0.3, 1.0)
_S8, _U8 = QParams((0.05,)), QParams((0.02,), 120, None, 0, 255)

# Operations that have no meaning for every element type.
_BITWISE = ("and", "or", "xor", "bitwise_not")
_FLOAT_DATA = (*FLOAT_ONLY, "floordiv", "truncdiv", "remainder", "fmod", "floor", "ceil", "trunc", "round", "relu", "isnan", "isinf")
_NO_BOOL = ("neg", "abs", "sign", "sub", *_FLOAT_DATA)

Operands = tuple[tuple[TensorType, ...], A.Attrs]


class Impossible(Exception):
    """This draw leads nowhere; draw again."""


def dimension(rng: random.Random) -> Dim:
    """A small size, sometimes symbolic."""
    return rng.choice((1, 2, 3, 4)) if rng.random() < 0.9 else rng.choice(_SYMBOLIC)


def random_type(rng: random.Random) -> TensorType:
    """Any tensor type, mostly f32 of one to three axes."""
    dtype = rng.choice((f32, f32, f32, f32, f64, bf16, i32, u8, boolean, i8))
    shape = tuple(dimension(rng) for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4))))
    return TensorType(dtype, shape, _S8 if dtype == i8 else None)


def _stretched(rng: random.Random, shape: Shape) -> Shape:
    """A shape that broadcasts to `shape`."""
    kept = shape[rng.randint(0, len(shape)):] if rng.random() < 0.3 else shape
    return tuple(1 if rng.random() < 0.3 else d for d in kept)


def _elementwise(rng: random.Random, op: str, want: TensorType) -> Operands:
    count = OPS[op].arity[0]
    dtype = want.dtype
    if op in COMPARE or op in PREDICATES:
        dtype = rng.choice((f32, i32, boolean))
    if (op in _FLOAT_DATA and not dtype.is_float) or (op in _BITWISE and dtype.is_float) or (op in _NO_BOOL and dtype == boolean):
        raise Impossible
    if op in ("shl", "shr"):
        raise Impossible
    shapes = [want.shape if count == 1 or rng.random() < 0.7 else _stretched(rng, want.shape) for _ in range(count)]
    shapes[rng.randrange(count)] = want.shape
    types = [TensorType(dtype, shape) for shape in shapes]
    if op == "where":
        types[0] = TensorType(boolean, shapes[0])
    return tuple(types), A.NoAttrs()


def _cast(rng: random.Random, op: str, want: TensorType) -> Operands:
    # Floats to integers only where every machine agrees: not for the infinities and NaN of the data.
    defined = want.dtype.is_float or want.dtype == boolean
    source = rng.choice((i32, boolean, u8, *((f32, f64, bf16) if defined else ())))
    return (TensorType(source, want.shape),), A.CastAttrs(want.dtype)


def _quantize(rng: random.Random, op: str, want: TensorType) -> Operands:
    if want.qparams is None:
        raise Impossible
    return (TensorType(f32, want.shape),), A.QuantizeAttrs(want.dtype, want.qparams)


def _dequantize(rng: random.Random, op: str, want: TensorType) -> Operands:
    dtype, q = rng.choice(((i8, _S8), (u8, _U8)))
    return (TensorType(dtype, want.shape, q),), A.NoAttrs()


def _reduce(rng: random.Random, op: str, want: TensorType) -> Operands:
    if want.dtype == boolean:
        raise Impossible
    rank, keepdim = len(want.shape), rng.random() < 0.5
    if keepdim:
        units = [axis for axis, d in enumerate(want.shape) if d == 1]
        if not units:
            raise Impossible
        axis = rng.choice(units)
        shape = (*want.shape[:axis], dimension(rng), *want.shape[axis + 1:])
    else:
        axis = rng.randint(0, rank)
        shape = (*want.shape[:axis], dimension(rng), *want.shape[axis:])
    return (replace(want, shape=shape),), A.ReduceAttrs(rng.choice(("sum", "max", "min")), (axis,), keepdim)


def _reshape(rng: random.Random, op: str, want: TensorType) -> Operands:
    """Merges neighbours, inserts and drops axes of size 1: what a reshape of symbolic sizes can do, too."""
    dims = [d for d in want.shape if d != 1 or rng.random() < 0.5]
    if len(dims) > 1 and rng.random() < 0.5:
        at = rng.randrange(len(dims) - 1)
        dims[at: at + 2] = [product(dims[at: at + 2])]
    if rng.random() < 0.5:
        dims.insert(rng.randint(0, len(dims)), 1)
    return (replace(want, shape=tuple(dims)),), A.ShapeAttrs(want.shape)


def _expand(rng: random.Random, op: str, want: TensorType) -> Operands:
    return (replace(want, shape=_stretched(rng, want.shape)),), A.ShapeAttrs(want.shape)


def _permute(rng: random.Random, op: str, want: TensorType) -> Operands:
    order = list(range(want.rank))
    rng.shuffle(order)
    return (replace(want, shape=tuple(want.shape[order.index(axis)] for axis in range(want.rank))),), A.PermuteAttrs(tuple(order))


def _slice(rng: random.Random, op: str, want: TensorType) -> Operands:
    if not want.rank:
        raise Impossible
    axis, start, step = rng.randrange(want.rank), rng.randint(0, 2), rng.randint(1, 2)
    length = want.shape[axis]
    size = start + (length - 1) * step + 1 + rng.randint(0, 2)
    return (replace(want, shape=(*want.shape[:axis], size, *want.shape[axis + 1:])),), A.SliceAttrs(axis, start, length, step)


def _window(rng: random.Random, op: str, want: TensorType) -> Operands:
    if want.rank < 2:
        raise Impossible
    axis, step = rng.randrange(want.rank - 1), rng.randint(1, 2)
    width = want.shape[axis + 1]
    if not isinstance(width, int):
        raise Impossible
    attrs = A.WindowAttrs(axis, width, step, rng.randint(1, 2))
    size = (want.shape[axis] - 1) * step + attrs.span + rng.randint(0, step - 1)
    return (replace(want, shape=(*want.shape[:axis], size, *want.shape[axis + 2 :])),), attrs


def _contraction(rng: random.Random, op: str, want: TensorType) -> Operands:
    if want.dtype != f32 or want.rank < (2 if op == "matmul" else 1):
        raise Impossible
    k, n = dimension(rng), want.shape[-1]
    groups = rng.choice([g for g in (1, 2, 3) if op != "matmul" and isinstance(n, int) and n % g == 0] or [1])
    x = TensorType(f32, (*want.shape[:-1], groups * k))
    if op == "matmul":
        return (x, TensorType(f32, (*want.shape[:-2], k, n))), A.NoAttrs()
    if op == "qlinear":
        return (TensorType(i8, x.shape, _S8), TensorType(i8, (n, k), _S8), TensorType(f32, (n,))), A.NoAttrs()
    return (x, TensorType(f32, (n, k)), TensorType(f32, (n,))), A.NoAttrs()


def _concat(rng: random.Random, op: str, want: TensorType) -> Operands:
    if not want.rank:
        raise Impossible
    return (want,), A.AxisAttrs(rng.randrange(want.rank))


def _full(rng: random.Random, op: str, want: TensorType) -> Operands:
    value = rng.choice([n for n in _NUMBERS if n >= 0 or want.dtype.kind != "uint"])
    converted = value if want.dtype.is_float else bool(value > 0) if want.dtype == boolean else int(value)
    return (), A.FullAttrs(converted, want.dtype, want.shape)


OPERANDS: dict[str, Callable[[random.Random, str, TensorType], Operands]] = {
    **dict.fromkeys((*UNARY, *BINARY, *COMPARE, "where"), _elementwise),
    "cast": _cast, "quantize": _quantize, "dequantize": _dequantize, "reduce": _reduce, "reshape": _reshape, "expand": _expand,
    "permute": _permute, "slice": _slice, "window": _window,
    "concat": _concat, "linear": _contraction, "qlinear": _contraction, "matmul": _contraction,
    "full": _full,
}


@dataclass
class Generator:
    """One draw: a value that matches a pattern, over inputs and constants of its own."""

    rng: random.Random
    definitions: dict[str, Pattern] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    attrs: dict[str, A.Attrs] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    inputs: int = 0

    def root(self, pattern: Pattern) -> Value:
        """Raises Impossible or InvalidGraph when this draw does not work out."""
        self.definitions = {n.name: n.pattern for n in walk(pattern) if isinstance(n, Bound)}
        return self.value(pattern, random_type(self.rng))

    def leaf(self, want: TensorType) -> Value:
        """An input, or sometimes a constant; quantized types are computed from one."""
        if want.qparams is not None:
            return b.quantize(self.leaf(TensorType(f32, want.shape)), want.dtype, want.qparams)
        if want.dtype.is_float and self.rng.random() < 0.2 and all(isinstance(d, int) for d in want.shape):
            seeded = torch.Generator().manual_seed(self.rng.getrandbits(32))
            return b.constant(torch.randn([d for d in want.shape if isinstance(d, int)], generator=seeded).to(want.dtype.torch))
        self.inputs += 1
        return b.input_(self.inputs - 1, want.dtype, want.shape)

    def value(self, node: Argument, want: TensorType) -> Value:
        """A value of type `want` that matches `node`."""
        if isinstance(node, Either):
            return self.value(self.rng.choice(node.options), want)
        if isinstance(node, Optional):
            return self.value(node.pattern, want)
        if isinstance(node, NumberLiteral):
            if isinstance(node.value, bool) != (want.dtype == boolean) or (isinstance(node.value, float) and not want.dtype.is_float):
                raise Impossible
            return full(node.value, want.dtype, self.rng.choice(((), want.shape)))
        if isinstance(node, NumberVariable):
            number = self.numbers.setdefault(node.name, self.rng.choice(_NUMBERS))
            return full(number, want.dtype, ()) if want.dtype.is_float else self.value(NumberLiteral(int(number)), want)
        if isinstance(node, Rest):
            raise Impossible
        return self.operation(node, want) if isinstance(node, Operation) else self.named(node.name, want)

    def named(self, name: str, want: TensorType) -> Value:
        """The value of a name: the one drawn before, a match of the pattern that the name is bound to, or anything."""
        known = self.values.get(name)
        if known is None:
            known = self.value(self.definitions[name], want) if name in self.definitions else self.leaf(want)
        if name != "_":
            self.values[name] = known
        if known.dtype != want.dtype or known.shape != want.shape:
            raise Impossible
        return known

    def operation(self, node: Operation, want: TensorType) -> Value:
        op = self.groups.setdefault(node.op, self.rng.choice(GROUPS[node.op])) if node.op in GROUPS else node.op
        if op not in OPERANDS:
            raise Impossible
        wants, attrs = OPERANDS[op](self.rng, op, want)
        given: dict[str, Any] = {k: BY_NAME[v] if isinstance(v, str) and v in BY_NAME else v for k, v in node.fields}
        attrs = replace(attrs, **given)
        if node.attrs is not None:
            attrs = self.attrs.setdefault(node.attrs, attrs)
        args = [a for a in node.args if not isinstance(a, Rest) and not (isinstance(a, Optional) and self.rng.random() < 0.5)]
        if len(args) > len(wants):
            raise Impossible
        operands = tuple(self.value(a, w) for a, w in zip(args, wants))
        found = infer(op, operands, attrs)
        if not isinstance(found, TensorType) or (found.dtype, found.shape) != (want.dtype, want.shape):
            raise Impossible
        return make(op, *operands, attrs=attrs)


def generate(pattern: Pattern, rng: random.Random, attempts: int = 60) -> Value | None:
    """A value that matches `pattern` (structurally: rules may have further conditions), or None when no attempt succeeded."""
    for _ in range(attempts):
        try:
            return Generator(rng).root(pattern)
        except (Impossible, InvalidGraph):
            continue
    return None


def random_tensor(rng: random.Random, dtype: DType, shape: tuple[int, ...], specials: bool) -> torch.Tensor:
    """Data for an input. specials: sometimes zeros of both signs, infinities, NaN, and the largest and smallest numbers."""
    seeded = torch.Generator().manual_seed(rng.getrandbits(32))
    if dtype == boolean:
        return torch.rand(shape, generator=seeded) < 0.5
    if not dtype.is_float:
        return torch.randint(0 if dtype.kind == "uint" else -4, 5, shape, generator=seeded).to(dtype.torch)
    data = (torch.randn(shape, generator=seeded) * 2).to(dtype.torch)
    if specials and rng.random() < 0.3 and data.numel():
        limits = torch.finfo(dtype.torch)
        for special in (0.0, -0.0, float("inf"), float("-inf"), float("nan"), limits.max, limits.min, limits.tiny):
            data.view(-1)[rng.randrange(data.numel())] = special
    return data
