"""The instruction-set features the project knows, one row each: adding one is adding a row.

Our names follow /proc/cpuinfo on x86 and the Arm architecture on AArch64. A row says how LLVM spells it, how the operating system
reports it, what it needs, and what it is good for. Sources: Linux `arch/x86/include/asm/cpufeatures.h` and
`arch/arm64/include/uapi/asm/hwcap.h`, LLVM's `X86.td` and `AArch64Features.td`.
"""

from __future__ import annotations

from dataclasses import dataclass

X86 = "x86_64"
ARM = "aarch64"
NVPTX = "nvptx64"  # NVIDIA's GPUs: what they have follows from the target's `cpu`, their compute capability


@dataclass(frozen=True)
class Feature:
    """One feature.

    arch: the architecture it belongs to. llvm: LLVM's name of it. requires: our names of the features it needs.
    hwcap: (word, bit) of the Linux auxiliary vector on AArch64, word 1 or 2; (0, 0) elsewhere. enables: what it is used for.
    """

    name: str
    arch: str
    llvm: str
    requires: tuple[str, ...]
    hwcap: tuple[int, int]
    enables: str


def _x86(name: str, llvm: str, requires: tuple[str, ...], enables: str) -> Feature:
    return Feature(name, X86, llvm, requires, (0, 0), enables)


def _arm(name: str, llvm: str, requires: tuple[str, ...], hwcap: tuple[int, int], enables: str) -> Feature:
    return Feature(name, ARM, llvm, requires, hwcap, enables)


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_ROWS: tuple[Feature, ...] = (
    _x86("avx2", "avx2", (), "256-bit float and integer vectors"),
    _x86("fma", "fma", ("avx2",), "fused multiply-add"),
    _x86("f16c", "f16c", ("avx2",), "float16 conversion"),
    _x86("avx512f", "avx512f", ("avx2", "fma", "f16c"), "512-bit vectors, 32 registers, masks"),
    _x86("avx512bw", "avx512bw", ("avx512f",), "512-bit vectors of bytes and words"),
    _x86("avx512vl", "avx512vl", ("avx512f",), "masks on 128- and 256-bit vectors"),
    _x86("avx512dq", "avx512dq", ("avx512f",), "512-bit vectors of 64-bit integers"),
    _x86("avx512_vnni", "avx512vnni", _AVX512, "int8 dot products, 64 products an instruction"),
    _x86("avx512_vbmi", "avx512vbmi", _AVX512, "byte permutation, 256-entry tables in registers"),
    _x86("avx512_bf16", "avx512bf16", _AVX512, "bfloat16 conversion and dot products"),
    _x86("avx512_fp16", "avx512fp16", _AVX512, "float16 arithmetic"),
    _x86("avx_vnni", "avxvnni", ("avx2",), "int8 dot products without AVX-512"),
    _x86("amx_tile", "amx-tile", _AVX512, "matrix tiles, 8 registers of 16 rows by 64 bytes"),
    _x86("amx_int8", "amx-int8", ("amx_tile",), "int8 tile products, 16384 products an instruction"),
    _x86("amx_bf16", "amx-bf16", ("amx_tile",), "bfloat16 tile products, 8192 products an instruction"),
    _arm("neon", "neon", (), (1, 1), "128-bit vectors, 32 registers"),
    _arm("fp16", "fullfp16", ("neon",), (1, 10), "float16 arithmetic"),
    _arm("dotprod", "dotprod", ("neon",), (1, 20), "int8 dot products (SDOT), 16 products an instruction"),
    _arm("i8mm", "i8mm", ("dotprod",), (2, 13), "int8 matrix products (SMMLA), 32 products an instruction"),
    _arm("bf16", "bf16", ("neon",), (2, 14), "bfloat16 matrix products (BFMMLA), 16 products an instruction"),
    _arm("sve", "sve", ("neon", "fp16"), (1, 22), "predicated vectors of any length"),
    _arm("sve2", "sve2", ("sve",), (2, 1), "SVE with the integer instructions of NEON"),
)

FEATURES: dict[str, Feature] = {row.name: row for row in _ROWS}


def closed(features: frozenset[str]) -> frozenset[str]:
    """Returns the features whose requirements are present too. A hypervisor may show a feature and hide what it needs."""
    kept = features
    while True:
        smaller = frozenset(name for name in kept if set(FEATURES[name].requires) <= kept)
        if smaller == kept:
            return kept
        kept = smaller
