"""Runs calibration data through an exported program and observes the activations to quantize."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from ..diagnostics.errors import PADDED, CalibrationError, InputError
from ..graph.examples import arguments, first_line, misfit
from ..graph.exporting import CPU
from ..graph.refusals import raised_at
from .masking import MaskArgument
from .module import Gate
from .observers import NonFinite, Watcher
from .placement import module_path, source_of
from .program import Call, Program, bind, scratch

_LOOP = "calibration data"
Select = Callable[[Node, torch.Tensor], torch.Tensor | None]
"""The mask of an activation, by its node and value; None where all of it counts."""


def check_iterable(batches: object) -> None:
    """Raises CalibrationError for what is no iterable of batches; a tensor and a mapping are one batch."""
    if isinstance(batches, (torch.Tensor, Mapping, str, bytes)) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"calibration data is a {type(batches).__name__}, not an iterable of batches", _LOOP, "put it in a list: [batch, ...]"
        )


def is_count(value: object) -> bool:
    """Whether it is a whole number from 1 on, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_transform(transform: object) -> None:
    """Raises InputError for what makes no batches of items."""
    if transform is not None and not callable(transform):
        what = f"transform={transform!r:.60} cannot be called"
        raise InputError(what, _LOOP, "a function that makes a batch of an item, or None")


def numbered(
    batches: Iterable[Any], limit: int | None, transform: Callable[[Any], Any] | None = None
) -> Iterator[tuple[int, Any]]:
    """(number from 1, batch), at most `limit`. transform: makes a batch of an item.

    Raises CalibrationError when `batches` is no iterable of batches, or when it or `transform` raises.
    """
    check_iterable(batches)
    check_transform(transform)
    if limit is not None and not is_count(limit):
        raise InputError(f"max_batches={limit!r} is no number of batches", _LOOP, "1 or more, or None for all")
    iterator = iter(batches)
    number = 0
    while limit is None or number < limit:
        number += 1
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise _raised("the calibration data", number, error) from error
        if transform is not None:
            try:
                batch = transform(batch)
            except Exception as error:
                raise _raised("transform", number, error) from error
        yield number, batch


def _raised(culprit: str, number: int, error: Exception) -> CalibrationError:
    what = f"{culprit} raised {type(error).__name__} while producing batch {number}: {error}"
    return CalibrationError(what, raised_at(error) or _LOOP)


def call_of(model: nn.Module, batch: Any, number: int) -> Call:
    """The call that a batch stands for: a tensor is the only argument, a tuple or list is positional, a mapping is by name.

    Raises CalibrationError when it does not fit the model's `forward`.
    """
    given = arguments(batch)
    if given is None:
        raise CalibrationError(
            f"batch {number} is a {type(batch).__name__}", _LOOP, "a batch is a tensor, a tuple of arguments, or a dict of named arguments"
        )
    args, kwargs = given
    if why := misfit(model, args, kwargs):
        hint = "leave out labels: quantize(model, (x for x, label in data))" if len(args) > 1 else "a dict names the arguments"
        raise CalibrationError(f"batch {number} {why}", _LOOP, hint)
    call = replace(bind(model, args, kwargs), name=f"batch {number}")
    if not call.tensors():
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in pytree.tree_leaves((args, kwargs))}))
        what = f"batch {number} holds no tensor, only {kinds or 'nothing'}"
        raise CalibrationError(what, _LOOP, "torch.as_tensor converts arrays and lists")
    if any(t.is_nested for t in call.tensors()):
        raise CalibrationError(f"batch {number} holds a nested tensor", _LOOP, PADDED)
    layout = next((t.layout for t in call.tensors() if t.layout is not torch.strided), None)
    if layout is not None:
        raise CalibrationError(f"batch {number} holds a tensor of layout {layout}", _LOOP, "to_dense() converts it")
    device = next((t.device for t in call.tensors() if t.device.type != "cpu"), None)
    if device is not None:
        raise CalibrationError(f"batch {number} holds a tensor on {device}", _LOOP, CPU)
    return call


class _Recorder(Interpreter):
    """Runs a program and shows the named activations to their observers. `current`: the node that is running."""

    def __init__(self, module: GraphModule, observers: Mapping[str, Sequence[Watcher]], select: Select) -> None:
        super().__init__(module)
        self.observers = observers
        self.select = select
        self.current: Node | None = None

    def run_node(self, n: Node) -> Any:
        self.current = n
        result = super().run_node(n)
        watchers = self.observers.get(n.name, ())
        mask = self.select(n, result) if watchers else None
        for watcher in watchers:
            watcher.observe(result, mask)
        return result


class _Tracker(Interpreter):
    """Runs a program and remembers which results hold NaN, and which hold infinity."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.nan: set[Node] = set()
        self.infinite: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if any(bool(t.isnan().any()) for t in tensors):
            self.nan.add(n)
        if any(bool(t.isinf().any()) for t in tensors):
            self.infinite.add(n)
        return result


def watch(program: Program, observers: Mapping[str, Sequence[Watcher]], calls: Iterable[Call]) -> int:
    """Runs all calls and shows the named activations to their observers. Returns the number of calls."""
    module = scratch(program)
    count = 0
    for call in calls:
        observe(module, program, observers, call)
        count += 1
    return count


def observe(module: GraphModule, program: Program, observers: Mapping[str, Sequence[Watcher]], call: Call) -> None:
    """Runs one batch. Raises CalibrationError when it does not fit, when the program fails on it, or when activations are not finite."""
    gate = program.gate
    try:
        values = gate.arrange(call.args, call.kwargs)
    except InputError as error:
        why = "; ".join(filter(None, (error.what, program.fixed)))
        what = f"{call.name} does not fit the program exported from the first batch: {why}"
        raise CalibrationError(what, _LOOP, error.hint) from error
    recorder = _Recorder(module, observers, selection(program.masks, dict(zip(gate.names, values, strict=True)), call.name))
    try:
        with torch.no_grad():
            recorder.run(*values)
    except NonFinite:
        assert recorder.current is not None
        raise _explain_non_finite(module, gate, values, recorder.current, call.name) from None
    except Exception as error:
        what = f"the model failed on {call.name}: {first_line(error)}"
        raise CalibrationError(what, raised_at(error) or _LOOP) from error


def selection(arguments: Sequence[MaskArgument], values: Mapping[str, Any], batch: str) -> Select:
    """What counts in the activations of the batch of that name."""
    read = [(argument, argument.read(values[argument.name], batch)) for argument in arguments]

    def select(node: Node, x: torch.Tensor) -> torch.Tensor | None:
        laid = (argument.on(mask, x, node) for argument, mask in read if mask is not None)
        return next((mask for mask in laid if mask is not None), None)

    return select


def _explain_non_finite(module: GraphModule, gate: Gate, values: list[Any], found: Node, batch: str) -> CalibrationError:
    """Says which argument brought NaN or infinity, or which layer made it of finite values. found: the activation that holds it."""
    for name, value in zip(gate.names, values, strict=True):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                count = int((~leaf.isfinite()).sum())
                kind = "NaN" if bool(leaf.isnan().any()) else "infinity"
                what = f"{batch}: argument {name!r} holds {kind} ({count} of {leaf.numel()} values are not finite)"
                return CalibrationError(what, _LOOP, "remove or repair that batch")
    tracker = _Tracker(module)
    with torch.no_grad():
        tracker.run(*values)
    # Minus infinity is the ordinary content of attention masks, so the search goes back from where it does harm.
    bad = tracker.nan if found in tracker.nan else tracker.infinite
    kind = "NaN" if found in tracker.nan else "infinity"
    node = found
    while before := [n for n in node.all_input_nodes if n in bad]:
        node = before[0]
    if node.op == "get_attr":
        return CalibrationError(f"{batch}: the model's own {node.target} holds {kind}", _LOOP, "repair its weights")
    layer = module_path(node) or "the model itself"
    what = f"{batch}: the inputs are finite, and {node.name} in {layer} is the first to give {kind}"
    return CalibrationError(what, source_of(node), "check that layer and the magnitude of the data")


def total(batches: object, limit: int | None) -> int | None:
    """How many batches there will be, where that is known."""
    if not isinstance(batches, Sized):
        return limit
    try:
        count = len(batches)
    except TypeError:  # a DataLoader over an iterable data set has __len__ and refuses it
        return limit
    return count if limit is None else min(count, limit)
