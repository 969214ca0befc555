"""Products of groups of rows: the operation beside torch's, what it captures, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph import build as b
from sashiko.graph.aten.experts import EXPERTS
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph
from sashiko.graph.types import f32, i8, i32, i64


def test_rows_take_the_matrix_of_their_group() -> None:
    x, w = torch.randn(9, 5), torch.randn(3, 4, 5)
    for ends in ([2, 2, 9], [0, 3, 7], [9, 9, 9], [0, 0, 0]):
        found = EXPERTS(x, w, torch.tensor(ends))
        for row in range(9):
            expert = next((e for e, end in enumerate(ends) if row < end), None)
            torch.testing.assert_close(found[row], torch.zeros(4) if expert is None else w[expert] @ x[row])


def test_gradients_pass() -> None:
    x, w = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: EXPERTS(x, w, torch.tensor([2, 2, 5])), (x, w))


def test_it_is_the_product_of_torch() -> None:
    x, w, ends = torch.randn(32, 16).bfloat16(), torch.randn(3, 16, 24).bfloat16(), torch.tensor([8, 8, 32], dtype=torch.int32)
    wide = EXPERTS(x.float(), w.mT.float(), ends)
    torch.testing.assert_close(torch._grouped_mm(x, w, offs=ends).float(), wide, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("ends", [[1, 1, 4], [0, 9, 9], [5, 2, -4]])
def test_the_operation_of_the_ir(ends: list[int]) -> None:
    """The last matrix takes what is left; numbers that are no rows do no harm."""
    x, w, stops = b.input_(0, f32, (9, 5)), b.input_(1, f32, (12, 5)), b.input_(2, i64, (3,))
    given = torch.randn(9, 5), torch.randn(12, 5), torch.tensor(ends)
    product, matrix = b.routed_linear(x, w, stops), b.route(stops, 9)
    assert product.shape == (9, 4)
    found, route = run(Graph((x, w, stops), (product, matrix)), given)
    if ends == sorted(ends):
        assert route.tolist() == [next((e for e, end in enumerate(ends[:2]) if row < end), 2) for row in range(9)]
        expected = torch.stack([given[1].reshape(3, 4, 5)[e] @ row for e, row in zip(route, given[0], strict=True)])
        torch.testing.assert_close(found, expected)
    assert found.shape == (9, 4)


def test_operands_that_do_not_fit() -> None:
    x, w, ends = b.input_(0, f32, (9, 5)), b.input_(1, f32, (12, 5)), b.input_(2, i64, (3,))
    for bad in ((x, w, b.cast(ends, i32)), (x, w, b.input_(2, i64, (5,))), (b.input_(0, f32, (9, 4)), w, ends), (b.cast(x, i32), w, ends)):
        with pytest.raises(InvalidGraph, match="routed_linear"):
            b.routed_linear(*bad)
    assert b.routed_linear(b.cast(x, i8), b.cast(w, i8), ends).dtype == i32
