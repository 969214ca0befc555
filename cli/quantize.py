"""`sashiko quantize MODULE:FUNCTION --data MODULE:FUNCTION --out DIR`: from a model and its data to files and a report."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..diagnostics.errors import InputError
from .source import check_takes, load_function
from .values import count, drop, file_to_write, folder_to_write, seconds

if TYPE_CHECKING:
    from ..quant import QuantizedModule, QuantRecord

_MODEL = "MODULE:FUNCTION, where the function takes nothing and returns the model"
_DATA = "MODULE:FUNCTION, where the function takes nothing and returns an iterable of batches"
_EVAL = "MODULE:FUNCTION, where the function takes a model and returns a number, higher is better"
MODULE_FILE = "quantized.sashiko"
CODE_FILE = "compiled.sashiko"
SUMMARY_FILE = "summary.json"
_BUDGET = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sashiko quantize`."""
    parser.add_argument("model", metavar="MODULE:FUNCTION", help=f"{_MODEL}; MODULE is an importable name or a .py file")
    parser.add_argument("--data", metavar="MODULE:FUNCTION", required=True, help=_DATA)
    written = f"folder for {MODULE_FILE} and {SUMMARY_FILE}, and after a search {CODE_FILE}"
    parser.add_argument("--out", metavar="DIR", type=folder_to_write, required=True, help=written)
    preset = "%(default)s when not given; auto searches for the precision of every operation"
    parser.add_argument("--preset", default="int8", help=preset)
    parser.add_argument("--max-batches", type=count, metavar="N", help="stop calibrating after so many batches")
    parser.add_argument("--eval", metavar="MODULE:FUNCTION", help=_EVAL)
    parser.add_argument("--max-drop", type=drop, metavar="X", help="search for the fastest mix that loses at most so much of --eval")
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help=f"for the search; {_BUDGET:g} when not given")
    parser.add_argument("--target", help="name of the machine that it is for; this machine when not given")
    parser.add_argument("--report", metavar="FILE.html", help="write the report as a page, too")


def run(options: argparse.Namespace) -> int:
    """Writes the files and prints the report."""
    from ..driver.quantized import measurable
    from ..platforms.host import resolve as resolve_target
    from ..quant.presets import AUTO, resolve

    if options.max_drop is not None and options.eval is None:
        raise InputError("--max-drop needs something that can drop", hint=f"give --eval {_EVAL}")
    resolve(options.preset)  # unknown names are refused before any work
    resolve_target(options.target)
    searched = options.preset == AUTO or options.max_drop is not None
    if options.budget is not None and not searched:
        raise InputError("--budget is for a search", hint=f"give --preset {AUTO} or --max-drop, or leave it out")
    if searched:
        measurable(options.target)
    report = None if options.report is None else _report(options)
    make_model, make_data = _function(options.model, _MODEL), _function(options.data, _DATA)
    measure = None if options.eval is None else _function(options.eval, _EVAL, None)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{str(options.out)!r} cannot be made: {error.strerror}", hint="give a folder for --out") from error
    _writable("--out", options.out / MODULE_FILE)
    if report is not None:
        _writable("--report", report)  # in the folder that was made
    model, data = make_model(), make_data()
    small = _searched(model, data, measure, options) if searched else _plain(model, data, measure, options)
    small.save(options.out / MODULE_FILE)
    if not searched:
        (options.out / CODE_FILE).unlink(missing_ok=True)  # of an earlier search, of another module
    (options.out / SUMMARY_FILE).write_text(json.dumps(summary(small.record), indent=2) + "\n", encoding="utf-8")
    print(small.report(report), end="")
    return 0


def _report(options: argparse.Namespace) -> Path:
    """The file of --report, whose folder --out may make."""
    text, out = options.report, options.out.absolute()
    folder = Path(text).parent.absolute()
    own = {os.path.realpath(out / name) for name in (MODULE_FILE, CODE_FILE, SUMMARY_FILE)}
    if "\0" not in text and os.path.realpath(text) in own:
        raise InputError(f"--report: {text!r} is a file that the command writes itself", hint="give the page a name of its own")
    if "\0" not in text and folder in (out, *out.parents) and not os.path.exists(folder):
        return Path(text)
    return _writable("--report", text)


def _writable(option: str, path: str | Path) -> Path:
    try:
        return file_to_write(str(path))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{option}: {error}") from error


def summary(record: QuantRecord) -> dict[str, Any]:
    """The record as JSON for other tools; histograms are in the module's own file."""
    from ..quant.plain import to_plain

    bare = (replace(item, ranges=tuple(replace(limits, histogram=None) for limits in item.ranges)) for item in record.sites)
    sites = [{"precision": item.site.scheme.label, **to_plain(item)} for item in bare]
    return {**to_plain(replace(record, sites=())), "sites": sites}


def _plain(model: Any, data: Any, measure: Callable[[Any], Any] | None, options: argparse.Namespace) -> QuantizedModule:
    from ..quant import Metric, calibrate, measured
    from ..quant.presets import resolve

    small = measured(calibrate(model, data, resolve(options.preset), max_batches=options.max_batches, target=options.target))
    if measure is not None:
        small.record = replace(small.record, metric=Metric(_name(options), *(_number(measure, each, options) for each in (model, small))))
    return small


def _searched(model: Any, data: Any, measure: Callable[[Any], Any] | None, options: argparse.Namespace) -> QuantizedModule:
    from ..driver.quantized import quantize_and_compile

    fast = quantize_and_compile(
        model, data, preset=options.preset, eval_fn=measure, max_drop=options.max_drop,
        budget_s=_BUDGET if options.budget is None else options.budget, max_batches=options.max_batches, target=options.target,
    )
    fast.save(options.out / CODE_FILE)
    assert fast.quantized is not None and fast.search is not None
    print(fast.search.text())
    record = fast.quantized.record
    if record.metric is not None:
        fast.quantized.record = replace(record, metric=replace(record.metric, name=_name(options)))
    return fast.quantized


def _function(source: str, form: str, *arguments: Any) -> Callable[..., Any]:
    """The function that `source` names, which takes the arguments."""
    function = load_function(source, form)
    check_takes(function, source, form, *arguments)
    return function


def _number(measure: Callable[[Any], Any], model: Any, options: argparse.Namespace) -> float:
    from ..graph.examples import first_line

    try:
        value = measure(model)
    except Exception as error:
        raise InputError(f"{options.eval} failed: {first_line(error)}", hint=f"give {_EVAL}") from error
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        shown = " ".join(repr(value).split())  # tensors have many lines
        raise InputError(f"{options.eval} returned {shown:.60}, not a number", hint=f"give {_EVAL}") from error
    if math.isnan(number):
        raise InputError(f"{options.eval} returned NaN", hint=f"give {_EVAL}")
    return number


def _name(options: argparse.Namespace) -> str:
    """What the number is called: the function that gives it."""
    return str(options.eval).rpartition(":")[2]
