"""The debug ladder and the stage dumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from sashiko.diagnostics.dump import dump_stage, say
from sashiko.diagnostics.errors import InputError


def never() -> str:
    raise AssertionError("the text was made although nobody reads it")


def test_silent_runs_make_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    say(1, never)
    assert dump_stage("model", 0, "graph", never) is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("level", range(5))
def test_each_level_prints_itself_and_what_is_below(
    level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SASHIKO_DEBUG", str(level))
    for step in range(1, 5):
        say(step, f"step {step}")
    assert capsys.readouterr() == ("", "".join(f"step {step}\n" for step in range(1, level + 1)))


def test_dumps_are_numbered_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASHIKO_DUMP", str(tmp_path / "new"))
    path = dump_stage("bert", 3, "fused", lambda: "text")
    assert path == tmp_path / "new" / "bert" / "03_fused.txt"
    assert path is not None and path.read_text() == "text\n"
    dump_stage("bert", 3, "fused", "newer\n")
    assert path.read_text() == "newer\n"
    assert [p.name for p in path.parent.iterdir()] == ["03_fused.txt"], "no temporary file stays behind"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SASHIKO_DUMP", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"SASHIKO_DUMP=.*file(.|\n)*another folder"):
        dump_stage("bert", 3, "fused", "text")


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", "..", "lambda <x>"])
def test_dumps_stay_in_their_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASHIKO_DUMP", str(tmp_path))
    path = dump_stage(name, 0, name, "text")
    assert path is not None and path.resolve().parent.parent == tmp_path.resolve()
