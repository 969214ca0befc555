"""`quantize`: from a model and a few batches to a calibrated int8 model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch import nn

from ..diagnostics.errors import CalibrationError
from .calibrate import call_of, numbered, observe, total
from .constants import Constants
from .insert import Inserter
from .module import QuantizedModule
from .observers import Observer, Range, make_observer
from .placement import place
from .program import Program, export, scratch
from .record import LeftOut, Placement, QuantRecord, QuantSite
from .scheme import Scheme, resolve


def quantize(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    preset: str | Scheme = "int8",
    exclude: str | re.Pattern[str] | Iterable[str | re.Pattern[str]] = (),
    max_batches: int | None = None,
    progress: bool | None = None,
) -> QuantizedModule:
    """Returns `model` in calibrated, simulated int8: an nn.Module that is called as the model is, and that `compile` makes real.

    model: in evaluation mode; it is not changed, and the result shares no memory with it.
    batches: any iterable. A batch is a tensor (the only argument), a tuple or list (positional arguments) or a mapping (by name).
    preset: a name of `PRESETS`, or a Scheme.
    exclude: what to leave in floating point: names as `report` shows them, modules containing them, or compiled patterns.
    max_batches: stop after so many. progress: show a bar; None shows one on a terminal when the work is long.

    Errors: CalibrationError for data or a model that cannot be calibrated, InputError for options, Unsupported for a model that
    torch.export does not accept.
    """
    scheme = resolve(preset)
    rules = (exclude,) if isinstance(exclude, (str, re.Pattern)) else tuple(exclude)
    _check_evaluating(model)
    stream = numbered(batches, max_batches)
    first = next(stream, None)
    if first is None:
        raise CalibrationError("the calibration data is empty", "calibration data", "a generator that was used before gives nothing again")
    call = call_of(model, first[1], first[0])
    program = export(model, call)
    constants = Constants(program.graph, program.attributes)
    placement = place(program.graph, constants, rules)
    rest = _shown(_chain(first, stream), total(batches, max_batches), progress)
    observers, count = _calibrated(model, program, placement, scheme, rest)
    return _rewritten(program, placement, observers, constants, scheme, count)


def _check_evaluating(model: nn.Module) -> None:
    training = [name or type(model).__name__ for name, module in model.named_modules() if module.training]
    if training:
        raise CalibrationError(
            f"the model is in training mode: {', '.join(training[:3])}{' ...' if len(training) > 3 else ''}",
            "quantize(model, ...)", "call model.eval() first: dropout and batch statistics would falsify the calibration",
        )


def _chain(first: tuple[int, Any], rest: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    yield first
    yield from rest


def _shown(batches: Iterator[tuple[int, Any]], count: int | None, progress: bool | None) -> Iterator[tuple[int, Any]]:
    """The same batches behind a progress bar. By default there is one on a terminal, from four batches on."""
    console = Console(stderr=True)
    wanted = console.is_terminal and (count is None or count >= 4) if progress is None else progress
    if not wanted:
        yield from batches
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("calibrating", total=count)
        for item in batches:
            yield item
            bar.advance(task)


def _calibrated(
    model: nn.Module, program: Program, placement: Placement, scheme: Scheme, batches: Iterator[tuple[int, Any]]
) -> tuple[dict[str, Observer], int]:
    """One observer for each activation to quantize, by node name, after all the data; and the number of batches."""
    observers = {site.activation: make_observer(scheme.activation) for site in placement.sites}
    module = scratch(program)
    count = 0
    for number, batch in batches:
        observe(module, program.gate, observers, call_of(model, batch, number), number)
        count = number
    return observers, count


def _rewritten(
    program: Program, placement: Placement, observers: dict[str, Observer], constants: Constants, scheme: Scheme, count: int
) -> QuantizedModule:
    ranges: dict[QuantSite, Range] = {}
    left = list(placement.left_out)
    for site in placement.sites:
        limits = observers[site.activation].range()
        if limits is None:
            left.append(LeftOut(site.name, site.op, "calibration gave it no values", site.source))
        else:
            ranges[site] = limits
    graph, attributes = program.graph, dict(program.attributes)
    sites = Inserter(graph, attributes, constants, scheme).run(ranges)
    notes = program.notes if sites else (*program.notes, "nothing was quantized")
    return QuantizedModule.build(attributes, graph, program.gate, QuantRecord(scheme, sites, tuple(left), count, notes))


