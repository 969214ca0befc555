"""Sizes of 0 and 1 where a dimension may have any size: as eager, or refused; and integer arguments of any sign."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.testing import assert_close

import sashiko
from sashiko import InputError
from tests.sweeps import swept

Function = Callable[[torch.Tensor], torch.Tensor]

# The least size of the first dimension that is served, of a tensor [n, 4].
LEAST: dict[str, tuple[int, Function]] = {
    "elements": (0, lambda x: x * 2 + x.shape[0]),
    "sum": (0, lambda x: x.sum(0)),
    "softmax": (0, lambda x: x.softmax(0)),
    "product": (0, lambda x: x.t() @ x),
    "concatenation": (0, lambda x: torch.cat([x, x.flip(0)])),
    "rows": (0, lambda x: F.layer_norm(x, (4,)).sort(0)[0]),
    "squares": (0, lambda x: x.reshape(-1, 2, 2).transpose(1, 2).reshape(x.shape[0], 4)),
    "counted": (0, lambda x: x + torch.arange(0, 4, 1)),
    "first": (1, lambda x: x[0]),
    "last": (1, lambda x: x[-1:]),
    "maximum": (1, lambda x: x.amax(0)),
    "largest so far of the maximum": (1, lambda x: x.amax(0).cummax(0)[0]),
    "place of the maximum": (1, lambda x: x.argmax(0)),
    "quotient": (1, lambda x: torch.ones(4) * (7 // x.shape[0])),
    "chosen": (1, lambda x: x[torch.tensor([0, 0])]),
    "gathered": (1, lambda x: x.gather(0, torch.zeros(1, 4, dtype=torch.int64))),
    "written": (1, lambda x: x.index_copy(0, torch.tensor([0]), torch.ones(1, 4))),
    "padded": (1, lambda x: F.pad(x.t()[None], (1, 1), mode="replicate")),
    "enlarged": (1, lambda x: F.interpolate(x.t()[None], size=9, mode="linear")),
    "means": (1, lambda x: F.adaptive_avg_pool1d(x.t()[None], 3)),
    "of all elements": (2, lambda x: x.flatten()[4:8]),
    "second": (2, lambda x: x[1]),
    "second last": (2, lambda x: x[-2]),
    "first two": (2, lambda x: x[0:2]),
    "windows": (2, lambda x: x.unfold(0, 2, 1)),
    "diagonal of one column": (1, lambda x: x[:, :1].diagonal() + 1),
    "diagonal of two": (0, lambda x: x[:, :2].diagonal() + 1),
    "largest": (2, lambda x: x.topk(2, 0)[0]),
}


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


SHOWN = (
    "elements", "counted", "softmax", "last", "maximum", "largest so far of the maximum", "chosen", "written", "enlarged", "second last",
    "first two", "diagonal of one column", "largest",
)


@pytest.mark.parametrize("name", swept(LEAST, SHOWN))
def test_sizes_are_served_from_the_least_one_that_operations_bear(name: str) -> None:
    least, function = LEAST[name]
    compiled = sashiko.compile(Applied(function).eval(), (torch.randn(6, 4),), dynamic_shapes=({0: Dim("n", max=9)},))
    for n in (0, 1, 2, 6):
        x = torch.randn(n, 4)
        if n < least:
            with pytest.raises(InputError, match="takes another way for these sizes"):
                compiled(x)
        else:
            assert_close(compiled(x), function(x), equal_nan=True)


@pytest.mark.parametrize("function", [
    lambda x: x[4:].max(0)[0], lambda x: x[4:].min(), lambda x: x[4:].amax((0, 1)), lambda x: x[4:].argmin(0), lambda x: x[4:].aminmax()[1],
])  # fmt: skip
def test_what_is_chosen_from_what_may_be_cut_off(function: Function) -> None:
    compiled = sashiko.compile(Applied(function).eval(), (torch.randn(9, 4),), dynamic_shapes=({0: Dim.AUTO},), strict=True)
    for n in (5, 20):
        x = torch.randn(n, 4)
        assert torch.equal(compiled(x), function(x))
    for n in (1, 4):
        with pytest.raises(InputError, match="takes another way for these sizes"):
            compiled(torch.randn(n, 4))


def test_a_size_of_one_that_a_squeeze_would_drop() -> None:
    compiled = sashiko.compile(Applied(lambda x: x.squeeze()).eval(), (torch.randn(6, 4),), dynamic_shapes=({0: Dim("n", max=9)},))
    assert compiled(torch.randn(5, 4)).shape == (5, 4)
    with pytest.raises(InputError, match="takes another way for these sizes"):
        compiled(torch.randn(1, 4))


def test_sizes_that_are_small_together() -> None:
    """The second element is there unless both sizes are 1."""
    model = Applied(lambda x: x.flatten()[1:2])
    compiled = sashiko.compile(model.eval(), (torch.randn(6, 4),), dynamic_shapes=({0: Dim("n", max=9), 1: Dim("m", max=9)},))
    for sizes in ((1, 2), (3, 1), (2, 2)):
        x = torch.randn(sizes)
        assert_close(compiled(x), model(x))
    with pytest.raises(InputError, match="takes another way for these sizes"):
        compiled(torch.randn(1, 1))


def test_bags_of_any_number_and_length() -> None:
    """PyTorch asks of where they begin, a range in steps of their length, whether these are none or one."""
    model = nn.Sequential(nn.EmbeddingBag(20, 8, mode="sum"), nn.Linear(8, 3)).eval()
    shapes = ({0: Dim("bags", max=64), 1: Dim("length", max=9)},)
    compiled = sashiko.compile(model, (torch.randint(0, 20, (5, 4)),), dynamic_shapes=shapes)
    for sizes in ((5, 4), (1, 4), (4, 1), (1, 1), (0, 4)):
        x = torch.randint(0, 20, sizes)
        assert_close(compiled(x), model(x))
    with pytest.raises(InputError, match="takes another way for these sizes"):
        compiled(torch.zeros(5, 0, dtype=torch.int64))  # a range without a step, to PyTorch


def test_a_small_size_that_others_cannot_make_up_for() -> None:
    """Four rows are there for sizes of 2, for which torch traces, and not for 1 and 2, though for 1 and 3."""
    class Joined(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, y])[2:4] * 2

    shapes = ({0: Dim("n", max=9)}, {0: Dim("m", max=9)})
    compiled = sashiko.compile(Joined().eval(), (torch.randn(6, 4), torch.randn(5, 4)), dynamic_shapes=shapes)
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    assert_close(compiled(x, y), y * 2)
    with pytest.raises(InputError, match="takes another way for these sizes"):
        compiled(x[:1], y)


@pytest.mark.parametrize("function", [
    lambda x: x.diff(dim=1), lambda x: x[:, :0] - 1, lambda x: x[:, None].permute(2, 1, 0)[:, :, :0].sum(0),
    lambda x: x[torch.arange(30)][:, :0] * 2, lambda x: torch.cat([x[:, :0] * 2, x[:, :0].exp()], 1),
    lambda x: x.expand(65, 3).t()[:, :0] * 2,
])
def test_results_without_elements(function: Function) -> None:
    x = torch.randn(65, 1)
    assert_close(sashiko.compile(Applied(function).eval(), (x,))(x), function(x))


def test_positions_that_are_negative_for_small_sizes() -> None:
    class Placed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            start = (x.shape[0] - 5) // 2
            return torch.zeros(start + 4, 3).index_copy(0, torch.arange(start, start + 2), x[:2])

    model = Placed().eval()
    compiled = sashiko.compile(model, (torch.randn(9, 3),), dynamic_shapes=({0: Dim.AUTO},))
    for size in (5, 6, 20):
        x = torch.randn(size, 3)
        assert_close(compiled(x), model(x))
    for function in (model, compiled):
        with pytest.raises(IndexError):
            function(torch.randn(4, 3))


def _number(name: str, function: Callable[[torch.Tensor, int], torch.Tensor]) -> object:
    return pytest.param(function, id=name)


@pytest.mark.parametrize("function", [
    _number("roll", lambda x, n: x.roll(n, 0)),
    _number("slice", lambda x, n: x[n:] + 1),
    _number("remainders", lambda x, n: x * (n // 3) + n % 3),
    _number("tensors", lambda x, n: torch.full((3,), n) + torch.full((3,), n, dtype=torch.bool) + x[0]),
    _number("integers", lambda x, n: torch.addcmul(x.int(), x.int(), x.int(), value=n)),
    _number("slope", lambda x, n: F.leaky_relu(x - 3, n) + F.elu(x - 3, n) + F.softplus(x, n)),
    _number("factors", lambda x, n: torch.addmm(x, torch.ones(2, 6), torch.ones(6, 6), alpha=n, beta=n + 1)),
])
@pytest.mark.parametrize("dynamic", swept((None, True), (None,)))
def test_integer_arguments_of_any_sign(function: Callable[[torch.Tensor, int], torch.Tensor], dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(function, backend="sashiko", dynamic=dynamic), torch.arange(6.0)
    for n in (2, 3, -1, 5, -6, 0):
        assert_close(compiled(x, n), function(x, n))


SHIFTED: dict[str, tuple[tuple[int, ...], Function]] = {
    "rows": ((), lambda x: SQUARE(x[:, 1:])),
    "shift": ((), lambda x: torch.cat([x[:, 1:], x[:, :1]], 1) + x),
    "taps": ((1,), lambda x: F.conv1d(x.mT, TAPS)),
    "loss": ((), lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), torch.zeros(x.shape[0] * (x.shape[1] - 1), dtype=torch.int64))),
    "broadcast": ((), lambda x: x[:, 1:] - x[:, 1:].mean(1, keepdim=True) + x[:, :1]),
    "products": ((), lambda x: (x[:, 1:] @ x.mT).softmax(1)),
    "squeezed": ((2,), lambda x: x[:, 1:].squeeze(1) * 2),
    "length": ((1,), lambda x: x / (x[:, 2:].shape[1] + 0.5)),
    "one left": ((1, 2), lambda x: x[:, 2:].amax(1)),
    "asked": ((2,), lambda x: x[:, 1:] * 2 if x.shape[1] - 1 == 1 else x[:, 1:] + 1),
}
TAPS, SQUARE = torch.randn(8, 8, 2), nn.Linear(8, 8)


@torch.no_grad()
@pytest.mark.parametrize("name", swept(SHIFTED, ("shift", "loss", "squeezed", "length", "one left")))
def test_computed_sizes_of_one(name: str) -> None:
    """Lengths of all but one or two: PyTorch asks whether they are 1, the model does not."""
    refused, function = SHIFTED[name]
    shapes = {0: Dim("batch", max=9), 1: Dim.AUTO if refused else Dim("n", max=64)}
    model = Applied(function).eval()
    compiled = sashiko.compile(model, (torch.randn(3, 9, 8),), dynamic_shapes=(shapes,))
    for n in (1, 2, 3, 20):
        x = torch.randn(2, n, 8)
        if n in refused:
            with pytest.raises(InputError):
                compiled(x)
        else:
            assert_close(compiled(x), function(x), equal_nan=True)


@torch.no_grad()
def test_one_item_of_rows_that_are_equally_many() -> None:
    """Whose operands do not broadcast, as those of sizes would that the trace does not take for equal."""
    class Weighted(nn.Module):
        def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return (x[:, 1:].reshape(-1, 8) * weights[:, 1:].reshape(-1, 1)).sum(0)

    model, free = Weighted().eval(), {0: Dim.AUTO, 1: Dim.AUTO}
    compiled = sashiko.compile(model, (torch.randn(3, 5, 8), torch.randn(3, 5)), dynamic_shapes=(free, free))
    for sizes in ((1, 5), (2, 2), (1, 2), (4, 7)):
        x, weights = torch.randn(*sizes, 8), torch.randn(sizes)
        assert_close(compiled(x, weights), model(x, weights))


@torch.no_grad()
def test_a_quantized_model_takes_computed_sizes_of_one() -> None:
    model = nn.Sequential(Applied(lambda x: x[:, 1:]), nn.Linear(8, 8)).eval()
    small = sashiko.quantize(model, [torch.randn(2, 9, 8)], progress=False)
    for n in (2, 3, 12):
        x = torch.randn(3, n, 8)
        assert_close(small(x), model(x), rtol=0, atol=0.2)


@torch.no_grad()
def test_a_computed_size_that_is_one_stays_so() -> None:
    model = Applied(lambda x: x[:, 1:].squeeze(1) * 2)
    compiled = sashiko.compile(model.eval(), (torch.randn(3, 2, 8),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    x = torch.randn(2, 2, 8)
    assert_close(compiled(x), model(x))
    with pytest.raises(InputError, match="expected 2"):
        compiled(torch.randn(2, 3, 8))
