"""The exponential of attention against float64."""

from __future__ import annotations

import numpy as np
import pytest

from sashiko.cpu_codegen.builder import F32, I64, PTR, VOID, Function, Module, Val, const, i64
from sashiko.cpu_codegen.slots import Slots
from sashiko.kernels.attention_softmax import octaves, short_pair, short_weight, weight
from tests.emulation import Array, Runner, runners


def computed(runner: Runner, x: Array, short: bool, largest: float = 0.0) -> Array:
    """e^(x - largest)."""
    module = Module()
    fn = Function(module, "weights", VOID, [PTR, I64, I64])
    slots, lanes = Slots(fn), runner.target.lanes(32)

    def vector(at: Val, _: list[Val]) -> list[Val]:
        place = fn.gep(slots.buffer(0), at, F32)
        value, top = fn.load(F32.vec(lanes), place), const(F32.vec(lanes), largest)
        rate = octaves(fn, value, None)
        found = short_weight(fn, runner.target, value, rate, fn.mul(top, rate)) if short else weight(fn, fn.sub(value, top))
        fn.store(found, place)
        return []

    fn.loop(i64(0), i64(len(x)), lanes, [], vector)
    fn.ret()
    fn.finish()
    return runner.run(module.text(), "weights", [x], order=slots.order)[0]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("runner", runners())
def test_weights(runner: Runner, short: bool) -> None:
    x = np.concatenate([np.linspace(-87, 0, 4000), -np.logspace(-9, 0, 1000)]).astype(np.float32)
    x = x[: len(x) // 16 * 16]
    got, wanted = computed(runner, x, short).astype(np.float64), np.exp(x.astype(np.float64))
    bound = 2.0**-13.6 if short else 2.0**-23 + np.abs(x) * 2.0**-24
    assert (np.abs(got - wanted) <= bound * wanted).all()


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("runner", runners())
def test_edges(runner: Runner, short: bool) -> None:
    edges = [-np.inf, -3.4e38, -1000.0, -104.0, -88.0, np.nan, 0.0, -0.0] * 2
    got = computed(runner, np.array(edges, np.float32), short)
    # Below 2^-126 the short one may be right instead of 0.
    assert (got[:3] == 0).all() and (got[3:5] <= (np.exp([-104.0, -88.0]) * (1 + 2.0**-13) if short else 0)).all()
    assert np.isnan(got[5]) and np.abs(got[6:8] - 1).max() <= 2.0**-13


@pytest.mark.parametrize("runner", runners())
def test_short_weights_beside_a_large_score(runner: Runner) -> None:
    """All of them may be off by the same factor, which the sum of the weights has too."""
    largest = np.float32(1234.567)
    x = (largest - np.concatenate([np.linspace(0, 80, 2000), np.full(8, 3.5)])).astype(np.float32)
    x = x[: len(x) // 16 * 16]
    got = computed(runner, x, True, float(largest)).astype(np.float64)
    wanted = np.exp(x.astype(np.float64) - float(largest))
    ratio = got / wanted
    assert abs(ratio[0] - 1) <= float(largest) * 2.0**-24 + 2.0**-13.6
    assert np.ptp(ratio) <= 2.0**-12.5


@pytest.mark.parametrize("runner", runners())
def test_pairs_of_short_weights(runner: Runner) -> None:
    """Rounded to the nearest bf16, ties and numbers that carry into the exponent among them."""
    lanes = runner.target.lanes(32)
    even, odd = np.random.default_rng(0).random((2, 64 * lanes), np.float32)
    even[:4] = [0.0, 1.0, 1 + 2.0**-8, 1 - 2.0**-24]
    module = Module()
    fn = Function(module, "pairs", VOID, [PTR, I64, I64])
    slots = Slots(fn)

    def vector(at: Val, _: list[Val]) -> list[Val]:
        first, second, both = (fn.gep(slots.buffer(n), at, F32) for n in range(3))
        fn.store(short_pair(fn, fn.load(F32.vec(lanes), first), fn.load(F32.vec(lanes), second)), both)
        return []

    fn.loop(i64(0), i64(len(even)), lanes, [], vector)
    fn.ret()
    fn.finish()
    found = runner.run(module.text(), "pairs", [even, odd, np.zeros(len(even), np.uint32)], order=slots.order)[2]
    for words, exact in ((found & 0xFFFF, even), (found >> 16, odd)):
        got = (words << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        _, exponent = np.frexp(exact.astype(np.float64))
        assert (np.abs(got - exact) <= 2.0 ** (exponent - 9)).all()
