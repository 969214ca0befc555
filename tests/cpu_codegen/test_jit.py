"""Compiling for every target, loading here, and refusing what would end the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from sashiko.cpu_codegen import intrinsics, jit, symbols
from sashiko.cpu_codegen.elf import read_symbols
from sashiko.diagnostics.errors import ArtifactError, InvalidGraph, Unsupported
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from tests.forked import succeeds

SUM = """
@table = private unnamed_addr constant [4 x i64] [i64 1, i64 20, i64 300, i64 4000], align 64
declare i64 @outside(i64)
define i64 @sum(i64 %a, i64 %b) nounwind {
  %p = getelementptr i64, ptr @table, i64 %a
  %x = load i64, ptr %p
  %y = call i64 @outside(i64 %b)
  %z = add i64 %x, %y
  ret i64 %z
}
define internal i64 @hidden() { ret i64 0 }
"""
FOREIGN = NEOVERSE_N1 if host().triple.startswith("x86") else X86_64_V3
Callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def function(library: jit.Library, name: str) -> ctypes._FuncPointer:  # type: ignore[name-defined]
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(library.address(name))


@pytest.mark.parametrize("target", CATALOGUE, ids=lambda t: t.name)
def test_compiles_for_every_target(target: Target) -> None:
    found = read_symbols(jit.compile_object(SUM, target))
    assert (found.arch, found.defined, found.undefined) == (target.arch, ("sum",), ("outside",))
    assert "sum:" in jit.assembly(SUM, target)


@pytest.mark.parametrize("cpu", ["skylake-avx512x", "neoverse-n1", "pentium4"])
def test_a_cpu_that_llvm_does_not_know_does_not_end_the_process(cpu: str) -> None:
    target = replace(X86_64_V3, cpu=cpu)
    text = "define void @f(ptr %p) { %v = load <8 x float>, ptr %p %w = fadd <8 x float> %v, %v store <8 x float> %w, ptr %p "
    text += "%old = atomicrmw add ptr %p, i64 1 seq_cst ret void }"

    def compiles() -> bool:
        return read_symbols(jit.compile_object(text, target)).undefined == () and "%ymm0" in jit.assembly(text, target)

    assert succeeds(compiles)


STRIDED = """
define void @strided(ptr %to, i64 %stride, i64 %count) nounwind {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %way = mul i64 %i, %stride
  %place = getelementptr i8, ptr %to, i64 %way
  store i64 %i, ptr %place
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %loop, label %end
end:
  ret void
}
"""


def test_strength_is_reduced_where_a_target_wants_it_and_for_others_that_use_llvm() -> None:
    def as_others_do(target: Target) -> str:
        machine = jit._machine(target.triple, target.cpu, target.llvm_features)
        with jit._Parsed(STRIDED, target, machine) as module:
            return str(machine.emit_assembly(module))

    assert not X86_64_V3.reduces_strength and NEOVERSE_N1.reduces_strength
    assert "imul" in jit.assembly(STRIDED, X86_64_V3), "multiplies in each step"
    assert "mul" not in jit.assembly(STRIDED, NEOVERSE_N1) and "madd" not in jit.assembly(STRIDED, NEOVERSE_N1)
    assert "imul" not in as_others_do(X86_64_V3)


def test_externals_are_called_wherever_they_are() -> None:
    twice = Callback(lambda v: 2 * v)
    address = ctypes.cast(twice, ctypes.c_void_p).value
    assert address is not None
    library = jit.load_object(jit.compile_object(SUM, host()), {"outside": address})
    assert function(library, "sum")(2, 50) == 400
    assert library.symbols == ("sum",)
    with pytest.raises(KeyError, match="hidden"):
        library.address("hidden")


def test_c_functions_are_found_without_being_given() -> None:
    text = "declare i64 @labs(i64)\ndefine i64 @f(i64 %a, i64 %b) { %r = call i64 @labs(i64 %a)\n ret i64 %r }"
    assert function(jit.load_object(jit.compile_object(text, host())), "f")(-5, 0) == 5


def test_what_llvm_calls_by_itself_is_found() -> None:
    text = "define void @f(ptr %a, i64 %n) { call void @llvm.memset.p0.i64(ptr %a, i8 7, i64 %n, i1 false)\n ret void }\n"
    text += "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1 immarg)"
    library = jit.load_object(jit.compile_object(text, host()))
    data = ctypes.create_string_buffer(5)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(library.address("f"))(ctypes.addressof(data), 3)
    assert data.raw == b"\7\7\7\0\0"


def test_a_missing_external_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="C function outside is not available: neither torch's libraries nor"):
        jit.load_object(jit.compile_object(SUM, host()))


def test_a_foreign_object_is_refused() -> None:
    with pytest.raises(ArtifactError, match="the object is for"):
        jit.load_object(jit.compile_object(SUM, FOREIGN))


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"MZ" * 100])
def test_what_is_no_object_is_refused(damage: bytes) -> None:
    with pytest.raises(ArtifactError):
        jit.load_object(damage)


def test_a_cut_object_is_refused() -> None:
    data = jit.compile_object(SUM, host())
    for length in (20, 70, len(data) // 2, len(data) - 100):
        with pytest.raises(ArtifactError):
            jit.load_object(data[:length])


@pytest.mark.parametrize("text", ["nonsense", "define i64 @f() { ret i32 0 }", "define void @f() { br label %nowhere }"])
def test_invalid_code_is_our_defect(text: str) -> None:
    with pytest.raises(InvalidGraph, match="not valid LLVM IR"):
        jit.compile_object(text, host())


def test_libraries_come_and_go() -> None:
    data = jit.compile_object("define i64 @f(i64 %a, i64 %b) { %r = add i64 %a, %b\n ret i64 %r }", host())
    kept = jit.load_object(data)
    for n in range(50):
        library = jit.load_object(data)
        assert function(library, "f")(n, 1) == n + 1
        assert library.address("f") != kept.address("f")
        del library
    assert function(kept, "f")(1, 2) == 3


def test_threads_may_compile_and_load_at_once() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for target in CATALOGUE:
                jit.compile_object(SUM, target)
            text = f"define i64 @f(i64 %a, i64 %b) {{ %r = add i64 %a, {seed}\n ret i64 %r }}"
            assert function(jit.load_object(jit.compile_object(text, host())), "f")(1, 0) == 1 + seed
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_forked_child_compiles_and_loads_while_its_parent_does() -> None:
    data = jit.compile_object("define i64 @f(i64 %a, i64 %b) { %r = add i64 %a, %b\n ret i64 %r }", host())
    many = "\n".join(f"define i64 @f{n}(i64 %a) {{ %r = mul i64 %a, {n}\n ret i64 %r }}" for n in range(100))
    stop = threading.Event()

    def compiling() -> None:
        while not stop.is_set():
            jit.compile_object(many, host())

    def loading() -> None:
        while not stop.is_set():
            jit.load_object(data)

    def loads() -> bool:
        library = jit.load_object(jit.compile_object(SUM.replace("@outside", "@labs"), host()))
        return bool(function(library, "sum")(2, -7) == 307)

    threads = [threading.Thread(target=compiling), threading.Thread(target=loading)]
    for thread in threads:
        thread.start()
    try:
        assert all(succeeds(loads) for _ in range(4))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_the_process_ends_cleanly_with_code_loaded() -> None:
    program = f"""
from sashiko.cpu_codegen import jit
from sashiko.platforms.host import host
kept = jit.load_object(jit.compile_object({'define i64 @f() { ret i64 3 }'!r}, host()))
print("done")
"""
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


SDOT = "declare <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)"
SMMLA = "declare <4 x i32> @llvm.aarch64.neon.smmla.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)"
BFMMLA = "declare <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float>, <8 x bfloat>, <8 x bfloat>)"
VNNI = "declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)"
VNNI_256 = "declare <8 x i32> @llvm.x86.avx512.vpdpbusd.256(<8 x i32>, <32 x i8>, <32 x i8>)"
TILE = "declare void @llvm.x86.tdpbssd(i8 immarg, i8 immarg, i8 immarg)"
TILE_BF16 = "declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)"


@pytest.mark.parametrize(
    ("text", "accepting"),
    [
        (SDOT, {"neoverse_n1", "neoverse_n2"}),
        (SMMLA, {"neoverse_n2"}),
        (BFMMLA, {"neoverse_n2"}),
        (VNNI, {"x86_64_vnni", "x86_64_amx"}),
        (VNNI_256, {"x86_64_vnni", "x86_64_amx"}),
        (TILE, {"x86_64_amx"}),
        (TILE_BF16, {"x86_64_amx"}),
        ("declare <8 x i32> @llvm.x86.avx2.madd.wd(<16 x i16>, <16 x i16>)", {"x86_64_v3", "x86_64_v4", "x86_64_vnni", "x86_64_amx"}),
        ("define void @f(<vscale x 4 x i32> %v) { ret void }", {"neoverse_n2"}),
        ('define void @f() { call void asm sideeffect "nop", ""()\n ret void }', set()),
        ("declare i32 @llvm.x86.something.new(i32)", set()),
        ("declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()", set()),
        ("declare <4 x float> @llvm.fma.v4f32(<4 x float>, <4 x float>, <4 x float>)", {t.name for t in CATALOGUE}),
    ],
)
def test_only_targets_that_have_an_instruction_get_it(text: str, accepting: set[str]) -> None:
    assert {t.name for t in CATALOGUE if not intrinsics.refusal(text, t)} == accepting


@pytest.mark.parametrize(
    ("text", "target"), [(SMMLA, NEOVERSE_N1), (VNNI, X86_64_V4), (TILE, X86_64_VNNI), (SDOT, X86_64_AMX), (VNNI, NEOVERSE_N2)]
)
def test_refusals_are_exceptions_with_a_reason(text: str, target: Target) -> None:
    with pytest.raises(Unsupported, match=target.name):
        jit.compile_object(text, target)


def test_symbols_of_torch_are_found_with_reasons_for_the_others() -> None:
    assert symbols.reasons(("GOMP_parallel", "omp_get_thread_num", "memcpy", "exp")) == {}
    assert symbols.address("no_such_function") is None
    assert list(symbols.reasons(("memcpy", "no_such_function"))) == ["no_such_function"]


def test_symbols_say_when_torch_is_not_there_yet() -> None:
    program = "from sashiko.cpu_codegen.symbols import address, find; print(find('GOMP_parallel').reason, address('memcpy') is None)"
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "torch is installed but not imported in this process False\n"
