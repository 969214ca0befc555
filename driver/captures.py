"""The captured program of a model, which knows what is required of the sizes of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..diagnostics.errors import SashikoError, Unsupported
from ..graph import numbers
from ..graph.alone import alone
from ..graph.capture import from_exported
from ..graph.captured import Captured, Parameters, TensorInput
from ..graph.dims import Dim, substitute, symbol
from ..graph.examples import failure
from ..graph.exporting import export
from ..graph.ir import Value
from ..graph.lower import constant_value
from ..graph.symbols import Assumed, Assumption
from ..graph.types import TensorType
from ..quant import QuantizedModule
from ..quant.module import Gate, TensorLeaf, gate_of


@alone()
def captured_of(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Captured:
    """The model for calls like the given one. Raises what `export` and `from_exported` raise, and InputError for a quantized model that
    does not take such calls, and for floats of types that the model fails with. A size that depends on numbers among the model's buffers
    is known where these are."""
    if not isinstance(model, QuantizedModule):
        return replace(_captured(model, args, kwargs, dynamic_shapes), parameters=Parameters.of(model.forward))
    gate = gate_of(model)  # behind which torch.export traces the graph: what the gate does is done here
    kwargs = {name: kwargs[name] for name in (*gate.names, *kwargs) if name in kwargs}  # a graph module takes them by position
    gate.arrange(tuple(args), kwargs)
    with torch.autocast("cpu", enabled=False):
        captured = _captured(model, args, kwargs, dynamic_shapes)
    return _behind(gate, replace(captured, parameters=Parameters(gate.order, dict(gate.omitted))))  # its signature lacks what was left out


def _captured(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Captured:
    """The same without what a quantized model requires of calls."""
    try:
        captured = from_exported(export(model, args, kwargs, dynamic_shapes), decomposed=True)
    except Unsupported as refusal:
        if not numbers.are_in(model):
            raise
        try:
            with numbers.known(model) as found:
                captured = from_exported(export(model, args, kwargs, dynamic_shapes), decomposed=True)
        except SashikoError:
            raise refusal from None
        read = (constant_value(number, name, True) for name, number in found.read.items())
        captured = replace(captured, baked=(*captured.baked, *(value for value in read if isinstance(value, Value))))
    if any(map(_mixed, captured.graph.order)) and (error := failure(model, args, kwargs)):
        raise error from error.__cause__
    return captured


def _mixed(value: Value) -> bool:
    """Whether an operation that is left to PyTorch reads floats of several types: most refuse these, and a trace does not tell."""
    if value.op != "aten":
        return False
    return len({operand.dtype for operand in value.inputs if isinstance(operand.type, TensorType) and operand.dtype.is_float}) > 1


def _behind(gate: Gate, captured: Captured) -> Captured:
    """What the gate requires of sizes is required of those of a call. It has let the example pass."""
    leaves = [leaf for _, held in gate.arguments for leaf in held]
    sizes: dict[str, Dim] = {}
    required: list[Assumed] = []  # in the symbols of the gate
    asked: list[Assumed] = []
    for leaf, given in zip(leaves, captured.inputs, strict=True):
        held = zip(leaf.dims, given.shape, strict=True) if isinstance(leaf, TensorLeaf) and isinstance(given, TensorInput) else ()
        for dim, there in held:
            if isinstance(dim, int):
                asked += [] if isinstance(there, int) else [Assumption(there - dim, "==")]
            else:
                size = symbol(dim.symbol)
                if sizes.get(dim.symbol, 1) == 1:  # which is no symbol's value where others are: it stretches
                    sizes[dim.symbol] = there
                required += [Assumption(size - dim.low, ">=")] if dim.low > 2 else []
                required += [Assumption(dim.high - size, ">=")] if dim.high is not None else []
    for each in (*required, *gate.assumed):
        if not isinstance(each, Assumption):
            defined = each.substituted(f"gate_{each.name}", sizes)
            sizes[each.name] = defined.dim
            asked.append(defined)
            continue
        own = Assumption(substitute(each.dim, sizes), each.relation)
        if not isinstance(own.dim, int):  # of fixed sizes, those of the example
            asked.append(own)
    return replace(captured, assumed=(*captured.assumed, *asked))
