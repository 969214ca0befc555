"""Models whose weights torchao's `quantize_` has quantized: products of integers, or of integers and floats, in every way to compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sashiko
from sashiko.diagnostics.errors import Unsupported
from sashiko.driver.model import CompiledModel
from sashiko.driver.segments import Note
from sashiko.graph.capture import from_exported
from sashiko.graph.lower import PART_OF
from sashiko.runtime.plan import AtenStep

Q: Any = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:::torchao", "ignore:::torch")
DEPTH, WIDTH = 96, 64
GROUP = 32


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config(name: str) -> Any:
    axis, group = Q.PerAxis(0), Q.PerGroup(GROUP)
    return {
        "weights": Q.Int8WeightOnlyConfig,
        "dynamic": Q.Int8DynamicActivationInt8WeightConfig,
        "weights, any bits": lambda: Q.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=axis),
        "weights, 4 bits": lambda: Q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "dynamic, any bits": lambda: Q.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=axis),
        "dynamic, 4 bits": lambda: Q.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=group),
    }[name]()


# The types of the operands, in f32 and in bf16; whether bytes have a sign is torchao's choice, and the compiler's, for each machine.
PRODUCTS = {
    "weights": ("f32_i8", "bf16_i8"),
    "dynamic": ("int_i8", "int_i8"),
    "weights, any bits": ("f32_i8", "bf16_i8"),
    "weights, 4 bits": ("f32_i4", "bf16_i4"),
    "dynamic, any bits": ("int_i8", "int_i8"),
    "dynamic, 4 bits": ("f32_i4", "bf16_i4"),
}


def quantized(name: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(DEPTH, WIDTH, bias)).eval().to(dtype)
    Q.quantize_(model, config(name))
    return model, torch.randn(2, 5, DEPTH, dtype=dtype)


def notes(compiled: CompiledModel) -> list[Note]:
    assert compiled.built is not None
    return [note for segment in compiled.built.notes if not isinstance(segment, AtenStep) for note in segment]


def products(compiled: CompiledModel) -> list[str]:
    """The operand types of the products."""
    found = ["_".join(n.kernel.split("_")[2:4]) for n in notes(compiled) if "linear" in n.label]
    return [re.sub("^[iu]8_", "int_", each) for each in found]


def allowed(name: str, model: nn.Module, x: Tensor) -> Tensor:
    """The rounding of results and of what is multiplied and, where activations are rounded to integers, the next one for one of a row."""
    wide = nn.functional.linear(torch.eye(DEPTH, dtype=x.dtype), model[0].weight).double()  # type: ignore[index]
    rounding = 4 * torch.finfo(x.dtype).eps * (x.abs().double() @ wide.abs() + 1)
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)).double().abs() / 127
    return rounding + step * wide.abs().amax(0) * ("dynamic" in name)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_of_integers(name: str, dtype: torch.dtype) -> None:
    model, x = quantized(name, dtype)
    want = model(x)
    compiled = sashiko.compile(model, (x,), strict=True)
    assert products(compiled) == [PRODUCTS[name][dtype == torch.bfloat16]]
    assert ((compiled(x) - want).abs() <= allowed(name, model, x)).all()


@torch.no_grad()
@pytest.mark.parametrize("name", PRODUCTS)
def test_without_a_bias_and_at_other_sizes(name: str) -> None:
    model, x = quantized(name, bias=False)
    batch = torch.export.Dim("batch", max=64)
    compiled = sashiko.compile(model, (x,), dynamic_shapes=({0: batch},), strict=True)
    for size in (1, 3, 64):
        x = torch.randn(size, 5, DEPTH)
        assert ((compiled(x) - model(x)).abs() <= allowed(name, model, x)).all()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CompiledModel]:
    """Every model that Dynamo has compiled."""
    found: list[CompiledModel] = []
    kept = CompiledModel.__init__

    def init(self: CompiledModel, *args: Any, **kwargs: Any) -> None:
        kept(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(CompiledModel, "__init__", init)
    return found


# Dynamo hands out torchao's arithmetic, which for scales of rows is not recognized.
WITH_DYNAMO = {**PRODUCTS, "dynamic, any bits": ("f32_i8", "bf16_i8")}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_dynamo(name: str, dtype: torch.dtype, made: list[CompiledModel]) -> None:
    model, x = quantized(name, dtype)
    compiled = torch.compile(model, backend="sashiko", options={"strict": True})
    assert ((compiled(x).double() - model(x).double()).abs() <= allowed(name, model, x)).all()
    assert [products(each) for each in made] == [[WITH_DYNAMO[name][dtype == torch.bfloat16]]]


@torch.no_grad()
def test_zero_points_that_were_zero_are_watched() -> None:
    model, x = quantized("weights, 4 bits")
    compiled = torch.compile(model, backend="sashiko")
    compiled(x)
    model[0].weight.zero_point.add_(1)  # type: ignore[index,union-attr,operator]
    assert ((compiled(x) - model(x)).abs() <= allowed("weights, 4 bits", model, x)).all()


@torch.no_grad()
def test_other_integers_that_were_zero_may_change() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.arange(12).view(3, 4))
            self.register_buffer("first", torch.zeros(3, 1, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.places - self.first)  # type: ignore[operator,no-any-return]

    model, x = Positions().eval(), torch.randn(3, 4)
    compiled = sashiko.compile(model, (x,))
    assert torch.equal(compiled(x), model(x))
    model.first.fill_(5)  # type: ignore[operator]
    assert torch.equal(compiled(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("name", ["weights", "dynamic", "weights, any bits"])
def test_dynamo_freezes_what_weights_are_made_of(name: str, made: list[CompiledModel]) -> None:
    """They are packed once, and other ones of the same model are noticed."""
    model, x = quantized(name)
    compiled = torch.compile(model, backend="sashiko")
    compiled(x)
    assert [products(each) for each in made] == [[PRODUCTS[name][0]]]
    model[0].weight.qdata.neg_()  # type: ignore[index,union-attr,operator]
    model[0].weight.scale.mul_(2)  # type: ignore[index,union-attr,operator]
    assert ((compiled(x) - model(x)).abs() <= allowed(name, model, x)).all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["weights", "dynamic"])
def test_weights_that_change_are_packed_again(name: str) -> None:
    model, x = quantized(name)
    compiled = sashiko.compile(model, (x,))
    compiled(x)
    model[0].weight.qdata.neg_()  # type: ignore[index,union-attr,operator]
    model[0].weight.scale.mul_(2)  # type: ignore[index,union-attr,operator]
    assert ((compiled(x) - model(x)).abs() <= allowed(name, model, x)).all()


@torch.no_grad()
@pytest.mark.parametrize(("name", "sites"), [
    ("weights", ["0.weight.qdata", "2"]), ("weights, 4 bits", ["0.linear", "2"]),
    ("dynamic", ["2"]), ("dynamic, 4 bits", ["0.linear", "2"]),
])
def test_the_other_layers_can_be_quantized(name: str, sites: list[str]) -> None:
    """What torchao rounded to integers of 8 or 4 bits is rounded once more at most; its own integer products stay."""
    model = nn.Sequential(nn.Linear(DEPTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 7)).eval()
    Q.quantize_(model, config(name), filter_fn=lambda module, path: path == "0")
    batches = [torch.randn(16, DEPTH) for _ in range(2)]
    small = sashiko.quantize(model, batches)
    assert [found.site.name for found in small.record.sites] == sites
    compiled = sashiko.compile(small, (batches[0],), strict=True)
    assert products(compiled)[-1] == "int_i8"
    want = model(batches[0])
    for got in (small(batches[0]), compiled(batches[0])):
        assert (got - want).norm() <= 0.03 * want.norm()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, DEPTH), nn.Linear(DEPTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("name", ["weights", "weights, any bits", "weights, 4 bits"])
def test_tables_are_integers_too(name: str) -> None:
    """`Int8Tensor` leaves a lookup in the exported program, which only tracing it takes apart."""
    model, words = Words().eval(), torch.randint(50, (2, 7))
    Q.quantize_(model, config(name), filter_fn=lambda module, path: isinstance(module, (nn.Embedding, nn.Linear)))
    compiled = sashiko.compile(model, (words,), strict=True)
    assert products(compiled) == [PRODUCTS[name][0]] and all("_f32_f32_f32" not in note.kernel for note in notes(compiled))
    torch.testing.assert_close(compiled(words), model(words))
    small = sashiko.quantize(model, [words])
    got, want = sashiko.compile(small, (words,), strict=True)(words), model(words)
    assert (got - want).norm() <= 0.03 * want.norm()


@torch.no_grad()
def test_what_was_quantized_twice_is_saved(tmp_path: Path) -> None:
    model, x = quantized("weights")
    small = sashiko.quantize(model, [x])
    small.save(tmp_path / "small.sashiko")
    assert torch.equal(sashiko.load(tmp_path / "small.sashiko")(x), small(x))


@torch.no_grad()
def test_a_weight_that_is_used_as_a_whole() -> None:
    """What `functional` has not taken apart is refused."""
    model, x = quantized("weights")
    program = torch.export.export(model, (x,))
    for node in program.graph.find_nodes(op="call_function", target=PART_OF):
        node.replace_all_uses_with(node.args[0])
    with pytest.raises(Unsupported, match=r"the Int8Tensor 0.weight is used as a whole"):
        from_exported(program, decomposed=True)


@torch.no_grad()
def test_a_product_of_integer_matrices() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randint(-128, 128, (40, 24), dtype=torch.int8))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return torch._int_mm(x, self.w), torch._int_mm(x, y), torch._int_mm(x, y.t().contiguous().t())  # type: ignore[arg-type]

    model = Products().eval()
    x, y = torch.randint(-128, 128, (33, 40), dtype=torch.int8), torch.randint(-128, 128, (40, 16), dtype=torch.int8)
    compiled = sashiko.compile(model, (x, y), strict=True)
    for got, want in zip(compiled(x, y), model(x, y), strict=True):
        assert torch.equal(got, want)
