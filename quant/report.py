"""The text report: what was quantized with which numbers, and what was left out and why."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Column, Table

from .module import QuantizedModule
from .record import QuantRecord


def report(result: QuantizedModule | QuantRecord, width: int = 140) -> str:
    """Plain text, at most `width` columns wide: a table of sites, a table of what was left out, the notes."""
    record = result if isinstance(result, QuantRecord) else result.record
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    scheme = record.scheme.activation
    observer = f"percentile {scheme.percentile:g}" if scheme.observer == "percentile" else scheme.observer
    console.print(
        f"{len(record.sites)} of {len(record.sites) + len(record.left_out)} contractions in int8, calibrated on {record.batches} batches "
        f"({'s8' if scheme.signed else 'u8'} activations by {observer}, s8 weights per {record.scheme.weight.granularity})"
    )
    if record.sites:
        console.print(_sites(record))
    if record.left_out:
        console.print(_left_out(record))
    for note in record.notes:
        console.print(f"note: {note}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _sites(record: QuantRecord) -> Table:
    table = Table(Column("site", overflow="fold"), "op", box=box.SIMPLE, title="quantized", title_justify="left")
    for heading in ("K", "N", "low", "high", "scale", "zero", "weight dB"):
        table.add_column(heading, justify="right")
    for item in record.sites:
        k, n = item.site.features
        numbers = (f"{item.low:.4g}", f"{item.high:.4g}", f"{item.scale:.4g}", str(item.zero_point), f"{item.weight_sqnr:.1f}")
        table.add_row(item.site.name, item.site.op, str(k), str(n), *numbers)
    return table


def _left_out(record: QuantRecord) -> Table:
    table = Table(box=box.SIMPLE, title="left in floating point", title_justify="left")
    for heading in ("contraction", "op", "reason", "source"):
        table.add_column(heading, overflow="fold")
    for item in record.left_out:
        table.add_row(item.name, item.op, item.reason, "/".join(item.source.split("/")[-2:]))
    return table
