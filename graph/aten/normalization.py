"""Normalization layers in inference form. Statistics are computed in f32 for narrower dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, Shape, bounds, floordiv, product
from ..ir import Value
from .call import Call, Row, need_alike, opmath
from .reductions import count, mean_of, variance

aten = torch.ops.aten


def need_parameters(x: Value, weight: Value | None, bias: Value | None) -> None:
    """Raises Unsupported for parameters that are neither of x's type nor, for narrower ones, f32, which PyTorch does not take."""
    wide = all(item is None or item.dtype is opmath(x.dtype) for item in (weight, bias))
    need_alike(weight, bias, *(() if wide else (x,)))


def affine(x: Value, weight: Value | None, bias: Value | None, shape: Shape | None = None) -> Value:
    """x * weight + bias in x's dtype, each reshaped to `shape` before it is broadcast."""
    for op, item in ((b.mul, weight), (b.add, bias)):
        if item is not None:
            x = op(x, b.cast(item if shape is None else b.reshape(item, shape), x.dtype))
    return x


def normalized(x: Value, axes: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """((x - mean) / sqrt(var + eps), mean, 1 / sqrt(var + eps)) with kept axes."""
    var, mean = variance(x, axes, True, 0)
    scale = b.rsqrt(b.add(var, float(eps)))
    return b.mul(b.sub(x, mean), scale), mean, scale


def layer_norm(c: Call, x: Value, shape: Sequence[Dim], weight: Value | None, bias: Value | None, eps: float) -> tuple[Value, ...]:
    need_parameters(x, weight, bias)
    axes = tuple(range(x.tensor.rank - len(shape), x.tensor.rank))
    out, mean, scale = normalized(b.cast(x, opmath(x.dtype)), axes, eps)
    return (b.cast(affine(out, weight, bias), x.dtype), b.cast(mean, c.element(1).dtype), b.cast(scale, c.element(2).dtype))


def rms_norm(c: Call, x: Value, shape: Sequence[Dim], weight: Value | None = None, eps: float | None = None) -> tuple[Value, ...]:
    axes = tuple(range(x.tensor.rank - len(shape), x.tensor.rank))
    wide = b.cast(x, opmath(x.dtype))
    small = torch.finfo(x.dtype.torch).eps if eps is None else float(eps)
    scale = b.rsqrt(b.add(mean_of(b.mul(wide, wide), axes, True), small))
    return b.cast(affine(b.mul(wide, scale), weight, None), x.dtype), b.cast(scale, c.element(1).dtype)


def group_norm(c: Call, x: Value, weight: Value | None, bias: Value | None, n: Dim, channels: Dim, spatial: Dim, groups: int,
               eps: float) -> tuple[Value, ...]:
    out, mean, scale = in_groups(x, weight, bias, groups, eps)
    return out, *(b.cast(b.reshape(s, (n, groups)), c.element(i).dtype) for i, s in enumerate((mean, scale), 1))


def in_groups(x: Value, weight: Value | None, bias: Value | None, groups: int, eps: float) -> tuple[Value, Value, Value]:
    """Group normalization of [n, channels, *spatial], and the statistics of its groups: [n, groups, 1, 1]."""
    need_parameters(x, weight, bias)
    n, channels, *spatial = x.shape
    if (each := floordiv(channels, groups)) * groups != channels:
        raise Unsupported(f"{groups} groups of {channels} channels, an unknown number")
    grouped = b.reshape(b.cast(x, opmath(x.dtype)), (n, groups, each, product(spatial)))
    var, mean = variance(grouped, (2, 3), True, 0)
    scale = b.rsqrt(b.add(var, float(eps)))
    # A number for each channel, not for each group: where channels lie side by side, they are read by whole vectors.
    ones = tuple(1 for _ in spatial)
    of_channels = (b.reshape(b.expand(s, (n, groups, each, 1)), (n, channels, *ones)) for s in (mean, scale))
    middle, factor = of_channels
    out = b.mul(b.sub(b.cast(x, mean.dtype), middle), factor)
    return b.cast(affine(out, weight, bias, (channels, *ones)), x.dtype), mean, scale


def batch_norm(c: Call, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value, momentum: float,
               eps: float) -> tuple[Value | None, ...]:
    c.need_only(0)
    return by_running_statistics(x, weight, bias, mean, var, eps), None, None


def by_running_statistics(x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value, eps: float) -> Value:
    """Batch normalization in inference: x * alpha + beta, both per channel, as eager computes it."""
    work = opmath(x.dtype)
    alpha = b.rsqrt(b.add(b.cast(var, work), float(eps)))
    alpha = alpha if weight is None else b.mul(alpha, b.cast(weight, work))
    beta = b.neg(b.mul(b.cast(mean, work), alpha))
    beta = beta if bias is None else b.add(beta, b.cast(bias, work))
    shape = (x.shape[1], *(1 for _ in x.shape[2:]))
    out = b.add(b.mul(b.cast(x, work), b.reshape(alpha, shape)), b.reshape(beta, shape))
    return b.cast(out, x.dtype)


def batch_norm_of_itself(c: Call, x: Value, weight: Value | None, bias: Value | None, train: bool, momentum: float,
                         eps: float) -> tuple[Value, ...]:
    """By the statistics of x over all axes but the second, as in `InstanceNorm`."""
    axes = (0, *range(2, x.tensor.rank))
    if (bounds(count(x, axes))[0] or 0) < 1:
        raise Unsupported("statistics over axes that may be empty")
    out, mean, scale = normalized(b.cast(x, opmath(x.dtype)), axes, eps)
    stats = tuple(b.cast(b.reshape(s, (x.shape[1],)), c.element(i).dtype) for i, s in enumerate((mean, scale), 1))
    return (b.cast(affine(out, weight, bias, (x.shape[1], *(1 for _ in x.shape[2:]))), x.dtype), *stats)


ROWS: dict[Any, Row] = {
    aten.native_layer_norm.default: layer_norm,
    aten._fused_rms_norm.default: rms_norm,
    aten.native_group_norm.default: group_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_of_itself,
}
