"""Models the inner loops of the AArch64 tiles with llvm-mca: what part of two products a cycle they reach.

    python -P benchmarks/mca.py

A model of the processor's pipelines with everything in L1: it ranks loops, it does not predict times.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from dataclasses import dataclass

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import I64, PTR, VOID, Function, Module, i64
from sashiko.graph.types import i8
from sashiko.kernels import neon
from sashiko.kernels.micro import MicroKernel, Start
from sashiko.kernels.tile import emit_tile
from sashiko.platforms.catalogue import NEOVERSE_N1, NEOVERSE_N2
from sashiko.platforms.target import Target

TOOLS = ("llvm-mca-22", "llvm-mca")
# Before, the models of Neoverse took a product into the same accumulator for twice as slow as it is.
OLDEST = 18
PRODUCTS = re.compile(r"^\s+(sdot|smmla|usmmla|bfmmla|fmla)\s")
PEAK = 2  # products a cycle of both processors
ITERATIONS = 200


@dataclass(frozen=True)
class Row:
    """One loop under one model. dispatch: instructions a cycle, as the processor's optimization guide says."""

    name: str
    target: Target
    micro: MicroKernel
    dispatch: int


ROWS = (
    Row("sdot 8x12 on N1", NEOVERSE_N1, neon.sdot(i8)[0], 4),
    Row("fmla 8x12 on N1", NEOVERSE_N1, neon.fmla()[0], 4),
    Row("smmla 8x12 on N2", NEOVERSE_N2, neon.smmla(i8)[0], 5),
    Row("bfmmla 8x12 on N2", NEOVERSE_N2, neon.bfmmla()[0], 5),
    Row("fmla 8x12 on N2", NEOVERSE_N2, neon.fmla()[0], 5),
)


@dataclass(frozen=True)
class Result:
    """instructions, products: of one pass of the loop. cycles: of one pass, modelled."""

    instructions: int
    products: int
    cycles: float

    @property
    def share(self) -> float:
        """Of the peak."""
        return self.products / PEAK / self.cycles


def tool() -> str | None:
    """The llvm-mca of this machine; None when there is none, or only one older than `OLDEST`."""
    return next((path for name in TOOLS if (path := shutil.which(name)) and version(path) >= OLDEST), None)


def version(path: str) -> int:
    """The major version of LLVM that the tool says it is of."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"LLVM version (\d+)", said)
    return int(found[1]) if found else 0


def inner_loop(row: Row) -> list[str]:
    """The instructions of the loop with the most products, its backward branch last."""
    module = Module()
    name = emit_tile(module, row.micro, Start.ZERO, row.micro.nr, None, 0)
    fn = Function(module, "entry", VOID, [PTR, PTR, PTR, I64])
    fn.call(name, VOID, [fn.args[0], i64(0), fn.args[1], fn.args[3], i64(0), *[fn.args[2]] * row.micro.panels])
    fn.ret()
    fn.finish()
    lines = jit.assembly(module.text(), row.target).splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"^\.?\w+:", line)}
    loops = []
    for at, line in enumerate(lines):
        branch = re.match(r"^\s+(?:b\.\w+|cbn?z\s+\w+,)\s*(\.\w+)", line)
        if branch and labels.get(branch[1], at) < at:
            loops.append([x for x in lines[labels[branch[1]] : at + 1] if x.startswith("\t") and not x.lstrip().startswith(".")])
    return max(loops, key=lambda loop: sum(bool(PRODUCTS.match(x)) for x in loop))


def model(row: Row, path: str) -> Result:
    """Runs llvm-mca on the loop."""
    loop = inner_loop(row)
    model_options = [f"-mcpu={row.target.cpu}", f"-iterations={ITERATIONS}", f"-dispatch={row.dispatch}"]
    command = [path, "-mtriple=aarch64-linux-gnu", "-mattr=+all", *model_options]
    text = "\n".join(["top:", *(re.sub(r"\.L\w+", "top", line) for line in loop), ""])
    ran = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    cycles = re.search(r"Total Cycles:\s+(\d+)", ran.stdout)
    assert cycles is not None
    return Result(len(loop), sum(bool(PRODUCTS.match(line)) for line in loop), int(cycles[1]) / ITERATIONS)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    path = tool()
    if path is None:
        raise SystemExit(f"none of {', '.join(TOOLS)} is installed, of LLVM {OLDEST} or newer")
    print(f"{'loop':20} {'instructions':>12} {'products':>9} {'cycles':>7} {'of peak':>8}")
    for row in ROWS:
        result = model(row, path)
        print(f"{row.name:20} {result.instructions:12} {result.products:9} {result.cycles:7.2f} {result.share:8.1%}")


if __name__ == "__main__":
    main()
