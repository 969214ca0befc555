"""torchao's affine operators: what models that its `quantize_` has changed are made of, where they are not spelled in aten.

Every block of elements has a scale and a zero point. Blocks that are whole tensors, channels of a weight or groups of them become what
`quantized_decomposed` has for these; others are spelled out: clamp(round(x * (1 / scale)) + zero, low, high) and (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, Shape, floordiv
from ..ir import Value
from ..types import FROM_TORCH, DType, QParams, bf16, f16, f32
from .call import Call, Row, promote
from .quantized import narrow, qparams_of, rounded_first, spelled, typed_by, zero_of
from .reductions import extreme
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


def _in(kind: DType) -> Callable[[Value], Value]:
    """What f32 is after a computation in a type: rounded to it."""
    return lambda value: b.cast(b.cast(value, kind), f32)


def choose(c: Call, x: Value, mapping: str, block: Sequence[Dim], dtype: torch.dtype, low: float | None = None, high: float | None = None,
           eps: float | None = None, *_: Any) -> tuple[Value, Value]:
    """Scales and zero points with which the range of each block, zero included, fills that of the integers."""
    if x.dtype not in (f32, bf16, f16):
        raise Unsupported(f"chooses scales for {x.dtype}")
    (least, most), rounded = _limits(dtype, low, high), _in(x.dtype)
    apart, each = _apart(x.shape, block)
    axes = tuple(axis for axis, (size, one) in enumerate(zip(apart, each, strict=True)) if size != one)
    axes = axes or tuple(range(len(apart)))  # torch takes no axes for all of them
    real = b.reshape(b.cast(x, f32), apart)
    below, above = (extreme(real, kind, axes, True) for kind in ("min", "max"))
    below, above = b.minimum(below, 0.0), b.maximum(above, 0.0)
    if mapping == "SYMMETRIC":
        scale = rounded(b.div(b.maximum(b.neg(below), above), (most - least) / 2))
    elif mapping == "SYMMETRIC_NO_CLIPPING_ERR":
        scale = b.maximum(rounded(b.div(below, float(least))), rounded(b.div(above, float(most))))
    elif mapping == "ASYMMETRIC":
        scale = rounded(b.div(rounded(b.sub(above, below)), float(most - least)))
    else:
        raise Unsupported(f"the mapping {mapping}")
    scale = b.maximum(scale, rounded(b.full(torch.finfo(x.dtype.torch).smallest_normal if eps is None else eps, f32)))
    zero = b.full(float(int((most + least + 1) / 2)), f32, scale.shape)
    if mapping == "ASYMMETRIC":
        zero = b.sub(float(least), b.round_(rounded(b.div(below, scale))))
        zero = b.minimum(b.maximum(zero, float(least)), float(most))
    first, second = c.element(0), c.element(1)
    return b.reshape(b.cast(scale, first.dtype), first.shape), b.reshape(b.cast(zero, second.dtype), second.shape)


def quantize(c: Call, x: Value, block: Sequence[Dim], scale: Value, zero: Value | None, dtype: torch.dtype, low: float | None = None,
             high: float | None = None) -> Value:
    least, most = _limits(dtype, low, high)
    known = _known(x.shape, block, scale, zero, least, most)
    if known is not None and known.axis is None and x.dtype == f32:
        return b.quantize(x, c.dtype, known)
    rounded, (apart, each) = _in(promote(x, scale)), _apart(x.shape, block)
    real = rounded(b.mul(b.reshape(b.cast(x, f32), apart), rounded(b.reciprocal(narrow(scale, each)))))
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


ROWS: dict[str, Row] = {
    "torchao.choose_qparams_affine.default": choose,
    "torchao.quantize_affine.default": quantize,
    "torchao.dequantize_affine.default": dequantize,
}
