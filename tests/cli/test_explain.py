"""`sashiko explain`: finding the user's function, and what is said when it is not there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sashiko.cli import explain
from sashiko.cli.app import run
from sashiko.diagnostics.errors import InputError

SOURCE = "def make():\n    return 'model', (1, 2)\n\ndef wrong():\n    return 'model'\n\ndef needs(more):\n    return more\n\nvalue = 3\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module in it that no other test knows."""
    (tmp_path / "explained_example.py").write_text(SOURCE)
    (tmp_path / "explained_broken.py").write_text("import module_that_nobody_wrote\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("explained_example", "explained_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("source", ["explained_example:make", "explained_example.py:make"])
def test_modules_and_files_are_found(source: str) -> None:
    assert explain.load_example(source) == ("model", (1, 2))


def test_files_import_what_lies_beside_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "apart").mkdir()
    (folder / "apart" / "explained_beside.py").write_text(SOURCE)
    (folder / "apart" / "explained_user.py").write_text("from explained_beside import make\n")
    for name in ("explained_beside", "explained_user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert explain.load_example("apart/explained_user.py:make") == ("model", (1, 2))


COUNTED = """
import pickle

class Net:
    pass

NET, RUNS = Net(), []

def make():
    RUNS.append(1)
    return NET, RUNS

def kept():
    return pickle.loads(pickle.dumps(Net())).__class__ is Net, NET
"""


def test_a_file_is_run_once_however_often_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one name are two modules; what both define can be pickled."""
    for name in ("explained_counted", "explained_counted__2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    models = []
    for where in ("one", "other"):
        (folder / where).mkdir()
        (folder / where / "explained_counted.py").write_text(COUNTED)
        file = f"{where}/explained_counted.py"
        model, _ = explain.load_example(f"{file}:make")
        again, runs = explain.load_example(f"{folder}/{file}:make")
        assert again is model and runs == [1, 1]
        assert explain.load_example(f"{file}:kept") == (True, model)
        models.append(model)
    assert models[0] is not models[1]
    assert explain.load_example("explained_counted:make")[0] is models[0]  # as an import names it


def test_a_file_that_fails_is_run_again(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="module_that_nobody_wrote"):
            explain.load_example("explained_broken.py:make")
    (folder / "explained_broken.py").write_text(SOURCE)
    assert explain.load_example("explained_broken.py:make") == ("model", (1, 2))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("explained_example", "form MODULE:FUNCTION"),
        (":make", "form MODULE:FUNCTION"),
        ("explained_example:", "form MODULE:FUNCTION"),
        ("explained_example:absent", "no function 'absent'"),
        ("explained_example:value", "no function 'value'"),
        ("explained_example:wrong", "returned str"),
        ("nowhere.at_all:make", "no module 'nowhere.at_all'"),
        ("absent.py:make", "no file 'absent.py'"),
        (f"{'n' * 300}.py:make", "no file 'nnn"),
        ("explained_example:needs", "cannot be called: missing a required argument: 'more'"),
    ],
)
def test_what_is_wrong_is_said(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        explain.load_example(source)


@pytest.mark.usefixtures("folder")
def test_a_failing_import_inside_the_module_is_the_users() -> None:
    with pytest.raises(ModuleNotFoundError, match="module_that_nobody_wrote"):
        explain.load_example("explained_broken:make")


@pytest.mark.usefixtures("folder")
def test_the_model_is_compiled_and_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Any] = []

    def compile_(model: object, inputs: object, **options: object) -> str:
        calls.append((model, inputs, options))
        return "compiled"

    api = SimpleNamespace(compile=compile_, explain=lambda compiled: f"explanation of {compiled}")
    monkeypatch.setattr(importlib, "import_module", lambda name: api)
    assert run(["explain", "explained_example.py:make", "--target", "x86_64_v3", "--precision", "bf16"]) == 0
    assert capsys.readouterr().out == "explanation of compiled\n"
    assert calls == [("model", (1, 2), {"precision": "bf16", "target": "x86_64_v3"})]


def test_unknown_targets_are_refused_before_the_model_is_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(explain, "load_example", lambda source: pytest.fail("the model was built"))
    assert run(["explain", "explained_example.py:make", "--target", "pentium"]) == 2
    assert "no target is called 'pentium'" in capsys.readouterr().err
