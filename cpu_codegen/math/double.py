"""float64: the C library's functions, lane by lane. Models hardly ever use float64, so exactness counts here and speed does not."""

from __future__ import annotations

from ..builder import Function, Val
from .parts import k, lanewise

LIBRARY = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "erf", "pow", "atan2")


def library(fn: Function, name: str, args: list[Val]) -> Val:
    """The function `name` of the C library; 1 ulp with glibc, and all special cases of C."""
    return lanewise(fn, name, args)


def sigmoid(fn: Function, x: Val) -> Val:
    """1 / (1 + e^-x). 2 ulp for x > -708; below, where the result is denormal, within 2 of its smallest units."""
    e = lanewise(fn, "exp", [fn.neg(fn.intrinsic("fabs", x.ty, [x]))])
    top = fn.select(fn.fcmp("olt", x, k(x, 0.0)), e, k(x, 1.0))
    return fn.div(top, fn.add(e, k(x, 1.0)))
