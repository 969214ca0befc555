"""SmoothQuant: the same function bit by bit, and better integers where channels differ in size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sashiko.diagnostics.errors import CalibrationError
from sashiko.platforms.catalogue import X86_64_VNNI
from sashiko.quant import FP32, ActivationScheme, Calibration, OpScheme, Override, Scheme, SmoothQuant, WeightScheme, calibrate, quantize
from sashiko.quant.smooth import RowSample
from tests.quant.models import Attention, bert, tokens

SCHEMES = {"rows": OpScheme(ActivationScheme(granularity="row")), "static": OpScheme(ActivationScheme(signed=False))}
SMOOTH = SmoothQuant()


class PreNorm(nn.Module):
    """The attention and feed-forward parts of a transformer, [..., 16]; `planted` channels of its norms are 50 times the others."""

    def __init__(self, planted: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)
        self.last, self.query, self.key = nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(16, 8, bias=False)
        with torch.no_grad():
            for norm in (self.norm, self.last) if planted else ():
                norm.weight[5] *= 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        y = self.last(x)
        return torch.as_tensor(self.query(y) * self.key(y))


def in_floating_point(found: Calibration) -> nn.Module:
    """The smoothed program, where `build` takes the original."""
    return replace(found, original=found.program).build({site.name: FP32 for site in found.placement.sites})


@torch.no_grad()
def error(found: nn.Module, exact: nn.Module, x: torch.Tensor) -> float:
    return float((found(x) - exact(x)).norm() / exact(x).norm())


@pytest.fixture
def batches() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 9, 16) for _ in range(6)]


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_planted_outliers(scheme: OpScheme, alpha: float | None, batches: list[torch.Tensor]) -> None:
    model = PreNorm().eval()
    plain = error(quantize(model, batches[:-1], preset=Scheme(scheme), target=X86_64_VNNI), model, batches[-1])
    found = calibrate(model, batches[:-1], Scheme(scheme, smooth=SmoothQuant(alpha)), target=X86_64_VNNI)
    smooth = error(found.build(), model, batches[-1])
    assert smooth < 0.03 and smooth < plain / 2
    assert torch.equal(in_floating_point(found)(batches[-1]), model(batches[-1]))


def test_where_the_division_goes(batches: list[torch.Tensor]) -> None:
    found = calibrate(PreNorm().eval(), batches, Scheme(SCHEMES["rows"], smooth=SmoothQuant(0.5)))
    at = {site.name: site.activations for site in found.placement.sites}
    divisions = [name for name in found.program.attributes if name.endswith("_smoothing")]
    assert at["up"] == ("layer_norm",) and at["query"] == at["key"] == ("layer_norm_1",)
    assert divisions == ["relu_smoothing"] and at["down"] not in (("relu",), ())
    small = found.build()
    assert {"up", "down", "query", "key"} == {item.site.name for item in small.record.sites}
    assert {"norm.weight", "up.bias"} <= dict(small.named_parameters()).keys() and "up.weight_int8" in dict(small.named_buffers())


def test_residuals_keep_their_scale(batches: list[torch.Tensor]) -> None:
    class PostNorm(PreNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return torch.as_tensor(y + self.down(torch.relu(self.up(y))))

    model = PostNorm().eval()
    found = calibrate(model, batches, Scheme(SCHEMES["rows"], smooth=SMOOTH))
    assert "layer_norm_smoothing" in found.program.attributes
    assert torch.equal(found.program.attributes["norm.weight"], model.norm.weight)
    assert torch.equal(in_floating_point(found)(batches[0]), model(batches[0]))


@pytest.mark.parametrize(("granularity", "folded"), [("channel", True), ("tensor", False)])
def test_a_linear_before_takes_the_division(granularity: str, folded: bool, batches: list[torch.Tensor]) -> None:
    model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 4)).eval()
    scheme = OpScheme(weight=WeightScheme(granularity=granularity))  # type: ignore[arg-type]
    found = calibrate(model, batches, Scheme(scheme, smooth=SmoothQuant(0.5)))
    assert ("linear_smoothing" not in found.program.attributes) is folded
    assert torch.equal(in_floating_point(found)(batches[0]), model(batches[0]))


@pytest.mark.parametrize("kind", ["a bias of two dimensions", "a gain that is the bias"])
def test_parameters_of_a_producer_that_are_unusual(kind: str) -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = torch.logspace(-1, 1, 16)
            self.weight, self.bias = nn.Parameter(torch.randn(16, 16) * sizes[:, None]), nn.Parameter(torch.randn(1, 16) * sizes)
            self.gain, self.last = nn.Parameter(sizes), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "a gain that is the bias":
                return torch.as_tensor(self.last(F.layer_norm(x, (16,), self.gain, self.gain)))
            return torch.as_tensor(self.last(F.linear(x, self.weight, self.bias)))

    torch.manual_seed(0)
    model, batches = Unusual().eval(), [torch.randn(16, 16) for _ in range(4)]
    found = calibrate(model, batches, Scheme(SCHEMES["rows"], smooth=SmoothQuant(alpha=0.5)))
    assert found.program is not found.original
    for made, allowed in ((in_floating_point(found), 1e-6), (found.build(), 0.03)):
        assert (made(batches[0]) - model(batches[0])).norm() <= allowed * model(batches[0]).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_write_a_linear(dtype: torch.dtype) -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))
            self.b = nn.Parameter(torch.randn(8))
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.addmm(self.b, x, self.w) + torch.mm(x, self.w.t()) + x @ self.w[:, :] + self.fc(x)
            return torch.as_tensor(torch.bmm(x[None], self.w.unsqueeze(0).expand(1, 8, 8))[0] + x)

    torch.manual_seed(0)
    model, x = Ways().eval().to(dtype), torch.randn(9, 8, dtype=dtype)
    found = calibrate(model, [x * torch.logspace(0, 2, 8, dtype=dtype)] * 2, Scheme(SCHEMES["rows"], smooth=SMOOTH))
    assert len(found.placement.sites) == 5 and any("smoothing" in name for name in found.program.attributes)
    assert torch.equal(in_floating_point(found)(x), model(x))


@pytest.mark.parametrize("kind", ["along both axes", "as the bias, too"])
def test_one_parameter_is_read_in_two_ways(kind: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.w = nn.LayerNorm(16), nn.Parameter(torch.randn(16, 16))
            with torch.no_grad():
                self.norm.weight[3] *= 50

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            return F.linear(x, self.w) + x @ self.w if kind == "along both axes" else torch.addmm(self.w, x, self.w)

    torch.manual_seed(0)
    model, batches = Twice().eval(), [torch.randn(16, 16) for _ in range(4)]
    found = calibrate(model, batches, Scheme(SCHEMES["rows"], smooth=SMOOTH))
    assert torch.equal(in_floating_point(found)(batches[0]), model(batches[0])) and error(found.build(), model, batches[0]) < 0.01


class Tied(nn.Module):
    """One weight for two activations, and read as it is as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            self.norm.weight[3] *= 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.fc(torch.relu(self.fc(self.norm(x)))) + self.fc.weight.sum(0))


def test_tied_weights(batches: list[torch.Tensor]) -> None:
    model = Tied().eval()
    found = calibrate(model, batches, Scheme(SCHEMES["rows"], smooth=SmoothQuant(0.5)))
    assert torch.equal(found.program.attributes["fc.weight"], model.fc.weight)
    assert torch.equal(in_floating_point(found)(batches[0]), model(batches[0]))
    assert error(found.build(), model, batches[0]) < 0.03


def test_nothing_else_is_touched() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.conv(x)
            h = (h @ h.transpose(1, 2)).softmax(-1) @ h
            return F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])

    scheme = Scheme(SCHEMES["static"], operations=("convolution", "matmul", "attention"))
    data = [torch.randn(2, 8, 6)]
    plain, smooth = (calibrate(Others().eval(), data, s) for s in (scheme, replace(scheme, smooth=SMOOTH)))
    assert [n.target for n in smooth.program.graph.nodes] == [n.target for n in plain.program.graph.nodes]
    assert smooth.placement == plain.placement and len(smooth.placement.sites) == 4


def test_linears_left_in_floating_point_are_not_smoothed(batches: list[torch.Tensor]) -> None:
    scheme = Scheme(SCHEMES["rows"], (Override("up", FP32), Override("key", FP32)), smooth=SmoothQuant(0.5))
    model = PreNorm().eval()
    found = calibrate(model, batches, scheme)
    assert torch.equal(found.program.attributes["up.weight"], model.up.weight)
    assert torch.equal(found.program.attributes["key.weight"], model.key.weight)
    assert "layer_norm_1_smoothing" in found.program.attributes
    assert torch.equal(in_floating_point(found)(batches[0]), model(batches[0]))


def test_names_are_those_without_smoothing() -> None:
    model, data = bert(), [tokens(3, 12), tokens(3, 7)]
    plain, smooth = (calibrate(model, data, Scheme(SCHEMES["rows"], smooth=s)) for s in (None, SMOOTH))
    assert [s.name for s in smooth.placement.sites] == [s.name for s in plain.placement.sites]
    exact = model(**data[0]).last_hidden_state
    assert torch.equal(in_floating_point(smooth)(**data[0]).last_hidden_state, in_floating_point(plain)(**data[0]).last_hidden_state)
    torch.testing.assert_close(in_floating_point(smooth)(**data[0]).last_hidden_state, exact)


def test_no_alpha_is_worse_than_none_on_the_sample() -> None:
    """Channels of equal size in the data: rounded factors can only do harm, so that none are used."""
    x = torch.randint(-127, 128, (64, 16)).float()
    x[:, :2] = torch.tensor([127.0, -127.0])
    model = nn.Sequential(nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-127, 128, (4, 16)))
        model[0].weight[:, 0] = 127.0
    found = calibrate(model, [x], Scheme(SCHEMES["rows"], smooth=SMOOTH))
    assert not any("smoothing" in name for name in found.program.attributes)


def test_channels_that_are_always_zero() -> None:
    model = nn.Sequential(nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight[:, 4] = 0
    x = torch.randn(32, 16) * torch.logspace(-2, 2, 16)
    x[:, 7] = 0
    found = calibrate(model, [x], Scheme(SCHEMES["rows"], smooth=SmoothQuant(0.5)))
    inverse = found.program.attributes["input_1_smoothing"]
    assert inverse[7] == 1 and 0 < inverse[4] <= inverse[3] and bool(inverse.isfinite().all())


def test_a_generator_is_read_once_and_the_answer_is_the_same(batches: list[torch.Tensor]) -> None:
    def stream() -> Iterator[torch.Tensor]:
        buffer = torch.empty_like(batches[0])
        for batch in batches:
            yield buffer.copy_(batch)  # a loader that uses its memory again

    torch.manual_seed(1)
    model = PreNorm().eval()
    scheme = Scheme(SCHEMES["static"], smooth=SMOOTH, sample=3)
    first, second = quantize(model, stream(), preset=scheme), quantize(model, batches, preset=scheme)
    assert first.record.batches == len(batches) and first.record == second.record
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))


def test_bad_data_is_named(batches: list[torch.Tensor]) -> None:
    batches[2][0, 0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="batch 3: argument 'x' holds NaN"):
        quantize(PreNorm().eval(), batches, preset=Scheme(SCHEMES["rows"], smooth=SMOOTH))


def test_padding_does_not_count() -> None:
    class Masked(Attention):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, attention_mask)

    def data(garbage: float) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        mask = (torch.arange(7)[None] < torch.tensor([[7], [4], [2]])).long()
        x = torch.randn(3, 7, 16, generator=generator) * torch.logspace(0, 2, 16)
        return [{"x": torch.where(mask[..., None] == 1, x, garbage), "attention_mask": mask}]

    torch.manual_seed(0)
    model = Masked().eval()
    scheme = Scheme(SCHEMES["rows"], smooth=SMOOTH)
    one, other = (calibrate(model, data(garbage), scheme).program.attributes["x_smoothing"] for garbage in (0.0, 1e4))
    assert torch.equal(one, other)


def test_a_row_sample_is_bounded_and_does_not_depend_on_batches() -> None:
    x = torch.randn(5000, 3)
    whole, parts = RowSample(), RowSample()
    whole.observe(x)
    for part in x.split([1, 700, 3, 1296, 3000]):
        parts.observe(part)
    assert torch.equal(whole.rows, parts.rows) and torch.equal(whole.peak, parts.peak) and torch.equal(whole.peak, x.abs().amax(0))
    assert 1024 <= len(whole.rows) <= 2048 and torch.equal(whole.rows, x[::4])
