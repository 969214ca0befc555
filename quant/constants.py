"""Which values of a graph are constant, and what they are: parameters, buffers, and what is computed from these alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg


class Constants:
    """Evaluates constant nodes on demand; nothing is kept but the answers of the weights that were asked for."""

    def __init__(self, graph: Graph, attributes: Mapping[str, Any]) -> None:
        self._attributes = attributes
        self._written = _written(graph)
        self._known: dict[Node, bool] = {}

    def is_constant(self, node: object) -> bool:
        """Whether a node has the same value in every call. An explicit stack: graphs may be deeper than Python's recursion."""
        if not isinstance(node, Node):
            return False
        stack = [node]
        while stack:
            top = stack[-1]
            pending = [n for n in top.all_input_nodes if n not in self._known]
            if top not in self._known and pending:
                stack.extend(pending)
                continue
            stack.pop()
            if top not in self._known:
                self._known[top] = self._judge(top)
        return self._known[node]

    def _judge(self, node: Node) -> bool:
        if node.op == "get_attr":
            return node.target not in self._written and isinstance(self._attributes.get(str(node.target)), torch.Tensor)
        pure = node.op == "call_function" and isinstance(node.target, OpOverload) and not _impure(node.target)
        return pure and bool(node.all_input_nodes) and all(self._known[n] for n in node.all_input_nodes)

    def value(self, node: Node) -> torch.Tensor:
        """The tensor that a constant node is. Raises KeyError for an attribute that does not exist."""
        done: dict[Node, Any] = {}
        order = [node]
        while order:
            top = order[-1]
            pending = [n for n in top.all_input_nodes if n not in done]
            if pending:
                order.extend(pending)
                continue
            order.pop()
            if top.op == "get_attr":
                done[top] = self._attributes[str(top.target)].detach()
            else:
                assert callable(top.target)
                args, kwargs = map_arg((top.args, top.kwargs), done.__getitem__)
                with torch.no_grad():
                    done[top] = top.target(*args, **kwargs)
        result = done[node]
        assert isinstance(result, torch.Tensor)
        return result

    def sources(self, node: Node) -> tuple[str, ...]:
        """The names of the parameters and buffers that a constant is computed from, sorted."""
        found: set[str] = set()
        seen: set[Node] = set()
        stack = [node]
        while stack:
            top = stack.pop()
            if top not in seen:
                seen.add(top)
                if top.op == "get_attr":
                    found.add(str(top.target))
                stack.extend(top.all_input_nodes)
        return tuple(sorted(found))


def _impure(op: OpOverload) -> bool:
    return bool(op._schema.is_mutable) or torch.Tag.nondeterministic_seeded in op.tags


def _written(graph: Graph) -> set[str]:
    """Names of attributes that the program writes to; an attribute counts as written when any value it flows into is.

    Views share memory, so the reverse reachability from a written value is followed to its attributes.
    """
    written: set[str] = set()
    stack = [
        arg
        for node in graph.nodes
        if node.op == "call_function" and isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        for arg in node.all_input_nodes[:1]
    ]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "get_attr":
            written.add(str(node.target))
        elif isinstance(node.target, OpOverload) and any(ret.alias_info is not None for ret in node.target._schema.returns):
            stack.extend(node.all_input_nodes[:1])
    return written
