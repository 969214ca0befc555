"""Positions that are known without running, against the interpreter; comparisons of them; masks that hide later keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sashiko
from sashiko.graph import build as b
from sashiko.graph import interpret
from sashiko.graph.attrs import AttentionAttrs
from sashiko.graph.dims import Dim, evaluate, symbol
from sashiko.graph.ir import Graph, Value
from sashiko.graph.positions import compare_positions, positions, window_mask
from sashiko.graph.simplify import canonical
from sashiko.graph.types import boolean, f32, i32, i64

S = symbol("S", 2, 64)
LENGTH = 7
COUNT = b.iota(S, i64)
ROW = b.reshape(COUNT, (1, S))
KEYS, QUERIES = b.reshape(COUNT, (1, 1, 1, S)), b.reshape(COUNT, (1, 1, S, 1))
X = b.input_(0, f32, (S, 6))
Q = b.input_(0, f32, (1, 2, S, 4))


def values(value: Value) -> torch.Tensor:
    return interpret.run(Graph((), (value,)), [], {"S": LENGTH})[0]  # type: ignore[no-any-return]


KNOWN = {
    "iota": b.iota(S, i64, 3, 2),
    "number": b.full(5, i64, (2, S)),
    "narrower": b.cast(COUNT, i32),
    "view": b.permute(b.reshape(COUNT, (1, S, 1)), (1, 0, 2)),
    "spread": b.expand(ROW, (3, S)),
    "backwards": b.slice_(COUNT, 0, S - 1, S, -1),
    "part": b.slice_(b.iota(S + 4, i64), 0, 3, S),
    "sum": b.add(QUERIES, b.mul(KEYS, 10)),
    "difference": b.sub(ROW, 1),
    "counts on": b.concat([b.full(-1, i64, (1, 1)), ROW], 1),
    "running sum": b.scan(b.full(3, i64, (2, S)), "sum", 1),
    "looked up": b.take(b.iota(S, i64, 5, 3), b.slice_(ROW, 1, 1, S - 1)),
    "looked up in one number": b.take(b.full(4, i64, (S,)), ROW),
}


@pytest.mark.parametrize("name", KNOWN)
def test_positions_are_what_the_interpreter_computes(name: str) -> None:
    found, got = positions(KNOWN[name]), values(KNOWN[name])
    assert found is not None
    wanted = torch.full(got.shape, evaluate(found.start, {"S": LENGTH}))
    for axis, step in enumerate(found.steps):
        index = torch.arange(got.shape[axis]).reshape([-1 if n == axis else 1 for n in range(got.dim())])
        wanted = wanted + index * evaluate(step, {"S": LENGTH})
    assert torch.equal(got.to(torch.int64), wanted)


@pytest.mark.parametrize("value", [
    b.concat([b.full(0, i64, (1, 1)), ROW], 1),  # two zeros
    b.concat([COUNT, b.slice_(COUNT, 0, S - 1, S, -1)], 0),
    b.mul(COUNT, COUNT),
    b.scan(COUNT, "sum", 0),
    b.scan(b.full(3, i64, (2, S)), "prod", 1),
    b.take(COUNT, b.add(COUNT, 1)),  # the last one is out of range
    b.take(COUNT, b.sub(COUNT, 1)),
    b.reshape(b.add(QUERIES, KEYS), (S * S,)),
    b.cast(X, i64),
    b.iota(S, f32),
], ids=lambda value: value.op)
def test_what_is_not_known(value: Value) -> None:
    assert positions(value) is None


@pytest.mark.parametrize(("value", "answer"), [
    (b.ge(COUNT, 0), True), (b.ge(COUNT, 1), None), (b.lt(COUNT, 64), True), (b.lt(COUNT, 63), None), (b.gt(COUNT, 63), False),
    (b.eq(COUNT, COUNT), True), (b.ne(COUNT, COUNT), False), (b.le(COUNT, COUNT), True), (b.lt(COUNT, COUNT), False),
    (b.ne(b.sub(b.slice_(COUNT, 0, 1, S - 1), b.slice_(COUNT, 0, 0, S - 1)), 1), False),
    (b.eq(COUNT, b.add(COUNT, 1)), False), (b.gt(b.add(COUNT, 2), COUNT), True), (b.le(KEYS, QUERIES), None), (b.eq(COUNT, 3), None),
    (b.le(KEYS, b.add(QUERIES, b.reshape(b.iota(1, i64, S), (1, 1, 1, 1)))), True), (b.lt(b.mul(KEYS, -1), b.add(QUERIES, 1)), True),
])
def test_comparisons(value: Value, answer: bool | None) -> None:
    found = compare_positions(value)
    if answer is None:
        assert found is None
        assert len(values(value).unique()) == 2 or value.op in ("ge", "lt")
    else:
        assert found is not None and found.op == "full" and found.shape == value.shape
        assert torch.equal(values(found), values(value)) and bool(values(value).all()) == answer


SEEN = b.input_(1, boolean, (1, 1, 1, S))


@pytest.mark.parametrize(("mask", "left"), [
    (b.le(KEYS, QUERIES), 0), (b.ge(QUERIES, KEYS), 0), (b.lt(KEYS, b.add(QUERIES, 1)), 0), (b.gt(QUERIES, b.sub(KEYS, 1)), 0),
    (b.reshape(b.le(b.reshape(COUNT, (1, S)), b.reshape(COUNT, (S, 1))), (1, 1, S, S)), 0),
    (b.and_(SEEN, b.le(KEYS, QUERIES)), 1), (b.and_(b.and_(b.le(KEYS, QUERIES), SEEN), b.ne(KEYS, 2)), 2),
])
def test_attention_knows_that_it_is_causal(mask: Value, left: int) -> None:
    value = b.attention(Q, Q, Q, mask, scale=0.5)
    found = window_mask(value)
    assert found is not None and found.attrs.after == 0 and len(found.inputs) == 3 + bool(left)  # type: ignore[attr-defined]
    q, seen = torch.randn(1, 2, LENGTH, 4), torch.rand(1, 1, 1, LENGTH) < 0.7
    before, after = (interpret.run(Graph((Q, SEEN), (v,)), [q, seen])[0] for v in (value, found))
    torch.testing.assert_close(after, before)


DISTANCE = b.abs_(b.sub(QUERIES, KEYS))


@pytest.mark.parametrize(("mask", "before", "after", "left"), [
    (b.and_(b.gt(KEYS, b.sub(QUERIES, 3)), b.le(KEYS, QUERIES)), 2, 0, False),  # a sliding window
    (b.le(DISTANCE, 2), 2, 2, False), (b.lt(DISTANCE, 3), 2, 2, False), (b.and_(SEEN, b.lt(DISTANCE, 1)), 0, 0, True),
    (b.le(QUERIES, KEYS), 0, None, False), (b.le(KEYS, b.add(QUERIES, S)), None, S, False), (b.lt(QUERIES, KEYS), -1, None, False),
    (b.and_(b.le(KEYS, QUERIES), b.le(KEYS, b.add(QUERIES, 1))), None, (0, 1), True),  # one of them is enough
])
def test_attention_knows_how_far_it_sees(mask: Value, before: Dim | None, after: Any, left: bool) -> None:
    value = b.attention(Q, Q, Q, mask, scale=0.5)
    found = window_mask(value)
    assert found is not None and isinstance(found.attrs, AttentionAttrs) and len(found.inputs) == 3 + left
    assert found.attrs.before == before and found.attrs.after in (after if isinstance(after, tuple) else (after,))
    q, seen = torch.randn(1, 2, LENGTH, 4), torch.rand(1, 1, 1, LENGTH) < 0.7
    wanted, got = (interpret.run(Graph((Q, SEEN), (v,)), [q, seen])[0] for v in (value, found))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("mask", [
    b.lt(KEYS, QUERIES), b.eq(KEYS, QUERIES), SEEN, b.or_(SEEN, b.le(KEYS, QUERIES)), b.logical_not(b.le(KEYS, QUERIES)),
    b.gt(DISTANCE, 2), b.le(b.abs_(KEYS), QUERIES), b.le(b.add(KEYS, KEYS), QUERIES),
], ids=lambda value: value.op)
def test_other_masks_stay(mask: Value) -> None:
    assert window_mask(b.attention(Q, Q, Q, mask, scale=0.5)) is None


@pytest.mark.parametrize(("keep", "low", "window"), [
    (b.le(KEYS, QUERIES), -3e38, True), (b.and_(b.le(KEYS, QUERIES), b.gt(KEYS, b.sub(QUERIES, 2))), -1e9, True),
    (b.le(KEYS, QUERIES), -1e4, False),  # some weight is left
    (b.and_(SEEN, b.le(KEYS, QUERIES)), -3e38, False), (b.lt(QUERIES, KEYS), -3e38, False),  # of no key, all weigh alike
    (b.and_(SEEN, b.le(KEYS, QUERIES)), -math.inf, True),
])
def test_numbers_that_hide_keys(keep: Value, low: float, window: bool) -> None:
    value = b.attention(Q, Q, Q, b.where(keep, b.full(0.0, f32), b.full(low, f32)), scale=0.5)
    (found,) = canonical(Graph((Q, SEEN), (value,))).outputs
    assert isinstance(found.attrs, AttentionAttrs) and (found.attrs.after == 0) == window
    q, seen = torch.randn(1, 2, LENGTH, 4), torch.rand(1, 1, 1, LENGTH) < 0.7
    wanted, got = (interpret.run(Graph((Q, SEEN), (v,)), [q, seen])[0] for v in (value, found))
    torch.testing.assert_close(got, wanted)


class Decoder(nn.Module):
    """The mask as transformers spells it: one sequence or several behind each other, and no key after its query."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[2])
        same = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool)
        mask = (same & (place[None] <= place[:, None]))[None, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@torch.no_grad()
def test_masks_of_models_leave_nothing_to_compute() -> None:
    x, long = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 40, 8)
    compiled = sashiko.compile(Decoder().eval(), (x,), dynamic_shapes=({2: torch.export.Dim("S", min=2, max=64)},), strict=True)
    assert compiled.built is not None
    assert [note.label for notes in compiled.built.notes for note in notes] == ["attention"]  # type: ignore[union-attr]
    for each in (x, long):
        torch.testing.assert_close(compiled(each), Decoder()(each))


def test_a_graph_of_comparisons_folds_away() -> None:
    """Whether positions start anew: the difference of neighbours is 1 everywhere."""
    before = b.concat([b.sub(b.slice_(ROW, 1, 0, 1), 1), ROW], 1)
    anew = b.ne(b.sub(b.slice_(before, 1, 1, S), b.slice_(before, 1, 0, S)), 1)
    (found,) = canonical(Graph((), (anew,))).outputs
    assert found.op == "full" and not values(found).any()


def test_long_and_shared_chains_are_followed_once() -> None:
    """Unrolled loops: each step counts on from the last one, or adds it to itself."""
    longer, doubled, mask = b.iota(2, i64), COUNT, b.le(KEYS, QUERIES)
    for step in range(2, 60):
        longer = b.concat([longer, b.add(b.slice_(longer, 0, step - 1, 1), 1)], 0)
        doubled, mask = b.sub(b.add(doubled, doubled), doubled), b.and_(mask, mask)
    for _ in range(2000):
        doubled = b.add(doubled, 1)
    assert positions(longer) == positions(b.iota(60, i64))
    assert positions(doubled) == positions(b.iota(S, i64, 2000))
    assert window_mask(b.attention(Q, Q, Q, mask, scale=0.5)) is not None
