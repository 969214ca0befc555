"""Recurrent layers: what one step of each kind of cell computes, for types and in PyTorch.

    recurrence(x[T, B, G * H], state[S, B, H], w[G * H, H], b[G * H]) -> states[T, S, B, H]
    recurrence(x[T, B, G * H], state[1, B, P + H], w[G * H, P], projection[P, H], b[G * H]) -> states[T, 1, B, P + H]

`x`: what a step adds to the product of the hidden state with `w`, the product of the layer's own input in general. `state`: before the
first step. The result holds the state after every step, the hidden state first; backwards in time with `reverse`, in the order of `x`.
Gates lie in PyTorch's order. `rounding` says what is left of the hidden state where it is multiplied; all else reads it as it is. The
second layout is that of a cell whose hidden state is a product with `projection`, which lies in one row with what the cell remembers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..diagnostics.errors import InvalidGraph
from .attrs import Attrs, RecurrenceAttrs
from .dims import Shape
from .rows import ROUNDINGS
from .types import TensorType, f32

_Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Cell:
    """`gates` and `states` are the G and S of the layout above. step(x, product of the hidden state, state) -> state, in PyTorch; of a
    `projected` cell, the projection comes last."""

    gates: int
    states: int
    step: _Step
    projected: bool = False


def _remembering(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000): gates i, f, g, o."""
    i, f, g, o = gates.chunk(4, -1)
    memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(memory), memory


def _lstm(x: Tensor, product: Tensor, state: Tensor) -> Tensor:
    return torch.stack(_remembering(x + product, state[1]))


def _lstm_projected(x: Tensor, product: Tensor, state: Tensor, projection: Tensor) -> Tensor:
    """Sak et al. (2014)."""
    hidden, memory = _remembering(x + product, state[0, :, len(projection) :])
    return torch.cat([torch.nn.functional.linear(hidden, projection), memory], 1)[None]


def _gru(x: Tensor, product: Tensor, state: Tensor) -> Tensor:
    """Cho et al. (2014), with the reset gate after the product, as PyTorch has it: gates r, z, n."""
    (r, z, n), (hr, hz, hn) = x.chunk(3, -1), product.chunk(3, -1)
    update = torch.sigmoid(z + hz)
    return ((1 - update) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + update * state[0])[None]


def _plain(function: Callable[[Tensor], Tensor]) -> _Step:
    return lambda x, product, state: function(x + product)[None]


CELLS: dict[str, Cell] = {
    "lstm": Cell(4, 2, _lstm), "lstm_projected": Cell(4, 1, _lstm_projected, projected=True), "gru": Cell(3, 1, _gru),
    "rnn_tanh": Cell(1, 1, _plain(torch.tanh)), "rnn_relu": Cell(1, 1, _plain(torch.relu)),
}


def states_type(types: tuple[TensorType, ...], attrs: Attrs) -> TensorType:
    """The type of the states. Raises InvalidGraph when the operands do not fit."""
    assert isinstance(attrs, RecurrenceAttrs)
    told = ", ".join(map(str, types))
    if attrs.rounding not in ROUNDINGS:
        raise InvalidGraph(f"recurrence: rounding {attrs.rounding!r}; there are {', '.join(ROUNDINGS)}")
    if attrs.cell not in CELLS or any(t.dtype != f32 for t in types):
        raise InvalidGraph(f"recurrence: {attrs.cell} of {told}; there are {', '.join(CELLS)}, of f32")
    cell = CELLS[attrs.cell]
    if not _fit(cell, *(t.shape for t in types)):
        raise InvalidGraph(f"recurrence: {told} do not fit the G = {cell.gates}, S = {cell.states} of {attrs.cell}")
    return TensorType(f32, (types[0].shape[0], *types[1].shape))


def _fit(cell: Cell, x: Shape, state: Shape, w: Shape, *others: Shape) -> bool:
    """Whether shapes are those of the layout of a cell."""
    projections, biases = (others[:1], others[1:]) if cell.projected else ((), others)
    if (len(x), len(state), len(w), *map(len, projections)) != (3, 3, 2, *[2] * cell.projected):
        return False
    hidden, size = projections[0] if projections else (state[2], state[2])
    fits = state[0] == cell.states and state[2] == (hidden + size if projections else size) and w == (cell.gates * size, hidden)
    return fits and x[1:] == (state[1], w[0]) and all(bias == w[:1] for bias in biases)


def reference(
    cell: str, x: Tensor, state: Tensor, w: Tensor, b: Tensor | None, reverse: bool, rounding: str = "none",
    projection: Tensor | None = None,
) -> Tensor:
    """The states, one step after the other."""
    states: list[Tensor] = []
    last = () if projection is None else (projection,)
    for now in x.flip(0) if reverse else x:
        hidden = ROUNDINGS[rounding](state[0, :, : w.shape[1]])
        state = CELLS[cell].step(now, torch.nn.functional.linear(hidden, w, b), state, *last)
        states.append(state)
    if not states:
        return x.new_empty((0, *state.shape))
    return torch.stack(states[::-1] if reverse else states)
