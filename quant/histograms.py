"""What is kept of an observer's histogram in the record: a few bins, enough to see where the chosen range cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .observers import HistogramObserver, Observer
from .record import ActivationRange, Histogram, SiteResult
from .scheme import ActivationScheme

_MOST_BINS = 64


def with_histograms(results: tuple[SiteResult, ...], observers: Mapping[tuple[str, ActivationScheme], Observer]) -> tuple[SiteResult, ...]:
    """The same results, with the histogram of each activation whose observer has one."""

    def shown(name: str, scheme: ActivationScheme | None, limits: ActivationRange) -> ActivationRange:
        return limits if scheme is None else replace(limits, histogram=summary(observers[name, scheme]))

    return tuple(
        replace(item, ranges=tuple(shown(n, item.site.scheme.activation, r) for n, r in zip(item.site.activations, item.ranges)))
        for item in results
    )


def summary(observer: Observer) -> Histogram | None:
    """At most 64 bins from the first to the last occupied one; None for an observer without a histogram, or without values."""
    if not isinstance(observer, HistogramObserver) or not observer.counts.any():
        return None
    occupied = observer.counts.nonzero().flatten()
    first, count = int(occupied[0]), int(occupied[-1] - occupied[0]) + 1
    width = -(-count // _MOST_BINS)
    bins = -(-count // width)
    merged = observer.counts.new_zeros(bins * width)
    merged[:count] = observer.counts[first : first + count]
    step = observer.extent / observer.scheme.bins
    low = (first - observer.scheme.bins) * step
    return Histogram(low, low + bins * width * step, tuple(merged.view(bins, width).sum(1).tolist()))
