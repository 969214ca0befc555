"""Calls: results, shapes, arguments that fit and that do not, and what results are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sashiko.diagnostics.errors import InputError, InvalidGraph
from sashiko.graph.dims import symbol
from sashiko.graph.types import TensorType, f32
from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.plan import InputInt, InputTensor, OutputDim, OutputTensor, Plan

Reference = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 33), (200, 1), (0, 4), (64, 257)])
def test_a_chain_of_steps(affine: Executable, expected: Reference, shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape), torch.randn(shape)
    (got,) = affine(x, y)
    torch.testing.assert_close(got, expected(x, y), rtol=0, atol=0)


def variants(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers in memory of other forms."""
    wide = torch.zeros(x.shape[0], 2 * x.shape[1])
    wide[:, ::2] = x
    padded = torch.zeros(x.shape[0] + 3, x.shape[1])
    padded[3:] = x
    negative = torch._neg_view(-x)
    assert negative.is_neg()
    return {
        "transposed": x.t().contiguous().t(), "strided": wide[:, ::2], "view with an offset": padded[3:], "negative bit": negative,
        "parameter": torch.nn.Parameter(x.clone()), "requires grad": x.clone().requires_grad_(), "expanded": x[:1].expand(x.shape),
    }


def test_any_memory_layout(affine: Executable, expected: Reference) -> None:
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for name, tensor in variants(x).items():
        for arguments in ((tensor, y), (y, tensor)):
            (got,) = affine(*arguments)
            assert isinstance(got, torch.Tensor)
            torch.testing.assert_close(got, expected(*arguments).detach(), rtol=0, atol=0, msg=name)
            assert not got.requires_grad, "results are detached"


def test_a_subclass_with_data(affine: Executable, expected: Reference) -> None:
    class Mine(torch.Tensor):
        pass

    x = torch.randn(2, 3)
    (got,) = affine(x.as_subclass(Mine), x)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, expected(x, x), rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(affine: Executable, expected: Reference, mode: Callable[[], Any]) -> None:
    with mode():
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        (got,) = affine(x, y)
        torch.testing.assert_close(got, expected(x, y), rtol=0, atol=0)


def test_results_are_new_memory_every_time(affine: Executable) -> None:
    x, y = torch.randn(5, 5), torch.randn(5, 5)
    (first,) = affine(x, y)
    assert isinstance(first, torch.Tensor)
    kept = first.clone()
    (second,) = affine(y, y)
    assert isinstance(second, torch.Tensor)
    assert first.data_ptr() not in (second.data_ptr(), x.data_ptr(), y.data_ptr())
    assert torch.equal(first, kept)
    assert first.is_contiguous() and first.untyped_storage().nbytes() == 100


WRONG: tuple[tuple[str, Callable[[torch.Tensor], tuple[Any, ...]], str], ...] = (
    ("too few", lambda x: (x,), "expected 2 arguments, got 1"),
    ("too many", lambda x: (x, x, x), "expected 2 arguments, got 3"),
    ("dtype", lambda x: (x, x.double()), r"argument 1 \('x1'\): expected torch.float32, got torch.float64"),
    ("device", lambda x: (x, x.to("meta")), "on the CPU, got one on meta"),
    ("not a tensor", lambda x: (x, 3.0), "expected a tensor, got float"),
    ("rank", lambda x: (x, x[0]), r"expected 2 dimensions, \[s0, s1\], got 1, \[5\]"),
    ("shape", lambda x: (x, x[:2]), r"dimension 0 has size 2, expected 4, the size of argument 0 \('x0'\), dimension 0"),
    ("sparse", lambda x: (x, x.to_sparse()), "expected a dense tensor"),
)


@pytest.mark.parametrize(("arguments", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_arguments_that_do_not_fit(affine: Executable, arguments: Callable[[torch.Tensor], tuple[Any, ...]], message: str) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            affine(*arguments(torch.randn(4, 5)))


def test_a_fake_tensor_is_refused(affine: Executable) -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(2, 2))
    with pytest.raises(InputError, match="no data of its own"):
        affine(fake, fake)


def test_numbers_as_arguments_and_results(code: Code, chain: type) -> None:
    """An int argument gives a size; results may be sizes, or one tensor twice, in any order."""
    c = chain()
    (x,) = c.inputs(1)
    c.step("shift", [x], c.buffer("output", 0), 1.0)
    base = c.plan(1, 1)
    n = symbol("n", 0)
    outputs = (OutputDim(2 * n + c.cols), OutputTensor(100), OutputTensor(100))
    plan = Plan((InputInt("n", n), *base.inputs), outputs, base.segments)
    executable = Executable(plan, code)
    data = torch.randn(2, 3)
    for number in (5, 7):
        size, tensor, again = executable(number, data)
        assert size == 2 * number + 3 and tensor is again
        torch.testing.assert_close(tensor, data + 1, rtol=0, atol=0)
    for wrong in (True, 1.0, data):
        with pytest.raises(InputError, match="expected an int"):
            executable(wrong, data)
    with pytest.raises(InputError, match="from 0 on"):
        executable(-1, data)


def test_arguments_nobody_uses_and_in_another_order(code: Code, chain: type) -> None:
    c = chain()
    a, b = c.inputs(2)
    doubled = c.step("scale", [a], c.arena(), 2.0)
    c.step("add", [doubled, b], c.buffer("output", 0))
    segment = c.segment([2, 0], [100])
    kind = TensorType(f32, (c.rows, c.cols))
    plan = Plan(tuple(InputTensor(f"x{n}", kind, n) for n in range(3)), (OutputTensor(100),), (segment,))
    x, y, z = (torch.randn(2, 3) for _ in range(3))
    (got,) = Executable(plan, code)(x, y, z)
    torch.testing.assert_close(got, z * 2 + x, rtol=0, atol=0)


def test_a_result_that_later_steps_read(code: Code, chain: type) -> None:
    c = chain()
    (x,) = c.inputs(1)
    first = c.step("scale", [x], c.buffer("output", 0), 2.0)
    c.step("shift", [first], c.buffer("output", 1), 1.0)
    data = torch.randn(3, 3)
    doubled, shifted = Executable(c.plan(1, 2), code)(data)
    torch.testing.assert_close(doubled, data * 2, rtol=0, atol=0)
    torch.testing.assert_close(shifted, data * 2 + 1, rtol=0, atol=0)


def test_a_plan_without_its_kernels_is_refused(code: Code, chain: type) -> None:
    c = chain()
    (x,) = c.inputs(1)
    c.step("unheard_of", [x], c.buffer("output", 0))
    with pytest.raises(InvalidGraph, match="unheard_of"):
        Executable(c.plan(1, 1), code)


def test_a_symbol_that_no_input_defines(code: Code, chain: type) -> None:
    c = chain(work=symbol("lost"))
    (x,) = c.inputs(1)
    c.step("shift", [x], c.buffer("output", 0))
    with pytest.raises(InvalidGraph, match="lost"):
        Executable(c.plan(1, 1), code)(torch.zeros(2, 2))
