"""Python's cyclic garbage collector, paused while a model is compiled."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .forks import Lock, in_child


class _Pause:
    """The thread of each open block, and whether the collector was on before the first. While it is off there is such a thread: a fork
    may come at any time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.threads: list[int] = []
        self.enabled = False

    def begin(self) -> None:
        with self.lock:
            if not self.threads:
                self.enabled = gc.isenabled()
            self.threads.append(threading.get_ident())
            gc.disable()

    def end(self) -> None:
        with self.lock:
            if len(self.threads) == 1 and self.enabled:
                gc.enable()
            self.threads.remove(threading.get_ident())

    def renew(self) -> None:
        """In a forked child, where the blocks of other threads do not end."""
        mine = [thread for thread in self.threads if thread == threading.get_ident()]
        if self.threads and not mine and self.enabled:
            gc.enable()
        self.threads = mine


_PAUSE = _Pause()
in_child(_PAUSE.renew)


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
