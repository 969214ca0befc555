"""A quantized layer for models that look at its weight: it reads as the one that it is in the place of, in floating point."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.quant import QuantizedLinear, experts, quantize_

weights = pytest.mark.parametrize("preset", ["int8-weight", "int4-weight"])
types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Casts(nn.Module):
    """What is called with the type of a layer's weight, as heads are, and a weight that is multiplied without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.steps = nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x.to(self.head.weight.dtype))
        return (self.steps.weight @ y.mT).mT + self.steps.bias


@torch.no_grad()
@weights
@types
def test_models_that_cast_to_the_type_of_a_weight_or_read_it(preset: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Casts().eval().to(dtype), torch.randn(4, 64, dtype=dtype)
    plain = model(x)
    quantize_(model, preset)
    expected = model(x)
    assert model.head.weight.dtype == expected.dtype == dtype
    assert (expected - plain).norm() < (0.02 if preset == "int8-weight" else 0.15) * plain.norm()
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for call in (sashiko.compile(model, (x,)), torch.compile(model, backend="sashiko")):
        torch.testing.assert_close(call(x), expected, rtol=close, atol=close)


class Written(Casts):
    """Writes into a weight in its first call."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write, self.is_written = write, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_written:
            self.write(self.head.weight)
            self.is_written = True
        return super().forward(x)


def _first_row(weight: Tensor) -> None:
    weight[0] = 0.0


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda w: w.div_(2),
    "operator": lambda w: operator.imul(w, 2),
    "power": lambda w: operator.ipow(w, 2),
    "remainder": lambda w: operator.imod(w, 2),
    "floor": lambda w: operator.ifloordiv(w, 2),
    "data": lambda w: w.data.clamp_(-0.1, 0.1),
    "data of a view": lambda w: w.t().detach()[:3].data.zero_(),
    "element": _first_row,
    "function": lambda w: nn.functional.relu(w, inplace=True),
    "several": lambda w: torch._foreach_mul_([w], 2.0),
    "out": lambda w: torch.add(w, 1, out=w),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_into_a_weight_is_not_lost(how: str, mode: Callable[[], AbstractContextManager[None]]) -> None:
    x = torch.randn(4, 64)
    with mode():
        model, plain = Written(WRITES[how]).eval(), Written(WRITES[how]).eval()
        quantize_(model, "int8-weight")
        calls: dict[str, Callable[[], object]] = {
            "eager": lambda: model(x),
            "compile": lambda: sashiko.compile(model, (x,)),
            "quantize": lambda: sashiko.quantize(model, [x], progress=False),
            "backend": lambda: torch.compile(model, backend="sashiko")(x),
        }
        for call in calls.values():
            torch._dynamo.reset()
            with pytest.raises(Exception, match="writes into the weight of a quantized layer"):
                call()
            assert not model.is_written
        expected = plain(x)
        quantize_(plain, "int8-weight")
        assert (plain(x) - expected).norm() < 0.02 * expected.norm()


def test_what_is_computed_of_a_weight_is_like_any_tensor() -> None:
    model, x = Casts().eval(), torch.randn(4, 64, requires_grad=True)
    quantize_(model, "int8-weight")
    weight = model.head.weight
    assert type(weight * 2) is type(weight.clone()) is type(x @ weight.t()) is Tensor
    (weight * 2).add_(1).mul_(weight)
    batched = torch.func.vmap(model)(x[None])
    torch.testing.assert_close(batched[0], model(x))
    batched.sum().backward()
    assert x.grad is not None and x.grad.norm() > 0


@torch.no_grad()
@weights
def test_the_weight_is_what_is_multiplied(preset: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 32)).eval(), torch.randn(4, 64)
    before = model[0].weight.detach().clone()
    quantize_(model, preset)
    layer = model[0]
    assert isinstance(layer, QuantizedLinear) and layer.integers.dtype == torch.int8
    assert layer.weight.shape == before.shape and (layer.weight - before).norm() < 0.15 * before.norm()
    torch.testing.assert_close(nn.functional.linear(x, layer.weight, layer.bias), layer(x))
    for other in (nn.Parameter(before), before):
        with pytest.raises(InputError, match="nothing is assigned to it"):
            layer.weight = other  # type: ignore[misc]


@torch.no_grad()
def test_a_transposed_weight_stays_transposed() -> None:
    layers = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(layers.Conv1D(16, 8))
    before, x = model[0].weight.detach().clone(), torch.randn(3, 8)
    quantize_(model, "int8-weight")
    assert model[0].weight.shape == before.shape
    torch.testing.assert_close(x @ model[0].weight + model[0].bias, model(x))  # type: ignore[operator]


@torch.no_grad()
@weights
def test_states_and_those_with_the_integers_called_weight(preset: str) -> None:
    model, x = Casts().eval(), torch.randn(4, 64)
    quantize_(model, preset)
    state = model.state_dict()
    assert set(state) == {f"{layer}.{part}" for layer in ("head", "steps") for part in ("integers", "scale", "bias")}
    for given in (state, OrderedDict((name.replace("integers", "weight"), tensor) for name, tensor in state.items())):
        other = Casts().eval()
        quantize_(other, preset)
        other.load_state_dict(given)
        assert torch.equal(other(x), model(x))
    with pytest.raises(RuntimeError, match=r"Missing key.*integers"):
        model.load_state_dict(Casts().state_dict() | {name: tensor for name, tensor in state.items() if "scale" in name})


@pytest.mark.parametrize("preset", ["int8-weight", "int4-weight", "int8-dynamic"])
def test_integers_are_refused(preset: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    quantize_(model, preset)
    with pytest.raises(InputError, match=r"takes floating point, got torch\.int8"):
        model(torch.ones(4, 64, dtype=torch.int8))


@torch.no_grad()
@pytest.mark.parametrize("preset", ["int8-weight", "int4-weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_conversion_to_another_type(preset: str, dtype: torch.dtype) -> None:
    """The weight is of that type, and scales, small as they are, are not rounded."""
    model = Casts().eval()
    model.head.weight.mul_(1e-3)
    quantize_(model, preset)
    layer = model.head
    state, weight = {name: tensor.clone() for name, tensor in model.state_dict().items()}, layer.weight.clone()
    assert layer.to(dtype) is layer and layer.weight.dtype == layer.bias.dtype == dtype and layer.integers.dtype == torch.int8
    assert model.to(dtype)(torch.randn(4, 64, dtype=dtype)).dtype == dtype
    assert torch.equal(layer.weight, weight.to(dtype))
    kept = model.state_dict()
    assert kept.keys() == state.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in state.items() if "bias" not in name)
    assert model.float().head.weight.dtype == torch.float32 and torch.equal(layer.weight, weight)
    assert model.to("meta").head.scale.device.type == "meta"


class Matrices(nn.Module):
    """Experts as transformers has them; its decorator replaces `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_transposed, self.down_proj = False, nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_holds_integers_already_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_MAKER", __name__)
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Matrices()]))
    assert [item.site.name for item in quantize_(model, "int8-weight").sites] == ["0", "1.0.down_proj"]
    again = quantize_(model, "int8-weight", exclude="1")
    assert [(item.name, item.reason) for item in again.left_out] == [(n, "it holds integers already") for n in ("0", "1.0.down_proj")]
    assert again.sites == ()


@torch.no_grad()
def test_a_head_that_was_tied_is_tied_no_more() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    quantize_(model, "int8-weight")
    with pytest.raises(InputError, match=r"tie_word_embeddings = False"):
        model.tie_weights()
    model.config.tie_word_embeddings = False
    model.tie_weights()
    assert isinstance(model.lm_head, QuantizedLinear)
