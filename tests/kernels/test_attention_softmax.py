"""The exponential of attention against float64."""

from __future__ import annotations

import numpy as np
import pytest

from sashiko.cpu_codegen.builder import F32, I64, PTR, VOID, Function, Module, Val, const, i64
from sashiko.cpu_codegen.slots import Slots
from sashiko.kernels.attention_softmax import octaves, short_pair, short_weight
from tests.emulation import Array, Runner, runners


def computed(runner: Runner, x: Array, largest: float = 0.0) -> Array:
    """e^(x - largest)."""
    module = Module()
    fn = Function(module, "weights", VOID, [PTR, I64, I64])
    slots, lanes = Slots(fn), runner.target.lanes(32)

    def vector(at: Val, _: list[Val]) -> list[Val]:
        place = fn.gep(slots.buffer(0), at, F32)
        value, top = fn.load(F32.vec(lanes), place), const(F32.vec(lanes), largest)
        rate = octaves(fn, top, None)
        fn.store(short_weight(fn, runner.target, value, rate, fn.mul(top, rate)), place)
        return []

    fn.loop(i64(0), i64(len(x)), lanes, [], vector)
    fn.ret()
    fn.finish()
    return runner.run(module.text(), "weights", [x], order=slots.order)[0]


@pytest.mark.parametrize("runner", runners())
def test_weights(runner: Runner) -> None:
    x = np.concatenate([np.linspace(-87, 0, 4000), -np.logspace(-9, 0, 1000)]).astype(np.float32)
    x = x[: len(x) // 16 * 16]
    got, wanted = computed(runner, x).astype(np.float64), np.exp(x.astype(np.float64))
    assert (np.abs(got - wanted) <= 2.0**-13.6 * wanted).all()


@pytest.mark.parametrize("runner", runners())
def test_edges(runner: Runner) -> None:
    edges = [-np.inf, -3.4e38, -1000.0, -104.0, -88.0, np.nan, 0.0, -0.0] * 2
    got = computed(runner, np.array(edges, np.float32))
    assert (got[:5] == 0).all(), "processors take very long for denormal numbers"
    assert np.isnan(got[5]) and np.abs(got[6:8] - 1).max() <= 2.0**-13


@pytest.mark.parametrize("runner", runners())
def test_short_weights_beside_a_large_score(runner: Runner) -> None:
    """All of them may be off by the same factor, which the sum of the weights has too."""
    largest = np.float32(1234.567)
    x = (largest - np.concatenate([np.linspace(0, 80, 2000), np.full(8, 3.5)])).astype(np.float32)
    x = x[: len(x) // 16 * 16]
    got = computed(runner, x, float(largest)).astype(np.float64)
    wanted = np.exp(x.astype(np.float64) - float(largest))
    ratio = got / wanted
    assert abs(ratio[0] - 1) <= float(largest) * 2.0**-24 + 2.0**-13.6
    assert np.ptp(ratio) <= 2.0**-12.5


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("largest", [-3.4028234663852886e38, -2.5e38, -1e30, -1e12, -1e9, 1e12, 3.4028234663852886e38])
def test_where_the_largest_score_is_huge(runner: Runner, largest: float) -> None:
    """As where a mask of the lowest float hides all keys: only the largest scores have weights, as in eager mode."""
    top = np.float32(largest)
    with np.errstate(over="ignore"):
        lower = [np.nextafter(top, np.float32(-np.inf)), *(top - np.abs(top) * np.float32(x) for x in (0.01, 0.5)), np.float32(-np.inf)]
    got = computed(runner, np.array([*[top] * 4, *lower, *[top] * 8], np.float32), largest).astype(np.float64)
    assert got[0] > 0 and np.isfinite(got).all()
    np.testing.assert_allclose(got / got[0], [1.0] * 4 + [0.0] * 4 + [1.0] * 8, atol=2.0**-20)


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
