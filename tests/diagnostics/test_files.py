"""Files that cannot be written: an InputError that names the file and the reason, and what else goes wrong passes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sashiko.diagnostics.errors import InputError
from sashiko.diagnostics.files import writing


def test_what_is_known_before_any_work_is_done(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is a folder"), ("", "is a folder"), (tmp_path / "absent" / "file", "there is no folder .*absent")):
        with pytest.raises(InputError, match=message), writing(path):
            pytest.fail("it was tried all the same")


@pytest.mark.parametrize("reason", [errno.EACCES, errno.ENOSPC])
def test_the_systems_reason_is_told(reason: int, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    with pytest.raises(InputError, match=f"file cannot be written: {os.strerror(reason)}") as caught, writing(path):
        raise OSError(reason, os.strerror(reason))
    assert caught.value.where == path


def test_names_that_are_too_long(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: File name too long"), writing(path := tmp_path / ("n" * 300)):
        path.write_text("")


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing(tmp_path / "file"):
        raise KeyError("theirs")
