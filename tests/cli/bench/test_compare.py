"""What counts as slower, and what the exit status of --against says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sashiko.cli.app import run as command_line
from sashiko.cli.bench import record
from sashiko.cli.bench.compare import compare, held_back
from sashiko.cli.bench.record import Row, Run
from tests.cli.bench.runs import EAGER, MACHINE, ours, row, run

BASE = row("eager", "fp32", EAGER)
OLD = run(BASE, ours(3.0))


def verdict(now: Run, old: Run = OLD) -> tuple[list[bool], list[bool]]:
    changes = compare(old, now).changes
    return [change.worse for change in changes], [change.better for change in changes]


def test_the_same_run_is_neither_worse_nor_better() -> None:
    assert verdict(OLD) == ([False], [False])


@pytest.mark.parametrize(("factor", "worse", "better"), [(2.5, True, False), (3.5, False, True), (2.95, False, False)])
def test_more_than_the_noise_counts(factor: float, worse: bool, better: bool) -> None:
    assert verdict(run(BASE, ours(factor))) == ([worse], [better])


def test_a_slower_machine_does_not_count() -> None:
    slow = run(
        dataclasses.replace(BASE, ms=tuple(2 * t for t in EAGER)), dataclasses.replace(ours(3.0), ms=tuple(2 * t for t in ours(3.0).ms))
    )
    assert verdict(slow) == ([False], [False])


def test_a_noisy_run_does_not_count() -> None:
    noisy = dataclasses.replace(ours(2.5), ms=tuple(t * n for t, n in zip(ours(2.5).ms, (0.6, 1.4, 1.0, 0.7, 1.3), strict=True)))
    assert verdict(run(BASE, noisy)) == ([False], [False])


def test_a_row_that_fails_now_is_worse_and_one_that_works_now_is_better() -> None:
    broken = run(BASE, row("sashiko", "int8", failure="RuntimeError: no"))
    assert verdict(broken) == ([True], [False])
    assert verdict(OLD, broken) == ([False], [True])
    assert verdict(broken, broken) == ([False], [False])


def test_only_our_rows_are_compared() -> None:
    peer = row("openvino", "fp32", EAGER)
    slower_peer = dataclasses.replace(peer, ms=tuple(3 * t for t in EAGER))
    assert verdict(run(BASE, slower_peer), run(BASE, peer)) == ([], [])


@pytest.mark.parametrize(("auto", "bf16", "slower"), [(3.0, 2.0, 0), (2.0, 2.02, 0), (2.0, 2.5, 1), (0.9, 2.5, 2)])
def test_a_search_that_made_a_model_slower_is_told(auto: float, bf16: float, slower: int) -> None:
    plain = (ours(1.0, precision="fp32"), ours(bf16, precision="bf16"))
    found = held_back(run(BASE, *plain, ours(auto, precision="auto"), ours(0.5)))
    assert len(found) == slower
    assert all(held.row.precision == "auto" for held in found)


def test_the_exit_status_tells_of_a_search_that_made_a_model_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(record.to_json(run(BASE, ours(3.0, precision="bf16"), ours(2.0, precision="auto"))), encoding="utf-8")
    assert command_line(["bench", "--from", str(path)]) == 1
    assert "sashiko auto is slower than sashiko bf16" in capsys.readouterr().out


def test_remarks_tell_what_is_not_comparable() -> None:
    other = dataclasses.replace(MACHINE, cpu="Other CPU")
    remarks = compare(run(BASE, ours(3.0), ours(2.0, precision="fp32"), torch="2.12.0", machine=other), OLD).remarks
    assert len(remarks) == 3
    for part, remark in zip(("Other CPU", "torch 2.12.0 before, 2.13.0 now", "sashiko fp32"), remarks, strict=True):
        assert part in remark


def saved(folder: Path, name: str, *rows: Row) -> str:
    path = folder / name
    path.write_text(record.to_json(run(*rows)))
    return str(path)


@pytest.mark.parametrize(("factor", "status"), [(2.0, 1), (3.0, 0), (4.0, 0)])
def test_exit_status_of_two_saved_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float, status: int) -> None:
    old, new = saved(tmp_path, "old.json", BASE, ours(3.0)), saved(tmp_path, "new.json", BASE, ours(factor))
    assert command_line(["bench", "--from", new, "--against", old]) == status
    assert ("slower" in capsys.readouterr().out) == bool(status)


def test_each_of_several_runs_is_compared_within_its_own_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the second run, whose turns were longer and fewer, ours are slower, and so is a search."""
    old = saved(tmp_path, "old.json", BASE, ours(3.0))
    slower = (("eager", "fp32", 20.0), ("sashiko", "int8", 10.0), ("sashiko", "auto", 15.0), ("sashiko", "bf16", 12.0))
    new = saved(tmp_path, "new.json", *(row(name, precision, (ms, ms)) for name, precision, ms in slower))
    assert command_line(["bench", "--from", old, "--against", old]) == 0
    assert "run 2" not in capsys.readouterr().out
    assert command_line(["bench", "--from", old, new, "--against", old]) == 1
    shown = capsys.readouterr().out
    assert "bert-mini 8x64, run 2: sashiko auto is slower than sashiko bf16" in shown
    verdicts = [line for line in shown.split("Against the old run")[1].splitlines() if "sashiko int8" in line]
    assert ["slower" in line for line in verdicts] == ["run 2" in line for line in verdicts] == [False, True]


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe\x00"])
@pytest.mark.parametrize("option", ["--from", "--against"])
def test_a_file_that_is_no_run_is_an_error(content: bytes, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    assert command_line(["bench", option, str(tmp_path / "bad.json")]) == 1
    assert "no saved benchmark" in capsys.readouterr().err
