"""`quantize`: from a model and a few batches to a calibrated int8 model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from torch import nn

from ..diagnostics.errors import CalibrationError, InputError
from ..diagnostics.surroundings import undisturbed
from ..graph.alone import alone
from ..graph.exporting import check_module
from ..graph.modes import in_training, to_evaluate
from ..platforms.host import resolve as resolve_target
from ..platforms.target import Target
from .bias import output_means
from .calibrate import call_of, numbered, total
from .calibration import Calibration, calibrated, not_masked
from .constants import Constants
from .gptq import Compensation
from .masking import mask_arguments
from .module import QuantizedModule, check_converted
from .operands import Operands, operands
from .placement import place
from .presets import resolve
from .program import Call, Program, export
from .record import Placement
from .scheme import Scheme, Where, several
from .sensitivity import without_outliers
from .sharding import Shards
from .smooth import smoothed


def quantize(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    preset: str | Scheme = "int8",
    exclude: Where | Iterable[Where] = (),
    transform: Callable[[Any], Any] | None = None,
    mask: str | Literal[False] | None = None,
    sharded: bool = False,
    max_batches: int | None = None,
    target: Target | str | None = None,
    progress: bool | None = None,
) -> QuantizedModule:
    """Returns `model` in calibrated, simulated int8: an nn.Module that is called as the model is, and that `compile` makes real.

    model: in evaluation mode; it is not changed, and the result shares no memory with it.
    batches: any iterable. A batch is a tensor (the only argument), a tuple or list (positional arguments) or a mapping (by name).
    preset: a name of `PRESETS`, or a Scheme.
    exclude: what to leave in floating point: names as `report` shows them, modules containing them, compiled patterns, module classes.
    transform: makes a batch of an item of `batches`, such as one that still holds its labels.
    mask: the name of an argument [batch, position] that is 1 where a position counts and 0 where it is padding: what activations hold
        there does not shape their ranges. None: `attention_mask` and `decoder_attention_mask`, where the model takes them; False:
        everything counts.
    sharded: every process of torch.distributed passes its own part of the data, and all get the module that the whole data gives. An
        error of one is an error of all. Without torch.distributed there is one process.
    max_batches: stop after so many, on each process. progress: show a bar; None shows one on a terminal when the work is long.
    target: the machine that the integers are for, as in `compile`: they run on any, but some multiply small weights faster
        (`WeightScheme.sums16`). None: this one.

    Errors: CalibrationError for data or a model that cannot be calibrated, InputError for options, Unsupported for a model that
    torch.export does not accept.
    """
    found = calibrate(
        model, batches, preset, exclude=exclude, transform=transform, mask=mask, sharded=sharded, max_batches=max_batches,
        target=target, progress=progress,
    )
    return found.build()


@undisturbed()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    scheme: str | Scheme,
    *,
    exclude: Where | Iterable[Where] = (),
    transform: Callable[[Any], Any] | None = None,
    mask: str | Literal[False] | None = None,
    sharded: bool = False,
    max_batches: int | None = None,
    target: Target | str | None = None,
    progress: bool | None = None,
) -> Calibration:
    """Exports a model, runs the calibration data through it and keeps what was learnt; arguments and errors as in `quantize`, whose preset
    `scheme` is."""
    _check_flags(sharded, progress)
    with Shards(sharded) as shards:
        scheme, rules = resolve(scheme), several(exclude)
        check_evaluating(model)
        stream = (call_of(model, batch, number) for number, batch in numbered(batches, max_batches, transform))
        held = [call.own() for call in islice(stream, scheme.sample)]
        sample = shards.interleaved([replace(call, name=call.name + shards.here) for call in held], scheme.sample)
        program = export(model, typical(sample))
        program = replace(program, masks=mask_arguments(program.gate, mask))
        machine = resolve_target(target)
        placement = place(program.graph, Constants(program.graph, program.attributes), scheme, machine, rules, _of_one_size(sample))
        original = program = replace(program, notes=(*program.notes, *not_masked(program, placement, scheme)))
        shards.check_alike(program, placement, scheme, machine)
        if scheme.smooth is not None:
            program, placement = smoothed(program, placement, scheme.smooth, sample)
        shown = _shown(chain(held, stream), total(batches, max_batches), progress if shards.rank == 0 else False)
        observers, grams, count = calibrated(program, placement, shown)
        _check_weights(program, placement)
        weigh = Compensation(program, placement, shards.merged(grams))
        count = sum(shards.gather(count))
        found = Calibration(program, original, placement, scheme, machine, shards.merged(observers), sample, count, weigh)
    found = without_outliers(found) if scheme.outliers is not None else found
    return replace(found, means=output_means(program, found.placement, sample)) if scheme.correct_bias else found


def _check_flags(sharded: object, progress: object) -> None:
    """Raises InputError for what would do as True or False without being either."""
    if not isinstance(sharded, bool):
        raise InputError(f"sharded={sharded!r:.60} is not True or False", "quantize(sharded=...)")
    if progress is not None and not isinstance(progress, bool):
        raise InputError(f"progress={progress!r:.60} is not True, False or None", "quantize(progress=...)")


def _of_one_size(sample: tuple[Call, ...]) -> bool:
    """Whether images, and whatever else has three axes or more, are of one size in all calls."""
    return len({tuple(tensor.shape[-2:] for tensor in call.tensors() if tensor.dim() >= 3) for call in sample}) == 1


def typical(sample: tuple[Call, ...]) -> Call:
    """The first call, from which all processes export the same program. Raises CalibrationError where there is none, or nothing in it."""
    if not sample:
        what = "the calibration data is empty"
        raise CalibrationError(what, "calibration data", "a generator that was used before gives nothing again")
    sizes = [tensor.numel() for tensor in sample[0].tensors()]
    if sizes and not any(sizes):
        what = f"{sample[0].name} is empty: its tensors hold no values"
        raise CalibrationError(what, "calibration data", "let the first batch be a typical one")
    return sample[0]


@alone()
def check_evaluating(model: nn.Module) -> None:
    """Raises CalibrationError for a model in training mode, and what `check_module` and `check_converted` raise."""
    check_module(model)
    check_converted(model)
    if names := in_training(model):
        hint = f"{to_evaluate(model)}; dropout and batch statistics would falsify the calibration"
        raise CalibrationError(f"the model is in training mode: {names}", "quantize(model, ...)", hint)


def _check_weights(program: Program, placement: Placement) -> None:
    """Raises CalibrationError when a weight holds NaN or infinity, which no integer stands for."""
    constants, nodes = Constants(program.graph, program.attributes), {node.name: node for node in program.graph.nodes}
    for site in (s for s in placement.sites if s.scheme.weight is not None):
        found = operands(nodes[site.node], constants)
        if isinstance(found, Operands) and found.weight is not None and not bool(constants.value(found.weight).isfinite().all()):
            what = f"the weight of {site.name}, {site.weight}, holds NaN or infinity"
            raise CalibrationError(what, site.source or "the model", "repair the weight, or exclude the operation")


def _shown(batches: Iterator[Call], count: int | None, progress: bool | None) -> Iterator[Call]:
    """The same calls behind a progress bar. By default there is one on a terminal, from four batches on."""
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
