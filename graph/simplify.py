"""General simplifications: common subexpressions, constants, views, and the algebra that attention masks need.

All of them are exact: the same bits come out, NaN and signed zero included. Watched constants are never folded, because a folded
copy would go stale when the model's parameter changes. Dead values need no pass: a graph is what its outputs reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from . import attrs as A
from . import build as b
from .choices import chosen_numbers, chosen_truth, negated, number_of, opposite
from .dims import product
from .interpret import evaluate_one
from .ir import Graph, Value, rebuild, with_inputs
from .ops import COMPARE, OPS, make
from .positions import HIGHEST_MASK, compare_positions, only_in_front, sees_itself, window_mask
from .types import boolean
from .updates import put_into_permuted, put_into_slice

Rule = Callable[[Value], Value | None]

FOLD_LIMIT = 1 << 16  # elements: enough for masks and tables, too little to hold a weight twice


def cse(graph: Graph) -> Graph:
    """Equal operations on the same operands become one. Calls left to PyTorch are kept apart: they may be random."""
    seen: dict[tuple[object, ...], Value] = {}

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        value = with_inputs(old, inputs)
        if value.op == "aten":
            return value
        a = value.attrs
        kind: object = (id(a.tensor), a.watched, value.type) if isinstance(a, A.ConstantAttrs) else value.kind
        return seen.setdefault((kind, *map(id, inputs)), value)

    return rebuild(graph, visit)


def _full_like(value: Value, number: float) -> Value:
    with b.at(value.origin):
        return b.full(number, value.dtype, value.shape)


def fold_uniform(value: Value) -> Value | None:
    """A view or elementwise function of repeated numbers is a repeated number."""
    if not value.inputs or value.inputs[0].op != "full" or any(v.op != "full" for v in value.inputs) or value.tensor.qparams is not None:
        return None
    group = OPS[value.op].group
    if group == "view":
        return _full_like(value, value.inputs[0].attrs.value) if isinstance(value.inputs[0].attrs, A.FullAttrs) else None
    if group != "elementwise" or value.op in ("quantize", "dequantize"):
        return None
    operands = [torch.tensor(number_of(v), dtype=v.dtype.torch) for v in value.inputs]
    return _full_like(value, evaluate_one(value, operands, {}, {}).item())


def fold_constants(value: Value) -> Value | None:
    """Operations on small constants of the model's own code, such as position tables, are done once, now."""
    frozen = [v for v in value.inputs if isinstance(v.attrs, A.ConstantAttrs) and not v.attrs.watched]
    if not frozen or value.op in ("expand", "quantize") or OPS[value.op].group in ("extern", "leaf"):
        return None
    if len(frozen) + sum(v.op == "full" for v in value.inputs) != len(value.inputs) or value.tensor.qparams is not None:
        return None
    size = product(value.shape)
    if not isinstance(size, int) or size > FOLD_LIMIT:
        return None
    if any(v.tensor.qparams is not None or not all(isinstance(d, int) for d in v.shape) for v in value.inputs):
        return None
    operands = [v.attrs.tensor.detach() if isinstance(v.attrs, A.ConstantAttrs) else _spread(v) for v in value.inputs]
    result = evaluate_one(value, operands, {}, {}).contiguous()
    return make("constant", attrs=A.ConstantAttrs(result), type=value.type, origin=value.origin, name=value.name or frozen[0].name)


def _spread(value: Value) -> torch.Tensor:
    return evaluate_one(value, [], {}, {})  # type: ignore[no-any-return]


def _neutral(value: Value, place: int) -> bool:
    """True when operand `place` of a binary operation leaves the other one as it is, bit for bit."""
    number = number_of(value.inputs[place])
    if number is None:
        return False
    floating = value.dtype.is_float
    if value.op in ("mul", "div", "floordiv") and (value.op != "floordiv" or not floating):
        return number == 1 and (place == 1 or value.op == "mul")
    if value.op in ("add", "sub") and not floating:
        return number == 0 and (place == 1 or value.op == "add")
    if value.dtype == boolean and value.op in ("and", "or"):
        return number == (value.op == "and")
    return False


def drop_neutral(value: Value) -> Value | None:
    """x * 1, and(x, True), integer x + 0, where(True, x, y)."""
    if value.op == "where" and number_of(value.inputs[0]) is not None:
        return b.expand(value.inputs[1 if number_of(value.inputs[0]) else 2], value.shape)
    for place in (0, 1) if len(value.inputs) == 2 else ():
        if _neutral(value, place):
            return b.expand(value.inputs[1 - place], value.shape)
    return None


def compose_views(value: Value) -> Value | None:
    """A view of a view of the same kind is one view; a view that changes nothing is none."""
    x = value.inputs[0]
    a, inner = value.attrs, x.attrs
    same = x.op == value.op
    if value.type == x.type and (value.op in ("reshape", "expand", "cast") or getattr(a, "order", None) == tuple(range(x.tensor.rank))):
        return x
    if value.op == "reshape" and same:
        return b.reshape(x.inputs[0], value.shape)
    if value.op == "expand" and same:
        return b.expand(x.inputs[0], value.shape)
    if isinstance(a, A.PermuteAttrs):
        if isinstance(inner, A.PermuteAttrs):
            return b.permute(x.inputs[0], tuple(inner.order[i] for i in a.order))
        moved = [axis for axis in a.order if x.shape[axis] != 1]
        return b.reshape(x, value.shape) if moved == sorted(moved) else None
    if isinstance(a, A.SliceAttrs):
        if a.start == 0 and a.step == 1 and value.shape == x.shape:
            return x
        if isinstance(inner, A.SliceAttrs) and inner.axis == a.axis:
            return b.slice_(x.inputs[0], a.axis, inner.start + a.start * inner.step, a.length, inner.step * a.step)
    return None


def whole_linear(value: Value) -> Value | None:
    """linear over flattened rows is linear over the rows as they were: the flattening moves behind it and can cancel there."""
    x = value.inputs[0]
    if x.op != "reshape" or x.tensor.rank != 2:
        return None
    source = x.inputs[0].shape
    rows = next((i for i in range(len(source) - 1, 1, -1) if (product(source[:i]), product(source[i:])) == x.shape), None)
    if rows is None:
        return None
    inner = make(value.op, b.reshape(x.inputs[0], (*source[:rows], x.shape[-1])), *value.inputs[1:], origin=value.origin, name=value.name)
    return b.reshape(inner, value.shape)


def narrow_mask(value: Value) -> Value | None:
    """attention broadcasts its mask itself, and takes a bool mask as it is: what would only write a larger one is left out. Where each
    query sees a key, what hides others may be any number that is low enough."""
    assert isinstance(value.attrs, A.AttentionAttrs)
    given = value.attrs.besides(value.inputs)[0]
    if given is None:
        return None
    if number_of(given) == (1 if given.dtype == boolean else 0):
        return replace(value, inputs=value.inputs[:3] + value.inputs[4:])
    mask = given
    while mask.op == "expand" or (mask.op == "reshape" and only_in_front(mask)):
        mask = mask.inputs[0]
    if mask.op == "where" and mask.dtype != boolean:
        condition, *others = mask.inputs
        with b.at(mask.origin):
            for keep, kept, hidden in ((condition, *others), (negated(condition), *reversed(others))):
                if _hides(value, keep, kept, hidden):
                    mask = keep
                    break
    if mask is given or (given.op == "reshape" and mask is given.inputs[0] and given.tensor.rank == 4):
        return None
    mask = b.reshape(mask, (1,) * (4 - mask.tensor.rank) + mask.shape)
    return replace(value, inputs=(*value.inputs[:3], mask, *value.inputs[4:]))


def _hides(attention: Value, keep: Value, kept: Value, hidden: Value) -> bool:
    """Whether what is added is 0 or as good as -inf: a number of at most `HIGHEST_MASK`, for queries of which each sees a key."""
    low = number_of(hidden)
    if number_of(kept) != 0 or low is None or low > HIGHEST_MASK:
        return False
    return low == float("-inf") or sees_itself(keep, attention.inputs[0].shape[2], attention.inputs[1].shape[2])


_VIEWS: tuple[Rule, ...] = (fold_uniform, fold_constants, compose_views)
RULES: dict[str, tuple[Rule, ...]] = {
    **{n: (fold_uniform, fold_constants, drop_neutral, chosen_numbers) for n, s in OPS.items() if s.group == "elementwise"},
    **dict.fromkeys(COMPARE, (fold_uniform, fold_constants, compare_positions, chosen_numbers)),
    **dict.fromkeys(("reshape", "expand", "permute", "slice"), _VIEWS),
    "cast": (*_VIEWS, chosen_numbers),
    "where": (fold_uniform, fold_constants, drop_neutral, chosen_truth),
    "logical_not": (fold_uniform, fold_constants, opposite, chosen_numbers),
    **dict.fromkeys(("reduce", "scan", "concat", "take", "gather", "pad"), (fold_constants,)),
    "put": (put_into_slice, put_into_permuted),
    "linear": (whole_linear,), "qlinear": (whole_linear,), "attention": (narrow_mask, window_mask),
}


def canonical(graph: Graph, rules: dict[str, tuple[Rule, ...]] = RULES) -> Graph:
    """Every value after all rules of its operation, until none applies."""

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        value = with_inputs(old, inputs)
        changed = True
        while changed:
            changed = False
            for rule in rules.get(value.op, ()):
                new = rule(value)
                if new is not None:
                    value, changed = new, True
                    break
        return value

    return rebuild(graph, visit)

