"""Models whose weights alone are quantized, compiled: against the same model in PyTorch, and what is kept of the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines torch.ops.quantized_decomposed
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.driver.segments import Note

Q = torch.ops.quantized_decomposed
BF16_STEP = 2.0**-8
SUM = 640 * 2.0**-24  # roundings of the longest sum here, in f32


def quantized(weight: torch.Tensor, group: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [n, k] and scales [n, groups]."""
    groups = weight.unflatten(1, (-1, group))
    scales = groups.abs().amax(2) / high
    return (groups / scales.unsqueeze(2)).round().to(torch.int8).flatten(1), scales


class Int8(nn.Module):
    """A linear layer with one scale for each output channel; `transposed` keeps the weight as [k, n]."""

    def __init__(self, n: int, k: int, bias: bool = True, transposed: bool = False) -> None:
        super().__init__()
        integers, scales = quantized(torch.randn(n, k) * k**-0.5, k, 127)
        self.register_buffer("integers", integers.t().contiguous() if transposed else integers)
        self.register_buffer("scales", scales.flatten())
        self.register_buffer("zeros", torch.zeros(n, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(n)) if bias else None
        self.axis = int(transposed)

    def real(self) -> torch.Tensor:
        return Q.dequantize_per_channel(self.integers, self.scales, self.zeros, self.axis, -127, 127, torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.axis and self.bias is not None:
            return torch.addmm(self.bias, x.flatten(0, -2), self.real()).unflatten(0, x.shape[:-1])
        return nn.functional.linear(x, self.real(), self.bias)


class Int4(nn.Module):
    """A linear layer with one scale for each group of neighbours along k."""

    def __init__(self, n: int, k: int, group: int, bias: bool = True, zeros: torch.Tensor | None = None) -> None:
        super().__init__()
        integers, scales = quantized(torch.randn(n, k) * k**-0.5, group, 7)
        self.register_buffer("integers", integers)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.bias = nn.Parameter(torch.randn(n)) if bias else None
        self.group = group

    def real(self) -> torch.Tensor:
        arguments = (self.integers, self.scales, self.zeros, -8, 7, torch.int8, self.group, torch.float32)
        return Q.dequantize_per_channel_group(*arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.real(), self.bias)


class Tied(nn.Module):
    """A table that is embedding and output layer."""

    def __init__(self, table: Int8 | Int4) -> None:
        super().__init__()
        self.table = table

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        return self.table(torch.tanh(nn.functional.embedding(token, self.table.real())))


def close(got: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """limit: relative to the largest element."""
    torch.testing.assert_close(got, expected, rtol=0, atol=limit * float(expected.detach().abs().max()))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "int8": lambda: Int8(70, 100),
    "int8 transposed": lambda: Int8(70, 100, transposed=True),
    "int4": lambda: Int4(70, 192, 64),
    "int4 with zeros": lambda: Int4(70, 96, 32, zeros=torch.zeros(70, 3, dtype=torch.int32)),
    "int4 per channel": lambda: Int4(70, 640, 640),
    # Two sizes of groups in one module, and everything around the products fused into them.
    "mixed": lambda: nn.Sequential(Int8(96, 64), nn.GELU(), Int4(80, 96, 32, bias=False), nn.Tanh(), Int4(33, 80, 8), nn.ReLU()),
}
DEPTHS = {"int8": 100, "int8 transposed": 100, "int4": 192, "int4 with zeros": 96, "int4 per channel": 640, "mixed": 64}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().eval()


def kernels(compiled: sashiko.CompiledModel) -> list[str]:
    return [note.kernel for notes in compiled.built.notes if isinstance(notes, tuple) for note in notes if isinstance(note, Note)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_row_few_and_many(name: str, precision: str) -> None:
    model = built(name)
    for rows in (1, 3, 21):
        x = torch.randn(rows, DEPTHS[name])
        compiled = sashiko.compile(model, (x,), precision=precision, strict=True)
        products = [k for k in kernels(compiled) if k.startswith("gemm")]
        # Activations, and for many rows 4-bit weights, may be rounded to bf16 once in every product.
        close(compiled(x), model(x), 2 * BF16_STEP * len(products) if precision == "bf16" else SUM)
        assert products and all("_i8_" in k or "_i4_" in k for k in products), "no product is of floats alone"


@pytest.mark.parametrize("n, k", [(1, 64), (17, 1), (1, 1)])
def test_weights_with_one_row_or_one_column(n: int, k: int) -> None:
    """The stride of an axis with one element says nothing about how they lie: they are packed once, whatever it is."""
    torch.manual_seed(0)
    layers = [Int8(n, k), nn.Linear(k, n), *([Int4(n, k, 32)] if k > 1 else [])]
    for model in (layer.eval() for layer in layers):
        x = torch.randn(5, k)
        compiled = sashiko.compile(model, (x,), strict=True)
        close(compiled(x), model(x), SUM)
        assert not any("(pack)" in step.label for segment in compiled.executable.plan.segments for step in getattr(segment, "steps", ()))


@pytest.mark.parametrize("name", ["int8", "mixed"])
def test_any_number_of_rows(name: str) -> None:
    model = built(name)
    compiled = sashiko.compile(model, (torch.randn(4, DEPTHS[name]),), dynamic_shapes=({0: Dim("rows")},), strict=True)
    for rows in (2, 9, 40):
        x = torch.randn(rows, DEPTHS[name])
        close(compiled(x), model(x), SUM)


@pytest.mark.parametrize("table", [lambda: Int8(90, 64, False), lambda: Int4(90, 64, 32, False)], ids=["int8", "int4"])
def test_a_tied_table_serves_both_as_integers(table: Callable[[], Int8 | Int4]) -> None:
    torch.manual_seed(0)
    model, token = Tied(table()).eval(), torch.tensor([[3, 89, 0]])
    compiled = sashiko.compile(model, (token,), strict=True)
    close(compiled(token), model(token), SUM)
    held = [source.derive() for source in compiled.executable.plan.constants]
    assert all(t.numel() < 90 * 64 for t in held if t.dtype == torch.float32), "the table is nowhere in f32"


def test_zero_points_and_other_ranges_become_float_weights() -> None:
    """What no kernel multiplies as integers is dequantized once."""
    torch.manual_seed(0)
    model = Int4(40, 64, 32, zeros=torch.full((40, 2), 1, dtype=torch.int32)).eval()
    x = torch.randn(3, 64)
    compiled = sashiko.compile(model, (x,), strict=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert not any("_i4_" in k for k in kernels(compiled))


def test_a_changed_weight_is_packed_again() -> None:
    model = built("int4")
    assert isinstance(model, Int4)
    x = torch.randn(2, 192)
    compiled = sashiko.compile(model, (x,), strict=True)
    compiled(x)
    model.integers.neg_().clamp_(-8, 7)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    model.integers.fill_(8)
    with pytest.raises(InputError, match="4-bit weights go from 8 to 8"):
        compiled(x)


@pytest.mark.parametrize("preset", ["int8-weight", "int4-weight"])
def test_presets_of_the_quantizer_meet_these_kernels(preset: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 60)).eval()
    x = torch.randn(2, 128)
    small = sashiko.quantize(model, [(x,)], preset=preset)
    compiled = sashiko.compile(small, (x,), strict=True)
    torch.testing.assert_close(compiled(x), small(x), rtol=1e-4, atol=1e-5)
    assert sum("_i4_" in k or "_i8_" in k for k in kernels(compiled)) == 2


def test_scales_that_come_with_each_call() -> None:
    """Which are no numbers of a weight that is packed ahead."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Int4(70, 192, 64)

        def forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            weight = Q.dequantize_per_channel_group(self.layer.integers, scales, None, -8, 7, torch.int8, 64, torch.float32)
            return nn.functional.linear(x, weight)

    model = Scaled().eval()
    arguments = torch.randn(3, 192), torch.rand(70, 3)
    close(sashiko.compile(model, arguments, strict=True)(*arguments), model(*arguments), SUM)
