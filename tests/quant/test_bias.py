"""Bias correction: over the sample, the means of the quantized model's linears are those of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sashiko.diagnostics.errors import CalibrationError
from sashiko.quant import BF16, FP32, ActivationScheme, OpScheme, Override, Scheme, WeightScheme, calibrate, quantize
from tests.graph.captures import Causal
from tests.quant.models import Attention, mlp

COARSE = OpScheme(None, WeightScheme(4, "group", 16))
SCHEMES = {"groups": COARSE, "rows": OpScheme(ActivationScheme(granularity="row")), "static": OpScheme(ActivationScheme(signed=False))}


class Shifted(nn.Module):
    """Three linears whose inputs are far from zero on average, so that rounding errors of weights shift the results; x: [..., 32]."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 32, bias), nn.Linear(32, 32, bias), nn.Linear(32, 8, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.third(torch.sigmoid(self.second(torch.sigmoid(self.first(x + 4)) + 2)) + 2))


@pytest.mark.parametrize("bias", [True, False])
def test_shifted_means(bias: bool) -> None:
    torch.manual_seed(0)
    model, batches = Shifted(bias).eval(), [torch.randn(4, 16, 32) for _ in range(5)]
    plain = quantize(model, batches[:4], preset=Scheme(COARSE))
    found = quantize(model, batches[:4], preset=Scheme(COARSE, correct_bias=True))
    with torch.no_grad():
        exact, x = model(batches[4]), torch.cat(batches[:4])
        assert (found(batches[4]) - exact).norm() < (plain(batches[4]) - exact).norm() / 3
        mean = model(x).mean((0, 1))
        shift = (found(x).mean((0, 1)) - mean).abs().max()
    # Rounding of float32 sums.
    assert shift < 1e-5 * mean.abs().max() < (plain(x).mean((0, 1)) - mean).abs().max()
    names = dict(found.named_parameters())
    assert {"first.bias", "second.bias", "third.bias"} <= names.keys() and len(names) == 3


@pytest.mark.parametrize("name", SCHEMES)
def test_each_is_corrected_for_what_the_others_left(name: str) -> None:
    torch.manual_seed(0)
    model, x = Shifted(True).eval(), torch.randn(64, 32)
    small = quantize(model, [x[:16], x[16:]], preset=Scheme(SCHEMES[name], correct_bias=True))
    with torch.no_grad():
        mean = model(x).mean(0)
        torch.testing.assert_close(small(x).mean(0), mean, rtol=0, atol=1e-5 * float(mean.abs().max()))


def test_only_the_sample_counts() -> None:
    torch.manual_seed(0)
    model, x = Shifted(True).eval(), torch.randn(3, 16, 32)
    scheme = Scheme(COARSE, correct_bias=True, sample=2)
    one, other = (quantize(model, [x[0], x[1], last], preset=scheme) for last in (x[2], x[2] * 9))
    assert torch.equal(one.get_parameter("third.bias"), other.get_parameter("third.bias"))


def test_padding_does_not_count() -> None:
    class Masked(Attention):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, attention_mask)

    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(3, 7, 16) + 1
    mask = (torch.arange(7)[None] < torch.tensor([[7], [4], [2]])).long()
    scheme = Scheme(COARSE, correct_bias=True)
    found = [
        quantize(model, [{"x": torch.where(mask[..., None] == 1, x, garbage), "attention_mask": mask}], preset=scheme).query.bias
        for garbage in (0.0, 1e3)
    ]
    torch.testing.assert_close(*found)


def test_tied_biases_and_weights_part() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.fc(torch.sigmoid(self.fc(x + 3)) + 2) + self.fc.bias)

    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(64, 32)
    small = quantize(model, [x], preset=Scheme(COARSE, correct_bias=True))
    with torch.no_grad():
        torch.testing.assert_close(small(x).mean(0), model(x).mean(0), rtol=0, atol=1e-4)
    assert torch.equal(small.fc.bias, model.fc.bias)
    assert sum(name.endswith("_int4") for name, _ in small.named_buffers()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_in_other_forms(dtype: torch.dtype) -> None:
    class Forms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 32))
            self.b = nn.Parameter(torch.randn(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            moving = torch.addmm(x.mean(0), x + 3, self.w)
            full = torch.addmm(x, x + 3, self.w.t())
            return moving + full + nn.functional.linear(x + 3, self.w, self.b * 2)

    torch.manual_seed(0)
    model, x = Forms().eval().to(dtype), torch.randn(64, 32, dtype=dtype)
    small, plain = (quantize(model, [x], preset=Scheme(COARSE, correct_bias=c)) for c in (True, False))
    with torch.no_grad():
        mean = model(x).float().mean(0)
        shifts = [(m(x).float().mean(0) - mean).abs().max() for m in (small, plain)]
    # Three biases and their sums, each rounded to the type.
    assert shifts[0] < min(shifts[1] / 2, 4 * float(torch.finfo(dtype).eps) * 32**0.5 * 10)


def test_a_choice_of_precisions_is_corrected_too() -> None:
    torch.manual_seed(0)
    model, x = Shifted(True).eval(), torch.randn(64, 32)
    found = calibrate(model, [x], Scheme(COARSE, correct_bias=True))
    assert set(found.means) == {"first", "second", "third"}
    mixed = found.build({"second": SCHEMES["rows"]})
    with torch.no_grad():
        torch.testing.assert_close(mixed(x).mean(0), model(x).mean(0), rtol=0, atol=1e-4)


def test_what_a_choice_leaves_in_floating_point_keeps_its_bias() -> None:
    torch.manual_seed(0)
    model, x = Shifted(True).eval(), torch.randn(64, 32)
    found = calibrate(model, [x], Scheme(COARSE, correct_bias=True))
    mixed = found.build({"first": BF16, "second": FP32})
    for name in ("first", "second"):
        assert torch.equal(mixed.get_parameter(f"{name}.bias"), model.get_parameter(f"{name}.bias"))
    narrow = found.build(dict.fromkeys(found.means, BF16))
    with torch.no_grad():
        torch.testing.assert_close(mixed(x).mean(0), model(x).mean(0), rtol=0, atol=1e-4)  # the last makes up for what is before it
        torch.testing.assert_close(narrow(x), quantize(model, [x], preset=Scheme(BF16))(x), rtol=0, atol=0)


def test_infinity_that_only_quantization_brings_is_a_clear_error() -> None:
    class Logarithm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
            self.first.weight.data.copy_(torch.eye(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).log())  # type: ignore[no-any-return]

    batches = [torch.tensor([2.6, 1, 2, 3, 4, 5, 6, 127]).repeat(8, 1) for _ in range(3)]  # 2.6 becomes 3: the mean is to fall
    batches[1][0, 0] = 1e-3
    scheme = Scheme(OpScheme(ActivationScheme(granularity="row")), correct_bias=True)
    with pytest.raises(CalibrationError, match="batch 2: once quantized, second gives NaN or infinity"):
        quantize(Logarithm().eval(), batches, preset=scheme)


def test_without_sites_nothing_happens() -> None:
    model, data = mlp(), [torch.randn(5, 8)]
    scheme = Scheme(SCHEMES["rows"], (Override(nn.Linear, OpScheme(None, None)),), correct_bias=True)
    assert torch.equal(quantize(model, data, preset=scheme)(data[0]), model(data[0]))


def test_runs_side_by_side_of_a_model_with_vmap() -> None:
    model, x = Causal().eval(), torch.randn(3, 5, 4)
    with torch.no_grad():
        found = quantize(model, [x], preset=Scheme(SCHEMES["static"], correct_bias=True), progress=False)
        torch.testing.assert_close(found(x), model(x), rtol=0, atol=0.05)  # a few steps of 8 bits
