"""v in pairs of neighbouring keys, as instructions that multiply pairs want it, and the kernel that brings it there once for each head.

    workspace   [batch * groups][pairs of keys][columns of v + padding][2]

The neighbour of an odd last key is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cpu_codegen.builder import I16, I64, PTR, VOID, Function, Module, Val, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, ceildiv, product
from ..platforms.target import Target
from .attention_rows import head_start, pair_rows
from .attention_spec import WORKSPACE, AttentionSpec, V
from .attention_tiling import PADDING, first_to_pack

_PAIRS = 16  # of a piece of the domain


@dataclass(frozen=True)
class PairLayout:
    """Where pairs lie in the workspace; sizes are bytes."""

    spec: AttentionSpec

    @property
    def pairs(self) -> Dim:
        return ceildiv(self.spec.s, 2)

    @property
    def pitch(self) -> int:
        """From a pair of keys to the next."""
        return (self.spec.width + PADDING) * 4

    @property
    def bytes(self) -> Dim:
        return product((self.spec.all_groups, self.pairs, self.pitch))


def pair_of_keys(fn: Function, first: Val, row_bytes: Val, col: Val, pair: Val, keys: Val, width: int, to: Val, lanes: int) -> None:
    """Mixes rows 2 * pair and the next one of the `keys` rows from `first` on; the last one with zeros where it is alone, since what lies
    beyond may be NaN. lanes: elements of 16 bits in a vector."""
    key = fn.mul(pair, i64(2))
    even = fn.gep(first, fn.mul(key, row_bytes))

    def mixed(odd: Val | None) -> list[Val]:
        pair_rows(fn, even, odd, col, width, to, lanes)
        return []

    together = fn.icmp("slt", fn.add(key, i64(1)), keys)
    fn.branch(together, lambda: mixed(fn.gep(even, row_bytes)), lambda: mixed(None))


def emit_pair_pack(module: Module, target: Target, layout: PairLayout, name: str) -> KernelCode:
    """Adds the kernel that packs; its domain is pieces of the pairs of all groups."""
    spec, lanes = layout.spec, 2 * target.lanes(32)
    fn = Function(module, name, VOID, [PTR, I64, I64])
    slots = Slots(fn)
    pieces = ceildiv(layout.pairs, _PAIRS)
    per_group, pairs, groups = slots.dim(pieces), slots.dim(layout.pairs), slots.dim(spec.groups)
    row_bytes, col = slots.dim(spec.v.row * 2), slots.dim(spec.v.col)

    def piece(index: Val, _: list[Val]) -> list[Val]:
        group, start = fn.udiv(index, per_group), fn.mul(fn.urem(index, per_group), i64(_PAIRS))
        first = head_start(fn, slots, V, spec.v, I16, fn.udiv(group, groups), fn.urem(group, groups))
        to = fn.gep(slots.buffer(WORKSPACE), fn.mul(group, pairs), scale=layout.pitch)

        def one(pair: Val, _: list[Val]) -> list[Val]:
            pair_of_keys(fn, first, row_bytes, col, pair, slots.dim(spec.s), spec.width, fn.gep(to, pair, scale=layout.pitch), lanes)
            return []

        return fn.loop(start, fn.smin(fn.add(start, i64(_PAIRS)), pairs), 1, [], one)

    fn.loop(first_to_pack(fn, slots, spec), fn.args[2], 1, [], piece)
    fn.ret()
    fn.finish()
    return KernelCode(name, slots.order, product((spec.all_groups, pieces)), 1, product((spec.all_groups, spec.s, spec.width)))
