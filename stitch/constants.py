"""Constant expressions: values that depend on weights alone, or on nothing, are computed once, outside the compiled code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.utils._pytree import tree_leaves

from ..diagnostics.errors import InputError
from ..graph import attrs as A
from ..graph.dims import Poly
from ..graph.interpret import run
from ..graph.ir import Graph, Value, with_inputs
from ..graph.ops import OPS, make
from ..graph.types import TupleType
from .roots import segment_order


def constant_values(outputs: Iterable[Value]) -> tuple[Value, ...]:
    """The outermost values computed from constants alone (with static shapes); everything below them is out of the graph."""
    outputs = tuple(outputs)
    order = segment_order(outputs, set())
    fixed: set[Value] = set()
    rooted: set[Value] = set()  # is or has below what no kernel makes: scalars and ranges alone are cheaper to make there
    for value in order:
        if value.op == "constant":
            fixed.add(value)
            rooted.add(value)
        elif fixed.issuperset(value.inputs) and _repeatable(value) and value.op != "input" and _static(value):
            fixed.add(value)
            if value.op == "aten" or any(v in rooted for v in value.inputs):
                rooted.add(value)
    used = {operand for value in order if value not in fixed for operand in value.inputs} | set(outputs)
    return tuple(v for v in order if v in rooted and v in used)


def own_results(graph: Graph, writes: Mapping[int, int]) -> Graph:
    """Every result as a tensor of its own, no argument, constant or other result: the caller may write into it. `writes`: numbers of
    outputs that are not returned but copied into arguments."""
    taken = {*graph.inputs, *constant_values(graph.outputs)}
    outputs: list[Value] = []
    for number, value in enumerate(graph.outputs):
        outputs.append(value if number in writes or value not in taken else _made_again(value))
        taken.add(value)
    return graph if tuple(outputs) == graph.outputs else Graph(graph.inputs, tuple(outputs), graph.name)


def _made_again(value: Value) -> Value:
    """The same in memory that nothing else reads; PyTorch makes complex tensors, of parts that are copied."""
    if value.dtype.kind == "complex":
        return with_inputs(value, tuple(_made_again(v) for v in value.inputs))
    return make("copy", value, origin=value.origin)


def _repeatable(value: Value) -> bool:
    """Whether the interpreter computes the same every time, of what is left to PyTorch, too: not where numbers are drawn, and not for
    operations from elsewhere, of which nothing is known."""
    if not isinstance(value.attrs, A.AtenAttrs):
        return value.op == "get" or OPS[value.op].group not in ("extern", "update")
    op = value.attrs.target
    return isinstance(op, torch._ops.OpOverload) and op.namespace == "aten" and torch.Tag.nondeterministic_seeded not in op.tags


def _static(value: Value) -> bool:
    """Whether neither the shape nor the attributes depend on symbols."""
    attrs = value.attrs
    if isinstance(value.type, TupleType):
        kinds = [kind for kind in value.type.elements if kind is not None]
    else:
        kinds = [value.tensor]
    known: tuple[object, ...] = tuple(size for kind in kinds for size in kind.shape)
    if isinstance(attrs, A.SliceAttrs):
        known += (attrs.start, attrs.length)
    elif isinstance(attrs, A.IotaAttrs):
        known += (attrs.start, attrs.step)
    elif isinstance(attrs, A.PadAttrs):
        known += tuple(amount for pair in attrs.amounts for amount in pair)
    elif isinstance(attrs, A.AtenAttrs):
        known += tuple(tree_leaves((attrs.args, dict(attrs.kwargs))))
    return not any(isinstance(item, Poly) for item in known)


def watched_tensors(value: Value) -> tuple[torch.Tensor, ...]:
    """The model's own tensors that a constant expression reads."""
    return tuple([v.attrs.tensor for v in _below(value) if isinstance(v.attrs, A.ConstantAttrs) and v.attrs.watched])


def _below(value: Value) -> tuple[Value, ...]:
    """The constants that a constant expression reads; most are one themselves."""
    return (value,) if value.op == "constant" else Graph((), (value,)).constants


def compute(value: Value) -> torch.Tensor:
    """The tensor that a constant expression is now. InputError when a tensor below it has got another shape or type."""
    for constant in _below(value):
        _check_unchanged(constant)
    result = value.attrs.tensor if isinstance(value.attrs, A.ConstantAttrs) else run(Graph((), (value,)), [])[0]
    assert isinstance(result, torch.Tensor)
    return result


def _check_unchanged(constant: Value) -> None:
    assert isinstance(constant.attrs, A.ConstantAttrs)
    tensor, expected = constant.attrs.tensor, constant.dtype.torch
    if tuple(tensor.shape) != constant.shape or tensor.dtype != expected:
        was, now = f"{expected}{list(constant.shape)}", f"{tensor.dtype}{list(tensor.shape)}"
        what = f"{constant.name or 'a weight'} was {was} when the model was compiled and is now {now}"
        raise InputError(what, constant.origin, "compile the model again")
