"""The grammar of equations: what is read, what is refused and where."""

from __future__ import annotations

import pytest

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.rewrite import parse_equation, parse_pattern
from sashiko.rewrite.pattern import (
    Bound,
    Either,
    NumberLiteral,
    NumberVariable,
    Operation,
    Optional,
    Rest,
    Variable,
    attribute_names,
    number_names,
    root_ops,
    value_names,
)


def test_every_construct_is_read() -> None:
    x = Variable("x")
    assert parse_pattern("x") == x
    assert parse_pattern("_") == Variable("_")
    assert parse_pattern("add(x, -0.5)") == Operation("add", (x, NumberLiteral(-0.5)))
    assert parse_pattern("add(x, -inf)") == Operation("add", (x, NumberLiteral(float("-inf"))))
    assert parse_pattern("add(x, 1e-5)") == Operation("add", (x, NumberLiteral(1e-5)))
    assert parse_pattern("mul(x, $c)") == Operation("mul", (x, NumberVariable("c")))
    assert parse_pattern("where(true, x, x)") == Operation("where", (NumberLiteral(True), x, x))
    assert parse_pattern("cast{d}(x)") == Operation("cast", (x,), attrs="d")
    assert parse_pattern("reduce{r, kind=sum, axes=[0, -1], keepdim=true}(x)") == Operation(
        "reduce", (x,), "r", (("kind", "sum"), ("axes", (0, -1)), ("keepdim", True)))
    assert parse_pattern("neg!(x)") == Operation("neg", (x,), single_use=True)
    assert parse_pattern("e@neg(x)") == Bound("e", Operation("neg", (x,)))
    assert parse_pattern("e@(neg(x) | x)") == Bound("e", Either((Operation("neg", (x,)), x)))
    assert parse_pattern("linear(x, w, b?)") == Operation("linear", (x, Variable("w"), Optional(Variable("b"))))
    assert parse_pattern("concat(x, more...)") == Operation("concat", (x, Rest("more")))


@pytest.mark.parametrize("text", [
    "add(linear!(x, w), b) -> linear(x, w, b)",
    "reduce{r, kind=max, keepdim=true}(x) -> x",
    "(neg(x) | abs(x)) -> x",
    "e@mul(neg(x), $c) -> mul(e, $c)",
    "concat{a}(dequantize(x), rest...) -> x",
    "linear(x, w, b?) -> linear(x, w, b?)",
])
def test_text_of_an_equation_reads_back(text: str) -> None:
    equation = parse_equation(text)
    assert str(equation) == text
    assert parse_equation(str(equation)) == equation


@pytest.mark.parametrize(("text", "problem"), [
    ("add(x, y", "expected ','"),
    ("add(x) -> x", "add takes 2 to 2 operands, not 1"),
    ("plus(x, y) -> x", "there is no operation 'plus'"),
    ("x -> x", "must be an operation"),
    ("(neg(x) | x) -> x", "must be an operation"),
    ("neg(x) -> y", "does not bind y"),
    ("mul(x, $a) -> mul(x, $b)", "does not bind b"),
    ("linear(x?, w) -> x", "may be absent come last"),
    ("add(x, y?) -> x", "both operands of add are needed"),
    ("cast{type=f32}(x) -> x", "cast has no attribute 'type'"),
    ("cast{d, e}(x) -> x", "bound to 'd' already"),
    ("neg(x) -> x x", "unexpected 'x'"),
    ("neg(x)", "expected '->'"),
    ("neg(x; y) -> x", "cannot read"),
    ("neg() -> 1", "neg takes 1 to 1 operands"),
])
def test_mistakes_name_problem_and_column(text: str, problem: str) -> None:
    with pytest.raises(InvalidGraph) as caught:
        parse_equation(text)
    assert problem in caught.value.what
    assert "column" in caught.value.what
    assert text in caught.value.what


def test_what_a_pattern_binds() -> None:
    pattern = parse_pattern("matmul(s@mul(q, $c), permute{p}(k)) | matmul(q, rest@neg(_))")
    assert value_names(pattern) == {"s", "q", "k", "rest"}
    assert number_names(pattern) == {"c"}
    assert attribute_names(pattern) == {"p"}


def test_root_operations() -> None:
    assert root_ops(parse_pattern("a@(neg(x) | abs(x))")) == ("neg", "abs")
    assert root_ops(parse_pattern("view(x)")) == ("reshape", "expand", "permute", "slice", "window")
    assert root_ops(parse_pattern("neg(x) | x")) == ()
