"""Small models and checks that the quantization tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node

from sashiko.quant import QuantizedModule
from sashiko.quant import ops as qops


class Attention(nn.Module):
    """Self-attention with three projections of the same activation; x: [B, S, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / 8**0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        out: torch.Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return out


class EncoderDecoder(nn.Module):
    """x: [B, S, 8], of which attention_mask says what counts; decoder_x: [B, T, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.keys, self.decoder, self.query, self.out = (nn.Linear(8, 8, bias=False) for _ in range(5))

    def forward(
        self, x: torch.Tensor, attention_mask: torch.Tensor, decoder_x: torch.Tensor, decoder_attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        keys = self.keys(self.encoder(x))
        y = torch.zeros_like(decoder_x)
        y[:, :] = self.decoder(decoder_x)
        if decoder_attention_mask is not None:
            y = y * decoder_attention_mask[..., None]
        scores = (self.query(y) @ keys.transpose(-1, -2)).masked_fill(attention_mask[:, None, :] == 0, -1e4)
        out: torch.Tensor = self.out(y + scores.softmax(-1) @ keys)
        return out


def sequences(target: int, source_garbage: float = 1.0, target_garbage: float = 1.0) -> dict[str, torch.Tensor]:
    """Sources of 6 of which 2 count, targets of which 3 count; garbage times noise in the others."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 6, 8, generator=g), torch.randn(3, target, 8, generator=g)
    x[:, 2:] *= source_garbage
    y[:, 3:] *= target_garbage
    return {"x": x, "attention_mask": (torch.arange(6) < 2).long().expand(3, 6).contiguous(), "decoder_x": y}


def mlp(bias: bool = True) -> nn.Sequential:
    """[..., 8] -> [..., 4]"""
    return nn.Sequential(nn.Linear(8, 32, bias=bias), nn.GELU(), nn.Linear(32, 4, bias=bias)).eval()


def bert() -> nn.Module:
    """Two layers of BERT with random weights."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100, max_position_embeddings=64
    )
    model: nn.Module = BertModel(config).eval()
    return model


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(0, 100, (batch, length)), "attention_mask": mask}


class IntegerExecution(Interpreter):
    """Runs the simulation and, beside each quantized linear, the integers that a kernel would multiply, exactly.

    `steps`: for each such linear, the greatest difference between the two, in steps of the activation's own quantization of a result
    with this range (greatest magnitude / 127).
    """

    def __init__(self, module: QuantizedModule) -> None:
        super().__init__(module)
        self.steps: list[float] = []

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.target == torch.ops.aten.linear.default and n.args[1].target == qops.dequantize_per_channel:  # type: ignore[union-attr]
            exact = self._exact(n)
            step = exact.abs().max().item() / 127
            self.steps.append((result.double() - exact).abs().max().item() / step if step else 0.0)
        return result

    def _exact(self, n: Node) -> torch.Tensor:
        x, w, *bias = n.args
        assert isinstance(x, Node) and isinstance(w, Node)
        q, scale, zero_point = x.args[:3]
        ints, wide = self.env[q].to(torch.int64) - zero_point, self._get(w.args[0]).to(torch.int64)
        exact = (ints @ wide.T).double() * (scale * self._get(w.args[1]).double())
        return exact + self._get(bias[0]).double() if bias and bias[0] is not None else exact

    def _get(self, node: Any) -> torch.Tensor:
        """Constants are read again: the interpreter drops values after their last use."""
        if node.op == "get_attr":
            value: Any = self.module
            for part in node.target.split("."):
                value = getattr(value, part)
            return value
        return self.env[node]

    def check(self, *args: Any) -> list[float]:
        self.garbage_collect_values = False
        with torch.no_grad():
            self.run(*args)
        return self.steps


class Headed(nn.Module):
    """With a part whose result nothing uses, as the pooler of an encoder under another head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        self.pooler(y[:, 0])
        result: torch.Tensor = self.head(y)
        return result
