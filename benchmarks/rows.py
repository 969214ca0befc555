"""Layers whose number of rows comes with the call, beside the same layers compiled for that number, and eager PyTorch in fp32 or bf16.

    python -P benchmarks/rows.py [--rows 1,4,5,...] [--precision fp32,bf16,int8] [--size 1024x4096] [--layers 6] [--json F]

A stack of pairs of linear layers, whose weights are read from memory: a row costs little beside them until there are many. One
pinned core; candidates take turns; operands are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import measure, pin
from sashiko.cli.values import count, file_to_write, one_of, several
from sashiko.quant import PRESETS

ROWS = (1, 2, 4, 5, 7, 8, 9, 11, 14, 16, 20, 24, 29, 32, 48, 64, 100, 128)
MOST = 512
PRECISIONS = ("fp32", "bf16", *PRESETS)


@dataclass(frozen=True)
class Row:
    """ms: of a call that brings so many rows. to_own: how many times as long as the layers compiled for that number; to_eager: as eager,
    which for int8 is eager fp32."""

    precision: str
    rows: int
    ms: float
    to_own: float
    to_eager: float


def stack(k: int, n: int, layers: int) -> nn.Module:
    """[rows, k] to [rows, k] by way of [rows, n], so many times."""
    return nn.Sequential(*(nn.Linear(*sizes) for _ in range(layers) for sizes in ((k, n), (n, k)))).eval()


def stack_in_bf16(model: nn.Module) -> nn.Module:
    """The same layers with weights in bf16, for eager PyTorch."""
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(*(nn.Linear(each.in_features, each.out_features, dtype=torch.bfloat16) for each in model)).eval()


def narrowed(model: nn.Module, k: int, precision: str) -> nn.Module:
    """The model, or its int8 form, which takes any number of rows."""
    if precision != "int8":
        return model
    batches = [torch.randn(rows, k) for rows in (9, 17)]
    return sashiko.quantize(model, batches)


def measured(model: nn.Module, k: int, precision: str, counts: list[int]) -> list[Row]:
    narrow, own = narrowed(model, k, precision), "auto" if precision == "int8" else precision
    any_rows = sashiko.compile(narrow, (torch.randn(9, k),), dynamic_shapes=({0: Dim("rows", min=1, max=MOST)},), precision=own)
    eager = model if precision != "bf16" else stack_in_bf16(model)
    found = []
    for rows in counts:
        x = torch.randn(rows, k)
        calls = {
            "any": partial(any_rows, x),
            "own": partial(sashiko.compile(narrow, (x,), precision=own), x),
            "eager": partial(eager, x.bfloat16() if precision == "bf16" else x),
        }
        times = measure(calls, rounds=7, seconds=0.1)
        ours = times["any"]
        found.append(Row(precision, rows, ours.median, 1 / ours.ratio_to(times["own"]), 1 / ours.ratio_to(times["eager"])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=several(count), default=",".join(map(str, ROWS)), help=f"%(default)s; at most {MOST}")
    parser.add_argument("--precision", type=several(one_of(PRECISIONS)), default="fp32,bf16,int8", help="%(default)s")
    parser.add_argument("--size", default="1024x4096", help="%(default)s")
    parser.add_argument("--layers", type=count, default=6, help="pairs of layers, %(default)s")
    parser.add_argument("--json", type=file_to_write, help="write the figures to this file")
    options = parser.parse_args()
    pin()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    k, n = map(int, options.size.split("x"))
    model, counts = stack(k, n, options.layers), options.rows
    found = [row for precision in options.precision for row in measured(model, k, precision, counts)]
    table = Table()
    for head in ("precision", "rows", "ms", "x compiled for it", "x eager"):
        table.add_column(head, justify="left" if head == "precision" else "right")
    for row in found:
        table.add_row(row.precision, str(row.rows), f"{row.ms:.3g}", f"{row.to_own:.2f}", f"{row.to_eager:.2f}")
    Console(width=140).print(table)
    if options.json:
        rows = [dataclasses.asdict(row) for row in found]
        options.json.write_text(json.dumps(story() | {"size": options.size, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
