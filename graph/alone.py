"""One trace at a time in a process.

While torch.export traces a module, the module's tensors are others, and so are functions, options and warnings that all threads share. What
any thread computes with symbolic sizes becomes part of the trace.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..diagnostics.forks import Lock, in_child, is_free

_DYNAMO = "torch._dynamo.convert_frame"


class _Locks:
    """own: ours. abandoned: whether Dynamo's is held by a thread that did not follow into this process."""

    def __init__(self) -> None:
        self.own = Lock()
        self.abandoned = False

    def chosen(self) -> Any:
        # Imported late: importing it takes a second, and what traces needs it anyway.
        found = None if self.abandoned else getattr(importlib.import_module(_DYNAMO), "compile_lock", None)
        return found or self.own

    def renew(self) -> None:
        """In a forked child, where the thread that held Dynamo's lock may be gone."""
        theirs = getattr(sys.modules.get(_DYNAMO), "compile_lock", None)
        self.abandoned = theirs is not None and not is_free(theirs)


_LOCKS = _Locks()
in_child(_LOCKS.renew)


@contextmanager
def alone() -> Iterator[None]:
    """No other thread is in such a block, nor compiles with Dynamo; blocks of one thread may nest, and it may call Dynamo in them.

    The lock is Dynamo's where it has one: it holds that while it calls a backend, which may trace, and a model that is traced may use
    functions of torch.compile, so that each of two locks could be waited for by whoever holds the other.
    """
    with _LOCKS.chosen():
        yield
