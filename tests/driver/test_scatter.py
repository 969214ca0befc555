"""Elements that are put together with what is there: sums, products and extremes by index, as graphs' neighbours are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph
from sashiko.graph.types import f32, i64
from tests.driver.functions import Apply, left

NODES, EDGES, WIDTH = 50, 200, 33
Made = Callable[..., torch.Tensor]


def wide(i: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return i[:, None].expand_as(like)


ALIKE: dict[str, Made] = {
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "times a number": lambda x, i, s: x.index_add(0, i, s, alpha=-0.5),
    "into zeros": lambda x, i, s: torch.zeros(NODES, WIDTH).index_add_(0, i, s),
    "scatter_add": lambda x, i, s: x.scatter_add(0, wide(i, s), s),
    "largest": lambda x, i, s: x.scatter_reduce(0, wide(i, s), s, "amax"),
    "smallest": lambda x, i, s: x.scatter_reduce(0, wide(i, s), s, "amin"),
    "product": lambda x, i, s: x.scatter_reduce(0, wide(i, s), s, "prod"),
    "mean": lambda x, i, s: x.scatter_reduce(0, wide(i, s), s, "mean"),
    "largest of new ones": lambda x, i, s: x.scatter_reduce(0, wide(i, s), s, "amax", include_self=False),
    "product of new ones": lambda x, i, s: x.scatter_reduce(0, wide(i, s), s, "prod", include_self=False),
    "mean of new ones": lambda x, i, s: x.scatter_reduce(0, wide(i, s), s, "mean", include_self=False),
    "indexed": lambda x, i, s: x.index_put((i - 20,), s, accumulate=True),
    "twice": lambda x, i, s: x.index_add(0, i, s).index_add(0, (i + 3) % NODES, s * 2) + x,
    "of itself": lambda x, i, s: x.index_add(0, i, x[i.flip(0)]),
    "along columns": lambda x, i, s: x.t().contiguous().index_add(1, i, s.t()),
    "of a permutation": lambda x, i, s: x.t().index_add(1, i, s.t()),
    "one": lambda x, i, s: x.index_add(0, i[:1], s[:1]),
    "few columns": lambda x, i, s: x[:, :3].index_add(0, i, s[:, 5:8]),
    "of a batch": lambda x, i, s: x.expand(2, -1, -1).index_add(1, i, torch.stack([s, s + 1])),
}
NEAR: dict[str, Made] = {  # with sums inside that are taken in another order
    "of what is computed": lambda x, i, s: x.index_add(0, i, torch.relu(s[i] * 2) + s.mean(1, keepdim=True)),
    "of rows that are reduced": lambda x, i, s: x.index_add(0, i, s.softmax(1)),
    "of all that is reduced": lambda x, i, s: x.index_add(0, i, s.flatten().softmax(0).view_as(s) * 100),
    "of sums": lambda x, i, s: x.index_add(0, i, torch.stack([s, s * 2], 1).sum(1)),
    "of products": lambda x, i, s: x.index_add(0, i, s @ s[:WIDTH]),
    "where something is largest": lambda x, i, s: x.index_add(0, (s + 1).argmax(1), s),
}
KINDS = {"sum": "sum", "prod": "prod", "max": "amax", "min": "amin"}


def given(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(7)
    x, s = (torch.randn(n, WIDTH, generator=drawn) for n in (NODES, EDGES))
    return (x if dtype.is_floating_point else x * 9).to(dtype), torch.randint(0, NODES, (EDGES,), generator=drawn), \
        (s if dtype.is_floating_point else s * 9).to(dtype)


@pytest.mark.parametrize("name", [*ALIKE, *NEAR])
def test_elements_are_put_together(name: str) -> None:
    """One after another, so that the sums are those of PyTorch to the last bit."""
    model, args = Apply((ALIKE | NEAR)[name]).eval(), given()
    fast = sashiko.compile(model, args)
    bound = 0.0 if name in ALIKE else 1e-5
    assert_close(fast(*args), model(*args), rtol=bound, atol=bound)
    assert left(fast) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.parametrize("name", ["index_add", "largest", "smallest", "product"])
def test_in_other_types(name: str, dtype: torch.dtype) -> None:
    model, args = Apply(ALIKE[name]).eval(), given(dtype)
    assert_close(sashiko.compile(model, args)(*args), model(*args), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_width_are_rounded_once(dtype: torch.dtype) -> None:
    x, i, s = given(dtype)
    fast = sashiko.compile(Apply(ALIKE["index_add"]).eval(), (x, i, s))
    assert_close(fast(x, i, s), x.float().index_add(0, i, s.float()).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, s: x[:, 0].index_add(0, i, s[:, 0]),
        lambda x, i, s: x.scatter_add(0, wide(i, s).roll(1, 1) * torch.ones(WIDTH, dtype=torch.int64), s),
        lambda x, i, s: x.scatter_add(1, wide(i[:NODES], x) % WIDTH, s[:NODES]),
    ],
)
def test_elements_that_go_one_by_one_are_left_to_pytorch(function: Made) -> None:
    """It is faster at them."""
    model, args = Apply(function).eval(), given()
    fast = sashiko.compile(model, args)
    assert_close(fast(*args), model(*args))
    assert len(left(fast)) == 1


def test_positions_that_are_not_there() -> None:
    x, i, s = given()
    fast = sashiko.compile(Apply(ALIKE["index_add"]).eval(), (x, i, s))
    for wrong in (NODES, -1):
        with pytest.raises(IndexError):
            fast(x, i.index_fill(0, torch.tensor([77]), wrong), s)


@pytest.mark.parametrize("batch", [(2, 3), (3,)], ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_places_in_a_plane(axes: int, batch: tuple[int, ...]) -> None:
    """A place beyond the end of one is none in the next."""
    pool, unpool = (getattr(torch.nn.functional, f"max_{kind}{axes}d") for kind in ("pool", "unpool"))
    model = Apply(lambda x, places: unpool(x, places, 2, output_size=[5] * axes))
    x, places = pool(torch.randn(*batch, *[4] * axes, generator=torch.Generator().manual_seed(0)), 2, return_indices=True)
    fast = sashiko.compile(model.eval(), (x, places), strict=True)
    assert torch.equal(fast(x, places), model(x, places))
    for wrong in (-1, 5**axes):
        with pytest.raises(IndexError):
            fast(x, places.masked_fill(places == places.flatten()[0], wrong))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("value", [3.7, torch.tensor(2.5)], ids=["number", "tensor"])
def test_one_number_at_places_from_both_ends(value: Any, dtype: torch.dtype) -> None:
    model = Apply(lambda x, i: (x.index_fill(1, i, value), x.clone().index_fill_(-2, i, value), x[0, 0].index_fill(0, i[:1] % 1, value)))
    x = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * 9).abs().to(dtype)
    shapes = (({0: Dim("rows", min=2)}, {0: Dim("places")}),)
    fast = sashiko.compile(model.eval(), (x, torch.tensor([0, -1])), dynamic_shapes=shapes, strict=True)
    for places in ([0, -1], [-3, 2, 2, 1], [1]):
        for got, expected in zip(fast(x, torch.tensor(places)), model(x, torch.tensor(places)), strict=True):
            assert torch.equal(got, expected)
    for wrong in (-4, 3):
        with pytest.raises(IndexError):
            fast(x, torch.tensor([0, wrong]))


def test_any_number_of_them() -> None:
    model, (x, i, s) = Apply(ALIKE["index_add"]).eval(), given()
    fast = sashiko.compile(model, (x, i, s), dynamic_shapes=(({0: Dim("nodes")}, {0: Dim("edges")}, {0: Dim("edges")}),))
    for nodes, edges in ((NODES, EDGES), (7, 3), (200, 900), (3, 0)):
        args = torch.randn(nodes, WIDTH), torch.randint(0, nodes, (edges,)), torch.randn(edges, WIDTH)
        assert_close(fast(*args), model(*args), rtol=0, atol=0)


@pytest.mark.parametrize("nodes", [40, 20000])
def test_two_threads_do_not_meet(nodes: int) -> None:
    """Rows of which several go to one place are one thread's."""
    args = torch.randn(nodes, 64), torch.randint(0, 40, (20000,)), torch.randn(20000, 64)
    model = Apply(lambda x, i, s: x.index_add(0, i, torch.tanh(s))).eval()
    fast, before = sashiko.compile(model, args), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = [fast(*args) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    for result in results:
        assert_close(result, results[0], rtol=0, atol=0)
    assert_close(results[0], model(*args), rtol=1e-5, atol=1e-4)


def test_in_place() -> None:
    def step(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        x.index_add_(0, i, s)
        return x.sum(1)

    (x, i, s), model = given(), Apply(step).eval()
    fast, mine, theirs = sashiko.compile(model, (x.clone(), i, s)), x.clone(), x.clone()
    for _ in range(2):
        assert_close(fast(mine, i, s), model(theirs, i, s))
    assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter(kind: str) -> None:
    x, i, s = given()
    values = b.input_(0, f32, (NODES, WIDTH)), b.input_(1, i64, (EDGES,)), b.input_(2, f32, (EDGES, WIDTH))
    made = b.put(values[0], values[2], {0: b.unsqueeze(values[1], 1)}, kind)
    [got] = run(Graph(values, (made,)), [x, i, s])
    assert_close(got, x.scatter_reduce(0, wide(i, s), s, KINDS[kind]))


def test_places_whose_number_is_a_product_of_quotients() -> None:
    """As a mask of blocks is made: the positions are made as a whole where their elements lie too far out of order."""

    def blocks(x: torch.Tensor, size: int) -> torch.Tensor:
        many = (x.shape[1] + size - 1) // size
        batch, rows, columns = torch.arange(x.shape[0])[:, None, None], torch.arange(many)[:, None], torch.arange(many)
        out = x.new_zeros(x.shape[0], many, many + 1)
        out[batch, rows, columns] = 1.0
        return out

    x = torch.zeros(3, 300)
    assert torch.equal(torch.compile(blocks, backend="sashiko", dynamic=True)(x, 128), blocks(x, 128))
