"""`make accuracy`: every preset on every job, and the peers on the sentence encoder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from accuracy import digits, language, sentences
from accuracy.jobs import Call, Job, Row, in_place_rows, own_rows, peer_rows
from accuracy.peers import PEERS
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import Timing, measure, pin
from sashiko.cli.values import file_to_write
from sashiko.quant import PRESETS

JOBS: dict[str, Callable[[], Iterator[Job]]] = {"sentences": sentences.jobs, "digits": digits.jobs, "language": language.jobs}
RESULTS = Path(__file__).resolve().parents[1] / "results" / "accuracy.json"


def rows(job: Job, presets: Sequence[str], rounds: int, tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    """All rows of a job; those that can be called are timed in turn when the job says with what. tell: hears of each row."""
    timed, found = job.timed, list[Row]()
    for row in chain(peer_rows(job, PEERS) if timed is not None else (), own_rows(job, presets), in_place_rows(job, presets)):
        found.append(row)
        tell(f"{job.name}: {row.framework} {row.preset} done")
    if timed is not None and rounds:
        calls = {f"{row.framework} {row.preset}": partial(_call, row.call, timed) for row in found if row.call is not None}
        times = measure(calls, rounds)
        for row in found:
            if row.call is not None:
                row.ms = times[f"{row.framework} {row.preset}"].rounds
    return found


def _call(call: Call, arguments: Mapping[str, Any]) -> object:
    import torch

    with torch.no_grad():
        return call(**arguments)


def table(job: Job, found: Sequence[Row]) -> Table:
    view = Table(title=job.name, title_justify="left")
    metrics = list(dict.fromkeys(name for row in found for name in (*row.simulated, *row.compiled)))
    times = any(row.ms for row in found)
    heads = [*(f"{form} {name}" for form in ("simulated", "compiled") for name in metrics), *(["ms"] if times else []), "remarks"]
    view.add_column("")
    for head in heads:
        view.add_column(head, justify="left" if head == "remarks" else "right", overflow="fold")
    for row in found:
        numbers = [f"{form[name]:.5f}" if name in form else "-" for form in (row.simulated, row.compiled) for name in metrics]
        ms = [f"{Timing(row.ms).median:.2f}" if row.ms else "-"] if times else []
        view.add_row(f"{row.framework} {row.preset}", *numbers, *ms, row.failure or row.note)
    return view


def record(command: str, found: Sequence[Row]) -> dict[str, Any]:
    """The run as JSON: command, machine, versions, and every row with every round in milliseconds."""
    kept = [{f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "call"} for row in found]
    return {**story(command), "rows": kept}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="make accuracy", description=__doc__)
    parser.add_argument("jobs", nargs="*", choices=[*JOBS, []], help="some of the jobs; all by default")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS), help="all by default")
    parser.add_argument("--rounds", type=int, default=9, help="of timing; 0 for none")
    parser.add_argument("--json", type=file_to_write, nargs="?", const=RESULTS, help=f"write the numbers to this file, or {RESULTS.name}")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # exporters have much to say about each other
    pin()
    console = Console(width=max(Console().width, 150))
    found: list[Row] = []
    for name in options.jobs or JOBS:
        with console.status(f"{name}: preparing") as status:
            for job in JOBS[name]():
                found += (mine := rows(job, options.presets, options.rounds, status.update))
                console.print(table(job, mine))
    if options.json:
        command = " ".join(["make accuracy", *([f"ARGS='{' '.join(arguments)}'"] if arguments else [])])
        options.json.write_text(json.dumps(record(command, found), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
