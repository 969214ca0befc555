"""Products of bf16 by 16-bit integers: what scales of steps are for, and what is done where one is not enough."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import Module
from sashiko.graph.types import bf16
from sashiko.kernels import gemm, x86_words
from sashiko.kernels.x86_words import WordMicro, family, most_of, pack, packing, step_of
from sashiko.platforms.catalogue import X86_64_V3, X86_64_VNNI
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from tests.emulation import Native, Runner, runners
from tests.kernels.products import Case, M, array, exact, random, spec_of

AVX_VNNI = replace(X86_64_V3, name="x86_64_avxvnni", features=X86_64_V3.features | {"avx_vnni"})
NARROW = [pytest.param(Native(target), id=target.name) for target in (X86_64_V3, AVX_VNNI) if not target.why_not_on(host())]
MACHINES = [*runners(host_only=True, needs=["avx512_vnni"]), *NARROW]
ROUNDING = 2.0**-9  # of bf16


def tiles(target: Target, k: int) -> tuple[WordMicro, ...]:
    wide = target.has("avx512_vnni")
    return family(k, 16 if wide else 8, wide or target.has("avx_vnni"))


def product(runner: Runner, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [m, k] times w [n, k] transposed, of bf16."""
    (m, k), n = x.shape, len(w)
    micros, module = tiles(runner.target, k), Module()
    code = gemm.emit(module, runner.target, spec_of(Case(m, n, k), bf16, bf16), micros, "product")
    arrays = [array(x), pack(w, micros[0].packing).numpy(), np.full((m, n), 77, np.float32)]
    return torch.from_numpy(runner.run(module.text(), "product", arrays, end=m, order=code.rows.slots, dims={"M": m})[2]).double()


def normal(m: int, k: int, seed: int) -> torch.Tensor:
    return random((m, k), bf16, seed)


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize("k", [16, 27, 64, 300, 1024])
def test_errors_are_smaller_than_those_of_bf16(runner: Runner, k: int) -> None:
    """Beside what rounding random numbers to bf16 would have cost, as a whole."""
    x, w = normal(33, k, 1), normal(70, k, 2)
    wanted = exact(x, w)
    rounded = ROUNDING / 3**0.5 * wanted.norm()
    assert (product(runner, x, w) - wanted).norm() < 0.4 * rounded


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize("size", [2.0**4, 2.0**8, 2.0**13])
def test_numbers_beside_a_much_larger_one_keep_their_digits(runner: Runner, size: float) -> None:
    """Of every other row, where the weight of the large one is 0."""
    k = 300
    x, w = normal(33, k, 1), normal(70, k, 2)
    x[::2, 150], w[:, 150] = size, 0.0
    wanted = exact(x, w)
    error = (product(runner, x, w) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max() < 1.5 * ROUNDING


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize("k", [16, 48, 80, 128, 130, 2000])
def test_the_largest_sums_do_not_overflow(runner: Runner, k: int) -> None:
    x, w = torch.full((20, k), -3.0).bfloat16(), torch.full((40, k), 5.0).bfloat16()
    assert (product(runner, x, w) / (-15.0 * k) - 1).abs().max() < 2.0**-20


@pytest.mark.parametrize("runner", MACHINES)
def test_rows_and_columns_of_any_size(runner: Runner) -> None:
    x, w = normal(20, 200, 3), normal(40, 200, 4)
    rows, columns = 2.0 ** torch.linspace(-60, 60, 20).round(), 2.0 ** torch.linspace(-60, 40, 40).round()
    found = product(runner, (x * rows[:, None]).bfloat16(), (w * columns[:, None]).bfloat16())
    wanted = exact(x, w)
    error = (found / rows[:, None] / columns - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert error.max() < ROUNDING
    assert not product(runner, torch.zeros_like(x), w).any() and not product(runner, x, torch.zeros_like(w)).any()
    small = product(runner, torch.full_like(x, 2.0**-120), w)
    assert (small.abs() <= 2.0**-99 * w.double().abs().sum(1)).all()


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize("spread", [1.0, 2.0, 4.0])
def test_what_weights_make_of_rows_counts(runner: Runner, spread: float) -> None:
    """Channels of any size that weights undo, as between layers with ReLU: a row's largest numbers are not those that matter."""
    k = 300
    sizes = torch.exp(spread * torch.randn(k, generator=torch.Generator().manual_seed(6)))
    x, w = (normal(33, k, 1) * sizes).bfloat16(), (normal(70, k, 2) / sizes).bfloat16()
    wanted = exact(x, w)
    assert (product(runner, x, w) - wanted).norm() < 0.5 * ROUNDING / 3**0.5 * wanted.norm()


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize("size", [2.0**8, 2.0**20])
def test_large_weights_of_what_is_zero_do_not_matter(runner: Runner, size: float) -> None:
    x, w = normal(33, 300, 1), normal(70, 300, 2)
    x[:, 70], w[:, 70], x[:, 71], w[:, 71] = 0.0, size, 1e6, 0.0
    wanted = exact(x, w)
    assert (product(runner, x, w) - wanted).norm() < 0.4 * ROUNDING / 3**0.5 * wanted.norm()


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row_and_column(runner: Runner, value: float) -> None:
    x, w = normal(20, 200, 3), normal(40, 200, 4)
    x[5, 150] = w[7, 20] = value
    broken = product(runner, x, w).isnan()
    assert broken[5].all() and broken[:, 7].all() and broken.sum() == 20 + 40 - 1


def test_few_numbers_are_added_to_fill_steps() -> None:
    for k in (1, 16, 27, 64, 96, 147, 192, 256, 384, 576, 768, 1000, 1152, 4096):
        step = step_of(k)
        padded = -(-k // step) * step
        assert (step % 16 == 0 and padded - k < max(16, 0.07 * k) and 64 <= step <= 128) or k < 64
        assert step * most_of(step) ** 2 < 2**31 <= step * (most_of(step) + 1) ** 2 or most_of(step) == 32767


def test_packed_weights_are_integers_times_scales() -> None:
    n, k = 37, 200
    w, form = normal(n, k, 5), packing(k)
    packed = pack(w, form)
    assert packed.numel() == form.bytes(n, k, bf16)
    step = form.group
    parts = packed[: 3 * -(-k // step) * (step + 2) * 32].view(3, -1, step + 2, 32)
    scales = parts[:, :, :2].reshape(3, -1, 64).view(torch.float32)
    words = parts[:, :, 2:].contiguous().view(torch.int16).view(3, -1, step // 2, 16, 2)
    values = (words * scales[:, :, None, :, None]).permute(0, 3, 1, 2, 4).reshape(48, -1)
    powers = packed[parts.numel() :].view(torch.float32)[:k]
    largest = (w.float().abs() / w.float().abs().amax(1, keepdim=True)).amax(0)
    assert (powers.log2() % 1 == 0).all() and (largest <= powers).all() and (2 * largest >= powers).all()
    balanced = w.float() / powers
    assert (values[:n, :k] - balanced).abs().max() <= balanced.abs().max() / (2 * most_of(step)) * 1.001
    assert not values[n:].any() and not values[:, k:].any() and words.abs().max() == most_of(step)


def test_minimal_filtering_stays_where_integers_are_not_made() -> None:
    """Few columns, many places, and machines without the instruction."""
    cases = (X86_64_VNNI, 784, 128, True), (X86_64_VNNI, 784, 32, False), (X86_64_VNNI, 3136, 128, False), (X86_64_V3, 784, 128, False)
    for target, m, n, slower in cases:
        assert (x86_words.faster_over_few_places(target, spec_of(Case(m, n, 1152), bf16, bf16, m=m)) is not None) == slower


@pytest.mark.parametrize(("n", "k"), [(37, 200), (64, 256)])
def test_a_transposed_weight_is_packed_alike(n: int, k: int) -> None:
    w = normal(n, k, 5)
    assert torch.equal(pack(w.T.contiguous().T, packing(k)), pack(w, packing(k)))


@pytest.mark.parametrize("target", [X86_64_VNNI, AVX_VNNI, X86_64_V3], ids=lambda target: target.name)
def test_one_instruction_for_a_product_and_its_sum(target: Target) -> None:
    """LLVM splits it into two where sums go on in a block of code, to have the last one sooner."""
    module = Module()
    gemm.emit(module, target, spec_of(Case(40, 70, 256), bf16, bf16, m=M), tiles(target, 256), "product")
    text = jit.assembly(module.text(), target)
    assert ("vpdpwssd" in text) != ("vpmaddwd" in text) and ("vpmaddwd" in text) == (target == X86_64_V3)
