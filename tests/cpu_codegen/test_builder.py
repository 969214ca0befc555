"""What is known while code is written is not computed by it."""

from __future__ import annotations

import numpy as np
import pytest

from sashiko.cpu_codegen.builder import F64, I64, PTR, VOID, Function, Module, Ty, Val, const, const_vec, i64
from sashiko.cpu_codegen.slots import Slots
from tests.emulation import Runner, runners, runners_in_turn


def test_numbers_that_are_known_make_no_code() -> None:
    fn = Function(Module(), "f", VOID, [I64])
    before = fn.args[0]
    found = [fn.add(i64(40), i64(2)), fn.sub(i64(2), i64(9)), fn.mul(i64(6), i64(7)), fn.udiv(i64(40), i64(9)), fn.smin(i64(3), i64(8)),
             fn.smax(i64(3), i64(8)), fn.add(before, i64(0)), fn.mul(before, i64(1))]
    assert [value.ref for value in found] == ["42", "-7", "42", "4", "3", "8", before.ref, before.ref]


def test_what_is_not_known_is_computed() -> None:
    fn = Function(Module(), "f", VOID, [I64])
    for value in (fn.udiv(i64(1), i64(0)), fn.add(i64(-1), i64(2)), fn.smin(fn.args[0], i64(8))):
        assert isinstance(value, Val) and value.ref.startswith("%")


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("condition", [False, True])
def test_masked_loads_of_several_registers_under_a_condition(runner: Runner, condition: bool) -> None:
    """LLVM 22, for AVX2, reads what is masked off by constants where the condition is one bit that was shuffled into all lanes."""
    half = runner.target.lanes(64)
    fn = Function(module := Module(), "f", VOID, [PTR, I64, I64])
    slots = Slots(fn)
    mask = fn.splat(fn.icmp("slt", fn.args[1], fn.args[2]), 2 * half)
    mask = fn.and_(mask, const_vec(mask.ty, [True] * half + [False] * half))
    ty = F64.vec(2 * half)
    fn.store(fn.masked_load(ty, slots.buffer(0), mask, const(ty, 0)), slots.buffer(1))
    fn.ret()
    fn.finish()
    numbers = np.arange(1.0, 1 + half)
    _, got = runner.run(module.text(), "f", [numbers, np.ones(2 * half)], end=int(condition))
    assert got.tolist() == [*(numbers * condition), *np.zeros(half)]


@pytest.mark.parametrize("runner", runners_in_turn())
@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_lanes_of_conditions_while_registers_are_in_use(runner: Runner, bits: int, lanes: int) -> None:
    """LLVM 22.1.0 reads the signs of a vector from another register than that which it is in, where that has a high number."""
    fn = Function(module := Module(), "f", VOID, [PTR, I64, I64])
    slots = Slots(fn)
    signs, numbers, some, result = (slots.buffer(n) for n in range(4))
    ty, wide = Ty(f"i{bits}", lanes), F64.vec(runner.target.lanes(64))
    held = [fn.load(wide, fn.gep(numbers, i64(8 * wide.lanes * n))) for n in range(20)]
    compared = fn.icmp("slt", fn.add(fn.load(ty, signs), fn.load(ty, fn.gep(signs, i64(ty.lanes * bits // 8)))), const(ty, 0))
    condition = fn.splat(fn.icmp("slt", fn.args[1], fn.args[2]), lanes)
    for n, mask in enumerate((compared, condition)):
        for lane in range(lanes):
            found = fn.load(F64, fn.select(fn.extract(mask, lane), fn.gep(some, i64(8 * lane)), numbers))
            fn.store(found, fn.gep(result, i64(8 * (n * lanes + lane))))
    for n, value in enumerate(held):
        fn.store(fn.mul(value, held[n - 1]), fn.gep(result, i64(8 * (2 * lanes + wide.lanes * n))))
    fn.ret()
    fn.finish()
    negative = np.random.default_rng(0).integers(0, 2, lanes)
    signed = np.concatenate([-5 * negative, np.full(lanes, 2)]).astype(f"int{bits}")
    given, others = np.arange(1.0, 1 + 20 * wide.lanes), -np.arange(1.0, 1 + lanes)
    for end in (0, 1):
        *_, got = runner.run(module.text(), "f", [signed, given, others, np.zeros(2 * lanes + len(given))], end=end)
        assert got[:lanes].tolist() == np.where(negative, others, 1.0).tolist()
        assert got[lanes : 2 * lanes].tolist() == (others if end else np.ones(lanes)).tolist()
        rows = given.reshape(20, wide.lanes)
        assert got[2 * lanes :].tolist() == (rows * np.roll(rows, 1, 0)).reshape(-1).tolist()
