"""The quantize and dequantize operators that a simulated model is made of.

They are torch's own `quantized_decomposed` operators, so consumers of PT2E graphs read ours. Importing this file makes sure that they
exist: a torch that no longer ships them gets the same operators, same schema, from here.

    quantize_per_tensor(x, scale, zero_point, qmin, qmax, dtype)      clamp(round(x * (1 / scale)) + zero_point, qmin, qmax)
    dequantize_per_tensor(q, scale, zero_point, qmin, qmax, dtype)    (q - zero_point) * scale, float32
    dequantize_per_channel(w, scales, zero_points, axis, qmin, qmax, dtype)    (w - zero_points[c]) * scales[c], float32
    dequantize_per_channel_group(w, scales, zero_points, qmin, qmax, dtype, group, out)    the same, a scale for each group of a row
    quantize_per_token(x, scales, zero_points, qmin, qmax, dtype), dequantize_per_token    with a scale and zero point for each row

Which scales rows have `sashiko::choose_rows` says, since torch's operators for it make zeros of small numbers (`graph/rows.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from ..graph import sums16
from ..graph.rows import CHOOSE_ROWS, choose_affine_rows, choose_rows, dequantize_rows, quantize_rows

_SCHEMAS = (
    "quantize_per_tensor(Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype) -> Tensor",
    "dequantize_per_tensor(Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype, *, "
    "ScalarType? out_dtype=None) -> Tensor",
    "dequantize_per_channel(Tensor input, Tensor scales, Tensor? zero_points, int axis, int quant_min, int quant_max, "
    "ScalarType dtype, *, ScalarType? out_dtype=None) -> Tensor",
    "dequantize_per_channel_group(Tensor input, Tensor scales, Tensor? zero_points, int quant_min, int quant_max, ScalarType dtype, "
    "int group_size, ScalarType output_dtype) -> Tensor",
    "choose_qparams_per_token(Tensor input, ScalarType dtype) -> (Tensor, Tensor)",
    "choose_qparams_per_token_asymmetric(Tensor input, ScalarType dtype) -> (Tensor, Tensor)",
    "quantize_per_token(Tensor input, Tensor scales, Tensor zero_points, int quant_min, int quant_max, ScalarType dtype) -> Tensor",
    "dequantize_per_token(Tensor input, Tensor scales, Tensor zero_points, int quant_min, int quant_max, ScalarType dtype, "
    "ScalarType output_dtype) -> Tensor",
)


def quantize_reference(x: torch.Tensor, scale: float, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers of `dtype` in [qmin, qmax]: round half to even, then saturate. x: any shape, float."""
    return torch.clamp(torch.round(x.to(torch.float32) * (1.0 / scale)) + zero_point, qmin, qmax).to(dtype)


def dequantize_reference(
    q: torch.Tensor, scale: float, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The reals that the integers stand for, float32 unless `out_dtype` says otherwise."""
    return ((q.to(torch.float32) - zero_point) * scale).to(out_dtype or torch.float32)


def dequantize_channels_reference(
    q: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    axis: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `dequantize_reference`, with one scale (and zero point) for each index of `axis`."""
    shape = [-1 if i == axis % q.dim() else 1 for i in range(q.dim())]
    real = q.to(torch.float32) if zero_points is None else q.to(torch.float32) - zero_points.to(torch.float32).view(shape)
    return (real * scales.view(shape)).to(out_dtype or torch.float32)


def dequantize_groups_reference(
    q: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    group: int,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """q: [N, K]; scales: [N, K / group], one for each group of neighbours in a row."""
    grouped = q.reshape(-1, group) if zero_points is None else q.reshape(-1, group) - zero_points.reshape(-1, 1)
    return (grouped * scales.reshape(-1, 1)).reshape(q.shape).to(out_dtype)


def _ensure_registered(namespace: str) -> None:
    """Registers the operators in `namespace` unless torch has them.

    Their home in torch is a deprecated package. When it is gone, the operators are defined here: composite for autograd, so that
    they stay whole in exported graphs, and traceable on fake tensors as they are.
    """
    try:
        importlib.import_module("torch.ao.quantization.fx._decomposed")
    except ImportError:
        define(namespace)


def define(namespace: str) -> None:
    """Defines the operators in `namespace`. Raises RuntimeError when it has operators of these names already."""
    bodies: tuple[Callable[..., object], ...] = (
        quantize_reference, dequantize_reference, dequantize_channels_reference, dequantize_groups_reference, choose_rows,
        choose_affine_rows, quantize_rows, dequantize_rows,
    )
    for schema, body in zip(_SCHEMAS, bodies, strict=True):
        name = f"{namespace}::{schema.split('(')[0]}"
        torch.library.define(name, schema[schema.index("(") :])
        torch.library.impl(name, "CompositeExplicitAutograd", body)


_ensure_registered("quantized_decomposed")
_OPS = torch.ops.quantized_decomposed
quantize_per_tensor: torch._ops.OpOverload = _OPS.quantize_per_tensor.default
dequantize_per_tensor: torch._ops.OpOverload = _OPS.dequantize_per_tensor.default
dequantize_per_channel: torch._ops.OpOverload = _OPS.dequantize_per_channel.default
dequantize_per_group: torch._ops.OpOverload = _OPS.dequantize_per_channel_group.default
choose_per_row: torch._ops.OpOverload = CHOOSE_ROWS
quantize_per_row: torch._ops.OpOverload = _OPS.quantize_per_token.default
dequantize_per_row: torch._ops.OpOverload = _OPS.dequantize_per_token.default


def rounded_rows(x: torch.Tensor, signed: bool) -> torch.Tensor:
    """Each row of float32 as its 8 bits give it back: in [-127, 127], or without sign in [-128, 127] with a zero point."""
    parameters = (*choose_per_row(x, not signed), -127 if signed else -128, 127, torch.int8)
    return torch.as_tensor(dequantize_per_row(quantize_per_row(x, *parameters), *parameters, torch.float32))


def _small_weight(weight: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
    steps = weight / scales[:, None]
    return sums16.limited(steps.round().clamp(-127, 127), steps, count) * scales[:, None]


torch.library.define("sashiko::small_weight", "(Tensor weight, Tensor scales, int count) -> Tensor")
torch.library.impl("sashiko::small_weight", "CompositeExplicitAutograd", _small_weight)
torch.library.register_fake("sashiko::small_weight", lambda weight, scales, count: torch.empty_like(weight))
small_weight: torch._ops.OpOverload = torch.ops.sashiko.small_weight.default
"""What integers leave of a weight [N, K], a scale for each row, where `count` products are added in 16 bits: see `graph.sums16`."""
