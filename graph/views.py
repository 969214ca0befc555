"""Views as operations on values: what a tensor is once one of its views was overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ..diagnostics.errors import Unsupported
from .nodes import name_of, origin_of, tensors, written
from .rebound import storage
from .types import inverse

aten = torch.ops.aten
ON_A_VIEW = "work on a view of it instead, such as x.t() for x.t_()"  # what to do about an argument that gets another shape

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
        return graph.call_function(aten.permute.default, (value, list(inverse(order))))
    if op in _RESHAPED:
        return graph.call_function(aten.reshape.default, (value, _sizes(graph, base)))
    if op is getitem:
        listing, index = view.args
        assert isinstance(listing, Node) and isinstance(index, int) and index >= 0
        return None if listing.kwargs else _put_part(graph, listing, index, base, value)
    return _put_windows(graph, base, value, *rest) if op is aten.unfold.default else None


def _put_windows(graph: Graph, base: Node, value: Node, axis: Any, size: Any, step: Any) -> Node | None:
    """Windows that have no element in common, and the elements between them as they are in `base`."""
    shape = base.meta["val"].shape
    axis = axis % max(len(shape), 1)
    if not shape or not size or not all(isinstance(number, int) for number in (shape[axis], size, step)):
        return None
    length, count = shape[axis], value.meta["val"].shape[axis]
    step = step if count > 1 else size
    if step < size:
        return None

    def call(op: Any, *args: Any) -> Node:
        made = graph.call_function(op, args)
        with torch.no_grad(), base.meta["val"].fake_mode, enable_python_dispatcher():
            made.meta["val"] = op(*pytree.tree_map_only(Node, lambda node: node.meta["val"], args))
        return made

    behind = [0, 0] * (len(shape) - axis - 1) + [0, count * step - length]
    even = call(aten.constant_pad_nd.default, base, behind)  # a piece of `step` for each window: the last one made longer, or the rest cut
    apart = call(aten.unflatten.int, even, axis, [count, step])
    order = [*range(axis + 1), len(shape), *range(axis + 1, len(shape))]
    within = call(aten.permute.default, value, order)
    joined = call(aten.flatten.using_ints, call(aten.slice_scatter.default, apart, within, axis + 1, 0, size), axis, axis + 1)
    if length > count * step:
        return call(aten.slice_scatter.default, base, joined, axis, 0, count * step)
    return call(aten.slice.Tensor, joined, axis, 0, length)


def refuse_windows(graph: Graph, hint: str = "") -> None:
    """Raises Unsupported for a graph of torch.export or Dynamo, not yet functional, that writes to memory through windows
    (`Tensor.unfold`) or as it was expanded. torch's functionalization makes zeros of what lies between windows then, and sums of what
    several of them hold, or an expanded axis repeats."""
    windows: set[Node] = set()
    for node in graph.nodes:
        if not windows.isdisjoint(written(node)):
            raise Unsupported("the model writes to what it sees through windows (Tensor.unfold) or expanded", origin_of(node), hint)
        seen = windows.intersection(node.all_input_nodes)
        if node.op.startswith("call") and (_is_window(node) or any(_share(node, other) for other in seen)):
            windows.add(node)


def _is_window(node: Node) -> bool:
    """Whether elements are there more than once, or between others that are seen."""
    again = (zip(each.shape, each.stride(), strict=True) for each in tensors(node) if each.layout is torch.strided)
    expanded = any(isinstance(stride, int) and stride == 0 and str(size) != "1" for axes in again for size, stride in axes)
    return expanded or name_of(node) in ("unfold", "aten.unfold.default")


def refuse_reshaped(graph: Graph) -> None:
    """Raises Unsupported for an exported graph that changes the shape of an argument or buffer in place, which its owner would see."""
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.inplace_view in tags and (given := node.args[0]).op == "placeholder" and _lie(node) != _lie(given):
            name = node.target._schema.name.partition("::")[2]
            what = f"the model changes the shape of {given.name} in place, by {name}"
            raise Unsupported(what, origin_of(node), ON_A_VIEW)


def _lie(node: Node) -> list[str]:
    """The sizes and strides of a tensor."""
    return [str(size) for size in (*node.meta["val"].shape, *node.meta["val"].stride())]


def _share(node: Node, read: Node) -> bool:
    """Whether a node has memory in common with one that it reads."""
    try:
        return bool({*map(storage, tensors(node))} & {*map(storage, tensors(read))} - {0})
    except NotImplementedError:  # inside of torch.vmap: as far as the operation says so
        return not isinstance(node.target, OpOverload) or any(result.alias_info for result in node.target._schema.returns)


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
