"""Mixed precision as a knapsack: which operations to give up the speed of, first to last, when the result is not accurate enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

MARGIN = 0.97
"""A precision counts as faster than a more accurate one when it takes at most this share of its time."""


@dataclass(frozen=True)
class Rung:
    """One way to compute an operation. error: squared error of the model's results when only this operation is computed so."""

    level: str
    seconds: float
    error: float


@dataclass(frozen=True)
class Move:
    """One operation computed more accurately: `to` a level that costs `seconds` more and takes `error` off."""

    site: str
    to: str
    seconds: float
    error: float

    @property
    def worth(self) -> float:
        return self.error / self.seconds


def worthwhile(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """Of the ways to compute an operation, from the least to the most accurate kind, those that are faster than all after them."""
    kept: list[Rung] = []
    for rung in reversed(rungs):
        if not kept or rung.seconds <= MARGIN * kept[0].seconds:
            kept.insert(0, rung)
    return tuple(kept)


def hull(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """The lower convex hull of (seconds, error) over worthwhile rungs: from one to the next the error gained per second decreases.

    The most accurate rung stays; one that is slower and no more accurate than another is not on the hull.
    """
    kept: list[Rung] = []
    for rung in rungs:
        if kept and rung.error >= kept[-1].error and rung is not rungs[-1]:
            continue
        while len(kept) > 1 and _gain(kept[-2], kept[-1]) <= _gain(kept[-1], rung):
            kept.pop()
        kept.append(rung)
    return tuple(kept)


def _gain(before: Rung, after: Rung) -> float:
    return (before.error - after.error) / (after.seconds - before.seconds)


def moves(ladders: Mapping[str, Sequence[Rung]]) -> tuple[Move, ...]:
    """All steps up the hulls of the operations, the most error per second first; steps of one operation stay in order.

    That is the greedy solution of the multiple-choice knapsack, which is optimal for the time spent after every step.
    """
    found = [
        Move(site, after.level, after.seconds - before.seconds, before.error - after.error)
        for site, rungs in ladders.items()
        for before, after in itertools.pairwise(rungs)
    ]
    return tuple(sorted(found, key=lambda move: -move.worth))


def moved(start: Mapping[str, str], steps: Iterable[Move]) -> dict[str, str]:
    """The levels after some steps."""
    return {**start, **{step.site: step.to for step in steps}}


def fewest(count: int, guess: int, passes: Callable[[int], bool | None]) -> int:
    """The least number in 1..count that passes; `count` is known to pass. None from `passes`: stop, and return the best.

    Galloping search: away from the guess in steps that double, until the answer is between two numbers that were asked, then bisection.
    Source: Bentley and Yao, "An almost optimal algorithm for unbounded searching", 1976.
    """
    low, high, step, middle = 0, count, 1, max(1, min(guess, count - 1))
    while high - low > 1:
        verdict = passes(middle)
        if verdict is None:
            break
        low, high = (low, middle) if verdict else (middle, high)
        if low and high < count:
            middle = (low + high) // 2
        else:
            middle = min(low + step, count - 1) if low else max(high - step, 1)
            step *= 2
    return high
