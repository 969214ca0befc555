"""What is said of examples that a model does not run with, and of calls that are nested otherwise than the example."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

import sashiko
from sashiko.graph.examples import called, failure
from tests.driver.functions import Apply

X = torch.randn(3, 8)


class Particular(nn.Module):
    """Takes 9 columns alone, counts its calls in a buffer, and writes into what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x.add_(1)
        if x.shape[0] == 2:
            raise KeyError("two")
        assert x.shape[-1] == 9, "nine columns"
        result: torch.Tensor = self.layer(x)
        return result


@pytest.mark.parametrize(("rows", "says"), [(2, "KeyError: 'two'"), (3, "AssertionError: nine columns")])
def test_what_the_model_itself_raises(rows: int, says: str) -> None:
    model, x = Particular().eval(), torch.zeros(rows, 8)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: sashiko.compile(model, (x,)), sashiko.InputError, "the model itself fails with this example"),
        (lambda: sashiko.quantize(model, [x], progress=False), sashiko.CalibrationError, "the model failed on batch 1"),
        (lambda: sashiko.quantize_(model, "int4-weight", [x]), sashiko.CalibrationError, "the model failed on batch 1"),
    ]
    for attempt, kind, what in cases:
        with pytest.raises(kind, match=what) as caught:
            attempt()
        error = caught.value
        assert isinstance(error, sashiko.SashikoError) and error.what.endswith(says) and "test_examples.py:" in error.where
        assert type(error.__cause__) is (KeyError if rows == 2 else AssertionError)
    assert model.calls == 1 and not x.any(), "only quantize_ calls it as it is, on batches of its own"


def test_what_a_quantized_model_raises_is_not_blamed_on_the_model() -> None:
    small = sashiko.quantize(nn.Linear(8, 4).eval(), [X])
    small.register_forward_hook(lambda *_: 1 // 0)
    for model in (small, nn.Sequential(small)):
        error = failure(model, (X,), {})
        assert error is not None and error.what.endswith("ZeroDivisionError: integer division or modulo by zero") and not error.hint
    failing = Particular().eval()
    error = failure(failing, (torch.zeros(3, 8),), {})
    assert error is not None and error.hint == "it does so without sashiko, too"


class Halving(nn.Module):
    """Writes into its weight and its buffer as a call begins, and may be traced or not. The weight is another tensor afterwards, if so."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(8, 8), way
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.layer.weight
        with torch.no_grad():
            if self.way == "bound":
                weight.data = weight.data / 2
            else:
                (weight.data if self.way == "data" else weight).div_(2)
            self.table.data.mul_(3)
            torch._foreach_add_([self.layer.bias], 1.0)
        return self.layer(x) * self.table, self.table


@pytest.mark.parametrize("way", ["bound", "data", "in place"])
def test_a_model_that_writes_into_parameters_is_called_without_changing_it(way: str) -> None:
    model = Halving(way).eval().requires_grad_(False)
    before, place = {name: value.clone() for name, value in model.state_dict().items()}, model.layer.weight.data_ptr()
    expected = copy.deepcopy(model)(X)
    assert_close(called(model, (X,), {}), expected)
    for attempt in (lambda: sashiko.compile(model, (X, X)), lambda: sashiko.quantize(model, [X], progress=False)):
        with contextlib.suppress(sashiko.SashikoError):
            attempt()
        assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert model.layer.weight.data_ptr() == place


def test_what_the_model_has_compiled_for_itself_is_called() -> None:
    class Flexible(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return flex_attention(x, x, x, score_mod=lambda score, *_: score * 2), torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    x = torch.randn(1, 1, 16, 16)
    assert_close(called(Flexible(), (x,), {}), Flexible()(x))


@pytest.mark.parametrize(("given", "says"), [
    ((X, X), "too many positional arguments"), ({"x": X}, "missing a required argument: 'input'"), ((), "missing a required argument"),
])  # fmt: skip
def test_what_is_no_call_of_the_model(given: Any, says: str) -> None:
    with pytest.raises(sashiko.InputError, match=r"the example does not fit forward\(input: ") as caught:
        sashiko.compile(nn.Linear(8, 4).eval(), given)
    assert says in caught.value.what and caught.value.where == "example_inputs"


def test_what_torch_raises_within_a_layer() -> None:
    with pytest.raises(sashiko.InputError, match=r"itself fails with this example: RuntimeError: mat1 and mat2 shapes") as caught:
        sashiko.compile(nn.Linear(8, 4).eval(), torch.randn(3, 9))
    assert caught.value.where == "example_inputs"
    with pytest.raises(sashiko.InputError, match="mat1 and mat2 shapes") as caught:
        sashiko.compile(Apply(lambda x: nn.functional.linear(x, torch.ones(2, 3))).eval(), X)
    assert "test_examples.py:" in caught.value.where


def test_what_a_quantized_module_refuses() -> None:
    """It says itself what does not fit, as it would where it is called."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Flatten(), nn.Linear(64, 4)).eval()
    small = sashiko.quantize(model, [torch.rand(2, 3, 8, 8)], progress=False)
    with pytest.raises(sashiko.InputError) as called:
        small(torch.rand(2, 3, 16, 8))
    with pytest.raises(sashiko.InputError) as compiled:
        sashiko.compile(small, (torch.rand(2, 3, 16, 8),))
    assert compiled.value.what == called.value.what


class Nested(nn.Module):
    def forward(self, d: dict[str, torch.Tensor], pair: tuple[torch.Tensor, ...], *, last: Any = None) -> torch.Tensor:
        return d["a"] + 2 * d["b"] + 3 * pair[0] + 4 * pair[1] + 5 * last[0]


WRONG: list[tuple[Any, Any, Any, str]] = [
    ({"a": X}, (X, X), [X], r"missing: d\['b'\]\n"),
    ({"a": X, "c": X}, (X, X), [X], r"missing: d\['b'\]; unknown: d\['c'\]\n"),
    ({"a": X, "b": X}, (X,), [X], r"missing: pair\[1\]\n"),
    ({"a": X, "b": X}, [X, X], [X], "pair is a list, and was a tuple"),
    ({"a": X, "b": X}, X, [X], r"missing: pair\[0\], pair\[1\]; unknown: pair\n"),
    ({"a": X, "b": X}, (X, X), X, r"missing: last\[0\]; unknown: last\n"),
    ({"a": [X], "b": X}, (X, X), [X], r"missing: d\['a'\]; unknown: d\['a'\]\[0\]\n"),
]


def test_calls_that_are_nested_otherwise() -> None:
    model = Nested().eval()
    fast = sashiko.compile(model, {"d": {"a": X, "b": X}, "pair": (X, X), "last": [X]})
    given = {"b": torch.randn(3, 8), "a": torch.randn(3, 8)}
    assert_close(fast(given, (X, X), last=[X]), model(given, (X, X), last=[X]))
    for d, pair, last, says in WRONG:
        for attempt in (lambda: fast(d, pair, last=last), lambda: fast(last=last, pair=pair, d=d)):  # noqa: B023
            with pytest.raises(sashiko.InputError, match=says) as caught:
                attempt()
            assert caught.value.hint == "give the arguments that the example had"


def test_the_place_is_not_that_of_a_library_of_python() -> None:
    model, n = Apply(lambda x, n: x * float(Fraction(n.max().item(), 2))).eval(), torch.tensor([1, 2])
    assert_close(model(X, n), X)
    with pytest.raises(sashiko.Unsupported, match="PyTorch cannot capture this model: TypeError") as caught:
        sashiko.compile(model, (X, n))
    assert "test_examples.py:" in caught.value.where
