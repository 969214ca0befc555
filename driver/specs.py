"""What the items of a stitched program are computed by: the specifications of their kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from ..cpu_codegen.streams import streaming
from ..graph import attrs as A
from ..graph.dims import bounds, product
from ..graph.ir import Value
from ..graph.symbols import Assumption
from ..kernels.attention_spec import AttentionSpec
from ..kernels.sorting import SortSpec
from ..kernels.spec import Choice, GemmSpec
from ..platforms.target import Target
from ..runtime.records import LARGE
from ..stitch.loops import LoopKernel
from ..stitch.program import CallItem, Item, LoopItem, Program, RecurrenceItem
from .contractions import attention_spec, gemm_spec


@dataclass(frozen=True)
class StepSpecs:
    """Those of a step that is repeated, item by item."""

    items: tuple[ItemSpec, ...]


# What an item of a program is computed by: for a loop also the kernel for large results; None where the user's kernel is called.
ItemSpec = tuple[LoopKernel, LoopKernel] | GemmSpec | AttentionSpec | SortSpec | StepSpecs | None
Choices = Mapping[GemmSpec, Choice]
"""What measuring decided about products, each without its choice and its numbers."""


def unchosen(product: GemmSpec) -> GemmSpec:
    """What all products have in common that one measurement speaks for."""
    return replace(product, choice=Choice(), params=())


def sort_spec(value: Value) -> SortSpec:
    """The kernel's view of an `argsort`."""
    assert isinstance(value.attrs, A.ArgsortAttrs)
    x = value.inputs[0]
    return SortSpec(x.dtype, product(x.shape[:-1]), x.shape[-1], value.attrs.count, value.attrs.descending)


def specs_of(program: Program, target: Target, choices: Choices) -> tuple[ItemSpec, ...]:
    """The specifications of a program's kernels, item by item."""
    constants, read = set(program.constants), {value for item in program.items for value in item.reads}

    def spec(item: Item) -> ItemSpec:
        if isinstance(item, LoopItem):
            always, if_large = _streams(item, program, read, target)
            return streaming(target, item.kernel, always), streaming(target, item.kernel, always | if_large)
        if isinstance(item, CallItem):
            return sort_spec(item.value) if item.value.op == "argsort" else None
        if isinstance(item, RecurrenceItem):
            return StepSpecs(specs_of(item.step, target, choices))
        if item.anchor.op == "attention":
            return attention_spec(item)
        product = gemm_spec(item, constants, target)
        return replace(product, choice=choices.get(unchosen(product), product.choice))

    return tuple([spec(item) for item in program.items])


def flat(specs: Iterable[ItemSpec]) -> Iterator[LoopKernel | GemmSpec | AttentionSpec | SortSpec | None]:
    """The specifications in the order in which kernels are made."""
    for spec in specs:
        if isinstance(spec, StepSpecs):
            yield from flat(spec.items)
        elif isinstance(spec, tuple):
            yield from spec
        else:
            yield spec


def lengths_assumed(specs: Iterable[object]) -> tuple[Assumption, ...]:
    """What kernels take for granted of lengths that have no bound."""
    spare = dict.fromkeys(spec.spare for spec in specs if isinstance(spec, SortSpec))
    return tuple(Assumption(dim, ">=") for dim in spare if dim is not None)


def beyond(item: LoopItem, value: Value, target: Target) -> int:
    """Bytes from which a result is stored around the caches: those are too small for it, or for what its elements are computed from.
    Such results are aligned: they are no part of the arena, and the runtime puts large ones on pages of their own."""
    widest = max(v.dtype.bytes for v in item.operands if product(v.shape) == product(value.shape))
    return max(target.l3 * value.dtype.bytes // widest, LARGE)


def _streams(item: LoopItem, program: Program, read: Set[Value], target: Target) -> tuple[set[int], set[int]]:
    """Buffers of a loop that go around the caches, since they are larger and nothing here reads them again: for all shapes, and
    those where it depends on the shapes."""
    always: set[int] = set()
    if_large: set[int] = set()
    for number, value in enumerate(item.operands):
        if target.l3 and value in item.writes and value in program.outputs and value not in read and value.op != "put":
            least, most = bounds(value.tensor.nbytes)
            if least is not None and least >= beyond(item, value, target):
                always.add(number)
            elif most is None or most >= beyond(item, value, target):
                if_large.add(number)
    return always, if_large
