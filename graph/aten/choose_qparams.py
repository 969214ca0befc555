"""The `choose_qparams` operators of torch, and ours without their floor: scales and zero points from the data of each call.

All of them are computed in f32, as torch does for f32 data, and handed on as torch declares them: f64 and i64.
"""

from __future__ import annotations

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Shape
from ..ir import Value
from ..rows import CHOOSE_ROWS, LEAST, MOST
from ..types import f32, f64, i64
from .call import Call, Row
from .reductions import extreme


def _pair(scale: Value, zero: Value | int, shape: Shape) -> tuple[Value, Value]:
    """A scale and a zero point in the types that torch declares."""
    whole = b.full(zero, i64, shape) if isinstance(zero, int) else b.cast(b.round_(b.reshape(zero, shape)), i64)
    return b.cast(b.reshape(scale, shape), f64), whole


def _data(x: Value) -> Value:
    if x.dtype != f32:
        raise Unsupported(f"chooses a scale for {x.dtype}")
    return x


def _row_range(x: Value) -> tuple[Value, Value]:
    """(least, greatest) of each row, with a last axis of 1, zero included."""
    low, high = (extreme(_data(x), kind, (x.tensor.rank - 1,), True) for kind in ("min", "max"))
    return b.minimum(low, 0.0), b.maximum(high, 0.0)


def _range(x: Value) -> tuple[Value, Value]:
    """(least, greatest) of all, zero included: by row first, which is work for many threads and joins what computes the rows."""
    low, high = _row_range(b.reshape(x, (1,)) if x.tensor.rank == 0 else x)
    return b.reduce(low, "min"), b.reduce(high, "max")


def _clamp(x: Value, low: float, high: float) -> Value:
    return b.minimum(b.maximum(x, low), high)


def per_tensor(c: Call, x: Value, qmin: int, qmax: int, eps: float, dtype: torch.dtype) -> tuple[Value, Value]:
    low, high = _range(x)
    scale = b.maximum(b.div(b.sub(high, low), float(qmax - qmin)), eps)
    zero = b.add(b.neg(b.round_(b.div(low, scale))), float(qmin))
    return _pair(scale, _clamp(zero, float(qmin), float(qmax)), (1,))


def per_tensor_symmetric(c: Call, x: Value, qmin: int, qmax: int, eps: float, dtype: torch.dtype) -> tuple[Value, Value]:
    low, high = _range(x)
    scale = b.maximum(b.div(b.maximum(b.neg(low), high), (qmax - qmin) / 2), eps)
    return _pair(scale, 128 if dtype == torch.uint8 else 0, (1,))


def _largest(x: Value, least: float) -> Value:
    """The scale with which the greatest magnitude of a row, `least` at least, is 127."""
    return _finite(b.div(b.maximum(extreme(b.abs_(_data(x)), "max", (x.tensor.rank - 1,), True), least), 127.0))


def _finite(scale: Value) -> Value:
    """As in `graph/rows.py`."""
    return b.where(b.eq(scale, float("inf")), float("nan"), b.minimum(scale, MOST))


def per_token(c: Call, x: Value, dtype: torch.dtype) -> tuple[Value, Value]:
    if dtype != torch.int8:
        raise Unsupported(f"chooses a scale per token for {dtype}")
    scale = _largest(x, 1e-5)
    return _pair(scale, 0, scale.shape)


def per_token_asymmetric(
    c: Call, x: Value, dtype: torch.dtype, least: float = torch.finfo(torch.float32).eps
) -> tuple[Value, Value]:
    """The zero point is that of the end of the range where rounding it costs less."""
    qmin, qmax = -128.0, 127.0
    low, high = _row_range(x)
    scale = _finite(b.maximum(b.div(b.sub(b.mul(high, 0.5), b.mul(low, 0.5)), (qmax - qmin) / 2), least))
    low, high = b.div(low, scale), b.div(high, scale)
    from_low = b.gt(b.add(b.add(low, qmin), b.add(high, qmax)), 0.0)
    zero = b.where(from_low, b.add(b.neg(low), qmin), b.add(b.neg(high), qmax))
    return _pair(scale, _clamp(zero, qmin, qmax), scale.shape)


def by_row(c: Call, x: Value, affine: bool) -> tuple[Value, Value]:
    """`sashiko::choose_rows`: scales as small as rows are."""
    if affine:
        return per_token_asymmetric(c, x, torch.int8, LEAST)
    scale = _largest(x, 127 * LEAST)
    return scale, b.full(0.0, f32, scale.shape)


ROWS: dict[str, Row] = {
    str(CHOOSE_ROWS): by_row,
    "quantized_decomposed.choose_qparams.tensor": per_tensor,
    "quantized_decomposed.choose_qparams_symmetric.tensor": per_tensor_symmetric,
    "quantized_decomposed.choose_qparams_per_token.default": per_token,
    "quantized_decomposed.choose_qparams_per_token_asymmetric.default": per_token_asymmetric,
    "quantized_decomposed._choose_qparams_per_token_asymmetric_impl.default": per_token_asymmetric,
}
