"""Whose turn it is: no more native runs at once than there are cores, and one.

More callers than that would only take the cores from one another in the middle of a run, with cold caches after each switch and some
callers far behind; so they wait for a turn instead, in the order of their coming. A waiting caller holds no memory of the run, nor of
its results. The one more keeps a core busy between the end of a turn and the waking of whoever gets it, who may be put on a core where
another run is under way and have to wait for that (`benchmarks/callers.py --callers 3`, where it shows most).
"""

from __future__ import annotations

import ctypes
import os
import threading
from _thread import LockType, allocate_lock
from collections import deque
from queue import Empty, SimpleQueue

from ..diagnostics.forks import in_child

# Callers that run with several threads, which native code counts, and callers that wait: among so many are the cores to be shared.
CALLERS = (ctypes.c_int64 * 2)()


class Turns:
    """`count` turns. Who finds one takes it without a lock; the others queue up, and a turn that ends goes to the first of them."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)
        self._get, self._put = self._free.get_nowait, self._free.put
        self._waiting: deque[LockType] = deque()
        self._lock = threading.Lock()

    def take(self) -> None:
        """Returns when it is the caller's turn."""
        if not self._waiting:
            try:
                self._get()
                return
            except Empty:
                pass
        self._queue_up()

    def give(self) -> None:
        """Ends a turn."""
        if not self._waiting or not self._hand_over():
            self._put(None)
            # Somebody may have begun to wait in between; either sees the other, since each writes before it looks.
            if self._waiting and self._found() and not self._hand_over():
                self._free.put(None)

    def _found(self) -> bool:
        try:
            self._get()
        except Empty:
            return False
        return True

    def _hand_over(self) -> bool:
        if not self._waiting:
            return False
        with self._lock:
            if not self._waiting:
                return False
            first = self._waiting.popleft()
            CALLERS[1] = len(self._waiting)
        first.release()
        return True

    def _queue_up(self) -> None:
        mine = allocate_lock()
        mine.acquire()
        with self._lock:
            self._waiting.append(mine)
            if len(self._waiting) == 1 and self._found():
                self._waiting.pop()
                return
            CALLERS[1] = len(self._waiting)
        try:
            mine.acquire()
        except BaseException:  # of a signal, such as KeyboardInterrupt
            self._leave(mine)
            raise

    def _leave(self, mine: LockType) -> None:
        """Gives up waiting, and the turn where it has come meanwhile."""
        with self._lock:
            waits = mine in self._waiting
            if waits:
                self._waiting.remove(mine)
                CALLERS[1] = len(self._waiting)
        if not waits:
            self.give()


def _turns() -> Turns:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Turns(cores + 1)


TURNS = _turns()
"""Others in each process."""
FORKED = False
"""Whether this process is a forked child. OpenMP's threads do not follow into it, and GNU's OpenMP waits for them forever there: all runs
have one thread."""


def _renew() -> None:
    """In a forked child, where the threads that had turns are gone."""
    global TURNS, FORKED
    TURNS, FORKED, CALLERS[0], CALLERS[1] = _turns(), True, 0, 0


in_child(_renew)
