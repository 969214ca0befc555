"""The rows of torchao's affine operators against the operators themselves: the same integers, the same numbers."""

from __future__ import annotations

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
from sashiko.graph.types import TensorType, f32, i8

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


class Both(nn.Module):
    """A round trip with parameters that come with the call, or are the model's."""

    def __init__(self, block: tuple[int, ...], out: torch.dtype, scale: Tensor | None = None, zero: Tensor | None = None) -> None:
        super().__init__()
        self.block, self.out = block, out
        self.scale, self.zero = scale, zero

    def forward(self, x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero = (scale if self.scale is None else self.scale), (zero if self.zero is None else self.zero)
        q = Q.quantize_affine(x, self.block, scale, zero, torch.int8, -128, 127)
        return q, Q.dequantize_affine(q, self.block, scale, zero, torch.int8, -128, 127, output_dtype=self.out)


@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
], ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "affine"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_round_trips(block: tuple[int, ...], zeros: bool, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """To the bit, in the types in which torch computes."""
    kind, of_scale = dtypes
    x, given = torch.randn(SHAPE).to(kind), parameters(block, of_scale, zeros)
    for model in (Both(block, kind), Both(block, kind, *given)):
        program = captured(model, x, *given)
        q, real = run(program.graph, [x, *given])
        want_q, want = model(x, *given)
        assert torch.equal(q, want_q)
        torch.testing.assert_close(real, want, rtol=torch.finfo(kind).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_chosen_parameters(block: tuple[int, ...], mapping: str, dtype: torch.dtype) -> None:
    """To the bit, with rows that are zero, of one sign, and small."""

    class Choose(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = Q.choose_qparams_affine(x, Q.MappingType[mapping], block, torch.int8, **self.options)
            return found

    x = torch.randn(SHAPE).to(dtype)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 0, x[0, 1].abs(), -x[0, 2].abs(), x[0, 3] * 1e-7
    plain: dict[str, Any] = {"zero_point_dtype": torch.int8}
    kept = {**plain, "scale_dtype": torch.float32, "keepdim": block != (1, 1, 1)}  # torch takes no axes for all of them
    for options in (plain, {"eps": 2.0**-20, "quant_min": -8, "quant_max": 7}, kept):
        model = Choose(**options)
        graph = captured(model, x).graph
        assert not any(v.op == "aten" for v in graph.order)
        for got, want in zip(run(graph, [x]), model(x), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)


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
