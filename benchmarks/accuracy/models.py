"""Small models trained on the spot from data that is always at hand: digits of scikit-learn, sources of the standard library.

Everything is deterministic: fixed seeds, fixed splits, one thread while training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Digits:
    """Handwritten digits. Images [N, 1, 8, 8] float32 with mean 0 and deviation 1, labels [N] int64."""

    train: torch.Tensor
    train_labels: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor

    def calibration(self, count: int = 256, batch: int = 64) -> list[torch.Tensor]:
        """Batches of the first training images."""
        return [self.train[i : min(i + batch, count)] for i in range(0, count, batch)]


def digits_data(seed: int = 0) -> Digits:
    """The 1797 digits of scikit-learn, a third of them to test. Raises ImportError without scikit-learn."""
    from sklearn.datasets import load_digits

    source = load_digits()
    images = torch.from_numpy(source.images).float().unsqueeze(1)
    labels = torch.from_numpy(source.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[len(images) // 3 :], order[: len(images) // 3]
    mean, deviation = images[train].mean(), images[train].std()
    images = (images - mean) / deviation
    return Digits(images[train], labels[train], images[test], labels[test])


class DigitsCnn(nn.Sequential):
    """Three convolutions and a linear; [B, 1, 8, 8] -> [B, 10]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
            nn.Linear(8 * width, 10),
        )


class Block(nn.Module):
    """A pre-norm transformer layer; [B, S, width] -> the same."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return result


class DigitsTransformer(nn.Module):
    """A vision transformer that reads an image as eight rows; [B, 1, 8, 8] -> [B, 10]."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.rows(x.squeeze(1)) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.head(self.norm(hidden).mean(1))
        return result


class LanguageModel(nn.Module):
    """A causal transformer over bytes; int64 [B, S] -> logits [B, S, 256], S at most `context`."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.token(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.head(self.norm(hidden))
        return result


class RecurrentLanguageModel(nn.Module):
    """One layer of cells over bytes; int64 [B, S] -> logits [B, S, 256]. cell: LSTM, GRU or RNN."""

    def __init__(self, cell: str, width: int = 256) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(256, width // 2), nn.Linear(width, 256)
        self.cells = getattr(nn, cell)(width // 2, width, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.cells(self.token(ids))[0])
        return result


def train_digits_cnn(seed: int = 0, epochs: int = 8, data: Digits | None = None, width: int = 16) -> DigitsCnn:
    """A trained `DigitsCnn` in evaluation mode; some seconds."""
    with deterministic(seed):
        model = DigitsCnn(width)
        _train(model, epochs, data or digits_data(), peak=4e-3)
    return model


def train_digits_transformer(seed: int = 0, epochs: int = 24, data: Digits | None = None, width: int = 64) -> DigitsTransformer:
    """A trained `DigitsTransformer` in evaluation mode; some seconds."""
    with deterministic(seed):
        model = DigitsTransformer(width)
        _train(model, epochs, data or digits_data(), peak=3e-3)
    return model


def _train(model: nn.Module, epochs: int, data: Digits, peak: float) -> None:
    """Trains in batches of 64 images with some noise, and puts the model in evaluation mode."""
    steps = math.ceil(len(data.train) / 64)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    for epoch in range(epochs):
        order = torch.randperm(len(data.train))
        for i in range(steps):
            set_rate(optimizer, peak, (epoch + i / steps) / epochs)
            chosen = order[64 * i : 64 * (i + 1)]
            images = data.train[chosen]
            loss = F.cross_entropy(model(images + 0.3 * torch.randn_like(images)), data.train_labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model.eval()


def set_rate(optimizer: torch.optim.Optimizer, peak: float, done: float) -> None:
    """The learning rate after a share `done` of the training: up in the first tenth, down along a cosine."""
    rate = peak * min(done * 10 + 0.02, 0.5 * (1 + math.cos(math.pi * done)) + 0.01)
    for group in optimizer.param_groups:
        group["lr"] = rate


def top1(model: Callable[[torch.Tensor], torch.Tensor], data: Digits) -> float:
    """Share of the test images that are recognized, in one call."""
    with torch.no_grad():
        return float((model(data.test).argmax(1) == data.test_labels).double().mean())


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """One thread and random numbers from `seed`; afterwards both are as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
