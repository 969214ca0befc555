"""The verifier: types are inferred again and compared, leaves and external calls are checked, symbols must be declared by an input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..diagnostics.errors import InvalidGraph
from . import attrs as A
from .dims import Dim, Symbol, symbols
from .ir import Graph, Value
from .ops import OPS, infer
from .text import around, dims_of
from .types import FROM_TORCH, TensorType, TupleType, Type

_GIVEN = ("input", "constant", "call", "aten")


@dataclass
class Sound:
    """What was verified before, under the same inputs: values, and the kinds of an operation and its operands."""

    values: set[Value] = field(default_factory=set)
    kinds: set[tuple[int, ...]] = field(default_factory=set)

    def clear(self) -> None:
        """For a graph with other inputs."""
        self.values.clear()
        self.kinds.clear()


def verify(graph: Graph, declared: Iterable[Dim] = (), where: str = "", sound: Sound | None = None) -> None:
    """Raises InvalidGraph, naming the value and printing those around it, when the graph breaks a rule of the IR.

    declared: symbols that no input shape holds but the call provides (integer arguments). where: the pass to blame.
    sound: what was verified before; it is skipped, and what is verified now joins it.
    """
    sound = Sound() if sound is None else sound
    known = {s for v in graph.inputs for d in v.shape for s in symbols(d)} | {s for d in declared for s in symbols(d)}
    for position, value in enumerate(graph.inputs):
        if not isinstance(value.attrs, A.InputAttrs) or value.attrs.index != position:
            _fail(graph, value, f"input number {position} is {value.op} {value.attrs}", where)
    inputs = set(graph.inputs)
    unseen = [value for value in graph.order if value not in sound.values]
    sound.values.update(unseen)
    for value in unseen:
        kinds = (value.kind, *[v.kind for v in value.inputs])
        if kinds in sound.kinds:
            continue
        fault = _fault(value, inputs, known)
        if fault is not None:
            _fail(graph, value, fault, where)
        sound.kinds.add(kinds)
    for number, output in enumerate(graph.outputs):
        if not isinstance(output.type, TensorType):
            _fail(graph, output, f"output {number} is a tuple; take an element with get", where)


def _fail(graph: Graph, value: Value, fault: str, where: str) -> None:
    raise InvalidGraph(f"{value.op}{f' {value.name}' if value.name else ''}: {fault}\n{around(graph, value)}", where or value.origin)


def _fault(value: Value, inputs: set[Value], known: set[Symbol]) -> str | None:
    """What is wrong with one value; None when nothing is."""
    spec = OPS.get(value.op)
    if spec is None:
        return "unknown operation"
    if not isinstance(value.attrs, spec.attrs):
        return f"attributes are {type(value.attrs).__name__}, not {spec.attrs.__name__}"
    if value.op not in ("aten", "call", "get") and any(not isinstance(v.type, TensorType) for v in value.inputs):
        return "an operand is a tuple"
    fault = _leaf_fault(value, inputs)
    if fault is not None:
        return fault
    if value.op not in _GIVEN:
        try:
            expected = infer(value.op, value.inputs, value.attrs)
        except (InvalidGraph, AssertionError, ValueError, IndexError) as error:
            return str(error) or f"operands do not fit ({type(error).__name__})"
        if _plain(expected) != _plain(value.type):
            return f"the type is {value.type}, the operands give {expected}"
    unknown = {s for d in dims_of(value) for s in symbols(d)} - known
    if unknown:
        return f"the symbols {sorted(s.name for s in unknown)} are declared by no input, or with another range"
    return None


def _plain(kind: Type) -> Type:
    """The type without its physical order and room, which are a choice and no fact."""
    if isinstance(kind, TensorType) and (kind.order is not None or kind.room):
        return replace(kind, order=None, room=())
    return kind


def _leaf_fault(value: Value, inputs: set[Value]) -> str | None:
    a = value.attrs
    if isinstance(a, A.InputAttrs) and value not in inputs:
        return "an input that the graph does not list"
    if isinstance(a, A.ConstantAttrs):
        kind = value.type
        if not isinstance(kind, TensorType) or FROM_TORCH.get(a.tensor.dtype) != kind.dtype or tuple(a.tensor.shape) != kind.shape:
            return f"the type is {kind}, the tensor {a.tensor.dtype} {tuple(a.tensor.shape)}"
    if isinstance(a, A.AtenAttrs):
        slots = sorted(_slots((a.args, a.kwargs)))
        if slots != list(range(len(value.inputs))):
            return f"{len(value.inputs)} operands for the places {slots}"
    if isinstance(a, A.GetAttrs):
        kind = value.inputs[0].type
        if not isinstance(kind, TupleType) or not 0 <= a.index < len(kind.elements) or kind.elements[a.index] is None:
            return f"no element {a.index} in {kind}"
    return None


def _slots(item: object) -> list[int]:
    if isinstance(item, A.Slot):
        return [item.index]
    return [s for i in item for s in _slots(i)] if isinstance(item, (list, tuple)) else []
