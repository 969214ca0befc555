"""Prefetches of what the epilogue of a tile will read and write, ahead of the tile's products: memory works while they are computed.

    void name(ptr slots, i64 row, i64 rows, i64 col)

What may be stored over what is read is asked for once, for writing. Beside tile products a fetch takes the place of a line that a tile
waits for, and the epilogue comes late enough to wait for numbers of one or two bytes by itself: on an Emerald Rapids ResNet-50 in bf16
takes 4 to 5 % less without asking for those (both called in turn), while results in f32 beyond L2 take twice as long unasked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cpu_codegen.builder import Function, Val, i64
from ..cpu_codegen.intrinsics import prefetch
from ..cpu_codegen.lines import Lines
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, bounds, coefficient, symbols
from ..platforms.target import Target
from ..stitch.loops import in_place
from .spec import GemmSpec

_LINE = 64
_WHOLE = 4  # bytes


@dataclass(frozen=True)
class Access:
    """Element (r, c) of the result is read or written at base + r * row + c of a buffer of the epilogue."""

    buffer: int
    base: Dim
    row: Dim
    bytes: int
    writes: bool


def accesses(target: Target, spec: GemmSpec, overlaps: bool = False) -> tuple[Access, ...]:
    """What is worth fetching: whole matrices, where the result does not stay in L2 anyway. overlaps: whether the epilogue of a tile is done
    beside the products of the next."""
    body = spec.epilogue
    overwritten = {read for _, read in in_place(body)}
    loads = [node for node in body.nodes if node.op == "load" and not node.args and node.buffer not in overwritten]
    found = [_access(node.buffer, node.index, node.dtype.bytes, False) for node in loads]
    found += [_access(store.buffer, store.index, body.buffers[store.buffer].bytes, True) for store in body.stores if store.guard < 0]
    whole = tuple(dict.fromkeys(access for access in found if access is not None))
    most = bounds(spec.batch * spec.m * spec.n)[1]
    stays = most is not None and most * max((access.bytes for access in whole), default=0) <= target.l2 // 2
    return () if stays else tuple(access for access in whole if access.bytes >= _WHOLE or not overlaps)


def _access(buffer: int, index: Dim, size: int, writes: bool) -> Access | None:
    column = coefficient(index, "c")
    row = coefficient(column[1], "r") if column is not None and column[0] == 1 else None
    if row is None or row[0] == 0 or any(s.name in ("r", "c") for part in row for s in symbols(part)):
        return None
    return Access(buffer, row[1], row[0], size, writes)


def emit_fetch(
    fn: Function, slots: Slots, found: tuple[Access, ...], first_buffer: int, columns: int, lines: Lines | None = None
) -> None:
    """Writes the body of the function for tiles of so many columns. lines: of `GemmSpec`."""
    _, row, rows, col = fn.args
    if lines is not None:
        end = lines.before(fn, fn.add(row, rows))
        row = lines.before(fn, row)
        rows = fn.sub(end, row)
    starts = [
        fn.gep(slots.buffer(first_buffer + a.buffer), fn.mul(fn.add(slots.dim(a.base), col), i64(a.bytes))) for a in found
    ]

    def each(i: Val, _: list[Val]) -> list[Val]:
        r = fn.add(row, i)
        for access, start in zip(found, starts, strict=True):
            line = fn.gep(start, fn.mul(fn.mul(r, slots.dim(access.row)), i64(access.bytes)))
            for at in range(0, columns * access.bytes, _LINE):
                prefetch(fn, fn.gep(line, i64(at)), writes=access.writes)
        return []

    fn.loop(i64(0), rows, 1, [], each)
