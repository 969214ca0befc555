"""What `torch.compile(backend="sashiko")` keeps where modules get other tensors from call to call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sashiko.driver import versions
from sashiko.driver.versions import Version, Versions, Weights
from tests.driver.functions import compiled_by_the_backend
from tests.sweeps import swept

MANY = 20  # tensors in turn, more than a graph is compiled for


@pytest.fixture
def built(own_garbage: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """What is compiled in a test, which starts without what Dynamo remembers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield compiled_by_the_backend(monkeypatch)
    torch._dynamo.reset()


def alive(made: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(model() is not None for model in made)


class Decoder(nn.Module):
    """What belongs to a request is an attribute or a buffer; a small adapter is there, too."""

    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.down, self.up = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(16, 2))
        self.memory: torch.Tensor
        if buffer:
            self.register_buffer("memory", torch.randn(5, 16))
        else:
            self.memory = torch.randn(5, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.project(x) @ self.memory.t()).softmax(-1)
        return self.out(weights @ self.memory) + x @ self.down.t() @ self.up.t()


def remembered(model: Decoder) -> None:
    model.memory = torch.randn(5, 16)


def adapted(model: Decoder) -> None:
    model.down, model.up = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(16, 2))


@pytest.mark.parametrize(
    ("change", "buffer"), swept(list(product([remembered, adapted], [False, True])), [(remembered, True), (adapted, False)])
)
def test_what_is_exchanged_again_and_again_is_an_argument(
    built: list[weakref.ref[Any]], change: Callable[[Decoder], None], buffer: bool
) -> None:
    model = Decoder(buffer).eval()
    compiled = torch.compile(model, backend="sashiko", options={"strict": True})
    with torch.no_grad():
        for _ in range(MANY):
            change(model)
            for x in torch.randn(2, 3, 16):
                assert_close(compiled(x), model(x))
        assert len(built) <= MANY // 2 and alive(built) == 1
        model.out.weight = nn.Parameter(torch.randn(16, 16))  # is still a weight
        assert_close(compiled(x), model(x))
    assert alive(built) == 2


def test_parameters_that_are_arguments(built: list[weakref.ref[Any]]) -> None:
    model, x = Decoder().eval(), torch.randn(3, 16)
    call = torch.compile(lambda given, x: torch.func.functional_call(model, given, (x,)), backend="sashiko")
    with torch.no_grad():
        for _ in range(MANY):
            # Of the size that layers begin with: sums of larger ones round by more than results that they cancel in may differ.
            given = {name: nn.Parameter(torch.randn_like(value) / 4) for name, value in model.named_parameters()}
            assert_close(call(given, x), torch.func.functional_call(model, given, (x,)))
    assert len(built) <= MANY // 2 and alive(built) == 1


def test_four_adapters_in_turn_compile_once_each(built: list[weakref.ref[Any]]) -> None:
    model, x = Decoder().eval(), torch.randn(3, 16)
    compiled = torch.compile(model, backend="sashiko")
    adapters = [(nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(16, 2))) for _ in range(4)]
    with torch.no_grad():
        for turn in range(40):
            model.down, model.up = adapters[turn % 4]
            assert_close(compiled(x), model(x))
    assert len(built) == alive(built) == 4


def test_many_equal_layers_keep_their_weights(built: list[weakref.ref[Any]]) -> None:
    """Each is seen for the first time after others that were, which tells nothing; then one has a memory that is exchanged."""
    layers, x = [Decoder().eval() for _ in range(10)], torch.randn(3, 16)
    for layer in layers:
        layer.compile(backend="sashiko")
    with torch.no_grad():
        for turn in range(12):
            if turn > 1:
                remembered(layers[0])
            for layer in layers:
                assert_close(layer(x), layer.forward(x))
            assert turn > 1 or len(built) == 10
    assert alive(built) == 10


def version(known: Versions, *weights: torch.Tensor) -> Version:
    return Version(weights, None, known.exchanged(weights))


def test_where_most_is_other_it_is_another_module() -> None:
    table, large, small, other = torch.zeros(4), torch.zeros(10), torch.zeros(2), torch.zeros(10)
    known = Versions((0, 2, 3), {0, 2})
    known.add(version(known, table, large, small))
    assert known.exchanged((table, large, torch.zeros(2))) == (0, 0, 1)
    assert known.exchanged((torch.zeros(4), large, small)) == (1, 0, 0)
    assert known.exchanged((table, other, torch.zeros(2))) == (0, 0, 0), "the table is shared by equal layers"
    assert Versions((3,), set()).exchanged((small,)) == (0,)


def test_sets_of_weights_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_MOST", 5)
    known, made = Versions((0, 1), {0}), list[Weights]()
    while known.settled((0, 0)) is known:
        made.append((torch.zeros(1), torch.zeros(1)))
        known.add(version(known, *made[-1]))
    assert len(made) == 5 and known.settled((0, 0)).positions == ()
    assert all(known.of(weights) is not None for weights in made)
