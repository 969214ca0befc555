"""Products whose result chooses what later products take, such as the router that sends a token to its experts.

A rounding moves most results by a step; where a choice is made of them, it may exchange what follows for something else. A router is a
small part of the work, so that its digits cost nothing that could be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import getitem

from torch.fx import Graph, Node

from .operands import packet

_ALONE = ("argmax", "argmin", "argsort")
_BESIDE_VALUES = ("topk", "sort", "max", "min")
"""Operators that choose: the indices are the result, or its second part."""


def routers(graph: Graph, products: Iterable[Node]) -> set[Node]:
    """The products of which something is chosen, with no product in between, that another product depends on."""
    ends = set(products)
    choices = [n for n in graph.nodes if _reached(_indices(n), lambda v: () if v in ends else v.users) & ends]
    return _reached(choices, lambda v: () if v in ends else v.all_input_nodes) & ends


def _indices(node: Node) -> list[Node]:
    if packet(node) in _BESIDE_VALUES:
        return [u for u in node.users if u.target == getitem and u.args[1] == 1]
    return [node] if packet(node) in _ALONE else []


def _reached(start: Iterable[Node], after: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All that some nodes lead to, with themselves."""
    seen: set[Node] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(after(node))
    return seen
