"""The command table: parsing, errors, exit statuses, and the two ways to start it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sashiko import __version__
from sashiko.cli.app import COMMANDS, Command, run
from sashiko.diagnostics.errors import InputError, Unsupported


def fail(options: argparse.Namespace) -> int:
    raise Unsupported("no such thing", "model.py:1", "leave it")


def refuse(options: argparse.Namespace) -> int:
    raise InputError("not that")


def add_number(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=0)


TABLE = (
    Command("fail", "fails", lambda parser: None, fail),
    Command("refuse", "refuses", lambda parser: None, refuse),
    Command("give", "gives its number back", add_number, lambda options: int(options.number)),
)


def test_the_chosen_command_runs_and_gives_the_status() -> None:
    assert run(["give", "--number", "7"], TABLE) == 7


def test_errors_are_printed_and_give_one_or_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["refuse"], TABLE) == 2
    assert capsys.readouterr().err == "sashiko refuse: not that\n"
    assert run(["fail"], TABLE) == 1
    assert capsys.readouterr().err == "sashiko fail: no such thing\n  where: model.py:1\n  hint: leave it\n"


def test_errors_are_raised_for_those_who_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASHIKO_DEBUG", "2")
    with pytest.raises(Unsupported):
        run(["fail"], TABLE)


def test_a_level_that_is_none_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SASHIKO_DEBUG", "much")
    for command in ("fail", "give"):
        assert run([command], TABLE) == 2
        assert capsys.readouterr().err.startswith(f"sashiko {command}: SASHIKO_DEBUG='much' is not a whole number")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [([], 2), (["nonsense"], 2), (["--help"], 0), (["--version"], 0), (["doctor", "--help"], 0)],
)
def test_usage(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == status
    assert "sashiko" in "".join(capsys.readouterr())


def test_every_command_is_listed_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    text = capsys.readouterr().out
    assert all(f"    {command.name} " in text for command in COMMANDS)


def test_help_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys; from sashiko.cli.app import run; run(['--version']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"sashiko {__version__}\n"), done.stderr


def test_python_m_and_the_console_script_are_the_same(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("sashiko")
    assert script.is_file(), "the package is not installed with its console script: pip install -e ."
    for command in ([sys.executable, "-m", "sashiko"], [os.fspath(script)]):
        done = subprocess.run([*command, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"sashiko {__version__}\n"), done.stderr
