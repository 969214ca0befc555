"""The machine this runs on, as a Target.

Features decide, never model names: hypervisors hide features and invent names. A feature counts when the operating system reports it,
what it requires is there too, and the kernel lets this process use it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..diagnostics import env
from ..diagnostics.errors import InputError
from . import amx
from .caches import Caches, read_caches
from .catalogue import by_name
from .features import ARM, FEATURES, X86, closed
from .target import Target

_AT_HWCAP = 16
_AT_HWCAP2 = 26
_AMX_FEATURES = frozenset(name for name in FEATURES if name.startswith("amx_"))

# Flags that LLVM takes for granted under a cpu name, and may use without being asked. Names as in /proc/cpuinfo, underscores removed.
_V2 = frozenset({"cx16", "lahflm", "popcnt", "sse41", "sse42", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512vnni", "adx", "aes", "clflushopt", "pclmulqdq", "rdseed", "3dnowprefetch"}
_SPR = _VNNI | {
    *("avx512vbmi", "avx512vbmi2", "avx512bitalg", "avx512vpopcntdq", "avx512ifma", "avx512bf16", "avx512fp16", "avxvnni"),
    *("gfni", "vaes", "vpclmulqdq", "shani", "movdiri", "movdir64b", "amxtile", "amxint8", "amxbf16"),
}
_X86_CPUS: tuple[tuple[str, frozenset[str]], ...] = (
    ("sapphirerapids", _SPR),
    ("cascadelake", _VNNI),
    ("x86-64-v4", _V4),
    ("x86-64-v3", _V3),
    ("x86-64-v2", _V2),
    ("x86-64", frozenset()),
)
_ARM_CPUS: tuple[tuple[str, frozenset[str]], ...] = (
    ("neoverse-n2", frozenset({"fp16", "dotprod", "i8mm", "bf16", "sve2"})),
    ("neoverse-n1", frozenset({"fp16", "dotprod"})),
    ("generic", frozenset()),
)
_ARM_NUMBERS = ("implementer", "part", "variant", "revision")
_TRIPLES = {"linux": "unknown-linux-gnu", "darwin": "apple-darwin", "win32": "pc-windows-msvc"}


@dataclass(frozen=True)
class HostReport:
    """What was detected. removed: features the CPU reports but this process may not use, each with the reason."""

    target: Target
    removed: tuple[tuple[str, str], ...]


def host() -> Target:
    """Returns this machine. Detected once per process; asks the kernel for AMX on the way where the CPU has it."""
    return host_report().target


@lru_cache(maxsize=1)
def host_report() -> HostReport:
    """Returns this machine with the reasons for what was left out."""
    machine = platform.machine().lower()
    caches = read_caches()
    if machine in ("aarch64", "arm64"):
        word1, word2 = _hwcaps()
        return arm_report(word1, word2, caches)
    return x86_report(_x86_flags(), caches, amx.request)


def default_target() -> Target:
    """Returns the target to compile for when the user names none: SASHIKO_TARGET, else this machine."""
    try:
        return resolve(env.target_name() or "host")
    except InputError as error:
        raise InputError(error.what, "SASHIKO_TARGET in the environment", error.hint) from None


def resolve(target: Target | str | None) -> Target:
    """Returns the target that a user's `target=` argument means: a Target, a catalogue name, "host", or None for the default."""
    if isinstance(target, Target):
        return target
    return default_target() if target is None else host() if target == "host" else by_name(target)


def x86_report(flags: frozenset[str], caches: Caches, ask_amx: Callable[[], amx.AmxPermission]) -> HostReport:
    """Returns the report of an x86-64 machine with the given /proc/cpuinfo flags. `ask_amx` is called when they include AMX."""
    plain = frozenset(flag.replace("_", "") for flag in flags)
    reported = frozenset(name for name, row in FEATURES.items() if row.arch == X86 and name.replace("_", "") in plain)
    removed = dict.fromkeys(reported - closed(reported), "a feature it requires is not reported")
    usable = closed(reported)
    if usable & _AMX_FEATURES:
        permission = ask_amx()
        if not permission.granted:
            removed |= dict.fromkeys(usable & _AMX_FEATURES, permission.reason)
            usable -= _AMX_FEATURES
    available = plain - {name.replace("_", "") for name in removed}
    cpu = next(name for name, needed in _X86_CPUS if needed <= available)
    wide = {"avx512bw", "avx512vl", "avx512dq"} <= usable
    bits = 512 if wide else 256 if "avx2" in usable else 128
    target = _target(X86, cpu, usable, bits, 32 if wide else 16, caches)
    return HostReport(target, tuple(sorted(removed.items())))


def arm_report(hwcap: int, hwcap2: int, caches: Caches) -> HostReport:
    """Returns the report of an AArch64 machine with the given words of the auxiliary vector. NEON is part of the architecture."""
    words = {1: hwcap, 2: hwcap2}
    rows = [row for row in FEATURES.values() if row.arch == ARM]
    reported = frozenset(row.name for row in rows if words[row.hwcap[0]] >> row.hwcap[1] & 1) | {"neon"}
    usable = closed(reported)
    removed = tuple((name, "a feature it requires is not reported") for name in sorted(reported - usable))
    cpu = next(name for name, needed in _ARM_CPUS if needed <= usable)
    return HostReport(_target(ARM, cpu, usable, 128, 32, caches), removed)


def _target(arch: str, cpu: str, features: frozenset[str], bits: int, registers: int, caches: Caches) -> Target:
    triple = f"{arch}-{_TRIPLES.get(sys.platform, 'unknown-unknown')}"
    return Target("host", triple, cpu, features, bits, registers, caches.l1d, caches.l2, caches.l3, caches.line)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's marketing name: for show, and to tell machines apart in caches of what was measured on them.

    On AArch64, where Linux knows none, the numbers of its first core.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    numbers = ", ".join(f"{name} {fields[f'CPU {name}']}" for name in _ARM_NUMBERS if f"CPU {name}" in fields)
    return fields.get("model name") or numbers or platform.processor() or "not named by the system"


def _x86_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the feature flags of the first CPU. py-cpuinfo starts subprocesses and takes seconds: only where /proc is missing."""
    try:
        with cpuinfo.open() as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "flags":
                    return frozenset(value.split())
    except OSError:
        pass
    import cpuinfo as py_cpuinfo

    return frozenset(py_cpuinfo.get_cpu_info().get("flags", ()))


def _hwcaps() -> tuple[int, int]:
    """Returns the two words of AArch64 feature bits; zeros (plain NEON) where the C library has no getauxval."""
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (AttributeError, OSError, TypeError):
        return 0, 0
    getauxval.restype = ctypes.c_ulong
    getauxval.argtypes = [ctypes.c_ulong]
    return getauxval(_AT_HWCAP), getauxval(_AT_HWCAP2)
