"""From quantize and dequantize pairs (QDQ) to integer kernels. With dq(x) = s (x - z) and q(y) = round(y / s) + z, saturated:

    linear(dq x, dq w, b) = qlinear(x, w, b)         x per tensor; w symmetric s8, per tensor or per output channel
    q(dq x) = x                                      the same type: parameters and integers
    view (dq x) = dq (view x)                        per tensor; likewise take, gather, and concat of equal parameters
    pad 0 (dq x) = dq (pad z x)
    q (view y) = view (q y)                          per tensor; not for slices, where it would be more work

Dequantization moves towards the outputs and quantization towards the inputs, over views, until they meet a contraction or one another.
Whatever arithmetic is between them stays: `quantize(relu(x))` is one loop after stitching. Only the first rounds differently, in f32
(`ulp=32`); the integer sum is exact and so is nearer to the truth.
"""

from __future__ import annotations

import random

from ...graph import attrs as A
from ...graph import build as b
from ...graph.ir import Value
from ...graph.types import QParams, f32, i8, i64, u8
from ..match import Mismatch
from ..rule import Match, RuleSet, rule
from .contraction import random_weight

_S8 = QParams((0.05,))
_U8 = QParams((0.02,), 120, None, 0, 255)


def _per_tensor(q: QParams | None) -> bool:
    return q is not None and q.axis is None and len(q.scale) == 1


def _quantized(rng: random.Random, *shape: int) -> Value:
    """Integers of an input, quantized per tensor in one of two schemes, for examples."""
    x = b.input_(0, f32, shape)
    return b.quantize(x, i8, _S8) if rng.random() < 0.5 else b.quantize(x, u8, _U8)


def _weight(rng: random.Random, n: int, k: int) -> Value:
    """A quantized constant of n output channels, for examples."""
    scales = tuple(rng.uniform(0.01, 0.05) for _ in range(n))
    q = QParams(scales, axis=0) if rng.random() < 0.5 else _S8
    return b.quantize(random_weight(rng, n, k), i8, q)


def _linear_example(rng: random.Random) -> Value:
    n, k = rng.randint(1, 5), rng.randint(1, 9)
    bias = (random_weight(rng, n),) if rng.random() < 0.5 else ()
    return b.linear(b.dequantize(_quantized(rng, 2, 3, k)), b.dequantize(_weight(rng, n, k)), *bias)


@rule("linear(dequantize(x), dequantize(w), b?) -> qlinear(x, w, b?)", ulp=32, example=_linear_example)
def quantized_linear(m: Match) -> Value | Mismatch:
    """sum s_x (x - z) s_w w = s_x s_w (sum x w - z sum w): integers inside, one scale for each output channel outside."""
    x, w = m["x"].tensor, m["w"].tensor
    if not _per_tensor(x.qparams) or x.dtype not in (i8, u8):
        return m.fail(f"x is {x}, not 8-bit integers quantized per tensor", m["x"])
    q = w.qparams
    if w.dtype != i8 or q is None or q.zero_point != 0:
        return m.fail(f"w is {w}, not symmetric s8", m["w"])
    if q.axis not in (None, 0):
        return m.fail(f"w has one scale for each index of axis {q.axis}, which is summed over", m["w"])
    return m.right()


def _round_trip_example(rng: random.Random) -> Value:
    x = _quantized(rng, 2, 3)
    assert x.tensor.qparams is not None
    return b.quantize(b.dequantize(x), x.dtype, x.tensor.qparams)


@rule("quantize{q}(dequantize(x)) -> x", example=_round_trip_example)
def round_trip(m: Match) -> Value | Mismatch:
    """With other parameters it is a requantization, which rounds."""
    return m["x"] if m["x"].type == m.root.type else m.fail(f"requantizes {m['x'].type} to {m.root.type}", m["x"])


def _view_example(rng: random.Random) -> Value:
    x = b.dequantize(_quantized(rng, 1, 2, 6))
    return rng.choice((b.permute(x, (2, 0, 1)), b.reshape(x, (3, 4)), b.slice_(x, 2, 1, 2, 2), b.expand(x, (5, 2, 6))))


@rule("view{a}(dequantize(x)) -> dequantize(view{a}(x))", example=_view_example)
def dequantize_after_view(m: Match) -> Value | Mismatch:
    """Which element goes where does not depend on what it means. Per channel, the axis would have to move too."""
    return m.right() if _per_tensor(m["x"].tensor.qparams) else m.fail(f"{m['x'].type} is not quantized per tensor", m["x"])


def _take_example(rng: random.Random) -> Value:
    index = b.cast(b.ge(b.input_(1, f32, (2, 3)), 0.0), i64)
    table = b.dequantize(_quantized(rng, 2, 3))
    return b.take(table, index, 0) if rng.random() < 0.5 else b.gather(table, index, 0)


@rule("take{a}(dequantize(x), i) | gather{a}(dequantize(x), i) -> dequantize(take{a}(x, i))", example=_take_example)
def dequantize_after_take(m: Match) -> Value | Mismatch:
    """A quarter of the bytes is read from the table."""
    if not _per_tensor(m["x"].tensor.qparams):
        return m.fail(f"{m['x'].type} is not quantized per tensor", m["x"])
    return m.make("dequantize", m.make(m.root.op, m["x"], m["i"], attrs=m.root.attrs))


def _concat_example(rng: random.Random) -> Value:
    x = _quantized(rng, 2, rng.randint(1, 3))
    return b.concat([b.dequantize(x)] * rng.randint(2, 3), rng.randint(0, 1))


@rule("concat{a}(dequantize(x), rest...) -> dequantize(concat{a}(x, rest...))", example=_concat_example)
def dequantize_after_concat(m: Match) -> Value | Mismatch:
    """Every part must be quantized in the same way."""
    wanted = m["x"].tensor
    if not _per_tensor(wanted.qparams):
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
    return b.pad(b.dequantize(_quantized(rng, 2, 3)), ((rng.randint(0, 2), 0), (1, 2)))


@rule("pad{a}(dequantize(x)) -> dequantize(pad{c}(x))", example=_pad_example)
def dequantize_after_pad(m: Match) -> Value | Mismatch:
    """Zero is the integer z, which quantization represents exactly; other numbers it need not."""
    q, attrs = m["x"].tensor.qparams, m.attrs("a", A.PadAttrs)
    if q is None or not _per_tensor(q):
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
    if not _per_tensor(m.attrs("q", A.QuantizeAttrs).qparams):
        return m.fail("quantized per channel: the axis would have to move too")
    if m.root.inputs[0].op == "slice":
        return m.fail("the slice drops elements; quantizing before it would be more work", m.root.inputs[0])
    return m.right()


RULES: RuleSet = (
    round_trip, quantized_linear, dequantize_after_view, dequantize_after_take, dequantize_after_concat,
    dequantize_after_pad, quantize_before_view,
)
