"""Locks in forked children: free of threads that are not there, or never taken by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from sashiko.diagnostics.forks import Lock, never_inside
from tests.forked import succeeds


@contextmanager
def held_by_another(lock: AbstractContextManager[object], seconds: float) -> Iterator[threading.Thread]:
    """Another thread has the lock, for so long or to the end of the block."""
    begun, end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            begun.set()
            end.wait(seconds)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    try:
        yield thread
    finally:
        end.set()
        thread.join()


def taken(lock: Lock) -> bool:
    with lock, lock:
        return True


def test_a_lock_of_another_thread_is_free_in_a_child_and_taken_in_the_parent() -> None:
    lock = Lock()
    with held_by_another(lock, 60) as thread:
        assert succeeds(lambda: taken(lock))
        assert thread.is_alive()
        assert not lock._lock.acquire(blocking=False)


def test_a_lock_of_the_thread_that_forks_stays_its_own() -> None:
    lock = Lock()

    def check() -> bool:
        lock.__exit__()
        other = threading.Thread(target=taken, args=(lock,))
        other.start()
        other.join(10)
        return not other.is_alive()

    with lock:
        assert succeeds(check)


def test_a_fork_waits_for_who_is_inside() -> None:
    lock = never_inside()
    with held_by_another(lock, 0.5):
        start = time.perf_counter()
        assert succeeds(lambda: lock.acquire(blocking=False))
        assert time.perf_counter() - start > 0.4
    assert lock.acquire(blocking=False)
    lock.release()


@pytest.mark.parametrize("times", [1, 2])
def test_who_is_inside_may_fork(times: int) -> None:
    lock = never_inside()
    for _ in range(times):
        lock.acquire()
    assert succeeds(lambda: all(lock.release() is None for _ in range(times)))
    for _ in range(times):
        lock.release()
