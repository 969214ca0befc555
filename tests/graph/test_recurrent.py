"""Recurrent layers: the operation beside PyTorch's own layers, which of them are taken apart, and what it refuses."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph import build as b
from sashiko.graph.aten.recurrent import RECURRENCE, Layers
from sashiko.graph.exporting import export
from sashiko.graph.recurrence import CELLS, reference
from sashiko.graph.types import bf16, f32
from tests.graph.cells import LAYERS, layer, leaves

OPTIONS: list[dict[str, Any]] = [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("cell", "options"), [*product(LAYERS, OPTIONS), *(("lstm", {**options, "proj_size": 3}) for options in OPTIONS)], ids=str
)
def test_layers_give_what_pytorch_gives(cell: str, options: dict[str, Any]) -> None:
    model, x = layer(cell, **options), torch.randn(4, 3, 6)
    batch, states = x.shape[0 if options.get("batch_first") else 1], 4 if options.get("bidirectional") else 1
    hidden = tuple(torch.randn(states, batch, size) for size in (options.get("proj_size", 5), 5)[: CELLS[cell].states])
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
    assert recurrences(layer("lstm", num_layers=2, bidirectional=True, proj_size=3), torch.randn(9, 3, 6)) == 4
    assert len(export(layer("lstm"), (torch.randn(50, 3, 6),)).graph.nodes) < 40


@pytest.mark.parametrize("change", ["one step", "double"])
def test_what_stays_as_pytorch_decomposes_it(change: str) -> None:
    model, x = layer("lstm"), torch.randn(1 if change == "one step" else 4, 2, 6)
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


@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("rounding", ["none", "rows"])
def test_gradients_pass(cell: str, rounding: str) -> None:
    """As through the steps written out, where a rounding is a constant added to what is rounded."""
    model, x = layer(cell), torch.randn(4, 3, 20 if cell == "lstm" else 15 if cell == "gru" else 5, requires_grad=True)
    state = torch.randn(CELLS[cell].states, 3, 5, requires_grad=True)
    given = (cell, x, state, model.weight_hh_l0, model.bias_hh_l0, True, rounding)
    weight = torch.randn(4, *state.shape)
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.autograd.grad(RECURRENCE(*given), tensors, weight)
    expected = torch.autograd.grad(reference(*given), tensors, weight)
    assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_pass_through_projections(bias: bool) -> None:
    model, x = layer("lstm", proj_size=3, bias=bias), torch.randn(4, 2, 20, requires_grad=True)
    state = torch.randn(1, 2, 8, requires_grad=True)
    given = ("lstm_projected", x, state, model.weight_hh_l0, model.bias_hh_l0 if bias else None, True, "rows", model.weight_hr_l0)
    weight, tensors = torch.randn(4, 1, 2, 8), [t for t in given if isinstance(t, torch.Tensor)]
    found = torch.autograd.grad(RECURRENCE(*given), tensors, weight)
    expected = torch.autograd.grad(reference(*given), tensors, weight)
    assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(found, expected, strict=True))


def test_gradients_are_those_of_pytorch() -> None:
    model, x = layer("lstm", bias=False), torch.randn(4, 3, 6)
    model(x)[0].square().sum().backward()
    given = (model.weight_ih_l0 @ x.transpose(1, 2)).transpose(1, 2)
    w = model.weight_hh_l0.detach().clone().requires_grad_()
    RECURRENCE("lstm", given, torch.zeros(2, 3, 5), w, None, False)[:, 0].square().sum().backward()
    torch.testing.assert_close(w.grad, model.weight_hh_l0.grad, rtol=1e-4, atol=1e-6)


def test_operands_that_do_not_fit() -> None:
    x, state, w = (b.input_(n, f32, shape) for n, shape in enumerate(((7, 2, 20), (2, 2, 5), (20, 5))))
    assert b.recurrence("lstm", x, state, w).shape == (7, 2, 2, 5)
    with pytest.raises(InvalidGraph, match="lstm, lstm_projected, gru"):
        b.recurrence("indrnn", x, state, w)
    with pytest.raises(InvalidGraph, match="G = 3, S = 1 of gru"):
        b.recurrence("gru", x, state, w)
    with pytest.raises(InvalidGraph, match="'columns'; there are none, rows"):
        b.recurrence("lstm", x, state, w, rounding="columns")
    with pytest.raises(InvalidGraph, match="of f32"):
        b.recurrence("lstm", x, state, b.cast(w, bf16))
    with pytest.raises(InvalidGraph, match="do not fit"):
        b.recurrence("lstm", x, state, w, b.input_(3, f32, (5,)))
    row, narrow, projection = (b.input_(n, f32, shape) for n, shape in enumerate(((1, 2, 8), (20, 3), (3, 5)), 3))
    assert b.recurrence("lstm_projected", x, row, narrow, projection=projection).shape == (7, 1, 2, 8)
    for others, last in (((x, row, narrow), None), ((x, state, narrow), projection), ((x, row, w), projection), ((x, row, narrow), narrow)):
        with pytest.raises(InvalidGraph, match="S = 1 of lstm_projected"):
            b.recurrence("lstm_projected", *others, projection=last)
