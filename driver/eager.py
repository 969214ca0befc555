"""Graphs that PyTorch runs as Dynamo made them, since what AOTAutograd makes of them is wrong, or has arguments that no code takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..diagnostics.errors import Unsupported
from ..graph.views import refuse_windows


def check(module: GraphModule, given: Sequence[Any]) -> None:
    """Unsupported for such a graph: what a call passes for the number of elements in the rows of a nested tensor has no value."""
    if any(isinstance(tensor, torch.Tensor) and tensor.is_nested for tensor in given):
        raise Unsupported("the graph takes a nested tensor")
    for graph in graphs(module):
        refuse_windows(graph)


def graphs(module: GraphModule) -> list[Graph]:
    """A graph and those inside it."""
    return [each.graph for each in module.modules() if isinstance(each, GraphModule)]
