"""Bad calibration data: each fault is named, with the number of the batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sashiko.diagnostics.errors import CalibrationError, Unsupported
from sashiko.quant import OpScheme, Scheme, WeightScheme, quantize
from tests.quant.models import Attention, mlp

GOOD = torch.linspace(-1, 1, 24).reshape(3, 8)


def refused(model: nn.Module, batches: Any, *words: str) -> CalibrationError:
    with pytest.raises(CalibrationError) as caught:
        quantize(model, batches)
    for word in words:
        assert word in str(caught.value)
    return caught.value


@pytest.mark.parametrize("batches", [[], (), iter(())])
def test_empty(batches: Any) -> None:
    refused(mlp(), batches, "empty")


@pytest.mark.parametrize("preset", ["int8", "int8-dynamic", "int8-weight"])
def test_nothing_in_the_first_batch(preset: str) -> None:
    """The program would be for calls without rows."""
    for batches in ([GOOD[:0]], [GOOD[:0], GOOD], [{"input": GOOD[:0]}]):
        with pytest.raises(CalibrationError, match="batch 1 is empty"):
            quantize(mlp(), batches, preset=preset)


@pytest.mark.parametrize("batches", [GOOD, {"input": GOOD}, "text", 3, None])
def test_one_batch_instead_of_an_iterable(batches: Any) -> None:
    refused(mlp(), batches, "not an iterable of batches", "list")


@pytest.mark.parametrize("batch", ["text", 7, None, np.zeros((3, 8), np.float32)])
def test_no_batch_at_all(batch: Any) -> None:
    refused(mlp(), [GOOD, batch], "batch 2", type(batch).__name__)


def test_arrays_inside_a_tuple() -> None:
    refused(mlp(), [(np.zeros((3, 8), np.float32),)], "no tensor", "ndarray")


def test_labels_in_the_batch() -> None:
    refused(mlp(), [(GOOD, torch.zeros(3))], "batch 1", "forward(", "labels")


def test_unknown_name() -> None:
    refused(Attention().eval(), [{"y": torch.randn(2, 3, 16)}], "batch 1", "missing a required argument: 'x'")


def test_structure_changes() -> None:
    model = Attention().eval()
    x = torch.randn(2, 3, 16)
    refused(model, [x, (x, torch.ones(2, 3))], "batch 2", "mask")
    refused(model, [(x, torch.ones(2, 3)), x], "batch 2", "mask")


@pytest.mark.parametrize(("other", "words"), [((3, 9), "size 9 in dimension 1"), ((8,), "1 dimensions")])
def test_shape_changes(other: tuple[int, ...], words: str) -> None:
    refused(mlp(), [GOOD, torch.zeros(other)], "batch 2", words)


def test_what_to_do_is_true_of_what_is_said() -> None:
    """Sizes that are 1 in the first batch are fixed; others are for other reasons."""
    x = torch.randn(4, 1, 16)
    assert "no size of 1" in refused(Attention().eval(), [x, x.repeat(1, 3, 1)], "size 3 in dimension 1").hint
    for other in (torch.zeros(3, 9), GOOD.double()):
        assert "no size of 1" not in refused(mlp(), [GOOD, other]).hint

    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(x if x.shape[0] % 2 else -x)
            return out

    assert "quantize the model from a batch of these sizes, too" in refused(Even().eval(), [GOOD, GOOD[:2]], "another way").hint


def test_what_fixes_sizes_is_said() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x.shape[1]) is not int:
                raise TypeError("windows are counted in numbers")
            out: torch.Tensor = self.fc(x)
            return out

    x, why = torch.randn(2, 6, 8), "all sizes but that of the batch are fixed .*windows are counted in numbers"
    assert any(re.search(why, note) for note in quantize(Windows().eval(), [x]).record.notes)
    assert re.search(why, refused(Windows().eval(), [x, x[:, :5]], "size 5 in dimension 1").what)


def test_images_of_all_sizes_on_many_levels() -> None:
    """The places of all levels in one row, as detectors have them: a long sum of sizes that are short to compute."""
    class Levels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.ModuleList(nn.Conv2d(3, 3, 3, 2, 1) for _ in range(5))
            self.head = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: list[torch.Tensor] = []
            for level in self.levels:
                x = level(x)
                found.append(x.flatten(2).transpose(1, 2))
            out: torch.Tensor = self.head(torch.cat(found, 1)).reshape(x.shape[0], -1, 2)
            return out

    model, images = Levels().eval(), [torch.rand(2, 3, 64, 64), torch.rand(1, 3, 96, 80), torch.rand(3, 3, 33, 70)]
    small = quantize(model, images)
    assert not small.record.notes
    for image in images:
        torch.testing.assert_close(small(image), model(image), rtol=0, atol=0.1)


def test_images_of_all_sizes_in_patches() -> None:
    """Images taken apart and put together again, as small vision transformers have it: long functions of their sizes, which torch would
    compare with one another."""
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.mix = nn.Conv2d(4, 4, 3, 2, 1), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.mix(self.down(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            batch, channels, rows, columns = x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2
            x = x.reshape(batch * channels * rows, 2, columns, 2).transpose(1, 2).reshape(batch, channels, rows * columns, 4)
            x = x.transpose(1, 3).reshape(batch * 4, rows * columns, channels)
            x = torch.softmax(x @ x.transpose(1, 2), -1) @ x
            x = x.reshape(batch, 4, rows * columns, channels).transpose(1, 3).reshape(batch * channels * rows, columns, 2, 2)
            return x.transpose(1, 2).reshape(batch, channels, 2 * rows, 2 * columns)

    model = nn.Sequential(Patches(), Patches()).eval()
    small = quantize(model, [torch.rand(1, 4, 32, 32)] * 2)
    assert not small.record.notes
    for image in (torch.rand(1, 4, 32, 32), torch.rand(3, 4, 64, 48)):
        assert (small(image) - model(image)).norm() < 0.05 * model(image).norm()


@pytest.mark.parametrize("first", [1, 6])
def test_a_batch_of_one_bag(first: int) -> None:
    """PyTorch asks whether there is more than one of what is as many as the bags, by another expression."""
    model = nn.Sequential(nn.EmbeddingBag(20, 16, mode="sum"), nn.Linear(16, 4)).eval()
    batches = [torch.randint(0, 20, (bags, 4)) for bags in (first, 6, 1)]
    small = quantize(model, batches)
    for batch in batches:
        torch.testing.assert_close(small(batch), model(batch), rtol=0, atol=0.1)


def test_dtype_changes() -> None:
    refused(mlp(), [GOOD, GOOD.double()], "batch 2", "float64")


def test_the_model_itself_fails() -> None:
    assert refused(mlp(), [torch.zeros(3, 9)], "batch 1").__cause__ is not None


@pytest.mark.parametrize("good", [0, 1, 3])
def test_the_data_raises(good: int) -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield from [GOOD] * good
        raise OSError("disk on fire")

    error = refused(mlp(), broken(), f"batch {good + 1}", "disk on fire")
    assert isinstance(error.__cause__, OSError)


def test_training_mode() -> None:
    refused(mlp().train(), [GOOD], "training mode", "eval()")
    model = mlp()
    model[2].train()
    refused(model, [GOOD], "training mode: 2")


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(0, 2),
    row=st.integers(0, 2),
    column=st.integers(0, 7),
    value=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
)
def test_non_finite_data_names_batch_and_argument(batch: int, row: int, column: int, value: float) -> None:
    batches = [GOOD.clone() for _ in range(3)]
    batches[batch][row, column] = value
    kind = "NaN" if value != value else "infinity"
    refused(mlp(), batches, f"batch {batch + 1}", "'input'", kind, "1 of 24")


class Logarithm(nn.Module):
    """Gives NaN for negative numbers and minus infinity for zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


@pytest.mark.parametrize(("value", "kind"), [(-1.0, "NaN"), (0.0, "infinity")])
def test_non_finite_activations_name_the_layer(value: float, kind: str) -> None:
    model = nn.Sequential(nn.Identity(), Logarithm(), nn.Linear(8, 4)).eval()
    refused(model, [GOOD.abs() + 1, torch.full((3, 8), value)], "batch 2", "log in 1", kind, "test_calibration.py")


def test_non_finite_weights_are_named() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    refused(model, [GOOD], "batch 1", "0.weight", "NaN")


def test_minus_infinity_in_a_mask_is_no_fault() -> None:
    class Masked(Attention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            assert mask is not None
            out: torch.Tensor = self.out((x @ x.transpose(1, 2) + mask).softmax(-1) @ x)
            return out

    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) == 1, -float("inf"))
    small = quantize(Masked().eval(), [(torch.randn(2, 3, 16), mask)])
    assert len(small.record.sites) == 1


@pytest.mark.parametrize("value", [0.0, 1e-40, 3.0, 1e30])
def test_constant_data_gives_a_usable_scale(value: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[3] = 0.0
        model[0].weight[4] = 1e-42
    x = torch.full((3, 8), value)
    small = quantize(model, [x])
    for item in small.record.sites:
        assert all(0 < r.scale < float("inf") for r in item.ranges)
    result = small(x)
    assert bool(result.isfinite().all())
    exact = model(x)
    assert (result - exact).abs().max() <= 0.1 * exact.abs().max()


def test_integer_inputs_and_empty_batches() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval()
    empty, narrow = torch.zeros(0, 4, dtype=torch.int64), torch.randint(0, 10, (2, 4), dtype=torch.int32)
    small = quantize(model, [torch.randint(0, 10, (3, 4)), empty, narrow])
    assert small.record.batches == 3 and len(small.record.sites) == 1


def test_a_model_that_cannot_be_exported() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if float(x.sum()) > 0 else x  # type: ignore[no-any-return]

    with pytest.raises(Unsupported, match="Branch cannot be exported"):
        quantize(Branch().eval(), [GOOD])


def test_what_cannot_be_captured_is_told_before_lengths_of_sizes() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n: Any = (x > 0).sum().item()
            long = x.new_zeros((n * n * n + 2 * n * n + 3 * n + 8) // 7)
            return self.fc(x) * len({n}) + long.sum()

    with pytest.raises(Unsupported, match=r"unhashable type(.|\n)*test_calibration\.py:"):
        quantize(Sizes().eval(), [GOOD])


def test_a_random_model_stays_random() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x, 0.5, training=True)

    small = quantize(nn.Sequential(Noise(), nn.Linear(8, 4)).eval(), [GOOD])
    assert len(small.record.sites) == 1
    assert not torch.equal(small(GOOD), small(GOOD))


def test_limits_and_two_thousand_batches() -> None:
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    seen = 0

    def many() -> Iterator[torch.Tensor]:
        nonlocal seen
        for seen in range(1, 2001):
            yield torch.full((2, 8), float(seen % 7))

    assert quantize(model, many(), max_batches=5).record.batches == 5 and seen == 5
    assert quantize(model, many(), preset="int8-percentile").record.batches == 2000


class Filled(nn.Module):
    """Products of what slices are assigned to, one of them read once more after another write; or of the same without writes."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv, self.fc = nn.Conv2d(6, 8, 3), nn.Linear(10, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            canvas = torch.zeros_like(x)
            canvas[:, 4:] = x[:, 4:]
            first, before = self.conv(canvas), self.fc(canvas)
            canvas[..., 0].add_(4.0)
        else:
            canvas = torch.cat([torch.zeros_like(x[:, :4]), x[:, 4:]], 1)
            first, before = self.conv(canvas), self.fc(canvas)
            canvas = torch.cat([canvas[..., :1] + 4.0, canvas[..., 1:]], -1)
        result: torch.Tensor = self.fc(canvas) + before + first.mean()
        return result


@pytest.mark.parametrize("preset", ["int8", "int8-static", "int8-symmetric", Scheme(OpScheme(None, WeightScheme(compensate=True)))])
def test_what_is_written_to_is_observed_as_it_is_read(preset: str | Scheme) -> None:
    batches = [torch.randn(3, 6, 8, 10) for _ in range(3)]
    small, expected = (quantize(Filled(writes).eval(), batches, preset=preset) for writes in (True, False))
    assert [(s.site.name, s.ranges) for s in small.record.sites] == [(s.site.name, s.ranges) for s in expected.record.sites]
    assert all(torch.equal(small(x), expected(x)) for x in batches)
