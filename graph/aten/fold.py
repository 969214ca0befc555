"""Windows as columns (unfold) and sums of what overlapping windows hold (fold).

    im2col    out[n, c * window + k, o] = x[n, c, o * stride + k * dilation - padding]
    col2im    out[n, c, p]              = sum of x[n, c * window + k, o] over all o, k with o * stride + k * dilation - padding = p

Sums go by phase, as in `transposed`: with k = t * stride + r, result q * stride + r is the sum over t of what window q - t has for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product as combinations
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, floordiv, product
from ..ir import Value
from . import windows
from .call import Call, Row, opmath
from .transposed import beyond, dilated, side_by_side

aten = torch.ops.aten


def im2col(c: Call, x: Value, size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]) -> Value:
    """torch.nn.functional.unfold: a view of the image, and what surrounds it."""
    image = windows.channels_last(x if x.tensor.rank == 4 else b.unsqueeze(x, 0))
    patches = windows.windows(windows.surrounded(image, padding, padding), size, stride, dilation)
    return b.reshape(b.permute(patches, (0, 5, 3, 4, 1, 2)), c.shape)


def col2im(c: Call, x: Value, out: Sequence[Dim], size: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
           stride: Sequence[int]) -> Value:
    """torch.nn.functional.fold"""
    if not x.dtype.is_float or 0 in x.shape:
        raise Unsupported(f"sums over windows of {x.type}")
    places = [floordiv(n + 2 * p - d * (k - 1) - 1, s) + 1 for n, k, d, p, s in zip(out, size, dilation, padding, stride, strict=True)]
    x = x if x.tensor.rank == 3 else b.unsqueeze(x, 0)
    x = b.cast(b.reshape(x, (x.shape[0], floordiv(x.shape[1], product(size)), *size, *places)), opmath(x.dtype))
    x = dilated(x, dilation)
    counts = [-(-int(k) // s) for k, s in zip(x.shape[2:4], stride, strict=True)]
    x = b.pad(x, ((0, 0), (0, 0), *((0, t * s - k) for t, s, k in zip(counts, stride, x.shape[2:4], strict=True)), (0, 0), (0, 0)))
    x = b.reshape(x, (*x.shape[:2], counts[0], stride[0], counts[1], stride[1], *places))
    x = b.permute(x, (2, 4, 0, 6, 7, 3, 5, 1))  # [taps..., n, windows..., phases..., c]
    more = [beyond(n + p - (o + t - 1) * s, s) for n, p, o, t, s in zip(out, padding, places, counts, stride, strict=True)]
    shifted: list[Value] = []
    for taps in combinations(*map(range, counts)):
        part = x
        for axis, tap in enumerate(taps):
            part = b.slice_(part, axis, tap, 1)
        room = [(tap, t - 1 - tap + extra) for tap, t, extra in zip(taps, counts, more, strict=True)]
        shifted.append(b.pad(b.reshape(part, (*x.shape[2:5], 1, *x.shape[5:])), ((0, 0), *room, *((0, 0),) * 4)))
    image = side_by_side(reduce(b.add, shifted))
    for axis, (start, length) in enumerate(zip(padding, out, strict=True), 1):
        image = b.slice_(image, axis, start, length)
    return b.reshape(windows.channels_first(b.cast(image, c.dtype)), c.shape)


ROWS: dict[Any, Row] = {aten.im2col.default: im2col, aten.col2im.default: col2im}
