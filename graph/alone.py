"""One trace at a time in a process.

While torch.export traces a module, the module's tensors are others, and so are functions, options and warnings that all threads share. What
any thread computes with symbolic sizes becomes part of the trace.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_DYNAMO = "torch._dynamo.convert_frame"


class _Locks:
    """own: ours. abandoned: whether Dynamo's is held by a thread that did not follow into this process."""

    def __init__(self) -> None:
        self.own = threading.RLock()
        self.abandoned = False

    def chosen(self) -> Any:
        # Imported late: importing it takes a second, and what traces needs it anyway.
        found = None if self.abandoned else getattr(importlib.import_module(_DYNAMO), "compile_lock", None)
        return found or self.own

    def renew(self) -> None:
        """In a forked child, where the thread that held a lock may be gone."""
        if not _is_free(self.own):
            self.own = threading.RLock()
        theirs = getattr(sys.modules.get(_DYNAMO), "compile_lock", None)
        self.abandoned = theirs is not None and not _is_free(theirs)


def _is_free(lock: Any) -> bool:
    """Whether this thread has the lock or can have it."""
    taken: bool = lock.acquire(blocking=False)
    if taken:
        lock.release()
    return taken


_LOCKS = _Locks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LOCKS.renew)


@contextmanager
def alone() -> Iterator[None]:
    """No other thread is in such a block, nor compiles with Dynamo; blocks of one thread may nest, and it may call Dynamo in them.

    The lock is Dynamo's where it has one: it holds that while it calls a backend, which may trace, and a model that is traced may use
    functions of torch.compile, so that each of two locks could be waited for by whoever holds the other.
    """
    with _LOCKS.chosen():
        yield
