"""Weights that are small enough for products to be added in 16 bits: their scales, when they are wanted, and what they are good for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.driver.model import CompiledModel
from sashiko.graph.sums16 import how_many, largest
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N1, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.host import host
from sashiko.quant import PRESETS, ActivationScheme, OpScheme, Scheme, WeightScheme, calibrate, prepare_qat, quantize
from sashiko.quant.gptq import Inputs, compensated
from sashiko.quant.scheme import Sums
from sashiko.quant.weights import dequantized, quantize_weight, settled
from tests.sweeps import swept

RUNS_V3 = pytest.mark.skipif(bool(X86_64_V3.why_not_on(host())), reason="this machine lacks AVX2")
COUNTS: tuple[Sums, ...] = (2, 4)


def normal(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


def counts_of(module: nn.Module) -> dict[str, int]:
    """`how_many` of each weight."""
    integers = {name.removesuffix(".weight_int8"): value for name, value in module.named_buffers() if name.endswith("_int8")}
    return {name: how_many(value.movedim(1, -1).flatten(1)) for name, value in integers.items()}


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("count", COUNTS)
def test_as_large_as_they_may_be(count: Sums, granularity: str) -> None:
    weight = normal(24, 100)
    found = quantize_weight(weight, WeightScheme(granularity=granularity, sums16=count))  # type: ignore[arg-type]
    assert how_many(found.values) == count
    sums = largest(found.values.float(), int(count))
    assert sums.max() == 128 and (granularity == "tensor" or (sums >= 126).all())
    whole = quantize_weight(weight, WeightScheme(granularity=granularity))  # type: ignore[arg-type]
    assert whole.sqnr - 6 < found.sqnr < whole.sqnr and how_many(whole.values) == 1


def test_a_few_large_weights_keep_their_scale() -> None:
    """Sums count, not magnitudes: 127 is fine beside what is small."""
    weight = normal(8, 64) * 0.02
    weight[:, 5] = 1.0
    for count in COUNTS:
        found = quantize_weight(weight, WeightScheme(sums16=count))
        assert int(found.values.max()) > 110 and how_many(found.values) >= int(count)


def test_how_many_are_worth_it() -> None:
    """Four where they leave 36 dB, or hardly less than all bits do; two, or one, where fewer would be lost."""
    heavy = torch.distributions.StudentT(torch.tensor(2.5)).sample((64, 512))
    flat = torch.rand(64, 512, generator=torch.Generator().manual_seed(0)) - 0.5
    assert settled(normal(64, 64), WeightScheme(sums16="most")).sums16 == 4
    assert settled(heavy, WeightScheme(sums16="most")).sums16 == 4 and quantize_weight(heavy, WeightScheme()).sqnr < 34
    laplace = torch.distributions.Laplace(0.0, 1.0).sample((64, 512))
    for weight in (flat, laplace, heavy, normal(64, 4096)):
        count = settled(weight, WeightScheme(sums16="most")).sums16
        found, whole = (quantize_weight(weight, WeightScheme(sums16=sums)) for sums in (count, 1))  # type: ignore[arg-type]
        assert found.sqnr > 35.8 or found.sqnr > whole.sqnr - 1.7
    assert settled(torch.zeros(3, 8), WeightScheme(sums16="most")).sums16 == 4
    large = normal(32, 64) * 0.05
    large[:, [0, 1, 4, 5]] = 1.0  # are added in 16 bits, and cost all others their digits
    for dead in (0, 1):
        large[:dead] = 0.0
        assert settled(large, WeightScheme(sums16="most")).sums16 == 1
    assert settled(normal(8, 64), WeightScheme()).sums16 == "auto" and how_many(quantize_weight(normal(8, 64), WeightScheme()).values) == 1


@pytest.mark.parametrize("target", swept(CATALOGUE, (X86_64_V4, X86_64_VNNI, NEOVERSE_N1)), ids=lambda target: target.name)
def test_the_target_decides(target: sashiko.Target) -> None:
    model, batches = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), [torch.randn(9, 64)]
    for preset in PRESETS:
        if preset == "int4-weight":
            continue
        small = quantize(model, batches, preset=preset, target=target)
        counts = [how_many(value) for name, value in small.named_buffers() if name.endswith("_int8")]
        assert len(counts) == 2 and (counts == [4, 4]) == (target.sums16 and preset != "int8-weight")


def test_what_is_asked_for() -> None:
    model, batches = nn.Sequential(nn.Linear(64, 64)).eval(), [torch.randn(9, 64)]
    for target in (X86_64_V3, X86_64_VNNI):
        for count in (1, 2, 4):
            scheme = Scheme(OpScheme(ActivationScheme(), WeightScheme(sums16=count)))
            [integers] = [v for n, v in quantize(model, batches, preset=scheme, target=target).named_buffers() if n.endswith("_int8")]
            assert how_many(integers) == count
    for bad in ({"sums16": 3}, {"bits": 4, "granularity": "group", "sums16": 4}, {"bits": 4, "granularity": "group", "sums16": "most"}):
        with pytest.raises(InputError, match="sums16"):
            WeightScheme(**bad)  # type: ignore[arg-type]


def test_every_mix_of_one_calibration() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    found = calibrate(model, [torch.randn(9, 64)], PRESETS["int8-minmax"], target=X86_64_V3)
    for chosen, count in ((OpScheme(), 4), (OpScheme(None), 1), (OpScheme(weight=WeightScheme(sums16=2)), 2)):
        held = dict(found.build({"2": chosen}).named_buffers())
        assert how_many(held["2.weight_int8"]) == count and how_many(held["0.weight_int8"]) == 4


def test_convolutions_that_are_no_products_of_integers_keep_all_bits() -> None:
    """Whatever is chosen for them later."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 16, 3)).eval()
    found = calibrate(model, [torch.randn(2, 8, 9, 9)], PRESETS["int8-minmax"], target=X86_64_V3)
    for choice in ({}, {"0": OpScheme(), "2": OpScheme()}):
        held = dict(found.build(choice).named_buffers())
        assert int(held["0.weight_int8"].abs().amax((1, 2, 3)).min()) == 127, "every channel has its own scale"
        assert how_many(held["2.weight_int8"].movedim(1, -1).flatten(1)) == 4


@pytest.mark.parametrize("count", COUNTS)
def test_compensated(count: Sums) -> None:
    x = torch.randn(400, 12) @ torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    weight, inputs = normal(32, 64), Inputs.of((x.t() @ x).double())
    scheme = WeightScheme(sums16=count)
    nearest, found = quantize_weight(weight, scheme), compensated(weight, inputs, replace(scheme, compensate=True))
    assert how_many(found.values) >= int(count)
    errors = [(x @ (dequantized(q.values, q.scales) - weight).t()).norm() for q in (nearest, found)]
    assert errors[1] < errors[0] / 1.5


class Net(nn.Module):
    """A convolution, one in groups, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.groups, self.head = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3, groups=2, padding=1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.groups(torch.relu(self.first(x))))
        result: torch.Tensor = self.head(h.mean((2, 3)))
        return result


def kernels(compiled: CompiledModel) -> list[str]:
    assert compiled.built is not None
    names = [note.kernel for part in compiled.built.notes if isinstance(part, tuple) for note in part]
    return [name for name in names if name.startswith(("gemm", "winograd"))]


@RUNS_V3
@pytest.mark.parametrize("preset", ["int8", "int8-static", "int8-symmetric"])
def test_all_products_are_the_fast_ones(preset: str) -> None:
    """Convolutions, too: which of their weights are neighbours is a matter of channels-last images. Of the groups 16 products do for 36,
    and the last product is so little of the work that it keeps all bits."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 14, 14)
    small = quantize(model, [x], preset=preset, target=X86_64_V3)
    compiled = sashiko.compile(small, (x,), target=X86_64_V3)
    found = [(name.partition("_")[0], name.rpartition("_")[2]) for name in kernels(compiled)]
    assert found == [("gemm", "avx2maddubs4"), ("winograd", "avx2madd"), ("gemm", "avx2madd")]
    exact = model(x)
    error, ours = ((result(x) - exact).norm() / exact.norm() for result in (small, compiled))
    assert error < 0.05 and ours < error * 1.2


def test_the_cheapest_products_keep_all_bits() -> None:
    """As many as have 3 % of all multiplications together: one of two that have 2 % each, whatever the number of rows."""
    layers = (nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 4), nn.Linear(4, 128))
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))).eval()
    for rows in (1, 9):
        found = counts_of(quantize(model, [torch.randn(rows, 64)], preset="int8-static", target=X86_64_V3))
        assert list(found) == ["0", "2", "4", "6"] and [n == 1 for n in found.values()] == [False, False, True, False]


FILTERED = {
    "8 x 9": (nn.Conv2d(32, 48, 3, padding=1), (8, 9), True),
    "no padding": (nn.Conv2d(32, 48, 3), (13, 16), True),
    "few channels": (nn.Conv2d(8, 48, 3), (12, 12), False),
    "few columns": (nn.Conv2d(32, 12, 3), (12, 12), False),
    "mostly borders": (nn.Conv2d(32, 48, 3, padding=1), (7, 7), False),
    "every second": (nn.Conv2d(32, 48, 3, 2), (12, 12), False),
    "groups": (nn.Conv2d(32, 48, 3, groups=2), (14, 14), False),
    "far apart": (nn.Conv2d(32, 48, 3, dilation=2), (16, 16), False),
    "another window": (nn.Conv2d(32, 48, (3, 5)), (12, 12), False),
    "large": (nn.Conv2d(256, 256, 3, padding=1), (4, 8), False),
}


@RUNS_V3
@pytest.mark.parametrize(("layer", "size", "filtered"), FILTERED.values(), ids=FILTERED)
def test_what_is_filtered_keeps_all_bits(layer: nn.Module, size: tuple[int, int], filtered: bool) -> None:
    """What the quantizer takes for minimal filtering is computed so, also where the batch is not known."""
    torch.manual_seed(0)
    model, x = nn.Sequential(layer, nn.ReLU()).eval(), torch.randn(2, layer.in_channels, *size)  # type: ignore[arg-type]
    found = quantize(model, [x], preset="int8-static", target=X86_64_V3)
    [integers] = [v.movedim(1, -1).flatten(1) for name, v in found.named_buffers() if name.endswith("_int8")]
    assert how_many(integers) == (1 if filtered else 4)
    for dynamic in (None, ({0: torch.export.Dim("batch", min=1, max=8)},)):
        compiled = sashiko.compile(found, (x,), target=X86_64_V3, dynamic_shapes=dynamic)
        assert not filtered or kernels(compiled) == ["winograd_i32_u8_i8_6x16x2_avx2madd"]
        expected = found(x)
        assert (compiled(x) - expected).norm() / expected.norm() < 1e-3


def test_images_of_several_sizes_are_not_filtered() -> None:
    """Compiled for any of them, products are of bytes."""
    model = nn.Sequential(nn.Conv2d(32, 48, 3), nn.ReLU()).eval()
    for sizes, count in (((12, 12), 1), ((12, 14), 4)):
        batches = [torch.randn(n, 32, size, 12) for n, size in enumerate(sizes, 1)]
        assert counts_of(quantize(model, batches, preset="int8-static", target=X86_64_V3)) == {"0": count}


def test_one_image_alone() -> None:
    """Without a batch, and with as many lines as channels."""
    model = nn.Sequential(nn.Conv2d(32, 48, 3), nn.ReLU()).eval()
    assert counts_of(quantize(model, [torch.randn(32, 32, 12)], preset="int8-static", target=X86_64_V3)) == {"0": 1}


@RUNS_V3
def test_weights_that_change() -> None:
    """Others that fit are packed again; larger ones cannot be, and say so instead of saturating."""
    model, x = nn.Sequential(nn.Linear(64, 32)).eval(), torch.randn(5, 64)
    small = quantize(model, [x], preset="int8-static", target=X86_64_V3)
    compiled = sashiko.compile(small, (x,), target=X86_64_V3)
    integers = next(value for name, value in small.named_buffers() if name.endswith("_int8"))
    integers.neg_()
    torch.testing.assert_close(compiled(x), small(x), rtol=0, atol=0.02)
    integers.fill_(127)
    with pytest.raises(InputError, match="larger: 4 of its products do not fit 16 bits"):
        compiled(x)
    again = sashiko.compile(small, (x,), target=X86_64_V3)
    assert kernels(again) == ["gemm_i32_u8_i8_6x16x2_avx2madd"]
    torch.testing.assert_close(again(x), small(x), rtol=1e-3, atol=0.02)
    assert "not gemm_i32_u8_i8_3x16x4_avx2maddubs4: 4 of its products do not fit 16 bits" in str(sashiko.explain(again))


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(64, 16)), Net()], ids=["linear", "convolutions"])
def test_training_rounds_as_the_converted_model_does(model: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64) if isinstance(model, nn.Sequential) else torch.randn(2, 3, 10, 10)
    scheme = replace(PRESETS["int8-static"], smooth=None)
    trained = prepare_qat(model.eval(), [x], preset=scheme, target=X86_64_V3)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        trained(x).square().mean().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trained.parameters())
        optimizer.step()
    small = trained.convert()
    assert set(counts_of(small).values()) == ({4} if isinstance(model, nn.Sequential) else {1, 4})
    torch.testing.assert_close(trained(x).detach(), small(x), rtol=0, atol=trained(x).abs().max().item() / 127)
