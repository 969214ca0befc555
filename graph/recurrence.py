"""Recurrent layers: what one step of each kind of cell computes, for types and in PyTorch.

    recurrence(x[T, B, G * H], state[S, B, H], w[G * H, H], b[G * H]) -> states[T, S, B, H]

`x`: what a step adds to the product of the hidden state with `w`, the product of the layer's own input in general. `state`: before the
first step. The result holds the state after every step, the hidden state first; backwards in time with `reverse`, in the order of `x`.
Gates lie in PyTorch's order. `rounding` says what is left of the hidden state where it is multiplied; all else reads it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..diagnostics.errors import InvalidGraph
from .attrs import Attrs, RecurrenceAttrs
from .rows import ROUNDINGS
from .types import TensorType, f32

_Step = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Cell:
    """`gates` and `states` are the G and S of the layout above. step(x, product of the hidden state, state) -> state, in PyTorch."""

    gates: int
    states: int
    step: _Step


def _lstm(x: Tensor, product: Tensor, state: Tensor) -> Tensor:
    """Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000): gates i, f, g, o."""
    i, f, g, o = (x + product).chunk(4, -1)
    memory = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.stack([torch.sigmoid(o) * torch.tanh(memory), memory])


def _gru(x: Tensor, product: Tensor, state: Tensor) -> Tensor:
    """Cho et al. (2014), with the reset gate after the product, as PyTorch has it: gates r, z, n."""
    (r, z, n), (hr, hz, hn) = x.chunk(3, -1), product.chunk(3, -1)
    update = torch.sigmoid(z + hz)
    return ((1 - update) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + update * state[0])[None]


def _plain(function: Callable[[Tensor], Tensor]) -> _Step:
    return lambda x, product, state: function(x + product)[None]


CELLS: dict[str, Cell] = {
    "lstm": Cell(4, 2, _lstm), "gru": Cell(3, 1, _gru),
    "rnn_tanh": Cell(1, 1, _plain(torch.tanh)), "rnn_relu": Cell(1, 1, _plain(torch.relu)),
}


def states_type(types: tuple[TensorType, ...], attrs: Attrs) -> TensorType:
    """The type of the states. Raises InvalidGraph when the operands do not fit."""
    assert isinstance(attrs, RecurrenceAttrs)
    (x, state, w), told = (t.shape for t in types[:3]), ", ".join(map(str, types))
    if attrs.rounding not in ROUNDINGS:
        raise InvalidGraph(f"recurrence: rounding {attrs.rounding!r}; there are {', '.join(ROUNDINGS)}")
    if attrs.cell not in CELLS or any(t.dtype != f32 for t in types):
        raise InvalidGraph(f"recurrence: {attrs.cell} of {told}; there are {', '.join(CELLS)}, of f32")
    cell = CELLS[attrs.cell]
    fits = len(x) == len(state) == 3 and len(w) == 2 and state[0] == cell.states and x[1] == state[1]
    if not fits or w != (cell.gates * state[2], state[2]) or x[2] != w[0] or any(t.shape != w[:1] for t in types[3:]):
        raise InvalidGraph(f"recurrence: {told} do not fit the G = {cell.gates}, S = {cell.states} of {attrs.cell}")
    return TensorType(f32, (x[0], *state))


def reference(cell: str, x: Tensor, state: Tensor, w: Tensor, b: Tensor | None, reverse: bool, rounding: str = "none") -> Tensor:
    """The states, one step after the other."""
    states: list[Tensor] = []
    for now in x.flip(0) if reverse else x:
        state = CELLS[cell].step(now, torch.nn.functional.linear(ROUNDINGS[rounding](state[0]), w, b), state)
        states.append(state)
    if not states:
        return x.new_empty((0, *state.shape))
    return torch.stack(states[::-1] if reverse else states)
