"""Kernels that are alike are lowered once. The layers of a model repeat, and stitching lowers each group of values several times while
it looks for the best grouping.

What lowering makes of values depends on their operations, types and attributes, on which of them have buffers, and on which are the
same value; not on which values they are. `signature` writes that down, and what came out is kept by it, with numbers for values.
Of positions it also depends on how they were computed, wherever they are stored: those that are counted are not read, and those that lie
within known bounds are not checked. So it does of what is subtracted: from an extreme, a difference is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ..graph.ir import Value
from ..graph.ops import OPS
from .elementwise import is_exact
from .loops import Body
from .lower import Lowering, NeedsBuffer

_POSITIONS = {"take": 1, "gather": 1, "put": 2}  # from which operand on an operation has positions
KEPT = 1 << 12  # lowerings kept: more than any model has, and some tens of MB
Signature = tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class Lowered:
    """The body of a kernel. operands: the values in its buffers. inlined: values that it evaluates, in order."""

    body: Body
    operands: tuple[Value, ...]
    inlined: dict[Value, None]


@dataclass(frozen=True, eq=False)
class _Made:
    """The same with numbers for values."""

    body: Body
    operands: tuple[int, ...]
    inlined: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Refused:
    """The value that needs a buffer, and why."""

    value: int
    why: str


_known: dict[Signature, _Made | _Refused] = {}


def signature(roots: Sequence[Value], stored: Container[Value], accumulator: Value | None = None) -> tuple[Signature, dict[Value, int]]:
    """What `roots` are computed from, and the numbers it gives to values: everything down to what is stored, or to the accumulator."""
    homes = set(roots)

    def given(value: Value) -> Hashable:
        if value is accumulator:
            return "accumulator", value.type
        return value.type if value in stored and value not in homes else None

    told, numbers = _told(roots, given)
    looked_up = [v for v in numbers if v.op in _POSITIONS and given(v) is None]
    positions = dict.fromkeys(p for v in looked_up for p in v.inputs[_POSITIONS[v.op] :])
    return (told, tuple([v in stored for v in roots]), _told(positions, _uncounted)[0]), numbers


def _told(roots: Iterable[Value], given: Callable[[Value], Hashable]) -> tuple[Signature, dict[Value, int]]:
    """The operations that `roots` are computed by, and the number of each value. given: what is told of a value that is not taken apart;
    None for all others."""
    numbers: dict[Value, int] = {}
    parts: list[Hashable] = []
    pending: list[Value | None] = [*reversed([*roots])]
    while pending:
        value = pending.pop()
        if value is None:  # what lies under it has its operands by now
            value = pending.pop()
            assert value is not None
            parts.append((value.kind, is_exact(value), *[numbers[v] for v in value.inputs]))
            numbers[value] = len(numbers)
        elif value not in numbers:
            part = given(value)
            if part is None:
                pending += (value, None, *value.inputs[::-1])
            else:
                parts.append(part)
                numbers[value] = len(numbers)
    return (tuple(parts), tuple([numbers[v] for v in roots])), numbers


def _uncounted(value: Value) -> Hashable:
    """What is told of what positions are computed from: what they are counted from, and bounded by, is taken apart, stored or not."""
    apart = value.op not in ("input", "constant") and (value.op == "copy" or OPS[value.op].group in ("view", "leaf", "elementwise"))
    return None if apart else value.type


def lowered(
    roots: Sequence[Value], stored: Container[Value], nest: Hashable, lower: Callable[[], Lowering], accumulator: Value | None = None
) -> Lowered:
    """What `lower` makes of `roots`, or made of others that are alike. Raises NeedsBuffer.

    nest: what else the lowering depends on. accumulator: a value that is at hand whatever it is computed from.
    """
    told, numbers = signature(roots, stored, accumulator)
    key = (nest, told)
    made = _known.get(key)
    if made is None:
        if len(_known) >= KEPT:
            _known.clear()
        made = _known[key] = _made(lower, numbers)
    values = list(numbers)
    if isinstance(made, _Refused):
        raise NeedsBuffer(values[made.value], made.why)
    return Lowered(made.body, tuple([values[n] for n in made.operands]), dict.fromkeys([values[n] for n in made.inlined]))


def _made(lower: Callable[[], Lowering], numbers: dict[Value, int]) -> _Made | _Refused:
    try:
        low = lower()
    except NeedsBuffer as need:
        return _Refused(numbers[need.value], need.why)
    return _Made(low.builder.finish(), tuple(numbers[v] for v in low.operands), tuple(numbers[v] for v in low.inlined))
