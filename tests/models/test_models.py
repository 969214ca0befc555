"""Whole architectures with random weights through `torch.compile(backend="sashiko")`, against eager.

Small versions have every kind of layer of the architecture, once or twice; the full sizes are marked slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import sashiko
from sashiko.runtime.plan import AtenStep

Made = tuple[nn.Module, dict[str, torch.Tensor]]

# Rounding errors of sums in another order, relative to the largest element of the result: 64 roundings of 2^-23 for each of a dozen
# layers in sequence.
TOLERANCE = 12 * 64 * 2**-23


@dataclass
class Counted:
    """A backend that counts what it leaves to PyTorch."""

    native: int = 0
    left: dict[str, int] = field(default_factory=dict)

    def note(self, compiled: sashiko.CompiledModel) -> None:
        for segment in compiled.executable.plan.segments:
            if isinstance(segment, AtenStep):
                self.left[str(segment.target)] = self.left.get(str(segment.target), 0) + 1
            else:
                self.native += len(segment.steps)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Counts kernels and operations of everything compiled in a test."""
    count = Counted()
    real = sashiko.CompiledModel.__init__

    def noted(self: sashiko.CompiledModel, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        count.note(self)

    monkeypatch.setattr(sashiko.CompiledModel, "__init__", noted)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):  # else Dynamo runs whatever holds an nn.LSTM in eager mode
        yield count
    torch._dynamo.reset()


def words(count: int, rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, count, (rows, length))


def masked(rows: int, length: int) -> torch.Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return mask


def resnet(small: bool) -> Made:
    sizes: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2]} if small else {}
    model = ResNetModel(ResNetConfig(**sizes))  # the defaults are those of ResNet-50
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics of a trained network, not zeros and ones
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model, {"pixel_values": torch.randn(2, 3, 32, 32) if small else torch.randn(1, 3, 224, 224)}


def vit(small: bool) -> Made:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = ViTModel(ViTConfig(**(sizes | {"image_size": 32, "patch_size": 8} if small else {})))
    return model, {"pixel_values": torch.randn(2, 3, 32, 32) if small else torch.randn(1, 3, 224, 224)}


def gpt2(small: bool) -> Made:
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**(sizes if small else {}), use_cache=False))
    length = 12 if small else 64
    return model, {"input_ids": words(300, 2, length), "attention_mask": masked(2, length)}


def t5(small: bool) -> Made:
    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 300}
    model = T5ForConditionalGeneration(T5Config(**(sizes if small else {}), use_cache=False))
    length = 10 if small else 48
    return model, {
        "input_ids": words(300, 2, length),
        "attention_mask": masked(2, length),
        "decoder_input_ids": words(300, 2, length - 3),
    }


class Lstm(nn.Module):
    """Two layers over an embedding; the last state is classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(100, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps, (hidden, _) = self.lstm(self.table(ids))
        return self.head(hidden[-1]), steps


def lstm(small: bool) -> Made:
    return Lstm(16 if small else 256), {"ids": words(100, 3, 6) if small else words(100, 8, 32)}


BUILDERS: tuple[Callable[[bool], Made], ...] = (resnet, vit, gpt2, t5, lstm)


def check(builder: Callable[[bool], Made], small: bool, counted: Counted) -> None:
    model, inputs = builder(small)
    model.eval()
    compiled = torch.compile(model, backend="sashiko")
    for _ in range(2):
        with torch.no_grad():
            expected, got = model(**inputs), compiled(**inputs)
        assert type(got) is type(expected)
        pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True)
        for mine, theirs in pairs:
            error = float((mine - theirs).abs().max() / theirs.abs().max())
            assert error <= TOLERANCE, f"relative error {error:.1e}"
    assert counted.native > 0, "nothing was compiled"
    print(f"{builder.__name__}: {counted.native} kernels; left to PyTorch: {counted.left or 'nothing'}")


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda b: b.__name__)
def test_small(builder: Callable[[bool], Made], counted: Counted) -> None:
    check(builder, True, counted)


@pytest.mark.slow
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda b: b.__name__)
def test_full_size(builder: Callable[[bool], Made], counted: Counted) -> None:
    check(builder, False, counted)
