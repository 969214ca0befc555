"""`sashiko doctor`: what this machine can do, as tables or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .machine import Found, Machine, examine

if TYPE_CHECKING:
    from ..kernels.peaks import Peaks

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sashiko doctor`."""
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--peaks", action="store_true", help="measure products and memory of one core, and keep the figures for `bench`")


def run(options: argparse.Namespace) -> int:
    """Prints the report to stdout."""
    machine, console = examine(), Console()
    peaks = _measured() if options.peaks else None
    if options.json:
        measured = {} if peaks is None else {"peaks": dataclasses.asdict(peaks)}
        print(json.dumps({**dataclasses.asdict(machine), **measured}, indent=2))
        return 0
    show(machine, console)
    if peaks is not None:
        show_peaks(peaks, console)
    return 0


def show(machine: Machine, console: Console) -> None:
    """Prints the report as tables."""
    console.print(_pairs("Machine", [(name, escape(value)) for name, value in _summary(machine)]))
    features = _table("Features", "feature", "", "used for")
    for row in machine.features:
        features.add_row(row.name, _mark(row.present), f"{row.enables} [dim]{escape(row.note)}[/dim]" if row.note else row.enables)
    console.print(features)
    console.print(_found("Inside torch", machine.symbols, mark_only=True))
    console.print(_found("Tools (tests only)", machine.tools))
    console.print(_pairs("Versions", [(p.name, escape(p.where) or "[dim]not installed[/dim]") for p in machine.packages]))
    console.print(_pairs("Settings", [(s.name, escape(s.where) or "[dim]not set[/dim]") for s in machine.settings]))


def show_peaks(peaks: Peaks, console: Console) -> None:
    """Prints what one core can do."""
    products = _table("Products of one core", "of", "10^9 operations/s", "inner loop")
    for row in peaks.products:
        products.add_row(row.kind, f"{row.giga:.0f}", row.kernel)
    console.print(products)
    memory = _table("Memory of one core, GB/s", "level", "measured with", "read", "write", "copy (read + write)")
    for level in peaks.bandwidths:
        memory.add_row(level.level, size_text(level.size), *(f"{rate:.1f}" for rate in (level.read, level.write, level.copy)))
    console.print(memory)


def _measured() -> Peaks:
    from ..kernels.peaks import remeasured

    return remeasured()


def size_text(size: int) -> str:
    """Returns a size in bytes for people, such as "1.5 MiB"; "none" for 0."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B" if size else "none"


def _summary(machine: Machine) -> list[tuple[str, str]]:
    caches = ", ".join(f"{name} {size_text(size)}" for name, size in (("L1", machine.l1d), ("L2", machine.l2), ("L3", machine.l3)))
    return [
        ("CPU", machine.model_name),
        ("system", machine.system),
        ("LLVM target", f"{machine.triple}, cpu {machine.llvm_cpu}"),
        ("vectors", f"{machine.registers} registers of {machine.vector_bits} bits"),
        ("caches", f"{caches}, lines of {machine.cache_line} B"),
        ("AMX tiles", machine.amx),
        ("threads of torch", str(machine.torch_threads)),
        ("kernel cache", f"{machine.cache_dir}: {machine.cache_files} files, {size_text(machine.cache_bytes)}"),
    ]


def _mark(present: bool) -> str:
    return "[green]yes[/green]" if present else "[dim]no[/dim]"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pairs(title: str, pairs: list[tuple[str, str]]) -> Table:
    """Returns a table of names and values; the values are rich markup."""
    table = _table(title, "", "")
    table.show_header = False
    for name, value in pairs:
        table.add_row(name, value)
    return table


def _found(title: str, rows: tuple[Found, ...], mark_only: bool = False) -> Table:
    table = _table(title, "name", "found", "what it is")
    for row in rows:
        table.add_row(row.name, _mark(bool(row.where)) if mark_only or not row.where else escape(row.where), row.use)
    return table
