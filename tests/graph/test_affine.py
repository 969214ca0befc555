"""The rows of torchao's affine operators against the operators themselves: the same integers, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sashiko.diagnostics.errors import Unsupported
from sashiko.graph.aten import affine
from sashiko.graph.aten.call import Call
from sashiko.graph.build import input_
from sashiko.graph.capture import Captured, export, from_exported
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph
from sashiko.graph.types import FROM_TORCH, TensorType, TupleType, f32, i8
from sashiko.graph.verify import verify

Q: Any = pytest.importorskip("torchao.quantization.quant_primitives", reason="torchao is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:::torchao", "ignore:::torch")
SHAPE = (4, 6, 8)
# Tensor, channel of each axis, row, groups along one and along two axes.
BLOCKS = [(4, 6, 8), (1, 6, 8), (4, 1, 8), (4, 6, 1), (1, 1, 8), (1, 1, 4), (2, 1, 8), (2, 6, 2), (1, 1, 1)]


def captured(model: nn.Module, *args: Tensor) -> Captured:
    result = from_exported(export(model.eval(), args), decomposed=True)
    assert not result.leftovers
    return result


def parameters(block: tuple[int, ...], dtype: torch.dtype, zeros: bool) -> tuple[Tensor, Tensor]:
    shape = [size // extent for size, extent in zip(SHAPE, block, strict=True)]
    zero = torch.randint(-9, 10, shape) if zeros else torch.zeros(shape)
    return (torch.rand(shape) * 0.02 + 0.01).to(dtype), zero.to(torch.int8)


def kind_of(tensor: Tensor) -> TensorType:
    return TensorType(FROM_TORCH[tensor.dtype], tuple(tensor.shape))


def computed(row: Callable[..., Any], wanted: Sequence[Tensor], x: Tensor, *arguments: Any) -> list[Tensor]:
    """What a row makes of tensors, which are inputs of its graph, and of other arguments."""
    tensors = [x, *(a for a in arguments if isinstance(a, Tensor))]
    values = {id(t): input_(n, FROM_TORCH[t.dtype], tuple(t.shape)) for n, t in enumerate(tensors)}
    types = [kind_of(t) for t in wanted]
    call = Call(types[0] if len(types) == 1 else TupleType(tuple(types)), frozenset(range(len(types))))
    made = row(call, values[id(x)], *(values.get(id(a), a) for a in arguments))
    graph = Graph(tuple(values.values()), made if isinstance(made, tuple) else (made,))
    verify(graph)
    assert [(v.dtype, v.shape) for v in graph.outputs] == [(t.dtype, t.shape) for t in types]
    return run(graph, tensors)


@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
], ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "affine"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_round_trips(block: tuple[int, ...], zeros: bool, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Integers to the bit, in the types in which torch computes."""
    kind, of_scale = dtypes
    x, (scale, zero) = torch.randn(SHAPE).to(kind), parameters(block, of_scale, zeros)
    limits = torch.int8, -128, 127
    want = Q.quantize_affine(x, block, scale, zero, *limits)
    (integers,) = computed(affine.quantize, [want], x, block, scale, zero, *limits)
    assert torch.equal(integers, want)
    want = Q.dequantize_affine(integers, block, scale, zero, *limits, output_dtype=kind)
    (real,) = computed(affine.dequantize, [want], integers, block, scale, zero, *limits, kind)
    torch.testing.assert_close(real, want, rtol=torch.finfo(kind).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_chosen_parameters(block: tuple[int, ...], mapping: str, dtype: torch.dtype) -> None:
    """To the bit, with rows that are zero, of one sign, and small."""
    x = torch.randn(SHAPE).to(dtype)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 0, x[0, 1].abs(), -x[0, 2].abs(), x[0, 3] * 1e-7
    kept = block != (1, 1, 1)  # torch takes no axes for all of them
    for limits, eps, types in (((None, None), None, (None, torch.int8, False)), ((-8, 7), 2.0**-20, (torch.float32, torch.int32, kept))):
        wanted = Q.choose_qparams_affine(x, Q.MappingType[mapping], block, torch.int8, *limits, eps, *types)
        found = computed(affine.choose, wanted, x, mapping, block, torch.int8, *limits, eps, *types)
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)


class Both(nn.Module):
    """A round trip by row, with scales from the data."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        block = (1, 1, 8)
        scale, zero = Q.choose_qparams_affine(x, Q.MappingType.ASYMMETRIC, block, torch.int8, zero_point_dtype=torch.int8)
        q = Q.quantize_affine(x, block, scale, zero, torch.int8, -128, 127)
        return scale, zero, q, Q.dequantize_affine(q, block, scale, zero, torch.int8, -128, 127)


def test_programs() -> None:
    """The operators stay whole in programs."""
    x = torch.randn(SHAPE)
    for got, want in zip(run(captured(Both(), x).graph, [x]), Both()(x), strict=True):
        torch.testing.assert_close(got, want, rtol=torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize(("block", "ops"), [
    ((1, 64), {"dequantize"}), ((40, 64), {"dequantize"}), ((40, 1), {"dequantize"}), ((1, 32), {"dequantize_groups"}),
], ids=str)
def test_weights_keep_a_form_that_products_take(block: tuple[int, ...], ops: set[str]) -> None:
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            counts = [size // extent for size, extent in zip((40, 64), block, strict=True)]
            self.register_buffer("q", torch.randint(-8, 8, (40, 64), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(counts) + 0.1)
            self.register_buffer("zero", torch.zeros(counts, dtype=torch.int8))

        def forward(self) -> Tensor:
            found: Tensor = Q.dequantize_affine(self.q, block, self.scale, self.zero, torch.int8, -8, 7)
            return found

    model = Weight()
    graph = captured(model).graph
    assert {v.op for v in graph.order} - {"constant"} == ops
    torch.testing.assert_close(run(graph, [])[0], model(), rtol=torch.finfo(torch.float32).eps, atol=0)


def test_ranges_may_be_those_of_the_type() -> None:
    call = Call(TensorType(i8, (2, 8)), frozenset())
    x, scale = input_(0, f32, (2, 8)), input_(1, f32, (2,))
    assert affine.quantize(call, x, (1, 8), scale, None, torch.int8).type == affine.quantize(
        call, x, (1, 8), scale, None, torch.int8, -128, 127
    ).type
    with pytest.raises(Unsupported, match="without their range"):
        affine.quantize(call, x, (1, 8), scale, None, torch.int4)
