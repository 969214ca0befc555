"""Known targets, by name. `SASHIKO_TARGET` and `target="..."` accept these; tests and inspection generate code for all of them.

Cache sizes are those of the common part of each class: Haswell to Zen 3, Skylake-SP, Cascade Lake, Sapphire Rapids, Altra, Yitian 710.
"""

from __future__ import annotations

from ..diagnostics.errors import InputError
from .target import Target

_KB = 1024
_MB = 1024 * _KB
_X86_LINUX = "x86_64-unknown-linux-gnu"
_ARM_LINUX = "aarch64-unknown-linux-gnu"
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_VNNI = _AVX512 | {"avx512_vnni"}
_AMX = _VNNI | {"avx512_vbmi", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}
_N1 = frozenset({"neon", "fp16", "dotprod"})
_N2 = _N1 | {"i8mm", "bf16", "sve", "sve2"}

X86_64_V3 = Target("x86_64_v3", _X86_LINUX, "x86-64-v3", _AVX2, 256, 16, 32 * _KB, 512 * _KB, 16 * _MB)
X86_64_V4 = Target("x86_64_v4", _X86_LINUX, "x86-64-v4", _AVX512, 512, 32, 32 * _KB, 1 * _MB, 24 * _MB)
X86_64_VNNI = Target("x86_64_vnni", _X86_LINUX, "cascadelake", _VNNI, 512, 32, 32 * _KB, 1 * _MB, 32 * _MB)
X86_64_AMX = Target("x86_64_amx", _X86_LINUX, "sapphirerapids", _AMX, 512, 32, 48 * _KB, 2 * _MB, 64 * _MB)
# SVE is 128 bits wide on Neoverse N2, so it brings no throughput over NEON there.
NEOVERSE_N1 = Target("neoverse_n1", _ARM_LINUX, "neoverse-n1", _N1, 128, 32, 64 * _KB, 1 * _MB, 32 * _MB)
NEOVERSE_N2 = Target("neoverse_n2", _ARM_LINUX, "neoverse-n2", _N2, 128, 32, 64 * _KB, 1 * _MB, 64 * _MB)

CATALOGUE: tuple[Target, ...] = (X86_64_V3, X86_64_V4, X86_64_VNNI, X86_64_AMX, NEOVERSE_N1, NEOVERSE_N2)


def by_name(name: str) -> Target:
    """Returns the target of that name; InputError when there is none."""
    for target in CATALOGUE:
        if target.name == name:
            return target
    raise InputError(f"no target is called {name!r}", hint=f"known: host, {', '.join(t.name for t in CATALOGUE)}")
