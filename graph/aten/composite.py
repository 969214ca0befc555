"""Composite operations as torch.export gives them: what their decomposition would compute, without the time of tracing the model again.

`graph/exporting.py` decomposes what has no row here or in the other tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim
from ..ir import Value
from .call import Call, Row, opmath
from .normalization import affine, by_running_statistics, in_groups, need_parameters, normalized
from .padding import surrounded
from .pointwise import binary
from .shape import concat, convert, pad, stretch
from .windows import convolution as batched_convolution

aten = torch.ops.aten


def layer_norm(c: Call, x: Value, shape: Sequence[Dim], weight: Value | None, bias: Value | None, eps: float, *_: Any) -> Value:
    need_parameters(x, weight, bias)
    axes = tuple(range(x.tensor.rank - len(shape), x.tensor.rank))
    return b.cast(affine(normalized(b.cast(x, opmath(x.dtype)), axes, eps)[0], weight, bias), x.dtype)


def group_norm(c: Call, x: Value, groups: int, weight: Value | None, bias: Value | None, eps: float, _: bool) -> Value:
    return in_groups(x, weight, bias, groups, eps)[0]


def instance_norm(c: Call, x: Value, weight: Value | None, bias: Value | None, mean: Value | None, var: Value | None, own: bool,
                  momentum: float, eps: float, _: bool) -> Value:
    if mean is not None and var is not None:
        return by_running_statistics(x, weight, bias, mean, var, eps)
    out = normalized(b.cast(x, opmath(x.dtype)), range(2, x.tensor.rank), eps)[0]
    return b.cast(affine(out, weight, bias, (x.shape[1], *(1 for _ in x.shape[2:]))), x.dtype)


def padding(c: Call, x: Value, amounts: Sequence[Dim], mode: str, value: float | None) -> Value:
    return pad(c, x, amounts, value or 0) if mode == "constant" else surrounded(c, x, amounts, mode)


def dropout(c: Call, x: Value, probability: float, train: bool) -> Value:
    if train:
        raise Unsupported("dropout in training")
    return x


def convolution(c: Call, x: Value, w: Value, bias: Value | None, stride: Sequence[Dim], padding: Sequence[Dim], dilation: Sequence[Dim],
                groups: Dim) -> Value:
    batch = x if x.tensor.rank == w.tensor.rank else b.unsqueeze(x, 0)
    return b.reshape(batched_convolution(c, batch, w, bias, stride, padding, dilation, groups), c.shape)


def batch_norm(c: Call, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value, train: bool, momentum: float,
               eps: float, _: bool) -> Value:
    return by_running_statistics(x, weight, bias, mean, var, eps)


def difference(c: Call, x: Value, times: int, axis: int, before: Value | None, after: Value | None) -> Value:
    if c.dtype.kind == "bool":
        raise Unsupported("the difference of bools")
    axis = b.axis_of(axis, x.tensor.rank)
    parts = [p for p in (before, x, after) if p is not None]
    x = concat(c, parts, axis) if len(parts) > 1 else x
    for _ in range(times):
        rest = x.shape[axis] - 1
        x = b.sub(b.slice_(x, axis, 1, rest), b.slice_(x, axis, 0, rest))
    return x


def _evaluates(node: Node) -> bool:
    return not node.args[2]


def _is_spelled_out(node: Node) -> bool:
    """Whether padding has no operation of its own."""
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    return mode in ("constant", "circular")


def _has_statistics(node: Node) -> bool:
    return isinstance(node.args[3], Node) and isinstance(node.args[4], Node) and not node.args[5]


def _keeps_statistics(node: Node) -> bool:
    """Whether an instance norm updates no statistics: it has none, or goes by them."""
    return node.args[3] is None if node.args[5] else isinstance(node.args[3], Node) and isinstance(node.args[4], Node)


# What else must hold of a node for its row to do.
CONDITIONS: dict[Any, Callable[[Node], bool]] = {
    aten.dropout.default: _evaluates, aten.batch_norm.default: _has_statistics, aten.pad.default: _is_spelled_out,
    aten.instance_norm.default: _keeps_statistics,
}

ROWS: dict[Any, Row] = {
    aten.layer_norm.default: layer_norm,
    aten.group_norm.default: group_norm,
    aten.instance_norm.default: instance_norm,
    aten.dropout.default: dropout,
    aten.pad.default: padding,
    aten.batch_norm.default: batch_norm,
    aten.conv1d.default: convolution,
    aten.conv2d.default: convolution,
    aten.conv3d.default: convolution,
    aten.diff.default: difference,
    aten.to.device: convert,
    aten.to.dtype: convert,
    aten.to.dtype_layout: convert,
    aten.to.other: convert,
    aten.type_as.default: convert,
    aten.expand_as.default: stretch,
    aten.__and__.Tensor: binary("and"),
    aten.__and__.Scalar: binary("and"),
    aten.__or__.Tensor: binary("or"),
    aten.__or__.Scalar: binary("or"),
}
