"""How long each step of a plan takes: the same frames and code, run one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from .frames import Frame
from .plan import NativeSegment


@dataclass(frozen=True)
class StepTime:
    """Seconds that one step took in one run. A native one includes about a microsecond of the call itself."""

    label: str
    seconds: float


class Stopwatch:
    """Collects the times of one run, in order of execution."""

    def __init__(self) -> None:
        self.times: list[StepTime] = []
        self._start = 0.0

    def start(self) -> None:
        self._start = perf_counter()

    def stop(self, label: str) -> None:
        self.times.append(StepTime(label, perf_counter() - self._start))

    def run(self, run: Callable[[int], int], frame: Frame, segment: NativeSegment) -> int:
        """Runs a frame as `run_plan` would, one step after another; returns what it would return."""
        failed = 0
        try:
            for number, step in enumerate(segment.steps):
                frame.limit(number, number + 1)
                self.start()
                failed = run(frame.address)
                self.stop(step.label)
                if failed:
                    break
        finally:
            frame.limit(0, len(segment.steps))
        return failed


def fastest(runs: list[list[StepTime]]) -> tuple[StepTime, ...]:
    """For each step the shortest of its times over several runs of one plan."""
    return tuple(min(times, key=lambda t: t.seconds) for times in zip(*runs, strict=True))
