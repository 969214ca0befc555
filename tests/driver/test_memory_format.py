"""Arguments and results that do not lie row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.runtime.plan import NativeSegment
from tests.driver.functions import Apply

LAST = torch.channels_last


class Net(nn.Module):
    """Returns an image, what is pooled, the argument transposed and the image with its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.Conv2d(32, 64, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.second(torch.relu(self.norm(self.first(x))))
        return y, y.mean((2, 3)), x.transpose(1, 2), y.permute(0, 2, 3, 1)


class Sorted(nn.Module):
    """With a call of PyTorch between two native parts."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, torch.sort(y, -1)[0] + x


def steps(compiled: sashiko.CompiledModel) -> int:
    return sum(len(s.steps) if isinstance(s, NativeSegment) else 1 for s in compiled.built.executable.plan.segments)


def alike(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert got.stride() == expected.stride()


@torch.no_grad()
@pytest.mark.parametrize("given", [torch.contiguous_format, LAST])
def test_results_lie_as_the_models_own(given: torch.memory_format) -> None:
    model, x = Net().eval().to(memory_format=LAST), torch.randn(2, 3, 32, 48).to(memory_format=given)
    compiled = sashiko.compile(model, (x,), strict=True)
    for got, expected in zip(compiled(x), model(x), strict=True):
        alike(got, expected)
        assert not got._is_view() and got.data_ptr() != x.data_ptr()
    for other in (x.contiguous(), x.to(memory_format=LAST), torch.randn(2, 3, 48, 32).transpose(2, 3), torch.randn(4, 3, 32, 48)[::2]):
        for got, expected in zip(compiled(other), model(other), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_channels_last_moves_nothing() -> None:
    model, x = nn.Conv2d(16, 32, 1).eval(), torch.randn(2, 16, 24, 24)
    assert steps(sashiko.compile(model, (x,))) > 1
    assert steps(sashiko.compile(model, (x.to(memory_format=LAST),))) == 1


@torch.no_grad()
def test_what_is_computed_row_by_row_is_returned_so() -> None:
    """A view of an image is a matrix, which is what the product behind the convolution makes."""

    class Patches(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten(2).transpose(1, 2)

    model, x = Patches(3, 32, 4, stride=4).eval(), torch.randn(1, 3, 32, 32)
    got = sashiko.compile(model, (x,))(x)
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)
    assert got.is_contiguous()


@torch.no_grad()
def test_beside_calls_of_pytorch(tmp_path: Path) -> None:
    model, x = Sorted().eval(), torch.randn(2, 8, 40, 6000).to(memory_format=LAST)
    compiled = sashiko.compile(model, (x,))
    compiled.save(tmp_path / "model.sashiko")
    for each in (compiled, sashiko.load(tmp_path / "model.sashiko")):
        for got, expected in zip(each(x), model(x), strict=True):
            torch.testing.assert_close(got, expected)
        assert each(x)[0].stride() == x.stride()


@torch.no_grad()
def test_one_result_in_two_orders() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = torch.exp(x)
            return y, y.transpose(1, 2), torch.sort(y.transpose(1, 2), -1)[0]

    model, x = Both().eval(), torch.randn(2, 5, 70)
    for got, expected in zip(sashiko.compile(model, (x,))(x), model(x), strict=True):
        torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_files_keep_the_order(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(2, 3, 32, 32).to(memory_format=LAST)
    sashiko.compile(model, (x,)).save(tmp_path / "model.sashiko")
    loaded = sashiko.load(tmp_path / "model.sashiko")
    for argument in (x, x.contiguous()):
        for got, expected in zip(loaded(argument), model(x), strict=True):
            alike(got, expected)


@torch.no_grad()
def test_sizes_that_change() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 32, 32).to(memory_format=LAST)
    batch = torch.export.Dim("batch", min=1, max=16)
    compiled = sashiko.compile(model, (x,), dynamic_shapes=({0: batch},))
    for count in (1, 5):
        argument = torch.randn(count, 3, 32, 32).to(memory_format=LAST)
        for got, expected in zip(compiled(argument), model(argument), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert compiled(argument)[0].is_contiguous(memory_format=LAST)


@torch.no_grad()
def test_messages_speak_of_the_callers_axes() -> None:
    x = torch.randn(2, 3, 32, 48).to(memory_format=LAST)
    compiled = sashiko.compile(Net().eval(), (x,))
    with pytest.raises(InputError, match=r"expected 4 dimensions, \[2, 3, 32, 48\], got 3"):
        compiled(x[0])
    with pytest.raises(InputError, match="dimension 1 has size 4"):
        compiled(torch.randn(2, 4, 32, 48).to(memory_format=LAST))


@torch.no_grad()
def test_an_argument_that_shares_memory_with_one_that_is_written() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, image: Tensor) -> Tensor:
            x.mul_(2)
            return image * 3

    def arguments() -> tuple[Tensor, Tensor]:
        memory = torch.arange(2 * 4 * 5 * 3, dtype=torch.float32)
        return memory, memory.view(2, 4, 5, 3).permute(0, 3, 1, 2)

    model = Writes().eval()
    apart = (torch.arange(120, dtype=torch.float32), torch.randn(2, 4, 5, 3).permute(0, 3, 1, 2))
    compiled = sashiko.compile(model, apart)
    memory, image = arguments()
    before = image.clone()
    with pytest.raises(InputError, match=r"argument 0 .* and argument 1 .* share memory"):
        compiled(memory, image)
    got = compiled(memory, before)
    torch.testing.assert_close(got, before * 3)
    torch.testing.assert_close(memory, torch.arange(120, dtype=torch.float32) * 2)


@torch.no_grad()
def test_dynamo() -> None:
    model, x = Net().eval().to(memory_format=LAST), torch.randn(2, 3, 32, 32).to(memory_format=LAST)
    compiled = torch.compile(model, backend="sashiko")
    for argument in (x, x.contiguous()):
        for got, expected in zip(compiled(argument), model(argument), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    alike(compiled(x)[0], model(x)[0])


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_view_of_a_copy_that_lies_otherwise(dynamic: bool | None) -> None:
    """What is left to PyTorch gets the elements row by row or as the argument has them, whichever the trace saw."""
    def step(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.reshape(b.shape[0], -1), b + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="sashiko", dynamic=dynamic)
    for rows, columns in ((6, 8), (6, 4), (10, 2)):
        a, b = torch.randn(rows, columns).t(), torch.randn(4, columns)
        torch.testing.assert_close(compiled(a, b), step(a, b))


@torch.library.custom_op("sashiko_tests::rows", mutates_args=())
def rows(x: Tensor) -> Tensor:
    """An operation that wants its argument row by row; it gives the address of what it was given, and twice the elements by columns."""
    assert x.is_contiguous(), f"it lies by {x.stride()}"
    seen.append(x.data_ptr())
    return (x * 2).t().contiguous().t()


@rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x).t().contiguous().t()


seen: list[int] = []


def fast(model: nn.Module, example: tuple[Tensor, ...], front_end: str) -> Any:
    """The compiled model."""
    torch._dynamo.reset()
    return sashiko.compile(model, example) if front_end == "compile" else torch.compile(model, backend="sashiko")


@torch.no_grad()
@pytest.mark.parametrize("front_end", ["compile", "backend"])
@pytest.mark.parametrize("copy", [
    Tensor.contiguous, Tensor.clone, lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x[:, 1:].contiguous(),
    lambda x: rows(x.contiguous()).contiguous(),
])
def test_what_the_model_lays_row_by_row_reaches_pytorch_so(copy: Callable[[Tensor], Tensor], front_end: str) -> None:
    model = Apply(lambda x: rows(copy(x)) + 1).eval()
    by_columns, repeated, by_rows = torch.arange(30.0).view(6, 5).t(), torch.arange(6.0).expand(5, 6), torch.arange(30.0).view(5, 6)
    for example in (repeated, by_rows) if copy is Tensor.clone else (by_columns, repeated, by_rows):
        compiled = fast(model, (example,), front_end)
        for x in (by_columns, repeated, by_rows) if front_end == "compile" else (example,):
            torch.testing.assert_close(compiled(x), model(x.contiguous()), rtol=0, atol=0)


@torch.no_grad()
def test_what_lies_row_by_row_is_not_copied_again() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.contiguous()
        return rows(y) + rows(y), y.mean(0)

    x = torch.randn(5, 6).t()
    compiled = sashiko.compile(Apply(model).eval(), (x,))
    steps = [segment for segment in compiled.built.executable.plan.segments if not isinstance(segment, NativeSegment)]
    assert [str(step.target) for step in steps] == ["sashiko_tests.rows.default"] * 2
    for given in (x.contiguous(), torch.randn(6, 5)):
        seen.clear()
        torch.testing.assert_close(compiled(given), model(given))
        assert seen[:2] == [given.data_ptr()] * 2


@torch.no_grad()
@pytest.mark.parametrize("front_end", ["compile", "backend"])
def test_operations_of_pytorch_that_read_row_by_row(front_end: str) -> None:
    """EmbeddingBag reads its ids where they would be if they lay so; the distances of rows are refused otherwise."""
    bag, table, offsets = nn.EmbeddingBag(50, 16, mode="sum").eval(), torch.randint(0, 50, (20, 3)), torch.tensor([[0, 4], [9, 15]])
    for ids in (table[:, 1], torch.tensor([7]).expand(20), table[:, 1].contiguous()):
        compiled = fast(bag, (ids, offsets[:, 0]), front_end)
        for given in (ids, table[:, 2]) if front_end == "compile" else (ids,):
            torch.testing.assert_close(compiled(given, offsets[:, 0]), bag(given, offsets[:, 0]))
    distances, x = Apply(torch.pdist).eval(), torch.randn(5, 6)
    for example in (x.t(), x):
        torch.testing.assert_close(fast(distances, (example,), front_end)(example), torch.pdist(example))


@torch.no_grad()
def test_weights_that_pytorch_reads_row_by_row() -> None:
    class Distances(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.pdist(self.weight.t())

    model, x = Distances(4, 3).eval(), torch.randn(6)
    torch.testing.assert_close(sashiko.compile(model, (x,))(x), model(x))
