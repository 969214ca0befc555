"""Regions of an exported program that compute as what is around them does, put back in their places.

torch.export makes a graph of its own of what runs under `torch.enable_grad()`, since it exports as if without gradients, and of what runs
under `torch.autocast`, also where that is switched off or for another device, as models guard their attention or their losses. For
numbers there is no difference, and what reads a graph, quantization for one, sees operations only there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled  # of (on or off, graph, *its arguments)
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast  # of (device, element type, on or off, caching, graph, *its arguments)


def put_back(program: ExportedProgram) -> None:
    """Replaces the regions of a program by what is in them, in place. Those of autocast stay where any casts on the CPU, so that one that
    is switched off may be inside of one that is not."""
    modules = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    casts = torch.is_autocast_enabled("cpu") or any(_casts(node) for module in modules for node in _regions(module, _AUTOCAST))
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for module in reversed(modules):  # what is inside of a region comes first
            nodes = [*_regions(module, _GRADIENTS), *(() if casts else _regions(module, _AUTOCAST))]
            for node in nodes:
                _inline(module, node, 1 if node.target is _GRADIENTS else 4)
            if nodes:
                module.recompile()


def transform(program: ExportedProgram) -> bool:
    """Whether operations in its graph are taken in another way: cast, or with a dimension more. A program says so of parts of it; what it
    was traced under as a whole, it does not."""
    if torch.is_autocast_enabled("cpu"):
        return True
    functions = "torch._functorch.predispatch"  # between which they are
    return any(n.target is _AUTOCAST or getattr(n.target, "__module__", "") == functions for n in program.graph.nodes)


def _regions(module: GraphModule, kind: Any) -> list[Node]:
    return module.graph.find_nodes(op="call_function", target=kind)


def _casts(region: Node) -> bool:
    """Whether autocast is on in a region of it, for what runs on the CPU."""
    device, _, enabled = region.args[:3]
    return device == "cpu" and bool(enabled)


def _inline(module: GraphModule, node: Node, at: int) -> None:
    """Replaces a region by what is in its graph, the argument `at`, which its arguments follow."""
    graph, held = module.graph, node.args[at]
    assert isinstance(held, Node)
    inner = module.get_submodule(str(held.target))
    assert isinstance(inner, GraphModule)
    given = dict(zip(inner.graph.find_nodes(op="placeholder"), node.args[at + 1:], strict=True))
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
