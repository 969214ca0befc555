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


@dataclass(frozen=True)
class ProductStep:
    """kernel: its name. seconds: the shortest time in so many runs."""

    kernel: str
    seconds: Callable[[int], float]


def product(kind: str, shape: tuple[int, ...], target: Target | None = None) -> ProductStep:
    """The product of `nn.Linear` with M x N x K = `shape`, on random operands. kind: of `OPERATIONS`; int8 has fixed ranges."""
    m, n, k = shape
    layer, x = nn.Linear(k, n).eval(), torch.randn(m, k)
    source: nn.Module = quantize(layer, [(x,)], preset="int8-static", progress=False, target=target) if kind == "int8" else layer
    compiled = compiled_by(source, (x,), precision="bf16" if kind == "bf16" else "fp32", target=target)
    compiled(x)
    assert compiled.built is not None, "not from a file"
    notes = [note for segment in compiled.built.notes if isinstance(segment, tuple) for note in segment]
    [kernel] = [note.kernel for note in notes if note.ops[0] == OPERATIONS[kind]]

    def seconds(repeat: int) -> float:
        [taken] = [s.seconds for s in compiled.times(x, repeat=repeat) if s.label.split(" + ")[0] == OPERATIONS[kind]]
        return taken

    return ProductStep(kernel, seconds)
