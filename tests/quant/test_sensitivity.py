"""Signal-to-noise ratios of sites and of whole models, and what is left in floating point because of them; the calibration sample."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from sashiko.quant import FP32, ActivationScheme, OpScheme, Scheme, SmoothQuant, WeightScheme, calibrate, measured, quantize, report
from sashiko.quant.sensitivity import end_sqnr, float_results, site_sqnr
from tests.quant.models import Attention, Headed, bert, mlp, tokens

ROW = OpScheme(ActivationScheme(granularity="row"))
STATIC = OpScheme(ActivationScheme("minmax"))
ALL = ("linear", "convolution", "matmul", "attention", "embedding")


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    return 10 * math.log10(float(exact.double().square().sum() / (found - exact).double().square().sum()))


class Everything(nn.Module):
    """x: int64 [B, S] -> [B, 3]"""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.head = nn.Embedding(10, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(self.table(x).transpose(1, 2)).transpose(1, 2)
        h = torch.matmul(torch.softmax(h @ h.transpose(1, 2), -1), h)
        h = nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        return torch.as_tensor(self.head(h.mean(1)))


@pytest.mark.parametrize("scheme", [ROW, STATIC], ids=["rows", "static"])
def test_a_site_is_measured_on_exact_inputs(scheme: OpScheme) -> None:
    """The ratio of the second linear is that of a model in which the first is exact."""
    torch.manual_seed(0)
    model, data = mlp(), [torch.randn(50, 8) for _ in range(3)]
    found = calibrate(model, data, Scheme(scheme))
    ratios = site_sqnr(found)
    assert list(ratios) == ["0", "2"]
    with torch.no_grad():
        alone = torch.cat([found.build({"0": FP32})(x) for x in data])
        assert ratios["2"] == pytest.approx(decibels(model(torch.cat(data)), alone), abs=1e-3)
        assert end_sqnr(found, {"0": FP32}) == pytest.approx(ratios["2"], abs=1e-6)


def test_every_operation() -> None:
    torch.manual_seed(0)
    found = calibrate(Everything().eval(), [torch.randint(0, 10, (4, 6)) for _ in range(3)], Scheme(STATIC, operations=ALL))
    ratios = site_sqnr(found)
    assert set(ratios) == {site.name for site in found.placement.sites} and len(ratios) == 6
    for name, ratio in ratios.items():
        alone = end_sqnr(found, {site.name: FP32 for site in found.placement.sites if site.name != name})
        assert 25 < ratio < 80 and math.isfinite(alone), name


def test_other_choices() -> None:
    torch.manual_seed(0)
    found = calibrate(mlp(), [torch.randn(50, 8)], Scheme(STATIC))
    assert set(site_sqnr(found, {"0": FP32})) == {"2"}
    weight = site_sqnr(found, {"0": OpScheme(None)})["0"]
    coarse = site_sqnr(found, {"0": OpScheme(None, WeightScheme(4, "group", 8))})["0"]
    # Four bits less, each worth 6.02 dB; two dB for the difference between groups and channels.
    assert coarse + 18 < weight < coarse + 26 and site_sqnr(found)["0"] < weight
    reference = float_results(found)
    assert end_sqnr(found, {}, reference) == end_sqnr(found) and math.isinf(end_sqnr(found, {"0": FP32, "2": FP32}, reference))


def test_padding_does_not_count() -> None:
    class Masked(Attention):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, attention_mask)

    def measured(garbage: float) -> tuple[dict[str, float], float]:
        torch.manual_seed(0)
        model, x = Masked().eval(), torch.randn(3, 7, 16)
        mask = (torch.arange(7)[None] < torch.tensor([[7], [4], [2]])).long()
        data = [{"x": torch.where(mask[..., None] == 1, x, garbage), "attention_mask": mask}]
        found = calibrate(model, data, Scheme(ROW))
        return site_sqnr(found), end_sqnr(found)

    (ratios, end), (others, other_end) = measured(0.0), measured(1e3)
    assert ratios == pytest.approx(others) and end == pytest.approx(other_end)


def test_several_results_and_names() -> None:
    model, data = bert(), [tokens(3, 12), tokens(3, 7)]
    found = calibrate(model, data, Scheme(ROW))
    ratios = site_sqnr(found)
    assert len(ratios) >= 12 and all(20 < ratio < 70 for ratio in ratios.values())
    small = found.build()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for batch in data:
        with torch.no_grad():
            exact, other = model(**batch), small(**batch)
        counts = batch["attention_mask"].bool()
        pairs.append((exact.last_hidden_state[counts], other.last_hidden_state[counts]))
        pairs.append((exact.pooler_output, other.pooler_output))
    exact, other = (torch.cat([p[i].flatten() for p in pairs]) for i in (0, 1))
    assert end_sqnr(found) == pytest.approx(decibels(exact, other), abs=1e-2)


class Masked(nn.Module):
    """Logits of which some are ruled out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("mask", torch.where(torch.arange(16) > 8, -math.inf, 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.fc(x) + self.mask)


def test_infinities_of_masks_are_no_noise() -> None:
    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(4, 16)
    found = calibrate(model, [x], Scheme(STATIC))
    assert end_sqnr(found) == pytest.approx(decibels(model(x).detach()[:, :9], found.build()(x)[:, :9]), abs=1e-2)
    (exact,) = float_results(found)
    assert end_sqnr(found, reference=[[torch.where(torch.arange(16) == 0, -math.inf, exact[0])]]) == -math.inf


class Sensitive(nn.Module):
    """`second` has an input of one great channel that its weight takes no notice of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.second.weight[:, 3] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return torch.as_tensor(self.second(h * torch.where(torch.arange(16) == 3, 300.0, 1.0)))


def test_outliers_stay_in_floating_point() -> None:
    torch.manual_seed(0)
    model, data = Sensitive().eval(), [torch.randn(20, 16) for _ in range(3)]
    found = calibrate(model, data, Scheme(STATIC, outliers=25.0))
    assert [site.name for site in found.placement.sites] == ["first"]
    (left,) = found.placement.left_out
    ratio = site_sqnr(calibrate(model, data, Scheme(STATIC)))["second"]
    assert ratio < 25 and left.name == "second" and left.reason == f"its result would keep only {ratio:.1f} dB, less than 25"
    text = report(found.build())
    assert "keep only" in text and (found.build()(data[0]) - model(data[0])).norm() / model(data[0]).norm() < 0.03
    smoothed = quantize(model, data, preset=Scheme(STATIC, outliers=25.0, smooth=SmoothQuant()))
    assert len(smoothed.record.sites) == 2


def test_buffers_that_the_model_writes_are_left_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.count = nn.Linear(8, 4), nn.Buffer(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return torch.as_tensor(self.fc(x))

    found = calibrate(Counting().eval(), [torch.randn(5, 8) for _ in range(3)], Scheme(ROW, outliers=1.0, correct_bias=True))
    assert site_sqnr(found).keys() == {"fc"} and math.isfinite(end_sqnr(found))
    assert float(found.program.attributes["count"]) == 0 and float(found.build().get_buffer("count")) == 0


def test_the_sample_is_bounded() -> None:
    """Of two thousand batches, three are kept, in copies; none of the others outlives its turn."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[torch.Tensor]:
        for i in range(2000):
            batch = torch.full((2, 8), float(i % 7))
            alive.append(weakref.ref(batch))
            yield batch
            if i % 200 == 199:
                del batch
                assert sum(ref() is not None for ref in alive) <= 2

    found = calibrate(nn.Sequential(nn.Linear(8, 4)).eval(), stream(), Scheme(OpScheme(weight=WeightScheme(compensate=True)), sample=3))
    assert found.batches == 2000 and len(found.sample) == 3
    assert [float(call.tensors()[0][0, 0]) for call in found.sample] == [0, 1, 2]


class Counts(Headed):
    """Writes into a buffer what nothing else needs, and ignores an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor, ignored: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.add_(x.sum((0, 1)))
        return super().forward(x)


def test_what_nothing_reads_is_no_site_and_what_is_written_stays() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    found = calibrate(Counts().eval(), [(x, x)], "int8-static")
    assert list(site_sqnr(found)) == ["body", "head"] and not found.placement.left_out
    small = measured(found)
    assert not any("pooler" in name for name in small.state_dict())
    small(x, x)
    torch.testing.assert_close(small.get_buffer("seen"), x.sum((0, 1)))
