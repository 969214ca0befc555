"""What an earlier compilation emitted for the same kernels: found by what they compute, before any of their text is written.

Writing the LLVM IR of the kernels takes longer than all else in a compilation whose object is cached. The text follows from the
specifications of the kernels, the target, the versions, and the sources of the generators. So beside the objects lies a note, named by a
hash of all these: which object the text gave, and what the slots of each kernel hold (docs/decisions/0006).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path

from ..cpu_codegen import cache
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.encode import kernel_from, kernel_json
from ..diagnostics.errors import InvalidGraph
from ..graph.encode import Json, dim_from, dim_json
from ..kernels.attention_spec import AttentionCode, AttentionSpec
from ..kernels.sorting import SortSpec
from ..kernels.spec import GemmCode, GemmSpec, Packing
from ..platforms.target import Target
from ..stitch.loops import LoopKernel

Spec = LoopKernel | GemmSpec | AttentionSpec | SortSpec
Code = KernelCode | GemmCode | AttentionCode
GENERATORS = ("platforms", "graph", "stitch", "cpu_codegen", "kernels", "driver")


def _sources() -> str:
    digest = hashlib.blake2b(digest_size=20)
    root = Path(__file__).parent.parent
    for folder in GENERATORS:
        for path in sorted(root.joinpath(folder).rglob("*.py")):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(data)} ".encode() + data)
    return digest.hexdigest()


# Read while the package is imported: a process that outlives a change of the files goes on emitting what it has loaded.
SOURCES = _sources()


@dataclass(frozen=True)
class Recalled:
    """The object of kernels, and the code of each in the order in which they were asked for."""

    data: bytes
    codes: tuple[Code, ...]


def name_of(wanted: Mapping[Spec, str], target: Target) -> str:
    """The name of the note about kernels: `wanted` gives for each, in the order of emission, by what it is emitted or how it is called."""
    known: dict[int, str] = {}
    text = ";".join([f"{label}:{_spelled(spec, known)}" for spec, label in wanted.items()])
    return cache.key(f"kernels of {SOURCES} for {_spelled(target, known)}: {text}", target)


def recalled(name: str, wanted: Mapping[Spec, str]) -> Recalled | None:
    """What the note says, or None when it or the object is not there."""

    def understood(note: Json) -> Recalled | None:
        codes = tuple([_from(spec, item) for spec, item in zip(wanted, note["codes"], strict=True)])
        data = cache.read(cache.path_of(note["object"]), note["object"])
        return None if data is None else Recalled(data, codes)

    return cache.noted(name, understood)


def remember(name: str, text: str, target: Target, codes: Mapping[Spec, Code]) -> None:
    """Writes the note: the kernels' text became the object that `cache.compiled` keeps."""
    cache.note(name, {"object": cache.key(text, target), "codes": [_json(code) for code in codes.values()]})


@lru_cache(maxsize=64)
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def spelled(spec: GemmSpec, target: Target) -> str:
    """Text by which a product on a target is told from all others, and from those of other versions of the generators."""
    known: dict[int, str] = {}
    return f"{_spelled(spec, known)} for {_spelled(target, known)} of {SOURCES}"


def _spelled(item: object, known: dict[int, str]) -> str:
    """Text that differs wherever two specifications do. `known`: of objects that live as long as this dictionary, by identity."""
    if item is None or isinstance(item, (int, float, str)):
        return repr(item)
    text = known.get(id(item))
    if text is None:
        if isinstance(item, tuple):
            text = f"({','.join([_spelled(part, known) for part in item])})"
        elif isinstance(item, frozenset):
            text = f"{{{','.join(sorted([_spelled(part, known) for part in item]))}}}"
        elif is_dataclass(kind := type(item)):
            text = f"{kind.__name__}({','.join([_spelled(getattr(item, name), known) for name in _fields(kind)])})"
        else:
            raise InvalidGraph(f"a kernel's specification holds {item!r}", "code generation", "report this")
        known[id(item)] = text
    return text


def _json(code: Code) -> Json:
    if isinstance(code, KernelCode):
        return kernel_json(code)
    if isinstance(code, AttentionCode):
        return [kernel_json(code.run), kernel_json(code.pack), dim_json(code.workspace_bytes)]
    packing = None if code.packing is None else [getattr(code.packing, name) for name in _fields(Packing)]
    kernels = [kernel_json(kernel) for kernel in (code.rows, code.columns, code.pack)]
    return [*kernels, packing, dim_json(code.packed_bytes), dim_json(code.workspace_bytes)]


def _from(spec: Spec, data: Json) -> Code:
    if isinstance(spec, (LoopKernel, SortSpec)):
        return kernel_from(data)
    if isinstance(spec, AttentionSpec):
        run, pack, nbytes = data
        return AttentionCode(kernel_from(run), None if pack is None else kernel_from(pack), dim_from(nbytes))
    rows, columns, pack, packing, packed, workspace = data
    extra = [None if kernel is None else kernel_from(kernel) for kernel in (columns, pack)]
    shape = None if packing is None else Packing(*packing)
    return GemmCode(kernel_from(rows), extra[0], shape, extra[1], dim_from(packed), dim_from(workspace))
