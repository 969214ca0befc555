"""Elementwise ATen operations. A row receives every argument of the schema, in order, defaults filled in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import attrs as A
from .. import build as b
from ..ir import Value
from ..types import boolean, f16, i8
from .call import Call, Operand, Row, as_value, computing, factor, is_one, known_number, need_divisor, need_fitting, opmath, promote

aten = torch.ops.aten

_ON_BOOL = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and", "and": "and", "or": "or", "xor": "xor"}


def formula(fn: Callable[..., Value], tensors: int = 1) -> Row:
    """`fn` applied in torch's computation dtype: the first `tensors` arguments are cast to it, the result is cast back."""

    def row(c: Call, *args: Any) -> Value:
        return b.cast(fn(*(computing(a, c.dtype) for a in args[:tensors]), *args[tensors:]), c.dtype)

    return row


def unary(op: str) -> Row:
    """One IR operation whose result has the dtype of the call."""
    return formula(lambda x, *_: b.elementwise(op, x))


def exact(op: str) -> Row:
    """An operation that needs no wider dtype, and no float for integers."""
    return lambda c, x: x if x.dtype == boolean else b.cast(b.elementwise(op, x), c.dtype)


def arithmetic(op: str, c: Call, x: Operand, y: Operand) -> Value:
    """A binary operation in the dtype of the call's result; bool operands become logic."""
    if c.dtype == boolean:
        if op not in _ON_BOOL:
            raise Unsupported(f"{op} of bool tensors")
        return b.elementwise(_ON_BOOL[op], as_value(x, boolean), as_value(y, boolean))
    second = factor if op in ("mul", "div", "floordiv") else computing
    return b.cast(b.elementwise(op, computing(x, c.dtype), second(y, c.dtype)), c.dtype)


def binary(op: str) -> Row:
    return lambda c, x, y: arithmetic(op, c, x, y)


def extreme(op: str) -> Row:
    """maximum and minimum, which need no wider dtype."""

    def row(c: Call, x: Operand, y: Operand) -> Value:
        name = _ON_BOOL[op] if c.dtype == boolean else op
        return b.elementwise(name, as_value(x, c.dtype), as_value(y, c.dtype))

    return row


def scaled(op: str, reverse: bool = False) -> Row:
    """add, sub and rsub: x op alpha * y."""

    def row(c: Call, x: Operand, y: Operand, alpha: float = 1) -> Value:
        if reverse:
            x, y = y, x
        if isinstance(x, Value) and y is not True and known_number(y) == 0 and x.type == c.type and not c.dtype.is_float and not reverse:
            return x
        if alpha == 1:
            return arithmetic(op, c, x, y)
        if c.dtype == boolean:
            raise Unsupported("alpha with bool tensors")
        need_fitting(c.dtype, alpha)
        other = b.mul(computing(y, c.dtype), computing(alpha, c.dtype))
        return b.cast(b.elementwise(op, computing(x, c.dtype), other), c.dtype)

    return row


def difference(c: Call, x: Operand, y: Operand, alpha: float = 1) -> Value:
    """sub. Integer weights without their zero points are the weights where all of these are zero."""
    zeros = _zero_points(x, y)
    if zeros is None or not isinstance(x, Value) or x.shape != c.shape:
        return _SUB(c, x, y, alpha)  # type: ignore[return-value]
    c.decided.append(zeros)
    return b.cast(x, c.dtype)


_SUB = scaled("sub")


def _zero_points(x: Operand, y: Operand) -> Value | None:
    """The constant that `y` is made of, where that is all zeros and `x` is made of a weight of bytes. Other integers that are zero now may
    be others later, such as where positions begin."""
    weight, zeros = (_integers(item) for item in (x, y))
    if weight is None or zeros is None or weight.dtype != i8 or weight.tensor.rank < 2:
        return None
    return zeros if isinstance(zeros.attrs, A.ConstantAttrs) and not bool(zeros.attrs.tensor.any()) else None


def _integers(item: Operand) -> Value | None:
    """The constant tensor of integers that a value is made of by casts and views."""
    while isinstance(item, Value) and item.op in ("cast", "reshape", "expand"):
        item = item.inputs[0]
    return item if isinstance(item, Value) and item.op == "constant" and item.dtype.kind == "int" else None


def compare(op: str) -> Row:
    def row(c: Call, x: Operand, y: Operand) -> Value:
        work, number = promote(x, y), known_number(y)
        if not work.is_float and work != boolean and number is not None and not _fits(number, work.bits, work.kind):
            raise Unsupported(f"comparing {work} with {number}")
        return b.elementwise(op, computing(x, work), computing(y, work))

    return row


def _fits(number: float, bits: int, kind: str) -> bool:
    low, high = (0, 1 << bits) if kind == "uint" else (-(1 << (bits - 1)), 1 << (bits - 1))
    return low <= number < high


def logical(op: str) -> Row:
    return lambda c, x, y: b.elementwise(op, as_value(x, boolean), as_value(y, boolean))


def division(c: Call, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return arithmetic("div", c, x, y)
    need_divisor(y, c.dtype)
    if rounding_mode == "trunc" and opmath(c.dtype) != c.dtype:
        ratio = b.div(computing(x, c.dtype), factor(y, c.dtype))
        # Eager rounds the quotient of two tensors to the narrow dtype before it truncates.
        return b.cast(b.trunc(ratio if is_one(y) else b.cast(b.cast(ratio, c.dtype), ratio.dtype)), c.dtype)
    return arithmetic("floordiv" if rounding_mode == "floor" else "truncdiv", c, x, y)


def modulo(op: str) -> Row:
    def row(c: Call, x: Operand, y: Operand) -> Value:
        need_divisor(y, c.dtype)
        return arithmetic(op, c, x, y)

    return row


def shift(op: str) -> Row:
    def row(c: Call, x: Operand, y: Operand) -> Value:
        number = known_number(y)
        if number is None or not 0 <= number < c.dtype.bits:
            raise Unsupported("a shift by a number that may be out of range")
        return arithmetic(op, c, x, y)

    return row


def power(c: Call, x: Operand, y: Operand) -> Value:
    """pow with the shortcuts that eager takes for special exponents; integers by repeated multiplication, powers of 2 by shifts."""
    number = known_number(y) if not isinstance(y, Value) else None
    short = (1, 2, 3) if not c.dtype.is_float or c.dtype == f16 else _POWERS
    if isinstance(x, Value) and number in short and number is not None:
        return b.cast(_POWERS[number](computing(x, c.dtype)), c.dtype)
    if not c.dtype.is_float and isinstance(x, int) and x == 2:
        return arithmetic("shl", c, 1, y)  # 0 where the bit is not in the dtype
    if not c.dtype.is_float:
        raise Unsupported("pow of integers")
    return arithmetic("pow", c, x, y)


_POWERS: dict[float, Callable[[Value], Value]] = {
    1: lambda x: x, 2: lambda x: b.mul(x, x), 3: lambda x: b.mul(b.mul(x, x), x), 0.5: b.sqrt, -0.5: b.rsqrt, -1: b.reciprocal,
    -2: lambda x: b.reciprocal(b.mul(x, x)),
}


def clamp(c: Call, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    """minimum(maximum(x, low), high); NaN in any of them is kept."""
    if c.dtype == boolean:
        raise Unsupported("clamp of bool tensors")
    need_fitting(c.dtype, low, high)
    if c.dtype.kind == "uint" and any(isinstance(x, int) and x < 0 for x in (low, high)):
        raise Unsupported("clamp of unsigned integers by a negative number")  # which wraps around before torch 2.15
    out = as_value(x, c.dtype)
    out = out if low is None else b.maximum(out, as_value(low, c.dtype))
    return out if high is None else b.minimum(out, as_value(high, c.dtype))


def where(c: Call, condition: Value, x: Operand, y: Operand) -> Value:
    need_fitting(c.dtype, x, y)
    return b.where(b.cast(condition, boolean), as_value(x, c.dtype), as_value(y, c.dtype))


def gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inner = b.mul(b.add(x, b.mul(b.mul(b.mul(x, x), x), 0.044715)), math.sqrt(2.0 / math.pi))
        return b.mul(b.mul(x, 0.5), b.add(b.tanh(inner), 1.0))
    return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, math.sqrt(0.5))), 1.0))


def elu(x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    return b.where(b.lt(x, 0.0), b.mul(b.expm1(b.mul(x, input_scale)), alpha if scale == 1 else alpha * scale), b.mul(x, scale))


def softplus(x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    inner = b.mul(x, beta)
    return b.where(b.gt(inner, threshold), x, b.div(b.log1p(b.exp(inner)), beta))


def log_sigmoid(c: Call, x: Value) -> tuple[Value | None, ...]:
    c.need_only(0)
    wide = b.cast(x, opmath(x.dtype))
    return b.cast(b.sub(b.minimum(wide, 0.0), b.log1p(b.exp(b.neg(b.abs_(wide))))), x.dtype), None


def hard_sigmoid(x: Value) -> Value:
    return b.div(b.minimum(b.maximum(b.add(x, 3.0), 0.0), 6.0), 6.0)


def is_infinite(op: str) -> Row:
    """isnan and isinf; no integer is either."""
    return lambda c, x: b.elementwise(op, as_value(x, opmath(x.dtype))) if x.dtype.is_float else b.full(False, boolean, x.shape)


_UNARY = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "tanh", "sigmoid",
    "erf",
)
_EXACT = ("neg", "abs", "sign", "floor", "ceil", "trunc", "round", "relu")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")

ROWS: dict[Any, Row] = {
    **{getattr(aten, n).default: unary(n) for n in _UNARY},
    **{getattr(aten, n).default: exact(n) for n in _EXACT},
    **{getattr(getattr(aten, n), kind): compare(n) for n in _COMPARE for kind in ("Tensor", "Scalar")},
    aten.special_erf.default: unary("erf"),
    aten.square.default: formula(lambda x: b.mul(x, x)),
    aten.isnan.default: is_infinite("isnan"),
    aten.isinf.default: is_infinite("isinf"),
    aten.atan.default: formula(lambda x: b.atan2(x, 1.0)),
    aten.add.Tensor: scaled("add"),
    aten.add.Scalar: scaled("add"),
    aten.sub.Tensor: difference,
    aten.sub.Scalar: scaled("sub"),
    aten.rsub.Tensor: scaled("sub", reverse=True),
    aten.rsub.Scalar: scaled("sub", reverse=True),
    aten.mul.Tensor: binary("mul"),
    aten.mul.Scalar: binary("mul"),
    aten.div.Tensor: division,
    aten.div.Scalar: division,
    aten.true_divide.Tensor: division,
    aten.div.Tensor_mode: division,
    aten.div.Scalar_mode: division,
    aten.floor_divide.default: lambda c, x, y: division(c, x, y, "floor"),
    aten.remainder.Tensor: modulo("remainder"),
    aten.remainder.Scalar: modulo("remainder"),
    aten.fmod.Tensor: modulo("fmod"),
    aten.fmod.Scalar: modulo("fmod"),
    aten.pow.Tensor_Tensor: power,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Scalar: power,
    aten.atan2.default: binary("atan2"),
    aten.maximum.default: extreme("maximum"),
    aten.minimum.default: extreme("minimum"),
    aten.bitwise_and.Tensor: binary("and"),
    aten.bitwise_and.Scalar: binary("and"),
    aten.bitwise_or.Tensor: binary("or"),
    aten.bitwise_or.Scalar: binary("or"),
    aten.bitwise_xor.Tensor: binary("xor"),
    aten.bitwise_xor.Scalar: binary("xor"),
    aten.bitwise_left_shift.Tensor_Scalar: shift("shl"),
    aten.bitwise_right_shift.Tensor_Scalar: shift("shr"),
    aten.__lshift__.Scalar: shift("shl"),
    aten.__rshift__.Scalar: shift("shr"),
    aten.bitwise_not.default: lambda c, x: b.logical_not(x) if x.dtype == boolean else b.bitwise_not(x),
    aten.logical_and.default: logical("and"),
    aten.logical_or.default: logical("or"),
    aten.logical_xor.default: logical("xor"),
    aten.logical_not.default: lambda c, x: b.logical_not(as_value(x, boolean)),
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_min.Tensor: clamp,
    aten.clamp_max.default: lambda c, x, high: clamp(c, x, None, high),
    aten.clamp_max.Tensor: lambda c, x, high: clamp(c, x, None, high),
    aten.hardtanh.default: clamp,
    aten.relu6.default: lambda c, x: clamp(c, x, 0, 6),
    aten.where.self: where,
    aten.where.ScalarSelf: where,
    aten.where.ScalarOther: where,
    aten.where.Scalar: where,
    aten.masked_fill.Scalar: lambda c, x, mask, value: where(c, mask, value, x),
    aten.masked_fill.Tensor: lambda c, x, mask, value: where(c, mask, value, x),
    aten.gelu.default: formula(gelu),
    aten.silu.default: formula(lambda x: b.mul(x, b.sigmoid(x))),
    aten.mish.default: formula(lambda x: b.mul(x, b.tanh(softplus(x)))),
    aten.elu.default: formula(elu),
    aten.softplus.default: formula(softplus),
    aten.log_sigmoid_forward.default: log_sigmoid,
    aten.hardsigmoid.default: formula(hard_sigmoid),
    aten.hardswish.default: formula(lambda x: b.div(b.mul(x, b.minimum(b.maximum(b.add(x, 3.0), 0.0), 6.0)), 6.0)),
    aten.leaky_relu.default: formula(lambda x, slope: b.where(b.gt(x, 0.0), x, b.mul(x, slope))),
    aten.threshold.default: lambda c, x, threshold, value: b.where(
        b.le(computing(x, x.dtype), as_value(threshold, opmath(x.dtype))), as_value(value, c.dtype), x),
    aten._prelu_kernel.default: formula(lambda x, w: b.where(b.gt(x, 0.0), x, b.mul(x, w)), tensors=2),
    aten.addcmul.default: formula(lambda x, y, z, value: b.add(x, b.mul(b.mul(y, value), z)), tensors=3),
    aten.addcdiv.default: formula(lambda x, y, z, value: b.add(x, b.div(b.mul(y, value), z)), tensors=3),
}
