"""The least time of a call: by products or by bytes, against figures worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sashiko.cli.bench.cases import Example
from sashiko.cli.bench.limits import Work, kind, limit, work_of
from tests.cli.bench.runs import PEAKS


def example(model: nn.Module, *args: torch.Tensor) -> Example:
    return Example(model.eval(), args, (args,), (args,))


def test_many_operations_are_limited_by_products() -> None:
    work = Work(operations=400_000_000, weights=1000, moved=1000)
    assert limit(work, "fp32", 1, PEAKS).ms == pytest.approx(4.0)
    assert limit(work, "int8", 1, PEAKS).ms == pytest.approx(1.0)
    assert limit(work, "int8", 2, PEAKS).ms == pytest.approx(0.5)
    assert limit(work, "int8-symmetric", 1, PEAKS).by == "int8 products"


def test_a_product_of_one_row_is_limited_by_reading_its_weight() -> None:
    work = Work(operations=2 << 20, weights=1 << 20, moved=2000)
    found = limit(work, "fp32", 1, PEAKS)
    assert found.by == "read from memory"
    assert found.ms == pytest.approx((4 * (1 << 20) + 2000) / 10e9 * 1e3)
    assert limit(work, "int8", 1, PEAKS).ms == pytest.approx(((1 << 20) + 2000) / 10e9 * 1e3)


def test_elementwise_work_is_limited_by_copying_in_the_level_that_holds_it() -> None:
    found = limit(Work(0, 0, 300_000), "fp32", 1, PEAKS)
    assert found.by == "copy in L2"
    assert found.ms == pytest.approx(300_000 / 75e9 * 1e3)


def test_work_of_a_linear_layer() -> None:
    assert work_of(example(nn.Linear(8, 16), torch.randn(4, 8))) == Work(2 * 4 * 8 * 16, 8 * 16 + 16, 4 * (4 * 8 + 4 * 16))


def test_attention_counts_and_tables_of_embeddings_do_not() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids).view(2, 1, 4, 8)
            return nn.functional.scaled_dot_product_attention(x, x, x)

    work = work_of(example(Attention(), torch.zeros(2, 4, dtype=torch.long)))
    assert work.weights == 0
    assert work.operations == 2 * (2 * 4 * 4 * 8) * 2  # two products of 4 x 4 x 8 for each of two samples


@pytest.mark.parametrize(("cells", "gates"), [(nn.LSTM(8, 16, 2, bidirectional=True), 4), (nn.GRU(8, 16, 2, bidirectional=True), 3)])
def test_recurrent_layers_count_all_steps(cells: nn.Module, gates: int) -> None:
    work = work_of(example(cells, torch.randn(5, 3, 8)))
    assert work.operations == 2 * 2 * (5 * 3) * gates * 16 * ((8 + 16) + (32 + 16))


def test_of_experts_those_that_are_chosen_are_read() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 16, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.w, offs=torch.tensor([3, 3, 8, 8], dtype=torch.int32))

    work = work_of(example(Experts(), torch.randn(8, 16)))
    assert (work.operations, work.weights) == (2 * 8 * 16 * 32, 2 * 16 * 32)


def test_kinds() -> None:
    assert [kind(p) for p in ("fp32", "bf16", "int8", "int8-minmax")] == ["fp32", "bf16", "int8", "int8"]


def test_views_of_parameters_are_arguments_of_layers() -> None:
    """As the queries of a detector are, which its embeddings are cut into."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.layer = nn.Embedding(6, 8), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.queries.weight.split(4, 1)
            result: torch.Tensor = self.layer(first.expand(2, -1, -1)) + second + x
            return result

    assert work_of(example(Queries(), torch.randn(2, 6, 4))).operations == 2 * 2 * 6 * 4 * 4
