"""Rows that would share the sets of a cache lie apart, and nobody else sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sashiko
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, bf16, f32
from sashiko.stitch.layout import spread_rows


def chain(width: int, dtype: DType = f32, between: Callable[[Value], Value] = b.relu, also: bool = False) -> Graph:
    """linear(between(linear(x))), with `width` columns in the middle. also: the middle is a result, too."""
    x = b.input_(0, dtype, (4, 32))
    first, second = (b.constant(torch.randn(shape).to(dtype.torch)) for shape in ((width, 32), (32, width)))
    middle = b.cast(between(b.linear(x, first)), dtype)
    return Graph((x,), (b.linear(middle, second), *([middle] if also else [])))


def gaps(graph: Graph) -> list[int]:
    return [v.tensor.room[-1][1] for v in graph.order if v.tensor.room]


def test_rows_at_multiples_of_1024_bytes_lie_a_line_apart() -> None:
    assert gaps(spread_rows(chain(256))) == [16]
    assert gaps(spread_rows(chain(1024, bf16))) == [32]
    assert gaps(spread_rows(chain(250))) == gaps(spread_rows(chain(320))) == gaps(spread_rows(chain(256, bf16))) == []


def test_what_others_see_stays_dense() -> None:
    assert gaps(spread_rows(chain(256, also=True))) == []
    # Rows that are taken apart would have gaps in the middle.
    assert gaps(spread_rows(chain(256, between=lambda x: b.reshape(b.relu(b.reshape(x, (8, 128))), (4, 256))))) == []
    assert gaps(spread_rows(chain(256, between=lambda x: b.reshape(b.relu(b.reshape(x, (2, 2, 256))), (4, 256))))) == [16]


def test_strides_and_bytes_count_the_gaps() -> None:
    spread = next(v.tensor for v in spread_rows(chain(256)).order if v.tensor.room)
    assert (spread.strides, spread.nbytes) == ((272, 1), 4 * 4 * 272)


def test_the_graph_means_the_same() -> None:
    graph = chain(256)
    x = torch.randn(4, 32)
    assert torch.equal(run(graph, [x])[0], run(spread_rows(graph), [x])[0])


class Middle(nn.Module):
    """Two layers with a normalization between them, whose rows are used three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        return y.tanh() + self.second(y)


@pytest.mark.parametrize("rows", [(1,), (37,), (3, 5)])
@pytest.mark.parametrize("width", [256, 1024])
def test_results_are_right(width: int, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Middle(width).eval(), torch.randn(*rows, 48)
    compiled = sashiko.compile(model, (x,))
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), rtol=0, atol=2e-5)


class Apart(Middle):
    """The same, with an operation of PyTorch's own in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        return self.second(y) + y.sort(-1).values


def test_segments_hand_over_dense_tensors() -> None:
    torch.manual_seed(0)
    model, x = Apart(256).eval(), torch.randn(9, 48)
    with torch.no_grad():
        assert torch.allclose(sashiko.compile(model, (x,))(x), model(x), rtol=0, atol=2e-5)
