"""Products are placed, quantized and computed alike, in whatever way a model writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sashiko
from sashiko.quant import Scheme, load, prepare_qat, quantize
from sashiko.quant.presets import PRESETS


class Projections(nn.Module):
    """A layer into heads, and one out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Parameter(torch.randn(16, 2, 8) / 4), nn.Parameter(torch.randn(2, 8, 16) / 4)
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("btm,mhd->bhtd", x, self.into).relu()
        return torch.einsum("bhtd,hdm->btm", heads, self.back) + self.bias


class Layers(Projections):
    """The same as products of matrices."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x @ self.into.flatten(1)).relu() @ self.back.flatten(0, 1) + self.bias
        return y


def test_einsum_is_quantized_as_the_layer_that_it_is() -> None:
    model, same = Projections().eval(), Layers().eval()
    same.load_state_dict(model.state_dict())
    x, before = torch.randn(3, 5, 16), {name: value.clone() for name, value in model.state_dict().items()}
    for preset in ("int8-minmax", "int8-weight"):
        small, other = (quantize(each, [x], preset=preset) for each in (model, same))
        assert [r.site.name for r in small.record.sites] == ["into", "back"] == [r.site.weight for r in small.record.sites]
        assert small.record.left_out == ()
        torch.testing.assert_close(small(x), other(x))
        more = torch.randn(7, 4, 16)
        torch.testing.assert_close(small(more), other(more))
        assert (sashiko.compile(small, (x,))(x) - small(x)).abs().max() < 0.02 * small(x).abs().max()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [r.site.name for r in quantize(model, [x], exclude="back").record.sites] == ["into"]


def test_it_is_saved_and_trained_like_a_layer(tmp_path: Path) -> None:
    model, x = Projections().eval(), torch.randn(3, 5, 16)
    student = prepare_qat(model, [x], preset="int8-minmax").train()
    (student(x) - model(x)).square().mean().backward()
    learned = dict(student.named_parameters())
    assert learned["into"].shape == (16, 2, 8)
    assert all((grad := learned[name].grad) is not None and bool(grad.any()) for name in ("into", "back"))
    small = student.eval().convert()
    torch.testing.assert_close(small(x), student(x).detach(), rtol=0, atol=0)
    small.save(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model")(x), small(x))


class Two(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y, self.w)


SCHEME = Scheme(PRESETS["int8-static"].default, operations=("linear", "matmul", "experts"))
PAIRS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "scores": (lambda x, y, w: torch.einsum("bthd,bshd->bhts", x, y), "matmul"),
    "values": (lambda x, y, w: torch.einsum("bhts,bshd->bthd", x.transpose(1, 2) @ y.permute(0, 2, 3, 1), y), "matmul"),
    "batches": (lambda x, y, w: torch.baddbmm(x[:, :, 0, :1], x[:, :, 0], y[:, :, 0].mT), "matmul"),
    "matrices": (lambda x, y, w: torch.einsum("thd,hde->the", x[0] + y[0], w), "experts"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_batches_of_matrices(name: str) -> None:
    function, kind = PAIRS[name]
    model, x, y = Two(function, 2, 8, 6).eval(), torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2, 8)
    small = quantize(model, [(x, y)], preset=SCHEME)
    assert {r.site.operation for r in small.record.sites} == {kind} and small.record.left_out == ()
    assert len(small.record.sites) == 1 + (name == "values")
    exact = model(x, y)
    assert (small(x, y) - exact).abs().max() < 0.05 * exact.abs().max()
    torch.testing.assert_close(sashiko.compile(small, (x, y))(x, y), small(x, y), rtol=1e-3, atol=1e-3 * float(exact.abs().max().detach()))


LAID: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "einsum": (lambda x, y, w: torch.einsum("md,bd->mb", w, x.flatten(0, 2)).view(-1), True),
    "inner": (lambda x, y, w: torch.inner(w, x.flatten(0, 2)).view(-1), True),
    "tensordot": (lambda x, y, w: torch.tensordot(w, x.flatten(0, 2).mT, ([1], [0])).view(-1), True),
    "activations": (lambda x, y, w: torch.einsum("bqd,bkd->bkq", x[:, :, 0], y[:, :, 0]).view(3, -1), True),
    "apart": (lambda x, y, w: torch.einsum("btm,mhd->dbth", x[:, :, 0], w.view(2, 4, 6).permute(2, 0, 1)), True),
    "ellipsis that is summed": (lambda x, y, w: torch.einsum("...td,md->tm", x[:, :, 0], w), False),
}


@pytest.mark.parametrize("name", LAID)
def test_results_lie_in_memory_as_before(name: str) -> None:
    function, taken = LAID[name]
    model, x, y = Two(function, 8, 6).eval(), torch.randn(3, 5, 2, 6), torch.randn(3, 5, 2, 6)
    small, exact = quantize(model, [(x, y)], preset=SCHEME), model(x, y)
    assert (len(small.record.sites) == 1) == taken
    for result in (small(x, y), sashiko.compile(small, (x, y))(x, y)):
        assert result.stride() == exact.stride() and (result - exact).abs().max() < 0.05 * exact.abs().max()


class Ensemble(nn.Module):
    """Three networks of one input, as torch.vmap runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias, self.second = (nn.Parameter(torch.randn(3, *shape) / 4) for shape in ((32, 16), (32,), (8, 32)))

    def forward(self, x: Tensor) -> Tensor:
        def one(first: Tensor, bias: Tensor, second: Tensor, x: Tensor) -> Tensor:
            return nn.functional.linear(nn.functional.linear(x, first, bias).relu(), second)

        each: Tensor = torch.vmap(one, in_dims=(0, 0, 0, None))(self.first, self.bias, self.second, x)
        return each


@pytest.mark.parametrize("preset", ["int8", "int8-minmax", "int8-weight"])
def test_networks_that_share_their_input(preset: str) -> None:
    model, x = Ensemble().eval(), torch.randn(10, 16)
    small = quantize(model, [x], preset=preset)
    assert [(r.site.name, r.site.operation, r.site.features) for r in small.record.sites] == [
        ("first", "linear", (16, 96)), ("second", "experts", (32, 8)),
    ]  # fmt: skip
    assert (small(x) - model(x)).abs().max() < 0.05 * model(x).abs().max()
    torch.testing.assert_close(sashiko.compile(small, (x,))(x), small(x), rtol=0.02, atol=0.02)
