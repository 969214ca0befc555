"""A run and a comparison as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .compare import Comparison, Held
from .record import Row, Run, title, yardstick
from .timing import Spread, Timing

_MOST_ERROR = 0.2  # of a peer of every row
WIDTH = 170  # of what is printed into a file or a pipe


def show(run: Run, console: Console) -> None:
    """Prints a table for each group of rows that took turns."""
    for group, rows in run.groups().items():
        console.print(table(title(*group), rows))
        for row in rows:
            remark = row.failure if row.timing is None else _far_off(row)
            if remark or row.timing is None:
                console.print(escape(f"{row.name}: {remark}"), style="dim", highlight=False)
    peaks = ", ".join(f"{p.kind} {p.giga:.0f} GOPS ({p.kernel})" for p in run.peaks.products)
    console.print(escape(f"Peaks of one core: {peaks}. {run.machine.cpu}."), highlight=False)


def table(heading: str, rows: Sequence[Row]) -> Table:
    """Medians, and in brackets the tenth and the ninetieth percentile of the ratios within the rounds."""
    eager = yardstick(rows)
    cosine = any(row.cosine is not None for row in rows)
    view = Table(title=escape(heading), title_justify="left")
    view.add_column("")
    for head in ("ms", "x eager fp32", "x best peer", "x best alike", "of peak", "error", *(["cosine"] if cosine else [])):
        view.add_column(head, justify="right")
    for head in ("quantize s", "cold s", "cached s", "MiB"):
        view.add_column(head, justify="right")
    for row in rows:
        if row.timing is None:
            continue
        view.add_row(
            f"[bold]{escape(row.name)}[/bold]" if row.ours else escape(row.name),
            number(row.timing.median),
            ratio(row.timing, eager),
            ratio(row.timing, best_peer(near := [other for other in rows if _is_near(other, row)])),
            ratio(row.timing, best_peer([other for other in near if other.precision == row.precision])),
            "-" if row.of_peak is None else escape(f"{row.of_peak:.0%} {row.limited_by}"),
            "-" if row.error is None else f"{row.error:.1e}",
            *(["-" if row.cosine is None else f"{row.cosine:.5f}"] if cosine else []),
            *("-" if s is None else f"{s:.1f}" for s in (row.quantize_s, row.cold_s, row.cached_s)),
            "-" if row.peak_mib is None else f"{row.peak_mib:.0f}",
        )
    return view


def best_peer(rows: Sequence[Row]) -> Timing | None:
    """The fastest row that is not ours, at any precision that is among them."""
    peers = [row.timing for row in rows if row.timing is not None and not row.ours]
    return min(peers, key=lambda timing: timing.median, default=None)


def _is_near(other: Row, row: Row) -> bool:
    """Whether another row computes about what eager fp32 does, or at least what `row` does: random weights may leave little to anybody."""
    return other.error is None or other.error <= max(_MOST_ERROR, 2 * (row.error or 0.0))


def _far_off(row: Row) -> str:
    """What to say of a peer that does not compute what eager fp32 does."""
    if row.ours or row.error is None or row.error <= _MOST_ERROR:
        return ""
    return f"its error of {row.error:.2g} makes it no peer of those with less than half of that"


def ratio(timing: Timing, base: Timing | None) -> str:
    if base is None:
        return "-"
    speed = timing.speed(base)
    return f"{speed.median:.2f} ({speed.low:.2f}-{speed.high:.2f})"


def number(ms: float) -> str:
    """Milliseconds with three digits that count."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" if ms >= 0.1 else f"{ms:.4f}"


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Prints every change, the worse ones marked, and the remarks."""
    view = Table(title="Against the old run, as speed relative to eager fp32", title_justify="left")
    for head in ("model", "", "before", "now", "now / before", ""):
        view.add_column(head, justify="right" if head in ("before", "now", "now / before") else "left")
    for change in comparison.changes:
        row = change.row
        verdict = "[red]slower[/red]" if change.worse else "[green]faster[/green]" if change.better else "within the noise"
        if change.now is None:
            verdict = f"[red]fails: {escape(row.failure)}[/red]" if change.worse else f"still fails: {escape(row.failure)}"
        shown = "-" if change.ratio is None else f"{change.ratio:.2f}"
        view.add_row(escape(title(*row.group)), escape(row.name), _spread(change.before), _spread(change.now), shown, verdict)
    console.print(view)
    for remark in comparison.remarks:
        console.print(escape(remark), style="yellow", highlight=False)


def show_held_back(found: Sequence[Held], console: Console) -> None:
    """Prints each model that a search made slower."""
    for held in found:
        text = f"{title(*held.row.group)}: {held.row.name} is slower than {held.faster.name}, {_spread(held.speed)} of its speed"
        console.print(escape(text), style="red", highlight=False)


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"
