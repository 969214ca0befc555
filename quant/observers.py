"""Observers: what is remembered of an activation while calibration data streams by, and the range that follows from it.

Memory does not grow with the data. Sums are integers and the histogram's extent is a power of two that doubles by merging neighbouring
bins, which is exact: what an observer knows depends on the batches seen, not on their order or on which of several merged observers saw
them; a histogram does not depend on the grouping into batches either.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .entropy import least_divergence
from .scheme import ActivationScheme

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Range:
    """Reals in [low, high] are represented, others saturate. low <= 0 <= high, both finite."""

    low: float
    high: float


class NonFinite(ValueError):
    """An activation holds NaN or infinity; the caller knows where and says so."""


class Watcher(Protocol):
    """Sees activations one by one. `mask`: bool, True where a value counts, broadcastable to the activation from the left."""

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None: ...


class Shared(Watcher, Protocol):
    """`merge` makes up for a stream that was split: afterwards this one knows what it would if it had seen all that `other` has seen
    too, where `other` is of its own kind. It travels between processes pickled.
    """

    def merge(self, other: Any) -> None: ...


class Observer(Shared, Protocol):
    """Watches an activation to find its range."""

    def range(self) -> Range | None:
        """The range to represent, or None when nothing was seen."""


def selected(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The values that count, as a flat float32 tensor. mask: shape x.shape[:mask.dim()], such as [batch, position]."""
    x = x.detach().to(torch.float32)
    return x.reshape(-1) if mask is None else x[mask.to(torch.bool).expand(x.shape[: mask.dim()])].reshape(-1)


def rows(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The rows of the last axis that count, float32 [R, K]; single values that do not count are 0. Raises NonFinite."""
    real = x.detach().to(torch.float32)
    if mask is not None and mask.dim() == real.dim():
        real = torch.where(mask.to(torch.bool), real, 0.0)
    elif mask is not None:
        real = real[mask.to(torch.bool).expand(real.shape[: mask.dim()])]
    if not bool(real.isfinite().all()):
        raise NonFinite
    return real.reshape(-1, x.shape[-1])


def extremes(x: torch.Tensor) -> tuple[float, float]:
    """Least and greatest of a non-empty tensor. Raises NonFinite for NaN and infinity."""
    low, high = (float(v) for v in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFinite
    return low, high


class MinMaxObserver:
    """The range is everything that was seen."""

    def __init__(self) -> None:
        self.low = math.inf
        self.high = -math.inf

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        values = selected(x, mask)
        if values.numel():
            low, high = extremes(values)
            self.low, self.high = min(self.low, low), max(self.high, high)

    def merge(self, other: MinMaxObserver) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def range(self) -> Range | None:
        return Range(min(self.low, 0.0), max(self.high, 0.0)) if self.low <= self.high else None


class AverageObserver:
    """The mean over the batches of their least values, to that of their greatest. Every float32 is a multiple of 2^-149, so sums of such
    multiples are exact integers.
    """

    def __init__(self) -> None:
        self.low = self.high = 0
        self.batches = 0

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        values = selected(x, mask)
        if values.numel():
            low, high = (int(math.ldexp(v, 149)) for v in extremes(values))
            self.low, self.high, self.batches = self.low + low, self.high + high, self.batches + 1

    def merge(self, other: AverageObserver) -> None:
        self.low, self.high, self.batches = self.low + other.low, self.high + other.high, self.batches + other.batches

    def range(self) -> Range | None:
        if not self.batches:
            return None
        low, high = (total / (self.batches << 149) for total in (self.low, self.high))
        return Range(min(low, 0.0), max(high, 0.0))


class HistogramObserver:
    """Counts in `2 * bins` equal bins over [-extent, extent), extent a power of two above every magnitude seen."""

    def __init__(self, scheme: ActivationScheme) -> None:
        self.scheme = scheme
        self.seen = MinMaxObserver()
        self.counts = torch.zeros(2 * scheme.bins, dtype=torch.int64)
        self.extent = 0.0

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        values = selected(x, mask)
        if not values.numel():
            return
        low, high = extremes(values)
        self.seen.observe(values)
        self._grow(_extent(max(-low, high)))
        bins = self.scheme.bins
        # Scaling by a power of two is exact, so a value falls in the bin whose halves it would fall in at twice the resolution.
        index = torch.floor(values.to(torch.float64) * (bins / self.extent)).to(torch.int64) + bins
        self.counts += torch.bincount(index, minlength=2 * bins).to(self.counts.device)

    def merge(self, other: HistogramObserver) -> None:
        if other.extent:
            other = copy.deepcopy(other)
            self._grow(other.extent)
            other._grow(self.extent)
            self.counts += other.counts
            self.seen.merge(other.seen)

    def _grow(self, extent: float) -> None:
        """Makes the extent `extent` at least."""
        if self.extent == 0.0:
            self.extent = extent
        bins = self.scheme.bins
        while self.extent < extent:
            inner = self.counts.view(-1, 2).sum(1)
            self.counts.zero_()
            self.counts[bins // 2 : bins + bins // 2] = inner
            self.extent *= 2.0

    def magnitudes(self) -> torch.Tensor:
        """Counts of |x| in `bins` bins over [0, extent)."""
        bins = self.scheme.bins
        return self.counts[bins:] + self.counts[:bins].flip(0)

    def range(self) -> Range | None:
        seen = self.seen.range()
        if seen is None:
            return None
        if self.scheme.observer == "percentile":
            return self._percentile(seen)
        return self._entropy(seen) if self.scheme.observer == "entropy" else self._least_error(seen)

    def _percentile(self, seen: Range) -> Range:
        """Cuts the tails that hold the remaining share; a symmetric range has one tail, that of the magnitudes."""
        share = self.scheme.percentile / 100.0
        step = self.extent / self.scheme.bins
        if self.scheme.signed:
            limit = min((_quantile(self.magnitudes(), share) + 1) * step, max(-seen.low, seen.high))
            return Range(-limit, limit)
        upper = (_quantile(self.counts, (1.0 + share) / 2.0) + 1 - self.scheme.bins) * step
        lower = (self.scheme.bins - _quantile(self.counts.flip(0), (1.0 + share) / 2.0) - 1) * step
        return Range(min(max(lower, seen.low), 0.0), max(min(upper, seen.high), 0.0))

    def _entropy(self, seen: Range) -> Range:
        """The range with the least divergence, of the magnitudes where it is symmetric; all of it where there is nothing to choose."""
        bins, step = self.scheme.bins, self.extent / self.scheme.bins
        if self.scheme.signed:
            _, end = least_divergence(self.magnitudes(), 0, self.scheme.qmax + 1)
            limit = min(end * step, max(-seen.low, seen.high))
            return Range(-limit, limit)
        begin, end = least_divergence(self.counts, bins, self.scheme.qmax + 1)
        return Range(max((begin - bins) * step, seen.low), min((end - bins) * step, seen.high))

    def _least_error(self, seen: Range) -> Range:
        """The shrunken range with the least squared error over the histogram, of 100 candidates down to a fifth of the extremes."""
        bins, step = self.scheme.bins, self.extent / self.scheme.bins
        centres = (torch.arange(2 * bins, dtype=torch.float64) - bins + 0.5) * step
        weights = self.counts.to(torch.float64)
        kept = weights > 0
        centres, weights = centres[kept], weights[kept]
        candidates = [Range(seen.low * share, seen.high * share) for share in (1.0 - 0.008 * i for i in range(100))]
        scales, zero_points = torch.tensor([affine(each, self.scheme) for each in candidates], dtype=torch.float64).T.unsqueeze(-1)
        rounded = (centres / scales).round_().add_(zero_points).clamp_(self.scheme.qmin, self.scheme.qmax)
        errors = rounded.sub_(zero_points).mul_(scales).sub_(centres).square_() @ weights
        return candidates[int(errors.argmin())]


def _extent(magnitude: float) -> float:
    """The least power of two above `magnitude`, and no less than the least normal number, which is that of zero too."""
    return max(math.ldexp(1.0, math.frexp(magnitude)[1]), 2.0**-126) if magnitude else 2.0**-126


def _quantile(counts: torch.Tensor, share: float) -> int:
    """The first bin up to which at least `share` of all counts lie."""
    cumulative = torch.cumsum(counts, 0)
    # Integers up to 2^53 are exact in float64; the ceiling keeps a share of 1.0 at the last occupied bin.
    wanted = math.ceil(share * int(cumulative[-1]))
    return int(torch.searchsorted(cumulative, torch.tensor(wanted, dtype=torch.int64)))


def affine(limits: Range, scheme: ActivationScheme) -> tuple[float, int]:
    """(scale, zero point) of a range. The scale is a float32 value, positive, and has a finite float32 reciprocal; what the integers stand
    for is finite, too: of the largest floats, which rounding would take beyond float32, some saturate.

    Data that is zero throughout gets scale 1: every scale represents it exactly.
    """
    span = max(-limits.low, limits.high) if scheme.signed else limits.high - limits.low
    levels = scheme.qmax if scheme.signed else scheme.qmax - scheme.qmin
    if span == 0.0:
        return 1.0, 0

    def zero(scale: float) -> int:
        return 0 if scheme.signed else int(min(max(round(scheme.qmin - limits.low / scale), scheme.qmin), scheme.qmax))

    scale = float(torch.tensor(max(span / levels, 2.0**-126), dtype=torch.float32))
    farthest = max(scheme.qmax - zero(scale), zero(scale) - scheme.qmin)
    if scale * farthest > _LARGEST:  # with a smaller scale the zero point is one further on at most
        scale = float(torch.tensor(_LARGEST / (farthest + 1), dtype=torch.float32))
    return scale, zero(scale)


def covered(scale: float, zero_point: int, scheme: ActivationScheme) -> Range:
    """The reals that the integers stand for; `affine` turns them back into this scale and zero point."""
    return Range((scheme.qmin - zero_point) * scale, (scheme.qmax - zero_point) * scale)


def make_observer(scheme: ActivationScheme) -> Observer:
    """A fresh observer of the kind that the scheme names."""
    if scheme.observer == "minmax":
        return MinMaxObserver()
    return AverageObserver() if scheme.observer == "average" else HistogramObserver(scheme)
