"""Which products choose among other values, and which comparisons are but activations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sashiko.quant import PRESETS, Override, QuantizedModule, Scheme, quantize
from tests.sweeps import swept


class Experts(nn.Module):
    """A router and the experts it sends rows of x [R, 8] to, by one of the operators that choose."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor], outputs: int = 4) -> None:
        super().__init__()
        self.choose = choose
        self.router = nn.Linear(8, outputs)
        self.experts = nn.Linear(8, outputs * 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = self.choose(self.router(x).softmax(-1))
        all_of = self.experts(x).unflatten(-1, (-1, 6))
        one: torch.Tensor = self.last(all_of.gather(1, index[:, None, None].expand(-1, 1, 6)).flatten(1))
        return one


CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "topk": lambda p: p.topk(2).indices[:, 0],
    "argmax": lambda p: p.argmax(-1),
    "max": lambda p: p.max(-1).indices,
    "sort": lambda p: p.sort(-1, descending=True)[1][:, 0],
    "argsort": lambda p: p.argsort(-1, descending=True)[:, 0],
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("preset", ["int8", "int8-static", "int4-weight"])
def test_what_chooses_is_not_rounded(name: str, preset: str) -> None:
    model, x = Experts(CHOICES[name]).eval(), torch.randn(64, 8)
    small = quantize(model, [x], preset=preset)
    assert [r.site.name for r in small.record.sites] == (["experts"] if preset == "int4-weight" else ["experts", "last"])
    assert ("router", "it chooses") in [(item.name, item.reason[:10]) for item in small.record.left_out]
    # All rows take the expert that the model takes: none differs by more than roundings do.
    assert (small(x) - model(x)).abs().max() < 0.2 * model(x).abs().max()


def test_what_chooses_is_rounded_where_asked_for_or_where_it_is_most_of_the_work() -> None:
    x = torch.randn(64, 8)
    asked = Scheme(PRESETS["int8"].default, overrides=(Override("router", PRESETS["int8"].default),))
    for model, preset in ((Experts(CHOICES["topk"]), asked), (Experts(CHOICES["topk"], outputs=9), "int8")):
        assert "router" in [r.site.name for r in quantize(model.eval(), [x], preset=preset).record.sites]


class Greedy(nn.Module):
    """What is chosen goes nowhere, and the values of a maximum choose nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores: torch.Tensor = self.head(self.pooled(x).max(1).values)
        return scores, scores.argmax(-1)


def test_a_choice_that_no_product_depends_on() -> None:
    assert [r.site.name for r in quantize(Greedy().eval(), [torch.randn(2, 5, 8)]).record.sites] == ["pooled", "head"]


class Parts(nn.Module):
    """A function of x [R, 8], of the scores of a router [R, 4], of the results of four experts [R, 4, 8]."""

    def __init__(self, function: Callable[[Parts, torch.Tensor, torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.router, self.experts, self.table = nn.Linear(8, 4), nn.Linear(8, 32), nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, x, self.router(x), self.experts(x).unflatten(-1, (4, 8)))


def _one_by_one(m: Parts, x: torch.Tensor, scores: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    values, indices = scores.softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for i in range(4):
        out = out + (values * (indices == i)).sum(-1, keepdim=True) * each[:, i]
    return out


def _weighted(scores: torch.Tensor, kept: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    return (torch.where(kept, scores, -torch.inf).softmax(-1)[..., None] * each).sum(-2)


COMBINED: dict[str, Callable[[Parts, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one by one": _one_by_one,
    "gather": lambda m, x, s, each: each.gather(-2, s.argmax(-1)[:, None, None].expand(-1, 1, 8))[:, 0],
    "index": lambda m, x, s, each: each[torch.arange(x.shape[0]), s.argmax(-1)],
    "one hot": lambda m, x, s, each: (F.one_hot(s.argmax(-1), 4)[..., None] * each).sum(-2),
    "scatter": lambda m, x, s, each: (torch.zeros_like(s).scatter(-1, s.topk(2)[1], 1.0)[..., None] * each).sum(-2),
    "least of the best": lambda m, x, s, each: _weighted(s, s >= s.topk(2)[0][:, -1:], each),
    "greatest": lambda m, x, s, each: ((s == s.amax(-1, keepdim=True)).float()[:, None] @ each)[:, 0],
    "threshold": lambda m, x, s, each: ((s.sigmoid() > 0.5)[..., None] * each).sum(-2),
    "one of two": lambda m, x, s, each: torch.where(s[:, :1] > s[:, 1:2], each[:, 0], each[:, 1]),
    "sign": lambda m, x, s, each: torch.where(s[:, :1] > 0, x, -x) + each.sum(-2),
    "table": lambda m, x, s, each: m.table(s.argmax(-1)) + each.sum(-2),
}


@pytest.mark.parametrize("name", swept(COMBINED, ("one by one", "gather", "least of the best", "greatest", "threshold", "table")))
def test_what_takes_other_values_or_leaves_them_is_not_rounded(name: str) -> None:
    small = quantize(Parts(COMBINED[name]).eval(), [torch.randn(6, 8)], preset="int8-dynamic")
    assert (_names(small), _choosing(small)) == (["experts"], ["router"])


class Gated(nn.Module):
    """A function of the products a, b and x, and a product of its result."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.function(self.a(x), self.b(x), x, mask))
        return result


def _hard(h: torch.Tensor) -> torch.Tensor:
    return torch.where(h <= -3, 0.0, torch.where(h >= 3, 1.0, h / 6 + 0.5))


def _sparsemax(h: torch.Tensor) -> torch.Tensor:
    values = h.sort(-1, descending=True)[0]
    sums = values.cumsum(-1)
    count = (1 + torch.arange(1, 9) * values > sums).sum(-1, keepdim=True)
    return (h - (sums.gather(-1, count - 1) - 1) / count).clamp_min(0)


ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda a, b, x, mask: torch.where(a > 0, a, torch.zeros_like(x)) * b,
    "relu by mask": lambda a, b, x, mask: a * (a > 0) * b,
    "relu of a residual": lambda a, b, x, mask: torch.where(x + a > 0, x + a, 0.0) * b + x,
    "relu6": lambda a, b, x, mask: torch.where(a > 6, 6.0, torch.where(a < 0, 0.0, a)) * b,
    "leaky relu": lambda a, b, x, mask: torch.where(a >= 0, a, 0.1 * a) * b,
    "softshrink": lambda a, b, x, mask: torch.where(a > 0.5, a - 0.5, torch.where(a < -0.5, a + 0.5, 0.0)) * b,
    "hardshrink": lambda a, b, x, mask: torch.where(a.abs() > 0.5, a, 0.0) * b,
    "softplus": lambda a, b, x, mask: torch.where(a > 20, a, a.exp().log1p()) * b,
    "hardswish": lambda a, b, x, mask: a * _hard(a) * b,
    "squeeze and excite": lambda a, b, x, mask: _hard(a.mean(1, keepdim=True)) * b,
    "window": lambda a, b, x, mask: (((a > 0) & (a < 1)) * a + (a >= 1).float()) * b,
    "greater of two": lambda a, b, x, mask: torch.where(a > b, a, b) * x,
    "sparsemax": lambda a, b, x, mask: _sparsemax(a) * b,
    "signs": lambda a, b, x, mask: a + (torch.where(a > 0, 1.0, -1.0) - a).detach() + b,
    "spikes": lambda a, b, x, mask: (((a - (a > 1).float()) * 0.9 + b) > 1).float(),
    "norm": lambda a, b, x, mask: a / torch.where(a.norm(dim=-1, keepdim=True) == 0, 1.0, a.norm(dim=-1, keepdim=True)) * b,
    "no NaN": lambda a, b, x, mask: torch.where(a != a, 0.0, torch.where(a.abs() == torch.inf, 0.0, a)) * b,
    "padding": lambda a, b, x, mask: torch.where(mask[..., None] > 0, a, 0.0) * b,
    "attention": lambda a, b, x, mask: (a @ b.mT).masked_fill(mask[:, None] == 0, -1e9).softmax(-1) @ x,
}


SHOWN = ("relu", "leaky relu", "squeeze and excite", "greater of two", "sparsemax", "padding")


@pytest.mark.parametrize("name", swept(ACTIVATIONS, SHOWN))
def test_activations_spelled_by_comparisons_choose_nothing(name: str) -> None:
    batch = (torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.long))
    small = quantize(Gated(ACTIVATIONS[name]).eval(), [batch], preset="int8-dynamic")
    assert (_names(small), _choosing(small)) == (["a", "b", "last"], [])


HEADS: dict[str, Callable[[Parts, torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "class": lambda m, x, s, each: (each, s.argmax(-1)),
    "class beside values": lambda m, x, s, each: torch.cat([each.flatten(1), s.argmax(-1, keepdim=True).float()], 1),
    "class where it counts": lambda m, x, s, each: (each, torch.where(x[:, 0] > 0, s.argmax(-1), -100)),
    "vector": lambda m, x, s, each: (each, m.table(s.argmax(-1))),
    "more likely than not": lambda m, x, s, each: (each, s.sigmoid() > 0.5),
    "none at all": lambda m, x, s, each: (each, s * (s > s.mean())),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_choice_that_is_the_result(name: str) -> None:
    small = quantize(Parts(HEADS[name]).eval(), [torch.randn(6, 8)], preset="int8-dynamic")
    assert (_names(small), _choosing(small)) == (["router", "experts"], [])


def _names(small: QuantizedModule) -> list[str]:
    return [item.site.name for item in small.record.sites]


def _choosing(small: QuantizedModule) -> list[str]:
    return [item.name for item in small.record.left_out if item.reason.startswith("it chooses")]
