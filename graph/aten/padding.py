"""Padding by elements of the image itself.

    reflect      x[low], .. x[1],  x[0], .. x[n-1],  x[n-2], .. x[n-1-high]
    replicate    x[0],   .. x[0],  x[0], .. x[n-1],  x[n-1], .. x[n-1]
    circular     x[n-low], .. x[n-1],  x[0], .. x[n-1],  x[0], .. x[high-1]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .. import build as b
from ..dims import Dim
from ..ir import Value
from ..types import i64
from .call import Call, Row

aten = torch.ops.aten


def surrounded(c: Call, x: Value, amounts: Sequence[Dim], mode: str) -> Value:
    """torch lists (low, high) from the last axis backwards; negative ones take elements away."""
    for n in range(0, len(amounts), 2):
        low, high = amounts[n : n + 2]
        if low != 0 or high != 0:
            x = _along(x, x.tensor.rank - 1 - n // 2, low, high, mode)
    return x


def _along(x: Value, axis: int, low: Dim, high: Dim, mode: str) -> Value:
    size = x.shape[axis]
    last = b.scalar(size - 1, i64)
    at = b.iota(low + size + high, i64, 0 - low)
    if mode == "replicate":
        at = b.minimum(b.maximum(at, 0), last)
    elif mode == "reflect":
        at = b.sub(last, b.abs_(b.sub(last, b.abs_(at))))
    else:
        at = b.remainder(b.add(at, b.scalar(size, i64)), b.scalar(size, i64))
    return b.take(x, at, axis)


def _row(mode: str) -> Row:
    return partial(surrounded, mode=mode)


ROWS: dict[Any, Row] = {
    **dict.fromkeys((aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default), _row("reflect")),
    **dict.fromkeys((aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default), _row("replicate")),
}
