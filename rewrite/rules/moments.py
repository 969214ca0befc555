"""Sums of squared differences from a mean, in blocks that stay in the first-level cache: sum((x - m)^2) reads x a second time after the
whole of it has been read for the mean.

Of an m that is the same for all n elements of a block with the mean b (Chan, Golub and LeVeque, "Algorithms for Computing the Sample
Variance", 1983, equation 2.1):

    sum((x - m)^2) = sum((x - b)^2) + n (b - m)^2        sum(x) = sum of the sums of blocks

b is rounded, which leaves out 2 (b - m) sum(x - b). So m has to be the mean of these elements, or of these and others beside them: as much
is uncertain of such an m itself, and where an element is infinite, m is, too. Sums of other differences stay as they are.

Only sums along another axis than the last are taken apart, as those of a group normalization of pixels whose channels lie side by side:
rows are short enough for the caches. Where m is the mean of these elements alone, one kernel computes both sums of a few columns after the
other: there the elements of a few columns have to be more than a cache holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import Dim, product
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.types import f32, f64

_SIZES = range(32, 7, -1)  # of blocks along the axis, the best first: a block is read twice, and leaves two numbers behind
_LONG = 2048  # elements along the axis, of four vectors of columns each: half a megabyte


@dataclass(frozen=True)
class _Blocks:
    """Neighbouring axes [first, end), not the last, as `count` times `size` elements."""

    first: int
    end: int
    count: int
    size: int

    def cut(self, x: Value) -> Value:
        """The blocks, and what is in them, as axes `first` and `first` + 1: one each of what is the same for all."""
        middle = (1, 1) if all(size == 1 for size in x.shape[self.first : self.end]) else (self.count, self.size)
        return b.reshape(x, (*x.shape[: self.first], *middle, *x.shape[self.end :]))

    def sums(self, x: Value) -> Value:
        """Of the elements of each block."""
        return b.reduce(self.cut(x), "sum", self.first + 1, keepdim=True)

    def total(self, x: Value) -> Value:
        """The sum over all blocks."""
        return b.reduce(x, "sum", (self.first, self.first + 1))

    def squares(self, x: Value, middle: Value) -> Value:
        """sum((x - middle)^2)"""
        mean = b.div(self.sums(x), float(self.size))
        inside, between = b.sub(self.cut(x), mean), b.sub(mean, self.cut(middle))
        of_block = b.reduce(b.mul(inside, inside), "sum", self.first + 1, keepdim=True)
        return self.total(b.add(of_block, b.mul(b.mul(between, between), float(self.size))))


def in_blocks(graph: Graph) -> Graph:
    """The graph with sums of squared differences, and the sums of the same elements, in two steps."""
    sums = {(v.inputs[0], v.attrs.axes): v for v in graph.order if isinstance(v.attrs, A.ReduceAttrs) and v.attrs.kind == "sum"}
    cut = dict(_cuts(sums))

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        if old not in cut:
            return with_inputs(old, inputs)
        squared, blocks = cut[old]
        [x] = inputs
        with b.at(old.origin):
            total = blocks.squares(*x.inputs[0].inputs) if squared else blocks.total(blocks.sums(x))
            return b.reshape(total, old.shape)

    return rebuild(graph, visit) if cut else graph


def _cuts(sums: dict[tuple[Value, tuple[int, ...]], Value]) -> Iterator[tuple[Value, tuple[bool, _Blocks]]]:
    """The sums to take apart, and whether they are those of squared differences or of the elements."""
    for (x, axes), squares in sums.items():
        if x.op != "mul" or x.inputs[0] is not x.inputs[1] or x.inputs[0].op != "sub":
            continue
        difference = x.inputs[0]
        elements, middle = difference.inputs
        plain = _sum_in_mean(middle, elements, axes)
        # What takes the rounding of the mean back sums the differences, too (`graph/aten/reductions.py`): means of blocks are rounded.
        if plain is None or (difference, axes) in sums:
            continue
        blocks = _blocks(elements, axes, alone=middle.shape == plain.shape)
        if blocks is not None:
            yield squares, (True, blocks)
            yield plain, (False, blocks)


def _sum_in_mean(middle: Value, elements: Value, axes: tuple[int, ...]) -> Value | None:
    """The sum of the elements over the axes in a middle that is their mean, or that of these and others beside them; None for others."""
    if middle.op not in ("mul", "div") or not isinstance(number := middle.inputs[1].attrs, A.FullAttrs):
        return None
    total = middle.inputs[0]
    count: Dim = 1
    while isinstance(total.attrs, A.ReduceAttrs) and total.attrs.kind == "sum" and total.attrs.keepdim:
        [x] = total.inputs
        count = count * product(x.shape[axis] for axis in total.attrs.axes)
        if x is elements and total.attrs.axes == axes:
            mean = isinstance(count, int) and count > 0 and number.value == (count if middle.op == "div" else 1 / count)
            return total if mean else None
        total = x
    return None


def _blocks(x: Value, axes: tuple[int, ...], alone: bool) -> _Blocks | None:
    """How axes are cut that squared differences from a mean are summed over, a mean of these `alone`; None where they stay whole."""
    first, end = axes[0], axes[-1] + 1
    length = product(x.shape[first:end])
    if x.dtype not in (f32, f64) or len(axes) < end - first or end == x.tensor.rank or not isinstance(length, int):
        return None
    if alone and length < _LONG:
        return None
    size = next((size for size in _SIZES if length % size == 0 and length > size), 0)
    return _Blocks(first, end, length // size, size) if size else None
