"""Convolutions of which taps see only padding: each band of results reads the taps that it sees.

    linear(windows(pad x), w)  =  concat over bands of linear(windows(pad (part of x)), part of w)

With a padding as wide as the dilation, most of what a window far apart reads is padding: over 14 places, one of three taps 12 apart
is inside for all results and the others for two of them each. Results that see the same taps are a band; a product over the taps
that a band sees has none of the others' zeros to multiply. What an infinity in the weight makes of padding is left out with them.

Products know no padding, and what a product is multiplied in decides what bands are worth: this comes when it is known, and before
anything else changes the form that `graph/aten/windows.py` gives to convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

from ...diagnostics.errors import InvalidGraph
from ...graph import attrs as A
from ...graph import build as b
from ...graph.aten.windows import dense, surrounded, windows
from ...graph.filtering import Filtering
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.types import f32

# A band of fewer rows takes as long as of so many, since its weights come from beyond L1; reading them for another one takes as long
# as multiplying by some rows.
_LEAST_ROWS, _ROWS_TO_READ = 6, 2
# What another product takes, in multiplications and of all the time; what another copy of the weight in memory must save of the time.
_CALL, _EACH, _COPY = 1 << 15, 0.002, 0.01
# What is worth it at all, and how many products.
_WORTH, _MOST = 0.96, 16
# Minimal filtering (`graph/filtering.py`) takes this share of the time of all the products, those of too many results too.
_FILTERED = 0.45


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


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution: elements of the image, results, taps of the window, stride, padding before and behind, dilation."""

    n: int
    out: int
    size: int
    step: int
    low: int
    high: int
    apart: int

    def bands(self) -> list[Band]:
        """One of them all where some result sees nothing but padding, or there would be too many."""
        size, step, out = self.size, self.step, self.out
        inside = [(max(0, -((k * self.apart - self.low) // step)), min(out, (self.n - 1 + self.low - k * self.apart) // step + 1))
                  for k in range(size)]
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


def bands(axes: Sequence[Axis], batch: int, depth: int = 1 << 16, tile_rows: int = 1, whole_costs: float = 1.0) -> list[list[Band]]:
    """The bands of each axis, those that save the most; none along an axis that is left as it is, which all are where it is not worth it.

    batch: how many images there are. depth: multiplications for one tap of one result in all channels. tile_rows: products take time for
    whole tiles of so many rows. whole_costs: of its product in the order of its definition, what the convolution takes uncut.
    """
    whole = [[Band(0, axis.out, 0, axis.size)] for axis in axes]
    cut = [axis.bands() for axis in axes]

    def time(choice: Sequence[list[Band]]) -> int:
        rows = [(prod(b.taps for b in each), batch * prod(b.length for b in each)) for each in product(*choice)]
        read = sum(taps * (max(-(-count // tile_rows) * tile_rows, _LEAST_ROWS) + _ROWS_TO_READ) for taps, count in rows)
        return read * depth + _CALL * len(rows)

    def cost(choice: Sequence[list[Band]]) -> float:
        copies = prod(sum(b.taps for b in found) / axis.size for found, axis in zip(choice, axes, strict=True))
        return time(choice) / time(whole) + _EACH * (prod(map(len, choice)) - 1) + _COPY * (copies - 1)

    # Of equals the first: bands of lines lie together in memory.
    choices = (choice for choice in product(*zip(cut, whole, strict=True)) if prod(map(len, choice)) <= _MOST)
    best = min(choices, key=cost)
    worth = cost(best) <= _WORTH * whole_costs
    return [found if worth and found != uncut else [] for found, uncut in zip(best, whole, strict=True)]


def by_bands(graph: Graph, narrow: Callable[[Value], bool] = lambda linear: False, tile_rows: int = 1) -> Graph:
    """The graph as it was lowered, with its convolutions cut into bands where that saves time.

    narrow: whether a product of f32 will be one of another type; those of dequantized images are. tile_rows: of products that are not of
    f32, as for `bands`.
    """

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        value = with_inputs(old, inputs)
        found = Convolution.of(value) if value.op == "linear" else None
        axes = found.axes() if found is not None else None
        if found is None or axes is None:
            return value
        batch = found.image.shape[0]
        wide = found.image.dtype == f32 and not narrow(old) and not _dequantized(found.image)
        rows, costs = (1, _filtered(found, axes)) if wide else (tile_rows, 1.0)
        cut = bands(axes, batch if isinstance(batch, int) else 1, found.depth, rows, costs)
        if not any(cut):
            return value
        with b.at(value.origin):
            return found.cut(cut)

    return rebuild(graph, visit)


def _dequantized(image: Value) -> bool:
    while image.op in ("permute", "reshape"):
        image = image.inputs[0]
    return image.op == "dequantize"


def _filtered(found: Convolution, axes: Sequence[Axis]) -> float:
    """The share of its time that a convolution in f32 takes by minimal filtering, where it can be had."""
    columns, channels = found.weight.shape[:2]
    plain = len(axes) == 2 and found.groups == 1 and all((a.size, a.step, a.apart) == (3, 1, axes[0].apart) for a in axes)
    if not plain or not isinstance(columns, int) or not isinstance(channels, int):
        return 1.0
    asked = Filtering(axes[0].out, axes[1].out, channels, columns, False, axes[0].apart)
    return 1.0 if asked.why_not(far=False) else _FILTERED * asked.waste


@dataclass(frozen=True)
class Convolution:
    """What a linear over windows computes. image: [n, spatial..., C]. weight: [M, C / groups, window...]. padding: (before, behind)."""

    image: Value
    weight: Value
    bias: Value | None
    step: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    apart: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, linear: Value) -> Convolution | None:
        """Reads the numbers off the views below a linear. Whether they are all, making a linear of them again tells."""
        (rows, matrix), bias = linear.inputs[:2], linear.inputs[2] if len(linear.inputs) > 2 else None
        if matrix.op != "reshape" or matrix.inputs[0].op != "permute":
            return None
        weight, seen = matrix.inputs[0].inputs[0], list[A.WindowAttrs]()
        while rows.op in ("reshape", "permute", "window"):
            seen += [rows.attrs] if isinstance(rows.attrs, A.WindowAttrs) else []
            rows = rows.inputs[0]
        if not isinstance(rows.attrs, A.PadAttrs) or weight.tensor.rank != rows.tensor.rank or weight.tensor.rank < 3:
            return None
        image, sizes = rows.inputs[0], weight.shape[2:]
        several = [size != 1 for size in sizes]
        channels, width = image.shape[-1], weight.shape[1]
        padding = tuple((low, high) for low, high in rows.attrs.amounts[1:-1] if isinstance(low, int) and isinstance(high, int))
        known = isinstance(channels, int) and isinstance(width, int) and width > 0 and len(padding) == len(sizes)
        if not known or sum(several) != len(seen):
            return None
        each = iter(reversed(seen))
        step, apart = zip(*((w.step, w.dilation) for w in (next(each) if more else A.WindowAttrs(0, 1) for more in several)), strict=True)
        assert isinstance(channels, int) and isinstance(width, int)
        found = cls(image, weight, bias, step, padding, apart, channels // width)
        try:
            with b.at(linear.origin):
                return found if _same(found.whole(), linear) else None
        except InvalidGraph:
            return None  # such numbers fit together in no convolution: the image is padded in another layout, for example

    @property
    def depth(self) -> int:
        """Multiplications for one tap of one result, in all channels."""
        return prod(n for n in self.weight.shape[:2] if isinstance(n, int))

    def whole(self) -> Value:
        """As `graph/aten/windows.py` lowers it."""
        low, high = zip(*self.padding, strict=True)
        size = tuple(k for k in self.weight.shape[2:] if isinstance(k, int))
        return dense(windows(surrounded(self.image, low, high), size, self.step, self.apart), self.weight, self.bias, self.groups)

    def axes(self) -> list[Axis] | None:
        """None where sizes are not known."""
        shape, size = self.image.shape[1:-1], self.weight.shape[2:]
        found = list[Axis]()
        for n, k, step, (low, high), apart in zip(shape, size, self.step, self.padding, self.apart, strict=True):
            if not isinstance(n, int) or not isinstance(k, int):
                return None
            found.append(Axis(n, (n + low + high - apart * (k - 1) - 1) // step + 1, k, step, low, high, apart))
        return found

    def cut(self, cut: Sequence[Sequence[Band]]) -> Value:
        """The bands along each axis one after another."""
        for axis, found in enumerate(cut):
            if found:
                rest = [*cut[:axis], [], *cut[axis + 1 :]]
                return b.concat([self._seen(axis, band).cut(rest) for band in found], axis + 1)
        return self.whole()

    def _seen(self, axis: int, band: Band) -> Convolution:
        """What a band reads of the image, with the padding that is among it, and of the weight."""
        n = self.image.shape[axis + 1]
        assert isinstance(n, int)
        low, high = band.reach(self.step[axis], self.apart[axis], self.padding[axis][0])
        start, stop = max(low, 0), min(high, n)
        padding = (*self.padding[:axis], (start - low, high - stop), *self.padding[axis + 1 :])
        image = b.slice_(self.image, axis + 1, start, stop - start)
        return replace(self, image=image, weight=b.slice_(self.weight, axis + 2, band.first, band.taps), padding=padding)


def _same(made: Value, other: Value) -> bool:
    """Whether two values are the same computation of the same operands."""
    if made is other:
        return True
    alike = made.op == other.op and made.attrs == other.attrs and made.type == other.type and len(made.inputs) == len(other.inputs)
    return alike and made.op != "constant" and all(map(_same, made.inputs, other.inputs))
