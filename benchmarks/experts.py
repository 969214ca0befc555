"""A mixture of experts, for `sashiko bench`: Mixtral's layers with random weights, four of them of 512, eight experts, two for each token.

    sashiko bench --models benchmarks/experts.py:token,benchmarks/experts.py:prefill --precision fp32,bf16,int8,int8-weight,int4-weight
"""

from __future__ import annotations

import torch
from torch import nn


class Words(nn.Module):
    """Words to their last hidden states."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralModel

        self.model = MixtralModel(MixtralConfig(
            vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
            num_local_experts=8, num_experts_per_tok=2, use_cache=False,
        ))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(input_ids=words).last_hidden_state
        return result


def _of(length: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Words().eval(), (torch.randint(0, 2000, (1, length)),)


def token() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _of(1)


def prefill() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _of(128)
