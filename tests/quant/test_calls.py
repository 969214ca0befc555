"""Models are called as the batches were given, so that hooks and wrappers of `forward` see what they see in any other call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.quant import quantize, quantize_
from tests.quant.models import mlp


def positional(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As decorators that time or count calls are often written: the signature remains that of `forward`."""

    @functools.wraps(forward)
    def inner(self: nn.Module, *args: Any) -> Any:
        return forward(self, *args)

    return inner


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> Any:
        return self.body(x) if shift is None else self.body(x) + shift


class Wrapped(Plain):
    forward = positional(Plain.forward)


def near(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((result - expected).norm() / expected.norm() < 0.03)


@torch.no_grad()
@pytest.mark.parametrize("by_name", [False, True])
def test_hooks_of_the_model_itself(by_name: bool) -> None:
    model, x = Plain().eval(), torch.randn(16, 8)
    if by_name:
        model.register_forward_pre_hook(lambda _, args, named: (args, {"x": named["x"] * 10}), with_kwargs=True)
    else:
        model.register_forward_pre_hook(lambda _, args: (args[0] * 10,))
    model.register_forward_hook(lambda _, args, result: result * (len(args) + 2))
    batch: Any = {"x": x} if by_name else x
    small = quantize(model, [batch])
    assert near(small(x), model(**batch) if by_name else model(x)) and torch.equal(small(x), small(x=x))


@torch.no_grad()
def test_a_wrapped_forward() -> None:
    model, x, shift = Wrapped().eval(), torch.randn(16, 8), torch.randn(16, 4)
    small = quantize(model, [x])
    assert near(small(x), model(x)) and torch.equal(small(x), small(x=x, shift=None))
    both = quantize(model, [(x, shift)])
    assert near(both(x, shift), model(x, shift)) and torch.equal(both(x, shift), both(shift=shift, x=x))
    expected = model(x)
    assert quantize_(model, "int4-weight", [x]).notes == () and (model(x) - expected).norm() / expected.norm() < 0.3


@torch.no_grad()
def test_an_exported_module_called_by_name_in_another_order() -> None:
    x, shift = torch.randn(16, 8), torch.randn(16, 4)
    model = torch.export.export(Plain().eval(), (), {"x": x, "shift": shift}).module()
    small = quantize(model, [{"shift": shift, "x": x}])
    assert near(small(x, shift), model(x=x, shift=shift))


@torch.no_grad()
def test_a_size_of_one_and_what_is_made_of_it() -> None:
    class Behind(nn.Module):
        """A position behind the others, and something to add to each."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.linear(x[:, -1:])], 1) + more

    def example(length: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(2, length, 8), torch.randn(2, length + 1, 8)

    model = Behind().eval()
    small = quantize(model, [example(5)], preset="int8-weight", progress=False)
    step = sashiko.compile(small, example(5), dynamic_shapes=({1: Dim.AUTO}, {1: Dim.AUTO}))
    given = example(1)
    for call in (small, step):
        torch.testing.assert_close(call(*given), model(*given), rtol=0, atol=0.1)


@torch.no_grad()
def test_another_type_of_integers_that_are_cast() -> None:
    class Masked(Plain):
        def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> Any:
            assert shift is not None
            return self.body(x) * shift.to(x.dtype)

    model, x, mask = Masked().eval(), torch.randn(16, 8), torch.ones(16, 1, dtype=torch.int64)
    small = quantize(model, [(x, mask)])
    assert near(small(x, mask), model(x, mask)) and torch.equal(small(x, mask.int()), small(x, mask))


@torch.no_grad()
def test_a_part_whose_attributes_the_model_reads(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = Plain(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.part(x)) * self.part.body[0].in_features

    model, x = Scaled().eval(), torch.randn(16, 8)
    small = quantize(model.part, [x])
    small.save(tmp_path / "small.sashiko")
    expected = model.head(small(x)) * 8
    for forward in (sashiko.load(tmp_path / "small.sashiko").forward, sashiko.compile(small, (x,)), small.forward):
        model.part.forward = forward  # type: ignore[method-assign]
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(torch.compile(model, backend="sashiko")(x), expected)
