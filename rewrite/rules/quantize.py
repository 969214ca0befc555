"""Quantize and dequantize pairs (QDQ) on their way to integer kernels. With dq(x) = s (x - z) and q(y) = round(y / s) + z, saturated:

    q(dq x) = x                                      the same type: parameters and integers
    view (dq x) = dq (view x)                        per tensor; likewise take, gather, and concat of equal parameters
    take (dq x) i = (take x i - z) * take s i        one scale for each row of a table
    pad 0 (dq x) = dq (pad z x)
    q (view y) = view (q y)                          per tensor; not for slices, where it would be more work
    q (pad v y) = pad (q v) (q y)                    per tensor
    q (concat y z) = concat (q y) (q z)              per tensor
    q (max y) = max (q y)                            per tensor, likewise min: q never decreases
    q (relu y) = q y                                 where 0 is the least number that has an integer; likewise other bounds

Dequantization moves towards the outputs and quantization towards the inputs, over views, until they meet a contraction (`integer.py`)
or one another. Whatever arithmetic is between them stays: `quantize(relu(x))` is one loop after stitching.
"""

from __future__ import annotations

import math
import random

import torch

from ...graph import attrs as A
from ...graph import build as b
from ...graph.interpret import quantize
from ...graph.ir import Value
from ...graph.ops import OPS
from ...graph.types import QParams, f32, i8, i64, u8
from ..match import Mismatch
from ..pattern import GROUPS
from ..rule import Match, RuleSet, rule

_S8 = QParams((0.05,))
_U8 = QParams((0.02,), 120, None, 0, 255)


def per_tensor(q: QParams | None) -> bool:
    """Whether there is one scale for all elements."""
    return q is not None and q.axis is None and len(q.scale) == 1


def random_integers(rng: random.Random, *shape: int) -> Value:
    """Integers of an input, quantized per tensor in one of two schemes, for examples."""
    x = b.input_(0, f32, shape)
    return b.quantize(x, i8, _S8) if rng.random() < 0.5 else b.quantize(x, u8, _U8)


def _round_trip_example(rng: random.Random) -> Value:
    x = random_integers(rng, 2, 3)
    assert x.tensor.qparams is not None
    return b.quantize(b.dequantize(x), x.dtype, x.tensor.qparams)


@rule("quantize{q}(dequantize(x)) -> x", example=_round_trip_example)
def round_trip(m: Match) -> Value | Mismatch:
    """With other parameters it is a requantization, which rounds."""
    return m["x"] if m["x"].type == m.root.type else m.fail(f"requantizes {m['x'].type} to {m.root.type}", m["x"])


def _by_channel(rng: random.Random, rows: int, columns: int) -> Value:
    """A table with one scale for each index of one axis, for examples."""
    axis = rng.randint(0, 1)
    scales = tuple(rng.uniform(0.01, 0.05) for _ in range((rows, columns)[axis]))
    return b.quantize(b.input_(0, f32, (rows, columns)), i8, QParams(scales, rng.choice((0, 3)), axis))


def _view_example(rng: random.Random) -> Value:
    if rng.random() < 0.3:
        table = b.dequantize(_by_channel(rng, 2, 3))
        return rng.choice((b.permute(table, (1, 0)), b.reshape(table, (2, 1, 3)), b.slice_(table, 1, 1, 2), b.slice_(table, 0, 1, 1)))
    x = b.dequantize(random_integers(rng, 1, 2, 6))
    return rng.choice((b.permute(x, (2, 0, 1)), b.reshape(x, (3, 4)), b.slice_(x, 2, 1, 2, 2), b.expand(x, (5, 2, 6))))


@rule("view{a}(dequantize(x)) -> dequantize(view{a}(x))", example=_view_example)
def dequantize_after_view(m: Match) -> Value | Mismatch:
    """Which element goes where does not depend on what it means. Per channel, the axis moves too: with a permutation, or not at all when
    a reshape leaves everything up to it alone, or a slice is along another one."""
    q, a = m["x"].tensor.qparams, m.root.attrs
    kept = 0 if q is None or q.axis is None else q.axis + 1
    beyond = m.root.op == "reshape" and m["x"].shape[:kept] == m.root.shape[:kept]
    across = isinstance(a, A.SliceAttrs) and a.axis != kept - 1
    if per_tensor(q) or m.root.op == "permute" or beyond or across:
        return m.right()
    return m.fail(f"{m['x'].type} is not quantized per tensor", m["x"])


def _take_example(rng: random.Random) -> Value:
    index = b.cast(b.ge(b.input_(1, f32, (2, 3)), 0.0), i64)
    if rng.random() < 0.5:
        return b.take(b.dequantize(_by_channel(rng, 2, 3)), index, rng.randint(0, 1))
    table = b.dequantize(random_integers(rng, 2, 3))
    return b.take(table, index, 0) if rng.random() < 0.5 else b.gather(table, index, 0)


@rule("take{a}(dequantize(x), i) | gather{a}(dequantize(x), i) -> dequantize(take{a}(x, i))", example=_take_example)
def dequantize_after_take(m: Match) -> Value | Mismatch:
    """A quarter of the bytes is read from the table. Where each row has a scale of its own, that is taken like the row."""
    x, q = m["x"], m["x"].tensor.qparams
    if per_tensor(q):
        return m.make("dequantize", m.make(m.root.op, x, m["i"], attrs=m.root.attrs))
    axis = m.attrs("a", A.AxisAttrs).axis
    if q is None or q.axis != axis or m.root.op != "take":
        return m.fail(f"{x.type} is not quantized per tensor or by what is taken", x)
    with b.at(m.root.origin):
        rows = b.sub(b.cast(b.take(x, m["i"], axis), f32), float(q.zero_point))
        scales = b.take(b.constant(torch.tensor(q.scale, dtype=torch.float32), "scales"), m["i"])
        return b.mul(rows, b.reshape(scales, (*scales.shape, *(1,) * (x.tensor.rank - axis - 1))))


def _concat_example(rng: random.Random) -> Value:
    x = random_integers(rng, 2, rng.randint(1, 3))
    return b.concat([b.dequantize(x)] * rng.randint(2, 3), rng.randint(0, 1))


@rule("concat{a}(dequantize(x), rest...) -> dequantize(concat{a}(x, rest...))", example=_concat_example)
def dequantize_after_concat(m: Match) -> Value | Mismatch:
    """Every part must be quantized in the same way."""
    wanted = m["x"].tensor
    if not per_tensor(wanted.qparams):
        return m.fail(f"{wanted} is not quantized per tensor", m["x"])
    parts = [m["x"]]
    for part in m.rest("rest"):
        if part.op != "dequantize":
            return m.fail(f"a part is {part.op}, not dequantize", part)
        have = part.inputs[0].tensor
        if (have.dtype, have.qparams) != (wanted.dtype, wanted.qparams):
            return m.fail(f"one part is {have}, another {wanted}", part)
        parts.append(part.inputs[0])
    return m.make("dequantize", m.make("concat", *parts, attrs=m.attrs("a", A.AxisAttrs)))


def _pad_example(rng: random.Random) -> Value:
    return b.pad(b.dequantize(random_integers(rng, 2, 3)), ((rng.randint(0, 2), 0), (1, 2)))


@rule("pad{a}(dequantize(x)) -> dequantize(pad{c}(x))", example=_pad_example)
def dequantize_after_pad(m: Match) -> Value | Mismatch:
    """Zero is the integer z, which quantization represents exactly; other numbers it need not."""
    q, attrs = m["x"].tensor.qparams, m.attrs("a", A.PadAttrs)
    if q is None or not per_tensor(q):
        return m.fail(f"{m['x'].type} is not quantized per tensor", m["x"])
    if attrs.value != 0:
        return m.fail(f"{attrs.value} may have no integer")
    return m.make("dequantize", m.make("pad", m["x"], attrs=A.PadAttrs(attrs.amounts, q.zero_point)))


def _quantize_example(rng: random.Random) -> Value:
    x = b.input_(0, f32, (2, 6))
    return b.quantize(rng.choice((b.permute(x, (1, 0)), b.reshape(x, (3, 4)), b.expand(x, (5, 2, 6)))), i8, _S8)


@rule("quantize{q}(view!{a}(x)) -> view{a}(quantize{q}(x))", example=_quantize_example)
def quantize_before_view(m: Match) -> Value | Mismatch:
    """Fewer bytes are moved, and quantization meets what computes its operand."""
    if not per_tensor(m.attrs("q", A.QuantizeAttrs).qparams):
        return m.fail("quantized per channel: the axis would have to move too")
    if m.root.inputs[0].op == "slice":
        return m.fail("the slice drops elements; quantizing before it would be more work", m.root.inputs[0])
    return m.right()


def _padded_example(rng: random.Random) -> Value:
    padded = b.pad(b.input_(0, f32, (2, 3)), ((rng.randint(0, 2), 0), (1, 2)), rng.choice((0.0, 1.3, -math.inf, math.inf)))
    return b.quantize(padded, i8, _S8) if rng.random() < 0.5 else b.quantize(padded, u8, _U8)


@rule("quantize{q}(pad!{a}(x)) -> pad{c}(quantize{q}(x))", example=_padded_example)
def quantize_before_pad(m: Match) -> Value | Mismatch:
    """What surrounds the elements is a number, and has an integer like any other."""
    attrs, pad = m.attrs("q", A.QuantizeAttrs), m.attrs("a", A.PadAttrs)
    if not per_tensor(attrs.qparams):
        return m.fail("quantized per channel")
    value = int(quantize(torch.tensor(float(pad.value), dtype=torch.float32), attrs.dtype.torch, attrs.qparams))
    return m.make("pad", m.make("quantize", m["x"], attrs=attrs), attrs=A.PadAttrs(pad.amounts, value))


def _joined_example(rng: random.Random) -> Value:
    parts = [b.relu(b.input_(0, f32, (2, 3))), b.input_(1, f32, (2, 3))][: rng.randint(1, 2)]
    return b.quantize(b.concat([*parts, parts[0]], rng.randint(0, 1)), i8, _S8)


@rule("quantize{q}(concat!{a}(x, rest...)) -> concat{a}(quantize{q}(x), rest...)", example=_joined_example)
def quantize_before_concat(m: Match) -> Value | Mismatch:
    """Fewer bytes are put side by side, and quantization meets what computes each part."""
    attrs = m.attrs("q", A.QuantizeAttrs)
    if not per_tensor(attrs.qparams):
        return m.fail("quantized per channel")
    return m.make("concat", *[m.make("quantize", part, attrs=attrs) for part in (m["x"], *m.rest("rest"))], attrs=m.attrs("a", A.AxisAttrs))


def _extreme_example(rng: random.Random) -> Value:
    x = b.relu(b.input_(0, f32, (2, 9, 3)))
    padded = b.pad(x, ((0, 0), (1, 1), (0, 0)), -math.inf) if rng.random() < 0.5 else x
    largest = b.reduce(b.window(padded, 1, 3, rng.choice((1, 2))), rng.choice(("max", "min")), 2)
    return b.quantize(largest, i8, _S8) if rng.random() < 0.5 else b.quantize(largest, u8, _U8)


@rule("quantize{q}(reduce!{a}(x)) -> reduce{a}(quantize{q}(x))", ulp=1, example=_extreme_example)
def quantize_before_extreme(m: Match) -> Value | Mismatch:
    """Pooling reads and writes a quarter of the bytes, and quantization meets what computes its operand.

    Not where the operand is in memory as it is, of which every element would be read to be quantized. A NaN, for which quantization has
    no more than an integer, no longer stands for all of its window.
    """
    if m.attrs("a", A.ReduceAttrs).kind not in ("max", "min"):
        return m.fail("another reduction than the greatest or the least")
    if not per_tensor(m.attrs("q", A.QuantizeAttrs).qparams):
        return m.fail("quantized per channel")
    source = m["x"]
    while source.op in GROUPS["view"] or source.op == "pad":
        source = source.inputs[0]
    return m.right() if OPS[source.op].group == "elementwise" else m.fail(f"{source.op} is not computed together with others", source)


def _bounded_example(rng: random.Random) -> Value:
    x, q = b.input_(0, f32, (2, 7)), QParams((0.02,), 0, None, 0, 255)
    low = rng.choice((b.relu(x), b.maximum(x, rng.choice((-0.3, 0.0)))))
    return b.quantize(rng.choice((low, b.minimum(low, 6.0), b.minimum(x, rng.choice((5.1, 7.0, math.inf))))), u8, q)


@rule("quantize{q}(relu!(x)) | quantize{q}(maximum!(x, $c)) | quantize{q}(minimum!(x, $c)) -> quantize{q}(x)", example=_bounded_example)
def bounded_by_integers(m: Match) -> Value | Mismatch:
    """What is beyond the range of the integers becomes the end of it anyway."""
    attrs, bound = m.attrs("q", A.QuantizeAttrs), float(m.bindings.numbers.get("c", 0.0))
    q = attrs.qparams
    if not per_tensor(q) or math.isnan(bound):
        return m.fail("quantized per channel, or bounded by no number")
    end = q.qmax if m.root.inputs[0].op == "minimum" else q.qmin
    found = int(quantize(torch.tensor(bound, dtype=torch.float32), attrs.dtype.torch, q))
    return m.right() if found == end else m.fail(f"{bound} has the integer {found}, and {end} is one as well", m.root.inputs[0])


RULES: RuleSet = (
    round_trip, dequantize_after_view, dequantize_after_take, dequantize_after_concat,
    dequantize_after_pad, quantize_before_view, quantize_before_pad, quantize_before_concat, quantize_before_extreme,
    bounded_by_integers,
)
