"""Many callers at once, many shapes, and memory that does not grow."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sashiko.runtime import turns
from sashiko.runtime.contexts import MAX_FRAMES
from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.frames import MIN_WORK
from sashiko.runtime.plan import ConstantSource
from sashiko.runtime.records import OutputShape
from tests.forked import succeeds

Reference = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CALLERS = 8


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_eight_threads_at_once(affine: Executable, expected: Reference) -> None:
    start = threading.Barrier(CALLERS)

    def caller(seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        start.wait()
        wrong = 0
        for n in range(150):
            shape = (1 + (seed * 7 + n) % 40, 1 + n % 30)
            x, y = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
            wrong += not torch.equal(affine(x, y)[0], expected(x, y))  # type: ignore[arg-type]
        return wrong

    with ThreadPoolExecutor(CALLERS) as pool:
        assert list(pool.map(caller, range(CALLERS))) == [0] * CALLERS


def test_parallel_steps_from_several_threads(code: Code, chain: type) -> None:
    c = chain(work=MIN_WORK * 4)
    (x,) = c.inputs(1)
    middle = c.step("scale", [x], c.arena(), 2.0)
    c.step("shift", [middle], c.buffer("output", 0), 1.0)
    executable = Executable(c.plan(1, 1), code)

    def caller(seed: int) -> bool:
        data = torch.full((101, 7), float(seed))
        return all(torch.equal(executable(data)[0], data * 2 + 1) for _ in range(30))  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(caller, range(4)))


def test_who_waits_for_a_turn_has_no_results_yet(affine: Executable, expected: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    one = turns.Turns(1)
    monkeypatch.setattr(turns, "TURNS", one)
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    made = list[OutputShape]()
    maker = OutputShape.__dict__["new"].func

    def new(output: OutputShape) -> Callable[[], torch.Tensor]:
        made.append(output)
        return maker(output)  # type: ignore[no-any-return]

    monkeypatch.setattr(OutputShape, "new", property(new))
    with ThreadPoolExecutor(1) as pool:
        turn = one.take()
        waiting = pool.submit(affine, x, y)
        while not one.waiting:
            time.sleep(0.001)
        before = len(made)
        one.free.put(turn)
        one.pass_on()
        assert torch.equal(waiting.result(60)[0], expected(x, y))
    assert (before, len(made)) == (0, 1)


def test_weights_change_while_others_call(code: Code, chain: type) -> None:
    """Every result is that of some state of the weight, never a mixture, and the last state is seen in the end."""
    weight = torch.zeros(50, 40)
    c = chain()
    (x,) = c.inputs(1)
    w = c.constant(ConstantSource((weight,), lambda: torch.full((50, 40), float(weight[0, 0])), "w"))
    c.step("add", [x, w], c.buffer("output", 0))
    executable = Executable(c.plan(1, 1), code)
    data = torch.zeros(50, 40)
    stop = threading.Event()

    def caller() -> bool:
        whole = True
        while not stop.is_set():
            (got,) = executable(data)
            assert isinstance(got, torch.Tensor)
            whole &= bool((got == got[0, 0]).all())
        return whole

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(caller) for _ in range(3)]
        for n in range(1, 200):
            weight.fill_(n)
        stop.set()
        assert all(task.result() for task in waiting)
    (got,) = executable(data)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, torch.full((50, 40), 199.0))


def test_a_forked_child_sees_weights_that_another_thread_of_its_parent_was_deriving(code: Code, chain: type) -> None:
    weight, begun, end = torch.zeros(50, 40), threading.Event(), threading.Event()
    deriving = threading.Thread(target=lambda: executable(data))

    def derive() -> torch.Tensor:
        if threading.current_thread() is deriving:
            begun.set()
            end.wait(60)
        return torch.full((50, 40), float(weight[0, 0]))

    c = chain()
    (x,) = c.inputs(1)
    w = c.constant(ConstantSource((weight,), derive, "w"))
    c.step("add", [x, w], c.buffer("output", 0))
    executable, data = Executable(c.plan(1, 1), code), torch.zeros(50, 40)
    weight.fill_(3)
    deriving.start()
    begun.wait(60)
    try:
        assert succeeds(lambda: torch.equal(executable(data)[0], torch.full((50, 40), 3.0)))  # type: ignore[arg-type]
    finally:
        end.set()
        deriving.join()


@pytest.mark.usefixtures("own_garbage")
def test_memory_stays_flat_over_many_shapes(affine: Executable, expected: Reference) -> None:
    def call(n: int) -> None:
        x = torch.randn(1 + n % 300, 200)
        (got,) = affine(x, x)
        if n % 50 == 0:
            torch.testing.assert_close(got, expected(x, x), rtol=0, atol=0)

    for n in range(400):
        call(n)
    gc.collect()
    before = resident()
    for n in range(3000):
        call(n)
    gc.collect()
    assert resident() - before < 4 << 20
    assert len(affine._records) <= MAX_FRAMES
    assert len(affine._contexts) == 1
    assert len(affine._contexts[0].frames) <= MAX_FRAMES


def test_contexts_are_given_back_after_errors(affine: Executable) -> None:
    x = torch.randn(2, 2)
    affine(x, x)
    for _ in range(20):
        with contextlib.suppress(TypeError):
            affine(x, x.double())
    assert len(affine._contexts) == 1
