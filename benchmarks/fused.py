"""Memory-bound chains of operations: bytes per second beside a plain copy, and time beside Inductor.

    python -P benchmarks/fused.py [--only LayerNorm,softmax,...] [--levels L2,memory] [--vs inductor|none] [--json F]

Bytes are those of inputs and results, moved once. The copy is a plain loop over as many bytes (`sashiko doctor --peaks`). Results are new
tensors in each call, as users get them. One pinned core; candidates take turns; operands are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import sashiko
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import measure, pin
from sashiko.cli.values import file_to_write, one_of, several, split
from sashiko.cpu_codegen import bandwidth
from sashiko.platforms.host import host

Tensors = tuple[torch.Tensor, ...]


class Quantized(nn.Module):
    """The last step of a producer of int8: a fixed scale, rounded and saturated."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.round(self.inner(*args) * 20.0), -128, 127).to(torch.int8)


class Residual(nn.Module):
    """LayerNorm(x + y), or RMSNorm of it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x + y)
        return result


class Biased(nn.Module):
    """GELU(x + bias)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + self.bias)


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)


# name -> (module for so many columns, number of inputs)
CHAINS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "residual + LayerNorm": (lambda c: Residual(nn.LayerNorm(c)), 2),
    "residual + LayerNorm + quantize": (lambda c: Quantized(Residual(nn.LayerNorm(c))), 2),
    "residual + RMSNorm": (lambda c: Residual(nn.RMSNorm(c)), 2),
    "softmax": (lambda c: Softmax(), 1),
    "bias + GELU": (Biased, 1),
    "bias + GELU + quantize": (lambda c: Quantized(Biased(c)), 1),
}


@dataclass(frozen=True)
class Row:
    """One chain at one level. giga: 10^9 bytes per second; share: of a plain copy; speedup: over Inductor, or None."""

    name: str
    level: str
    shape: tuple[int, int]
    us: float
    giga: float
    share: float
    speedup: float | None


LEVELS = ("L2", "memory")


def shapes(level: str) -> tuple[int, int]:
    """Rows and columns so that three tensors of f32 fit the level, or each is larger than all caches."""
    target = host()
    if level == "L2":
        return max(8, target.l2 // (4 * 4 * 256)), 256
    return max(8192, target.l3 * 2 // (4 * 1024)), 1024


def row(name: str, level: str, inductor: bool) -> Row:
    make, count = CHAINS[name]
    rows, columns = shapes(level)
    torch.manual_seed(0)
    model, inputs = make(columns).eval(), tuple(torch.randn(rows, columns) for _ in range(count))
    calls = {"sashiko": partial(sashiko.compile(model, inputs), *inputs)}
    if inductor:
        torch._dynamo.reset()
        calls["inductor"] = partial(torch.compile(model), *inputs)
    result = calls["sashiko"]()
    moved = sum(t.numel() * t.element_size() for t in (*inputs, result))
    times = measure(calls, rounds=9, seconds=0.1)
    [copy] = bandwidth.measure(host(), ((level, moved),))
    ours = times["sashiko"]
    giga = moved / ours.median / 1e6
    speedup = ours.ratio_to(times["inductor"]) if inductor else None
    return Row(name, level, (rows, columns), ours.median * 1e3, giga, giga / copy.copy, speedup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=split, default="", help="chains whose names contain one of these words")
    parser.add_argument("--levels", type=several(one_of(LEVELS)), default="L2,memory", help="%(default)s")
    parser.add_argument("--vs", default="inductor", choices=("inductor", "none"))
    parser.add_argument("--json", type=file_to_write, help="write the figures to this file")
    options = parser.parse_args()
    names = [n for n in CHAINS if not options.only or any(word in n for word in options.only)]
    if not names:
        parser.error(f"--only: none of {', '.join(CHAINS)} contains one of these words")
    pin()
    torch.set_grad_enabled(False)
    found = [row(n, level, options.vs == "inductor") for level in options.levels for n in names]
    table = Table()
    for head in ("chain", "level", "rows x columns", "us", "GB/s", "of a copy", "x inductor"):
        table.add_column(head, justify="left" if head in ("chain", "level") else "right")
    for r in found:
        speed = "-" if r.speedup is None else f"{r.speedup:.1f}"
        table.add_row(r.name, r.level, f"{r.shape[0]} x {r.shape[1]}", f"{r.us:.1f}", f"{r.giga:.0f}", f"{r.share:.0%}", speed)
    Console(width=140).print(table)
    if options.json:
        run = story()
        options.json.write_text(json.dumps(run | {"rows": [dataclasses.asdict(r) for r in found]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
