"""Convolutions beside oneDNN, layer by layer; and networks made of them, for `sashiko bench`.

    python -P benchmarks/convolutions.py [--only dense,grouped,depthwise,dilated] [--kinds fp32,bf16,fp16,int8] [--rounds 9] [--quick]
        [--json F]
    sashiko bench --models benchmarks/convolutions.py:vgg --precision fp32    # regnet_x, regnet_y, mobilenet, convnext, poolformer

Layers have a bias and a relu on both sides, weights packed beforehand, and one image in channels-last order. oneDNN is called as
Inductor with frozen weights calls it (`mkldnn._convolution_pointwise`), or PyTorch where it has no such layer (f16). In int8 both read and
write bytes of fixed ranges (`onednn.qconv2d_pointwise`). One pinned core; candidates take turns; operands are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import sashiko
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import Timing, measure, pin
from sashiko.cli.values import count, file_to_write, one_of, several

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.uint8}
READ, WRITTEN = (0.02, 0), (0.03, 0)  # scale and zero point of bytes


@dataclass(frozen=True)
class Layer:
    """channels: that it reads and writes. window, image: sizes of squares; the padding keeps the image's size where the stride is 1.
    apart: the dilation."""

    channels: tuple[int, int]
    window: int
    image: int
    stride: int = 1
    groups: int = 1
    apart: int = 1

    @property
    def name(self) -> str:
        grouped = f" in {self.groups} groups" if 1 < self.groups < self.channels[0] else ""
        channels = str(self.channels[0]) if self.channels[0] == self.channels[1] else f"{self.channels[0]} to {self.channels[1]}"
        window = f"{self.window} x {self.window}" + f" of taps {self.apart} apart" * (self.apart > 1)
        return f"{channels}{grouped}, {window}, {self.stride}, {self.image} x {self.image}"

    @property
    def padding(self) -> int:
        return self.window // 2 * self.apart

    @property
    def giga(self) -> float:
        """10^9 additions and multiplications, those of zeros around the image too."""
        side = (self.image + 2 * self.padding - self.apart * (self.window - 1) - 1) // self.stride + 1
        return 2e-9 * side * side * self.channels[1] * (self.channels[0] // self.groups) * self.window**2


def depthwise(channels: int, window: int, image: int) -> Layer:
    return Layer((channels, channels), window, image, groups=channels)


# Of ResNet-50, of ResNeXt and RegNet, of MobileNets, ConvNeXt, EfficientNet-B3 and networks of large windows.
# The first of each sort is the one for a quick look.
LAYERS: Mapping[str, tuple[Layer, ...]] = {
    "dense": (
        Layer((64, 64), 3, 56), Layer((64, 256), 1, 56), Layer((128, 128), 3, 28), Layer((512, 128), 1, 28), Layer((256, 256), 3, 14),
        Layer((1024, 256), 1, 14), Layer((512, 512), 3, 7), Layer((256, 256), 3, 28, 2), Layer((64, 64), 3, 224), Layer((512, 512), 3, 28),
    ),
    "grouped": (
        Layer((128, 128), 3, 56, groups=32), Layer((256, 256), 3, 28, groups=32), Layer((512, 512), 3, 14, groups=32),
        Layer((1024, 1024), 3, 7, groups=32), Layer((168, 168), 3, 28, groups=7), Layer((408, 408), 3, 14, groups=17),
    ),
    "depthwise": (
        depthwise(64, 3, 112), depthwise(144, 3, 56), depthwise(192, 3, 28), depthwise(120, 5, 28), depthwise(960, 5, 7),
        depthwise(96, 7, 56), depthwise(384, 7, 14), depthwise(336, 5, 19), depthwise(256, 13, 28), depthwise(128, 31, 56),
    ),
    # Of networks that label each pixel: the last stages of their encoders, and the wide windows behind these.
    "dilated": (
        Layer((512, 512), 3, 16, apart=2), Layer((256, 256), 3, 28, apart=2), Layer((512, 512), 3, 28, apart=4),
        Layer((256, 256), 3, 33, apart=6), Layer((512, 256), 3, 32, apart=12), Layer((512, 256), 3, 32, apart=24),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One layer. giga: its 10^9 operations. ms, peer_ms: of each round, ours and oneDNN's."""

    part: str
    layer: str
    kind: str
    giga: float
    ms: tuple[float, ...]
    peer_ms: tuple[float, ...]


class ChannelsLast(nn.Module):
    """relu(convolution) of [batch, height, width, channels], the order that both sides compute in."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.convolution(x.permute(0, 3, 1, 2)).relu().permute(0, 2, 3, 1)
        return result


class Bytes(nn.Module):
    """The same of bytes, as PT2E writes it: their scales and zero points, and weights with a scale for each channel."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        weight = convolution.weight.detach()
        scales = weight.abs().amax((1, 2, 3)) / 127
        self.weight = nn.Buffer((weight / scales.view(-1, 1, 1, 1)).round().to(torch.int8))
        self.scales, self.zeros = nn.Buffer(scales), nn.Buffer(torch.zeros(len(scales), dtype=torch.int64))
        assert convolution.bias is not None
        self.bias = nn.Buffer(convolution.bias.detach())
        self.geometry = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops, image = torch.ops.quantized_decomposed, x.permute(0, 3, 1, 2)
        weight = ops.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        real = ops.dequantize_per_tensor(image, *READ, 0, 255, torch.uint8)
        result = nn.functional.conv2d(real, weight, self.bias, *self.geometry).relu()  # type: ignore[arg-type]
        written: torch.Tensor = ops.quantize_per_tensor(result, *WRITTEN, 0, 255, torch.uint8).permute(0, 2, 3, 1)
        return written


def onednn_bytes(model: Bytes, x: torch.Tensor) -> Callable[[], object]:
    """The call of a packed convolution and relu of bytes."""
    image = x.permute(0, 3, 1, 2)
    stride, padding, dilation, groups = model.geometry
    geometry = (list(stride), list(padding), list(dilation), groups)
    packed = torch.ops.onednn.qconv_prepack(model.weight, model.scales, *READ, *geometry, list(image.shape))
    given = (image, *READ, packed, model.scales, model.zeros, model.bias, *geometry, *WRITTEN, torch.uint8, "relu", [], "")
    return partial(torch.ops.onednn.qconv2d_pointwise, *given)


def onednn(layer: nn.Conv2d, x: torch.Tensor) -> Callable[[], object]:
    """The call of a packed convolution and relu on x [batch, height, width, channels]."""
    image = x.permute(0, 3, 1, 2)
    geometry = (layer.padding, layer.stride, layer.dilation, layer.groups)
    packed = torch.ops.mkldnn._reorder_convolution_weight(layer.weight.detach().to(x.dtype), *geometry, list(image.shape))
    assert layer.bias is not None
    bias = layer.bias.detach().to(x.dtype)
    return partial(torch.ops.mkldnn._convolution_pointwise, image, packed, bias, *geometry, "relu", [], "")


def measured(part: str, layer: Layer, kind: str, rounds: int, seconds: float) -> Row:
    torch.manual_seed(0)
    inner = nn.Conv2d(*layer.channels, layer.window, layer.stride, layer.padding, layer.apart, layer.groups)
    dtype, shape = DTYPES[kind], (1, layer.image, layer.image, layer.channels[0])
    model: nn.Module
    if kind == "int8":
        x, model = torch.randint(0, 256, shape, dtype=dtype), Bytes(inner).eval()
        peer = onednn_bytes(model, x)
    else:
        x, model = torch.randn(shape).to(dtype), ChannelsLast(inner).eval().to(dtype)
        try:
            peer = onednn(inner, x)
        except RuntimeError:  # for f16 it wants instructions that few processors have; PyTorch has loops of its own
            peer = partial(model, x)
    times = measure({"ours": partial(sashiko.compile(model, x, strict=True), x), "peer": peer}, rounds, seconds)
    return Row(part, layer.name, kind, layer.giga, times["ours"].rounds, times["peer"].rounds)


def _images(model: nn.Module) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from sashiko.cli.bench.cases import Result

    return Result(alive(model), ("pixel_values",), "last_hidden_state").eval(), (torch.randn(1, 3, 224, 224),)


def alive(model: nn.Module) -> nn.Module:
    """With statistics of random images in its batch normalizations: random weights alone leave next to nothing after so many layers."""
    normalizations = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if normalizations:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        for module in normalizations:
            module.momentum = None  # the mean over all calls
        with torch.no_grad():
            model.train()(torch.randn(4, 3, 224, 224))
    return model


def regnet_x() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """RegNetX-200MF: groups of 8 channels."""
    from transformers import RegNetConfig, RegNetModel

    sizes = {"hidden_sizes": [24, 56, 152, 368], "depths": [1, 1, 4, 7], "groups_width": 8}
    return _images(RegNetModel(RegNetConfig(layer_type="x", **sizes)))


def regnet_y() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """RegNetY-4GF: groups of 64 channels."""
    from transformers import RegNetConfig, RegNetModel

    return _images(RegNetModel(RegNetConfig()))


def mobilenet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """MobileNet V2: depthwise 3 x 3."""
    from transformers import MobileNetV2Config, MobileNetV2Model

    return _images(MobileNetV2Model(MobileNetV2Config()))


def convnext() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ConvNeXt-T: depthwise 7 x 7."""
    from transformers import ConvNextConfig, ConvNextModel

    return _images(ConvNextModel(ConvNextConfig()))


def poolformer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """PoolFormer-S12: pooling."""
    from transformers import PoolFormerConfig, PoolFormerModel

    return _images(PoolFormerModel(PoolFormerConfig()))


class _Vgg(nn.Module):
    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for length, width in zip(lengths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(length):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(pixel_values)
        return result


def vgg() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The convolutions of VGG-16 with batch norm: 3 x 3 throughout (Simonyan and Zisserman, 2015)."""
    return _Vgg((2, 2, 3, 3, 3)).eval(), (torch.randn(1, 3, 224, 224),)


def table(rows: Sequence[Row]) -> Table:
    result = Table()
    for head in ("", "channels, window, stride, image", "", "ms", "GFLOPS", "oneDNN, ms", "GFLOPS", "x oneDNN"):
        result.add_column(head, justify="right" if head in ("ms", "GFLOPS", "oneDNN, ms", "x oneDNN") else "left")
    for row in rows:
        ours, peer = Timing(row.ms), Timing(row.peer_ms)
        speed = ours.speed(peer)
        rates = [f"{row.giga / timing.median * 1e3:.0f}" for timing in (ours, peer)]
        told = f"{speed.median:.2f} [{speed.low:.2f}, {speed.high:.2f}]"
        result.add_row(row.part, row.layer, row.kind, f"{ours.median:.3f}", rates[0], f"{peer.median:.3f}", rates[1], told)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=several(one_of(LAYERS)), default=",".join(LAYERS), help="%(default)s")
    parser.add_argument("--kinds", type=several(one_of(DTYPES)), default="fp32,bf16", help="%(default)s")
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--quick", action="store_true", help="the first layer of each sort, 3 short rounds")
    parser.add_argument("--json", type=file_to_write, help="write all rounds to this file")
    options = parser.parse_args()
    pin()
    torch.set_grad_enabled(False)
    rounds, seconds = (3, 0.02) if options.quick else (options.rounds, 0.1)
    chosen = [(part, layer) for part in options.only for layer in LAYERS[part][: 1 if options.quick else None]]
    rows = [measured(part, layer, kind, rounds, seconds) for kind in options.kinds for part, layer in chosen]
    Console(width=140).print(table(rows))
    if options.json:
        run = story()
        options.json.write_text(json.dumps(run | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
