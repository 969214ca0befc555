"""The matrix product of one linear layer by itself: its kernel, and the time of its step, without the call around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...driver.compile import compile as compiled_by
from ...platforms.target import Target
from ...quant import quantize

OPERATIONS = {"fp32": "linear", "bf16": "linear", "int8": "int_linear"}
NARROW = "-narrow"  # behind a kind: the result is in the type of the operands, as another layer takes it
_AGAIN = 5


@dataclass(frozen=True)
class ProductStep:
    """kernel: its name. seconds: the shortest time in so many runs, in each of which it comes several times in a row: what caches can hold
    of its operands is there."""

    kernel: str
    seconds: Callable[[int], float]


def product(kind: str, shape: tuple[int, ...], target: Target | None = None) -> ProductStep:
    """The product of `nn.Linear` with M x N x K = `shape`, on random operands. kind: of `OPERATIONS`, with results in f32 unless `NARROW`
    is behind it; int8 has fixed ranges."""
    m, n, k = shape
    layer: nn.Module = nn.Linear(k, n).eval()
    if kind.endswith(NARROW):
        kind, layer = kind.removesuffix(NARROW), nn.Sequential(layer, nn.Linear(n, 1)).eval()
    x = torch.randn(m, k)
    source: nn.Module = quantize(layer, [(x,)], preset="int8-static", progress=False, target=target) if kind == "int8" else layer
    compiled = compiled_by(source, (x,), precision="bf16" if kind == "bf16" else "fp32", target=target)
    compiled(x)
    assert compiled.built is not None, "not from a file"
    notes = [note for segment in compiled.built.notes if isinstance(segment, tuple) for note in segment]
    kernel = next(note.kernel for note in notes if note.ops[0] == OPERATIONS[kind])

    def seconds(repeat: int) -> float:
        times = compiled.times(x, repeat=-(-repeat // _AGAIN), again=_AGAIN)
        return next(s.seconds for s in times if s.label.split(" + ")[0] == OPERATIONS[kind])

    return ProductStep(kernel, seconds)
