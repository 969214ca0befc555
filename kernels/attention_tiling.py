"""How attention is cut: blocks of queries and keys, and register tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cpu_codegen.builder import Function, Val, i64
from ..cpu_codegen.slots import Slots
from .attention_spec import AttentionSpec

PADDING = 16  # elements between rows of scratch, so that rows do not share cache sets


@dataclass(frozen=True)
class Tiling:
    """lanes: queries of a vector. vectors: vectors of a block of queries. keys, columns: of a register tile. block: keys of a block."""

    lanes: int
    vectors: int
    keys: int
    columns: int
    block: int

    @property
    def queries(self) -> int:
        return self.lanes * self.vectors


def up(fn: Function, value: Val, step: int) -> Val:
    """value rounded up to a multiple of a power of two."""
    return fn.and_(fn.add(value, i64(step - 1)), i64(-step))


def has_one_query(fn: Function, slots: Slots, spec: AttentionSpec) -> Val:
    """Whether a call has one query, whose keys and values are read as they lie."""
    return fn.icmp("eq", slots.dim(spec.m), i64(1))


def first_to_pack(fn: Function, slots: Slots, spec: AttentionSpec) -> Val:
    """Where the loop of `void pack(ptr slots, i64 begin, i64 end)` begins: at its end where nothing reads what is packed."""
    return fn.args[1] if isinstance(spec.m, int) else fn.select(has_one_query(fn, slots, spec), fn.args[2], fn.args[1])


def sizes_for(spec: AttentionSpec, tilings: Sequence[Tiling]) -> tuple[Tiling, ...]:
    """Those of two sizes of blocks that the number of queries calls for; the second one has a single vector of queries."""
    large, small = tilings
    if isinstance(spec.m, int):
        if spec.m <= small.queries:
            return (small,)
        if spec.m % large.queries == 0 or spec.m % large.queries > small.queries:
            return (large,)
    return large, small


def even_block(spec: AttentionSpec, most: int, step: int) -> int:
    """Keys of a block, a multiple of `step` and about `most` of them: blocks of equal length where the number of keys is known."""
    if not isinstance(spec.s, int):
        return most
    parts = max(1, round(spec.s / most))
    return max(1, -(-spec.s // parts // step)) * step
