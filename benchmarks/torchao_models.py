"""Encoders that torchao's `quantize_` has quantized, for `sashiko bench`: everybody compiles the same module.

    sashiko bench --models benchmarks/torchao_models.py:dynamic,benchmarks/torchao_models.py:weights --precision fp32 --vs inductor
"""

from __future__ import annotations

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from transformers import BertConfig, BertModel

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _encoder(config: object, batch: int, length: int) -> Example:
    """BERT of 4 layers, its linears quantized as `config` says."""
    shape = BertConfig(num_hidden_layers=4, hidden_size=256, intermediate_size=1024, num_attention_heads=4)
    model: nn.Module = BertModel(shape, add_pooling_layer=False).eval().requires_grad_(False)
    quantize_(model, config)  # type: ignore[arg-type]
    return model, (torch.randint(0, shape.vocab_size, (batch, length)),)


def dynamic() -> Example:
    """int8 weights, activations in int8 with a scale for each row, found in each call."""
    return _encoder(Int8DynamicActivationInt8WeightConfig(), 8, 64)


def weights() -> Example:
    """int8 weights alone."""
    return _encoder(Int8WeightOnlyConfig(), 1, 8)
