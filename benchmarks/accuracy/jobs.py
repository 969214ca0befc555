"""A job is a model, the data to calibrate it on and a judge; every preset and every peer makes one row of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import sashiko
from sashiko.quant import quantize, quantize_
from sashiko.quant.presets import AUTO

Call = Callable[..., torch.Tensor]
Metrics = Mapping[str, float]
FP32 = "fp32"
IN_PLACE = {"int8-dynamic": ("no data",), "int8-weight": ("no data",), "int4-weight": ("data", "no data")}
"""What `quantize_` takes, and what with: data where rounding errors are compensated."""


@dataclass(frozen=True)
class Job:
    """batches, example: as `sashiko.quantize` and `sashiko.compile` take them. judge: the accuracy of a way to call the model.

    timed: keyword arguments of the call whose time is measured, None for none. score: what a search is judged by, higher is better; it
    may fall by `max_drop`.
    """

    name: str
    model: nn.Module
    batches: Sequence[Any]
    example: Any
    judge: Callable[[Call], Metrics]
    dynamic_shapes: Any = None
    timed: Mapping[str, torch.Tensor] | None = None
    score: Callable[[Metrics], float] = lambda metrics: next(iter(metrics.values()))
    max_drop: float = 0.005


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
    """fp32 and each preset, simulated and compiled, and for `auto` also what the search makes of it. What fails leaves its reason in the
    row."""
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
    if AUTO in presets:
        yield searched_row(job)


def in_place_rows(job: Job, presets: Sequence[str]) -> Iterator[Row]:
    """The linear layers quantized in place: with the data, and with none, where weights are rounded to nearest."""
    for preset in (each for each in IN_PLACE if each in presets):
        for data in IN_PLACE[preset]:
            row = Row(job.name, "sashiko", f"{preset}, in place, {data}")
            try:
                model = copy.deepcopy(job.model)
                quantize_(model, preset, job.batches if data == "data" else None)
                row.simulated = job.judge(model)
                row.call = sashiko.compile(model, job.example, dynamic_shapes=job.dynamic_shapes)
                row.compiled = job.judge(row.call)
            except Exception as error:  # as above
                row.failure = reason(error)
            yield row


def searched_row(job: Job) -> Row:
    """The fastest mix of precisions that loses at most `job.max_drop`, found within a minute. The note says how fast it is."""
    row = Row(job.name, "sashiko", f"{AUTO}, searched")
    try:
        fast = sashiko.quantize_and_compile(
            job.model, job.batches, preset=AUTO, eval_fn=lambda call: job.score(job.judge(call)), max_drop=job.max_drop, budget_s=60.0,
            dynamic_shapes=job.dynamic_shapes, progress=False,
        )
        assert fast.quantized is not None and fast.search is not None
        row.call, row.compiled, row.simulated = fast, job.judge(fast), job.judge(fast.quantized)
        ratios = [f"{fast.search.speed(other):.2f} x {other}" for other in ("fp32", "bf16")]
        row.note = f"{', '.join(ratios)}; {len(fast.search.trials)} mixes judged, {fast.search.seconds:.0f} s"
    except Exception as error:  # as above
        row.failure = reason(error)
    return row


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
