"""Products of rows that choose a matrix each (`graph.build.routed_linear`), of quantized operands. With dq(x) = s (x - z), and e the matrix
of a row:

    routed_linear(x * s, dq w, e) = routed_linear(x, dq w, e) * s                          s one number for each row, computed in each call
    routed_linear(dq x - z, dq w, e) = s_x s_w[e] (x @ w[e] - (z_x + z / s_x) sum(w[e]))   z likewise; w symmetric s8
    routed_linear(x, dq w, e) = s_w[e] routed_linear(x, w, e)                              the integers are multiplied as they are
    routed_linear(x, dq_groups w s, e) = routed_linear(x, w, e, s)                         4-bit integers with scales along k
    routed_linear(x, cast dq w, e)     = the same as without the cast to bf16              which is not rounded then

The first two apply to dequantized integers only, as the rules of `integer.py` do; the others to what they leave. What a batch is multiplied
with matrix by matrix are such products, too, whose groups are all of one length:

    matmul(x[E, M, K], (dq w)^T)       = reshape routed_linear(reshape x, dq w, M 2M ...)  w[E N, K] as [E, N, K]
    routed_linear(reshape (x * s), dq w, e) = routed_linear(reshape x * reshape s, dq w, e)     so that the first two find their operands
"""

from __future__ import annotations

import random

import torch

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import product
from ...graph.ir import Value
from ...graph.types import QParams, bf16, f32, i8, i32, i64
from ..match import Mismatch
from ..query import is_weight
from ..rule import Match, RuleSet, rule
from .contraction import random_weight
from .integer import UNIT, by_row, refused
from .weight_only import groups_refused, random_groups


def _weight(rng: random.Random, count: int, n: int, k: int) -> Value:
    scales = tuple(rng.uniform(0.01, 0.05) for _ in range(count * n))
    q = QParams(scales, axis=0) if rng.random() < 0.7 else QParams((0.05,))
    return b.dequantize(b.quantize(random_weight(rng, count * n, k), i8, q))


def _ends(rng: random.Random, count: int, rows: int) -> Value:
    return b.constant(torch.tensor(sorted(rng.randint(0, rows) for _ in range(count)), dtype=i64.torch))


def _example(rng: random.Random, form: str) -> Value:
    count, rows, n, k = rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 9)
    x, (scale, zero) = b.input_(0, f32, (rows, k)), (b.input_(i, f32, rng.choice(((rows, 1), (1,), ()))) for i in (1, 2))
    if form != "float":
        x = b.dequantize(b.quantize(x, i8, rng.choice((UNIT, QParams((0.04,), 3, None, -128, 127)))))
        x = b.sub(x, b.round_(zero)) if rng.random() < 0.7 else x
    x = b.mul(x, scale) if form == "scaled" else x
    return b.routed_linear(x, _weight(rng, count, n, k), _ends(rng, count, rows))


def _each(m: Match, numbers: Value) -> Value:
    """[S, N]: of one number for each row of the weight those of the matrix that a row of the product takes."""
    ends, (rows, n) = m["e"], m.root.shape
    return b.take(b.reshape(numbers, (ends.shape[0], n)), b.route(ends, rows), 0)


def _scales(m: Match, factor: float) -> Value:
    """The scales of the weight times `factor`, as they multiply the product."""
    q = m["w"].tensor.qparams
    assert q is not None
    numbers = torch.tensor(q.scale, dtype=torch.float32) * factor
    return b.full(float(numbers[0]), f32) if q.axis is None else _each(m, b.constant(numbers, "scales"))


@rule("routed_linear(mul((y@dequantize(x) | y@sub(dequantize(x), z)), s), v@dequantize(w), e) -> mul(routed_linear(y, v, e), s)", ulp=64,
      example=lambda rng: _example(rng, "scaled"))
def row_scale_after_routed(m: Match) -> Value | Mismatch:
    """The scale of a row is a factor of every sum over it."""
    if not by_row(m["y"], m["s"]):
        return m.fail(f"the scale {m['s'].type} changes within a row", m["s"])
    return refused(m, m["x"], m["w"]) or m.right()


@rule("routed_linear((dequantize(x) | sub(y@dequantize(x), z)), dequantize(w), e) -> dequantize(routed_linear(x, w, e))", ulp=256,
      example=lambda rng: _example(rng, "integers"))
def routed_integers(m: Match) -> Value | Mismatch:
    """Exact sums of integers; what the zero point of a row adds is known from the weight: the sums of its rows are constants."""
    x, w, z = m["x"], m["w"], m.get("z")
    if z is not None and not by_row(m["y"], z):
        return m.fail(f"the zero point {z.type} changes within a row", z)
    why = refused(m, x, w)
    if why is not None:
        return why
    p = x.tensor.qparams
    assert p is not None
    with b.at(m.root.origin):
        real = b.cast(b.routed_linear(x, w, m["e"]), f32)
        if z is not None or p.zero_point:
            zero = b.full(float(p.zero_point), f32) if z is None else b.add(b.mul(z, 1.0 / p.scale[0]), float(p.zero_point))
            real = b.sub(real, b.mul(zero, _each(m, b.cast(b.reduce(b.cast(w, i32), "sum", 1), f32))))
        return m.fitted(b.mul(real, _scales(m, p.scale[0])))


@rule("routed_linear(x, dequantize(w), e) -> dequantize(routed_linear(x, w, e))", ulp=64, example=lambda rng: _example(rng, "float"))
def routed_integer_weight(m: Match) -> Value | Mismatch:
    """One scale for each output channel of each matrix is a factor of its sums."""
    return _routed_integers(m)


@rule("routed_linear(x, cast(dequantize(w)), e) -> dequantize(routed_linear(x, w, e))", ulp=2**20,
      example=lambda rng: _narrow(_example(rng, "float")))
def routed_narrow_weight(m: Match) -> Value | Mismatch:
    """The weight of a bf16 model, without its rounding."""
    return _routed_integers(m)


def _narrow(product: Value) -> Value:
    x, w, ends = product.inputs
    return b.routed_linear(b.cast(x, bf16), b.cast(w, bf16), ends)


def _routed_integers(m: Match) -> Value | Mismatch:
    w, q = m["w"], m["w"].tensor.qparams
    if m["x"].dtype not in (f32, bf16):
        return m.fail(f"x is {m['x'].dtype}; products with integer weights are of f32 or bf16", m["x"])
    if w.dtype != i8 or q is None or q.zero_point != 0 or q.axis not in (None, 0) or not is_weight(w):
        return m.fail(f"w is {w.tensor}, not a constant of symmetric s8 by output channel", w)
    with b.at(m.root.origin):
        return m.fitted(b.mul(b.routed_linear(m["x"], w, m["e"]), _scales(m, 1.0)))


def _group_example(rng: random.Random) -> Value:
    count, rows, n, groups = rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 3)
    return b.routed_linear(b.input_(0, f32, (rows, 8 * groups)), random_groups(rng, count * n, groups), _ends(rng, count, rows))


@rule("routed_linear(x, dequantize_groups(w, s), e) -> routed_linear(x, w, e, s)", ulp=64, example=_group_example)
def routed_groups(m: Match) -> Value | Mismatch:
    """The kernel multiplies the scales in."""
    return _routed_groups(m)


@rule("routed_linear(x, cast(dequantize_groups(w, s)), e) -> routed_linear(x, w, e, s)", ulp=2**20,
      example=lambda rng: _narrow(_group_example(rng)))
def routed_narrow_groups(m: Match) -> Value | Mismatch:
    """As of `routed_narrow_weight`."""
    return _routed_groups(m)


def _routed_groups(m: Match) -> Value | Mismatch:
    why = groups_refused(m)
    if why is not None:
        return why
    with b.at(m.root.origin):
        return m.fitted(b.routed_linear(m["x"], m["w"], m["e"], m["s"]))


def _batch_example(rng: random.Random) -> Value:
    count, n, groups = rng.randint(1, 3), rng.randint(2, 5), rng.randint(1, 3)
    w = random_groups(rng, count * n, groups) if rng.random() < 0.5 else _weight(rng, count, n, 8 * groups)
    matrices = b.permute(b.reshape(w, (count, n, 8 * groups)), (0, 2, 1))
    return b.matmul(b.input_(0, f32, (count, rng.randint(1, 5), 8 * groups)), matrices)


@rule("matmul(x, permute{p}(reshape{t}(v@(dequantize(w) | dequantize_groups(w, s))))) -> "
      "reshape{r}(routed_linear(reshape{q}(x), v, iota{e}()))", ulp=64, example=_batch_example)
def batch_of_weights(m: Match) -> Value | Mismatch:
    """The matrices take turns along the rows of all parts of the batch, each for as many as one part has."""
    x, v, shape = m["x"], m["v"], m.attrs("t", A.ShapeAttrs).shape
    count, n, k = shape if len(shape) == 3 else (0, 0, 0)
    if m.attrs("p", A.PermuteAttrs).order != (0, 2, 1) or v.shape != (product((count, n)), k) or not is_weight(m["w"]):
        return m.fail(f"{v.type} is no constant whose rows are those of matrices", v)
    if x.tensor.rank != 3 or x.shape[0] != count:
        return m.fail(f"{x.type} is no batch of {count}", x)
    rows = x.shape[1]
    with b.at(m.root.origin):
        out = b.routed_linear(b.reshape(x, (product((count, rows)), k)), v, b.iota(count, i64, rows, rows))
        return m.fitted(b.reshape(out, m.root.shape))


def _reshaped_example(rng: random.Random) -> Value:
    count, rows, n, k = rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 5), rng.randint(2, 9)
    x, (scale, zero) = b.input_(0, f32, (2, rows, k)), (b.input_(i, f32, (2, rows, 1)) for i in (1, 2))
    real = b.dequantize(b.quantize(x, i8, UNIT))
    scaled = rng.random() < 0.7
    real = b.sub(real, zero) if rng.random() < 0.7 or not scaled else real
    real = b.mul(real, scale) if scaled else real
    return b.routed_linear(b.reshape(real, (2 * rows, k)), _weight(rng, count, n, k), _ends(rng, count, 2 * rows))


@rule("routed_linear(reshape{t}((mul((y@dequantize(x) | sub(y@dequantize(x), z)), s) | sub(y@dequantize(x), z))), w, e) -> "
      "routed_linear(mul(reshape{t}(y), s), w, e)", ulp=64, example=_reshaped_example)
def reshape_before_routed(m: Match) -> Value | Mismatch:
    """Integers are numbered in another way, and so are the scales and zero points of their rows."""
    x, shape = m["x"], m.attrs("t", A.ShapeAttrs).shape
    numbers = {op: number for op, name in (("sub", "z"), ("mul", "s")) if (number := m.get(name)) is not None}
    if x.shape[-1] != shape[-1] or any(number.shape != (*x.shape[:-1], 1) for number in numbers.values()):
        return m.fail(f"the rows of {x.type} do not stay whole, or have no number each", x)
    with b.at(m.root.origin):
        real = b.reshape(m["y"], shape)
        for op, number in numbers.items():
            real = b.elementwise(op, real, b.reshape(number, (*shape[:-1], 1)))
        return m.make("routed_linear", real, m["w"], m["e"])


SPELLING: RuleSet = (batch_of_weights,)
RULES: RuleSet = (reshape_before_routed, row_scale_after_routed, routed_integers)
WEIGHT_RULES: RuleSet = (routed_integer_weight, routed_narrow_weight, routed_groups, routed_narrow_groups)
