"""The text report: what was quantized with which numbers, and what was left out and why."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Column, Table

from ..module import QuantizedModule
from ..record import QuantRecord, SiteResult

_MEASURED = {"weight_sqnr": "weight dB", "result_db": "result dB", "error_db": "error dB"}


def report(result: QuantizedModule | QuantRecord, width: int = 140) -> str:
    """Plain text, at most `width` columns wide: tables of what is quantized, what is in bf16 and what was left out, and the notes."""
    record = result if isinstance(result, QuantRecord) else result.record
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, markup=False, emoji=False)
    counts = Counter(item.site.scheme.label for item in record.sites)
    mix = ", ".join(f"{count} in {label}" for label, count in counts.items()) or "0 quantized"
    console.print(f"{mix}, {len(record.left_out)} left as they were, calibrated on {record.batches} batches")
    for title, quantized in (("quantized", True), ("in bf16", False)):
        sites = [item for item in record.sites if item.site.scheme.quantized == quantized]
        if sites:
            console.print(_sites(title, sites))
    if record.left_out:
        console.print(_left_out(record))
    if record.metric is not None:
        console.print(f"{record.metric.name}: {record.metric.floating:g} in floating point, {record.metric.quantized:g} quantized")
    for note in record.notes:
        console.print(f"note: {note}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _sites(title: str, sites: Sequence[SiteResult]) -> Table:
    table = Table(Column("site", overflow="fold"), "op", box=box.SIMPLE, title=title, title_justify="left")
    measured = [key for key in _MEASURED if any(getattr(item, key) is not None for item in sites)]
    for heading in ("precision", "K", "N", "low", "high", "scale", "zero", *(_MEASURED[key] for key in measured)):
        table.add_column(heading, justify="right")
    for item in sites:
        k, n = ("", "") if item.site.features == (0, 0) else map(str, item.site.features)
        noise = ["" if value is None else f"{value:.1f}" for value in (getattr(item, key) for key in measured)]
        columns = [(f"{r.low:.4g}", f"{r.high:.4g}", f"{r.scale:.4g}", str(r.zero_point)) for r in item.ranges]
        numbers = ["\n".join(column) for column in zip(*columns, strict=True)] if columns else [""] * 4
        table.add_row(item.site.name, item.site.op, item.site.scheme.label, k, n, *numbers, *noise)
    return table


def _left_out(record: QuantRecord) -> Table:
    table = Table(box=box.SIMPLE, title="left as they were", title_justify="left")
    for heading in ("contraction", "op", "reason", "source"):
        table.add_column(heading, overflow="fold")
    for item in record.left_out:
        table.add_row(item.name, item.op, item.reason, "/".join(item.source.split("/")[-2:]))
    return table
