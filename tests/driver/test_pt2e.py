"""Models that torchao's PT2E quantized for x86, compiled: linears and convolutions on int8 products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.driver.model import CompiledModel
from sashiko.driver.segments import Note
from sashiko.runtime.plan import AtenStep

pt2e: Any = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e", reason="torchao is not installed")
x86: Any = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer", reason="this torchao has no quantizer for x86")

pytestmark = pytest.mark.filterwarnings("ignore:::torchao", "ignore:::torch")
EPS = torch.finfo(torch.float32).eps


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.inner(x)))  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.pool, self.outer = nn.MaxPool2d(2), nn.Linear(8 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.outer(torch.flatten(self.pool(x), 1))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {"layers": (Layers, (4, 32)), "convolutions": (Convolutions, (2, 3, 16, 16))}


def quantized(name: str, dynamic: bool, folded: bool = True) -> tuple[nn.Module, Tensor]:
    """The converted model, as PT2E hands it out, and an input."""
    kind, shape = MODELS[name]
    exported = torch.export.export(kind().eval(), (torch.randn(shape),)).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    prepared = pt2e.prepare_pt2e(exported, quantizer)
    for _ in range(4):
        prepared(torch.randn(shape))
    converted: nn.Module = pt2e.convert_pt2e(prepared, fold_quantize=folded)
    return converted, torch.randn(shape)


def notes(compiled: CompiledModel) -> list[Note]:
    assert compiled.built is not None
    return [note for segment in compiled.built.notes if not isinstance(segment, AtenStep) for note in segment]


def products(compiled: CompiledModel) -> list[str]:
    """The operand types of the products."""
    return ["_".join(n.kernel.split("_")[2:4]) for n in notes(compiled) if "linear" in n.label]


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_linears_and_convolutions_are_integer_products(name: str, dynamic: bool) -> None:
    """PyTorch quantizes the images of convolutions for static ranges only; otherwise their weights alone are integers."""
    model, x = quantized(name, dynamic)
    compiled = sashiko.compile(model, (x,), strict=True)
    convolutions = [] if name == "layers" else ["f32_i8" if dynamic else "u8_i8"] * 2
    assert products(compiled) == [*convolutions, *["u8_i8"] * (2 if name == "layers" else 1)]
    got, want = compiled(x), model(x)
    assert ((got - want).abs() <= allowed(model, x)).all()
    assert all(text in compiled.explain() for text in ("int_linear", "row_zero_after_linear" if dynamic else "quantized_linear"))


def allowed(model: nn.Module, x: Tensor) -> float:
    """A result may differ by the roundings of its sum, and by one step of one activation of the last layer: a scale times a weight."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Watch(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is torch.ops.aten.linear.default:
                seen.append((args[0], args[1]))
            return super().call_function(target, args, kwargs)

    assert isinstance(model, torch.fx.GraphModule)
    Watch(model).run(x)
    activation, weight = seen[-1]
    one = float(activation.unique().diff().min() * weight.abs().max())
    return one + 64 * EPS * float((activation.abs() @ weight.abs().t()).max())


@torch.no_grad()
def test_weights_that_were_not_folded() -> None:
    """The model holds f32 weights and quantizes them in each call; here they are integers once."""
    model, x = quantized("layers", False, folded=False)
    compiled = sashiko.compile(model, (x,))
    assert products(compiled) == ["u8_i8"] * 2 and len(notes(compiled)) == 3
    assert ((compiled(x) - model(x)).abs() <= allowed(model, x)).all()


@torch.no_grad()
def test_a_changed_scale_is_noticed() -> None:
    model, x = quantized("layers", False)
    compiled = sashiko.compile(model, (x,))
    compiled(x)
    next(b for n, b in model.named_buffers() if n.startswith("_scale")).mul_(2)
    with pytest.raises(InputError, match="changed after the model was compiled"):
        compiled(x)


def test_training_mode_is_refused_of_modules_that_have_one() -> None:
    """An exported graph has no modes and is always marked as training; a module that is marked so means it."""
    graph = torch.fx.symbolic_trace(Layers().train())
    with pytest.raises(InputError, match="training mode"):
        sashiko.compile(graph, (torch.randn(4, 32),))


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "least", "most", "zero"), [(torch.uint8, 0, 255, 117), (torch.int8, -128, 127, -3), (torch.int8, -127, 127, 0)]
)
def test_bytes_that_come_with_the_call(dtype: torch.dtype, least: int, most: int, zero: int) -> None:
    """A tensor of bytes holds some of all there are: where less of them are allowed, it is not known that those come."""
    q = torch.ops.quantized_decomposed

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Buffer(torch.randint(-127, 128, (16, 8, 3, 3), dtype=torch.int8))
            self.scales, self.zeros = nn.Buffer(torch.rand(16) + 0.1), nn.Buffer(torch.zeros(16, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            weight = q.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
            return torch.conv2d(q.dequantize_per_tensor(x, 0.021, zero, least, most, dtype), weight, padding=1)

    model, x = Inner().eval(), torch.randint(least, most + 1, (2, 8, 9, 11), dtype=dtype)
    x.flatten()[: most - least + 1] = torch.arange(least, most + 1, dtype=dtype)
    compiled = sashiko.compile(model, (x,), strict=True)
    assert products(compiled) == ["f32_i8" if least == -127 else "u8_i8" if dtype == torch.uint8 else "i8_i8"]
    magnitudes = torch.conv2d((x.double() - zero).abs() * 0.021, (model.weight.double() * model.scales.view(-1, 1, 1, 1)).abs(), padding=1)
    assert ((compiled(x) - model(x)).abs() <= 80 * EPS * magnitudes).all()
