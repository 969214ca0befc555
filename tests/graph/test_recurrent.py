"""Recurrent layers: the operation beside PyTorch's own layers, which of them are taken apart, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph import build as b
from sashiko.graph.aten.recurrent import RECURRENCE, Layers
from sashiko.graph.exporting import export
from sashiko.graph.recurrence import CELLS
from sashiko.graph.types import bf16, f32
from tests.graph.cells import LAYERS, layer, leaves


@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}], ids=str)
def test_layers_give_what_pytorch_gives(cell: str, options: dict[str, Any]) -> None:
    model, x = layer(cell, **options), torch.randn(4, 3, 6)
    batch, states = x.shape[0 if options.get("batch_first") else 1], 4 if options.get("bidirectional") else 1
    hidden = tuple(torch.randn(states, batch, 5) for _ in range(CELLS[cell].states))
    with torch.no_grad():
        for given in ((), (hidden if cell == "lstm" else hidden[0],)):
            expected = model(x, *given)
            with Layers():
                found = model(x, *given)
            assert [t.shape for t in leaves(found)] == [t.shape for t in leaves(expected)]
            for got, want in zip(leaves(found), leaves(expected), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def recurrences(model: nn.Module, *args: torch.Tensor) -> int:
    return sum(node.target is RECURRENCE for node in export(model, args).graph.nodes)


def test_steps_are_not_written_out() -> None:
    assert recurrences(layer("gru", num_layers=2, bidirectional=True), torch.randn(9, 3, 6)) == 4
    assert len(export(layer("lstm"), (torch.randn(50, 3, 6),)).graph.nodes) < 40


@pytest.mark.parametrize("change", ["one step", "projection", "double"])
def test_what_stays_as_pytorch_decomposes_it(change: str) -> None:
    model = layer("lstm", proj_size=3) if change == "projection" else layer("lstm")
    x = torch.randn(1 if change == "one step" else 4, 2, 6)
    assert recurrences(model.double(), x.double()) == 0 if change == "double" else recurrences(model, x) == 0


def test_gradients_and_packed_sequences_are_left_to_pytorch() -> None:
    model, x = layer("lstm"), torch.randn(4, 2, 6)
    packed = pack_padded_sequence(x, torch.tensor([4, 2]))
    with Layers():
        out = model(x)[0]
        out.sum().backward()
        with torch.no_grad():
            found = model(packed)[0].data
    assert model.weight_hh_l0.grad is not None
    assert torch.equal(found, model(packed)[0].data)


def test_operands_that_do_not_fit() -> None:
    x, state, w = (b.input_(n, f32, shape) for n, shape in enumerate(((7, 2, 20), (2, 2, 5), (20, 5))))
    assert b.recurrence("lstm", x, state, w).shape == (7, 2, 2, 5)
    with pytest.raises(InvalidGraph, match="lstm, gru"):
        b.recurrence("indrnn", x, state, w)
    with pytest.raises(InvalidGraph, match="G = 3, S = 1 of gru"):
        b.recurrence("gru", x, state, w)
    with pytest.raises(InvalidGraph, match="of f32"):
        b.recurrence("lstm", x, state, b.cast(w, bf16))
    with pytest.raises(InvalidGraph, match="do not fit"):
        b.recurrence("lstm", x, state, w, b.input_(3, f32, (5,)))
