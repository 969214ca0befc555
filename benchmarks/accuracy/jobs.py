"""A job is a model, the data to calibrate it on and a judge; every preset and every peer makes one row of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import sashiko
from sashiko.quant import quantize

Call = Callable[..., torch.Tensor]
Metrics = Mapping[str, float]
FP32 = "fp32"


@dataclass(frozen=True)
class Job:
    """batches, example: as `sashiko.quantize` and `sashiko.compile` take them. judge: the accuracy of a way to call the model.

    timed: keyword arguments of the call whose time is measured, None for none.
    """

    name: str
    model: nn.Module
    batches: Sequence[Any]
    example: Any
    judge: Callable[[Call], Metrics]
    dynamic_shapes: Any = None
    timed: Mapping[str, torch.Tensor] | None = None


@dataclass
class Row:
    """One way to run a job's model. simulated, compiled: its accuracy in PyTorch and as native code, empty where it does not exist.

    call: the fastest form there is. ms: of each round. failure: why something is missing. note: what else there is to know.
    """

    job: str
    framework: str
    preset: str
    simulated: Metrics = field(default_factory=dict)
    compiled: Metrics = field(default_factory=dict)
    call: Call | None = None
    ms: tuple[float, ...] = ()
    failure: str = ""
    note: str = ""


@dataclass(frozen=True)
class Peer:
    """A compiled model and what there is to know about how it came to be."""

    call: Call
    note: str = ""


def own_rows(job: Job, presets: Sequence[str]) -> Iterator[Row]:
    """fp32 and each preset, simulated and compiled. What fails leaves its reason in the row."""
    for preset in (FP32, *presets):
        row = Row(job.name, "sashiko", preset)
        try:
            model = job.model if preset == FP32 else quantize(job.model, job.batches, preset=preset, progress=False)
            row.simulated = job.judge(model)
            row.call = sashiko.compile(model, job.example, dynamic_shapes=job.dynamic_shapes)
            row.compiled = job.judge(row.call)
        except Exception as error:  # a benchmark reports what does not work and goes on
            row.failure = reason(error)
        yield row


def peer_rows(job: Job, peers: Mapping[tuple[str, str], Callable[[Job], Peer]]) -> Iterator[Row]:
    """Each peer, compiled. peers: (framework, preset) -> how it is made."""
    for (framework, preset), make in peers.items():
        row = Row(job.name, framework, preset)
        try:
            peer = make(job)
            row.call, row.note = peer.call, peer.note
            row.compiled = job.judge(peer.call)
        except Exception as error:
            row.failure = reason(error)
        yield row


def reason(error: Exception) -> str:
    """The kind of an error and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
