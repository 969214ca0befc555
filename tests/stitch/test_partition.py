"""Which segment computes what, where PyTorch computes something in between."""

from __future__ import annotations

import torch

import sashiko
from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph.ir import Graph, Value
from sashiko.graph.ops import make
from sashiko.graph.types import f32
from sashiko.stitch.partition import Extern, Native, partition
from tests.driver.functions import Apply


def by_torch(x: Value) -> Value:
    return make("aten", x, attrs=A.AtenAttrs(None, (A.Slot(0),), (), "a test"), type=x.type)  # type: ignore[arg-type]


def test_views_of_arguments_are_looked_through_where_they_are_read() -> None:
    x, y = b.input_(0, f32, (4, 6)), b.input_(1, f32, (6, 4))
    late = b.add(b.permute(x, (1, 0)), by_torch(b.neg(y)))
    (first, extern, last), _ = partition(Graph((x, y), (late,)))
    assert isinstance(first, Native) and isinstance(extern, Extern) and isinstance(last, Native)
    assert [v.op for v in first.outputs] == ["neg"] and x in last.inputs and len(last.inputs) == 2


def test_views_of_what_is_computed_are_stored_instead_of_it() -> None:
    """Only a part of it may be needed later."""
    x = b.input_(0, f32, (6, 4))
    part = b.slice_(b.exp(x), 0, 5, 1)
    (first, _, last), _ = partition(Graph((x,), (b.add(part, by_torch(b.neg(x))),)))
    assert isinstance(first, Native) and isinstance(last, Native)
    assert {v.op for v in first.outputs} == {"neg", "slice"} and x not in last.inputs


def test_views_that_are_needed_now_stay() -> None:
    x = b.input_(0, f32, (4, 6))
    turned = b.permute(x, (1, 0))
    parts, _ = partition(Graph((x,), (b.add(turned, by_torch(turned)), turned)))
    assert isinstance(parts[0], Native) and parts[0].outputs == (turned,)


@torch.no_grad()
def test_views_that_are_written_into_an_argument() -> None:
    """Writing comes last, and has its operands by then."""

    def step(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        order = torch.sort(x, -1)[0]
        cache[0] = x[1]
        return order

    cache, x = torch.zeros(2, 5000), torch.randn(3, 5000)
    compiled = sashiko.compile(Apply(step).eval(), (cache.clone(), x))
    assert torch.equal(compiled(cache, x), torch.sort(x, -1)[0]) and torch.equal(cache[0], x[1])
