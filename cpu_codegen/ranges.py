"""Ranges of columns in which the conditions of a body hold everywhere or nowhere, such as those of the parts of a concatenation.

Where a body asks on which side of a bound its column is, it is cut at that bound into bodies that need not ask. Each reads one part of
what lies side by side in the result, without masks; as one body it would compute all parts at every column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ..graph.dims import Dim, Func, Poly, coefficient, substitute, symbol
from ..graph.types import boolean
from ..stitch.loops import Body, LoopKernel, Node
from .builder import Function, Val, i64
from .index import by_column, functions, lane_form

_MOST = 8  # ranges of one kernel: each is code of its own
_GATHERED = 4.0  # the same of elements that would be read one by one
_WORTH = 1.5  # a range that fills its vectors badly still takes less than all parts at every column, up to so much for all of them


def column_ranges(kernel: LoopKernel, least: int) -> tuple[LoopKernel, ...]:
    """Kernels for one range of columns each that do together what `kernel` does; itself where it asks nothing.

    least: as many columns take as long as fewer. All kernels have the rows of this one. What goes around the caches must start at whole
    registers, and stays in one piece.
    """
    body, columns = kernel.body, kernel.cols
    if not isinstance(columns, int) or any(node.axis == "c" for node in body.nodes):
        return (kernel,)
    if any(store.streams or coefficient(store.index, "c") == (0, store.index) for store in body.stores):
        return (kernel,)
    worth = _GATHERED if is_read_in_pieces(kernel, least) else _WORTH
    pieces = _pieces(body, columns, least)
    if len(pieces) == 1 or len(pieces) > _MOST or sum(-(-width // least) * least for width, _ in pieces) > worth * columns:
        return (kernel,)
    return tuple(replace(kernel, body=body, cols=width) for width, body in pieces)


def part_of(fn: Function, bound: Val, first: Dim, width: Dim, lanes: int) -> Val:
    """Where a bound of a flat kernel's columns lies in its range of `width` columns from `first` on, in whole vectors."""
    assert isinstance(first, int) and isinstance(width, int), "ranges are of columns whose number is known"
    at = fn.and_(fn.add(bound, i64(lanes - 1 - first)), i64(-lanes))
    return fn.smin(fn.smax(at, i64(0)), i64(width))


def is_read_in_pieces(kernel: LoopKernel, lanes: int) -> bool:
    """Whether positions in loads are what they are on one side of some column, and would be looked up otherwise."""
    return isinstance(kernel.cols, int) and bool(_position_cuts(kernel.body, kernel.cols, lanes))


def _pieces(body: Body, columns: int, lanes: int) -> list[tuple[int, Body]]:
    """Bodies for ranges of so many columns, one after the other, none of which can be cut further."""
    asked = {cut for n in range(len(body.nodes)) if (cut := _cut(body.nodes, n)) is not None and 0 < cut < columns}
    cuts = sorted(asked | _position_cuts(body, columns, lanes))
    if not cuts or len(cuts) >= _MOST:
        return [(columns, body)]
    edges = [0, *cuts, columns]
    return [
        piece for low, high in pairwise(edges) for piece in _pieces(_within(body, low, high - low), high - low, lanes)
    ]


def _position_cuts(body: Body, columns: int, lanes: int) -> set[int]:
    """Columns at which functions of these begin to be something else, in the loads that are not of vectors because of them."""
    varies = by_column(body.deps)
    found: set[int] = set()
    for node in body.nodes:
        if node.op == "load" and lane_form(node.index, lanes, varies) is None:
            found.update(cut for atom in functions(node.index) for cut in _turns(atom, lanes) if 0 < cut < columns)
    return found


def _turns(atom: Func, lanes: int) -> Iterator[int]:
    """The first columns at which a function is another line of its column; of a division it is whole vectors that lie on one."""
    a, b = atom.args
    if atom.kind in ("min", "max"):
        at = _rises(a - b)
        if at is not None:
            yield at
    elif isinstance(b, int) and b >= lanes and (parts := _line_of(a)) is not None and parts[0] == 1:
        first = -parts[1] % b
        yield from range(first, first + _MOST * b, b)


def _rises(difference: Dim) -> int | None:
    """The first column at which a difference that grows or falls along the columns has another sign; None: it does neither, or other
    axes are in it."""
    parts = _line_of(difference)
    if parts is not None:
        slope, start = parts
        return None if slope == 0 else -(start // slope) if slope > 0 else start // -slope + 1
    terms = difference.terms if isinstance(difference, Poly) else ()
    found = [(mono[0], factor) for mono, factor in terms if len(mono) == 1 and isinstance(mono[0], Func)]
    rest = sum(factor for mono, factor in terms if not mono)
    if len(found) != 1 or len(terms) > 2 - (rest == 0) or found[0][0].kind != "floordiv":
        return None
    (quotient, scale), line = found[0], _line_of(found[0][0].args[0])
    divisor = quotient.args[1]
    if line is None or line[0] != 1 or not isinstance(divisor, int):
        return None
    least = -(rest // scale) if scale > 0 else rest // -scale + 1  # of the quotient
    return least * divisor - line[1]


def _line(node: Node) -> tuple[int, int] | None:
    """(slope, start) of an integer that is slope * c + start at every point."""
    if node.op == "const" and isinstance(node.value, int):
        return 0, int(node.value)
    return _line_of(node.index) if node.op == "index" else None


def _line_of(position: Dim) -> tuple[int, int] | None:
    parts = coefficient(position, "c")
    return (parts[0], parts[1]) if parts is not None and isinstance(parts[0], int) and isinstance(parts[1], int) else None


def _cut(nodes: Sequence[Node], n: int) -> int | None:
    """The first column at which a comparison `c + start >= bound` holds, or `c + start < bound` no longer does."""
    if nodes[n].op not in ("ge", "lt"):
        return None
    left, right = (_line(nodes[a]) for a in nodes[n].args)
    return right[1] - left[1] if left is not None and right is not None and left[0] == 1 and right[0] == 0 else None


def _within(body: Body, low: int, width: int) -> Body:
    """The body for columns low, .. low + width - 1, counted from 0."""
    column = {"c": symbol("c", 0, None, width) + low}
    moved = tuple(replace(node, index=substitute(node.index, column)) for node in body.nodes)
    stores = tuple(replace(store, index=substitute(store.index, column)) for store in body.stores)
    return decided(replace(body, nodes=moved, stores=stores), lambda nodes, node: _side(nodes, node, width))


Decide = Callable[[Sequence[Node], Node], bool | None]


def decided(body: Body, decide: Decide, given: Mapping[int, bool] | None = None) -> Body:
    """The body without conditions that are the same at every point. decide(nodes so far, node): what a comparison is at every point, or
    None. given: conditions that are known. Nodes keep their numbers."""
    nodes: list[Node] = []
    known: dict[int, bool] = {}  # conditions
    same: dict[int, int] = {}  # nodes that are another one here
    for n, old in enumerate(body.nodes):
        args = tuple(same.get(a, a) for a in old.args)
        node = replace(old, args=args)
        truth = given[n] if given and n in given else _truth(nodes, node, known, decide)
        if truth is not None:
            known[n] = truth
            node = Node("const", boolean, value=truth)
        elif node.op == "check" and known.get(args[0]):
            node = Node("const", boolean, value=True)
        elif node.op == "load" and args and args[0] in known:
            if known[args[0]]:
                node = replace(node, args=())
            else:
                same[n] = args[1]
        elif node.op == "where" and args[0] in known:
            same[n] = args[1 if known[args[0]] else 2]
        elif node.op in ("and", "or") and (found := [a for a in args if a in known]):
            same[n] = args[0] if args[1] == found[0] else args[1]
        nodes.append(node)
    stores = tuple(replace(s, node=same.get(s.node, s.node), guard=same.get(s.guard, s.guard)) for s in body.stores)
    return Body(tuple(nodes), stores, body.buffers)


def _truth(nodes: Sequence[Node], node: Node, known: dict[int, bool], decide: Decide) -> bool | None:
    """What a condition is at every point, None where that differs or is not known."""
    if node.dtype != boolean:
        return None
    given = [known.get(a) for a in node.args]
    match node.op:
        case "and":
            return False if False in given else True if given == [True, True] else None
        case "or":
            return True if True in given else False if given == [False, False] else None
        case "logical_not":
            return None if given[0] is None else not given[0]
        case "lt" | "ge":
            return decide(nodes, node)
    return None


def _side(nodes: Sequence[Node], node: Node, width: int) -> bool | None:
    """What a comparison is at all of so many columns."""
    left, right = (_line(nodes[a]) for a in node.args)
    if left is None or right is None:
        return None
    below = [left[1] - right[1] + (left[0] - right[0]) * c < 0 for c in (0, width - 1)]
    return None if below[0] != below[1] else below[0] == (node.op == "lt")
