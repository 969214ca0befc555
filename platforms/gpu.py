"""NVIDIA's GPUs as targets, by compute capability."""

from __future__ import annotations

from ..diagnostics.errors import Unsupported
from .target import Target

TRIPLE = "nvptx64-nvidia-cuda"
WARP = 32  # threads that run together
_KB = 1024
# Those LLVM has names for. Code for one runs on all later ones: PTX is compiled by the driver.
_CAPABILITIES = (70, 72, 75, 80, 86, 87, 89, 90, 100, 120)


def nvidia(major: int, minor: int) -> Target:
    """The target for GPUs of a compute capability, such as (9, 0). Raises Unsupported before 7.0, Volta, whose shuffles we need."""
    known = max((each for each in _CAPABILITIES if each <= 10 * major + minor), default=0)
    if not known:
        raise Unsupported(f"a GPU of compute capability {major}.{minor}", hint="7.0 (Volta) and later are supported")
    # A thread holds one element at a time: vectors are as wide as one.
    return Target(f"nvidia_sm_{known}", TRIPLE, f"sm_{known}", frozenset(), 32, 255, 128 * _KB, 4096 * _KB, 0, 128)
