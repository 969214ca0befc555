"""Quantization-aware training: fake quantizers against the integers, gradients, gains, conversion."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import sashiko
from sashiko.diagnostics.errors import InputError, Unsupported
from sashiko.platforms.catalogue import X86_64_VNNI
from sashiko.quant import BF16, FP32, ActivationScheme, OpScheme, QATModule, QuantizedModule, Scheme, WeightScheme, prepare_qat, quantize
from tests.quant.models import Attention, Headed, mlp
from tests.sweeps import swept

SCHEMES = {
    "static": Scheme(OpScheme(ActivationScheme("minmax"))),
    "unsigned": Scheme(OpScheme(ActivationScheme("minmax", signed=False))),
    "rows": Scheme(OpScheme(ActivationScheme(granularity="row"))),
    "weights": Scheme(OpScheme(None)),
    "groups": Scheme(OpScheme(None, WeightScheme(4, "group", 8))),
}


def step_of(exact: torch.Tensor) -> float:
    return exact.abs().max().item() / 127


@pytest.mark.parametrize("name", SCHEMES)
def test_fake_quantizers_compute_what_the_converted_model_computes(name: str) -> None:
    torch.manual_seed(0)
    model, data = mlp(), [torch.randn(16, 8) for _ in range(3)]
    trained = prepare_qat(model, data, preset=SCHEMES[name])
    before = trained(data[0]).detach()
    torch.testing.assert_close(before, quantize(model, data, preset=SCHEMES[name])(data[0]), rtol=0, atol=step_of(before))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        trained(data[1]).square().mean().backward()
        optimizer.step()
    after = trained(data[0]).detach()
    assert (after - before).abs().max() > 0
    small = trained.convert()
    assert isinstance(small, QuantizedModule) and not isinstance(small, QATModule) and not any(p.requires_grad for p in small.parameters())
    torch.testing.assert_close(small(data[0]), after, rtol=0, atol=step_of(after))


@pytest.mark.parametrize("kind", ["plain", "frozen", "computed"])
def test_training_begins_with_compensated_weights(kind: str) -> None:
    """Without a change of the parameters, which may be frozen or computed from others."""
    torch.manual_seed(0)
    model, data = mlp(), [torch.randn(64, 3) @ torch.randn(3, 8) for _ in range(3)]
    if kind == "frozen":
        model[0].weight.requires_grad_(False)
    if kind == "computed":
        nn.utils.parametrizations.weight_norm(model[0])
    scheme = Scheme(OpScheme(None, WeightScheme(4, "group", 8, compensate=True)))
    with torch.no_grad():
        exact, *others = model(data[0]), *(quantize(model, data, preset=each)(data[0]) for each in (scheme, SCHEMES["groups"]))
        trained = prepare_qat(model, data, preset=scheme)
        small = trained.convert()(data[0])
        assert torch.equal(small, others[0]) and (small - exact).norm() < 0.9 * (others[1] - exact).norm()
    assert all(torch.equal(trained.get_parameter(name), value) for name, value in model.named_parameters() if kind != "computed")
    other = prepare_qat(model, data[1:], preset=scheme)
    trained(data[1]).square().mean().backward()
    torch.optim.SGD(trained.parameters(), lr=0.1).step()
    other.load_state_dict(trained.state_dict())
    torch.testing.assert_close(other.convert()(data[0]), trained(data[0]).detach())


@pytest.mark.parametrize("floating", [FP32, BF16], ids=["fp32", "bf16"])
def test_what_has_no_integers_trains_too(floating: OpScheme) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    trained = prepare_qat(mlp(), [x], preset=Scheme(floating))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(2.0)
    torch.testing.assert_close(trained.convert()(x), trained(x).detach(), rtol=0, atol=0)


class Tagger(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.head = cell(8, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.cells(x)[0])
        return result


@pytest.mark.parametrize("name", swept(SCHEMES, ("rows", "groups")))
@pytest.mark.parametrize("cell", swept((nn.LSTM, nn.GRU), (nn.LSTM,)))
def test_recurrent_layers_train(cell: type[nn.RNNBase], name: str) -> None:
    """Through the rounding of what is fed back, too; a number that is rounded the other way is fed back."""
    torch.manual_seed(0)
    model, data = Tagger(cell).eval(), [torch.randn(4, 7, 8) for _ in range(3)]
    trained = prepare_qat(model, data, preset=SCHEMES[name])
    before = trained(data[0]).detach()
    torch.testing.assert_close(before, quantize(model, data, preset=SCHEMES[name])(data[0]), rtol=0, atol=2 * step_of(before))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (trained(data[1]) - data[1][..., :4]).square().mean()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) and bool(p.grad.any()) for p in trained.parameters())
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    after = trained(data[0]).detach()
    torch.testing.assert_close(trained.convert()(data[0]), after, rtol=0, atol=2 * step_of(after))


def test_every_parameter_and_scale_gets_a_gradient() -> None:
    model = Attention().eval()
    trained = prepare_qat(model, [torch.randn(2, 5, 16)], preset="int8-minmax")
    assert len(trained.scale_parameters()) == 4 + 2  # four weights; query, key and value share an activation
    trained(torch.randn(2, 5, 16)).square().sum().backward()
    for name, parameter in trained.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()) and parameter.grad.abs().max() > 0, name


def test_the_original_is_not_touched() -> None:
    model, data = mlp(), [torch.randn(4, 8)]
    kept = copy.deepcopy(model.state_dict())
    trained = prepare_qat(model, data)
    trained(data[0]).sum().backward()
    torch.optim.Adam(trained.parameters()).step()
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_training_repairs_what_calibration_spoilt() -> None:
    """One sample in the calibration data is a hundred times too large: the scale it gives is useless until it is learned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    data = torch.randn(256, 16)
    with torch.no_grad():
        wanted = model(data)
    spoilt = data.clone()
    spoilt[0] *= 100
    trained = prepare_qat(model, [spoilt], preset="int8-minmax", target=X86_64_VNNI)

    def error(candidate: nn.Module) -> float:
        with torch.no_grad():
            return ((candidate(data) - wanted).norm() / wanted.norm()).item()

    before = error(trained.convert())
    scales = trained.scale_parameters()
    known = {id(p) for p in scales}
    weights = [p for p in trained.parameters() if id(p) not in known]
    optimizer = torch.optim.Adam([{"params": weights, "lr": 1e-4}, {"params": scales, "lr": 1e-2}])
    for _ in range(300):
        optimizer.zero_grad()
        (trained(data) - wanted).square().mean().backward()
        optimizer.step()
    after = error(trained.convert())
    assert before > 0.2 and after < before / 5


def test_tied_weights_train_as_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.a(self.a(x).relu())
            return out

    trained = prepare_qat(Tied().eval(), [torch.randn(4, 8)], preset="int8-symmetric")
    names = [name for name, _ in trained.named_parameters() if name.endswith(".weight")]
    assert len(names) == 1 and len(trained.scale_parameters()) == 3
    small = trained.convert()
    assert sum(1 for name in small.state_dict() if name.endswith("_int8")) == 1


def test_arguments_of_calibration_count() -> None:
    """Labels are taken off, and what the mask leaves out does not shape the scales."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(x) * keep[..., None]
            return out

    def scale(garbage: float) -> float:
        x, keep = torch.ones(2, 3, 8), torch.tensor([[1, 1, 0], [1, 1, 1]])
        x[0, 2] = garbage
        trained = prepare_qat(
            Masked().eval(), [((x, keep), "label")], preset="int8-minmax", transform=lambda item: item[0], mask="keep"
        )
        return trained.record.sites[0].ranges[0].scale

    assert scale(1e4) == scale(1.0)


@pytest.mark.parametrize("name", ("static", "unsigned"))
def test_training_goes_on_from_a_state_dict(name: str) -> None:
    """Whatever data the scales of the other process began with, and its zero points."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4)).eval()
    x = torch.randn(16, 8)
    first, second = (prepare_qat(model, [data], preset=SCHEMES[name]) for data in (x, x * 1.5 + 1))
    second.load_state_dict(first.state_dict())
    small = second.convert()
    assert torch.equal(second(x), first(x)) and torch.equal(small(x), second(x))
    assert [item.ranges for item in small.record.sites] == [item.ranges for item in first.convert().record.sites]


def test_a_state_that_does_not_fit_says_what_it_depends_on() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(64, 16)
    first, second = (prepare_qat(model, [data], preset="int8-static") for data in (torch.cat((50 * x[:, :1], x[:, 1:]), 1), x))
    assert "relu_smoothing" in first.state_dict() and "relu_smoothing" not in second.state_dict()
    with pytest.raises(InputError, match=r"Unexpected key.*relu_smoothing(.|\n)*with the same data"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("store", [lambda module, path: pickle.dumps(module), torch.save, QATModule.save], ids=["pickle", "torch", "save"])
def test_what_still_trains_is_not_stored_as_a_whole(store: Callable[[QATModule, Path], object], tmp_path: Path) -> None:
    """The form of a file would lose what training and `convert` need. A copy has it."""
    trained = prepare_qat(mlp(), [torch.randn(4, 8)])
    with pytest.raises(Unsupported, match="still trains") as caught:
        store(trained, tmp_path / "whole")
    assert "state_dict()" in str(caught.value) and "convert()" in str(caught.value)
    other = copy.deepcopy(trained)
    assert isinstance(other, QATModule) and all(p.requires_grad for p in other.parameters())
    assert isinstance(pickle.loads(pickle.dumps(other.convert())), QuantizedModule)


@pytest.mark.parametrize("preset", ["int8", "int8-static", "int4-weight"])
def test_parts_whose_results_nothing_uses_do_not_train(preset: str) -> None:
    torch.manual_seed(0)
    model, x = Headed().eval(), torch.randn(4, 6, 8)
    trained = prepare_qat(model, [x], preset=preset)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained(x).square().mean().backward()
    optimizer.step()
    small = trained.convert()
    torch.testing.assert_close(small(x), trained(x), rtol=1e-5, atol=1e-5)
    assert [item.site.name for item in small.record.sites] == [item.site.name for item in quantize(model, [x], preset=preset).record.sites]


def test_what_is_frozen_stays_so() -> None:
    model, x = mlp(), torch.randn(4, 8)
    frozen = [name for name, _ in model.named_parameters()][:2]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    trained = prepare_qat(model, [x])
    before = {name: trained.get_parameter(name).clone() for name in frozen}
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained(x).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(trained.get_parameter(name), value) for name, value in before.items())
    assert all(parameter.requires_grad for name, parameter in trained.named_parameters() if name not in frozen)
    assert all(not model.get_parameter(name).requires_grad for name in frozen)


@pytest.mark.parametrize("verb", [
    quantize, prepare_qat, partial(sashiko.quant.calibrate, scheme="int8"), lambda model, data: sashiko.compile(model, data[0]),
    lambda model, data: sashiko.quantize_(model, "int8-weight"), lambda model, data: sashiko.quantize_(model, "int4-weight", data),
], ids=["quantize", "prepare_qat", "calibrate", "compile", "quantize_", "quantize_ with data"])
def test_what_still_trains_is_no_model_yet(verb: Callable[[nn.Module, list[torch.Tensor]], object]) -> None:
    data = [torch.randn(4, 8)]
    trained = prepare_qat(mlp(), data)
    owner = nn.Sequential(nn.Linear(8, 8), trained).eval()
    for model, says in ((trained, "the model still trains"), (owner, "1 still trains")):
        with pytest.raises(InputError, match=says):
            verb(model, data)


def test_the_converted_model_shares_nothing_with_the_one_that_trains() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
    x = torch.randn(16, 8)
    student = prepare_qat(model, [x])
    small = student.convert()
    expected = small(x)
    with torch.no_grad():
        for value in (*student.parameters(), *student.buffers()):
            value.add_(1)
    assert torch.equal(small(x), expected)


def test_divergence_is_reported() -> None:
    trained = prepare_qat(mlp(), [torch.randn(4, 8)])
    with torch.no_grad():
        next(iter(trained.parameters())).fill_(float("nan"))
    with pytest.raises(InputError, match="not finite"):
        trained.convert()
