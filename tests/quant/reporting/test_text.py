"""The text report: what is counted, and under which titles."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from sashiko.quant import BF16, PRESETS, Override, quantize
from tests.quant.models import mlp


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x), x @ x.t()


def test_what_is_in_bf16_has_a_table_of_its_own() -> None:
    scheme = PRESETS["int8"].overriding(Override("layers.0", BF16), Override("matmul", BF16))
    scheme = replace(scheme, operations=(*scheme.operations, "matmul"))
    small = quantize(Squares().eval(), [torch.randn(3, 8)], preset=scheme)
    counts, quantized, narrow = re.split(r"\n(?=quantized|in bf16)", small.report())
    assert counts == "2 in bf16, 1 in int8 per row, 0 left as they were, calibrated on 1 batches"
    assert "layers.2" in quantized and "bf16" not in quantized
    rows = [line.split() for line in narrow.splitlines() if "  bf16" in line]
    assert rows == [["layers.0", "linear", "bf16", "8", "32"], ["matmul", "matmul", "bf16"]]  # without a weight there are no K and N
