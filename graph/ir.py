"""The graph: immutable values in SSA form. Construction goes through `graph.ops.make`, which infers and checks types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count

from .attrs import Attrs
from .dims import Shape
from .types import DType, Order, Room, TensorType, Type

_numbers = count()


@lru_cache(maxsize=1 << 14)
def _kind(op: str, attrs: Attrs, exact: str, type: Type) -> int:
    return next(_numbers)


@dataclass(frozen=True, eq=False)
class Value:
    """The result of one operation. Equality is identity; `origin` is the user's file:line, `name` a readable hint."""

    op: str
    inputs: tuple[Value, ...]
    attrs: Attrs
    type: Type
    origin: str = ""
    name: str = ""

    @property
    def tensor(self) -> TensorType:
        """The type, for values that are one tensor."""
        assert isinstance(self.type, TensorType), f"{self.op} has several results"
        return self.type

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @cached_property
    def kind(self) -> int:
        """Values with equal numbers do the same with their operands and have the same type. The layers of a model are full of them, so
        what is found out about an operation by its kind and its operands' is found out once."""
        try:
            # What is compared by identity is no kind of thing, and holds a tensor that must not be kept alive here.
            return _kind(self.op, self.attrs, self.attrs.exact, self.type) if self.attrs.has_equals else next(_numbers)
        except TypeError:  # something in it cannot be hashed
            return next(_numbers)

    def __repr__(self) -> str:
        return f"<{self.op}{' ' + self.name if self.name else ''}: {self.type}>"


@dataclass(frozen=True, eq=False)
class Graph:
    """A program: `inputs` in call order, `outputs` in return order. Constants are values of op `constant`."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name: str = "graph"

    @cached_property
    def order(self) -> tuple[Value, ...]:
        """Every value reachable from inputs and outputs, operands before users, deterministic."""
        result: dict[Value, None] = {}
        stack: list[Value | None] = [*reversed(self.outputs), *reversed(self.inputs)]
        while stack:
            value = stack.pop()
            if value is None:  # what lies under it has its operands by now
                result[stack.pop()] = None  # type: ignore[index]
            elif value not in result:
                if value.inputs:
                    stack += (value, None, *value.inputs[::-1])
                else:
                    result[value] = None
        return tuple(result)

    @cached_property
    def users(self) -> dict[Value, tuple[Value, ...]]:
        """Values that read each value (once per operand position); graph outputs are not users."""
        found: dict[Value, list[Value]] = {v: [] for v in self.order}
        for value in self.order:
            for operand in value.inputs:
                found[operand].append(value)
        return {v: tuple(u) for v, u in found.items()}

    @cached_property
    def constants(self) -> tuple[Value, ...]:
        return tuple(v for v in self.order if v.op == "constant")

    def is_output(self, value: Value) -> bool:
        return any(value is o for o in self.outputs)


def rebuild(graph: Graph, visit: Callable[[Value, tuple[Value, ...]], Value]) -> Graph:
    """A new graph from `visit(old_value, new_inputs)`, called operands first for every value but the inputs; the old one when that
    changes nothing."""
    new: dict[Value, Value] = {v: v for v in graph.inputs}
    for value in graph.order:
        if value not in new:
            new[value] = visit(value, tuple([new[v] for v in value.inputs]))
    outputs = tuple([new[v] for v in graph.outputs])
    return graph if outputs == graph.outputs else Graph(graph.inputs, outputs, graph.name)


def with_inputs(value: Value, inputs: Iterable[Value]) -> Value:
    """`value` itself when its inputs did not change, else a copy that reads `inputs` (types must be the same)."""
    inputs = tuple(inputs)
    if inputs == value.inputs:
        return value
    copy = object.__new__(Value)  # passes copy most of a graph; what is known about the kind of the value stays known
    copy.__dict__.update(value.__dict__, inputs=inputs)
    return copy


def reordered(value: Value, order: Order) -> Value:
    """The same operation with its result laid out in physical `order`."""
    return Value(value.op, value.inputs, value.attrs, replace(value.tensor, order=order), value.origin, value.name)


# Rows so many bytes apart, or a multiple of it, share a quarter of the sets of a first-level cache or less (its ways have 4096 bytes), and
# processors take a load for one of what was just stored when both have the same place in 4096 bytes. A gap between them ends it.
ALIKE = 1024


def with_room(value: Value, room: Room) -> Value:
    """The same operation whose result has room around its elements, see `TensorType`."""
    return Value(value.op, value.inputs, value.attrs, replace(value.tensor, room=room), value.origin, value.name)
