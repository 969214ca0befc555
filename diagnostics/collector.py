"""Python's cyclic garbage collector, paused while a model is compiled."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """How many blocks are open, and whether the collector was on before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks = 0
        self.enabled = False

    def begin(self) -> None:
        with self.lock:
            if not self.blocks:
                self.enabled = gc.isenabled()
                gc.disable()
            self.blocks += 1

    def end(self) -> None:
        with self.lock:
            self.blocks -= 1
            if not self.blocks and self.enabled:
                gc.enable()


_PAUSE = _Pause()


@contextmanager
def paused() -> Iterator[None]:
    """No collection starts by itself inside. Afterwards the collector is as it was; blocks may nest, and overlap in several threads.

    A compile makes many objects and few cycles. It would start full collections, each of which walks everything that torch and the
    model's libraries hold: half a million objects, 0.3 s.
    """
    _PAUSE.begin()
    try:
        yield
    finally:
        _PAUSE.end()
