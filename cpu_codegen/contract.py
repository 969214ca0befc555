"""The kernel contract: how every native kernel, generated or vendor, is called.

    void kernel(ptr slots, i64 begin, i64 end)

`slots` is an array of 8-byte words: slot 0 points to the status word (i32, set to nonzero when an index is out of range), then
come pointers to buffers, then integers. `begin`/`end` cut the kernel's parallel domain. No allocation, no threads and no global state
inside; the caller owns scheduling. Kernels that differ only in numbers (scales, epsilon) share code: such numbers come
through a buffer of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.dims import Dim


@dataclass(frozen=True)
class BufferSlot:
    """Pointer to operand `index` of the kernel (inputs and outputs in the order of its declaration)."""

    index: int


@dataclass(frozen=True)
class DimSlot:
    """An integer known when the shapes are known: the value of a dimension expression."""

    dim: Dim


@dataclass(frozen=True)
class ParamSlot:
    """Pointer to the kernel instance's own float32 numbers; `values` are those of this instance."""

    values: tuple[float, ...]


Slot = BufferSlot | DimSlot | ParamSlot


@dataclass(frozen=True)
class KernelCode:
    """One callable kernel of a module: its symbol and what its slots hold, slot 1 first (slot 0 is the status word).

    `domain`: extent of [begin, end). `grain`: begin is always a multiple of it. `work`: scalar operations of the whole domain,
    an estimate from which the caller decides whether threads pay.
    """

    symbol: str
    slots: tuple[Slot, ...]
    domain: Dim
    grain: int = 1
    work: Dim = 0
