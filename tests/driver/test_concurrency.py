"""Many threads in one compiled model: every result right, and memory that does not grow."""

from __future__ import annotations

import gc
import importlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.graph.alone import alone
from sashiko.graph.exporting import _LOGGED
from tests.forked import succeeds

CALLERS = 8
GROWTH = 48 << 20  # bytes: a few times the results in flight and the allocator's slack per thread; a leak of one result a call is more


class Block(nn.Module):
    """Attention and a feed-forward layer over [batch, length, 64], with some of it left to PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, length, _ = x.shape
        q, k, v = self.project(x).view(rows, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, 64)
        y = self.norm(x + self.out(y))
        y = y + self.down(nn.functional.gelu(self.up(y)))
        return y, torch.sort(y[:, :, 0], dim=-1).values * 2


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def hammer(seconds: float) -> tuple[int, int, int]:
    """(calls, wrong results, bytes of growth) of eight threads that call one model with different shapes for so long."""
    model = Block().eval()
    free = ({0: Dim("rows", min=1, max=8), 1: Dim("length", min=1, max=64)},)
    compiled = sashiko.compile(model, (torch.randn(3, 5, 64),), dynamic_shapes=free)
    shapes = [(1 + n % 8, 1 + (n * 23) % 64) for n in range(24)]
    inputs = [torch.randn(*shape, 64) for shape in shapes]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    barrier = threading.Barrier(CALLERS + 1)

    def right(number: int) -> bool:
        return all(torch.allclose(got, wanted, rtol=1e-4, atol=1e-4) for got, wanted in zip(compiled(inputs[number]), expected[number]))

    def caller(seed: int) -> tuple[int, int]:
        warm = [right((seed + n) % len(inputs)) for n in range(len(inputs))]
        barrier.wait()  # everyone has called every shape: memory has its final size
        barrier.wait()
        calls = wrong = 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            wrong += not right((seed * 5 + calls) % len(inputs))
            calls += 1
        return calls + len(warm), wrong + warm.count(False)

    with ThreadPoolExecutor(CALLERS) as pool:
        waiting = [pool.submit(caller, n) for n in range(CALLERS)]
        barrier.wait()
        gc.collect()
        before = resident()
        barrier.wait()
        counts = [w.result() for w in waiting]
        gc.collect()
        growth = resident() - before
    return sum(c for c, _ in counts), sum(w for _, w in counts), growth


@pytest.mark.usefixtures("own_garbage")
@pytest.mark.parametrize("seconds", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_eight_threads_in_one_model(seconds: int) -> None:
    calls, wrong, growth = hammer(seconds)
    print(f"{calls} calls in {seconds} s, memory grew by {growth / 2**20:.1f} MiB")
    assert wrong == 0
    assert calls > 50 * seconds
    assert growth <= GROWTH


def test_several_models_called_at_once() -> None:
    """Models share no memory with each other."""
    models = [nn.Sequential(nn.Linear(8, 8 + n), nn.GELU(), nn.LayerNorm(8 + n)).eval() for n in range(4)]
    x = torch.randn(3, 8)
    compiled = [sashiko.compile(m, (x,)) for m in models]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda call: call(x), compiled * 50))
    for got, model in zip(results, models * 50, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(got, model(x))


def test_several_models_compiled_at_once() -> None:
    """Two threads are at the same model, and the models are as before."""
    asking, forward = nn.modules.transformer._detect_is_causal_mask, nn.LSTM.forward
    exporter = importlib.import_module("torch.export._trace")
    models = [nn.Sequential(nn.Linear(8, 8 + n), nn.GELU(), nn.LayerNorm(8 + n)).eval() for n in range(4)] * 2
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = [model(x) for model in models]

    def made(number: int) -> torch.Tensor:
        found: torch.Tensor = sashiko.compile(sashiko.quantize(models[number], [x]) if number in (1, 4) else models[number], (x,))(x)
        return found

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(made, range(len(models))))
    for got, wanted, model in zip(results, expected, models, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.1)
        assert torch.equal(model(x), wanted)
    assert (asking, forward) == (nn.modules.transformer._detect_is_causal_mask, nn.LSTM.forward)
    assert "print" not in vars(exporter)
    assert not any(logging.getLogger(name).filters for name in _LOGGED)


@pytest.mark.parametrize("dynamos", [True, False])
def test_a_forked_child_compiles_while_its_parent_does(dynamos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """dynamos: whether the lock is Dynamo's, which other versions of torch may lack."""
    monkeypatch.setattr("torch._dynamo.convert_frame.compile_lock", threading.RLock() if dynamos else None)
    begun, end = threading.Event(), threading.Event()

    def compiling() -> None:
        with alone():
            begun.set()
            end.wait()

    thread = threading.Thread(target=compiling)
    thread.start()
    begun.wait()

    def compile_another() -> bool:
        with alone(), alone():
            return True

    try:
        assert succeeds(compile_another)
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("where", ["before", "loaded", "compiled"])
def test_a_forked_child_does_not_wait_for_threads_that_are_not_there(where: str, tmp_path: Path) -> None:
    """As workers of a server are that load the model before it forks, or themselves. PyTorch itself would wait forever."""
    model, x = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).eval(), torch.randn(256, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compiled = sashiko.compile(model, x)
        compiled.save(tmp_path / "model")
        expected = compiled(x)
        makes: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
            "before": lambda: compiled, "loaded": lambda: sashiko.load(tmp_path / "model"), "compiled": lambda: sashiko.compile(model, x),
        }
        assert succeeds(lambda: torch.equal(makes[where]()(x), expected))
    finally:
        torch.set_num_threads(threads)
