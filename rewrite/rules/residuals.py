"""What a product rounds to a narrow type is rounded once, for all that read it, and stored so.

    cast(max of windows x), cast(concat(x, y)) = max of windows (cast x), concat(cast x, cast y)       nothing is rounded otherwise
    v + y, cast v                              = cast f32 (cast v) + y, cast v
    cast(relu(v + y))                          = cast(relu(cast f32 (cast v) + y))                     v: of an earlier product than y

The sums of a convolution network are read twice, by the next product and as a residual by a later sum. In f32 and narrow they would be
stored twice, three times the bytes, and for images these are what the time goes to: ResNet-50 in bf16 takes 86 % of that time so,
1 or 8 images of 224 x 224 on one core of an Emerald Rapids (both called in turn).

Only sums of products and what is made of them element by element are rounded. Each product after it rounds them all the same, so that
the error is that of one more rounding in each block, beside those of its products. Not so where the sums are normalized before a product
reads them, as in transformers: their residuals stay in f32, and so do normalized values, of which small differences add up.
"""

from __future__ import annotations

from ...graph import attrs as A
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import OPS, make
from ...graph.types import DType, f32
from .digits import Demands

# Operations to which a rounding error matters no more than to a product, as do sums: exponentials make it larger, and where comparisons
# choose, what is alike when rounded may have been different.
_LINEAR = ("add", "sub", "mul", "neg", "relu", "maximum", "minimum", "slice")
_FIXED, _INPUT, _SUMS, _OTHER = range(4)  # what a value is made of: constants, inputs, products' sums, anything else


def rounded_once(graph: Graph, dtype: DType) -> Graph:
    """The graph, of which products read what is cast to `dtype`, with values rounded before they are stored."""
    graph = _before_moves(graph, dtype)
    graph = _rounded(graph, dtype, _shared(graph, dtype))
    return _rounded(graph, dtype, _addends(graph))


def _rounded(graph: Graph, dtype: DType, chosen: set[Value]) -> Graph:
    """Whatever reads these in f32 reads them rounded."""
    wide: dict[Value, Value] = {}

    def read(old: Value, new: Value) -> Value:
        if old not in chosen:
            return new
        if old not in wide:
            narrow = make("cast", new, attrs=A.CastAttrs(dtype), origin=old.origin)
            wide[old] = make("cast", narrow, attrs=A.CastAttrs(f32), origin=old.origin)
        return wide[old]

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        if _narrows(value, dtype):
            return with_inputs(value, inputs)
        return with_inputs(value, tuple(read(old, new) for old, new in zip(value.inputs, inputs, strict=True)))

    return rebuild(graph, visit) if chosen else graph


def _narrows(value: Value, dtype: DType) -> bool:
    return value.op == "cast" and value.dtype == dtype and value.inputs[0].dtype == f32


def _before_moves(graph: Graph, dtype: DType) -> Graph:
    """Rounds what is only moved or compared before it is."""
    narrow: dict[Value, Value] = {}

    def cast(value: Value) -> Value:
        if value not in narrow:
            narrow[value] = make("cast", value, attrs=A.CastAttrs(dtype), origin=value.origin)
        return narrow[value]

    def before(old: Value, new: Value) -> Value:
        if not _moves(old) or len(graph.users[old]) != 1 or graph.is_output(old):
            return cast(new)
        inputs = (before(*both) for both in zip(old.inputs, new.inputs, strict=True))
        return make(new.op, *inputs, attrs=new.attrs, origin=new.origin, name=new.name)

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        moved = _narrows(value, dtype) and _moves(value.inputs[0])
        return before(value.inputs[0], inputs[0]) if moved else with_inputs(value, inputs)

    return rebuild(graph, visit)


def _moves(value: Value) -> bool:
    """Whether elements of the result are elements of the operands."""
    if isinstance(value.attrs, A.ReduceAttrs):
        return value.attrs.kind in ("max", "min")
    return value.op in ("concat", "pad") or (OPS[value.op].group == "view" and value.op != "slice")


def _passes_on(user: Value) -> bool:
    return user.op in _LINEAR or _moves(user) or (isinstance(user.attrs, A.ReduceAttrs) and user.attrs.kind == "sum")


def _kinds(graph: Graph) -> dict[Value, int]:
    kinds: dict[Value, int] = {}
    for value in graph.order:
        below = max((kinds[v] for v in value.inputs), default=_INPUT if value.op == "input" else _FIXED)
        group = OPS[value.op].group
        if not value.inputs or below == _FIXED or group == "elementwise" or value.op == "slice" or _moves(value):
            kinds[value] = below
        else:
            kinds[value] = _SUMS if group == "contraction" else _OTHER
    return kinds


def _shared(graph: Graph, dtype: DType) -> set[Value]:
    """Products' sums that are rounded for a product, and also read as they are."""
    kinds = _kinds(graph)

    def shared(value: Value) -> bool:
        if kinds[value] != _SUMS or value.dtype != f32 or graph.is_output(value):
            return False
        others = [user for user in graph.users[value] if not _narrows(user, dtype)]
        return 0 < len(others) < len(graph.users[value]) and all(map(_passes_on, others))

    return {value for value in graph.order if shared(value)}


def _addends(graph: Graph) -> set[Value]:
    """Of two products whose sum is rounded whatever becomes of it: the result of the first, stored until the second is there."""
    kinds, demands = _kinds(graph), Demands(graph)
    place = {value: number for number, value in enumerate(graph.order)}
    last: dict[Value, int] = {}  # the place of the product that computes a value, with what comes behind it
    for value in graph.order:
        product = OPS[value.op].group == "contraction"
        last[value] = place[value] if product else max((last[v] for v in value.inputs), default=-1)
    chosen: set[Value] = set()
    for value in graph.order:
        if value.op == "add" and value.dtype == f32 and demands.few_digits(value):
            first, second = sorted(value.inputs, key=last.__getitem__)
            alone = graph.users[first] == (value,) and not graph.is_output(first)
            if alone and first.op != "cast" and kinds[first] == _SUMS == kinds[second] and last[first] < last[second]:
                chosen.add(first)
    return chosen
