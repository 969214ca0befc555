"""Outliers planted into a trained transformer: the same function, bit for bit, on activations that are hard to quantize.

Some channels between two layers are multiplied, and the weights that read them divided, by a power of two, which is exact.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from accuracy.models import Block, DigitsTransformer


def with_outliers(model: DigitsTransformer, factor: float = 256.0, channels: int = 3) -> DigitsTransformer:
    """A copy whose normalized activations have `channels` channels `factor` times as large, before both halves of each layer.

    factor: a power of two. The channels are those with the least gain, so that nothing but the factor makes them stand out.
    """
    result = copy.deepcopy(model)
    with torch.no_grad():
        for block in result.blocks:
            assert isinstance(block, Block)
            for norm, reader in ((block.attention_norm, block.qkv), (block.mlp_norm, block.up)):
                _plant(norm, reader, factor, channels)
    return result


def _plant(norm: nn.LayerNorm, reader: nn.Linear, factor: float, channels: int) -> None:
    chosen = norm.weight.abs().argsort()[:channels]
    norm.weight[chosen] *= factor
    norm.bias[chosen] *= factor
    reader.weight[:, chosen] /= factor
