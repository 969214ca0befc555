"""How the native runner cuts work: threads, grains, alternatives, the status word."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from sashiko.cpu_codegen import symbols
from sashiko.cpu_codegen.contract import BufferSlot, KernelCode
from sashiko.graph.dims import Dim, symbol
from sashiko.graph.types import TensorType, f32, i64
from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.frames import MIN_WORK, largest_share, pieces, team
from sashiko.runtime.plan import Buffer, InputTensor, NativeSegment, Operand, OutputTensor, Plan, SegmentOutput, Step
from sashiko.runtime.team import MOST

N: Dim = symbol("n", 0)


def ranges_plan(work: Dim, grain: int, alternative: KernelCode | None = None, domain: Dim = N) -> Plan:
    """One step that writes, for each row, the begin of the range it was run in."""
    kernel = KernelCode("ranges", (BufferSlot(0),), domain, grain, work)
    step = Step(kernel, (Operand(0),), (0,), "ranges", alternative)
    segment = NativeSegment((), (SegmentOutput(1, TensorType(i64, (N,))),), (Buffer("output", 0, 8 * N, i64),), (step,))
    return Plan((InputTensor("x", TensorType(f32, (N,)), 0),), (OutputTensor(1),), (segment,))


def begins(plan: Plan, code: Code, rows: int) -> list[int]:
    """The distinct begins of the ranges."""
    (got,) = Executable(plan, code)(torch.zeros(rows))
    assert isinstance(got, torch.Tensor)
    return sorted(set(got.tolist()))


CUTS = ((100, 1, [0, 50]), (100, 16, [0, 48]), (17, 16, [0, 16]), (16, 16, [0]), (1, 1, [0]))


@pytest.mark.parametrize(("rows", "grain", "expected"), CUTS)
def test_two_threads_cut_at_multiples_of_the_grain(code: Code, rows: int, grain: int, expected: list[int]) -> None:
    assert begins(ranges_plan(MIN_WORK, grain), code, rows) == expected


def test_large_results_have_a_kernel_of_their_own(code: Code, chain: type) -> None:
    c = chain()
    (x,) = c.inputs(1)
    c.step("shift", [x], c.buffer("output", 0), 2.0)
    (step,) = c.steps
    large = replace(step.kernel, symbol="scale")
    c.steps[:] = [replace(step, large=large, large_from=400)]
    executable = Executable(c.plan(1, 1), code)
    for rows, of in ((9, torch.add), (10, torch.mul), (11, torch.mul), (1, torch.add)):
        data = torch.randn(rows, 10)
        (got,) = executable(data)
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, of(data, 2.0))


def test_small_work_stays_in_the_calling_thread(code: Code) -> None:
    assert begins(ranges_plan(MIN_WORK - 1, 1), code, 100) == [0]


def test_the_number_of_threads_is_read_on_every_call(code: Code) -> None:
    executable = Executable(ranges_plan(MIN_WORK * 100, 1), code)
    for threads in (1, 4, 2, 3):
        torch.set_num_threads(threads)
        (got,) = executable(torch.zeros(1200))
        assert isinstance(got, torch.Tensor)
        assert sorted(set(got.tolist())) == [1200 // threads * n for n in range(threads)]


def test_work_below_the_minimum_of_the_environment_is_not_split(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASHIKO_THREADS_MIN_WORK", "0")
    assert begins(ranges_plan(1, 1), code, 10) == [0, 5]


def test_team() -> None:
    assert team(99, 8, 100) == 1
    assert team(100, 8, 100) == 2
    assert team(10000, 8, 100) == 8
    assert team(0, 8, 0) == 8
    assert pieces(0, 16) == 0
    assert pieces(17, 16) == 2


def test_an_alternative_is_used_when_it_has_enough_pieces(code: Code) -> None:
    rows_kernel = ranges_plan(MIN_WORK, 100, KernelCode("ranges", (BufferSlot(0),), N, 10, MIN_WORK))
    assert begins(rows_kernel, code, 100) == [0, 50]
    assert begins(rows_kernel, code, 10) == [0], "one piece each way: the first form stays"


def test_an_alternative_is_used_when_its_threads_have_more_even_shares(code: Code) -> None:
    plan = ranges_plan(MIN_WORK, 100, KernelCode("ranges", (BufferSlot(0),), N, 10, MIN_WORK))
    assert begins(plan, code, 300) == [0, 150], "not one hundred and two hundred"
    assert begins(plan, code, 1900) == [0, 900], "ten pieces of nineteen are even enough"
    assert begins(plan, code, 210) == [0, 100], "the last of three pieces is small"


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
def test_the_largest_share(threads: int) -> None:
    for rows in range(1, 60):
        for grain in (1, 4, 14):
            grains = pieces(rows, grain)
            parts = min(threads, grains)
            ends = [min(rows, grains * share // parts * grain) for share in range(parts + 1)]
            largest = max(b - a for a, b in pairwise(ends))
            assert largest_share(rows, grain, threads) == largest / rows
    assert largest_share(0, 4, threads) == 0


def check_plan() -> Plan:
    kernel = KernelCode("check", (BufferSlot(0), BufferSlot(1)), N)
    buffers = (Buffer("input", 0, 4 * N, f32), Buffer("arena", 0, 4 * N, f32), Buffer("output", 0, 4 * N, f32))
    first = Step(kernel, (Operand(0), Operand(1)), (1,), "first look")
    second = Step(kernel, (Operand(1), Operand(2)), (1,), "second look")
    kind = TensorType(f32, (N,))
    segment = NativeSegment((0,), (SegmentOutput(1, kind),), buffers, (first, second))
    return Plan((InputTensor("x", kind, 0),), (OutputTensor(1),), (segment,))


def test_the_status_word_becomes_an_index_error(code: Code) -> None:
    executable = Executable(check_plan(), code)
    with pytest.raises(IndexError, match="first look"):
        executable(torch.tensor([1.0, -1.0]))
    (got,) = executable(torch.tensor([1.0, 2.0]))
    assert isinstance(got, torch.Tensor)
    assert got.tolist() == [1.0, 2.0], "the next call starts clean"


def test_times_name_every_step(code: Code) -> None:
    executable = Executable(check_plan(), code)
    times = executable.times(torch.ones(100), repeat=2)
    assert [t.label for t in times] == ["first look", "second look"]
    assert all(t.seconds > 0 for t in times)
    assert [t.label for t in executable.times(torch.ones(100), repeat=2, again=3)] == ["first look", "second look"]
    for again in (1, 2):
        with pytest.raises(IndexError, match="first look"):
            executable.times(-torch.ones(3), again=again)
    (got,) = executable(torch.ones(3))
    assert isinstance(got, torch.Tensor)
    assert got.tolist() == [1.0] * 3, "whole calls run all steps again"


@pytest.mark.parametrize("backwards", [False, True])
def test_repeated_steps_walk_through_their_operands(code: Code, repeated: Callable[..., Plan], backwards: bool) -> None:
    executable = Executable(repeated(backwards), code)
    for rows, cols in ((1, 3), (2, 3), (7, 1), (7, 5), (40, 3), (2, 3)):
        x, state = torch.rand(rows, cols) / 2, torch.rand(cols)
        expected, now = torch.empty(rows, cols), state
        for t in reversed(range(rows)) if backwards else range(rows):
            now = expected[t] = 2 * (now + x[t])
        for _ in range(2):  # a run leaves the frame as it was
            (got,) = executable(x, state)
            assert isinstance(got, torch.Tensor) and torch.equal(got, expected)


def test_a_repeated_step_is_timed_with_all_its_turns(code: Code, repeated: Callable[..., Plan]) -> None:
    executable = Executable(repeated(), code)
    seconds = [[t.seconds for t in executable.times(torch.rand(rows, 64), torch.rand(64), repeat=5)] for rows in (2, 20000)]
    assert len(seconds[0]) == 2 and sum(seconds[1]) > 20 * sum(seconds[0])
    (got,) = executable(torch.zeros(3, 1), torch.ones(1))
    assert isinstance(got, torch.Tensor) and got.flatten().tolist() == [2.0, 4.0, 8.0]


PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


@pytest.mark.parametrize(("threads", "team_size"), [(2, 2), (4, 4), (MOST + 1, MOST)])
def test_threads_that_never_come_are_not_waited_for(code: Code, monkeypatch: pytest.MonkeyPatch, threads: int, team_size: int) -> None:
    asked: list[int] = []

    @PARALLEL
    def leader_only(function: int, data: int, count: int, flags: int) -> None:
        asked.append(count)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)

    real = symbols.address
    stand_in = ctypes.cast(leader_only, ctypes.c_void_p).value
    monkeypatch.setattr(symbols, "address", lambda name: stand_in if name == "GOMP_parallel" else real(name))
    torch.set_num_threads(threads)
    assert begins(ranges_plan(MIN_WORK * 1000, 1), code, 1200) == [1200 * n // team_size for n in range(team_size)]
    assert asked == [team_size]


@pytest.mark.parametrize(("waiting", "steps", "expected"), [(0, 8, 0), (3, 8, 2), (3, 7, 0)])
def test_a_long_run_makes_way_where_callers_wait(
    code: Code, chain: type, monkeypatch: pytest.MonkeyPatch, waiting: int, steps: int, expected: int
) -> None:
    offers: list[None] = []

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def offer() -> int:
        offers.append(None)
        return 0

    real, stand_in = symbols.address, ctypes.cast(offer, ctypes.c_void_p).value
    monkeypatch.setattr(symbols, "address", lambda name: stand_in if name == "sched_yield" else real(name))
    monkeypatch.setattr("sashiko.runtime.frames.CALLERS", (ctypes.c_int64 * 2)(0, waiting))
    c = chain()
    (x,) = c.inputs(1)
    for n in range(steps):
        x = c.step("shift", [x], c.buffer("output", 0) if n == steps - 1 else c.arena(), 1.0)
    (got,) = Executable(c.plan(1, 1), code)(torch.zeros(3, 4))
    assert isinstance(got, torch.Tensor) and bool((got == steps).all())
    assert len(offers) == expected
