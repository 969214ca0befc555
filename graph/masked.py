"""What is written where a mask is true and computed of what is there, as in d[m] = q[m] * 2: a choice, no size of which depends on data."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.value_ranges import bound_sympy

from .oblivious import oblivious

aten = torch.ops.aten
_ALSO = {"aten::_to_copy", "aten::where"}  # element by element, too, whatever PyTorch says
_OF_INTEGERS = {"aten::div", "aten::remainder", "aten::fmod", "aten::pow"}  # which raise for some: perhaps where the mask is not true


def spell_out(module: GraphModule) -> None:
    """Makes a choice by the mask of each such write of a functional program: what is written is computed of all elements. What is read by
    a mask for nothing, as for a write that nobody reads, is left out."""
    graph = module.graph
    alike = _numbered(graph)
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        place = _place(node.args[1])
        if place is not None and len(node.args) == 3 and not node.kwargs:
            _choose(graph, node, *place, alike)
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        place = _place(node.args[1])
        sayings = None if place is None else _sayings([node], place[1])
        if sayings is not None:
            _erase(*reversed(sayings), node)


def _place(indices: Any) -> tuple[int, Node] | None:
    """The mask that is all of the indices, and its first axis."""
    found = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    return found[0] if len(found) == 1 and found[0][1].meta["val"].dtype == torch.bool else None


def _choose(graph: Graph, put: Node, axis: int, mask: Node, alike: Mapping[Node, int]) -> None:
    x, values, steps = put.args[0], put.args[2], dict[Node, None]()
    own, covered = put.meta["val"], mask.meta["val"].dim()
    rank = own.dim() - covered + 1
    if not isinstance(values, Node) or values.meta["val"].dim() != rank or (axis and covered > 1):
        return
    if values.meta["val"].dtype != own.dtype or not _by_elements(values, axis, mask, rank, steps, alike):
        return
    sayings = _sayings(steps, mask, put)
    if sayings is None:
        return
    whole: dict[Node, Any] = {}
    before = put.prev
    with graph.inserting_before(put), own.fake_mode, enable_python_dispatcher(), oblivious():
        for node in steps:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: whole.get(n, n))
            whole[node] = args[0] if node.target is aten.index.Tensor else _called(node, node.target, *args, **kwargs)
        wide = mask
        for _ in range(own.dim() - axis - covered):
            wide = _called(put, aten.unsqueeze.default, wide, -1)
        chosen = _called(put, aten.where.self, wide, whole[values], x)
    if str(chosen.meta["val"].shape) != str(own.shape):
        while put.prev is not before:
            graph.erase_node(put.prev)
        return  # what is written is broadcast, which PyTorch does not do
    put.replace_all_uses_with(chosen)
    _erase(put, *reversed(sayings), *reversed(steps))


def _erase(*nodes: Node) -> None:
    for node in nodes:
        node.graph.erase_node(node)


def _called(place: Node, op: Any, *args: Any, **kwargs: Any) -> Node:
    """A call in the place of a node."""
    made = place.graph.call_function(op, args, kwargs)
    made_of = map_arg((args, kwargs), lambda node: node.meta["val"])
    made.meta = {**place.meta, "val": op(*made_of[0], **made_of[1])}
    return made


def _by_elements(node: Node, axis: int, mask: Node, rank: int, steps: dict[Node, None], alike: Mapping[Node, int]) -> bool:
    """Whether a tensor is made, element by element, of what others have where the mask is true; `steps`: by these nodes, in order."""
    made, op = node.meta["val"], node.target
    if node in steps:
        return True
    if not isinstance(made, torch.Tensor) or made.dim() != rank or not isinstance(op, torch._ops.OpOverload):
        return False
    if op is not aten.index.Tensor:
        alone = torch.Tag.pointwise in op.tags or op._schema.name in _ALSO
        if not alone or _draws(op) or (op._schema.name in _OF_INTEGERS and not made.is_floating_point()):
            return False
        for operand in node.all_input_nodes:
            value = operand.meta["val"]
            if free_unbacked_symbols(value):
                if not _by_elements(operand, axis, mask, rank, steps, alike):
                    return False
            elif isinstance(value, torch.Tensor) and value.dim() >= rank - axis and str(value.shape[axis - rank]) != "1":
                return False  # as many rows as are true in the example
    elif (place := _place(node.args[1])) is None or place[0] != axis or not _same(place[1], mask, alike):
        return False
    steps[node] = None
    return True


def _draws(op: object) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _numbered(graph: Graph) -> dict[Node, int]:
    """A number for each node, the same for those that are computed alike."""
    found: dict[Node, int] = {}
    numbers: dict[object, int] = {}
    for node in graph.nodes:
        key: object = node
        if node.op == "call_function" and not _draws(node.target):
            key = node.target, str(map_arg((node.args, node.kwargs), lambda operand: _Numbered(found[operand])))
        found[node] = numbers.setdefault(key, len(numbers))
    return found


class _Numbered(int):
    """Stands for a node, and is written as none of its other arguments is."""

    def __repr__(self) -> str:
        return f"<{int(self)}>"


def _same(one: Node, other: Node, alike: Mapping[Node, int]) -> bool:
    return one is other or (one in alike and alike[one] == alike.get(other))


def _sayings(steps: Collection[Node], mask: Node, put: Node | None = None) -> list[Node] | None:
    """The nodes that say of `steps` what holds of any elements: their type, and that they are no fewer than none and no more than all. None
    where others than these and `put` need `steps`."""
    elements = mask.meta["val"].numel()
    most = bound_sympy(elements.node.expr, elements.node.shape_env.var_to_range).upper if isinstance(elements, torch.SymInt) else elements
    found: dict[Node, None] = {}
    for node in (user for step in steps for user in step.users):
        if node.target in (aten._assert_tensor_metadata.default, aten.sym_size.int):
            found[node] = None
            for said in node.users:
                bound = said.args[1] if said.target in (operator.ge, operator.le) else None
                if isinstance(bound, int) and (bound == 0 if said.target is operator.ge else bound >= most):
                    found |= dict.fromkeys((said, *(user for user in said.users if user.target is aten._assert_scalar.default)))
    others = (user for node in (*steps, *found) for user in node.users if user is not put and user not in steps and user not in found)
    return [*found] if next(others, None) is None else None
