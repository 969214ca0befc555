"""Memory of large results: kept when nobody holds it any more, and given to the next call.

A page that the system hands out is cleared at its first touch, which takes longer than most of what a kernel does with it, and the C
library gives everything above 32 MiB back at once. So a large result lies in a mapping of ours, on huge pages. Its torch storage owns the
memory and says when it lets go of it: when the last tensor, view, array or capsule over it is gone, or its data has moved elsewhere, to
shared memory for instance. Until then no other result gets that memory. As with a tensor made from an array, such a storage cannot grow.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from .memory import Arena
from .records import LARGE, OutputShape

# An idle piece of memory serves results down to this part of it, so that nearly equal shapes share it.
_LEAST_FILLED = 0.5


def _seen_as(tensor: torch.Tensor, output: OutputShape) -> torch.Tensor:
    """A tensor that is written into, in the shape of the result: what another segment made may have had other axes."""
    return tensor if tensor.shape == output.shape else tensor.view(output.shape)


class Results:
    """Makes the large results of one compiled model. Any thread may call, and any may let go of a result: a piece of memory is in the
    list of idle ones or with whoever took it out, and every operation on that list is atomic.

    Idle are at most as many bytes as the large results of one call had so far. They go with this object; those of results live on.
    """

    def __init__(self) -> None:
        self._idle: list[Arena] = []
        self._lent: dict[int, _Loan] = {}
        self._most = 0
        self._self = weakref.ref(self)

    def make(self, outputs: Sequence[OutputShape], most: int, held: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """New tensors, those of LARGE bytes and more in memory kept, or those of `held` that are written into. `most`: bytes of all large
        results of the call."""
        self._most = max(self._most, most)
        return [
            _seen_as(held[o.updates], o) if o.updates is not None else self._large(o) if o.nbytes >= LARGE else o.new() for o in outputs
        ]

    def _large(self, output: OutputShape) -> torch.Tensor:
        arena = self._taken(output.nbytes)
        memory = arena.view(output.nbytes)
        loan = _Loan(memory, _ended)
        loan.arena, loan.owner = arena, self._self
        self._lent[id(loan)] = loan
        # `data`: no view of another tensor, and a version of its own.
        return torch.frombuffer(memory, dtype=output.dtype).as_strided(output.shape, output.strides).data

    def _taken(self, nbytes: int) -> Arena:
        for arena in reversed(self._idle[:]):
            if arena.nbytes * _LEAST_FILLED <= nbytes <= arena.nbytes:
                try:
                    self._idle.remove(arena)
                except ValueError:  # another thread took it
                    continue
                return arena
        return Arena(nbytes)

    def take_back(self, loan: _Loan) -> None:
        """Called once, when nobody holds the memory of a loan any more."""
        self._lent.pop(id(loan), None)
        self._idle.append(loan.arena)
        while sum(arena.nbytes for arena in self._idle[:]) > self._most:
            try:
                del self._idle[0]
            except IndexError:
                break


class _Loan(weakref.ref[memoryview]):
    """A reference to the memory that a storage owns; it gives the memory back when the storage has let go."""

    __slots__ = ("arena", "owner")
    arena: Arena
    owner: weakref.ref[Results]


def _ended(loan: _Loan) -> None:
    owner = loan.owner()
    if owner is not None:
        owner.take_back(loan)
