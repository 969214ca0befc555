"""Reads the text of a graph back. Arguments are Python expressions of a few harmless forms, walked and never executed."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..diagnostics.errors import InvalidGraph
from . import attrs as A
from . import dims
from .dims import Dim
from .ir import Graph, Value
from .ops import OPS
from .types import BY_NAME, QParams, TensorType, TupleType, Type

_LINE = re.compile(r"%(\d+)(?: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))? = (\w+)\((.*)\) : (.*?)(?:  # (.*))?")
_TENSOR = re.compile(r"(\w+)\[(.*?)\](?: order=(\[.*?\]))?(?: room=(\[.*?\]))?(?: <\$(\d+)>)?")
_STRING = re.compile(r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_MARKS = ((re.compile(r"%(\d+)"), r"VALUE(\1)"), (re.compile(r"&(\d+)"), r"SLOT(\1)"), (re.compile(r"\$(\d+)"), r"QPARAMS(\1)"),
          (re.compile(r"@([\w.]+)"), r"OBJECT('\1')"))
_DIM_FUNCTIONS: Mapping[str, Callable[[Dim, Dim], Dim]] = {
    "floordiv": dims.floordiv, "mod": dims.mod, "min": dims.minimum, "max": dims.maximum,
}


@dataclass
class _Parser:
    """Everything named so far."""

    objects: Mapping[str, Any]
    symbols: dict[str, Dim] = field(default_factory=dict)
    qparams: dict[int, QParams] = field(default_factory=dict)
    values: dict[int, Value] = field(default_factory=dict)

    def expression(self, text: str) -> ast.expr:
        pieces = _STRING.split(text)
        for mark, call in _MARKS:
            pieces[::2] = [mark.sub(call, piece) for piece in pieces[::2]]
        # Splitting again for every mark would be needed if a replacement made a string that another mark matches; none does.
        return ast.parse("".join(pieces), mode="eval").body

    def item(self, node: ast.expr) -> Any:
        """The value of one expression. Raises InvalidGraph for any other form."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List)):
            inside = [self.item(i) for i in node.elts]
            return inside if isinstance(node, ast.List) else tuple(inside)
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return getattr(torch, node.attr)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.item(node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = self.item(node.left), self.item(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.call(node.func.id, [self.item(a) for a in node.args], {k.arg: self.item(k.value) for k in node.keywords})
        raise InvalidGraph(f"cannot read {ast.unparse(node)!r} in the text of a graph")

    def name(self, name: str) -> Any:
        if name in ("inf", "nan"):
            return math.inf if name == "inf" else math.nan
        found = self.symbols.get(name, BY_NAME.get(name))
        if found is None:
            raise InvalidGraph(f"the text of a graph names {name!r}, which is neither a symbol nor a dtype")
        return found

    def call(self, name: str, args: list[Any], kwargs: dict[str | None, Any]) -> Any:
        if name == "VALUE":
            return self.values[args[0]]
        if name == "SLOT":
            return A.Slot(args[0])
        if name == "QPARAMS":
            return self.qparams[args[0]]
        if name == "OBJECT":
            return self.objects[args[0]]
        if name == "device":
            return torch.device(**{str(k): v for k, v in kwargs.items()})
        if name in _DIM_FUNCTIONS:
            return _DIM_FUNCTIONS[name](*args)
        raise InvalidGraph(f"the text of a graph calls {name!r}")

    def type(self, text: str) -> Type:
        if text.startswith("("):
            return TupleType(tuple(None if part == "None" else self.tensor(part) for part in _split(text[1:-1])))
        return self.tensor(text)

    def tensor(self, text: str) -> TensorType:
        match = _TENSOR.fullmatch(text)
        if match is None:
            raise InvalidGraph(f"cannot read the type {text!r}")
        dtype, shape, order, room, qparams = match.groups()
        sizes = self.item(self.expression(f"({shape},)" if shape else "()"))
        meaning = self.qparams[int(qparams)] if qparams else None
        return TensorType(
            BY_NAME[dtype], sizes, meaning, tuple(ast.literal_eval(order)) if order else None, tuple(ast.literal_eval(room or "()"))
        )

    def line(self, text: str) -> None:
        match = _LINE.fullmatch(text)
        if match is None:
            raise InvalidGraph(f"cannot read the line {text!r}")
        number, name, op, arguments, kind, origin = match.groups()
        if op not in OPS:
            raise InvalidGraph(f"unknown operation {op!r}")
        call = self.expression(f"f({arguments})")
        assert isinstance(call, ast.Call)
        given = {str(k.arg): self.item(k.value) for k in call.keywords}
        if op == "aten" and isinstance(given["target"], str):
            given["target"] = overload(given["target"])
        inputs = tuple(self.item(a) for a in call.args)
        hint = ast.literal_eval(name) if name else ""
        self.values[int(number)] = Value(op, inputs, OPS[op].attrs(**given), self.type(kind), origin or "", hint)


def overload(name: str) -> Any:
    """`aten::sort.stable` as an operator."""
    space, rest = name.split("::")
    packet, _, kind = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), kind or "default")


def _split(text: str) -> list[str]:
    """Parts between the commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([<") - (c in ")]>")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def parse(text: str, objects: Mapping[str, Any] | None = None) -> Graph:
    """The graph whose text this is. objects: what `@name` stands for. Raises InvalidGraph for text of any other form."""
    parser = _Parser(objects or {})
    name, inputs, outputs = "graph", "", ""
    for raw in text.splitlines():
        line = raw.strip()
        word, _, rest = line.partition(" ")
        if word == "graph":
            name = rest
        elif word == "symbol":
            symbol, bounds = rest.split(" ")
            low, high = bounds.split("..")
            parser.symbols[symbol] = dims.symbol(symbol, int(low), int(high) if high else None)
        elif word.startswith("$"):
            parser.qparams[int(word[1:])] = QParams(*parser.item(parser.expression(rest.partition("= ")[2])))
        elif word == "inputs":
            inputs = rest
        elif word == "return":
            outputs = rest
        elif line:
            parser.line(line)
    chosen = [tuple(parser.values[int(n)] for n in re.findall(r"%(\d+)", part)) for part in (inputs, outputs)]
    return Graph(chosen[0], chosen[1], name)
