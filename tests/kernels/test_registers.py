"""The inner loops of products keep their accumulators in registers: LLVM neither stores them nor moves them around.

Where a tile needs about as many registers as there are, this depends on the order in which loads and products are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import Module
from sashiko.graph.types import DType, bf16, f32, i8, u8
from sashiko.kernels import table
from sashiko.platforms.catalogue import NEOVERSE_N1, NEOVERSE_N2, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target
from tests.kernels.products import Case, spec_of

SMALL = "i8 of which four products are added in 16 bits"
_PRODUCT = re.compile(r"\t(vfmadd|vdpbf16|vpdpb|vpmaddwd|vpmaddubsw|fmla|sdot|smmla|usmmla|bfmmla)")
_STACK = re.compile(r"\(%rsp\).*[xyz]mm|[xyz]mm.*\(%rsp\)|\t(?:st|ld)[rp]\tq.*\[sp")
_MOVE = re.compile(r"\tvmov[au]\w+\t%[xyz]mm\d+, %[xyz]mm|\tmov\tv\d+\.16b")


def inner_loops(text: str) -> Iterator[list[str]]:
    """The lines of each block of an assembly listing that jumps to itself."""
    for block in re.split(r"\n(?=\.LBB)", text):
        label = re.match(r"(\.LBB\w+):", block)
        if label and re.search(rf"\t\S+\t(?:\S+, )?{re.escape(label[1])}$", block, re.MULTILINE):
            yield block.split("\n")


@pytest.mark.parametrize(
    ("target", "lhs", "rhs", "m", "n"),
    [
        (X86_64_V4, f32, f32, 14, 32),
        (X86_64_V4, f32, f32, 9, 48),
        (X86_64_V4, f32, f32, 6, 64),
        (X86_64_V3, f32, f32, 6, 16),
        (X86_64_V4, bf16, bf16, 14, 32),
        (X86_64_V4, bf16, bf16, 9, 48),
        (X86_64_V3, bf16, bf16, 6, 16),
        (X86_64_V4, u8, i8, 14, 32),
        (X86_64_V4, u8, i8, 28, 16),
        (X86_64_V4, i8, i8, 9, 48),
        (X86_64_V3, u8, i8, 6, 16),
        (X86_64_V3, u8, SMALL, 3, 16),
        (X86_64_V4, u8, SMALL, 12, 32),
        (X86_64_VNNI, u8, i8, 14, 32),
        (X86_64_VNNI, i8, i8, 9, 48),
        (NEOVERSE_N1, f32, f32, 8, 12),
        (NEOVERSE_N1, i8, i8, 8, 12),
        (NEOVERSE_N2, bf16, bf16, 8, 12),
        (NEOVERSE_N2, u8, i8, 8, 12),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_nothing_leaves_its_register(target: Target, lhs: DType, rhs: DType | str, m: int, n: int) -> None:
    spec, module = spec_of(Case(m, n, 512, 0), lhs, i8 if rhs == SMALL else rhs, m=m), Module()
    spec = replace(spec, sums16=4 if rhs == SMALL else 1)
    table.select(target, spec).kernel.emit(module, target, spec, "product")
    loops = [lines for lines in inner_loops(jit.assembly(module.text(), target)) if sum(map(bool, map(_PRODUCT.match, lines))) >= 4]
    assert loops
    for lines in loops:
        moved = [line for line in lines if _STACK.search(line) or _MOVE.search(line)]
        assert len(moved) <= 2, "\n".join(lines)
