"""`quantize_and_compile` by itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import sashiko


def test_the_example_is_the_first_batch_though_its_memory_is_used_again() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        batch = {}
        for rows in (16, 16, 3):
            batch["x"] = torch.randn(rows, 8)
            yield batch

    model, x = Named().eval(), torch.randn(16, 8)
    fast = sashiko.quantize_and_compile(model, batches(), preset="int8")
    assert (fast(x=x) - model(x)).norm() < 0.05 * model(x).norm()
