"""torch's group-wise dequantization: weights with one scale for each group of neighbours along the last axis."""

from __future__ import annotations

from typing import Any

import torch

from .. import attrs as A
from .. import build as b
from ..ir import Value
from ..types import f32
from .call import Call, Row


def dequantize_group(
    c: Call, w: Value, scales: Value, zeros: Value | None, qmin: int, qmax: int, dtype: torch.dtype, group: int = 128, *_: Any
) -> Value:
    """(w - zero) * scale. 4-bit integers without zero points keep their form, for products with 4-bit weights; others are spelled out, and
    so are those whose scales come with each call, for which there is no kernel."""
    n, k = w.shape
    size = k if isinstance(k, int) and group > k and scales.shape[-1] == 1 else group
    assert isinstance(k, int) and k % size == 0, "torch has checked it"
    scale = b.reshape(b.cast(scales, f32), (n, k // size))
    if _is_zero(zeros) and qmin >= -8 and qmax <= 7 and _four_bits(w) and _known(scale) and size % 8 == 0:
        return b.cast(b.dequantize_groups(w, scale), c.dtype)
    real = b.reshape(b.cast(w, f32), (n, k // size, size))
    if zeros is not None:
        real = b.sub(real, b.cast(b.reshape(zeros, (n, k // size, 1)), f32))
    return b.cast(b.reshape(b.mul(real, b.unsqueeze(scale, 2)), w.shape), c.dtype)


def _is_zero(zeros: Value | None) -> bool:
    return zeros is None or (isinstance(zeros.attrs, A.ConstantAttrs) and not bool(zeros.attrs.tensor.any()))


def _four_bits(w: Value) -> bool:
    """Whether the integers are known now and lie in [-8, 7], as they are said to."""
    tensor = w.attrs.tensor if isinstance(w.attrs, A.ConstantAttrs) else None
    return tensor is not None and tensor.dtype == torch.int8 and bool(((tensor >= -8) & (tensor <= 7)).all())


def _known(scale: Value) -> bool:
    while scale.op in ("cast", "permute", "reshape"):
        (scale,) = scale.inputs
    return scale.op == "constant"


ROWS: dict[str, Row] = {"quantized_decomposed.dequantize_per_channel_group.default": dequantize_group}
