"""What one kernel computes again at other places of an operand: a value and its neighbours, or its mirror image, or other pieces of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..graph.dims import Dim, Symbol, bounds, evaluate, product, symbols
from ..graph.ir import Value
from ..graph.ops import TRANSCENDENTAL
from .costs import PASS
from .loops import BodyBuilder
from .views import Index

_TYPICAL = 64  # a size that has no greatest value
_LONG = 2 * PASS  # what transcendental functions take
_CALL = 1 << 12  # what a kernel of its own takes besides, in operations on one element, many of which a vector does at once
_LEAST = 32  # a shorter piece of a concatenation takes as long as so many elements
_MOST = 16  # places at which one kernel computes a value: each of them is code
Axes = frozenset[Symbol]


def typical(size: Dim) -> int:
    """A number for a size: its symbols are as large as they may be."""
    return evaluate(size, {s.name: _of_symbol(s) for s in symbols(size)})


def _of_symbol(dim: Symbol) -> int:
    high = bounds(dim.extent)[1] if dim.hi is None and dim.extent is not None else dim.hi
    return max(dim.lo, _TYPICAL) if high is None else high


@dataclass
class _Seen:
    """What computing a value takes at one point, on average, and what has been computed of it so far, at how many places."""

    once: float
    spent: float
    places: int = 1


@dataclass
class Repeats:
    """Counts what a kernel computes of each value, operations times the points at which they are evaluated.

    Without it a chain of values, each computed from two places of the one before, would be one kernel of exponential size. reduced: names
    of the axes that reductions run over.
    """

    builder: BodyBuilder
    reduced: frozenset[str]
    _seen: dict[Value, _Seen] = field(default_factory=dict)
    _axes: list[Axes] = field(default_factory=list)  # those that each node varies with
    _total: list[float] = field(default_factory=lambda: [0.0])  # what the nodes up to each take
    _counts: dict[Axes, int] = field(default_factory=dict)

    def add(self, value: Value, index: Index, start: int) -> bool:
        """Notes that `value` has been computed at `index` by the nodes from number `start` on. Returns whether all that is computed of
        it by now takes longer than to compute it once, store it, and load it, or is too much code."""
        taken, points = self._taken(start), self._points(self._along(index))
        seen = self._seen.get(value)
        if seen is None:
            self._seen[value] = _Seen(taken / max(points, 1), taken)
            return False
        again = taken - points  # a load takes its place
        if again <= 0:
            return False
        seen.spent += again
        seen.places += 1
        return seen.places > _MOST or seen.spent > typical(product(value.shape)) * (seen.once + PASS) + _CALL

    def share(self, start: int, part: Dim, whole: Dim) -> None:
        """Notes that only `part` of `whole` elements are computed by the nodes from number `start` on."""
        taken, size = self._taken(start), typical(whole)
        self._total[-1] = self._total[start] + taken * min(1.0, max(typical(part), _LEAST) / max(size, 1))

    def _taken(self, start: int) -> float:
        for node in self.builder.nodes[len(self._axes) :]:
            axes = self._along([node.index]).union(*[self._axes[arg] for arg in node.args])
            if node.op == "reduce":
                axes = frozenset(s for s in axes if s.name not in self.reduced)
            self._axes.append(axes)
            self._total.append(self._total[-1] + (_LONG if node.op in TRANSCENDENTAL else 1) * self._points(axes))
        return self._total[-1] - self._total[start]

    def _along(self, index: Iterable[Dim]) -> Axes:
        """The axes that an index varies with, by way of numbers read from memory, too."""
        found: set[Symbol] = set()
        for s in (s for i in index for s in symbols(i)):
            if s.name.startswith("%"):
                found |= self._axes[int(s.name[1:])]
            elif s.extent is not None:
                found.add(s)
        return frozenset(found)

    def _points(self, axes: Axes) -> int:
        if axes not in self._counts:
            self._counts[axes] = typical(product([s.extent for s in axes if s.extent is not None]))
        return self._counts[axes]
