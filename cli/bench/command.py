"""The arguments of `sashiko bench`, and what they lead to. Nothing heavy is imported before `run`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...diagnostics.errors import InputError
from ..values import count, file_to_read, file_to_write, seconds, split
from .timing import allowed_cores

if TYPE_CHECKING:
    from .measure import Plan, Settings
    from .record import Row, Run

PEERS = ("openvino", "inductor", "onnxruntime", "eager")
_DEFAULTS = {
    "models": "bert-mini,minilm,chain,mlp",
    "shapes": "",
    "precision": "fp32,bf16,int8",
    "threads": "1",
    "vs": ",".join(PEERS),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add = parser.add_argument
    add("--models", default=_DEFAULTS["models"], metavar="A,B", help="names (`list` shows them) or FILE.py:FUNCTION (default: %(default)s)")
    add("--shapes", default=_DEFAULTS["shapes"], metavar="8x64,...", help="instead of each model's own")
    add("--precision", default=_DEFAULTS["precision"], metavar="P,Q", help="fp32, bf16, and presets of quantization (default: %(default)s)")
    add("--threads", default=_DEFAULTS["threads"], metavar="1,2", help="numbers of cores to use (default: %(default)s)")
    add("--vs", default=_DEFAULTS["vs"], metavar="A,B", help="peers; eager fp32 is always there (default: %(default)s)")
    add("--rounds", type=count, default=0, metavar="N", help="how often each candidate has its turn (default: 11, or 5 with --quick)")
    add("--quick", action="store_true", help="the first shape of each model, short turns, no second compilation")
    add("--tune", type=seconds, default=0.0, metavar="SECONDS", help="measure our products first, for presets but auto: compile(tune=...)")
    add("--json", type=file_to_write, metavar="F", help="write the run to this file")
    add("--plot", type=file_to_write, metavar="F.png", help="draw the run into this file (needs matplotlib)")
    saved = "show, draw or compare saved runs of one machine, measure nothing"
    add("--from", type=file_to_read, metavar="F", nargs="+", dest="saved", help=saved)
    add("--against", type=file_to_read, metavar="OLD", help="compare with a saved run; the exit status is 1 when something got slower")


def run(options: argparse.Namespace) -> int:
    """Prints tables to stdout. Returns 0, or 1 when something got slower than in the run of --against, or by a search for precisions, or
    nothing could be measured."""
    from rich.console import Console

    from . import compare, plot, record, show

    console = Console()
    if not console.is_terminal:
        console = Console(width=show.WIDTH)
    if options.models == "list":
        _list(console)
        return 0
    if options.plot:
        plot.check(options.plot)
    old = record.load(options.against) if options.against else None
    found = record.together([record.load(path) for path in options.saved]) if options.saved else measured(options)
    if options.json:
        options.json.write_text(record.to_json(found), encoding="utf-8")
    show.show(found, console)
    if options.plot:
        plot.draw(found, options.plot)
    held_back = compare.held_back(found)
    show.show_held_back(held_back, console)
    if not any(row.timing for row in found.rows):
        return 1
    if old is None:
        return 1 if held_back else 0
    comparison = compare.compare(old, found)
    show.show_comparison(comparison, console)
    return 1 if comparison.worse or held_back else 0


def measured(options: argparse.Namespace) -> Run:
    """Measures what the options ask for, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ...kernels.peaks import peaks
    from .measure import measure
    from .record import Run, this_machine, versions

    plans = list(planned(options))
    rows: list[Row] = []
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("measuring the peaks of this machine", total=None)
        best = peaks()
        for plan in plans:
            rows += measure(plan, best, settings(options), lambda text: bar.update(task, description=text))
    return Run(command(options), this_machine(), versions(), best, tuple(rows))


def planned(options: argparse.Namespace) -> Iterator[Plan]:
    """What the options ask for; InputError for names and numbers that mean nothing."""
    from . import cases
    from .frameworks import FRAMEWORKS, OURS
    from .measure import Plan, candidates

    peers, precisions, models = split(options.vs), split(options.precision), split(options.models)
    for option, given in (("--models", models), ("--precision", precisions)):
        if not given:
            raise InputError("nothing is named", f"bench {option}", "leave it out for the usual ones")
    _check("--vs", [name for name in peers if name not in PEERS], PEERS)
    known = [p for p in precisions if any(f.offers(p) for f in FRAMEWORKS.values())]
    _check("--precision", [p for p in precisions if p not in known], _precisions())
    shapes = tuple(cases.parse_shape(text) for text in split(options.shapes))
    beside = candidates([name for name in FRAMEWORKS if name in peers and name != OURS], precisions)
    threads = _threads(options.threads)
    for name in models:
        case = cases.checked(name)
        wrong = [cases.shape_text(shape) for shape in shapes if not case.fits(shape)]
        if wrong:
            raise InputError(f"{name} has no shape {wrong[0]}", "bench --shapes", f"its form is {case.form or 'fixed: give no shapes'}")
        for shape in shapes or (case.shapes[:1] if options.quick else case.shapes):
            for number in threads:
                yield Plan(case, shape, number, beside)


def settings(options: argparse.Namespace) -> Settings:
    """How much to measure."""
    from dataclasses import replace

    from .measure import QUICK, Settings

    chosen = QUICK if options.quick else Settings()
    return replace(chosen, rounds=options.rounds if options.rounds > 0 else chosen.rounds, tune=options.tune)


def command(options: argparse.Namespace) -> str:
    """The command line that these options stand for, without where the results go."""
    words = ["sashiko", "bench"]
    for name, default in _DEFAULTS.items():
        value = getattr(options, name)
        if value != default:
            words += [f"--{name}", value]
    words += ["--rounds", str(options.rounds)] if options.rounds else []
    words += ["--tune", f"{options.tune:g}"] if options.tune else []
    words += ["--quick"] if options.quick else []
    return shlex.join(words)


def _threads(text: str) -> list[int]:
    numbers = split(text)
    if not numbers or not all(n.isdecimal() and int(n) for n in numbers):
        raise InputError(f"{text!r} is no list of numbers of threads", "bench --threads", "such as 1,2")
    cores = allowed_cores()
    if max(map(int, numbers)) > cores:
        raise InputError(f"{max(map(int, numbers))} threads are more than the {cores} cores that this process has", "bench --threads")
    return [int(n) for n in numbers]


def _precisions() -> Sequence[str]:
    from ...quant import PRESETS

    return ("fp32", "bf16", *PRESETS)


def _check(option: str, unknown: list[str], known: Sequence[str]) -> None:
    if unknown:
        raise InputError(f"{unknown[0]!r} is unknown", f"bench {option}", f"known: {', '.join(known)}")


def _list(console: object) -> None:
    """Prints the models."""
    from rich.console import Console
    from rich.table import Table

    from .cases import CASES, shape_text

    assert isinstance(console, Console)
    view = Table("model", "what it is", "shape", "usual ones")
    for case in CASES:
        view.add_row(case.name, case.what, case.form, ", ".join(map(shape_text, case.shapes)))
    console.print(view)
