"""Builds the right side of an equation from what the left side bound."""

from __future__ import annotations

from dataclasses import fields

from ..diagnostics.errors import InvalidGraph
from ..graph import attrs as A
from ..graph.dims import Dim
from ..graph.ir import Value
from ..graph.ops import OPS, make
from ..graph.shapes import broadcast
from ..graph.types import BY_NAME, DType, TensorType, boolean
from .match import Bindings
from .pattern import GROUPS, Argument, Number, NumberLiteral, NumberVariable, Operation, Optional, Pattern, Rest, Variable
from .query import rounded


def full(value: Number, dtype: DType, shape: tuple[Dim, ...] = (), origin: str = "") -> Value:
    """A tensor of one repeated number, which is converted to the type."""
    return make("full", attrs=A.FullAttrs(rounded(value, dtype), dtype, shape), origin=origin)


def fit(value: Value, wanted: TensorType, origin: str = "") -> Value | None:
    """`value`, stretched to the wanted shape where that is all it lacks; None when its type differs in another way.

    An equation such as `add(x, 0) -> x` holds up to broadcasting: the zero may have more axes than x.
    """
    have = value.tensor
    if have.shape == wanted.shape and have.dtype == wanted.dtype and have.qparams == wanted.qparams:
        return value
    if have.dtype != wanted.dtype or have.qparams != wanted.qparams:
        return None
    try:
        if broadcast((have.shape, wanted.shape)) != wanted.shape:
            return None
    except InvalidGraph:
        return None
    return make("expand", value, attrs=A.ShapeAttrs(wanted.shape), origin=origin)


def build(node: Pattern, bound: Bindings, root: Value) -> Value:
    """The value that the template `node` describes. Raises InvalidGraph when operands do not fit one another."""
    if isinstance(node, (NumberLiteral, NumberVariable)):
        return full(_number(node, bound), root.dtype, root.shape, root.origin)
    return _value(node, bound, root, is_root=True)


def _number(node: NumberLiteral | NumberVariable, bound: Bindings) -> Number:
    return node.value if isinstance(node, NumberLiteral) else bound.numbers[node.name]


def _value(node: Pattern, bound: Bindings, root: Value, is_root: bool = False) -> Value:
    if isinstance(node, Variable):
        found = bound.values.get(node.name)
        if found is None:
            raise InvalidGraph(f"the match did not bind {node.name!r}", root.origin, "use it as an optional operand")
        return found
    if not isinstance(node, Operation):
        raise InvalidGraph(f"{node} is no template: a right side has no choice", root.origin)
    op = bound.groups[node.op] if node.op in GROUPS else node.op
    inputs = _operands(op, node.args, bound, root)
    if op == "call" and is_root:
        return make(op, *inputs, attrs=_attrs(node, op, bound), type=root.type, origin=root.origin)
    return make(op, *inputs, attrs=_attrs(node, op, bound), origin=root.origin)


def _operands(op: str, nodes: tuple[Argument, ...], bound: Bindings, root: Value) -> tuple[Value, ...]:
    """Operands in order; a number takes the element type of its first sibling that has one, but for a condition, which is of bools."""
    found: list[Value | Number] = []
    for node in nodes:
        if isinstance(node, Rest):
            found.extend(bound.rests[node.name])
        elif isinstance(node, Optional):
            if not isinstance(node.pattern, Variable) or node.pattern.name in bound.values:
                found.append(_value(node.pattern, bound, root))
        elif isinstance(node, (NumberLiteral, NumberVariable)):
            found.append(_number(node, bound))
        else:
            found.append(_value(node, bound, root))
    conditions = 1 if op == "where" else 0
    dtype = next((v.dtype for v in found[conditions:] if isinstance(v, Value)), root.dtype)
    types = (boolean if n < conditions else dtype for n in range(len(found)))
    return tuple(v if isinstance(v, Value) else full(v, t, (), root.origin) for v, t in zip(found, types, strict=True))


def _attrs(node: Operation, op: str, bound: Bindings) -> A.Attrs:
    """The bound attributes, or new ones from `field=literal` for every field (those with a default may be left out)."""
    if node.attrs is not None:
        return bound.attrs[node.attrs]
    kind = OPS[op].attrs
    if not fields(kind):
        return A.NoAttrs()
    given: dict[str, object] = {key: BY_NAME[value] if isinstance(value, str) and value in BY_NAME else value for key, value in node.fields}
    try:
        return kind(**given)
    except TypeError as error:
        raise InvalidGraph(f"{node} does not say all attributes of {op}: {error}") from error
