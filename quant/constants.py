"""Which values of a graph are constant, and what they are: parameters, buffers, and what is computed from these alone."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree


class Constants:
    """Evaluates constant nodes on demand; nothing is kept but the answers of the weights that were asked for.

    given: the names of the attributes that placeholders stand for, in a graph inside of another.
    """

    def __init__(self, graph: Graph, attributes: Mapping[str, Any], given: Mapping[Node, str] | None = None) -> None:
        self._attributes = attributes
        self._given = given or {}
        self._written = _written(graph)
        self._known: dict[Node, bool] = {}

    def inside(self, node: Node) -> Iterator[tuple[Graph, Constants]]:
        """The graphs that an operator such as torch.cond is given, with their constants: the last of its arguments are those of each."""
        leaves = pytree.tree_leaves(node.args)
        for module in [self._attributes.get(str(held.target)) for held in node.all_input_nodes if held.op == "get_attr"]:
            if isinstance(module, GraphModule):
                taken = zip(reversed(module.graph.find_nodes(op="placeholder")), reversed(leaves), strict=False)
                names = {inner: name for inner, outer in taken if self.is_constant(outer) and (name := self._read(outer))}
                yield module.graph, Constants(module.graph, {**self._attributes, **dict(module.named_children())}, names)

    def _read(self, node: Node) -> str:
        """The attribute that a node reads; empty when it does something else."""
        return str(node.target) if node.op == "get_attr" else self._given.get(node, "")

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
        if name := self._read(node):
            return name not in self._written and isinstance(self._attributes.get(name), torch.Tensor)
        # A part of what an operator such as split gives is as constant as that.
        pure = node.target is operator.getitem or (isinstance(node.target, OpOverload) and not _impure(node.target))
        return node.op == "call_function" and pure and bool(node.all_input_nodes) and all(self._known[n] for n in node.all_input_nodes)

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
            if name := self._read(top):
                done[top] = self._attributes[name].detach()
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
                if name := self._read(top):
                    found.add(name)
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
