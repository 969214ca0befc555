"""`sashiko doctor`: what it finds and how it shows it."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sashiko.cli import doctor, machine
from sashiko.cli.app import run
from sashiko.kernels import peaks
from sashiko.platforms.catalogue import NEOVERSE_N1, X86_64_AMX, X86_64_V4
from sashiko.platforms.host import HostReport, host
from tests.cli.bench.runs import PEAKS


@pytest.fixture(scope="module")
def found() -> machine.Machine:
    return machine.examine()


def test_json_holds_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.keys() == {field.name for field in dataclasses.fields(machine.Machine)}
    assert {row["name"] for row in data["features"] if row["present"]} == host().features


def test_peaks_are_measured_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peaks, "remeasured", lambda: PEAKS)
    assert run(["doctor", "--peaks", "--json"]) == 0
    assert peaks.from_json(json.loads(capsys.readouterr().out)["peaks"]) == PEAKS
    assert run(["doctor", "--peaks"]) == 0
    shown = capsys.readouterr().out
    assert "Products of one core" in shown and "256 MiB" in shown


def test_tables_name_everything(found: machine.Machine) -> None:
    file = io.StringIO()
    doctor.show(found, Console(file=file, width=200))
    text = file.getvalue()
    named = [row.name for rows in (found.symbols, found.tools, found.packages, found.settings) for row in rows]
    assert [name for name in named + [row.name for row in found.features] if name not in text] == []
    assert found.triple in text and found.cache_dir in text


def test_brackets_in_paths_are_text_and_not_markup(found: machine.Machine) -> None:
    file = io.StringIO()
    doctor.show(dataclasses.replace(found, cache_dir="/home/[/bold]/[red]"), Console(file=file, width=200))
    assert "/home/[/bold]/[red]" in file.getvalue()


def test_the_thread_pool_of_torch_is_found(found: machine.Machine) -> None:
    assert next(row.where for row in found.symbols if row.name == "GOMP_parallel") != ""


def test_symbols_of_a_missing_library_are_absent(tmp_path: Path) -> None:
    assert {row.where for row in machine._symbols(tmp_path)} == {""}


def test_amx_state() -> None:
    assert machine.amx_state(HostReport(X86_64_AMX, ())) == "granted"
    assert machine.amx_state(HostReport(X86_64_V4, ())) == "not reported by the CPU"
    assert machine.amx_state(HostReport(X86_64_V4, (("amx_tile", "the kernel said no"),))) == "the kernel said no"


def test_feature_rows_are_those_of_the_architecture_with_notes() -> None:
    rows = {row.name: row for row in machine.feature_rows(HostReport(NEOVERSE_N1, (("i8mm", "hidden"),)))}
    assert "avx2" not in rows
    assert rows["dotprod"].present and not rows["i8mm"].present
    assert (rows["i8mm"].note, rows["dotprod"].note) == ("hidden", "")


def test_folder_size(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "inner" / "b").write_bytes(b"123")
    assert machine.folder_size(tmp_path) == (2, 8)
    for name in ("absent", "n" * 300):
        assert machine.folder_size(tmp_path / name) == (0, 0)


@pytest.mark.parametrize(("size", "text"), [(0, "none"), (512, "512 B"), (48 << 10, "48 KiB"), (3 << 19, "1.5 MiB"), (2 << 30, "2 GiB")])
def test_size_text(size: int, text: str) -> None:
    assert doctor.size_text(size) == text
