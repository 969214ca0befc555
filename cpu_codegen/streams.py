"""How the stores of a kernel meet memory: which go around the caches, and which hold up the loads after them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from ..graph.dims import coefficient
from ..platforms.target import Target
from ..stitch.loops import LoopKernel, Store
from . import convert
from .choices import vector_lanes
from .index import aligned
from .ranges import is_read_in_pieces


def streaming(target: Target, kernel: LoopKernel, buffers: Set[int]) -> LoopKernel:
    """The kernel that stores into these buffers around the caches: those of its stores that fill whole registers, by themselves or
    joined (`BodyEmitter.stores_beside`), but for the last of a row. x86 only.

    On one core of Zen 4, results larger than the caches take 0.85 of the time so. Parts of a register gain nothing, and rows that are
    read in pieces are stored in pieces.
    """
    lanes, body = vector_lanes(target, kernel.body), kernel.body
    if not buffers or not target.has("avx2") or is_read_in_pieces(kernel, lanes):
        return kernel

    def whole(store: Store) -> bool:
        full = target.lanes(convert.memory_type(body.buffers[store.buffer]).bits)
        slope = coefficient(store.index, "c")
        return full % lanes == 0 and store.guard < 0 and slope is not None and slope[0] == 1 and aligned(store.index, full)

    stores = tuple(replace(store, streams=store.buffer in buffers and whole(store)) for store in body.stores)
    return replace(kernel, body=replace(body, stores=stores))


def holds_up(target: Target, kernel: LoopKernel) -> bool:
    """Whether the kernel is slower where it stores over what it loads.

    The store at the end of a row is masked, and a processor takes it for a whole register: the first load of the next row waits until it
    is in the cache. Longer rows hide that, and gain from touching less memory.
    """
    lanes = vector_lanes(target, kernel.body)
    cols = kernel.cols
    return target.masked_memory and kernel.rows is not None and isinstance(cols, int) and cols % lanes != 0 and cols < 16 * lanes
