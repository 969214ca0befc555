"""What PyTorch decides by, asked of the sizes of a call."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.graph.dims import symbol
from sashiko.graph.symbols import Assumption, Symbols
from tests.graph.captures import capture, module

A, B = sympy.symbols("a b", integer=True, positive=True)


@pytest.mark.parametrize(
    "decided",
    [
        sympy.Or(sympy.Eq(A, 3), sympy.Eq(sympy.Mod(A, 4), 0)),
        sympy.Or(A > 3, sympy.And(sympy.Ne(A, B), B <= 2)),
        sympy.And(sympy.Or(A >= B, sympy.Ne(B, 4)), sympy.Or(sympy.Eq(A, 2), B > 1, A < B)),
    ],
    ids=str,
)
def test_one_of_several_relations(decided: sympy.Basic) -> None:
    """An assumption for it holds for the very sizes that it is true of."""
    assumed = list(Symbols(None)._assumed(decided))
    held = {(a, b): all(each.holds({"a": a, "b": b}) for each in assumed) for a in range(1, 9) for b in range(1, 7)}
    assert held == {(a, b): bool(decided.subs({A: a, B: b})) for a, b in held}
    assert {True, False} == set(held.values())


@pytest.mark.parametrize("relation", ["==", "!=", ">="])
@pytest.mark.parametrize("constant", range(-8, 3))
def test_what_goes_without_saying_holds_for_all_sizes(relation: str, constant: int) -> None:
    a, b = symbol("a", 2, 4), symbol("b", 1, 3)
    for dim in (a + b + constant, a - b + constant, a * b + constant, a - a + constant):
        assumption = Assumption(dim, relation)
        held = [assumption.holds({"a": x, "b": y}) for x in (2, 3, 4) for y in (1, 2, 3)]
        assert assumption.evident == all(held) or relation == "!="  # what is between two bounds may be left out
        assert all(held) or not assumption.evident


class Positions(nn.Module):
    """Sizes of one argument, of which another one's numbers are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.query = nn.Embedding(50, 96), nn.Linear(96, 96)
        self.register_buffer("table", torch.randn(100, 96))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length = mask.shape
        x = self.words(ids) + self.table.index_select(0, ids.view(-1)).view(batch, length, 96)
        q = self.query(x).view(batch, length, -1, 24).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, mask[:, None, None, :].bool())


@pytest.mark.parametrize("sizes", [(Dim("batch", min=1, max=8), Dim("length", min=4, max=64)), (Dim.AUTO, Dim.AUTO)], ids=["named", "auto"])
@torch.no_grad()
def test_sizes_that_are_equal_by_products_of_them(sizes: Any) -> None:
    """PyTorch finds that the products are equal, then that the first factors are, and never says so of the others."""
    torch.manual_seed(0)
    model = Positions().eval()

    def example(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(50, (batch, length)), torch.ones(batch, length, dtype=torch.int64)

    small = sashiko.quantize(model, [example(2, 13)] * 2, progress=False)
    free = dict(enumerate(sizes))
    for fast, own in ((sashiko.compile(model, example(2, 13), dynamic_shapes=(free, free), strict=True), model),
                      (sashiko.compile(small, example(2, 13), dynamic_shapes=(free, free)), small)):
        for batch, length in ((2, 13), (3, 21), (8, 64)):
            x = example(batch, length)
            assert_close(fast(*x), own(*x), rtol=1e-5, atol=1e-5 if own is model else 0.05)
        with pytest.raises(sashiko.InputError, match="mask"):
            fast(example(2, 12)[0], example(2, 24)[1])
        with pytest.raises(sashiko.InputError, match="mask"):
            fast(example(4, 6)[0], example(2, 12)[1])


class Slopes(nn.Module):
    """A bias for each head, as ALiBi's: one of the batch is as many as the other has."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[0], mask.shape[1]
        bias = (mask[:, None, :] * torch.arange(4.0)[:, None]).reshape(mask.shape[0] * 4, 1, length).reshape(batch, -1, 1, length)
        return nn.functional.scaled_dot_product_attention(x.view(batch, 4, 1, 16), v, v, attn_mask=bias)


@torch.no_grad()
def test_sizes_that_are_equal_by_quotients_of_them() -> None:
    """A batch of 1 and then another one, so that `torch.compile` does not know that both are the same."""

    def example(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(batch, 64), torch.randn(batch, length), torch.randn(batch, 4, length, 16)

    auto = {0: Dim.AUTO, 1: Dim.AUTO}
    whole = sashiko.compile(Slopes().eval(), example(2, 3), dynamic_shapes=({0: Dim.AUTO}, auto, {0: Dim.AUTO, 2: Dim.AUTO}))
    backend = torch.compile(Slopes().eval(), backend="sashiko", dynamic=True)
    for sizes in ((1, 3), (3, 5), (4, 9)):
        x = example(*sizes)
        wanted = Slopes()(*x)
        assert_close(backend(*x), wanted)
        if sizes[0] > 1:
            assert_close(whole(*x), wanted)


def test_sizes_times_a_number_that_may_be_zero() -> None:
    """Equal products say nothing of the sizes there."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, times: int) -> torch.Tensor:
            return x.sum() + y.sum() if x.shape[0] * times == y.shape[0] * times else x.sum() - y.sum()

    model, free = Scaled().eval(), {0: Dim.AUTO}
    fast = sashiko.compile(model, (torch.ones(5, 3), torch.ones(5, 3), 7), dynamic_shapes=(free, free, Dim.AUTO))
    for rows, others, times in ((5, 5, 7), (4, 4, 3), (4, 6, 0)):
        assert_close(fast(torch.ones(rows, 3), torch.ones(others, 3), times), model(torch.ones(rows, 3), torch.ones(others, 3), times))
    with pytest.raises(sashiko.InputError, match="takes another way"):
        fast(torch.ones(4, 3), torch.ones(6, 3), 2)


class Counted(nn.Module):
    """As many rows as Python counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(range(x.shape[0] // 4)), 4, -1) * 2


@pytest.mark.parametrize("size", [4 * Dim("rows", max=16), Dim.DYNAMIC], ids=["multiple", "free"])
def test_a_declared_size_that_equations_fix_is_refused(size: Any) -> None:
    """torch takes it for one that there are others of."""
    with pytest.raises(sashiko.InputError, match=r"L\['x'\].size\(\)\[0\] is free there, and the model fixes it to 8") as caught:
        capture(Counted().eval(), (torch.randn(8, 3),), shapes=({0: size},))
    assert caught.value.where == f"{__file__}:{Counted.forward.__code__.co_firstlineno + 1}"


def test_what_the_model_decides_is_told_of_the_sizes_of_a_call() -> None:
    captured = capture(Counted().eval(), (torch.randn(8, 3),), shapes=({0: Dim.AUTO},))
    assert captured.graph.inputs[0].shape == (8, 3)
    quarters = module(lambda self, x, y: x.view(-1, 4, 3) * y.sum() if x.shape[0] > y.shape[0] else x)
    fast = sashiko.compile(quarters, (torch.randn(12, 3), torch.randn(5)), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    with pytest.raises(sashiko.InputError, match=r"and here x.shape\[0\] = 8, y.shape\[0\] = 9\n"):
        fast(torch.randn(8, 3), torch.randn(9))
