"""Weights are watched: a changed one is derived again before the next result."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sashiko.diagnostics.errors import InputError
from sashiko.runtime import constants
from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.plan import ConstantSource


class Weights:
    """(x + 2 * w) + v, with a count of how often each constant was derived."""

    def __init__(self, code: Code, chain: type, w: torch.Tensor, v: torch.Tensor) -> None:
        self.w, self.v = w, v
        self.derived = {"w": 0, "v": 0}
        c = chain()
        (x,) = c.inputs(1)
        packed = c.constant(ConstantSource((w,), self.double, "w packed"))
        plain = c.constant(ConstantSource((v,), self.same, "v"))
        total = c.step("add", [x, packed], c.arena())
        c.step("add", [total, plain], c.buffer("output", 0))
        self.executable = Executable(c.plan(1, 1), code)

    def double(self) -> torch.Tensor:
        self.derived["w"] += 1
        return self.w * 2

    def same(self) -> torch.Tensor:
        self.derived["v"] += 1
        return self.v

    def check(self) -> None:
        x = torch.randn(self.w.shape)
        (got,) = self.executable(x)
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, (x + 2 * self.w + self.v).detach(), rtol=0, atol=0)


@pytest.fixture(params=["native", "python", "inference"])
def weights(request: pytest.FixtureRequest, code: Code, chain: type, monkeypatch: pytest.MonkeyPatch) -> Weights:
    """Watched by native code, by Python where torch has no handles, and without versions."""
    if request.param == "python":
        monkeypatch.setattr(constants, "_native_watch_available", lambda: False)
    if request.param == "inference":
        with torch.inference_mode():
            w, v = torch.randn(3, 4), torch.randn(3, 4)
    else:
        w, v = torch.nn.Parameter(torch.randn(3, 4)), torch.randn(3, 4)
    return Weights(code, chain, w, v)


def test_unchanged_weights_are_derived_once(weights: Weights) -> None:
    for _ in range(5):
        weights.check()
    assert weights.derived == {"w": 1, "v": 1}


def test_a_change_in_place_is_noticed(weights: Weights) -> None:
    weights.check()
    mode = torch.inference_mode if weights.w.is_inference() else torch.no_grad
    with mode():
        weights.w.add_(1)
    weights.check()
    assert weights.derived == {"w": 2, "v": 1}, "only what came from the changed weight is made again"
    with mode():
        weights.v[1, 2] = 7
    weights.check()


def test_a_change_through_one_of_two_weights_in_the_same_memory_is_one_of_both(code: Code, chain: type) -> None:
    w = torch.nn.Parameter(torch.randn(3, 3))
    weights = Weights(code, chain, w, torch.nn.Parameter(w.data.t()))
    for written in (weights.w, weights.v):
        with torch.no_grad():
            written.mul_(2)
        weights.check()
    assert weights.derived == {"w": 3, "v": 3}


def test_other_weights_without_versions_are_noticed() -> None:
    """Large ones by some of their bytes; those of memory that ends early or was freed are looked at without reading beyond it."""
    with torch.inference_mode():
        large, turned, repeated, freed = torch.randn(300, 200), torch.randn(300, 200).t(), torch.randn(1, 1).expand(50, 50), torch.randn(99)
        freed.untyped_storage().resize_(0)
        for tensor in (large, turned, repeated, freed, torch.empty(0)):
            before = constants.look(tensor)
            assert before.version == constants.NO_VERSION
            assert constants.look(tensor) == before
            if tensor is large or tensor is turned:
                tensor.copy_(torch.randn_like(tensor))
                assert constants.look(tensor) != before


@pytest.mark.parametrize("traced", [False, True])
def test_a_fused_step_is_noticed(code: Code, chain: type, traced: bool) -> None:
    """PyTorch's fused kernels do not count what they write."""
    weights = Weights(code, chain, torch.nn.Parameter(torch.randn(3, 4)), torch.randn(3, 4))
    optimizer = torch.optim.AdamW([weights.w], lr=0.1, fused=True)
    weights.w.grad = torch.ones(3, 4)
    step = torch.compile(optimizer.step, backend="aot_eager") if traced else optimizer.step
    for _ in range(2):
        step()
        weights.check()
    assert weights.derived == {"w": 3, "v": 1}


def test_a_step_whose_gradients_are_gone_is_noticed(code: Code, chain: type) -> None:
    weights = Weights(code, chain, torch.nn.Parameter(torch.randn(3, 4)), torch.randn(3, 4))
    optimizer = torch.optim.AdamW([weights.w], lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())
    weights.w.grad = torch.ones(3, 4)
    optimizer.step()
    weights.check()
    assert weights.derived == {"w": 2, "v": 1}


def test_what_no_model_watches_is_not_counted(code: Code, chain: type) -> None:
    """Backward passes of others go on as if nothing had been compiled."""

    class Waiting(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            """Its steps are collected."""

    Weights(code, chain, torch.nn.Parameter(torch.randn(3, 4)), torch.randn(3, 4))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    loss = model(torch.randn(2, 3)).square().sum()
    loss.backward(retain_graph=True)
    Waiting(model.parameters(), {}).step()
    loss.backward()


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("size", [1, 3, 16, 41, 900])
def test_statistics_of_batch_norm_are_noticed(code: Code, chain: type, size: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm does not count what it writes either."""
    if not native:
        monkeypatch.setattr(constants, "_native_watch_available", lambda: False)
    mean = torch.zeros(size)
    weights = Weights(code, chain, torch.nn.Parameter(torch.randn(1, size)), mean)
    for _ in range(2):
        weights.check()
        F.batch_norm(torch.randn(5, size), mean, torch.ones(size), training=True)
    weights.check()
    assert weights.derived == {"w": 1, "v": 3}


def test_new_storage_is_noticed(weights: Weights) -> None:
    weights.check()
    weights.w.data = torch.randn(3, 4)
    weights.check()
    with torch.inference_mode():
        weights.w.data = torch.randn(3, 4)
    weights.check()
    weights.check()


def test_old_data_keeps_its_address_until_the_change_is_noticed(weights: Weights) -> None:
    """Otherwise new data could be given the same memory, and look unchanged."""
    owner = np.ones((3, 4), dtype=np.float32)
    alive = weakref.ref(owner)
    weights.w.data = torch.from_numpy(owner)
    del owner
    weights.check()
    weights.w.data = torch.randn(3, 5)
    with pytest.raises(InputError):
        weights.executable(torch.randn(3, 4))
    assert alive() is not None
    weights.w.data = torch.randn(3, 4)
    weights.check()
    assert alive() is None


def test_looking_at_times_does_not_stop_the_watch(weights: Weights) -> None:
    weights.executable.times(torch.randn(3, 4), repeat=1)
    weights.check()
    weights.w.data = torch.randn(3, 4)
    weights.check()
    weights.w.data = torch.randn(3, 4)
    weights.executable.times(torch.randn(3, 4), repeat=1)
    weights.check()


def test_another_shape_is_an_error(weights: Weights) -> None:
    weights.check()
    weights.w.data = torch.randn(3, 5)
    for _ in range(2):
        with pytest.raises(InputError, match=r"w packed was torch.float32\[3, 4\] .* now torch.float32\[3, 5\]"):
            weights.executable(torch.randn(3, 4))
    weights.w.data = torch.randn(3, 4)
    weights.check()


@pytest.mark.usefixtures("own_garbage")
def test_nothing_is_kept_alive_afterwards(code: Code, chain: type) -> None:
    w = torch.nn.Parameter(torch.randn(3, 4))
    holder = Weights(code, chain, w, torch.zeros(3, 4))
    holder.check()
    gone, data = weakref.ref(holder.executable), weakref.ref(w)
    del holder, w
    gc.collect()
    assert gone() is None
    assert data() is None


def test_no_weights_at_all(code: Code, chain: type) -> None:
    c = chain()
    (x,) = c.inputs(1)
    fixed = c.constant(ConstantSource((), lambda: torch.full((2, 2), 3.0), "three"))
    c.step("add", [x, fixed], c.buffer("output", 0))
    (got,) = Executable(c.plan(1, 1), code)(torch.zeros(2, 2))
    assert isinstance(got, torch.Tensor)
    assert got.tolist() == [[3.0, 3.0], [3.0, 3.0]]
