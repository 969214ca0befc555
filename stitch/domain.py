"""The loop nest of one kernel: which axes are rows, columns or depth, adjacent axes merged wherever every access allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ..graph.dims import Dim, bounds, coefficient, product, substitute, symbol, symbols
from ..graph.types import i64
from .loops import COLUMN, Body, LoopKernel, hoist_numbers
from .views import delinearize

Axis = tuple[str, Dim]
_NARROW = 16  # columns: the lanes of the widest vectors of f32
_FEW = 8  # columns: half of the lanes of the widest vectors of f32


@dataclass(frozen=True)
class Domain:
    """Axes of a kernel, outermost first.

    free: no reduction; all axes are alike. c: `rows` x `reduced`, reductions over `reduced`. k: `rows` (the last one becomes the
    columns), reductions over `reduced` run sequentially inside.
    """

    rows: tuple[Axis, ...]
    reduced: tuple[Axis, ...] = ()
    kind: str = "free"

    @cached_property
    def extents(self) -> tuple[Dim, Dim]:
        """(rows, columns) as numbers of points, for comparing domains."""
        if self.kind == "c":
            return product(e for _, e in self.rows), product(e for _, e in self.reduced)
        return product(e for _, e in self.rows[:-1]), product(e for _, e in self.rows[-1:])

    @cached_property
    def size(self) -> Dim:
        """Number of points."""
        return product(self.extents)


def _merge(axes: Sequence[Axis], exprs: list[Dim]) -> tuple[list[Axis], list[Dim]]:
    """Join neighbours i, j wherever every expression has coefficient(i) == coefficient(j) * extent(j)."""
    result = [a for a in axes if a[1] != 1]
    at = len(result) - 2
    while at >= 0:
        (outer, outer_extent), (inner, inner_extent) = result[at], result[at + 1]
        if all(_joinable(e, outer, inner, inner_extent) for e in exprs):
            joined = symbol(inner, 0, None, outer_extent * inner_extent)
            exprs = [substitute(e, {outer: 0, inner: joined}) for e in exprs]
            result[at : at + 2] = [(inner, outer_extent * inner_extent)]
        at -= 1
        at = min(at, len(result) - 2)
    return result, exprs


def _joinable(expr: Dim, outer: str, inner: str, extent: Dim) -> bool:
    a, b = coefficient(expr, outer), coefficient(expr, inner)
    if a is None or b is None:
        return False
    return a[0] == b[0] * extent and not {s.name for s in symbols(a[0])} & {outer, inner}


def _widened(body: Body, axes: list[Axis], exprs: list[Dim]) -> tuple[Body, list[Axis], list[Dim]]:
    """Few columns joined with the axis around them, where only questions such as which part of a concatenation a row lies in keep them
    apart: the questions are asked of elements instead, i < bound as i * columns + c < bound * columns."""
    while len(axes) > 1 and isinstance(axes[-1][1], int) and axes[-1][1] < _NARROW:
        found = _asked_of_elements(body, exprs, axes[-2][0], axes[-1])
        joined, merged = _merge(axes, found[1]) if found is not None else (axes, exprs)
        if found is None or len(joined) == len(axes):
            break
        body, axes, exprs = found[0], joined, merged
    return body, axes, exprs


def _asked_of_elements(body: Body, exprs: list[Dim], outer: str, columns: Axis) -> tuple[Body, list[Dim]] | None:
    """The body and its expressions with the conditions on an axis as conditions on it and the columns; None where it has others."""
    inner, extent = columns
    assert isinstance(extent, int)
    apart = {n for n, e in enumerate(exprs) if not _joinable(e, outer, inner, extent)}
    asked = {n: coefficient(exprs[n], outer) for n in apart}
    if not apart or any(n >= len(body.nodes) or body.nodes[n].op != "index" or body.nodes[n].dtype != i64 for n in apart):
        return None
    if any(step is None or step[0] not in (1, -1) or inner in {s.name for s in symbols(exprs[n])} for n, step in asked.items()):
        return None
    ends: set[int] = set()
    for n, node in enumerate(body.nodes):
        if apart.intersection(body.operands(n)):
            if node.op not in ("ge", "lt") or node.args[0] not in apart or node.args[1] in apart:
                return None
            ends.add(node.args[1])
    ends = {n for n in ends if body.nodes[n].value != 0 or body.nodes[n].op != "const"}
    used = [n for n in range(len(body.nodes)) if ends.intersection(body.operands(n))]
    kept = apart | ends
    if any(body.nodes[n].args[0] not in apart for n in used) or any(kept.intersection((s.node, s.guard)) for s in body.stores):
        return None
    if any(body.nodes[n].op not in ("const", "index") or {outer, inner} & {s.name for s in symbols(exprs[n])} for n in ends):
        return None
    column = symbol(inner, 0, None, extent)
    nodes, exprs = list(body.nodes), list(exprs)
    for n, step in asked.items():
        assert step is not None
        exprs[n] = exprs[n] * extent + (column if step[0] == 1 else extent - 1 - column)
    for n in ends:
        if nodes[n].op == "const":
            nodes[n] = replace(nodes[n], value=nodes[n].value * extent)
        exprs[n] = exprs[n] * extent
    return replace(body, nodes=tuple(nodes)), exprs


def _stored_in_sequence(axes: list[Axis], reads: Sequence[Dim]) -> list[Axis]:
    """Axes that are all alike, in the order of their loops: the last one becomes the columns, which are the lanes of vectors.

    Where that one has few points, such as the colours of an image, another one that all reads go along in sequence takes its place, if it
    fills whole vectors, or several times as many of their lanes: these are loaded and computed, and the results stored one by one.
    """
    columns = axes[-1][1]
    if not isinstance(columns, int) or columns >= _FEW:
        return axes
    return _read_in_sequence(axes, reads, min(2 * _FEW, max(_FEW, 4 * columns)))


def _read_across(axes: list[Axis], reads: Sequence[Dim]) -> list[Axis]:
    """The same axes, the last of the rows being the one along which reads lie side by side that do not so along the columns: such rows are
    read together."""
    far = [e for e in reads if not _in_sequence(axes[-1], [e])]
    for axis in reversed(axes[:-1]):
        if far and (bounds(axis[1])[0] or 0) >= _FEW and all((coefficient(e, axis[0]) or (0,))[0] == 1 for e in far):
            return [*(a for a in axes[:-1] if a is not axis), axis, axes[-1]]
    return axes


def _looks_up(body: Body) -> bool:
    """Whether positions that are themselves read, such as those of rows in a table, are all that moves a read along the columns."""
    reads = [{s.name for s in symbols(node.index)} for node in body.nodes if node.op == "load"]
    return any("c" in body.deps[int(name[1:])] for names in reads if "c" not in names for name in names if name.startswith("%"))


def _summed_in_sequence(axes: list[Axis], reads: Sequence[Dim]) -> list[Axis]:
    """The same for the results of a reduction, each of which reads many elements: one is enough that is read from far apart. Even four
    side by side are fetched sooner than a vector of others."""
    return axes if not axes or _in_sequence(axes[-1], reads) else _read_in_sequence(axes, reads, _FEW // 2)


def _read_in_sequence(axes: list[Axis], reads: Sequence[Dim], least: int) -> list[Axis]:
    for axis in reversed(axes[:-1]) if axes[-1][1] != 0 else ():  # of nothing, nothing is stored
        if (bounds(axis[1])[0] or 0) >= least and _in_sequence(axis, reads):
            return [*(a for a in axes if a is not axis), axis]
    return axes


def _in_sequence(axis: Axis, reads: Sequence[Dim]) -> bool:
    """Whether all that is read lies side by side along an axis, or does not depend on it."""
    steps = [coefficient(e, axis[0]) for e in reads]
    return all(step is not None and step[0] in (0, 1) for step in steps)


def _assign(axes: Sequence[Axis], name: str) -> dict[str, Dim]:
    """Substitution that expresses `axes` through the single loop axis `name`."""
    if not axes:
        return {}
    extents = tuple(e for _, e in axes)
    loop = symbol(name, 0, None, product(extents))
    return dict(zip((n for n, _ in axes), delinearize(loop, extents)))


def _with_indices(body: Body, exprs: list[Dim], env: dict[str, Dim]) -> Body:
    fresh = iter([substitute(e, env) for e in exprs])
    nodes = tuple([n if (index := next(fresh)) == n.index else replace(n, index=index) for n in body.nodes])
    stores = tuple([replace(s, index=next(fresh)) for s in body.stores])
    return replace(body, nodes=nodes, stores=stores)


@lru_cache(maxsize=1 << 10)
def finish(body: Body, domain: Domain) -> LoopKernel:
    """The kernel, without a name, of a body whose indices use the domain's own axis names: r, c, k take their place."""
    exprs = [n.index for n in body.nodes] + [s.index for s in body.stores]
    rows, exprs = _merge(domain.rows, exprs)
    if domain.kind == "free" and not body.accumulates:
        body, rows, exprs = _widened(body, rows, exprs)
    reduced, exprs = _merge(domain.reduced, exprs)
    depth: Dim | None = None
    if domain.kind == "c":
        env = _assign(rows, "r") | _assign(reduced, "c")
        row_count: Dim | None = product(e for _, e in rows)
        columns = product(e for _, e in reduced)
    elif domain.kind == "k":
        if not body.accumulates:
            rows = _summed_in_sequence(rows, [e for e, node in zip(exprs, body.nodes) if node.op == "load"])
        env = _assign(rows[:-1], "r") | _assign(rows[-1:], "c") | _assign(reduced, "k")
        row_count, columns = product(e for _, e in rows[:-1]), product(e for _, e in rows[-1:])
        depth = product(e for _, e in reduced)
    elif len(rows) <= 1:
        env, row_count, columns = _assign(rows, "c"), None, product(e for _, e in rows)
    else:
        reads = [e for e, node in zip(exprs, body.nodes) if node.op == "load"]
        if not body.accumulates:
            rows = _read_across(_stored_in_sequence(rows, reads), reads)
        env = _assign(rows[:-1], "r") | _assign(rows[-1:], "c")
        if not body.accumulates and _looks_up(_with_indices(body, exprs, env)):
            rows = _read_in_sequence(rows, reads, 2 * _FEW)
            env = _assign(rows[:-1], "r") | _assign(rows[-1:], "c")
        row_count, columns = product(e for _, e in rows[:-1]), rows[-1][1]
    hoisted, params = hoist_numbers(_with_indices(body, exprs, env))
    return LoopKernel("", hoisted, row_count, columns, depth, params)


@lru_cache(maxsize=1 << 10)
def finish_epilogue(body: Body, rows: tuple[Axis, ...], columns: Axis) -> tuple[Body, tuple[float, ...]]:
    """The body of a contraction's epilogue: all but the last axis of the result become r, the last one c."""
    # A result with one column is still stored column by column: its index must say so.
    column = COLUMN if columns[1] == 1 else 0
    exprs = [n.index for n in body.nodes] + [s.index + column for s in body.stores]
    merged, exprs = _merge(rows, exprs)
    env = _assign(merged, "r") | _assign([columns], "c")
    return hoist_numbers(_with_indices(body, exprs, env))
