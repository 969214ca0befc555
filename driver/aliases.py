"""Results that share the memory of an argument or of another result, as PyTorch gives them.

What AOTAutograd returns to the user for a view of an argument is a view of his own tensor, with the sizes and strides of what a backend
gave. So that must be the very view, not a copy of what can be seen through it. Views of results are made of these, after the call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten
Views = Callable[..., Sequence[Any]]
# What they give depends on how a tensor lies in memory, and a result of ours may lie otherwise.
_OF_MEMORY = frozenset({aten.as_strided.default, aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default})


def without_views(module: GraphModule) -> tuple[GraphModule, dict[int, int], Views]:
    """(the graph without those results, which result is which view, what computes all views from the arguments and the other results)."""
    memory = _memory(module.graph)
    results = list(pytree.tree_leaves(module.graph.output_node().args[0]))
    seen = _views_among(results, module.graph, memory)
    found = {n: node for n, node in enumerate(results) if node in seen}
    if not found:
        return module, {}, lambda *arguments: ()
    kept = [node for node in results if node not in seen]
    rest = Graph()
    made: dict[Node, Node] = {}
    rest.graph_copy(module.graph, made)
    rest.output(tuple(made[r] if isinstance(r, Node) else r for r in kept))
    views = _computing(module.graph, list(found.values()), kept, memory)
    return GraphModule(module, rest), {n: place for place, n in enumerate(found)}, GraphModule(module, views).forward


def _memory(graph: Graph) -> dict[Node, Node]:
    """For each node that has the memory of an argument when the graph has run, the argument: itself, and what is written there."""
    found = {node: node for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        if node.target is aten.copy_.default and node.args[0] in found:
            found.setdefault(node.args[1], node.args[0])  # an argument that is copied to another one keeps memory of its own
    return found


def _views_among(results: Sequence[Any], graph: Graph, memory: dict[Node, Node]) -> set[Node]:
    """Which results are views of arguments, or of results before them. The others are noted as memory of their own."""
    seen: set[Node] = set()
    given = {result for result in results if isinstance(result, Node)}
    for node in graph.nodes:
        if node in given and _is_view(node, memory):
            seen.add(node)
        elif node in given:
            memory.setdefault(node, node)
    return seen


def _is_view(node: Node, memory: Mapping[Node, Node]) -> bool:
    """Whether it is an argument, or a result, through one view or more."""
    through = []
    while node not in memory:
        one_of = node.target is operator.getitem
        if not (one_of or (isinstance(node.target, OpOverload) and node.target.is_view)) or not isinstance(node.args[0], Node):
            return False
        through.append(node.target)
        node = node.args[0]
    return bool(through) and (memory[node].op == "placeholder" or _OF_MEMORY.isdisjoint(through))


def _computing(graph: Graph, views: Sequence[Node], kept: Sequence[Any], memory: Mapping[Node, Node]) -> Graph:
    """The part of a graph that computes these views once the rest of it has run, from the same arguments and its results."""
    needed, stack = set(views), list(views)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in needed and node not in memory:
                needed.add(node)
                stack.append(node)
    part = Graph()
    made = {node: part.node_copy(node) for node in graph.nodes if node.op == "placeholder"}
    for n, result in enumerate(kept):
        made.setdefault(result, part.placeholder(f"result_{n}"))
    for node in graph.nodes:
        if node in needed:
            made[node] = part.node_copy(node, lambda n: made[memory.get(n, n)])
            if node.target is aten.view.default:  # a view all the same, where the tensor lies as it did in the trace
                made[node].target = aten.reshape.default
    part.output(tuple(made[node] for node in views))
    return part


def merged(results: Sequence[Any], places: Mapping[int, int], views: Sequence[Any]) -> list[Any]:
    """All results in their order."""
    rest = iter(results)
    return [views[places[n]] if n in places else next(rest) for n in range(len(results) + len(places))]
