"""The scores that a softmax is taken of, read from the inside: products of queries and keys, times numbers, and what is added or hidden.

    s = product * scale * rows + added                  -inf where not kept
    s = cap * tanh(product * scale * rows) + added

Each step keeps one of these forms: x + a, x - a, x * c, x / c, x times one number for all keys, tanh(x) of what nothing is added to,
where(keep, x, low), where(drop, low, x), casts between floats, and reshapes of the axes of batch and head. A `low` of -inf makes what is
kept; a finite one of at most -1e8 is added: beside it a score is lost in rounding, as it is when it is replaced. Where the model rounds
scores to f16, the least number of that is such a one, beside which scores below 16 are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from ...graph import build as b
from ...graph.ir import Value
from ...graph.positions import HIDDEN
from ...graph.types import f16, f32
from ..equation import parse_pattern
from ..match import Mismatch
from ..rule import Match
from ..template import full

# Queries that see no key weigh all alike beside what is added to hidden scores, `HIDDEN`. Of masks between that and `HIGHEST_MASK` there
# may be but one, since of several the greater would count.
_LEAST_HALF = -65504.0  # of f16
_LEAST_DIVISOR = 2.0**-126  # of which the inverse is no infinity in f32
_MOST_STEPS, _OF_A_SUM = 24, 3  # narrow floats are cast between any two; each operand of a sum may be the product
_FACTOR = parse_pattern("mul(x, $times) | div(x, $over)")
_HIDING = parse_pattern("where(keep, x, $low) | where(drop, $low, x)")


@dataclass(frozen=True)
class Scores:
    """product: matmul(q, transposed k). rows: numbers that are the same for all keys. low: the largest finite one that hides a score.
    narrowed: whether the model rounds scores, which attention does not. cap: None where there is no tanh."""

    product: Value
    scale: float = 1.0
    rows: Value | None = None
    added: Value | None = None
    kept: Value | None = None
    low: float = -inf
    narrowed: bool = False
    cap: float | None = None

    @property
    def mask(self) -> Value | None:
        """The mask of an attention: bool, or numbers to add."""
        return self.kept if self.added is None else self.folded().added

    def folded(self) -> Scores:
        """The same with numbers alone."""
        if self.kept is None:
            return self
        return replace(self, added=_chosen(self.kept, self.added, -inf), kept=None)


def scores_of(m: Match, s: Value, steps: int = 0) -> Scores | Mismatch:
    """What the scores `s` in a match are made of; steps: how many lead to them from the softmax."""
    read = _STEPS.get(s.op) if steps < _MOST_STEPS else None
    if read is None:
        return m.fail("the scores are no product of queries and keys", s)
    # A softmax reads them twice, and what makes rows 0 of which all scores are -inf once more.
    if m.graph.is_output(s) or len(m.graph.users[s]) > (1 if steps else 2 + ("hidden" in m.bindings.attrs)):
        return m.fail("the scores are used elsewhere, too", s)
    return read(m, s, steps + 1)


def factor_of(m: Match, value: Value) -> tuple[Value, float] | None:
    """(x, c) where `value` is x times the number c, or over one whose inverse is not infinite."""
    found = m.find(_FACTOR, value)
    divisor = 1.0 if found is None else float(found.bindings.numbers.get("over", 1.0))
    if found is None or found["x"].shape != value.shape or abs(divisor) < _LEAST_DIVISOR:
        return None
    return found["x"], float(found.bindings.numbers.get("times", 1.0)) / divisor


def _product(m: Match, s: Value, steps: int) -> Scores:
    return Scores(s)


def _plus(m: Match, s: Value, steps: int) -> Scores | Mismatch:
    """Either operand may be the product; the first that is one counts."""
    refusals = []
    for x, other in (s.inputs, s.inputs[::-1]):
        found = scores_of(m, x, steps + _OF_A_SUM - 1)
        found = found if isinstance(found, Mismatch) else _with(m, s, x, found, other)
        if isinstance(found, Scores):
            return found
        refusals.append(found)
    return refusals[0]


def _minus(m: Match, s: Value, steps: int) -> Scores | Mismatch:
    x, other = s.inputs
    found = scores_of(m, x, steps)
    return found if isinstance(found, Mismatch) else _with(m, s, x, found, b.neg(other))


def _with(m: Match, s: Value, x: Value, found: Scores, other: Value) -> Scores | Mismatch:
    if _stretches(s, x):
        return _stretched(m, s, x)
    if found.low > HIDDEN:
        return _twice(m, s, found.low)
    if _is_half(m, s):
        other = b.where(b.eq(b.cast(other, f32), _LEAST_HALF), HIDDEN, b.cast(other, f32))
    before = found.folded()
    return replace(before, added=other if before.added is None else b.add(b.cast(before.added, f32), b.cast(other, f32)))


def _is_half(m: Match, s: Value) -> bool:
    """Whether scores are in f16, or rounded to it as soon as they are computed."""
    users = m.graph.users[s]
    return s.dtype == f16 or (len(users) == 1 and users[0].op == "cast" and users[0].dtype == f16)


def _stretches(s: Value, x: Value) -> bool:
    """Whether more than axes of size 1 in front make `s` of `x`."""
    more = s.tensor.rank - x.tensor.rank
    return s.shape != (1,) * more + x.shape


def _stretched(m: Match, s: Value, x: Value) -> Mismatch:
    return m.fail(f"the mask stretches the scores {x.type} to {s.type}", m["s"])


def _twice(m: Match, s: Value, low: float) -> Mismatch:
    return m.fail(f"scores that become {low} are masked once more", s)


def _times(m: Match, s: Value, steps: int) -> Scores | Mismatch:
    factor = factor_of(m, s)
    if factor is None:
        return _times_rows(m, s, steps)
    x, c = factor
    found = scores_of(m, x, steps)
    if isinstance(found, Mismatch):
        return found
    if c <= 0 and found.mask is not None:
        return m.fail(f"masked scores are multiplied by {c}", s)
    before = found.folded()
    added = None if before.added is None else b.mul(before.added, c)
    if before.cap is not None:
        return replace(before, cap=before.cap * c, added=added, low=before.low * c)
    return replace(before, scale=before.scale * c, added=added, low=before.low * c)


def _tanh(m: Match, s: Value, steps: int) -> Scores | Mismatch:
    found = scores_of(m, s.inputs[0], steps)
    if isinstance(found, Scores) and (found.mask is not None or found.cap is not None):
        return m.fail("masked or capped scores are capped", s)
    return found if isinstance(found, Mismatch) else replace(found, cap=1.0)


def _times_rows(m: Match, s: Value, steps: int) -> Scores | Mismatch:
    for x, rows in (s.inputs, s.inputs[::-1]) if s.op == "mul" else ():
        if rows.shape[-1:] == (1,):
            found = scores_of(m, x, steps + _OF_A_SUM - 1)
            if isinstance(found, Mismatch) or found.mask is not None or found.cap is not None or _stretches(s, x):
                continue
            return replace(found, rows=rows if found.rows is None else b.mul(found.rows, rows))
    return m.fail("the scores are multiplied by more than a number for each query, or divided by one whose inverse is infinite", s)


def _where(m: Match, s: Value, steps: int) -> Scores | Mismatch:
    chosen = m.find(_HIDING, s)
    if chosen is None:
        return m.fail("the scores are replaced by more than a number", s)
    found = scores_of(m, chosen["x"], steps)
    if isinstance(found, Mismatch):
        return found
    if _stretches(s, chosen["x"]):
        return _stretched(m, s, chosen["x"])
    low, drop = float(chosen.number("low")), chosen.get("drop")
    keep = chosen["keep"] if drop is None else b.logical_not(drop)
    low = HIDDEN if low == _LEAST_HALF and _is_half(m, s) else low
    if max(low, found.low) > HIDDEN and found.mask is not None:
        return _twice(m, s, max(low, found.low))
    if low == -inf:
        return replace(found, kept=keep if found.kept is None else b.and_(found.kept, keep))
    before = found.folded()
    return replace(before, added=_chosen(keep, before.added, HIDDEN), low=max(low, before.low))


def _chosen(keep: Value, added: Value | None, low: float) -> Value:
    return b.where(keep, full(0.0, f32) if added is None else b.cast(added, f32), full(low, f32))


def _cast(m: Match, s: Value, steps: int) -> Scores | Mismatch:
    x = s.inputs[0]
    if not (x.dtype.is_float and s.dtype.is_float and x.tensor.qparams is None):
        return m.fail(f"the scores are {x.type}", s)
    found = scores_of(m, x, steps)
    rounded = s.dtype.bits < x.dtype.bits
    return replace(found, narrowed=True) if rounded and isinstance(found, Scores) else found


def _reshaped(m: Match, s: Value, steps: int) -> Scores | Mismatch:
    """Axes of batch and head may be merged and split. A mask is stretched to all of them before, unless it is the same for all."""
    x = s.inputs[0]
    if min(x.tensor.rank, s.tensor.rank) < 2 or x.shape[-2:] != s.shape[-2:]:
        return m.fail(f"{x.type} becomes {s.type}, and not in batch and head alone", s)
    found = scores_of(m, x, steps)
    if isinstance(found, Mismatch):
        return found

    def moved(mask: Value | None) -> Value | None:
        if mask is None or all(n == 1 for n in mask.shape[:-2]):
            return mask if mask is None else b.reshape(mask, mask.shape[-2:])
        last = mask.shape[-2:]
        return b.reshape(b.expand(mask, (*x.shape[:-2], *last)), (*s.shape[:-2], *last))

    return replace(found, rows=moved(found.rows), added=moved(found.added), kept=moved(found.kept))


_STEPS: dict[str, Callable[[Match, Value, int], Scores | Mismatch]] = {
    "matmul": _product, "add": _plus, "sub": _minus, "mul": _times, "div": _times, "where": _where, "tanh": _tanh,
    "cast": _cast, "reshape": _reshaped,
}
