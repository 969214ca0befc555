"""Transposed convolutions as products: each input position adds a window of numbers to the result.

    result[n, i * stride + k * dilation - padding, m] += x[n, i, c] * w[c, m, k]

Results whose positions differ by multiples of the stride see the same part of the window. With k = t * stride + r, all `stride` such
phases r are columns of one product over windows of T = ceil(size / stride) neighbours in x, and lie side by side in the result:

    result[n, q * stride + r, m] = sum over (t, c) of x[n, q - t, c] * w[c, m, t * stride + r]

Nothing is multiplied by the zeros that a convolution over a spread image would read (those of the weight, up to the next multiple of the
stride, aside); see Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, bounds, floordiv, product
from ..ir import Value
from . import windows
from .call import Call, Row, opmath

aten = torch.ops.aten


def convolution(c: Call, x: Value, w: Value, bias: Value | None, stride: Sequence[Dim], padding: Sequence[Dim], dilation: Sequence[Dim],
                transposed: bool, output_padding: Sequence[Dim], groups: Dim) -> Value:
    """aten.convolution: x[N, C, spatial...]; w[M, C / groups, window...], transposed w[C, M / groups, window...]; bias[M]."""
    if not transposed:
        return windows.convolution(c, x, w, bias, stride, padding, dilation, groups)
    rank = len(windows.window_of(x, w))
    w = dilated(w, windows.fixed(dilation, rank))
    steps, edges = windows.fixed(stride, rank), windows.numbers(padding, rank)
    counts = [-(-k // s) for k, s in zip(windows.window_of(x, w), steps, strict=True)]
    more = [_beyond(out + p - (n + t - 1) * s, s) for out, p, n, t, s in zip(c.shape[2:], edges, x.shape[2:], counts, steps, strict=True)]
    image = windows.surrounded(windows.channels_last(x), [t - 1 for t in counts], [t - 1 + e for t, e in zip(counts, more, strict=True)])
    patches = windows.windows(image, counts, (1,) * rank, (1,) * rank)
    phases = _by_phase(w, steps, counts, groups)
    out = _side_by_side((_depthwise if w.shape[1] == 1 and w.shape[0] == groups != 1 else _dense)(patches, phases, bias))
    for axis, (start, length) in enumerate(zip(edges, c.shape[2:], strict=True), 1):
        out = b.slice_(out, axis, start, length)
    return windows.channels_first(b.cast(out, c.dtype))


def dilated(w: Value, dilation: Sequence[int]) -> Value:
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


def _by_phase(w: Value, steps: Sequence[int], counts: Sequence[int], groups: Dim) -> Value:
    """w[C, M / groups, window...] as [groups, phases..., M / groups, C / groups, taps...], the taps from the last to the first."""
    rank = len(steps)
    whole = tuple((0, t * s - k) for t, s, k in zip(counts, steps, w.shape[2:], strict=True))
    pairs = (n for pair in zip(counts, steps, strict=True) for n in pair)
    split = b.reshape(b.pad(w, ((0, 0), (0, 0), *whole)), (groups, floordiv(w.shape[0], groups), w.shape[1], *pairs))
    taps, phases = range(3, 3 + 2 * rank, 2), range(4, 4 + 2 * rank, 2)
    for axis in taps:
        split = b.slice_(split, axis, split.shape[axis] - 1, split.shape[axis], -1)
    return b.permute(split, (0, *phases, 2, 1, *taps))


def _dense(patches: Value, w: Value, bias: Value | None) -> Value:
    """patches[n, places..., taps..., C] times w of `_by_phase` as [n, places..., groups, phases..., M / groups]."""
    rank = (w.tensor.rank - 3) // 2
    groups, phases, width = w.shape[0], w.shape[1 : rank + 1], w.shape[rank + 1]
    if bias is not None:
        each = b.reshape(bias, (groups, *(1,) * rank, width))
        bias = b.reshape(b.expand(each, (groups, *phases, width)), (product((groups, *phases, width)),))
    filters = b.reshape(w, (product((groups, *phases, width)), *w.shape[rank + 2 :]))
    out = windows.dense(patches, filters, bias, groups)
    return b.reshape(out, (*out.shape[:-1], groups, *phases, width))


def _depthwise(patches: Value, w: Value, bias: Value | None) -> Value:
    """`_dense` where each channel is a group: patches[n, places..., taps..., C] as [n, places..., 1, phases..., C]."""
    rank, work = (w.tensor.rank - 3) // 2, opmath(w.dtype)
    phases, taps = w.shape[1 : rank + 1], w.shape[rank + 3 :]
    filters = b.permute(b.reshape(w, (w.shape[0], *phases, *taps)), (*range(1, 1 + 2 * rank), 0))
    here = b.reshape(patches, (*patches.shape[: rank + 1], *(1,) * rank, *taps, patches.shape[-1]))
    out = b.reduce(b.mul(b.cast(here, work), b.cast(filters, work)), "sum", tuple(range(1 + 2 * rank, 1 + 3 * rank)))
    return b.unsqueeze(out if bias is None else b.add(out, b.cast(bias, work)), rank + 1)


def _side_by_side(x: Value) -> Value:
    """x[n, spatial..., groups, phases..., M / groups] as [n, spatial..., M], the phases of each axis between its neighbours."""
    rank = (x.tensor.rank - 3) // 2
    places, phases = x.shape[1 : rank + 1], x.shape[rank + 2 : -1]
    between = (0, *(a for axis in range(rank) for a in (1 + axis, 2 + rank + axis)), 1 + rank, 2 + 2 * rank)
    whole = tuple(n * s for n, s in zip(places, phases, strict=True))
    return b.reshape(b.permute(x, between), (x.shape[0], *whole, x.shape[rank + 1] * x.shape[-1]))


ROWS: dict[Any, Row] = {aten.convolution.default: convolution}
