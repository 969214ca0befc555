"""Layers that `quantize_` has put in place, compiled: products with integers, in every way to compile, and in a model that others call."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.driver import backend
from sashiko.driver.model import CompiledModel, build_model
from sashiko.runtime.plan import AtenStep
from tests.driver.functions import compiled_by_the_backend
from tests.sweeps import swept

# What is multiplied, for a model in f32 and in bf16.
PRODUCTS = {"int8-weight": ("f32_i8", "bf16_i8"), "int4-weight": ("f32_i4", "bf16_i4"), "int8-dynamic": ("_i8", "_i8")}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def quantized(preset: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64, bias=False)).eval().to(dtype)
    sashiko.quantize_(model, preset)
    return model


def products(compiled: CompiledModel) -> list[str]:
    assert compiled.built is not None
    notes = [note for segment in compiled.built.notes if not isinstance(segment, AtenStep) for note in segment]
    return [note.kernel for note in notes if "linear" in note.label]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", PRODUCTS)
def test_layers_are_products_of_integers(preset: str, dtype: torch.dtype) -> None:
    """Rounding of what is multiplied, of results, and by one step of a row where another sum rounds the other way."""
    model, x = quantized(preset, dtype), torch.randn(2, 5, 128, dtype=dtype)
    expected = model(x)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] + (2e-2 if preset == "int8-dynamic" else 0)
    compiled = sashiko.compile(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=True)
    kernels = products(compiled)
    assert len(kernels) == 2 and all(PRODUCTS[preset][dtype == torch.bfloat16] in kernel for kernel in kernels)
    for call in (compiled, torch.compile(model, backend="sashiko", options={"strict": True})):
        got = call(x)
        assert got.dtype == dtype
        assert (got.double() - expected.double()).abs().max() <= tolerance * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("preset", ["int8-weight", "int4-weight"])
def test_weights_that_change_are_packed_again_and_scales_are_watched(preset: str) -> None:
    model, x = quantized(preset), torch.randn(3, 128)
    compiled = sashiko.compile(model, (x,))
    compiled(x)
    model[0].integers.neg_()  # type: ignore[operator,index,union-attr]
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    model[0].zero_point.add_(1)  # type: ignore[operator,index,union-attr]
    with pytest.raises(InputError, match="changed after the model was compiled"):
        compiled(x)


class Counting(nn.Module):
    """A model that counts its calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.inner(x)


@pytest.mark.usefixtures("own_garbage")
@torch.no_grad()
@pytest.mark.parametrize("preset", swept(PRODUCTS, ("int8-dynamic",)))
def test_the_backend_compiles_again_for_other_scales(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each state, in place of what it had; the call that finds them out is made once. A scale that is NaN stays the same."""
    made = compiled_by_the_backend(monkeypatch)
    model, other, x = Counting(quantized(preset)), Counting(quantized(preset)), torch.randn(3, 128)
    compiled = torch.compile(model, backend="sashiko", options={"strict": True})
    compiled(x)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: model.inner.load_state_dict(other.inner.state_dict()),
        lambda: model.inner[2].zero_point.fill_(1),  # type: ignore[operator,index,union-attr]
        lambda: model.inner[2].scale[0].fill_(torch.nan),  # type: ignore[operator,index,union-attr]
    )
    for number, change in enumerate(changes):
        change()
        expected = model.inner(x)
        for _ in range(2):
            before = int(model.calls)
            got = compiled(x)
            assert int(model.calls) == before + 1
            assert got.isnan().any() == expected.isnan().any()
            scale = float(expected.nan_to_num().abs().max())
            torch.testing.assert_close(got, expected, rtol=0, atol=scale * (2e-2 if preset == "int8-dynamic" else 1e-5), equal_nan=True)
        gc.collect()
        assert len(made) == number + 2 and [each() is not None for each in made] == [False] * (number + 1) + [True]


@torch.no_grad()
def test_transformers_generate_with_it() -> None:
    """GPT-2's layers are no nn.Linear; its head shares its weight with the table."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=96, n_positions=32, eos_token_id=None, pad_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    table = model.transformer.wte.weight.clone()
    record = sashiko.quantize_(model, "int8-weight")
    assert [item.site.name.removeprefix("transformer.h.0.") for item in record.sites] == [
        "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "lm_head",
    ]
    assert torch.equal(model.transformer.wte.weight, table)
    prompt, options = torch.randint(1, 96, (1, 5)), {"max_new_tokens": 1, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(prompt, **options)
    model.forward = torch.compile(model.forward, backend="sashiko", dynamic=True)
    assert torch.equal(model.generate(prompt, **options), expected)


def mixture(kind: str) -> nn.Module:
    """A small mixture of experts of transformers: matrices [E, N, K], or [E, K, N] and biases."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    common = {**sizes, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**common)).eval()  # type: ignore[no-any-return]
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**common, head_dim=16)).eval()  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "preset", "dtype"), swept(
    list(itertools.product(("mixtral", "gpt-oss"), ("int8-weight", "int4-weight"), (torch.float32, torch.bfloat16))),
    [("gpt-oss", "int4-weight", torch.bfloat16)],
))
def test_experts_are_products_of_integers(kind: str, preset: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses the experts is no linear layer and stays as it is."""
    made: list[CompiledModel] = []

    def kept(*arguments: Any) -> CompiledModel:
        made.append(build_model(*arguments))
        return made[-1]

    monkeypatch.setattr(backend, "build_model", kept)
    ids = torch.randint(0, 100, (1, 7))
    model = mixture(kind).to(dtype)
    plain = model(ids).logits
    sites = [each.site for each in sashiko.quantize_(model, preset).sites]
    assert [site.name.rpartition(".")[2] for site in sites if site.operation == "experts"] == ["gate_up_proj", "down_proj"]
    expected = model(ids).logits
    got = torch.compile(model, backend="sashiko", options={"strict": True})(ids).logits
    wanted = PRODUCTS[preset][dtype == torch.bfloat16]
    kernels = [note.kernel for note in made[0].built.notes[0] if "routed_linear" in note.label]  # type: ignore[union-attr]
    assert len(kernels) == 2 and all(wanted in kernel for kernel in kernels), kernels
    assert (got - expected).norm() <= (1e-5 if dtype == torch.float32 else 3e-2) * expected.norm()
    assert (got - plain).norm() <= (0.05 if preset == "int8-weight" else 0.5) * plain.norm()
