"""Graphs of quantize and dequantize operators, compiled: which kernels they become, and that they compute what the simulation does."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
import torch.nn.functional as F
from torch import Tensor, nn

import sashiko
from sashiko.driver.model import CompiledModel
from sashiko.driver.segments import Note
from sashiko.graph.types import i8
from sashiko.kernels.table import unsigned_step
from sashiko.platforms.host import host
from sashiko.runtime.plan import AtenStep

Q = torch.ops.quantized_decomposed
EPS = torch.finfo(torch.float32).eps
ROWS = "u8" if unsigned_step(host()) else "i8"  # what the host's products read


def per_token(x: Tensor) -> Tensor:
    scale, zero = Q.choose_qparams_per_token(x, torch.int8)
    q = Q.quantize_per_token(x, scale, zero, -127, 127, torch.int8)
    return Q.dequantize_per_token(q, scale, zero, -127, 127, torch.int8, torch.float32)  # type: ignore[no-any-return]


def per_token_asymmetric(x: Tensor) -> Tensor:
    scale, zero = Q.choose_qparams_per_token_asymmetric(x, torch.int8)
    q = Q.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
    return Q.dequantize_per_token(q, scale, zero, -128, 127, torch.int8, torch.float32)  # type: ignore[no-any-return]


def per_tensor(x: Tensor) -> Tensor:
    scale, zero = Q.choose_qparams.tensor(x, 0, 255, 2.0**-12, torch.uint8)
    q = Q.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
    return Q.dequantize_per_tensor.tensor(q, scale, zero, 0, 255, torch.uint8)  # type: ignore[no-any-return]


SCHEMES = {"token": per_token, "asymmetric token": per_token_asymmetric, "tensor": per_tensor}


def static(x: Tensor, scale: float, zero: int = 0, unsigned: bool = False) -> Tensor:
    low, high, dtype = (0, 255, torch.uint8) if unsigned else (-127, 127, torch.int8)
    return Q.dequantize_per_tensor(Q.quantize_per_tensor(x, scale, zero, low, high, dtype), scale, zero, low, high, dtype)  # type: ignore[no-any-return]


class Weight(nn.Module):
    """An int8 weight with one scale for each index of the first axis, and what it means."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        weight = torch.randn(shape)
        scale = weight.flatten(1).abs().amax(1) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.zeros(shape[0], dtype=torch.int64))
        self.register_buffer("integers", (weight / scale.view(-1, *(1,) * (len(shape) - 1))).round().to(torch.int8))

    def forward(self) -> Tensor:
        return Q.dequantize_per_channel(self.integers, self.scale, self.zero, 0, -127, 127, torch.int8)  # type: ignore[no-any-return]


class Normalized(nn.Module):
    """LayerNorm, and linears that read its result quantized in each call."""

    def __init__(self, scheme: str, width: int, outputs: int, linears: int = 1) -> None:
        super().__init__()
        self.scheme, self.norm, self.bias = SCHEMES[scheme], nn.LayerNorm(width), nn.Parameter(torch.randn(outputs))
        self.weights = nn.ModuleList(Weight(outputs, width) for _ in range(linears))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q = self.scheme(self.norm(x))
        return tuple(F.relu(F.linear(q, weight(), self.bias)) for weight in self.weights)


def notes(compiled: CompiledModel) -> list[Note]:
    """The kernels in order."""
    assert compiled.built is not None
    return [note for segment in compiled.built.notes if not isinstance(segment, AtenStep) for note in segment]


def kinds(compiled: CompiledModel) -> list[str]:
    """loop, or the types of a product, for each kernel."""
    return [n.kernel[:4] if n.kernel.startswith("loop") else "_".join(n.kernel.split("_")[:4]) for n in notes(compiled)]


def within_a_step(got: Tensor, want: Tensor, step: float) -> bool:
    """Equal but for roundings of the sums, or where one integer of a row came out on the other side of a tie."""
    return bool(((got - want).abs() <= step + 64 * EPS * want.abs().max()).all())


def step_of(model: Normalized, x: Tensor) -> float:
    """What one step of one quantized activation is worth in the result: the greatest scale times the greatest weight."""
    y = model.norm(x)
    return float((y.amax(-1) - y.amin(-1)).max() / 127 * max(float(w().abs().max()) for w in model.weights))


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["token", "asymmetric token"])
def test_normalization_and_quantization_of_rows_are_one_loop(scheme: str) -> None:
    """One loop computes the rows, their scales and their integers; one product does the rest. It reads the scales as they are stored."""
    model, x = Normalized(scheme, 64, 48).eval(), torch.randn(3, 5, 64)
    compiled = sashiko.compile(model, (x,))
    assert kinds(compiled) == ["loop", f"gemm_i32_{ROWS}_i8"]
    loop, product = notes(compiled)
    assert {"rsqrt", "reduce", "quantize", "div"} <= set(loop.ops)
    assert {"int_linear", "mul", "add", "relu"} <= set(product.ops) and not {"reduce", "div", "maximum"} & set(product.ops)
    assert within_a_step(compiled(x)[0], model(x)[0], step_of(model, x))


@torch.no_grad()
def test_rows_along_another_axis_are_integer_products() -> None:
    """A mixer: the permutation before the product goes to the integers, wherever the rows' ranges are found."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.places, self.channels = nn.LayerNorm(48), nn.Linear(32, 32), nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.places(self.norm(x).transpose(1, 2)).transpose(1, 2)
            return x + torch.relu(self.channels(x))

    model, x = Mixer().eval(), torch.randn(2, 32, 48)
    small = sashiko.quantize(model, [x], preset="int8")
    fast = sashiko.compile(small, (x,), strict=True)
    assert [kind for kind in kinds(fast) if kind != "loop"] == ["gemm_i32_i8_i8", f"gemm_i32_{ROWS}_i8"]
    widest = max(float(y.abs().max()) for y in (model.norm(x), small(x), x)) * 2 / 255
    largest = max(float(linear.weight.abs().max()) for linear in (model.places, model.channels))
    assert within_a_step(fast(x), small(x), widest * largest)


@torch.no_grad()
def test_one_scale_of_each_call() -> None:
    """The range of all rows is found by row first; then there are the quantization and the product."""
    model, x = Normalized("tensor", 64, 48).eval(), torch.randn(3, 5, 64)
    compiled = sashiko.compile(model, (x,))
    assert kinds(compiled)[-1] == "gemm_i32_u8_i8" and kinds(compiled)[:-1] == ["loop"] * (len(kinds(compiled)) - 1)
    assert within_a_step(compiled(x)[0], model(x)[0], step_of(model, x))


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linears_share_one_quantization_at_any_size(scheme: str) -> None:
    model, x = Normalized(scheme, 32, 16, linears=3).eval(), torch.randn(4, 6, 32)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=512)},)
    compiled = sashiko.compile(model, (x,), dynamic_shapes=shapes)
    assert sum("quantize" in n.ops for n in notes(compiled)) == 1 and sum("int_linear" in n.ops for n in notes(compiled)) == 3
    for batch, length in ((4, 6), (1, 1), (2, 33)):
        x = torch.randn(batch, length, 32)
        for got, want in zip(compiled(x), model(x), strict=True):
            assert within_a_step(got, want, step_of(model, x))


@torch.no_grad()
def test_dynamic_quantization_through_torch_compile() -> None:
    model, x = Normalized("token", 32, 16).eval(), torch.randn(4, 6, 32)
    got = torch.compile(model, backend="sashiko")(x)[0]
    assert within_a_step(got, model(x)[0], step_of(model, x))


class Convolution(nn.Module):
    """Quantized data, quantized channels, quantized result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = Weight(6, 3, 3, 3), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return static(F.relu(F.conv2d(static(x, 0.02, 128, True), self.weight(), self.bias, padding=1)), 0.05, 0, True)


@torch.no_grad()
def test_a_convolution_is_an_integer_product_over_windows() -> None:
    """The image is quantized and padded with its zero point at once; the result is quantized where it is computed, to integers that are
    no less than that of zero: there is no relu."""
    model, x = Convolution().eval(), torch.randn(2, 3, 9, 9)
    compiled = sashiko.compile(model, (x,), strict=True)
    assert kinds(compiled) == ["loop", "gemm_i32_u8_i8", "loop"]
    assert {"pad", "quantize"} <= set(notes(compiled)[0].ops) and {"int_linear", "quantize"} <= set(notes(compiled)[1].ops)
    assert "relu" not in notes(compiled)[1].ops
    difference = (compiled(x) - model(x)).abs()
    # An activation that PyTorch's sum in floating point rounds to the other side of a half is one step off.
    assert difference.max() <= 0.05 * (1 + EPS) and (difference > 0).float().mean() <= 0.01


class Table(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = Weight(rows, width)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight())


@torch.no_grad()
def test_an_embedding_reads_bytes() -> None:
    """The table in memory stays as it is in the model: int8, and one scale for each row."""
    model, index = Table(50, 16).eval(), torch.randint(0, 50, (3, 7))
    compiled = sashiko.compile(model, (index,))
    assert kinds(compiled) == ["loop"] and torch.equal(compiled(index), model(index))
    assert compiled.built is not None
    assert {v.dtype for v in compiled.built.graph.order if v.shape == (50, 16)} == {i8}


class Product(nn.Module):
    """x @ y of quantized activations."""

    def __init__(self, unsigned: tuple[bool, bool], transposed: bool) -> None:
        super().__init__()
        self.unsigned, self.transposed = unsigned, transposed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = (static(t, 0.03, 120 if u else 0, u) for t, u in zip((x, y), self.unsigned, strict=True))
        return left @ (right.transpose(-1, -2) if self.transposed else right)


@torch.no_grad()
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("unsigned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_two_quantized_activations(unsigned: tuple[bool, bool], transposed: bool) -> None:
    """The right one in signed integers: where the model quantizes it to unsigned ones, both the integers and their zero are 128 less."""
    model = Product(unsigned, transposed).eval()
    x, y = torch.randn(2, 3, 5, 32), torch.randn(2, 3, 9, 32) if transposed else torch.randn(2, 3, 32, 9)
    compiled = sashiko.compile(model, (x, y))
    assert kinds(compiled)[-1] == f"gemm_i32_{'u8' if unsigned[0] else 'i8'}_i8"
    # Integers are summed exactly here and in f32, 32 products of at most 255 * 127 each, there: 2**20 at most, which f32 holds.
    assert within_a_step(compiled(x, y), model(x, y), 0.0)


class Padded(nn.Module):
    """The right operand is padded as integers, with something that no quantization gives."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = F.pad(Q.quantize_per_tensor(y, 0.03, 120, 0, 255, torch.uint8), (1, 0), value=7)
        return static(x, 0.03) @ Q.dequantize_per_tensor(q, 0.03, 120, 0, 255, torch.uint8)  # type: ignore[no-any-return]


@torch.no_grad()
def test_unsigned_right_operands_from_elsewhere_stay_in_floating_point() -> None:
    model, x, y = Padded().eval(), torch.randn(3, 12, 32), torch.randn(3, 32, 9)
    compiled = sashiko.compile(model, (x, y))
    assert kinds(compiled)[-1] == "gemm_f32_f32_f32"
    assert within_a_step(compiled(x, y), model(x, y), 0.0)


class Attention(nn.Module):
    """Attention of quantized q, k and v: in one operation, or spelled out with quantized probabilities."""

    def __init__(self, spelled: bool) -> None:
        super().__init__()
        self.spelled = spelled

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (static(t, 0.03) for t in (q, k, v))
        if not self.spelled:
            return F.scaled_dot_product_attention(q, k, v)
        weights = static(torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1), 1 / 255, 0, True)
        return static((weights @ v).permute(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1), 0.02)


@torch.no_grad()
def test_attention_of_quantized_operands_is_correct() -> None:
    model, operands = Attention(False).eval(), [torch.randn(2, 4, n, 16) for n in (7, 9, 9)]
    compiled = sashiko.compile(model, tuple(operands))
    assert "attention" in notes(compiled)[-1].ops
    assert within_a_step(compiled(*operands), model(*operands), 0.0)


@torch.no_grad()
def test_attention_spelled_out_exchanges_integers() -> None:
    """Scores and probabilities times values are integer products; the softmax between them is one loop that ends in integers, and the
    result is quantized as it is stored, heads side by side."""
    model, operands = Attention(True).eval(), [torch.randn(2, 4, n, 16) for n in (7, 9, 9)]
    compiled = sashiko.compile(model, tuple(operands))
    products = [n for n in notes(compiled) if "int_matmul" in n.ops]
    assert [n.kernel.split("_")[2] for n in products] == ["i8", "u8"] and "quantize" in products[1].ops
    assert sum({"exp_weight", "quantize"} <= set(n.ops) for n in notes(compiled)) == 1
    # One probability may round to a neighbour, 1/255 of a value of at most 127 * 0.03, and then the result to its neighbour.
    assert within_a_step(compiled(*operands), model(*operands), 127 * 0.03 / 255 + 0.02)


@pytest.mark.parametrize("preset", ["int8", "int8-dynamic"])
@pytest.mark.parametrize("layer", [nn.Linear(16, 8), nn.LSTM(16, 8, batch_first=True)], ids=["linear", "lstm"])
def test_infinity_spoils_its_row_alone(layer: nn.Module, preset: str) -> None:
    """It has no scale: the row is NaN, as in the simulation, and no infinity of any sign."""
    x = torch.randn(4, 3, 16)
    quantized = sashiko.quantize(layer.eval(), [x], preset=preset)
    compiled = sashiko.compile(quantized, (x,))
    for bad in (torch.inf, -torch.inf, 3e38):
        spoilt = x.clone()
        spoilt[1, 0, 3:5] = bad
        found, expected = (each[0] if isinstance(each, tuple) else each for each in (compiled(spoilt), quantized(spoilt)))
        assert torch.equal(found.isnan(), expected.isnan()) and found[1, 0].isnan().all() == (bad != 3e38)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-2, atol=1e-2)
