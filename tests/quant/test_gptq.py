"""GPTQ: integer weights that lose less of the results than the nearest integers do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from sashiko.platforms.catalogue import X86_64_VNNI
from sashiko.quant import ActivationScheme, OpScheme, Override, Scheme, SmoothQuant, WeightScheme, calibrate, quantize
from sashiko.quant.gptq import GramObserver, Inputs, compensated
from sashiko.quant.observers import NonFinite
from sashiko.quant.weights import dequantized, quantize_weight

PAIRS = {
    "int8": (WeightScheme(), WeightScheme(compensate=True)),
    "int4": (WeightScheme(4, "group", 16), WeightScheme(4, "group", 16, compensate=True)),
    "clipped": (WeightScheme(4, "group", 16, "mse"), WeightScheme(4, "group", 16, "mse", True)),
    "tensor": (WeightScheme(8, "tensor"), WeightScheme(8, "tensor", compensate=True)),
}


def correlated(rows: int, k: int = 64, rank: int = 12) -> torch.Tensor:
    """Inputs that are mostly combinations of a few: [rows, k]."""
    mix = torch.randn(rank, k, generator=torch.Generator().manual_seed(5))
    return torch.randn(rows, rank) @ mix + 0.1 * torch.randn(rows, k)


def loss(weight: torch.Tensor, found: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (found - weight).t()).square().sum() / (x @ weight.t()).square().sum())


@pytest.mark.parametrize("name", PAIRS)
def test_correlated_inputs(name: str) -> None:
    torch.manual_seed(0)
    seen, fresh, weight = correlated(2000), correlated(500), torch.randn(32, 64)
    plain, scheme = PAIRS[name]
    nearest, found = quantize_weight(weight, plain), compensated(weight, Inputs.of((seen.t() @ seen).double()), scheme)
    assert found.values.dtype == torch.int8 and int(found.values.abs().max()) <= scheme.qmax and found.scales.shape == nearest.scales.shape
    losses = [loss(weight, dequantized(q.values, q.scales), fresh) for q in (nearest, found)]
    # The errors of 64 weights are made up for in all directions but the 12 that the inputs have.
    assert losses[1] < losses[0] / 3
    assert found.sqnr < nearest.sqnr  # at the expense of the weights themselves


def test_against_the_definition() -> None:
    """One column after the other, each followed by the least-squares update of all columns that are left."""
    torch.manual_seed(1)
    x, weight, scheme = correlated(300, 24, 6), torch.randn(5, 24), WeightScheme(compensate=True)
    inputs = Inputs.of((x.t() @ x).double())
    scales = quantize_weight(weight, scheme).scales.double()
    moved, integers = weight.double().clone(), torch.zeros(5, 24, dtype=torch.float64)
    left = inputs.order.tolist()
    while left:
        j, *left = left
        integers[:, j] = torch.clamp(torch.round(moved[:, j] / scales), -127, 127)
        error = moved[:, j] - integers[:, j] * scales
        if left:
            solved = torch.linalg.solve(inputs.gram[left][:, left], inputs.gram[left, j])
            moved[:, left] += error[:, None] * solved
    found = compensated(weight, inputs, scheme)
    nearest = quantize_weight(weight, scheme)
    for n in range(5):
        assert torch.equal(found.values[n].double(), integers[n]) or torch.equal(found.values[n], nearest.values[n])
    assert (found.values.double() == integers).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["independent", "zero", "one row", "one input", "constant"])
@pytest.mark.parametrize("name", PAIRS)
def test_never_worse_than_the_nearest_integers(name: str, kind: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(200, 32), torch.randn(8, 32)
    x = {"independent": x, "zero": x * 0, "one row": x[:1], "one input": x * (torch.arange(32) == 3), "constant": torch.ones(4, 32)}[kind]
    weight[2] = 0
    plain, scheme = PAIRS[name]
    inputs = Inputs.of((x.t() @ x).double())
    q, r = compensated(weight, inputs, scheme), quantize_weight(weight, plain)
    errors = [(dequantized(v.values, v.scales) - weight).double() for v in (q, r)]
    ours, theirs = (((e @ inputs.gram) * e).sum(1) for e in errors)
    assert bool((ours <= theirs).all())
    assert torch.equal(q.values, r.values) or kind not in ("zero", "one input")


@pytest.mark.parametrize("activation", [None, ActivationScheme(granularity="row"), ActivationScheme(signed=False)])
def test_in_a_model(activation: ActivationScheme | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Softsign(), nn.Linear(32, 64)).eval()
    batches = [correlated(100).reshape(4, 25, 64) for _ in range(8)]
    weight = WeightScheme(4, "group", 16) if activation is None else WeightScheme()
    with torch.no_grad():
        exact = model(batches[-1])
        losses = [
            (quantize(model, batches[:-1], preset=Scheme(OpScheme(activation, w)))(batches[-1]) - exact).norm()
            for w in (weight, PAIRS["int4" if activation is None else "int8"][1])
        ]
    assert losses[1] < losses[0] * (0.7 if activation is None else 1.0)


def test_with_smoothing_the_smoothed_activation_is_what_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)).eval()
    with torch.no_grad():
        model[0].weight[7] *= 50
    scheme = Scheme(OpScheme(ActivationScheme(granularity="row"), WeightScheme(compensate=True)), smooth=SmoothQuant(0.5))
    found = calibrate(model, [correlated(100)], scheme)
    gram = found.weigh._grams["layer_norm"].gram  # type: ignore[attr-defined]
    norm = found.program.attributes
    y = nn.functional.layer_norm(correlated(1), (64,), norm["0.weight"], norm["0.bias"])
    assert y.shape == (1, 64) and gram[7, 7] / gram.diagonal().median() < 50**2 / 10


class Shared(nn.Module):
    """One weight for two activations of which only the second has a large input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.fc(x) + self.fc(x.flip(-1) * 100))


def test_a_tied_weight_is_compensated_for_all_its_inputs() -> None:
    torch.manual_seed(0)
    model, batches = Shared().eval(), [correlated(200, 32, 6) for _ in range(3)]
    exact = model(batches[0])
    plain, found = (quantize(model, batches, preset=Scheme(OpScheme(None, w))) for w in PAIRS["int4"])
    assert sum(name.endswith("_int4") for name, _ in found.named_buffers()) == 1
    assert (found(batches[0]) - exact).norm() < (plain(batches[0]) - exact).norm() / 2


def test_a_head_that_is_tied_to_a_table_is_compensated() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix, self.head = nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 40, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.head(torch.relu(self.mix(self.table(ids)).mean(1))))

    torch.manual_seed(0)
    model, ids = Tied().eval(), [torch.randint(0, 40, (50, 9)) for _ in range(3)]
    plain, scheme = (OpScheme(None, weight) for weight in PAIRS["int8"])
    nearest, tied, alone = (
        [value for name, value in quantize(model, ids, preset=Scheme(each, operations=kinds)).named_buffers() if name.endswith("_int8")]
        for each, kinds in ((plain, ("embedding", "linear")), (scheme, ("embedding", "linear")), (scheme, ("linear",)))
    )
    assert len(tied) == len(alone) == 2
    for table in (value for value in tied if len(value) == 40):
        assert any(torch.equal(table, other) for other in alone) and not any(torch.equal(table, other) for other in nearest)


def test_convolutions_and_other_choices_round_to_nearest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4)).eval()
    scheme = Scheme(OpScheme(ActivationScheme(), WeightScheme(compensate=True)), operations=("convolution", "linear"))
    small = quantize(model, [torch.randn(3, 8, 6)], preset=scheme, target=X86_64_VNNI)
    held = dict(small.named_buffers())
    assert torch.equal(held["0.weight_int8"].flatten(1), quantize_weight(model[0].weight.flatten(1), WeightScheme()).values)
    scheme = Scheme(OpScheme(), (Override("2", OpScheme(weight=WeightScheme(compensate=True))),))
    found = calibrate(model, [torch.randn(3, 8, 6)], scheme, target=X86_64_VNNI)
    other = dict(found.build({"2": OpScheme()}).named_buffers())
    assert torch.equal(other["2.weight_int8"], quantize_weight(model[2].weight, WeightScheme()).values)


def test_a_gram_does_not_depend_on_how_the_data_is_cut() -> None:
    x = torch.randn(6, 10, 5)
    mask = torch.rand(6, 10) < 0.7
    whole, parts, others = GramObserver(), GramObserver(), GramObserver()
    whole.observe(x, mask)
    for i in range(6):
        (parts if i < 4 else others).observe(x[i : i + 1], mask[i : i + 1])
    parts.merge(others)
    parts.merge(GramObserver())
    rows = x[mask].double()
    torch.testing.assert_close(whole.gram, rows.t() @ rows)
    torch.testing.assert_close(parts.gram, whole.gram, rtol=1e-12, atol=1e-12)
    with pytest.raises(NonFinite):
        whole.observe(x / 0, mask)


def test_the_same_again() -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(64, 16)).eval(), [correlated(50) for _ in range(3)]

    def stream() -> Iterator[torch.Tensor]:
        yield from batches

    first, second = (quantize(model, stream(), preset=Scheme(OpScheme(None, PAIRS["int4"][1]))) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))
