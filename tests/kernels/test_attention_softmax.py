"""The exponential of attention against float64."""

from __future__ import annotations

import numpy as np
import pytest

from sashiko.cpu_codegen.builder import F32, I64, PTR, VOID, Function, Module, Val, i64
from sashiko.cpu_codegen.slots import Slots
from sashiko.kernels.attention_softmax import weight
from tests.emulation import Array, Runner, runners


def computed(runner: Runner, x: Array, short: bool) -> Array:
    module = Module()
    fn = Function(module, "weights", VOID, [PTR, I64, I64])
    slots, lanes = Slots(fn), runner.target.lanes(32)

    def vector(at: Val, _: list[Val]) -> list[Val]:
        place = fn.gep(slots.buffer(0), at, F32)
        fn.store(weight(fn, fn.load(F32.vec(lanes), place), short), place)
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
    assert (got[:5] == 0).all() and np.isnan(got[5]) and np.abs(got[6:8] - 1).max() <= 2.0**-13
