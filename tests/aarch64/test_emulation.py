"""The test harness itself: results, guards and refusals, natively and emulated."""

from __future__ import annotations

import numpy as np
import pytest

from sashiko.cpu_codegen.builder import F32, I32, I64, PTR, VOID, Function, Module, const, i64
from sashiko.cpu_codegen.slots import Slots
from sashiko.graph.dims import symbol
from tests.emulation import Buffer, Call, Runner, runners


def axpy(at: int = 0) -> tuple[str, tuple[object, ...]]:
    """y = 3x + y over [begin, end), reading `at` elements further on."""
    module = Module()
    fn = Function(module, "axpy", VOID, [PTR, I64, I64])
    slots = Slots(fn, (3.0,))
    x, y, shift, a = slots.buffer(0), slots.buffer(1), slots.dim(symbol("shift")), slots.number(0, 0)

    def body(i, _):
        source = fn.gep(x, fn.add(fn.add(i, shift), i64(at)), F32)
        target = fn.gep(y, i, F32)
        fn.store(fn.fma(a, fn.load(F32, source), fn.load(F32, target)), target)
        return []

    fn.loop(fn.args[1], fn.args[2], 1, [], body)
    fn.store(const(I32, 0), slots.status())
    fn.ret()
    fn.finish()
    return module.text(), slots.order


@pytest.mark.parametrize("runner", runners())
def test_runs(runner: Runner) -> None:
    text, order = axpy()
    x, y = np.arange(10, dtype=np.float32), np.ones(10, np.float32)
    got_x, got_y = runner.run(text, "axpy", [x, y], order=order, dims={"shift": 0}, begin=2, end=10)
    assert np.array_equal(got_x, x)
    assert np.array_equal(got_y, np.where(x >= 2, 3 * x + 1, 1))


@pytest.mark.parametrize("runner", runners())
def test_several_calls_share_the_arrays(runner: Runner) -> None:
    text, order = axpy()
    assert [type(slot).__name__ for slot in order] == ["BufferSlot", "BufferSlot", "DimSlot", "ParamSlot"]
    x, y, a = np.arange(8, dtype=np.float32), np.zeros(8, np.float32), np.array([2], np.float32)
    calls = [Call("axpy", (Buffer(0, 4), Buffer(1), 0, Buffer(2)), 0, 4), Call("axpy", (Buffer(0), Buffer(1), 1, Buffer(2)), 2, 7)]
    got = runner.run_calls(text, [x, y, a], calls)[1]
    assert got.tolist() == [2, 4, 12, 16, 10, 12, 14, 0]


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("shift", [-2048, 1])
def test_reads_out_of_bounds_are_found(runner: Runner, shift: int) -> None:
    text, order = axpy()
    arrays = [np.zeros(8, np.float32), np.zeros(8, np.float32)]
    with pytest.raises(AssertionError, match="SIGSEGV"):
        runner.run(text, "axpy", arrays, order=order, dims={"shift": shift}, end=8)


@pytest.mark.parametrize("runner", runners())
def test_writes_out_of_bounds_are_found(runner: Runner) -> None:
    text, order = axpy()
    arrays = [np.ones(16, np.float32), np.zeros(7, np.float32)]
    with pytest.raises(AssertionError, match="array 1 was written outside"):
        runner.run(text, "axpy", arrays, order=order, dims={"shift": 0}, end=8, align=64)


@pytest.mark.parametrize("runner", runners())
def test_the_status_word_is_compared(runner: Runner) -> None:
    text = "define void @bad(ptr %s, i64 %b, i64 %e) { %p = load ptr, ptr %s\n store i32 7, ptr %p\n ret void }"
    assert runner.run(text, "bad", [], status=7) == []
    with pytest.raises(AssertionError, match=r"status words \[7\], expected 0"):
        runner.run(text, "bad", [])


@pytest.mark.parametrize("runner", runners(needs=["i8mm"]))
def test_an_instruction_of_another_processor_is_found(runner: Runner) -> None:
    from sashiko.cpu_codegen import jit
    from sashiko.platforms.catalogue import NEOVERSE_N1
    from tests.emulation import Emulated

    text = """define void @mm(ptr %s, i64 %b, i64 %e) {
      %p = load ptr, ptr %s
      %w = load i32, ptr %p
      %l = insertelement <4 x i32> zeroinitializer, i32 %w, i32 0
      %v = bitcast <4 x i32> %l to <16 x i8>
      %a = call <4 x i32> @llvm.aarch64.neon.smmla.v4i32.v16i8(<4 x i32> zeroinitializer, <16 x i8> %v, <16 x i8> %v)
      %x = extractelement <4 x i32> %a, i32 0
      store i32 %x, ptr %p
      ret void }
      declare <4 x i32> @llvm.aarch64.neon.smmla.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)"""
    data = jit.compile_object(text, runner.target)
    assert runner.run(data, "mm", []) == []
    with pytest.raises(AssertionError, match="SIGILL"):
        Emulated(NEOVERSE_N1).run(data, "mm", [])
