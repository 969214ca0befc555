"""Forked children: of all threads only the one that forked is there, so what another one held at that moment would be held for ever."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Lock:
    """A lock that the thread that has it may take again. A forked child finds it free, unless its own thread has it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        if not is_free(self._lock):
            self._lock = threading.RLock()


_LOCKS = weakref.WeakSet[Lock]()


def is_free(lock: Any) -> bool:
    """Whether this thread has the lock or can have it."""
    taken: bool = lock.acquire(blocking=False)
    if taken:
        lock.release()
    return taken


def in_child(renew: Callable[[], None]) -> None:
    """Has `renew` called in each forked child, before anything else runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


def never_inside() -> threading.RLock:
    """A lock around what a fork must not interrupt, since its state in a child could not be put right: who forks waits for it. A thread
    that has it may take it again, or fork."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def _renew() -> None:
    for lock in tuple(_LOCKS):
        lock.renew()


in_child(_renew)
