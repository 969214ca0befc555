"""The sets of weights for which one graph was compiled: which are kept, and which of its inputs are no weights after all."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from .model import CompiledModel

_IDLE = 128  # calls after which weights that came with none of them are forgotten, or twice as many as there are sets of weights
_EXCHANGES = 8  # times that a module may get another tensor for an input which still is a weight
_MOST = 1024  # sets of weights that are kept: there may be as many equal layers, such as experts

Weights = tuple[torch.Tensor, ...]


@dataclass
class Version:
    """A graph compiled for some weights; model: None where PyTorch runs it as a whole. exchanged: how often each of the weights was another
    one while the module was the same. used: the number of the last call."""

    weights: Weights
    model: CompiledModel | None
    exchanged: tuple[int, ...]
    used: int = 0


class Versions:
    """The versions of one graph with the inputs at `positions` frozen into them. own: those of the positions that are parameters or buffers
    of modules."""

    def __init__(self, positions: Sequence[int], own: Set[int]) -> None:
        self.positions, self.own = tuple(positions), own
        self.known: dict[tuple[int, ...], Version] = {}

    def __len__(self) -> int:
        return len(self.known)

    def of(self, weights: Weights) -> Version | None:
        return self.known.get(_key(weights))

    def add(self, version: Version) -> None:
        self.known[_key(version.weights)] = version

    def forget(self, calls: int) -> None:
        """Weights that nobody brings any more, such as those before others were assigned, are given back."""
        oldest = calls - max(_IDLE, 2 * len(self.known))
        self.known = {key: version for key, version in list(self.known.items()) if version.used >= oldest}

    def exchanged(self, weights: Weights) -> tuple[int, ...]:
        """How often each of the weights has been another one in the module that now comes with these."""
        before = [version for version in list(self.known.values()) if self._same_module(version.weights, weights)]
        if not before:
            return (0,) * len(weights)
        return tuple(
            max(version.exchanged[n] for version in before) + all(version.weights[n] is not weight for version in before)
            for n, weight in enumerate(weights)
        )

    def settled(self, exchanged: Sequence[int]) -> Versions:
        """These, or none yet with fewer inputs frozen: what a module has for a while, such as the features of an image in one of its
        attributes, comes with each call from now on, as does everything where there are too many sets of weights to keep."""
        kept = [n for n, times in zip(self.positions, exchanged, strict=True) if times <= _EXCHANGES and len(self.known) < _MOST]
        return self if len(kept) == len(self.positions) else Versions(kept, self.own)

    def _same_module(self, one: Weights, other: Weights) -> bool:
        """Whether most of what belongs to modules is the same. Else it may be the turn of another one of equal layers, whose weights are
        seen for the first time but are there to stay. Equal layers may share a little, and adapters are small beside their layer."""
        own = [(a, b) for n, a, b in zip(self.positions, one, other, strict=True) if n in self.own]
        return 2 * sum(a.numel() for a, b in own if a is b) >= sum(a.numel() for a, _ in own)


def _key(weights: Weights) -> tuple[int, ...]:
    """Which tensors they are: a version holds its own, so that no other can have their place."""
    return tuple(map(id, weights))
