"""What integers leave of rows: beside torch's own operators, and the gradients that pass."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sashiko
from sashiko.graph.rows import CHOOSE_ROWS, ROUNDINGS, rounded_affine_rows, rounded_rows
from sashiko.quant import ops

Q = torch.ops.quantized_decomposed
SMALL = [1e-3, 1e-6, 1e-12, 1e-30]


def rows() -> torch.Tensor:
    plain = [torch.randn(40, 33), torch.rand(40, 33), torch.zeros(1, 33), torch.full((1, 33), -2.5), torch.randn(1, 33) * 1e30]
    return torch.cat([*plain, *(torch.randn(1, 33) * size for size in SMALL)])


def by(parameters: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, affine: bool) -> torch.Tensor:
    """What integers of these scales and zero points leave."""
    given = *parameters, -128 if affine else -127, 127, torch.int8
    left: torch.Tensor = ops.dequantize_per_row(ops.quantize_per_row(x, *given), *given, torch.float32)
    return left


@pytest.mark.parametrize("affine", [False, True])
def test_rows_are_rounded_as_torch_does_but_for_small_ones(affine: bool) -> None:
    x = rows()
    chosen, left = CHOOSE_ROWS(x, affine), by(CHOOSE_ROWS(x, affine), x, affine)
    assert torch.equal((rounded_affine_rows if affine else rounded_rows)(x), left)
    torchs = (Q.choose_qparams_per_token_asymmetric if affine else Q.choose_qparams_per_token)(x, torch.int8)
    large = slice(0, len(x) - len(SMALL) + 1)
    for ours, other in zip(chosen, torchs, strict=True):
        assert ours.dtype == other.dtype and torch.equal(ours[:80], other[:80])
    assert torch.equal(left[large], by(torchs, x, affine)[large])
    assert by(torchs, x, affine)[-1].count_nonzero() == 0, "what torch makes of small numbers"
    wide = x.double()
    spread = wide.amax(-1, keepdim=True).clamp(min=0) - wide.amin(-1, keepdim=True).clamp(max=0)
    step = spread / 255 if affine else wide.abs().amax(-1, keepdim=True) / 127
    assert bool(((left.double() - wide).abs() <= step * 1.0001).all())


@pytest.mark.parametrize("affine", [False, True])
def test_shapes_are_known_without_numbers(affine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.library.opcheck(CHOOSE_ROWS, (torch.randn(3, 4, 5), affine))
    for name in ("choose_rows", "choose_affine_rows"):
        monkeypatch.delattr(f"sashiko.graph.rows.{name}")
    with FakeTensorMode():
        scales, zero_points = CHOOSE_ROWS(torch.empty(3, 4, 5), affine)
    assert scales.shape == zero_points.shape == (3, 4, 1)


@pytest.mark.parametrize("affine", [False, True])
def test_the_choice_is_native(affine: bool) -> None:
    class Chosen(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return by(CHOOSE_ROWS(x, affine), x, affine)

    x = rows()
    fast = sashiko.compile(Chosen().eval(), (x,), strict=True)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert bool(((fast(x) - Chosen()(x)).abs() <= 1.01 * step).all()), "ties may fall to either side"
    assert bool((fast(x)[-len(SMALL) :] != 0).any(-1).all())


@pytest.mark.parametrize("name", ROUNDINGS)
def test_gradients_pass_as_if_nothing_were_rounded(name: str) -> None:
    x, weight = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    (ROUNDINGS[name](x) * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight, rtol=2**-8 if name == "bf16" else 0, atol=0)  # bf16's gradients are bf16


@pytest.mark.parametrize("affine", [False, True])
def test_the_greatest_numbers_stay_finite(affine: bool) -> None:
    """Their difference is beyond f32, and 128 times a 127th of them; infinities stay visible."""

    class Chosen(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return by(CHOOSE_ROWS(x, affine), x, affine)

    most = torch.finfo(torch.float32).max
    x = torch.tensor([[most, -most, 0.0], [most, 1.0, 2.0], [-most, -1.0, 0.5 * most]])
    left = Chosen()(x)
    assert ((left.double() - x.double()).abs() <= 2 * most / 255 * 1.01).all()
    infinite = torch.tensor([[torch.inf, 1.0, 2.0]])
    assert not Chosen()(infinite).isfinite().all()
    compiled = sashiko.compile(Chosen().eval(), (x,), strict=True)
    assert torch.equal(compiled(x), left)
