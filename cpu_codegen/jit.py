"""LLVM IR text to machine code, and machine code into this process. The only file that imports llvmlite.

No LLVM pass pipeline runs: the generator writes vector code, on which it was measured to double the time of compilation and to gain
nothing (`docs/math.md`). Code is position-independent and of the small code model, so one object serves loading here and linking elsewhere.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import llvmlite
import llvmlite.binding as llvm

from ..diagnostics.errors import ArtifactError, InvalidGraph, Unsupported
from ..diagnostics.forks import never_inside
from ..platforms.host import host
from ..platforms.target import Target
from . import intrinsics, symbols
from .elf import read_symbols

OPT = 1  # LLVM's codegen level: 0 was measured 20 to 30 % slower to run, 2 and 3 no faster
_LLVM = never_inside()  # around all that LLVM does, since llvmlite has a lock that a forked child would find taken
_NAMES = itertools.count()


def versions() -> str:
    """Returns llvmlite's and LLVM's versions; part of every cache key."""
    return f"llvmlite {llvmlite.__version__} LLVM {'.'.join(map(str, llvm.llvm_version_info))}"


def compile_object(ir_text: str, target: Target) -> bytes:
    """Returns the ELF object of a module of LLVM IR text.

    Unsupported when the text uses an instruction that the target lacks; InvalidGraph when it is not valid LLVM IR.
    """
    with _emitting(target) as machine, _Parsed(ir_text, target, machine) as module:
        return bytes(machine.emit_object(module))


def assembly(ir_text: str, target: Target) -> str:
    """Returns the assembly text of what `compile_object` makes."""
    with _emitting(target) as machine, _Parsed(ir_text, target, machine) as module:
        return str(machine.emit_assembly(module))


class Library:
    """Machine code loaded into this process. It stays as long as this object; keep it while any of its addresses may be called."""

    def __init__(self, tracker: llvm.ResourceTracker, names: tuple[str, ...]) -> None:
        self._tracker = tracker
        self.symbols = names
        weakref.finalize(self, _unload, tracker).atexit = False  # threads may still run it then

    def address(self, symbol: str) -> int:
        """Returns the address of a global function of the object; KeyError when it has none of that name."""
        if symbol not in self.symbols:
            raise KeyError(f"{symbol} is not one of {', '.join(self.symbols)}")
        return int(self._tracker[symbol])


def _unload(tracker: llvm.ResourceTracker) -> None:
    with _LLVM:
        tracker.close()


def load_object(data: bytes, externals: Mapping[str, int] | None = None) -> Library:
    """Loads an object that `compile_object` made for this machine.

    Undefined symbols are taken from `externals` (name to address), then from `symbols.address`. Unsupported when one is nowhere;
    ArtifactError when the object is damaged or for another architecture.
    """
    found = read_symbols(data)
    if found.arch != host().arch:
        raise ArtifactError(f"the object is for {found.arch}, this machine is {host().arch}", hint="compile it for this machine")
    builder = llvm.JITLibraryBuilder().add_object_img(data)
    for name in found.defined:
        builder.export_symbol(name)
    for name in found.undefined:
        builder.import_symbol(name, _resolve(name, externals or {}))
    try:
        with _LLVM:
            tracker = builder.link(_engine(), f"sashiko.{next(_NAMES)}")
    except RuntimeError as error:
        raise ArtifactError(f"the object cannot be loaded: {error}", hint="delete the cache folder") from error
    return Library(tracker, found.defined)


def _resolve(name: str, externals: Mapping[str, int]) -> int:
    if name in externals:
        return externals[name]
    symbol = symbols.find(name)
    if not symbol.address:
        raise Unsupported(f"the C function {name} is not available: {symbol.reason}", hint="choose a kernel that does not call it")
    return symbol.address


@contextmanager
def _emitting(target: Target) -> Iterator[llvm.TargetMachine]:
    """The machine of a target, for one thread at a time: these options are of the whole process."""
    with _LLVM:
        machine = _machine(target.triple, target.cpu, target.llvm_features)
        try:
            _options(target.schedule, target.reduces_strength)
            yield machine
        finally:
            _options(host().usual_schedule, True)  # for others that compile for this machine with the same LLVM


def _options(direction: str, reduces_strength: bool) -> None:
    llvm.set_option("sashiko", f"-misched-prera-direction={direction}")
    llvm.set_option("sashiko", f"-disable-lsr={'false' if reduces_strength else 'true'}")


class _Parsed:
    """A verified module in a context of its own, so that nothing of it stays in memory afterwards."""

    def __init__(self, ir_text: str, target: Target, machine: llvm.TargetMachine) -> None:
        intrinsics.check(ir_text, target)
        self._text, self._triple, self._layout = ir_text, target.triple, str(machine.target_data)

    def __enter__(self) -> llvm.ModuleRef:
        self._context = llvm.create_context()
        try:
            self._module = llvm.parse_assembly(self._text, self._context)
            self._module.verify()
        except RuntimeError as error:
            raise InvalidGraph(f"the generated code is not valid LLVM IR: {error}", "code generation") from error
        self._module.triple, self._module.data_layout = self._triple, self._layout
        return self._module

    def __exit__(self, *_: object) -> None:
        self._module.close()
        self._context.close()


@lru_cache(maxsize=64)
def _machine(triple: str, cpu: str, features: str) -> llvm.TargetMachine:
    with _LLVM:
        _initialized()
        return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=OPT, reloc="pic", codemodel="small")


@lru_cache(maxsize=1)
def _engine() -> llvm.LLJIT:
    """The loader of this process; it only ever gets finished objects."""
    _initialized()
    raw = llvm.Target.from_triple(host().triple).create_target_machine(reloc="pic", codemodel="small", jit=True)
    return llvm.create_lljit_compiler(raw, use_jit_link=True, suppress_errors=True)


def _initialized() -> None:
    """Makes all of LLVM's targets known. LLVM ignores a repetition; llvmlite lets one thread in at a time."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
