"""Which contractions are found, what they are called, and why others are left out."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sashiko.diagnostics.errors import InputError
from sashiko.quant import FP32, PRESETS, ActivationScheme, OpScheme, Override, QuantizedModule, quantize, quantize_
from tests.quant.models import Attention, IntegerExecution, mlp


class Product(nn.Module):
    """One operation on x with one parameter `w`, and maybe a bias `b`."""

    def __init__(self, function: Callable[[Product, torch.Tensor], torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))
        self.b = nn.Parameter(torch.randn(6))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


QUANTIZED = {
    "functional": (lambda m, x: F.linear(x, m.w, m.b), (6, 8), (4, 8)),
    "no_bias": (lambda m, x: F.linear(x, m.w), (6, 8), (2, 4, 8)),
    "vector": (lambda m, x: F.linear(x, m.w), (6, 8), (8,)),
    "matmul": (lambda m, x: x @ m.w, (8, 6), (2, 4, 8)),
    "matmul_vector": (lambda m, x: x @ m.w, (8, 6), (8,)),
    "transpose": (lambda m, x: x @ m.w.transpose(0, 1), (6, 8), (2, 4, 8)),
    "t": (lambda m, x: torch.mm(x, m.w.t()), (6, 8), (4, 8)),
    "permute": (lambda m, x: x @ m.w.permute(1, 0), (6, 8), (4, 8)),
    "view": (lambda m, x: x @ m.w.view(8, 6), (48,), (4, 8)),
    "slice": (lambda m, x: F.linear(x, m.w[6:]), (12, 8), (4, 8)),
    "computed": (lambda m, x: F.linear(x, m.w * m.b[:, None]), (6, 8), (4, 8)),
    "mm": (lambda m, x: torch.mm(x, m.w), (8, 6), (4, 8)),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), (8, 6), (4, 8)),
    "addmm_full": (lambda m, x: torch.addmm(x[:, :6], x, m.w), (8, 6), (4, 8)),
    "into": (lambda m, x: torch.zeros(4, 6).addmm_(x, m.w), (8, 6), (4, 8)),
    "bmm": (lambda m, x: torch.bmm(x, m.w.unsqueeze(0).expand(x.shape[0], 8, 6)), (8, 6), (3, 4, 8)),
    "einsum": (lambda m, x: torch.einsum("ij,jk", x, m.w), (8, 6), (4, 8)),
    "einsum_heads": (lambda m, x: torch.einsum("btm,mhd->bhtd", x, m.w), (8, 3, 2), (2, 4, 8)),
    "einsum_of_heads": (lambda m, x: torch.einsum("bthd,mdh->bmt", x, m.w), (6, 4, 2), (2, 5, 2, 4)),
    "einsum_weight_first": (lambda m, x: torch.einsum("jk, ...j -> k...", m.w, x), (8, 6), (2, 3, 8)),
    "tensordot": (lambda m, x: torch.tensordot(x, m.w, ([2, 1], [1, 0])), (2, 4, 6), (3, 2, 4)),
    "tensordot_left": (lambda m, x: torch.tensordot(m.w, x, ([1], [1])), (6, 8), (3, 8, 4)),
    "inner": (lambda m, x: torch.inner(x, m.w), (6, 8), (3, 4, 8)),
    "mv": (lambda m, x: torch.mv(m.w, x), (6, 8), (8,)),
    "addmv": (lambda m, x: torch.addmv(m.b, m.w, x), (6, 8), (8,)),
    "addbmm": (lambda m, x: torch.addbmm(m.b, x, m.w), (2, 4, 6), (2, 3, 4)),
    "matmul_one": (lambda m, x: x @ m.w, (1, 8, 6), (3, 4, 8)),
    "matmul_each": (lambda m, x: x @ m.w, (3, 8, 2), (4, 8)),
    "matmul_each_of_one": (lambda m, x: x @ m.w, (1, 8, 6), (4, 8)),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_products_with_a_constant(name: str) -> None:
    function, shape, data = QUANTIZED[name]
    model = Product(function, *shape).eval()  # type: ignore[arg-type]
    x = torch.randn(data)
    small = quantize(model, [x], preset="int8-minmax")
    (item,) = small.record.sites
    assert item.site.features == (8, 6) and small.record.left_out == ()
    assert item.site.weight == ("expression of b, w" if name == "computed" else "w")
    check = IntegerExecution(small)
    # Only float32 rounding separates the simulation from the integers: far below one step.
    assert all(step < 1e-3 for step in check.check(x))
    assert len(check.steps) == 1
    exact = model(x)
    # Both factors carry an error of at most half a step, 1/254 of their greatest magnitude each, times K = 8 products.
    assert (small(x) - exact).abs().max() <= 8 * (1 / 254 + 1 / 254 + 1 / 254**2) * x.abs().max() * _greatest(model)


def _greatest(model: Product) -> torch.Tensor:
    return model.w.abs().max() * max(1.0, float(model.b.detach().abs().max()))


LEFT_OUT = {
    "weight on the left": (lambda m, x: m.w @ x, (6, 4), (4, 8), "the weight is on the left"),
    "matrix vector": (lambda m, x: x @ m.w, (8,), (4, 8), "the weight is a vector"),
    "batch": (lambda m, x: x @ m.w, (3, 8, 6), (2, 3, 4, 8), "batch of 3 matrices"),
    "batch for one": (lambda m, x: x @ m.w, (3, 8, 6), (1, 4, 8), "batch of 3 matrices"),
    "batch of several rows": (lambda m, x: torch.einsum("bthd,hde->bthe", x, m.w), (3, 8, 6), (2, 4, 3, 8), "no product of an activation"),
    "einsum with a vector": (lambda m, x: torch.einsum("ij,j->i", x, m.w), (8,), (4, 8), "no product of an activation"),
    "einsum with nothing": (lambda m, x: torch.einsum("thd,hdm->tm", x[..., :0], m.w), (2, 0, 6), (4, 2, 8), "the weight is empty"),
    "einsum of three": (lambda m, x: torch.einsum("ij,jk,kl->il", x, m.w, m.w), (8, 8), (4, 8), "no product of an activation"),
    "summed before": (lambda m, x: torch.einsum("bij,jk->ik", x, m.w), (8, 6), (2, 4, 8), "no product of an activation"),
    "outer": (lambda m, x: torch.einsum("i,jk->ijk", x, m.w), (8, 6), (4,), "no product of an activation"),
    "scaled": (lambda m, x: torch.addmv(m.b, m.w, x, alpha=2), (6, 8), (8,), "no product of an activation"),
    "several": (lambda m, x: torch.linalg.multi_dot([x, m.w, m.w]), (8, 8), (4, 8), "not taken apart"),
    "time first": (lambda m, x: torch.conv_tbc(x, m.w, m.b), (3, 8, 6), (5, 2, 8), "conv1d"),
    "alpha": (lambda m, x: torch.addmm(m.b, x, m.w, alpha=2), (8, 6), (4, 8), "alpha"),
    "gram": (lambda m, x: x @ x.t() + m.w, (4, 4), (4, 8), "both factors are activations"),
    "stretch": (lambda m, x: x @ m.w, (1, 1, 8, 6), (2, 4, 8), "stretch"),
    "integers": (lambda m, x: torch._int_mm(x.to(torch.int8), m.w.to(torch.int8)).float(), (8, 6), (4, 8), "integers already"),
    "batch on the left": (lambda m, x: m.w @ x, (6, 4), (3, 4, 8), "the weight is on the left"),
    "double": (lambda m, x: (x.double() @ m.w.double()).float(), (8, 6), (4, 8), "float64"),
    "convolution": (lambda m, x: F.conv1d(x, m.w), (6, 4, 3), (2, 4, 8), "convolutions"),
    "transposed": (lambda m, x: F.conv_transpose2d(x, m.w), (4, 6, 3, 3), (2, 4, 8, 8), "convolutions"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out_with_a_reason(name: str) -> None:
    function, shape, data, reason = LEFT_OUT[name]
    model = Product(function, *shape).eval()  # type: ignore[arg-type]
    x = torch.randn(data)
    small = quantize(model, [x], preset="int8-dynamic")
    assert small.record.sites == ()
    (item,) = small.record.left_out
    assert reason in item.reason and "test_placement.py:" in item.source
    assert "nothing was quantized" in small.record.notes
    # Nothing was rewritten, so the result is the model's own; torch.export may pick another operator for a product.
    torch.testing.assert_close(small(x), model(x))


def test_products_of_parameters_alone_are_parameters() -> None:
    functions: dict[str, Callable[[Product, torch.Tensor], torch.Tensor]] = {
        "matmul": lambda m, x: m.w @ m.w,
        "linear": lambda m, x: F.linear(m.w, m.w),
        "added": lambda m, x: torch.addmm(x, m.w, m.w),
        "vector": lambda m, x: torch.mv(m.w, m.w[0]),
        "several": lambda m, x: torch.linalg.multi_dot([m.w, m.w, m.w]),
        "convolution": lambda m, x: F.conv1d(m.w[None], m.w[..., None])[0],
    }
    for name, function in functions.items():
        small = quantize(Product(lambda m, x, f=function: x * f(m, x), 8, 8).eval(), [torch.randn(8, 8)])  # type: ignore[misc]
        assert (small.record.sites, small.record.left_out) == ((), ()), name
    for normed in (nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal):
        small = quantize(nn.Sequential(normed(nn.Linear(16, 8)), nn.ReLU(), nn.Linear(8, 16)).eval(), [torch.randn(8, 16)])
        assert (len(small.record.sites), small.record.left_out) == (2, ()), normed


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu")])
def test_cells_are_left_out_with_a_reason(kind: Callable[[int, int], nn.Module]) -> None:
    small = quantize(kind(8, 6).eval(), [torch.randn(4, 8)])
    assert small.record.sites == ()
    (item,) = small.record.left_out
    assert item.op.endswith("_cell") and item.name.endswith("weight_ih") and "cells" in item.reason


@torch.library.custom_op("sashiko_tests::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor, times: int) -> torch.Tensor:
    return x @ w * times


product.register_fake(lambda x, w, times: x.new_empty(*x.shape[:-1], w.shape[-1]))


def test_products_in_operators_of_other_packages_are_left_out_with_a_reason() -> None:
    foreign = Product(lambda m, x: product(x * m.b[:1], m.w, 2), 16, 16).eval()
    activations = Product(lambda m, x: product(x, x.t(), 2), 16, 16).eval()
    for model, dtype, reasons in (
        (foreign, torch.float32, ["an operator of sashiko_tests"]),
        (activations, torch.float32, []),
    ):
        small = quantize(model.to(dtype), [torch.randn(32, 16, dtype=dtype)])
        assert [reason in item.reason for item, reason in zip(small.record.left_out, reasons, strict=True)] == [True] * len(reasons)


def test_attention_shares_one_activation() -> None:
    small = quantize(Attention().eval(), [torch.randn(2, 5, 16)], preset="int8-symmetric")
    assert [item.site.name for item in small.record.sites] == ["query", "key", "value", "out"]
    assert [item.op for item in small.record.left_out] == ["matmul", "matmul"]
    assert _count(small, "quantize_per_tensor") == 2


def test_projections_of_cross_attention_are_parts_of_one_parameter() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.attention(x, y, y, need_weights=False)[0]
            return result

    small = quantize(Cross().eval(), [(torch.randn(2, 5, 16), torch.randn(2, 7, 16))])
    names = ["attention.in_proj_weight", "attention.in_proj_weight#2", "attention.out_proj"]
    assert [item.site.name for item in small.record.sites] == names


def test_tied_weights_are_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.mix = nn.Linear(8, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.mix(self.mix(self.table(ids)).relu())
            logits: torch.Tensor = self.head(h)
            return logits

    model = Tied().eval()
    ids = torch.randint(0, 10, (3, 4))
    small = quantize(model, [ids])
    # torch.export keeps one of the tied parameter's two names.
    names = [item.site.name for item in small.record.sites]
    assert names[:2] == ["mix", "mix#2"] and names[2] in ("head", "table")
    kept = small.state_dict()
    assert {name for name, value in kept.items() if value.dtype == torch.int8} == {"mix.weight_int8", f"{names[2]}.weight_int8"}
    assert f"{names[2]}.weight" in kept, "the embedding still reads it"
    assert "mix.weight" not in kept


def test_convolutions_have_one_scale_and_stay_where_there_is_none_but_by_row() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    for name, preset in PRESETS.items():
        small = quantize(model, [torch.randn(2, 3, 8, 8)], preset=name)
        labels = {item.site.name: item.site.scheme.label for item in small.record.sites}
        if preset.default.activation is None or name == "int8-dynamic":
            assert [item.name for item in small.record.left_out] == ["0"] and list(labels) == ["2"]
        else:
            assert not small.record.left_out and labels["0"] == "int8"


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_transformer_layer(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first).eval()
    small = quantize(layer, [torch.randn(2, 5, 16)])
    names = {item.site.name for item in small.record.sites}
    assert names == {"self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2"}


@pytest.mark.parametrize(
    ("exclude", "kept"),
    [
        ("0", ["2"]),
        (["0", "2"], []),
        (re.compile("2$"), ["0"]),
        ([re.compile("[02]")], []),
    ],
)
def test_excludes(exclude: str | list[str] | re.Pattern[str], kept: list[str]) -> None:
    small = quantize(mlp(), [torch.randn(3, 8)], exclude=exclude)  # type: ignore[arg-type]
    assert [item.site.name for item in small.record.sites] == kept
    assert all(item.reason == "excluded by the caller" for item in small.record.left_out)


def test_exclude_a_module_and_everything_in_it() -> None:
    model = nn.Sequential(mlp(), nn.Linear(4, 8), mlp()).eval()
    small = quantize(model, [torch.randn(3, 8)], exclude=["0", "2.2"])
    assert [item.site.name for item in small.record.sites] == ["1", "2.0"]


class Inheriting(nn.Linear):
    """Multiplies as any linear layer."""


def test_a_class_stands_for_those_that_inherit_from_it() -> None:
    class Local(Inheriting):
        """Has a name that leads nowhere."""

    model = nn.Sequential(nn.Linear(8, 8), Inheriting(8, 8), Local(8, 8)).eval()
    for exclude, kept in ((nn.Linear, []), (Inheriting, ["0"]), (Local, ["0", "1"]), (nn.Module, [])):
        small = quantize(model, [torch.randn(3, 8)], exclude=exclude)
        assert [item.site.name for item in small.record.sites] == kept
        assert [item.site.name for item in quantize_(copy.deepcopy(model), "int8-weight", exclude=exclude).sites] == kept
    scheme = PRESETS["int8"].overriding(Override(nn.Linear, OpScheme(ActivationScheme(granularity="row"))), Override(Inheriting, FP32))
    small = quantize(model, [torch.randn(3, 8)], preset=scheme)
    assert [item.site.name for item in small.record.sites] == ["0"]


def test_exclude_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(InputError, match=r"did you mean.*query"):
        quantize(Attention().eval(), [torch.randn(2, 5, 16)], exclude="qeury")


def test_a_weight_that_the_model_writes_to_is_no_constant() -> None:
    class Learner(nn.Module):
        w: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randn(6, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.linear(x, self.w)
            self.w.mul_(0.5)
            return y

    model = Learner().eval()
    before = model.w.clone()
    small = quantize(model, [torch.randn(4, 8)] * 3)
    assert small.record.sites == ()
    assert torch.equal(model.w, before), "calibration must not move the model's state"
    assert torch.equal(small.w, before), "nor the state of the result"


def _count(module: QuantizedModule, name: str) -> int:
    return sum(name in str(node.target) and not str(node.target).count("de" + name) for node in module.graph.nodes)
