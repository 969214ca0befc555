"""What the accuracy methods add to a program runs natively and computes what the simulation computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sashiko
from sashiko.quant import ActivationScheme, OpScheme, Scheme, SmoothQuant, WeightScheme
from sashiko.runtime.plan import AtenStep

ROWS, STATIC = ActivationScheme(granularity="row"), ActivationScheme(signed=False)
SCHEMES = {
    "rows smoothed": Scheme(OpScheme(ROWS), smooth=SmoothQuant(0.5)),
    "static smoothed": Scheme(OpScheme(STATIC), smooth=SmoothQuant(0.5)),
    "compensated": Scheme(OpScheme(ROWS, WeightScheme(compensate=True)), smooth=SmoothQuant(0.5)),
    "corrected": Scheme(OpScheme(STATIC), correct_bias=True),
    "groups": Scheme(OpScheme(None, WeightScheme(4, "group", 32, "mse", True)), correct_bias=True),
    "everything": Scheme(OpScheme(ROWS, WeightScheme(compensate=True)), smooth=SmoothQuant(), correct_bias=True, outliers=10.0),
}


class Block(nn.Module):
    """A feed-forward block after a norm that is also the residual; x: [..., 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        with torch.no_grad():
            self.norm.weight[5] *= 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.as_tensor(x + self.down(nn.functional.gelu(self.up(x))))


@pytest.mark.parametrize("name", SCHEMES)
def test_compiled_as_simulated(name: str) -> None:
    torch.manual_seed(0)
    model, batches = Block().eval(), [torch.randn(4, 8, 64) for _ in range(3)]
    small = sashiko.quantize(model, batches, preset=SCHEMES[name])
    compiled = sashiko.compile(small, (batches[0],))
    assert not [s for s in compiled.executable.plan.segments if isinstance(s, AtenStep)]
    with torch.no_grad():
        simulated, exact = small(batches[0]), model(batches[0])
    found = compiled(batches[0])
    # Where float32 sums of another order round to a neighbouring integer, one product of the next linear differs.
    assert (found - simulated).norm() < 1e-3 * simulated.norm()
    assert (found - exact).norm() < 0.03 * exact.norm()
