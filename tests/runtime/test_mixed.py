"""Plans in which native segments and PyTorch operations alternate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sashiko.diagnostics.errors import InputError, InvalidGraph
from sashiko.graph.attrs import Slot
from sashiko.graph.types import TensorType, f32
from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.plan import (
    AtenStep,
    ConstantSource,
    InputTensor,
    NativeSegment,
    OutputDim,
    OutputTensor,
    Plan,
    SegmentOutput,
)

ATEN = torch.ops.aten


def mixed(chain: type, weight: torch.Tensor) -> Plan:
    """y = sort(2x, columns backwards); returns y.t() + 1, the indices, x itself, the number of rows, weight @ weight."""
    first = chain()
    (x,) = first.inputs(1)
    first.step("scale", [x], first.buffer("output", 0), 2.0)
    head = first.segment([0], [1])
    sort = AtenStep(ATEN.sort.default, (Slot(0), -1), (("descending", True),), (1,), (2, 3), "no native sort", True)
    flip = AtenStep(ATEN.t.default, (Slot(0),), (), (2,), (4,), "a view")
    square = AtenStep(ATEN.matmul.default, (Slot(0), Slot(0)), (), (9,), (10,), "left to PyTorch")
    last = chain(rows=first.cols, cols=first.rows)
    (t,) = last.inputs(1)
    last.step("shift", [t], last.buffer("output", 0), 1.0)
    tail = last.segment([4], [5])
    inputs = (InputTensor("x", TensorType(f32, (first.rows, first.cols)), 0),)
    outputs = (OutputTensor(5), OutputTensor(3), OutputTensor(0), OutputDim(first.rows), OutputTensor(10))
    return Plan(inputs, outputs, (head, sort, flip, tail, square), (ConstantSource((weight,), lambda: weight, "weight"),), ((9, 0),))


def test_values_pass_between_native_code_and_pytorch(code: Code, chain: type) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 3))
    executable = Executable(mixed(chain, weight), code)
    for shape in ((4, 6), (1, 1), (5, 2)):
        x = torch.randn(shape).requires_grad_()
        y, indices, same, rows, square = executable(x)
        values, order = torch.sort(2 * x.detach(), descending=True)
        assert isinstance(y, torch.Tensor) and isinstance(square, torch.Tensor) and isinstance(indices, torch.Tensor)
        torch.testing.assert_close(y, values.t() + 1, rtol=0, atol=0)
        assert torch.equal(indices, order)
        assert same is x
        assert rows == shape[0]
        torch.testing.assert_close(square, (weight @ weight).detach())
        assert not y.requires_grad and not square.requires_grad
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(executable(torch.randn(2, 2))[4], (weight @ weight).detach())


def test_non_contiguous_arguments_reach_pytorch_as_they_are_or_row_by_row(chain: type, code: Code) -> None:
    kind = TensorType(f32, (3, 4))
    step = AtenStep(ATEN.alias.default, (Slot(0),), (), (0,), (1,), "a view")
    executable = Executable(Plan((InputTensor("x", kind, 0),), (OutputTensor(1),), (step,)), code)
    x = torch.randn(4, 3).t()
    (got,) = executable(x)
    assert isinstance(got, torch.Tensor)
    assert got.stride() == x.stride()
    dense = Executable(Plan((InputTensor("x", kind, 0),), (OutputTensor(1), OutputTensor(0)), (replace(step, dense=(0,)),)), code)
    for argument in (x, x.contiguous()):
        got, itself = dense(argument)
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, x) and got.is_contiguous() and itself is argument
        assert (got.data_ptr() == argument.data_ptr()) == argument.is_contiguous()
    with pytest.raises(InputError, match="dimension 1 has size 3"):
        executable(torch.randn(3, 3))


def test_expressions_in_the_arguments(chain: type, code: Code) -> None:
    c = chain()
    kind = TensorType(f32, (c.rows, c.cols))
    step = AtenStep(ATEN.view.default, (Slot(0), [c.rows * c.cols]), (), (0,), (1,), "a view")
    executable = Executable(Plan((InputTensor("x", kind, 0),), (OutputTensor(1),), (step,)), code)
    for shape in ((2, 3), (4, 5)):
        (got,) = executable(torch.zeros(shape))
        assert isinstance(got, torch.Tensor)
        assert got.shape == (shape[0] * shape[1],)


def test_what_pytorch_returns_is_checked_before_kernels_read_it(chain: type, code: Code) -> None:
    c = chain()
    kind = TensorType(f32, (c.rows, c.cols))
    for wrong, args in ((ATEN.select.int, (Slot(0), 0, 0)), (ATEN.isnan.default, (Slot(0),))):
        lies = AtenStep(wrong, args, (), (0,), (1,), "returns something smaller")
        c = chain()
        (x,) = c.inputs(1)
        c.step("shift", [x], c.buffer("output", 0), 1.0)
        plan = Plan((InputTensor("x", kind, 0),), (OutputTensor(2),), (lies, c.segment([1], [2])))
        with pytest.raises(InvalidGraph, match="expected 24 bytes of f32"):
            Executable(plan, code)(torch.zeros(2, 3))


def test_exceptions_of_pytorch_pass_through(chain: type, code: Code) -> None:
    kind = TensorType(f32, (2, 3))
    step = AtenStep(ATEN.mm.default, (Slot(0), Slot(0)), (), (0,), (1,), "left to PyTorch")
    executable = Executable(Plan((InputTensor("x", kind, 0),), (OutputTensor(1),), (step,)), code)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        executable(torch.zeros(2, 3))


def test_a_physical_order_of_dimensions(chain: type, code: Code) -> None:
    """Input and output whose memory has the columns outermost: the kernel sees rows and columns swapped."""
    c = chain()
    swapped = chain(rows=c.cols, cols=c.rows)
    (x,) = swapped.inputs(1)
    swapped.step("shift", [x], swapped.buffer("output", 0), 1.0)
    kind = TensorType(f32, (c.rows, c.cols), None, (1, 0))
    segment = NativeSegment((0,), (SegmentOutput(1, kind),), tuple(swapped.buffers), swapped.segment([0], [1]).steps)
    executable = Executable(Plan((InputTensor("x", kind, 0),), (OutputTensor(1),), (segment,)), code)
    for data in (torch.randn(3, 5), torch.randn(5, 3).t()):
        (got,) = executable(data)
        assert isinstance(got, torch.Tensor)
        assert got.stride() == (1, data.shape[0])
        torch.testing.assert_close(got, data + 1, rtol=0, atol=0)
