"""The wheel holds the package and nothing else, and works without the checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, so that nothing is left behind in it."""
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    # Hidden folders hold virtual environments and caches, and may be large.
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info"))
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("sashiko-*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    declared = re.search(r"^packages = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert declared is not None
    folders = [Path(*name.split(".")[1:]) for name in re.findall(r'"([^"]+)"', declared.group(1))]
    expected = {f"sashiko/{(folder / path.name).as_posix()}" for folder in folders for path in (ROOT / folder).glob("*.py")}
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name for name in inside if name.endswith(".py")} == expected
    assert {"sashiko/py.typed", "sashiko/cli/bench/sentences.txt"} <= inside


@pytest.mark.slow
def test_the_wheel_runs_and_offers_its_backends(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    entry_points = next(tmp_path.glob("sashiko-*.dist-info/entry_points.txt")).read_text()
    for line in ("sashiko = sashiko:backend", "disc = sashiko:backend", "aot_disc = sashiko:backend", "sashiko = sashiko.__main__:main"):
        assert line in entry_points
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from sashiko.cli import app
print(app.__file__)
sys.exit(app.run(["--version"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and str(tmp_path) in done.stdout, done.stdout + done.stderr
