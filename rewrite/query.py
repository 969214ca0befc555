"""Questions that rules ask about values."""

from __future__ import annotations

import ctypes
import math

import torch

from ..graph import attrs as A
from ..graph.ir import Value
from ..graph.types import DType, f32
from .pattern import Number

# Larger constants are not searched for being one repeated number.
_UNIFORM_LIMIT = 4096
_SAME_NUMBERS = ("expand", "reshape", "permute", "slice", "window")
# Operations that `number` reads.
NUMBER_OPS = frozenset(("full", "constant", "cast", *_SAME_NUMBERS))
_FROM_WEIGHTS = ("cast", "permute", "reshape", "quantize", "dequantize")


def rounded(value: Number, dtype: DType) -> Number:
    """The number that `value` becomes as an element of this type."""
    if dtype.kind == "bool":
        return bool(value)
    if not dtype.is_float:
        return dtype.wrapped(int(value))
    if dtype == f32:
        return ctypes.c_float(value).value  # the usual type, and fifty times as fast as a tensor
    return float(torch.tensor(float(value), dtype=torch.float64).to(dtype.torch).item())


def number(value: Value) -> Number | None:
    """The number that every element of `value` is, when that is known now.

    Parameters of the user's model are never taken for numbers: they may change between calls.
    """
    if value.op in _SAME_NUMBERS:
        return number(value.inputs[0])
    attrs = value.attrs
    if isinstance(attrs, A.FullAttrs):
        return rounded(attrs.value, value.dtype)
    if isinstance(attrs, A.ConstantAttrs) and not attrs.watched and value.tensor.qparams is None:
        return _uniform(attrs.tensor)
    if isinstance(attrs, A.CastAttrs):
        return _cast_number(value.inputs[0], attrs.dtype)
    return None


def _uniform(tensor: torch.Tensor) -> Number | None:
    if not 0 < tensor.numel() <= _UNIFORM_LIMIT or tensor.is_complex():
        return None
    first = tensor.reshape(-1)[0]
    found: Number = first.item()
    return found if tensor.numel() == 1 or bool((tensor == first).all()) else None


def _cast_number(source: Value, dtype: DType) -> Number | None:
    """A cast of a known number, where the conversion is defined for every machine."""
    found = number(source)
    if found is None or dtype.is_float or dtype.kind == "bool":
        return None if found is None else rounded(found, dtype)
    if isinstance(found, float) and not math.isfinite(found):
        return None
    low, high = integer_range(dtype)
    return int(found) if low <= int(found) <= high else None


def integer_range(dtype: DType) -> tuple[int, int]:
    """Least and greatest integer of an integer or bool type."""
    if dtype.kind == "bool":
        return 0, 1
    return (0, 2**dtype.bits - 1) if dtype.kind == "uint" else (-(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1)


def is_weight(value: Value) -> bool:
    """True for a constant, and for one seen through casts, views and quantization: what can be packed once, ahead of all calls."""
    while value.op in _FROM_WEIGHTS:
        value = value.inputs[0]
    return value.op == "constant"


# Bits of the significand, the implicit one included, and the largest exponent.
_FLOATS: dict[str, tuple[int, int]] = {"bf16": (8, 127), "f16": (11, 15), "f32": (24, 127), "f64": (53, 1023)}


def holds(wide: DType, narrow: DType) -> bool:
    """True when every number of type `narrow` is a number of type `wide`, infinities and NaN included."""
    if wide == narrow or narrow.kind == "bool":
        return True
    if wide.kind == "bool":
        return False
    if narrow.is_float:
        return wide.is_float and all(w >= n for w, n in zip(_FLOATS[wide.name], _FLOATS[narrow.name], strict=True))
    low, high = integer_range(narrow)
    if wide.is_float:
        return high <= int(2 ** _FLOATS[wide.name][0])
    least, most = integer_range(wide)
    return least <= low and high <= most


def power_of_two(value: Number) -> bool:
    """True for +-2**k with 2**k and 2**-k normal in every floating-point type but f16: multiplying by it only moves the exponent."""
    mantissa, exponent = math.frexp(value) if math.isfinite(value) else (0.0, 0)
    return abs(mantissa) == 0.5 and -120 < exponent < 120


def last_axes_swapped(rank: int) -> tuple[int, ...]:
    """The order that transposes the last two of `rank` axes."""
    return (*range(rank - 2), rank - 1, rank - 2)
