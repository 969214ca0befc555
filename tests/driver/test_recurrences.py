"""Recurrent layers compiled: steps that the plan repeats, for every cell, direction, length and precision."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from sashiko.quant import BF16, QuantizedModule, Scheme
from sashiko.runtime.plan import NativeSegment
from tests.graph import cells
from tests.graph.cells import LAYERS, leaves
from tests.sweeps import swept


def layer(cell: str, features: int = 12, size: int = 20, **options: Any) -> nn.Module:
    return cells.layer(cell, features, size, batch_first=True, **options)


def agree(compiled: Any, model: nn.Module, x: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Every result beside PyTorch's in f64. Numbers are at most about 1."""
    with torch.no_grad():
        expected = leaves(copy.deepcopy(model).double()(x.double()))
    for got, want in zip(leaves(compiled(x)), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


FREE = ({0: Dim("batch", max=40), 1: Dim("length", max=200)},)
PRESETS = ("int8", "int8-static", "int8-dynamic", "int8-weight", "int4-weight")
PROJECTED = {"proj_size": 32}


@pytest.mark.parametrize(("cell", "options"), swept(
    [*((cell, {}) for cell in LAYERS), ("lstm", {"proj_size": 7})], [("lstm", {}), ("gru", {}), ("lstm", {"proj_size": 7})],
), ids=str)
def test_one_compilation_serves_every_length(cell: str, options: dict[str, Any]) -> None:
    model = layer(cell, num_layers=2, bidirectional=True, **options)
    compiled = sashiko.compile(model, (torch.randn(2, 5, 12),), dynamic_shapes=FREE, strict=True)
    for batch, length in ((2, 5), (1, 1), (3, 2), (33, 7), (1, 200), (2, 5)):
        agree(compiled, model, torch.randn(batch, length, 12))
    with pytest.raises(InputError, match=r"where input.shape\[1\] != 0"):
        compiled(torch.randn(2, 0, 12))
    agree(compiled, model, torch.randn(0, 3, 12))


@pytest.mark.parametrize(
    ("cell", "dtype"),
    swept(list(product(LAYERS, (torch.bfloat16, torch.float16))), [("gru", torch.bfloat16)]),
    ids=str,
)
def test_models_of_narrow_floats(cell: str, dtype: torch.dtype) -> None:
    """PyTorch needs oneDNN for an LSTM of them, and writes out the steps of the others. The state is f32 between the steps here."""
    model = layer(cell, num_layers=2, bidirectional=True).to(dtype)
    compiled = sashiko.compile(model, (torch.randn(2, 5, 12, dtype=dtype),), dynamic_shapes=FREE, strict=True)
    for batch, length in ((2, 5), (3, 1), (1, 90)):
        x = torch.randn(batch, length, 12, dtype=dtype)
        agree(compiled, model, x, 4 * torch.finfo(dtype).eps)
        assert {result.dtype for result in leaves(compiled(x))} == {dtype}
    one = torch.randn(2, 1, 12, dtype=dtype)
    agree(sashiko.compile(model, (one,), strict=True), model, one, 4 * torch.finfo(dtype).eps)
    agree(sashiko.quantize(model, [one], preset="int8-weight", progress=False), model, one, 8 * torch.finfo(torch.bfloat16).eps)


def test_the_plan_does_not_grow_with_the_length() -> None:
    plans = [sashiko.compile(layer("lstm"), (torch.randn(1, length, 12),)).executable.plan for length in (3, 300)]
    (short,), (long,) = (p.segments for p in plans)
    assert isinstance(short, NativeSegment) and isinstance(long, NativeSegment)
    assert len(short.steps) == len(long.steps) and [r.times for r in (*short.repeats, *long.repeats)] == [3, 300]


@pytest.mark.parametrize("target", [t for t in CATALOGUE if not t.why_not_on(host())], ids=lambda target: target.name)
def test_other_targets(target: Target) -> None:
    model = layer("gru", bidirectional=True)
    agree(sashiko.compile(model, (torch.randn(2, 6, 12),), target=target), model, torch.randn(2, 6, 12))


@pytest.mark.parametrize("bias", [False, True])
def test_projections_with_states_of_the_callers(bias: bool) -> None:
    """Also where a step is large enough for results to be stored beside others."""
    model, x = layer("lstm", 24, 96, proj_size=64, bias=bias), torch.randn(80, 5, 24)
    state = torch.randn(1, 80, 64), torch.randn(1, 80, 96)
    compiled = sashiko.compile(model, (x, state), strict=True)
    for got, want in zip(leaves(compiled(x, state)), leaves(model(x, state)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_bf16_products() -> None:
    """Numbers of at most 1 with 8 bits, summed 20 at a time and fed back: far from f32, within a few units of bf16."""
    model, x = layer("lstm"), torch.randn(2, 9, 12)
    compiled = sashiko.compile(model, (x,), precision="bf16")
    agree(compiled, model, x, 2**-6)
    with pytest.raises(AssertionError):
        agree(compiled, model, x)


def test_weights_that_change_are_noticed() -> None:
    model, x = layer("gru"), torch.randn(2, 6, 12)
    compiled = sashiko.compile(model, (x,))
    with torch.no_grad():
        model.weight_hh_l0.mul_(-1)
        model.bias_hh_l0.add_(0.5)
    agree(compiled, model, x)


class GivenWeights(nn.Module):
    """Weights that come with the call, and a first state that is computed."""

    def forward(self, x: torch.Tensor, w: torch.Tensor, w_state: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first = torch.stack([x.mean(1)[:, :20], x.amax(1)[:, :20]])[:, None]
        out, hidden, memory = torch.lstm(x, (first[0], first[1]), (w, w_state, b, b), True, 1, 0.0, False, False, True)
        return torch.cat([out[:, -1], hidden[0], memory[0]], 1)


def test_weights_that_are_arguments() -> None:
    model, x, weights = GivenWeights().eval(), torch.randn(3, 6, 24), (torch.randn(80, 24) / 5, torch.randn(80, 20) / 5, torch.randn(80))
    compiled = sashiko.compile(model, (x, *weights), strict=True)
    torch.testing.assert_close(compiled(x, *weights), model(x, *weights), rtol=0, atol=2e-6)


def test_a_state_of_the_callers() -> None:
    model, x = layer("lstm", num_layers=2), torch.randn(2, 6, 12)
    state = (torch.randn(2, 2, 20), torch.randn(2, 2, 20))
    compiled, kept = sashiko.compile(model, (x, state)), [s.clone() for s in state]
    for got, want in zip(leaves(compiled(x, state)), leaves(model(x, state)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    assert all(torch.equal(s, k) for s, k in zip(state, kept, strict=True))


def test_two_threads() -> None:
    model, x = layer("lstm", 96, 256), torch.randn(64, 12, 96)
    compiled, before = sashiko.compile(model, (x,)), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for _ in range(5):
            agree(compiled, model, x)
    finally:
        torch.set_num_threads(before)


def quantized(cell: str, preset: str, **options: Any) -> tuple[nn.Module, QuantizedModule]:
    model = nn.Sequential(layer(cell, 64, 64, **options)).eval()
    return model, sashiko.quantize(model, [torch.randn(2, 9, 64) for _ in range(3)], preset=preset)


@pytest.mark.parametrize(("cell", "options", "preset"), swept(
    [(cell, options, preset) for preset in PRESETS for cell, options in [*((cell, {}) for cell in LAYERS), ("lstm", PROJECTED)]],
    [("lstm", {}, "int8"), ("gru", {}, "int4-weight"), ("lstm", PROJECTED, "int8-static")],
), ids=str)
def test_quantized(cell: str, options: dict[str, Any], preset: str, tmp_path: Path) -> None:
    """Weights of integers over all times and in each step; the length that calibration saw is not the only one."""
    model, small = quantized(cell, preset, bidirectional=True, **options)
    assert [s.site.operation for s in small.record.sites] == ["linear", "recurrence"] * 2
    small.save(tmp_path / "small")
    compiled = sashiko.compile(small, (torch.randn(2, 9, 64),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    kernels = {p.kernel for p in compiled.built.products if p is not None} if compiled.built else set()
    of_floats = {k for k in kernels if not ("i4" in k if "int4" in preset else "i8" in k or "s8" in k or "u8" in k)}
    assert kernels > of_floats and len(of_floats) == len(options), kernels  # a projection's product stays what it is
    for module in (small, sashiko.load(tmp_path / "small")):
        for length in (9, 31):
            x = torch.randn(2, length, 64)
            for got, want, real in zip(*(leaves(f(x)) for f in (compiled, module, model)), strict=True):
                assert (want - real).norm() < (0.3 if "int4" in preset else 0.03) * real.norm()
                # A number that is rounded the other way is one step of 127, of one of 64 terms, and is fed back.
                assert (got - want).abs().max() < 0.01 * max(1.0, float(real.abs().max()))


@pytest.mark.parametrize("target", [t for t in CATALOGUE if not t.why_not_on(host())], ids=lambda target: target.name)
def test_quantized_for_other_targets(target: Target) -> None:
    _, small = quantized("lstm", "int8")
    x = torch.randn(3, 12, 64)
    for got, want in zip(*(leaves(f(x)) for f in (sashiko.compile(small, (x,), target=target), small)), strict=True):
        assert (got - want).abs().max() < 0.01


def test_products_with_a_hidden_state_can_be_left_out() -> None:
    """By name, and where the scheme does not list them; in bf16 the hidden state is narrow in the simulation, too."""
    model, x = nn.Sequential(layer("gru", 64, 64)).eval(), torch.randn(2, 9, 64)
    without = sashiko.quantize(model, [x], exclude="0.weight_hh_l0")
    assert [s.site.operation for s in without.record.sites] == ["linear"]
    unlisted = sashiko.quantize(model, [x], preset=Scheme(operations=("linear",)))
    assert [each.reason for each in unlisted.record.left_out] == ["the scheme leaves products with a hidden state in floating point"]
    narrow = sashiko.quantize(model, [x], preset=Scheme(BF16))
    for got, want, real in zip(*(leaves(f(x)) for f in (sashiko.compile(narrow, (x,)), narrow, model)), strict=True):
        assert 0 < (want - real).abs().max() < 2**-6
        assert (got - want).abs().max() < 2**-8


def test_the_search_chooses_for_products_with_a_hidden_state() -> None:
    model, x = nn.Sequential(layer("lstm", 64, 64)).eval(), torch.randn(4, 9, 64)
    compiled = sashiko.quantize_and_compile(model, [x], preset="auto", budget_s=5)
    assert compiled.search is not None
    sites = {site.name: site for site in compiled.search.sites}
    assert set(dict(sites["0.weight_hh_l0"].seconds)) >= {"fp32", "int8 per row"}
    agree(compiled, model, x, 0.05)


def test_saved(tmp_path: Path) -> None:
    model = layer("gru", bidirectional=True)
    compiled = sashiko.compile(model, (torch.randn(2, 5, 12),), dynamic_shapes=FREE)
    compiled.save(tmp_path / "gru")
    loaded, x = sashiko.load(tmp_path / "gru"), torch.randn(4, 17, 12)
    for got, want in zip(leaves(loaded(x)), leaves(compiled(x)), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(InputError, match=r"where input.shape\[1\] != 0"):
        loaded(torch.randn(2, 0, 12))


def test_explained_and_timed() -> None:
    compiled = sashiko.compile(layer("lstm"), (torch.randn(2, 50, 12),))
    text = sashiko.explain(compiled)
    assert text.count(", 50 times") == 3 and "sigmoid" in text  # the product, what the cell remembers, and what it says beside that
    x = torch.randn(2, 50, 12)
    times = {t.label: t.seconds for t in compiled.times(x)}
    assert all(seconds > 0 for seconds in times.values())
    agree(compiled, layer("lstm"), x)


@pytest.mark.parametrize(("cell", "options", "repeats"), [
    ("gru", {}, 1), ("lstm", {"bidirectional": True}, 2), ("lstm", {"proj_size": 4}, 1),
])
def test_programs_of_others(cell: str, options: dict[str, Any], repeats: int) -> None:
    """A program that torch.export has traced alone holds each layer as one operation."""
    model, x = layer(cell, **options), torch.randn(3, 6, 12)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim.AUTO},))
    compiled = sashiko.compile(program.module(), (x,))
    (segment,) = compiled.executable.plan.segments
    assert isinstance(segment, NativeSegment) and len(segment.repeats) == repeats
    agree(compiled, model, x)


def test_dynamo_takes_them_apart_where_it_is_told_to() -> None:
    """By default Dynamo runs whatever holds an nn.LSTM in eager mode."""
    model = layer("lstm", bidirectional=True)
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        compiled = torch.compile(model, backend="sashiko", dynamic=True, fullgraph=True)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for length in (5, 9, 40):
            agree(compiled, model, torch.randn(2, length, 12))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
