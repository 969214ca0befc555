"""Hyperbolic functions, their inverses, and those of sine and cosine: of exponentials, logarithms and atan2, in forms that cancel nothing
(Kahan, "Branch cuts for complex elementary functions", 1987, has those of the inverses)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..ir import Value
from ..types import f64
from .call import Call, Row
from .pointwise import formula

aten = torch.ops.aten
_TINY = 1e-8  # an odd function with slope 1 is its argument, to 16 digits
_HUGE = 2.0**28  # x^2 + 1 is x^2, likewise


def _odd(of_size: Callable[[Value], Value]) -> Callable[[Value], Value]:
    """An odd function with slope 1 at 0, of what it is for numbers above 0."""

    def whole(x: Value) -> Value:
        size = b.abs_(x)
        result = of_size(size)
        return b.where(b.lt(size, _TINY), x, b.where(b.lt(x, 0.0), b.neg(result), result))

    return whole


def _halves(size: Value) -> tuple[Value, Value]:
    """exp(x) / 2, which may be finite where exp(x) is not, and exp(-x) / 2."""
    root = b.exp(b.mul(size, 0.5))
    return b.mul(b.mul(root, 0.5), root), b.div(0.5, b.mul(root, root))


def _sinh(size: Value) -> Value:
    near = b.expm1(size)
    return b.where(b.lt(size, 1.0), b.mul(b.add(near, b.div(near, b.add(near, 1.0))), 0.5), b.sub(*_halves(size)))


def _asinh(size: Value) -> Value:
    square = b.mul(size, size)
    near = b.log1p(b.add(size, b.div(square, b.add(b.sqrt(b.add(square, 1.0)), 1.0))))
    return b.where(b.gt(size, _HUGE), b.add(b.log(size), math.log(2)), near)


def _acosh(x: Value) -> Value:
    above = b.sub(x, 1.0)
    near = b.log1p(b.add(above, b.sqrt(b.mul(above, b.add(above, 2.0)))))
    return b.where(b.lt(x, 1.0), math.nan, b.where(b.gt(x, _HUGE), b.add(b.log(x), math.log(2)), near))


def _cathetus(x: Value) -> Value:
    """sqrt(1 - x^2)"""
    return b.sqrt(b.mul(b.sub(1.0, x), b.add(x, 1.0)))


def _short(fn: Callable[[Value], Value]) -> Row:
    row = formula(fn)

    def of(c: Call, x: Value) -> Any:
        if c.dtype == f64:
            raise Unsupported("a function of f64 that PyTorch computes sooner")
        return row(c, x)

    return of


ROWS: dict[Any, Row] = {
    aten.sinh.default: _short(_odd(_sinh)),
    aten.cosh.default: _short(lambda x: b.add(*_halves(b.abs_(x)))),
    aten.asinh.default: _short(_odd(_asinh)),
    aten.acosh.default: _short(_acosh),
    aten.atanh.default: _short(_odd(lambda size: b.mul(b.log1p(b.div(b.mul(size, 2.0), b.sub(1.0, size))), 0.5))),
    aten.asin.default: _short(lambda x: b.atan2(x, _cathetus(x))),
    aten.acos.default: _short(lambda x: b.atan2(_cathetus(x), x)),
}
