"""Types of arguments for argparse: what it says of a wrong one, it says before any work is done.

`os.path` says of what cannot be looked at, such as a name that is too long, that it is not there; some versions of `Path` raise instead.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ..diagnostics.errors import InputError

T = TypeVar("T")


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """A finite number from 0 on."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def drop(text: str) -> float:
    """A number from 0 on; infinity bounds nothing."""
    value = _number(text)
    if not value >= 0:
        raise ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def split(text: str) -> list[str]:
    """The parts between commas, each once, empty ones left out."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def several(each: Callable[[str], T]) -> Callable[[str], list[T]]:
    """What `each` makes of the parts between commas, of which there is at least one."""

    def parse(text: str) -> list[T]:
        if not split(text):
            raise ArgumentTypeError("nothing is named")
        try:
            return [each(part) for part in split(text)]
        except (ValueError, InputError) as error:
            raise ArgumentTypeError(str(error)) from error

    return parse


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """One of the known names."""
    names = tuple(known)

    def parse(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def _number(text: str) -> float:
    """NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def file_to_read(text: str) -> Path:
    if not os.path.isfile(text):
        raise ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def file_to_write(text: str) -> Path:
    """In a folder that exists. What is not there is made, and taken away again: folders such as /proc do not say that they take none."""
    try:
        real = Path(os.path.realpath(text))
        if not real.exists():
            real.touch(exist_ok=False)
            real.unlink()
        elif real.is_dir() or not os.access(real, os.W_OK):
            raise ArgumentTypeError(f"{text!r} cannot be written")
    except (OSError, ValueError) as error:  # ValueError: no name at all
        raise ArgumentTypeError(f"{text!r} cannot be written") from error
    return Path(text)


def folder_to_write(text: str) -> Path:
    """It need not exist."""
    path = Path(text)
    if not text or "\0" in text:
        raise ArgumentTypeError(f"{text!r} is no name of a folder")
    there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))
    if not os.path.isdir(there) or not os.access(there, os.W_OK):
        raise ArgumentTypeError(f"{text!r} is no folder that can be written")
    return path
