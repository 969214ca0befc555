"""Passes are functions from graph to graph. `run` verifies after each, times it, and dumps what it made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..diagnostics.dump import dump_stage, say
from ..diagnostics.errors import InvalidGraph
from .dims import Dim
from .ir import Graph
from .text import to_text
from .verify import Sound, verify


@dataclass(frozen=True)
class Pass:
    """A named function from graph to graph."""

    name: str
    fn: Callable[[Graph], Graph]


@dataclass(frozen=True)
class PassReport:
    """What one pass did: its time, and how many values there were before and after."""

    name: str
    seconds: float
    before: int
    after: int


def run(graph: Graph, passes: Sequence[Pass], *, declared: Iterable[Dim] = (), reports: list[PassReport] | None = None,
        first_stage: int = 0) -> Graph:
    """The graph after all passes, in order.

    declared: symbols that come from integer arguments (see `verify`). reports: receives one entry per pass. first_stage: number of the
    first dump file. Raises InvalidGraph naming the pass whose result breaks a rule of the IR.
    """
    declared = tuple(declared)
    sound = Sound()  # values are immutable: most of them survive most passes
    for number, step in enumerate(passes, first_stage):
        start = time.perf_counter()
        try:
            result = step.fn(graph)
        except InvalidGraph as error:
            raise InvalidGraph(error.what, f"pass {step.name}", error.hint) from error
        seconds = time.perf_counter() - start
        if result is not graph:
            if result.inputs != graph.inputs:
                sound.clear()
            verify(result, declared, f"pass {step.name}", sound)
        report = PassReport(step.name, seconds, len(graph.order), len(result.order))
        if reports is not None:
            reports.append(report)
        say(2, lambda r=report: f"pass {r.name}: {r.before} -> {r.after} values in {r.seconds * 1e3:.1f} ms")  # type: ignore[misc]
        if result is not graph:
            say(3, lambda g=result: to_text(g))  # type: ignore[misc]
        dump_stage(graph.name, number, step.name, lambda g=result: to_text(g))  # type: ignore[misc]
        graph = result
    return graph
