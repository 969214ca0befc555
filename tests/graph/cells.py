"""Recurrent layers by the name of their cell, and the tensors of what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def layer(cell: str, features: int = 6, size: int = 5, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    kind = {"nonlinearity": cell.removeprefix("rnn_")} if cell.startswith("rnn") else {}
    return LAYERS[cell](features, size, **kind, **options).eval()


def leaves(results: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
