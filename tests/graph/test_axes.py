"""Axes that dynamic_shapes names and no tensor has, and what else is refused before anything is traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ShapesCollection
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply

B = Dim("b", max=16)
X = torch.randn(4, 8)


class Nested(nn.Module):
    def forward(self, x: torch.Tensor, d: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return x + d["a"][0]


@pytest.mark.parametrize(("shapes", "says"), [
    (({5: B},), r"dynamic_shapes\[0\] has axis 5, of a tensor with 2 dimensions"), (({-2: B},), "has axis -2"),
    (({-2: Dim.AUTO},), "has axis -2"), (({"0": B},), "has '0' for an axis"), (({(0,): B},), r"has \(0,\) for an axis"),
    (({0.0: B},), "has 0.0 for an axis"), (({True: B},), "has True for an axis"), ({"input": {2: B}}, r"\['input'\] has axis 2"),
    (3, "dynamic_shapes=3 is no tuple and no dict"),
])  # fmt: skip
def test_axes_that_are_none(shapes: Any, says: str) -> None:
    with pytest.raises(sashiko.InputError, match=says) as caught:
        sashiko.compile(nn.Linear(8, 4).eval(), (X,), dynamic_shapes=shapes)
    assert caught.value.where == "dynamic_shapes" and caught.value.hint


def test_axes_of_nested_arguments() -> None:
    model, example = Nested().eval(), (X, {"a": [X]})
    with pytest.raises(sashiko.InputError, match=r"dynamic_shapes\[1\]\['a'\]\[0\] has axis 2"):
        sashiko.compile(model, example, dynamic_shapes=({0: B}, {"a": [{2: B}]}))
    fast, x = sashiko.compile(model, example, dynamic_shapes={"x": {0: B}, "d": {"a": [{0: B}]}}), torch.randn(3, 8)
    assert_close(fast(x, {"a": [x]}), 2 * x)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + named["a"] * named["b"]


@pytest.mark.parametrize("form", ["by name", "of torch.export", "of the tensors"])
def test_sizes_of_any_number_of_named_arguments(form: str) -> None:
    model, axes = Named().eval(), {0: B}
    first, second = ({"b": torch.randn(n, 8), "x": torch.randn(n, 8), "a": torch.randn(n, 8)} for n in (4, 5))
    of_tensors = ShapesCollection()
    for tensor in first.values():
        of_tensors[tensor] = axes
    each = {"x": axes, "a": axes, "b": axes}
    shapes = {"by name": each, "of torch.export": {"x": axes, "named": {"a": axes, "b": axes}}, "of the tensors": of_tensors}[form]
    assert_close(sashiko.compile(model, first, dynamic_shapes=shapes)(**second), model(**second))
    assert "forward" not in vars(model)
    with pytest.raises(sashiko.InputError, match=r"keys must be the arg names \['x', 'b', 'a'\]"):
        sashiko.compile(model, first, dynamic_shapes={"x": axes, "a": axes})


def test_calibration_frees_sizes_of_named_arguments() -> None:
    model = Named().eval()
    first, second = ({name: torch.randn(n, 8) for name in ("x", "a", "b")} for n in (4, 5))
    small = sashiko.quantize(model, [first], preset="int8-weight")
    assert_close(small(**second), model(**second), rtol=0.05, atol=0.05)


class Padded(nn.Module):
    """Takes one of two ways, by a size that depends on a number among its buffers: it is refused where that size is free."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Buffer(torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.pad(x, (0, (x.shape[1] + self.step) % 4))
        return y.cos() if y.shape[1] > 7 else y.sin()


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked by the caller"])
@pytest.mark.parametrize("attempt", [
    lambda x: sashiko.compile(Padded().eval(), (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},)),
    lambda x: sashiko.compile(nn.Linear(9, 4).eval(), (x,), dynamic_shapes=({1: B},)),
    lambda x: sashiko.compile(nn.Linear(9, 4).eval(), (x,), dynamic_shapes=({0: Dim.AUTO},)),
    lambda x: sashiko.quantize(nn.Sequential(nn.Linear(9, 9), Padded()).eval(), [x]),
    lambda x: sashiko.quantize_and_compile(nn.Sequential(nn.Linear(9, 9), Padded()).eval(), [x]),
])  # fmt: skip
def test_marks_of_tensors_stay_those_of_the_caller(attempt: Callable[[torch.Tensor], object], marked: bool) -> None:
    model, x = Padded().eval(), torch.randn(2, 9)
    if marked:
        torch._dynamo.mark_dynamic(x, 0)
    before = copy.deepcopy(vars(x))
    with suppress(sashiko.SashikoError):
        attempt(x)
    assert vars(x) == before
    if not marked:
        assert_close(sashiko.compile(model, (x,))(x), model(x))


@pytest.mark.parametrize("given", [3, [3], (None,)])
def test_rules_and_kernels(given: Any) -> None:
    for name in ("rules", "kernels"):
        options: dict[str, Any] = {name: given}
        with pytest.raises(sashiko.InputError, match=rf"{name} is .*\n(.|\n)*a tuple of"):
            sashiko.compile(nn.Linear(8, 4).eval(), (X,), **options)


@pytest.mark.parametrize(("layer", "name"), [
    (lambda: nn.LazyLinear(4), "weight"), (lambda: nn.LazyBatchNorm1d(affine=False), "running_mean"),
])  # fmt: skip
def test_lazy_modules(layer: Callable[[], nn.Module], name: str) -> None:
    model = nn.Sequential(layer()).eval()
    kind, attempts = type(model[0]), [
        lambda: sashiko.compile(model, (X,)), lambda: sashiko.quantize_(model, "int8-weight"), lambda: sashiko.quantize(model, [X]),
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(sashiko.InputError, match=rf"0\.{name} has no shape yet(.|\n)*call the model once first"):
            attempt()
    assert type(model[0]) is kind
    model(X)
    assert_close(sashiko.compile(model, (X,))(X), model(X))


@pytest.mark.parametrize("change", [
    lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(2, 2), lambda x: x.swapaxes_(0, 1).add_(1),
])  # fmt: skip
def test_arguments_that_get_another_shape(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def changed(x: torch.Tensor) -> torch.Tensor:
        change(x)
        return x + 1

    with pytest.raises(sashiko.Unsupported, match=r"the model changes the shape of .* in place(.|\n)*x\.t\(\) for x\.t_\(\)"):
        sashiko.compile(Apply(changed).eval(), (X.clone(),))


def test_tensors_of_the_model_may_get_another_shape() -> None:
    def changed(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.t_()
        return y.unsqueeze_(0) + x.squeeze_().sum()

    assert_close(sashiko.compile(Apply(changed).eval(), (X,))(X), changed(X))
