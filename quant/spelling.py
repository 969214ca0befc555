"""Products that a model writes as `einsum` and its like, as linear layers or `matmul` between views, so that they are placed like these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.memory_format import lies_row_by_row, order_of
from ..graph.nodes import schema_arguments
from ..graph.types import inverse
from . import edit
from .constants import Constants
from .transposed import Transposed

aten = torch.ops.aten
_Axes = tuple[object, ...]
"""The names of the axes of a tensor."""
_Key = tuple[Node, tuple[int, ...], int]
"""A weight, the order of its axes, and how many of them are columns."""


@dataclass(frozen=True)
class _Equation:
    """Two factors, the names of their axes and of those of the result, as in einsum, and what is added to it. left: whether the first may
    be the weight."""

    factors: tuple[Node, Node]
    axes: tuple[_Axes, _Axes]
    out: _Axes
    added: Node | None = None
    left: bool = True


def respell(graph: Graph, attributes: Mapping[str, Any]) -> None:
    """Rewrites, in place, each product of two factors that is one of matrices, or of batches of them, up to the order of axes.

    With a constant, whose axes are summed or are columns of the result, it is a linear layer: its rows keep their axes, whatever sizes
    they have, and the sizes of all others are those of the constant.
    Transposed convolutions become convolutions (`transposed.py`).
    """
    constants, weights = Constants(graph, attributes), dict[_Key, Node]()
    transposed = Transposed(constants.is_constant)
    for node in list(graph.nodes):
        reader = _READERS.get(node.target)
        equation = reader(*schema_arguments(node)) if reader is not None else None
        with graph.inserting_before(node):
            if equation is None or not _fits(equation):
                made = transposed.rewritten(node)
            else:
                made = _rewritten(node, equation, constants, weights)
            if made is not None:
                node.replace_all_uses_with(_as_it_lay(made, node))
                graph.erase_node(node)


def _rewritten(node: Node, equation: _Equation, constants: Constants, weights: dict[_Key, Node]) -> Node | None:
    """What stands for the product, or None where it stays."""
    (x, w), (x_axes, w_axes), out = equation.factors, equation.axes, equation.out
    if constants.is_constant(x) and equation.left:
        (x, w), (x_axes, w_axes) = (w, x), (w_axes, x_axes)
    batch, summed = ([a for a in x_axes if a in w_axes and (a in out) == kept] for kept in (True, False))
    rows, columns = [a for a in x_axes if a not in w_axes], [a for a in out if a not in x_axes]
    graph, sizes = node.graph, dict(zip(w_axes, w.meta["val"].shape, strict=True))

    def permuted(value: Node, order: Sequence[object], axes: _Axes) -> Node:
        places = [axes.index(axis) for axis in order]
        return value if places == sorted(places) else edit.call(graph, aten.permute.default, (value, places), node)

    if constants.is_constant(w) and not constants.is_constant(x) and columns and not batch:
        key = w, tuple(w_axes.index(axis) for axis in (*columns, *summed)), len(columns)
        if key not in weights:
            weight = permuted(w, [*columns, *summed], w_axes)
            shape = [math.prod(sizes[a] for a in axes) for axes in (columns, summed)]
            weights[key] = weight if len(w_axes) == 2 else edit.call(graph, aten.reshape.default, (weight, shape), node)
        x = permuted(x, [*rows, *summed], x_axes)
        x = edit.call(graph, aten.flatten.using_ints, (x, -len(summed), -1), node) if len(summed) > 1 else x
        made = edit.call(graph, aten.linear.default, (x, weights[key]), node)
        if len(columns) > 1:
            made = edit.call(graph, aten.unflatten.int, (made, -1, [sizes[a] for a in columns]), node)
    elif len(rows) == len(columns) == len(summed) == 1:
        left, right = permuted(x, [*batch, *rows, *summed], x_axes), permuted(w, [*batch, *summed, *columns], w_axes)
        made = edit.call(graph, aten.matmul.default, (left, right), node)
    else:
        return None
    made = permuted(made, out, (*batch, *rows, *columns))
    return made if equation.added is None else edit.call(graph, aten.add.Tensor, (made, equation.added), node)


def _as_it_lay(made: Node, node: Node) -> Node:
    """The same in memory as the result of `node` was, which the model may ask for a view of."""
    order = order_of(node.meta["val"])
    if order == order_of(made.meta["val"]) and (order or lies_row_by_row(made.meta["val"])):
        return made
    order = order or tuple(range(len(made.meta["val"].shape)))
    dense = edit.call(node.graph, aten.permute.default, (made, list(order)), node)
    dense = edit.call(node.graph, aten.clone.default, (dense,), node, {"memory_format": torch.contiguous_format})
    return edit.call(node.graph, aten.permute.default, (dense, list(inverse(order))), node)


def _fits(equation: _Equation) -> bool:
    """Whether each axis is one of both factors, of the same size, or else of the result, and something is summed."""
    (x, w), (x_axes, w_axes), out = equation.factors, equation.axes, equation.out
    if any(len(set(axes)) < len(axes) for axes in (x_axes, w_axes, out)) or not {*x_axes} ^ {*w_axes} <= {*out} <= {*x_axes, *w_axes}:
        return False
    left, right = (dict(zip(axes, map(str, f.meta["val"].shape), strict=True)) for f, axes in ((x, x_axes), (w, w_axes)))
    shared = left.keys() & right.keys()
    return bool(shared - {*out}) and all(left[axis] == right[axis] for axis in shared)


def _einsum(text: str, factors: Sequence[Node], path: object) -> _Equation | None:
    if len(factors) != 2:
        return None
    terms, arrow, given = text.replace(" ", "").partition("->")
    if arrow and "..." in terms and "..." not in given:
        return None  # what the ellipsis stands for is summed
    axes = [_named(term, factor.meta["val"].dim()) for term, factor in zip(terms.split(","), factors, strict=True)]
    rest: _Axes = max((tuple(a for a in each if isinstance(a, int)) for each in axes), key=len)
    letters = "".join(sorted(letter for letter in {*terms} - {*",."} if terms.count(letter) == 1))
    out = _named(given if arrow else f"...{letters}", len(rest) + len((given if arrow else letters).replace("...", "")))
    return _Equation((factors[0], factors[1]), (axes[0], axes[1]), out)


def _named(term: str, rank: int) -> _Axes:
    """The letters of a term; those that its ellipsis stands for are numbered from the last."""
    before, _, behind = term.partition("...")
    return (*before, *range(len(before) + len(behind) - rank, 0), *behind)


def _tensordot(x: Node, w: Node, x_axes: Sequence[int], w_axes: Sequence[int]) -> _Equation:
    ranks = x.meta["val"].dim(), w.meta["val"].dim()
    left: list[object] = [f"left {n}" for n in range(ranks[0])]
    right: list[object] = [f"right {n}" for n in range(ranks[1])]
    for one, other in zip(x_axes, w_axes, strict=True):
        right[other] = left[one]
    return _Equation((x, w), (tuple(left), tuple(right)), tuple(a for a in (*left, *right) if (a in left) != (a in right)))


def _inner(x: Node, w: Node) -> _Equation | None:
    return _tensordot(x, w, [-1], [-1]) if min(x.meta["val"].dim(), w.meta["val"].dim()) else None


def _matmul(x: Node, w: Node) -> _Equation | None:
    """Rows that are multiplied with each matrix of a batch, as by the members of an ensemble; all others are placed as they are."""
    ranks = x.meta["val"].dim(), w.meta["val"].dim()
    return _Equation((x, w), (("m", "k"), ("e", "k", "n")), ("e", "m", "n"), left=False) if ranks == (2, 3) else None


def _of(text: str) -> Callable[..., _Equation | None]:
    """Reads two factors with these axes, before them what is added, if anything is, and behind them by what both are scaled."""
    x_axes, w_axes, out = text.split()

    def read(*arguments: Any) -> _Equation | None:
        added, x, w, *factors = arguments if len(arguments) > 2 else (None, *arguments)
        return _Equation((x, w), (tuple(x_axes), tuple(w_axes)), tuple(out), added) if {*factors} <= {1} else None

    return read


_READERS: dict[Any, Callable[..., _Equation | None]] = {
    aten.einsum.default: _einsum,
    aten.tensordot.default: _tensordot,
    aten.inner.default: _inner,
    aten.matmul.default: _matmul,
    aten.mv.default: _of("nk k n"),
    aten.addmv.default: _of("nk k n"),
    aten.addbmm.default: _of("bmk bkn mn"),
    aten.baddbmm.default: _of("bmk bkn bmn"),
}
