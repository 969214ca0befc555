"""The CUDA driver, which PyTorch's GPU builds bring along: modules of PTX, and many launches in one call.

Functions belong to the primary context of a device, which is PyTorch's own, so that tensors and streams are shared by address. CUDA
Driver API, sections 6.12 (modules) and 6.22 (execution control).
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from ..cpu_codegen import cache, jit
from ..cpu_codegen.builder import I32, I64, PTR, Function, Module, Val, const, i64
from ..diagnostics.errors import InvalidGraph, Unsupported
from ..platforms.host import host

_LOG_BYTES = 8192
_JIT_ERROR_LOG, _JIT_ERROR_LOG_SIZE = 5, 6  # CU_JIT_ERROR_LOG_BUFFER and its size
_TOO_OLD = (221, 222)  # CUDA_ERROR_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_UNSUPPORTED_PTX_VERSION
ROW = 4
"""Words of a launch: function, blocks, threads of a block, address of the pointer to the slots."""


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The driver's library. Raises Unsupported where there is none."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise Unsupported(f"there is no CUDA driver: {error}") from error


def _reason(code: int) -> str:
    text = ctypes.c_char_p()
    driver().cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} ({code})"


def _check(code: int, what: str, log: str = "") -> None:
    if code in _TOO_OLD:
        raise Unsupported(f"{what}: {_reason(code)}", hint="a newer driver takes it")
    if code:
        raise InvalidGraph(f"{what}: {_reason(code)}{': ' + log if log else ''}", "loading code for a GPU")


_THREAD = threading.local()


def _current() -> int | None:
    """The CUDA context of this thread, if there is one."""
    context = ctypes.c_void_p()
    _check(driver().cuCtxGetCurrent(ctypes.byref(context)), "the GPU cannot be used in this thread")
    return context.value


class CudaModule:
    """The kernels of a PTX text on one device; `functions` are their handles by name. They stay with the process.

    Raises Unsupported where the driver is too old for the text, InvalidGraph where it refuses it.
    """

    def __init__(self, ptx: str, names: Sequence[str], device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # which makes PyTorch's context that of this thread
            self._context = _current()
            self._handle = ctypes.c_void_p()
            log = ctypes.create_string_buffer(_LOG_BYTES)
            options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_SIZE)
            values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
            code = driver().cuModuleLoadDataEx(ctypes.byref(self._handle), ptx.encode(), 2, options, values)
            _check(code, "the driver refuses the code", log.value.decode(errors="replace"))
            self.functions = {name: self._function(name) for name in names}

    def enter(self) -> None:
        """Before launches of a thread: one that has not used a GPU has no context, and PyTorch's allocator may not need any."""
        if not getattr(_THREAD, "entered", False):
            if not _current():
                _check(driver().cuCtxSetCurrent(ctypes.c_void_p(self._context)), "the GPU cannot be used in this thread")
            _THREAD.entered = True

    def _function(self, name: str) -> int:
        found = ctypes.c_void_p()
        _check(driver().cuModuleGetFunction(ctypes.byref(found), self._handle, name.encode()), f"the code has no kernel {name}")
        return found.value or 0


def emit_launches(module: Module) -> None:
    """launch_all(rows, count, stream, launch) -> i64: launches row after row, none without blocks. 0, or what `launch` said first."""
    f = Function(module, "launch_all", I64, [PTR, I64, PTR, PTR])
    rows, count, stream, launch = f.args
    one, none = const(I32, 1), Val(PTR, "null")

    def row(number: Val, carried: list[Val]) -> list[Val]:
        at = f.gep(rows, number, scale=8 * ROW)
        words = [f.gep(at, i64(n), I64) for n in range(ROW)]
        blocks, threads = (f.convert("trunc", f.load(I64, word), I32) for word in words[1:3])

        def go() -> list[Val]:
            function, slots = f.load(PTR, words[0], 8), f.load(PTR, words[3], 8)
            arguments = [function, blocks, one, one, threads, one, one, const(I32, 0), stream, slots, none]
            return [f.convert("zext", f.call_pointer(launch, I32, arguments), I64)]

        wanted = f.and_(f.icmp("ne", blocks, const(I32, 0)), f.icmp("eq", carried[0], i64(0)))
        return f.branch(wanted, go, lambda: carried)

    (code,) = f.loop(i64(0), count, 1, [i64(0)], row)
    f.ret(code)
    f.finish()


@lru_cache(maxsize=1)
def launcher() -> Callable[[int, int, int, int], int]:
    """`launch_all` as native code of this machine: (address of rows, count, stream, address of cuLaunchKernel)."""
    module = Module()
    emit_launches(module)
    library = jit.load_object(cache.compiled(module.text(), host()))
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    call: Callable[[int, int, int, int], int] = function(library.address("launch_all"))
    _KEPT.append(library)
    return call


_KEPT: list[jit.Library] = []


def launch_address() -> int:
    """The address of cuLaunchKernel."""
    return ctypes.cast(driver().cuLaunchKernel, ctypes.c_void_p).value or 0


def check_launch(code: int) -> None:
    """Raises RuntimeError for what `launch_all` returns when a launch fails."""
    if code:
        raise RuntimeError(f"a kernel cannot be launched: {_reason(code)}")
