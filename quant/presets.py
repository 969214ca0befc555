"""Schemes by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..diagnostics.errors import InputError
from .scheme import ActivationScheme, Operation, OpScheme, Scheme, SmoothQuant, WeightScheme

AUTO = "auto"
"""Where `quantize_and_compile` begins its search for the precision of every operation; by itself an int8 recipe like any other."""

# A convolution is a product like a linear, and most of what a network of them does. One scale for each position of an image would be one
# for each pixel, and windows hold several: all of an image has the scale that calibration found, in the presets by row too.
_PRODUCTS: tuple[Operation, ...] = ("linear", "convolution", "recurrence", "experts")


def _static(activation: ActivationScheme) -> Scheme:
    return Scheme(OpScheme(activation), operations=_PRODUCTS)


# The default is the most accurate recipe at the speed of integer products; docs/decisions/0004 has the study. A sentence encoder's mean and
# least cosine to float32: 0.9994 and 0.9990 (0.9990 and 0.9983 without smoothing, 0.9983 and 0.9971 with one range for each activation),
# for one pass more over activations that a product makes: about a tenth of the time.
_ROWS = OpScheme(ActivationScheme("mse", signed=False, granularity="row"))
PRESETS: Mapping[str, Scheme] = {
    "int8": Scheme(_ROWS, operations=_PRODUCTS, smooth=SmoothQuant()),
    AUTO: Scheme(_ROWS, operations=_PRODUCTS, smooth=SmoothQuant()),
    "int8-dynamic": Scheme(OpScheme(ActivationScheme(granularity="row"))),
    "int8-static": replace(_static(ActivationScheme("minmax", signed=False)), smooth=SmoothQuant(), correct_bias=True),
    "int8-symmetric": _static(ActivationScheme("mse")),
    "int8-minmax": _static(ActivationScheme("minmax")),
    "int8-percentile": _static(ActivationScheme("percentile", 99.999)),
    "int8-average": _static(ActivationScheme("average", signed=False)),
    "int8-entropy": _static(ActivationScheme("entropy")),
    "int8-weight": Scheme(OpScheme(None)),
    "int4-weight": Scheme(OpScheme(None, WeightScheme(4, "group", 64, clip="mse", compensate=True))),
}


def resolve(preset: str | Scheme) -> Scheme:
    """The scheme of a preset's name; a scheme is itself. Raises InputError for an unknown name."""
    if isinstance(preset, Scheme):
        return preset
    scheme = PRESETS.get(preset) if isinstance(preset, str) else None
    if scheme is None:
        raise InputError(f"there is no preset {preset!r}", "quantize(preset=...)", f"choose one of {', '.join(PRESETS)}, or pass a Scheme")
    return scheme
