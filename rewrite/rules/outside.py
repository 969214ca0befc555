"""Views that only PyTorch's operations read are PyTorch's, too, so that nothing is copied for them. For GPUs, where products are
PyTorch's: heads of attention and transposed weights are views there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...graph import attrs as A
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import make

VIEW = "a view"


def _shape(value: Value) -> tuple[Any, ...]:
    return (list(value.shape),)


def _order(value: Value) -> tuple[Any, ...]:
    assert isinstance(value.attrs, A.PermuteAttrs)
    return (list(value.attrs.order),)


def _part(value: Value) -> tuple[Any, ...]:
    a = value.attrs
    assert isinstance(a, A.SliceAttrs)
    return a.axis, a.start, a.start + a.length * a.step, a.step


_FORMS: dict[str, tuple[Any, Callable[[Value], tuple[Any, ...]]]] = {
    "reshape": (torch.ops.aten.reshape.default, _shape),
    "expand": (torch.ops.aten.expand.default, _shape),
    "permute": (torch.ops.aten.permute.default, _order),
    "slice": (torch.ops.aten.slice.Tensor, _part),
}


def views_outside(graph: Graph) -> Graph:
    """The graph with PyTorch's views between what is computed and what PyTorch reads of it."""
    made: dict[Value, Value] = {}

    def outside(value: Value) -> Value:
        if value.op not in _FORMS or (isinstance(value.attrs, A.SliceAttrs) and value.attrs.step < 0):
            return value
        if value not in made:
            target, arguments = _FORMS[value.op]
            attrs = A.AtenAttrs(target, (A.Slot(0), *arguments(value)), (), VIEW)
            base = outside(value.inputs[0])
            made[value] = make("aten", base, attrs=attrs, type=value.type, origin=value.origin, name=str(target))
        return made[value]

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        return with_inputs(value, map(outside, inputs)) if value.op == "aten" else with_inputs(value, inputs)

    return rebuild(graph, visit)
