"""Calibration data of every form: items that need a transformation, long streams in little memory, the same module every time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sashiko.diagnostics.errors import CalibrationError
from sashiko.quant import PRESETS, QuantizedModule, quantize
from tests.quant.models import Attention, mlp
from tests.sweeps import swept

X = torch.linspace(-1, 1, 48).reshape(6, 8)
LABELS = torch.arange(6)


def same(a: QuantizedModule, b: QuantizedModule) -> bool:
    """To the bit: program, record and tensors."""
    ours, theirs = a.state_dict(), b.state_dict()
    equal = list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return equal and a.record == b.record and str(a.graph) == str(b.graph)


def test_every_iterable() -> None:
    model = mlp()
    labelled = DataLoader(TensorDataset(X, LABELS), batch_size=2)
    plain = [X[:2], X[2:4], X[4:]]
    expected = quantize(model, plain)
    assert same(quantize(model, labelled, transform=lambda item: item[0]), expected)
    assert same(quantize(model, ({"pixels": x} for x in plain), transform=lambda item: (item["pixels"],)), expected)
    assert same(quantize(model, [x.tolist() for x in plain], transform=torch.tensor), expected)
    assert same(quantize(model, [{"input": x} for x in plain]), expected)
    assert same(quantize(model, DataLoader(X, batch_size=2)), expected)  # type: ignore[arg-type]


def test_a_failing_transform_is_named() -> None:
    def broken(item: Any) -> Any:
        raise StopIteration("over")

    with pytest.raises(CalibrationError, match="transform raised StopIteration while producing batch 1"):
        quantize(mlp(), [X, X], transform=broken)
    with pytest.raises(CalibrationError, match="batch 1 is a str"):
        quantize(mlp(), [X], transform=str)


@pytest.mark.parametrize("preset", swept(sorted(PRESETS), ("int8", "int8-static", "int8-entropy", "int4-weight")))
def test_the_same_data_gives_the_same_module(preset: str) -> None:
    torch.manual_seed(0)
    model = Attention().eval()
    data = [torch.randn(3, n, 16) for n in (4, 7, 4)]
    first = quantize(model, data, preset=preset)
    second = quantize(model, iter(data), preset=preset, progress=True)
    assert same(second, first) and torch.equal(second(data[0]), first(data[0]))


@pytest.mark.parametrize("preset", ["int8", "int8-symmetric", "int8-average", "int8-entropy"])
def test_the_order_of_batches_does_not_matter(preset: str) -> None:
    data = [X * 2.0**i for i in range(6)]
    model = mlp()
    found = [quantize(model, batches, preset=preset).record.sites for batches in (data, data[::-1])]
    assert [item.ranges for item in found[0]] == [item.ranges for item in found[1]]


PEAK = """
import resource, sys, torch
from torch import nn
from sashiko.quant import quantize
torch.set_num_threads(1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024)
def stream(count):
    for i in range(count):
        yield torch.full((4, 8), float(i % 11))
model = nn.Sequential(nn.Linear(8, 8)).eval()
peaks = []
for count in (100, int(sys.argv[2])):
    quantize(model, stream(count), preset=sys.argv[1])
    peaks.append(peak())
print(*peaks)
"""


@pytest.mark.parametrize(("preset", "count"), [("int8", 1000), pytest.param("int8-entropy", 10_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_data(preset: str, count: int) -> None:
    command = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-c", PEAK, preset, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    few, many = map(float, done.stdout.split())
    assert many - few < (50 if count > 1000 else 10)  # MiB


def test_nothing_is_kept_of_a_batch() -> None:
    """Only the first few batches outlive their turn."""
    import weakref

    held: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[torch.Tensor]:
        for _ in range(60):
            x = torch.randn(2, 8)
            held.append(weakref.ref(x))
            yield x

    small = quantize(nn.Sequential(nn.Linear(8, 4)).eval(), stream())
    assert small.record.batches == 60
    assert sum(ref() is not None for ref in held) <= 1  # the generator's own variable
