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
from weakref import ref

from ..diagnostics.forks import in_child

# Callers that run with several threads, which native code counts, and callers that wait: among so many are the cores to be shared.
CALLERS = (ctypes.c_int64 * 2)()


# Seconds after which who waits looks for a turn that has come back by itself.
_LOOK = 0.2


class Turn:
    """The right to run. One that is dropped, as where a signal such as KeyboardInterrupt cuts its holder off, comes back by itself once no
    traceback holds it."""

    __slots__ = ("_free",)

    def __init__(self, free: SimpleQueue[Turn]) -> None:
        self._free = ref(free)

    def __del__(self) -> None:
        free = self._free()
        if free is not None:
            free.put(Turn(free))


class _Waiter:
    """Who waits: `woken` is held until `turn` is there. Whoever gives it may be cut off in between."""

    def __init__(self) -> None:
        self.woken, self.turn = allocate_lock(), None
        self.woken.acquire()

    woken: LockType
    turn: Turn | None


class Turns:
    """`count` turns. Who finds one takes it without a lock; the others queue up, and a turn that ends goes to the first of them.

    A turn ends by `free.put`, and `pass_on` where somebody waits. The former is one call of C, which no signal comes into: after any other
    a handler may raise.
    """

    def __init__(self, count: int) -> None:
        self.free: SimpleQueue[Turn] = SimpleQueue()
        for _ in range(count):
            self.free.put(Turn(self.free))
        self._get = self.free.get_nowait
        self.waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    def take(self) -> Turn:
        """Returns when it is the caller's turn."""
        if not self.waiting:
            try:
                return self._get()
            except Empty:
                pass
        return self._queue_up()

    def pass_on(self) -> None:
        """Gives those who wait the turns that are free. Who begins to wait meanwhile finds one, or is seen here: either writes before it
        looks."""
        while self.waiting and not self.free.empty():
            with self._lock:
                if not self.waiting:
                    return
                first = self.waiting[0]
                if first.turn is None:
                    first.turn = self._found()
                if first.turn is None:
                    return
                self.waiting.popleft()
                CALLERS[1] = len(self.waiting)
                first.woken.release()

    def _found(self) -> Turn | None:
        try:
            return self._get()
        except Empty:
            return None

    def _queue_up(self) -> Turn:
        mine = _Waiter()
        try:
            with self._lock:
                self.waiting.append(mine)
                CALLERS[1] = len(self.waiting)
            while True:
                self.pass_on()
                woken = mine.woken.acquire(timeout=_LOOK)
                if mine.turn is not None:
                    if not woken:  # a signal came between
                        self._withdraw(mine)
                    return mine.turn
        except BaseException:  # of a signal
            self._withdraw(mine)
            if mine.turn is not None:
                self.free.put(mine.turn)
                self.pass_on()
            raise

    def _withdraw(self, mine: _Waiter) -> None:
        """Waits no longer."""
        with self._lock:
            if mine in self.waiting:
                self.waiting.remove(mine)
                CALLERS[1] = len(self.waiting)


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
