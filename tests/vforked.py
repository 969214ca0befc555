"""Calls kernels in a child process, so that what kills it is a failed test.

The child has the memory of this process, which waits for it, as after vfork. A fork copies the page tables of all that torch holds, and
then the first write to each page is a trap: that takes longer than most kernels take to be built and run. What a kernel writes anywhere
stays, so that it may also be a later crash that shows a stray write, which a forked child would hide.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Sequence
from functools import lru_cache

from sashiko.cpu_codegen import jit
from sashiko.platforms.host import host

TIMEOUT_S = 300
_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000
_STACK = 8 << 20
_DEADLY = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGALRM)
# A handler makes an exit status of each signal: what a core dump does to others with the same memory depends on the kernel.
_CODE = f"""
declare ptr @signal(i32, ptr)
declare i32 @alarm(i32)
declare void @_exit(i32)
define void @died(i32 %signal) {{
  %status = add i32 %signal, 128
  call void @_exit(i32 %status)
  unreachable
}}
define i32 @calls(ptr %first) {{
entry:
{chr(10).join(f"  call ptr @signal(i32 {int(each)}, ptr @died)" for each in _DEADLY)}
  call i32 @alarm(i32 {TIMEOUT_S})
  br label %next
next:
  %call = phi ptr [ %first, %entry ], [ %after, %made ]
  %kernel = load ptr, ptr %call
  %none = icmp eq ptr %kernel, null
  br i1 %none, label %last, label %made
made:
  %slots.at = getelementptr i64, ptr %call, i64 1
  %begin.at = getelementptr i64, ptr %call, i64 2
  %end.at = getelementptr i64, ptr %call, i64 3
  %after = getelementptr i64, ptr %call, i64 4
  %slots = load ptr, ptr %slots.at
  %begin = load i64, ptr %begin.at
  %end = load i64, ptr %end.at
  call void %kernel(ptr %slots, i64 %begin, i64 %end)
  br label %next
last:
  ret i32 0
}}
"""


@lru_cache(maxsize=1)
def _child() -> tuple[jit.Library, mmap.mmap]:
    """What the child runs, and its stack."""
    libc = ctypes.CDLL(None)
    externals = {name: ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0 for name in ("signal", "alarm", "_exit")}
    stack = mmap.mmap(-1, _STACK, flags=mmap.MAP_PRIVATE)
    lowest = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(stack)))
    assert libc.mprotect(lowest, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return jit.load_object(jit.compile_object(_CODE, host()), externals), stack


def status_of(calls: Sequence[tuple[int, int, int, int]]) -> int:
    """Calls kernels: address, slots, begin and end of each. 0, or of what the child died: a negative signal or another status."""
    library, stack = _child()
    words = [*(word for call in calls for word in call), 0]
    given = (ctypes.c_int64 * len(words))(*words)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + _STACK
    libc, flags = ctypes.CDLL(None, use_errno=True), _CLONE_VM | _CLONE_VFORK | signal.SIGCHLD
    child = libc.clone(ctypes.c_void_p(library.address("calls")), ctypes.c_void_p(top), ctypes.c_int(flags), given)
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return 128 - code if code > 128 else code
