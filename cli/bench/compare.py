"""Two runs side by side: what of ours got slower by more than the noise.

Speeds are compared as ratios to eager fp32 of the same round, in both runs, so a machine that is slower today does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .record import Row, Run, title, yardstick
from .timing import Spread

LEAST = 0.03  # a smaller change is never told
_STEADY = ("torch", "transformers")


@dataclass(frozen=True)
class Change:
    """One row of ours in both runs. before, now: how many times faster than eager fp32; None when there is no time."""

    row: Row
    before: Spread | None
    now: Spread | None

    @property
    def ratio(self) -> float | None:
        """The speed now over that before; None where one of them is missing."""
        return self.now.median / self.before.median if self.now and self.before else None

    @property
    def worse(self) -> bool:
        """Whether a row that had a time has none, or both the median and the spread say that it is slower."""
        if self.before is None or self.now is None:
            return self.before is not None
        return self.now.high < self.before.low and self.now.median < (1 - LEAST) * self.before.median

    @property
    def better(self) -> bool:
        if self.before is None or self.now is None:
            return self.now is not None
        return self.now.low > self.before.high and self.now.median > (1 + LEAST) * self.before.median


@dataclass(frozen=True)
class Comparison:
    """changes: of the rows in both runs. remarks: what makes them less comparable, and what only the old run has."""

    changes: tuple[Change, ...]
    remarks: tuple[str, ...]

    @property
    def worse(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.worse)


def compare(old: Run, new: Run) -> Comparison:
    """Compares our rows, of each run in `new`, with the first of `old` of the same model, shape, number of threads and precision."""
    before: dict[_Key, Spread | None] = {}
    for row, speed in _speeds(old):
        before.setdefault(_key(row), speed)
    now = _speeds(new)
    changes = tuple(Change(row, before[_key(row)], speed) for row, speed in now if _key(row) in before)
    missing = [key for key in before if key not in {_key(row) for row, _ in now}]
    return Comparison(changes, tuple(_remarks(old, new, missing)))


@dataclass(frozen=True)
class Held:
    """A searched model of ours that is slower than ours in another precision. speed: of the searched one over the other."""

    row: Row
    faster: Row
    speed: Spread


def held_back(run: Run) -> tuple[Held, ...]:
    """The models that a search for precisions made slower than fp32 or bf16 alone, by more than the noise: there should be none."""
    from ...quant.presets import AUTO

    found: list[Held] = []
    for rows in run.groups().values():
        plain = [row for row in rows if row.ours and row.precision in ("fp32", "bf16") and row.timing]
        for row in (r for r in rows if r.ours and r.precision == AUTO):
            speeds = [Held(row, other, row.timing.speed(other.timing)) for other in plain if row.timing and other.timing]
            found += [held for held in speeds if held.speed.high < 1 and held.speed.median < 1 - LEAST]
    return tuple(found)


_Key = tuple[str, str, int, str]


def _key(row: Row) -> _Key:
    return row.model, row.shape, row.threads, row.name


def _speeds(run: Run) -> list[tuple[Row, Spread | None]]:
    """Our rows, each with the speed relative to the yardstick of its group; groups without a yardstick are left out."""
    found: list[tuple[Row, Spread | None]] = []
    for rows in run.groups().values():
        base = yardstick(rows)
        if base is not None:
            found += [(row, row.timing.speed(base) if row.timing else None) for row in rows if row.ours]
    return found


def _remarks(old: Run, new: Run, missing: list[_Key]) -> Iterator[str]:
    if (old.machine.cpu, old.machine.features) != (new.machine.cpu, new.machine.features):
        yield f"the old run is from another machine: {old.machine.cpu}"
    was, now = dict(old.versions), dict(new.versions)
    for name in _STEADY:
        if was.get(name) != now.get(name):
            yield f"the yardstick changed: {name} {was.get(name, 'absent')} before, {now.get(name, 'absent')} now"
    for model, shape, threads, name in missing:
        yield f"only in the old run: {name} on {title(model, shape, threads)}"
