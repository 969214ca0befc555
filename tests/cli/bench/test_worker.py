"""Candidates in processes of their own: a whole small run, and what becomes of those that fail, die or hang."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sashiko.cli.app import run as command_line
from sashiko.cli.bench import command, measure, record, worker
from sashiko.cpu_codegen.rate import Effort
from sashiko.kernels import peaks

# A child runs this file before it loads its framework, so this is where one goes missing or a process dies.
OWN = """
import multiprocessing, os, sys
import torch
if multiprocessing.parent_process():
    sys.modules["openvino"] = None

def make():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval(), (torch.randn(4, 16),)

def die():
    print("these are the last words", file=sys.stderr, flush=True)
    os._exit(3)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "own_model.py"
    path.write_text(OWN)
    return path


def hide(modules: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules look missing to new processes, whether they are installed or not."""
    for name in modules:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('hidden', name={name!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_small_run(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "QUICK", measure.Settings(rounds=3, seconds=0.002, cached=False))
    hide(("openvino", "nncf"), tmp_path, monkeypatch)
    peaks.remeasured(Effort(1e-4, 1), levels=(("L1", 16 << 10),))
    file = tmp_path / "run.json"
    arguments = ["--models", f"{source}:make", "--precision", "fp32", "--vs", "openvino", "--quick", "--json", str(file)]
    assert command_line(["bench", *arguments]) == 0
    eager, missing, ours = record.load(file).rows
    assert [r.name for r in (eager, missing, ours)] == ["eager fp32", "openvino fp32", "sashiko fp32"]
    assert missing.failure in {"openvino is not installed", "nncf is not installed"} and not missing.ms
    assert eager.error == 0 and len(eager.ms) == 3
    assert ours.error is not None and 0 <= ours.error < 16 * 32 * torch.finfo(torch.float32).eps
    assert ours.cold_s and ours.peak_mib and ours.peak_mib > 50 and ours.of_peak and ours.limited_by
    assert json.loads(file.read_text())["command"].startswith("sashiko bench --models")
    shown = capsys.readouterr().out
    assert f"openvino fp32: {missing.failure}" in shown and "sashiko fp32" in shown


def job(source: Path, function: str, tmp_path: Path) -> worker.Job:
    return worker.Job("eager", "fp32", f"{source}:{function}", (), 1, str(tmp_path / "caches"))


def test_a_dead_process_leaves_its_last_words(source: Path, tmp_path: Path) -> None:
    with worker.Worker(job(source, "die", tmp_path), 300) as dying:
        assert dying.ready() == worker.Failed("the process ended with status 3: these are the last words")
        assert isinstance(dying.turn(1), worker.Failed)


def test_a_silent_process_is_given_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FAREWELL", 0.1)
    with worker.Worker(job(source, "make", tmp_path), 0.01) as slow:
        assert slow.ready() == worker.Failed("no answer in 0 seconds")


def raised(make: Callable[[], object]) -> str:
    try:
        make()
    except Exception as error:
        return worker.reason_of(error)
    raise AssertionError("it must raise")


def test_reasons_are_one_line() -> None:
    assert raised(lambda: __import__("module_that_nobody_wrote")) == "module_that_nobody_wrote is not installed"
    assert raised(lambda: int("x")).startswith("ValueError: invalid literal")
    assert worker.reason_of(RuntimeError("two\n\n  lines")) == "RuntimeError: two lines"
    assert worker.reason_of(RuntimeError()) == "RuntimeError"
    assert len(worker.reason_of(RuntimeError("x" * 5000))) == worker.REASON_LENGTH


def test_peak_memory(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmPeak:\t 9999 kB\nVmHWM:\t  2048 kB\n")
    assert worker.peak_mib(status) == 2
    assert worker.peak_mib(tmp_path / "absent") > 50


def test_results_of_any_structure_become_one_row_of_numbers() -> None:
    values, width = worker.flat({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": (torch.zeros(1), None)})
    assert (values.tolist(), width) == ([1, 1, 1, 1, 1, 1, 0], 3)


def ready(*rows: list[float]) -> worker.Ready:
    answer = torch.tensor(rows).reshape(-1).numpy()
    return worker.Ready(0, 0, 0, answer, len(rows[0]), None)


def test_errors_and_cosines() -> None:
    reference = ready([3.0, 4.0], [1.0, 0.0])
    assert measure.relative_error(reference, reference) == 0
    assert measure.relative_error(ready([3.0, 4.0]), ready([3.0, 4.5])) == pytest.approx(0.1)
    assert measure.mean_cosine(reference, reference) == pytest.approx(1)
    assert measure.mean_cosine(reference, ready([3.0, 4.0], [0.0, 1.0])) == pytest.approx(0.5)


def test_the_help_names_options_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("--against", "--precision", *command.PEERS))


@pytest.mark.slow
def test_every_candidate_that_is_installed_agrees_with_eager(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert command_line(["bench", "--models", "mlp", "--shapes", "32x64", "--rounds", "3", "--json", str(file)]) == 0
    least = {"fp32": 1e-5, "bf16": 2e-2, "int8": 0.1}
    rows = record.load(file).rows
    assert {r.name for r in rows} >= {f"{peer} fp32" for peer in command.PEERS} | {"sashiko int8", "openvino int8"}
    for found in rows:
        if found.ours or "is not installed" not in found.failure:
            assert found.error is not None and found.error < least[found.precision], f"{found.name}: {found.failure}"
    ours = next(r for r in rows if r.name == "sashiko int8")
    assert ours.quantize_s and ours.cold_s and ours.cached_s
