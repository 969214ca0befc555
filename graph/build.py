"""A concise way to write graphs: one function per operation, `b.add(b.mul(x, 2.0), y)`.

Operands are values or Python numbers; a number becomes a `full` of shape () with the dtype of the other operand. Functions that
would change nothing (a cast to the same dtype, a reshape to the same shape) return their operand. Names that Python or its
builtins own carry a trailing underscore. All raise InvalidGraph when operands do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Union

import torch

from ..diagnostics.errors import InvalidGraph
from . import attrs as A
from .dims import Dim, Poly, Shape
from .ir import Value
from .ops import make
from .shapes import broadcast
from .types import FROM_TORCH, DType, QParams, TensorType, Type, boolean, f32, i64, inverse

Number = Union[int, float, bool]
Operand = Union[Value, Number]

_origin: ContextVar[str] = ContextVar("sashiko_build_origin", default="")


@contextmanager
def at(origin: str) -> Iterator[None]:
    """Values built inside carry `origin` (the user's file:line) instead of their first operand's."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


def _make(op: str, *inputs: Value, attrs: A.Attrs | None = None, type: Type | None = None, name: str = "") -> Value:
    return make(op, *inputs, attrs=attrs if attrs is not None else A.NoAttrs(), type=type, origin=_origin.get(), name=name)


def full(value: Number | Poly, dtype: DType, shape: Shape = ()) -> Value:
    """A tensor of one repeated number; an integer becomes one of the dtype."""
    if isinstance(value, Poly):
        number = ne(scalar(value, i64), 0) if dtype == boolean else scalar(value, dtype)
        return expand(number, shape)
    converted = bool(value) if dtype == boolean else float(value) if dtype.is_float else value
    if dtype.kind in ("int", "uint"):
        if isinstance(value, float):
            raise InvalidGraph(f"the number {value!r} is no {dtype}")
        converted = dtype.wrapped(value)
    return _make("full", attrs=A.FullAttrs(converted, dtype, shape))


def operands(*items: Operand) -> tuple[Value, ...]:
    """Values for all items; at least one must be a value, and numbers take the dtype of the first one."""
    first = next((i for i in items if isinstance(i, Value)), None)
    if first is None:
        raise InvalidGraph("an operation on numbers alone has no dtype; use full()")
    return tuple(i if isinstance(i, Value) else full(i, first.dtype) for i in items)


def elementwise(op: str, *items: Operand) -> Value:
    """An elementwise operation without attributes, by name."""
    return _make(op, *operands(*items))


def _unary(op: str) -> Callable[[Value], Value]:
    return lambda x: _make(op, x)


def _binary(op: str) -> Callable[[Operand, Operand], Value]:
    return lambda x, y: _make(op, *operands(x, y))


neg, abs_, sign = _unary("neg"), _unary("abs"), _unary("sign")
exp, exp2, expm1 = _unary("exp"), _unary("exp2"), _unary("expm1")
log, log2, log10, log1p = _unary("log"), _unary("log2"), _unary("log10"), _unary("log1p")
sqrt, rsqrt, reciprocal = _unary("sqrt"), _unary("rsqrt"), _unary("reciprocal")
sin, cos, tan, tanh = _unary("sin"), _unary("cos"), _unary("tan"), _unary("tanh")
sigmoid, erf, relu = _unary("sigmoid"), _unary("erf"), _unary("relu")
floor, ceil, trunc, round_ = _unary("floor"), _unary("ceil"), _unary("trunc"), _unary("round")
logical_not, bitwise_not, isnan, isinf = _unary("logical_not"), _unary("bitwise_not"), _unary("isnan"), _unary("isinf")

add, sub, mul, div = _binary("add"), _binary("sub"), _binary("mul"), _binary("div")
floordiv, truncdiv, remainder, fmod = _binary("floordiv"), _binary("truncdiv"), _binary("remainder"), _binary("fmod")
pow_, atan2, maximum, minimum = _binary("pow"), _binary("atan2"), _binary("maximum"), _binary("minimum")
and_, or_, xor = _binary("and"), _binary("or"), _binary("xor")
eq, ne, lt, le, gt, ge = _binary("eq"), _binary("ne"), _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")


def where(condition: Value, x: Operand, y: Operand) -> Value:
    """x where the bool `condition` holds, else y."""
    return _make("where", condition, *operands(x, y))


def pack_bytes(parts: Sequence[Value]) -> Value:
    """One to four tensors of 8 bits as the bytes of i32, the first the lowest; those that are missing are zeros."""
    return _make("pack_bytes", *parts)


def dot_bytes(a: Value, b: Value) -> Value:
    """i32: the sum of the four products of the unsigned bytes of a with the signed bytes of b."""
    return _make("dot_bytes", a, b)


def cast(x: Value, dtype: DType) -> Value:
    """Conversion as torch's `.to(dtype)`."""
    return x if x.dtype == dtype and x.tensor.qparams is None else _make("cast", x, attrs=A.CastAttrs(dtype))


def quantize(x: Value, dtype: DType, qparams: QParams) -> Value:
    """Real numbers to integers of a quantized type."""
    return _make("quantize", x, attrs=A.QuantizeAttrs(dtype, qparams))


def dequantize(x: Value) -> Value:
    """Quantized integers to f32."""
    return _make("dequantize", x)


def axis_of(axis: int, rank: int) -> int:
    """`axis` counted from the front. Raises InvalidGraph when there is no such axis."""
    if not -max(rank, 1) <= axis < max(rank, 1):
        raise InvalidGraph(f"axis {axis} of a tensor with {rank} axes")
    return axis % max(rank, 1)


def reduce(x: Value, kind: str, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Value:
    """sum, prod, max, min, any, all, argmax or argmin over `axes` (None: all of them)."""
    chosen = range(x.tensor.rank) if axes is None else (axes,) if isinstance(axes, int) else axes
    found = tuple(sorted({axis_of(a, x.tensor.rank) for a in chosen})) if x.tensor.rank else ()
    return _make("reduce", x, attrs=A.ReduceAttrs(kind, found, keepdim))


def scan(x: Value, kind: str, axis: int) -> Value:
    """Running sums, products or extremes (kind: sum, prod, max, min) along an axis, in the dtype of x: f32, f64, i32 or i64."""
    axis, rank = axis_of(axis, x.tensor.rank), x.tensor.rank
    if x.shape[axis] == 1:
        return x
    order = [*(a for a in range(rank) if a != axis), axis]
    return permute(_make("scan", permute(x, order), attrs=A.ScanAttrs(kind)), inverse(order))


def reshape(x: Value, shape: Sequence[Dim]) -> Value:
    """The same elements, row-major, in another shape."""
    return x if x.shape == tuple(shape) else _make("reshape", x, attrs=A.ShapeAttrs(tuple(shape)))


def expand(x: Value, shape: Sequence[Dim]) -> Value:
    """Right-aligned broadcast."""
    return x if x.shape == tuple(shape) else _make("expand", x, attrs=A.ShapeAttrs(tuple(shape)))


def permute(x: Value, order: Sequence[int]) -> Value:
    """result.shape[i] == x.shape[order[i]]"""
    order = tuple(axis_of(a, x.tensor.rank) for a in order)
    return x if order == tuple(range(x.tensor.rank)) else _make("permute", x, attrs=A.PermuteAttrs(order))


def unsqueeze(x: Value, axis: int) -> Value:
    """A new axis of size 1 at position `axis` of the result."""
    at_axis = axis_of(axis, x.tensor.rank + 1)
    return reshape(x, (*x.shape[:at_axis], 1, *x.shape[at_axis:]))


def slice_(x: Value, axis: int, start: Dim, length: Dim, step: int = 1) -> Value:
    """Elements start, start + step, ... along one axis, `length` of them."""
    axis = axis_of(axis, x.tensor.rank)
    if start == 0 and step == 1 and length == x.shape[axis]:
        return x
    return _make("slice", x, attrs=A.SliceAttrs(axis, start, length, step))


def window(x: Value, axis: int, size: int, step: int = 1, dilation: int = 1) -> Value:
    """result[..., i, j, ...] = x[..., i * step + j * dilation, ...]: all windows that lie inside; j < size is a new axis behind `axis`."""
    return _make("window", x, attrs=A.WindowAttrs(axis_of(axis, x.tensor.rank), size, step, dilation))


def pad(x: Value, amounts: Sequence[tuple[Dim, Dim]], value: float = 0.0) -> Value:
    """Constant padding, (low, high) for each axis; negative amounts crop."""
    return _make("pad", x, attrs=A.PadAttrs(tuple(amounts), value))


def concat(items: Sequence[Value], axis: int) -> Value:
    """All items one after another along `axis`."""
    return items[0] if len(items) == 1 else _make("concat", *items, attrs=A.AxisAttrs(axis_of(axis, items[0].tensor.rank)))


def take(table: Value, index: Value, axis: int = 0) -> Value:
    """Whole slices of `table` along `axis`; the axes of `index` take its place. Indices must lie in [0, size)."""
    return _make("take", table, index, attrs=A.AxisAttrs(axis_of(axis, table.tensor.rank)))


def gather(x: Value, index: Value, axis: int) -> Value:
    """torch.gather. Indices must lie in [0, size)."""
    return _make("gather", x, index, attrs=A.AxisAttrs(axis_of(axis, x.tensor.rank)))


def argsort(x: Value, *, descending: bool = False, count: Dim | None = None) -> Value:
    """i64 [..., count]: where the elements of each row are that come first in order, all of them without a count, which is in [0, size].

    Equal elements keep their order, NaN is the greatest.
    """
    return _make("argsort", x, attrs=A.ArgsortAttrs(descending, x.shape[-1] if count is None else count))


def put(x: Value, part: Value, positions: Mapping[int, Value], kind: str = "") -> Value:
    """x with some elements replaced: part[i], at i, but along each axis of `positions` at the number that is given there for i.

    part has as many axes as x, and its size along those without positions. Positions are i64, broadcast to part, and must lie in
    [0, size); where two elements meet, one of them stays. kind: "sum", "prod", "max" or "min" of what is there and all that is put there,
    whose positions do not vary along the last axis. `graph/updates.py` says when this writes into the memory of x.
    """
    axes = tuple(sorted(positions))
    return _make("put", x, part, *(positions[a] for a in axes), attrs=A.PutAttrs(axes, x.shape, kind))


def linear(x: Value, w: Value, bias: Value | None = None) -> Value:
    """x[..., K] @ w[N, K]^T + bias[N]; f32 for operands narrower than that. A float x takes integers for w, as numbers.

    x[..., G * K]: the columns are in G groups of N / G neighbours, and group g is the product of x[..., g * K : (g + 1) * K] alone.
    """
    return _make("linear", x, w) if bias is None else _make("linear", x, w, bias)


def qlinear(x: Value, w: Value, bias: Value | None = None) -> Value:
    """`linear` on quantized x and w: exact integer products, real-valued f32 result, f32 bias."""
    return _make("qlinear", x, w) if bias is None else _make("qlinear", x, w, bias)


def dequantize_groups(w: Value, scales: Value) -> Value:
    """w[N, K], integers in [-8, 7] held as i8, times the f32 scales[N, G] of groups of K / G neighbours."""
    return _make("dequantize_groups", w, scales)


def group_linear(x: Value, w: Value, scales: Value) -> Value:
    """`linear` with the weight dequantize_groups(w, scales)."""
    return _make("group_linear", x, w, scales)


def routed_linear(x: Value, w: Value, ends: Value, scales: Value | None = None) -> Value:
    """x[S, K] by one of E matrices for each row, w[E * N, K]: `linear` of rows [ends[e - 1], ends[e]) with matrix e, [S, N].

    ends: i64 [E], never falling; the last matrix takes all rows that are left. f32 for floats narrower than that, which take integers for
    w, as numbers, or with scales as `dequantize_groups` says; exact in i32 for 8-bit integers.
    """
    return _make("routed_linear", x, w, ends) if scales is None else _make("routed_linear", x, w, ends, scales)


def route(ends: Value, rows: Dim) -> Value:
    """i64 [rows]: which matrix of `routed_linear` a row takes."""
    count = ends.shape[0]
    passed = ge(unsqueeze(iota(rows, i64), 1), unsqueeze(ends, 0))
    return minimum(reduce(cast(passed, i64), "sum", 1), scalar(count - 1, i64))


def int_linear(x: Value, w: Value) -> Value:
    """x[..., K] @ w[N, K]^T of 8-bit integers, exact in i32."""
    return _make("int_linear", x, w)


def matmul(x: Value, y: Value) -> Value:
    """[..., M, K] @ [..., K, N]; f32 for operands narrower than that."""
    return _make("matmul", x, y)


def int_matmul(x: Value, y: Value) -> Value:
    """`matmul` of 8-bit integers, exact in i32."""
    return _make("int_matmul", x, y)


def attention(
    q: Value, k: Value, v: Value, mask: Value | None = None, sink: Value | None = None, *, scale: float,
    before: Dim | None = None, after: Dim | None = None, cap: float | None = None,
) -> Value:
    """softmax(q @ k^T * scale + mask) @ v over q[B,H,M,D], k[B,G,S,D], v[B,G,S,E]; with a cap, of cap tanh(q @ k^T * scale) + mask. sink
    [B,H,M,1], or 1 in place of any: the score of one more key, whose value is 0. Key j is seen by query i when i - before <= j <= i +
    after."""
    given = [operand for operand in (mask, sink) if operand is not None]
    return _make("attention", q, k, v, *given, attrs=A.AttentionAttrs(scale, before, after, cap=cap, sink=sink is not None))


def recurrence(
    cell: str, x: Value, state: Value, w: Value, b: Value | None = None, *, reverse: bool = False, rounding: str = "none",
    projection: Value | None = None,
) -> Value:
    """The states of a recurrent layer; `graph/recurrence.py` has the layout."""
    others = (each for each in (projection, b) if each is not None)
    return _make("recurrence", x, state, w, *others, attrs=A.RecurrenceAttrs(cell, reverse, rounding))


def iota(length: Dim, dtype: DType, start: Dim | float = 0, step: Dim | float = 1) -> Value:
    """start + step * i for i < length."""
    return _make("iota", attrs=A.IotaAttrs(length, dtype, start, step))


def scalar(value: Dim | float, dtype: DType) -> Value:
    """A tensor of shape () that holds a number or the run-time value of a symbolic integer."""
    return reshape(iota(1, dtype, value), ()) if isinstance(value, Poly) else full(value, dtype)


def input_(index: int, dtype: DType, shape: Sequence[Dim], name: str = "") -> Value:
    """The graph's input number `index`."""
    return _make("input", attrs=A.InputAttrs(index), type=TensorType(dtype, tuple(shape)), name=name)


def constant(tensor: torch.Tensor, name: str = "", watched: bool = False, qparams: QParams | None = None) -> Value:
    """A tensor frozen into the graph (not copied)."""
    kind = TensorType(FROM_TORCH[tensor.dtype], tuple(tensor.shape), qparams)
    return _make("constant", attrs=A.ConstantAttrs(tensor, watched), type=kind, name=name)


def channel_scales(x: QParams, w: QParams) -> Value:
    """What the integer products of x, quantized per tensor, and w, by output channel or per tensor, are multiplied with: f32 numbers
    for the channels, or one."""
    scales = torch.tensor(w.scale, dtype=torch.float64) * x.scale[0]
    return full(float(scales[0]), f32) if len(w.scale) == 1 else constant(scales.float(), "scales")


def call(kernel: str, inputs: Sequence[Value], type: Type, options: Sequence[tuple[str, float | int | str]] = ()) -> Value:
    """A custom kernel by name."""
    return _make("call", *inputs, attrs=A.CallAttrs(kernel, tuple(options)), type=type)


def get(x: Value, index: int) -> Value:
    """Element of a tuple-typed value."""
    return _make("get", x, attrs=A.GetAttrs(index))


def stretch(*items: Value) -> tuple[Value, ...]:
    """All items expanded to their common shape."""
    shape = broadcast(tuple(i.shape for i in items))
    return tuple(expand(i, shape) for i in items)
