"""Timings that can be compared: one pinned core, candidates in turn within every round, medians and paired ratios."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one candidate over the rounds, in order."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def ratio_to(self, base: Timing) -> float:
        """How many times faster than `base`: the median over rounds of the ratio within the round."""
        return statistics.median(b / a for a, b in zip(self.rounds, base.rounds, strict=True))


def one_core() -> None:
    """Pin this process to its first allowed core and use one thread."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def measure(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 9, seconds: float = 0.15, advance: Callable[[], None] | None = None
) -> dict[str, Timing]:
    """Time every candidate `rounds` times in turn; each turn repeats the call for about `seconds` and keeps the mean.

    advance: called after each turn, for progress bars.
    """
    repeats = {name: _repeats(call, seconds) for name, call in candidates.items()}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            found[name].append((time.perf_counter() - start) / repeats[name] * 1e3)
            if advance is not None:
                advance()
    return {name: Timing(tuple(times)) for name, times in found.items()}


def _repeats(call: Callable[[], object], seconds: float) -> int:
    """How often a call fits into `seconds`, after two calls to warm up."""
    call()
    start = time.perf_counter()
    call()
    return max(1, int(seconds / max(time.perf_counter() - start, 1e-6)))
