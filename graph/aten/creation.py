"""Tensors made from numbers. `empty` gives zeros: any content is right, and zeros are repeatable."""

from __future__ import annotations

from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import attrs as A
from .. import build as b
from ..dims import Dim
from ..ir import Value
from ..types import DType, i64
from .call import Call, Operand, Row, SymScalar, as_value, need_fitting

aten = torch.ops.aten


def filled(c: Call, value: Operand) -> Value:
    """A tensor of the call's type that holds one number everywhere."""
    need_fitting(c.dtype, value)
    single = as_value(value, c.dtype)
    return b.full(single.attrs.value, c.dtype, c.shape) if isinstance(single.attrs, A.FullAttrs) else b.expand(single, c.shape)


def zeros(c: Call, *_: Any) -> Value:
    return filled(c, 0)


def ones(c: Call, *_: Any) -> Value:
    return filled(c, 1)


def arange(c: Call, start: Dim | float, end: Dim | float, step: Dim | float = 1, *_: Any) -> Value:
    if isinstance(start, SymScalar) or isinstance(step, SymScalar):
        raise Unsupported("arange from a number that depends on sizes or data")
    return b.iota(c.shape[0], c.dtype, _whole(start, c.dtype), _whole(step, c.dtype))


def _whole(number: Dim | float, dtype: DType) -> Dim | float:
    """As an int where that is all that counts, or the same: integers are added up exactly, and to sizes."""
    exact = not dtype.is_float or (isinstance(number, float) and number.is_integer() and abs(number) < 1 << 31)
    return int(number) if isinstance(number, float) and exact else number


def triangle(upper: bool) -> Row:
    """tril and triu: elements on the other side of a diagonal become 0."""

    def row(c: Call, x: Value, diagonal: Dim = 0) -> Value:
        rows = b.reshape(b.iota(x.shape[-2], i64), (x.shape[-2], 1))
        columns = b.reshape(b.iota(x.shape[-1], i64), (1, x.shape[-1]))
        edge = b.add(rows, as_value(diagonal, i64))
        keep = b.ge(columns, edge) if upper else b.le(columns, edge)
        return b.where(keep, x, as_value(0, x.dtype))

    return row


ROWS: dict[Any, Row] = {
    aten.full.default: lambda c, size, value, *_: filled(c, value),
    aten.full_like.default: lambda c, x, value, *_: filled(c, value),
    aten.new_full.default: lambda c, x, size, value, *_: filled(c, value),
    aten.fill.Scalar: lambda c, x, value: filled(c, value),
    aten.fill.Tensor: lambda c, x, value: filled(c, value),
    aten.copy.default: lambda c, x, source, *_: filled(c, source),
    aten.scalar_tensor.default: lambda c, value, *_: filled(c, value),
    aten.zeros.default: zeros,
    aten.zeros_like.default: zeros,
    aten.new_zeros.default: zeros,
    aten.empty.memory_format: zeros,
    aten.empty_like.default: zeros,
    aten.empty_strided.default: zeros,
    aten.new_empty.default: zeros,
    aten.new_empty_strided.default: zeros,
    aten.ones.default: ones,
    aten.ones_like.default: ones,
    aten.new_ones.default: ones,
    aten.arange.default: lambda c, end, *_: arange(c, 0, end),
    aten.arange.start: lambda c, start, end, *_: arange(c, start, end),
    aten.arange.start_step: arange,
    aten.tril.default: triangle(upper=False),
    aten.triu.default: triangle(upper=True),
}
