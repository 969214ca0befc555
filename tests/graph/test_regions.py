"""Models that switch gradients or autocast on or off: their graphs hold the operations themselves, and compute what the models do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.graph.exporting import export


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            y = self.up(x)
            shape, given = y.shape[0], x
        return self.down(torch.relu(y)) * shape, given, y


class Whole(Part):
    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


class Writing(Part):
    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> Any:
        self.seen += x.detach().sum(0)
        y = x * 2
        y[:, 0] = 1
        return self.down(self.up(y)), y


class Nested(Part):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            y = self.up(x)
            with torch.autocast("cpu", torch.bfloat16):
                y = self.down(y)
                with torch.no_grad(), torch.enable_grad():
                    z = self.up(y)
            with torch.no_grad():
                other = y + 1
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            z = self.down(z)
        return y, z.float(), other


class Constant(Part):
    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tensor([1.0, 2.0] * 4), torch.vmap(lambda row: row * 3)(x)


@pytest.mark.parametrize("kind", [Part, Whole, Writing, Nested, Constant])
@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@torch.no_grad()
def test_gradients_on_or_off(kind: type[Part], free: bool) -> None:
    torch.manual_seed(0)
    model, other = kind().eval(), kind().eval()
    other.load_state_dict(model.state_dict())
    x = torch.randn(3, 8)
    fast = sashiko.compile(model, (x,), dynamic_shapes=({0: Dim("rows")},) if free else None)
    for rows in (3, 5) if free else (3,):
        x = torch.randn(rows, 8)
        assert_close(fast(x), other(x), rtol=1e-2 if kind is Nested else 1e-5, atol=1e-2 if kind is Nested else 1e-5)
        assert_close(model.seen, other.seen)
    assert not any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in export(model, (x,)).graph.nodes)


class Guarded(Part):
    """As models keep parts of themselves in f32, or cast on a device that is not there."""

    device, enabled = "cpu", False

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(self.device, torch.bfloat16, self.enabled):
            y = self.up(x.float())
            with torch.enable_grad():
                y = y + 1
        return self.down(y.float())


class Elsewhere(Guarded):
    device, enabled = "cuda", True


class Casting(Guarded):
    enabled = True


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("ambient", [False, True], ids=["f32", "autocast"])
@pytest.mark.parametrize("kind", [Guarded, Elsewhere, Casting])
@torch.no_grad()
def test_autocast_on_or_off(kind: type[Guarded], ambient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(3, 8)
    whole: list[object] = []
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", _noted(whole))
    with torch.autocast("cpu", torch.bfloat16, ambient):
        expected, fast = model(x), sashiko.compile(model, (x,))
    result = fast(x)
    assert result.dtype == expected.dtype
    casts = ambient or kind is Casting
    assert_close(result, expected, rtol=2**-7 if casts else 1e-5, atol=2**-7 if casts else 1e-5)
    assert bool(whole) == casts  # what casts nothing needs no second trace of the whole


class Products(nn.Module):
    """Composites, and operations that are decomposed, on both sides."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            exact = torch.einsum("ij,jk->ik", x, x), torch.addbmm(x, x[None], x[None])
        return *exact, torch.einsum("ij,jk->ik", x, x), torch.addbmm(x, x[None], x[None])


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)), Products()])
@torch.no_grad()
def test_a_model_is_captured_under_autocast(model: nn.Module) -> None:
    x = torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, fast = model.eval()(x), sashiko.compile(model, (x,))
    assert_close(fast(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(fast(x), expected)


def _noted(calls: list[object]) -> Any:
    original = torch.export.ExportedProgram.run_decompositions

    def run(self: torch.export.ExportedProgram, *args: Any) -> Any:
        calls.append(self)
        return original(self, *args)

    return run


@pytest.mark.parametrize("kind", [Part, Whole, Guarded, Casting])
@torch.no_grad()
def test_what_runs_in_regions_is_quantized(kind: type[Part]) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(3, 8)
    small = sashiko.quantize(model, [x], progress=False)
    assert [item.site.name for item in small.record.sites] == ["up", "down"]
    assert_close(sashiko.compile(small, (x,))(x), small(x), rtol=1e-5, atol=0.05)
