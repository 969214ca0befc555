"""Cutting a graph into native segments and calls of PyTorch operations, in an order that gives few segments."""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.ir import Graph, Value
from ..graph.ops import OPS
from ..graph.updates import late_puts, memory_of
from .constants import constant_values
from .views import VIEWS


@dataclass(frozen=True, eq=False)
class Native:
    """Values computed by native code: `outputs` are those that anything outside reads; `inputs` come from outside."""

    inputs: tuple[Value, ...]
    constants: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Extern:
    """One `aten` value, with the `get` values that take its results apart."""

    value: Value
    elements: tuple[Value, ...]


Part = Native | Extern


def partition(graph: Graph) -> tuple[tuple[Part, ...], tuple[Value, ...]]:
    """(parts in execution order, all constant expressions used by any of them)."""
    constants = constant_values(graph.outputs)
    ready: set[Value] = {*graph.inputs, *constants}
    below = _needed(graph, ready)
    late = late_puts(graph)  # what they write into may be read until the end
    last = [v for v in below if v in late]
    rest = [v for v in below if v not in ready and v not in late]
    steps: list[list[Value] | Extern] = []
    while rest:
        steps.append(_needed_now(_take(rest, ready, native=True), rest, graph, ready))
        rest = [v for v in rest if v not in ready]
        for value in _take(rest, ready, native=False):
            if value.op == "aten":
                elements = tuple(u for u in graph.users[value] if u.op == "get")
                steps.append(Extern(value, tuple(dict.fromkeys(elements))))
        rest = [v for v in rest if v not in ready]
    if steps and isinstance(steps[-1], list):
        steps[-1] += last
    else:
        steps.append(last)
    parts = tuple([step if isinstance(step, Extern) else _native(step, graph, set(constants)) for step in steps])
    return tuple(p for p in parts if isinstance(p, Extern) or p.outputs), constants


def _needed(graph: Graph, ready: set[Value]) -> list[Value]:
    """Values that have to be computed: nothing below a constant expression."""
    needed: set[Value] = set()
    stack = list(graph.outputs)
    while stack:
        value = stack.pop()
        if value not in needed and value not in ready:
            needed.add(value)
            stack.extend(value.inputs)
    return [v for v in graph.order if v in needed]


def _take(rest: list[Value], ready: set[Value], native: bool) -> list[Value]:
    """All values of one kind that can be computed from `ready` alone; they become ready."""
    taken = []
    for value in rest:
        extern = OPS[value.op].group == "extern" and value.op != "call"
        if extern != native and ready.issuperset(value.inputs):
            ready.add(value)
            taken.append(value)
    return taken


def _needed_now(batch: list[Value], rest: list[Value], graph: Graph, ready: set[Value]) -> list[Value]:
    """What is taken of the rest without views of what was there before that only later segments read: these look at it themselves, and
    nothing is copied. They are not ready any more."""
    taken, kept, returned = set(batch), set[Value](), set(graph.outputs)
    later = {v for v in rest if v not in taken and v.op != "aten"}
    for value in reversed(batch):
        base, users = value, graph.users[value]
        while base.op in VIEWS:
            base = base.inputs[0]
        if base in taken or value in returned or not later.issuperset(users):
            kept.add(value)
        else:
            ready.discard(value)
            later.add(value)
    return [value for value in batch if value in kept]


def _native(batch: list[Value], graph: Graph, constants: set[Value]) -> Native:
    """The segment of `batch`. Scalars and ranges are made again where they are needed, so they leave no segment. What is written into
    memory from outside is known outside."""
    inside, returned = set(batch), set(graph.outputs)
    outputs = [
        v
        for v in batch
        if v in returned
        or (OPS[v.op].group != "leaf" and not inside.issuperset(graph.users[v]))
        or any(u.op == "aten" for u in graph.users[v])
        or (v.op == "put" and memory_of(v) not in inside and not any(u.op == "put" and u.inputs[0] is v for u in graph.users[v]))
    ]
    read = dict.fromkeys(operand for v in batch for operand in v.inputs if operand not in inside)
    inputs = tuple(v for v in read if (v not in constants and OPS[v.op].group != "leaf") or v.op == "input")
    return Native(inputs, tuple(v for v in read if v in constants), tuple(outputs))
