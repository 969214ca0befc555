"""Linear layers quantized in place: the same numbers as of the captured model, and nothing that reads or changes a weight is broken."""

from __future__ import annotations

import copy
import re
import weakref
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sashiko.diagnostics.errors import CalibrationError, InputError
from sashiko.platforms.catalogue import X86_64_V3
from sashiko.quant import (
    BF16,
    FP32,
    ActivationScheme,
    OpScheme,
    Override,
    QuantizedLinear,
    Scheme,
    WeightScheme,
    experts,
    quantize,
    quantize_,
    report,
)
from sashiko.quant.gptq import Inputs, compensated
from sashiko.quant.weights import QuantizedWeight, quantize_weight
from tests.quant.models import EncoderDecoder, mlp, sequences

NEAREST = Scheme(OpScheme(None, WeightScheme(4, "group", 8, clip="mse")))
COMPENSATED = Scheme(OpScheme(None, WeightScheme(4, "group", 8, compensate=True)))
ROWS = Scheme(OpScheme(ActivationScheme(signed=False, granularity="row")))


def names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]


class Layers(nn.Module):
    """Query and key share their input; `inner` is reached twice, `unused` never."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.inner, self.unused = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = F.silu(self.query(x)) * self.key(x)
        return self.inner(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


def correlated(*shape: int) -> torch.Tensor:
    """What GPTQ is for: inputs that say much about each other."""
    return torch.randn(*shape, 3) @ torch.randn(3, 16, generator=torch.Generator().manual_seed(5)) + 0.1 * torch.randn(*shape, 16)


@torch.no_grad()
@pytest.mark.parametrize("preset", ["int8-weight", "int8-dynamic", NEAREST, ROWS], ids=["weights", "rows", "int4", "affine rows"])
def test_numbers_are_those_of_the_captured_model(preset: str | Scheme) -> None:
    model, x = mlp(), torch.randn(5, 8)
    small = quantize(model, [x], preset=preset)
    record = quantize_(model, preset)
    assert names(model) == [item.site.name for item in record.sites] == [item.site.name for item in small.record.sites]
    torch.testing.assert_close(model(x), small(x), rtol=1e-6, atol=1e-6)
    assert [item.weight_sqnr for item in record.sites] == [item.weight_sqnr for item in small.record.sites]
    assert f"{len(record.sites)} in int" in report(record)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("preset", ["int8-weight", "int8-dynamic"])
def test_types_stay(preset: str, dtype: torch.dtype) -> None:
    model, x = mlp(), torch.randn(5, 8)
    expected = model(x)
    model.to(dtype)
    quantize_(model, preset)
    got = model(x.to(dtype))
    assert got.dtype == dtype
    assert (got - expected).norm() < 0.03 * expected.norm()


def test_for_a_machine_without_vnni_weights_are_small() -> None:
    model = nn.Sequential(nn.Linear(64, 16))
    record = quantize_(model, "int8-dynamic", target=X86_64_V3)
    [site] = record.sites
    assert site.site.scheme.weight is not None and site.site.scheme.weight.sums16 == "most"
    pairs = model[0].integers.int().abs().unflatten(1, (-1, 4))  # type: ignore[union-attr,operator]
    assert pairs.max() < 127


@torch.no_grad()
def test_compensation_is_that_of_the_captured_model_whatever_memory_there_is() -> None:
    model, data = Layers().eval(), [correlated(6) for _ in range(8)]
    small = quantize(model, data, preset=COMPENSATED)
    expected = dict(small.named_buffers())
    made = []
    for memory in (1, None):
        one = copy.deepcopy(model)
        record = quantize_(one, COMPENSATED, data, memory=memory)
        assert record.batches == 8 and names(one) == ["query", "key", "inner", "unused"]
        made.append({name: one.get_submodule(name).integers for name in names(one)})
    for name in ("query", "key"):  # the captured model knows two layers where one is reached twice
        assert torch.equal(made[0][name], expected[f"{name}.weight_int4"])
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@torch.no_grad()
def test_compensation_helps_and_says_when_it_cannot() -> None:
    model, data = Layers().eval(), [correlated(32) for _ in range(8)]
    seen, errors, notes = correlated(64), [], []
    for batches in (None, data):
        one = copy.deepcopy(model)
        notes.append(quantize_(one, COMPENSATED, batches).notes)
        errors.append(float((one.query(seen) - model.query(seen)).norm()))
    assert errors[1] < 0.7 * errors[0]
    assert "without data" in notes[0][0] and "query, key, inner ..." in notes[0][0]
    assert notes[1] == ("weights were rounded to nearest, for the calls do not reach them: unused",)


@torch.no_grad()
def test_what_only_later_calls_reach_is_compensated_for_all_of_them() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.both, self.plain = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x) + self.both(x) if x[0, 0] > 0 else self.second(x) + self.both(x)
            return self.plain(x)  # type: ignore[no-any-return]

    model, data = Branching().eval(), [correlated(32) for _ in range(6)]
    for n, x in enumerate(data):
        x[0, 0] = 1 if n < 2 else -1
    record = quantize_(one := copy.deepcopy(model), COMPENSATED.overriding(Override("plain", NEAREST.default)), data)
    assert record.notes == ()
    for name, seen in (("first", data[:2]), ("second", data[2:]), ("both", data)):
        rows = torch.cat(seen).double()
        expected = compensated(model.get_submodule(name).weight, Inputs.of(rows.t() @ rows), COMPENSATED.default.weight)
        assert (one.get_submodule(name).integers == expected.values).float().mean() > 0.99, name  # sums in another order
    assert torch.equal(one.plain.integers, quantize_weight(model.plain.weight, NEAREST.default.weight).values)


@torch.no_grad()
def test_padding_does_not_count() -> None:
    model, x = Layers().eval(), correlated(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    noisy = torch.where(mask[..., None].bool(), x, 50 * torch.randn(2, 6, 16))
    made = []
    for batch in ((x, mask), (noisy, mask)):
        one = copy.deepcopy(model)
        quantize_(one, COMPENSATED, [batch])
        made.append(one.query.integers)
    assert torch.equal(*made)


@torch.no_grad()
def test_padding_of_a_source_is_none_of_a_target_as_long() -> None:
    model = EncoderDecoder().eval()
    own = (torch.arange(6) < 3).long().expand(3, 6).contiguous()

    def integers(batch: dict[str, torch.Tensor], mask: Literal[False] | None = None) -> dict[str, torch.Tensor]:
        one = copy.deepcopy(model)
        quantize_(one, COMPENSATED, [batch], mask=mask)
        return {name: part.integers for name, part in one.named_children()}

    def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
        return {name for name in one if not torch.equal(one[name], other[name])}

    assert not differ(integers(sequences(6)), integers(sequences(6, 100.0)))
    everything = integers(sequences(6, 100.0), mask=False)
    assert differ(integers(sequences(6, 100.0)), everything) == {"encoder", "keys"}
    owned = [integers({**sequences(6, garbage, garbage), "decoder_attention_mask": own}) for garbage in (1.0, 100.0)]
    assert not differ(*owned)
    assert differ(owned[0], integers(sequences(6))) >= {"decoder", "query"}


def test_layers_that_others_read_or_change_stay() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.linear(input, self.weight.abs())

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 8, 8))

    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda module, args, result: result * 2)
    model = nn.ModuleDict({
        "encoder": nn.TransformerEncoderLayer(8, 2, 16), "attention": nn.MultiheadAttention(8, 2), "own": Own(8, 8), "hooked": hooked,
        "parametrized": weight_norm(nn.Linear(8, 8)), "excluded": nn.Linear(8, 8),
        "lstm": nn.LSTM(8, 8), "cell": nn.GRUCell(8, 8), "convolution": nn.Conv1d(8, 8, 3), "experts": Experts(), "kept": nn.Linear(8, 8),
        "narrow": nn.Linear(12, 8), "plain": nn.Linear(8, 8),
    })
    before = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("plain")}
    record = quantize_(model, Scheme(OpScheme(None, WeightScheme(4, "group", 8)), overrides=(Override("kept", FP32),)), exclude="excluded")
    assert names(model) == ["plain"]
    reasons = {item.name: item.reason for item in record.left_out}
    expected = {
        "encoder.linear1": "reads its weight", "encoder.self_attn.out_proj": "reads its weight", "attention.out_proj": "reads its weight",
        "own": "forward of its own", "hooked": "hooks", "parametrized": "parametrization", "excluded": "excluded", "lstm": "no linear",
        "cell": "no linear", "convolution": "no linear", "experts": "no linear", "kept": "the scheme keeps it",
        "narrow": "groups of 8 do not divide its 12 inputs",
    }
    assert set(expected) < set(reasons)
    assert all(re.search(text, reasons[name]) for name, text in expected.items())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


class Matrices(nn.Module):
    """Experts as transformers has them; its decorator replaces `forward`."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.is_transposed, self.count = transposed, 3
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 16) if transposed else torch.randn(3, 16, 8))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_experts(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are quantized as linear layers of as many rows, and are read in the shape that they had."""
    monkeypatch.setattr(experts, "_MAKER", __name__)
    model = nn.ModuleDict({"experts": Matrices(transposed), "others": Matrices(transposed), "up": nn.Linear(8, 8)})
    plain = {name: getattr(model["experts"], name).detach().clone() for name in ("gate_up_proj", "down_proj")}
    record = quantize_(model, "int8-weight", exclude="others")
    found = {site.site.name: site.site for site in record.sites}
    assert set(found) == {"experts.gate_up_proj", "experts.down_proj", "up"}
    site = found["experts.gate_up_proj"]
    assert (site.operation, site.features) == ("experts", (8, 16))
    assert {item.name: item.reason for item in record.left_out} == dict.fromkeys(
        ("others.gate_up_proj", "others.down_proj"), "excluded by the caller"
    )
    assert site.scheme.weight is not None
    for name, before in plain.items():
        got = getattr(model["experts"], name)
        rows = before.transpose(1, 2) if transposed else before
        expected = quantize_weight(rows.reshape(-1, rows.shape[-1]), site.scheme.weight)
        real = (expected.values * expected.scales[:, None]).view(rows.shape)
        assert got.shape == before.shape and torch.equal(got, real.transpose(1, 2) if transposed else real)
        with pytest.raises(InputError, match="nothing is assigned"):
            setattr(model["experts"], name, before)
    same = nn.ModuleDict({"experts": Matrices(transposed), "others": Matrices(transposed), "up": nn.Linear(8, 8)})
    quantize_(same, "int8-weight", exclude="others")
    same.load_state_dict(model.state_dict())
    assert torch.equal(same["experts"].down_proj, model["experts"].down_proj)
    assert same.bfloat16()["experts"].down_proj.dtype == torch.bfloat16


def test_experts_are_rounded_to_nearest_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_MAKER", __name__)
    scheme = Scheme(OpScheme(None, WeightScheme(4, "group", 8, compensate=True)))
    for batches, reason in (([torch.randn(4, 8)], "which rows an expert sees"), (None, "without data")):
        model = nn.Sequential(nn.Linear(8, 8), Matrices(False)).eval()
        (note,) = quantize_(model, scheme, batches).notes
        assert reason in note and "1.gate_up_proj" in note


def test_experts_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_MAKER", __name__)

    def left(scheme: Scheme | str) -> set[str]:
        return {item.reason for item in quantize_(nn.Sequential(Matrices(False)), scheme).left_out}

    assert "rows are rounded inside" in left("int8-dynamic").pop()
    assert left(Scheme(OpScheme(None, WeightScheme(8)), operations=("linear",))) == {"the scheme keeps it in floating point"}


def test_one_layer_in_two_places_stays_one_and_a_tied_table_is_kept() -> None:
    table = nn.Embedding(32, 8)
    shared, head = nn.Linear(8, 8), nn.Linear(8, 32, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, shared, nn.Sequential(shared), head)
    quantize_(model, "int8-weight")
    assert model[1] is model[2][0] and isinstance(model[1], QuantizedLinear)  # type: ignore[index]
    assert model[0].weight is table.weight and table.weight.dtype == torch.float32
    assert names(model) == ["1", "3"]


def test_weights_go_as_their_integers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []

    def counting(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
        alive.append(sum(ref() is not None for ref in weights))
        return quantize_weight(weight, scheme)

    monkeypatch.setattr("sashiko.quant.in_place.quantize_weight", counting)
    quantize_(model, "int8-weight")
    assert alive == [4, 3, 2, 1]


@torch.no_grad()
def test_a_state_fits_another_one_quantized_alike() -> None:
    model, other, x = mlp(), mlp(), torch.randn(3, 8)
    for each in (model, other):
        quantize_(each, "int8-weight")
    assert not torch.equal(model(x), other(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize(("preset", "options", "text"), [
    ("int8", {}, "smooths"), ("int8-minmax", {}, "ranges for all calls"),
    (Scheme(OpScheme(None), correct_bias=True), {}, "corrects biases"),
    (Scheme(OpScheme(None), outliers=20.0), {}, "outliers"), (Scheme(OpScheme(None), (Override("0", BF16),)), {}, "bf16"),
    ("int8-weight", {"batches": [torch.randn(2, 8)]}, "nothing to learn"), ("int8-weight", {"exclude": "nothing"}, "matches no operation"),
    ("int8-weight", {"mask": "which"}, "mask is given without batches"), ("int7", {}, "no preset"),
    (COMPENSATED, {"batches": [torch.randn(2, 8)], "mask": "which"}, "'which' is not an argument"),
])
def test_options_that_mean_nothing_are_refused(preset: Any, options: dict[str, Any], text: str) -> None:
    model = mlp()
    with pytest.raises(InputError, match=text):
        quantize_(model, preset, **options)
    assert names(model) == []


@pytest.mark.parametrize(("batches", "text"), [
    ([], "empty"), ([torch.full((2, 8), torch.nan)], "batch 1: the input of 0 holds NaN"), ([torch.randn(2, 7)], "failed on batch 1"),
    (torch.randn(2, 8), "not an iterable of batches"), ([torch.randn(0, 8)], "batch 1 is empty"),
])
def test_bad_data_is_refused_and_changes_nothing(batches: Any, text: str) -> None:
    model = mlp()
    with pytest.raises(CalibrationError, match=text):
        quantize_(model, COMPENSATED, batches)
    assert names(model) == [] and not any(m._forward_pre_hooks for m in model.modules())


def test_bad_models_are_refused() -> None:
    model = mlp()
    with pytest.raises(CalibrationError, match="training mode"):
        quantize_(model.train(), COMPENSATED, [torch.randn(2, 8)])
    with torch.no_grad():
        next(m for m in model.modules() if isinstance(m, nn.Linear)).weight[0, 0] = torch.inf
    with pytest.raises(CalibrationError, match="holds NaN or infinity"):
        quantize_(model, "int8-weight")
    assert names(model) == []
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module"):
        quantize_(lambda x: x, "int8-weight")  # type: ignore[arg-type]
    alone = quantize_(nn.Linear(8, 8), "int8-weight")
    assert alone.notes == ("nothing was quantized",) and "the model itself" in alone.left_out[0].reason
