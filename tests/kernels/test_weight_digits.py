"""Rows of floats as digits: what rounding them may cost, the largest digits and sums, zeros, tiny and huge numbers, infinities and NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet

from sashiko.cpu_codegen.builder import Module
from sashiko.graph.types import FROM_TORCH, DType, bf16, f32, i4, i8
from sashiko.kernels import table
from sashiko.kernels.packing import packed_group
from sashiko.kernels.weight_digits import step_of
from sashiko.kernels.weight_only import AVX2, AVX512_VNNI, AVX_VNNI, SDOT, Small
from tests.emulation import Runner, runners
from tests.kernels.products import Case, array, halves, random
from tests.kernels.test_weight_only import digits_bound, weight, weight_spec
from tests.sweeps import swept

_AVX512_VNNI = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")


def machines() -> Iterator[ParameterSet]:
    """Every class of digits with a machine; 256-bit vectors where AVX-512 has them, for AVX-VNNI is the same instruction."""
    for small, needs in ((AVX512_VNNI, _AVX512_VNNI), (AVX2, ("avx2", "fma")), (AVX_VNNI, _AVX512_VNNI), (SDOT, ("neon", "dotprod"))):
        found = runners(needs=needs)
        if not found:
            yield pytest.param(None, small, id=small.family, marks=pytest.mark.skip(reason=f"no machine here has {', '.join(needs)}"))
        else:
            yield pytest.param(found[0].values[0], small, id=small.family, marks=found[0].marks)


ON = pytest.mark.parametrize(("runner", "small"), tuple(machines()))


@dataclass(frozen=True)
class Weights:
    """integers [n, k]; scales [n, groups] for i4, None for i8."""

    integers: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def group(self) -> int:
        return 0 if self.scales is None else self.integers.shape[1] // self.scales.shape[1]

    @property
    def real(self) -> torch.Tensor:
        """Their values, f64."""
        values = self.integers.double()
        return values if self.scales is None else values * self.scales.double().repeat_interleave(self.group, 1)


def weights(n: int, k: int, group: int) -> Weights:
    """Of the whole range; group 0: i8."""
    return Weights(*weight(Case(1, n, k), i4 if group else i8, group))


def product(runner: Runner, small: Small, x: torch.Tensor, w: Weights) -> torch.Tensor:
    """x [m, k] (f32 or bf16) times the weights, [m, n] f32, by the small tiles alone."""
    lhs, rhs = bf16 if x.dtype == torch.bfloat16 else f32, i4 if w.group else i8
    case = Case(x.shape[0], *w.integers.shape)
    row = table.weight_only_row(None, small, lhs, rhs, (), 1)
    module = Module()
    code = row.emit(module, runner.target, weight_spec(case, lhs, rhs, w.group), "product")
    packed = row.pack(w.integers) if w.scales is None else row.pack(w.integers, w.scales)
    out = np.full((case.m, case.n), 77, np.float32)
    calls = halves(code.rows, (0, 1, 2), {"M": case.m})
    return torch.from_numpy(runner.run_calls(module.text(), [array(x), packed.numpy(), out], calls)[2])


def check(runner: Runner, small: Small, x: torch.Tensor, w: Weights) -> None:
    """Against the exact product: the rounding to digits, and an f32 sum's roundings of its terms."""
    got, real, left = product(runner, small, x, w).double(), w.real, x.double()
    step = packed_group(w.group) if w.group else step_of(x.shape[1])
    terms = (x.shape[1] + 4) * 2.0**-24 * (left.abs() @ real.abs().mT) + 2.0**-149
    allowed = terms + digits_bound(left, real, step, FROM_TORCH[x.dtype])
    difference = (got - left @ real.mT).abs()
    assert bool((difference <= allowed).all()), f"{(difference / allowed).max().item():.3g} of the bound"


@ON
@pytest.mark.parametrize("lhs", swept((f32, bf16), (f32,)))
@pytest.mark.parametrize(("k", "group"), [(1, 0), (67, 0), (200, 0), (96, 32), (120, 40), (512, 256)])
def test_magnitudes_far_apart_within_a_row(runner: Runner, small: Small, lhs: DType, k: int, group: int) -> None:
    """Each element has its own power of two; rows of zeros, of the tiniest and of the largest numbers beside them."""
    generator = torch.Generator().manual_seed(4)
    x = random((6, k), f32, 5) * torch.exp2(torch.randint(-30, 30, (6, k), generator=generator).float())
    x[1] = 0
    x[2] = random((k,), f32, 6) * 2.0**-120
    x[3] = random((k,), f32, 7) * 2.0**-140
    x[4] = random((k,), f32, 8).clamp(-2, 2) * 2.0**105
    check(runner, small, x.to(lhs.torch), weights(37, k, group))


@ON
@pytest.mark.parametrize("lhs", [f32, bf16])
def test_few_bits_are_exact(runner: Runner, small: Small, lhs: DType) -> None:
    """Integers, and powers of two near each other, whose sums of products an f32 holds: nothing is rounded, in bf16 either."""
    x = torch.randint(-100, 101, (3, 192), generator=torch.Generator().manual_seed(1)).float()
    x[2] = torch.exp2(torch.arange(192) % 8 - 4.0)
    w = weights(50, 192, 0)
    assert torch.equal(product(runner, small, x.to(lhs.torch), w).double(), x.double() @ w.real.mT)


@ON
@pytest.mark.parametrize("group", [0, 256])
def test_the_largest_digits_and_sums(runner: Runner, small: Small, group: int) -> None:
    """Numbers just below a power of two, where three balanced digits end, times the largest weights, all of one sign."""
    edges = [2 - 2.0**-23, 2 - 2.0**-7, 2 / (1 + 2.0**-7), 1.0, 1 + 2.0**-23, 1.98, 127 / 64]
    x = torch.tensor([[sign * edge] * 512 for edge in edges for sign in (1, -1)])
    x[:, 0] *= 2.0**-9
    ends = torch.tensor([-8, 7] if group else [-128, 127], dtype=torch.int8)
    integers = ends[:, None].expand(2, 512).contiguous()
    check(runner, small, x, Weights(integers, torch.tensor([[0.5, 3.0]] * 2) if group else None))


@ON
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("lhs", [f32, bf16])
def test_infinities_and_nan_are_those_of_float_products(runner: Runner, small: Small, lhs: DType, group: int) -> None:
    """Also several in one step, beside weights of both signs and zeros; a finite row in the same tile keeps its digits."""
    inf, nan = float("inf"), float("nan")
    x = random((8, 192), f32, 9)
    odd = [{}, {3: inf}, {3: -inf}, {3: inf, 7: -inf}, {3: inf, 100: inf}, {65: nan}, {8: inf, 9: inf}, {0: nan, 1: inf}]
    for r, places in enumerate(odd):
        for k, value in places.items():
            x[r, k] = value
    x = x.to(lhs.torch)
    w = weights(45, 192, group)
    w.integers[4:20, 3] = 0
    w.integers[:, 9] = w.integers[:, 8]
    # In f64, whose sums do not overflow; a product of infinity and zero is NaN in both.
    expected = (x.double()[:, None, :] * w.real).sum(2).float()
    got = product(runner, small, x, w)
    finite = expected.isfinite()
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())
    assert torch.equal(got[expected.isinf()], expected[expected.isinf()])
    assert bool(finite[0].all()) and not bool(finite[1:].any())
    check(runner, small, x[:1], w)
