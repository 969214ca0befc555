"""Writes where a mask is true, of what is computed of others there, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from sashiko.diagnostics.errors import SashikoError, Unsupported
from tests.graph.captures import capture, module, run


def _written(self: object, d: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    nearest, computed, rows, columns = d.clone(), d.clone(), d.clone(), d.clone()
    for step in range(2):  # as farthest points are sampled: the distance to the nearest one that was taken
        nearer = q * (step + 1) < nearest
        nearest[nearer] = q[nearer]
        _ = nearest[nearer] * 2  # which nobody reads, as the last of what is written in a loop may be
    near, far = q < d, q[:, 0] > d[:, 0]
    computed[near] *= q[near] * 2 + torch.where(d[near] > 0, d[near], 1.0).exp()
    rows[far] = q[far].double().relu_().float() * d[:1]
    columns[:, q[0] < 0] = q[:, q[0] < 0].abs() + d[:, :1]
    return nearest, computed, rows, columns


def test_values() -> None:
    model, rows = module(_written), {0: Dim("rows", min=2, max=64)}
    captured = capture(model, (torch.randn(6, 3), torch.randn(6, 3)), shapes=(rows, rows))
    assert not any(value.op == "aten" for value in captured.graph.order) and not captured.checks
    for n in (6, 9):
        d, q = torch.randn(n, 3), torch.randn(n, 3)
        d[1, 1], q[2] = torch.nan, torch.nan  # where masks are not true
        torch.testing.assert_close(run(captured, (d, q)), model(d, q), equal_nan=True)


@pytest.mark.parametrize("to", [lambda q: q.cumsum(0), lambda q: q * q.shape[0], lambda q: (7 % q.long()).float()])
def test_what_is_not_computed_element_by_element_is_refused(to: Callable[[Tensor], Tensor]) -> None:
    def forward(self: object, d: Tensor, q: Tensor) -> Tensor:
        mask, d = q > 0, d.clone()
        d[mask] = to(q[mask])
        return d

    with pytest.raises(Unsupported, match="depends on the data"):
        capture(module(forward), (torch.ones(6), torch.ones(6)))


@pytest.mark.parametrize("q", [torch.ones(6, 5), torch.ones(6, 1, dtype=torch.float64)], ids=["broadcast", "of another type"])
def test_what_pytorch_does_not_write_is_not_written(q: Tensor) -> None:
    def forward(self: object, d: Tensor, q: Tensor) -> Tensor:
        mask, d = q[:, 0] > 0, d.clone()
        d[mask] = q[mask] * 2
        return d

    with pytest.raises(SashikoError):
        capture(module(forward), (torch.ones(6, 1), q))


def test_masks_of_many_steps_are_compared_at_once() -> None:
    def forward(self: object, d: Tensor, q: Tensor) -> Tensor:
        def mask() -> Tensor:
            y = q
            for _ in range(40):
                y = y * y + y
            return y > 0

        d = d.clone()
        d[mask()] = q[mask()]
        return d

    model, given = module(forward), (torch.zeros(6), torch.rand(6) - 0.5)
    torch.testing.assert_close(run(capture(model, given), given), model(*given))
