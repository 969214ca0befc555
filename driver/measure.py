"""Times on this machine: of each product of a compiled model with what prepares it, and of whole models beside one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..graph.examples import Held, put_back
from .model import CompiledModel

_TURN_SECONDS = 0.02
_FEWEST, _MOST = 3, 15
_ALL_SECONDS = 3.0
"""A measurement has as many rounds as fit into this time, within these limits."""


class Timer(Protocol):
    """Where a search gets its times from."""

    def products(self, models: Mapping[str, CompiledModel]) -> Mapping[str, Mapping[str, float]]:
        """Seconds for each named product of each model. A model is given by the level that it computes every operation at."""
        ...

    def paired(self, models: Mapping[str, CompiledModel]) -> Mapping[str, float]:
        """Seconds of a call of each model."""
        ...


@dataclass(frozen=True)
class Example:
    """The arguments of a typical call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class HostTimer:
    """Measures on the machine it runs on, with the arguments of `example`."""

    example: Example

    def products(self, models: Mapping[str, CompiledModel]) -> Mapping[str, Mapping[str, float]]:
        """See `Timer`. The models take turns, and each time is the shortest, so that what else the machine does hardly counts."""
        calls = {name: partial(model.times, *self.example.args, **self.example.kwargs) for name, model in models.items()}
        taken = {name: [t.seconds for t in call(repeat=2)] for name, call in calls.items()}
        repeats = {name: max(1, min(20, int(_TURN_SECONDS / max(sum(taken[name]), 1e-6)))) for name in calls}
        for _ in range(_rounds(sum(repeats[name] * sum(taken[name]) for name in calls))):
            for name, call in calls.items():
                again = [t.seconds for t in call(repeat=repeats[name])]
                taken[name] = [min(pair) for pair in zip(taken[name], again, strict=True)]
        return {name: regions(_names(model), taken[name]) for name, model in models.items()}

    def paired(self, models: Mapping[str, CompiledModel]) -> Mapping[str, float]:
        """See `Timer`. The models take turns, so that what disturbs one disturbs all; the median of the turns. Each call finds arguments,
        buffers and parameters as they were."""
        args, kwargs = self.example.args, self.example.kwargs
        calls = {name: _Calls(partial(model, *args, **kwargs), _held(model.written(*args, **kwargs))) for name, model in models.items()}
        for call in calls.values():
            call.seconds(1)
        once = {name: call.seconds(1) for name, call in calls.items()}
        repeats = {name: max(1, min(1000, int(_TURN_SECONDS / max(once[name], 1e-6)))) for name in calls}
        turns: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_rounds(sum(repeats[name] * once[name] for name in calls))):
            for name, call in calls.items():
                turns[name].append(call.seconds(repeats[name]))
        return {name: statistics.median(taken) for name, taken in turns.items()}


def kernels(model: CompiledModel) -> dict[str, tuple[str, ...]]:
    """By which kernels each named product of a freshly compiled model is computed."""
    found: dict[str, tuple[str, ...]] = {}
    for product in model.built.products if model.built else ():
        if product is not None:
            found[product.name] = (*found.get(product.name, ()), product.kernel)
    return found


def _names(model: CompiledModel) -> list[str]:
    return [product.name if product else "" for product in (model.built.products if model.built else ())]


def regions(products: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    """The time of each named product together with everything unnamed that runs between it and the product before.

    What a precision costs beside the product, such as rounding its operand, is thus part of its time. products: the name or nothing for
    everything that `seconds` times, in order. Steps after the last product belong to it.
    """
    found: dict[str, float] = {}
    pending, last = 0.0, ""
    for name, taken in zip(products, seconds, strict=True):
        pending += taken
        if name:
            found[name] = found.get(name, 0.0) + pending
            pending, last = 0.0, name
    if last:
        found[last] += pending
    return found


def _rounds(seconds: float) -> int:
    """How many rounds of so many seconds to measure."""
    return max(_FEWEST, min(_MOST, int(_ALL_SECONDS / max(seconds, 1e-6))))


def _held(tensors: Sequence[torch.Tensor]) -> Held:
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


@dataclass(frozen=True)
class _Calls:
    """One call again and again. held: what it writes into."""

    call: partial[Any]
    held: Held

    def seconds(self, times: int) -> float:
        """The mean of so many calls. What they write is put back in between, which does not count."""
        taken = 0.0
        for _ in range(times):
            start = time.perf_counter()
            try:
                self.call()
            finally:
                taken += time.perf_counter() - start
                put_back(self.held)
        return taken / times
