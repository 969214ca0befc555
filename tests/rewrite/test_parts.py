"""Reductions in two steps: where there are any, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph
from sashiko.graph.types import FROM_TORCH
from sashiko.rewrite.rules.parts import in_parts


def reduced(x: torch.Tensor, kind: str, axes: tuple[int, ...], keepdim: bool = False) -> Graph:
    value = b.input_(0, FROM_TORCH[x.dtype], tuple(x.shape), "x")
    return Graph((value,), (b.reduce(value, kind, axes, keepdim),))


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize(("shape", "axes"), [((4096, 8), (0,)), ((1, 65536), (1,)), ((64, 32, 16), (0, 1)), ((128, 4, 128), (0, 2))])
def test_two_steps(kind: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = 1 + torch.randn(shape) / 1000
    for keepdim in (False, True):
        graph = reduced(x, kind, axes, keepdim)
        made = in_parts(graph)
        assert sum(v.op == "reduce" for v in made.order) == 2
        torch.testing.assert_close(run(made, [x])[0], run(graph, [x])[0], rtol=1e-5, atol=1e-5)


def test_partial_results_are_not_rounded() -> None:
    x = torch.rand(4096, 8).bfloat16()
    (got,) = run(in_parts(reduced(x, "sum", (0,))), [x])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, x.float().sum(0).bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize(("shape", "axes", "kind"), [
    ((4096, 768), (1,), "sum"),  # every row is a group's
    ((16, 8), (0,), "sum"),  # little to do
    ((4099, 8), (0,), "sum"),  # a prime number
    ((1, 65536), (1,), "argmax"),
    ((0, 8), (0,), "sum"),
])
def test_one_step(shape: tuple[int, ...], axes: tuple[int, ...], kind: str) -> None:
    graph = reduced(torch.randn(shape), kind, axes)
    assert in_parts(graph).order == graph.order
