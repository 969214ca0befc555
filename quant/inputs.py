"""GPTQ without a program: the inputs of linear layers, seen by hooks while the model itself runs, for a part of the layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..diagnostics.errors import CalibrationError
from ..graph.examples import first_line
from ..graph.refusals import raised_at
from .gptq import GramObserver, Inputs, compensated
from .masking import ANY, DECODER, MaskArgument, fitted
from .observers import NonFinite
from .program import Call, named
from .scheme import WeightScheme
from .weights import QuantizedWeight

_LOOP = "calibration data"


@dataclass(frozen=True)
class Layer:
    """A linear layer to quantize, or the module of experts. weight: float [N, K]; of experts [E, N, K]."""

    module: nn.Module
    weight: torch.Tensor
    scheme: WeightScheme


class _NotFinite(Exception):
    """Carries the name of the layer out of the model."""


def compensated_weights(
    model: nn.Module, layers: Mapping[str, Layer], calls: Sequence[Call], masks: Sequence[MaskArgument], memory: int
) -> dict[str, QuantizedWeight]:
    """Integers by GPTQ for each layer that a call reaches, by name.

    The model runs over all calls once, and then once for each part of the layers whose sums, float64 [K, K], fit `memory` bytes
    together. Layers that get one and the same tensor, as query, key and value do, share one sum.
    """
    found: dict[str, QuantizedWeight] = {}
    groups = _groups(model, layers, calls)
    for part in _parts(groups, layers, memory):
        grams = {group[0]: GramObserver() for group in part}
        for call in calls:
            own = call.own()  # a model may write into its arguments
            given = named(model, own)
            flow = _Flow(value for name, value in given.items() if name.startswith(DECODER))
            see = _observing(grams, given, call.name, masks, flow)
            _run(model, {name: layers[name].module for name in grams}, own, see, flow if masks and flow.begins else None)
        for group in part:
            inputs = Inputs.of(grams.pop(group[0]).gram)
            for name in group:
                found[name] = compensated(layers[name].weight, inputs, layers[name].scheme)
    return found


def _groups(model: nn.Module, layers: Mapping[str, Layer], calls: Sequence[Call]) -> list[list[str]]:
    """The layers that calls reach; together those that, one after the other, got one and the same tensor, not written to in between,
    whenever they were reached."""
    modules = {name: layer.module for name, layer in layers.items()}
    reached: dict[str, list[int]] = {}
    last: torch.Tensor | None = None
    version: int | None = None
    inputs = 0

    def see(name: str, x: torch.Tensor) -> None:
        nonlocal last, version, inputs
        now = None if x.is_inference() else x._version  # without one, what was written in between cannot be told
        inputs += x is not last or now is None or now != version
        reached.setdefault(name, []).append(inputs)
        last, version = x, now

    for call in calls:
        _run(model, modules, call.own(), see)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, which in reached.items():
        groups.setdefault(tuple(which), []).append(name)
    return list(groups.values())


def _parts(groups: Sequence[list[str]], layers: Mapping[str, Layer], memory: int) -> Iterator[list[list[str]]]:
    """As many groups at once as fit, one at least."""
    part: list[list[str]] = []
    used = 0
    for group in groups:
        size = 8 * layers[group[0]].weight.shape[1] ** 2
        if part and used + size > memory:
            yield part
            part, used = [], 0
        part.append(group)
        used += size
    if part:
        yield part


class _Flow(TorchFunctionMode):
    """Knows what is computed from some tensors, while it is active. begins: there are any."""

    def __init__(self, sources: Iterable[Any]) -> None:
        super().__init__()
        self._computed = WeakTensorKeyDictionary()
        self._add(list(sources))
        self.begins = bool(self._computed)

    def __contains__(self, x: torch.Tensor) -> bool:
        return x in self._computed

    def _add(self, values: Any) -> None:
        self._computed.update((leaf, True) for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf in self for leaf in pytree.tree_leaves((args, kwargs))):
            self._add(args[0] if result is None else result)  # what returns nothing, as x[i] = y, writes
        return result


def _observing(
    grams: Mapping[str, GramObserver], given: Mapping[str, Any], batch: str, arguments: Sequence[MaskArgument], flow: _Flow
) -> Callable[[str, torch.Tensor], None]:
    """Sizes do not tell the positions of a decoder from those of its encoder: what is computed from the decoder's arguments has its own."""
    read = [(a.name.startswith(DECODER), a.read(given[a.name], batch)) for a in arguments if a.name in given]

    def see(name: str, x: torch.Tensor) -> None:
        masks = (mask for decoder, mask in read if mask is not None and decoder == (x in flow))
        laid = (fitted(mask, (ANY, ANY), x.shape, [{ANY}] * x.dim()) for mask in masks)
        grams[name].observe(x, next((mask for mask in laid if mask is not None), None))

    return see


def _run(
    model: nn.Module, modules: Mapping[str, nn.Module], call: Call, see: Callable[[str, torch.Tensor], None],
    flow: _Flow | None = None,
) -> None:
    """Calls the model and shows what goes into the modules, by their names. It may write into the arguments."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                see(name, args[0] if args else next(iter(kwargs.values())))
            except NonFinite:
                raise _NotFinite(name) from None

        return seen

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        with torch.no_grad(), flow or nullcontext():
            model(*call.args, **call.kwargs)
    except _NotFinite as found:
        what = f"{call.name}: the input of {found} holds NaN or infinity"
        raise CalibrationError(what, _LOOP, "remove or repair that batch, or exclude the layer") from None
    except Exception as error:
        where = raised_at(error) or _LOOP
        raise CalibrationError(f"the model failed on {call.name}: {first_line(error)}", where) from error
    finally:
        for handle in handles:
            handle.remove()
