"""How fast generated code runs: loading a module and timing one of its functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ..platforms.target import Target
from . import cache, jit
from .builder import Module

LINE = 64


@dataclass(frozen=True)
class Effort:
    """How long to measure one figure: the best of `tries`, each of about `seconds`. The best, since whatever disturbs only makes slower."""

    seconds: float = 0.01
    tries: int = 7


USUAL = Effort()


def loaded(module: Module, target: Target) -> jit.Library:
    """A module as machine code for a target that this machine can run, in this process. Of a richer one LLVM would use what the target
    lacks: VPDPWSSD for a multiplication and an addition of AVX2."""
    return jit.load_object(cache.compiled(module.text(), target))


@dataclass(frozen=True)
class Bound:
    """A function void f(ptr or i64 ..., i64 passes) of a library with all its arguments but the last. It keeps the library loaded."""

    library: jit.Library
    symbol: str
    arguments: tuple[int, ...]

    @cached_property
    def _function(self) -> Callable[..., None]:
        types = [ctypes.c_int64] * (len(self.arguments) + 1)
        return ctypes.CFUNCTYPE(None, *types)(self.library.address(self.symbol))

    def __call__(self, passes: int) -> None:
        self._function(*self.arguments, passes)


def best_rate(run: Callable[[int], None], work: float, effort: Effort) -> float:
    """Work per second of `run(passes)`, which does passes * work."""
    passes = 1
    while True:
        elapsed = _elapsed(run, passes)
        if elapsed >= effort.seconds / 2:
            break
        # Not by the elapsed time at once: that of few passes is mostly the call.
        passes = min(16 * passes, max(2 * passes, int(passes * effort.seconds / max(elapsed, 1e-7))))
    fastest = min(_elapsed(run, passes) for _ in range(effort.tries))
    return passes * work / fastest


def aligned(count: int) -> npt.NDArray[np.uint8]:
    """`count` bytes that start at a cache line, all written once, so that every page has memory of its own."""
    whole = np.full(count + LINE, 1, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + count]


def _elapsed(run: Callable[[int], None], passes: int) -> float:
    start = perf_counter()
    run(passes)
    return perf_counter() - start
