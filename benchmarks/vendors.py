"""Generated matrix products beside those of the libraries that torch carries (MKL, oneDNN), over random shapes.

    python -P benchmarks/vendors.py [--count 200] [--shapes 490x80x4084,...] [--kinds fp32,bf16,int8] [--seed 0] [--json F]

M is drawn from 1-2048, N and K from 32-4096, their logarithms uniformly. Weights are constant and packed beforehand on both sides;
operands are random; one pinned core; candidates take turns, for longer where the ratio is near 0.95. Ours is the time of the product's
own step, a library's that of the fastest of its calls, each less what the same takes for 1 x 32 x 32, so that neither side pays for
Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from sashiko.cli.bench.cases import parse_shape
from sashiko.cli.bench.product import OPERATIONS, product
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import pin
from sashiko.cli.values import count, file_to_write, one_of, several

ROUNDS, SECONDS = 5, 0.01
LEAST = (1, 32, 32)
SLOWER = 1.05  # a library is faster when ours takes more than this times its time
Call = Callable[[], object]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Row:
    """One shape M, N, K. us: of ours with `kernel`, and of the fastest call of the libraries, less the overhead of the call."""

    kind: str
    shape: Shape
    kernel: str
    us: float
    vendor: str
    vendor_us: float

    @property
    def ratio(self) -> float:
        return self.vendor_us / self.us


def random_shapes(count: int, seed: int) -> list[Shape]:
    draw = random.Random(seed)

    def size(low: int, high: int) -> int:
        return round(low * (high / low) ** draw.random())

    return [(size(1, 2048), size(32, 4096), size(32, 4096)) for _ in range(count)]


def _shape(text: str) -> Shape:
    m, n, k = parse_shape(text)
    return m, n, k


def vendor_calls(kind: str, shape: Shape) -> dict[str, Call]:
    """The libraries' calls for a product with a bias: f32 to f32, bf16 to bf16, or u8 times i8 to f32."""
    m, n, k = shape
    x, w, b = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    if kind == "fp32":
        return {"torch linear (MKL)": partial(nn.functional.linear, x, w, b), **_onednn(x, w, b)}
    if kind == "bf16":
        return _onednn(x.bfloat16(), w.bfloat16(), b.bfloat16())
    qx = torch.randint(0, 256, (m, k), dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 128, (n, k), dtype=torch.int8).t().contiguous().t(), [m, k])
    scales, zeros = torch.rand(n), torch.zeros(n, dtype=torch.int32)
    args = (qx, 0.1, 128, packed, scales, zeros, b, 1.0, 0, torch.float32, "none", [], "")
    return {"oneDNN int8": partial(torch.ops.onednn.qlinear_pointwise, *args)}


def _onednn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> dict[str, Call]:
    packed = torch.ops.mkldnn._reorder_linear_weight(w, len(x))
    return {"oneDNN packed": partial(torch.ops.mkldnn._linear_pointwise, x, packed, b, "none", [], "")}


def shortest(call: Call, repeat: int) -> float:
    """Seconds of the fastest of `repeat` calls."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


@dataclass(frozen=True)
class Timed:
    """Seconds of ours with `kernel` and of the fastest call of each library, as they were timed."""

    shape: Shape
    kernel: str
    ours: float
    theirs: dict[str, float]

    def row(self, kind: str, overheads: Timed) -> Row:
        """overheads: what calls take that hardly compute anything."""
        net = {name: max(seconds - overheads.theirs[name], 1e-7) for name, seconds in self.theirs.items()}
        vendor = min(net, key=net.__getitem__)
        return Row(kind, self.shape, self.kernel, max(self.ours - overheads.ours, 1e-7) * 1e6, vendor, net[vendor] * 1e6)


class Candidates:
    """Both sides of one shape."""

    def __init__(self, kind: str, shape: Shape) -> None:
        self.shape, self.step, self.calls = shape, product(kind, shape), vendor_calls(kind, shape)
        self.repeat = max(2, min(200, int(SECONDS / self.step.seconds(2))))
        for call in self.calls.values():
            call()

    def timed(self) -> Timed:
        """One round."""
        theirs = {name: shortest(call, self.repeat) for name, call in self.calls.items()}
        return Timed(self.shape, self.step.kernel, self.step.seconds(self.repeat), theirs)


def fastest(rounds: Sequence[Timed]) -> Timed:
    """The shortest times of each candidate."""
    first = rounds[0]
    theirs = {name: min(each.theirs[name] for each in rounds) for name in first.theirs}
    return Timed(first.shape, first.kernel, min(each.ours for each in rounds), theirs)


def near_bound(row: Row) -> bool:
    """Whether more rounds may change what is slower."""
    return abs(row.ratio * SLOWER - 1) < 0.05


def measure(kind: str, shapes: Sequence[Shape], console: Console) -> list[Row]:
    """Times all shapes. The overheads are timed again with each of them, since whatever else the machine does comes and goes.

    Shapes near the bound, on either side of it, get three times the rounds.
    """
    try:
        least = Candidates(kind, LEAST)
    except (AttributeError, RuntimeError) as error:  # no such operation in this build, or not on this processor
        console.print(f"{kind}: nothing to compare with: {str(error).splitlines()[0]}")
        return []
    overheads: list[Timed] = []

    def rounds(candidates: Candidates, count: int) -> list[Timed]:
        found = []
        for _ in range(count):
            overheads.append(least.timed())
            found.append(candidates.timed())
        return found

    timed = []
    for shape in track(shapes, kind, console=console):
        candidates = Candidates(kind, shape)
        found = fastest(rounds(candidates, ROUNDS))
        if near_bound(found.row(kind, fastest(overheads))):
            found = fastest([found, *rounds(candidates, 2 * ROUNDS)])
        timed.append(found)
    return [each.row(kind, fastest(overheads)) for each in timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=count, default=200, help="shapes of each kind (default: %(default)s)")
    parser.add_argument("--shapes", type=several(_shape), help="these M x N x K instead of random ones, such as 490x80x4084,512x768x768")
    parser.add_argument("--kinds", type=several(one_of(OPERATIONS)), default="fp32,bf16,int8", help="%(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=file_to_write, help="write the figures to this file")
    options = parser.parse_args()
    pin()
    torch.manual_seed(options.seed)
    torch.set_grad_enabled(False)
    console = Console(width=150)
    shapes = options.shapes or random_shapes(options.count, options.seed)
    rows = [row for kind in options.kinds for row in measure(kind, shapes, console)]
    table = Table("kind", "M x N x K", "kernel", "us", "library", "us", "library / ours")
    for row in sorted((r for r in rows if options.shapes or r.ratio * SLOWER < 1), key=lambda r: r.ratio):
        shape = "x".join(map(str, row.shape))
        table.add_row(row.kind, shape, row.kernel, f"{row.us:.1f}", row.vendor, f"{row.vendor_us:.1f}", f"{row.ratio:.2f}")
    console.print(table)
    for kind in options.kinds:
        ratios = [r.ratio for r in rows if r.kind == kind]
        if not ratios:
            continue
        slower = sum(ratio * SLOWER < 1 for ratio in ratios)
        median = statistics.median(ratios)
        console.print(f"{kind}: median {median:.2f}x the library's speed, slower by more than 5 % in {slower} of {len(ratios)}")
    if options.json:
        run = story()
        options.json.write_text(json.dumps(run | {"rows": [dataclasses.asdict(r) for r in rows]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
