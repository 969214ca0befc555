"""Steps that k is a whole number of. Of what is left over the rows are copied, with zeros behind them, for every group of columns again.

Tile registers take as long for 16 or 24 bytes of a row as for 64, and for three steps of 48 as for two of 64 and one of 16.
Emerald Rapids in 8 bits, 12544 x 96 x 16, 3136 x 144 x 24 and 784 x 192 x 32, with the results quantized: 136 us instead of 192, 56
instead of 71, 18 instead of 25.
"""

from __future__ import annotations

from collections.abc import Sequence

from .micro import MicroKernel
from .spec import GemmSpec


def in_whole_steps(spec: GemmSpec, micros: Sequence[MicroKernel]) -> Sequence[MicroKernel]:
    """The tiles in narrower steps where these are no more than theirs, and rows are read where they lie."""
    if not isinstance(spec.k, int) or spec.lhs_pieces is not None or spec.lhs_strides.col != 1:
        return micros
    return tuple(_narrower(micro, spec.k) or micro for micro in micros)


def _narrower(micro: MicroKernel, k: int) -> MicroKernel | None:
    narrow = micro.in_steps(k * micro.lhs.bytes)
    return narrow if narrow is not None and k // narrow.step_k == -(-k // micro.step_k) else None
