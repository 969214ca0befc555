"""Products whose result chooses among other values, such as the router that sends a token to its experts.

A rounding moves most results by a step; where a choice is made of them, it may exchange what follows for something else. A router is a
small part of the work, so that its digits cost nothing that could be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import getitem

import torch
from torch.fx import Graph, Node

from .constants import Constants
from .operands import packet

_ALONE = ("argmax", "argmin", "argsort")
_BESIDE_VALUES = ("topk", "sort", "max", "min")
"""Operators that choose: the indices are the result, or its second part."""
_COMPARED = ("gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "not_equal")
_ADDED = ("add", "sub")
_TAKEN = (
    "mul", "multiply", "where", "masked_fill", "masked_scatter", "gather", "take", "take_along_dim", "index", "index_select",
    "index_put", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce",
)  # fmt: skip
"""Operators that take a value or leave it, as the choice says."""
_SIZES = (int, float, torch.SymInt, torch.SymFloat)


def routers(graph: Graph, products: Iterable[Node], constants: Constants) -> set[Node]:
    """The products of which something is chosen, with no product in between, that takes other values or leaves them. Indices also count
    where another product depends on them, however they reach it."""
    ends = set(products)
    found: set[Node] = set()
    for node in graph.nodes:
        indices = _indices(node)
        start = indices or ([node] if _compares(node) else [])
        trail = _Trail(start, ends, constants)
        if trail.asked and (_reached(indices, lambda v: () if v in ends else v.users) & ends or trail.takes(by_index=bool(indices))):
            found |= trail.asked
    return found


class _Trail:
    """What a choice is computed from, and what becomes of it. start: the choice. asked: the products of which it is made."""

    def __init__(self, start: list[Node], ends: set[Node], constants: Constants) -> None:
        self._start, self._ends, self._constants = start, ends, constants
        self._own = _reached(start, self._before)
        self.asked = self._own & ends

    def takes(self, by_index: bool) -> bool:
        """Whether it takes values that it was not made of. A comparison that asks for one element is an activation where its result meets
        what was compared; what picks among several, such as the greatest, is a choice still."""
        taking, met = (_TAKEN + _ADDED, {None, True}) if by_index else (_TAKEN, {None, True} if self._among_several() else {None})
        seen: set[Node] = set()
        stack = list(self._start)
        while stack:
            value = stack.pop()
            seen.add(value)
            for user in value.users.keys() - seen:
                others = {self._is_own(other) for other in user.all_input_nodes if other not in seen and _is_float(other)}
                if False in others and (user in self._ends or packet(user).removesuffix("_") in taking):
                    return True
                if user not in self._ends and others <= met:
                    stack.append(user)
        return False

    def _among_several(self) -> bool:
        """Whether elements are compared with what was found of several, as with the greatest of a row."""
        sides = self._start[0].all_input_nodes
        shapes = {str(getattr(side.meta.get("val"), "shape", "")) for side in sides}
        return len(shapes) == 2 and all(_reached([s], self._before) & self._ends for s in sides)

    def _is_own(self, value: Node) -> bool | None:
        """Whether a value depends on what the choice was made of, or else on other data; None if on none, but for masks."""
        seen = _reached([value], lambda v: () if v in self._own else self._before(v))
        if seen & self._own:
            return True
        data = any(v in self._ends or packet(v) == "embedding" or (v.op == "placeholder" and _is_float(v)) for v in seen)
        return False if data else None

    def _before(self, value: Node) -> list[Node]:
        """The data that a value is computed from; sizes are none."""
        name = packet(value)
        if value in self._ends or name.endswith("_like") or name.startswith("new_"):
            return []
        return [v for v in value.all_input_nodes if not isinstance(v.meta.get("val"), _SIZES) and not self._constants.is_constant(v)]


def _indices(node: Node) -> list[Node]:
    if packet(node) in _BESIDE_VALUES:
        return [u for u in node.users if u.target == getitem and u.args[1] == 1]
    return [node] if packet(node) in _ALONE else []


def _compares(node: Node) -> bool:
    return packet(node) in _COMPARED and any(map(_is_float, node.all_input_nodes))


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


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
