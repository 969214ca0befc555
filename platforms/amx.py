"""Permission to use AMX tiles, which Linux grants to a process on request.

The 8 KB of tile state make signal frames larger, so the kernel wants a process to ask (Linux `Documentation/arch/x86/xstate.rst`).
Without permission the first tile instruction kills the process: the features count only once the kernel has said yes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from dataclasses import dataclass
from functools import lru_cache

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
# What the numbers mean here (Linux `arch/x86/kernel/fpu/xstate.c`, `arch/x86/kernel/signal.c`), where their own texts mislead.
_MEANING = {
    errno.ENOSPC: "a thread's alternate signal stack (sigaltstack) has no room for it, and was there before sashiko asked",
    errno.EINVAL: "it does not know the request; Linux 5.16 and later do",
}


@dataclass(frozen=True)
class AmxPermission:
    """The kernel's answer. reason: empty when granted."""

    granted: bool
    reason: str


@lru_cache(maxsize=1)
def request() -> AmxPermission:
    """Asks the kernel once per process for the tile state; all its threads and forked children have it from then on.

    On a machine without AMX the answer is a refusal with a reason.
    """
    machine = platform.machine()
    # The number means something else in the system calls of other architectures.
    if not sys.platform.startswith("linux") or machine != "x86_64":
        return AmxPermission(False, f"AMX is known for Linux on x86_64 only, not for {sys.platform} on {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    if libc.syscall(*(ctypes.c_long(a) for a in arguments)) == 0:
        return AmxPermission(True, "")
    return AmxPermission(False, refusal(ctypes.get_errno()))


def refusal(number: int) -> str:
    """Returns what an error number of the request means."""
    return f"the kernel refused the AMX tile state: {_MEANING.get(number) or os.strerror(number)}"
