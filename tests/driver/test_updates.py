"""Models that write into their arguments and buffers: the tensors of the caller are updated as eager PyTorch updates them, in place where
that is possible, and nothing else shares their memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.runtime.segments import written

Step = Callable[..., Any]
CACHE, TWO, ONE = (2, 3, 10, 4), (2, 3, 2, 4), (2, 3, 4)


class Model(nn.Module):
    """A module of a function."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, *args: torch.Tensor) -> Any:
        return self.step(*args)


def indexed(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c[:, :, p] = k
    return c.sum(-1)


def copied(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c.index_copy_(2, p, k * 2)
    return c * 2, c


def scattered(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c.scatter_(2, p.view(1, 1, 2, 1).expand(k.shape), k)
    return c.amax((0, 1))


def sliced(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c[:, :, 3:7:2] = k
    return c.mean()


def selected(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c[1, :, 4] = k[0, :, 0]
    c[0, :, 4] = k[1, :, 1]
    return c.exp()


def of_every_row(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c[torch.arange(2), :, p] = k[:, :, 0]
    return c.amax(2)


def transposed(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c.transpose(1, 2)[:, p] = k.transpose(1, 2)
    return c.sum()


def in_halves(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c.unflatten(2, (2, -1))[:, :, :, 1] = k
    return c.sum()


def in_pages(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c.view(-1, 4)[p * 7] = k[0, 0]
    return c.sum()


def read_before(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    total = (c * 2).sum((0, 1, 3))
    c.index_copy_(2, p, k + c[:, :, :2])
    return total


def crosswise(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    """Each is written with what the other one was, though nothing reads either afterwards."""
    was, other = c[:, :, :2] * 3, k * 2
    c.index_copy_(2, p, other + 1)
    k.index_copy_(2, p - 3 - torch.tensor([0, 1]), was[:, :, :1].expand(2, 3, 2, 4) * 2)
    return p


def beside_a_late_one(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    """Both have the same positions: one is read afterwards, of the other what was there before."""
    was = k.clone()
    c.index_copy_(2, p, was)
    k.index_copy_(2, (p - 3) // 2, was + 1)
    return c.exp() + was.sum()


def products_before(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    """Each layer of a cache is read between writes into others."""
    x = k[:, :, 0]
    for layer in range(2):
        c[layer].index_copy_(1, p, x.reshape(3, 2, 4))
        x = x + torch.matmul(torch.matmul(x, c[layer].transpose(1, 2)[:1]).softmax(-1), c[layer][:1])
    return x


def attention_before(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    """The same with attention of one query."""
    x = k[:1, :, :1]
    for layer in range(2):
        c[layer].index_copy_(1, p, x.expand(-1, -1, 2, -1)[0])
        x = x + nn.functional.scaled_dot_product_attention(x, c[layer : layer + 1], c[layer : layer + 1])
    return x


def returned(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    c.index_copy_(2, p, k)
    return c.clone(), c.view(-1), c


def read_after(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    old = c + 1
    c.index_copy_(2, p, k)
    return old.exp() * c


def kept(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    before = c.clone()
    c.index_copy_(2, p, k)
    return before, c.sum()


def no_update(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    new = c.index_copy(2, p, k)
    return new, new * 2


def with_pytorch_between(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
    before = torch.linalg.inv(c[0, 0, :4] + 9 * torch.eye(4))
    c.index_copy_(2, p, k @ before)
    return torch.linalg.inv(c[0, 0, :4] + 9 * torch.eye(4))


IN_PLACE = (
    *(indexed, copied, scattered, sliced, selected, of_every_row, transposed, in_halves, in_pages, read_before, crosswise),
    *(beside_a_late_one, products_before, attention_before, returned),
)
COPIED = (read_after, kept, no_update, with_pytorch_between)


def example(seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(CACHE, generator=g), torch.randn(TWO, generator=g), torch.tensor([3, 5])


def updates(fast: sashiko.CompiledModel) -> int:
    """How many arguments are written in place."""
    return len(written(fast.executable.plan))


@pytest.mark.parametrize("step", [*IN_PLACE, *COPIED], ids=lambda f: f.__name__)
def test_arguments_are_updated_as_in_eager(step: Step) -> None:
    fast = sashiko.compile(Model(step).eval(), example())
    assert bool(updates(fast)) == (step in IN_PLACE)
    assert step is no_update or (": in place" if step in IN_PLACE else "with a copy of all") in fast.explain()
    for seed in range(1, 4):
        mine, theirs = example(seed), example(seed)
        got, wanted = fast(*mine), step(*theirs)
        assert_close(got, wanted)
        assert_close(mine, theirs)
        assert [t._version > 0 for t in mine] == [t._version > 0 for t in theirs]


def test_what_is_returned_is_the_argument_or_memory_of_its_own() -> None:
    fast = sashiko.compile(Model(returned).eval(), example())
    c, k, p = example(1)
    clone, flat, same = fast(c, k, p)
    assert same is c
    c.zero_()
    assert clone.abs().min() > 0 and flat.abs().min() > 0
    kept_one, _ = sashiko.compile(Model(kept).eval(), example())(c, k, p)
    assert kept_one is not c
    assert kept_one.abs().max() == 0 and c.abs().max() > 0


def test_a_result_in_the_shape_in_which_the_argument_was_written() -> None:
    """It has that shape, and memory of its own."""

    def flat(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = x.view(-1)
        seen[3] = 7.0
        return x, seen.clone()

    fast, mine, theirs = sashiko.compile(Model(flat).eval(), (torch.ones(2, 4),)), torch.ones(2, 4), torch.ones(2, 4)
    got, wanted = fast(mine), flat(theirs)
    assert got[0] is mine and all(map(torch.equal, got, wanted)) and torch.equal(mine, theirs)
    mine.zero_()
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("positions", [[3, 10], [-11, 2]])
def test_a_position_out_of_range_is_reported_and_writes_nothing(positions: list[int]) -> None:
    fast = sashiko.compile(Model(indexed).eval(), example())
    memory = torch.zeros(2, *CACHE)
    with pytest.raises(IndexError, match="out of range"):
        fast(memory[0], torch.ones(TWO), torch.tensor(positions))
    assert memory[1].abs().max() == 0


@pytest.mark.parametrize("step", [copied, transposed, in_halves], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [False, True], ids=["another order", "part of a larger one"])
def test_arguments_that_are_not_row_major(step: Step, rows: bool) -> None:
    fast = sashiko.compile(Model(step).eval(), example())
    c, k, p = example(1)
    mine = c.repeat(1, 2, 1, 1)[:, : len(c[0])] if rows else c.transpose(1, 2).contiguous().transpose(1, 2)
    got, wanted = fast(mine, k, p), step(c, k, p)
    assert_close((got, mine), (wanted, c))
    assert step is not copied or got[1] is mine


def test_arguments_that_share_memory() -> None:
    """Eager refuses this one, too; what else may share memory is in `test_sharing.py`."""

    def step(c: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        c.index_copy_(2, p, k)
        return c.sum()

    fast = sashiko.compile(Model(step).eval(), example())
    memory = example(1)[0]
    before = memory.clone()
    for function in (fast, step):
        with pytest.raises((sashiko.InputError, RuntimeError), match=r"share memory|single memory location"):
            function(memory, memory.view(-1)[:48].view(TWO), torch.tensor([0, 1]))
    assert torch.equal(memory, before)


def test_arguments_that_are_overwritten_with_one_another() -> None:
    def swap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        t = a.clone()
        a.copy_(b)
        b.copy_(t)
        return a - b

    fast = sashiko.compile(Model(swap).eval(), (torch.randn(3), torch.randn(3)))
    mine, theirs = (torch.ones(3), torch.zeros(3)), (torch.ones(3), torch.zeros(3))
    assert_close(fast(*mine), swap(*theirs))
    assert_close(mine, theirs)


class Cached(nn.Module):
    """A decoder's attention with a cache in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.project = nn.Linear(16, 48)
        self.register_buffer("keys", torch.zeros(1, 4, 8, 4))
        self.register_buffer("values", torch.zeros(1, 4, 8, 4))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(1, -1, 3, 4, 4).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = torch.arange(8) <= position.unsqueeze(1)
        out: torch.Tensor = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cache_in_buffers(precision: str) -> None:
    torch.manual_seed(0)
    model = Cached().eval()
    twin = copy.deepcopy(model)
    length = Dim("length", max=8)
    shapes = ({1: length}, {0: length})
    fast = sashiko.compile(model, (torch.randn(1, 3, 16), torch.arange(3)), dynamic_shapes=shapes, precision=precision)
    assert updates(fast) == 2
    near = 2e-2 if precision == "bf16" else 1e-5
    for first, count in ((0, 3), (3, 1), (4, 1), (5, 2)):
        x, position = torch.randn(1, count, 16), torch.arange(first, first + count)
        assert_close(fast(x, position), twin(x, position), atol=near, rtol=near)
        assert_close((model.keys, model.values), (twin.keys, twin.values), atol=near, rtol=near)


def test_a_model_that_updates_arguments_is_saved_and_measured(tmp_path: Path) -> None:
    fast = sashiko.compile(Model(copied).eval(), example())
    c, k, p = example(1)
    before = c.clone()
    assert fast.times(c, k, p, repeat=2)
    assert torch.equal(c, before), "measuring writes into nothing of the caller's"
    fast.save(tmp_path / "model.sashiko")
    loaded = sashiko.load(tmp_path / "model.sashiko")
    got = loaded(c, k, p)
    assert got[1] is c
    assert_close(got, copied(before, k, p))


@pytest.mark.parametrize("step", [copied, read_after, returned], ids=lambda f: f.__name__)
def test_through_torch_compile(step: Step) -> None:
    torch._dynamo.reset()
    fast = torch.compile(Model(step).eval(), backend="sashiko", options={"strict": True}, dynamic=True)
    for seed in range(3):
        mine, theirs = example(seed), example(seed)
        with torch.no_grad():
            assert_close(fast(*mine), step(*theirs))
        assert_close(mine, theirs)


def test_what_one_segment_copies_and_another_writes_into() -> None:
    """The result has the shape of the second, not of the copy."""

    def step(x: torch.Tensor, at: torch.Tensor, row: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[15].index_copy(0, at, row), (x / (by.abs() + 0.5)).unflatten(1, (-1, by.shape[1] + 1))

    args = torch.randn(33, 33, 2), torch.tensor([3]), torch.randn(1, 2), torch.randn(1, 2)
    free = ({0: Dim.AUTO, 1: Dim.AUTO, 2: Dim.AUTO}, {}, {1: Dim.AUTO}, {1: Dim.AUTO})
    fast = sashiko.compile(Model(step).eval(), args, dynamic_shapes=(free,))
    for got, expected in zip(fast(*args), step(*args), strict=True):
        assert_close(got, expected)
    assert len(fast.executable.plan.segments) == 3
