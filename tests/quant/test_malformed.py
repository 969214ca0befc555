"""Malformed calls: whatever the model's weights and the data hold, the answer is a clear error or a sound module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import sashiko
from sashiko.diagnostics.errors import CalibrationError, InputError
from sashiko.quant import PRESETS, QuantizedModule, quantize

K = 16
Make = Callable[[torch.Tensor], Any]
BATCHES: dict[str, Make] = {
    "good": lambda x: x,
    "another size": lambda x: torch.cat([x, x[:2]]),
    "single": lambda x: x[:1],
    "empty": lambda x: x[:0],
    "constant": torch.ones_like,
    "zero": torch.zeros_like,
    "NaN": lambda x: x.where(x < 1, float("nan")),
    "infinity": lambda x: x.where(x < 1, float("inf")),
    "minus infinity": lambda x: x.where(x < 1, -float("inf")),
    "huge": lambda x: x * 1e30,
    "greatest": lambda x: x.sign() * torch.finfo(torch.float32).max,
    "denormal": lambda x: x * 1e-42,
    "double": torch.Tensor.double,
    "half": torch.Tensor.half,
    "integers": torch.Tensor.long,
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "not contiguous": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(5, K),
    "with gradients": lambda x: x.clone().requires_grad_(),
    "other rank": lambda x: x[None],
    "vector": lambda x: x[0],
    "scalar": lambda x: x.sum(),
    "wide": lambda x: torch.cat([x, x], 1),
    "other device": lambda x: x.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "array": torch.Tensor.numpy,
    "text": lambda x: "text",
    "none": lambda x: None,
    "number": lambda x: 3.0,
    "tuple": lambda x: (x,),
    "with labels": lambda x: (x, x[:, 0]),
    "empty tuple": lambda x: (),
    "tuple of an array": lambda x: (x.numpy(),),
    "list": lambda x: [x],
    "by name": lambda x: {"input": x},
    "by another name": lambda x: {"inputs": x},
    "empty dict": lambda x: {},
}
WEIGHTS: dict[str, Make] = {
    "good": lambda w: w,
    "zero": torch.zeros_like,
    "dead channel": lambda w: w * (torch.arange(len(w)) != 1)[:, None],
    "constant": lambda w: torch.full_like(w, 0.1),
    "huge": lambda w: w * 1e30,
    "denormal": lambda w: w * 1e-42,
    "uneven": lambda w: w * torch.logspace(-30, 6, len(w))[:, None],
    "NaN": lambda w: w.where(w < w.max(), float("nan")),
    "infinity": lambda w: w.where(w < w.max(), float("inf")),
    "no channels": lambda w: w[:0],
}
NAMES = sorted(PRESETS)


def data(kind: str) -> Any:
    return BATCHES[kind](torch.randn(4, K, generator=torch.Generator().manual_seed(len(kind))))


def raising(batches: list[Any]) -> Iterator[Any]:
    yield from batches
    raise OSError("disk on fire")


def model(weights: str, deep: bool) -> nn.Module:
    """One or two linears, the last with unusual weights."""
    last = nn.Linear(K, 0 if weights == "no channels" else 8)
    with torch.no_grad():
        last.weight.copy_(WEIGHTS[weights](last.weight))
    return (nn.Sequential(nn.Linear(K, K), nn.ReLU(), last) if deep else nn.Sequential(last)).eval()


def sound(small: QuantizedModule, original: nn.Module, batches: list[Any]) -> None:
    """Finite positive scales; finite results, of the original's type and shape, wherever the original's are finite."""
    for item in small.record.sites:
        for r in item.ranges:
            assert 0 < r.scale < float("inf") and np.isfinite(np.float32(1) / np.float32(r.scale)) and r.low <= 0 <= r.high
    for name, buffer in small.named_buffers():
        if name.endswith("_scale"):
            assert bool((buffer > 0).all()) and bool(buffer.isfinite().all())
    for batch in batches:
        args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})
        with torch.no_grad():
            expected = original(*args, **kwargs)
            actual = small(*args, **kwargs)
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert bool(actual.isfinite().all()) or not bool(expected.isfinite().all())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(NAMES), st.sampled_from(sorted(WEIGHTS)), st.booleans(), st.lists(st.sampled_from(sorted(BATCHES)), max_size=3),
    st.sampled_from([False, False, False, True]),
)
@example("int8", "NaN", False, ["good"], False)
@example("int8-weight", "infinity", False, ["good"], False)
@example("int8-static", "infinity", False, ["another size"], False)
@example("int8-average", "NaN", False, ["empty"], False)
@example("int8-average", "constant", False, ["greatest"], False)
def test_a_clear_error_or_a_sound_module(preset: str, weights: str, deep: bool, kinds: list[str], broken: bool) -> None:
    torch.manual_seed(0)
    original = model(weights, deep)
    batches = [data(kind) for kind in kinds]
    try:
        small = quantize(original, raising(batches) if broken else batches, preset=preset)
    except (CalibrationError, InputError) as error:
        assert error.what and error.where
        return
    assert not broken and batches and weights not in ("NaN", "infinity")
    sound(small, original, batches)


@pytest.mark.parametrize("kind", sorted(BATCHES))
@pytest.mark.parametrize("first", [True, False])
def test_every_kind_of_batch(kind: str, first: bool) -> None:
    """Alone, and behind a good one. Those that are faults say so with their number."""
    test: Any = test_a_clear_error_or_a_sound_module.hypothesis.inner_test  # type: ignore[attr-defined]
    test("int8", "good", True, [kind] if first else ["good", kind], False)


@pytest.mark.parametrize(
    "kind",
    ["NaN", "infinity", "double", "complex", "wide", "vector", "other device", "array", "text", "none", "number", "with labels", "sparse",
     "by another name", "empty dict", "empty tuple"],
)
def test_faults_are_named(kind: str) -> None:
    with pytest.raises(CalibrationError, match="batch 2"):
        quantize(model("good", True), [data("good"), data(kind)])


@pytest.mark.parametrize("options", [
    {"preset": "int7"}, {"preset": 8}, {"exclude": "nothing"}, {"exclude": 3}, {"exclude": [int]}, {"exclude": [nn.Linear, 3]},
    {"mask": "nothing"}, {"max_batches": 0}, {"max_batches": "2"},
])
def test_options(options: dict[str, Any]) -> None:
    with pytest.raises((CalibrationError, InputError)):
        quantize(model("good", False), [data("good")], **options)


@pytest.mark.parametrize(
    ("preset", "weights", "kind"),
    [("int8", "uneven", "huge"), ("int8-dynamic", "zero", "zero"), ("int8-weight", "denormal", "denormal"),
     ("int4-weight", "dead channel", "constant"), ("int8-entropy", "denormal", "denormal"), ("int8-dynamic", "dead channel", "huge")],
)
def test_compiled(preset: str, weights: str, kind: str) -> None:
    original, batch = model(weights, False), data(kind)
    small = quantize(original, [batch], preset=preset)
    sound(small, original, [batch])
    expected = small(batch)
    actual = sashiko.compile(small, (batch,))(batch)
    # Sums of 16 products in another order; a row's scale that is rounded otherwise moves an input by one step of 127.
    tolerance = 0.02 if preset == "int8-dynamic" else 1e-5
    assert bool(actual.isfinite().all())
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


class Nested(nn.Module):
    """Takes {"a": (x, y), "b": [z]} and a number; all [B, K]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(K, 8)

    def forward(self, parts: Any, factor: float = 1.0) -> torch.Tensor:
        x, y = parts["a"]
        result: torch.Tensor = self.linear(x + y * factor) + self.linear(parts["b"][0])
        return result


class Indexed(nn.Module):
    """A table behind which there is a linear; int64 [B, S] -> [B, S, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(8, K), nn.Linear(K, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.table(ids))
        return result


class Doubled(nn.Module):
    """A model without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


X, Y, Z = (torch.randn(4, K, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
NESTED: dict[str, Any] = {
    "good": ({"a": (X, Y), "b": [Z]},),
    "other order": ({"b": [Z], "a": (X, Y)},),
    "a list for a tuple": ({"a": [X, Y], "b": [Z]},),
    "by name": {"parts": {"a": (X, Y), "b": [Z]}},
    "another batch size": ({"a": (X[:2], Y[:2]), "b": [Z[:2]]},),
    "a bare tensor": (X,),
    "another key": ({"a": (X, Y), "c": [Z]},),
    "a key too few": ({"a": (X, Y)},),
    "a key too many": ({"a": (X, Y), "b": [Z], "c": X},),
    "one deeper": ({"a": ((X,), Y), "b": [Z]},),
    "one flatter": ({"a": (X, Y), "b": Z},),
    "a tensor too many": ({"a": (X, Y, Z), "b": [Z]},),
    "a tensor too few": ({"a": (X,), "b": [Z]},),
    "empty inside": ({"a": (X, Y), "b": []},),
    "all empty": ({},),
    "a number for a tensor": ({"a": (X, 1.0), "b": [Z]},),
    "none for a tensor": ({"a": (X, None), "b": [Z]},),
    "an array for a tensor": ({"a": (X, Y.numpy()), "b": [Z]},),
    "complex inside": ({"a": (X, Y), "b": [Z.to(torch.complex64)]},),
    "integers inside": ({"a": (X, Y.long()), "b": [Z]},),
    "NaN inside": ({"a": (X, Y), "b": [Z.where(Z < 1, float("nan"))]},),
    "another width inside": ({"a": (X, Y), "b": [Z[:, :8]]},),
    "another batch size inside": ({"a": (X, Y), "b": [Z[:3]]},),
    "another number": ({"a": (X, Y), "b": [Z]}, 2.0),
}
FITTING = ("good", "other order", "a list for a tuple", "by name", "another batch size")


def applied(call: Any, function: Callable[..., Any]) -> Any:
    return function(**call) if isinstance(call, dict) else function(*call)


@pytest.fixture(scope="module")
def nested() -> tuple[nn.Module, QuantizedModule]:
    """A model and what it becomes."""
    torch.manual_seed(0)
    original = Nested().eval()
    return original, quantize(original, [NESTED["good"]])


@pytest.mark.parametrize("kind", sorted(NESTED))
def test_nested_arguments(nested: tuple[nn.Module, QuantizedModule], kind: str) -> None:
    """Containers are compared by the places of their leaves, both in calibration and when the result is called."""
    original, small = nested
    if kind in FITTING:
        sound(quantize(original, [NESTED["good"], NESTED[kind]]), original, [NESTED[kind]])
        assert torch.equal(applied(NESTED[kind], small), applied(NESTED[kind], quantize(original, [NESTED["good"]])))
        return
    with pytest.raises(CalibrationError, match="batch 2"):
        quantize(original, [NESTED["good"], NESTED[kind]])
    if kind != "NaN inside":  # as the model does, the module computes with it
        with pytest.raises(InputError, match="argument"):
            applied(NESTED[kind], small)


@pytest.mark.parametrize("x", [(X,), [X], {"x": X}, ((X,),), {}, (), None], ids=str)
def test_a_container_is_no_tensor(x: Any) -> None:
    small = quantize(model("good", False), [X])
    with pytest.raises(InputError, match=r"argument 'input'"):
        small(x)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(torch.tensor([[1, 2]]), torch.tensor([[1.0, 2.0]]), "float32, and was torch.int64"),
     (torch.tensor([[1, 2]]), torch.tensor([[9, 0]]), "batch 2"),
     (torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 2]]), "batch 1"), (torch.tensor([[True]]), torch.tensor([[1]]), "batch 1"),
     (torch.tensor([[-1, 2]]), torch.tensor([[1, 2]]), "batch 1")],
    ids=["reals for indices", "an index too great", "reals first", "bools first", "an index below zero"],
)
def test_faulty_indices(first: torch.Tensor, second: torch.Tensor, words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        quantize(Indexed().eval(), [first, second])


def test_integers_of_another_width_are_the_same_indices() -> None:
    ids = torch.tensor([[1, 2, 3], [0, 7, 4]])
    small = quantize(Indexed().eval(), [ids, ids.int()])
    assert torch.equal(small(ids), small(ids.int()))


@pytest.mark.parametrize("after", [0, 1, 3, 20])
@pytest.mark.parametrize("preset", ["int8", "int8-entropy"])
def test_data_that_breaks_off(after: int, preset: str) -> None:
    """Before the first batch, within the sample and behind it; the error says where, and keeps the cause."""
    with pytest.raises(CalibrationError, match=f"{after + 1}.*disk on fire") as caught:
        quantize(model("good", True), raising([data("good")] * after), preset=preset)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.where.startswith(f"{__file__}:")


@pytest.mark.parametrize("preset", NAMES)
def test_a_model_without_parameters(preset: str) -> None:
    small = quantize(Doubled().eval(), [X], preset=preset)
    assert torch.equal(small(Y), 2 * Y) and not small.record.sites
    assert "nothing was quantized" in small.report()


def test_a_model_of_complex_numbers_is_left_as_it_is() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(K, 8, dtype=torch.complex64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x)
            return result

    original, x = Complex().eval(), X.to(torch.complex64)
    small = quantize(original, [x])
    with torch.no_grad():
        assert torch.equal(small(x), original(x))
    assert not small.record.sites and len(small.record.left_out) == 1
