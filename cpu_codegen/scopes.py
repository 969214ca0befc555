"""Values already computed, and where they may be used again.

Code inside a loop or a branch may use what was computed before it, not the other way round: each such region is a scope. A value is
found by a key that names what it depends on, so that one emitter serves every point of a kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .builder import Function, Val

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Point:
    """Where a body is evaluated.

    lanes: 0 for one element, n for columns c .. c + n - 1. axes: i64 scalars "r", "c" (base column, a multiple of `lanes`) and "k", those
    that exist. mask: active lanes, <lanes x i1>; None for all. Lane 0 is always active.
    """

    lanes: int
    axes: dict[str, Val] = field(default_factory=dict)
    mask: Val | None = None

    def at(self, **axes: Val) -> Point:
        """The same point with other axes as well."""
        return Point(self.lanes, {**self.axes, **axes}, self.mask)

    def at_column(self, other: Point) -> Point:
        """This row at the columns of another point."""
        return Point(other.lanes, {**self.axes, "c": other.axes["c"]}, other.mask)

    @property
    def scalar(self) -> Point:
        """The point without its columns."""
        return Point(0, {name: value for name, value in self.axes.items() if name != "c"})


class Scopes:
    """Layers of known values: layer 0 is the entry block of the function, the last one the innermost region being emitted."""

    def __init__(self, fn: Function) -> None:
        self._fn = fn
        self._layers: list[dict[Key, tuple[Val, int]]] = [{}, {}]

    def find(self, key: Key) -> Val | None:
        for layer in reversed(self._layers):
            found = layer.get(key)
            if found is not None:
                return found[0]
        return None

    def put(self, key: Key, value: Val, sources: int = 0) -> Val:
        """`sources`: a bit for each node the value depends on, for `forget`."""
        self._layers[-1][key] = value, sources
        return value

    def forget(self, source: int) -> None:
        """Drops every value that depends on any of these nodes."""
        for layer in self._layers:
            for key in [key for key, (_, sources) in layer.items() if sources & source]:
                del layer[key]

    @contextmanager
    def inner(self) -> Iterator[None]:
        """A region whose values are not known after it."""
        self._layers.append({})
        try:
            yield
        finally:
            self._layers.pop()

    @contextmanager
    def entry(self) -> Iterator[None]:
        """Emission on entry: what does not change during the call is computed once. A branch there makes it several blocks."""
        fn = self._fn
        if fn._lines is fn._entry:
            yield
            return
        layers, self._layers = self._layers, self._layers[:1]
        lines, block = fn._lines, fn._block
        fn._lines, fn._block = fn._entry, fn._entry_block
        try:
            yield
        finally:
            fn._entry_block = fn._block
            self._layers, fn._lines, fn._block = layers, lines, block
