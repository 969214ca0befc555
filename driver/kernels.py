"""The code of one compilation: kernels chosen from the tables, emitted once each, or found as an earlier compilation emitted them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..cpu_codegen import cache, jit
from ..cpu_codegen.builder import Module
from ..cpu_codegen.contract import KernelCode, ParamSlot
from ..cpu_codegen.loops import emit_loop_kernel
from ..diagnostics import env
from ..diagnostics.dump import dump_stage, say
from ..diagnostics.errors import Unsupported
from ..graph.attrs import CallAttrs
from ..graph.ir import Value
from ..kernels import attention_table, table
from ..kernels.attention_spec import AttentionCode, AttentionSpec
from ..kernels.custom import CustomKernel
from ..kernels.selection import Selection
from ..kernels.sorting import SortSpec
from ..kernels.sorting import emit as emit_sort
from ..kernels.spec import GemmCode, GemmSpec
from ..platforms.target import Target
from ..stitch.loops import LoopKernel
from .recall import Code, Spec, name_of, recalled, remember

CODE = 4
"""The level of SASHIKO_DEBUG that shows it."""

GemmChoice = Selection[table.Kernel]
AttentionChoice = Selection[attention_table.AttentionKernel]


@dataclass
class Kernels:
    """All code of one compilation. Kernels that differ only in numbers are emitted once."""

    target: Target
    custom: tuple[CustomKernel, ...] = ()
    module: Module = field(default_factory=Module)
    _calls: int = 0
    _codes: dict[Spec, Code] = field(default_factory=dict)
    _gemms: dict[GemmSpec, GemmChoice] = field(default_factory=dict)
    _attentions: dict[AttentionSpec, AttentionChoice] = field(default_factory=dict)
    _note: str = ""
    _wanted: dict[Spec, str] = field(default_factory=dict)
    _object: bytes | None = None

    def expect(self, specs: Iterable[Spec]) -> None:
        """Told, before any other call, all kernels that will be asked for, in that order: an earlier compilation may have their code.

        Not called where there are kernels of the user's: what these emit follows from no specification.
        """
        for spec in specs:
            plain = _plain(spec)
            if plain not in self._wanted:
                self._wanted[plain] = self._label(spec, plain)
        self._note = name_of(self._wanted, self.target)
        shown = env.dump_dir() is not None or env.debug_level() >= CODE  # what is recalled has no text
        found = None if shown else recalled(self._note, self._wanted)
        if found is not None:
            self._object, self._codes = found.data, dict(zip(self._wanted, found.codes, strict=True))

    def compiled(self, name: str) -> bytes:
        """The object of all kernels. name: of the compilation, for dumps."""
        if self._object is None:
            text = self.module.text()
            for number, stage, shown in ((90, "llvm", lambda: text), (91, "assembly", lambda: jit.assembly(text, self.target))):
                dump_stage(name, number, stage, shown)
                say(CODE, shown)
            self._object = cache.compiled(text, self.target)
            if self._note:
                assert list(self._codes) == list(self._wanted), "other kernels were emitted than expected"
                remember(self._note, text, self.target, self._codes)
        return self._object

    def loop(self, kernel: LoopKernel) -> KernelCode:
        key = replace(kernel, name="", params=())
        if key not in self._codes:
            named = replace(kernel, name=f"{self._name('loop', LoopKernel)}_{kernel.name}")
            say(CODE, lambda: str(named))
            self._codes[key] = emit_loop_kernel(self.module, self.target, named)
        code = self._codes[key]
        assert isinstance(code, KernelCode)
        return with_params(code, kernel.params)

    def gemm(self, spec: GemmSpec) -> tuple[GemmCode, GemmChoice]:
        key = replace(spec, params=())
        selection = self._gemm_choice(key)
        if key not in self._codes:
            name = f"{self._name('gemm', GemmSpec)}_{selection.kernel.name}"
            self._codes[key] = selection.kernel.emit(self.module, self.target, spec, name)
        code = self._codes[key]
        assert isinstance(code, GemmCode)
        columns = None if code.columns is None else with_params(code.columns, spec.params)
        return replace(code, rows=with_params(code.rows, spec.params), columns=columns), selection

    def call(self, value: Value) -> KernelCode:
        """The user's kernel for a `call`. Raises Unsupported when there is none of that name."""
        attrs = value.attrs
        assert isinstance(attrs, CallAttrs)
        found = next((k for k in self.custom if k.name == attrs.kernel), None)
        if found is None:
            raise Unsupported(f"there is no kernel {attrs.kernel!r}", value.origin, "pass it to compile(kernels=...)")
        self._calls += 1
        symbol = f"call{self._calls}_{attrs.kernel}"
        return found.emit(self.module, self.target, symbol, tuple(v.tensor for v in value.inputs), value.tensor, attrs.options)

    def attention(self, spec: AttentionSpec) -> tuple[AttentionCode, AttentionChoice]:
        key = replace(spec, params=())
        selection = self._attention_choice(key)
        if key not in self._codes:
            self._codes[key] = selection.kernel.emit(self.module, self.target, spec, self._name("attention", AttentionSpec))
        code = self._codes[key]
        assert isinstance(code, AttentionCode)
        return replace(code, run=with_params(code.run, spec.params)), selection

    def sort(self, spec: SortSpec) -> KernelCode:
        if spec not in self._codes:
            self._codes[spec] = emit_sort(self.module, self.target, spec, self._name("sort", SortSpec))
        code = self._codes[spec]
        assert isinstance(code, KernelCode)
        return code

    def _name(self, prefix: str, kind: type) -> str:
        return f"{prefix}{sum(isinstance(spec, kind) for spec in self._codes)}"

    def _label(self, spec: Spec, plain: Spec) -> str:
        """By what a kernel is emitted, or how it is called."""
        if isinstance(plain, (LoopKernel, SortSpec)):
            return spec.name if isinstance(spec, LoopKernel) else "sort"
        return (self._gemm_choice(plain) if isinstance(plain, GemmSpec) else self._attention_choice(plain)).kernel.name

    def _gemm_choice(self, plain: GemmSpec) -> GemmChoice:
        if plain not in self._gemms:
            self._gemms[plain] = table.select(self.target, plain)
        return self._gemms[plain]

    def _attention_choice(self, plain: AttentionSpec) -> AttentionChoice:
        if plain not in self._attentions:
            self._attentions[plain] = attention_table.select(self.target, plain)
        return self._attentions[plain]


def _plain(spec: Spec) -> Spec:
    """What kernels that differ only in numbers have in common."""
    return replace(spec, name="", params=()) if isinstance(spec, LoopKernel) else replace(spec, params=())


def with_params(code: KernelCode, params: tuple[float, ...]) -> KernelCode:
    """The same code for an instance with other numbers."""
    return replace(code, slots=tuple(ParamSlot(params) if isinstance(s, ParamSlot) else s for s in code.slots))
