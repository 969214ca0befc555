"""Environment variables: defaults, values, refusals, and their manual page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sashiko.diagnostics import env
from sashiko.diagnostics.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert env.debug_level() == 0
    assert env.dump_dir() is None
    assert env.target_name() is None
    assert env.threads_min_work() is None
    assert env.cache_dir() == Path("/home/someone/.cache/sashiko")


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in (("DEBUG", " 3 "), ("DUMP", "~/d"), ("CACHE", "~/c"), ("TARGET", "neoverse_n1"), ("THREADS_MIN_WORK", "0")):
        monkeypatch.setenv(f"SASHIKO_{name}", value)
    assert env.debug_level() == 3
    assert env.dump_dir() == Path("/home/someone/d")
    assert env.cache_dir() == Path("/home/someone/c")
    assert env.target_name() == "neoverse_n1"
    assert env.threads_min_work() == 0


def test_overridden_values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASHIKO_CACHE", "/before")
    env.override({"SASHIKO_CACHE": "/after"})
    assert env.cache_dir() == Path("/after")


def test_blank_means_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.setenv(variable.name, "  ")
    assert (env.debug_level(), env.dump_dir(), env.target_name(), env.threads_min_work()) == (0, None, None, None)


def test_xdg_is_respected_and_relative_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/c")
    assert env.cache_dir() == Path("/var/c/sashiko")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.cache_dir() == Path("/home/someone/.cache/sashiko")


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("SASHIKO_DEBUG", "5", env.debug_level),
        ("SASHIKO_DEBUG", "-1", env.debug_level),
        ("SASHIKO_DEBUG", "yes", env.debug_level),
        ("SASHIKO_DEBUG", "²", env.debug_level),
        ("SASHIKO_DEBUG", "1" * 5000, env.debug_level),
        ("SASHIKO_THREADS_MIN_WORK", "1e6", env.threads_min_work),
    ],
)
def test_bad_numbers_name_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: Callable[[], object]) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=name):
        read()


@pytest.mark.parametrize(("name", "read"), [("SASHIKO_DUMP", env.dump_dir), ("SASHIKO_CACHE", env.cache_dir)])
def test_a_home_of_nobody_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], object]) -> None:
    monkeypatch.setenv(name, "~nobody that is known/folder")
    with pytest.raises(InputError, match=name):
        read()


def test_without_a_home_the_variable_for_the_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(InputError, match="SASHIKO_CACHE"):
        env.cache_dir()


def test_at_most_six_variables_and_every_one_documented() -> None:
    page = (ROOT / "docs" / "env.md").read_text()
    assert len(env.VARIABLES) <= 6
    for variable in env.VARIABLES:
        assert f"`{variable.name}`" in page
