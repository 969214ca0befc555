"""Made-up runs for the tests of what is done with them."""

from __future__ import annotations

from typing import Any

from sashiko.cli.bench.record import Machine, Row, Run
from sashiko.cpu_codegen.bandwidth import Bandwidth
from sashiko.kernels.peaks import Peaks, ProductPeak

PEAKS = Peaks(
    "Some CPU",
    (ProductPeak("fp32", "fma", 100.0), ProductPeak("bf16", "dot", 200.0), ProductPeak("int8", "quad", 400.0)),
    (
        Bandwidth("L1", 16 << 10, 200.0, 100.0, 150.0),
        Bandwidth("L2", 512 << 10, 100.0, 50.0, 75.0),
        Bandwidth("memory", 256 << 20, 10.0, 5.0, 8.0),
    ),
)
MACHINE = Machine("Some CPU", ("avx2", "fma"), 4, 32 << 10, 1 << 20, 0, "Linux 6, Python 3.11")
EAGER = (10.0, 10.2, 9.8, 10.1, 9.9)


def row(framework: str, precision: str, ms: tuple[float, ...] = (), **fields: Any) -> Row:
    """A row of bert-mini 8x64 on one core, unless said."""
    place = {"model": "bert-mini", "shape": "8x64", "threads": 1}
    return Row(framework=framework, precision=precision, ms=ms, **(place | fields))


def run(*rows: Row, torch: str = "2.13.0", machine: Machine = MACHINE) -> Run:
    return Run("sashiko bench", machine, (("sashiko", "0.1.0"), ("torch", torch)), PEAKS, rows)


def ours(factor: float, **fields: Any) -> Row:
    """Our int8, unless said, `factor` times faster than `EAGER` in every round, give or take a percent."""
    ms = tuple(t / factor * noise for t, noise in zip(EAGER, (1.0, 1.01, 0.99, 1.0, 1.0), strict=True))
    return row("sashiko", **({"precision": "int8", "ms": ms} | fields))
