"""Every kind of scheme on every kind of operation: the simulation against the same arithmetic written out in float64."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from sashiko.diagnostics.errors import InputError
from sashiko.platforms.catalogue import X86_64_VNNI
from sashiko.quant import BF16, FP32, ActivationScheme, OpScheme, Override, QuantizedModule, Scheme, WeightScheme, calibrate, quantize
from sashiko.quant.weights import dequantized, quantize_weight, weight_scales
from tests.quant.models import mlp

ROW = OpScheme(ActivationScheme(granularity="row"))
STATIC = OpScheme(ActivationScheme("minmax"))


class Everything(nn.Module):
    """One of each operation; x: int64 [B, S] below 10 -> [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.head = nn.Embedding(10, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        h = torch.matmul(torch.softmax(h @ h.transpose(1, 2), -1), h)
        h = torch.nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        out: torch.Tensor = self.head(h.mean(1))
        return out


def labels(small: QuantizedModule) -> dict[str, str]:
    return {item.site.name: item.site.scheme.label for item in small.record.sites}


def test_rows_have_scales_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    small = quantize(model, [torch.randn(2, 3, 8)], preset=Scheme(ROW), target=X86_64_VNNI)
    x = torch.randn(5, 3, 8) * torch.logspace(-3, 3, 5)[:, None, None]
    scales = x.double().abs().amax(-1, keepdim=True) / 127
    ints = torch.round(x.double() / scales)
    weight = quantize_weight(model[0].weight, WeightScheme())
    exact = (ints * scales) @ dequantized(weight.values, weight.scales).double().T + model[0].bias.double()
    # A tie may round either way when the scale is computed in float32: one step of one input and its weight.
    step = (scales * weight.scales.double().max() * 127).float()
    error = (small(x) - exact).abs()
    assert (error <= step).all() and (error <= 1e-5 * exact.abs().amax(-1, keepdim=True)).float().mean() > 0.9
    assert small.record.sites[0].ranges == ()


def test_rows_with_a_zero_point_use_all_levels() -> None:
    one_sided = torch.rand(64, 16) + 3
    model = nn.Sequential(nn.Linear(16, 4)).eval()
    exact = model(one_sided)
    errors = []
    for signed in (True, False):
        scheme = Scheme(OpScheme(ActivationScheme(signed=signed, granularity="row")))
        errors.append((quantize(model, [one_sided], preset=scheme)(one_sided) - exact).abs().mean())
    assert errors[1] < errors[0]


@pytest.mark.parametrize(("weight", "bits", "scales"), [(WeightScheme(), 8, (4,)), (WeightScheme(4, "group", 8), 4, (4, 2))])
def test_weights_alone(weight: WeightScheme, bits: int, scales: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(16, 4)).eval()
    small = quantize(model, [torch.randn(2, 16)], preset=Scheme(OpScheme(None, weight)))
    held = {name: t for name, t in small.named_buffers() if name.endswith((f"_int{bits}", "_scale"))}
    values, scale = held[f"0.weight_int{bits}"], held["0.weight_scale"]
    assert values.dtype == torch.int8 and values.abs().max() == 2 ** (bits - 1) - 1 and scale.shape == scales
    x = torch.randn(7, 16)
    expected = torch.nn.functional.linear(x, dequantized(values, scale), model[0].bias)
    torch.testing.assert_close(small(x), expected)
    assert small.record.sites[0].ranges == () and labels(small) == {"0": f"int{bits} weight"}


def test_groups_follow_the_inputs() -> None:
    model = nn.Sequential(nn.Linear(48, 4), nn.Linear(4, 20), nn.Linear(20, 2)).eval()
    small = quantize(model, [torch.randn(2, 48)], preset="int4-weight")
    (item,) = small.record.sites
    assert item.site.name == "0" and item.site.scheme.weight is not None and item.site.scheme.weight.group == 16
    assert [(left.name, left.reason) for left in small.record.left_out] == [
        ("1", "groups of 8 do not divide its 4 inputs"), ("2", "groups of 8 do not divide its 20 inputs"),
    ]


def test_every_operation() -> None:
    torch.manual_seed(0)
    model = Everything().eval()
    data = [torch.randint(0, 10, (4, 6)) for _ in range(3)]
    scheme = Scheme(STATIC, operations=("linear", "convolution", "matmul", "attention", "embedding"))
    small = quantize(model, data, preset=scheme)
    kinds = [(item.site.operation, len(item.ranges), item.weight_sqnr is not None) for item in small.record.sites]
    assert kinds == [
        ("embedding", 0, True), ("convolution", 1, True), ("matmul", 2, False), ("matmul", 2, False), ("attention", 3, False),
        ("linear", 1, True),
    ]
    exact = model(data[0])
    error = (small(data[0]) - exact).norm() / exact.norm()
    # Six operations, each with two operands of relative error 2^-8 / sqrt(3) at most of the range: well below a twentieth of the result.
    assert 0 < error < 0.05
    assert small.conv.weight_int8.shape == (8, 8, 3)
    assert labels(quantize(model, data)) == {"conv": "int8", "head": "int8 per row"}
    by_row = quantize(model, data, preset="int8-dynamic")
    assert labels(by_row) == {"head": "int8 per row"}
    assert [item.reason.split(",")[0] for item in by_row.record.left_out] == [
        "the scheme leaves convolutions in floating point", "both factors are activations", "both factors are activations",
        "attention multiplies activations with activations",
    ]


def test_overrides_by_name_pattern_and_class() -> None:
    model, data = mlp(), [torch.randn(5, 8)]
    assert labels(quantize(model, data, preset=Scheme(STATIC, (Override("2", ROW),)))) == {"0": "int8", "2": "int8 per row"}
    assert labels(quantize(model, data, preset=Scheme(STATIC, (Override(re.compile("[01]"), FP32),)))) == {"2": "int8"}
    last_wins = Scheme(STATIC, (Override(nn.Linear, BF16), Override("0", ROW)))
    small = quantize(model, data, preset=last_wins)
    assert labels(small) == {"0": "int8 per row", "2": "bf16"}
    assert quantize(model, data, exclude=nn.Linear).record.sites == ()
    with pytest.raises(InputError, match="Conv2d"):
        quantize(model, data, exclude=nn.Conv2d)


def test_bf16_rounds_the_operands() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4)).eval(), torch.randn(5, 8)
    small = quantize(model, [x], preset=Scheme(BF16))
    torch.testing.assert_close(small(x), model.to(torch.bfloat16)(x.to(torch.bfloat16)).float(), rtol=0, atol=0)


def test_one_calibration_builds_every_mix() -> None:
    model, data = mlp(), [torch.randn(5, 8) for _ in range(3)]
    found = calibrate(model, data, Scheme(STATIC))
    assert labels(found.build()) == {"0": "int8", "2": "int8"}
    assert labels(found.build({"0": BF16, "2": FP32})) == {"0": "bf16"}
    assert labels(found.build({"0": ROW})) == {"0": "int8 per row", "2": "int8"}
    torch.testing.assert_close(found.build({"0": FP32, "2": FP32})(data[0]), model(data[0]))


def test_clipped_weights_have_less_error() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64)
    plain, clipped = (quantize_weight(weight, WeightScheme(4, "group", 64, clip=clip)) for clip in ("none", "mse"))  # type: ignore[arg-type]
    assert clipped.sqnr > plain.sqnr + 0.3
    assert bool((weight_scales(weight, WeightScheme(8, clip="mse")) <= weight_scales(weight, WeightScheme(8))).all())


def test_one_scale_for_all_is_that_of_what_is_not_zero() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64)
    weight[5] = 0.0
    found = quantize_weight(weight, WeightScheme(granularity="tensor"))
    assert found.sqnr > 38 and torch.equal(found.scales, (weight.abs().max() / 127).expand(16))
    for scheme in (WeightScheme(granularity="tensor", clip="mse"), WeightScheme(), WeightScheme(4, "group", 64, clip="mse")):
        assert bool((weight_scales(torch.zeros(3, 64), scheme) == 1).all())


def test_one_scale_for_all_is_clipped_for_all() -> None:
    """No row by itself has so many small weights that one large one is worth giving up."""
    torch.manual_seed(0)
    weight = 2 * torch.rand(64, 1024) - 1
    weight[3, 5] = 1.1
    plain, clipped = (quantize_weight(weight, WeightScheme(granularity="tensor", clip=clip)) for clip in ("none", "mse"))  # type: ignore[arg-type]
    assert clipped.sqnr > plain.sqnr + 0.3
