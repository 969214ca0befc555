"""Views as operations on values: what a tensor is once one of its views was overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

# Operations whose result is all of a tensor in another shape, with its elements in their order.
_RESHAPED: frozenset[Any] = frozenset({
    aten.alias.default, aten.detach.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.unflatten.int, aten.view.default,
})
_ORDERED: frozenset[Any] = frozenset({aten.permute.default, aten.t.default, aten.transpose.int})
_SCATTERED: Mapping[Any, Any] = {aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default}
_PARTS: frozenset[Any] = frozenset({aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
# Elements that are there more than once, or in no place that an operation could put them to.
_ONLY_READ: frozenset[Any] = frozenset({aten.diagonal.default, aten.expand.default, aten.unfold.default})
_VIEWS: frozenset[Any] = _RESHAPED | _ORDERED | _SCATTERED.keys() | _PARTS | _ONLY_READ


def source(node: Node) -> Node | None:
    """The tensor of which an operation's result, or what it lists, is a view whatever the sizes and strides; None of other operations."""
    if node.target is getitem:
        listing = node.args[0]
        return source(listing) if isinstance(listing, Node) and listing.target in _PARTS else None
    found = node.args[0] if node.target in _VIEWS else None
    return found if isinstance(found, Node) else None


def put(graph: Graph, view: Node, base: Node, value: Node) -> Node | None:
    """`base` with `value` in the place of the view of it, at the end of the graph; None where no operation is known to do that."""
    made = _put(graph, view, base, value)
    if made is not None:
        made.meta = dict(base.meta)
    return made


def _put(graph: Graph, view: Node, base: Node, value: Node) -> Node | None:
    op, rest = view.target, view.args[1:]
    if view.kwargs:
        return None
    if op in _SCATTERED:
        return graph.call_function(_SCATTERED[op], (base, value, *rest))
    if op in _ORDERED:
        order = _order(op, base.meta["val"].ndim, rest)
        return graph.call_function(aten.permute.default, (value, [order.index(axis) for axis in range(len(order))]))
    if op in _RESHAPED:
        return graph.call_function(aten.reshape.default, (value, _sizes(graph, base)))
    if op is getitem:
        listing, index = view.args
        assert isinstance(listing, Node) and isinstance(index, int) and index >= 0
        return None if listing.kwargs else _put_part(graph, listing, index, base, value)
    return None


def _put_part(graph: Graph, listing: Node, index: int, base: Node, value: Node) -> Node | None:
    if listing.target is aten.unbind.int:
        return graph.call_function(aten.select_scatter.default, (base, value, *(listing.args[1:] or (0,)), index))
    axis: Any = listing.args[2] if len(listing.args) > 2 else 0
    ends = [0]
    for part in listing.meta["val"][: index + 1]:
        ends.append(ends[-1] + part.shape[axis])
    if not all(isinstance(end, int) for end in ends):
        return None
    return graph.call_function(aten.slice_scatter.default, (base, value, axis, *ends[-2:]))


def _order(op: Any, rank: int, rest: Any) -> list[int]:
    """The axes of a tensor in the order that its view has them."""
    if op is aten.permute.default:
        return [axis % rank for axis in rest[0]]
    order = list(range(rank))
    if rank:
        one, other = (axis % rank for axis in (rest if op is aten.transpose.int else (0, rank - 1)))
        order[one], order[other] = other, one
    return order


def _sizes(graph: Graph, tensor: Node) -> list[Any]:
    """The sizes of a tensor: numbers, and nodes of those that are not known."""
    sizes: list[Any] = list(tensor.meta["val"].shape)
    for axis, size in enumerate(sizes):
        if not isinstance(size, int):
            sizes[axis] = graph.call_function(aten.sym_size.int, (tensor, axis))
            sizes[axis].meta["val"] = size
    return sizes
