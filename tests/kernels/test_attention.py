"""Every row of the attention table against float64, on every target that can run here."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import Module
from sashiko.graph.dims import Func, Poly, evaluate, symbols
from sashiko.graph.types import DType, QParams, bf16, f16, f32, f64, i8, u8
from sashiko.kernels.attention_amx import emit_amx
from sashiko.kernels.attention_few import emit_few, enough_keys
from sashiko.kernels.attention_score import keys_across, over, queries_across
from sashiko.kernels.attention_spec import AttentionCode, AttentionSpec, heads_as_queries
from sashiko.kernels.attention_table import ATTENTION, select
from sashiko.kernels.attention_window import conditions
from sashiko.platforms.catalogue import NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target
from tests.emulation import Runner, runners
from tests.kernels.attention_cases import CASES, MANY, MOST, STEPS, SYMBOLS, Case, Emit, check, check_quantized, problem, run
from tests.kernels.tile_emulation import tiles_on
from tests.sweeps import swept

BY_NAME = {case.name: case for case in CASES}
BY_ROW = {row.name: row for row in ATTENTION}
DOTS = replace(X86_64_V4, name="x86_64_v4_bf16", features=X86_64_V4.features | {"avx512_bf16"})
# AVX-512 is tried once: where this machine has it, by the machine itself.
MACHINES = [p for p in runners() if p.id != X86_64_V4.name]
AVX512 = runners(host_only=True, needs=["avx512bw", "avx512vl"])[:1]
PAIRS = [*runners(host_only=True, needs=["avx512_bf16"]), *runners(needs=["bf16"])]  # have instructions that multiply pairs


def selected(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    return select(target, spec).kernel.emit(module, target, spec, name)


def tiled(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    return emit_amx(module, target, spec, name, tiles_on(target))


def dotted(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    return BY_ROW[f"attention_bf16_bf16_{'bfdot' if target.has('bf16') else 'avx512bf16'}"].emit(module, target, spec, name)


def few(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    return AttentionCode(emit_few(module, target, heads_as_queries(spec), name))


def referenced(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    return ATTENTION[-1].emit(module, target, spec, name)


@pytest.mark.parametrize("runner", runners(few=True))
@pytest.mark.parametrize("case", MOST, ids=lambda case: case.name)
def test_f32(runner: Runner, case: Case) -> None:
    given = problem(case, f32)
    check(run(runner, selected, given), given)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("name", swept(
    ("bert", "keep", "odd", "decode", "window", "near", "after_past", "positions", "hidden", "sinks", "alone", "blocks", "low", *STEPS),
    ("bert", "keep", "odd", "decode", "window", "hidden", "sinks", "low"),
))
def test_bf16(runner: Runner, name: str) -> None:
    given = problem(BY_NAME[name], bf16)
    check(run(runner, selected, given), given)


@pytest.mark.parametrize("name", ["plain", "step"])
@pytest.mark.parametrize("runner", MACHINES)
def test_f16(runner: Runner, name: str) -> None:
    given = problem(BY_NAME[name], f16)
    check(run(runner, selected, given), given)


@pytest.mark.parametrize("runner", AVX512)
@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_amx(runner: Runner, case: Case) -> None:
    given = problem(case, bf16)
    check(run(runner, tiled, given), given)


@pytest.mark.parametrize("runner", PAIRS)
@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_bf16_dots(runner: Runner, case: Case) -> None:
    given = problem(case, bf16)
    check(run(runner, dotted, given), given)


@pytest.mark.parametrize("runner", runners(few=True))
@pytest.mark.parametrize("dtype", [f32, bf16, f16, f64], ids=str)
@pytest.mark.parametrize("name", ["keep", "odd"])
def test_reference_row(runner: Runner, dtype: DType, name: str) -> None:
    given = problem(BY_NAME[name], dtype)
    check(run(runner, referenced, given), given)


SIGNED, UNSIGNED = (i8, QParams((0.01,))), (u8, QParams((0.012,), 117, None, 0, 255))


@pytest.mark.parametrize("runner", runners(few=True))
@pytest.mark.parametrize(("name", "dtype", "result"), [
    ("bert", f32, SIGNED), ("odd", f16, UNSIGNED), ("grouped", bf16, UNSIGNED), ("step", f32, SIGNED), ("steps", bf16, UNSIGNED),
])
def test_results_are_quantized_as_they_are_made(runner: Runner, name: str, dtype: DType, result: tuple[DType, QParams]) -> None:
    given = problem(BY_NAME[name], dtype, quantized=result)
    for emit in (selected, referenced):
        check_quantized(run(runner, emit, given), given, result[1])


@pytest.mark.parametrize("runner", AVX512)
@pytest.mark.parametrize(("name", "result"), [("bert", UNSIGNED), ("first_keys", UNSIGNED), ("grouped", SIGNED), ("decode", UNSIGNED)])
def test_tiles_quantize_results(runner: Runner, name: str, result: tuple[DType, QParams]) -> None:
    given = problem(BY_NAME[name], bf16, quantized=result)
    check_quantized(run(runner, tiled, given), given, result[1])


@pytest.mark.parametrize("emit", [selected, few, tiled, referenced])
@pytest.mark.parametrize("runner", AVX512)
def test_nan_stays_in_its_row_and_infinite_scores_do_not_hide(runner: Runner, emit: Emit) -> None:
    """A NaN in a query makes exactly its row NaN, and so does a score of +inf, as inf - inf in a softmax does."""
    check_that_nan_stays_in_its_row(runner, emit, emit is tiled)


@pytest.mark.parametrize("runner", PAIRS)
def test_nan_stays_in_its_row_of_pairs(runner: Runner) -> None:
    check_that_nan_stays_in_its_row(runner, dotted, True)


def check_that_nan_stays_in_its_row(runner: Runner, emit: Emit, short: bool) -> None:
    given = problem(BY_NAME["plain"], bf16 if short else f32)
    q = given.arrays[0].reshape(2, 3, 20, 32)
    bits = 0x7FC0 if short else float("nan")
    q[1, 2, 5, 7] = bits
    huge = 0x7F00 if short else 2.0**127
    q[0, 1, 19] = huge
    got = run(runner, emit, given)
    broken = got.isnan().any(-1)
    assert broken[1, 2, 5] and broken[0, 1, 19] and got[1, 2, 5].isnan().all() and broken.sum() == 2


@pytest.mark.parametrize(("emit", "name"), [(selected, "sinks"), (selected, "steps"), (referenced, "sinks")])
def test_an_infinite_sink_makes_its_head_nan(emit: Emit, name: str) -> None:
    runner = MACHINES[0].values[0]
    assert isinstance(runner, Runner)
    given = problem(BY_NAME[name], f32)
    given.masks[-1].reshape(-1)[:] = np.array([np.inf, -np.inf, 0.0])[: given.case.heads]
    got = run(runner, emit, given)
    assert got[:, 0].isnan().all() and not got[:, 1:].isnan().any()


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("name", ["plain", "long"])
@pytest.mark.parametrize("runner", MACHINES)
def test_what_follows_the_keys_does_not_matter(runner: Runner, name: str, dtype: DType) -> None:
    """The number of keys is odd and the next head's are NaN, which stays in that head, be it packed before or not."""
    case = BY_NAME[name]
    given = problem(case, dtype)
    for array in given.arrays[1:]:
        array.reshape(case.batch, case.heads, case.s, -1)[:, 1] = 0x7FC0 if dtype == bf16 else float("nan")
    got = run(runner, selected, given)
    assert got[:, 1].isnan().all() and not got[:, ::2].isnan().any()


@pytest.mark.parametrize("name", [case.name for case in CASES if case.mask != "none" or case.before or case.after is not None])
def test_queries_as_columns_mean_the_same_elements(name: str) -> None:
    """The body over (head, key, query) reads what the body over (row, column) reads, at every point."""
    given = problem(BY_NAME[name], f32)
    case, moved = given.case, over(queries_across(given.spec), given.spec)
    atoms = {atom for node in moved.nodes if isinstance(node.index, Poly) for term, _ in node.index.terms for atom in term}
    divided = [atom for atom in atoms if isinstance(atom, Func) and "c" in {s.name for s in symbols(Poly((((atom,), 1),)))}]
    assert not divided, "a query is divided"
    for old, new in zip(given.spec.score.nodes, moved.nodes, strict=True):
        for head, query, key in product(range(case.batch * case.heads), range(case.m), (0, case.s // 2, case.s - 1)):
            before = evaluate(old.index, {**given.dims, "r": head * case.m + query, "c": key})
            assert before == evaluate(new.index, {**given.dims, "r": head, "c": query, "k": key})


def test_windows_of_keys_are_recognized() -> None:
    found = {}
    for case in CASES:
        spec = problem(case, f32).spec
        told, of_few = (conditions(axes, over(axes, spec)) for axes in (queries_across(spec), keys_across(spec)))
        assert told == of_few
        found[case.name] = len(told.first), len(told.last), len(told.others)
    ends = {"causal": (0, 1), "first_keys": (0, 1), **dict.fromkeys(("window", "near", "after_past", "positions", "steps"), (1, 1))}
    assert found == {case.name: (*ends.get(case.name, (0, 0)), case.mask not in ("none", "positions")) for case in CASES}


def test_few_queries_want_enough_keys() -> None:
    given = ((1, 23), (4, 24), (8, 24), (8, 32), (8, SYMBOLS["S"]))
    assert [enough_keys(*each) for each in given] == [False, True, False, True, True]


@pytest.mark.parametrize("name", ["blocks", "low"])
@pytest.mark.parametrize("runner", MACHINES)
def test_masks_in_memory_are_asked_for_the_last_key(runner: Runner, name: str) -> None:
    """A NaN among the values would become one of every row that looks at it, be its weight 0."""
    given = problem(BY_NAME[name], f32)
    case = given.case
    given.arrays[2].reshape(case.batch, case.groups, case.s, case.width)[:, :, -20:] = np.nan
    got = run(runner, selected, given)
    assert not got[:, :, :32].isnan().any() and got[:, :, -1].isnan().all()


def test_selection_tells_why() -> None:
    bf16_spec, f32_spec, f64_spec = (problem(BY_NAME["bert"], dtype).spec for dtype in (bf16, f32, f64))
    assert select(X86_64_AMX, bf16_spec).kernel.name == "attention_bf16_bf16_amxbf16"
    assert select(DOTS, bf16_spec).kernel.name == "attention_bf16_bf16_avx512bf16"
    assert select(X86_64_VNNI, bf16_spec).kernel.name == "attention_bf16_bf16_avx512vnni"
    chosen = select(replace(DOTS, features=DOTS.features | {"avx512_fp16"}), bf16_spec)
    assert chosen.kernel.name == "attention_bf16_bf16_avx512" and "half as fast" in dict(chosen.refusals)["attention_bf16_bf16_avx512bf16"]
    assert select(NEOVERSE_N2, bf16_spec).kernel.name == "attention_bf16_bf16_bfdot"
    assert select(NEOVERSE_N1, bf16_spec).kernel.name == "attention_bf16_bf16_neon"
    assert select(DOTS, f32_spec).kernel.name == "attention_f32_f32_avx512"
    chosen = select(X86_64_V4, bf16_spec)
    assert chosen.kernel.name == "attention_bf16_bf16_avx512"
    assert "no faster than floats" in dict(chosen.refusals)["attention_bf16_bf16_avx2madd"]
    chosen = select(X86_64_V3, problem(BY_NAME["odd"], bf16).spec)
    assert chosen.kernel.name == "attention_bf16_bf16_avx2"
    assert "7 queries and 11 keys" in dict(chosen.refusals)["attention_bf16_bf16_avx2madd"]
    chosen = select(X86_64_V3, bf16_spec)
    assert chosen.kernel.name == "attention_bf16_bf16_avx2madd"
    assert dict(chosen.refusals)["attention_bf16_bf16_amxbf16"] == "x86_64_v3 lacks amx_bf16, avx512f, avx512bw, avx512vl, avx512dq"
    assert select(X86_64_V4, f32_spec).kernel.name == "attention_f32_f32_avx512"
    assert select(NEOVERSE_N1, f32_spec).kernel.name == "attention_f32_f32_neon"
    step = problem(BY_NAME["parts_of_few"], bf16).spec
    assert {select(target, step).kernel.name for target in (X86_64_AMX, X86_64_V3, NEOVERSE_N1)} == {"attention_bf16_bf16_few"}
    chosen = select(X86_64_AMX, replace(step, s=23))
    assert dict(chosen.refusals)["attention_bf16_bf16_few"] == "is for more keys than 23 with 2 queries"
    chosen = select(X86_64_AMX, bf16_spec)
    assert dict(chosen.refusals)["attention_bf16_bf16_few"] == "is for 4 queries of a key at most, here there are 64"
    last = select(NEOVERSE_N1, f64_spec)
    assert last.kernel is ATTENTION[-1] and len(last.refusals) == len(ATTENTION) - 1
    wide = replace(f32_spec, width=2048)
    assert select(X86_64_V4, wide).kernel is ATTENTION[-1]


@pytest.mark.parametrize("name", ["bert", "uneven", "odd"])
def test_dots_are_instructions(name: str) -> None:
    text = assembly(DOTS, name, dotted)
    assert all(word in text for word in ("vdpbf16ps", "vcvtne2ps2bf16"))


def test_dots_take_lanes_of_registers() -> None:
    """No vector is made of a key's pair or a value's before BFDOT multiplies by it."""
    products = re.findall(r"\n\s+bfdot\s+(.*)", assembly(NEOVERSE_N2, "bert"))
    assert products and all(re.search(r"\.2h\[\d\]$", operands) for operands in products)


@pytest.mark.parametrize(("name", "packed"), [("plain", False), ("decode", False), ("bert", True), ("long", True), ("grouped", True)])
def test_values_are_packed_where_blocks_of_queries_share_them(name: str, packed: bool) -> None:
    """Not for 20 queries, which are one block."""
    code = dotted(Module(), DOTS, problem(BY_NAME[name], bf16).spec, "attention")
    assert (code.pack is not None) == packed == (code.workspace_bytes != 0)


def test_a_single_query_of_each_head_makes_a_block_of_its_group() -> None:
    """4 heads of 2 groups, one query each: a group's are one block, so nothing is packed; 40 heads of a group are two blocks."""
    for heads, groups, packed in ((4, 2, False), (80, 2, True)):
        code = dotted(Module(), DOTS, problem(Case("group", 1, heads, groups, 1, 33, 64, 64), bf16).spec, "attention")
        assert (code.pack is not None) == packed


@pytest.mark.parametrize("runner", PAIRS)
def test_values_packed_for_heads_of_a_group(runner: Runner) -> None:
    given = problem(Case("group", 1, 80, 2, 1, 33, 64, 64), bf16)
    check(run(runner, dotted, given), given)


def assembly(target: Target, name: str, emit: Emit = selected) -> str:
    module, spec = Module(), problem(BY_NAME[name], bf16).spec
    emit(module, target, spec, "attention")
    return jit.assembly(module.text(), target)


@pytest.mark.parametrize("name", ["bert", "grouped", "odd"])
def test_amx_code_uses_tiles(name: str) -> None:
    """What cannot run here is at least generated, in both forms of k."""
    module = Module()
    code = emit_amx(module, X86_64_AMX, problem(BY_NAME[name], bf16).spec, "attention")
    text = jit.assembly(module.text(), X86_64_AMX)
    assert code.pack is not None and all(word in text for word in ("ldtilecfg", "tdpbf16ps", "tilestored", "tilerelease", "vcvtne2ps2bf16"))
