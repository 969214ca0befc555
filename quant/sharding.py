"""Calibration shared by several processes: each looks at its part of the data, and all end with what all of them saw."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from ..diagnostics.errors import CalibrationError, SashikoError
from ..platforms.target import Target
from .observers import Shared
from .plain import to_plain
from .program import Program
from .record import Placement
from .scheme import Scheme

T = TypeVar("T")
K = TypeVar("K")
W = TypeVar("W", bound=Shared)


@dataclass(frozen=True)
class _Failure:
    """What went wrong on a process, for the others."""

    what: str
    where: str
    hint: str


class Shards:
    """The processes of torch.distributed that calibrate together; this one alone unless `shared`.

    Every process calls the same methods in the same order inside `with shards:`. An error that ends the block on one process ends it
    on all of them: it is sent in place of the value that the others wait for, and they raise CalibrationError.
    """

    def __init__(self, shared: bool) -> None:
        shared = shared and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if shared else 1
        self.rank = dist.get_rank() if shared else 0
        self._over = False

    @property
    def here(self) -> str:
        """What tells the batches of this process from those of others, behind their names; nothing where there is one process."""
        return f" of rank {self.rank}" if self.size > 1 else ""

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.gather(None)  # an error after a process had left would find nobody to tell
        elif isinstance(error, Exception) and not self._over:
            told = error if isinstance(error, SashikoError) else CalibrationError(f"{type(error).__name__}: {error}")
            self._exchange(_Failure(told.what, told.where, told.hint))

    def gather(self, value: T) -> list[T]:
        """The values of all processes in order of rank; they travel pickled. Raises CalibrationError when a process failed instead."""
        answers = self._exchange(value)
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Failure):
                self._over = True
                raise CalibrationError(f"calibration failed on rank {rank} of {self.size}: {answer.what}", answer.where, answer.hint)
        return [answer for answer in answers if not isinstance(answer, _Failure)]

    def merged(self, observers: Mapping[K, W]) -> dict[K, W]:
        """For each observer one that has seen what all processes saw. Merged in order of rank, so that they are the same everywhere."""
        return {key: _joined(self.gather(observer)) for key, observer in observers.items()} if self.size > 1 else dict(observers)

    def check_alike(self, program: Program, placement: Placement, scheme: Scheme, target: Target) -> None:
        """Raises CalibrationError when the processes do not quantize the same weights in the same way."""
        if self.size > 1 and len(set(self.gather(_digest(program, placement, scheme, target)))) > 1:
            what = "the processes quantize different models, or in different ways"
            raise CalibrationError(what, "quantize(sharded=True)", "give all of them one model with the same weights, and the same options")

    def interleaved(self, items: Sequence[T], limit: int) -> tuple[T, ...]:
        """The first item of each process, then the second of each, `limit` at most: the order in which a DistributedSampler deals them."""
        counts = self.gather(len(items))
        order = [(i, rank) for i in range(max(counts)) for rank, count in enumerate(counts) if i < count][:limit]
        parts = self.gather([item for i, item in enumerate(items) if (i, self.rank) in order])
        return tuple(parts[rank][i] for i, rank in order)

    def _exchange(self, value: T | _Failure) -> list[T | _Failure]:
        if self.size == 1:
            return [value]
        answers: list[T | _Failure] = [value] * self.size
        dist.all_gather_object(answers, value)
        return answers


def _digest(program: Program, placement: Placement, scheme: Scheme, target: Target) -> bytes:
    """Equal for programs of equal weights that are observed and quantized alike."""
    sites = [(site.node, site.activations, to_plain(site.scheme)) for site in placement.sites]
    choices = [to_plain(scheme), sites, [argument.name for argument in program.masks], target.sums16]
    digest = hashlib.blake2b(json.dumps(choices).encode(), digest_size=20)
    for name, value in program.attributes.items():
        if isinstance(value, torch.Tensor):  # nested graphs are attributes, too
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _joined(parts: list[W]) -> W:
    total, *others = parts
    for other in others:
        total.merge(other)
    return total
