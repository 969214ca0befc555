"""What LLVM would abort on: instructions that the target lacks.

Selecting an instruction that the processor of a target does not have ends in `LLVM ERROR: Cannot select` and `abort()` of the whole
process, so the text is checked first. Only target intrinsics (`llvm.x86.*`, `llvm.aarch64.*`), scalable vectors and inline
assembly can do that; the portable intrinsics are expanded for every target.
"""

from __future__ import annotations

import re

from ..diagnostics.errors import Unsupported
from ..platforms.features import ARM, NVPTX, X86
from ..platforms.target import Target
from .builder import I32, PTR, VOID, Function, Val, const

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_VNNI = (("avx512_vnni",), ("avx_vnni",))
# (regular expression of names, alternatives: each a tuple of features that is enough). The first row that matches decides.
Row = tuple[str, tuple[tuple[str, ...], ...]]
_ROWS: dict[str, tuple[Row, ...]] = {
    X86: (
        (r"tdpb(ss|su|us|uu)d(\.internal)?", (("amx_int8",),)),
        (r"tdpbf16ps(\.internal)?", (("amx_bf16",),)),
        (r"(ldtilecfg|sttilecfg|tilerelease|tilezero|tileloadd64|tileloaddt164|tilestored64)(\.internal)?", (("amx_tile",),)),
        (r"avx512\.vpdp(bu|ws)sds?\.512", (("avx512_vnni",),)),
        (r"avx512\.vpdp(bu|ws)sds?\.(128|256)", _VNNI),
        (r"avx512bf16\..*", (("avx512_bf16",),)),
        (r"avx512fp16\..*", (("avx512_fp16",),)),
        (r"avx512\.(vpermi2var|permvar)\.qi\..*", (("avx512_vbmi",),)),
        (r"avx512\..*", (_AVX512,)),
        (r"avx2\..*", (("avx2",),)),
        (r"(avx\.|fma\.).*", (("avx2", "fma"),)),
        (r"vcvtps2ph\..*", (("f16c",), ("avx512f",))),
        (r"sse2?\..*", ((),)),
    ),
    ARM: (
        (r"neon\.(sdot|udot)\..*", (("dotprod",),)),
        (r"neon\.(smmla|ummla|usmmla|usdot)\..*", (("i8mm",),)),
        (r"neon\.(bfmmla|bfdot|bfmlal[bt])(\..*)?", (("bf16",),)),
        (r"sve\.(smmla|ummla|usmmla|usdot)(\..*)?", (("sve", "i8mm"),)),
        (r"sve\.bf.*", (("sve", "bf16"),)),
        (r"sve\..*", (("sve",), ("sve2",))),
        (r"neon\..*", (("neon",),)),
        (r"hint", ((),)),
    ),
    NVPTX: ((r"read\.ptx\.sreg\..*|shfl\.sync\.bfly\..*|barrier0", ((),)),),
}
_PAUSE: dict[str, tuple[str, tuple[Val, ...]]] = {X86: ("llvm.x86.sse2.pause", ()), ARM: ("llvm.aarch64.hint", (const(I32, 1),))}
_PREFIX = {X86: "x86", ARM: "aarch64", NVPTX: "nvvm"}
# All begin with their letters: a text of megabytes is searched for those more than ten times as fast.
_DECLARED = re.compile(r"\ndeclare\b[^@\n]*@\"?llvm\.(x86|aarch64|nvvm|amdgcn|arm|riscv|ppc)\.([\w.]+)")
_INLINE = re.compile(r"asm\s+(sideeffect|alignstack|inteldialect|unwind|\")")
_SCALABLE = re.compile(r"vscale x\b")


def pause(fn: Function, arch: str) -> None:
    """A moment's rest for a thread that waits for a word to change: PAUSE, or YIELD."""
    name, args = _PAUSE[arch]
    fn.call(name, VOID, args)


def prefetch(fn: Function, pointer: Val, level: int = 1, writes: bool = False) -> None:
    """Asks for a line in cache level 1 or 2, for reading unless said. An address beyond the end of memory is ignored by the processor."""
    flags = [Val(I32, flag) for flag in (str(int(writes)), str(4 - level), "1")]
    fn.call("llvm.prefetch.p0", VOID, [pointer, *flags], params=[PTR, *["i32 immarg"] * 3])


def stores_done(fn: Function) -> None:
    """Makes what `Function.stream` stored visible to other threads before whatever this thread stores next. x86 only."""
    fn.call("llvm.x86.sse.sfence", VOID, [])


def refusal(ir_text: str, target: Target) -> str:
    """Returns why code for `target` cannot be generated from this LLVM IR, or an empty string when it can."""
    for match in _DECLARED.finditer("\n" + ir_text):
        prefix, name = match.groups()
        if prefix != _PREFIX[target.arch]:
            return f"llvm.{prefix}.{name} belongs to another architecture than {target.name} ({target.arch})"
        alternatives = next((needs for pattern, needs in _ROWS[target.arch] if re.fullmatch(pattern, name)), None)
        if alternatives is None:
            return f"llvm.{prefix}.{name} is not in the table of known intrinsics"
        if not any(target.has(*features) for features in alternatives):
            needs = " or ".join(" and ".join(features) for features in alternatives)
            return f"llvm.{prefix}.{name} needs {needs}, which {target.name} lacks"
    if _SCALABLE.search(ir_text) and "sve" not in target.features:
        return f"scalable vectors need sve, which {target.name} lacks"
    if _INLINE.search(ir_text):
        return "inline assembly is not accepted: a mistake in it would end the process"
    return ""


def check(ir_text: str, target: Target) -> None:
    """Raises Unsupported where `refusal` has a reason."""
    reason = refusal(ir_text, target)
    if reason:
        raise Unsupported(f"no code can be generated: {reason}", hint="choose a kernel that the target can run")
