"""Sashiko: a quantizing compiler that makes PyTorch models fast on CPUs.

    fast = sashiko.compile(model, example_inputs)
    small = sashiko.quantize(model, batches)
    model = torch.compile(model, backend="sashiko")

Names are loaded when first used, so that `import sashiko` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import quant
    from .diagnostics.errors import ArtifactError, CalibrationError, InputError, InvalidGraph, SashikoError, Unsupported
    from .driver.backend import backend
    from .driver.compile import compile
    from .driver.explain import explain
    from .driver.model import CompiledModel, load
    from .driver.quantized import quantize_and_compile
    from .quant.in_place import quantize_
    from .quant.quantize import quantize

_HOME = {
    "compile": "driver.compile",
    "quantize_and_compile": "driver.quantized",
    "CompiledModel": "driver.model",
    "backend": "driver.backend",
    "explain": "driver.explain",
    "load": "driver.model",
    "quantize": "quant",
    "quantize_": "quant",
    **dict.fromkeys(
        ("SashikoError", "Unsupported", "InvalidGraph", "CalibrationError", "ArtifactError", "InputError"), "diagnostics.errors"
    ),
}

_PACKAGES = ("quant",)

__all__ = [
    "ArtifactError",
    "CalibrationError",
    "CompiledModel",
    "InputError",
    "InvalidGraph",
    "SashikoError",
    "Unsupported",
    "backend",
    "compile",
    "explain",
    "load",
    "quant",
    "quantize",
    "quantize_",
    "quantize_and_compile",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)  # which sets the attribute
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
