"""The emulated x86 processor: results and memory that come back, and what is found out."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from sashiko.cpu_codegen import jit
from sashiko.platforms.catalogue import X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target
from tests.emulation import Guarded
from tests.x86.bochs import Machine, NotEmulated, missing_tools

pytestmark = pytest.mark.skipif(missing_tools() != "", reason=missing_tools())

DOUBLED = """define i64 @f(ptr %x, i64 %n, i64 %m) {
  %v = load <16 x float>, ptr %x, align 4
  %w = fadd <16 x float> %v, %v
  store <16 x float> %w, ptr %x, align 4
  %r = add i64 %n, %m
  ret i64 %r }"""
DOTS = """define i64 @f(ptr %x, i64 %n, i64 %m) {
  %v = load <16 x i32>, ptr %x, align 4
  %w = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> zeroinitializer, <16 x i32> %v, <16 x i32> %v)
  store <16 x i32> %w, ptr %x, align 4
  ret i64 0 }
  declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <16 x i32>, <16 x i32>)"""
FAR = """define i64 @f(ptr %x, i64 %n, i64 %m) {
  %p = getelementptr i8, ptr %x, i64 %n
  store i8 7, ptr %p
  ret i64 0 }"""


def loaded(text: str, target: Target) -> tuple[jit.Library, int]:
    library = jit.load_object(jit.compile_object(text, target))
    return library, library.address("f")


def test_vectors_of_avx512() -> None:
    library, address = loaded(DOUBLED, X86_64_V4)
    x = np.arange(16, dtype=np.float32)
    assert Machine(X86_64_V4).call(address, (x.ctypes.data, -7, 3)) == -4
    assert np.array_equal(x, 2 * np.arange(16))
    del library


def test_dot_products_of_bytes_and_who_lacks_them() -> None:
    library, address = loaded(DOTS, X86_64_VNNI)
    x = np.random.default_rng(0).integers(0, 128, 64).astype(np.int8)
    before = x.astype(np.int32).reshape(16, 4)
    with pytest.raises(AssertionError, match="SIGILL"):
        Machine(X86_64_V4).call(address, (x.ctypes.data, 0, 0))
    Machine(X86_64_VNNI).call(address, (x.ctypes.data, 0, 0))
    assert np.array_equal(x.view(np.int32), (before * before).sum(1))
    del library


def test_code_for_a_smaller_processor_has_no_larger_vectors() -> None:
    library, address = loaded(DOUBLED, X86_64_V4)
    x = np.zeros(16, np.float32)
    with pytest.raises(AssertionError, match="SIGILL"):
        Machine(X86_64_V3).call(address, (x.ctypes.data, 0, 0))
    del library


def test_a_gather_that_only_bochs_lacks() -> None:
    """vgatherqps ymm14{k1}, [rcx + zmm2 * 4], where no lane is wanted, and the same with zmm18."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    gathers = [bytes.fromhex(f"62 72 7d {v} 93 34 91 c3") for v in ("49", "41")]
    memory[: len(gathers[0])] = gathers[0]
    Machine(X86_64_VNNI).call(address, ())
    memory[: len(gathers[1])] = gathers[1]
    with pytest.raises(NotEmulated, match="gathers"):
        Machine(X86_64_VNNI).call(address, ())


def test_memory_that_is_touched_far_away_comes_and_goes_back() -> None:
    library, address = loaded(FAR, X86_64_V3)
    x = np.zeros(64 << 20, np.int8)
    Machine(X86_64_V3).call(address, (x.ctypes.data, x.size - 1, 0))
    assert x[-1] == 7
    assert np.count_nonzero(x) == 1
    del library


def test_memory_that_is_not_there() -> None:
    library, address = loaded(FAR, X86_64_V3)
    array = Guarded(np.zeros(16, np.int8), 1)
    with pytest.raises(AssertionError, match="out of bounds"):
        Machine(X86_64_V3).call(address, (array.address, 16, 0))
    del library


def test_memory_of_this_process_alone_is_not_written_where_a_child_would_write() -> None:
    library, address = loaded(FAR, X86_64_V3)
    own, shared = np.zeros(16, np.int8), Guarded(np.zeros(16, np.int8), 1)
    for at in (own.ctypes.data, shared.address):
        Machine(X86_64_V3).call(address, (at, 3, 0), shared=True)
    assert not own.any()
    assert shared.value()[3] == 7
    del library


def test_code_that_must_not_be_written() -> None:
    library, address = loaded(FAR, X86_64_V3)
    before = ctypes.string_at(address, 16)
    with pytest.raises(AssertionError, match="not to be written"):
        Machine(X86_64_V3).call(address, (address, 15, 0))
    assert ctypes.string_at(address, 16) == before
    del library
