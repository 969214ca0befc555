"""Calls functions of this process on an x86 processor that this machine is not: Bochs emulates one, on which nothing but the call runs.

    Machine(X86_64_VNNI).call(address, (pointer, 0, 16))

The call sees the memory of this process at the same addresses. What it touches is copied as it asks for it: an access to a page that is
not there yet ends the attempt, and the next one starts over with that page and some around it. At the end the bytes that it changed are
written back. It has one thread, and no operating system. An AssertionError tells of an access to memory that this process does not have,
or may not read, and of an instruction that the processor lacks; NotEmulated of one that only Bochs lacks.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

from sashiko.platforms.catalogue import X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target

BOCHS, VERSION = "bochs", "2.7"
# The processor of this Bochs that has what a target has, and as little more as there is.
MODELS = {X86_64_V3: "corei7_haswell_4770", X86_64_V4: "corei7_skylake_x", X86_64_VNNI: "corei7_icelake_u"}
TIMEOUT_S = 300
_SOURCE = Path(__file__).parent / "boot.S"
_TRIPLE = "x86_64-unknown-linux-gnu"
_PAGE, _LARGE_PAGE, _BLOCK, _MB = 1 << 12, 1 << 21, 1 << 17, 1 << 20
# Physical addresses. The first two megabytes that are not tables are the stack's and the job's, from _UPPER on in virtual ones.
_TABLES, _LAST_TABLE, _STACK, _JOB, _PAGES = 0x100000, 0x400000, 0x400000, 0x600000, 0x800000
_END_OF_MEMORY, _ROM = 0x104000, 0xFFE00000
_UPPER = 0xFFFFFFFF80000000
_TABLES_SEEN = _UPPER + 2 * _LARGE_PAGE  # where the job finds the memory of the tables
_FAULTS, _FAULT_BYTES, _INTERRUPTS, _INTERRUPT_TABLE = 0xFFFF8000, 16, 32, _JOB + 0x1F0000
_CALLED, _FAILED = b"\0SASHIKO CALLED\0", b"\0SASHIKO FAILED\0"
_PAGE_FAULT, _INVALID_OPCODE = 14, 6
_PRESENT, _LARGE = 3, 0x83
_NO_PORT, _MOST_STARTS = b"could not bind any port", 60  # its screen is served on one of 50 ports, which others may have
_FIRST_WINDOW, _LAST_WINDOW, _MOST_ATTEMPTS = 1 << 17, 1 << 24, 200


@dataclass(frozen=True)
class _Mapping:
    """A range of this process's memory. rights: as the kernel writes them, such as rw-p."""

    start: int
    end: int
    rights: str


@lru_cache(maxsize=1)
def missing_tools() -> str:
    """Why nothing can be emulated here; empty when it can. Other versions have other settings, and other processors."""
    if platform.machine() != "x86_64":
        return "code for x86 cannot be loaded here"
    if shutil.which(BOCHS) is None:
        return f"not installed: {BOCHS}"
    says = subprocess.run([BOCHS, "--help"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    found = re.search(r"Emulator (\d+\.\d+)", says.stdout + says.stderr)
    return "" if found and found[1] == VERSION else f"{BOCHS} {VERSION} is needed, and this is {found[1] if found else 'another'}"


class NotEmulated(Exception):
    """An instruction that the processor has, and Bochs does not."""


class Machine:
    """A processor that runs what is compiled for `target`, and less than that of this machine may."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def call(self, function: int, arguments: Sequence[int], near: Iterable[tuple[int, int]] = (), *, shared: bool = False) -> int:
        """What the function at that address returns, an integer of 64 bits.

        near: addresses, and how many bytes from there on, that the call will touch: each that is told saves an attempt.
        shared: write back to memory only that is shared with other processes, as a child of this one would.
        """
        mappings = list(_mappings())
        pages: dict[int, bytes] = {}
        windows: dict[int, int] = {}
        for address, size in ((function - _FIRST_WINDOW, 2 * _FIRST_WINDOW), *near):
            _include(pages, mappings, address, size)
        for _ in range(_MOST_ATTEMPTS):
            answer = self._attempt(pages, function, arguments)
            if answer.startswith(_CALLED):
                return _write_back(pages, mappings, answer[len(_CALLED) :], shared)
            address = self._missing(answer)
            held = _holding(mappings, address)
            assert held is not None, f"{self._target.name}: SIGSEGV: it reads or writes out of bounds, at {address:#x}"
            size = windows.get(held.start, _FIRST_WINDOW)
            windows[held.start] = min(2 * size, _LAST_WINDOW)
            assert _include(pages, mappings, address - size // 4, size, held), f"{self._target.name}: it may not write at {address:#x}"
        raise AssertionError(f"{self._target.name}: it touches memory at more than {_MOST_ATTEMPTS} places")

    def _missing(self, answer: bytes) -> int:
        """The address that an attempt ended at for lack of a page. Raises AssertionError or NotEmulated for another end."""
        address, number, _, place = struct.unpack_from("<4Q", answer, len(_FAILED))
        if number == _INVALID_OPCODE:
            code = ctypes.string_at(place, 15)
            if _is_gather_by_a_high_register(code):
                raise NotEmulated(f"{BOCHS} {VERSION} has no gathers with indices in the registers from zmm16 on")
            raise AssertionError(f"{self._target.name}: SIGILL: the target lacks an instruction, or {BOCHS} does: {code.hex(' ')}")
        assert number == _PAGE_FAULT, f"{self._target.name}: exception {number} at {place:#x}"
        return int(address)

    def _attempt(self, pages: dict[int, bytes], function: int, arguments: Sequence[int]) -> bytes:
        """What the machine says after it was started with these pages: from the words _CALLED or _FAILED on."""
        with tempfile.TemporaryDirectory(prefix="sashiko-bochs-") as folder:
            image = _image(pages, function, arguments, 0xE7 if self._target.has("avx512f") else 7)
            Path(folder, "ram").write_bytes(image)
            Path(folder, "rom").write_bytes(_firmware())
            Path(folder, "settings").write_text(_settings(folder, MODELS[self._target], len(image)), encoding="utf-8")
            command = [BOCHS, "-q", "-f", f"{folder}/settings"]
            for _ in range(_MOST_STARTS):
                # Builds with a debugger wait for its command to go on.
                ran = subprocess.run(command, input=b"c\n", capture_output=True, timeout=TIMEOUT_S, check=False)
                for words in (_CALLED, _FAILED):
                    if words in ran.stdout:
                        return ran.stdout[ran.stdout.index(words) :]
                if _NO_PORT not in ran.stdout + ran.stderr:
                    break
                time.sleep(1)
        raise AssertionError(f"{BOCHS} did not come to the call: {ran.stdout[-1000:]!r} {ran.stderr[-1000:]!r}")


def _settings(folder: str, model: str, size: int) -> str:
    megabytes = 1 << (-(-size // _MB) + 1).bit_length()
    return f"""megs: {max(megabytes, 32)}
cpu: model={model}, ips=100000000, reset_on_triple_fault=0
romimage: file={folder}/rom
optramimage1: file={folder}/ram, address={_TABLES:#x}
port_e9_hack: enabled=1
display_library: rfb, options="timeout=0"
log: {folder}/log
panic: action=fatal
plugin_ctrl: unmapped=1, biosdev=0, speaker=0, extfpuirq=0, parallel=0, serial=0, iodebug=0
"""


def _is_gather_by_a_high_register(code: bytes) -> bool:
    """Whether code begins with an EVEX prefix without V', map 0F38, and the operation of a gather or scatter."""
    return code[0] == 0x62 and code[1] & 7 == 2 and not code[3] & 8 and code[4] in (*range(0x90, 0x94), *range(0xA0, 0xA4))


@lru_cache(maxsize=1)
def _firmware() -> bytes:
    """boot.S, assembled: the section of code of an object that has nothing to link."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    lines = [line.split("#")[0].rstrip() for line in _SOURCE.read_text(encoding="utf-8").splitlines()]
    quoted = (line.replace("\\", "\\5C").replace('"', "\\22") for line in lines if line)
    text = f'target triple = "{_TRIPLE}"\n' + "".join(f'module asm "{line}"\n' for line in quoted)
    data = bytes(llvm.Target.from_triple(_TRIPLE).create_target_machine().emit_object(llvm.parse_assembly(text)))
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, table + size * n) for n in range(count)]
    start = sections[names][4]
    code = [s for s in sections if data[start + s[0] :].startswith(b".text\0")]
    assert len(code) == 1 and not any(data[start + s[0] :].startswith(b".rela") for s in sections)
    return data[code[0][4] : code[0][4] + code[0][5]]


def _image(pages: dict[int, bytes], function: int, arguments: Sequence[int], xcr0: int) -> bytes:
    """The memory from _TABLES on: tables, stack, job, the pages."""
    order = sorted(pages)
    end = -(-(_PAGES + _PAGE * len(order)) // _BLOCK) * _BLOCK
    image = bytearray(end - _TABLES)

    def put(address: int, data: bytes) -> None:
        image[address - _TABLES : address - _TABLES + len(data)] = data

    tables = _Tables()
    tables.map(_ROM, _ROM, large=True)
    tables.map(_UPPER, _STACK, large=True)
    tables.map(_UPPER + _LARGE_PAGE, _JOB, large=True)
    for n in range(2):
        tables.map(_UPPER + (n + 2) * _LARGE_PAGE, n * _LARGE_PAGE, large=True)
    places = []
    for n, page in enumerate(order):
        places += [page, _TABLES_SEEN + tables.map(page, _PAGES + n * _PAGE)]
        put(_PAGES + n * _PAGE, pages[page])
    for address, table in tables.entries.items():
        put(address, b"".join(struct.pack("<Q", table.get(n, 0)) for n in range(512)))
    put(_END_OF_MEMORY, struct.pack("<Q", end))
    for n in range(_INTERRUPTS):
        handler = _FAULTS + _FAULT_BYTES * n
        put(_INTERRUPT_TABLE + 16 * n, struct.pack("<HHBBHII", handler & 0xFFFF, 24, 0, 0x8E, handler >> 16, 0, 0))
    words = [xcr0, function, *(a & 2**64 - 1 for a in (*arguments, 0, 0, 0)[:3]), *places, 0, 0]
    assert 8 * len(words) < _LARGE_PAGE // 2, "too many pages"
    put(_JOB, struct.pack(f"<{len(words)}Q", *words))
    return bytes(image)


class _Tables:
    """Tables of pages of four levels, by their addresses. Source: Intel's manual, volume 3, section 4.5."""

    def __init__(self) -> None:
        self.entries: dict[int, dict[int, int]] = {_TABLES: {}}
        self._next = 0x110000

    def map(self, virtual: int, physical: int, large: bool = False) -> int:
        """Puts a page there, and returns where its entry is."""
        table = _TABLES
        for shift in (39, 30) if large else (39, 30, 21):
            table = self._below(table, virtual >> shift & 511)
        index = virtual >> (21 if large else 12) & 511
        self.entries[table][index] = physical | (_LARGE if large else _PRESENT)
        return table + 8 * index

    def _below(self, table: int, index: int) -> int:
        if index not in self.entries[table]:
            self.entries[self._next] = {}
            self.entries[table][index] = self._next | _PRESENT
            self._next += _PAGE
            assert self._next <= _LAST_TABLE, "too many tables of pages"
        return self.entries[table][index] & ~(_PAGE - 1)


def _mappings() -> Iterator[_Mapping]:
    """The memory of this process that it may read."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (r\S+) (?!.*\[v)", line)  # not what the kernel lends: [vvar], [vsyscall]
        if found:
            yield _Mapping(int(found[1], 16), int(found[2], 16), found[3])


def _holding(mappings: Sequence[_Mapping], address: int) -> _Mapping | None:
    return next((m for m in mappings if m.start <= address < m.end), None)


def _include(pages: dict[int, bytes], mappings: Sequence[_Mapping], address: int, size: int, held: _Mapping | None = None) -> int:
    """Copies the pages of `size` bytes from `address` on that there are, of one mapping or all of them; returns how many are new."""
    before = len(pages)
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for m in mappings if held is None else (held,):
            for page in range(max(m.start, address // _PAGE * _PAGE), min(m.end, address + size), _PAGE):
                if page not in pages:
                    with suppress(OSError):  # what lies near may have been given back since the mappings were listed
                        pages[page] = os.pread(memory.fileno(), _PAGE, page)
    return len(pages) - before


def _write_back(pages: dict[int, bytes], mappings: Sequence[_Mapping], report: bytes, shared: bool) -> int:
    """Makes the call's changes in this process, byte by byte: others may have been made here meanwhile. Returns the call's result."""
    at = 8
    while page := struct.unpack_from("<Q", report, at)[0]:
        after, held = report[at + 8 : at + 8 + _PAGE], _holding(mappings, page)
        at += 8 + _PAGE
        if held is None or (shared and not held.rights.endswith("s")):
            continue
        differ = np.flatnonzero(np.frombuffer(after, np.uint8) != np.frombuffer(pages[page], np.uint8))
        assert held.rights[1] == "w" or not differ.size, f"it writes to memory that is not to be written, at {page:#x}"
        for run in np.split(differ, np.flatnonzero(np.diff(differ) != 1) + 1) if differ.size else ():
            ctypes.memmove(page + int(run[0]), after[int(run[0]) : int(run[-1]) + 1], len(run))
    return int(struct.unpack_from("<q", report)[0])
