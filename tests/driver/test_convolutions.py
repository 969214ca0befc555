"""Convolutions and pooling as compiled code: against eager in f64, in one native segment, and what is left to PyTorch with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sashiko
from sashiko.driver.model import CompiledModel
from sashiko.platforms.catalogue import CATALOGUE, X86_64_V4
from sashiko.platforms.host import host
from sashiko.runtime.plan import AtenStep

EPS = torch.finfo(torch.float32).eps


def left(compiled: CompiledModel) -> list[str]:
    assert compiled.built is not None
    return [str(note.target) for note in compiled.built.notes if isinstance(note, AtenStep)]


def labels(compiled: CompiledModel) -> list[str]:
    assert compiled.built is not None
    return [note.label for notes in compiled.built.notes if not isinstance(notes, AtenStep) for note in notes]


def roundings(layer: nn.Module, x: Tensor) -> Tensor:
    """What the sums of a layer in f32 may be off by: k + 2 roundings of the sum of magnitudes (Higham, section 3.1)."""
    magnitudes = _double(layer)
    with torch.no_grad():
        for parameter in magnitudes.parameters():
            parameter.abs_()
        terms = next(layer.parameters())[0].numel() if list(layer.parameters()) else 128
        return (terms + 2) * EPS / 2 * magnitudes(x.double().abs())


def _double(layer: nn.Module) -> nn.Module:
    copy = nn.Module.__new__(type(layer))
    copy.__dict__ = dict(layer.__dict__) | {"_parameters": {k: v if v is None else nn.Parameter(v.detach().double().clone())
                                                           for k, v in layer._parameters.items()}}
    return copy


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3x3": (lambda: nn.Conv2d(5, 37, 3, padding=1), (2, 5, 9, 11)),
    "strided": (lambda: nn.Conv2d(16, 20, (3, 5), stride=(2, 3), padding=(0, 2)), (2, 16, 13, 14)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2), (1, 4, 10, 8)),
    "1x1": (lambda: nn.Conv2d(16, 24, 1), (2, 16, 5, 7)),
    "1x1 strided": (lambda: nn.Conv2d(16, 24, 1, stride=2, bias=False), (2, 16, 8, 7)),
    "patches": (lambda: nn.Conv2d(3, 10, 4, stride=4), (2, 3, 8, 12)),
    "patches and a rest": (lambda: nn.Conv2d(2, 7, (3, 5), stride=(3, 5), bias=False), (2, 2, 10, 17)),
    "patches of a line": (lambda: nn.Conv1d(2, 5, 9, stride=9), (3, 2, 40)),
    "patches of a volume": (lambda: nn.Conv3d(3, 6, (2, 4, 4), stride=(2, 4, 4)), (1, 3, 4, 8, 9)),
    "patches deeper than wide": (lambda: nn.Conv2d(6, 8, 2, stride=2), (2, 6, 6, 9)),
    "same": (lambda: nn.Conv1d(6, 5, 4, padding="same"), (2, 6, 17)),
    "volume": (lambda: nn.Conv3d(3, 7, (3, 2, 3), padding=1, dilation=(1, 2, 1)), (1, 3, 5, 6, 7)),
    "depthwise": (lambda: nn.Conv2d(20, 20, 3, padding=1, stride=2, groups=20), (2, 20, 9, 9)),
    "depthwise, odd lines": (lambda: nn.Conv2d(20, 20, 5, padding=2, groups=20), (2, 20, 13, 19)),
    "depthwise, large windows": (lambda: nn.Conv2d(12, 12, (13, 9), padding=(6, 4), groups=12), (1, 12, 17, 14)),
    "depthwise volume": (lambda: nn.Conv3d(8, 8, 5, padding=2, groups=8), (1, 8, 5, 6, 7)),
    "each channel twice": (lambda: nn.Conv2d(12, 24, 3, padding=1, groups=12), (2, 12, 9, 9)),
    "each channel thrice": (lambda: nn.Conv1d(5, 15, 3, dilation=2, groups=5), (2, 5, 21)),
    "narrow groups": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=16), (2, 64, 9, 11)),
    "narrow groups of 1x1": (lambda: nn.Conv2d(48, 24, 1, groups=12), (2, 48, 5, 7)),
    "odd groups": (lambda: nn.Conv2d(15, 21, (3, 2), stride=2, padding=1, groups=3, bias=False), (2, 15, 9, 10)),
    "wide groups": (lambda: nn.Conv2d(48, 96, 3, stride=2, padding=1, groups=2), (2, 48, 14, 14)),
    "groups 1x1 strided": (lambda: nn.Conv2d(40, 80, 1, stride=2, groups=5), (2, 40, 7, 7)),
    "groups of a line": (lambda: nn.Conv1d(12, 24, 5, padding=2, groups=6), (3, 12, 31)),
    "groups of a volume": (lambda: nn.Conv3d(8, 16, 3, padding=1, dilation=(1, 2, 1), groups=2), (1, 8, 5, 6, 7)),
    "depthwise 1d": (lambda: nn.Conv1d(9, 9, 5, groups=9, bias=False), (2, 9, 21)),
    "average": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), (2, 5, 8, 10)),
    "maximum": (lambda: nn.MaxPool2d(3, 2, 1), (2, 5, 8, 10)),
    "average of all": (lambda: nn.AvgPool2d((640, 9), padding=(0, 1), ceil_mode=True), (2, 5, 8, 7)),
    "maximum of all": (lambda: nn.MaxPool2d(640, padding=1, ceil_mode=True), (2, 5, 8, 10)),
    "transposed": (lambda: nn.ConvTranspose2d(5, 7, 3, stride=2, padding=1, output_padding=1), (2, 5, 6, 4)),
    "transposed without overlap": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2), (1, 4, 5, 7)),
    "transposed, far apart": (
        lambda: nn.ConvTranspose2d(3, 5, (2, 5), stride=(5, 2), dilation=(3, 2), output_padding=(4, 1)), (2, 3, 4, 5)
    ),
    "transposed 1d": (lambda: nn.ConvTranspose1d(6, 4, 7, bias=False, padding=3), (2, 6, 9)),
    "transposed volume": (lambda: nn.ConvTranspose3d(2, 3, 3, stride=(1, 2, 3), padding=(0, 1, 2)), (1, 2, 3, 4, 3)),
    "transposed in groups": (
        lambda: nn.ConvTranspose2d(6, 9, (3, 4), stride=(2, 3), padding=1, dilation=(2, 1), output_padding=(1, 0), groups=3), (2, 6, 5, 4)
    ),
    "transposed depthwise": (lambda: nn.ConvTranspose2d(20, 20, 4, stride=2, padding=1, groups=20), (2, 20, 6, 5)),
    "transposed, each channel twice without overlap": (lambda: nn.ConvTranspose2d(3, 6, 2, stride=2, groups=3), (2, 3, 4, 4)),
    "transposed, each channel twice": (lambda: nn.ConvTranspose1d(5, 10, 5, stride=3, groups=5, bias=False), (2, 5, 7)),
    "transposed depthwise volume": (lambda: nn.ConvTranspose3d(3, 3, 3, stride=(1, 2, 3), groups=3), (1, 3, 3, 4, 3)),
    "nearest, twice": (lambda: nn.Upsample(scale_factor=2), (2, 5, 8, 10)),
    "nearest, elsewhere": (lambda: nn.Upsample((7, 30), mode="nearest-exact"), (2, 5, 8, 10)),
    "unequal regions": (lambda: nn.AdaptiveAvgPool2d((3, 12)), (2, 5, 8, 10)),
    "regions": (lambda: nn.AdaptiveAvgPool2d((2, 5)), (2, 5, 8, 10)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_native_and_agree_with_f64(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make().eval(), torch.randn(shape)
    compiled = sashiko.compile(layer, (x,), strict=True)
    error = (compiled(x).double() - _double(layer)(x.double())).abs()
    assert (error <= roundings(layer, x)).all()


@torch.no_grad()
@pytest.mark.parametrize("bf16", [False, True])
def test_patches_are_read_line_by_line(bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch has its lines one channel after the other, as they lie in the image: nothing is gathered."""
    monkeypatch.setenv("SASHIKO_DUMP", str(tmp_path))

    class Patches(nn.Conv2d):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(image).flatten(2).transpose(1, 2)

    layer, x = Patches(3, 32, 16, stride=16).eval(), torch.randn(1, 3, 64, 48)
    target = X86_64_V4 if bf16 else None  # where integers stand for bf16, making them divides
    compiled = sashiko.compile(layer, (x,), strict=True, precision="bf16" if bf16 else "fp32", target=target)
    code = next(tmp_path.glob("*/90_llvm.txt")).read_text()
    assert "llvm.masked.gather" not in code and "fdiv" not in code
    assert labels(compiled)[0] == ("cast" if bf16 else "linear + add")


@torch.no_grad()
def test_a_window_larger_than_the_image_reads_the_image_alone() -> None:
    """Windows that a model takes larger than any image, to average all of it: nothing is surrounded by what does not count."""
    x = torch.randn(2, 5, 8, 7)
    for layer in (nn.AvgPool2d(1280, ceil_mode=True), nn.MaxPool2d(1280, ceil_mode=True)):
        assert not any("pad" in label for label in labels(sashiko.compile(nn.Sequential(layer).eval(), (x,), strict=True)))


@torch.no_grad()
@pytest.mark.parametrize(("layer", "reason"), [
    (nn.Conv2d(8, 4, 3).double(), "a convolution of f64"),
    (nn.MaxPool2d(2, return_indices=True), "result number 1 is used"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_left_to_pytorch_is_right_and_says_why(layer: nn.Module, reason: str) -> None:
    x = torch.randn(2, 8, 10, 10, dtype=next(iter(layer.parameters()), torch.empty(0)).dtype)
    compiled = sashiko.compile(nn.Sequential(layer).eval(), (x,))
    torch.testing.assert_close(compiled(x), layer(x))
    assert len(left(compiled)) == 1 and reason in compiled.explain()


class Block(nn.Module):
    """The kinds of layers of a residual network."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.inner, self.other = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.short, self.head = nn.Conv2d(width, width, 1, stride=2), nn.Linear(width, 10)
        for norm in (self.norm, self.other):
            norm.running_mean, norm.running_var = torch.randn(width), torch.rand(width) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(x))))
        x = F.relu(self.other(self.inner(x)) + x)
        return self.head(self.short(x).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(1)
    return Block().eval()


X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_a_network_is_one_segment_whose_products_take_in_what_follows(block: nn.Module) -> None:
    """Nothing is permuted between the first image and the result, and the images of windows are not laid out."""
    compiled = sashiko.compile(block, (X,), strict=True)
    torch.testing.assert_close(compiled(X), block(X), rtol=1e-5, atol=1e-5)
    kinds = [next(kind for kind in ("linear", "reduce", "pad") if kind in label) for label in labels(compiled)]
    assert kinds == ["pad", "linear", "reduce", "pad", "linear", "linear", "reduce", "linear"]
    assert [set(label.split(" + ")) for label in labels(compiled) if "relu" in label] == [{"linear", "mul", "add", "relu"}] * 2


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 takes for granted whether a pooled size is even")
@torch.no_grad()
def test_any_batch_and_size() -> None:
    torch.manual_seed(3)
    first, second, last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, dilation=2), nn.Conv2d(8, 5, 1)
    model = nn.Sequential(first, nn.ReLU(), second, nn.MaxPool2d(3, 2, 1), last).eval()
    shapes = ({0: torch.export.Dim("batch", max=8), 2: torch.export.Dim("height", min=12, max=64)},)
    compiled = sashiko.compile(model, (X,), dynamic_shapes=shapes, strict=True)
    for shape in ((2, 3, 32, 32), (1, 3, 17, 32), (3, 3, 40, 32)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("target", [t for t in (*CATALOGUE, host()) if t.triple == host().triple and t.features <= host().features],
                         ids=lambda t: t.name)
def test_on_smaller_machines(block: nn.Module, target: object) -> None:
    compiled = sashiko.compile(block, (X,), target=target, strict=True)  # type: ignore[arg-type]
    torch.testing.assert_close(compiled(X), block(X), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_products_in_bf16(block: nn.Module) -> None:
    compiled = sashiko.compile(block, (X,), precision="bf16", strict=True)
    assert compiled.built is not None
    kernels = [note.kernel for notes in compiled.built.notes if not isinstance(notes, AtenStep) for note in notes]
    assert sum("bf16_bf16" in kernel for kernel in kernels) == 4
    error = (compiled(X) - block(X)).norm() / block(X).norm()
    assert 1e-5 < error < 4 * 2.0**-8  # each of four products in a row rounds its operands to 8 bits


@torch.no_grad()
def test_quantized_convolutions_are_integer_products(block: nn.Module) -> None:
    """What calibration simulates, bit for bit up to the order of sums in the last float layers."""
    small = sashiko.quantize(block, [(X,)], preset="int8-minmax", progress=False)
    compiled = sashiko.compile(small, (X,), strict=True)
    assert [label.split(" + ")[0] for label in labels(compiled)].count("int_linear") == 4
    assert (compiled(X) - small(X)).norm() <= 0.01 * small(X).norm() < (block(X)).norm()
    assert (compiled(X) - block(X)).norm() <= 0.1 * block(X).norm()


class Pooled(nn.Module):
    """Down and up again, with what was there before beside it: [B, 3, H, W] -> [B, 2, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        before = self.down(x).relu()
        small = self.inner(F.max_pool2d(before, 3, 2, 1)).relu()
        out: Tensor = self.up(torch.cat([before, F.interpolate(small, scale_factor=2)], 1))
        return out


@torch.no_grad()
def test_pooling_is_of_integers_and_nothing_between_products_is_left_to_pytorch() -> None:
    torch.manual_seed(5)
    model, x = Pooled().eval(), torch.randn(2, 3, 12, 16)
    small = sashiko.quantize(model, [(x,)], preset="int8-static", progress=False)
    compiled = sashiko.compile(small, (x,), strict=True)
    found = labels(compiled)
    pooling = next(label for label in found if "reduce" in label)
    assert "quantize" not in pooling and sum(label.startswith("int_linear") for label in found) == 3
    assert not any("permute" in label for label in found[:-1])
    # The results are sums of 144 steps of the last operand: one that is rounded the other way counts 2^-8 of its range.
    torch.testing.assert_close(compiled(x), small(x), rtol=0, atol=float(2.0**-8 * model.up.weight.abs().sum((1, 2, 3)).max()))
    assert (compiled(x) - small(x)).norm() <= 0.01 * small(x).norm()


@torch.no_grad()
@pytest.mark.parametrize("size", [(3, 40, 37), (1, 5, 70), (7, 18, 16)])
def test_images_of_few_colours_are_laid_out_along_their_lines(size: tuple[int, ...]) -> None:
    """Nothing is rounded by a layout: the kernel for a few channels gives the same integers and floats."""
    torch.manual_seed(6)
    x = torch.randn(2, *size)
    model = nn.Conv2d(size[0], 5, 3, padding=2).eval()
    compiled = sashiko.compile(model, (x,), strict=True)
    assert ((compiled(x).double() - _double(model)(x.double())).abs() <= roundings(model, x)).all()
    shapes = ({0: torch.export.Dim("batch", max=4), 2: torch.export.Dim("height", min=3, max=90)},)
    dynamic = sashiko.compile(model, (x,), dynamic_shapes=shapes, strict=True)
    torch.testing.assert_close(dynamic(x[:1]), compiled(x)[:1], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_changed_weights_and_statistics_are_noticed(block: nn.Module) -> None:
    compiled = sashiko.compile(block, (X,))
    compiled(X)
    block.inner.weight.mul_(1.5)  # type: ignore[union-attr, operator]
    block.norm.running_mean.add_(0.5)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(compiled(X), block(X), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_saved_and_loaded(block: nn.Module, tmp_path: Path) -> None:
    compiled = sashiko.compile(block, (X,))
    compiled.save(tmp_path / "block.sashiko")
    assert torch.equal(sashiko.load(tmp_path / "block.sashiko")(X), compiled(X))


@torch.no_grad()
def test_through_torch_compile_and_in_channels_last(block: nn.Module) -> None:
    fast = torch.compile(block, backend="sashiko")
    for x in (X, X.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(fast(x), block(x), rtol=1e-5, atol=1e-5)


class Grouped(nn.Module):
    """A layer in groups with a residual, as in ResNeXt, between two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.inner, self.norm = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.widen(x))
        return self.head(F.relu(self.norm(self.inner(x)) + x).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.fixture
def grouped() -> nn.Module:
    torch.manual_seed(5)
    return Grouped().eval()


@torch.no_grad()
def test_a_convolution_in_groups_is_one_product_that_takes_in_what_follows(grouped: nn.Module, tmp_path: Path) -> None:
    compiled = sashiko.compile(grouped, (X,), dynamic_shapes=({0: torch.export.Dim("batch", max=8)},), strict=True)
    for x in (X, X[:1], X.repeat(3, 1, 1, 1)):
        torch.testing.assert_close(compiled(x), grouped(x), rtol=1e-5, atol=1e-5)
    assert [set(label.split(" + ")) for label in labels(compiled) if "relu" in label][-1] == {"linear", "mul", "add", "relu"}
    grouped.inner.weight.mul_(1.5)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(compiled(X), grouped(X), rtol=1e-5, atol=1e-5)
    compiled.save(tmp_path / "grouped.sashiko")
    assert torch.equal(sashiko.load(tmp_path / "grouped.sashiko")(X), compiled(X))


@torch.no_grad()
def test_convolutions_in_groups_in_narrow_types(grouped: nn.Module) -> None:
    error = (sashiko.compile(grouped, (X,), precision="bf16", strict=True)(X) - grouped(X)).norm() / grouped(X).norm()
    assert 1e-5 < error < 3 * 2.0**-8
    small = sashiko.quantize(grouped, [(X,)], preset="int8-minmax", progress=False)
    compiled = sashiko.compile(small, (X,), strict=True)
    assert [label.split(" + ")[0] for label in labels(compiled)].count("int_linear") == 3
    assert (compiled(X) - small(X)).norm() <= 0.01 * small(X).norm()
    assert (compiled(X) - grouped(X)).norm() <= 0.1 * grouped(X).norm()


@torch.no_grad()
def test_a_weight_in_groups_that_is_computed_in_each_call() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 4, 3, 3))

        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return F.conv2d(x, self.weight * by, stride=2, groups=3)

    model, x, by = Scaled().eval(), torch.randn(2, 12, 9, 8), torch.tensor(0.7)
    torch.testing.assert_close(sashiko.compile(model, (x, by), strict=True)(x, by), model(x, by), rtol=1e-5, atol=1e-5)
