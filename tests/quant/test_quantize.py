"""The simulated model: its numbers against integers and float64, its calls, copies and exports; the original stays as it was."""

from __future__ import annotations

import copy
import io
import math
import pickle
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.quant import PRESETS, QuantizedModule, quantize, report
from sashiko.quant.scheme import WeightScheme
from sashiko.quant.weights import quantize_weight
from tests.quant.models import Attention, IntegerExecution, bert, mlp, tokens
from tests.sweeps import swept

Case = tuple[nn.Module, list[Any]]


def case(name: str) -> Case:
    if name == "mlp":
        return mlp(), [torch.randn(5, 8) for _ in range(3)]
    if name == "no_bias":
        return mlp(bias=False), [torch.randn(2, 3, 8) for _ in range(3)]
    if name == "attention":
        return Attention().eval(), [(torch.randn(2, 5, 16), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])) for _ in range(3)]
    if name == "bf16":
        return mlp().to(torch.bfloat16), [torch.randn(5, 8, dtype=torch.bfloat16)]
    return bert(), [tokens(3, length) for length in (12, 7)]


CASES = (*(SMALL := ("mlp", "no_bias", "attention", "bf16")), "bert")
STATIC = [name for name, scheme in PRESETS.items() if scheme.default.label == "int8"]
# Presets differ in how they find ranges; the largest model is tried with one of unsigned and one of signed activations.
FEW = [(name, preset) for name in CASES for preset in STATIC if name != "bert" or preset in ("int8-static", "int8-symmetric")]


def call(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        result = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    tensor = result if isinstance(result, torch.Tensor) else result.last_hidden_state
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize(("name", "preset"), swept(FEW, [each for each in FEW if each != ("bert", "int8-symmetric")]))
def test_simulation_is_integer_arithmetic(name: str, preset: str) -> None:
    model, data = case(name)
    small = quantize(model, data, preset=preset)
    values = tuple(data[0].values()) if isinstance(data[0], dict) else data[0] if isinstance(data[0], tuple) else (data[0],)
    steps = IntegerExecution(small).check(*values)
    assert len(steps) == len(small.record.sites) > 0
    # float32 sums of K <= 64 products against exact integers: K * 2^-24 relative to the sum of magnitudes, a step is 1/127.
    assert max(steps) < 0.01


@pytest.mark.parametrize("name", CASES)
def test_near_the_original(name: str) -> None:
    model, data = case(name)
    small = quantize(model, data)
    exact, ours = call(model, data[0]), call(small, data[0])
    assert ours.shape == exact.shape and ours.dtype == exact.dtype
    # One step is 1/127 of the range: relative noise of some 1/127/sqrt(12) for each of a handful of quantizations.
    assert (ours - exact).double().norm() / exact.double().norm() < 0.05
    assert not torch.equal(ours, exact)


@pytest.mark.parametrize("name", swept(CASES, SMALL))
def test_the_original_is_bit_identical_and_shares_no_memory(name: str) -> None:
    model, data = case(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    random = torch.random.get_rng_state()
    result = call(model, data[0])
    small = quantize(model, data)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(call(model, data[0]), result)
    with torch.no_grad():
        for value in small.state_dict().values():
            value.zero_()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", swept(CASES, SMALL))
def test_reexport_with_free_dimensions(name: str) -> None:
    model, data = case(name)
    small = quantize(model, data, preset="int8-symmetric")
    batch = data[0]
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
    free = [{0: Dim.AUTO} for _ in (*args, *kwargs)]
    shapes = dict(zip(kwargs, free, strict=True)) if kwargs else tuple(free)
    exported = torch.export.export(small, args, kwargs, dynamic_shapes=shapes, strict=False)
    targets = [str(node.target) for node in exported.graph.nodes]
    for op in ("quantize_per_tensor", "dequantize_per_tensor", "dequantize_per_channel"):
        assert any(t == f"quantized_decomposed.{op}.default" for t in targets)
    wider = _doubled(batch)
    assert torch.equal(call(exported.module(), wider), call(small, wider))


def _doubled(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {k: torch.cat([v, v]) for k, v in batch.items()}
    return tuple(torch.cat([v, v]) for v in batch) if isinstance(batch, tuple) else torch.cat([batch, batch])


@pytest.mark.parametrize("name", swept(CASES, SMALL))
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_copies(name: str) -> None:
    model, data = case(name)
    small = quantize(model, data)
    expected = call(small, data[0])
    stored = io.BytesIO()
    torch.save(small, stored)
    stored.seek(0)
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small)), torch.load(stored, weights_only=False)):
        assert isinstance(other, QuantizedModule) and not other.training
        assert torch.equal(call(other, data[0]), expected)
        assert other.record == small.record and list(other.state_dict()) == list(small.state_dict())
        with torch.no_grad():
            next(iter(other.buffers())).zero_()
        assert torch.equal(call(small, data[0]), expected), "the copy shares memory"


def test_state_dict_round_trip() -> None:
    model, data = case("mlp")
    small, other = (quantize(m, data, preset="int8-symmetric") for m in (model, mlp()))
    other.load_state_dict(small.state_dict())
    # Scales of activations are part of the program: those of `other` come from other hidden activations.
    assert torch.equal(other.get_buffer("0.weight_int8"), small.get_buffer("0.weight_int8"))


def test_dynamo() -> None:
    model, data = case("attention")
    small = quantize(model, data)
    compiled = torch.compile(small, backend="eager", fullgraph=True)
    for batch in (data[0], _doubled(data[0])):
        assert torch.equal(call(compiled, batch), call(small, batch))


def test_calls_as_the_model_is_called() -> None:
    model, data = case("attention")
    small = quantize(model, data)
    x, mask = data[0]
    expected = small(x, mask)
    for result in (small(x=x, mask=mask), small(mask=mask, x=x), small(x, mask=mask)):
        assert torch.equal(result, expected)
    for args, kwargs in (((x,), {}), ((x, mask, 1), {}), ((x, mask), {"x": x}), ((x, mask), {"y": x}), ((x, None), {})):
        with pytest.raises(InputError):
            small(*args, **kwargs)


def test_omitted_arguments_may_be_given_as_their_default() -> None:
    small = quantize(Attention().eval(), [torch.randn(2, 5, 16)])
    x = torch.randn(4, 3, 16)
    assert torch.equal(small(x, None), small(x)) and torch.equal(small(x, mask=None), small(x))
    with pytest.raises(InputError, match="mask"):
        small(x, torch.ones(4, 3))


@pytest.mark.parametrize(("default", "same", "others"), [
    (0.5, float("0.5"), (0.25, 1)), (math.nan, float("nan"), (0.5,)), (1, 1, (True, 1.0)), ((1, 300), (1, int("300")), ((1, 2), [1, 300])),
    ("mean", "".join(("me", "an")), ("sum",)), (None, None, (torch.ones(1), 0)),
])
def test_another_object_is_the_default_too(default: object, same: object, others: tuple[object, ...]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, how: Any = default) -> torch.Tensor:
            out: torch.Tensor = self.fc(x)
            return out

    x = torch.randn(3, 8)
    small = quantize(Scaled().eval(), [x])
    assert torch.equal(small(x, how=same), small(x)) and torch.equal(small(x, same), small(x))
    for other in others:
        with pytest.raises(InputError, match=r"fixed to the default.*: how="):
            small(x, how=other)


def test_positions_hold_behind_an_omitted_argument() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, z: torch.Tensor | None = None) -> torch.Tensor:
            out: torch.Tensor = self.fc(x) + (0 if y is None else y) - (0 if z is None else z)
            return out

    x, z = torch.randn(3, 8), torch.randn(3, 4)
    small = quantize(Three().eval(), [{"z": z, "x": x}])
    assert torch.equal(small(x, None, z), small(z=z, x=x))
    with pytest.raises(InputError, match="missing: z"):
        small(x, z)


def test_numbers_are_part_of_the_program() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            out: torch.Tensor = self.fc(x) * factor
            return out

    x = torch.randn(3, 8)
    small = quantize(Scaled().eval(), [(x, 2.0)])
    assert torch.equal(small(x, 2.0), small(x=x, factor=2.0))
    with pytest.raises(InputError, match="factor"):
        small(x, 3.0)


@pytest.mark.parametrize("first", [1, 2, 5])
def test_other_batch_sizes(first: int) -> None:
    model = Attention().eval()
    # Uniform data, and short sequences among it: what comes later stays within the calibrated ranges.
    sizes = ((first, 5), (64, 1), (64, 3), (64, 8))
    small = quantize(model, [torch.rand(*size, 16) * 2 - 1 for size in sizes], preset="int8-minmax")
    for batch in (1, 2, 9):
        for length in (1, 5, 8):
            x = torch.rand(batch, length, 16) * 2 - 1
            assert (small(x) - model(x)).norm() / model(x).norm() < 0.05


def test_a_size_the_model_branches_on_is_guarded() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(x if x.shape[0] <= 10 else -x)
            return out

    small = quantize(Short().eval(), [torch.randn(4, 8)])
    assert small(torch.randn(10, 8)).shape == (10, 4)
    with pytest.raises(InputError, match="size 11"):
        small(torch.randn(11, 8))


def test_a_fixed_size_is_noted() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] != 1:
                raise ValueError("one at a time")
            out: torch.Tensor = self.fc(x)
            return out

    small = quantize(Fixed().eval(), [torch.randn(1, 8)] * 2)
    assert any("fixed to 1" in note for note in small.record.notes)
    with pytest.raises(InputError, match="size 2"):
        small(torch.randn(2, 8))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_is_free_where_other_sizes_cannot_be(batch: int) -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x.shape[1]) is not int:
                raise TypeError("windows are counted in numbers")
            out: torch.Tensor = self.fc(x)
            return out

    model = Windows().eval()
    small = quantize(model, [torch.randn(batch, 6, 4)] * 2)
    assert any("all sizes but that of the batch" in note for note in small.record.notes)
    x = torch.randn(5, 6, 4)
    torch.testing.assert_close(small(x), model(x), rtol=0, atol=0.1)
    with pytest.raises(InputError, match="size 7"):
        small(torch.randn(5, 7, 4))


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_weights(granularity: Any) -> None:
    weight = torch.randn(6, 20) * torch.logspace(-3, 3, 6)[:, None]
    weight[2] = 0
    found = quantize_weight(weight, WeightScheme(8, granularity))
    assert found.values.dtype == torch.int8 and found.values.abs().max() == 127
    error = (found.values.double() * found.scales.double()[:, None] - weight.double()).abs()
    # Half a step, and the rounding of the float32 quotient.
    assert bool((error <= found.scales.double()[:, None] * (0.5 + 127 * 2**-22)).all())
    assert len(set(found.scales.tolist())) == (1 if granularity == "tensor" else 6)
    assert found.scales[2] == 1 or granularity == "tensor"
    noise, signal = float((error**2).sum()), float((weight.double() ** 2).sum())
    assert found.sqnr == pytest.approx(10 * torch.tensor(signal / noise).log10().item(), rel=1e-5)


def test_report() -> None:
    model, data = case("attention")
    text = report(quantize(model, data, exclude="value"))
    assert text.startswith("3 in int8 per row, 3 left as they were, calibrated on 3 batches")
    for word in ("query", "key", "out", "excluded by the caller", "both factors are activations", "weight dB"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 140


def test_sizes_that_are_too_much_to_reason_about_are_fixed() -> None:
    """Stages that pad what they get to whole windows, take these apart and put them together: of images, torch takes minutes for it."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.down = nn.Linear(4, 4), nn.Conv1d(4, 4, 3, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.pad(x, (0, -x.shape[2] % 7))
            places = x.shape[2] // 7
            x = self.fc(x.view(-1, 4, places, 7).permute(0, 2, 3, 1).reshape(-1, 7, 4))
            out: torch.Tensor = self.down(x.view(-1, places, 7, 4).permute(0, 3, 1, 2).reshape(-1, 4, places * 7))
            return out

    model = nn.Sequential(*(Stage() for _ in range(4))).eval()
    start = time.process_time()
    small = quantize(model, [torch.randn(2, 4, 120)] * 2)
    assert time.process_time() - start < 30
    assert any("all sizes but that of the batch" in note for note in small.record.notes)
    x = torch.randn(5, 4, 120)
    assert (small(x) - model(x)).norm() < 0.1 * model(x).norm()


@pytest.mark.parametrize("preset", ["int8", "int8-static", "int8-dynamic"])
@torch.no_grad()
def test_small_numbers_keep_their_digits(preset: str) -> None:
    """In units that make them 1e-9, numbers are worth as much as in others."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).eval(), 1e-9 * torch.randn(16, 64)
    small = sashiko.quantize(model, [x, -x], preset=preset, progress=False)
    for result in (small(x), sashiko.compile(small, (x,))(x)):
        assert ((result - model(x)).double().norm() < 0.02 * model(x).double().norm()).all()
