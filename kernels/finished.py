"""Tiles whose epilogue takes the accumulators from registers: for products of few k, where the way through memory costs as much.

    void name(ptr slots, ptr a, i64 steps, i64 row, i64 col, i64 last, i64 next, ptr b[panels], ptr sums[panels])

computes a tile and the epilogue of all its rows and columns, from (row, col) of the result on; `last` of its last vector's columns count.
A store of 512 bits takes two cycles on Zen 4, whose queue of stores holds about one tile: with a second store of each accumulator the
products of the next tile wait. The epilogue is written out for each accumulator, so that only short ones are worth it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cpu_codegen import schedule
from ..cpu_codegen.body import BodyEmitter
from ..cpu_codegen.builder import I64, PTR, VOID, Function, Module, Val, i64
from ..cpu_codegen.choices import vector_lanes
from ..cpu_codegen.contract import Slot
from ..cpu_codegen.epilogue import emit_register_epilogue
from ..cpu_codegen.slots import Slots
from ..graph.dims import symbols
from ..platforms.target import Target
from .blocking import Variant
from .indexing import request
from .micro import MicroKernel, Start, Tile
from .spec import FIRST_EPILOGUE_BUFFER, GemmSpec
from .tile import accumulated
from .vector_micro import VectorMicro

_WRITTEN = 12 * 28  # operations of the epilogue for all accumulators of a tile


def lanes(micro: MicroKernel) -> int:
    """Columns of a vector of accumulators; 0 where a tile does not hold vectors of columns."""
    return micro.lanes if isinstance(micro, VectorMicro) else 0


def applies(target: Target, spec: GemmSpec, micro: MicroKernel) -> bool:
    """Whether the epilogue of `spec` is short, stores nothing but by columns, and is in the vectors of the accumulators."""
    body = spec.epilogue
    if not lanes(micro) or vector_lanes(target, body) != lanes(micro):
        return False
    if any(node.op == "check" for node in body.nodes) or any("c" not in {s.name for s in symbols(store.index)} for store in body.stores):
        return False
    return schedule.column_cost(body, lanes(micro)) * micro.mr * micro.nr // lanes(micro) <= _WRITTEN


def emit_finished(
    module: Module, target: Target, spec: GemmSpec, order: Sequence[Slot], variant: Variant, left: int, masked: bool, blocks: bool,
    name: str,
) -> str:
    """Adds the function and returns its name. order: the slots of the kernel. left: of `Tile`. masked: the last vector may have fewer
    columns. blocks: of `in_blocks`."""
    micro = variant.micro
    assert isinstance(micro, VectorMicro), "others do not apply"
    name = f"{name}.finished.{micro.mr}x{micro.nr}" + ".masked" * masked
    if name in module.functions:
        return name
    kind = micro.begins
    extra = micro.panels * (2 if kind is Start.SUMS else 1)
    fn = Function(module, name, VOID, [PTR, PTR, *[I64] * 5, *[PTR] * extra], internal=True)
    _, a, steps, row, col, last, following = fn.args[:7]
    slots = Slots(fn, spec.params)
    request(slots, order)
    b, sums = fn.args[7 : 7 + micro.panels], fn.args[7 + micro.panels :]
    tile = Tile(a, i64(variant.pitch), Val(PTR, "null"), steps, following, tuple(b), tuple(sums), micro.nr, variant.shares, left)
    accumulators = accumulated(fn, micro, tile, kind, blocks)
    rows = [accumulators[r * micro.vectors : (r + 1) * micro.vectors] for r in range(micro.mr)]
    emitter = BodyEmitter(fn, target, spec.epilogue, slots, FIRST_EPILOGUE_BUFFER)
    emit_register_epilogue(fn, emitter, rows, row, col, last if masked else None)
    fn.ret()
    fn.finish()
    return name
