"""Contractions: matrix products, linear layers, attention. Results of narrow operands are rounded back to the call's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Shape, bounds, product
from ..ir import Value
from ..products import transposed
from ..shapes import broadcast
from ..types import boolean, f32, f64, i8, u8
from .call import Call, Row, need_alike, opmath

aten = torch.ops.aten
_MANY = 1 << 18  # multiplications


def need_float(*items: Value | None) -> None:
    """Raises Unsupported for integer products, which wrap around in torch, and for operands of several types."""
    if not all(i is None or i.dtype.is_float for i in items):
        raise Unsupported("a product of integer matrices")
    need_alike(*items)


def need_few(shape: Shape, x: Value) -> None:
    """Raises Unsupported for large products of f64, of that shape, which no kernel has tiles for: the libraries of PyTorch are twice as
    fast."""
    if x.dtype is f64 and (bounds(product((*shape, *x.shape[-1:])))[0] or 0) >= _MANY:
        raise Unsupported("a product of many numbers in f64")


def matmul_2d(c: Call, x: Value, y: Value) -> Value:
    """x[..., K] @ y[K, N]"""
    need_float(x, y)
    w = transposed(y)
    return b.linear(x, w) if w is not None else b.matmul(x, y)


def matmul(c: Call, x: Value, y: Value) -> Value:
    """torch.matmul with its rules for vectors."""
    need_float(x, y)
    need_few(c.shape, x)
    left = b.unsqueeze(x, 0) if x.tensor.rank == 1 else x
    right = b.unsqueeze(y, 1) if y.tensor.rank == 1 else y
    out = matmul_2d(c, left, right) if right.tensor.rank == 2 else b.matmul(left, right)
    return b.cast(b.reshape(out, c.shape), c.dtype)


def int_mm(c: Call, x: Value, y: Value) -> Value:
    """x[M, K] @ y[K, N] of 8-bit integers, in i32."""
    if x.dtype not in (i8, u8) or y.dtype != i8:
        raise Unsupported(f"a product of {x.dtype} and {y.dtype}")
    w = transposed(y)
    return b.int_linear(x, w) if w is not None else b.int_matmul(x, y)


def addmm(c: Call, bias: Value, x: Value, y: Value, beta: float = 1, alpha: float = 1) -> Value:
    """beta * bias + alpha * x @ y"""
    need_float(x, y, bias)
    need_few(c.shape, x)
    w = transposed(y) if y.tensor.rank == 2 else None
    if w is not None and beta == 1 and alpha == 1 and bias.shape == (w.shape[0],):
        return b.cast(b.linear(x, w, bias), c.dtype)
    return _added(c, bias, matmul_2d(c, x, y) if y.tensor.rank == 2 else b.matmul(x, y), beta, alpha)


def _added(c: Call, bias: Value, out: Value, beta: float, alpha: float) -> Value:
    """beta * bias + alpha * out"""
    out = b.mul(out, alpha) if alpha != 1 else out
    if beta == 0:
        return b.cast(out, c.dtype)
    added = b.cast(bias, out.dtype)
    return b.cast(b.add(out, b.mul(added, beta) if beta != 1 else added), c.dtype)


def addmv(c: Call, bias: Value, x: Value, y: Value, beta: float = 1, alpha: float = 1) -> Value:
    """beta * bias + alpha * x @ y, a vector"""
    need_float(x, y, bias)
    return _added(c, bias, b.reshape(b.matmul(x, b.unsqueeze(y, 1)), c.shape), beta, alpha)


def addbmm(c: Call, bias: Value, x: Value, y: Value, beta: float = 1, alpha: float = 1) -> Value:
    """addmm of the matrices of both batches side by side, whose products are added."""
    rows = b.reshape(b.permute(x, (1, 0, 2)), (x.shape[1], product((x.shape[0], x.shape[2]))))
    return addmm(c, bias, rows, b.reshape(y, (rows.shape[1], y.shape[2])), beta, alpha)


def linear(c: Call, x: Value, w: Value, bias: Value | None = None) -> Value:
    need_float(x, w, bias)
    need_few(c.shape, x)
    if w.tensor.rank == 1:
        return b.cast(b.reshape(matmul(c, x, w), c.shape), c.dtype)
    return b.cast(b.linear(x, w, bias), c.dtype)


def trilinear(c: Call, x: Value, w: Value, y: Value, *axes: Sequence[int] | int) -> Value:
    """The sum of x[b, i] w[n, i, j] y[b, j] over i and j, which nn.Bilinear is: a product with `w`, and sums of it times x."""
    need_float(x, w, y)
    if axes[:4] != ([1, 3], [0], [1, 2], [2, 3]) or (x.tensor.rank, w.tensor.rank, y.tensor.rank) != (2, 3, 2):
        raise Unsupported("a product of three tensors that is not bilinear in rows of two of them")
    shape = (y.shape[0], *w.shape[:2])
    need_few(shape, y)
    rows = b.reshape(b.linear(y, b.reshape(w, (product(w.shape[:2]), w.shape[2]))), shape)
    return b.cast(b.reduce(b.mul(rows, b.unsqueeze(b.cast(x, rows.dtype), 1)), "sum", 2), c.dtype)


def bilinear_sum(c: Call, x: Value, y: Value) -> Value:
    """dot: sum of products of two vectors."""
    need_float(x, y)
    work = opmath(c.dtype)
    return b.cast(b.reduce(b.mul(b.cast(x, work), b.cast(y, work)), "sum"), c.dtype)


def one_batch(x: Value) -> Value:
    """[..., heads, rows, columns] as [batch, heads, rows, columns]"""
    return b.reshape(x, (product(x.shape[:-3]), *x.shape[-3:]))


def attention_of(c: Call, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: float | None, grouped: bool) -> Value:
    """Scaled dot product attention; operands of other ranks are brought to [batch, heads, length, size], masks to [batch or 1, ...]."""
    need_float(q, k, v)
    if q.tensor.rank < 3 or not (q.tensor.rank == k.tensor.rank == v.tensor.rank):
        raise Unsupported(f"attention over tensors with {q.tensor.rank} and {k.tensor.rank} axes")
    if q.tensor.rank == 3:
        # The leading axis is the batch; torch lines masks up from the right, so they need the head axis too.
        q, k, v = (b.unsqueeze(x, 1) for x in (q, k, v))
        mask = b.unsqueeze(mask, 1) if mask is not None and mask.tensor.rank == 3 else mask
    batch = broadcast(tuple(x.shape[:-3] for x in (q, k, v)))
    heads = [x.shape[-3:-2] for x in (q, k, v)]
    heads = heads if grouped else [broadcast(tuple(heads))] * 3
    q, k, v = (one_batch(b.expand(x, batch + h + x.shape[-2:])) for x, h in zip((q, k, v), heads, strict=True))
    if mask is not None:
        mask = b.reshape(mask, (1,) * (4 - mask.tensor.rank) + mask.shape)
        mask = one_batch(mask if set(mask.shape[:-3]) == {1} else b.expand(mask, batch + mask.shape[-3:]))
        mask = mask if mask.dtype == boolean else b.cast(mask, f32) if q.dtype.bits < 32 else mask
    size = q.shape[-1]
    if scale is None and isinstance(size, int):
        scale = 1.0 / math.sqrt(size)
    elif scale is None:
        wide = opmath(q.dtype)
        q, k, v = (b.cast(x, wide) for x in (q, k, v))
        q, scale = b.div(q, b.sqrt(b.scalar(size, wide))), 1.0
    return b.cast(b.reshape(b.attention(q, k, v, mask, scale=float(scale), after=0 if causal else None), c.shape), c.dtype)


def attention(c: Call, q: Value, k: Value, v: Value, mask: Value | None = None, dropout: float = 0.0, causal: bool = False,
              scale: float | None = None, grouped: bool = False) -> Value:
    if dropout:
        raise Unsupported("attention with dropout")
    return attention_of(c, q, k, v, mask, causal, scale, grouped)


def flash_attention(c: Call, q: Value, k: Value, v: Value, dropout: float = 0.0, causal: bool = False, mask: Value | None = None,
                    scale: float | None = None) -> tuple[Value | None, ...]:
    """What scaled_dot_product_attention becomes on CPU; the log-sum-exp is for training only. Several heads may share keys and values."""
    c.need_only(0)
    if dropout:
        raise Unsupported("attention with dropout")
    inner = Call(c.element(0), frozenset())
    return attention_of(inner, q, k, v, mask, causal, scale, q.shape[1] != k.shape[1]), None


ROWS: dict[Any, Row] = {
    aten.linear.default: linear,
    aten.addmm.default: addmm,
    aten.baddbmm.default: addmm,
    aten.addmv.default: addmv,
    aten.addbmm.default: addbmm,
    aten.mm.default: matmul,
    aten.bmm.default: matmul,
    aten.mv.default: matmul,
    aten._int_mm.default: int_mm,
    aten._trilinear.default: trilinear,
    aten.matmul.default: matmul,
    aten.dot.default: bilinear_sum,
    aten.scaled_dot_product_attention.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: flash_attention,
}
