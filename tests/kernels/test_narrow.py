"""Few columns and narrow groups of them: every row of the table that reads words of windows where they lie, against products with zeros
where other groups are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from sashiko.cpu_codegen.builder import Module
from sashiko.graph.dims import evaluate
from sashiko.graph.types import DType, bf16, f32, i8, u8
from sashiko.kernels import table
from sashiko.kernels.spec import GemmSpec, Strides
from sashiko.kernels.table import Kernel
from sashiko.platforms.catalogue import X86_64_AMX, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target
from tests.emulation import Array, Runner, runners
from tests.kernels.images import Images
from tests.kernels.products import Case, M, Together, acc_of, array, compare, plain_store, random
from tests.machines import ZEN4
from tests.sweeps import left_to_sweep


@dataclass(frozen=True)
class Narrow:
    """For each of `images.groups` weights, `joined` groups that read `run` channels and have `columns` each. known: so it is told."""

    images: Images
    joined: int
    run: int
    columns: int
    known: bool = True

    @property
    def n(self) -> int:
        return self.joined * self.columns

    @property
    def own(self) -> int:
        """k of a column."""
        return self.images.k // self.joined

    def spec(self, dtype: DType, many: bool = False) -> GemmSpec:
        """many: any number of images."""
        rows = M * (self.images.lines * self.images.places) if many else None
        diagonal = (self.joined, self.run) if self.known else (1, 0)
        return replace(self.images.spec(dtype, self.n, rows=rows), diagonal=diagonal, sums16=2)

    def weights(self, dtype: DType) -> torch.Tensor:
        """[groups, n, own]; of bytes so small that two products fit 16 bits."""
        shape = self.images.groups, self.n, self.own
        return random(shape, dtype, 2) if dtype.is_float else random(shape, i8, 2) // 2

    def dense(self, weights: torch.Tensor) -> torch.Tensor:
        """[groups, n, k] with zeros."""
        whole = weights.new_zeros(self.images.groups, self.n, self.own // self.run, self.joined, self.run)
        for column in range(self.n):
            whole[:, column, :, column // self.columns] = weights[:, column].unflatten(-1, (-1, self.run))
        return whole.flatten(2)


CASES = (
    Narrow(Images(2, 9, 8, 24, groups=3), 2, 4, 8),
    Narrow(Images(2, 5, 33, 32, groups=2), 4, 4, 4),  # tiles of several heights in a line
    Narrow(Images(1, 9, 11, 16, taps=5, across=5), 4, 4, 4),  # the channels of neighbouring taps follow one another
    Narrow(Images(2, 11, 10, 48, step=2, apart=2, groups=2), 6, 4, 2),  # more words than a vector has
    Narrow(Images(2, 7, 9, 24, groups=2), 3, 4, 5),  # no power of two
    Narrow(Images(2, 6, 19, 32, taps=2, across=7, groups=4), 1, 8, 8),  # a vector of one group
    Narrow(Images(2, 7, 7, 32, groups=2), 1, 16, 20),  # more columns than a vector has
    Narrow(Images(2, 9, 8, 24, groups=3), 2, 4, 7),  # the taps of the first, and other columns
    Narrow(Images(2, 9, 12, 12), 1, 12, 8, known=False),  # all columns read all channels
    Narrow(Images(1, 9, 23, 8, step=2), 1, 8, 12, known=False),
)


def lhs_of(row: Kernel) -> DType:
    return {str(dtype): dtype for dtype in (f32, bf16, i8, u8)}[row.name.split("_")[2]]


def pairs() -> Iterator[ParameterSet]:
    for runner in runners():
        held = runner.values[0]
        for row in (row for row in table.TABLE if row.narrow):
            if isinstance(held, Runner) and any(row.when(held.target, case.spec(lhs_of(row))) is None for case in CASES):
                found = pytest.param(row, held, marks=runner.marks, id=f"{row.name}-{runner.id}")
                # Instructions that other machines have too; u8 differs from i8 in the instruction alone.
                again = runner.id in ("x86_64_v4", "neoverse_n2") and not row.name.endswith("16_avx512maddubs2")
                again |= (runner.id == "x86_64_v3" and "_f32_" in row.name) or (runner.id != "host" and "_u8_" in row.name)
                yield left_to_sweep(found) if again else found


PAIRS = tuple(pairs())


@pytest.mark.parametrize(("row", "runner"), PAIRS)
def test_groups_of_windows(row: Kernel, runner: Runner) -> None:
    """In a known number of images, and in any."""
    products, dtype = Together(runner), lhs_of(row)
    for case, many in (*((case, False) for case in CASES), (CASES[1], True), (CASES[5], True)):
        spec = case.spec(dtype, many)
        if row.when(runner.target, spec) is not None:  # where another row is for vectors of one group
            continue
        code = row.emit(products.module, runner.target, spec, products.name())
        assert code.columns is not None
        shape = case.images.count, case.images.height, case.images.width, case.images.channels
        image, weights = random(shape, dtype, 1), case.weights(spec.rhs)
        packed = np.concatenate([row.pack(each).numpy() for each in weights])
        sizes = {"M": case.images.count}
        assert packed.size == evaluate(code.packed_bytes, sizes)
        out = np.full((case.images.groups, case.images.rows, case.n), 77, np.float32 if dtype.is_float else np.int32)
        windows, dense = case.images.windows(image), case.dense(weights)

        def alike(result: Array, case: Narrow, windows: torch.Tensor, dense: torch.Tensor) -> None:
            for x, w, found in zip(windows, dense, result, strict=True):
                compare(found, x=x, w=w, case=Case(case.images.rows, case.n, case.own))

        known = partial(alike, case=case, windows=windows, dense=dense)
        products.add((code.rows, code.columns), products.place(array(image)), products.place(packed), out, sizes, known)
    products.run()


def chosen(case: Narrow, dtype: DType = u8, target: Target = X86_64_VNNI, **changes: object) -> str:
    spec = replace(case.spec(dtype), **changes)  # type: ignore[arg-type]
    return table.select(target, spec).kernel.name.partition("_")[0]


def test_what_is_computed_with_zeros() -> None:
    case = CASES[1]
    assert chosen(case) == chosen(case, f32) == "narrow"
    rows = replace(case.spec(u8), lhs_pieces=None, lhs_strides=Strides(0, 288), diagonal=(1, 0))
    assert not table.select(X86_64_VNNI, rows).kernel.narrow  # neither windows nor groups
    assert chosen(case, target=X86_64_AMX) == "gemm"  # faster there
    assert chosen(Narrow(Images(2, 9, 8, 24, groups=3), 4, 2, 4)) == "gemm"  # half a word of each group
    assert chosen(case, lhs_pieces=None, lhs_strides=Strides(0, 32)) == "gemm"  # k that are no taps
    far = Narrow(Images(1, 9, 9, 256, groups=1), 1, 256, 16)
    assert chosen(far) == "gemm" and chosen(far, f32) in ("gemm", "winograd")  # weights that L1 does not hold
    wide = Narrow(Images(1, 60, 60, 32, groups=2), 1, 16, 16)
    assert chosen(wide) == "narrow" and chosen(wide, f32, X86_64_V4) == "winograd"  # 16 products for 36
    short = Narrow(Images(2, 6, 6, 32, groups=2), 1, 16, 16)  # four places in a line
    assert chosen(short) == "gemm" and chosen(replace(short, joined=4, run=4, columns=4)) == "narrow"
    single = Narrow(Images(2, 6, 5, 32, taps=1, across=1, groups=2), 2, 8, 8)
    assert chosen(single) == "gemm"  # rows are read once anyway


def test_lines_that_fill_tiles_take_less_time_than_minimal_filtering() -> None:

    def square(each: int, side: int, target: Target = X86_64_V4) -> str:
        return chosen(Narrow(Images(1, side + 2, side + 2, 4 * each, groups=4), 1, each, each), f32, target)

    assert [square(16, side) for side in (7, 14, 20, 28)] == ["winograd", "narrow", "winograd", "narrow"]
    assert [square(24, side) for side in (7, 14, 20, 28)] == ["winograd", "narrow", "winograd", "winograd"]
    assert square(32, 14) == square(16, 14, ZEN4) == "winograd"


def test_long_windows_are_loops() -> None:
    """HiFi-GAN: 11 taps of 16 channels would be 2464 products of 14 rows, and half of the time that the model takes to compile."""
    spec = Narrow(Images(1, 1, 240, 16, taps=1, across=11, apart=3), 1, 16, 16, known=False).spec(f32)
    selected = table.select(X86_64_V4, spec)
    assert selected.kernel.narrow
    module = Module()
    selected.kernel.emit(module, X86_64_V4, spec, "narrow")
    counts = [function.count("call <16 x float> @llvm.fma") for function in module.text().split("define ")]
    assert 11 * 14 in counts and max(counts) <= 11 * 14


def test_rows_that_lie_one_after_the_other() -> None:
    """A convolution of 1 x 1 in groups, and one along a line, have no grid of places."""
    spec = GemmSpec(u8, i8, 50, 16, 16, Strides(0, 64), plain_store(16, acc_of(u8)), diagonal=(4, 4))
    assert table.select(X86_64_VNNI, spec).kernel.narrow
    assert table.select(X86_64_VNNI, replace(spec, m=M * 7)).kernel.narrow  # any number of images
    assert not table.select(X86_64_VNNI, replace(spec, m=M * 7 + 3)).kernel.narrow
    assert not table.select(X86_64_VNNI, replace(spec, k=32)).kernel.narrow


def test_vectors_of_one_group_each_where_they_are_as_fast() -> None:
    case = Narrow(Images(2, 9, 8, 32, groups=2), 2, 8, 8)
    names = [table.select(target, case.spec(u8)).kernel.name for target in (X86_64_VNNI, ZEN4)]
    assert names == ["narrow_i32_u8_i8_16_avx512vnni", "narrow_i32_u8_i8_8_avxvnni"]
    few = Narrow(Images(2, 9, 8, 16, groups=2), 1, 8, 8)
    assert table.select(X86_64_VNNI, few.spec(u8)).kernel.name == names[1]
