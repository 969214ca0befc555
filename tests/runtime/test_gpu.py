"""Executables for GPUs on a simulated one: results, sizes, weights, where tensors begin, errors, and launches in native code."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from sashiko.diagnostics.errors import InputError
from sashiko.graph import lower
from sashiko.runtime import cuda
from sashiko.runtime.plan import AtenStep, NativeSegment
from sashiko.runtime.replay import can_replay
from tests.simulated_gpu import compiled, executable, on_gpu


def test_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(6, 100), torch.randn(100)
    fast = compiled(monkeypatch, lambda x, w: (F.layer_norm(x, (100,), w), x.sum(0), torch.softmax(x, -1).bfloat16()), x, w)
    for got, expected in zip(fast(x, w), (F.layer_norm(x, (100,), w), x.sum(0), torch.softmax(x, -1).bfloat16()), strict=True):
        torch.testing.assert_close(got, expected)


def test_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.pad(torch.cat([x, x * 2], 1), (1, 2, 3, 4)) + 1

    x = torch.randn(1, 2, 6, 6)
    for got, expected in zip(compiled(monkeypatch, model, x)(x), model(x), strict=True):
        torch.testing.assert_close(got, expected)


def test_products_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of tensors on a GPU; views that only products read are PyTorch's, and nothing is copied for them."""

    def model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = (F.gelu(x) @ w).view(2, 3, 2, 4).transpose(1, 2)
        return (heads @ v).transpose(1, 2).reshape(6, 10) + 1

    x, w, v = torch.randn(6, 8), torch.randn(8, 8), torch.randn(2, 2, 4, 5)
    captured = on_gpu(model, x, w, v)
    assert captured.device == torch.device("cuda", 0)
    fast = executable(monkeypatch, captured)
    torch.testing.assert_close(fast(x, w, v)[0], model(x, w, v))
    left = [str(s.target) for s in fast.plan.segments if isinstance(s, AtenStep)]
    assert left.count("aten.mm.default") == 1 and left.count("aten.bmm.default") == 1 and "aten.permute.default" in left
    kernels = [step.label for s in fast.plan.segments if isinstance(s, NativeSegment) for step in s.steps]
    assert len(kernels) == 2, kernels


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8)
    fast = compiled(monkeypatch, lambda x: x * 2 + x.sum(0), x, dynamic_shapes=(({0: Dim("n", min=2, max=100)},),))
    for rows in (2, 5, 9):
        y = torch.randn(rows, 8)
        torch.testing.assert_close(fast(y)[0], y * 2 + y.sum(0))
    with pytest.raises(InputError, match="dimension 1"):
        fast(torch.randn(3, 9))
    with pytest.raises(InputError, match=r"expected torch\.float32"):
        fast(torch.randn(3, 8).double())


def test_where_tensors_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are read at multiples of their size: what begins elsewhere is copied; so is what does not lie row by row."""
    fast = compiled(monkeypatch, lambda x: x + 1, torch.randn(4, 8))
    whole = torch.randn(4 * 8 + 1)
    for x in (whole[1:].view(4, 8), whole[:32].view(8, 4).t(), torch.randn(1, 8).expand(4, 8)):
        assert torch.equal(fast(x)[0], x + 1)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift.exp()


def test_weights_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Weighted(), torch.randn(3, 8)
    fast = compiled(monkeypatch, model, x)
    for weight in (model.scale, model.shift):
        torch.testing.assert_close(fast(x)[0], model(x).detach())
        with torch.no_grad():
            weight.add_(1)
    torch.testing.assert_close(fast(x)[0], model(x).detach())


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.mm(torch.relu(x), self.weight.t()) + self.weight.sum()


def test_pytorch_reads_weights_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed weight is a view of the weight, not a copy of it."""
    monkeypatch.setattr(lower, "CPU", torch.device("meta"))  # products are left as on a GPU
    model, x = Product(), torch.randn(3, 8)
    fast = compiled(monkeypatch, model, x)
    assert any("mm" in str(s.target) for s in fast.plan.segments if isinstance(s, AtenStep))
    torch.testing.assert_close(fast(x)[0], model(x).detach())
    (transposed,) = [t for t in fast.constants() if t.shape == (8, 5)]
    assert transposed.data_ptr() == model.weight.data_ptr() and not transposed.is_contiguous()


def test_the_next_call_tells_of_an_index_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    table, places = torch.randn(10, 4), torch.tensor([1, 2])
    fast = compiled(monkeypatch, lambda w, i: F.embedding(i, w) * 2, table, places)
    fast(table, torch.tensor([1, 10]))
    with pytest.raises(IndexError, match="in an earlier call"):
        fast(table, places)
    torch.testing.assert_close(fast(table, places)[0], table[places] * 2)


def test_launches() -> None:
    """Rows without blocks are left out; after a launch that fails there are none."""
    seen: list[tuple[int, int, int]] = []

    def launch(function: int, *rest: int) -> int:
        seen.append((function, rest[0], rest[3]))
        return 700 if function == 3 else 0

    words = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    callback = ctypes.CFUNCTYPE(ctypes.c_int, *words)(launch)
    address = ctypes.cast(callback, ctypes.c_void_p).value or 0
    rows = (ctypes.c_int64 * 16)(1, 5, 32, 64, 2, 0, 32, 64, 3, 7, 64, 64, 4, 1, 32, 64)
    assert cuda.launcher()(ctypes.addressof(rows), 2, 0, address) == 0 and seen == [(1, 5, 32)]
    assert cuda.launcher()(ctypes.addressof(rows), 4, 0, address) == 700 and seen[1:] == [(1, 5, 32), (3, 7, 64)]


def test_a_thread_without_a_context_gets_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; a thread that has one keeps it."""
    current, entered = {"main": 5}, list[tuple[str, int]]()

    class Driver:
        def cuCtxGetCurrent(self, found: Any) -> int:
            found._obj.value = current.get(threading.current_thread().name)
            return 0

        def cuCtxSetCurrent(self, context: Any) -> int:
            entered.append((threading.current_thread().name, context.value))
            current[threading.current_thread().name] = context.value
            return 0

    monkeypatch.setattr(cuda, "driver", Driver)
    module = object.__new__(cuda.CudaModule)
    module._context = 9
    for name in ("main", "other"):
        thread = threading.Thread(target=lambda: [module.enter() for _ in range(3)], name=name)
        thread.start()
        thread.join()
    assert entered == [("other", 9)]


def test_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose work follows from their shapes, of several steps; attention that drops nothing draws no random numbers."""

    def chain(x: torch.Tensor, *then: torch.Tensor) -> torch.Tensor:
        for w in then:
            x = torch.relu(x) @ w
        return x + 1

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    replays = [can_replay(executable(monkeypatch, on_gpu(chain, x, *[w] * count)).plan) for count in (0, 3)]
    assert replays == [False, True]
    q = torch.randn(1, 2, 16, 32).bfloat16()

    def attend(q: torch.Tensor, dropout: float) -> torch.Tensor:
        attention = torch.ops.aten._scaled_dot_product_flash_attention
        for _ in range(2):
            q = attention(torch.relu(q), q + 1, q + 2, dropout)[0] * 2
        return q

    for dropout, expected in ((0.0, True), (0.5, False)):
        plan = executable(monkeypatch, on_gpu(partial(attend, dropout=dropout), q)).plan
        assert any("flash_attention" in str(s.target) for s in plan.segments if isinstance(s, AtenStep))
        assert can_replay(plan) == expected
    decomposed = executable(monkeypatch, on_gpu(lambda x: torch.relu(torch.linalg.svd(torch.relu(torch.relu(x) @ x) @ x)[0]) + 1, x)).plan
    assert any("linalg" in str(s.target) for s in decomposed.segments if isinstance(s, AtenStep)) and not can_replay(decomposed)
    masked = executable(monkeypatch, on_gpu(lambda x: torch.relu(torch.relu(x) @ x) @ torch.relu(torch.bernoulli(x)), x)).plan
    assert not can_replay(masked)
