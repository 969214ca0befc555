"""The table of attention kernels: which code computes an attention on a target, and why not the rows before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cpu_codegen.builder import Module
from ..graph.types import DType, bf16, f16, f32
from ..platforms.target import Target
from .attention_amx import emit_amx
from .attention_blocks import Family, emit_blocks
from .attention_few import why_not_few
from .attention_pairs import emit_dots
from .attention_parts import emit_few_or_parts
from .attention_reference import emit_reference
from .attention_spec import AttentionCode, AttentionSpec, heads_as_queries
from .attention_vector import VectorFamily
from .attention_words import emit_words, why_not_words
from .selection import Selection, first_accepting, lacks

# Rows of scratch are on the stack; longer ones are left to the reference.
LONGEST = 1024
Emit = Callable[[Module, Target, AttentionSpec, str], AttentionCode]
When = Callable[[Target, AttentionSpec], str | None]


@dataclass(frozen=True)
class AttentionKernel:
    """One row.

    name: by the grammar attention_<dst>_<operands>_<isa>, where the kernel for few queries, by vectors of any, is "few". when: None, or the
    reason why the row does not apply. emit: adds the functions to a module under a given name.
    """

    name: str
    when: When
    emit: Emit


def select(target: Target, spec: AttentionSpec) -> Selection[AttentionKernel]:
    """Returns the first row that accepts `spec` on `target`."""
    return first_accepting(ATTENTION, target, spec)


def _row(dtype: DType, isa: str, features: tuple[str, ...], emit: Emit, refusal: When = lambda target, spec: None) -> AttentionKernel:
    """refusal: other reasons why the row does not apply."""

    def when(target: Target, spec: AttentionSpec) -> str | None:
        if spec.dtype != dtype:
            return f"computes {dtype}, not {spec.dtype}"
        missing = lacks(target, features)
        if missing:
            return missing
        longest = max(spec.depth, spec.width)
        if longest > LONGEST:
            return f"keeps rows of at most {LONGEST} elements on the stack, here they have {longest}"
        return refusal(target, spec)

    return AttentionKernel(f"attention_{dtype}_{dtype}_{isa}", when, emit)


def _blocks(family: Family) -> Emit:
    return lambda module, target, spec, name: AttentionCode(emit_blocks(module, target, heads_as_queries(spec), name, family))


def _reference(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    return AttentionCode(emit_reference(module, target, spec, name))


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_VECTORS = (("avx512", _AVX512), ("avx2", ("avx2", "fma", "f16c")), ("neon", ("neon",)))

ATTENTION: tuple[AttentionKernel, ...] = (
    *(_row(dtype, "few", (), emit_few_or_parts, why_not_few) for dtype in (f32, bf16, f16)),
    _row(bf16, "amxbf16", ("amx_bf16", *_AVX512), emit_amx),
    _row(bf16, "avx512bf16", ("avx512_bf16", *_AVX512), emit_dots),
    _row(bf16, "avx512vnni", ("avx512_vnni", *_AVX512), emit_words, why_not_words),
    _row(bf16, "avxvnni", ("avx_vnni", "avx2", "fma"), emit_words, why_not_words),
    _row(bf16, "avx2madd", ("avx2", "fma"), emit_words, why_not_words),
    _row(bf16, "bfdot", ("bf16", "neon"), emit_dots),
    *(_row(dtype, isa, features, _blocks(VectorFamily())) for dtype in (f32, bf16, f16) for isa, features in _VECTORS),
    AttentionKernel("attention_reference", lambda target, spec: None, _reference),
)
