"""Reductions over axis k: one sequential loop serves several vectors of columns, with the partial results in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

from ..stitch.loops import Body
from .body import BodyEmitter, Point
from .builder import Val, i64
from .reduce import BLOCK, Reduction, State, flatten, reductions_of, results, unflatten
from .sweep import Copies, Sweep
from .turns import CHAINS
from .written import Lines

_UNROLLED, _FEW = 9, 2  # steps up to which a loop is written out, as of windows of 3 x 3, and of how many sums


class Depth:
    """Computes the k reductions of one kernel. `extent`: i64 number of steps; `static`: that number where it is known. lines: what most
    steps have in common where they are lines of a window."""

    def __init__(self, emitter: BodyEmitter, extent: Val, static: int | None, lines: Lines | None = None) -> None:
        self._emitter, self._extent, self._static, self._lines = emitter, extent, static, lines

    def resolve(self, roots: Sequence[int], points: Sequence[Point]) -> None:
        """Makes every k reduction that `roots` need known at the points, which differ in their column alone, or where all reductions depend
        on it also in their row."""
        body, deps = self._emitter.body, self._emitter.deps
        found: set[int] = set()
        pending, seen = list(roots), set()
        while pending:
            n = pending.pop()
            if n in seen or self._emitter.is_known(n, points[0]):
                continue
            seen.add(n)
            node = body.nodes[n]
            if node.op == "reduce" and node.axis == "k":
                found.add(n)
            pending += body.operands(n)
        while found:
            # The first one in order cannot depend on the others; all that depend on none of the rest share its loop.
            sources = self._emitter.sources
            ready = [n for n in sorted(found) if not any(m != n and sources[n] >> m & 1 for m in found)]
            for group in ([n for n in ready if "c" not in deps[n]], [n for n in ready if "c" in deps[n]]):
                if group:
                    self._loop(group, list(points) if "c" in deps[group[0]] else [points[0].scalar])
            found -= set(ready)

    def _loop(self, nodes: list[int], points: list[Point]) -> None:
        emitter, fn, body = self._emitter, self._emitter.fn, self._emitter.body
        arguments = [argument for n in nodes for argument in body.nodes[n].args]
        for point in points:
            emitter.prepare(arguments, (), point, "".join(point.axes))
        reductions = reductions_of(fn, emitter.target, body, nodes, self._static)
        # States in the order copies of k, points, reductions.
        lanes = points[0].lanes
        copies = max(1, CHAINS // (len(points) * len(nodes)))
        start = self._fresh(reductions, lanes, copies * len(points))
        if self._static is not None and self._static <= _UNROLLED and len(nodes) <= _FEW:
            states = self._steps([i64(k) for k in range(self._static)], start, reductions, points, nodes)
        else:
            main = fn.mul(fn.udiv(self._extent, i64(copies)), i64(copies)) if copies > 1 else self._extent

            def several(k: Val, carried: list[Val]) -> list[Val]:
                ks = [fn.add(k, i64(copy)) for copy in range(copies)]
                return flatten(self._steps(ks, unflatten(carried, start), reductions, points, nodes))

            def block(k: Val, carried: list[Val]) -> list[Val]:
                end = fn.smin(fn.add(k, i64(BLOCK)), main)
                part = unflatten(fn.loop(k, end, copies, flatten(start), several), start)
                before = unflatten(carried, start)
                return flatten([reductions[n % len(reductions)].merge(*both) for n, both in enumerate(zip(before, part))])

            long = (self._static is None or self._static > 2 * BLOCK) and any(reduction.rounds for reduction in reductions)
            done = fn.loop(i64(0), main, BLOCK if long else copies, flatten(start), block if long else several)
            states = unflatten(done, start)
            states = self._rest(states, main, reductions, points, nodes) if copies > 1 else states
        self._finish(states, reductions, points, nodes)

    def _rest(self, states: list[State], start: Val, reductions: list[Reduction], points: list[Point], nodes: list[int]) -> list[State]:
        def single(k: Val, carried: list[Val]) -> list[Val]:
            return flatten(self._steps([k], unflatten(carried, first), reductions, points, nodes))

        count = len(points) * len(reductions)
        first = states[:count]
        done = unflatten(self._emitter.fn.loop(start, self._extent, 1, flatten(first), single), first)
        return done + states[count:]

    def _fresh(self, reductions: list[Reduction], lanes: int, count: int) -> list[State]:
        return [reduction.identity(lanes) for _ in range(count) for reduction in reductions]

    def _steps(self, ks: list[Val], states: list[State], reductions: list[Reduction], points: list[Point], nodes: list[int]) -> list[State]:
        result = list(states)
        group = len(points) * len(reductions)
        with self._emitter.scope():
            for step, k in enumerate(ks):
                first = step * group % len(states)
                here = [point.at(k=k) for point in points]
                result[first : first + group] = self._step(result[first : first + group], reductions, here, nodes)
        return result

    def _step(self, states: list[State], reductions: list[Reduction], points: list[Point], nodes: list[int]) -> list[State]:
        """The states with what one k brings to each point."""
        lines, emitter = self._lines, self._emitter
        if lines is None:
            return self._joined(states, reductions, points, nodes)

        def where(body: Body) -> list[Val]:
            with emitter.scope(), emitter.assuming(body):
                return flatten(self._joined(states, reductions, points, nodes))

        asked = reduce(emitter.fn.and_, [emitter.value(n, points[0].scalar) for n in lines.conditions])
        return unflatten(emitter.fn.branch(asked, partial(where, lines.inside), partial(where, lines.outside)), states)

    def _joined(self, states: list[State], reductions: list[Reduction], points: list[Point], nodes: list[int]) -> list[State]:
        emitter, result = self._emitter, list[State]()
        for place, point in enumerate(points):
            here = states[place * len(reductions) : (place + 1) * len(reductions)]
            for terms in zip(*(emitter.body.nodes[n].args for n in nodes), strict=True):
                if len(nodes) > 1:  # rows written out side by side use up together what they share
                    emitter.compute(terms, point)
                for which, (reduction, term) in enumerate(zip(reductions, terms)):
                    x = emitter.operand(term, point.lanes, point)
                    position = emitter.fn.splat(point.axes["k"], point.lanes) if reduction.needs_position else None
                    here[which] = reduction.update(here[which], x, position, None)
            emitter.checks(point, [n for n in emitter.depth_checks if emitter.deps[n] <= point.axes.keys()])
            result += here
        return result

    def _finish(self, states: list[State], reductions: list[Reduction], points: list[Point], nodes: list[int]) -> None:
        group = len(points) * len(reductions)
        for place, point in enumerate(points):
            merged = []
            for which, reduction in enumerate(reductions):
                parts = states[place * len(reductions) + which :: group]
                while len(parts) > 1:
                    parts = [reduction.merge(a, b) for a, b in zip(parts[::2], parts[1::2])] + ([parts[-1]] if len(parts) % 2 else [])
                merged.append(parts[0])
            for n, value in zip(nodes, results(reductions, merged)):
                self._emitter.remember(n, point, value)


def visit_rows(
    depth: Depth, rows: Sequence[Point], roots: Sequence[int], sweep: Sweep, unroll: int, effects: Callable[[list[Point]], None]
) -> None:
    """Visits the columns of several rows of one run at once: what these read alike at a step is read once."""

    def visit(columns: list[Point], states: Copies) -> Copies:
        points = [[row.at_column(column) for column in columns] for row in rows]
        depth.resolve(roots, [point for of_row in points for point in of_row])
        for of_row in points:
            effects(of_row)
        return states

    sweep.run(rows[0], unroll, [], visit)
