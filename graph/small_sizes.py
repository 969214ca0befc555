"""Which sizes of 0 and 1 a graph serves that was traced for sizes of at least 2.

Loops over a size of 0 or 1 are as good as others; what such a size breaks is seen in single operations: slices and windows reach beyond
the end, a maximum of nothing or an element of nothing is asked for. torch raises for those, or its result has another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils import _pytree as pytree

from . import attrs as A
from .dims import Dim, Func, Shape, Symbol, bounds, coefficient, evaluate, substitute, symbol, symbols
from .interpret import call_aten
from .ir import Graph, Value
from .nodes import schema_arguments
from .poly import terms_of
from .symbols import Assumption, Symbols
from .types import TensorType, TupleType

Sizes = Mapping[str, Dim]
_UNDEFINED_OF_NOTHING = ("max", "min", "argmax", "argmin")


def needed(nodes: Iterable[Node], known: Symbols) -> Iterator[Assumption]:
    """What torch's operations asked of sizes where the graph has an answer for all: a squeeze leaves alone what is not 1, the element or
    the largest ones that are chosen are there, a range has a step, and there is something to pool."""
    for node in nodes:
        if node.target is torch.ops.aten.arange.start_step and len(node.args) > 2 and isinstance(node.args[2], Node):
            step = node.args[2].meta["val"]
            if isinstance(step, torch.SymInt) and not known.depends_on_data(step):
                yield Assumption(known.dim(step), "!=")
        rule = _ASKS.get(getattr(node.target, "overloadpacket", None))
        if rule is not None:
            x, *given = schema_arguments(node)
            sizes = x.meta["val"].shape
            for axis, least in rule(len(sizes), *given):
                if len(sizes) and isinstance(sizes[axis], torch.SymInt):
                    dim = known.dim(sizes[axis])
                    if least is not None:
                        yield Assumption(dim - least, ">=")
                    elif dim != 1:
                        yield Assumption(dim - 1, "!=")


_Asked = Iterable[tuple[int, int | None]]


def _squeeze(rank: int, axes: int | Sequence[int] | None = None) -> _Asked:
    """Axis, and None: that it is not 1 any more than in the trace."""
    return [(axis, None) for axis in (range(rank) if axes is None else (axes,) if isinstance(axes, int) else axes)]


def _select(rank: int, axis: int, index: Any) -> _Asked:
    """Axis, and its least size."""
    return [(axis, index + 1 if index >= 0 else -index)] if isinstance(index, int) else []


def _topk(rank: int, count: Any, axis: int, *_: object) -> _Asked:
    return [(axis, count)] if isinstance(count, int) else []


def _pool(axes: int, rank: int, *_: object) -> _Asked:
    """All but a batch."""
    return [(axis, 1) for axis in range(0 if rank == axes + 1 else 1, rank)]


def _extreme(rank: int, axes: int | Sequence[int] | Node | None = None, *_: object) -> _Asked:
    """The axes along which an element is chosen: all where none is named, and none of two tensors."""
    return [] if isinstance(axes, Node) else [(axis, 1) for axis in ((axes,) if isinstance(axes, int) else axes or range(rank))]


_ASKS: dict[Any, Callable[..., _Asked]] = {
    **{getattr(torch.ops.aten, name): _extreme for name in ("amax", "amin", *_UNDEFINED_OF_NOTHING)},
    torch.ops.aten.squeeze: _squeeze, torch.ops.aten.select: _select, torch.ops.aten.topk: _topk,
    **{
        getattr(torch.ops.aten, f"{kind}{axes}d{places}"): partial(_pool, axes)
        for axes in (1, 2, 3) for kind, places in (("max_pool", ""), ("max_pool", "_with_indices"), ("avg_pool", ""))
    },
}


def small_sizes(graph: Graph, equal: Sequence[Dim] = ()) -> tuple[Assumption, ...]:
    """What has to hold of the inputs' sizes so that the graph is right for those of 0 and 1 as well. equal: what is 0 in every call."""
    every = {s.name: s for value in graph.inputs for dim in value.shape for s in symbols(dim)}
    small = [name for name, s in every.items() if s.lo == 1]
    others = _ordinary(graph, every, equal) if small else {}
    found: list[Assumption] = []
    at_least_two: set[str] = set()
    for size in (1, 0):
        broken: list[frozenset[str]] = []
        for names in _subsets([name for name in small if name not in at_least_two]):
            sizes = _fitting({**others, **dict.fromkeys(names, size)}, names, equal)
            if not any(names >= other for other in broken) and _breaks(graph, sizes):
                broken.append(names)
                found.append(_more_than(size, [every[name] for name in sorted(names)]))
        if size == 1:
            at_least_two = {name for names in broken if len(names) == 1 for name in names}
    return tuple(found)


def _ordinary(graph: Graph, every: Mapping[str, Symbol], equal: Sequence[Dim]) -> Sizes:
    """The smallest sizes from 2 on that the graph bears: a small one beside them has to do without large ones. Where the model needs larger
    ones it says so by other assumptions. {}: none were found."""
    for least in (2**n + 1 for n in range(12)):
        sizes = {name: max(least, s.lo) if s.hi is None else min(max(least, s.lo), s.hi) for name, s in every.items()}
        fitting = _fitting(sizes, frozenset(), equal)
        if not _breaks(graph, fitting):
            return fitting
    return {}


def _fitting(sizes: Sizes, names: frozenset[str], equal: Sequence[Dim]) -> Sizes:
    """The same but for sizes beside those of `names`, such that what is equal in every call is, where one of them settles it: operations
    whose operands broadcast have another shape otherwise."""
    for zero in equal:
        for one in sorted(symbols(zero), key=lambda one: one.name) if substitute(zero, sizes) != 0 else ():
            line = coefficient(substitute(zero, {name: size for name, size in sizes.items() if name != one.name}), one.name)
            slope, rest = line if line is not None and one.name not in names else (0, 0)
            if not isinstance(slope, int) or not isinstance(rest, int) or slope == 0 or rest % slope:
                continue
            number = -rest // slope
            if number >= max(one.lo, 2) and (one.hi is None or number <= one.hi):
                sizes = {**sizes, one.name: number}
                break
    return sizes


def _subsets(names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Single ones, pairs, and all: what needs three of four sizes to be small is taken to need all."""
    for count in sorted({1, 2, len(names)} - {0}):
        yield from map(frozenset, combinations(names, count))


def _more_than(size: int, all_of: Sequence[Symbol]) -> Assumption:
    """That not all are as small as `size`."""
    total: Dim = -(size * len(all_of) + 1)
    for one in all_of:
        total = total + symbol(one.name, one.lo, one.hi, one.extent)
    return Assumption(total, ">=")


def _breaks(graph: Graph, sizes: Sizes) -> bool:
    """Whether an operation cannot be done for these sizes, or numbers that are not defined reach a result."""
    undefined: set[Value] = set()
    for value in graph.order:
        a, rule = value.attrs, _BREAKS.get(value.op)
        lengths = _lengths(a)
        if any(_negative(dim) for dim in _at(lengths, sizes)) or any(_by_nothing(dim, sizes) for dim in (*lengths, *_numbers(a))):
            return True
        if rule is not None and rule(a, [_at(v.shape, sizes) for v in (*value.inputs, value)], sizes):
            return True
        if value.op == "aten" and _is_of_another_shape(value, sizes):
            return True
        undefined.update(_undefined(value, sizes, undefined))
    return not undefined.isdisjoint(graph.outputs)


def _undefined(value: Value, sizes: Sizes, before: set[Value]) -> tuple[Value, ...]:
    """The value if elements of it are a maximum of nothing, or come from such ones."""
    a = value.attrs
    one = isinstance(a, A.ReduceAttrs) and a.kind in _UNDEFINED_OF_NOTHING and 0 in _at(value.inputs[0].shape, sizes)
    if not one and before.isdisjoint(value.inputs):
        return ()
    empty = isinstance(value.type, TensorType) and 0 in _at(value.shape, sizes)  # of several results, each is asked where it is read
    return () if empty else (value,)


def _is_of_another_shape(value: Value, sizes: Sizes) -> bool:
    """Whether what is left to PyTorch has not the shape that it has for larger sizes, such as the lesser one of two. Where PyTorch raises,
    it does so in the call."""
    env = {name: size for name, size in sizes.items() if isinstance(size, int)}
    try:
        with FakeTensorMode(allow_fallback_kernels=False):  # nothing is computed, and no random number taken
            operands = [torch.empty([evaluate(dim, env) for dim in v.shape], dtype=v.dtype.torch) for v in value.inputs]
            made = pytree.tree_leaves(call_aten(value, env, *operands))
    except Exception:
        return False
    types = value.type.elements if isinstance(value.type, TupleType) else (value.type,)
    return any(isinstance(kind, TensorType) and tuple(tensor.shape) != _at(kind.shape, sizes) for tensor, kind in zip(made, types))


def _lengths(a: A.Attrs) -> Shape:
    return a.shape if isinstance(a, (A.FullAttrs, A.ShapeAttrs)) else (a.length,) if isinstance(a, (A.IotaAttrs, A.SliceAttrs)) else ()


def _numbers(a: A.Attrs) -> Shape:
    """What else is computed from sizes."""
    return tuple(dim for dim in (a.start, a.step) if not isinstance(dim, float)) if isinstance(a, A.IotaAttrs) else ()


def _by_nothing(dim: Dim, sizes: Sizes) -> bool:
    """Whether something is divided by 0, which PyTorch refuses."""
    return any(
        (atom.kind in ("floordiv", "mod") and substitute(atom.args[1], sizes) == 0) or any(_by_nothing(arg, sizes) for arg in atom.args)
        for mono, _ in terms_of(dim) for atom in mono if isinstance(atom, Func)
    )


def _at(shape: Shape, sizes: Sizes) -> Shape:
    return tuple(substitute(dim, sizes) for dim in shape)


def _negative(dim: Dim) -> bool:
    """Whether a length is negative, whatever the other sizes are."""
    most = bounds(dim)[1]
    return most is not None and most < 0


def _slice(a: A.Attrs, shapes: Sequence[Shape], sizes: Sizes) -> bool:
    assert isinstance(a, A.SliceAttrs)
    first, size, length = substitute(a.start, sizes), shapes[0][a.axis], shapes[-1][a.axis]
    last = first + (length - 1) * a.step
    return length != 0 and any(_negative(dim) or _negative(size - 1 - dim) for dim in (first, last))


def _window(a: A.Attrs, shapes: Sequence[Shape], sizes: Sizes) -> bool:
    assert isinstance(a, A.WindowAttrs)
    return _negative(shapes[0][a.axis] - a.span)


def _argsort(a: A.Attrs, shapes: Sequence[Shape], sizes: Sizes) -> bool:
    return _negative(shapes[0][-1] - shapes[-1][-1])


def _of_nothing(a: A.Attrs, shapes: Sequence[Shape], sizes: Sizes) -> bool:
    """Elements of a tensor without elements."""
    return 0 in shapes[0] and 0 not in shapes[-1]


def _into_nothing(a: A.Attrs, shapes: Sequence[Shape], sizes: Sizes) -> bool:
    """Elements into a tensor without elements."""
    return 0 in shapes[0] and 0 not in shapes[1]


_BREAKS: dict[str, Callable[[A.Attrs, Sequence[Shape], Sizes], bool]] = {
    "slice": _slice, "window": _window, "argsort": _argsort, "take": _of_nothing, "gather": _of_nothing, "put": _into_nothing,
}
