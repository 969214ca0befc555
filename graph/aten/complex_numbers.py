"""Complex numbers as pairs of real tensors, which everything behind this table can compute with.

    (a + bi)(c + di) = (ac - bd) + (ad + bc)i

What moves elements does the same to both parts. Where an operation is left to PyTorch, `graph/lower.py` puts its operands together and
takes its result apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..ir import Value
from ..types import DType, TensorType, TupleType, Type, c64, c128, f32, f64
from . import creation, indexing, linear_algebra, reductions, shape, updates
from .call import Call, Row, as_value

aten = torch.ops.aten
PARTS: dict[DType, DType] = {c64: f32, c128: f64}


@dataclass(frozen=True, eq=False)
class Pair:
    """The real and the imaginary part of a complex tensor, alike in shape and dtype."""

    re: Value
    im: Value


Operand = Union[Pair, Value, complex]
ComplexRow = Callable[..., Any]


def real_type(kind: Type) -> Type:
    """The type of a part of what has the type `kind`."""
    if isinstance(kind, TupleType):
        return TupleType(tuple(None if t is None else _real(t) for t in kind.elements))
    return _real(kind)


def _real(kind: TensorType) -> TensorType:
    return TensorType(PARTS.get(kind.dtype, kind.dtype), kind.shape)


def pair_of(x: Operand, dtype: DType) -> Pair:
    """An operand as a pair of parts of a dtype: what is real has an imaginary part of 0."""
    if isinstance(x, Pair):
        return Pair(b.cast(x.re, dtype), b.cast(x.im, dtype))
    if isinstance(x, complex):
        return Pair(b.full(x.real, dtype), b.full(x.imag, dtype))
    real = as_value(x, dtype)
    return Pair(real, b.full(0.0, dtype, real.shape))


def by_part(row: Row) -> ComplexRow:
    """Operations on one complex tensor that treat its parts alike, such as views and sums."""

    def both(c: Call, x: Any, *rest: Any) -> Any:
        if not isinstance(x, Pair) or any(isinstance(item, (Pair, complex)) for item in rest):
            raise Unsupported("complex numbers")
        part = Call(real_type(c.type), c.used)
        re, im = row(part, x.re, *rest), row(part, x.im, *rest)
        if isinstance(re, Value) and isinstance(im, Value):
            return Pair(re, im)
        assert isinstance(re, tuple) and isinstance(im, tuple)
        return tuple(None if r is None or i is None else Pair(r, i) for r, i in zip(re, im, strict=True))

    return both


def joined(row: Row) -> ComplexRow:
    """cat and stack."""

    def both(c: Call, items: Sequence[Operand], axis: int = 0) -> Pair:
        part = Call(real_type(c.type), c.used)
        pairs = [pair_of(item, part.dtype) for item in items]
        return Pair(_one(row(part, [pair.re for pair in pairs], axis)), _one(row(part, [pair.im for pair in pairs], axis)))

    return both


def updated(row: Row) -> ComplexRow:
    """A tensor some of whose elements are another one's."""

    def both(c: Call, x: Operand, source: Operand, *rest: Any) -> Pair:
        part = Call(real_type(c.type), c.used)
        old, new = pair_of(x, part.dtype), pair_of(source, part.dtype)
        return Pair(_one(row(part, old.re, new.re, *rest)), _one(row(part, old.im, new.im, *rest)))

    return both


def _one(result: Any) -> Value:
    assert isinstance(result, Value)
    return result


def arithmetic(fn: Callable[[Pair, Pair], Pair]) -> ComplexRow:
    """An operation of two operands, of which one may be real."""

    def row(c: Call, x: Operand, y: Operand) -> Pair:
        work = PARTS[c.dtype]
        return fn(pair_of(x, work), pair_of(y, work))

    return row


def scaled(op: Callable[[Value, Value], Value]) -> ComplexRow:
    """add and sub: x + alpha * y"""

    def row(c: Call, x: Operand, y: Operand, alpha: complex = 1) -> Pair:
        work = PARTS[c.dtype]
        left, right = pair_of(x, work), pair_of(y, work)
        right = right if alpha == 1 else product(right, pair_of(alpha, work))
        return Pair(op(left.re, right.re), op(left.im, right.im))

    return row


def product(x: Pair, y: Pair) -> Pair:
    """x * y"""
    return Pair(b.sub(b.mul(x.re, y.re), b.mul(x.im, y.im)), b.add(b.mul(x.re, y.im), b.mul(x.im, y.re)))


def quotient(x: Pair, y: Pair) -> Pair:
    """x / y, with y scaled so that its square neither overflows nor vanishes, as PyTorch does."""
    scale = b.reciprocal(b.maximum(b.abs_(y.re), b.abs_(y.im)))
    re, im = b.mul(y.re, scale), b.mul(y.im, scale)
    factor = b.div(scale, b.add(b.mul(re, re), b.mul(im, im)))
    top = product(x, Pair(re, b.neg(im)))
    return Pair(b.mul(top.re, factor), b.mul(top.im, factor))


def matrix_product(row: Row) -> ComplexRow:
    """x @ y"""

    def both(c: Call, x: Pair | Value, y: Pair | Value) -> Pair:
        if not isinstance(x, Pair) or not isinstance(y, Pair):
            raise Unsupported("complex numbers")
        part = Call(real_type(c.type), c.used)
        rr, ii, ri, ir = (_one(row(part, p, q)) for p, q in ((x.re, y.re), (x.im, y.im), (x.re, y.im), (x.im, y.re)))
        return Pair(b.sub(rr, ii), b.add(ri, ir))

    return both


def magnitude(c: Call, x: Pair) -> Value:
    """sqrt(re^2 + im^2), whose squares neither overflow nor vanish: the greater part is taken out."""
    re, im = b.abs_(x.re), b.abs_(x.im)
    great, small = b.maximum(re, im), b.minimum(re, im)
    ratio = b.div(small, b.where(b.eq(great, 0.0), b.full(1.0, great.dtype), great))
    found = b.mul(great, b.sqrt(b.add(b.mul(ratio, ratio), 1.0)))
    infinite = b.or_(b.isinf(re), b.isinf(im))
    return b.where(infinite, b.full(float("inf"), re.dtype), found)


def exponential(c: Call, x: Pair) -> Pair:
    scale = b.exp(x.re)
    return Pair(b.mul(scale, b.cos(x.im)), b.mul(scale, b.sin(x.im)))


def conjugate(c: Call, x: Pair | Value) -> Pair | Value:
    return Pair(x.re, b.neg(x.im)) if isinstance(x, Pair) else x


def with_parts(c: Call, x: Value) -> Pair:
    """view_as_complex: the last axis holds the two parts."""
    last = x.tensor.rank - 1
    return Pair(*(b.reshape(b.slice_(x, last, part, 1), x.shape[:-1]) for part in (0, 1)))


def parts_of(c: Call, x: Pair) -> Value:
    """view_as_real"""
    return b.concat([b.unsqueeze(part, part.tensor.rank) for part in (x.re, x.im)], x.re.tensor.rank)


def converted(c: Call, x: Pair | Value, *_: Any) -> Pair | Value:
    if c.dtype in PARTS:
        return pair_of(x, PARTS[c.dtype])
    return b.cast(x.re if isinstance(x, Pair) else x, c.dtype)


def filled(number: int) -> ComplexRow:
    """Creation: the filling is argument `number` of the call."""
    return lambda c, *given: pair_of(complex(given[number]) if number >= 0 else 0j, PARTS[c.dtype])


_MOVED = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.permute.default, aten.t.default, aten.transpose.int, aten.alias.default, aten.detach.default, aten.clone.default,
    aten.contiguous.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default,
    aten.unbind.int, aten.unfold.default, aten.diagonal.default, aten.flip.default, aten.roll.default, aten.repeat.default,
)
_FOUND = (aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default)
_SUMMED = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.matmul.default)

ROWS: dict[Any, ComplexRow] = {
    **{op: by_part(shape.ROWS[op]) for op in _MOVED},
    **{op: by_part(indexing.ROWS[op]) for op in _FOUND},
    **{op: by_part(reductions.ROWS[op]) for op in _SUMMED},
    **{op: matrix_product(linear_algebra.ROWS[op]) for op in _PRODUCTS},
    aten.cat.default: joined(shape.ROWS[aten.cat.default]),
    aten.stack.default: joined(shape.ROWS[aten.stack.default]),
    **{op: updated(updates.ROWS[op]) for op in (aten.slice_scatter.default, aten.select_scatter.default)},
    aten.copy.default: updated(creation.ROWS[aten.copy.default]),
    aten.neg.default: by_part(lambda c, x: b.neg(x)),
    aten.add.Tensor: scaled(b.add),
    aten.add.Scalar: scaled(b.add),
    aten.sub.Tensor: scaled(b.sub),
    aten.sub.Scalar: scaled(b.sub),
    aten.mul.Tensor: arithmetic(product),
    aten.mul.Scalar: arithmetic(product),
    aten.div.Tensor: arithmetic(quotient),
    aten.div.Scalar: arithmetic(quotient),
    aten.abs.default: magnitude,
    aten.angle.default: lambda c, x: b.atan2(x.im, x.re),
    aten.exp.default: exponential,
    aten._conj.default: conjugate,
    aten._conj_physical.default: conjugate,
    aten.conj_physical.default: conjugate,
    aten.resolve_conj.default: by_part(shape.ROWS[aten.alias.default]),
    aten.view_as_complex.default: with_parts,
    aten.view_as_real.default: parts_of,
    aten.complex.default: lambda c, re, im: Pair(re, im),
    aten.polar.default: lambda c, length, angle: Pair(b.mul(length, b.cos(angle)), b.mul(length, b.sin(angle))),
    aten._to_copy.default: converted,
    aten.to.device: converted,
    aten.to.dtype: converted,
    aten.to.dtype_layout: converted,
    aten.to.other: converted,
    aten.type_as.default: converted,
    aten.expand_as.default: lambda c, x, _: by_part(shape.stretch)(c, x, c.shape),
    aten.view_as.default: lambda c, x, _: by_part(shape.as_shape)(c, x),
    aten.reshape_as.default: lambda c, x, _: by_part(shape.as_shape)(c, x),
    aten.zeros.default: filled(-1),
    aten.zeros_like.default: filled(-1),
    aten.new_zeros.default: filled(-1),
    aten.full.default: filled(1),
    aten.full_like.default: filled(1),
    aten.ones.default: lambda c, *_: pair_of(1 + 0j, PARTS[c.dtype]),
}
