"""Types of arguments: what they take, and that asking leaves nothing behind."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from sashiko.cli.values import count, file_to_read, file_to_write, folder_to_write, one_of, several


def test_files_to_write(tmp_path: Path) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("text")
    link.symlink_to(tmp_path / "target")
    for path in (there, link, tmp_path / "new"):
        assert file_to_write(str(path)) == path
    assert there.read_text() == "text" and link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"there", "link"}


@pytest.mark.parametrize("name", ["", "absent/file", "there/file", "\0", "n" * 300])
def test_files_that_cannot_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("text")
    with pytest.raises(ArgumentTypeError, match="cannot be written"):
        file_to_write(str(tmp_path / name))


@pytest.mark.parametrize("name", ["", "absent", "there/file", "\0", "n" * 300])
def test_files_that_are_not_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("text")
    assert file_to_read(str(tmp_path / "there")) == tmp_path / "there"
    with pytest.raises(ArgumentTypeError, match="there is no file"):
        file_to_read(str(tmp_path / name))


def test_folders_to_write(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("text")
    for name in ("", "new", "new/deep", "n" * 300):  # of the last is told as it is made
        assert folder_to_write(str(tmp_path / name)) == tmp_path / name
    for name in ("there", "there/new", "\0"):
        with pytest.raises(ArgumentTypeError, match="is no"):
            folder_to_write(str(tmp_path / name))
    with pytest.raises(ArgumentTypeError, match="'' is no name"):
        folder_to_write("")


def test_lists() -> None:
    assert several(count)("2, 1,,2") == [2, 1]
    assert several(one_of({"fp32": 4, "int8": 1}))("int8") == ["int8"]
    for text, message in ((" ,", "nothing is named"), ("fp32,int4", "'int4' is none of fp32, int8")):
        with pytest.raises(ArgumentTypeError, match=message):
            several(one_of(("fp32", "int8")))(text)
    with pytest.raises(ArgumentTypeError, match="invalid literal"):
        several(int)("1,x")
