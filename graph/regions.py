"""Regions of an exported program in which gradients are on or off, put back in their places.

torch.export makes a graph of its own of what runs under `torch.enable_grad()`, since it exports as if without gradients. For numbers there
is no difference, and what reads a graph, quantization for one, sees operations only there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def put_back(program: ExportedProgram) -> None:
    """Replaces the regions of a program by what is in them, in place."""
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for module in reversed(list(program.graph_module.modules())):  # what is inside of a region comes first
            nodes = module.graph.find_nodes(op="call_function", target=_REGION) if isinstance(module, GraphModule) else []
            for node in nodes:
                _inline(module, node)
            if nodes:
                module.recompile()


def _inline(module: GraphModule, node: Node) -> None:
    graph, held = module.graph, node.args[1]
    assert isinstance(held, Node)
    inner = module.get_submodule(str(held.target))
    assert isinstance(inner, GraphModule)
    given = dict(zip(inner.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
    with graph.inserting_before(node):
        results = _copied(inner, module, given)
    for user in list(node.users):
        assert user.target is operator.getitem and isinstance(user.args[1], int)
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    if not held.users:
        graph.erase_node(held)


def _copied(inner: GraphModule, outer: GraphModule, env: dict[Node, Any]) -> Any:
    """What a graph returns, by copies of its nodes in another, where that is about to get nodes. env: what its placeholders are there."""
    graph: Graph = outer.graph
    for node in inner.graph.nodes:
        if node.op not in ("placeholder", "output"):
            made = env[node] = graph.node_copy(node, env.__getitem__)
            if node.op == "get_attr":  # a graph inside that stays one, such as that of other types under autocast
                made.target = f"{made.name}_inside"
                setattr(outer, made.target, operator.attrgetter(str(node.target))(inner))
    return torch.fx.node.map_arg(inner.graph.output_node().args[0], env.__getitem__)
