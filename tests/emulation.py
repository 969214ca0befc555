"""Runs generated kernels on numpy arrays, in this process and, for other processors, under emulation, through one interface.

    from tests.emulation import Runner, runners

    @pytest.mark.parametrize("runner", runners())            # this machine, smaller x86 targets it can run, Neoverse N1 and N2
    def test_axpy(runner: Runner) -> None:
        ir = make_ir(runner.target)                          # LLVM IR text; an object (bytes) of runner.target is fine too
        [x, y] = runner.run(ir, "axpy", [x0, y0], ints=[n], end=n)

`run(code, symbol, arrays, ...)` calls `void symbol(ptr slots, i64 begin, i64 end)` of `cpu_codegen/contract.py` and returns copies of all
arrays as the kernel left them. What the slots hold is said in one of two ways: by `order` (the `Slots.order` or `KernelCode.slots`
of the kernel, with `dims` giving the value of each dimension symbol), or without it: the arrays in order, then `ints`.
`run_calls` makes several calls on the same arrays.

It fails the test, with the reason, when the kernel
- reads or writes beyond an array: an inaccessible page follows each array (after at most `align` - 1 bytes, which are checked for
  writes) and precedes it, so over-reads are found as well. `align` is by default the size of an element: the contract promises no more.
- executes an instruction its target does not have (emulated Neoverse N1 and x86; natively by nature),
- leaves another status word than `status`.
Arrays are C-contiguous; bfloat16 is uint16. Native calls run in a child process, so that a crash is a failed test.
The emulators and the cross compiler (which only links) are needed by tests alone; without them the test is skipped with that reason.
With TEST_ON_BOCHS in the environment, x86 targets that this machine cannot run are there, too: AVX-512 on a machine without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Union

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.contract import BufferSlot, ParamSlot, Slot
from sashiko.cpu_codegen.elf import read_symbols
from sashiko.graph.dims import evaluate
from sashiko.platforms.catalogue import NEOVERSE_N1, NEOVERSE_N2, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from tests.sweeps import left_to_sweep
from tests.vforked import TIMEOUT_S, status_of
from tests.x86 import bochs

Array = np.ndarray[Any, np.dtype[Any]]
QEMU, GCC = "qemu-aarch64-static", "aarch64-linux-gnu-gcc"
DRIVER = Path(__file__).parent / "aarch64" / "driver.c"
ON_BOCHS = "TEST_ON_BOCHS" in os.environ
_PAGE = mmap.PAGESIZE
_CANARY = 0xA5
_MEANING = {
    int(signal.SIGSEGV): "it reads or writes out of bounds",
    int(signal.SIGILL): "the target lacks an instruction",
    int(signal.SIGALRM): "it runs too long",
}
# Status words, the first array that was damaged, the arrays.
Outcome = tuple[list[int], Union[int, None], list[Array]]


@dataclass(frozen=True)
class Buffer:
    """A slot that points `offset` bytes into array `index`."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a kernel. slots: from slot 1 on, pointers into the arrays and integers."""

    symbol: str
    slots: tuple[Buffer | int, ...]
    begin: int
    end: int


class Runner(ABC):
    """What runs kernels made for `target`."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def run(
        self,
        code: str | bytes,
        symbol: str,
        arrays: Sequence[Array],
        *,
        begin: int = 0,
        end: int = 1,
        ints: Sequence[int] = (),
        order: Sequence[Slot] | None = None,
        dims: Mapping[str, int] | None = None,
        align: int = 0,
        status: int = 0,
    ) -> list[Array]:
        """One call; see the top of this file."""
        slots: list[Buffer | int] = [*map(Buffer, range(len(arrays))), *ints]
        extra: list[Array] = []
        if order is not None:
            slots = []
            for slot in order:
                if isinstance(slot, ParamSlot):
                    slots.append(Buffer(len(arrays) + len(extra)))
                    extra.append(np.array(slot.values, np.float32))
                else:
                    slots.append(Buffer(slot.index) if isinstance(slot, BufferSlot) else evaluate(slot.dim, dims or {}))
        call = Call(symbol, tuple(slots), begin, end)
        return self.run_calls(code, [*arrays, *extra], [call], align=align, status=status)[: len(arrays)]

    def run_calls(
        self, code: str | bytes, arrays: Sequence[Array], calls: Sequence[Call], *, align: int = 0, status: int = 0
    ) -> list[Array]:
        """Calls in order on the same arrays, of which copies are returned as the kernels left them."""
        for array in arrays:
            assert array.flags.c_contiguous, "arrays are C-contiguous"
        found, damaged, results = self._execute(compiled(code, self.target), arrays, calls, align)
        assert damaged is None, f"{self.target.name}: array {damaged} was written outside its bounds"
        assert found == [status] * len(calls), f"{self.target.name}: status words {found}, expected {status}"
        return results

    @abstractmethod
    def _execute(self, data: bytes, arrays: Sequence[Array], calls: Sequence[Call], align: int) -> Outcome:
        """Returns the status words, which array was damaged, and the arrays."""


@lru_cache(maxsize=256)
def compiled(code: str | bytes, target: Target) -> bytes:
    return code if isinstance(code, bytes) else jit.compile_object(code, target)


def died(target: Target, code: int) -> AssertionError:
    """The failure of a process that ended with a signal or an exit status."""
    if code < 0:
        return AssertionError(f"{target.name}: the kernel died of {signal.Signals(-code).name}: {_MEANING.get(-code, 'unexpected')}")
    return AssertionError(f"{target.name}: the process ended with status {code}")


class Guarded:
    """A copy of an array in shared memory between two inaccessible pages."""

    def __init__(self, array: Array, align: int) -> None:
        rounded = -(-array.nbytes // align) * align
        room = -(-rounded // _PAGE) * _PAGE + _PAGE
        self._map = mmap.mmap(-1, room + 2 * _PAGE)
        self._bytes: Array = np.frombuffer(self._map, np.uint8)
        self._bytes[:] = _CANARY
        self._start = _PAGE + room - rounded
        self._shape, self._dtype, self.size = array.shape, array.dtype, array.nbytes
        self._bytes[self._start : self._start + self.size] = np.frombuffer(array.tobytes(), np.uint8)
        self.address = self._bytes.ctypes.data + self._start
        libc = ctypes.CDLL(None)
        for page in (0, room + _PAGE):
            assert libc.mprotect(ctypes.c_void_p(self._bytes.ctypes.data + page), ctypes.c_size_t(_PAGE), 0) == 0

    def damaged(self) -> bool:
        around = self._bytes[_PAGE : self._start], self._bytes[self._start + self.size : -_PAGE]
        return any(bool((part != _CANARY).any()) for part in around)

    def value(self) -> Array:
        data = self._bytes[self._start : self._start + self.size].tobytes()
        value: Array = np.frombuffer(data, self._dtype).reshape(self._shape).copy()
        return value


class Native(Runner):
    """Runs kernels on this machine."""

    def _execute(self, data: bytes, arrays: Sequence[Array], calls: Sequence[Call], align: int) -> Outcome:
        library = jit.load_object(data)
        buffers = [Guarded(array, align or array.itemsize) for array in arrays]
        status = Guarded(np.zeros(2 * len(calls), np.int32), 8)
        given = []
        for n, call in enumerate(calls):
            words = [status.address + 8 * n]
            words += [slot if isinstance(slot, int) else buffers[slot.index].address + slot.offset for slot in call.slots]
            given.append((ctypes.c_int64 * len(words))(*words))
        addresses = [library.address(call.symbol) for call in calls]
        self._call([(a, ctypes.addressof(slots), c.begin, c.end) for a, slots, c in zip(addresses, given, calls)], [*buffers, status])
        damaged = next((n for n, buffer in enumerate(buffers) if buffer.damaged()), None)
        return [int(word) for word in status.value()[::2]], damaged, [buffer.value() for buffer in buffers]

    def _call(self, calls: Sequence[tuple[int, int, int, int]], buffers: Sequence[Guarded]) -> None:
        """Calls kernels: address, slots, begin and end of each."""
        code = status_of(calls)
        if code:
            raise died(self.target, code)


class Booted(Native):
    """Runs kernels for an x86 processor that this machine is not."""

    def _call(self, calls: Sequence[tuple[int, int, int, int]], buffers: Sequence[Guarded]) -> None:
        lacking = bochs.missing_tools()
        if lacking:
            pytest.skip(lacking)
        machine, near = bochs.Machine(self.target), [(buffer.address - _PAGE, buffer.size + 2 * _PAGE) for buffer in buffers]
        try:
            for address, *arguments in calls:
                machine.call(address, arguments, [(arguments[0], _PAGE), *near], shared=True)
        except bochs.NotEmulated as lacks:
            pytest.skip(str(lacks))


def not_on_bochs(runner: Runner, why: str) -> None:
    """Skips a test of what Bochs computes in another way than processors do."""
    if isinstance(runner, Booted):
        pytest.skip(f"Bochs {bochs.VERSION} {why}")


class Emulated(Runner):
    """Runs AArch64 kernels on the emulated processor that is nearest to `target`."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        # There is no model of Neoverse N2; with SVE of 128 bits and without SME, "max" is the nearest. N1 rejects what N1 lacks.
        self.cpu = "max,sve-max-vq=1,sme=off" if target.has("sve") else "neoverse-n1"

    def _execute(self, data: bytes, arrays: Sequence[Array], calls: Sequence[Call], align: int) -> Outcome:
        lacking = missing_tools()
        if lacking:
            pytest.skip(lacking)
        names = read_symbols(data).defined
        program = linked(data, self.target)
        job, result = program.with_suffix(f".{os.getpid()}.job"), program.with_suffix(f".{os.getpid()}.result")
        job.write_bytes(_job(arrays, calls, names, align))
        ran = subprocess.run([QEMU, "-cpu", self.cpu, program, job, result], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if ran.returncode:
            raise AssertionError(f"{died(self.target, ran.returncode)}\n{ran.stderr.strip()}")
        text = result.read_bytes()
        job.unlink()
        result.unlink()
        words = struct.unpack_from(f"<{len(calls) + 1}Q", text)
        at, results = 8 * len(words), []
        for array in arrays:
            results.append(np.frombuffer(text[at : at + array.nbytes], array.dtype).reshape(array.shape).copy())
            at += -(-array.nbytes // 8) * 8
        return list(words[:-1]), words[-1] - 1 if words[-1] else None, results


def _job(arrays: Sequence[Array], calls: Sequence[Call], names: tuple[str, ...], align: int) -> bytes:
    """The job file; its form is described in driver.c."""
    parts = [struct.pack("<QQ", len(arrays), len(calls))]
    for array in arrays:
        data = array.tobytes()
        parts += [struct.pack("<QQ", len(data), align or array.itemsize), data, bytes(-len(data) % 8)]
    for call in calls:
        parts.append(struct.pack("<QQqq", names.index(call.symbol), len(call.slots), call.begin, call.end))
        parts += [struct.pack("<QqQ", 0, s, 0) if isinstance(s, int) else struct.pack("<QQQ", 1, s.index, s.offset) for s in call.slots]
    return b"".join(parts)


def missing_tools() -> str:
    """Why nothing can be emulated here; empty when it can."""
    lacking = [tool for tool in (QEMU, GCC) if shutil.which(tool) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Holds the programs; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="sashiko-emulation-")


@lru_cache(maxsize=1)
def _driver() -> Path:
    path = Path(_folder().name) / "driver.o"
    subprocess.run([GCC, "-O1", "-c", DRIVER, "-o", path], check=True)
    return path


@lru_cache(maxsize=64)
def linked(data: bytes, target: Target) -> Path:
    """A static program: the driver, the object, and the table of its kernels."""
    names = read_symbols(data).defined
    pointers = ", ".join(f"ptr @{name}" for name in names)
    declared = "\n".join(f"declare void @{name}(ptr, i64, i64)" for name in names)
    table = jit.compile_object(f"@sashiko_kernels = constant [{len(names)} x ptr] [{pointers}]\n{declared}\n", target)
    program = Path(_folder().name) / hashlib.blake2b(data, digest_size=12).hexdigest()
    objects = []
    for kind, content in (("table", table), ("kernels", data)):
        objects.append(program.with_suffix(f".{kind}.o"))
        objects[-1].write_bytes(content)
    subprocess.run([GCC, "-static", "-o", program, _driver(), *objects, "-lgomp", "-lpthread", "-lm"], check=True)
    return program


def runners(*, host_only: bool = False, needs: Sequence[str] = (), few: bool = False) -> list[ParameterSet]:
    """Parameters for `@pytest.mark.parametrize("runner", runners())`: this machine, the smaller x86 targets it can run, N1 and N2, and
    with TEST_ON_BOCHS the larger ones.

    needs: features (of platforms/features.py); targets without them are left out. few: one target of each kind, for what the features
    beyond `needs` do not change: this machine, 256-bit x86, and the first AArch64 one.
    """
    machine = host()
    natives = [t for t in (machine, X86_64_V3, *([] if few else [X86_64_V4])) if not t.why_not_on(machine)]
    found: list[ParameterSet] = [pytest.param(Native(t), id=t.name) for t in natives if set(needs) <= t.features]
    others = [t for t in (X86_64_V4, X86_64_VNNI) if t.why_not_on(machine)] if ON_BOCHS and machine.arch == X86_64_V4.arch else []
    found += [pytest.param(Booted(t), id=t.name, marks=pytest.mark.bochs) for t in others if set(needs) <= t.features]
    if not host_only:
        arms = [t for t in (NEOVERSE_N1, NEOVERSE_N2) if set(needs) <= t.features]
        found += [pytest.param(Emulated(t), id=t.name, marks=pytest.mark.aarch64) for t in arms[: 1 if few else None]]
    return found


def runners_in_turn(needs: Sequence[str] = ()) -> list[ParameterSet]:
    """All of `runners`, of which `make test` takes the few and `make sweep` the others."""
    usual = [p.id for p in runners(needs=needs, few=True)]
    return [p if p.id in usual else left_to_sweep(p) for p in runners(needs=needs)]
