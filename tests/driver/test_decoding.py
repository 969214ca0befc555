"""Text generation: a decoder whose caches are arguments, and transformers' own loop, beside eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.runtime.segments import written
from tests.sweeps import swept

LAYERS, WIDTH, HEADS, GROUPS, DEPTH, LENGTH, WORDS = 2, 64, 4, 2, 16, 24, 128


class Block(nn.Module):
    """A layer with grouped heads and a gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, HEADS * DEPTH), nn.Linear(WIDTH, 2 * GROUPS * DEPTH)
        self.out, self.up, self.down = nn.Linear(HEADS * DEPTH, WIDTH), nn.Linear(WIDTH, 256), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q = self.q(y).unflatten(2, (HEADS, DEPTH)).transpose(1, 2)
        k, v = self.kv(y).unflatten(2, (2, GROUPS, DEPTH)).permute(2, 0, 3, 1, 4)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        seen = torch.arange(keys.shape[2]) <= position.unsqueeze(1)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.middle(x)).chunk(2, -1)
        return x + torch.as_tensor(self.down(F.silu(gate) * up))


class Decoder(nn.Module):
    """All layers share one tensor of keys and one of values, [layer, batch, group, position, depth]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, keys[layer], values[layer], position)
        logits: torch.Tensor = x[:, -1] @ self.embed.weight.t()
        return logits


def caches(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (LAYERS, batch, GROUPS, LENGTH, DEPTH)
    return torch.zeros(shape), torch.zeros(shape)


@torch.no_grad()
def text(step: Any, prompt: torch.Tensor, given: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, logits of each step, keys) of greedy decoding, or of `given` tokens."""
    keys, values = caches(len(prompt))
    logits = [step(prompt, torch.arange(prompt.shape[1]), keys, values)]
    tokens: list[torch.Tensor] = []
    for at in range(prompt.shape[1], LENGTH):
        tokens.append(logits[-1].argmax(-1, keepdim=True) if given is None else given[:, len(tokens) : len(tokens) + 1])
        logits.append(step(tokens[-1], torch.tensor([at]), keys, values))
    return torch.cat(tokens, 1), torch.stack(logits), keys


@pytest.mark.parametrize("kind", swept(("fp32", "bf16", "int8", "int4-weight"), ("bf16", "int8")))
def test_a_decoder_with_caches_as_arguments(kind: str) -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    prompt = torch.randint(0, WORDS, (2, 5))
    example = (prompt, torch.arange(5), *caches(2))
    length = Dim("length", max=LENGTH)
    simulated = model if kind in ("fp32", "bf16") else sashiko.quantize(model, [example], preset=kind)
    step = sashiko.compile(simulated, example, dynamic_shapes=({1: length}, {0: length}, None, None), strict=True,
                           precision="bf16" if kind == "bf16" else "fp32")
    assert len(written(step.executable.plan)) == 2, "one row of each cache is written"
    tokens, logits, keys = text(model, prompt)
    if kind == "fp32":
        assert torch.equal(text(step, prompt)[0], tokens)
    wanted = (logits, keys) if simulated is model else text(simulated, prompt, tokens)[1:]
    got = text(step, prompt, tokens)[1:]
    # Products rounded to bf16, or integers of neighbouring steps where sums differ in their last digits: a share of the whole.
    share = 1e-5 if kind == "fp32" else 1e-2
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine - theirs).norm() <= share * theirs.norm()


class Grown(nn.Module):
    """A step of attention that returns its caches with one position more."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * HEADS * DEPTH)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = self.project(x).unflatten(2, (3, HEADS, DEPTH)).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return F.scaled_dot_product_attention(q, keys, values), keys, values


def grown(keys: int, values: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, 1, WIDTH), *(torch.randn(1, HEADS, length, DEPTH) for length in (keys, values))


@pytest.mark.parametrize("preset", [None, "int8-dynamic"])
def test_caches_that_grow(preset: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: nn.Module = Grown().eval()
    if preset is not None:
        model = sashiko.quantize(model, [grown(5, 5), grown(9, 9)], preset=preset, progress=False)
    step = sashiko.compile(model, grown(5, 5), dynamic_shapes=(None, {2: Dim.AUTO}, {2: Dim.AUTO}), strict=True)
    step.save(tmp_path / "step")
    loaded = sashiko.load(tmp_path / "step")
    for length in (1, 5, 12):
        given = grown(length, length)
        with torch.no_grad():
            wanted = model(*given)
        for result in (step(*given), loaded(*given)):
            assert_close(result, wanted, rtol=1e-2 if preset else 1e-4, atol=1e-2 if preset else 1e-5)
    for call in (step, loaded, *([model] if preset else [])):
        with pytest.raises(sashiko.InputError, match=r"size 7\b.* 5\b"):
            call(*grown(5, 7))


@pytest.mark.slow
@pytest.mark.parametrize("preset", [None, "int8-dynamic"])
def test_the_growing_cache_of_transformers(preset: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128
    )
    llama = transformers.LlamaForCausalLM(config)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama

        def forward(self, tokens: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            cache = transformers.DynamicCache(config=config)
            for layer, pair in enumerate(zip(keys, values, strict=True)):
                cache.update(*pair, layer)
            logits = self.llama(tokens, past_key_values=cache, use_cache=True).logits
            return logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))

    def example(length: int) -> tuple[Any, ...]:
        return torch.randint(0, 256, (1, 1)), *([torch.randn(1, 2, length, 16) for _ in range(2)] for _ in range(2))

    model: nn.Module = Step().eval()
    if preset is not None:
        model = sashiko.quantize(model, [example(5), example(9)], preset=preset, progress=False)
    grows = [{2: Dim.AUTO}] * 2
    step = sashiko.compile(model, example(5), dynamic_shapes=(None, grows, grows), strict=True)
    for length in (2, 5, 11):
        given = example(length)
        with torch.no_grad():
            wanted = model(*given)
        for mine, theirs in zip(step(*given), wanted, strict=True):
            assert (mine - theirs).norm() <= (2e-2 if preset else 1e-5) * theirs.norm()


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["static", None])
@pytest.mark.parametrize("batch", [1, 3])
def test_generate_of_transformers(cache: str | None, batch: int) -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    tokens = torch.randint(3, 256, (batch, 7))
    mask = torch.ones_like(tokens)
    for row in range(1, batch):
        mask[row, :row] = tokens[row, :row] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    options |= {"cache_implementation": cache, "output_logits": True, "return_dict_in_generate": True}
    wanted = model.generate(tokens, **options)
    model.forward = torch.compile(model.forward, backend="sashiko", dynamic=True, options={"strict": True})
    got = model.generate(tokens, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-4)
