"""Matrix products with constant weights: what part of the peak of its own inner loop each instruction set reaches.

    python -P benchmarks/products.py [--targets host,x86_64_vnni,x86_64_v3] [--shapes 512x256x256,...] [--kinds fp32,bf16,int8] [--json F]

A shape is M x N x K. The time is that of the product's own step with its epilogue, on one pinned core; operands are random, and results
in f32, or in the type of the operands ("-narrow"). The peak is that of the same rounds with operands in L1 (`sashiko.kernels.peaks`): other
users of a machine may slow it down for seconds, so that of everything the best round counts. Targets that this machine cannot run are left
out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from rich.console import Console
from rich.table import Table

from sashiko.cli.bench.cases import parse_shape
from sashiko.cli.bench.product import NARROW, OPERATIONS, product
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import pin
from sashiko.cli.values import file_to_write, one_of, several
from sashiko.kernels.peaks import measure_kind
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.platforms.host import host
from sashiko.platforms.target import Target

SHAPES = "512x256x256,512x1024x256,512x256x1024,64x768x768,256x768x768,512x768x768,512x1024x1024,512x768x3072"
REPEAT, ROUNDS = 60, 5
TARGETS: dict[str, Target | None] = {"host": None, **{target.name: target for target in CATALOGUE}}
KINDS = (*OPERATIONS, *(f"{kind}{NARROW}" for kind in OPERATIONS))


@dataclass(frozen=True)
class Product:
    """One shape on one target. giga: 10^9 multiplications and additions per second; share: of the peak."""

    target: str
    kind: str
    shape: str
    kernel: str
    us: float
    giga: float
    share: float


def runnable(names: Sequence[str]) -> list[tuple[str, Target]]:
    """The targets of these names that this machine can run, "host" among them."""
    here = host()
    found = [(name, TARGETS[name] or here) for name in names]
    return [(name, target) for name, target in found if target.triple == here.triple and target.features <= here.features]


def measure(name: str, target: Target, kind: str, shapes: Sequence[str]) -> list[Product]:
    """Times the products' steps of compiled linear layers."""
    torch.manual_seed(0)
    steps = [product(kind, parse_shape(shape), target) for shape in shapes]
    peak, best = 0.0, [float("inf")] * len(steps)
    for _ in range(ROUNDS):
        peak = max(peak, measure_kind(target, kind.removesuffix(NARROW)).giga)
        best = [min(seconds, step.seconds(REPEAT)) for seconds, step in zip(best, steps, strict=True)]
    found: list[Product] = []
    for shape, step, seconds in zip(shapes, steps, best, strict=True):
        giga = 2 * prod(parse_shape(shape)) / seconds / 1e9
        found.append(Product(name, kind, shape, step.kernel, seconds * 1e6, giga, giga / peak))
    return found


def table(found: Sequence[Product]) -> Table:
    shown = Table()
    for head in ("target", "kind", "M x N x K", "us", "10^9/s", "of peak", "kernel"):
        shown.add_column(head, justify="right" if head in ("us", "10^9/s", "of peak") else "left")
    for p in found:
        shown.add_row(p.target, p.kind, p.shape, f"{p.us:.1f}", f"{p.giga:.0f}", f"{p.share:.0%}", p.kernel)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=several(one_of(TARGETS)), default="host,x86_64_vnni,x86_64_v3", help="%(default)s")
    parser.add_argument("--shapes", default=SHAPES, help="%(default)s")
    parser.add_argument("--kinds", type=several(one_of(KINDS)), default="fp32,bf16,bf16-narrow,int8,int8-narrow", help="%(default)s")
    parser.add_argument("--json", type=file_to_write, help="write the figures to this file")
    options = parser.parse_args()
    pin()
    found: list[Product] = []
    for name, target in runnable(options.targets):
        for kind in options.kinds:
            found += measure(name, target, kind, options.shapes.split(","))
    Console(width=150).print(table(found))
    if options.json:
        run = story()
        options.json.write_text(json.dumps(run | {"products": [dataclasses.asdict(p) for p in found]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
