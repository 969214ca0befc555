"""A target machine as a value.

Code is generated for a `Target`, never for "this machine", so that AArch64 code is made and inspected on x86 and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..diagnostics.errors import InputError
from .features import ARM, FEATURES, NVPTX, X86, Feature, closed

# LLVM's names of processors with AVX2 and one unit for VPMADDWD.
_ONE_MADD = ("haswell", "broadwell", "znver1", "znver2")
# What every machine has, and LLVM takes from the cpu alone: where it does not know the cpu, it would end the process for want of it.
_BASE = {X86: ("64bit", "cmov", "cx8", "sse2", "x87")}


@dataclass(frozen=True)
class Target:
    """A machine to generate code for.

    name: ours, as in the catalogue, or "host". triple, cpu: LLVM's; where it does not know the cpu it warns, and generates code by the
    features alone. features: our names, see `features.py`; the set must hold what its members require. vector_bits: width of the
    vectors to use. registers: how many vector registers there are. l1d, l2: bytes of one core. l3: bytes, shared; 0 when there is none
    or it is unknown. cache_line: bytes.
    """

    name: str
    triple: str
    cpu: str
    features: frozenset[str]
    vector_bits: int
    registers: int
    l1d: int
    l2: int
    l3: int
    cache_line: int = 64

    def __post_init__(self) -> None:
        unknown = self.features - FEATURES.keys()
        if unknown:
            raise InputError(f"target {self.name!r} has unknown features {sorted(unknown)}", hint="features.py lists the known ones")
        foreign = sorted(name for name in self.features if FEATURES[name].arch != self.arch)
        if foreign:
            raise InputError(f"target {self.name!r} is {self.arch} but has the features {foreign} of another architecture")
        lacking = sorted(self.features - closed(self.features))
        if lacking:
            needs = "; ".join(f"{name} needs {', '.join(FEATURES[name].requires)}" for name in lacking)
            raise InputError(f"target {self.name!r} lacks what its features require: {needs}")

    @cached_property
    def arch(self) -> str:
        """'x86_64', 'aarch64' or 'nvptx64'. Ask `has(...)` instead wherever a feature is what matters."""
        first = self.triple.split("-", 1)[0]
        arch = {"x86_64": X86, "aarch64": ARM, "arm64": ARM, "nvptx64": NVPTX}.get(first)
        if arch is None:
            what = f"target {self.name!r}: no support for the architecture of {self.triple!r}"
            raise InputError(what, hint="x86_64, aarch64 and nvptx64 are supported")
        return arch

    @cached_property
    def known_features(self) -> tuple[Feature, ...]:
        """Every feature that a machine of this architecture may have, present here or not."""
        return tuple(row for row in FEATURES.values() if row.arch == self.arch)

    def has(self, *features: str) -> bool:
        """Returns whether all the named features are present. A name that no row of `features.py` has is an InputError, not False."""
        for name in features:
            if name not in FEATURES:
                raise InputError(f"unknown feature {name!r}", hint=f"known: {', '.join(FEATURES)}")
        return self.features.issuperset(features)

    def lanes(self, bits: int) -> int:
        """Returns how many elements of `bits` bits one vector holds."""
        return self.vector_bits // bits

    @cached_property
    def lookup_entries(self) -> int:
        """How many f32 numbers the table may have that one instruction looks up in registers for every lane: 0 where none does.

        VPERMT2PS has a table of two registers, VPERMPS of one. TBL of NEON looks up bytes; tables of more than two registers take
        it three or four times as long (LLVM's models of Neoverse N1 and N2, as llvm-mca shows them).
        """
        if self.has("neon"):
            return 2 * self.lanes(32)
        if self.has("avx512f", "avx512bw", "avx512vl", "avx512dq") and self.vector_bits == 512:
            return 2 * self.lanes(32)
        return self.lanes(32) if self.has("avx2", "fma") and self.vector_bits == 256 else 0

    @cached_property
    def masked_memory(self) -> bool:
        """Whether loads and stores of any element width take a lane mask at full speed (AVX-512 mask registers).

        AVX2 masks 32- and 64-bit elements only, and LLVM scalarizes masked NEON accesses: tails are done otherwise there.
        """
        return self.has("avx512bw", "avx512vl")

    @cached_property
    def sums16(self) -> bool:
        """Whether its fastest products of bytes add four of them in 16 bits before they are added in 32, for weights that are small enough
        for it (`graph.sums16`): VPMADDUBSW, where there is no dot product of bytes."""
        return self.has("avx2", "fma") and not (self.vnni or self.has("amx_int8"))

    @cached_property
    def vnni(self) -> bool:
        """Whether one instruction multiplies four bytes, or a pair of 16-bit integers, in each lane of 32 bits and adds them up: VPDPBUSD
        and VPDPWSSD."""
        return any(self.has(name) for name in ("avx512_vnni", "avx_vnni"))

    @cached_property
    def byte_dots(self) -> bool:
        """Whether there is an instruction for the dot product of four unsigned bytes with four signed ones in each lane of 32 bits."""
        return self.vnni or self.has("i8mm")

    @cached_property
    def halves_vectors(self) -> bool:
        """Whether an operation on 512 bits takes a unit of 256 twice, so that vectors of 256 are as fast: Zen 4, which is known by what it
        has and has not. (Cooper Lake is taken for one.)"""
        return self.has("avx512_bf16") and not any(self.has(name) for name in ("avx512_fp16", "avx_vnni"))

    @cached_property
    def golden_cove(self) -> bool:
        """Whether its cores are Intel's of Sapphire Rapids or later ones, known by what came with them: tiles, which hypervisors and old
        kernels hide, or half-precision arithmetic of vectors. (Others' cores that have it are taken for them.)"""
        return self.has("amx_tile") or self.has("avx512_fp16")

    @cached_property
    def bf16_dots(self) -> bool:
        """Whether vectors' dot products of bf16 pairs are twice as fast as multiply-adds of f32. In Golden Cove they are half as fast:
        109 GFLOPS against 217 by bf16 that is widened to f32 (measured on Emerald Rapids)."""
        return self.has("avx512_bf16") and not self.golden_cove

    @cached_property
    def word_pairs(self) -> bool:
        """Whether products of pairs of 16-bit integers, added in 32 bits, take less time than multiply-adds of f32: VPDPWSSD does as many
        pairs at a time as VFMADD numbers, and in vectors of 256 bits VPMADDWD and VPADDD share more units than VFMADD has, but in the
        processors that have a single one for VPMADDWD."""
        return self.vnni or (self.has("avx2", "fma") and self.vector_bits == 256 and self.cpu not in _ONE_MADD)

    @cached_property
    def tiles(self) -> int:
        """How many matrix tile registers there are: 8 with AMX, else 0."""
        return 8 if self.has("amx_tile") else 0

    @cached_property
    def llvm_features(self) -> str:
        """LLVM's feature string. Absent features are switched off by name, since `cpu` may imply them.

        Wide vectors are asked for explicitly, so LLVM must not halve them: hence -prefer-256-bit.
        """
        off = [f"-{row.llvm}" for row in self.known_features if row.name not in self.features]
        on = [f"+{row.llvm}" for row in self.known_features if row.name in self.features]
        wide = ["-prefer-256-bit"] if self.has("avx512f") else []
        base = [f"+{name}" for name in _BASE.get(self.arch, ())]
        # Off first: switching a feature off in LLVM also switches off what depends on it.
        return ",".join(off + base + on + wide)

    @property
    def usual_schedule(self) -> str:
        """Which way LLVM by itself goes through straight-line code to order it, in its own words."""
        return "bottomup" if self.arch == "x86_64" else "bidirectional"

    @cached_property
    def schedule(self) -> str:
        """Which way it shall go. From the bottom up, chains of operations that are written side by side are put one after the other where
        there are 16 registers, to need fewer of them, and a processor waits for every step of each."""
        return "topdown" if self.registers <= 16 else self.usual_schedule

    @property
    def reduces_strength(self) -> bool:
        """Whether LLVM shall look for what addresses are best stepped by in each loop. It takes long, and x86-64, whose addresses have
        a base, a scaled index and a number, gains little by it (`docs/math.md`)."""
        return self.arch != "x86_64"

    @cached_property
    def key(self) -> str:
        """Text that is equal for two targets exactly when the same code is generated for both; for cache keys. The name is not in it."""
        sizes = f"{self.vector_bits}x{self.registers} {self.l1d}/{self.l2}/{self.l3}/{self.cache_line}"
        return f"{self.triple} {self.cpu} {','.join(sorted(self.features))} {sizes}"

    def why_not_on(self, machine: Target) -> str:
        """Returns why code made for this target cannot run on `machine`, or an empty string when it can."""
        if self.arch != machine.arch:
            return f"{self.name} is {self.arch}, this machine is {machine.arch}"
        missing = sorted(self.features - machine.features)
        return f"this machine lacks {', '.join(missing)}" if missing else ""
