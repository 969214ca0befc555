"""How a model is quantized, as data. A preset is a name for a `Scheme`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..diagnostics.errors import InputError

ObserverName = Literal["minmax", "percentile", "mse"]
OBSERVERS: tuple[ObserverName, ...] = ("minmax", "percentile", "mse")


@dataclass(frozen=True)
class ActivationScheme:
    """Activations: one scale per tensor, fixed by calibration.

    observer: how the range is chosen from the data: `minmax` all of it, `percentile` that share of it, `mse` the range with the
        least squared error of rounding and saturation together.
    percentile: in (50, 100], read by the percentile observer only.
    signed: True: int8 in [-127, 127], zero point 0. False: uint8 in [0, 255] with a zero point, for one-sided data.
    granularity: `tensor`.
    bins: resolution of the histogram on each side of zero, a power of two, read by percentile and mse.
    """

    observer: ObserverName = "minmax"
    percentile: float = 99.99
    signed: bool = True
    granularity: Literal["tensor"] = "tensor"
    bins: int = 4096

    def __post_init__(self) -> None:
        if self.observer not in OBSERVERS:
            raise InputError(f"there is no observer {self.observer!r}", "ActivationScheme", f"choose one of {', '.join(OBSERVERS)}")
        if not 50.0 < self.percentile <= 100.0:
            raise InputError(f"percentile={self.percentile} is not in (50, 100]", "ActivationScheme", "99.9 to 99.999 is usual")
        if self.granularity != "tensor":
            raise InputError(f"granularity={self.granularity!r} is not known for activations", "ActivationScheme", "use 'tensor'")
        if self.bins < 64 or self.bins & (self.bins - 1):
            raise InputError(f"bins={self.bins} is not a power of two of at least 64", "ActivationScheme")

    @property
    def qmin(self) -> int:
        return -127 if self.signed else 0

    @property
    def qmax(self) -> int:
        return 127 if self.signed else 255

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8


@dataclass(frozen=True)
class WeightScheme:
    """Weights: symmetric int8 in [-127, 127], one scale per output channel or one for the whole tensor."""

    granularity: Literal["channel", "tensor"] = "channel"

    def __post_init__(self) -> None:
        if self.granularity not in ("channel", "tensor"):
            raise InputError(f"granularity={self.granularity!r} is not known for weights", "WeightScheme", "use 'channel' or 'tensor'")


@dataclass(frozen=True)
class Scheme:
    """Everything `quantize` needs to know besides the model and the data."""

    activation: ActivationScheme = field(default_factory=ActivationScheme)
    weight: WeightScheme = field(default_factory=WeightScheme)


# The default is what keeps a sentence encoder's embeddings nearest to those of float32 (benchmarks/encoder.py). Mean cosine: 0.994 with
# mse on uint8; on int8 0.988 with mse, 0.984 with percentile 99.999 and minmax, 0.968 with percentile 99.99. The products of both are as
# fast; a zero point costs one subtraction per result.
PRESETS: Mapping[str, Scheme] = {
    "int8": Scheme(ActivationScheme("mse", signed=False)),
    "int8-symmetric": Scheme(ActivationScheme("mse")),
    "int8-minmax": Scheme(ActivationScheme("minmax")),
    "int8-percentile": Scheme(ActivationScheme("percentile", 99.999)),
}


def resolve(preset: str | Scheme) -> Scheme:
    """The scheme of a preset's name; a scheme is itself. Raises InputError for an unknown name."""
    if isinstance(preset, Scheme):
        return preset
    scheme = PRESETS.get(preset)
    if scheme is None:
        raise InputError(f"there is no preset {preset!r}", "quantize(preset=...)", f"choose one of {', '.join(PRESETS)}, or pass a Scheme")
    return scheme
