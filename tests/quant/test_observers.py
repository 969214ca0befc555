"""Observers: ranges, growth of the histogram, independence of order and batching, masks, memory."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sashiko.diagnostics.errors import InputError
from sashiko.quant.observers import HistogramObserver, NonFinite, Range, affine, make_observer
from sashiko.quant.presets import PRESETS, resolve
from sashiko.quant.scheme import ActivationScheme, ObserverName, OpScheme, Scheme, SmoothQuant, WeightScheme

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def test_minmax_includes_zero() -> None:
    observer = make_observer(ActivationScheme("minmax"))
    assert observer.range() is None
    observer.observe(torch.tensor([2.0, 5.0]))
    observer.observe(torch.tensor([[3.0, 7.0]]))
    assert observer.range() == Range(0.0, 7.0)


@pytest.mark.parametrize("name", get_args(ObserverName))
def test_mask_leaves_values_out(name: ObserverName) -> None:
    observer = make_observer(ActivationScheme(name))
    x = torch.ones(2, 3, 4)
    x[0, 2] = 1e6
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    observer.observe(x, mask)
    found = observer.range()
    assert found is not None and found.high <= 1.0


@pytest.mark.parametrize("name", get_args(ObserverName))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_is_refused(name: ObserverName, value: float) -> None:
    with pytest.raises(NonFinite):
        make_observer(ActivationScheme(name)).observe(torch.tensor([1.0, value]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(FLOATS, min_size=1, max_size=8), min_size=1, max_size=8), st.randoms())
def test_the_histogram_depends_on_the_values_alone(batches: list[list[float]], random: object) -> None:
    scheme = ActivationScheme("percentile", bins=64)
    streamed, whole = HistogramObserver(scheme), HistogramObserver(scheme)
    shuffled = list(batches)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for batch in shuffled:
        streamed.observe(torch.tensor(batch))
    whole.observe(torch.tensor([v for batch in batches for v in batch]))
    assert streamed.extent == whole.extent
    assert torch.equal(streamed.counts, whole.counts)
    assert int(whole.counts.sum()) == sum(map(len, batches))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9])
def test_percentile_matches_numpy(signed: bool, percentile: float) -> None:
    observer = HistogramObserver(ActivationScheme("percentile", percentile, signed=signed))
    data = torch.randn(20, 1000)
    for row in data:
        observer.observe(row)
    found = observer.range()
    assert found is not None
    bin_width = observer.extent / observer.scheme.bins
    values = data.flatten().double().numpy()
    if signed:
        expected = float(np.quantile(np.abs(values), percentile / 100, method="inverted_cdf"))
        assert found.high == -found.low == pytest.approx(expected, abs=2 * bin_width)
    else:
        share = (1 + percentile / 100) / 2
        low, high = (sign * float(np.quantile(sign * values, share, method="inverted_cdf")) for sign in (-1, 1))
        assert found.low == pytest.approx(low, abs=2 * bin_width) and found.high == pytest.approx(high, abs=2 * bin_width)


def test_percentile_of_all_is_minmax() -> None:
    observer = HistogramObserver(ActivationScheme("percentile", 100.0))
    observer.observe(torch.tensor([-3.0, 0.5, 2.0]))
    assert observer.range() == Range(-3.0, 3.0)


def test_mse_cuts_an_outlier_and_keeps_a_uniform_range() -> None:
    uniform = HistogramObserver(ActivationScheme("mse"))
    uniform.observe(torch.linspace(-1, 1, 10001))
    found = uniform.range()
    # Cutting costs more than the finer step gains, but for the last half step of the rounding.
    assert found is not None and found.high == pytest.approx(1.0, abs=1 / 127)
    outlier = HistogramObserver(ActivationScheme("mse"))
    outlier.observe(torch.cat([torch.randn(100_000), torch.tensor([12.0])]))
    found = outlier.range()
    assert found is not None and 3.0 < found.high < 9.0


LARGEST = float(np.finfo(np.float32).max)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6), st.booleans(),
    st.sampled_from(get_args(ObserverName)),
)
@example([-LARGEST, LARGEST], False, "minmax")
@example([-LARGEST, LARGEST], True, "minmax")
@example([-LARGEST / 3, LARGEST], False, "average")
def test_scales_are_positive_and_finite(values: list[float], signed: bool, name: ObserverName) -> None:
    scheme = ActivationScheme(name, signed=signed)
    observer = make_observer(scheme)
    observer.observe(torch.tensor(values))
    found = observer.range()
    assert found is not None and found.low <= 0 <= found.high
    scale, zero_point = affine(found, scheme)
    assert 0 < scale < float("inf") and np.isfinite(np.float32(1) / np.float32(scale)) and scale == float(np.float32(scale))
    assert scheme.qmin <= zero_point <= scheme.qmax and (zero_point == 0 or not signed)
    ends = [np.float32(end - zero_point) * np.float32(scale) for end in (scheme.qmin, scheme.qmax)]
    assert np.isfinite(ends).all() and ends[0] <= 0.97 * found.low + scale and ends[1] >= 0.97 * found.high - scale


def test_memory_is_bounded() -> None:
    observer = HistogramObserver(ActivationScheme("percentile"))
    for i in range(2000):
        observer.observe(torch.full((3,), float(i)))
    held = [v for v in vars(observer).values() if isinstance(v, torch.Tensor)]
    assert sum(v.numel() for v in held) == 2 * observer.scheme.bins
    assert int(observer.counts.sum()) == 6000


def test_bad_options_are_named() -> None:
    for make in (
        lambda: ActivationScheme("median"),  # type: ignore[arg-type]
        lambda: ActivationScheme(percentile=50.0),
        lambda: ActivationScheme(bins=100),
        lambda: ActivationScheme(granularity="column"),  # type: ignore[arg-type]
        lambda: WeightScheme(granularity="row"),  # type: ignore[arg-type]
        lambda: WeightScheme(4),
        lambda: WeightScheme(8, "group"),
        lambda: WeightScheme(4, "group", 48),
        lambda: WeightScheme(3),  # type: ignore[arg-type]
        lambda: OpScheme(ActivationScheme(), WeightScheme(4, "group")),
        lambda: OpScheme(ActivationScheme(), None),
        lambda: OpScheme(None, None, "fp16"),  # type: ignore[arg-type]
        lambda: Scheme(operations=("softmax",)),  # type: ignore[arg-type]
        lambda: Scheme(sample=0),
        lambda: SmoothQuant(1.5),
        lambda: resolve("int3"),
        lambda: resolve(["int8"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError):
            make()
    assert resolve("int8") is PRESETS["int8"]
    scheme = Scheme()
    assert resolve(scheme) is scheme
