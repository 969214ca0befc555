"""Elementwise operations as nodes of a loop body, those with attributes spelled out."""

from __future__ import annotations

from math import inf

from ..graph import attrs as A
from ..graph.ir import Value
from ..graph.ops import OPS
from ..graph.types import DType, QParams, boolean, f32, f64, i32, i64
from .loops import BodyBuilder, Node
from .views import Index

# 1.5 * 2^23: a float of magnitude below 2^22 added to it is rounded to an integer, which the low bits of the sum are.
MAGIC = float(3 << 22)
_EXTREMES = ("max", "min", "argmax", "argmin")
_CHOICES, _MOVES = ("where", "maximum", "minimum", "relu", "cast"), ("view", "index", "update")  # operations, and groups of such
_MOST = 32  # of those that are looked through; beyond, there may be an extreme


def elementwise(b: BodyBuilder, value: Value, args: list[int]) -> int:
    """The node that computes an element of `value` from those of its operands."""
    if value.op == "cast":
        return b.cast(args[0], value.dtype)
    if value.op == "quantize":
        return _quantize(b, value, args[0])
    if value.op == "dequantize":
        return _dequantize(b, value, args[0])
    if value.op == "piecewise":
        return _piecewise(b, value, *args)
    if is_exact(value):
        return b.add(Node("sub", value.dtype, tuple(args), kind="exact"))
    return b.op(value.op, value.dtype, *args)


def is_exact(value: Value) -> bool:
    """Whether a value may be the difference of products and the greatest or least of them, which was rounded: it has to be 0 for that one.
    Whether the extreme is of these very products is not asked: passes move views and cut reductions in two, and all there is to lose is
    the fused multiply-add."""
    return value.op == "sub" and any(map(_is_chosen, value.inputs))


def _is_chosen(value: Value) -> bool:
    """Whether elements of a value are chosen for being the greatest or least, or by their order, wherever they are moved then."""
    seen: set[Value] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        a = value.attrs
        ordered = isinstance(a, (A.ReduceAttrs, A.ScanAttrs, A.PutAttrs)) and a.kind in _EXTREMES
        if ordered or value.op == "argsort" or len(seen) > _MOST:
            return True
        if (value.op in _CHOICES or OPS[value.op].group in _MOVES) and value not in seen:
            seen.add(value)
            pending += value.inputs
    return False


def _scale(b: BodyBuilder, scale: tuple[float, ...], axis: int | None, invert: bool) -> int:
    if axis is not None and len(scale) > 1:
        raise AssertionError("per-channel scales of activations are constants, folded before stitching")
    return b.const(1.0 / scale[0] if invert else scale[0], f32)


def _quantize(b: BodyBuilder, value: Value, x: int) -> int:
    assert isinstance(value.attrs, A.QuantizeAttrs)
    return quantized(b, x, value.dtype, value.attrs.left)


def quantized(b: BodyBuilder, x: int, dtype: DType, q: QParams) -> int:
    """clamp(round(x * (1 / scale)) + zero_point); a NaN becomes qmin, because the comparison is false for it."""
    scaled = b.cast(x, f32)
    if q.scale != (1.0,):  # as it is where rows have scales of their own
        scaled = b.op("mul", f32, scaled, _scale(b, q.scale, q.axis, True))
    real = b.op("round", f32, scaled)
    if q.zero_point:
        real = b.op("add", f32, real, b.const(float(q.zero_point), f32))  # exact, or beyond the range anyway
    return b.cast(_saturated(b, real, q.qmin, q.qmax), dtype)


def _saturated(b: BodyBuilder, real: int, least: int | None, greatest: int | None) -> int:
    """A number that is no less than `least`, which NaN becomes, and no more than `greatest`."""
    for bound, op in ((least, "gt"), (greatest, "lt")):
        if bound is not None:
            limit = b.const(float(bound), f32)
            real = b.op("where", f32, b.op(op, boolean, real, limit), real, limit)
    return real


def _piecewise(b: BodyBuilder, value: Value, x: int, factor: int = -1) -> int:
    """The number of the piece is the low bits of MAGIC + x * density. A NaN without a `least` becomes the integer 0 when it is cast."""
    assert isinstance(value.attrs, A.PiecewiseAttrs)
    a = value.attrs

    def between(y: int, low: float, high: float) -> int:
        y = b.op("maximum", f32, y, b.const(low, f32)) if low > -inf else y
        return b.op("minimum", f32, y, b.const(high, f32)) if high < inf else y

    u = between(x, a.low, a.high)
    units = u if a.density == 1 else b.op("mul", f32, u, b.const(a.density, f32))
    piece = b.op("add", f32, units, b.const(MAGIC, f32))
    piece = between(piece, MAGIC + a.first if a.low == -inf else -inf, MAGIC + a.last if a.high == inf else inf)
    numbers = [b.add(Node("lookup", f32, (piece,), numbers=row)) for row in a.coefficients]
    total = numbers.pop()
    while numbers:
        at = x if a.line and len(numbers) == 1 else u
        total = b.op("add", f32, b.op("mul", f32, total, at), numbers.pop())
    if a.dtype == f32:
        return total
    if factor >= 0:
        total = b.op("mul", f32, total, factor)
        total = b.op("add", f32, total, b.const(float(a.zero), f32)) if a.zero else total
    return b.cast(_saturated(b, b.op("round", f32, total), a.least, a.greatest), value.dtype)


def _dequantize(b: BodyBuilder, value: Value, x: int) -> int:
    q = value.inputs[0].tensor.qparams
    assert q is not None
    whole = b.cast(x, i32)
    if q.zero_point:
        whole = b.op("sub", i32, whole, b.const(q.zero_point, i32))
    return b.op("mul", f32, b.cast(whole, f32), _scale(b, q.scale, q.axis, False))


def full(b: BodyBuilder, value: Value) -> int:
    """The one number of a `full`."""
    assert isinstance(value.attrs, A.FullAttrs)
    return b.const(value.attrs.value, value.dtype)


def iota(b: BodyBuilder, value: Value, index: Index) -> int:
    """The element of an `iota` at an index."""
    assert isinstance(value.attrs, A.IotaAttrs)
    a = value.attrs
    if not isinstance(a.start, float) and not isinstance(a.step, float):
        return b.cast(b.add(Node("index", i64, index=a.start + index[0] * a.step)), value.dtype)
    wide = f64 if value.dtype == f64 else f32
    numbers = (index[0], a.step, a.start)
    i, step, start = (b.const(n, wide) if isinstance(n, float) else b.cast(b.add(Node("index", i64, index=n)), wide) for n in numbers)
    return b.cast(b.op("add", wide, b.op("mul", wide, i, step), start), value.dtype)
