"""torchao's affine operators: what models that its `quantize_` has changed are made of, where they are not spelled in aten.

Every block of elements has a scale and a zero point. Blocks that are whole tensors, channels of a weight or groups of them become what
`quantized_decomposed` has for these; others are spelled out: clamp(round(x * (1 / scale)) + zero, low, high) and (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, Shape, floordiv
from ..ir import Value
from ..types import FROM_TORCH, QParams, f32
from .call import Call, Row, promote
from .quantized import narrow, qparams_of, rounded_first, spelled, typed_by, zero_of
from .weight_only import dequantize_group


def _apart(shape: Shape, block: Sequence[Dim]) -> tuple[Shape, Shape]:
    """The shape in which blocks have axes of their own, and that of one number for each block."""
    apart: list[Dim] = []
    each: list[Dim] = []
    for size, extent in zip(shape, block, strict=True):
        count = size if extent == 1 else 1 if extent == size else floordiv(size, extent)
        cut = extent not in (1, size)
        apart += (count, extent) if cut else (size,)
        each += (count, 1) if cut else (count,)
    return tuple(apart), tuple(each)


def _limits(dtype: torch.dtype, low: float | None, high: float | None) -> tuple[int, int]:
    if low is not None and high is not None:
        return int(low), int(high)
    if dtype not in FROM_TORCH:
        raise Unsupported(f"integers of {dtype} without their range")
    info = torch.iinfo(dtype)
    return info.min if low is None else int(low), info.max if high is None else int(high)


def _known(shape: Shape, block: Sequence[Dim], scale: Value, zero: Value | None, low: int, high: int) -> QParams | None:
    """What a type can say: scales that are known now, one for all elements or for each index of an axis."""
    cut = [axis for axis, (size, extent) in enumerate(zip(shape, block, strict=True)) if extent != size]
    if len(cut) > 1 or any(block[axis] != 1 for axis in cut):
        return None
    return qparams_of(scale, zero, cut[0] if cut else None, low, high)


def quantize(c: Call, x: Value, block: Sequence[Dim], scale: Value, zero: Value | None, dtype: torch.dtype, low: float | None = None,
             high: float | None = None) -> Value:
    least, most = _limits(dtype, low, high)
    known = _known(x.shape, block, scale, zero, least, most)
    if known is not None and known.axis is None and x.dtype == f32:
        return b.quantize(x, c.dtype, known)
    kind, (apart, each) = promote(x, scale), _apart(x.shape, block)

    def computed(value: Value) -> Value:
        """As torch rounds what it computes in a narrow type."""
        return b.cast(b.cast(value, kind), f32)

    real = computed(b.mul(b.reshape(b.cast(x, f32), apart), computed(b.reciprocal(narrow(scale, each)))))
    integers = b.quantize(rounded_first(real, zero_of(zero, each)), c.dtype, QParams((1.0,), 0, None, least, most))
    return b.reshape(integers, x.shape)


def dequantize(c: Call, x: Value, block: Sequence[Dim], scale: Value, zero: Value | None, dtype: torch.dtype, low: float | None = None,
               high: float | None = None, *_: Any) -> Value:
    least, most = _limits(dtype, low, high)
    typed = typed_by(x, _known(x.shape, block, scale, zero, least, most))
    if typed is not None:
        return b.cast(b.dequantize(typed), c.dtype)
    if x.op == "constant" and x.tensor.rank == 2 and block[0] == 1 and isinstance(block[1], int):
        return dequantize_group(c, x, scale, zero, least, most, dtype, block[1])
    apart, each = _apart(x.shape, block)
    return b.cast(b.reshape(spelled(b.reshape(x, apart), narrow(scale, each), zero_of(zero, each)), x.shape), c.dtype)


ROWS: dict[str, Row] = {"torchao.quantize_affine.default": quantize, "torchao.dequantize_affine.default": dequantize}
