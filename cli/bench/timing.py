"""Timings that can be compared: one pinned core, candidates in turn within every round, medians and paired ratios."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of something measured in rounds, and the tenth and ninetieth percentile."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one candidate over the rounds, in order."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def ratio_to(self, base: Timing) -> float:
        """How many times faster than `base`: the median over rounds of the ratio within the round."""
        return self.speed(base).median

    def speed(self, base: Timing) -> Spread:
        """How many times faster than `base` within each round. What disturbs a round disturbs both."""
        return spread([b / a for a, b in zip(self.rounds, base.rounds, strict=True)])


def spread(values: Sequence[float]) -> Spread:
    """Median and percentiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), tenths[0], tenths[-1])


def allowed_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pin(cores: int = 1) -> None:
    """Keep this process on its first allowed cores, and torch on as many threads."""
    import torch

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores]))
    torch.set_num_threads(cores)


def measure(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 9, seconds: float = 0.15, advance: Callable[[], None] | None = None
) -> dict[str, Timing]:
    """Time candidates of this process `rounds` times in turn; each turn repeats the call for about `seconds` and keeps the mean.

    advance: called after each turn, for progress bars.
    """
    calls = {name: repeats(seconds_of(call), seconds) for name, call in candidates.items()}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            found[name].append(turn(call, calls[name]) * 1e3)
            if advance is not None:
                advance()
    return {name: Timing(tuple(times)) for name, times in found.items()}


def seconds_of(call: Callable[[], object]) -> float:
    """About how long a call takes, after two to warm up."""
    call()
    call()
    return turn(call, 1)


def repeats(once: float, seconds: float) -> int:
    """How many calls of `once` seconds fill a turn of `seconds`."""
    return max(1, int(seconds / max(once, 1e-6)))


def turn(call: Callable[[], object], times: int) -> float:
    """Seconds of one of `times` calls, after one that brings code and weights back into the caches."""
    call()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
