"""Networks whose layers are wanted with a border around them or beside others, for `sashiko bench`.

    sashiko bench --models benchmarks/dense_images.py:unet --precision fp32,bf16,int8    # upscaler, detector, scales, shuffles

Weights are random; batch norms have statistics of random images.
"""

from __future__ import annotations

import torch
from convolutions import alive
from torch import Tensor, nn
from torch.nn import functional as F

Case = tuple[nn.Module, tuple[Tensor, ...]]


def _layer(before: int, behind: int, window: int = 3, stride: int = 1, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    convolution = nn.Conv2d(before, behind, window, stride, window // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(behind), activation())


class _Unet(nn.Module):
    """Two layers at each scale on the way down and up, each scale's own beside what comes up (Ronneberger et al., 2015)."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        steps = list(zip((3, *widths), (*widths, 2 * widths[-1]), strict=True))
        self.down = nn.ModuleList(nn.Sequential(_layer(a, b), _layer(b, b)) for a, b in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in reversed(widths))
        self.merge = nn.ModuleList(nn.Sequential(_layer(2 * width, width), _layer(width, width)) for width in reversed(widths))
        self.last = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for layers in self.down:
            x = layers(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        result: Tensor = self.last(x)
        return result


class _Upscaler(nn.Module):
    """Residual blocks without normalization (EDSR: Lim et al., 2017)."""

    def __init__(self, width: int = 48, blocks: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 12, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.pixel_shuffle(self.last(first + x), 2)


class _Parts(nn.Module):
    """Half of the channels go through some pairs of layers, and all that is made on the way is put side by side (as in YOLOv8)."""

    def __init__(self, before: int, behind: int, pairs: int) -> None:
        super().__init__()
        half = behind // 2
        self.first, self.last = _layer(before, behind, 1, 1, nn.SiLU), _layer((2 + pairs) * half, behind, 1, 1, nn.SiLU)
        self.pairs = nn.ModuleList(
            nn.Sequential(_layer(half, half, 3, 1, nn.SiLU), _layer(half, half, 3, 1, nn.SiLU)) for _ in range(pairs)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for pair in self.pairs:
            parts.append(parts[-1] + pair(parts[-1]))
        result: Tensor = self.last(torch.cat(parts, 1))
        return result


class _Detector(nn.Module):
    """The encoder of a small detector, with what comes back up beside it."""

    def __init__(self) -> None:
        super().__init__()
        stages = ((3, 16, 0), (16, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 1))
        self.stages = nn.ModuleList(
            nn.Sequential(_layer(a, b, 3, 2, nn.SiLU), *([_Parts(b, b, pairs)] if pairs else [])) for a, b, pairs in stages
        )
        self.merge = nn.ModuleList((_Parts(384, 128, 1), _Parts(192, 64, 1)))
        self.heads = nn.ModuleList(
            nn.Sequential(_layer(width, 64, 3, 1, nn.SiLU), nn.Conv2d(64, 84, 1)) for width in (256, 128, 64)
        )

    def forward(self, x: Tensor) -> Tensor:
        scales: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            scales.append(x)
        found = [x]
        for merge, beside in zip(self.merge, (scales[3], scales[2]), strict=True):
            found.append(merge(torch.cat([F.interpolate(found[-1], scale_factor=2.0), beside], 1)))
        return torch.cat([head(each).flatten(2) for head, each in zip(self.heads, found, strict=True)], 2)


class _Scales(nn.Module):
    """Two scales side by side that add to each other (HRNet: Sun et al., 2019)."""

    def __init__(self, fine: int = 32, coarse: int = 64, rounds: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(_layer(3, 64, 3, 2), _layer(64, 64, 3, 2))
        self.begin = nn.ModuleList((_layer(64, fine), _layer(64, coarse, 3, 2)))
        self.along = nn.ModuleList(
            nn.ModuleList(nn.Sequential(*(_layer(width, width) for _ in range(4))) for width in (fine, coarse)) for _ in range(rounds)
        )
        self.up, self.down = nn.Conv2d(coarse, fine, 1), nn.Conv2d(fine, coarse, 3, 2, 1)
        self.last = nn.Conv2d(fine + coarse, 17, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        fine, coarse = (layer(x) for layer in self.begin)
        for along in self.along:
            fine, coarse = (layers(each) for layers, each in zip(along, (fine, coarse), strict=True))
            fine, coarse = F.relu(fine + F.interpolate(self.up(coarse), scale_factor=2.0)), F.relu(coarse + self.down(fine))
        result: Tensor = self.last(torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], 1))
        return result


class _Shuffled(nn.Module):
    """Half of the channels stay as they are, the others go through three layers, and both take turns (ShuffleNet V2: Ma et al., 2018)."""

    def __init__(self, before: int, behind: int, stride: int) -> None:
        super().__init__()
        half, self.stride = behind // 2, stride
        inner = before if stride > 1 else half
        self.changed = nn.Sequential(_layer(inner, half, 1), *_apart(half, half, stride))
        self.kept = nn.Sequential(*_apart(before, half, stride)) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = (x, x) if self.stride > 1 else x.chunk(2, 1)
        both = torch.cat([self.kept(kept), self.changed(changed)], 1)
        return both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _apart(before: int, behind: int, stride: int) -> tuple[nn.Module, ...]:
    """A window for each channel, then one layer over all."""
    window = nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)
    return window, nn.BatchNorm2d(before), _layer(before, behind, 1)


def _shuffles() -> nn.Module:
    """The features of ShuffleNet V2 1.0x."""
    layers: list[nn.Module] = [_layer(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    width = 24
    for behind, units in ((116, 4), (232, 8), (464, 4)):
        layers += [_Shuffled(width if n == 0 else behind, behind, 2 if n == 0 else 1) for n in range(units)]
        width = behind
    return nn.Sequential(*layers, _layer(width, 1024, 1), nn.AdaptiveAvgPool2d(1))


def shuffles() -> Case:
    """ShuffleNet V2 without its classifier, 224 x 224."""
    return alive(_shuffles()).eval(), (torch.randn(1, 3, 224, 224),)


def unet() -> Case:
    """A small U-Net, 128 x 128."""
    return alive(_Unet()).eval(), (torch.randn(1, 3, 128, 128),)


def upscaler() -> Case:
    """A small network for super-resolution, 96 x 96 to 192 x 192."""
    return _Upscaler().eval(), (torch.randn(1, 3, 96, 96),)


def detector() -> Case:
    """A small detector, 320 x 320."""
    return alive(_Detector()).eval(), (torch.randn(1, 3, 320, 320),)


def scales() -> Case:
    """A small network of two scales, 256 x 256."""
    return alive(_Scales()).eval(), (torch.randn(1, 3, 256, 256),)
