"""Buffers that forward binds to other tensors, in any module: as a model of its own has them after each call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import sashiko
from sashiko.diagnostics.errors import Unsupported

X = torch.arange(12.0).view(4, 3) / 10


class Inner(nn.Module):
    """A child in which something happens to buffers; `mask` has no tensor, and comes before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None
        self.register_buffer("mask", None)
        self.state: Tensor
        self.other: Tensor
        self.register_buffer("state", torch.zeros(4, 3))
        self.register_buffer("other", torch.ones(4, 3), persistent=False)


class Mean(Inner):
    def forward(self, x: Tensor) -> Any:
        self.state = 0.9 * self.state + 0.1 * x
        return self.state


class Before(Inner):
    """What is returned is the buffer as it was, or a view of that."""

    def forward(self, x: Tensor) -> Any:
        old = self.state
        self.state = x + 1
        return old, {"row": old[0]}, self.state * old


class Swapped(Inner):
    def forward(self, x: Tensor) -> Any:
        self.state, self.other = self.other, self.state
        self.other.add_(x)
        return self.state - self.other


class Rolled(Inner):
    def forward(self, x: Tensor) -> Any:
        self.state = torch.cat([self.state[1:], x[:1]])
        self.state[0] = 7
        return self.state


class Argument(Inner):
    def forward(self, x: Tensor) -> Any:
        found = self.state + x
        self.state = x
        return found


class Table(Inner):
    """Made by the first call, as `longer` is: of sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.longer: Tensor
        self.late: Tensor
        self.register_buffer("longer", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        if self.mask is None:
            self.mask = x.new_zeros(x.shape)
            self.mask[:, 1:] = torch.arange(x.shape[0])[:, None]
        if len(self.longer) < len(x):
            self.longer = torch.arange(1.0, 1 + len(x))
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(3), persistent=False)
        self.state = self.state + x
        return (self.state + self.mask + self.late) * self.longer[:, None]


class Unread(Inner):
    """Stored in each call and used by none."""

    def forward(self, x: Tensor) -> Any:
        self.mask = x.softmax(1)
        return self.mask @ x.t()


class Itself(Inner):
    """Calls itself."""

    def forward(self, x: Tensor, times: int = 2) -> Any:
        self.state = self.state + x
        return self(x * 2, times - 1) if times else self.state


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(3, 3), inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.linear(x))


KEPT = (Mean, Before, Swapped, Rolled, Argument, Table, Unread, Itself)


def inside(kind: type[Inner], nested: bool) -> nn.Module:
    return (Outer(kind()) if nested else kind()).eval()


def held(model: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [(name, tensor) for module in model.modules() for name, tensor in module._buffers.items()]


@pytest.mark.parametrize("nested", [False, True], ids=["the model", "a child"])
@pytest.mark.parametrize("kind", KEPT)
@torch.no_grad()
def test_they_are_kept(kind: type[Inner], nested: bool) -> None:
    model = inside(kind, nested)
    twin, before = copy.deepcopy(model), held(model)
    compiled = sashiko.compile(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    results, expected = [], []
    for call in range(3):
        x = X * (1 + call)
        results.append(compiled(x))
        expected.append(copy.deepcopy(twin(x)))
        assert torch.equal(x, X * (1 + call)), "an argument is nobody's buffer"
    assert_close(results, expected)
    kept = [[dict(m.named_buffers())[f"inner.{name}" if nested else name] for name in ("state", "other")] for m in (model, twin)]
    assert_close(*kept)
    after = held(model)
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(mine is own for (_, mine), (_, own) in zip(after, before, strict=True)), "the same tensors, written into"


@pytest.mark.parametrize("kind", (Mean, Argument, Table))
@torch.no_grad()
def test_and_by_a_quantized_model(kind: type[Inner]) -> None:
    model = inside(kind, nested=True)
    twin = copy.deepcopy(model)
    small = sashiko.quantize(model, [X], preset="int8-weight")
    for call in range(3):
        x = X * (1 + call)
        assert_close(small(x), twin(x), rtol=2e-2, atol=5e-2)
        assert torch.equal(x, X * (1 + call))


class First(Inner):
    def forward(self, x: Tensor) -> Any:
        self.mask = x if self.mask is None else 0.9 * self.mask + 0.1 * x
        return self.mask


class FirstRow(Inner):
    def forward(self, x: Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.zeros(4, 3)
            self.mask[0] = x[0]
        return x + self.mask


class Grown(Inner):
    def forward(self, x: Tensor) -> Any:
        self.state = torch.cat([self.state, x])
        return self.state


class Typed(Inner):
    def forward(self, x: Tensor) -> Any:
        self.state = self.state.double() + x
        return self.state


class Gone(Inner):
    def forward(self, x: Tensor) -> Any:
        found = self.state + x
        self.state = None  # type: ignore[assignment]
        return found


class Shared(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.state = self.other

    def forward(self, x: Tensor) -> Any:
        self.state = self.state + x
        return self.state + self.other


REFUSED = (
    (First, "makes the buffer inner.mask from its arguments(.|\n)*call the model once before"),
    (FirstRow, "makes the buffer inner.mask from its arguments"),
    (Grown, r"makes a tensor of float32 \[8, 3\] of the buffer inner.state, a tensor of float32 \[4, 3\](.|\n)*as large as it gets"),
    (Typed, r"a tensor of float64 \[4, 3\] of the buffer inner.state(.|\n)*float64 to begin with"),
    (Gone, r"binds the buffer inner.state to None(.|\n)*self.state.copy_"),
    (Shared, "binds the buffer inner.state to another tensor, while another buffer or parameter shares its memory"),
)


@pytest.mark.parametrize(("kind", "why"), REFUSED)
def test_what_cannot_be_kept_is_refused(kind: type[Inner], why: str) -> None:
    model = inside(kind, nested=True)
    before = held(model)
    with pytest.raises(Unsupported, match=why):
        sashiko.compile(model, (X,))
    assert held(model) == before and not model._forward_hooks and not model._forward_pre_hooks


@torch.no_grad()
def test_what_the_first_call_makes_is_kept_after_that() -> None:
    model = inside(First, nested=True)
    model(X)
    twin = copy.deepcopy(model)
    compiled = sashiko.compile(model, (X,))
    for call in range(2):
        assert_close(compiled(X * call), twin(X * call))
    assert_close(dict(model.state_dict()), dict(twin.state_dict()))


def test_a_child_of_a_graph_is_refused_or_right() -> None:
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Inner) or super().is_leaf_module(m, module_qualified_name)

    def graph(kind: type[Inner]) -> torch.fx.GraphModule:
        model = Outer(kind())
        return torch.fx.GraphModule(model, Leaves().trace(model)).eval()

    with pytest.raises(Unsupported, match=r"binds the buffer state to another tensor(.|\n)*self.state.copy_"):
        sashiko.compile(graph(Mean), (X,))
    model = graph(Unread)
    assert_close(sashiko.compile(model, (X,))(X), model(X))
