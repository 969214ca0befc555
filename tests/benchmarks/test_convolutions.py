"""Both sides of the benchmark of convolutions compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sashiko
from tests.benchmarks.test_arguments import script


@torch.no_grad()
@pytest.mark.isa("avx2")
def test_layers_of_bytes_are_integer_products_on_both_sides() -> None:
    module = script("convolutions")
    model = module.Bytes(nn.Conv2d(16, 32, 3, padding=1, groups=4)).eval()
    x = torch.randint(0, 256, (1, 9, 11, 16), dtype=torch.uint8)
    compiled, peer = sashiko.compile(model, (x,), strict=True), module.onednn_bytes(model, x)()
    assert "int_linear" in str(compiled.explain()) and "gemm_f32" not in str(compiled.explain())
    want = model(x).int()
    assert want.unique().numel() > 20
    for got in (compiled(x), peer.permute(0, 2, 3, 1)):  # a tie, rounded the other way
        assert (got.int() - want).abs().max() <= 1
