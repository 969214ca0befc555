"""Rows that are sorted and have more elements than 32 bits can number."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError

PLACES = 1 << 32


class Top(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.topk(x, 2)
        return values, places


def test_rows_of_any_length_are_refused_from_where_their_places_do_not_fit() -> None:
    compiled = sashiko.compile(Top().eval(), (torch.zeros(100, dtype=torch.uint8),), dynamic_shapes=({0: Dim("n", min=8)},))
    x = torch.zeros(3000, dtype=torch.uint8)
    x[2000], x[7] = 9, 5
    for got, expected in zip(compiled(x), torch.topk(x, 2), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(InputError, match=f"captured where {PLACES} >= .*, and here .* = {PLACES + 1}"):
        compiled(torch.empty(PLACES + 1, dtype=torch.uint8))


@pytest.mark.slow
def test_rows_of_a_declared_length_are_not() -> None:
    lengths = {0: Dim("n", min=8, max=2 * PLACES)}
    compiled = sashiko.compile(Top().eval(), (torch.zeros(100, dtype=torch.uint8),), dynamic_shapes=(lengths,))
    x = torch.zeros(PLACES + 100, dtype=torch.uint8)
    x[PLACES + 50], x[7] = 9, 5
    values, places = compiled(x)
    assert (values.tolist(), places.tolist()) == ([9, 5], [PLACES + 50, 7])
