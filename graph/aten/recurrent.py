"""Recurrent layers of PyTorch: each layer and direction a product over all times, and one operation that walks through time.

torch.export would write out every step, which ties a program to one length and makes it long. While it traces, `Layers` puts
`sashiko::recurrence` in the place of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`; in programs that others have
traced, `decompositions` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import build as b
from ..ir import Value
from ..recurrence import CELLS, reference
from .call import Call, Row

_SCHEMA = (
    '(str cell, Tensor x, Tensor state, Tensor w, Tensor? b, bool reverse, str rounding="none", Tensor? projection=None) -> Tensor'
)
_NAME = "sashiko::recurrence"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _shape(cell: str, x: Tensor, state: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], *state.shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    cell, *tensors, reverse, rounding, projection = inputs
    ctx.save_for_backward(*tensors, projection)
    ctx.options = cell, reverse, rounding


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Walks through time once more: what a step leaves for its gradients is not kept between the calls."""
    cell, reverse, rounding = ctx.options
    with torch.enable_grad():
        given: list[Any] = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        x, state, w, b, projection = given
        states = reference(cell, x, state, w, b, reverse, rounding, projection)
    found = iter(torch.autograd.grad(states, [t for t in given if t is not None], gradient))
    *before, last = (None if t is None else next(found) for t in given)
    return None, *before, None, None, last


torch.library.define(_NAME, _SCHEMA)
torch.library.impl(_NAME, "CPU", reference)
torch.library.register_fake(_NAME, _shape)
torch.library.register_autograd(_NAME, _gradients, setup_context=_keep)
RECURRENCE: torch._ops.OpOverload = torch.ops.sashiko.recurrence.default


class Layers(TorchFunctionMode):
    """Takes recurrent layers apart where it can; the others are what PyTorch makes of them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        cell = getattr(func, "__name__", "")
        if cell in CELLS and func is getattr(torch, cell, None) and not kwargs and _separable(*args):
            return _layers(cell, *args)
        return func(*args, **(kwargs or {}))


def _separable(x: Tensor, states: Any, weights: Any, biases: Any, *rest: Any) -> bool:
    """Sequences of one length, without gradients and dropout between the layers; in f32 of more than one step, unless that depends on
    the call. (PyTorch takes an LSTM of narrow floats to oneDNN, which lacks it on many machines.)"""
    if not isinstance(weights, (list, tuple)) or len(rest) != 5:  # packed sequences have their lengths second
        return False
    layers, dropout, training, two_ways, batch_first = rest
    directions, own = (1 + two_ways) * layers, 4 if biases else 2
    if x.dim() != 3 or x.dtype not in _FLOATS or len(weights) not in (own * directions, (own + 1) * directions) or (training and dropout):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights)):
        return False
    times: int | torch.SymInt = x.shape[1 if batch_first else 0]
    return isinstance(times, torch.SymInt) or times > 1 or x.dtype != torch.float32


def _layers(
    cell: str, x: Tensor, states: Any, weights: Sequence[Tensor], biases: bool, layers: int, dropout: float, training: bool,
    two_ways: bool, batch_first: bool,
) -> tuple[Tensor, ...]:
    """What PyTorch's function of these arguments returns. A state of narrow floats is one of f32 between the steps."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)

    x = x.transpose(0, 1) if batch_first else x
    first = states if isinstance(states, (list, tuple)) else (states,)
    ways = 1 + two_ways
    each = len(weights) // (layers * ways)
    last: list[Sequence[Tensor]] = []
    for layer in range(layers):
        found: list[Tensor] = []
        for way in range(ways):
            at = layer * ways + way
            w_in, w, *others = weights[at * each : (at + 1) * each]
            projection = others.pop() if each % 2 else None
            b_in, b_state = others or (None, None)
            given = wide(torch.nn.functional.linear(x, w_in, b_in))
            before, bias = [wide(s[at]) for s in first], None if b_state is None else wide(b_state)
            if projection is not None:
                row = torch.cat(before, 1)[None]
                made = RECURRENCE(f"{cell}_projected", given, row, wide(w), bias, bool(way), "none", wide(projection))
            else:
                made = RECURRENCE(cell, given, torch.stack(before), wide(w), bias, bool(way))
            made = made if x.dtype == torch.float32 else made.to(x.dtype)
            parts = made.unbind(1) if projection is None else made[:, 0].split(projection.shape, 2)
            last.append([part[0 if way else -1] for part in parts])
            found.append(parts[0])
        x = torch.cat(found, 2) if two_ways else found[0]
    return (x.transpose(0, 1) if batch_first else x, *map(torch.stack, zip(*last, strict=True)))


def decompositions(others: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The decompositions of recurrent layers; `others` has those of the layers that cannot be taken apart."""

    def decomposition(cell: str, other: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: _layers(cell, *args) if _separable(*args) else other(*args)

    operations = {getattr(torch.ops.aten, cell).input: cell for cell, kind in CELLS.items() if not kind.projected}
    return {op: decomposition(cell, others[op]) for op, cell in operations.items() if op in others}


def recurrence(
    c: Call, cell: str, x: Value, state: Value, w: Value, bias: Value | None, reverse: bool, rounding: str = "none",
    projection: Value | None = None,
) -> Value:
    return b.recurrence(cell, x, state, w, bias, reverse=reverse, rounding=rounding, projection=projection)


ROWS: dict[Any, Row] = {RECURRENCE: recurrence}
