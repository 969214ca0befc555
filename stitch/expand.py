"""Contractions in their barest form, so that everything around the products is elementwise and fuses like the rest.

linear(x, w, b)  -> linear(x, w) + b
qlinear(x, w, b) -> f32(int_linear(x, w)) * s + (b - zero_point * sum(w) * s)      s = scale_x * scale_w
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph import build as g
from ..graph.attrs import AttentionAttrs, PermuteAttrs
from ..graph.dims import floordiv
from ..graph.ir import Graph, Value, rebuild, with_inputs
from ..graph.ops import OPS, make
from ..graph.products import column_groups, transposed
from ..graph.types import boolean, f32, f64, i32, i64

_SPELLED = ("linear", "routed_linear", "matmul")


def expand_contractions(graph: Graph) -> Graph:
    """Split biases, scales and zero points off the products."""
    return rebuild(graph, lambda value, inputs: _expand(with_inputs(value, inputs)))


def _expand(value: Value) -> Value:
    if value.op == "linear" and len(value.inputs) == 3:
        with g.at(value.origin):
            product = g.linear(*value.inputs[:2])
            return g.add(product, g.cast(value.inputs[2], product.dtype))
    if value.op == "qlinear":
        with g.at(value.origin):
            return _expand_qlinear(value)
    return value


def _expand_qlinear(value: Value) -> Value:
    x, w = value.inputs[:2]
    xq, wq = x.tensor.qparams, w.tensor.qparams
    assert xq is not None and wq is not None
    scales = g.channel_scales(xq, wq)
    real = g.mul(g.cast(g.int_linear(x, w), f32), scales)
    offset = g.cast(value.inputs[2], f32) if len(value.inputs) == 3 else None
    if xq.zero_point:
        # Known with the weight, and no operation of its own. Four roundings of 2^8 sum |w| at most are 2^-14 of a step of each x.
        share = g.mul(g.cast(g.reduce(g.cast(w, i32), "sum", 1), f32), g.mul(scales, float(xq.zero_point)))
        offset = g.neg(share) if offset is None else g.sub(offset, share)
    return real if offset is None else g.add(real, offset)


def expand_unsupported(graph: Graph, native: Callable[[Value], bool], within: Callable[[Value], bool] | None = None) -> Graph:
    """Spell out contractions that no kernel takes (`native` says which): multiplications and sums, which any type has. within: `native` of
    the products of an attention that is spelled out, whose keys and values several heads may share, which sums read as they lie."""

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        value = with_inputs(old, inputs)
        if OPS[value.op].group != "contraction" or native(old):
            return value
        with g.at(value.origin):
            if value.op == "attention":
                return rebuild(Graph((), (_attention(value),)), lambda v, i: visit_product(with_inputs(v, i))).outputs[0]
            return spelled(value) if value.op in _SPELLED else value

    def visit_product(value: Value) -> Value:
        return value if value.op not in _SPELLED or (within or native)(value) else spelled(value)

    def spelled(value: Value) -> Value:
        exact = f32 if value.dtype.is_float and value.dtype.bits < 32 else value.dtype  # short floats are summed in f32
        x, y = (g.cast(v, exact) for v in value.inputs[:2])
        if value.op == "routed_linear":  # [S, 1, K] * [S, N, K], summed over K
            ends, scales = value.inputs[2], value.inputs[3:]
            y = g.cast(g.dequantize_groups(value.inputs[1], *scales), exact) if scales else y
            matrices = g.reshape(y, (ends.shape[0], value.shape[1], y.shape[1]))
            return g.cast(g.reduce(g.mul(g.unsqueeze(x, 1), g.take(matrices, g.route(ends, value.shape[0]), 0)), "sum", -1), value.dtype)
        groups = column_groups(x.shape, y.shape) if value.op == "linear" else 0
        if groups == 1 and isinstance(x.attrs, PermuteAttrs) and x.attrs.order[-1] != x.tensor.rank - 1:
            total = _across(x.inputs[0], x.attrs.order, y)
        elif groups:  # [..., G, 1, K] * [G, N / G, K], summed over K
            parts = g.reshape(x, (*x.shape[:-1], groups, 1, y.shape[1]))
            columns = g.reshape(y, (groups, floordiv(y.shape[0], groups), y.shape[1]))
            total = g.reshape(g.reduce(g.mul(parts, columns), "sum", -1), value.shape)
        elif (whole := transposed(y)) is not None:  # [..., M, 1, K] * [..., 1, N, K], along memory
            total = g.reduce(g.mul(g.unsqueeze(x, -2), g.unsqueeze(whole, -3)), "sum", -1)
        else:  # [..., M, K, 1] * [..., 1, K, N]
            total = g.reduce(g.mul(g.unsqueeze(x, x.tensor.rank), g.unsqueeze(y, y.tensor.rank - 2)), "sum", -2)
        for bias in value.inputs[2:]:
            total = g.add(total, g.cast(bias, exact))
        return g.cast(total, value.dtype)

    return rebuild(graph, visit)


def _across(x: Value, order: tuple[int, ...], y: Value) -> Value:
    """linear(permute(x), y) of an x in which K is not the last axis, as it is in images by planes: whole lines are multiplied and added up,
    [..., 1, K, ...] * [N, K, 1, ...], and the sums permuted."""
    axis = order[-1]
    columns = g.reshape(y, (*y.shape, *[1] * (x.tensor.rank - axis - 1)))
    return g.permute(g.reduce(g.mul(g.unsqueeze(x, axis), columns), "sum", axis + 1), order)


def _attention(value: Value) -> Value:
    """softmax(q k^T scale + mask) v, its products capped perhaps, with a row that is masked everywhere giving zeros."""
    assert isinstance(value.attrs, AttentionAttrs)
    wide = f64 if value.inputs[0].dtype == f64 else f32
    q, k, v = (g.cast(x, wide) for x in value.inputs[:3])
    heads, groups = q.shape[1], k.shape[1]
    if heads != groups:
        times = floordiv(heads, groups)
        k, v = (
            g.reshape(g.expand(g.unsqueeze(x, 2), (x.shape[0], groups, times, *x.shape[2:])), (x.shape[0], heads, *x.shape[2:]))
            for x in (k, v)
        )
    score = g.mul(g.matmul(q, g.permute(k, (0, 1, 3, 2))), value.attrs.scale)
    score = score if value.attrs.cap is None else g.mul(g.tanh(score), value.attrs.cap)
    keep = None
    for end, sign in ((value.attrs.before, -1), (value.attrs.after, 1)):
        if end is not None:
            ends, keys = g.unsqueeze(g.iota(score.shape[2], i64, end * sign), 1), g.unsqueeze(g.iota(score.shape[3], i64), 0)
            seen = g.le(keys, ends) if sign > 0 else g.le(ends, keys)
            keep = seen if keep is None else g.and_(keep, seen)
    mask, sink = value.attrs.besides(value.inputs)
    if mask is not None:
        if mask.dtype == boolean:
            keep = mask if keep is None else g.and_(keep, mask)
        else:
            score = g.add(score, g.cast(mask, wide))
    if keep is not None:
        score = g.where(keep, score, float("-inf"))
    top = g.reduce(score, "max", -1, True)
    sink = sink if sink is None else g.cast(sink, wide)
    top = top if sink is None else g.maximum(top, sink)
    masked = g.eq(top, float("-inf"))
    below = g.sub(score, g.where(masked, 0.0, top))
    weight = make("exp_weight", below) if wide == f32 else g.exp(below)  # what is hidden takes `exp` ten times as long
    total = g.reduce(weight, "sum", -1, True)
    total = total if sink is None else g.add(total, g.exp(g.sub(sink, g.where(masked, 0.0, top))))
    result = g.div(g.matmul(weight, v), g.where(masked, 1.0, total))
    return g.cast(result, value.dtype) if value.attrs.qparams is None else g.quantize(result, value.dtype, value.attrs.qparams)
