"""One compilation of a small BERT serves every batch size and length, in floating point and in int8."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.export import Dim
from transformers import BertConfig, BertModel

import sashiko
from sashiko.driver.kernels import Kernels

BATCH, LENGTH, WORDS = 16, 256, 1000
SHAPES, QUANTIZED_SHAPES = 30, 8  # simulating int8 is slow


class Encoder(nn.Module):
    """BERT without the wrapping of its results."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
        self.bert = BertModel(BertConfig(vocab_size=WORDS, **sizes))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def batch(rows: int, length: int, generator: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers, and a mask with rows of different lengths of at least one token."""
    ids = torch.randint(0, WORDS, (rows, length))
    mask = torch.zeros(rows, length, dtype=torch.long)
    for row in mask:
        row[: generator.randint(1, length)] = 1
    return ids, mask


def shapes(count: int) -> list[tuple[int, int]]:
    """The corners, and random shapes; small ones are likelier, so that the test is quick."""
    generator = random.Random(1)
    corners = [(1, 1), (1, LENGTH), (BATCH, 1), (2, 2)]
    spread = [(int(BATCH ** generator.random()), int(LENGTH ** generator.random())) for _ in range(count - len(corners))]
    return corners + spread


def dynamic() -> dict[str, dict[int, Dim]]:
    free = {0: Dim("batch", min=1, max=BATCH), 1: Dim("length", min=1, max=LENGTH)}
    return {"input_ids": free, "attention_mask": free}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().eval()


class Count:
    """How often the compiler ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        real = Kernels.compiled

        def counted(kernels: Kernels, name: str) -> bytes:
            self.runs += 1
            return real(kernels, name)

        monkeypatch.setattr(Kernels, "compiled", counted)


def test_floating_point(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(0)
    compiled = sashiko.compile(model, batch(3, 17, generator), dynamic_shapes=dynamic(), strict=True)
    count = Count(monkeypatch)
    for rows, length in shapes(SHAPES):
        ids, mask = batch(rows, length, generator)
        with torch.no_grad():
            expected = model(ids, mask)
        error = (compiled(ids, mask) - expected).abs().max()
        assert error <= 1e-4, (rows, length, float(error))
    assert count.runs == 0, "a call compiled something"


def test_int8(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the simulation. Both round the same numbers to int8, but where sums in another order fall on the other side of a
    rounding boundary, an activation moves by one step, and what follows moves with it. A step of a normalized activation (range
    about 4) is 4 / 127 of its unit variance. Few elements move, so the root mean square stays below a quarter of that step, and no
    element is off by more than one."""
    generator = random.Random(0)
    small = sashiko.quantize(model, [batch(4, 48, generator) for _ in range(4)])
    compiled = sashiko.compile(small, batch(3, 17, generator), dynamic_shapes=dynamic(), strict=True)
    count = Count(monkeypatch)
    step = 4 / 127
    worst = largest = 0.0
    for rows, length in shapes(QUANTIZED_SHAPES):
        ids, mask = batch(rows, length, generator)
        with torch.no_grad():
            expected = small(ids, mask)
        error = compiled(ids, mask) - expected
        worst = max(worst, float(error.square().mean().sqrt()) / step)
        assert float(error.square().mean().sqrt()) <= step / 4, (rows, length)
        largest = max(largest, float(error.abs().max()) / step)
        assert float(error.abs().max()) <= step, (rows, length)
    print(f"largest root mean square error: {worst:.3f} steps, largest error {largest:.2f} steps")
    assert count.runs == 0, "a call compiled something"
