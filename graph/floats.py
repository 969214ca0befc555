"""Sizes that a model computes in Python's floats, such as torch.sym_int(1.5 * n): which have no polynomial form."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import sympy

from . import dims
from .dims import Dim

Tree = tuple[Any, ...]  # ("dim", a Dim) or ("number", a float) or the name of a function and trees
_TO_INT: Mapping[str, Callable[[float], int]] = {
    "TruncToInt": math.trunc, "FloorToInt": math.floor, "CeilToInt": math.ceil, "RoundToInt": round,
}
_RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "Equality": operator.eq, "Unequality": operator.ne, "GreaterThan": operator.ge, "StrictGreaterThan": operator.gt,
    "LessThan": operator.le, "StrictLessThan": operator.lt,
}
# As PyTorch's symbolic functions are defined in torch.utils._sympy.functions: those of numbers that are true of Python's.
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    **_TO_INT, **_RELATIONS, "ToFloat": float, "TruncToFloat": lambda x: float(math.trunc(x)), "RoundDecimal": round,
    "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv, "FloatPow": operator.pow, "PowByNatural": operator.pow,
    "Pow": operator.pow, "Min": min, "Max": max, "Abs": abs,
    "Add": lambda *terms: reduce(operator.add, terms),  # sum() is more exact from Python 3.12 on
    "Mul": lambda *factors: reduce(operator.mul, factors),
    **{f"OpaqueUnaryFn_{name}": getattr(math, name) for name in ("sqrt", "log", "log2", "exp", "sin", "cos", "tan", "atan")},
}
_LARGEST = 1 << 20  # of the numbers of a fraction: a product with a size below 2^33 has no rounding error


@dataclass(frozen=True)
class Definition:
    """A symbol whose number, within low and high (None: no bound), Python's floats give in each call from those of other symbols."""

    name: str
    tree: Tree
    low: int
    high: int | None

    @property
    def dim(self) -> Dim:
        return dims.symbol(self.name, self.low, self.high)

    def number(self, env: Mapping[str, int]) -> int:
        return int(_number(self.tree, env))

    def substituted(self, name: str, env: Mapping[str, Dim]) -> Definition:
        """Of that name, with other dimensions for symbols."""
        return replace(self, name=name, tree=_substituted(self.tree, env))

    @property
    def text(self) -> str:
        """What the number is of."""
        return _text(self.tree)

    def __str__(self) -> str:
        return f"{self.name} = {self.text}"


def function(name: str) -> str:
    """The name of a function of trees. Raises KeyError for another."""
    if name not in _FUNCTIONS:
        raise KeyError(name)
    return name


def is_whole(expr: sympy.Expr) -> bool:
    """Whether an expression is one of a float made an int."""
    return type(expr).__name__ in _TO_INT


def tree_of(expr: sympy.Expr, dim: Callable[[sympy.Expr], Dim]) -> Tree | None:
    """The tree of a symbolic number; `dim` translates whole ones. None where it has a function that is not known here."""
    if expr.is_integer and not is_whole(expr):
        return ("dim", dim(expr))
    if isinstance(expr, sympy.Float):
        return ("number", float(expr))
    if isinstance(expr, sympy.Rational):
        return ("IntTrueDiv", ("dim", int(expr.p)), ("dim", int(expr.q)))
    name = type(expr).__name__
    parts = [tree_of(part, dim) for part in expr.args]
    return (name, *parts) if name in _FUNCTIONS and None not in parts else None


def exact(expr: sympy.Expr, dim: Callable[[sympy.Expr], Dim]) -> Dim | None:
    """The Dim of a float made an int where no rounding can show: a multiple of a fraction with a power of 2 below, or one quotient of ints,
    whose rounding never reaches the next int. None otherwise."""
    inner, name = expr.args[0], type(expr).__name__
    if inner.is_integer:
        return dim(inner)
    found = _divided(inner, dim) or _fraction(inner, dim)
    if found is None or name == "RoundToInt":
        return None
    above, below = found
    if name == "CeilToInt":
        return dims.ceildiv(above, below)
    return dims.floordiv(above, below) if name == "FloorToInt" or dims.non_negative(above) else None


def _divided(expr: sympy.Expr, dim: Callable[[sympy.Expr], Dim]) -> tuple[Dim, int] | None:
    """(a, b) of a quotient a / b by an int, which is made > 0."""
    if type(expr).__name__ not in ("IntTrueDiv", "FloatTrueDiv"):
        return None
    above, below = expr.args
    if type(above).__name__ == "ToFloat":
        above = above.args[0]
    if not above.is_integer or not below.is_number or below == 0 or not float(below).is_integer():
        return None
    return (dim(above), int(below)) if below > 0 else (-dim(above), -int(below))


def _fraction(expr: sympy.Expr, dim: Callable[[sympy.Expr], Dim]) -> tuple[Dim, int] | None:
    """(a, b) of a / b with a power of 2 for b, all of whose parts floats hold exactly."""
    if type(expr).__name__ == "ToFloat":
        return dim(expr.args[0]), 1
    if isinstance(expr, (sympy.Float, sympy.Integer)):
        above, below = float(expr).as_integer_ratio()
        return (above, below) if max(abs(above), below) <= _LARGEST else None
    if not isinstance(expr, (sympy.Mul, sympy.Add)):
        divided = _divided(expr, dim)
        return divided if divided is not None and divided[1] & (divided[1] - 1) == 0 else None
    parts = [_fraction(part, dim) for part in expr.args]
    a: Dim = 1 if isinstance(expr, sympy.Mul) else 0
    b = 1
    for part in parts:
        if part is None:
            return None
        a = a * part[0] if isinstance(expr, sympy.Mul) else a * part[1] + part[0] * b
        b *= part[1]
    return (a, b) if b <= _LARGEST else None


def _number(tree: Tree, env: Mapping[str, int]) -> float:
    kind, *rest = tree
    if kind == "dim":
        return dims.evaluate(rest[0], env)
    if kind == "number":
        number: float = rest[0]
        return number
    return _FUNCTIONS[kind](*(_number(part, env) for part in rest))


def _substituted(tree: Tree, env: Mapping[str, Dim]) -> Tree:
    kind, *rest = tree
    if kind == "dim":
        return (kind, dims.substitute(rest[0], env))
    return tree if kind == "number" else (kind, *(_substituted(part, env) for part in rest))


def _text(tree: Tree) -> str:
    kind, *rest = tree
    return str(rest[0]) if kind in ("dim", "number") else f"{kind}({', '.join(map(_text, rest))})"
