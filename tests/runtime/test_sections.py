"""How the native runner cuts work: threads, grains, blocks, alternatives, the status word."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from sashiko.cpu_codegen import symbols
from sashiko.cpu_codegen.contract import BufferSlot, KernelCode
from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph.dims import Dim, symbol
from sashiko.graph.types import TensorType, f32, i64
from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.frames import MIN_WORK, pieces, team
from sashiko.runtime.plan import Buffer, InputTensor, NativeSegment, Operand, OutputTensor, Plan, Section, SegmentOutput, Step, single

N: Dim = symbol("n", 0)


def ranges_plan(work: Dim, grain: int, alternative: KernelCode | None = None, domain: Dim = N) -> Plan:
    """One step that writes, for each row, the begin of the range it was run in."""
    kernel = KernelCode("ranges", (BufferSlot(0),), domain, grain, work)
    step = Step(kernel, (Operand(0),), (0,), "ranges", 1, alternative)
    segment = NativeSegment((), (SegmentOutput(1, TensorType(i64, (N,))),), (Buffer("output", 0, 8 * N, i64),), (single(step),))
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


def test_an_alternative_is_used_when_it_has_more_pieces(code: Code) -> None:
    rows_kernel = ranges_plan(MIN_WORK, 100, KernelCode("ranges", (BufferSlot(0),), N, 10, MIN_WORK))
    assert begins(rows_kernel, code, 100) == [0, 50]
    assert begins(rows_kernel, code, 10) == [0], "one piece each way: the first form stays"


def test_blocks_run_every_step_before_the_next_block(code: Code, chain: type) -> None:
    c = chain()
    (x,) = c.inputs(1)
    middle = c.step("scale", [x], c.arena(), 2.0)
    c.step("shift", [middle], c.buffer("output", 0), 1.0)
    for work, block in ((0, 4), (0, 64), (MIN_WORK, 4), (MIN_WORK, 1)):
        steps = tuple(Step(KernelCode(s.kernel.symbol, s.kernel.slots, s.kernel.domain, 1, work), s.operands, s.writes) for s in c.steps)
        executable = Executable(c.plan(1, 1, [Section(steps, c.rows, block, 2)]), code)
        for rows in (0, 1, 3, 4, 37):
            data = torch.randn(rows, 5)
            (got,) = executable(data)
            torch.testing.assert_close(got, data * 2 + 1, rtol=0, atol=0)


def test_steps_with_their_own_rows_in_a_unit(code: Code, chain: type) -> None:
    """A unit is three rows of the first kernel and one row, three times as long, of the second."""
    c = chain(rows=3 * N, cols=4)
    (x,) = c.inputs(1)
    middle = c.step("scale", [x], c.arena(), 2.0)
    c.step("shift", [middle], c.buffer("output", 0), 1.0)
    first = Step(KernelCode("scale", c.steps[0].kernel.slots, 3 * N), c.steps[0].operands, (1,), unit_rows=3)
    wide = chain(rows=N, cols=12)
    wide.step("shift", [0], 0, 1.0)
    second = Step(wide.steps[0].kernel, c.steps[1].operands, (1,))
    executable = Executable(c.plan(1, 1, [Section((first, second), N, 2)]), code)
    data = torch.randn(21, 4)
    (got,) = executable(data)
    torch.testing.assert_close(got, data * 2 + 1, rtol=0, atol=0)


def test_blocks_off_the_grain_are_refused(code: Code, chain: type) -> None:
    c = chain()
    (x,) = c.inputs(1)
    c.step("scale", [x], c.buffer("output", 0), 2.0)
    kernel = KernelCode("scale", c.steps[0].kernel.slots, c.rows, 16)
    section = Section((Step(kernel, c.steps[0].operands, (1,)),), c.rows, 8, 16)
    with pytest.raises(InvalidGraph, match="grain 16"):
        Executable(c.plan(1, 1, [section]), code)(torch.zeros(100, 2))


def check_plan() -> Plan:
    kernel = KernelCode("check", (BufferSlot(0), BufferSlot(1)), N)
    buffers = (Buffer("input", 0, 4 * N, f32), Buffer("arena", 0, 4 * N, f32), Buffer("output", 0, 4 * N, f32))
    first = Step(kernel, (Operand(0), Operand(1)), (1,), "first look")
    second = Step(kernel, (Operand(1), Operand(2)), (1,), "second look")
    kind = TensorType(f32, (N,))
    segment = NativeSegment((0,), (SegmentOutput(1, kind),), buffers, (single(first), single(second)))
    return Plan((InputTensor("x", kind, 0),), (OutputTensor(1),), (segment,))


def test_the_status_word_becomes_an_index_error(code: Code) -> None:
    executable = Executable(check_plan(), code)
    with pytest.raises(IndexError, match="first look"):
        executable(torch.tensor([1.0, -1.0]))
    (got,) = executable(torch.tensor([1.0, 2.0]))
    assert isinstance(got, torch.Tensor)
    assert got.tolist() == [1.0, 2.0], "the next call starts clean"


def test_times_name_every_section(code: Code) -> None:
    executable = Executable(check_plan(), code)
    times = executable.times(torch.ones(100), repeat=2)
    assert [t.label for t in times] == ["first look", "second look"]
    assert all(t.seconds > 0 for t in times)
    with pytest.raises(IndexError, match="first look"):
        executable.times(-torch.ones(3))
    (got,) = executable(torch.ones(3))
    assert isinstance(got, torch.Tensor)
    assert got.tolist() == [1.0] * 3, "whole calls run all sections again"


PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_that_never_come_are_not_waited_for(code: Code, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    asked: list[int] = []

    @PARALLEL
    def leader_only(function: int, data: int, team_size: int, flags: int) -> None:
        asked.append(team_size)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)

    real = symbols.address
    stand_in = ctypes.cast(leader_only, ctypes.c_void_p).value
    monkeypatch.setattr(symbols, "address", lambda name: stand_in if name == "GOMP_parallel" else real(name))
    torch.set_num_threads(threads)
    assert begins(ranges_plan(MIN_WORK * 100, 1), code, 1200) == [1200 // threads * n for n in range(threads)]
    assert asked == [threads]
