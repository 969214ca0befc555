"""The average and entropy observers, merging, and the criterion of entropy against its definition."""

from __future__ import annotations

import itertools
import math
import pickle
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sashiko.quant.entropy import _Sums, least_divergence
from sashiko.quant.observers import AverageObserver, Observer, Range, affine, make_observer
from sashiko.quant.scheme import ActivationScheme, ObserverName

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
BATCHES = st.lists(st.lists(FLOATS, min_size=0, max_size=6), min_size=1, max_size=8)


def fed(scheme: ActivationScheme, batches: list[list[float]]) -> Observer:
    observer = make_observer(scheme)
    for batch in batches:
        observer.observe(torch.tensor(batch))
    return observer


@settings(max_examples=60, deadline=None)
@given(BATCHES)
def test_average_is_the_exact_mean(batches: list[list[float]]) -> None:
    found = fed(ActivationScheme("average"), batches).range()
    full = [b for b in batches if b]
    if not full:
        assert found is None
        return
    low, high = (float(sum(Fraction(f(b)) for b in full) / len(full)) for f in (min, max))
    assert found == Range(min(low, 0.0), max(high, 0.0))


def test_average_is_between_the_extremes() -> None:
    observer = AverageObserver()
    observer.observe(torch.tensor([-1.0, 4.0]), None)
    observer.observe(torch.tensor([[-2.0, 2.0]]), None)
    observer.observe(torch.tensor([]), None)
    assert observer.range() == Range(-1.5, 3.0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", get_args(ObserverName))
@settings(max_examples=15, deadline=None)
@given(batches=BATCHES, random=st.randoms())
def test_merged_is_whole(name: ObserverName, signed: bool, batches: list[list[float]], random: object) -> None:
    scheme = ActivationScheme(name, signed=signed, bins=64)
    parts: list[list[list[float]]] = [[], [], []]
    for batch in batches:
        random.choice(parts).append(batch)  # type: ignore[attr-defined]
    first, *others = (pickle.loads(pickle.dumps(fed(scheme, part))) for part in parts)
    for other in others:
        before = other.range()
        first.merge(other)
        assert other.range() == before
    assert first.range() == fed(scheme, batches).range()


def divergence(counts: np.ndarray, begin: int, end: int, levels: int) -> float:
    """By the definition: clip, group, spread over the bins that are occupied, normalize, sum p log(p / q). Not where most is clipped."""
    if 2 * counts[begin:end].sum() < counts.sum():
        return math.inf
    p = counts[begin:end].astype(float)
    p[0] += counts[:begin].sum()
    p[-1] += counts[end:].sum()
    q = np.zeros(end - begin)
    edges = [g * (end - begin) // levels for g in range(levels + 1)]
    for low, high in itertools.pairwise(edges):
        occupied = p[low:high] > 0
        if occupied.any():
            q[low:high][occupied] = counts[begin + low : begin + high].sum() / occupied.sum()
    if q.sum() == 0 or bool((q[p > 0] == 0).any()):
        return math.inf
    p, q = p / p.sum(), q / q.sum()
    return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=24, max_size=24).filter(any), st.sampled_from([4, 8, 16]), st.data())
def test_divergences_follow_the_definition(values: list[int], levels: int, data: st.DataObject) -> None:
    counts = np.array(values)
    begin = data.draw(st.integers(0, 10))
    end = data.draw(st.integers(begin + 2, 24))
    found = _Sums.of(torch.tensor(counts)).divergences(torch.tensor([begin]), torch.tensor([end]), levels)
    assert float(found[0]) == pytest.approx(divergence(counts, begin, end, levels), abs=1e-9)


def test_entropy_cuts_outliers_and_keeps_what_is_dense() -> None:
    for signed in (True, False):
        uniform = make_observer(ActivationScheme("entropy", signed=signed))
        uniform.observe(torch.linspace(-1, 1, 1_000_001))
        found = uniform.range()
        assert found is not None and found.high == pytest.approx(1.0, abs=0.02) and found.low == pytest.approx(-1.0, abs=0.02)
        outlier = make_observer(ActivationScheme("entropy", signed=signed))
        outlier.observe(torch.cat([torch.randn(100_000), torch.tensor([40.0])]))
        found = outlier.range()
        assert found is not None and 2.5 < found.high < 20.0


def test_each_side_is_cut_for_itself() -> None:
    observer = make_observer(ActivationScheme("entropy", signed=False))
    x = torch.nn.functional.gelu(torch.randn(200_000))
    observer.observe(torch.cat([x, torch.tensor([60.0])]))
    found = observer.range()
    # GELU's least value is -0.17, and much of the data lies near it.
    assert found is not None and -0.18 < found.low < -0.15 and found.high < 30.0


@pytest.mark.parametrize("signed", [True, False])
def test_zeros_do_not_decide(signed: bool) -> None:
    scheme = ActivationScheme("entropy", signed=signed)
    x = torch.randn(100_000).abs()
    plain, sparse = make_observer(scheme), make_observer(scheme)
    plain.observe(x)
    sparse.observe(torch.cat([x, torch.zeros(10_000_000)]))
    a, b = plain.range(), sparse.range()
    assert a is not None and b is not None and b.high == pytest.approx(a.high, rel=0.02)


@pytest.mark.parametrize("signed", [True, False])
def test_most_of_what_begins_far_from_zero_is_not_saturated(signed: bool) -> None:
    """Its least values, to which all else is added, would fit better than a peak that shares its level with others."""
    observer = make_observer(ActivationScheme("entropy", signed=signed))
    observer.observe(torch.cat([torch.full((5000,), 0.5), torch.sigmoid(torch.randn(2000)).clamp(0.2105, 0.7166)]))
    found = observer.range()
    assert found is not None and found.high > 0.5


def test_nothing_to_choose() -> None:
    for values, high in (([0.0, 0.0], 0.0), ([2.0], 2.0), ([0.0, 1e-30], 1e-30), ([3e38], 3e38)):
        observer = make_observer(ActivationScheme("entropy"))
        observer.observe(torch.tensor(values))
        found = observer.range()
        assert found is not None and found.high == pytest.approx(high, rel=1e-6)
        assert affine(found, ActivationScheme("entropy"))[0] > 0


def test_the_edges_hold_zero() -> None:
    counts = torch.zeros(64, dtype=torch.int64)
    counts[40:50] = 5
    assert least_divergence(counts, 32, 16) == (32, 50)
    counts.zero_()
    counts[10:20] = 5
    assert least_divergence(counts, 32, 16) == (10, 32)


class Work(TorchDispatchMode):
    """Counts operations and the elements they write: what a search costs, on a busy machine as on an idle one."""

    operations = elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **kwargs or {})
        self.operations += 1
        self.elements += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def test_entropy_is_quick() -> None:
    # One core of 2 GHz takes 5 ms for it. An operation for each candidate or bin, or a search of all pairs of ends, would take far more.
    observer = make_observer(ActivationScheme("entropy", signed=False))
    observer.observe(torch.randn(100_000))
    with Work() as work:
        observer.range()
    assert 0 < work.operations < 300 and work.elements < 100 * 256 * 257
