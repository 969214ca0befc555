"""Outliers planted into a trained transformer: the same function, bit for bit, on activations that are hard to quantize.

Some channels between two layers are multiplied, and the weights that read them divided, by a power of two, which is exact.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from accuracy.models import Block, DigitsTransformer

FACTOR, CHANNELS = 256.0, 3


def with_outliers(model: DigitsTransformer) -> DigitsTransformer:
    """A copy whose normalized activations have some channels that are many times as large, before both halves of each layer.

    The channels are those with the least gain, so that nothing but the factor makes them stand out.
    """
    result = copy.deepcopy(model)
    with torch.no_grad():
        for block in result.blocks:
            assert isinstance(block, Block)
            for norm, reader in ((block.attention_norm, block.qkv), (block.mlp_norm, block.up)):
                _plant(norm, reader)
    return result


def _plant(norm: nn.LayerNorm, reader: nn.Linear) -> None:
    chosen = norm.weight.abs().argsort()[:CHANNELS]
    norm.weight[chosen] *= FACTOR
    norm.bias[chosen] *= FACTOR
    reader.weight[:, chosen] /= FACTOR
