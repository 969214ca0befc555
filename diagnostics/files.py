"""Files that a caller names to be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import InputError


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what makes a file and writes it: InputError where it cannot be written, before any work where that is known."""
    given: object = path
    if not isinstance(given, (str, os.PathLike)) or "\0" in os.fspath(given):
        raise InputError(f"{given!r} is no path of a file", "save(path)", "pass a str without NUL, or a pathlib.Path")
    where, file = os.fspath(path), Path(path)
    try:
        if not file.parent.is_dir():
            raise InputError(f"there is no folder {file.parent}", where, "make it first")
        if file.is_dir():
            raise InputError(f"{file} is a folder", where, "give the name of a file, such as one in it")
        yield
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}", where, "give a file that can be") from error
