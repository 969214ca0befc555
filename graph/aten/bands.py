"""Which taps of a window lie inside the image, by bands of results.

With a padding as wide as the dilation, most of what a window far apart reads is padding: over 14 places, one of three taps 12 apart
is inside for all results and the others for two of them each. Results that see the same taps are a band; a product over the taps
that a band sees has none of the others' zeros to multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

# Reading a weight takes as long as multiplying it by some rows: each band reads its taps' weights.
_ROWS_TO_READ = 16
# Bands are worth their joining where they save a quarter, and code for so many products.
_WORTH, _MOST = 0.75, 16


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
    """The bands of one axis with n elements; one of them all where some result sees nothing but padding, or they would be too many."""
    inside = [(max(0, -((k * apart - padding) // step)), min(out, (n - 1 + padding - k * apart) // step + 1)) for k in range(size)]
    places = sorted({0, out, *(place for first, last in inside if first < last for place in (first, last))})
    found = list[Band]()
    if len(places) > _MOST + 1:
        return [Band(0, out, 0, size)]
    for start, end in pairwise(places):
        seen = [k for k, (first, last) in enumerate(inside) if first <= start and end <= last]
        if not seen:
            return [Band(0, out, 0, size)]
        found.append(Band(start, end - start, seen[0], len(seen)))
    return found


def bands(shape: Sequence[int], out: Sequence[int], size: Sequence[int], step: Sequence[int], padding: Sequence[int],
          apart: Sequence[int], batch: int) -> list[list[Band]]:
    """The bands of each axis, those that save the most; none along an axis that is left as it is, which all are where it is not worth it.

    All per axis: elements, results, taps, stride, padding on both sides, dilation. batch: how many images there are.
    """
    whole = [[Band(0, o, 0, k)] for o, k in zip(out, size, strict=True)]
    cut = [_along(*axis) for axis in zip(shape, out, size, step, padding, apart, strict=True)]

    def cost(choice: Sequence[list[Band]]) -> int:
        return sum(prod(b.taps for b in each) * (batch * prod(b.length for b in each) + _ROWS_TO_READ) for each in product(*choice))

    choices = (choice for choice in product(*zip(whole, cut, strict=True)) if prod(map(len, choice)) <= _MOST)
    best = min(choices, key=cost)
    worth = cost(best) <= _WORTH * cost(whole)
    return [found if worth and found != uncut else [] for found, uncut in zip(best, whole, strict=True)]
