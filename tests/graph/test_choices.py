"""Choices between numbers, beside the interpreter, and the masks that models make of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sashiko.driver.captures import captured_of
from sashiko.graph import build as b
from sashiko.graph.attrs import AttentionAttrs
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.simplify import canonical
from sashiko.graph.types import DType, boolean, f32, i32, i64
from sashiko.rewrite import apply
from sashiko.rewrite.rules import CANONICAL
from tests.sweeps import swept

C, D = b.input_(0, boolean, (3, 1)), b.input_(1, boolean, (1, 4))
X, Y = b.input_(2, f32, (3, 4)), b.input_(3, i64, (3, 4))


def between(yes: float, no: float, dtype: DType = f32) -> Value:
    return b.where(C, b.full(yes, dtype), b.full(no, dtype))


FOUND: dict[str, tuple[Value, str]] = {
    "compared": (b.ne(between(1, 0), 0.0), "input"),
    "compared with the other": (b.eq(between(1, 0), 0.0), "logical_not"),
    "cast to bool": (b.cast(between(1, 0), boolean), "input"),
    "never": (b.gt(between(1, 0), 3.0), "full"),
    "times a number": (b.mul(between(1, 0), -1e9), "where"),
    "a number less it": (b.sub(b.full(1, i32, (3, 4)), between(1, 0, i32)), "where"),
    "a function": (b.log(between(1, 0)), "where"),
    "bool": (b.where(C, b.full(False, boolean), b.full(True, boolean)), "logical_not"),
    "both": (b.where(C, D, b.full(False, boolean)), "and"),
    "either": (b.where(C, b.full(True, boolean), D), "or"),
    "not the first": (b.where(C, D, b.full(True, boolean)), "or"),
    "neither": (b.where(C, b.full(False, boolean), D), "and"),
    "opposite": (b.logical_not(b.lt(Y, 1)), "ge"),
    "of numbers that may be NaN": (b.logical_not(b.lt(X, 1.0)), "logical_not"),
    "unequal": (b.logical_not(b.eq(X, 1.0)), "ne"),
    "of two": (b.logical_not(b.or_(C, b.le(Y, 1))), "and"),
    "twice": (b.logical_not(b.logical_not(D)), "input"),
    "of a number": (b.logical_not(b.logical_not(X)), "logical_not"),
}


@pytest.mark.parametrize("name", FOUND)
def test_choices_of_numbers(name: str) -> None:
    value, op = FOUND[name]
    graph = Graph((C, D, X, Y), (b.expand(value, (3, 4)),))
    found = canonical(graph)
    (out,) = found.outputs
    assert (out.inputs[0] if out.op == "expand" else out).op == op
    x = torch.randn(3, 4)
    x[0, 0], x[1, 1] = math.nan, 1.0
    data = [torch.tensor([[True], [False], [True]]), torch.tensor([[True, False, False, True]]), x, torch.randint(0, 3, (3, 4))]
    torch.testing.assert_close(run(found, data)[0], run(graph, data)[0], rtol=0, atol=0, equal_nan=True)


def eager(q: Tensor, hidden: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    scores = q @ q.mT * 0.5
    scores = scores if added is None else scores + added
    return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1) @ q


def ones(q: Tensor) -> Tensor:
    return torch.ones(q.shape[2], q.shape[2])


CAUSAL: dict[str, Callable[[Tensor], Tensor]] = {
    "tril": lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=ones(q).bool().tril()),
    "tril is 0": lambda q: eager(q, ones(q).tril() == 0),
    "not tril": lambda q: eager(q, ~ones(q).tril().bool()),
    "triu": lambda q: eager(q, ones(q).triu(1).bool()),
    "triu of infinities": lambda q: eager(q, added=torch.full_like(ones(q), -math.inf).triu(1)),
    "subsequent": lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=nn.Transformer.generate_square_subsequent_mask(q.shape[2])),
    "later": lambda q: eager(q, torch.arange(q.shape[2]) > torch.arange(q.shape[2])[:, None]),
    "filled": lambda q: eager(q, added=torch.zeros_like(ones(q)).masked_fill(ones(q).triu(1).bool(), -math.inf)),
    "times a number": lambda q: eager(q, added=(1 - ones(q).tril()) * -1e9),
    "chosen": lambda q: torch.where(ones(q).tril().bool(), q @ q.mT, torch.finfo(torch.float32).min).softmax(-1) @ q,
}


class Spelled(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, q: Tensor) -> Tensor:
        return CAUSAL[self.name](q)


@pytest.mark.parametrize("name", swept(CAUSAL, ("tril is 0", "triu of infinities", "subsequent", "times a number", "chosen")))
@pytest.mark.parametrize("free", swept((False, True), (True,)))
def test_masks_of_later_keys(name: str, free: bool) -> None:
    q = torch.randn(2, 3, 7, 4)
    captured = captured_of(Spelled(name).eval(), (q,), {}, ({2: torch.export.Dim.AUTO},) if free else None)
    graph = canonical(apply(canonical(captured.graph), CANONICAL))
    (found,) = [v for v in graph.order if isinstance(v.attrs, AttentionAttrs)]
    assert isinstance(found.attrs, AttentionAttrs) and found.attrs.after == 0 and len(found.inputs) == 3
