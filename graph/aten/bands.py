"""Which taps of a window lie inside the image, by bands of results.

With a padding as wide as the dilation, most of what a window far apart reads is padding: over 14 places, one of three taps 12 apart
is inside for all results and the others for two of them each. Results that see the same taps are a band; a product over the taps
that a band sees has none of the others' zeros to multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod

# Reading a weight takes as long as multiplying it by some rows: each band reads its taps' weights.
_ROWS_TO_READ = 16
# Bands are worth their joining where they save a quarter.
_WORTH = 0.75


@dataclass(frozen=True)
class Band:
    """Results start, .. start + length - 1 along one axis, which see the taps first, .. first + taps - 1 of the window."""

    start: int
    length: int
    first: int
    taps: int

    def reach(self, step: int, apart: int, padding: int) -> tuple[int, int]:
        """(first, last + 1) of the elements that are read, counted from the first one of the image."""
        low = self.start * step + self.first * apart - padding
        return low, low + (self.length - 1) * step + (self.taps - 1) * apart + 1


def _along(n: int, out: int, size: int, step: int, padding: int, apart: int) -> list[Band]:
    """The bands of one axis with n elements; one of them all where some result sees nothing but padding."""
    seen = [[k for k in range(size) if 0 <= o * step + k * apart - padding < n] for o in range(out)]
    if not all(seen):
        return [Band(0, out, 0, size)]
    bands, start = list[Band](), 0
    for (first, last), group in groupby((taps[0], taps[-1]) for taps in seen):
        length = sum(1 for _ in group)
        bands.append(Band(start, length, first, last - first + 1))
        start += length
    return bands


def bands(shape: Sequence[int], out: Sequence[int], size: Sequence[int], step: Sequence[int], padding: Sequence[int],
          apart: Sequence[int], batch: int) -> list[list[Band]]:
    """The bands of each axis, those that save the most; none along an axis that is left as it is, which all are where it is not worth it.

    All per axis: elements, results, taps, stride, padding on both sides, dilation. batch: how many images there are.
    """
    whole = [[Band(0, o, 0, k)] for o, k in zip(out, size, strict=True)]
    cut = [_along(*axis) for axis in zip(shape, out, size, step, padding, apart, strict=True)]

    def cost(choice: Sequence[list[Band]]) -> int:
        return sum(prod(b.taps for b in each) * (batch * prod(b.length for b in each) + _ROWS_TO_READ) for each in product(*choice))

    best = min(product(*zip(whole, cut, strict=True)), key=cost)
    worth = cost(best) <= _WORTH * cost(whole)
    return [found if worth and found != uncut else [] for found, uncut in zip(best, whole, strict=True)]
