"""What a search for a mix of precisions found, as data and as text."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

_MS = 1e3


@dataclass(frozen=True)
class Trial:
    """One mix that was judged. score: of eval_fn, None without one. error: relative error of the results over the sample, or over its
    first call when that has no bound. simulated: whether it was the simulation, not the code."""

    mix: str
    meets: bool
    score: float | None
    error: float
    simulated: bool


@dataclass(frozen=True)
class Candidate:
    """A compiled model at the end of the search. seconds: of a call, measured in turns with the others.

    meets: whether it keeps the bound; None when it was not judged, because a faster one did.
    """

    name: str
    seconds: float
    meets: bool | None


@dataclass(frozen=True)
class SiteChoice:
    """One operation. seconds: measured for each precision that was timed, by label; of the product and what prepares it.

    error_db: signal-to-noise ratio of the model's results with this operation alone quantized, None when it was not needed.
    """

    name: str
    precision: str
    seconds: tuple[tuple[str, float], ...]
    error_db: float | None
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """bound: in words. baseline, score: of the model itself and of the answer, None without eval_fn.

    chosen: the name of the candidate that was returned. seconds: what the search took. notes: what the user should know, one sentence each.
    """

    bound: str
    baseline: float | None
    score: float | None
    chosen: str
    candidates: tuple[Candidate, ...]
    trials: tuple[Trial, ...]
    sites: tuple[SiteChoice, ...]
    notes: tuple[str, ...]
    seconds: float

    def speed(self, other: str) -> float:
        """How many times as fast the answer is as another candidate. Raises KeyError for one that was not timed."""
        seconds = {item.name: item.seconds for item in self.candidates}
        return seconds[other] / seconds[self.chosen]

    def text(self, width: int = 140) -> str:
        """Plain text: the candidates, the mixes that were judged, the operations, the notes."""
        out = io.StringIO()
        console = Console(file=out, width=width, color_system=None, force_terminal=False)
        baseline = "" if self.baseline is None else f", which gives {self.baseline:g} for the model itself"
        console.print(f"precision search: {self.bound}{baseline}; {len(self.trials)} mixes judged in {self.seconds:.1f} s")
        console.print(self._candidates())
        ratios = [f"{self.speed(item.name):.2f} times as fast as {item.name}" for item in self.candidates if item.name != self.chosen]
        console.print(f"{self.chosen} is returned" + "".join(f", {ratio}" for ratio in ratios))
        if self.trials:
            console.print(self._trials())
        console.print(self._sites())
        for note in self.notes:
            console.print(f"note: {note}")
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    def _candidates(self) -> Table:
        words = {True: "yes", False: "no", None: "not judged"}
        table = _table("compiled and timed", "model", "ms", "keeps the bound", "")
        for item in self.candidates:
            table.add_row(item.name, _ms(item.seconds), words[item.meets], "returned" if item.name == self.chosen else "")
        return table

    def _trials(self) -> Table:
        table = _table("judged", "mix", "as", "score", "relative error", "keeps the bound")
        for trial in self.trials:
            score = "" if trial.score is None else f"{trial.score:g}"
            form = "simulation" if trial.simulated else "code"
            table.add_row(trial.mix, form, score, f"{trial.error:.3g}", "yes" if trial.meets else "no")
        return table

    def _sites(self) -> Table:
        table = _table("operations", "operation", "precision", "ms", "reason")
        for site in self.sites:
            times = ", ".join(f"{label} {_ms(seconds)}" for label, seconds in site.seconds)
            table.add_row(site.name, site.precision, times, site.reason)
        return table


def _table(title: str, *headings: str) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * _MS:.3g}"
