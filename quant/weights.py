"""Integer weights: symmetric, one scale for each output channel, for the whole tensor, or for each group of inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..graph import sums16
from .scheme import Sums, WeightScheme

_LEAST_SCALE = 2.0**-126
_ENOUGH, _LOST = 36.0, 1.5
"""Decibels: weights with so many, or no more than so much fewer than 8 bits give them, are as small as is fast."""
_SHRUNKEN = tuple(1.0 - 0.02 * i for i in range(31))
"""Shares of the full range that `clip="mse"` tries."""
_AT_ONCE = 2**18
"""Rows of so many weights are quantized at once, which stay in the cache through all that is done with them."""


@dataclass(frozen=True)
class QuantizedWeight:
    """values: int8 [N, K] in [-qmax, qmax]; scales: float32 [N], or [N, K / group], positive; sqnr: signal to noise in decibels."""

    values: torch.Tensor
    scales: torch.Tensor
    sqnr: float


def quantize_weight(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """weight: float [N, K], finite. What has a scale and is zero throughout (a channel, a group or all) gets scale 1."""
    whole = weight.detach()
    if scheme.sums16 == "most":
        scheme = settled(whole.to(torch.float32), scheme)
    count = len(whole) if scheme.granularity == "tensor" else max(1, _AT_ONCE // max(1, whole.shape[1]))
    parts = [_quantized(rows.to(torch.float32), scheme) for rows in torch.split(whole, max(1, count))]
    values, scales, noise, signal = zip(*parts, strict=True)
    return QuantizedWeight(torch.cat(values), torch.cat(scales), _decibels(math.hypot(*signal), math.hypot(*noise)))


def _quantized(real: torch.Tensor, scheme: WeightScheme) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Integers and scales of some rows, and the norms of their errors and of themselves."""
    scales = weight_scales(real, scheme)
    values = rounded(real, scales, scheme)
    return values, scales, _norm(real - dequantized(values, scales)), _norm(real)


def settled(real: torch.Tensor, scheme: WeightScheme) -> WeightScheme:
    """The scheme for float32 weights [N, K], with `sums16` as a number: as many as leave them enough decibels, by their scales, since the
    error of rounding is spread evenly over a step."""
    if scheme.sums16 != "most":
        return scheme
    signal = real.square().mean()

    def decibels(count: Sums) -> float:
        steps = _steps(real, replace(scheme, sums16=count))
        return 10 * math.log10(signal / (steps.square().mean() / 12)) if signal > 0 else math.inf

    least = min(_ENOUGH, decibels(1) - _LOST)
    counts: tuple[Sums, ...] = (4, 2)
    return replace(scheme, sums16=next((count for count in counts if decibels(count) >= least), 1))


def weight_scales(real: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Scales [N] or [N, K / group] of float32 weights [N, K]."""
    steps = _steps(real, scheme)
    scales = torch.where(steps > 0, steps, torch.ones_like(steps))
    return scales.contiguous() if scheme.granularity == "group" else scales.expand(len(real), 1).reshape(-1).contiguous()


def _steps(real: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """[N, groups], or [1, 1] for the whole tensor: how far apart the integers of each group are; 0 for one that is zero throughout."""
    grouped = _grouped(real, scheme)
    peak = grouped.abs().amax(-1)
    # Below 2^-126 the reciprocal would overflow; such weights round to zero, an error of less than 2^-126.
    steps = (peak / scheme.qmax).clamp_min(_LEAST_SCALE)
    if scheme.clip == "mse":
        steps = _least_error(grouped, steps, scheme)
    if scheme.sums16 in (2, 4):
        least = (sums16.largest(real, scheme.sums16) / sums16.MOST)[:, None]
        steps = torch.maximum(steps, least.amax() if scheme.granularity == "tensor" else least)
    return torch.where(peak > 0, steps, torch.zeros_like(steps))


def rounded(real: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Integers of weights [N, K], to nearest even, saturated."""
    scales = spread(scales, real.shape[1])
    return limited(_nearest(real, scales, scheme), scheme, real / scales).to(torch.int8)


def simulated(real: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """What integers leave of weights [N, K], in a third of the memory traffic."""
    scales = spread(weight_scales(real, scheme), real.shape[1])
    return _nearest(real, scales, scheme).mul_(scales)


def limited(values: torch.Tensor, scheme: WeightScheme, real: torch.Tensor | None = None) -> torch.Tensor:
    """Integers [N, K], in floating point, no larger than `scheme` wants their sums in 16 bits. real: what they are rounded from."""
    return sums16.limited(values, values if real is None else real, scheme.sums16) if scheme.sums16 in (2, 4) else values


def _nearest(real: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    return (real / scales).round_().clamp_(-scheme.qmax, scheme.qmax)


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The reals that integers [N, K] stand for, float32."""
    return values.to(torch.float32) * spread(scales, values.shape[1])


def spread(scales: torch.Tensor, k: int) -> torch.Tensor:
    """Scales [N] or [N, K / group] as [N, 1] or [N, K]."""
    return scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(k // scales.shape[1], 1)


def sqnr(real: torch.Tensor, approximate: torch.Tensor) -> float:
    """Signal-to-noise ratio in decibels; infinite without noise."""
    return _decibels(_norm(real), _norm(real - approximate))


def _decibels(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 20 * math.log10(signal / noise) if signal > 0 else -math.inf


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _grouped(real: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """[N, groups, K / groups]; one group unless the scheme has groups. [1, 1, N K] where all have one scale."""
    if scheme.granularity == "tensor":
        return real.reshape(1, 1, -1)
    size = scheme.group if scheme.granularity == "group" else real.shape[1]
    return real.reshape(real.shape[0], -1, size)


def _least_error(grouped: torch.Tensor, full: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """For each group, the shrunken scale with the least squared error."""
    best, least = full, torch.full_like(full, math.inf)
    for share in _SHRUNKEN:
        scales = (full * share).clamp_min(_LEAST_SCALE)
        error = _nearest(grouped, scales[..., None], scheme).mul_(scales[..., None]).sub_(grouped).square_().sum(-1)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best
