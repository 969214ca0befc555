"""ONNX files in ONNX Runtime give what the quantized module gives, to within one int8 step, for sizes other than the exported ones too."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sashiko.diagnostics.errors import InputError, Unsupported
from sashiko.platforms.host import host
from sashiko.quant import BF16, ActivationScheme, OpScheme, QuantizedModule, Scheme, export_onnx, load, quantize
from tests.quant.models import Attention, bert, mlp, tokens
from tests.sweeps import swept

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="onnx, onnxscript or onnxruntime is not installed",
)
HALF_DOUBLE = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 writes a product of double and float")
STATIC = Scheme(OpScheme(ActivationScheme("minmax")), operations=("linear", "convolution", "matmul", "attention", "embedding"))
# Without VNNI its products of activations saturate. Those with small weights (`graph.sums16`) do not, as most of ours are there.
EXACT = not host().sums16
AFFINE_ROWS = Scheme(OpScheme(ActivationScheme(signed=False, granularity="row")))


@pytest.fixture(autouse=True, scope="module")
def operations_found_once() -> Iterator[None]:
    """For each file torch gathers all operations of ONNX again, and onnxscript parses their sources, which takes a third of a second."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    found = cache(ONNXRegistry.from_torchlib)

    def again(**options: Any) -> ONNXRegistry:
        registry = copy(found(**options))
        registry.functions = {target: [*functions] for target, functions in registry.functions.items()}  # an export adds its own
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(again))
        yield


def cnn() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


def run(path: Path, batch: dict[str, torch.Tensor], fused: bool = True, nbits: str = "4") -> list[torch.Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", nbits)
    if not fused:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(value) for value in session.run(None, {name: t.numpy() for name, t in batch.items()})]


def kinds(path: Path) -> Counter[str]:
    import onnx

    model = onnx.load(path)
    onnx.checker.check_model(model)
    return Counter(node.op_type for node in model.graph.node)


def steps(small: QuantizedModule, path: Path, batch: dict[str, torch.Tensor], fused: bool = True, nbits: str = "4") -> float:
    """The greatest difference of a result, in int8 steps of that result. fused: with ONNX Runtime's own kernels for integers. nbits: 1 for
    floating point where they multiply with integer weights alone, 4 for int8."""
    with torch.no_grad():
        expected = [t for t in torch.utils._pytree.tree_leaves(small(**batch)) if isinstance(t, torch.Tensor)]
    found = run(path, batch, fused, nbits)
    assert [t.shape for t in found] == [t.shape for t in expected]
    return max(((a - b).abs().max() / (b.abs().max() / 127)).item() for a, b in zip(found, expected, strict=True))


PRESETS = ["int8", "int8-static", "int8-symmetric", pytest.param("int8-dynamic", marks=HALF_DOUBLE), "int8-weight", "int4-weight"]


@pytest.mark.parametrize("preset", PRESETS)
def test_mlp(preset: Any, tmp_path: Path) -> None:
    small = quantize(mlp(), [torch.randn(16, 8)], preset=preset)
    export_onnx(small, tmp_path / "mlp.onnx")
    for rows in (1, 5, 40):
        assert steps(small, tmp_path / "mlp.onnx", {"input": torch.randn(rows, 8)}) < 1
    found = kinds(tmp_path / "mlp.onnx")
    static = preset in ("int8-static", "int8-symmetric")
    assert found["DequantizeLinear"] == (4 if static else 2) and found["QuantizeLinear"] == (2 if static else 0)


def test_sizes_that_the_program_fixes_are_numbers(tmp_path: Path) -> None:
    import onnx

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(14, 4)).eval()
    small = quantize(model, [torch.randn(2, 3, 16, 16), torch.randn(3, 3, 20, 16)], preset="int8-static")
    export_onnx(small, path := tmp_path / "small.onnx")
    graph = onnx.load(path).graph
    values = [*graph.input, *graph.output, *graph.value_info]
    taken, made, *inner = ([dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values)
    assert (taken[1], taken[3], made[1], made[3]) == (3, 16, 8, 4) and all(isinstance(size, str) for size in (taken[0], taken[2]))
    assert taken in inner and not any(str(size).isdecimal() and isinstance(size, str) for shape in (made, *inner) for size in shape)


def test_names_that_are_words_of_python(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict({"class": nn.Linear(8, 4), "lambda": nn.Linear(4, 4)})).eval()
    x = torch.randn(3, 8)
    small = quantize(model, [x], preset="int8-static")
    export_onnx(small, path := tmp_path / "small.onnx")
    assert [item.site.name for item in small.record.sites] == ["class", "lambda"] and steps(small, path, {"input": x}) <= 1



@pytest.mark.parametrize("preset", ["int8", "int4-weight"])
def test_exact_products_with_integer_weights(preset: str, tmp_path: Path) -> None:
    """ONNX Runtime, which rounds the other factor once more by default, can be told not to: then only the order of sums is another one."""
    small = quantize(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).eval(), [torch.randn(2, 5, 32)], preset=preset)
    export_onnx(small, tmp_path / "m.onnx")
    batch = {"input": torch.randn(2, 5, 32)}
    assert steps(small, tmp_path / "m.onnx", batch, nbits="1") < 1e-3


@HALF_DOUBLE
def test_infinity_spoils_its_row_alone(tmp_path: Path) -> None:
    small = quantize(nn.Sequential(nn.Linear(8, 4)).eval(), [torch.randn(3, 8)], preset="int8-dynamic")
    export_onnx(small, tmp_path / "m.onnx")
    x = torch.randn(3, 8)
    x[1, 2] = torch.inf
    found = run(tmp_path / "m.onnx", {"input": x})[0]
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_attention(tmp_path: Path) -> None:
    batch = {"x": torch.randn(3, 5, 16), "mask": torch.tensor([[1, 1, 1, 0, 0]] * 3)}
    small = quantize(Attention().eval(), [batch], preset=STATIC)
    assert {item.site.operation for item in small.record.sites} == {"linear", "matmul"}
    export_onnx(small, tmp_path / "a.onnx")
    other = {"x": torch.randn(2, 7, 16), "mask": torch.ones(2, 7, dtype=torch.int64)}
    assert max(steps(small, tmp_path / "a.onnx", b, EXACT) for b in (batch, other)) < 1


def test_convolutions(tmp_path: Path) -> None:
    small = quantize(cnn(), [torch.randn(2, 3, 16, 16)], preset=STATIC)
    assert [item.site.operation for item in small.record.sites] == ["convolution", "convolution", "linear"]
    export_onnx(small, tmp_path / "c.onnx")
    assert max(steps(small, tmp_path / "c.onnx", {"input": torch.randn(n, 3, 16, 16)}) for n in (1, 3)) < 1


def test_images_of_the_size_that_a_linear_takes(tmp_path: Path) -> None:
    """Height and width hang together by their product: the file is made for those of calibration."""
    convolutions = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
    small = quantize(nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 4)).eval(), [torch.randn(2, 1, 8, 8)], preset=STATIC)
    export_onnx(small, tmp_path / "c.onnx")
    assert max(steps(small, tmp_path / "c.onnx", {"input": torch.randn(n, 1, 8, 8)}) for n in (1, 3)) < 1


def test_images_that_become_small(tmp_path: Path) -> None:
    """What one pixel is left of says nothing of larger images: the file is made for those of calibration, which a saved module knows."""

    class Gated(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x * x.mean((2, 3), keepdim=True).sigmoid()

    layers = [Gated(nn.Conv2d(n, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU()) for n in (3, 8, 8, 8)]
    small = quantize(nn.Sequential(*layers, nn.Conv2d(8, 4, 1)).eval(), [torch.randn(2, 3, 64, 64) for _ in range(2)], preset=STATIC)
    small.save(tmp_path / "small")
    export_onnx(load(tmp_path / "small"), tmp_path / "c.onnx")
    assert max(steps(small, tmp_path / "c.onnx", {"input": torch.randn(2, 3, *size)}) for size in ((64, 64), (96, 80))) < 1


@pytest.mark.parametrize("preset", [STATIC, pytest.param("int8-dynamic", marks=pytest.mark.slow)], ids=["everything", "int8-dynamic"])
def test_bert(preset: Any, tmp_path: Path) -> None:
    small = quantize(bert(), [tokens(3, 9)], preset=preset)
    export_onnx(small, tmp_path / "b.onnx")
    assert max(steps(small, tmp_path / "b.onnx", b, EXACT) for b in (tokens(3, 9), tokens(2, 6))) < 1


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("signed", swept((None, False, True), (False,)), ids=["head alone", "affine", "signed"])
@pytest.mark.parametrize(("cell", "options"), [
    (nn.LSTM, {"bidirectional": True}), (nn.LSTM, {"proj_size": 6}), pytest.param(nn.GRU, {}, marks=pytest.mark.sweep),
    pytest.param(nn.RNN, {"bias": False}, marks=pytest.mark.sweep),
    pytest.param(nn.RNN, {"nonlinearity": "relu", "bidirectional": True}, marks=pytest.mark.sweep),
])
def test_recurrent_layers(cell: type[nn.RNNBase], options: dict[str, Any], signed: bool | None, tmp_path: Path) -> None:
    """Walks through time with the length of the call. What is fed back is rounded as in the module, unless the head alone is quantized.
    Both are not, since ONNX Runtime rounds what goes into products with integer weights once more."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = cell(8, 12, batch_first=True, **options)
            self.head = nn.Linear((self.cells.proj_size or 12) * (1 + self.cells.bidirectional), 8)

        def forward(self, x: torch.Tensor) -> Any:
            out, last = self.cells(x)
            return out, last, self.head(out)

    exact, ways = signed is None, 1 + options.get("bidirectional", False)
    hidden = Scheme(OpScheme(ActivationScheme(signed=bool(signed))), operations=("recurrence",))
    small = quantize(Tagger().eval(), [torch.randn(3, 7, 8)], preset="int8-weight" if exact else hidden, exclude=[cell] if exact else ())
    assert [item.site.operation for item in small.record.sites] == (["linear"] if exact else ["recurrence"] * ways)
    export_onnx(small, tmp_path / "r.onnx")
    assert kinds(tmp_path / "r.onnx")["Scan"] == ways
    for batch, length in ((3, 7), (2, 12)):
        given = {"x": torch.randn(batch, length, 8)}
        assert steps(small, tmp_path / "r.onnx", given) < 1
        pairs = [*zip(run(tmp_path / "r.onnx", given), torch.utils._pytree.tree_leaves(small(**given)), strict=True)]
        assert not exact or all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs[:-1])


def test_examples_may_be_given(tmp_path: Path) -> None:
    small, x = quantize(mlp(), [torch.randn(4, 8)]), torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    marks = dict(vars(x))
    for n, example in enumerate((x, (torch.randn(4, 8),), {"input": torch.randn(4, 8)})):
        export_onnx(small, tmp_path / f"{n}.onnx", example)
        assert vars(x) == marks
        assert steps(small, tmp_path / f"{n}.onnx", {"input": torch.randn(3, 8)}) < 1


def test_what_is_no_example(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="example_inputs is a int"):
        export_onnx(quantize(mlp(), [torch.randn(4, 8)]), tmp_path / "m.onnx", 4)  # type: ignore[arg-type]


def test_bf16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="bf16"):
        export_onnx(quantize(mlp(), [torch.randn(4, 8)], preset=Scheme(BF16)), tmp_path / "m.onnx")


class Typed(nn.Module):
    """A convolution, and a function of what comes out in another type."""

    def __init__(self, inside: torch.dtype, function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.conv, self.inside, self.function = nn.Conv1d(4, 8, 3), inside, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.conv(x).to(self.inside)).to(x.dtype)


BF16_SOMEWHERE = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("outside", "inside"), BF16_SOMEWHERE)
@pytest.mark.parametrize("preset", ["int8", "int8-weight"])
def test_models_that_compute_in_bf16_are_refused(outside: torch.dtype, inside: torch.dtype, preset: str, tmp_path: Path) -> None:
    small = quantize(Typed(inside).to(outside).eval(), [torch.randn(2, 4, 9, dtype=outside)], preset=preset)
    with pytest.raises(Unsupported, match="in bf16") as caught:
        export_onnx(small, tmp_path / "m.onnx")
    assert "test_to_onnx.py:" in caught.value.where and "float()" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_written(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype).eval()
    small = quantize(model, [torch.randn(16, 8, dtype=dtype)], preset="int8-symmetric")
    export_onnx(small, tmp_path / "m.onnx")
    assert steps(small, tmp_path / "m.onnx", {"input": torch.randn(5, 8, dtype=dtype)}) < 1 + 127 * torch.finfo(dtype).eps
    cast = quantize(Typed(torch.float64).eval(), [torch.randn(2, 4, 9)])
    export_onnx(cast, tmp_path / "m.onnx")
    assert steps(cast, tmp_path / "m.onnx", {"x": torch.randn(2, 4, 9)}) < 1


def test_operations_in_f64_that_do_not_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(Typed(torch.float64).double().eval(), [torch.randn(2, 4, 9).double()])
    inside = quantize(Typed(torch.float64, torch.erf).eval(), [torch.randn(2, 4, 9)])
    loaded = quantize(nn.GRU(8, 16).double().eval(), [torch.randn(2, 4, 8).double()])
    for small, operation in ((whole, "Conv"), (inside, "Erf"), (loaded, "GRU")):
        with pytest.raises(Unsupported, match=f"f64.*{operation}") as caught:
            export_onnx(small, tmp_path / "m.onnx")
        assert small is loaded or "test_to_onnx.py:" in caught.value.where
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Unsupported, match=r"f64.*onnxruntime"):
        export_onnx(inside, tmp_path / "m.onnx")


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projections_of_the_hidden_state_are_refused(tmp_path: Path) -> None:
    """Where they are left to PyTorch, as in f64."""
    with pytest.raises(Unsupported, match="proj_size"):
        export_onnx(quantize(nn.LSTM(8, 16, proj_size=4).double().eval(), [torch.randn(3, 5, 8).double()]), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


class Returns(nn.Module):
    """A tensor, or two, with what is none."""

    def __init__(self, given: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.given = nn.Linear(8, 8), given

    def forward(self, x: torch.Tensor) -> Any:
        return self.given(self.fc(x))


@pytest.mark.parametrize(("given", "says"), [
    (lambda y: {"o": [y, y + 1], "n": None, "k": 3}, r"the result\['k'\] is 3, "),
    (lambda y: (y, ["word"]), r"the result\[1\]\[0\] is 'word', "), (lambda y: 0.5, "the result is 0.5, "),
])  # fmt: skip
def test_results_that_are_no_tensors_are_named(given: Callable[[torch.Tensor], Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=says):
        export_onnx(quantize(Returns(given).eval(), [torch.randn(4, 8)]), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_is_none_is_left_out(tmp_path: Path) -> None:
    small = quantize(Returns(lambda y: {"o": [y, y + 1], "n": None}).eval(), [torch.randn(4, 8)], preset="int8-static")
    export_onnx(small, tmp_path / "m.onnx")
    assert steps(small, tmp_path / "m.onnx", {"x": torch.randn(3, 8)}) < 1


def test_an_operation_without_a_form(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(self.fc(x))

    with pytest.raises(Unsupported, match="bessel_j0"):
        export_onnx(quantize(Odd().eval(), [torch.randn(4, 8)]), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_autocast_casts_nothing(tmp_path: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        export_onnx(quantize(mlp(), [torch.randn(4, 8)]), tmp_path / "m.onnx")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = quantize(mlp(), [torch.randn(4, 8)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"sashiko\[onnx\]"):
        export_onnx(small, tmp_path / "m.onnx")
