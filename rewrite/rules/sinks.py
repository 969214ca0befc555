"""Softmax over scores and one number more, of which only the scores' part is used: a key whose value is 0, an attention sink.

    p = softmax(concat(scores, sink))[..., :-1]        Xiao et al., 2023; gpt-oss has one sink for each head

The sink may come first. What is taken of all of a row alike, its largest element, changes nothing: a softmax takes it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...graph import attrs as A
from ...graph import build as b
from ...graph.ir import Value
from ..match import Mismatch
from ..rule import Match


@dataclass(frozen=True)
class Sunk:
    """scores [..., M, S]. sink [..., M, 1], or 1 in place of axes before the last. narrowed: whether the model rounds both."""

    scores: Value
    sink: Value
    narrowed: bool


def sunk(m: Match, s: Value, kept: A.SliceAttrs) -> Sunk | Mismatch:
    """What `s`, of whose softmax `kept` is used, is made of."""
    joined, narrowed = _below_largest(s)
    last = s.tensor.rank - 1
    if joined.op != "concat" or len(joined.inputs) != 2 or joined.attrs != A.AxisAttrs(last):
        return m.fail("a part of the probabilities is used, and they are not of scores and a sink", s)
    a, z = joined.inputs
    for scores, sink, start in ((a, z, 0), (z, a, 1)):
        if sink.shape[last] == 1 and kept == A.SliceAttrs(last, start, scores.shape[last], 1):
            while sink.op == "expand":
                sink = sink.inputs[0]
            return Sunk(scores, b.reshape(sink, (1,) * (last + 1 - sink.tensor.rank) + sink.shape), narrowed)
    return m.fail("the part of the probabilities that is used is not that of the scores", s)


def _below_largest(s: Value) -> tuple[Value, bool]:
    """What `s` is without casts and subtractions of the largest element, and whether it was rounded."""
    narrowed = False
    while True:
        if s.op == "cast" and s.inputs[0].dtype.is_float:
            narrowed |= s.dtype.bits < s.inputs[0].dtype.bits
            s = s.inputs[0]
        elif s.op == "sub" and _largest(_plain(s.inputs[1]), _plain(s.inputs[0])):
            s = s.inputs[0]
        else:
            return s, narrowed


def _plain(value: Value) -> Value:
    while value.op == "cast" and value.inputs[0].dtype.is_float:
        value = value.inputs[0]
    return value


def _largest(value: Value, of: Value) -> bool:
    """Whether `value` is the largest element of each row of `of`."""
    attrs = value.attrs
    if not isinstance(attrs, A.ReduceAttrs) or attrs.kind != "max" or not attrs.keepdim:
        return False
    return attrs.axes == (of.tensor.rank - 1,) and _plain(value.inputs[0]) is of
