"""The function of one register tile (`micro.py`).

    void name(ptr a, i64 a_pitch, ptr out, i64 steps, i64 next, ptr b[panels], ptr sums[panels], i64 ways[], i64 back)

It reads `steps` steps of packed lhs and of each panel, and stores the accumulators, 4 bytes each, as
[nr / out_pitch][mr][out_pitch]. A pointer of `b` may repeat: the same panel is computed twice then. `next` is the way in bytes from
panels to those that will follow. `sums` is there only when it starts from them, `ways` where rows are in pieces, `back` where tiles may go
back through k: -1 in those that do, else 0. A tile that `overlaps` has further arguments: `Pending`; its accumulators stay in their
registers until the next tile has begun, or are `put` away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..cpu_codegen.builder import I64, PTR, VOID, Function, Module, Val, i64
from .micro import MicroKernel, Start, Tile
from .pending import PENDING, Epilogue, Pending

# Steps whose products are added to nothing, and then to those before: rounding errors grow with the length of the chain (`BLOCK` in
# `cpu_codegen/reduce.py`). On a Zen 3, k = 4096 takes less than 1 % longer than in one chain; with blocks of 512, 2 %.
BLOCK = 1024


def emit_tile(
    module: Module, micro: MicroKernel, kind: Start, out_pitch: int, a_pitch: int | None, shares: int, left: int = 0,
    epilogue: Epilogue | None = None, reverses: bool = False, every: tuple[int, ...] = (), blocks: bool = False,
) -> str:
    """Adds the function of one tile and returns its name.

    a_pitch: bytes from row to row of the lhs where that is known. shares, left: of `Tile`; every: the steps of its `ways`. epilogue: of the
    tile before, to be done between the steps. reverses: whether it may go back through k. blocks: of `in_blocks`.
    """
    name = f"{micro.name}.{kind.value}.{out_pitch}" + (f".{a_pitch}" if a_pitch is not None else "") + (f".share{shares}" if shares else "")
    name += f".and{left}" if left else ""
    name += "".join(f".{word}{size}" for word, size in (("groups", micro.packing.group), ("pitch", micro.packing.pitch)) if size)
    name += f".lhs{micro.layout.group}" if micro.layout.group else ""
    name += f".every{'_'.join(map(str, every))}" if every else ""
    name += ".back" if reverses else ""
    name += ".blocks" if blocks else ""
    name += f".with.{epilogue.name}" if epilogue else ""
    known = module.made.get((name, micro))
    if known is not None:
        return known
    # Whatever a name tells of a tile, no other is called by it.
    name = module.made[name, micro] = name + f".{len(module.made)}" * (name in module.functions)
    panels = micro.panels * micro.unpacked_panels
    extra = panels * (2 if kind is Start.SUMS else 1)
    others = [*[I64] * len(every), *([I64] if reverses else ()), *(PENDING if epilogue else ())]
    fn = Function(module, name, VOID, [PTR, I64, PTR, I64, I64, *[PTR] * extra, *others], internal=True)
    a, pitch, out, steps, following = fn.args[:5]
    b, sums, rest = fn.args[5 : 5 + panels], fn.args[5 + panels : 5 + extra], fn.args[5 + extra :]
    ways = tuple((steps_on, rest.pop(0)) for steps_on in every)
    back = rest.pop(0) if reverses else None
    pitch = pitch if a_pitch is None else i64(a_pitch)
    tile = Tile(a, pitch, out, steps, following, tuple(b), tuple(sums), out_pitch, shares, left, ways, back)
    if epilogue is None:
        micro.finish(fn, tile, accumulated(fn, micro, tile, kind, blocks))
    else:
        _overlapped(fn, micro, tile, kind, Pending(epilogue, rest[:-1], rest[-1]))
    fn.ret()
    fn.finish()
    return name


def _overlapped(fn: Function, micro: MicroKernel, tile: Tile, kind: Start, pending: Pending) -> None:
    """All steps of a tile, which stays in its registers, and what is pending of the tile before, which is still there."""

    def between() -> list[Val]:
        with pending.between(fn, micro, tile.steps) as rows:
            _in_turn(fn, micro, tile, kind, pending, rows)
        return []

    def before() -> list[Val]:
        pending.emit(fn, micro)
        accumulated(fn, micro, tile, kind)
        return []

    # There may be no step, as where a piece is all of what k leaves over.
    fn.branch(fn.and_(pending.whole(fn, micro.mr), fn.icmp("sgt", tile.steps, i64(0))), between, before)


def _in_turn(fn: Function, micro: MicroKernel, tile: Tile, kind: Start, pending: Pending, rows: Callable[[Val, Val, Val], Val]) -> None:
    """The steps of a tile, after each of them or of their products rows of the tile before, and after the last one those that are left."""
    whole, places = replace(tile, left=0), pending.epilogue.places(micro)

    def one(number: Val, emit: Callable[[int | None], None], n: int = 0) -> list[Val]:
        """emit(number), of as many as there are places; all where there is one."""

        def this() -> list[Val]:
            emit(n if places > 1 else None)
            return []

        return this() if n == places - 1 else fn.branch(fn.icmp("eq", number, i64(n)), this, lambda: one(number, emit, n + 1))

    def step(index: Val, done: list[Val]) -> list[Val]:
        def turn(number: Val, done: list[Val]) -> list[Val]:
            fn.branch(
                fn.icmp("eq", index, i64(0)), lambda: one(number, lambda n: micro.first_turn(fn, whole, kind, pending.tile, n)),
                lambda: fn.branch(fn.icmp("slt", index, tile.steps), lambda: one(number, lambda n: micro.turn(fn, whole, index, n))),
            )
            return [rows(index, number, done[0])]

        return turn(i64(0), done) if places == 1 else fn.loop(i64(0), i64(places), 1, done, turn)

    fn.loop(i64(0), fn.add(tile.steps, i64(1)), 1, [i64(0)], step)
    if tile.left:
        micro.step(fn, tile, tile.steps, [])


def in_blocks(micro: MicroKernel, k: int) -> bool:
    """Whether the sums of so many k at most are taken in blocks."""
    return micro.acc.is_float and k > BLOCK * micro.step_k


def accumulated(fn: Function, micro: MicroKernel, tile: Tile, kind: Start, blocks: bool = False) -> list[Val]:
    """The accumulators of a tile after all its steps and what is left. blocks: of `in_blocks`; a later block of k is one, however short."""
    whole, values = replace(tile, left=0), micro.start(fn, tile, kind)

    def added(begin: Val, end: Val, values: list[Val]) -> list[Val]:
        return fn.loop(begin, end, 1, values, lambda index, values: micro.step(fn, whole, index, values))

    def block(begin: Val, before: list[Val]) -> list[Val]:
        sums = added(begin, fn.smin(fn.add(begin, i64(BLOCK)), tile.steps), micro.start(fn, tile, Start.ZERO))
        return [fn.add(a, b) for a, b in zip(before, sums, strict=True)]

    if values and micro.acc.is_float and (blocks or kind is Start.OUT):
        values = fn.loop(i64(0), tile.steps, BLOCK, values, block)
    else:
        values = added(i64(0), tile.steps, values)
    return micro.step(fn, tile, tile.steps, values) if tile.left else values
