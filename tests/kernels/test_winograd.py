"""Convolutions by minimal filtering: every vector length, odd sizes, several images, columns that fill no tile, against exact ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet

from sashiko.graph.dims import Dim, evaluate, floordiv, mod
from sashiko.graph.types import DType, bf16, f16, f32, i8, u8
from sashiko.kernels import neon, winograd, winograd_emit, x86_vector
from sashiko.kernels.spec import BATCH, GemmSpec, Pieces, Strides
from sashiko.kernels.table import select
from sashiko.platforms.catalogue import NEOVERSE_N1, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target
from tests.emulation import Array, Runner, runners
from tests.kernels.products import M, Micros, Together, acc_of, array, kernels_of, plain_store, random
from tests.sweeps import swept

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX2 = ("avx2", "fma")
FAMILIES = ((x86_vector.fma(16), _AVX512), (x86_vector.fma(8), _AVX2), (neon.fmla(), ("neon",)))
INTEGERS = ((x86_vector.pairs(16), _AVX512), (x86_vector.pairs(8), _AVX2))
# (images, lines, places in a line, channels, columns, places from tap to tap): odd sizes, columns that fill no panel and no tile, one
# tile of few patches, patches that are interleaved, of which some have no results.
CASES = ((1, 8, 8, 16, 32, 1), (2, 7, 11, 32, 37, 1), (3, 3, 4, 24, 17, 1), (1, 2, 2, 48, 96, 1),
         (2, 7, 11, 32, 37, 2), (1, 8, 12, 16, 32, 3), (3, 5, 8, 24, 17, 2))
_Case = tuple[int, int, int, int, int, int]
_B = torch.tensor([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], dtype=torch.float64)
_G = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=torch.float64)
_A = torch.tensor([[1, 1, 1, 0], [0, 1, -1, -1]], dtype=torch.float64)


def _pairs(families: Sequence[tuple[Micros, tuple[str, ...]]] = FAMILIES) -> Iterator[ParameterSet]:
    for micros, needs in families:
        for each in runners(needs=needs, few=True):
            yield pytest.param(micros, each.values[0], id=f"{micros[0].name}-{each.id}", marks=each.marks)


def spec_of(
    lines: int, width: int, channels: int, n: int, images: int = 2, m: Dim = M, dtype: DType = f32, apart: int = 1
) -> GemmSpec:
    """Windows of 3 x 3 over images with `apart` lines and columns more on each side."""
    pitch = (width + 2 * apart) * channels
    row = mod(BATCH, width) * channels
    row = row + (floordiv(BATCH, width) * pitch if images == 1 else mod(floordiv(BATCH, width), lines) * pitch)
    row = row if images == 1 else row + floordiv(BATCH, lines * width) * ((lines + 2 * apart) * pitch)
    spread = Pieces(row, floordiv(BATCH, 3) * (apart * pitch) + mod(BATCH, 3) * (apart * channels), channels)
    pieces = Pieces(row, BATCH * pitch, 3 * channels) if apart == 1 else spread
    rhs = dtype if dtype.is_float else i8
    return GemmSpec(dtype, rhs, m, n, 9 * channels, Strides(0, 0), plain_store(n, acc_of(dtype)), lhs_pieces=pieces)


def bound(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What results may be off by: the roundings of V (2), of U (1), of the products' sums (channels), and of the sums of M (4), each of
    the magnitudes that it is made of (Higham, section 3.1). image [n, c, h, w], weight [m, c, 3, 3], f64; the result has full patches."""
    d = image.abs().unfold(2, 4, 2).unfold(3, 4, 2)
    v = torch.einsum("ia,jb,nchwab->nhwcij", _B.abs(), _B.abs(), d)
    u = torch.einsum("ia,jb,mcab->mcij", _G.abs(), _G.abs(), weight.abs())
    m = torch.einsum("nhwcij,mcij->nhwmij", v, u)
    y = torch.einsum("pi,qj,nhwmij->nhpwqm", _A.abs(), _A.abs(), m)
    return (weight.shape[1] + 8) * 2.0**-24 * y.flatten(1, 2).flatten(2, 3)


def check(result: Array, image: torch.Tensor, weight: torch.Tensor, lines: int, width: int, apart: int = 1) -> None:
    """Results that lie `apart` are those of a convolution of every so many-th line and column."""
    found = torch.from_numpy(result).double().view(image.shape[0], lines, width, -1)
    for y, x in product(range(apart), repeat=2):
        part, got = image[:, :, y::apart, x::apart], found[:, y::apart, x::apart]
        exact = torch.nn.functional.conv2d(part, weight).permute(0, 2, 3, 1)
        whole = torch.nn.functional.pad(part, (0, part.shape[3] % 2, 0, part.shape[2] % 2))
        difference = (got - exact).abs()
        assert (difference <= bound(whole, weight)[:, : got.shape[1], : got.shape[2]]).all(), f"off by {difference.max().item()}"


def check_integers(result: Array, image: torch.Tensor, weight: torch.Tensor, apart: int = 1) -> None:
    exact = torch.nn.functional.conv2d(image.double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2), dilation=apart)
    assert torch.equal(torch.from_numpy(result).double(), exact.permute(0, 2, 3, 1).flatten(0, 2))


def image_shape(case: _Case) -> tuple[int, int, int, int]:
    images, lines, width, channels, _, apart = case
    return images, lines + 2 * apart, width + 2 * apart, channels


def add(
    products: Together, micros: Micros, l2: int, case: _Case, dtype: DType, image: torch.Tensor, w: torch.Tensor,
    alike: Callable[[Array], None],
) -> None:
    """One product on a machine with so much L2; w [n, 3, 3, channels]."""
    images, lines, width, channels, n, apart = case
    spec = spec_of(lines, width, channels, n, images, M if images > 1 else lines * width, dtype, apart)
    assert spec.lhs_pieces is not None and winograd.image_of(spec.lhs_pieces, spec.k, spec.m) is not None
    why_not = winograd.why_not(products.runner.target, spec)
    assert why_not is None or (not dtype.is_float and why_not.startswith("computes")), "of integers also where it does not pay"
    code = winograd_emit.emit(products.module, replace(products.runner.target, l2=l2), spec, micros, products.name())
    packed, sizes = winograd.pack(w.reshape(n, -1), micros[0]), {"M": images * lines * width}
    assert packed.numel() == evaluate(code.packed_bytes, sizes)
    out = np.full((sizes["M"], n), 77, np.float32 if dtype.is_float else np.int32)
    products.add(kernels_of(code), products.place(array(image)), products.place(packed.numpy()), out, sizes, alike)


@pytest.mark.parametrize(("micros", "runner"), tuple(_pairs()))
@pytest.mark.parametrize("l2", [1 << 20, 1 << 16, 1 << 12])  # one block of all patches, several, and one for each patch
@pytest.mark.parametrize("dtype", swept((f32, bf16, f16), (f32,)), ids=str)
def test_results_and_their_edges(micros: Micros, runner: Runner, dtype: DType, l2: int) -> None:
    products = Together(runner)
    for case in CASES:
        _, lines, width, channels, n, apart = case
        image, w = random(image_shape(case), dtype, 1), random((n, 3, 3, channels), dtype, 2)
        alike = partial(
            check, image=image.double().permute(0, 3, 1, 2), weight=w.double().permute(0, 3, 1, 2), lines=lines, width=width, apart=apart
        )
        add(products, micros, l2, case, dtype, image, w, alike)
    products.run()


@pytest.mark.parametrize(("micros", "runner"), tuple(_pairs(INTEGERS)))
@pytest.mark.parametrize("l2", [1 << 20, 1 << 12])
@pytest.mark.parametrize("dtype", (u8, i8), ids=str)
def test_integers_are_exact(micros: Micros, runner: Runner, dtype: DType, l2: int) -> None:
    products = Together(runner)
    for case in CASES:
        image, w = random(image_shape(case), dtype, 1), random((case[4], 3, 3, case[3]), i8, 2)
        add(products, micros, l2, case, dtype, image, w, partial(check_integers, image=image, weight=w, apart=case[5]))
    products.run()


@pytest.mark.parametrize(("micros", "runner"), tuple(_pairs(INTEGERS)))
@pytest.mark.parametrize(("dtype", "number"), [(u8, 255), (i8, -128), (i8, 127)], ids=str)
def test_the_largest_integers_of_the_most_channels(micros: Micros, runner: Runner, dtype: DType, number: int) -> None:
    """Sums on the way go beyond 32 bits; four times the results, which these are made of, do not."""
    case = (1, 2, 4, 1024, 17, 1)
    products = Together(runner)
    for weight in (-128, 127):
        image = torch.full(image_shape(case), number, dtype=dtype.torch)
        w = torch.full((17, 3, 3, 1024), weight, dtype=torch.int8)
        w[::2, 1] = -1 - weight
        add(products, micros, 1 << 20, case, dtype, image, w, partial(check_integers, image=image, weight=w))
    products.run()


@pytest.mark.parametrize(("micros", "runner"), tuple(_pairs()))
def test_columns_in_groups(micros: Micros, runner: Runner) -> None:
    """Each matrix of the batch reads its own channels of the pixels, and has its own weight."""
    groups, images, side, channels, n = 3, 2, 5, 16, 21
    pixel, m = groups * channels, images * side**2
    line = (side + 2) * pixel
    row = mod(BATCH, side) * pixel + mod(floordiv(BATCH, side), side) * line + floordiv(BATCH, side**2) * ((side + 2) * line)
    pieces = Pieces(row, floordiv(BATCH, 3) * line + mod(BATCH, 3) * pixel, channels)
    body, k = plain_store(n, f32), 9 * channels
    spec = GemmSpec(f32, f32, M, n, k, Strides(BATCH * channels, 0), body, groups, lhs_pieces=pieces, weights=groups)
    assert winograd.why_not(runner.target, spec) is None
    products = Together(runner)
    code = winograd_emit.emit(products.module, runner.target, spec, micros, products.name())
    image, w = random((images, side + 2, side + 2, pixel), f32, 1), random((groups, n, 3, 3, channels), f32, 2)
    packed = torch.cat([winograd.pack(each.reshape(n, -1), micros[0]) for each in w])
    assert packed.numel() == evaluate(code.packed_bytes, {"M": m})

    def alike(result: Array) -> None:
        for g, part in enumerate(image.double().permute(0, 3, 1, 2).split(channels, 1)):
            check(result[g], part, w[g].double().permute(0, 3, 1, 2), side, side)

    out = np.full((groups, m, n), 77, np.float32)
    products.add(kernels_of(code), products.place(array(image)), products.place(packed.numpy()), out, {"M": m}, alike)
    products.run()


@pytest.mark.parametrize(("images", "apart"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_the_image_behind_the_windows(images: int, apart: int) -> None:
    spec = spec_of(5, 7, 16, 32, images, images * 35, apart=apart)
    assert spec.lhs_pieces is not None
    found = winograd.image_of(spec.lhs_pieces, 144, spec.m)
    line = (7 + 2 * apart) * 16
    assert found is not None and replace(found, step=0) == winograd.Image(7, 5, 16, line, 0, 16, apart)
    assert found.images(spec.m) == images and (images == 1 or found.step == (5 + 2 * apart) * line)


def test_what_it_is_not_for() -> None:
    spec, pitch = spec_of(6, 6, 16, 32), 8 * 16
    assert spec.lhs_pieces is not None
    uneven = Pieces(spec.lhs_pieces.row, floordiv(BATCH, 3) * pitch + mod(BATCH, 3) * 32, 16)
    strided = Pieces(floordiv(BATCH, 3) * (2 * pitch) + mod(BATCH, 3) * 32, BATCH * pitch, 48)
    apart = Pieces(spec.lhs_pieces.row, BATCH * (2 * pitch), 48)
    for other, reason in (
        (spec_of(6, 6, 16, 32, 1), "known size"),  # so many lines as there are rows
        (replace(spec, lhs_pieces=strided, m=9), "one for each place"),
        (replace(spec, lhs_pieces=apart), "one for each place"),
        (replace(spec, lhs_pieces=uneven), "one for each place"),
        (replace(spec, k=5 * 16, lhs_pieces=Pieces(spec.lhs_pieces.row, BATCH * pitch, 80)), "one for each place"),
        (replace(spec, lhs_pieces=None), "windows"),
        (replace(spec, constant_rhs=False, rhs_strides=Strides(0, 144)), "constant"),
        (spec_of(6, 6, 8, 32), "channels"),
        (spec_of(6, 6, 20, 32), "vectors"),
        (spec_of(6, 6, 2048, 32), "at most"),
        (spec_of(4, 4, 512, 512, 1, 16), "patches"),
        (spec_of(48, 48, 1024, 32, apart=12), "scratch"),
        (spec_of(6, 6, 16, 8), "columns"),
    ):
        assert reason in (winograd.why_not(X86_64_V4, other) or "")


@pytest.mark.parametrize("apart", [1, 2, 5, 12])
@pytest.mark.parametrize("micros", [micros for micros, _ in FAMILIES], ids=lambda micros: micros[0].name)
def test_what_lies_on_the_stack(micros: Micros, apart: int) -> None:
    """About as much as is allowed, however many patches are interleaved; tiles and the pages of a matrix are filled up."""
    for channels in (64, 512, 1024):
        spec = spec_of(60, 60, channels, 512, apart=apart)
        if winograd.why_not(X86_64_V4, spec) is None:
            made = winograd.plan(X86_64_V4, spec, micros)
            assert made.span % apart == 0 and winograd.POINTS * (made.matrix + made.out + made.grouped) < 5 << 18
        assert winograd.why_not(X86_64_V4, spec) is None or channels * apart > 4096


@pytest.mark.parametrize(("target", "feature"), [(X86_64_V4, "avx512_bf16"), (NEOVERSE_N1, "bf16")])
def test_the_table_prefers_it(target: Target, feature: str) -> None:
    assert select(target, spec_of(8, 8, 32, 64)).kernel.name.startswith("winograd_f32_f32")
    integers = spec_of(8, 8, 128, 64, dtype=u8)
    assert select(X86_64_V3, integers).kernel.name == "winograd_i32_u8_i8_6x16x2_avx2madd"
    assert select(X86_64_V4, integers).kernel.name == "winograd_i32_u8_i8_14x32x2_avx512madd"
    for other in (X86_64_VNNI, NEOVERSE_N1):
        assert select(other, integers).kernel.name.startswith("gemm")
    assert "1.31 times" in dict(select(X86_64_V3, spec_of(7, 7, 32, 64, dtype=u8)).refusals)["winograd_i32_u8_i8_6x16x2_avx2madd"]
    short = spec_of(8, 8, 128, 64, dtype=bf16)
    assert select(target, short).kernel.name.startswith("winograd_f32_bf16")
    assert select(X86_64_V3, short).kernel.name.startswith("winograd_f32_bf16")
    assert select(replace(target, features=target.features | {feature}), short).kernel.name.startswith("gemm")


def test_a_convolution_with_windows_that_reach_outside_the_image() -> None:
    """From the model on: padding, a bias and a residual in the epilogue, a batch that is not known."""
    import sashiko

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (torch.nn.Conv2d(32, 32, 3, padding=n, dilation=n) for n in (1, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.two(torch.relu(self.one(x))) + x)

    torch.manual_seed(0)
    model = Block().eval()
    compiled = sashiko.compile(model, (torch.randn(2, 32, 9, 11),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    assert sum(line.strip().startswith("winograd_f32") for line in sashiko.explain(compiled).splitlines()) == 2
    for batch in (1, 3, 8):
        x = torch.randn(batch, 32, 9, 11)
        with torch.no_grad():
            expected = model.double()(x.double())
            model.float()
            assert (compiled(x) - expected).abs().max() <= 2e-5 * expected.abs().max()


@torch.no_grad()
def test_what_is_no_number_stays_where_it_is_seen() -> None:
    """Under the windows that hold it, and nowhere else."""
    import sashiko

    torch.manual_seed(0)
    model = torch.nn.Conv2d(32, 32, 3, padding=1).eval()
    x = torch.randn(1, 32, 9, 10)
    compiled = sashiko.compile(model, (x,))
    for number in (float("inf"), float("nan")):
        for place in ((0, 0), (3, 4), (4, 5), (8, 9)):
            image = x.clone()
            image[0, 7, place[0], place[1]] = number
            got, expected = compiled(image), model(image)
            assert torch.equal(got.isfinite(), expected.isfinite())
            torch.testing.assert_close(got[got.isfinite()], expected[got.isfinite()], rtol=1e-4, atol=1e-5)
