"""The kernel around a block of queries: its domain is the blocks of queries of all heads. Where a call says how many there are, a single
one is computed as such."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..cpu_codegen.builder import I64, PTR, VOID, Function, Module, Val, i64
from ..cpu_codegen.contract import KernelCode, Slot
from ..cpu_codegen.slots import Slots
from ..graph.dims import ceildiv, product
from ..platforms.target import Target
from ..stitch.loops import Body
from .attention_few import emit_one
from .attention_score import over, queries_across
from .attention_spec import AttentionSpec
from .attention_stream import Stream
from .attention_tiling import Tiling, has_one_query
from .indexing import request


class Family(ABC):
    """A way to compute a block of queries."""

    @abstractmethod
    def tilings(self, target: Target, spec: AttentionSpec) -> tuple[Tiling, ...]:
        """The blocks of queries to use, most queries first."""

    @abstractmethod
    def stream(self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling) -> Stream:
        """What emits a block."""

    def enter(self, fn: Function) -> None:  # noqa: B027
        """What must happen once in a call before the first block; by default nothing."""

    def leave(self, fn: Function) -> None:  # noqa: B027
        """What must happen once after the last block; by default nothing."""


def emit_blocks(module: Module, target: Target, spec: AttentionSpec, name: str, family: Family) -> KernelCode:
    """Adds the kernel, one function for each size of block, and returns what it is."""
    sizes = family.tilings(target, spec)
    body = over(queries_across(spec), spec)
    order: tuple[Slot, ...] = ()
    for tiling in sizes:
        fn = Function(module, _block_name(name, tiling), VOID, [PTR, I64, I64, I64], internal=True)
        slots = Slots(fn, spec.params)
        request(slots, order)  # one numbering serves all functions
        family.stream(fn, target, spec, slots, body, tiling).emit()
        order = slots.order
        fn.ret()
        fn.finish()
    if not isinstance(spec.m, int):
        order = emit_one(module, target, spec, _one_name(name), order)
    return _emit_entry(module, spec, name, family, sizes, order)


def _one_name(name: str) -> str:
    return f"{name}.one"


def _block_name(name: str, tiling: Tiling) -> str:
    return f"{name}.block{tiling.queries}"


def _emit_entry(
    module: Module, spec: AttentionSpec, name: str, family: Family, sizes: tuple[Tiling, ...], order: tuple[Slot, ...]
) -> KernelCode:
    fn = Function(module, name, VOID, [PTR, I64, I64])
    slots = Slots(fn, spec.params)
    request(slots, order)
    queries = sizes[0].queries
    blocks = ceildiv(spec.m, queries)
    per_head, m = slots.dim(blocks), slots.dim(spec.m)

    def block(index: Val, _: list[Val]) -> list[Val]:
        head = fn.udiv(index, per_head)
        first = fn.mul(fn.sub(index, fn.mul(head, per_head)), i64(queries))
        rows = fn.smin(fn.sub(m, first), i64(queries))

        def call(tiling: Tiling) -> list[Val]:
            fn.call(_block_name(name, tiling), VOID, [fn.args[0], head, first, rows])
            return []

        if len(sizes) == 1:
            return call(sizes[0])
        few = fn.icmp("sle", rows, i64(sizes[1].queries))
        return fn.branch(few, lambda: call(sizes[1]), lambda: call(sizes[0]))

    def blocks_of_many() -> list[Val]:
        family.enter(fn)
        fn.loop(fn.args[1], fn.args[2], 1, [], block)
        family.leave(fn)
        return []

    def heads_of_one() -> list[Val]:
        fn.call(_one_name(name), VOID, list(fn.args[:3]))
        return []

    if isinstance(spec.m, int):
        blocks_of_many()
    else:
        fn.branch(has_one_query(fn, slots, spec), heads_of_one, blocks_of_many)
    fn.ret()
    fn.finish()
    return KernelCode(name, slots.order, product((spec.batch, spec.heads, blocks)), 1, spec.work)
