"""Numbers that a graph computes beside its tensors: from sizes, or read from a tensor by `item()`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..diagnostics.errors import Unsupported
from . import build as b
from .aten import SymScalar
from .dims import Poly
from .ir import Value
from .types import DType, boolean, f64, i64

READ = torch.ops.aten._local_scalar_dense.default
_COMPARED: Mapping[Any, Callable[[Value, Value], Value]] = {
    operator.eq: b.eq, operator.ne: b.ne, operator.lt: b.lt, operator.le: b.le, operator.gt: b.gt, operator.ge: b.ge,
}
_LOGICAL: Mapping[Any, Callable[..., Value]] = {torch.sym_not: b.logical_not, operator.and_: b.and_, operator.or_: b.or_}
_EXACT: Mapping[Any, Callable[..., Value]] = {
    operator.add: b.add, operator.sub: b.sub, operator.mul: b.mul, operator.neg: b.neg, operator.abs: b.abs_, torch.sym_ite: b.where,
    torch.sym_min: b.minimum, torch.sym_max: b.maximum, torch.sym_sum: lambda *parts: reduce(b.add, parts),
}
_WHOLE: Mapping[Any, Callable[..., Value]] = {torch.sym_int: b.trunc, math.floor: b.floor, math.ceil: b.ceil}  # of a float, an int
_COMPUTED: Mapping[DType, Mapping[Any, Callable[..., Value]]] = {
    i64: {**_EXACT, **_WHOLE},
    f64: {
        **_EXACT, **dict.fromkeys((math.sqrt, torch.sym_sqrt), b.sqrt),
        operator.truediv: b.div, operator.pow: b.pow_, torch.sym_float: lambda x: x,
    },
}


def of_data(number: Any) -> bool:
    """Whether a number of PyTorch's tracing depends on what is in tensors."""
    return isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(number))


def computed_with(node: Node) -> bool:
    """Whether a condition is an operand of a computation with tensors or floats, and not only what a path or an assertion asks."""
    for user in node.users:
        made = user.meta.get("val")
        if isinstance(made, (torch.Tensor, torch.SymFloat, float)) or (isinstance(made, torch.SymBool) and computed_with(user)):
            return True
    return False


def computed(node: Node, operands: list[Any]) -> SymScalar:
    """What a call makes of numbers or, for READ, of a tensor: in f64 where Python has a float, else in i64. Raises Unsupported."""
    dtype = f64 if isinstance(node.meta["val"], (torch.SymFloat, float)) else i64
    if node.target is READ:
        return SymScalar(b.cast(b.reshape(operands[0], ()), dtype))
    rule = _COMPUTED[dtype].get(node.target)
    if rule is None:
        raise Unsupported(f"{getattr(node.target, '__name__', node.target)} computes a number from sizes or data")
    given = f64 if node.target in _WHOLE else dtype
    return SymScalar(b.cast(rule(*(_value(x, given) for x in operands)), dtype))


def defined(node: Node, operands: list[Any]) -> Value | None:
    """What holds where Python has a result, if it may raise instead: by 0 nothing is divided, no int is infinite or NaN,
    and of negative numbers only whole powers are real."""
    if node.target is operator.truediv:
        return b.ne(_value(operands[1], f64), 0.0)
    if node.target is operator.pow:
        base, exponent = (_value(x, f64) for x in operands)
        return b.and_(b.or_(b.ne(base, 0.0), b.ge(exponent, 0.0)), b.or_(b.ge(base, 0.0), b.eq(exponent, b.floor(exponent))))
    return b.lt(b.abs_(_value(operands[0], f64)), 2.0**63) if node.target in _WHOLE else None


def condition(node: Node, operands: list[Any]) -> SymScalar:
    """The bool that is read from a tensor, or that a call makes of numbers and bools. Raises Unsupported."""
    if node.target is READ:
        return SymScalar(b.reshape(b.cast(operands[0], boolean), ()))
    if node.target in _LOGICAL:
        return SymScalar(_LOGICAL[node.target](*(_value(x, boolean) for x in operands)))
    if node.target not in _COMPARED:
        raise Unsupported(f"{getattr(node.target, '__name__', node.target)} decides by data")
    floats = any(isinstance(x, float) or (isinstance(x, SymScalar) and x.value.dtype is f64) for x in operands)
    return SymScalar(_COMPARED[node.target](*(_value(x, f64 if floats else i64) for x in operands)))


def _value(item: Any, dtype: DType) -> Value:
    if isinstance(item, SymScalar):
        choice = item.value.dtype is boolean  # of a sym_ite
        return item.value if choice else b.cast(item.value, dtype)
    return b.scalar(item, dtype) if isinstance(item, Poly) else b.full(item, dtype)
