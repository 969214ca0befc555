"""The parent of the workers: starts one for each candidate, lets them take turns, and makes rows of what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from . import frameworks, limits
from .cases import Case, Shape, shape_text
from .record import Row
from .timing import repeats
from .worker import Failed, Job, Ready, Worker

if TYPE_CHECKING:
    from ...kernels.peaks import Peaks


@dataclass(frozen=True)
class Settings:
    """How much to measure. seconds: of a turn. patience: seconds until a silent worker is given up. cached: compile a second time.

    tune: seconds that ours may measure its products, a part of its compilation.
    """

    rounds: int = 11
    seconds: float = 0.15
    cached: bool = True
    patience: float = 600.0
    tune: float = 0.0


QUICK = Settings(rounds=5, seconds=0.05, cached=False)


@dataclass
class Entry:
    """One candidate while it is measured; `row` grows."""

    job: Job
    row: Row
    worker: Worker | None = None
    ready: Ready | None = None
    ms: list[float] = field(default_factory=list)

    def failed(self, failure: Failed) -> None:
        self.row = replace(self.row, failure=failure.reason)
        self.worker = None


@dataclass(frozen=True)
class Plan:
    """One model in one shape, and the candidates beside each other: (framework, precision), the yardstick first."""

    case: Case
    shape: Shape
    threads: int
    candidates: tuple[tuple[str, str], ...]


def candidates(names: Sequence[str], precisions: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The candidates of these frameworks and precisions. The yardstick, eager fp32, is always the first, and ours are the last."""
    chosen = [(name, p) for name in (*names, frameworks.OURS) for p in precisions if frameworks.FRAMEWORKS[name].offers(p)]
    return tuple(dict.fromkeys([(frameworks.YARDSTICK, "fp32"), *chosen]))


def measure(plan: Plan, peaks: Peaks, settings: Settings, say: Callable[[str], None]) -> list[Row]:
    """Compiles and times all candidates of a plan. say: is told what is being done."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="sashiko-bench-")))
        entries = list(_entries(plan, folder, settings.tune))
        for entry in entries:
            say(f"compiling {_title(plan)}: {entry.row.name}")
            _start(entry, settings, stack)
        _rounds(entries, settings, lambda number: say(f"timing {_title(plan)}: round {number + 1} of {settings.rounds}"))
        yardstick = entries[0].ready
        return [_finished(entry, plan, yardstick, peaks) for entry in entries]


def _title(plan: Plan) -> str:
    return f"{plan.case.name} {shape_text(plan.shape)}".strip()


def _entries(plan: Plan, folder: Path, tune: float) -> Iterator[Entry]:
    for number, (framework, precision) in enumerate(plan.candidates):
        place = str(folder / str(number))
        job = Job(framework, precision, plan.case.name, plan.shape, plan.threads, place, counts=number == 0, tune=tune)
        yield Entry(job, Row(plan.case.name, shape_text(plan.shape), plan.threads, framework, precision))


def _start(entry: Entry, settings: Settings, stack: ExitStack) -> None:
    """Compiles with empty caches, and once more in a second process that finds them filled."""
    worker = stack.enter_context(Worker(entry.job, settings.patience))
    ready = worker.ready()
    if isinstance(ready, Failed):
        entry.failed(ready)
        return
    entry.worker, entry.ready = worker, ready
    quantizes = limits.kind(entry.job.precision) == "int8"
    entry.row = replace(entry.row, quantize_s=ready.quantize_s if quantizes else None, cold_s=ready.compile_s)
    if settings.cached and frameworks.FRAMEWORKS[entry.job.framework].caches:
        with Worker(entry.job, settings.patience) as second:
            again = second.ready()
        if isinstance(again, Ready):
            entry.row = replace(entry.row, cached_s=again.compile_s)


def _rounds(entries: Sequence[Entry], settings: Settings, say: Callable[[int], None]) -> None:
    """Each round begins with another candidate, so that none always follows the same one."""
    for number in range(settings.rounds):
        say(number)
        first = number % len(entries)
        for entry in (*entries[first:], *entries[:first]):
            if entry.worker is None or entry.ready is None:
                continue
            answer = entry.worker.turn(repeats(entry.ready.call_s, settings.seconds))
            if isinstance(answer, Failed):
                entry.failed(answer)
            else:
                entry.ms.append(answer * 1e3)


def _finished(entry: Entry, plan: Plan, yardstick: Ready | None, peaks: Peaks) -> Row:
    if entry.worker is None or entry.ready is None:
        return entry.row
    peak = entry.worker.peak()
    row = replace(entry.row, ms=tuple(entry.ms), peak_mib=None if isinstance(peak, Failed) else peak)
    if yardstick is None:
        return row
    if yardstick.work is not None:
        bound = limits.limit(yardstick.work, row.precision, plan.threads, peaks)
        row = replace(row, limit_ms=bound.ms, limited_by=bound.by)
    if entry.ready.answer.shape != yardstick.answer.shape:
        return replace(row, ms=(), failure=f"gives {entry.ready.answer.size} numbers, eager gives {yardstick.answer.size}")
    cosine = mean_cosine(yardstick, entry.ready) if plan.case.embeddings else None
    return replace(row, error=relative_error(yardstick, entry.ready), cosine=cosine)


def relative_error(reference: Ready, other: Ready) -> float:
    """The norm of the difference over that of the reference, in f64."""
    exact = reference.answer.astype(np.float64)
    return float(np.linalg.norm(other.answer - exact) / max(float(np.linalg.norm(exact)), 1e-300))


def mean_cosine(reference: Ready, other: Ready) -> float:
    """The mean over the rows of the results."""
    a, b = (ready.answer.astype(np.float64).reshape(-1, reference.width) for ready in (reference, other))
    return float(np.mean((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))))
