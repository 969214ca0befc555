"""Transposed convolutions as convolutions that have a column for each phase of the stride (see `graph/aten/transposed.py`), and what puts
the phases between one another: so they are placed, quantized and computed like convolutions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from ..graph.nodes import schema_arguments
from . import edit

aten = torch.ops.aten


@dataclass(frozen=True)
class _Steps:
    """What a transposed convolution is given for each axis of the image."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    more: tuple[int, ...]
    dilation: tuple[int, ...]
    window: tuple[int, ...]

    @property
    def spans(self) -> tuple[int, ...]:
        """Results that one place of the image adds to."""
        return tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, self.window, strict=True))

    @property
    def taps(self) -> tuple[int, ...]:
        """Neighbours in the image that a result is computed from."""
        return tuple(-(-span // s) for span, s in zip(self.spans, self.stride, strict=True))

    @property
    def behind(self) -> tuple[int, ...]:
        """Results beyond the last one, where each place and each neighbour before the first one has `stride`: fewer than 0 are missing."""
        axes = zip(self.taps, self.stride, self.padding, self.spans, self.more, strict=True)
        return tuple(t * s + p - span - more for t, s, p, span, more in axes)


class Transposed:
    """Rewrites those of one graph. What is made of a weight is shared by all that multiply with it alike."""

    def __init__(self, is_constant: Callable[[Node], bool]) -> None:
        self._is_constant = is_constant
        self._weights: dict[Hashable, Node] = {}

    def rewritten(self, node: Node) -> Node | None:
        """What stands for a node; None where it is no transposed convolution with a constant weight that sums over channels, or where its
        numbers come with the call."""
        found = _arguments(node)
        if found is None:
            return None
        x, w, bias, groups, stride, padding, more, dilation = found
        rank = len(w.meta["val"].shape) - 2
        channels, width, *window = w.meta["val"].shape
        numbers = [tuple(given) * (rank if len(given) == 1 else 1) for given in (stride, padding, more, dilation)]
        known = all(isinstance(n, int) for n in (groups, channels, width, *window, *sum(numbers, ())))
        if not known or not self._is_constant(w) or self._is_constant(x) or (width == 1 and groups == channels != 1):
            return None
        steps = _Steps(numbers[0], numbers[1], numbers[2], numbers[3], tuple(window))
        key = w, groups, steps
        if key not in self._weights:
            self._weights[key] = _weight(node, w, groups, steps)
        return _interleaved(node, _convolution(node, x, self._weights[key], bias, groups, steps), groups, steps)


def _arguments(node: Node) -> tuple[Any, ...] | None:
    """(x, w, bias, groups, stride, padding, output_padding, dilation) of a transposed convolution."""
    if node.target in _TRANSPOSED:
        x, w, bias, stride, padding, more, groups, dilation = schema_arguments(node)
    elif node.target == aten.convolution.default and schema_arguments(node)[6]:
        x, w, bias, stride, padding, dilation, _, more, groups = schema_arguments(node)
    else:
        return None
    return x, w, bias, groups, stride, padding, more, dilation


def _weight(node: Node, w: Node, groups: int, steps: _Steps) -> Node:
    """w[C, M / groups, window...] as [groups, phases..., M / groups, C / groups, taps...] with the first axes in one; taps from the last to
    the first."""

    def call(target: Any, *args: Any) -> Node:
        return edit.call(node.graph, target, args, node)

    rank = len(steps.window)
    channels, width = w.meta["val"].shape[:2]
    for axis, apart in enumerate(steps.dilation, 2):
        if apart > 1 and steps.window[axis - 2] > 1:
            w = call(aten.constant_pad_nd.default, call(aten.unsqueeze.default, w, axis + 1), [0, 0] * (rank + 1 - axis) + [0, apart - 1])
            w = call(aten.slice.Tensor, call(aten.flatten.using_ints, w, axis, axis + 1), axis, 0, 1 - apart)
    whole = [t * s - span for t, s, span in zip(steps.taps, steps.stride, steps.spans, strict=True)]
    if any(whole):
        w = call(aten.constant_pad_nd.default, w, [n for rest in reversed(whole) for n in (0, rest)])
    pairs = [n for pair in zip(steps.taps, steps.stride, strict=True) for n in pair]
    w = call(aten.reshape.default, w, [groups, channels // groups, width, *pairs])
    taps, phases = list(range(3, 3 + 2 * rank, 2)), list(range(4, 4 + 2 * rank, 2))
    if any(t > 1 for t in steps.taps):
        w = call(aten.flip.default, w, taps)
    w = call(aten.permute.default, w, [0, *phases, 2, 1, *taps])
    return call(aten.reshape.default, w, [groups * prod(steps.stride) * width, channels // groups, *steps.taps])


def _convolution(node: Node, x: Node, w: Node, bias: Node | None, groups: int, steps: _Steps) -> Node:
    """A window ends at each place of the image, and at each after the last that another window reaches."""
    graph, rank = node.graph, len(steps.window)
    if bias is not None:
        width = w.meta["val"].shape[0] // (groups * prod(steps.stride))
        each = edit.call(graph, aten.reshape.default, (bias, [groups, *[1] * rank, width]), node)
        each = edit.call(graph, aten.expand.default, (each, [groups, *steps.stride, width]), node)
        bias = edit.call(graph, aten.reshape.default, (each, [-1]), node)
    missing = [-(min(0, behind) // s) for behind, s in zip(steps.behind, steps.stride, strict=True)]
    if any(missing):
        x = edit.call(graph, aten.constant_pad_nd.default, (x, [n for rest in reversed(missing) for n in (0, rest)]), node)
    edges = [t - 1 for t in steps.taps]
    return edit.call(graph, _CONVOLUTIONS[rank], (x, w, bias, [1] * rank, edges, [1] * rank, groups), node)


def _interleaved(node: Node, made: Node, groups: int, steps: _Steps) -> Node:
    """[n, groups * phases * M / groups, places...] as [n, M, places and phases...], without what is beyond the first and last result."""

    def call(target: Any, *args: Any) -> Node:
        return edit.call(node.graph, target, args, node)

    rank = len(steps.window)
    before = len(made.meta["val"].shape) - rank - 1  # an image may stand alone
    images, places = range(before), range(before, before + rank)
    made = call(aten.permute.default, made, [*images, *(axis + 1 for axis in places), before])
    made = call(aten.unflatten.int, made, before + rank, [groups, *steps.stride, -1])
    pairs = (n for axis in places for n in (axis, axis + rank + 1))
    made = call(aten.permute.default, made, [*images, *pairs, before + rank, before + 2 * rank + 1])
    for axis in (*places, before + rank):
        made = call(aten.flatten.using_ints, made, axis, axis + 1)
    for axis, start, behind, s in zip(places, steps.padding, steps.behind, steps.stride, strict=True):
        beyond = behind - min(0, behind) // s * s
        if start or beyond:
            made = call(aten.slice.Tensor, made, axis, start, -beyond if beyond else _END)
    return call(aten.permute.default, made, [*images, before + rank, *places])


_END = 2**63 - 1
_TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
_CONVOLUTIONS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
