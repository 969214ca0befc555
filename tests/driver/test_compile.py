"""`sashiko.compile`: every way to call a model, and every form of what it returns, against the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close
from transformers.modeling_outputs import BaseModelOutput

import sashiko
from sashiko.driver.pipeline import PRECISIONS
from sashiko.graph import build as b
from sashiko.graph.ir import Value
from sashiko.platforms.catalogue import by_name
from sashiko.platforms.host import host
from sashiko.rewrite.match import Mismatch
from sashiko.rewrite.rule import Match, rule
from tests.driver.functions import Apply, left

BF16_STEP = 2**-8  # one rounding to bf16, relative


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(x)))
        return y if scale is None else y * scale


def same(model: nn.Module, *args: Any, **options: Any) -> sashiko.CompiledModel:
    """Compiles and compares one call; returns the compiled model."""
    model.eval()
    compiled = sashiko.compile(model, args, **options)
    with torch.no_grad():
        expected = model(*args)
    got = compiled(*args)
    assert type(got) is type(expected)
    assert_close(got, expected)
    return compiled


def test_a_tensor_is_the_only_argument() -> None:
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    assert_close(sashiko.compile(model, x)(x), model(x))


def test_a_chain_deeper_than_the_stack_of_python() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x
            for _ in range(300):
                y = (y * 0.9 + x).tanh()
            return y

    same(Chain().eval(), torch.randn(2, 4))


@pytest.mark.parametrize("times", [4, 8, 40])
@pytest.mark.parametrize("shapes", [None, ({0: Dim("batch")},)])
def test_elements_far_out_of_order(times: int, shapes: Any) -> None:
    """Each place is divided again and again until it is no number that code can follow; so what is in between is stored."""

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                x = x.reshape(x.shape[0], 16, 128).transpose(1, 2).reshape(x.shape[0], 32, 64)
            return x

    model = Turned().eval()
    compiled = sashiko.compile(model, torch.randn(2, 32, 64), dynamic_shapes=shapes)
    for batch in (2,) if shapes is None else (2, 7):
        x = torch.randn(batch, 32, 64)
        assert torch.equal(compiled(x), model(x))


def test_nested_arguments() -> None:
    def total(first: dict[str, torch.Tensor], rest: list[torch.Tensor]) -> torch.Tensor:
        return first["a"] + 2 * first["b"] + 3 * rest[0]

    a, bb, c = torch.randn(3, 4, 5).unbind()
    compiled = same(Apply(total), {"a": a, "b": bb}, [c])
    with pytest.raises(sashiko.InputError, match="compiled for"):
        compiled({"a": a, "b": bb}, [c, c])


@dataclass
class Case:
    name: str
    function: Callable[[torch.Tensor, torch.Tensor], Any]


RETURNED = [
    Case("tuple", lambda x, y: (x + y, x * y)),
    Case("list", lambda x, y: [x + y, x * y]),
    Case("dict", lambda x, y: {"sum": x + y, "nested": {"product": x * y}}),
    Case("named tuple", lambda x, y: Pair(x + y, x - y)),
    Case("model output", lambda x, y: BaseModelOutput(last_hidden_state=x + y, hidden_states=(x * y, x - y))),
    Case("same value twice", lambda x, y: ((z := x * y), z)),
    Case("nothing", lambda x, y: (None, x + y, None)),
    Case("numbers", lambda x, y: (x + y, 3, 2.5, True, x.shape[0])),
    Case("an argument", lambda x, y: (x, x + y, y)),
    Case("only an argument", lambda x, y: y),
    Case("a view of an argument", lambda x, y: (x.t(), y[1:], (x + y).sum())),
    Case("a constant", lambda x, y: (torch.arange(5), torch.full((2, 3), 7.0), x + y)),
    Case("only constants", lambda x, y: torch.ones(3)),
    Case("a scalar tensor", lambda x, y: (x * y).mean()),
    Case("empty", lambda x, y: (x[:0] + y[:0], (x + y)[:, :0].sum())),
    Case("booleans and integers", lambda x, y: (x > y, (x > y).sum(), (x * 10).to(torch.int32), x.argmax(-1))),
    Case("other types", lambda x, y: (x.double() + y, x.to(torch.float16), x.to(torch.bfloat16), (x * 5).to(torch.uint8).to(torch.int8))),
]


@pytest.mark.parametrize("case", RETURNED, ids=lambda c: c.name)
def test_what_a_model_returns(case: Case) -> None:
    same(Apply(case.function), torch.rand(4, 5), torch.rand(4, 5))


def test_a_parameter_can_be_returned() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.weight, self.weight

    same(Model(), torch.randn(3, 4))


def test_a_result_is_not_overwritten_by_the_next_call() -> None:
    compiled = sashiko.compile(Mlp().eval(), (torch.randn(2, 32),))
    first = compiled(torch.ones(2, 32))
    kept = first.clone()
    compiled(torch.zeros(2, 32))
    assert torch.equal(first, kept)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions(precision: str) -> None:
    model, x = Mlp(64).eval(), torch.randn(9, 64)
    with torch.no_grad():
        expected = model(x)
    got = sashiko.compile(model, (x,), precision=precision, strict=True)(x)
    assert got.dtype == torch.float32
    # Two products of rounded operands: each term is off by at most two roundings, and the terms add up like their magnitudes.
    bound = 1e-5 if precision == "fp32" else 4 * BF16_STEP
    assert (got - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_operations_of_several_results_between_products(precision: str) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(8, 8)

    def function(x: Tensor) -> Tensor:
        q, r = torch.linalg.qr(layer(x))
        pooled = nn.functional.max_unpool1d(*nn.functional.max_pool1d(q[None], 2, return_indices=True), 2)[0]
        return torch.relu(layer(pooled) + layer(q @ r).cummax(0)[0]) @ layer.weight

    got = sashiko.compile(Apply(function).eval(), (x,), precision=precision)(x)
    assert (got - function(x)).norm() <= (1e-5 if precision == "fp32" else 0.1) * function(x).norm()


def test_bf16_rounds_and_fp32_does_not() -> None:
    model, x = Mlp(64).eval(), torch.randn(9, 64)
    wide, narrow = (sashiko.compile(model, (x,), precision=p)(x) for p in ("fp32", "bf16"))
    assert (narrow - wide).norm() > BF16_STEP / 16 * wide.norm()
    with pytest.raises(sashiko.InputError, match="one of fp32, bf16, auto"):
        sashiko.compile(model, (x,), precision="fp8")


def test_strict_names_the_operation_and_its_place() -> None:
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x) + 1

    model, x = Inverse(), torch.eye(3) * 2
    relaxed = same(model, x)
    (operation,) = left(relaxed)
    assert "left to PyTorch" in relaxed.explain() and f"PyTorch's {operation}: no native form\n" in relaxed.explain()
    with pytest.raises(sashiko.Unsupported, match=r"linalg_inv.*has no native form") as caught:
        sashiko.compile(model.eval(), (x,), strict=True)
    assert "test_compile.py" in caught.value.where


@pytest.mark.parametrize("name", ["eq_", "lt_", "ge_", "logical_xor_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool])
def test_comparisons_in_place_keep_the_type(name: str, dtype: torch.dtype) -> None:
    class Compared(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.mul(getattr(x.clone(), name)(y), 3)

    x, y = torch.tensor([0, 1, 2, 3, 1]).to(dtype), torch.tensor([0, 1, 1, 1, 0], dtype=torch.int32)
    got, want = sashiko.compile(Compared().eval(), (x, y), strict=True)(x, y), Compared()(x, y)
    assert got.dtype == want.dtype and torch.equal(got, want)


def test_the_target_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    name = "x86_64_v3" if host().arch == "x86_64" else "neoverse_n1"
    monkeypatch.setenv("SASHIKO_TARGET", name)
    compiled = sashiko.compile(model, (x,)), sashiko.quantize_and_compile(model, [x])
    assert [each.executable.code.target.name for each in compiled] == [name] * 2


def test_targets_by_name_and_by_value() -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    with torch.no_grad():
        expected = model(x)
    for target in (None, "host", host(), "x86_64_v3" if host().arch == "x86_64" else "neoverse_n1"):
        assert_close(sashiko.compile(model, (x,), target=target)(x), expected)
    with pytest.raises(sashiko.SashikoError, match="z80"):
        sashiko.compile(model, (x,), target="z80")


def test_a_foreign_target_is_an_error_not_a_crash() -> None:
    foreign = "neoverse_n1" if host().arch == "x86_64" else "x86_64_v3"
    assert by_name(foreign).arch != host().arch
    with pytest.raises(sashiko.SashikoError, match=f"{by_name(foreign).arch}.*{host().arch}"):
        sashiko.compile(Mlp().eval(), (torch.randn(4, 32),), target=foreign)(torch.randn(4, 32))


@rule("mul(sigmoid(x), x) -> sub(x, x)")
def wrong_on_purpose(m: Match) -> Value | Mismatch:
    """A rule whose effect shows in the result."""
    return b.sub(m["x"], m["x"])


def test_rules_of_the_user() -> None:
    model, x = Apply(lambda x: torch.sigmoid(x) * x + 1).eval(), torch.randn(4, 32)
    plain, ruled = sashiko.compile(model, (x,)), sashiko.compile(model, (x,), rules=(wrong_on_purpose,))
    assert_close(plain(x), model(x))
    assert torch.equal(ruled(x), torch.ones(4, 32))
    assert "wrong_on_purpose" in ruled.explain()


def test_dynamic_shapes_by_name_and_position() -> None:
    model = Mlp().eval()
    rows = Dim("rows", min=1, max=40)
    by_position = sashiko.compile(model, (torch.randn(4, 32),), dynamic_shapes=({0: rows},))
    by_name_ = sashiko.compile(model, {"x": torch.randn(4, 32)}, dynamic_shapes={"x": {0: rows}})
    for size in (1, 2, 7, 40):
        x = torch.randn(size, 32)
        with torch.no_grad():
            expected = model(x)
        assert_close(by_position(x), expected)
        assert_close(by_name_(x=x), expected)


def test_sizes_derived_from_other_sizes() -> None:
    def glued(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        both = torch.cat([x, y * 2])
        return both.reshape(-1, 2).sum(1), both.shape[0]

    n = Dim("n", min=1, max=20)
    model = Apply(glued).eval()
    compiled = sashiko.compile(model, (torch.randn(4, 6), torch.randn(5, 6)), dynamic_shapes={"args": ({0: n}, {0: n + 1})})
    for size in (1, 2, 13):
        args = torch.randn(size, 6), torch.randn(size + 1, 6)
        assert_close(compiled(*args), model(*args))
    with pytest.raises(sashiko.InputError):
        compiled(torch.randn(4, 6), torch.randn(4, 6))


def test_the_model_is_not_changed() -> None:
    model = nn.Sequential(Mlp(), nn.BatchNorm1d(32), nn.Dropout(0.5)).eval()
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(t) for name, t in model.named_parameters()}
    x = torch.randn(4, 32)
    kept = x.clone()
    sashiko.compile(model, (x,), precision="bf16")(x)
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert {name: id(t) for name, t in model.named_parameters()} == identities
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not model.training and torch.equal(x, kept)


def test_tied_weights_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids))

    model, ids = Tied().eval(), torch.arange(10).reshape(2, 5)
    compiled = same(model, ids)
    with torch.no_grad():
        model.table.weight.mul_(3)
        assert_close(compiled(ids), model(ids))


def test_arguments_that_require_gradients_or_come_from_inference_mode() -> None:
    model = Mlp().eval()
    x = torch.randn(3, 32, requires_grad=True)
    compiled = sashiko.compile(model, (x,))
    got = compiled(x)
    assert not got.requires_grad
    assert_close(got, model(x).detach())
    with torch.inference_mode():
        inner = torch.randn(3, 32)
        assert_close(compiled(inner), model(inner))
    assert_close(compiled(inner), model(inner.clone()).detach())


def test_arguments_that_are_parameters_or_subclasses() -> None:
    model = Mlp().eval()
    compiled = sashiko.compile(model, (torch.randn(3, 32),))
    x = nn.Parameter(torch.randn(3, 32))
    assert_close(compiled(x), model(x).detach())


class OwnResidual(nn.Module):
    """h + b(h), where the sum may not take the place of h: the product still reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(96, 96) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        result: torch.Tensor = self.c(h + self.b(h))
        return result


def test_a_residual_that_is_also_multiplied_is_not_written_over() -> None:
    model, x = OwnResidual().eval(), torch.randn(40, 96)
    assert_close(sashiko.compile(model, (x,))(x), model(x).detach(), rtol=1e-4, atol=1e-5)
