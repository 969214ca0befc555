"""Windows as columns (unfold) and sums of what overlapping windows hold (fold, the end of an inverse Fourier transform by frames).

    im2col             out[n, c * window + k, o] = x[n, c, o * stride + k * dilation - padding]
    col2im             out[n, c, p]              = sum of x[n, c * window + k, o] over all o, k with o * stride + k * dilation - padding = p
    unfold_backward    out[.., p, ..]            = sum of x[.., o, .., k] over all o, k with o * step + k = p

Sums go by phase, as in `transposed`: with k = t * step + r, result q * step + r is the sum over t of what window q - t has for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, floordiv, product
from ..ir import Value
from . import windows
from .call import Call, Row, opmath
from .transposed import dilated

aten = torch.ops.aten

_MOST_OVERLAPPING = 64  # each is a term of the code


def im2col(c: Call, x: Value, size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]) -> Value:
    """torch.nn.functional.unfold: a view of the image, and what surrounds it."""
    image = windows.channels_last(x if x.tensor.rank == 4 else b.unsqueeze(x, 0))
    patches = windows.windows(windows.surrounded(image, padding, padding), size, stride, dilation)
    return b.reshape(b.permute(patches, (0, 5, 3, 4, 1, 2)), c.shape)


def col2im(c: Call, x: Value, out: Sequence[Dim], size: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
           stride: Sequence[int]) -> Value:
    """torch.nn.functional.fold"""
    x = x if x.tensor.rank == 3 else b.unsqueeze(x, 0)
    places = [floordiv(n + 2 * p - d * (k - 1) - 1, s) + 1 for n, k, d, p, s in zip(out, size, dilation, padding, stride, strict=True)]
    columns = dilated(b.reshape(x, (x.shape[0], floordiv(x.shape[1], product(size)), *size, *places)), dilation)
    image = _summed(b.permute(columns, (0, 4, 5, 1, 2, 3)), 1, 4, stride[0], padding[0], out[0])
    image = _summed(image, 2, 4, stride[1], padding[1], out[1])
    return b.reshape(windows.channels_first(b.cast(image, c.dtype)), c.shape)


def unfold_backward(c: Call, x: Value, sizes: Sequence[Dim], axis: int, size: int, step: int) -> Value:
    if not c.tensor.rank:
        raise Unsupported("windows of a scalar")
    axis = b.axis_of(axis, c.tensor.rank)
    x = b.expand(x, (*sizes[:axis], x.shape[axis], *sizes[axis + 1 :], size))
    return b.cast(_summed(x, axis, x.tensor.rank - 1, step, 0, sizes[axis]), c.dtype)


def _summed(x: Value, axis: int, window: int, step: int, start: int, length: Dim) -> Value:
    """Results start, .. start + length - 1 of the windows along `axis`, whose elements are along the later axis `window`."""
    size = x.shape[window]
    if not x.dtype.is_float or not isinstance(size, int) or 0 in x.shape:
        raise Unsupported(f"sums over windows of {x.type}")
    x, count = b.cast(x, opmath(x.dtype)), -(-size // step)
    if count > _MOST_OVERLAPPING:
        raise Unsupported(f"sums over windows of which {count} overlap")
    x = _padded(x, window, 0, count * step - size)
    total: Value | None = None
    for tap in range(count):
        part = _padded(b.slice_(x, window, tap * step, step), axis, tap, count - 1 - tap)
        total = part if total is None else b.add(total, part)
    assert total is not None
    order = [a for a in range(x.tensor.rank) if a != window]
    phases = b.permute(total, [*order[: axis + 1], window, *order[axis + 1 :]])
    whole = phases.shape[axis] * step
    merged = b.reshape(phases, (*phases.shape[:axis], whole, *phases.shape[axis + 2 :]))
    return _padded(merged, axis, -start, start + length - whole)


def _padded(x: Value, axis: int, low: Dim, high: Dim) -> Value:
    return x if low == 0 == high else b.pad(x, [(low, high) if a == axis else (0, 0) for a in range(x.tensor.rank)])


ROWS: dict[Any, Row] = {
    aten.im2col.default: im2col,
    aten.col2im.default: col2im,
    aten.unfold_backward.default: unfold_backward,
}
