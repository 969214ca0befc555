"""Contractions in one spelling, so that few kernels serve them: `linear` for a weight on the right, `matmul` for two activations.

    x @ w^T with a weight w[N, K]      = linear(x, w)
    x @ w   with a weight w[K, N]      = linear(x, w^T)            the permute is a view of the constant; packing reads through it
    w @ x^T with a weight w[N, K]      = (linear(x, w))^T          a weight may be a batch of one matrix here, and above
    linear(x, w) + b with a row b[N]   = linear(x, w, b)           also with a reshape in between that keeps the last axis
    linear(reshape x, w, b)            = reshape (linear(x, w, b)) when the reshape keeps the last axis
    linear(reshape (permute x), w, b)  = linear(reshape x, w', b)  where features change places: w' does once, x would in each call
    reshape a @ reshape b              = reshape (a @ b)           when both only merge or split the same batch axes
    expand a @ b                       = a @ b                     when b brings the batch axes that a was stretched to

What is said of `linear` holds for `qlinear` too, once there is one, and of products for those of integers.
The number of multiplications stays the same. Adding the bias inside may round once less (`ulp=8` of the largest result: a sum may
start from the bias instead of ending with it); the rest may change only the order in which a library sums, hence the same bound.
"""

from __future__ import annotations

import math
import random

import torch

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import product
from ...graph.ir import Value
from ...graph.products import transposed
from ...graph.types import f32, i8
from ..match import Mismatch
from ..query import is_weight, last_axes_swapped
from ..rule import Match, RuleSet, rule


def random_weight(rng: random.Random, *shape: int) -> Value:
    """A constant of normally distributed f32, for examples."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    return b.constant(torch.randn(shape, generator=generator))


def _integers(x: Value) -> Value:
    """Those nearest to `x`, for examples."""
    return b.cast(b.minimum(b.maximum(b.mul(x, 40.0), -128.0), 127.0), i8)


def _times_transposed(rng: random.Random) -> Value:
    x, w = b.input_(0, f32, (2, rng.randint(1, 3), 5)), random_weight(rng, 4, 5)
    if rng.random() < 0.5:
        return b.int_matmul(_integers(x), b.permute(_integers(w), (1, 0)))
    return b.matmul(x, b.permute(w, (1, 0)))


@rule("matmul(x, permute{p}(w)) | int_matmul(x, permute{p}(w)) -> linear(x, w)", ulp=8, example=_times_transposed)
def matmul_transposed_weight(m: Match) -> Value | Mismatch:
    """The weight must be a matrix known now."""
    if m["w"].tensor.rank != 2 or m.attrs("p", A.PermuteAttrs).order != (1, 0):
        return m.fail(f"{m['w'].type} is not a transposed matrix", m["w"])
    return _linear(m, m["w"])


def _times_weight(rng: random.Random) -> Value:
    x, w = b.input_(0, f32, (2, rng.randint(1, 3), 5)), random_weight(rng, 5, 4)
    return b.int_matmul(_integers(x), _integers(w)) if rng.random() < 0.5 else b.matmul(x, w)


@rule("matmul(x, w) | int_matmul(x, w) -> linear(x, permute{order=[1, 0]}(w))", ulp=8, example=_times_weight)
def matmul_weight(m: Match) -> Value | Mismatch:
    """The weight must be a matrix known now, or a batch of one."""
    w = _matrix(m["w"])
    if w is None:
        return m.fail(f"{m['w'].type} is no matrix", m["w"])
    made = _linear(m, b.permute(w, (1, 0)))
    return b.reshape(made, m.root.shape) if isinstance(made, Value) else made


def _weight_times(rng: random.Random) -> Value:
    w = random_weight(rng, *rng.choice(((), (1,))), 4, 5)
    return b.matmul(w, _swapped(b.input_(0, f32, (*rng.choice(((), (2,))), rng.randint(1, 3), 5))))


@rule("matmul(w, x) -> permute{order=[1, 0]}(linear(permute{order=[1, 0]}(x), w))", ulp=8, example=_weight_times)
def weight_matmul(m: Match) -> Value | Mismatch:
    """Kernels pack weights that are on the right. Columns must lie as rows do: else they, or their results, would have to be moved."""
    w, x = _matrix(m["w"]), m["x"]
    if w is None or not is_weight(w):
        return m.fail("the left operand is no matrix that is constant", m["w"])
    if transposed(x) is None and x.shape[-1] != 1:
        return m.fail("the columns are no rows of another value", x)
    made = m.make("linear", _swapped(x), w)
    return b.reshape(_swapped(made), m.root.shape)


def _swapped(x: Value) -> Value:
    return b.permute(x, last_axes_swapped(x.tensor.rank))


def _matrix(w: Value) -> Value | None:
    """A matrix, also one that is a batch of itself."""
    return b.reshape(w, w.shape[-2:]) if all(d == 1 for d in w.shape[:-2]) else None


def _linear(m: Match, w: Value) -> Value | Mismatch:
    """The product with a weight, of integers where it was one of integers."""
    if not is_weight(w):
        return m.fail("the right operand is no constant", w)
    return m.make("int_linear" if m.root.op == "int_matmul" else "linear", m["x"], w)


def _linear_plus(rng: random.Random) -> Value:
    n = rng.randint(1, 5)
    bias = random_weight(rng, *rng.choice(((n,), (1, n), (1,), ())))
    return b.add(b.linear(b.input_(0, f32, (2, 3, 6)), random_weight(rng, n, 6)), bias)


@rule("add(l@(linear!(x, w) | qlinear!(x, w)), b) -> linear(x, w, b)", ulp=8, example=_linear_plus)
def add_bias(m: Match) -> Value | Mismatch:
    """The addend must be the same for every row."""
    bias = as_row(m["b"], m["w"])
    if bias is None:
        return m.fail(f"the addend {m['b'].type} is not one row of {m['w'].shape[0]}", m["b"])
    return m.fitted(m.make(m["l"].op, m["x"], m["w"], bias))


def _reshaped_plus(rng: random.Random) -> Value:
    n = rng.randint(1, 5)
    return b.add(b.reshape(b.linear(b.input_(0, f32, (6, 4)), random_weight(rng, n, 4)), (2, 3, n)), random_weight(rng, n))


@rule("add(reshape{s}(l@(linear!(x, w) | qlinear!(x, w))), b) -> reshape{s}(linear(x, w, b))", ulp=8, example=_reshaped_plus)
def add_bias_after_reshape(m: Match) -> Value | Mismatch:
    """As above, when the reshape keeps the axis that the addend runs along."""
    bias = as_row(m["b"], m["w"])
    shape = m.attrs("s", A.ShapeAttrs)
    if bias is None or not shape.shape or shape.shape[-1] != m["w"].shape[0]:
        return m.fail(f"the addend {m['b'].type} is not one row of {m['w'].shape[0]}", m["b"])
    return m.fitted(m.make("reshape", m.make(m["l"].op, m["x"], m["w"], bias), attrs=shape))


def as_row(bias: Value, weight: Value) -> Value | None:
    """`bias` as a value of shape [N], when it adds the same number to a whole column."""
    n = weight.shape[0]
    if any(d != 1 for d in bias.shape[:-1]) or (bias.tensor.rank > 0 and bias.shape[-1] not in (1, n)):
        return None
    last = bias.shape[-1:]
    return b.expand(b.reshape(bias, last), (n,))


def _linear_of_reshape(rng: random.Random) -> Value:
    x = b.input_(0, f32, (2, rng.randint(1, 4), 5))
    rows = product(x.shape[:-1])
    if rng.random() < 0.3:
        return b.int_linear(b.reshape(_integers(x), (rows, 5)), _integers(random_weight(rng, 3, 5)))
    bias = (random_weight(rng, 3),) if rng.random() < 0.5 else ()
    return b.linear(b.reshape(x, (rows, 5)), random_weight(rng, 3, 5), *bias)


@rule("linear(reshape{t}(x), w, b?) | qlinear(reshape{t}(x), w, b?) | int_linear(reshape{t}(x), w) -> reshape{s}(linear(x, w, b?))", ulp=8,
      example=_linear_of_reshape)
def linear_of_reshape(m: Match) -> Value | Mismatch:
    """Rows are independent of one another; where they stand does not matter."""
    x, flat = m["x"], m.attrs("t", A.ShapeAttrs).shape
    if x.tensor.rank < 2 or x.shape[-1] != flat[-1] or product(x.shape[:-1]) != product(flat[:-1]):
        return m.fail(f"the reshape of {x.type} changes the rows", x)
    inner = m.make(m.root.op, x, *m.root.inputs[1:])
    return m.make("reshape", inner, attrs=A.ShapeAttrs(m.root.shape))


def _linear_of_moved_features(rng: random.Random) -> Value:
    x = b.permute(b.input_(0, f32, (2, rng.randint(2, 3), 3, 4)), rng.choice(((0, 1, 3, 2), (1, 0, 3, 2), (2, 0, 3, 1), (3, 2, 1, 0))))
    sizes = [d for d in x.shape if isinstance(d, int)]
    k = math.prod(sizes[2:])
    return b.linear(b.reshape(x, (math.prod(sizes[:2]), k)), random_weight(rng, 3, k))


@rule("linear(r@reshape{s}(permute{p}(x)), w, b?) -> linear(reshape{s}(permute(x)), w, b?)", ulp=8, example=_linear_of_moved_features)
def linear_of_moved_features(m: Match) -> Value | Mismatch:
    """In which order a sum is taken is free, and the weight is moved before all calls."""
    order, w = m.attrs("p", A.PermuteAttrs).order, m["w"]
    shape = tuple(m["x"].shape[axis] for axis in order)
    first = next((n for n in reversed(range(len(shape))) if product(shape[n:]) == m["r"].shape[-1]), None)
    if first is None or product(shape[first:]) != w.shape[1]:
        return m.fail("the features are no axes of what is permuted", m["r"])
    if not is_weight(w) or w.op == "dequantize":
        return m.fail("the weight is no constant of floats", w)
    places = sorted(range(first, len(order)), key=order.__getitem__)
    if [n for n in places if shape[n] != 1] == [n for n in range(first, len(order)) if shape[n] != 1]:
        return m.fail("the features are in order", m["r"])
    if max(n for n, size in enumerate(m["x"].shape) if size != 1) != order[places[-1]]:
        return m.fail("rows would not lie one after another", m["r"])
    x = b.reshape(b.permute(m["x"], (*order[:first], *(order[n] for n in places))), m["r"].shape)
    parts = b.reshape(w, (w.shape[0], *shape[first:]))
    return m.make("linear", x, b.reshape(b.permute(parts, (0, *(1 + n - first for n in places))), w.shape), *m.root.inputs[2:])


def _matmul_of_reshapes(rng: random.Random) -> Value:
    x, y = b.input_(0, f32, (2, 3, rng.randint(1, 4), 5)), b.input_(1, f32, (2, 3, 5, rng.randint(1, 4)))
    return b.matmul(b.reshape(x, (6, *x.shape[2:])), b.reshape(y, (6, *y.shape[2:])))


@rule("matmul(reshape{s}(x), reshape{t}(y)) -> reshape{r}(matmul(x, y))", ulp=8, example=_matmul_of_reshapes)
def matmul_of_reshapes(m: Match) -> Value | Mismatch:
    """Matrices of a batch are independent of one another; how they are numbered does not matter."""
    x, y = m["x"], m["y"]
    left, right = m.attrs("s", A.ShapeAttrs).shape, m.attrs("t", A.ShapeAttrs).shape
    if x.tensor.rank < 3 or y.tensor.rank < 3 or x.shape[:-2] != y.shape[:-2] or left[:-2] != right[:-2]:
        return m.fail(f"{x.type} and {y.type} are not batches of one shape", x)
    if x.shape[-2:] != left[-2:] or y.shape[-2:] != right[-2:] or product(x.shape[:-2]) != product(left[:-2]):
        return m.fail("a reshape changes the matrices", x)
    return m.make("reshape", m.make("matmul", x, y), attrs=A.ShapeAttrs(m.root.shape))


def _matmul_of_expand(rng: random.Random) -> Value:
    x, y = b.input_(0, f32, (1, rng.randint(1, 4), 5)), b.input_(1, f32, (3, 5, 2))
    return b.matmul(b.expand(x, (3, *x.shape[1:])), y)


@rule("matmul(expand(x), y) | matmul(x, expand(y)) -> matmul(x, y)", ulp=8, example=_matmul_of_expand)
def matmul_of_expand(m: Match) -> Value | Mismatch:
    """matmul broadcasts batch axes by itself. A stretched matrix axis, or one that nothing else brings, must stay."""
    if m["x"].tensor.rank < 2 or m["y"].tensor.rank < 2 or m["x"].shape[-1] != m["y"].shape[-2]:
        return m.fail("the matrices themselves are stretched")
    result = m.make("matmul", m["x"], m["y"])
    return result if result.type == m.root.type else m.fail(f"the result would be {result.type}")


RULES: RuleSet = (
    matmul_of_expand, matmul_transposed_weight, matmul_weight, weight_matmul, matmul_of_reshapes, add_bias, add_bias_after_reshape,
    linear_of_reshape, linear_of_moved_features,
)
