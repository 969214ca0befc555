"""How a model is quantized, as data: a `Scheme` says what happens to each operation; a preset is a name for a scheme."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from ..diagnostics.errors import InputError
from .fields import check_fields

ObserverName = Literal["minmax", "average", "percentile", "mse", "entropy"]
Floating = Literal["fp32", "bf16"]
Operation = Literal["linear", "convolution", "recurrence", "experts", "matmul", "attention", "embedding"]
Sums = Literal["auto", "most", 1, 2, 4]
Where = str | re.Pattern[str] | type[nn.Module]


@dataclass(frozen=True)
class ActivationScheme:
    """Activations in 8 bits.

    granularity: `tensor`: one scale, fixed by calibration (static). `row`: one scale for each row of the last axis (a token), computed
        from the row in each call (dynamic). Linears and experts take either; a recurrent layer's hidden state is `row` always, and all
        else `tensor`.
    observer: how a static range is chosen from the data: `minmax` all of it, `average` the mean over the batches of their extremes (a
        moving average), `percentile` that share of it, `mse` the range with the least squared error of rounding and saturation
        together, `entropy` the range whose quantized histogram is nearest to the full one (Kullback-Leibler).
    percentile: in (50, 100], read by the percentile observer only.
    signed: True: int8 in [-127, 127], zero point 0. False: 8 bits with a zero point, for one-sided data.
    bins: resolution of the histogram on each side of zero, a power of two, read by percentile, mse and entropy.
    """

    observer: ObserverName = "minmax"
    percentile: float = 99.99
    signed: bool = True
    granularity: Literal["tensor", "row"] = "tensor"
    bins: int = 4096

    def __post_init__(self) -> None:
        check_fields(self)
        if not 50.0 < self.percentile <= 100.0:
            raise InputError(f"percentile={self.percentile} is not in (50, 100]", "ActivationScheme", "99.9 to 99.999 is usual")
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
    """Symmetric integer weights.

    bits: 8, in [-127, 127], or 4, in [-7, 7]; 4 bits need granularity `group` and no quantized activation.
    granularity: one scale per output `channel`, one for the whole `tensor`, or one for each `group` of `group` neighbours along K.
    clip: `none`: the greatest magnitude is the end of the range. `mse`: each range is shrunk to the least squared error.
    sums16: integers so small that so many products with unsigned bytes, 4 or 2, are added in 16 bits (`graph.sums16`), which x86 processors
        without VNNI do one and a half times as fast, or 1.3 times. Scales are the larger for it: normally distributed weights lose 4 and 2
        decibels. 1: as large as 8 bits allow. `most`: as many as leave a weight enough digits (`weights.settled`). `auto`: `most` where the
        activations are quantized and the target is such a processor, but for depthwise convolutions, which multiply no integers; else 1.
        After Colbert et al., "A2Q: Accumulator-Aware Quantization with Guaranteed Overflow Avoidance", ICCV 2023.
    compensate: GPTQ: the rounding error of each input's weights is made up for by the weights of later inputs, over the calibration data.
    """

    bits: Literal[8, 4] = 8
    granularity: Literal["channel", "tensor", "group"] = "channel"
    group: int = 64
    clip: Literal["none", "mse"] = "none"
    compensate: bool = False
    sums16: Sums = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.bits == 4) != (self.granularity == "group"):
            what = f"{self.bits}-bit weights per {self.granularity}"
            raise InputError(what, "WeightScheme", "groups are for 4 bits, and 4 bits need groups")
        if self.group < 8 or self.group & (self.group - 1):
            raise InputError(f"group={self.group} is not a power of two of at least 8", "WeightScheme")
        if self.sums16 in ("most", 2, 4) and self.bits != 8:
            raise InputError(f"sums16={self.sums16} with {self.bits}-bit weights", "WeightScheme", "it is for 8 bits")

    @property
    def qmax(self) -> int:
        """Integers are in [-qmax, qmax]."""
        return 127 if self.bits == 8 else 7


@dataclass(frozen=True)
class OpScheme:
    """One operation: in floating point of the width `floating` without `weight`, with integer weights alone without `activation`."""

    activation: ActivationScheme | None = field(default_factory=ActivationScheme)
    weight: WeightScheme | None = field(default_factory=WeightScheme)
    floating: Floating = "fp32"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.activation is not None and self.weight is not None and self.weight.bits != 8:
            raise InputError("4-bit weights with quantized activations have no kernel", "OpScheme", "use activation=None, or 8 bits")
        if self.activation is not None and self.weight is None:
            raise InputError("quantized activations with weights in floating point have no kernel", "OpScheme", "give both or neither")

    @property
    def quantized(self) -> bool:
        return self.weight is not None

    @property
    def label(self) -> str:
        """Short name for tables: `int8`, `int8 per row`, `int8 weight`, `int4 weight`, `fp32`, `bf16`."""
        if self.weight is None:
            return self.floating
        if self.activation is None:
            return f"int{self.weight.bits} weight"
        return "int8 per row" if self.activation.granularity == "row" else "int8"


FP32 = OpScheme(None, None)
BF16 = OpScheme(None, None, "bf16")


@dataclass(frozen=True)
class Override:
    """Another scheme for some operations.

    where: a name as `report` shows it or a module containing it; a compiled pattern to search in names; or a class of modules.
    """

    where: Where
    scheme: OpScheme

    def __post_init__(self) -> None:
        where: object = self.where
        if not isinstance(where, (str, re.Pattern)) and not (isinstance(where, type) and issubclass(where, nn.Module)):
            what = f"{where!r} names no operations"
            raise InputError(what, "quantize(exclude=...) or Override(...)", "give a name, a compiled pattern or a class of modules")
        check_fields(self)


@dataclass(frozen=True)
class SmoothQuant:
    """Difficulty moved from activations to weights: x W = (x / s)(s W), s_k = max|x_k|^alpha / max|W_k|^(1 - alpha) for input k.

    alpha: a fixed strength in [0, 1], or None: for each activation the one of `alphas` with the least error of the products.
    Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2022.
    """

    alpha: float | None = None
    alphas: tuple[float, ...] = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

    def __post_init__(self) -> None:
        check_fields(self)
        if any(not 0.0 <= a <= 1.0 for a in (*self.alphas, self.alpha or 0.0)) or not self.alphas:
            raise InputError("alpha is not in [0, 1]", "SmoothQuant", "0.5 is usual")


@dataclass(frozen=True)
class Scheme:
    """Everything `quantize` needs to know besides the model and the data.

    default: of every operation of the kinds in `operations`. overrides: the last one that matches an operation decides.
    smooth: SmoothQuant, or None. correct_bias: the mean error of each output, over the calibration data, is taken off its bias
    (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019).
    outliers: an operation stays in floating point when the signal-to-noise ratio of its result, in decibels, is below this; None: never.
    sample: the methods that look at data more than once (smooth, correct_bias, outliers) see that many batches, the first ones.
    """

    default: OpScheme = field(default_factory=OpScheme)
    overrides: tuple[Override, ...] = ()
    operations: tuple[Operation, ...] = ("linear", "recurrence", "experts")
    smooth: SmoothQuant | None = None
    correct_bias: bool = False
    outliers: float | None = None
    sample: int = 16

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sample < 1:
            raise InputError(f"sample={self.sample} is not a number of batches", "Scheme", "16 is usual")

    def overriding(self, *overrides: Override) -> Scheme:
        """This scheme with more overrides, stronger than those it has."""
        return replace(self, overrides=(*self.overrides, *overrides))


def several(where: Where | Iterable[Where]) -> tuple[Where, ...]:
    """One place or any number of them."""
    return tuple(where) if isinstance(where, Iterable) and not isinstance(where, (str, type)) else (where,)
