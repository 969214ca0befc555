"""What windows over images read: one for each place of a grid, by whose rows an image is left operand of a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from ..graph.dims import Dim, Poly, Shape, evaluate, floordiv, symbols
from ..stitch.views import delinearize
from .spec import BATCH

_LONGEST = 1 << 12  # places of a line, and lines of an image, that are looked for


@dataclass(frozen=True)
class Grid:
    """Where windows begin: `width` places in a line and `height` lines of them; elements from place to place, from line to line and from
    image to image."""

    width: int
    height: int
    pixel: int
    line: int
    step: int

    def images(self, m: Dim) -> Dim:
        """How many images have m places."""
        return floordiv(m, self.width * self.height)


@lru_cache(maxsize=1 << 10)
def grid_of(row: Dim, m: Dim) -> Grid | None:
    """The grid behind `Pieces.row` of m rows; None where they are no places of images of known size, at least two lines of two."""
    if {s.name for s in symbols(row)} != {"b"}:
        return None

    def place(number: int) -> int:
        return evaluate(row, {"b": number})

    pixel, most = place(1), m if isinstance(m, int) else _LONGEST
    width = next((n for n in range(2, min(most, _LONGEST)) if place(n) != n * pixel), 0)
    line = place(width)
    # Where there is one image, it has all the lines, and their number must be known.
    height = next((n for n in range(1, min(most // max(1, width), _LONGEST)) if place(n * width) != n * line), 0)
    if not height and isinstance(m, int) and width and m % width == 0:
        height = m // width
    if width < 2 or height < 2:
        return None
    grid = Grid(width, height, pixel, line, place(width * height))
    rows = (strided((height, width), (line, pixel)), strided((1, height, width), (grid.step, line, pixel)))
    return grid if row in rows else None


def line_of(row: Dim, m: Dim) -> Grid | None:
    """The same of one line of places for each image: all of them where m is a number, else as many as m is a multiple of. `Grid.line`
    means nothing then. None where the places of a line are unevenly apart."""
    if {s.name for s in symbols(row)} != {"b"}:
        return None
    pixel = evaluate(row, {"b": 1})
    width = m if isinstance(m, int) else gcd(*(factor for _, factor in m.terms)) if isinstance(m, Poly) else 1
    if row != BATCH * pixel:
        width = next((n for n in range(1, min(width, _LONGEST) + 1) if evaluate(row, {"b": n}) != n * pixel), 0)
    line = Grid(width, 1, pixel, 0, evaluate(row, {"b": width}))
    return line if row in (BATCH * pixel, strided((1, width), (line.step, pixel))) else None


def strided(shape: Shape, steps: Sequence[int]) -> Dim:
    """Where the element with number `BATCH` of a strided array is."""
    return sum((i * step for i, step in zip(delinearize(BATCH, shape), steps, strict=True)), 0)
