"""Transposition of squares in registers, by exchanging off-diagonal halves, quarters, ... of pairs of vectors."""

from __future__ import annotations

from collections.abc import Sequence

from .builder import Function, Val


def transposed(fn: Function, rows: Sequence[Val]) -> list[Val]:
    """Returns the columns of a square whose rows are vectors of n elements, n vectors, n a power of two."""
    n = len(rows)
    values = list(rows)
    distance = n // 2
    while distance:
        for i in range(n):
            if i & distance:
                continue
            upper, lower = values[i], values[i + distance]
            # Elements whose position has the `distance` bit change places with those of the other vector that lack it.
            first = [p if not p & distance else n + (p - distance) for p in range(n)]
            second = [p + distance if not p & distance else n + p for p in range(n)]
            values[i], values[i + distance] = fn.shuffle(upper, lower, first), fn.shuffle(upper, lower, second)
        distance //= 2
    return values
