"""Addresses of the C functions that generated code calls: torch's own libraries and the C library.

torch is found, not imported: a function counts when the library that holds it is already loaded in this process. Its libtorch_cpu
depends on the OpenMP runtime and the BLAS that torch uses, and a look-up through it searches those too, so that
`GOMP_parallel` is that of the very runtime whose thread pool torch uses.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_TORCH_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")


@dataclass(frozen=True)
class Symbol:
    """A function's address, or 0 and the reason why there is none. library: where it was found."""

    name: str
    address: int
    library: str
    reason: str


def address(name: str) -> int | None:
    """Returns the address of the C function `name` in this process, or None; `find(name).reason` says why."""
    return find(name).address or None


def find(name: str) -> Symbol:
    """Returns where the C function `name` is in this process. Torch's libraries come first, then the global ones (libc, libm)."""
    library, reason = _torch_library()
    for handle, place in ((library, "libtorch_cpu and its dependencies"), (_process(), "the process")):
        found = _address_in(handle, name) if handle is not None else 0
        if found:
            return Symbol(name, found, place, "")
    return Symbol(name, 0, "", reason or f"neither torch's libraries nor the C library have {name}")


def reasons(names: tuple[str, ...]) -> dict[str, str]:
    """Returns why each of the absent functions among `names` is absent; empty when all are there."""
    found = (find(name) for name in names)
    return {symbol.name: symbol.reason for symbol in found if not symbol.address}


def _address_in(library: ctypes.CDLL, name: str) -> int:
    try:
        function = getattr(library, name)
    except AttributeError:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@lru_cache(maxsize=1)
def _process() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@lru_cache(maxsize=1)
def _torch_path() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    return next((folder / file for file in _TORCH_LIBRARIES if (folder / file).is_file()), None)


def _torch_library() -> tuple[ctypes.CDLL | None, str]:
    """Returns torch's library, or None and the reason. Asked every time, since torch may be imported later."""
    path = _torch_path()
    if path is None:
        return None, f"torch is not installed with {' or '.join(_TORCH_LIBRARIES)}"
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW), ""
    except OSError:
        return None, "torch is installed but not imported in this process"
