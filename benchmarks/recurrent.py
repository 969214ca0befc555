"""Recurrent networks, for `sashiko bench`.

    sashiko bench --models benchmarks/recurrent.py:lstm --precision fp32,bf16,int8-static
    sashiko bench --models benchmarks/recurrent.py:gru --precision fp32,bf16,int8-static
"""

from __future__ import annotations

import torch
from torch import nn

WORDS, SIZE, FEATURES = 8000, 256, 128


class Tagger(nn.Module):
    """Words to a class for each: two bidirectional layers of LSTM cells, as taggers and speech models had them before transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, SIZE)
        self.cells = nn.LSTM(SIZE, SIZE, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * SIZE, 64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.cells(self.table(words))[0])
        return result


class Encoder(nn.Module):
    """Frames to one vector: the last state of one layer of GRU cells."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(FEATURES, SIZE, batch_first=True)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.cells(frames)[1]
        return result


def lstm() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Tagger().eval(), (torch.randint(0, WORDS, (4, 64)),)


def gru() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Encoder().eval(), (torch.randn(8, 50, FEATURES),)
