"""Results that share the memory of an argument, as AOTAutograd wants them.

What it returns to the user is a view of his own tensor, with the sizes and strides of what a backend gave. So that must be the very view,
not a copy of what can be seen through it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

Views = Callable[..., Sequence[Any]]


def without_views(module: GraphModule) -> tuple[GraphModule, dict[int, int], Views]:
    """(the graph without those results, which result is which view, what computes all views from the arguments)."""
    memory = _memory(module.graph)
    results = list(pytree.tree_leaves(module.graph.output_node().args[0]))
    found = {n: node for n, node in enumerate(results) if isinstance(node, Node) and _is_view(node, memory)}
    if not found:
        return module, {}, lambda *arguments: ()
    rest = Graph()
    made: dict[Node, Node] = {}
    rest.graph_copy(module.graph, made)
    rest.output(tuple(made[r] if isinstance(r, Node) else r for n, r in enumerate(results) if n not in found))
    views = _computing(module.graph, list(found.values()), memory)
    return GraphModule(module, rest), {n: place for place, n in enumerate(found)}, GraphModule(module, views).forward


def _memory(graph: Graph) -> dict[Node, Node]:
    """For each node that has the memory of an argument when the graph has run, the argument: itself, and what is written there."""
    found = {node: node for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in found:
            found.setdefault(node.args[1], node.args[0])  # an argument that is copied to another one keeps memory of its own
    return found


def _is_view(node: Node, memory: Mapping[Node, Node]) -> bool:
    """Whether it is an argument through one view or more."""
    views = 0
    while node not in memory:
        one_of = node.target is operator.getitem
        if not (one_of or (isinstance(node.target, OpOverload) and node.target.is_view)) or not isinstance(node.args[0], Node):
            return False
        node, views = node.args[0], views + 1
    return views > 0


def _computing(graph: Graph, results: Sequence[Node], memory: Mapping[Node, Node]) -> Graph:
    """The part of a graph that computes these views once the rest of it has run, from the same arguments."""
    needed, stack = set(results), list(results)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in needed and node not in memory:
                needed.add(node)
                stack.append(node)
    part = Graph()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            made[node] = part.node_copy(node, lambda n: made[memory.get(n, n)])
    part.output(tuple(made[node] for node in results))
    return part


def merged(results: Sequence[Any], places: Mapping[int, int], views: Sequence[Any]) -> list[Any]:
    """All results in their order."""
    rest = iter(results)
    return [views[places[n]] if n in places else next(rest) for n in range(len(results) + len(places))]
