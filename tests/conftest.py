"""Shared fixtures: seeds, threads, a private cache, the host target, golden files, and the markers that skip with a reason."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Two workers of two threads each share two cores: a thread that spins at a barrier takes the time of the one it waits for. OpenMP reads
# this when torch is loaded; workers inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# With the checkout itself on the path (`python -m pytest` puts it there), libraries that look for a top-level package called
# `kernels` would find ours.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

from sashiko.diagnostics import env  # noqa: E402
from sashiko.platforms.host import host_report  # noqa: E402
from sashiko.platforms.target import Target  # noqa: E402

_TEMPORARY: dict[str, str] = {}

# torch keeps what it traced for as long as the process lives. The collector of cycles goes through all of it again and again, which
# would take a tenth of the tests' time.
gc.set_threshold(200_000, 20, 100)

# pytest listens to each logger that hands nothing on. For this one, torch then makes records of all that it traces, with stacks and graphs.
_TRACES = logging.getLogger("torch.__trace")
_TRACES.handlers.clear()
_TRACES.propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden text files instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    """Cuts the tests off from the user's settings and cache. Workers share one cache, that of the process which started them."""
    shared = os.environ["SASHIKO_CACHE"] if hasattr(config, "workerinput") else None
    for variable in env.VARIABLES:
        os.environ.pop(variable.name, None)
    if shared is None:
        shared = _TEMPORARY["cache"] = tempfile.mkdtemp(prefix="sashiko-test-cache-")
    os.environ["SASHIKO_CACHE"] = shared
    torch.set_num_threads(2)


def pytest_sessionfinish() -> None:
    """pytest then looks for cycles five times, in all that torch traced; what is there by now stays until the process ends."""
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if "cache" in _TEMPORARY:
        shutil.rmtree(_TEMPORARY.pop("cache"), ignore_errors=True)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a test module draws as it is imported is the same in every run, too."""
    if isinstance(collector, pytest.Module):
        _seed()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what this machine cannot run, and says what is missing."""
    report = host_report()
    reasons = dict(report.removed)
    for marker in item.iter_markers("isa"):
        for feature in marker.args:
            if not report.target.has(feature):
                pytest.skip(f"this machine lacks {feature}" + (f": {reasons[feature]}" if feature in reasons else ""))
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    if item.get_closest_marker("aarch64") is not None:
        lacking = [tool for tool in ("qemu-aarch64-static", "aarch64-linux-gnu-gcc") if shutil.which(tool) is None]
        if lacking:
            pytest.skip(f"not installed: {', '.join(lacking)}")


@pytest.fixture(autouse=True)
def deterministic() -> None:
    """Every test starts from the same seeds, whatever ran before it."""
    _seed()


@pytest.fixture(autouse=True)
def fixed_threads() -> Iterator[None]:
    """A test may change the number of threads; the next one finds two again."""
    yield
    if torch.get_num_threads() != 2:
        torch.set_num_threads(2)


@pytest.fixture
def own_garbage() -> Iterator[None]:
    """`gc.collect()` looks at what the test makes alone: to go through all that torch has traced until then takes a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, empty."""
    monkeypatch.setenv("SASHIKO_CACHE", str(tmp_path))


@pytest.fixture
def target() -> Target:
    """The machine the tests run on."""
    return host_report().target


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name", text)` compares text with golden/name.txt beside the test; `--update-golden` rewrites the file."""
    folder = request.path.parent / "golden"

    def compare(name: str, text: str) -> None:
        path = folder / f"{name}.txt"
        actual = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(actual)
            return
        assert path.is_file(), f"{path} is missing; run pytest with --update-golden and look at what it writes"
        assert actual == path.read_text(), f"differs from {path}; if that is meant, run pytest with --update-golden"

    return compare
