"""The matcher: what each construct of a pattern accepts, what it binds, and why it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, QParams, bf16, boolean, f16, f32, f64, i8, i16, i32, i64, u8
from sashiko.rewrite.equation import parse_pattern
from sashiko.rewrite.match import Bindings, Matcher, Miss
from sashiko.rewrite.query import holds, is_weight, number, power_of_two

X = b.input_(0, f32, (2, 3), name="x")
Y = b.input_(1, f32, (2, 3), name="y")
C = b.input_(2, boolean, (2, 3), name="c")


def first(text: str, value: Value, *others: Value) -> Bindings | None:
    """The preferred match in the graph of `value` and `others`."""
    return next(Matcher(Graph((X, Y, C), (value, *others))).matches(parse_pattern(text), value), None)


def why(text: str, value: Value, *others: Value) -> str:
    """The reason of the nearest miss."""
    miss = Miss()
    found = list(Matcher(Graph((X, Y, C), (value, *others)), miss).matches(parse_pattern(text), value))
    assert not found and miss.mismatch is not None
    return miss.mismatch.reason


def test_variables_bind_operands() -> None:
    found = first("sub(p, q)", b.sub(X, Y))
    assert found is not None and dict(found.values) == {"p": X, "q": Y}


def test_repeated_name_is_one_value() -> None:
    assert first("sub(p, p)", b.sub(X, X)) is not None
    assert first("sub(p, p)", b.sub(X, Y)) is None
    assert why("sub(p, p)", b.sub(X, Y)) == "expected the same value as the other p, found another input"
    assert first("sub(p, p)", b.sub(b.full(0.0, f32), b.full(0.0, f32))) is not None
    assert first("sub(p, p)", b.sub(b.full(0.0, f32), b.full(-0.0, f32))) is None
    # A name may be used before it is defined.
    square = b.mul(X, X)
    assert first("div(e, n@neg(e@mul(x, x)))", b.div(square, b.neg(square))) is not None
    assert first("div(e, n@neg(e@mul(x, x)))", b.div(square, b.neg(b.mul(X, X)))) is None


@pytest.mark.parametrize(("op", "commutes"), [("add", True), ("mul", True), ("maximum", True), ("eq", True), ("sub", False), ("lt", False)])
def test_operands_of_commutative_operations_match_in_both_orders(op: str, commutes: bool) -> None:
    value = b.elementwise(op, Y, b.neg(X))
    assert (first(f"{op}(neg(p), q)", value) is not None) == commutes


def test_backtracking_finds_the_only_assignment() -> None:
    """The first operand could be either negation; only one choice lets the rest match."""
    value = b.add(b.neg(X), b.neg(b.exp(Y)))
    found = first("add(neg(exp(p)), neg(q))", value)
    assert found is not None and (found.values["p"], found.values["q"]) == (Y, X)
    deep = b.sub(b.add(X, Y), Y)
    found = first("sub(add(p, q), p)", deep)
    assert found is not None and found.values["p"] is Y


@pytest.mark.parametrize(("spelling", "matches"), [
    (lambda: b.full(0.0, f32), True),
    (lambda: b.full(0.0, f32, (2, 3)), True),
    (lambda: b.constant(torch.zeros(3)), True),
    (lambda: b.expand(b.constant(torch.zeros(())), (2, 3)), True),
    (lambda: b.cast(b.full(0, i32), f32), True),
    (lambda: b.full(1e-30, f32), False),
    (lambda: b.constant(torch.tensor([0.0, 0.0, 1.0])), False),
    (lambda: b.constant(torch.zeros(3), watched=True), False),
    (lambda: Y, False),
])
def test_numbers_are_known_through_constants_views_and_casts(spelling: object, matches: bool) -> None:
    assert callable(spelling)
    assert (first("add(x, 0)", b.add(X, spelling())) is not None) == matches


def test_numbers_are_compared_as_elements_of_the_type() -> None:
    assert first("mul(x, 0.1)", b.mul(X, 0.1)) is not None
    assert first("mul(x, 0.1)", b.mul(X, b.constant(torch.tensor(0.1)))) is not None
    assert first("mul(x, 0.1)", b.mul(b.cast(X, bf16), b.constant(torch.tensor(0.1).bfloat16()))) is not None
    assert first("mul(x, 0.5)", b.mul(b.cast(X, i32), 0)) is None
    assert first("mul(x, -inf)", b.mul(b.cast(X, i32), 0)) is None
    assert first("and(x, 1)", b.and_(C, b.full(True, boolean))) is None
    assert first("and(x, true)", b.and_(C, b.full(True, boolean))) is not None


def test_number_variables() -> None:
    found = first("mul(add(x, $a), $c)", b.mul(b.add(X, 3.0), 0.1))
    assert found is not None and found.numbers["a"] == 3.0
    assert found.numbers["c"] == pytest.approx(0.1, rel=torch.finfo(torch.float32).eps) and found.numbers["c"] != 0.1
    assert first("mul(add(x, $a), $a)", b.mul(b.add(X, 3.0), 2.0)) is None
    assert why("mul(add(x, $a), $a)", b.mul(b.add(X, 3.0), 2.0)) == "expected the number 3.0 again, found 2.0"
    assert why("mul(x, $c)", b.mul(X, Y)) == "expected a known number, found input"


def test_optional_operands_and_the_rest() -> None:
    w, bias = b.constant(torch.ones(4, 3)), b.constant(torch.ones(4))
    with_bias, without = first("linear(x, w, b?)", b.linear(X, w, bias)), first("linear(x, w, b?)", b.linear(X, w))
    assert with_bias is not None and with_bias.values["b"] is bias
    assert without is not None and "b" not in without.values
    assert first("linear(x, w)", b.linear(X, w, bias)) is None
    found = first("concat(x, more...)", b.concat([X, Y, X], 0))
    assert found is not None and found.rests["more"] == (Y, X)


def test_attributes_bind_and_constrain() -> None:
    turned = b.permute(b.permute(X, (1, 0)), (1, 0))
    found = first("permute{p}(permute{p}(x))", turned)
    assert found is not None and found.attrs["p"] == turned.attrs
    three = b.permute(b.permute(b.reshape(X, (2, 3, 1)), (2, 0, 1)), (1, 0, 2))
    assert first("permute{p}(permute{p}(x))", three) is None
    padded = b.pad(b.pad(X, ((1, 1), (0, 0)), 0.0), ((1, 1), (0, 0)), -0.0)
    assert first("pad{p}(pad{p}(x))", padded) is None and first("pad{p}(pad{q}(x))", padded) is not None
    total = b.reduce(X, "sum", 1)
    assert first("reduce{kind=sum, axes=[1], keepdim=false}(x)", total) is not None
    assert why("reduce{kind=max}(x)", total) == "expected reduce with kind=max, found kind=sum"
    assert first("cast{dtype=bf16}(x)", b.cast(X, bf16)) is not None
    assert first("cast{dtype=f16}(x)", b.cast(X, bf16)) is None


def test_single_use() -> None:
    inner = b.exp(X)
    assert first("neg(exp!(x))", b.neg(inner)) is not None
    assert why("neg(exp!(x))", b.neg(inner), b.abs_(inner)) == "expected exp with one user, found 2 users"
    assert why("neg(exp!(x))", b.neg(inner), inner) == "expected exp with one user, found an output of the graph"
    assert why("add(exp!(x), _)", b.add(inner, inner)) == "expected exp with one user, found 2 users"


def test_groups_match_any_member_and_the_same_one_again() -> None:
    assert first("unary(x)", b.exp(X)) is not None
    assert first("unary(x)", b.add(X, Y)) is None
    assert first("unary(unary(x))", b.exp(b.exp(X))) is not None
    assert first("unary(unary(x))", b.exp(b.neg(X))) is None
    found = first("binary(expand(p), q)", b.mul(Y, b.expand(b.input_(3, f32, (3,)), (2, 3))))
    assert found is not None and found.groups["binary"] == "mul" and found.values["q"] is Y


def test_alternatives_in_order() -> None:
    found = first("neg(exp(p) | q)", b.neg(b.exp(X)))
    assert found is not None and dict(found.values) == {"p": X}
    found = first("neg(exp(p) | q)", b.neg(X))
    assert found is not None and dict(found.values) == {"q": X}


def test_nearest_miss_is_the_deepest() -> None:
    value = b.div(b.exp(b.sub(X, Y)), Y)
    assert why("div(exp(sub(p, reduce(p))), _)", value) == "expected reduce, found input"
    assert why("div(exp(add(p, _)), _)", value) == "expected add, found sub"


def test_known_numbers() -> None:
    assert number(b.cast(b.full(2.75, f32), i32)) == 2
    assert number(b.cast(b.full(300, i32), u8)) is None
    assert number(b.cast(b.full(math.inf, f32), i32)) is None
    assert number(b.full(0.1, bf16)) == float(torch.tensor(0.1).bfloat16())
    assert number(b.constant(torch.ones(2, dtype=torch.int8), qparams=QParams((0.1,)))) is None
    assert number(X) is None


TYPES = (f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean)


@pytest.mark.parametrize("narrow", TYPES, ids=str)
@pytest.mark.parametrize("wide", TYPES, ids=str)
def test_holds_agrees_with_conversions_of_extreme_numbers(wide: DType, narrow: DType) -> None:
    """`holds` promises that every number survives; torch converts the numbers that break first, Python compares them exactly."""
    values = _extremes(narrow)
    survive = [x.item() for x in values.to(wide.torch)] == [x.item() for x in values]
    assert holds(wide, narrow) == survive


def _extremes(dtype: DType) -> torch.Tensor:
    if dtype == boolean:
        return torch.tensor([False, True])
    if dtype.is_float:
        info = torch.finfo(dtype.torch)
        return torch.tensor([info.max, info.min, info.tiny, 1 + info.eps, -math.inf], dtype=torch.float64).to(dtype.torch)
    limits = torch.iinfo(dtype.torch)
    return torch.tensor([limits.min, limits.max, limits.max - 1], dtype=dtype.torch)


def test_powers_of_two() -> None:
    assert all(power_of_two(x) for x in (1, 2.0, -0.5, 2.0**-100))
    assert not any(power_of_two(x) for x in (0, 3, 0.3, math.inf, math.nan, 2.0**-126, 2.0**127))


def test_weights_are_constants_behind_views_casts_and_quantization() -> None:
    w = b.constant(torch.ones(4, 3))
    assert is_weight(b.permute(b.cast(w, bf16), (1, 0)))
    assert is_weight(b.dequantize(b.quantize(w, i8, QParams((0.1,)))))
    assert not is_weight(b.mul(w, 2.0))
    assert not is_weight(X)
