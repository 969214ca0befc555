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
    """Collects the times of one run, in order of execution. again: how often each native step runs, the shortest time counting."""

    def __init__(self, again: int = 1) -> None:
        self.times: list[StepTime] = []
        self._again = again
        self._start = 0.0

    def start(self) -> None:
        self._start = perf_counter()

    def stop(self, label: str) -> None:
        self.times.append(StepTime(label, perf_counter() - self._start))

    def run(self, run: Callable[[int], int], frame: Frame, segment: NativeSegment) -> int:
        """Runs a frame as `run_plan` would, one step after another; returns what it would return. Repeated steps share the time
        of all turns as they share that of the first."""
        failed = 0
        try:
            for number, step in enumerate(segment.steps):
                failed = self._timed(run, frame, (number, number + 1), step.label)
                if failed:
                    break
                repeat = segment.repeat(number)
                if repeat is not None and number + 1 == repeat.end and repeat.first < number:
                    self._timed(run, frame, (repeat.first, repeat.end), "")
                    whole, turn = self.times.pop().seconds, self.times[repeat.first - repeat.end :]
                    share = whole / sum(each.seconds for each in turn)
                    self.times[repeat.first - repeat.end :] = [StepTime(each.label, share * each.seconds) for each in turn]
        finally:
            frame.limit(0, len(segment.steps))
        return failed

    def _timed(self, run: Callable[[int], int], frame: Frame, steps: tuple[int, int], label: str) -> int:
        frame.limit(*steps)
        several: list[StepTime] = []
        for _ in range(self._again):
            self.start()
            failed = run(frame.address)
            self.stop(label)
            several.append(self.times.pop())
            if failed:
                break
        self.times.append(min(several, key=lambda t: t.seconds))
        return failed


def fastest(runs: list[list[StepTime]]) -> tuple[StepTime, ...]:
    """For each step the shortest of its times over several runs of one plan."""
    return tuple(min(times, key=lambda t: t.seconds) for times in zip(*runs, strict=True))
