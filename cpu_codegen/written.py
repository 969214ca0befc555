"""Sums over windows, written out for several neighbouring rows at once: what these rows read alike is read once.

In a loop over k, a depthwise convolution reads a pixel once for every window that it is in, and the weight once for every pixel; where
each comes from, and whether it is within the image, is found out every time. Written out for the pixels r R .. r R + R - 1 and all k,
equal loads are one, and conditions that hold for all of these at once are none. What is left of the conditions, at the edges of the
image, is asked once a row: all of them hold in most rows, which need none (`cpu_codegen/loops.py`).

Large windows are written out a line at a time, which is what neighbouring rows share anyway, in a loop over the lines. Whether a line is
within the image is asked once for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..graph.dims import Dim, Func, Poly, bounds, floordiv, mod, product, substitute, symbol, symbols
from ..graph.types import boolean, f32, i32
from ..platforms.target import Target
from ..stitch.costs import WRITTEN_TERMS
from ..stitch.loops import Body, BodyBuilder, LoopKernel, Node
from .ranges import decided

# How many rows, the best first (`benchmarks/convolutions.py --only depthwise`): 4 to 8 are alike, 2 share too little where everything is
# in L2. Where sums of few terms wait for memory instead, 2 are better than 4, which read pixels far apart before those in between. Lines
# that are no multiple of these, as of 13 or 19 pixels, are written out as a whole, and so are short ones, of which it is known where the
# image ends. Large windows have more in common. Windows whose rows have no such number are still better written out one by one.
_LINES = (9, 10, 11, 13, 17, 19, 23)
_LARGE, _TALL = 49, (14, 13, 12, 11, 10)
_ROWS, _FAR_ROWS, _FEW_TERMS = (4, 7, 6, 5, 8, *_LINES, 3, 2, 1), (2, 3, 4, 5, 7, *_LINES, 1), 16
_MOST_PRODUCTS = 400  # of all rows; of one there are WRITTEN_TERMS, or as many in a line of it
_LEAST_LINE = 5  # terms: lines of fewer are taken together with others
_SHARED = 2 / 3  # of the loads of rows one by one: with more, the rows have too little in common


@dataclass(frozen=True)
class Lines:
    """Conditions of the lines of a window, and the body where they all hold and elsewhere."""

    conditions: tuple[int, ...]
    inside: Body
    outside: Body


@dataclass(frozen=True)
class Written:
    """sums: the nodes that were reductions over k, to be computed together, in order; none where there is a loop over lines. conditions:
    nodes that hold in most rows. of_lines: those that hold in most lines."""

    kernel: LoopKernel
    sums: tuple[int, ...]
    conditions: tuple[int, ...]
    of_lines: tuple[int, ...]

    @property
    def inner(self) -> LoopKernel:
        """The kernel where all conditions hold."""
        return replace(self.kernel, body=_assumed(self.kernel.body, self.conditions, True))

    def lines(self, body: Body) -> Lines | None:
        """How `body`, the kernel's or that of `inner`, is computed in the loop over lines."""
        if not self.of_lines:
            return None
        outside = _assumed(body, self.of_lines, False) if len(self.of_lines) == 1 else body
        return Lines(self.of_lines, _assumed(body, self.of_lines, True), outside)


def written_out(target: Target, kernel: LoopKernel) -> Written | None:
    """The kernel with fewer rows, each of them several of its own, and no loop over k, or one over lines; None where that does not pay."""
    body, depth, rows = kernel.body, kernel.depth, kernel.rows
    sums = [node for node in body.nodes if node.op == "reduce"]
    plain = all(node.axis == "k" and node.kind == "sum" and node.dtype in (f32, i32) for node in sums)
    if not isinstance(depth, int) or rows is None or not sums or not plain or depth <= 1 or body.accumulates:
        return None
    if any(node.op == "check" or any(s.name.startswith("%") for s in symbols(node.index)) for node in body.nodes):
        return None
    count, terms = _sizes(target, kernel, depth, rows)
    if not count:
        return None
    copies = _Copies(body, rows, depth // terms, terms, count)
    most_loads = _SHARED * count * sum(terms if "k" in body.deps[n] else 1 for n, node in enumerate(body.nodes) if node.op == "load")
    if count > 1 and copies.least_loads() > most_loads:
        return None
    made = copies.body()
    if count > 1 and sum(node.op == "load" for node in made.nodes) > most_loads:
        return None
    result = decided(made, _everywhere)
    lines = None if terms == depth else depth // terms
    of_rows, of_lines = _conditions(result)
    return Written(replace(kernel, body=result, rows=floordiv(rows, count), depth=lines), tuple(copies.sums), of_rows, of_lines)


def _sizes(target: Target, kernel: LoopKernel, depth: int, rows: Dim) -> tuple[int, int]:
    """How many rows are written out at once, and how many terms of each; zeros where no number fits."""
    body = kernel.body
    line = _line(depth, {divisor for index in body.indices for divisor in _divisors(index, "k")})
    divided = (rows, *(divisor for index in body.indices for divisor in _divisors(index, "r")))
    most = bounds(_bytes(body) * rows * kernel.cols)[1]
    far = depth <= _FEW_TERMS and (most is None or most > target.l2 // 2)
    whole = min((d for d in divided if isinstance(d, int) and d > 1), default=0)
    short = (whole,) if 0 < whole <= _TALL[0] else ()
    wanted = _FAR_ROWS if far else (*short, *(_TALL if depth >= _LARGE else ()), *_ROWS)
    counts = [n for n in wanted if all(mod(divisor, n) == 0 for divisor in divided) and (n > 1 or line)]
    lengths = (*([depth] if depth <= WRITTEN_TERMS else ()), *([line] if line else ()))
    return next(((n, terms) for n in counts for terms in lengths if n * terms <= _MOST_PRODUCTS), (0, 0))


def _bytes(body: Body) -> int:
    """How wide the elements are that each window reads for itself."""
    windows = (node for n, node in enumerate(body.nodes) if node.op == "load" and {"r", "k"} <= body.deps[n])
    return max((body.buffers[node.buffer].bytes for node in windows), default=4)


def _line(depth: int, divisors: set[Dim]) -> int:
    """How many neighbouring k of so many are written out, a line of the window or several: what indices divide k by are the sizes of
    lines, planes and so on. 0 where there is no such number."""
    sizes = sorted(d for d in divisors if isinstance(d, int))
    if not sizes or len(sizes) < len(divisors) or depth % sizes[-1] or any(large % small for small, large in pairwise(sizes)):
        return 0
    fitting = [size for size in sizes if size <= WRITTEN_TERMS]
    return next((size for size in fitting if size >= _LEAST_LINE), fitting[-1] if fitting else 0)


def _divisors(index: Dim, axis: str) -> set[Dim]:
    """What an expression divides by where the position on an axis is in it."""
    found: set[Dim] = set()
    for mono, _ in index.terms if isinstance(index, Poly) else ():
        for atom in mono:
            if isinstance(atom, Func):
                inner = {d for arg in atom.args for d in _divisors(arg, axis)}
                found |= inner | ({atom.args[1]} if atom.kind in ("floordiv", "mod") and axis in _axes(atom.args[0]) else set())
    return found


class _Copies:
    """The nodes of a body for each of `count` neighbouring rows and each of `terms` neighbouring k, equal ones once."""

    def __init__(self, body: Body, rows: Dim, lines: int, terms: int, count: int) -> None:
        self._body, self._lines, self._terms, self._count = body, lines, terms, count
        self._builder = BodyBuilder(buffers=list(body.buffers))
        row, line = symbol("r", 0, None, floordiv(rows, count)) * count, (symbol("k", 0, None, lines) if lines > 1 else 0) * terms
        self._rows, self._ks = [row + n for n in range(count)], [line + n for n in range(terms)]
        self._known: dict[tuple[int, int, int], int] = {}
        self._split: dict[Dim, dict[str, Dim]] = {}
        self._parts: dict[tuple[Dim, int, int], Dim] = {}
        self.sums: list[int] = []

    def body(self) -> Body:
        """All of it. The sums grow side by side, so that what rows share is read and used up."""
        reductions = [n for n, node in enumerate(self._body.nodes) if node.op == "reduce"]
        for n in reductions:
            sums = self._sums_of_lines(n) if self._lines > 1 else self._sums(n)
            self._known.update({self._key(n, row, -1): total for row, total in enumerate(sums)})
        for row in range(self._count):
            for store in self._body.stores:
                guard = self._node(store.guard, row, -1) if store.guard >= 0 else -1
                node, index = self._node(store.node, row, -1), self._index(store.index, row, -1)
                self._builder.stores.append(replace(store, index=index, node=node, guard=guard))
        return self._builder.finish()

    def _sums(self, n: int) -> list[int]:
        """The sum of each row, of all its terms."""
        node = self._body.nodes[n]
        totals = [self._node(node.args[0], row, 0) for row in range(self._count)]
        for k in range(1, self._terms):
            for row, total in enumerate(totals):
                totals[row] = self._added(total, node.args[0], row, k)
        self.sums += dict.fromkeys(totals)
        return totals

    def _added(self, total: int, n: int, row: int, k: int) -> int:
        """A sum and another term; instructions for dot products add them to one themselves."""
        term = self._body.nodes[n]
        if term.op == "dot_bytes":
            return self._builder.op("dot_bytes", term.dtype, *(self._node(a, row, k) for a in term.args), total)
        return self._builder.op("add", term.dtype, total, self._node(n, row, k))

    def _sums_of_lines(self, n: int) -> list[int]:
        """The sum of each row in the loop over lines. Terms join it one by one: a sum of the line would take as many registers again."""
        node = self._body.nodes[n]
        by_term = [[self._node(node.args[0], row, k) for row in range(self._count)] for k in range(self._terms)]
        by_row = list(zip(*by_term))  # all alike where no row is in them
        sums = {terms: self._builder.add(replace(node, args=terms)) for terms in dict.fromkeys(by_row)}
        return [sums[terms] for terms in by_row]

    def _key(self, n: int, row: int, k: int) -> tuple[int, int, int]:
        return n, row if "r" in self._body.deps[n] else -1, k if "k" in self._body.deps[n] else -1

    def least_loads(self) -> int:
        """At least so many loads are not alike, as is seen without writing out any: their places are apart by numbers."""
        return sum(self._places(n) for n, node in enumerate(self._body.nodes) if node.op == "load")

    def _places(self, n: int) -> int:
        """How many places a load reads, where all are numbers more than the first; else 1."""
        index, deps = self._body.nodes[n].index, self._body.deps[n]
        by_row = [self._index(index, row, 0) for row in range(self._count if "r" in deps else 1)]
        by_term = [self._index(index, 0, k) for k in range(self._terms if "k" in deps else 1)]
        rows, terms = ([value - by_row[0] for value in values] for values in (by_row, by_term))
        if "rk" in self._split[index] or not all(isinstance(value, int) for value in (*rows, *terms)):
            return 1
        return len({row + term for row in rows for term in terms})

    def _node(self, n: int, row: int, k: int) -> int:
        key = self._key(n, row, k)
        if key not in self._known:
            node = self._body.nodes[n]
            args = tuple(self._node(a, row, k) for a in node.args)
            self._known[key] = self._builder.add(replace(node, args=args, index=self._index(node.index, row, k)))
        return self._known[key]

    def _index(self, index: Dim, row: int, k: int) -> Dim:
        """Most expressions are sums of parts that depend on one of the two."""
        if index not in self._split:
            self._split[index] = _by_axis(index)
        total: Dim = 0
        for part, which in self._split[index].items():
            key = (which, row if "r" in part else -1, k if "k" in part else -1)
            if key not in self._parts:
                self._parts[key] = substitute(which, {"r": self._rows[row], "k": self._ks[k]})
            total = total + self._parts[key]
        return total


def _by_axis(index: Dim) -> dict[str, Dim]:
    """The terms of an expression by those of the axes r and k that they depend on."""
    if not isinstance(index, Poly):
        return {"": index}
    found: dict[str, Dim] = {}
    for mono, factor in index.terms:
        term = product([factor, *(Poly((((atom,), 1),)) for atom in mono)])
        found[_axes(term)] = found.get(_axes(term), 0) + term
    return found


def _axes(index: Dim) -> str:
    names = {s.name for s in symbols(index)}
    return "".join(axis for axis in "rk" if axis in names)


def _everywhere(nodes: Sequence[Node], node: Node) -> bool | None:
    """What a comparison of positions is wherever the axes lead."""
    left, right = (_position(nodes[a]) for a in node.args)
    if left is None or right is None:
        return None
    low, high = bounds(left - right)
    if low is not None and low >= 0:
        return node.op == "ge"
    return node.op == "lt" if high is not None and high < 0 else None


def _position(node: Node) -> Dim | None:
    if node.op == "index":
        return node.index
    return int(node.value) if node.op == "const" and not node.dtype.is_float else None


def _conditions(body: Body) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The conditions of loads and choices that depend on the row alone, and on the line."""
    of_rows, of_lines = set[int](), set[int]()
    pending = [node.args[0] for node in body.nodes if node.op in ("load", "where") and node.args]
    while pending:
        n = pending.pop()
        node, deps = body.nodes[n], body.deps[n]
        if node.op == "const" or node.dtype != boolean or not deps <= {"r", "k"}:
            continue
        if deps == {"r"}:
            of_rows.add(n)
        elif node.op == "and":
            pending += node.args
        elif "k" in deps:
            of_lines.add(n)
    for n, node in enumerate(body.nodes):  # what is asked together is one condition
        if node.op == "and" and of_lines.issuperset(node.args):
            of_lines -= set(node.args)
            of_lines.add(n)
    return tuple(sorted(of_rows)), tuple(sorted(of_lines))


def _assumed(body: Body, conditions: Sequence[int], truth: bool) -> Body:
    return decided(body, lambda nodes, node: None, dict.fromkeys(conditions, truth))
