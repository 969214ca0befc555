"""What a model asks of its sizes: another way for a size of 1 is seen, and counts where it gives another result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError, Unsupported
from tests.driver.functions import Apply

OTHER_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "equal": lambda x: x * 3 if x.shape[0] == 1 else x * 2,
    "larger": lambda x: x * 2 if x.shape[0] > 1 else x * 3,
    "of two sizes": lambda x: x * 2 if x.shape[0] * x.shape[1] > 8 else x * 3,
    "largest": lambda x: x * max(x.shape[0], 2) - (x if x.shape[0] == 1 else 0),
}
OTHER_WAYS |= {
    "no question": lambda x: x * 2 if x.shape[0] - 1 else x * 3,
    "not": lambda x: x * 3 if not x.shape[0] // 2 else x * 2,
    "contiguous": lambda x: x * 2 if x.t().is_contiguous() else x * 3,
    "contiguous by a stride": lambda x: x * 2 if x.t().contiguous()[:, 0].is_contiguous() else x * 3,
    "divided": lambda x: x * 3 if x.shape[0] == 1 or 12 // (x.shape[0] - 1) > 50 else x * 2,
}
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda x: x + torch.full((x.shape[0], x.shape[0]), -9.0).triu(1).sum(1, keepdim=True) if x.shape[0] > 1 else x,
    "as it is": lambda x: x.reshape(-1, 8) if x.shape[0] != 1 else x,
}


def compiled(function: Callable[[Tensor], Tensor], free: object) -> Callable[[Tensor], Tensor]:
    return sashiko.compile(Apply(function).eval(), torch.randn(3, 8), dynamic_shapes={"args": ({0: free},)})


@pytest.mark.parametrize("free", [Dim("n", max=9), Dim.AUTO], ids=["declared", "found"])
@pytest.mark.parametrize("name", OTHER_WAYS)
def test_another_way_for_one_is_refused(name: str, free: object) -> None:
    model = compiled(OTHER_WAYS[name], free)
    for rows in (2, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(model(x), OTHER_WAYS[name](x))
    with pytest.raises(InputError, match="takes another way for these sizes"):
        model(torch.randn(1, 8))


@pytest.mark.parametrize("name", SAME)
def test_another_way_with_the_same_result_is_none(name: str) -> None:
    model = compiled(SAME[name], Dim.AUTO)
    for rows in (1, 2, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(model(x), SAME[name](x))


@pytest.mark.parametrize("function", [
    lambda x: x * 3 if x.shape[0] == 1 and x.shape[1] == 1 else x * 2, lambda x: x * 3 if x.numel() == 1 else x * 2,
])  # fmt: skip
def test_several_sizes_of_one(function: Callable[[Tensor], Tensor]) -> None:
    sizes = {"args": ({0: Dim("n", max=9), 1: Dim("m", max=9)},)}
    model = sashiko.compile(Apply(function).eval(), torch.randn(3, 8), dynamic_shapes=sizes)
    for rows, columns in ((1, 8), (3, 1), (2, 2)):
        torch.testing.assert_close(model(x := torch.randn(rows, columns)), function(x))
    with pytest.raises(InputError, match="takes another way for these sizes"):
        model(torch.randn(1, 1))


@pytest.mark.parametrize("quantized", [False, True], ids=["compiled", "quantized"])
def test_sizes_that_are_equal_are_tried_together(quantized: bool) -> None:
    """One of them alone is what the model does not bear."""

    def compared(x: Tensor, y: Tensor) -> Tensor:
        u, v = torch.chunk(torch.cat([x, y]) * 2, 2)
        if u.shape != v.shape:
            raise ValueError("other batches")
        return u - v + x

    model, args = Apply(compared).eval(), (torch.randn(2, 8), torch.randn(2, 8))
    free = {"args": ({0: Dim.AUTO}, {0: Dim.AUTO})}
    served = sashiko.quantize(model, [args]) if quantized else sashiko.compile(model, args, dynamic_shapes=free)
    for rows in (1, 3):
        x, y = torch.randn(2, rows, 8)
        torch.testing.assert_close(served(x, y), compared(x, y))
    with pytest.raises(InputError):
        served(torch.randn(2, 8), torch.randn(1, 8))


def test_of_numbers_that_do_not_tell() -> None:
    """An example of zeros, a mask of ones."""
    ways: tuple[Callable[..., Tensor], ...] = (
        lambda x, mask: x * 3 if x.shape[0] == 1 else x * 2, lambda x, mask: x + 1 if x.shape[0] == 1 else (x + 1) * mask,
    )
    shapes = {"args": ({0: Dim.AUTO}, {0: Dim.AUTO})}
    for way in ways:
        model = sashiko.compile(Apply(way).eval(), (torch.zeros(3, 8), torch.ones(3, 8, dtype=torch.long)), dynamic_shapes=shapes)
        with pytest.raises(InputError, match="takes another way for these sizes"):
            model(torch.randn(1, 8), torch.ones(1, 8, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.int8, torch.bool], ids=str)
def test_other_numbers_of_any_type(dtype: torch.dtype) -> None:
    """Of which some are refused, but not for being tried."""
    x = torch.ones(3, 8).to(dtype)
    function = lambda x: x.to(torch.float32) * (2 if x.shape[0] == 1 else 3)  # noqa: E731
    try:
        model = sashiko.compile(Apply(function).eval(), x, dynamic_shapes={"args": ({0: Dim.AUTO},)})
    except Unsupported as error:
        assert str(dtype) in str(error)
        return
    torch.testing.assert_close(model(x), function(x))
    with pytest.raises(InputError, match="takes another way for these sizes"):
        model(x[:1])


def test_sizes_that_may_not_be_one_are_not_tried() -> None:
    function = lambda x: x * 2 if 12 % (x.shape[0] - 1) == 0 else x * 3  # noqa: E731
    model = compiled(function, Dim.AUTO)
    torch.testing.assert_close(model(x := torch.randn(5, 8)), function(x))
    asked = Counts().eval()
    sashiko.compile(asked, torch.randn(4, 8), dynamic_shapes=({0: Dim("n", min=3, max=9)},))
    assert asked.calls == 0


def test_what_is_written_into_arguments_is_a_result_and_not_lost() -> None:
    def write(x: Tensor, kept: Tensor) -> Tensor:
        kept[:, :1] = x[:, :1] if x.shape[0] > 1 else x[:, :1] * 2
        return kept.sum(1)

    kept = torch.zeros(3, 8)
    model = sashiko.compile(Apply(write).eval(), (torch.randn(3, 8), kept), dynamic_shapes={"args": ({0: Dim.AUTO}, {0: Dim.AUTO})})
    assert not kept.any()
    with pytest.raises(InputError, match="takes another way for these sizes"):
        model(torch.randn(1, 8), torch.zeros(1, 8))


def test_what_pytorch_asks_is_no_way_of_the_model() -> None:
    model = compiled(lambda x: x.transpose(0, 1).reshape(8, -1).expand(8, x.shape[0]) + torch.ones(8, 1), Dim.AUTO)
    assert model(torch.randn(1, 8)).shape == (8, 1)


class Counts(nn.Module):
    """Writes down how often it is called, which finding out leaves as it was."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layer(x)
        return y if x.shape[0] > 1 else y + self.calls


def test_of_a_quantized_model_with_state() -> None:
    model = Counts().eval()
    small = sashiko.quantize(model, [torch.randn(4, 8)], progress=False)
    assert model.calls == 0
    with pytest.raises(InputError, match="takes another way for these sizes"):
        small(torch.randn(1, 8))
    small(torch.randn(2, 8))
