"""Two processes that calibrate together find what one finds, to the bit; what fails in one fails in both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sashiko.diagnostics.errors import CalibrationError
from sashiko.quant import quantize
from sashiko.quant.observers import MinMaxObserver
from sashiko.quant.sharding import Shards
from tests.quant import shard

SIZE = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, what shard.py found."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch lacks gloo")
    folder = tmp_path_factory.mktemp("shards")
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", shard.__file__]
    started = [subprocess.Popen([*command, str(rank), str(SIZE), str(folder)], stderr=subprocess.PIPE) for rank in range(SIZE)]
    outcomes = [process.communicate(timeout=240)[1].decode() for process in started]
    assert [process.returncode for process in started] == [0] * SIZE, "\n".join(outcomes)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(SIZE)]


def same(a: shard.Found, b: shard.Found) -> bool:
    return bool(a[0] == b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("preset", shard.PRESETS)
def test_together_as_alone(results: list[dict[str, Any]], preset: str) -> None:
    whole = shard.found(quantize(shard.model(), shard.data(), preset=preset))
    for result in results:
        assert same(result[preset], whole)
    half = shard.found(quantize(shard.model(), shard.data()[::SIZE], preset=preset))
    assert not same(half, whole), "half of the data shows no difference"


def test_not_sharded_unless_asked(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert same(result["alone"], shard.found(quantize(shard.model(), shard.data()[rank::SIZE], preset="int8-symmetric")))


@pytest.mark.parametrize("name", ["one is empty", "the first is empty"])
def test_a_process_without_data(results: list[dict[str, Any]], name: str) -> None:
    whole = shard.found(quantize(shard.model(), shard.data(), preset="int8-symmetric"))
    assert all(same(result[name], whole) for result in results)


def test_no_data_at_all(results: list[dict[str, Any]]) -> None:
    assert all(result["all are empty"].startswith("the calibration data is empty") for result in results)


@pytest.mark.parametrize(
    ("name", "culprit", "words"),
    [
        ("NaN in a first batch", 1, "batch 1: argument 'input' holds NaN"),
        ("NaN in a later batch", 1, "batch 2: argument 'input' holds NaN"),
        ("the data of one raises", 0, "disk on fire"),
        ("one gives a tensor", 1, "is a Tensor, not an iterable of batches"),
    ],
)
def test_the_error_of_one_reaches_all(results: list[dict[str, Any]], name: str, culprit: int, words: str) -> None:
    for rank, result in enumerate(results):
        assert words in result[name]
        assert result[name].startswith(f"calibration failed on rank {culprit} of 2: ") == (rank != culprit)


def test_the_error_of_a_shared_batch_names_its_process(results: list[dict[str, Any]]) -> None:
    assert all(result["NaN in the sample"].startswith("batch 1 of rank 1: argument 'input' holds NaN") for result in results)


@pytest.mark.parametrize("name", ["other weights", "another preset"])
def test_processes_that_would_make_different_modules_are_told(results: list[dict[str, Any]], name: str) -> None:
    assert all(result[name].startswith("the processes quantize different models, or in different ways") for result in results)


def test_a_wrong_option_of_one_reaches_all(results: list[dict[str, Any]]) -> None:
    first, last = (result["an unknown preset"] for result in results)
    assert "int7" in last and first.startswith(f"calibration failed on rank 1 of 2: {last[:10]}")


def test_errors_of_all(results: list[dict[str, Any]]) -> None:
    assert all(result["NaN everywhere"].startswith("batch 2: argument 'input' holds NaN") for result in results)


def test_without_torch_distributed_there_is_one_process() -> None:
    batches = shard.data()
    assert same(shard.found(quantize(shard.model(), batches, sharded=True)), shard.found(quantize(shard.model(), batches)))
    with Shards(True) as shards:
        observer = MinMaxObserver()
        assert (shards.size, shards.rank, shards.gather(3), shards.merged({"a": observer})) == (1, 0, [3], {"a": observer})
        assert shards.interleaved([1, 2, 3], 2) == (1, 2)
    with pytest.raises(CalibrationError, match="empty"):
        quantize(shard.model(), [], sharded=True)


@pytest.mark.parametrize("rank", range(3))
def test_samples_are_dealt_as_they_were_taken(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    items = [[1, 2, 3], [], [11, 12]]
    shards = Shards(False)
    shards.rank = rank
    answers = iter([[3, 0, 2], [[1, 2], [], [11, 12]]])
    sent: list[Any] = []
    monkeypatch.setattr(shards, "gather", lambda own: [sent.append(own), next(answers)][1])
    assert shards.interleaved(items[rank], 4) == (1, 11, 2, 12)
    assert sent == [len(items[rank]), items[rank][:2]], "more than the sample travels"
