"""Reductions, softmax and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, bounds, product
from ..ir import Value
from ..types import FROM_TORCH, DType, boolean, f32, f64, i32, i64, identity
from .call import Call, Row, as_value, computing, opmath

aten = torch.ops.aten
Axes = Sequence[int] | int | None
_FEW, _ROW = 16, 16  # running sums: of so many elements, in rows of that many or more, each is computed by itself


def axes_of(x: Value, axes: Axes) -> tuple[int, ...]:
    """The reduced axes, counted from the front; none or an empty list means all."""
    if axes is None or (not isinstance(axes, int) and len(axes) == 0):
        return tuple(range(x.tensor.rank))
    return tuple(b.axis_of(a, x.tensor.rank) for a in ([axes] if isinstance(axes, int) else axes)) if x.tensor.rank else ()


def count(x: Value, axes: Sequence[int]) -> Dim:
    """How many elements each result of a reduction over `axes` sees."""
    return product(x.shape[a] for a in axes)


def total(c: Call, x: Value, axes: Axes = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    return b.cast(b.reduce(computing(x, c.dtype), "sum", axes_of(x, axes), keepdim), c.dtype)


def mean_of(x: Value, axes: Sequence[int], keepdim: bool = False) -> Value:
    """Sum divided by the number of elements; x is f32 or f64."""
    return b.div(b.reduce(x, "sum", axes, keepdim), as_value(count(x, axes), x.dtype))


def mean(c: Call, x: Value, axes: Axes = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    return b.cast(mean_of(b.cast(x, opmath(c.dtype)), axes_of(x, axes), keepdim), c.dtype)


def times(c: Call, x: Value, axes: Axes = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    return b.cast(b.reduce(computing(x, c.dtype), "prod", axes_of(x, axes), keepdim), c.dtype)


def running(kind: str) -> Row:
    """cumsum and cumprod: computed, as in PyTorch, in f64 for f32, in f32 for narrower floats, in i64 for integers."""

    def row(c: Call, x: Value, axis: int, dtype: torch.dtype | None = None) -> Value:
        if not x.tensor.rank:
            return b.cast(x, c.dtype)
        work = f64 if c.dtype == f32 else opmath(c.dtype) if c.dtype.is_float else i64
        x = b.cast(b.cast(x, c.dtype), work)
        axis = b.axis_of(axis, x.tensor.rank)
        n, behind = x.shape[axis], bounds(product(x.shape[axis + 1 :]))[1]
        few = isinstance(n, int) and 1 < n <= _FEW and (behind is None or behind >= _ROW)
        return b.cast(_of_few(x, kind, axis) if few else b.scan(x, kind, axis), c.dtype)

    return row


def furthest(kind: str) -> Row:
    """cummax and cummin: (values, indices), of equal elements those of the last, and of NaN of the last NaN."""

    def row(c: Call, x: Value, axis: int) -> tuple[Value, Value | None]:
        if not x.tensor.rank:
            return x, b.full(0, i64, ())
        axis, work = b.axis_of(axis, x.tensor.rank), i32 if x.dtype == boolean else opmath(x.dtype)
        wide = b.cast(x, work)
        values = b.scan(wide, kind, axis)
        if 1 not in c.used:
            return b.cast(values, x.dtype), None
        place = b.reshape(b.iota(x.shape[axis], i64), (x.shape[axis], *[1] * (x.tensor.rank - axis - 1)))
        reached = b.eq(wide, values)
        reached = b.or_(reached, b.ne(wide, wide)) if work.is_float else reached
        return b.cast(values, x.dtype), b.scan(b.where(reached, place, 0), "max", axis)

    return row


def _of_few(x: Value, kind: str, axis: int) -> Value:
    """Running sums of few elements, which lie apart: each by itself, as many beside each other as vectors have lanes."""
    n, behind = x.shape[axis], x.tensor.rank - axis - 1
    last, each = (b.reshape(b.iota(n, i32), shape) for shape in ((n, 1, *[1] * behind), (n, *[1] * behind)))
    reached = b.where(b.le(each, last), b.unsqueeze(x, axis), b.full(identity(kind, x.dtype), x.dtype))
    return b.reduce(reached, kind, axis + 1)


def extreme(x: Value, kind: str, axes: Sequence[int], keepdim: bool) -> Value:
    """max or min; for bool any or all. Raises Unsupported where there may be nothing to choose from, which PyTorch refuses."""
    if (bounds(count(x, axes))[0] or 0) < 1:
        raise Unsupported(f"{kind} over an axis that may be empty")
    return _chosen(x, kind, axes, keepdim)


def _chosen(x: Value, kind: str, axes: Sequence[int], keepdim: bool) -> Value:
    """The same for axes of computed sizes as well, which are not empty in any call: `small_sizes.needed`, or a guard of Dynamo, says so."""
    if count(x, axes) == 0:
        raise Unsupported(f"{kind} over an axis that is empty")
    if x.dtype == boolean:
        return b.reduce(x, "any" if kind == "max" else "all", axes, keepdim)
    return b.reduce(x, kind, axes, keepdim)


def most(kind: str) -> Row:
    return lambda c, x, axes=None, keepdim=False: _chosen(x, kind, axes_of(x, axes), keepdim)


def most_and_where(kind: str) -> Row:
    """max.dim and min.dim: (values, indices)."""

    def row(c: Call, x: Value, axis: int, keepdim: bool = False) -> tuple[Value | None, ...]:
        index = arg(kind)(c, x, axis, keepdim) if 1 in c.used else None
        assert not isinstance(index, tuple)
        return _chosen(x, kind, axes_of(x, axis), keepdim), index

    return row


def arg(kind: str) -> Row:
    def row(c: Call, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
        if x.dtype == boolean:
            raise Unsupported(f"arg{kind} of a bool tensor")
        if x.tensor.rank == 0:
            return b.full(0, i64, ())
        if axis is None:
            out = b.reduce(b.reshape(x, (product(x.shape),)), f"arg{kind}", 0)
            return b.reshape(out, (1,) * x.tensor.rank) if keepdim else out
        axes = axes_of(x, axis)
        if count(x, axes) == 0:
            raise Unsupported(f"arg{kind} over an axis that is empty")
        return b.reduce(x, f"arg{kind}", axes, keepdim)

    return row


def truth(kind: str) -> Row:
    """any and all; of uint8 tensors they are uint8 again."""
    return lambda c, x, axes=None, keepdim=False: b.cast(b.reduce(b.cast(x, boolean), kind, axes_of(x, axes), keepdim), c.dtype)


def variance(x: Value, axes: Sequence[int], keepdim: bool, correction: float | None, far: bool = False) -> tuple[Value, Value]:
    """(variance, mean) by two passes; divisor max(0, N - correction).

    far: the mean may be so many times the deviation that its rounding shows, which the sum of the differences then takes back (Chan,
    Golub and LeVeque, "Algorithms for Computing the Sample Variance", 1983, equation 1.7).
    """
    average = mean_of(x, axes, True)
    centred = b.sub(x, average)
    squares = b.reduce(b.mul(centred, centred), "sum", axes, keepdim)
    if far:
        rest = b.reduce(centred, "sum", axes, keepdim)
        taken = b.minimum(b.div(b.mul(rest, rest), as_value(count(x, axes), x.dtype)), torch.finfo(x.dtype.torch).max)  # not inf - inf
        squares = b.maximum(b.sub(squares, taken), 0.0)
    divisor = b.sub(as_value(count(x, axes), x.dtype), float(1 if correction is None else correction))
    kept = tuple(d for a, d in enumerate(average.shape) if keepdim or a not in axes)
    return b.div(squares, b.maximum(divisor, 0.0)), b.reshape(average, kept)


def spread(root: bool, with_mean: bool) -> Row:
    """var, std and var_mean with `correction`."""

    def row(c: Call, x: Value, axes: Axes = None, correction: float | None = None, keepdim: bool = False) -> Any:
        work = opmath(x.dtype)
        var, average = variance(b.cast(x, work), axes_of(x, axes), keepdim, correction, far=True)
        out = b.cast(b.sqrt(var) if root else var, x.dtype)
        return (out, b.cast(average, x.dtype)) if with_mean else out

    return row


def softmax_of(x: Value, axis: int) -> Value:
    """exp(x - max) / sum over one axis; x is f32 or f64. One division for all elements: where the sum is a number it is 1 or more."""
    if not x.tensor.rank:
        return b.exp(b.sub(x, x))
    powers = b.exp(b.sub(x, b.reduce(x, "max", axis, True)))
    return b.mul(powers, b.reciprocal(b.reduce(powers, "sum", axis, True)))


def softmax(c: Call, x: Value, axis: int, *_: Any) -> Value:
    return b.cast(softmax_of(computing(x, c.dtype), axis), c.dtype)


def safe_softmax(c: Call, x: Value, axis: int, dtype: torch.dtype | None = None) -> Value:
    """softmax that gives 0 instead of NaN where a whole row is -inf."""
    wide = computing(x, c.dtype)
    masked = b.reduce(b.eq(wide, float("-inf")), "all", axis, True)
    return b.cast(b.where(masked, b.full(0.0, wide.dtype), softmax_of(wide, axis)), c.dtype)


def log_softmax(c: Call, x: Value, axis: int, *_: Any) -> Value:
    wide = computing(x, c.dtype)
    if not wide.tensor.rank:
        return b.cast(b.sub(wide, wide), c.dtype)
    shifted = b.sub(wide, b.reduce(wide, "max", axis, True))
    return b.cast(b.sub(shifted, b.log(b.reduce(b.exp(shifted), "sum", axis, True))), c.dtype)


def vector_norm(c: Call, x: Value, order: float = 2, axes: Axes = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    """Norms of order 1, 2 and infinity."""
    wide: DType = opmath(FROM_TORCH[dtype] if dtype is not None else c.dtype)
    size, chosen = b.cast(x, wide), axes_of(x, axes)
    if order == 2:
        out = b.sqrt(b.reduce(b.mul(size, size), "sum", chosen, keepdim))
    elif order == 1:
        out = b.reduce(b.abs_(size), "sum", chosen, keepdim)
    elif order == float("inf"):
        out = extreme(b.abs_(size), "max", chosen, keepdim)
    else:
        raise Unsupported(f"a vector norm of order {order}")
    return b.cast(out, c.dtype)


ROWS: dict[Any, Row] = {
    aten.sum.default: lambda c, x, dtype=None: total(c, x),
    aten.sum.dim_IntList: total,
    aten.mean.default: lambda c, x, dtype=None: mean(c, x),
    aten.mean.dim: mean,
    aten.prod.default: lambda c, x, dtype=None: times(c, x),
    aten.prod.dim_int: times,
    aten.cumsum.default: running("sum"),
    aten.cumprod.default: running("prod"),
    aten.cummax.default: furthest("max"),
    aten.cummin.default: furthest("min"),
    aten.amax.default: most("max"),
    aten.amin.default: most("min"),
    aten.max.default: most("max"),
    aten.min.default: most("min"),
    aten.max.dim: most_and_where("max"),
    aten.min.dim: most_and_where("min"),
    aten.argmax.default: arg("max"),
    aten.argmin.default: arg("min"),
    aten.any.default: truth("any"),
    aten.any.dim: truth("any"),
    aten.any.dims: truth("any"),
    aten.all.default: truth("all"),
    aten.all.dim: truth("all"),
    aten.all.dims: truth("all"),
    aten._is_all_true.default: truth("all"),
    aten._is_any_true.default: truth("any"),
    aten.var.correction: spread(root=False, with_mean=False),
    aten.std.correction: spread(root=True, with_mean=False),
    aten.var_mean.correction: spread(root=False, with_mean=True),
    aten.softmax.int: softmax,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: safe_softmax,
    aten.log_softmax.int: log_softmax,
    aten._log_softmax.default: log_softmax,
    aten.linalg_vector_norm.default: vector_norm,
}
