"""Where results lie that are wanted as part of something larger: with a border around them, as images are that windows are read from, or
beside others. What computes them stores them there, and nothing is copied.

A value with room around it (`TensorType.room`) lies in a buffer of the whole. Its `border` is the same memory with the rest set, and
what is `joined` is the memory that all parts are in. This comes last: to all rules a border is a `pad`, and what is joined a `concat`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..graph import attrs as A
from ..graph.dims import less, product
from ..graph.ir import Graph, Value, rebuild, with_inputs, with_room
from ..graph.ops import OPS, make
from ..graph.types import Room
from .each import DEEPEST, is_made, of_each_part
from .partition import Native, partition
from .roots import PIECEWISE, WITH_EPILOGUE, find_roots
from .steps import by_pieces
from .views import VIEWS

_LEAST = 1 << 12  # elements: less than that is copied in the time that it takes to call another kernel
_LOOPS = ("elementwise", "reduce", "index", "update")  # what reads elements wherever they are


def in_their_places(graph: Graph) -> Graph:
    """The graph with borders and joined values for those stored paddings and concatenations whose parts products store."""
    if not any(v.op in ("pad", "concat") and is_made(v) for v in graph.order):
        return graph
    graph = of_each_part(graph)
    found = _Places(graph)
    for part in partition(graph)[0]:
        if isinstance(part, Native):
            found.add(part)
    return rebuild(graph, found.visit) if found.whole else graph


@dataclass
class _Places:
    """whole: the paddings and concatenations, and the room around each. rooms: what has its place in one of them: in which one, and the
    room around it."""

    graph: Graph
    whole: dict[Value, Room] = field(default_factory=dict)
    rooms: dict[Value, tuple[Value, Room]] = field(default_factory=dict)
    _made: set[Value] = field(default_factory=set)  # by products
    _outside: set[Value] = field(default_factory=set)

    def add(self, part: Native) -> None:
        """Finds places for what a native segment stores."""
        given = {*part.inputs, *part.constants}
        roots = find_roots(part.outputs, given)
        self._outside |= {*given, *part.outputs}
        self._made |= roots.epilogue.keys()
        for value in reversed(self.graph.order):  # the outermost first
            if value in roots.stored and value not in given and value not in self.rooms:
                self._place(value, value.tensor.room)

    def visit(self, value: Value, inputs: tuple[Value, ...]) -> Value:
        """For `rebuild`."""
        if value in self.whole:
            return self._bordered(value, inputs[0]) if value.op == "pad" else self._joined(value, inputs)
        now = with_inputs(value, inputs)
        return with_room(now, self.rooms[value][1]) if value in self.rooms else now

    # -- which -------------------------------------------------------------------------------------------------------
    def _place(self, value: Value, room: Room, depth: int = 0) -> None:
        """Lets what `value` puts together be stored in its place, if it is a padding or concatenation and that saves something. depth: in
        how many others it is."""
        if depth == DEEPEST or not less(_LEAST - 1, product(value.shape)) or not all(isinstance(n, int) for n in value.shape[1:]):
            return
        if isinstance(value.attrs, A.PadAttrs):
            inner = value.inputs[0]
            if self._saves(value) and self._may_lie(inner, value, around := _sum(_amounts(value.attrs), room)):
                self.whole[value], self.rooms[inner] = room, (value, around)
                self._place(inner, around, depth + 1)
        elif self._saves(value):
            self.whole[value] = room
            for part, around in self._parts(value):
                if self._may_lie(part, value, around):
                    self.rooms[part] = (value, around)
                    self._place(part, around, depth + 1)

    def _saves(self, value: Value, depth: int = 0) -> bool:
        """Whether a product would store part of what is put together in its place."""
        if isinstance(value.attrs, A.PadAttrs) and value.op == "pad":
            return bool(_amounts(value.attrs)) and self._is_stored(value.inputs[0], depth)
        if not isinstance(value.attrs, A.AxisAttrs) or value.op != "concat" or by_pieces(value):
            return False
        axis, parts = value.attrs.axis, value.inputs
        return all(isinstance(part.shape[axis], int) for part in parts) and any(self._is_stored(part, depth) for part in parts)

    def _is_stored(self, value: Value, depth: int) -> bool:
        return value in self._made or (depth < DEEPEST and self._saves(value, depth + 1))

    def _may_lie(self, value: Value, whole: Value, room: Room) -> bool:
        """Whether a value can be stored in its place: the kernel that makes it is ours, and whoever else reads it finds it there."""
        if value in self._outside or value in self.rooms or value.tensor.order is not None or value.tensor.room:
            return False
        if whole.inputs.count(value) > 1 or not all(isinstance(n, int) for n in value.shape[1:]):
            return False
        ours = OPS[value.op].group in ("elementwise", "reduce", "index") or value.op in WITH_EPILOGUE
        rows = all(amount == (0, 0) for amount in room[:-1])
        others = (user for user in self.graph.users[value] if user is not whole)
        return (ours or (value.op == "reshape" and value in self._made)) and all(self._finds(user, value, rows) for user in others)

    def _finds(self, user: Value, value: Value, rows: bool) -> bool:
        """Whether a user reads a value with room around it. rows: there is room between rows alone, of which it may read one by one."""
        if user.op in VIEWS:
            rows = rows and user.op == "reshape" and user.shape[-1:] == value.shape[-1:]
            return not self.graph.is_output(user) and all(self._finds(u, user, rows) for u in self.graph.users[user])
        if user.op in PIECEWISE:
            return rows and value not in user.inputs[1:]
        return OPS[user.op].group in _LOOPS and user.op != "put"

    def _parts(self, concat: Value) -> Iterator[tuple[Value, Room]]:
        """The parts of a concatenation, and the room around each."""
        assert isinstance(concat.attrs, A.AxisAttrs)
        axis, before = concat.attrs.axis, 0
        lengths = [n for part in concat.inputs if isinstance(n := part.shape[axis], int)]
        for part, length in zip(concat.inputs, lengths, strict=True):
            beside = tuple((before, sum(lengths) - before - length) if n == axis else (0, 0) for n in range(part.tensor.rank))
            yield part, _sum(beside, self.whole[concat])
            before += length

    # -- the graph ---------------------------------------------------------------------------------------------------
    def _bordered(self, pad: Value, inner: Value) -> Value:
        """One border for each axis, the last one first: what is around the others is then part of it."""
        assert isinstance(pad.attrs, A.PadAttrs)
        amounts, room = _amounts(pad.attrs), self.whole[pad]
        for axis in reversed(range(len(amounts))):
            if amounts[axis] != (0, 0):
                alone = tuple(a if n == axis else (0, 0) for n, a in enumerate(amounts))
                rest = tuple(a if n < axis else (0, 0) for n, a in enumerate(amounts))
                border = make("border", inner, attrs=replace(pad.attrs, amounts=alone), origin=pad.origin)
                inner = with_room(border, _sum(rest, room))
        return inner

    def _joined(self, concat: Value, inputs: tuple[Value, ...]) -> Value:
        """What has its place elsewhere is copied."""
        parts = [
            new if self.rooms.get(part, (None, ()))[0] is concat else with_room(make("copy", new), room)
            for new, (part, room) in zip(inputs, self._parts(concat), strict=True)
        ]
        return with_room(make("joined", *parts, attrs=concat.attrs, origin=concat.origin), self.whole[concat])


def _sum(one: Room, other: Room) -> Room:
    """The room around what has one around itself and the other around that; () where there is none."""
    both = tuple((a + c, b + d) for (a, b), (c, d) in zip(one, other, strict=True)) if other else one
    return both if any(amount != (0, 0) for amount in both) else ()


def _amounts(pad: A.PadAttrs) -> Room:
    """What a padding adds along each axis; () where it takes something away, or adds to rows, or it is not known how much."""
    known = tuple((low, high) for low, high in pad.amounts if isinstance(low, int) and isinstance(high, int) and min(low, high) >= 0)
    return known if len(known) == len(pad.amounts) and known[-1] == (0, 0) else ()
