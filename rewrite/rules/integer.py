"""Products of dequantized operands become products of integers. With dq(x) = s (x - z):

    linear(dq x, dq w, b) = qlinear(x, w, b)             x per tensor; w symmetric s8, per tensor or per output channel
    linear(x * s, dq w, b) = linear(x, dq w) * s + b     s one number for each row, computed in each call
    linear(dq x - z, dq w, b) = s_x s_w (x @ w - (z_x + z / s_x) sum(w)) + b      z likewise
    linear(cast(dq x), cast(dq w), b) = linear(dq x, dq w, b)     what was rounded to bf16 or f16 in between; (dq x - z) * s likewise
    permute((dq x - z) * s) = (dq permute(x) - permute(z)) * permute(s)           on its way to such a product
    dq x @ dq y = s_x s_y (x @ y - z_x sum(y) - z_y sum(x) + K z_x z_y)      both per tensor, y signed or made so

None is applied where sums over K may leave 32 bits: a K that changes from call to call needs a bound. The second applies to dequantized
integers only, and leaves a product that the first or the third one takes. All round differently in f32; the integer sums are exact and so
are nearer to the truth. The bounds are wide where a result may be much smaller than what is summed: products of a few elements, and the
shares of zero points; and where a rounding to a narrow type is left out.
"""

from __future__ import annotations

import random
from dataclasses import replace

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import Dim, less
from ...graph.ir import Value
from ...graph.types import QParams, bf16, f16, f32, i8, i32, u8
from ..match import Mismatch
from ..pattern import GROUPS
from ..query import last_axes_swapped
from ..rule import Match, RuleSet, rule
from .contraction import random_weight
from .quantize import per_tensor, random_integers
from .unsigned import MOST

UNIT = QParams((1.0,), 0, None, -128, 127)


def _weight(rng: random.Random, n: int, k: int) -> Value:
    """A dequantized constant of n output channels, for examples."""
    scales = tuple(rng.uniform(0.01, 0.05) for _ in range(n))
    return b.dequantize(b.quantize(random_weight(rng, n, k), i8, QParams(scales, axis=0) if rng.random() < 0.5 else QParams((0.05,))))


def refused(m: Match, x: Value, w: Value) -> Mismatch | None:
    """Why no integer kernel multiplies the quantized `x` by the transposed quantized `w`."""
    if not per_tensor(x.tensor.qparams) or x.dtype not in (i8, u8):
        return m.fail(f"x is {x.tensor}, not 8-bit integers quantized per tensor", x)
    q = w.tensor.qparams
    if w.dtype != i8 or q is None or q.zero_point != 0:
        return m.fail(f"w is {w.tensor}, not symmetric s8", w)
    if q.axis not in (None, 0):
        return m.fail(f"w has one scale for each index of axis {q.axis}, which is summed over", w)
    return _too_long(m, w)


def _too_long(m: Match, rows: Value, most: int = MOST) -> Mismatch | None:
    k = rows.shape[-1]
    return None if less(k, most + 1) else m.fail(f"a sum of {k} products of integers may not fit 32 bits, as one of {most} does", rows)


def _reach(v: Value, zero: int) -> int:
    """The greatest distance of an 8-bit integer from the zero point."""
    low, high = (0, 255) if v.dtype == u8 else (-128, 127)
    return max(high - zero, zero - low)


def _linear_example(rng: random.Random) -> Value:
    n, k = rng.randint(1, 5), rng.randint(1, 9)
    bias = (random_weight(rng, n),) if rng.random() < 0.5 else ()
    return b.linear(b.dequantize(random_integers(rng, 2, 3, k)), _weight(rng, n, k), *bias)


@rule("linear(dequantize(x), dequantize(w), b?) -> qlinear(x, w, b?)", ulp=32, example=_linear_example)
def quantized_linear(m: Match) -> Value | Mismatch:
    """sum s_x (x - z) s_w w = s_x s_w (sum x w - z sum w): integers inside, one scale for each output channel outside."""
    return refused(m, m["x"], m["w"]) or m.right()


def by_row(x: Value, number: Value) -> bool:
    """Whether `number` is the same for all elements of a row of `x`, along its last axis."""
    return x.tensor.rank > 0 and (number.tensor.rank == 0 or number.shape[-1] == 1)


def _rounded_example(rng: random.Random) -> Value:
    n, k, dtype = rng.randint(1, 5), rng.randint(1, 9), rng.choice((bf16, f16))
    real = b.dequantize(b.quantize(b.input_(0, f32, (2, 3, k)), i8, UNIT))
    if rng.random() < 0.7:
        real = b.sub(real, b.input_(2, f32, (2, 3, 1))) if rng.random() < 0.5 else real
        real = b.mul(real, b.input_(1, f32, rng.choice(((2, 3, 1), ()))))
    bias = (b.cast(random_weight(rng, n), dtype),) if rng.random() < 0.5 else ()
    return b.linear(b.cast(real, dtype), b.cast(_weight(rng, n, k), dtype), *bias)


@rule("linear(cast(y@(dequantize(x) | mul((dequantize(x) | sub(dequantize(x), z)), s))), cast(v@dequantize(w)), b?) -> linear(y, v, b)",
      ulp=2**20, example=_rounded_example)
def unrounded_factors(m: Match) -> Value | Mismatch:
    """The numbers of a narrow model are what the integers stand for, rounded. Without that rounding, rules below take the product."""
    x, scale, zero = m["x"], m.get("s"), m.get("z")
    if m.root.inputs[0].dtype not in (bf16, f16):
        return m.fail(f"a product in {m.root.inputs[0].dtype}", x)
    if not all(number is None or by_row(x, number) for number in (scale, zero)):
        return m.fail("the scale or zero point changes within a row", x)
    why = refused(m, x, m["w"])
    if why is not None:
        return why
    bias = m.get("b")
    return m.make("linear", m["y"], m["v"], *(() if bias is None else (m.make("cast", bias, attrs=A.CastAttrs(f32)),)))


def _permuted_example(rng: random.Random) -> Value:
    real = b.dequantize(b.quantize(b.input_(0, f32, (2, 3, 4)), i8, UNIT))
    zero, scale = (b.input_(n, f32, rng.choice(((2, 3, 1), (1, 3, 1), (2, 1, 4)))) for n in (1, 2))
    real = b.sub(real, zero) if rng.random() < 0.7 else real
    scaled = b.mul(real, scale) if real.op == "dequantize" or rng.random() < 0.7 else real
    return b.permute(scaled, rng.choice(((0, 2, 1), (1, 0, 2), (2, 0, 1))))


@rule("permute{a}(mul((y@dequantize(x) | y@sub(dequantize(x), z)), s)) -> mul(permute{a}(y), permute{a}(s))", example=_permuted_example)
def permute_before_scale(m: Match) -> Value | Mismatch:
    """Integers are put in another order, so that a product behind it finds its rows and their scales."""
    return m.right() if m["s"].tensor.rank == m["x"].tensor.rank else m.fail(f"the scale {m['s'].type} has other axes", m["s"])


@rule("permute{a}(sub(y@dequantize(x), z)) -> sub(permute{a}(y), permute{a}(z))", example=_permuted_example)
def permute_before_zero(m: Match) -> Value | Mismatch:
    """Likewise for the zero points of rows."""
    return m.right() if m["z"].tensor.rank == m["x"].tensor.rank else m.fail(f"the zero point {m['z'].type} has other axes", m["z"])


def _row_scale_example(rng: random.Random) -> Value:
    n, k = rng.randint(1, 5), rng.randint(1, 9)
    x, scale = b.input_(0, f32, (2, 3, k)), b.input_(1, f32, rng.choice(((2, 3, 1), (3, 1), (1,), ())))
    real = b.dequantize(b.quantize(x, i8, UNIT))
    if rng.random() < 0.5:
        real = b.sub(real, b.input_(2, f32, (2, 3, 1)))
    bias = (random_weight(rng, n),) if rng.random() < 0.5 else ()
    return b.linear(b.mul(real, scale), _weight(rng, n, k), *bias)


@rule("linear(mul((y@dequantize(x) | y@sub(dequantize(x), z)), s), v@dequantize(w), b?) -> mul(linear(y, v), s)", ulp=64,
      example=_row_scale_example)
def row_scale_after_linear(m: Match) -> Value | Mismatch:
    """The scale of a row is a factor of every sum over it; the bias is added behind it."""
    if not by_row(m["y"], m["s"]):
        return m.fail(f"the scale {m['s'].type} changes within a row", m["s"])
    why = refused(m, m["x"], m["w"])
    if why is not None:
        return why
    product = m.make("mul", m.make("linear", m["y"], m["v"]), m["s"])
    bias = m.get("b")
    return m.fitted(product if bias is None else m.make("add", product, bias))


def _row_zero_example(rng: random.Random) -> Value:
    n, k = rng.randint(1, 5), rng.randint(1, 9)
    x, zero = b.input_(0, f32, (2, 3, k)), b.round_(b.input_(1, f32, rng.choice(((2, 3, 1), (3, 1), (1,), ()))))
    bias = (random_weight(rng, n),) if rng.random() < 0.5 else ()
    return b.linear(b.sub(b.dequantize(b.quantize(x, i8, UNIT)), zero), _weight(rng, n, k), *bias)


@rule("linear(sub(y@dequantize(x), z), dequantize(w), b?) -> dequantize(sub(int_linear(x, w), mul(z, reduce{r}(w))))", ulp=256,
      example=_row_zero_example)
def row_zero_after_linear(m: Match) -> Value | Mismatch:
    """What the zero point of a row adds to each sum over it is known from the weight: the sums of its rows are constants.

    It is taken off before the scales, by one fused multiply-subtract of whole numbers: exact below 2^24 where the scale of `x` is one, as
    it is where a row has its own.
    """
    if not by_row(m["y"], m["z"]):
        return m.fail(f"the zero point {m['z'].type} changes within a row", m["z"])
    x, w = m["x"], m["w"]
    why = refused(m, x, w)
    if why is not None:
        return why
    p, q = x.tensor.qparams, w.tensor.qparams
    assert p is not None and q is not None
    with b.at(m.root.origin):
        zero = b.add(b.mul(m["z"], 1.0 / p.scale[0]), float(p.zero_point))
        share = b.mul(zero, b.cast(b.reduce(b.cast(w, i32), "sum", 1), f32))
        real = b.mul(b.sub(b.cast(b.int_linear(x, w), f32), share), b.channel_scales(p, q))
        bias = m.get("b")
        return m.fitted(real if bias is None else b.add(real, b.cast(bias, f32)))


def _matmul_example(rng: random.Random) -> Value:
    batch, k = rng.choice(((2, 3), (3,), ())), rng.randint(1, 9)
    dtype, q = rng.choice(((i8, QParams((0.04,))), (i8, QParams((0.04,), 3, None, -128, 127)), (u8, QParams((0.03,), 99, None, 0, 255))))
    y = b.quantize(b.input_(1, f32, (*batch, rng.randint(1, 5), k)), dtype, q)
    return b.matmul(b.dequantize(random_integers(rng, *batch, 2, k)), b.dequantize(b.permute(y, last_axes_swapped(y.tensor.rank))))


@rule("matmul(dequantize(x), dequantize(y)) -> dequantize(int_matmul(x, y))", ulp=256, example=_matmul_example)
def quantized_matmul(m: Match) -> Value | Mismatch:
    """sum s_x (x - z_x) s_y (y - z_y), the zero points' shares taken off the exact sum of x y."""
    x, y = m["x"], m["y"]
    p, q = x.tensor.qparams, y.tensor.qparams
    if p is None or q is None or not per_tensor(p) or not per_tensor(q):
        return m.fail(f"{x.type} and {y.type} are not quantized per tensor", x)
    signed = _signed(m, y)
    if x.dtype not in (i8, u8) or signed is None:
        return m.fail(f"integer products are of s8 or u8 with s8, not of {x.dtype} with {y.dtype}", y)
    zero = q.zero_point if signed is y else q.zero_point - 128
    why = _too_long(m, x, min(MOST, (2**31 - 1) // (_reach(x, p.zero_point) * _reach(signed, zero))))
    if why is not None:
        return why
    with b.at(m.root.origin):
        return b.mul(b.cast(_centred(x, signed, p.zero_point, zero), f32), p.scale[0] * q.scale[0])


def _signed(m: Match, y: Value) -> Value | None:
    """`y` in signed integers, less by 128 where it was quantized to unsigned ones; None when it came from elsewhere."""
    if y.dtype == i8:
        return y
    attrs = y.attrs
    if isinstance(attrs, A.QuantizeAttrs) and y.dtype == u8:
        q = attrs.qparams
        lower = replace(q, zero_point=q.zero_point - 128, qmin=q.qmin - 128, qmax=q.qmax - 128)
        return m.make("quantize", y.inputs[0], attrs=A.QuantizeAttrs(i8, lower))
    inner = _signed(m, y.inputs[0]) if y.op in GROUPS["view"] else None
    return None if inner is None else m.make(y.op, inner, attrs=attrs)


def _centred(x: Value, y: Value, x_zero: int, y_zero: int) -> Value:
    """(x - x_zero) @ (y - y_zero) in i32."""
    depth: Dim = x.shape[-1]
    total = b.int_matmul(x, y)
    if x_zero:
        total = b.sub(total, b.mul(b.reduce(b.cast(y, i32), "sum", -2, keepdim=True), x_zero))
    if y_zero:
        total = b.sub(total, b.mul(b.reduce(b.cast(x, i32), "sum", -1, keepdim=True), y_zero))
    return b.add(total, b.scalar(depth * (x_zero * y_zero), i32)) if x_zero and y_zero else total


RULES: RuleSet = (
    unrounded_factors, quantized_linear, permute_before_scale, permute_before_zero, row_scale_after_linear, row_zero_after_linear,
    quantized_matmul,
)
