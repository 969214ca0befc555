"""Views that only PyTorch reads: which become PyTorch's, and that the numbers stay."""

from __future__ import annotations

import torch

from sashiko.graph.interpret import run
from sashiko.rewrite.rules.outside import VIEW, views_outside
from tests.simulated_gpu import on_gpu


def test_views_of_operands() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        heads = torch.relu(x).narrow(1, 1, 4).reshape(2, 3, 4).transpose(0, 1)
        return torch.bmm(heads, w.expand(3, 4, 5)) + x.flip(1).narrow(0, 0, 3).reshape(3, 1, 5)

    x, w = torch.randn(6, 5), torch.randn(4, 5)
    graph = on_gpu(model, x, w).graph
    made = views_outside(graph)
    (product,) = [v for v in made.order if v.op == "aten" and "bmm" in v.name]
    below = [v for v in made.order if v.op == "aten" and getattr(v.attrs, "reason", "") == VIEW]
    assert {v.name for v in below} >= {"aten.reshape.default", "aten.permute.default", "aten.slice.Tensor", "aten.expand.default"}
    assert all(v in below for v in product.inputs)
    torch.testing.assert_close(run(made, [x, w])[0], model(x, w))


def test_what_is_no_view_of_pytorchs() -> None:
    """PyTorch's slices go forward."""
    graph = on_gpu(lambda x: x.flip(1) @ x, torch.randn(4, 4)).graph
    assert [v.name for v in views_outside(graph).order if v.op == "aten"] == ["aten.mm.default"]
