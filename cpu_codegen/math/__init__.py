"""Mathematical functions as vector code: for any lanes, any target with fused multiply-add, in portable LLVM IR.

`call(fn, target, name, args)` is the way in; float32 functions are written here, float64 ones are those of the C library. bfloat16 and
float16 are widened by the caller. Accuracy and method: `docs/math.md`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...platforms.target import Target
from ..builder import Function, Val
from .double import LIBRARY, library
from .double import sigmoid as sigmoid_wide
from .exponential import erf, exp, exp2, exp_weight, expm1, sigmoid, tanh
from .logarithm import log, log1p, log2, log10
from .normal import gelu, normal_cdf
from .power import pow as power
from .short import normal_cdf_short, sigmoid_short
from .trigonometric import atan2, cos, sin, tan

# Those with an instruction of their own on some target.
_BY_TARGET: dict[str, Callable[[Function, Target, Val], Val]] = {
    "exp": exp,
    "exp2": exp2,
    "exp_weight": exp_weight,
    "sigmoid": sigmoid,
    "gelu": gelu,
    "normal_cdf": normal_cdf,
    "normal_cdf_short": normal_cdf_short,
    "sigmoid_short": sigmoid_short,
}
_PORTABLE: dict[str, Callable[[Function, Val], Val]] = {
    "expm1": expm1,
    "log": log,
    "log2": log2,
    "log10": log10,
    "log1p": log1p,
    "sin": sin,
    "cos": cos,
    "tan": tan,
    "tanh": tanh,
    "erf": erf,
}
MATH = (*_BY_TARGET, *_PORTABLE)
MATH2: dict[str, Callable[[Function, Val, Val], Val]] = {"pow": power, "atan2": atan2}


def call(fn: Function, target: Target, name: str, args: list[Val]) -> Val:
    """The function `name` of `MATH` or `MATH2` applied to arguments of one type, float or double, scalar or vector."""
    scalar = args[0].ty.scalar
    assert scalar in ("float", "double"), f"{name} of {scalar}: widen it first"
    if scalar == "double":
        if name == "sigmoid":
            return sigmoid_wide(fn, args[0])
        assert name in LIBRARY, f"no function is called {name}"
        return library(fn, name, args)
    if name in MATH2:
        return MATH2[name](fn, args[0], args[1])
    return _BY_TARGET[name](fn, target, args[0]) if name in _BY_TARGET else _PORTABLE[name](fn, args[0])
