"""The operations: one row each with arity and type rule. `make` is the only way to build a value.

Elementwise operands broadcast as in torch (right-aligned, size 1 stretches) and must agree in dtype; conversions are
explicit `cast`s. `linear`, `qlinear` and `matmul` accumulate in f32 (int32 exactly for qlinear) and give f32 for bf16/f16/int8 operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from ..diagnostics.errors import InvalidGraph
from . import attrs as A
from . import products
from .dims import Dim, floordiv, product
from .ir import Value
from .recurrence import states_type
from .shapes import broadcast
from .types import DType, TensorType, TupleType, Type, boolean, f32, i32, i64

Infer = Callable[[tuple[TensorType, ...], A.Attrs], Type]
_NONE = A.NoAttrs()

UNARY = (
    "neg", "abs", "sign", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan",
    "tanh", "sigmoid", "erf", "floor", "ceil", "trunc", "round", "relu", "logical_not", "bitwise_not", "isnan", "isinf",
)
# To the digits of bf16; `rewrite.rules.short` puts them where more would be rounded off.
SHORT = ("normal_cdf_short", "sigmoid_short")
# That only rules make, of f32.
MADE = ("exp_weight", "gelu", "normal_cdf", *SHORT)
# Of many instructions each.
TRANSCENDENTAL = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "pow", "atan2", *MADE,
)
BINARY = (
    "add", "sub", "mul", "div", "floordiv", "truncdiv", "remainder", "fmod", "pow", "atan2", "maximum", "minimum",
    "and", "or", "xor", "shl", "shr",
)
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
PREDICATES = ("logical_not", "isnan", "isinf")
FLOAT_ONLY = (*TRANSCENDENTAL, "sqrt", "rsqrt", "reciprocal", "div")


@dataclass(frozen=True)
class OpSpec:
    """One operation: least and greatest number of operands, attribute class, type rule."""

    name: str
    arity: tuple[int, int]
    attrs: type[A.Attrs]
    infer: Infer
    group: str  # elementwise, reduce, view, index, update, contraction, order, recurrence, quant, check, leaf, extern


def _same_dtype(types: tuple[TensorType, ...]) -> DType:
    if any(t.dtype != types[0].dtype for t in types):
        raise InvalidGraph(f"operands differ in dtype: {', '.join(str(t.dtype) for t in types)}")
    return types[0].dtype


def _elementwise(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    return TensorType(_same_dtype(types), broadcast(tuple(t.shape for t in types)))


def _predicate(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    _same_dtype(types)
    return TensorType(boolean, broadcast(tuple(t.shape for t in types)))


def _where(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    if types[0].dtype != boolean:
        raise InvalidGraph(f"where: the condition is {types[0].dtype}, not bool")
    return TensorType(_same_dtype(types[1:]), broadcast(tuple(t.shape for t in types)))


def _cast(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.CastAttrs)
    return types[0].with_dtype(attrs.dtype)


def _reduce(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.ReduceAttrs)
    shape = types[0].shape
    kept = tuple(1 if a in attrs.axes else d for a, d in enumerate(shape)) if attrs.keepdim else tuple(
        d for a, d in enumerate(shape) if a not in attrs.axes)
    dtype = boolean if attrs.kind in ("any", "all") else i64 if attrs.kind.startswith("arg") else types[0].dtype
    q = types[0].qparams if attrs.kind in ("max", "min") else None  # one of the integers, which means what it did
    return TensorType(dtype, kept, q if q is not None and q.axis is None else None)


def _argsort(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.ArgsortAttrs)
    if not types[0].rank:
        raise InvalidGraph("argsort of a scalar")
    return TensorType(i64, (*types[0].shape[:-1], attrs.count))


def _scan(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    x = types[0]
    if not x.rank or x.dtype.bits < 32 or x.qparams is not None:
        raise InvalidGraph(f"scan: {x} is no tensor of numbers of 32 or 64 bits along an axis")
    return TensorType(x.dtype, x.shape)


def _reshape(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.ShapeAttrs)
    if product(types[0].shape) != product(attrs.shape):
        raise InvalidGraph(f"reshape: {types[0].shape} and {attrs.shape} hold different numbers of elements")
    return types[0].with_shape(attrs.shape)


def _expand(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.ShapeAttrs)
    if broadcast((types[0].shape, attrs.shape)) != attrs.shape:
        raise InvalidGraph(f"expand: {types[0].shape} does not stretch to {attrs.shape}")
    return types[0].with_shape(attrs.shape)


def _permute(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.PermuteAttrs)
    if sorted(attrs.order) != list(range(types[0].rank)):
        raise InvalidGraph(f"permute: {attrs.order} is no permutation of {types[0].rank} axes")
    shape, q = tuple(types[0].shape[a] for a in attrs.order), types[0].qparams
    if q is not None and q.axis is not None:
        q = replace(q, axis=attrs.order.index(q.axis))
    return TensorType(types[0].dtype, shape, q)


def _slice(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.SliceAttrs)
    return types[0].with_shape(types[0].shape[: attrs.axis] + (attrs.length,) + types[0].shape[attrs.axis + 1:])


def _window(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.WindowAttrs)
    shape, axis, q = types[0].shape, attrs.axis, types[0].qparams
    count = floordiv(shape[axis] - attrs.span, attrs.step) + 1
    if q is not None and q.axis is not None and q.axis > axis:
        q = replace(q, axis=q.axis + 1)
    return TensorType(types[0].dtype, (*shape[:axis], count, attrs.size, *shape[axis + 1 :]), q)


def _pad(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.PadAttrs)
    return types[0].with_shape(tuple(d + lo + hi for d, (lo, hi) in zip(types[0].shape, attrs.amounts, strict=True)))


def _concat(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.AxisAttrs)
    total: Dim = 0
    for t in types:
        if t.rank != types[0].rank or any(a != b for i, (a, b) in enumerate(zip(t.shape, types[0].shape)) if i != attrs.axis):
            raise InvalidGraph(f"concat on axis {attrs.axis}: {t.shape} does not fit {types[0].shape}")
        total = total + t.shape[attrs.axis]
    _same_dtype(types)
    return types[0].with_shape(types[0].shape[: attrs.axis] + (total,) + types[0].shape[attrs.axis + 1:])


def _take(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.AxisAttrs)
    table, index = types
    shape, q = table.shape[: attrs.axis] + index.shape + table.shape[attrs.axis + 1:], table.qparams
    if q is not None and q.axis is not None:  # what is taken along the channel axis no longer says which channel it is of
        q = None if q.axis == attrs.axis else replace(q, axis=q.axis + (index.rank - 1 if q.axis > attrs.axis else 0))
    return TensorType(table.dtype, shape, q)


def _gather(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    if types[0].rank != types[1].rank:
        raise InvalidGraph(f"gather: {types[0]} and {types[1]} differ in rank")
    return types[0].with_shape(types[1].shape)


def _put(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.PutAttrs)
    x, part, *positions = types
    result = _reshape((x,), A.ShapeAttrs(attrs.shape))
    fits = part.rank == len(attrs.shape) and all(p == d for a, (p, d) in enumerate(zip(part.shape, attrs.shape)) if a not in attrs.axes)
    if not fits or part.dtype != x.dtype or len(positions) != len(attrs.axes) or any(p.dtype != i64 for p in positions):
        raise InvalidGraph(f"put: {', '.join(map(str, types))} do not fit along {attrs.axes} of {attrs.shape}")
    broadcast((part.shape, *(p.shape for p in positions)))
    # Of a vector of elements that become one with others, no two may meet.
    if attrs.kind and (part.shape[-1] == 1 or any(p.shape and p.shape[-1] != 1 for p in positions)):
        raise InvalidGraph(f"put: positions {', '.join(map(str, positions))} of elements that become one vary along the last axis")
    return result


def _quantize(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.QuantizeAttrs)
    return TensorType(attrs.dtype, types[0].shape, attrs.qparams)


def _piecewise(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, A.PiecewiseAttrs)
    narrow = attrs.dtype.bits == 8 or (attrs.dtype == f32 and len(types) == 1)
    if any(t.dtype != f32 for t in types) or not narrow:
        raise InvalidGraph(f"piecewise: {', '.join(map(str, types))} to {attrs.dtype} is not from f32 to 8 bits, nor from one f32 to f32")
    if broadcast(tuple(t.shape for t in types)) != types[0].shape:
        raise InvalidGraph(f"piecewise: factors {types[1]} do not spread over {types[0]}")
    least, most = (round(float(np.float32(u) * np.float32(attrs.density))) if isfinite(u) else None for u in (attrs.low, attrs.high))
    if (least is not None and least < attrs.first) or (most is not None and most > attrs.last):
        raise InvalidGraph(f"piecewise: [{attrs.low}, {attrs.high}] is more than pieces {attrs.first} to {attrs.last}, by {attrs.density}")
    return TensorType(attrs.dtype, types[0].shape, attrs.qparams)


def _pack_bytes(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    if _same_dtype(types).bits != 8:
        raise InvalidGraph(f"pack_bytes: {types[0]} has no elements of 8 bits")
    return TensorType(i32, broadcast(tuple(t.shape for t in types)))


def _dot_bytes(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    if _same_dtype(types) != i32:
        raise InvalidGraph(f"dot_bytes: {types[0]} has no elements of four bytes")
    return TensorType(i32, broadcast(tuple(t.shape for t in types)))


def _dequantize(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    if types[0].qparams is None:
        raise InvalidGraph(f"dequantize: {types[0]} has no quantization parameters")
    return TensorType(f32, types[0].shape)


def _given(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    raise InvalidGraph("this operation's type must be given to make()")


def _counted(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    assert isinstance(attrs, (A.FullAttrs, A.IotaAttrs))
    return TensorType(attrs.dtype, attrs.shape if isinstance(attrs, A.FullAttrs) else (attrs.length,))


_ROWS: tuple[OpSpec, ...] = (
    *(OpSpec(n, (1, 1), A.NoAttrs, _predicate if n in PREDICATES else _elementwise, "elementwise") for n in (*UNARY, *MADE)),
    *(OpSpec(n, (2, 2), A.NoAttrs, _elementwise, "elementwise") for n in BINARY),
    *(OpSpec(n, (2, 2), A.NoAttrs, _predicate, "elementwise") for n in COMPARE),
    OpSpec("where", (3, 3), A.NoAttrs, _where, "elementwise"),
    OpSpec("cast", (1, 1), A.CastAttrs, _cast, "elementwise"),
    OpSpec("quantize", (1, 1), A.QuantizeAttrs, _quantize, "elementwise"),
    OpSpec("dequantize", (1, 1), A.NoAttrs, _dequantize, "elementwise"),
    OpSpec("piecewise", (1, 2), A.PiecewiseAttrs, _piecewise, "elementwise"),
    OpSpec("pack_bytes", (1, 4), A.NoAttrs, _pack_bytes, "elementwise"),  # the bytes of an i32 from the lowest on, zeros behind them
    OpSpec("dot_bytes", (2, 2), A.NoAttrs, _dot_bytes, "elementwise"),  # i32: four unsigned bytes times four signed ones, added up
    OpSpec("bounded", (1, 1), A.BoundedAttrs, lambda types, attrs: types[0], "check"),
    OpSpec("reduce", (1, 1), A.ReduceAttrs, _reduce, "reduce"),
    OpSpec("scan", (1, 1), A.ScanAttrs, _scan, "reduce"),  # element i of a row: what a reduction of its first i + 1 elements gives
    OpSpec("reshape", (1, 1), A.ShapeAttrs, _reshape, "view"),
    OpSpec("expand", (1, 1), A.ShapeAttrs, _expand, "view"),
    OpSpec("permute", (1, 1), A.PermuteAttrs, _permute, "view"),
    OpSpec("slice", (1, 1), A.SliceAttrs, _slice, "view"),
    OpSpec("window", (1, 1), A.WindowAttrs, _window, "view"),  # [..., L, ...] -> [..., windows, size, ...]
    OpSpec("pad", (1, 1), A.PadAttrs, _pad, "index"),
    OpSpec("concat", (1, 1 << 30), A.AxisAttrs, _concat, "index"),
    OpSpec("take", (2, 2), A.AxisAttrs, _take, "index"),  # table, index: torch.embedding for axis 0; indices must be in [0, size)
    OpSpec("gather", (2, 2), A.AxisAttrs, _gather, "index"),  # torch.gather; indices must be in [0, size)
    OpSpec("copy", (1, 1), A.NoAttrs, lambda types, attrs: types[0], "update"),  # the same numbers in memory that nothing else reads
    OpSpec("border", (1, 1), A.PadAttrs, _pad, "update"),  # pad, of what has as much room around it: its memory with the rest set
    OpSpec("joined", (1, 1 << 30), A.AxisAttrs, _concat, "update"),  # concat, of what lies in the memory of the whole already
    OpSpec("put", (2, 1 << 30), A.PutAttrs, _put, "update"),  # x, part, positions: x with part there; `graph/updates.py`
    # What follows is in `graph/products.py`, and the operands are those of `graph/build.py`.
    OpSpec("linear", (2, 3), A.NoAttrs, products.linear_type, "contraction"),  # w: like x, or i8
    OpSpec("qlinear", (2, 3), A.NoAttrs, products.linear_type, "contraction"),  # of quantized x, w: real-valued result, f32 bias
    OpSpec("dequantize_groups", (2, 2), A.NoAttrs, products.dequantize_groups_type, "quant"),  # w[N, K] in [-8, 7] times scales[N, G]
    OpSpec("group_linear", (3, 3), A.NoAttrs, products.group_linear_type, "contraction"),  # linear(x, dequantize_groups(w, scales))
    OpSpec("int_linear", (2, 2), A.NoAttrs, products.int_linear_type, "contraction"),  # of 8-bit integers, exact in i32
    OpSpec("routed_linear", (3, 4), A.NoAttrs, products.routed_linear_type, "contraction"),  # x[S, K], w[E N, K], ends[E], scales[E N, G]?
    OpSpec("matmul", (2, 2), A.NoAttrs, products.matmul_type, "contraction"),
    OpSpec("int_matmul", (2, 2), A.NoAttrs, products.int_matmul_type, "contraction"),  # the same of 8-bit integers, exact in i32
    # q, k, v, perhaps a mask (bool: keep; float: added), perhaps a sink
    OpSpec("attention", (3, 5), A.AttentionAttrs, products.attention_type, "contraction"),
    OpSpec("argsort", (1, 1), A.ArgsortAttrs, _argsort, "order"),  # along the last axis, equal elements as they were, NaN the greatest
    OpSpec("recurrence", (3, 5), A.RecurrenceAttrs, states_type, "recurrence"),  # x, state, w, projection, b: `graph/recurrence.py`
    OpSpec("input", (0, 0), A.InputAttrs, _given, "leaf"),
    OpSpec("constant", (0, 0), A.ConstantAttrs, _given, "leaf"),
    OpSpec("full", (0, 0), A.FullAttrs, _counted, "leaf"),
    OpSpec("iota", (0, 0), A.IotaAttrs, _counted, "leaf"),
    OpSpec("call", (0, 1 << 30), A.CallAttrs, _given, "extern"),
    OpSpec("aten", (0, 1 << 30), A.AtenAttrs, _given, "extern"),
    OpSpec("get", (1, 1), A.GetAttrs, _given, "extern"),
)
OPS: dict[str, OpSpec] = {row.name: row for row in _ROWS}


def infer(op: str, inputs: tuple[Value, ...], attrs: A.Attrs) -> Type:
    """The type of `op(inputs)`. Raises InvalidGraph when operands or attributes do not fit."""
    spec = OPS.get(op)
    if spec is None:
        raise InvalidGraph(f"unknown operation {op!r}")
    if not spec.arity[0] <= len(inputs) <= spec.arity[1]:
        raise InvalidGraph(f"{op} takes {spec.arity[0]} to {spec.arity[1]} operands, got {len(inputs)}")
    if not isinstance(attrs, spec.attrs):
        raise InvalidGraph(f"{op} needs {spec.attrs.__name__}, got {type(attrs).__name__}")
    if op == "get":
        assert isinstance(attrs, A.GetAttrs) and isinstance(inputs[0].type, TupleType)
        element = inputs[0].type.elements[attrs.index]
        assert element is not None
        return element
    types = tuple(v.tensor for v in inputs)
    if op in FLOAT_ONLY and not types[0].dtype.is_float:
        raise InvalidGraph(f"{op} needs floating-point operands, got {types[0].dtype}")
    return spec.infer(types, attrs)


def make(op: str, *inputs: Value, attrs: A.Attrs = _NONE, type: Type | None = None, origin: str = "", name: str = "") -> Value:
    """A new value. The type is inferred, or checked for arity only where `type` is given (leaves, aten, call)."""
    if type is None:
        type = infer(op, inputs, attrs)
    if not origin and inputs:
        origin = inputs[0].origin
    return Value(op, inputs, attrs, type, origin, name)
