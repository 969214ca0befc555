"""Quantized weights times activations that are not quantized. With dq(w) = s w for integers w:

    linear(x, dq w, b)         = linear(x, w) * s + b        per tensor or per output channel; the integers are multiplied as they are
    linear(x, cast w, b)       = linear(x, w) + b            for integers that the type of x holds
    linear(x, cast w s, b)     = linear(x, w) * s + b        where dequantization is spelled out; that of groups is dequantize_groups
    linear(x, dq_groups w s, b) = group_linear(x, w, s) + b  4-bit integers with a scale for each group along k
    take (dq_groups w s) i     = dequantization of take w i with take s i

To be applied after the rules for integer products, which take what has quantized activations. The scale of a channel counts after the
sum instead of before it, which rounds once less for each product (`ulp=64` of the largest result).
"""

from __future__ import annotations

import random

import torch

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import floordiv, mod
from ...graph.ir import Value
from ...graph.types import QParams, bf16, f16, f32, i8, i64
from ..match import Mismatch
from ..query import is_weight
from ..rule import Match, RuleSet, rule
from .contraction import random_weight


def _integers(rng: random.Random, n: int, k: int, low: int, high: int, q: QParams | None = None) -> Value:
    """A constant of integers, for examples."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    return b.constant(torch.randint(low, high + 1, (n, k), generator=generator).to(torch.int8), qparams=q)


def random_groups(rng: random.Random, n: int, groups: int) -> Value:
    """A dequantized weight [n, 8 * groups] of 4-bit integers, for examples."""
    return b.dequantize_groups(_integers(rng, n, 8 * groups, -8, 7), random_weight(rng, n, groups))


def _channel_example(rng: random.Random) -> Value:
    n, k = rng.randint(1, 5), rng.randint(1, 9)
    q = QParams(tuple(rng.uniform(0.01, 0.05) for _ in range(n)), axis=0) if rng.random() < 0.7 else QParams((0.05,))
    bias = (random_weight(rng, n),) if rng.random() < 0.5 else ()
    return b.linear(b.input_(0, f32, (2, 3, k)), b.dequantize(_integers(rng, n, k, -127, 127, q)), *bias)


def _channels_refused(m: Match) -> Mismatch | None:
    """Why no kernel multiplies x with integers w whose type says what they stand for."""
    w, q = m["w"], m["w"].tensor.qparams
    if m["x"].dtype not in (f32, bf16):
        return m.fail(f"x is {m['x'].dtype}; products with integer weights are of f32 or bf16", m["x"])
    if w.dtype != i8 or q is None or q.zero_point != 0 or not is_weight(w):
        return m.fail(f"w is {w.tensor}, not a constant of symmetric s8", w)
    if q.axis not in (None, 0):
        return m.fail(f"w has one scale for each index of axis {q.axis}, which is summed over", w)
    return None


@rule("linear(x, dequantize(w), b?) -> dequantize(linear(x, w))", ulp=64, example=_channel_example)
def weight_only_linear(m: Match) -> Value | Mismatch:
    """One scale for each output channel is a factor of its sum; the bias is added behind it."""
    why, q = _channels_refused(m), m["w"].tensor.qparams
    if why is not None:
        return why
    assert q is not None
    with b.at(m.root.origin):
        scale = b.full(q.scale[0], f32) if q.axis is None else b.constant(torch.tensor(q.scale, dtype=torch.float32), "scales")
        return m.fitted(_plus_bias(m, b.mul(b.linear(m["x"], m["w"]), scale)))


def _plain_example(rng: random.Random) -> Value:
    n, k, dtype = rng.randint(1, 5), rng.randint(1, 9), rng.choice((f32, bf16))
    bias = (random_weight(rng, n),) if rng.random() < 0.5 else ()
    return b.linear(b.cast(b.input_(0, f32, (2, 3, k)), dtype), b.cast(_integers(rng, n, k, -128, 127), dtype), *bias)


@rule("linear(x, cast(w), b?) -> linear(x, w)", ulp=8, example=_plain_example)
def plain_integers(m: Match) -> Value | Mismatch:
    """What scales them comes behind the product, as in models whose weights were quantized by hand or by torchao."""
    if m["x"].dtype not in (f32, bf16) or m["w"].dtype != i8 or not is_weight(m["w"]):
        return m.fail(f"x is {m['x'].dtype} and w {m['w'].tensor}, not f32 or bf16 and a constant of s8", m["w"])
    with b.at(m.root.origin):
        return m.fitted(_plus_bias(m, b.linear(m["x"], m["w"])))


def _channel_scales_example(rng: random.Random) -> Value:
    n, k = rng.randint(1, 5), rng.randint(2, 9)
    bias = (random_weight(rng, n),) if rng.random() < 0.5 else ()
    return b.linear(b.input_(0, f32, (2, 3, k)), b.mul(b.cast(_integers(rng, n, k, -128, 127), f32), random_weight(rng, n, 1)), *bias)


@rule("linear(x, p@mul(cast(w), s), b?) -> mul(linear(x, w), s)", ulp=64, example=_channel_scales_example)
def spelled_channels(m: Match) -> Value | Mismatch:
    """As of `weight_only_linear`, whose scales are part of a type."""
    return _spelled_channels(m)


def _narrow_channel_scales_example(rng: random.Random) -> Value:
    product = _channel_scales_example(rng)
    return b.linear(*(b.cast(value, bf16) for value in product.inputs))


@rule("linear(x, cast(p@mul(cast(w), s)), b?) -> mul(linear(x, w), s)", ulp=2**20, example=_narrow_channel_scales_example)
def spelled_narrow_channels(m: Match) -> Value | Mismatch:
    """The weight of a bf16 model, without its rounding."""
    return _spelled_channels(m)


def _spelled_channels(m: Match) -> Value | Mismatch:
    x, w, s = m["x"], m["w"], m["s"]
    if x.dtype not in (f32, bf16) or w.dtype != i8 or not is_weight(w) or s.shape != (w.shape[0], 1) or not is_weight(s):
        what = f"x is {x.dtype}, w {w.tensor} and s {s.tensor}"
        return m.fail(f"{what}, not f32 or bf16, a constant of s8 and one scale for each of its rows", w)
    why = _wider(m, m["p"])
    if why is not None:
        return why
    with b.at(m.root.origin):
        scale = b.reshape(b.cast(s, f32), (w.shape[0],))
        return m.fitted(_plus_bias(m, b.mul(b.linear(x, w), scale)))


def _wider(m: Match, *values: Value) -> Mismatch | None:
    """Why f32 does not hold what integers times their scales are in the model: f64 has more digits, and integers wrap around."""
    value = next((v for v in values if v.dtype not in (f32, f16, bf16)), None)
    return None if value is None else m.fail(f"the weight is computed in {value.dtype}, not in f32 or narrower", value)


def _spelled_example(rng: random.Random) -> Value:
    n, groups = rng.randint(1, 5), rng.randint(2, 3)
    integers = b.reshape(_integers(rng, n, 8 * groups, -8, 7), (n, groups, 8))
    real = b.mul(b.cast(integers, f32), random_weight(rng, n, groups, 1))
    return b.reshape(b.cast(real, rng.choice((f32, bf16))), (n, 8 * groups))


@rule("reshape(v@(p@mul(cast(reshape(w)), s) | cast(p@mul(cast(reshape(w)), s)))) -> cast(dequantize_groups(w, s))",
      example=_spelled_example)
def spelled_groups(m: Match) -> Value | Mismatch:
    """Every group of a row of 4-bit integers times its scale."""
    w, s, v = m["w"], m["s"], m["v"]
    held = w.attrs.tensor if isinstance(w.attrs, A.ConstantAttrs) else None
    if held is None or w.dtype != i8 or m.root.shape != w.shape or w.tensor.rank != 2 or v.tensor.rank != 3:
        return m.fail("w is no matrix of s8 whose rows are cut into groups", w)
    if s.shape != (*v.shape[:2], 1) or v.shape[0] != w.shape[0] or not is_weight(s) or mod(v.shape[2], 8) != 0:
        return m.fail(f"s is {s.tensor}, not one scale for each group of a multiple of 8", s)
    if not bool(((held >= -8) & (held <= 7)).all()):
        return m.fail("w has integers of more than 4 bits", w)
    why = _wider(m, m["p"], v)
    if why is not None:
        return why
    with b.at(m.root.origin):
        return m.fitted(b.cast(b.dequantize_groups(w, b.reshape(b.cast(s, f32), v.shape[:2])), m.root.dtype))


def _plus_bias(m: Match, product: Value) -> Value:
    bias = m.get("b")
    return product if bias is None else b.add(product, b.cast(bias, product.dtype))


def _narrow_example(rng: random.Random) -> Value:
    product = _channel_example(rng) if rng.random() < 0.5 else _group_example(rng)
    narrowed = (b.cast(value, bf16) for value in product.inputs)
    return b.linear(*narrowed)


@rule("linear(x, cast(v@(dequantize(w) | dequantize_groups(w, s))), b?) -> linear(x, v, b?)", ulp=2**20, example=_narrow_example)
def unrounded_weight(m: Match) -> Value | Mismatch:
    """The weight of a bf16 model is what its integers stand for, rounded. Without that rounding, the rules here take the product."""
    why = _channels_refused(m) if m["v"].op == "dequantize" else groups_refused(m)
    return why or m.make("linear", m["x"], m["v"], *m.root.inputs[2:])


def groups_refused(m: Match) -> Mismatch | None:
    """Why no kernel multiplies x with integers w and scales s of their groups."""
    if m["x"].dtype not in (f32, bf16):
        return m.fail(f"x is {m['x'].dtype}; products with integer weights are of f32 or bf16", m["x"])
    if not is_weight(m["w"]) or not is_weight(m["s"]):
        return m.fail("the weight is computed in each call", m["w"])
    return None


def _group_example(rng: random.Random) -> Value:
    n, groups = rng.randint(1, 5), rng.randint(1, 3)
    bias = (random_weight(rng, n),) if rng.random() < 0.5 else ()
    return b.linear(b.input_(0, f32, (2, 3, 8 * groups)), random_groups(rng, n, groups), *bias)


@rule("linear(x, dequantize_groups(w, s), b?) -> group_linear(x, w, s)", ulp=64, example=_group_example)
def weight_only_group_linear(m: Match) -> Value | Mismatch:
    """The kernel multiplies the scales in; the bias is added behind it."""
    why = groups_refused(m)
    if why is not None:
        return why
    with b.at(m.root.origin):
        return m.fitted(_plus_bias(m, b.group_linear(m["x"], m["w"], m["s"])))


def _take_example(rng: random.Random) -> Value:
    index = b.cast(b.ge(b.input_(0, f32, (2, 3)), 0.0), i64)
    return b.take(random_groups(rng, 3, rng.randint(1, 3)), index, 0)


@rule("take{a}(dequantize_groups(w, s), i) -> mul(take{a}(w, i), take{a}(s, i))", example=_take_example)
def dequantize_groups_after_take(m: Match) -> Value | Mismatch:
    """Half a byte or one for each element is read from a table that a product shares, instead of a table of f32."""
    if m.attrs("a", A.AxisAttrs).axis != 0:
        return m.fail("columns are taken, not rows")
    with b.at(m.root.origin):
        integers, scales = (b.take(table, m["i"], 0) for table in (m["w"], m["s"]))
        groups = m["s"].shape[1]
        real = b.reshape(b.cast(integers, f32), (*integers.shape[:-1], groups, floordiv(m["w"].shape[1], groups)))
        return m.fitted(b.reshape(b.mul(real, b.unsqueeze(scales, scales.tensor.rank)), m.root.shape))


RULES: RuleSet = (
    spelled_groups, spelled_channels, spelled_narrow_channels, unrounded_weight, weight_only_linear, plain_integers,
    weight_only_group_linear, dequantize_groups_after_take,
)
