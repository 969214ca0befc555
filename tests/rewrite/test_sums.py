"""Sums over a concatenation become sums of its parts where the parts lie along an axis that is not the last."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import bf16, f32
from sashiko.rewrite import apply
from sashiko.rewrite.rules import CANONICAL

PARTS = [b.input_(n, f32, (2, 1, 3, 8)) for n in range(2)]
WEIGHT = b.input_(2, f32, (2, 6, 1))
DATA = [torch.randn(v.shape) for v in (*PARTS, WEIGHT)]


def rewritten(root: Value) -> list[str]:
    """The operations of the graph after the rules, whose results are those before."""
    graph = Graph((*PARTS, WEIGHT), (root,))
    after = apply(graph, CANONICAL)
    torch.testing.assert_close(run(after, DATA)[0], run(graph, DATA)[0])
    return [v.op for v in after.order]


@pytest.mark.parametrize("keep", [False, True])
def test_each_part_is_multiplied_by_its_part_of_the_weight(keep: bool) -> None:
    joined = b.reshape(b.concat(PARTS, 1), (2, 6, 8))
    found = rewritten(b.reduce(b.mul(WEIGHT, joined), "sum", 1, keep))
    assert found.count("reduce") == found.count("mul") == found.count("slice") == 2 and "concat" not in found
    assert "concat" not in rewritten(b.reduce(joined, "sum", 1, keep))


def test_a_weight_that_is_the_same_for_all() -> None:
    joined = b.concat(PARTS, 2)
    found = rewritten(b.reduce(b.mul(joined, b.reshape(b.slice_(WEIGHT, 1, 0, 1), (2, 1, 1, 1))), "sum", 2))
    assert found.count("slice") == 1 and found.count("mul") == 2


@pytest.mark.parametrize("root", [
    b.reduce(b.concat(PARTS, 3), "sum", 3),  # along the columns
    b.reduce(b.concat(PARTS, 1), "sum", 2),  # along another axis
    b.reduce(b.concat(PARTS, 1), "max", 1),
    b.reduce(b.reshape(b.concat(PARTS, 2), (2, 3, 2, 8)), "sum", 1),  # the parts do not end where the axis does
    b.reduce(b.reshape(b.concat(PARTS, 2), (2, 6, 8)), "sum", (1, 2)),
    b.reduce(b.concat([b.cast(v, bf16) for v in PARTS], 1), "sum", 1),  # rounded once
    b.reduce(b.mul(b.concat([PARTS[0], b.slice_(PARTS[1], 1, 0, 0)], 1), b.reshape(WEIGHT, (2, 6, 1, 1))), "sum", 1),  # stretched along it
])
def test_what_stays(root: Value) -> None:
    assert "concat" in rewritten(root)
