"""What a forked child of a process with other threads does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from multiprocessing import get_context


def succeeds(check: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether `check` is true in a child that is forked now, and does not wait there for ever."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # that it has threads is what is tested
        child = get_context("fork").Process(target=lambda: os._exit(0 if check() else 2))
        child.start()
    try:
        child.join(seconds)
        return child.exitcode == 0
    finally:
        child.kill()
