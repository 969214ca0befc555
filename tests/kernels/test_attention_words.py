"""Attention in bf16 by products of 16-bit integers: what scales of rows, of columns and of blocks of keys are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import Module
from sashiko.graph.types import DType, QParams, bf16, i8, u8
from sashiko.kernels.attention_words import emit_words
from sashiko.kernels.attention_words_pack import WordLayout
from sashiko.platforms.catalogue import X86_64_V3, X86_64_VNNI
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from tests.emulation import Native, Runner, runners
from tests.kernels.attention_cases import CASES, MANY, Case, Problem, check, check_quantized, problem, run, to_array

BY_NAME = {case.name: case for case in CASES}
AVX_VNNI = replace(X86_64_V3, name="x86_64_avxvnni", features=X86_64_V3.features | {"avx_vnni"})
NARROW = [pytest.param(Native(target), id=target.name) for target in (X86_64_V3, AVX_VNNI) if not target.why_not_on(host())]
WIDE = runners(host_only=True, needs=["avx512_vnni"])
MACHINES = [*WIDE, *NARROW]
ANY = MACHINES[:1]  # for what vectors and instructions do not change


def given(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
    """The problem of a case with these operands."""
    return replace(problem(case, bf16), arrays=tuple(to_array(x.to(torch.bfloat16)) for x in (q, k, v)))


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_every_case(runner: Runner, case: Case) -> None:
    found = problem(case, bf16)
    check(run(runner, emit_words, found), found)


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize(
    ("name", "result"), [("bert", (u8, QParams((0.012,), 117, None, 0, 255))), ("grouped", (i8, QParams((0.01,))))], ids=["u8", "i8"]
)
def test_results_are_quantized_as_they_are_made(runner: Runner, name: str, result: tuple[DType, QParams]) -> None:
    found = problem(BY_NAME[name], bf16, quantized=result)
    check_quantized(run(runner, emit_words, found), found, result[1])


@pytest.mark.parametrize("runner", MACHINES)
@pytest.mark.parametrize("depth", [1, 13, 64, 1024])
def test_the_largest_sums_do_not_overflow(runner: Runner, depth: int) -> None:
    """Where all numbers are alike each is the largest integer: of every product, and of every sum of weighted values."""
    case = Case("ones", 1, 1, 1, 33, 500, depth, depth)
    ones = torch.ones(1, 1, 500, depth)
    got = run(runner, emit_words, given(case, ones[:, :, :33], -ones, -3 * ones))
    assert bool((got == -3).all())


@pytest.mark.parametrize("runner", MACHINES)
def test_many_small_weights_count_beside_one_large(runner: Runner) -> None:
    """The first key has a weight of 2^20 and each of 2000 others, which give the column that it leaves 0, one that rounds to no integer
    beside it: together they are 2^-9 of the whole. Those in the first key's own block are lost."""
    count, case = 2000, Case("sink", 1, 1, 1, 40, 2000, 32, 32)
    q, k, v = torch.zeros(1, 1, 40, 32), torch.zeros(1, 1, count, 32), torch.zeros(1, 1, count, 32)
    q[..., 0], k[0, 0, 0, 0] = 1.0, 20 * np.log(2) * 32**0.5
    v[..., 0, 0], v[..., 1:, 1] = 1.0, 1.0
    layout = WordLayout(problem(case, bf16).spec, 120)
    assert layout.most_value >= 1023
    got = run(runner, emit_words, given(case, q, k, v))
    share = 2.0**-20 * (1 + torch.tensor([0, *[1] * (count - 1)]).sum())
    assert got[..., 0].double().sub(1).abs().max() < 0.01
    assert bool((got[..., 1].double() / share > 0.85).all() and (got[..., 1].double() / share < 1.02).all())


@pytest.mark.parametrize("runner", ANY)
def test_rows_of_any_size(runner: Runner) -> None:
    """A query and a key are scaled by themselves, and so is a column of v."""
    case = BY_NAME["plain"]
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, n, 32).to(torch.bfloat16) for n in (20, 37, 37))
    sizes = 2.0 ** torch.linspace(-90, 90, 20).round()
    v_sizes = 2.0 ** torch.linspace(-100, 100, 32).round()
    plain = run(runner, emit_words, given(case, q, k, v)).double()
    by_column = run(runner, emit_words, given(case, q, k, v * v_sizes)).double() / v_sizes
    assert torch.equal(by_column, plain)
    # The largest score of a row is that of one key alone, or all are alike.
    got = run(runner, emit_words, given(case, q * sizes[:, None], k, v)).double()
    scores = (q.double() * sizes[:, None] * 32**-0.5) @ k.double().transpose(2, 3)
    wanted = torch.softmax(scores, -1) @ v.double()
    clear = sizes.log2().abs() > 9
    assert (got - wanted)[:, :, clear].abs().max() < 0.02


@pytest.mark.parametrize("runner", ANY)
def test_zeros(runner: Runner) -> None:
    case = BY_NAME["plain"]
    zeros, v = torch.zeros(2, 3, 37, 32), torch.randn(2, 3, 37, 32).to(torch.bfloat16)
    got = run(runner, emit_words, given(case, zeros[:, :, :20], zeros, v)).double()
    assert (got - v.double().mean(2, keepdim=True)).abs().max() < 0.01
    assert not run(runner, emit_words, given(case, zeros[:, :, :20], zeros, zeros)).any()


@pytest.mark.parametrize("runner", MACHINES)
def test_a_row_hidden_by_the_lowest_number_has_equal_weights(runner: Runner) -> None:
    """As in models that add it to the scores of padding: scores of that size differ from their rounded products by many octaves."""
    case = replace(BY_NAME["added"], name="lowest", m=20)
    found = problem(case, bf16)
    found.masks[0][:] = 0.0
    found.masks[0][:, 3] = -3.4028234663852886e38
    found.masks[0][:, 4] = -1.0e9
    got = run(runner, emit_words, found).double()
    v = torch.from_numpy(found.arrays[2]).view(torch.int16).view(torch.bfloat16).double()
    mean = v.view(1, 3, 50, 48).mean(2)
    assert (got[:, :, 3:5] - mean[:, :, None]).abs().max() < 0.01 and not got.isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("runner", MACHINES)
def test_what_is_no_number_stays_where_it_is(runner: Runner, value: float) -> None:
    """In a query its row, in a key its head, in v its column of the head."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 3, n, 32) for n in (20, 37, 37))
    q[0, 0, 5, 7] = k[0, 1, 3, 30] = v[1, 2, 36, 9] = value
    broken = run(runner, emit_words, given(BY_NAME["plain"], q, k, v)).isnan()
    assert broken[0, 0, 5].all() and broken[0, 1].all() and broken[1, 2, :, 9].all()
    assert broken.sum() == 32 + 20 * 32 + 20


@pytest.mark.parametrize("runner", MACHINES)
def test_a_key_that_a_mask_hides_does_not_matter(runner: Runner) -> None:
    found = problem(BY_NAME["keep"], bf16)
    keys = found.arrays[1].reshape(2, 2, 19, 80)
    keys[:, :, 4] = 0x7FC0
    found.masks[0][..., 4] = False
    got = run(runner, emit_words, found)
    assert not got.isnan().any() and bool(got[:, :, 0].any())


@pytest.mark.parametrize("target", [X86_64_VNNI, AVX_VNNI, X86_64_V3], ids=lambda target: target.name)
def test_one_instruction_for_a_product_and_its_sum(target: Target) -> None:
    """LLVM splits it into two where sums go on in a block of code, to have the last one sooner."""
    module = Module()
    emit_words(module, target, problem(BY_NAME["long"], bf16).spec, "attention")
    text = jit.assembly(module.text(), target)
    assert ("vpdpwssd" in text) != ("vpmaddwd" in text) and ("vpmaddwd" in text) == (target == X86_64_V3)
