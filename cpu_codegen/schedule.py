"""How often the columns of a row are visited, what each visit computes, and what is worth keeping between visits.

A reduction over the columns must be complete before anything that uses it, so a body is evaluated in passes: every pass computes all
reductions whose operands are known by then, and the last pass stores. What an earlier pass computed is computed again where
that is cheap, else kept in an array over the columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..graph.dims import Dim, symbols
from ..stitch.loops import Body, LoopKernel
from . import index

MATH = 14  # operations of an exponential or the like, per element
_COSTS = {
    **dict.fromkeys(("const", "param", "acc", "index", "reduce", "check", "bitcast", "lookup"), 1),
    **dict.fromkeys(("load", "add", "sub", "mul", "neg", "abs", "relu", "maximum", "minimum", "where", "cast", "and", "or", "xor"), 1),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bitwise_not", "isnan", "isinf", "shl", "shr"), 1),
    **dict.fromkeys(("floor", "ceil", "trunc", "round", "sign"), 2),
    **dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal"), 4),
    **dict.fromkeys(("exp_weight", "normal_cdf_short", "sigmoid_short"), 9),
    **dict.fromkeys(("floordiv", "truncdiv", "remainder", "fmod"), 10),
}
_WORTH_KEEPING = 8  # operations: more than the store and the load of keeping a value


@dataclass
class Pass:
    """One visit of the columns: reductions (nodes) that it completes, whether it stores, and nodes it keeps for later passes."""

    reductions: list[int] = field(default_factory=list)
    stores: bool = False
    checks: list[int] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)

    def roots(self, body: Body, stores: Iterable[int]) -> list[int]:
        """Nodes that the pass needs at every column."""
        found = [body.nodes[n].args[0] for n in self.reductions] + self.checks
        if self.stores:
            for n in stores:
                found += [m for m in (body.stores[n].node, body.stores[n].guard) if m >= 0]
        return found


def levels(body: Body) -> list[int]:
    """For each node the number of passes over the columns that must be complete before it is known."""
    result: list[int] = []
    for n, node in enumerate(body.nodes):
        before = max((result[m] for m in body.operands(n)), default=0)
        result.append(before + (1 if node.op == "reduce" and node.axis == "c" else 0))
    return result


def needed(body: Body) -> set[int]:
    """Nodes that a store or a check depends on."""
    pending = [n for n, node in enumerate(body.nodes) if node.op == "check"]
    for store in body.stores:
        pending += [store.node] + ([store.guard] if store.guard >= 0 else []) + index_nodes(store.index)
    seen: set[int] = set()
    while pending:
        n = pending.pop()
        if n not in seen:
            seen.add(n)
            pending += body.operands(n)
    return seen


def reduced(body: Body, roots: Iterable[int]) -> bool:
    """Whether nodes are computed from a reduction of columns."""
    pending, seen = list(roots), set[int]()
    while pending:
        n = pending.pop()
        if body.nodes[n].op == "reduce" and body.nodes[n].axis == "c":
            return True
        if n not in seen:
            seen.add(n)
            pending += body.operands(n)
    return False


def within(body: Body, roots: Iterable[int], axes: frozenset[str]) -> list[int]:
    """Values that some nodes need and that depend on no other axes."""
    found, pending, seen = [], list(roots), set[int]()
    while pending:
        n = pending.pop()
        if n in seen:
            continue
        seen.add(n)
        if body.deps[n] <= axes:
            found.append(n)
        elif not (body.nodes[n].op == "reduce" and body.nodes[n].axis == "k"):
            pending += body.operands(n)
    return found


def index_nodes(expression: Dim) -> list[int]:
    return [int(s.name[1:]) for s in symbols(expression) if s.name.startswith("%")]


def passes(body: Body, column_stores: Iterable[int]) -> list[Pass]:
    """The passes over the columns, without what they keep."""
    level = levels(body)
    used = needed(body)
    count = max((level[n] for n in used), default=0)
    result = [Pass() for _ in range(count)]
    for n in sorted(used):
        node = body.nodes[n]
        if node.op == "reduce" and node.axis == "c":
            result[level[n] - 1].reductions.append(n)
    stores = list(column_stores)
    if stores:
        of_stores = max(max(level[m] for m in (body.stores[n].node, body.stores[n].guard) if m >= 0) for n in stores)
        # Storing last allows an output to lie where an input was.
        if of_stores == count:
            result.append(Pass())
        result[-1].stores = True
    for n in sorted(used):
        if body.nodes[n].op == "check" and "c" in body.deps[n] and "k" not in body.deps[n]:  # the loop over k sees to those of k
            while len(result) <= level[n]:
                result.append(Pass())
            result[level[n]].checks.append(n)
    return result


def costs(body: Body, lanes: int) -> list[int]:
    """Operations of each node alone, for one element."""
    varies = index.by_column(body.deps)
    result = []
    for n, node in enumerate(body.nodes):
        cost = _COSTS.get(node.op, MATH)
        if node.op == "load" and "c" in body.deps[n]:
            form = index.lane_form(node.index, lanes, varies)
            cost = 1 if form is not None and (form.uniform or form.contiguous) else 8
        result.append(100 if node.op == "reduce" and node.axis == "k" else cost)
    return result


def column_cost(body: Body, lanes: int, without: tuple[str, ...] = ()) -> int:
    """Operations for one vector of columns, those named in `without` apart, in a body that needs one pass."""
    own = costs(body, lanes)
    return sum(own[n] for n in needed(body) if "c" in body.deps[n] and body.nodes[n].op not in without)


def add_kept(body: Body, plan: list[Pass], column_stores: Iterable[int], lanes: int) -> None:
    """Fills in `keep` of each pass: the largest values that a later pass uses again and that cost more than keeping them."""
    own = costs(body, lanes)
    stores = list(column_stores)
    seen_in: dict[int, int] = {}
    kept: set[int] = set()
    for position, each in enumerate(plan):
        pending = each.roots(body, stores)
        visited: set[int] = set()
        while pending:
            n = pending.pop()
            if n in visited or "c" not in body.deps[n] or n in kept:
                continue
            visited.add(n)
            if n in seen_in and body.nodes[n].op != "const" and recompute_cost(body, n, own, kept) >= _WORTH_KEEPING:
                kept.add(n)
                plan[seen_in[n]].keep.append(n)
                continue
            if not (body.nodes[n].op == "reduce" and body.nodes[n].axis == "k"):
                pending += body.operands(n)
        for n in visited - kept:
            seen_in.setdefault(n, position)


def recompute_cost(body: Body, node: int, own: list[int], known: set[int]) -> int:
    """Operations to compute a node again at one element; what does not depend on the column and what is in `known` is free."""
    total = 0
    seen: set[int] = set()
    pending = [node]
    while pending:
        n = pending.pop()
        if n in seen or "c" not in body.deps[n] or (n in known and n != node):
            continue
        seen.add(n)
        total += own[n]
        if body.nodes[n].op != "reduce":
            pending += body.operands(n)
    return total


def live_between(body: Body, plan: list[Pass], column_stores: Iterable[int]) -> int:
    """How many values per column stay alive between two passes when nothing is computed again; at most, over the passes."""
    stores = list(column_stores)
    born: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for position, each in enumerate(plan):
        visited: set[int] = set()
        pending = each.roots(body, stores)
        while pending:
            n = pending.pop()
            if "c" not in body.deps[n] or n in visited or body.nodes[n].op == "const":
                continue
            visited.add(n)
            if n in born:
                last_use[n] = position
            else:
                pending += body.operands(n)
        for n in visited:
            born.setdefault(n, position)
    return max((sum(born[n] < at <= last for n, last in last_use.items()) for at in range(1, len(plan))), default=0)


def work(kernel: LoopKernel) -> Dim:
    """Scalar operations of the whole domain."""
    own = costs(kernel.body, 16)
    extents = {"r": 1 if kernel.rows is None else kernel.rows, "c": kernel.cols, "k": 1 if kernel.depth is None else kernel.depth}
    total: Dim = 0
    for n in needed(kernel.body):
        node = kernel.body.nodes[n]
        axes = set(kernel.body.deps[n]) | ({node.axis} if node.op == "reduce" else set())
        cost: Dim = 1 if node.op == "reduce" else own[n]
        for axis in sorted(axes):
            cost = cost * extents[axis]
        total = total + cost
    return total
