"""The readable form of a graph: `%3 = add(%1, %2) : f32[B, S, 256]  # model.py:12`. `parse` (in parse.py) reads it back exactly.

Tensors and other objects that have no text are named `@name` and kept in a table beside the text. Inside arguments `%3` is a value,
`&0` the place of operand 0 in an `aten` call, and `$0` a set of quantization parameters from the list at the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from .attrs import AtenAttrs, Slot
from .dims import Poly, symbols
from .ir import Graph, Value
from .types import DType, QParams, TensorType, TupleType, Type

Objects = dict[str, Any]


@dataclass
class _Printer:
    """Numbers and names given so far."""

    numbers: dict[Value, int]
    objects: Objects = field(default_factory=dict)
    qparams: dict[QParams, int] = field(default_factory=dict)

    def object(self, item: Any, name: str) -> str:
        for known, other in self.objects.items():
            if other is item:
                return f"@{known}"
        stem = "".join(c if c.isalnum() or c in "._" else "_" for c in name) or "object"
        free, count = stem, 1
        while free in self.objects:
            free, count = f"{stem}.{count}", count + 1
        self.objects[free] = item
        return f"@{free}"

    def attribute(self, item: Any, name: str) -> str:
        """One attribute value as text that `parse` reads back."""
        if item is None or isinstance(item, (bool, int, str, torch.dtype, torch.layout, torch.memory_format, torch.device, Poly, DType)):
            return repr(item)
        if isinstance(item, float):
            return repr(item) if math.isfinite(item) else str(item)
        if isinstance(item, Slot):
            return f"&{item.index}"
        if isinstance(item, QParams):
            return f"${self.qparams.setdefault(item, len(self.qparams))}"
        if isinstance(item, torch._ops.OpOverload):
            return repr(str(item._schema.name) + "." + item._overloadname)
        if isinstance(item, (list, tuple)):
            inside = ", ".join(self.attribute(i, name) for i in item)
            return f"[{inside}]" if isinstance(item, list) else f"({inside}{',' if len(item) == 1 else ''})"
        return self.object(item, name or type(item).__name__)

    def type(self, kind: Type | None) -> str:
        if kind is None:
            return "None"
        if isinstance(kind, TupleType):
            return f"({', '.join(self.type(e) for e in kind.elements)})"
        text = f"{kind.dtype}[{', '.join(map(str, kind.shape))}]"
        text += f" order={list(kind.order)}" if kind.order is not None else ""
        text += f" room={list(kind.room)}" if kind.room else ""
        return text + (f" <{self.attribute(kind.qparams, '')}>" if kind.qparams is not None else "")

    def line(self, value: Value) -> str:
        parts = [f"%{self.numbers[v]}" if v in self.numbers else f"<{v.op}>" for v in value.inputs]
        for f in fields(value.attrs):
            item = getattr(value.attrs, f.name)
            if f.default is MISSING or repr(item) != repr(f.default):
                name = str(item) if isinstance(value.attrs, AtenAttrs) and f.name == "target" else value.name
                parts.append(f"{f.name}={self.attribute(item, name or f.name)}")
        label = f" {value.name!r}" if value.name else ""
        origin = f"  # {value.origin}" if value.origin else ""
        return f"%{self.numbers[value]}{label} = {value.op}({', '.join(parts)}) : {self.type(value.type)}{origin}"


def dump(graph: Graph) -> tuple[str, Objects]:
    """The text of a graph, and the objects that it names with `@`."""
    printer = _Printer({v: i for i, v in enumerate(graph.order)})
    body = [f"  {printer.line(v)}" for v in graph.order]
    found = {s for v in graph.order for d in dims_of(v) for s in symbols(d)}
    head = [f"graph {graph.name}"]
    head += [f"  symbol {s.name} {s.lo}..{'' if s.hi is None else s.hi}" for s in sorted(found, key=lambda s: s.name)]
    head += [f"  ${n} = {(q.scale, q.zero_point, q.axis, q.qmin, q.qmax)!r}" for q, n in printer.qparams.items()]
    inputs = f"  inputs {', '.join(f'%{printer.numbers[v]}' for v in graph.inputs)}".rstrip()
    outputs = f"  return {', '.join(f'%{printer.numbers[v]}' for v in graph.outputs)}".rstrip()
    return "\n".join([*head, inputs, *body, outputs]) + "\n", printer.objects


def to_text(graph: Graph) -> str:
    """The text of a graph, for people and golden files."""
    return dump(graph)[0]


def around(graph: Graph, value: Value, margin: int = 3) -> str:
    """The lines of a graph next to one value, which is marked."""
    printer = _Printer({v: i for i, v in enumerate(graph.order)})
    place = graph.order.index(value) if value in printer.numbers else 0
    window = graph.order[max(place - margin, 0): place + margin + 1]
    return "\n".join(f"{'> ' if v is value else '  '}{printer.line(v)}" for v in window)


def dims_of(value: Value) -> list[Poly]:
    """All symbolic expressions in a value's type and attributes."""
    found: list[Poly] = []
    kinds = value.type.elements if isinstance(value.type, TupleType) else (value.type,)
    for kind in kinds:
        if isinstance(kind, TensorType):
            _collect(kind.shape, found.append)
    for item in vars(value.attrs).values():
        _collect(item, found.append)
    return found


def _collect(item: Any, add: Callable[[Poly], None]) -> None:
    if isinstance(item, Poly):
        add(item)
    elif isinstance(item, (list, tuple)):
        for i in item:
            _collect(i, add)
