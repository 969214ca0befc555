"""Files that are not there, and files that may not be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sashiko.graph import container
from tests.forked import succeeds


@pytest.mark.parametrize("name", ["absent", "n" * 300, "there/file"])
def test_files_that_are_not_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(FileNotFoundError, match=f"there is no file .*{name}"):
        container.kind_of(tmp_path / name)


def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "model").touch(mode=0)
    tmp_path.chmod(0o755)

    def refuses() -> bool:
        os.chdir(tmp_path)
        if os.getuid() == 0:
            os.setuid(65534)  # root may read everything
        with pytest.raises(PermissionError):
            container.kind_of("model")
        return True

    assert succeeds(refuses)
