"""Whole compiled models on x86 processors with AVX-512 and VNNI, wherever this machine has neither."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import sashiko
from sashiko.platforms.catalogue import X86_64_V4, X86_64_VNNI
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from sashiko.runtime import runner
from tests.emulation import ON_BOCHS
from tests.x86.bochs import Machine, missing_tools

TARGETS = [t for t in (X86_64_V4, X86_64_VNNI) if ON_BOCHS and t.why_not_on(host())]
pytestmark = [pytest.mark.bochs, pytest.mark.skipif(missing_tools() != "", reason=missing_tools())]
_NEAR = 1 << 15  # bytes behind each address in a frame that are likely to be read


@pytest.fixture(params=TARGETS, ids=lambda t: t.name)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A target whose models can be called: their code is called on the emulated processor, in one thread."""
    wanted: Target = request.param
    load = runner.Runner.__init__

    def loaded(self: runner.Runner, data: bytes) -> None:
        load(self, data)
        self.threads = self.watch = False
        self.run = _running(self._library.address(runner.SYMBOL), wanted)

    monkeypatch.setattr(Target, "why_not_on", lambda self, machine: "")
    monkeypatch.setattr(runner.Runner, "__init__", loaded)
    yield wanted


def _running(address: int, target: Target) -> Callable[[int], int]:
    def run(frame: int) -> int:
        size = (mmap.PAGESIZE - frame % mmap.PAGESIZE) // 8  # no further than the page that it starts in: the next one may not be there
        words = struct.unpack(f"<{size}Q", ctypes.string_at(frame, 8 * size))
        return Machine(target).call(address, (frame,), [(word, _NEAR) for word in {frame, *words}])

    return run


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Sequential(
        nn.Conv2d(3, 24, 3, 2, 1), nn.SiLU(), nn.Conv2d(24, 24, 3, 1, 1, groups=24), nn.Hardswish(), nn.Conv2d(24, 40, 1), nn.ReLU(),
        nn.Conv2d(40, 40, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(40, 64, 3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )
    return layers, torch.randn(2, 3, 20, 20)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    return nn.TransformerEncoderLayer(48, 4, 96, activation="gelu", batch_first=True), torch.randn(2, 19, 48)


@pytest.mark.parametrize("made", [convolutions, encoder])
@torch.no_grad()
def test_models(target: Target, made: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    torch.manual_seed(0)
    model, x = made()
    model.eval()
    torch.testing.assert_close(sashiko.compile(model, (x,), target=target)(x), model(x), rtol=1e-4, atol=1e-5)
    for preset in ("int8", "int8-static", "int8-dynamic"):
        small = sashiko.quantize(model, [(x,)], preset=preset, target=target)
        got, simulated = sashiko.compile(small, (x,), target=target)(x), small(x)
        assert float((got - simulated).norm() / simulated.norm()) < 1e-2, preset
