"""The debug ladder and the stage dumps: text for people who look into a compilation.

Texts are passed as functions where making them costs something, so that a silent run pays nothing.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import env
from .errors import InputError

Text = str | Callable[[], str]


def say(level: int, text: Text) -> None:
    """Prints `text` to stderr when SASHIKO_DEBUG >= level.

    1: one line per compilation. 2: passes, their times, what was left to PyTorch and why. 3: graphs, stitches, kernel choices.
    4: loops, LLVM IR and assembly.
    """
    if env.debug_level() >= level:
        print(text if isinstance(text, str) else text(), file=sys.stderr)


def dump_stage(name: str, number: int, stage: str, text: Text) -> Path | None:
    """Writes `text` to SASHIKO_DUMP/<name>/<nn>_<stage>.txt and returns the path, or None when dumping is off.

    name: of the compilation. number: position of the stage in the pipeline, 0 to 99. An older file is replaced whole, so that
    two processes dumping the same model leave one complete file. InputError where the folder cannot be written.
    """
    root = env.dump_dir()
    if root is None:
        return None
    folder = root / _file_name(name)
    path = folder / f"{number:02d}_{_file_name(stage)}.txt"
    content = text if isinstance(text, str) else text()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".dump")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content if content.endswith("\n") else content + "\n")
        os.replace(temporary, path)
    except OSError as error:
        what = f"nothing can be written to SASHIKO_DUMP={str(root)!r}: {error}"
        raise InputError(what, "environment", "name another folder or unset SASHIKO_DUMP") from error
    return path


def _file_name(text: str) -> str:
    """Returns `text` with everything replaced that a file name may not hold; never empty, never a parent folder."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", text).strip(".") or "unnamed"
