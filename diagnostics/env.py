"""The only file that reads environment variables. `docs/env.md` is the manual page; `VARIABLES` is its source.

Nothing is cached: a test or a notebook may set a variable at any time. Each read costs about a microsecond and happens
while compiling, never while a compiled model runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import InputError

MAX_DEBUG = 4
_DIGITS = 20  # that a number may have: more than the largest has, and not so many that Python refuses to read them


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the meaning of an unset value, and one sentence of help."""

    name: str
    default: str
    help: str


VARIABLES: tuple[Variable, ...] = (
    Variable("SASHIKO_DEBUG", "0", "how much is printed to stderr, 0 (nothing) to 4 (generated code)"),
    Variable("SASHIKO_DUMP", "off", "folder that receives every stage of every compilation as text"),
    Variable("SASHIKO_CACHE", "~/.cache/sashiko", "folder of compiled kernels and measured choices"),
    Variable("SASHIKO_TARGET", "this machine", "name of the target to compile for, as in platforms/catalogue.py"),
    Variable("SASHIKO_THREADS_MIN_WORK", "measured", "smallest work, in multiply-adds, that is split between threads"),
)


def _read(name: str) -> str:
    """Returns the stripped value, or an empty string when it is unset."""
    return os.environ.get(name, "").strip()


def _read_int(name: str, low: int, high: int) -> int | None:
    text = _read(name)
    if not text:
        return None
    if not text.isdecimal() or len(text) > _DIGITS or not low <= int(text) <= high:
        what = f"{name}={text!r:.60} is not a whole number from {low} to {high}"
        raise InputError(what, "environment", f"set it in that range or unset {name}")
    return int(text)


def _folder(name: str, text: str) -> Path:
    """The folder that a variable names or, unset, stands for. Raises InputError for the home of somebody unknown."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        what = f"{name}: {text!r} lies in a home folder that is not known"
        raise InputError(what, "environment", f"set {name} to a path without ~") from error


def current() -> tuple[tuple[Variable, str], ...]:
    """Returns every variable with its present text, empty when it is unset."""
    return tuple((variable, _read(variable.name)) for variable in VARIABLES)


def override(values: Mapping[str, str]) -> None:
    """Sets variables of this process. For a process that was started for one job, before it imports what reads them."""
    os.environ.update(values)


def debug_level() -> int:
    """Returns SASHIKO_DEBUG, 0 to 4; see `dump.say` for the meaning of each level."""
    return _read_int("SASHIKO_DEBUG", 0, MAX_DEBUG) or 0


def dump_dir() -> Path | None:
    """Returns the folder for stage dumps, or None when dumping is off."""
    text = _read("SASHIKO_DUMP")
    return _folder("SASHIKO_DUMP", text) if text else None


def cache_dir() -> Path:
    """Returns the cache folder (it may not exist yet): SASHIKO_CACHE, else XDG_CACHE_HOME/sashiko, else ~/.cache/sashiko."""
    text = _read("SASHIKO_CACHE")
    if text:
        return _folder("SASHIKO_CACHE", text)
    xdg = _read("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is invalid and is to be ignored.
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else _folder("SASHIKO_CACHE", "~/.cache")
    return base / "sashiko"


def names_cache() -> bool:
    """Returns whether SASHIKO_CACHE says where the cache folder is."""
    return bool(_read("SASHIKO_CACHE"))


def target_name() -> str | None:
    """Returns the name of the target to compile for, or None for the machine this runs on."""
    return _read("SASHIKO_TARGET") or None


def threads_min_work() -> int | None:
    """Returns the smallest work in multiply-adds worth splitting between threads, or None for the measured default."""
    return _read_int("SASHIKO_THREADS_MIN_WORK", 0, 1 << 62)
