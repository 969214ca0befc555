"""Places for the buffers of a segment: those that are never alive together share memory.

The method is greedy by size: the largest buffer first, each into the smallest gap that holds it between the placed buffers whose
lives meet its own. It comes within a few percent of the lower bound (the most bytes alive at one time) on real plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64
# Kernels may read up to one vector beyond the end of a buffer; a second line keeps neighbours off the line that one reads.
SLACK = 128


@dataclass(frozen=True)
class Life:
    """A buffer's size in bytes and the first and last step that touch it.

    `inherits`: a buffer whose memory this one takes over: it must end where this one begins, and they share when this one fits.
    """

    nbytes: int
    first: int
    last: int
    inherits: int | None = None


@dataclass(frozen=True)
class Layout:
    """Byte offset of each buffer, and the size of the whole."""

    offsets: tuple[int, ...]
    nbytes: int


@dataclass
class _Block:
    """Memory that one buffer, or a chain of buffers that inherit it, occupies."""

    size: int
    first: int
    last: int
    owner: int  # the buffer at the end of the chain
    offset: int = 0

    def meets(self, other: _Block) -> bool:
        return self.first <= other.last and other.first <= self.last


def padded(nbytes: int) -> int:
    """Bytes that a buffer occupies: its own, the slack, and up to the next aligned address."""
    return -(-(nbytes + SLACK) // ALIGN) * ALIGN


def arrange(lives: Sequence[Life]) -> Layout:
    """Returns where each buffer goes; offsets are multiples of 64, and buffers alive in the same step never overlap,
    except those that inherit one another's memory."""
    blocks: list[_Block] = []
    of: dict[int, _Block] = {}
    for number in sorted(range(len(lives)), key=lambda n: lives[n].first):
        life = lives[number]
        block = _inherited(lives, of, number)
        if block is None:
            block = _Block(padded(life.nbytes), life.first, life.last, number)
            blocks.append(block)
        block.last, block.owner = life.last, number
        of[number] = block
    placed: list[_Block] = []
    for block in sorted(blocks, key=lambda b: (-b.size, b.first, b.last)):
        block.offset = _best_gap(block, [other for other in placed if other.meets(block)])
        placed.append(block)
    return Layout(tuple(of[n].offset for n in range(len(lives))), max((block.offset + block.size for block in blocks), default=0))


def _inherited(lives: Sequence[Life], of: dict[int, _Block], number: int) -> _Block | None:
    """The block that buffer `number` takes over, if it may: nobody else did, one life ends where the other begins, and it fits."""
    life = lives[number]
    if life.inherits is None:
        return None
    giver = lives[life.inherits]
    if giver.first >= life.first or giver.last != life.first:
        return None
    block = of[life.inherits]
    return block if padded(life.nbytes) <= block.size and block.owner == life.inherits else None


def _best_gap(block: _Block, neighbours: list[_Block]) -> int:
    """The offset of the smallest gap between `neighbours` that holds the block, or the end of the last one."""
    best, best_size = -1, 0
    end = 0
    for other in sorted(neighbours, key=lambda b: b.offset):
        gap = other.offset - end
        if gap >= block.size and (best < 0 or gap < best_size):
            best, best_size = end, gap
        end = max(end, other.offset + other.size)
    return end if best < 0 else best
