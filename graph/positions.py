"""Integers that count: what arange, views, sums and lookups make of positions, without looking at any data.

The masks of transformers are spelled as comparisons of such numbers, whatever is left of them: that all positions belong to one
sequence, that a key comes no later than its query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Union

from . import attrs as A
from . import build as b
from .dims import Dim, bounds
from .ir import Value
from .types import DType, boolean


@dataclass(frozen=True)
class Positions:
    """start + sum over the axes of steps[axis] * index. The step of an axis of size 1 is 0."""

    start: Dim
    steps: tuple[Dim, ...]

    def plus(self, other: Positions, times: int) -> Positions:
        """The sum with `times` the other one, which has as many axes."""
        return Positions(self.start + other.start * times, tuple(a + c * times for a, c in zip(self.steps, other.steps, strict=True)))


# What the scores of masked keys may become: above it, some weight would be left for them.
HIGHEST_MASK = -1e8
# What stands for it where masks are added, and what an added mask hides keys with from there on: numbers so far apart that of two scores
# that they are added to one has no weight, as long as these are no such numbers themselves.
HIDDEN = -1e37
Known = dict[Value, Union[Positions, None]]
_FOLLOWED = ("concat", "add", "sub", "mul", "take", "scan", "cast", "reshape", "expand", "permute", "slice")


def positions(value: Value) -> Positions | None:
    """What the elements of a value are, or None where that is not known. Each value that it is made of is looked at once."""
    known: Known = {}
    stack = [value]
    while stack:
        each = stack[-1]
        followed = each.inputs if each.op in _FOLLOWED and _counts(each.dtype) else ()
        missing = [v for v in followed if v not in known]
        if missing:
            stack += missing
            continue
        stack.pop()
        found = _positions(each, known) if _counts(each.dtype) else None
        found = found if found is not None and fit(each.dtype, *_range(found, each)) else None
        if found is not None:
            found = replace(found, steps=tuple(0 if extent == 1 else step for step, extent in zip(found.steps, each.shape, strict=True)))
        known[each] = found
    return known[value]


def fit(dtype: DType, low: int | None, high: int | None) -> bool:
    """Whether integers from `low` to `high` are none that wrap around, as far as these are known."""
    end = 1 << (dtype.bits - 1)
    return (low is None or low >= -end) and (high is None or high < end)


def _counts(dtype: DType) -> bool:
    return dtype.kind == "int" and dtype.bits >= 32


def _positions(value: Value, known: Known) -> Positions | None:
    a = value.attrs
    if isinstance(a, A.IotaAttrs):
        return None if isinstance(a.start, float) or isinstance(a.step, float) else Positions(a.start, (a.step,))
    if isinstance(a, A.FullAttrs):
        return Positions(int(a.value), (0,) * value.tensor.rank)
    if value.op == "concat":
        return _joined(value, known)
    if value.op in ("add", "sub"):
        x, y = (_aligned(known[v], value.tensor.rank) for v in value.inputs)
        return None if x is None or y is None else x.plus(y, 1 if value.op == "add" else -1)
    if value.op == "mul":
        return _product(value, known)
    if value.op == "take":
        return _taken(value, known)
    if value.op == "scan":
        return _running(value, known)
    return _viewed(value, known) if value.op in _FOLLOWED else None


def _aligned(found: Positions | None, rank: int) -> Positions | None:
    """With so many axes, the new ones in front."""
    return None if found is None else Positions(found.start, (0,) * (rank - len(found.steps)) + found.steps)


def _broadcast(value: Value, rank: int) -> Positions | None:
    return _aligned(positions(value), rank)


def _product(value: Value, known: Known) -> Positions | None:
    x, y = (_aligned(known[v], value.tensor.rank) for v in value.inputs)
    if x is None or y is None or (any(x.steps) and any(y.steps)):
        return None
    factor, other = (y.start, x) if any(x.steps) else (x.start, y)
    return Positions(other.start * factor, tuple(step * factor for step in other.steps))


def _running(value: Value, known: Known) -> Positions | None:
    """Running sums of one number."""
    x = known[value.inputs[0]]
    if x is None or any(x.steps) or not isinstance(value.attrs, A.ScanAttrs) or value.attrs.kind != "sum":
        return None
    return Positions(x.start, (*x.steps[:-1], x.start))


def _taken(value: Value, known: Known) -> Positions | None:
    table, index = (known[v] for v in value.inputs)
    if table is None or index is None or len(table.steps) != 1:
        return None
    beyond = Positions(index.start - value.inputs[0].shape[0], index.steps)
    if not (_above(_range(index, value.inputs[1])[0], 0) and _below(_range(beyond, value.inputs[1])[1], -1)):
        return None  # an index out of range is to be reported
    step = table.steps[0]
    return Positions(table.start + index.start * step, tuple(s * step for s in index.steps))


def _joined(value: Value, known: Known) -> Positions | None:
    """Pieces that count on from each other."""
    assert isinstance(value.attrs, A.AxisAttrs)
    axis, pieces = value.attrs.axis, [known[v] for v in value.inputs]
    long = next((n for n, v in enumerate(value.inputs) if v.shape[axis] != 1), None)
    if long is None or any(piece is None for piece in pieces):
        return None
    steps = pieces[long].steps  # type: ignore[union-attr]
    offset: Dim = 0
    start: Dim | None = None
    for piece, v in zip(pieces, value.inputs, strict=True):
        assert piece is not None
        others = [n for n in range(len(steps)) if n != axis]
        first = piece.start - offset * steps[axis]
        same = v.shape[axis] == 1 or piece.steps[axis] == steps[axis]
        if not same or any(piece.steps[n] != steps[n] for n in others) or (start is not None and first != start):
            return None
        start, offset = first, offset + v.shape[axis]
    assert start is not None
    return Positions(start, steps)


def _viewed(value: Value, known: Known) -> Positions | None:
    x, a = value.inputs[0], value.attrs
    found = known[x]
    if found is None or isinstance(a, A.CastAttrs):
        return found
    if isinstance(a, A.PermuteAttrs):
        return Positions(found.start, tuple(found.steps[n] for n in a.order))
    if isinstance(a, A.SliceAttrs):
        steps = list(found.steps)
        start, steps[a.axis] = found.start + steps[a.axis] * a.start, steps[a.axis] * a.step
        return Positions(start, tuple(steps))
    if value.op == "expand":
        return _aligned(found, value.tensor.rank)
    long = [(step, extent) for step, extent in zip(found.steps, x.shape, strict=True) if extent != 1]
    if not any(found.steps):
        return Positions(found.start, (0,) * value.tensor.rank)
    if [extent for _, extent in long] != [extent for extent in value.shape if extent != 1]:
        return None
    left = iter(step for step, _ in long)
    return Positions(found.start, tuple(0 if extent == 1 else next(left) for extent in value.shape))


def _range(found: Positions, value: Value) -> tuple[int | None, int | None]:
    """Bounds of the elements of a value; None where there is none."""
    low = high = found.start
    for step, extent in zip(found.steps, value.shape, strict=True):
        least, most = bounds(step)
        if least is not None and least >= 0:
            high = high + step * (extent - 1)
        elif most is not None and most <= 0:
            low = low + step * (extent - 1)
        else:
            return None, None
    return bounds(low)[0], bounds(high)[1]


def compare_positions(value: Value) -> Value | None:
    """Comparisons of positions that one answer fits: `arange(n) >= 0`, or that of something with itself."""
    x, y = (_broadcast(v, value.tensor.rank) for v in value.inputs)
    if x is None or y is None:
        return None
    least, most = _range(x.plus(y, -1), value)
    answers = {
        "eq": (least == most == 0, _above(least, 1) or _below(most, -1)), "ne": (_above(least, 1) or _below(most, -1), least == most == 0),
        "lt": (_below(most, -1), _above(least, 0)), "le": (_below(most, 0), _above(least, 1)),
        "gt": (_above(least, 1), _below(most, 0)), "ge": (_above(least, 0), _below(most, -1)),
    }
    always, never = answers[value.op]
    if not (always or never):
        return None
    with b.at(value.origin):
        return b.full(always, boolean, value.shape)


def _above(least: int | None, number: int) -> bool:
    return least is not None and least >= number


def _below(most: int | None, number: int) -> bool:
    return most is not None and most <= number


def window_mask(value: Value) -> Value | None:
    """A mask that, among other things, hides all keys so far before or after the query: attention leaves them out by itself, without
    computing them."""
    attrs = value.attrs
    assert isinstance(attrs, A.AttentionAttrs)
    given = attrs.besides(value.inputs)[0]
    places = value.inputs[0].shape[2], value.inputs[1].shape[2]
    if given is None or given.dtype != boolean or 1 in places:
        return None
    found: dict[str, Dim | None] = {"before": attrs.before, "after": attrs.after}
    parts, rest = _conjuncts(given), []
    for part in parts:
        ends = _ends(part) if part.shape[-2:] == places else {}
        if ends and all(found[end] is None for end in ends):
            found |= ends
        else:
            rest.append(part)
    if len(rest) == len(parts):
        return None
    with b.at(value.origin):
        mask = [_four_axes(reduce(b.and_, rest))] if rest else []
    window = replace(attrs, before=found["before"], after=found["after"])
    return replace(value, inputs=(*value.inputs[:3], *mask, *value.inputs[4:]), attrs=window)


def sees_itself(keep: Value, queries: Dim, keys: Dim) -> bool:
    """Whether a mask that follows from positions alone keeps, for every query, the key of its own number."""
    places = queries, keys
    if not _above(bounds(keys - queries)[0], 0) or 1 in places:
        return False
    ends = [_ends(part) if part.shape[-2:] == places else {} for part in _conjuncts(keep)]
    return all(each and all(_above(bounds(end)[0], 0) for end in each.values()) for each in ends)


def only_in_front(view: Value) -> bool:
    """Whether a reshape adds or drops axes of size 1 before all others alone."""
    x, most = view.inputs[0], max(view.tensor.rank, view.inputs[0].tensor.rank)
    return x.tensor.rank <= 4 and (1,) * (most - view.tensor.rank) + view.shape == (1,) * (most - x.tensor.rank) + x.shape


def _conjuncts(mask: Value) -> list[Value]:
    found: dict[Value, None] = {}
    seen, stack = set[Value](), [mask]
    while stack:
        each = stack.pop()
        while each.op == "reshape" and each.inputs[0].op == "and" and only_in_front(each):
            each = each.inputs[0]
        if each not in seen:
            seen.add(each)
            stack += each.inputs if each.op == "and" else ()
            found |= {} if each.op == "and" else {each: None}
    return list(found)


def _four_axes(mask: Value) -> Value:
    return b.reshape(mask, (1,) * (4 - mask.tensor.rank) + mask.shape)


def _ends(part: Value) -> dict[str, Dim]:
    """`after`: that element [..., i, j] says that j <= i + after; `before`: that i - before <= j. Both, if it says that j is so near."""
    while part.op in ("reshape", "expand") and part.inputs[0].shape[-2:] == part.shape[-2:]:
        part = part.inputs[0]
    if part.op not in ("le", "lt", "ge", "gt"):
        return {}
    less, more = part.inputs if part.op in ("le", "lt") else part.inputs[::-1]
    distance = less.op == "abs"
    x, y = (_broadcast(v, part.tensor.rank) for v in (less.inputs[0] if distance else less, more))
    if x is None or y is None or (distance and any(y.steps)):
        return {}
    strict = 1 if part.op in ("lt", "gt") else 0
    sides = [x.plus(y, -1)] + [Positions(0, (0,) * part.tensor.rank).plus(x, -1).plus(y, -1)] * distance  # at most 0, or less
    found = {_SIDES.get(side.steps[-2:], ""): -strict - side.start for side in sides if not any(side.steps[:-2])}
    first = bounds(found.get("after", 0))[0]  # every query might be one that sees no key
    return found if "" not in found and len(found) == len(sides) and _above(first, 0) else {}


_SIDES: dict[tuple[Dim, ...], str] = {(-1, 1): "after", (1, -1): "before"}  # by the steps of queries and keys
