"""`sashiko doctor`: what this machine can do, as tables or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .machine import Found, Machine, examine

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sashiko doctor`."""
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the report to stdout."""
    machine = examine()
    if options.json:
        print(json.dumps(dataclasses.asdict(machine), indent=2))
    else:
        show(machine, Console())
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
