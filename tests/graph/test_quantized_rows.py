"""The rows of torch's `quantized_decomposed` operators against the operators themselves: the same integers, the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
from torch import Tensor, nn

from sashiko.graph.aten import quantized
from sashiko.graph.capture import Captured, export, from_exported
from sashiko.graph.interpret import run
from sashiko.graph.verify import verify

Q = torch.ops.quantized_decomposed
Pair = tuple[Tensor, Tensor]


class Function(nn.Module):
    """A function of tensors, with buffers of its own."""

    def __init__(self, function: Callable[..., object], **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Tensor) -> object:
        return self.function(*args, **dict(self.named_buffers()))


def captured(model: nn.Module, *args: Tensor) -> Captured:
    result = from_exported(export(model.eval(), args), decomposed=True)
    verify(result.graph)
    assert not result.leftovers
    return result


def token(x: Tensor) -> Pair:
    scale, zero = Q.choose_qparams_per_token(x, torch.int8)
    q = Q.quantize_per_token(x, scale, zero, -127, 127, torch.int8)
    return q, Q.dequantize_per_token(q, scale, zero, -127, 127, torch.int8, torch.float32)


def token_asymmetric(x: Tensor) -> Pair:
    scale, zero = Q.choose_qparams_per_token_asymmetric(x, torch.int8)
    q = Q.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
    return q, Q.dequantize_per_token(q, scale, zero, -128, 127, torch.int8, torch.float32)


def token_composite(x: Tensor) -> Pair:
    """torch.export takes this operator apart."""
    scale, zero = Q._choose_qparams_per_token_asymmetric_impl(x, torch.int8)
    q = Q.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
    return q, Q.dequantize_per_token(q, scale, zero, -128, 127, torch.int8, torch.float32)


def tensor(x: Tensor) -> Pair:
    scale, zero = Q.choose_qparams.tensor(x, 0, 255, 2.0**-12, torch.uint8)
    q = Q.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
    return q, Q.dequantize_per_tensor.tensor(q, scale, zero, 0, 255, torch.uint8)


def tensor_symmetric(x: Tensor) -> Pair:
    scale, zero = Q.choose_qparams_symmetric.tensor(x, -127, 127, 2.0**-12, torch.int8)
    q = Q.quantize_per_tensor.tensor(x, scale, zero, -127, 127, torch.int8)
    return q, Q.dequantize_per_tensor.tensor(q, scale, zero, -127, 127, torch.int8)


def tensor_centred(x: Tensor) -> Pair:
    """Symmetric in unsigned integers: the zero point is 128."""
    scale, zero = Q.choose_qparams_symmetric.tensor(x, 0, 255, 2.0**-12, torch.uint8)
    q = Q.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
    return q, Q.dequantize_per_tensor.tensor(q, scale, zero, 0, 255, torch.uint8)


SHAPE = (3, 5, 64)
DATA = (
    torch.randn(SHAPE) * 2 + 0.3,
    torch.rand(SHAPE) + 1.0,
    -torch.rand(SHAPE) - 1.0,
    torch.zeros(SHAPE),
    torch.randn(SHAPE) * 1e-8,
    torch.randn(SHAPE) * 100,
)


@pytest.mark.parametrize("scheme", [token, tensor, tensor_symmetric, tensor_centred])
def test_parameters_of_each_call(scheme: Callable[[Tensor], Pair]) -> None:
    graph = captured(Function(scheme), DATA[0]).graph
    for data in DATA:
        for got, want in zip(run(graph, [data]), scheme(data), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("scheme", [token_asymmetric, token_composite])
def test_zero_points_of_each_row(scheme: Callable[[Tensor], Pair]) -> None:
    """torch multiplies in f64 and we in f32, so that a number within a rounding of a tie may go either way: one integer, or one scale."""
    graph = captured(Function(scheme), DATA[0]).graph
    for data in DATA:
        integers, reals = run(graph, [data])
        scale, zero = Q.choose_qparams_per_token_asymmetric(data, torch.int8)
        exact = data.double() / scale + zero
        near_tie = ((exact - exact.floor()) - 0.5).abs() < 256 * torch.finfo(torch.float32).eps
        off = (integers.int() - scheme(data)[0].int()).abs()
        assert off[~near_tie].eq(0).all() and off.le(1).all()
        assert torch.equal(reals, ((integers.double() - zero) * scale).float())


def test_one_row_alone() -> None:
    x = torch.randn(9)
    for got, want in zip(run(captured(Function(tensor), x).graph, [x]), tensor(x), strict=True):
        assert torch.equal(got, want)


def test_scales_that_are_arguments() -> None:
    """f64 and i64 tensors of the caller, of which nothing is known."""
    x, scale, zero = torch.randn(4, 16), torch.rand(4, 1).double() + 0.01, torch.randint(-5, 5, (4, 1))

    def both(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        q = Q.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
        return Q.dequantize_per_token(q, scale, zero, -128, 127, torch.int8, torch.float32)  # type: ignore[no-any-return]

    got = run(captured(Function(both), x, scale, zero).graph, [x, scale, zero])[0]
    # The scale is rounded to f32, and the product with it.
    assert ((got - both(x, scale, zero)).abs() <= 2 * torch.finfo(torch.float32).eps * got.abs()).all()


def test_channels_with_zero_points_of_their_own() -> None:
    scales, zeros = torch.rand(6) * 0.02 + 0.01, torch.arange(6) - 2
    x = torch.randn(3, 6, 5)

    def both(x: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        q = Q.quantize_per_channel(x, scales, zeros, 1, -128, 127, torch.int8)
        return Q.dequantize_per_channel(q, scales, zeros, 1, -128, 127, torch.int8)  # type: ignore[no-any-return]

    got = run(captured(Function(both, scales=scales, zeros=zeros), x).graph, [x])[0]
    assert torch.equal(got, both(x, scales, zeros))


def test_weights_keep_a_type_and_activations_are_spelled_out() -> None:
    """Only of a weight can a type say one scale for each channel: its numbers are in no kernel."""
    scales, zeros = torch.rand(6) * 0.02 + 0.01, torch.zeros(6, dtype=torch.int64)

    def both(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, ...]:
        return tuple(Q.dequantize_per_channel(Q.quantize_per_channel(v, scales, zeros, 0, -127, 127, torch.int8), scales, zeros, 0, -127,
                                              127, torch.int8) for v in (x, w))

    x, w = torch.randn(6, 5), torch.randn(6, 5)
    graph = captured(Function(both, w=w, scales=scales, zeros=zeros), x).graph
    axes = [v.tensor.qparams.axis for v in graph.order if v.op == "quantize" and v.tensor.qparams is not None]
    assert sorted(axes, key=str) == [0, None]
    for got, want in zip(run(graph, [x]), both(x, w, scales, zeros), strict=True):
        assert torch.equal(got, want)


def test_scales_chosen_in_half_precision_are_left_to_pytorch() -> None:
    """PyTorch rounds them to that precision, so they would be other scales; and the whole chain stays with it."""
    x = torch.randn(3, 8).bfloat16()
    leftovers = from_exported(export(Function(token).eval(), (x,)), decomposed=True).leftovers
    assert [note.op.split(".")[1] for note in leftovers] == ["choose_qparams_per_token", "quantize_per_token", "dequantize_per_token"]


def test_every_operator_with_a_row_exists() -> None:
    for name in quantized.ROWS:
        namespace, op, overload = name.split(".")
        assert getattr(getattr(getattr(torch.ops, namespace), op), overload)
