"""Transposed convolutions as products: each input position adds a window of numbers to the result.

    result[n, i * stride + k * dilation - padding, m] += x[n, i, c] * w[c, m, k]

Results whose positions differ by multiples of the stride see the same part of the window. With k = t * stride + r, all `stride` such
phases r are columns of one product over windows of T = ceil(size / stride) neighbours in x, and lie side by side in the result:

    result[n, q * stride + r, m] = sum over (t, c) of x[n, q - t, c] * w[c, m, t * stride + r]

Nothing is multiplied by the zeros that a convolution over a spread image would read (those of the weight, up to the next multiple of the
stride, aside); see Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, bounds, floordiv, product
from ..ir import Value
from . import windows
from .call import Call, Row

aten = torch.ops.aten


def convolution(c: Call, x: Value, w: Value, bias: Value | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
                transposed: bool, output_padding: Sequence[int], groups: int) -> Value:
    """aten.convolution: x[N, C, spatial...]; w[M, C / groups, window...], transposed w[C, M / groups, window...]; bias[M]."""
    if not transposed:
        return windows.convolution(c, x, w, bias, stride, padding, dilation, groups)
    if groups != 1:
        raise Unsupported("a transposed convolution in groups")
    rank = len(windows.window_of(x, w))
    w = _dilated(w, windows.numbers(dilation, rank))
    steps, edges = windows.numbers(stride, rank), windows.numbers(padding, rank)
    counts = [-(-k // s) for k, s in zip(windows.window_of(x, w), steps, strict=True)]
    beyond = [_beyond(out + p - (n + t - 1) * s, s) for out, p, n, t, s in zip(c.shape[2:], edges, x.shape[2:], counts, steps, strict=True)]
    image = windows.surrounded(windows.channels_last(x), [t - 1 for t in counts], [t - 1 + e for t, e in zip(counts, beyond, strict=True)])
    patches = windows.windows(image, counts, (1,) * rank, (1,) * rank)
    rows = b.reshape(patches, (*patches.shape[: rank + 1], product(patches.shape[rank + 1 :])))
    phases = None if bias is None else b.reshape(b.expand(bias, (math.prod(steps), *bias.shape)), (math.prod(steps) * bias.shape[0],))
    out = _side_by_side(b.linear(rows, _by_phase(w, steps, counts), phases), steps)
    for axis, (start, length) in enumerate(zip(edges, c.shape[2:], strict=True), 1):
        out = b.slice_(out, axis, start, length)
    return windows.channels_first(b.cast(out, c.dtype))


def _dilated(w: Value, dilation: Sequence[int]) -> Value:
    """The weight with the zeros between its taps that a dilation stands for."""
    for axis, apart in enumerate(dilation, 2):
        if apart > 1 and w.shape[axis] != 1:
            spread = b.pad(b.unsqueeze(w, axis + 1), (*((0, 0),) * (axis + 1), (0, apart - 1), *((0, 0),) * (w.tensor.rank - axis - 1)))
            merged = b.reshape(spread, (*w.shape[:axis], w.shape[axis] * apart, *w.shape[axis + 1 :]))
            w = b.slice_(merged, axis, 0, merged.shape[axis] - (apart - 1))
    return w


def _beyond(missing: Dim, step: int) -> int:
    """How many more windows the last results need, which only `output_padding` asks for: they are the bias alone."""
    high = bounds(missing)[1]
    if high is None:
        raise Unsupported("a transposed convolution whose end is not known")
    return max(0, -(-high // step))


def _by_phase(w: Value, steps: Sequence[int], counts: Sequence[int]) -> Value:
    """w[C, M, window...] as [phases * M, taps * C], the taps from the last to the first."""
    rank = len(steps)
    whole = tuple((0, t * s - k) for t, s, k in zip(counts, steps, w.shape[2:], strict=True))
    split = b.reshape(b.pad(w, ((0, 0), (0, 0), *whole)), (*w.shape[:2], *(n for pair in zip(counts, steps, strict=True) for n in pair)))
    for axis in range(2, 2 + 2 * rank, 2):
        split = b.slice_(split, axis, split.shape[axis] - 1, split.shape[axis], -1)
    ordered = b.permute(split, (*range(3, 3 + 2 * rank, 2), 1, *range(2, 2 + 2 * rank, 2), 0))
    return b.reshape(ordered, (math.prod(steps) * w.shape[1], math.prod(counts) * w.shape[0]))


def _side_by_side(x: Value, steps: Sequence[int]) -> Value:
    """x[n, spatial..., phases * M] with the phases of each axis between its neighbours."""
    rank, places = len(steps), x.shape[1:-1]
    split = b.reshape(x, (x.shape[0], *places, *steps, floordiv(x.shape[-1], math.prod(steps))))
    between = (0, *(a for axis in range(rank) for a in (1 + axis, 1 + rank + axis)), 1 + 2 * rank)
    return b.reshape(b.permute(split, between), (x.shape[0], *(n * s for n, s in zip(places, steps, strict=True)), split.shape[-1]))


ROWS: dict[Any, Row] = {aten.convolution.default: convolution}
