"""Results of attention that are only wanted quantized are quantized as they are made: nothing else of them goes through memory.

    quantize(views(attention(q, k, v))) = views(attention'(q, k, v))        attention': with a quantized result
    heads(attention(q, k, v)) * c       = heads(attention(q, k, v * c))     heads: side by side, c: constants for each column

where one scale is that of all elements, and casts from a short float between them go with what they widen. The constants are what
activations are smoothed by before they are quantized: with values, which are sums of products, they are multiplied where these are made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...graph import attrs as A
from ...graph.dims import product
from ...graph.ir import ALIKE, Graph, Value, rebuild, with_inputs
from ...graph.ops import make
from ...graph.types import bf16, f16, f32, f64
from .scales import constant_operand

_VIEWS = ("reshape", "permute")
_HEADS_LAST = (0, 2, 1, 3)  # from [batch, heads, rows, columns], and back


def quantized_results(graph: Graph, constants: Collection[Value]) -> Graph:
    """The graph with attention in the place of it and of the quantization that alone reads its result. constants: the values that depend
    on no input."""
    fixed = frozenset(constants)
    found = {v for v in graph.order if _chain(graph, fixed, v)}
    if not found:
        return graph

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        if value not in found:
            return with_inputs(value, inputs)
        assert isinstance(value.attrs, A.QuantizeAttrs)
        at, above = inputs[0], list[Value]()
        factor = None
        while not isinstance(at.attrs, A.AttentionAttrs):
            above.append(at)
            if at.op == "mul":
                at, factor = _split(at, fixed)
            else:
                at = at.inputs[0]
        assert isinstance(at.attrs, A.AttentionAttrs)
        q, k, v, *others = at.inputs
        operands = q, k, v if factor is None else _multiplied(v, factor), *others
        at = make("attention", *operands, attrs=replace(at.attrs, dtype=value.dtype, qparams=value.attrs.qparams), origin=at.origin)
        for view in reversed(above):
            at = make(view.op, at, attrs=view.attrs, origin=view.origin, name=view.name) if view.op in _VIEWS else at
        return at

    return rebuild(graph, visit)


def _chain(graph: Graph, fixed: frozenset[Value], value: Value) -> list[Value]:
    """The values from the operand of a quantization down to an attention that nothing else reads; none where there is no such chain."""
    attrs = value.attrs
    if not isinstance(attrs, A.QuantizeAttrs) or value.dtype.bits != 8 or len(attrs.qparams.scale) != 1 or attrs.in_steps:
        return []
    columns = value.shape[-1] if value.shape else 0
    if not isinstance(columns, int) or columns % ALIKE == 0:  # stored with gaps between rows, which attention does not write
        return []
    chain, at = list[Value](), value.inputs[0]
    while len(graph.users[at]) == 1 and not graph.is_output(at):
        chain.append(at)
        if isinstance(at.attrs, A.AttentionAttrs):
            plain = at.attrs.dtype is None and at.dtype != f64
            return chain if plain and _movable(graph, fixed, chain) else []
        if at.op == "mul" and len(chain) == 1 and at.dtype == f32 and _split(at, fixed)[1] in fixed:
            at = _split(at, fixed)[0]
        elif at.op in _VIEWS or _widens(at):
            at = at.inputs[0]
        else:
            return []
    return []


def _movable(graph: Graph, fixed: frozenset[Value], chain: list[Value]) -> bool:
    """Whether what the results of attention, the end of the chain, are multiplied by, if anything, may go to the values."""
    if chain[0].op != "mul":
        return True
    attention, c = chain[-1], _split(chain[0], fixed)[1]
    between = [v for v in chain[1:-1] if v.op in _VIEWS]
    if [v.op for v in between] != ["reshape", "permute"] or not _side_by_side(between[0], between[1]):
        return False
    values = attention.inputs[2]
    if values.shape[1] != attention.shape[1] or values.op != "permute" or values.inputs[0].op != "reshape":
        return False
    y = values.inputs[0].inputs[0]
    alone = all(len(graph.users[v]) == 1 and not graph.is_output(v) for v in (values, values.inputs[0], y))
    rows = c.shape[-1:] == chain[0].shape[-1:] and product(c.shape) == c.shape[-1] and between[0].shape == chain[0].shape
    return alone and rows and _side_by_side(values.inputs[0], values, back=True) and (y.dtype == f32 or _narrows(y))


def _side_by_side(reshape: Value, permute: Value, back: bool = False) -> bool:
    """Whether a permutation of [batch, heads, rows, columns] and the merging of heads and columns, or the two the other way round, are
    all that these do."""
    assert isinstance(permute.attrs, A.PermuteAttrs)
    apart, beside = (reshape.shape, reshape.inputs[0].shape) if back else (reshape.inputs[0].shape, reshape.shape)
    return permute.attrs.order == _HEADS_LAST and len(apart) == 4 and beside[-1] == apart[2] * apart[3]


def _multiplied(values: Value, factor: Value) -> Value:
    """The values of attention times numbers for each column of all heads side by side."""
    heads = values.inputs[0]
    y = heads.inputs[0]
    exact = y.inputs[0] if _narrows(y) else y
    new = make("mul", exact, factor, origin=y.origin)
    if exact is not y:
        new = make("cast", new, attrs=y.attrs, origin=y.origin, name=y.name)
    for view in (heads, values):
        new = make(view.op, new, attrs=view.attrs, origin=view.origin, name=view.name)
    return new


def _split(value: Value, fixed: Collection[Value]) -> tuple[Value, Value]:
    """What a product multiplies, and by which constants."""
    at = constant_operand(fixed, value)
    return value.inputs[1 - at], value.inputs[at]


def _widens(value: Value) -> bool:
    return value.op == "cast" and value.dtype == f32 and value.inputs[0].dtype in (bf16, f16)


def _narrows(value: Value) -> bool:
    return value.op == "cast" and value.dtype in (bf16, f16) and value.inputs[0].dtype == f32
