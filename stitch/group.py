"""Grouping: which stored values are computed by one kernel.

Every stored value starts as its own kernel, with everything below it that has no buffer inlined. Values that cannot be inlined where
they are wanted (a reduction over other axes, a product wanted transposed) get a buffer and a kernel of their own. Kernels
over the same domain that share work or data are then joined as long as no dependency runs through a third kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..graph import attrs as A
from ..graph.dims import Dim, Shape, product, symbol, symbols
from ..graph.ir import Value
from ..graph.ops import OPS
from ..graph.updates import IN_PLACE, padded_axis, under
from .alike import Lowered, lowered
from .domain import Axis, Domain
from .lower import Lowering, NeedsBuffer
from .roots import ANCHORS
from .steps import by_pieces
from .views import VIEWS, Index, divides_by_sizes, parts, reshape_index, strip, through


@dataclass(eq=False)
class Group:
    """Stored values computed together. `anchor`: the contraction whose epilogue this is, or None."""

    roots: list[Value]
    domain: Domain
    anchor: Value | None = None
    needs: dict[Value, None] = field(default_factory=dict)  # stored values it reads; ordered, so that equal graphs give equal kernels
    inlined: dict[Value, None] = field(default_factory=dict)


def computed(root: Value) -> Shape:
    """The shape of what a kernel computes for a root: of a `put`, of its new elements; of what is computed by pieces, of one of them."""
    if root.op == "border":
        axis = padded_axis(root)
        return (*root.shape[:axis], root.shape[axis] - root.inputs[0].shape[axis], *root.shape[axis + 1 :])
    return root.inputs[1].shape if root.op == "put" else root.inputs[0].shape if by_pieces(root) else root.shape


def root_index(domain: Domain, root: Value) -> Index:
    """Where in the domain's axes a root is computed. Raises NeedsBuffer when its shape does not fit the domain."""
    shape = computed(root)
    rows = tuple(e for _, e in domain.rows)
    row_at = axes_of(domain.rows)
    if domain.kind == "c":
        columns = tuple(e for _, e in domain.reduced)
        if product(shape) == product(rows) * product(columns) and product(columns) != 1:
            return _reshaped(root, row_at + axes_of(domain.reduced), rows + columns, shape)
    if product(shape) != product(rows):
        raise NeedsBuffer(root, "its shape does not fit this kernel")
    return _reshaped(root, row_at, rows, shape)


def _reshaped(root: Value, index: Index, shape: Shape, source: Shape) -> Index:
    """`reshape_index`. Raises NeedsBuffer where each position, and not each row, would take divisions by sizes that are not known."""
    result = reshape_index(index, shape, source)
    innermost = next((s for i in reversed(index) for s in symbols(i)), None)
    if innermost is not None and any(divides_by_sizes(i, innermost) for i in result):
        raise NeedsBuffer(root, "its elements lie in another order than this kernel's")
    return result


def axes_of(named: tuple[Axis, ...]) -> Index:
    """The axis symbols; 0 where the extent is 1."""
    return tuple(0 if extent == 1 else symbol(name, 0, None, extent) for name, extent in named)


def first_reduction(root: Value, stored: set[Value]) -> Value | None:
    """The first reduction or scan that would be inlined below `root` (or is `root`)."""
    stack, seen = [root], set()
    while stack:
        value = stack.pop()
        if value in seen or (value in stored and value is not root) or value.op in ANCHORS:
            continue
        seen.add(value)
        if OPS[value.op].group == "reduce":
            return value
        stack.extend(reversed(value.inputs))
    return None


def domains(root: Value, stored: set[Value]) -> list[Domain]:
    """Loop nests worth trying for a kernel that computes `root`, best first."""
    names = _named(computed(root))
    reduction = first_reduction(root, stored)
    if reduction is None or by_pieces(root):
        # Another shape of the same memory has other axes, by which elements may be found that are too far out of order by these.
        return [Domain(names), *([Domain(_named(under(root).shape))] if root.op == "reshape" else [])]
    source = reduction.inputs[0]
    wanted = reduction.attrs.axes if isinstance(reduction.attrs, A.ReduceAttrs) else (source.tensor.rank - 1,)
    extents = tuple(source.shape[a] for a in wanted)
    reduced = tuple((f"q{n}", e) for n, e in enumerate(extents))
    first = min((axis for axis in wanted if source.shape[axis] != 1), default=source.tensor.rank)
    if any(source.shape[axis] != 1 for axis in range(first, source.tensor.rank) if axis not in wanted):
        return [Domain(_named(_cut(root, names, stored)), reduced, "k")]
    result = []
    rows, columns = tuple(axis for axis in names if axis[1] != 1), tuple(e for e in extents if e != 1)
    before = len(rows) - len(columns)
    if (root is not reduction or reduction.op == "scan") and before >= 0 and tuple(e for _, e in rows[before:]) == columns:
        result.append(Domain(rows[:before], reduced, "c"))
    return [*result, Domain(names, reduced, "c")]


def _named(shape: Iterable[Dim]) -> tuple[Axis, ...]:
    return tuple((f"a{n}", extent) for n, extent in enumerate(shape))


def _cut(root: Value, axes: tuple[Axis, ...], stored: set[Value]) -> Iterator[Dim]:
    """The extents of a root's axes, those in parts that are several axes of what it is a view of, such as heads and the features of each:
    what is the same all along one of these is computed once for it."""
    at = axes_of(axes)
    index = strip(*through(root, at), stored)[1] if root.op in VIEWS else at
    for axis, (_, extent) in zip(at, axes, strict=True):
        yield from parts(axis, extent, index)


def lower_group(roots: Sequence[Value], domain: Domain, stored: set[Value]) -> Lowered:
    """Evaluate all roots in one loop nest, storing each. Raises NeedsBuffer."""
    return lowered(roots, stored, domain, lambda: _lowering(roots, domain, stored))


def _lowering(roots: Sequence[Value], domain: Domain, stored: set[Value]) -> Lowering:
    home = {root: root_index(domain, root) for root in roots}
    kind = "k" if domain.kind == "k" else "c"
    loops = tuple(name for name, extent in (*domain.rows, *domain.reduced) if extent != 1)
    lowering = Lowering(
        stored, home, reduce_axes=domain.reduced, reduce_kind=kind, reductions=product(e for _, e in domain.rows), loops=loops
    )
    for root in roots:
        lowering.store(root, home[root])
    return lowering


def form(root: Value, stored: set[Value]) -> Group:
    """A kernel of its own for `root`. Raises NeedsBuffer naming a value that must be stored first."""
    if root.op == "joined":  # nothing is left to do
        return Group([root], Domain(()), None, dict.fromkeys(root.inputs))
    failure: NeedsBuffer | None = None
    for domain in domains(root, stored):
        try:
            return group_of([root], domain, stored)
        except NeedsBuffer as error:
            failure = failure or error
    assert failure is not None
    raise failure


def group_of(roots: list[Value], domain: Domain, stored: set[Value]) -> Group:
    """The kernel that computes `roots` over a domain. Raises NeedsBuffer."""
    made = lower_group(roots, domain, stored)
    read = [v for v in made.operands if v not in roots]
    # What a put writes into may be seen in another shape; what a border is around is stored as it is.
    written = [under(v.inputs[0]) if v.op == "put" else v.inputs[0] for v in roots if v.op in IN_PLACE]
    return Group(roots, domain, None, dict.fromkeys([*read, *written]), made.inlined)


def related(a: Group, b: Group) -> bool:
    """Whether joining two kernels could pay: loops over one domain that share data or work."""
    if a.anchor is not None or b.anchor is not None or not _compatible(a.domain, b.domain):
        return False
    if any(v.op in IN_PLACE for v in (*a.roots, *b.roots)):
        return False  # when it writes matters to whoever reads what was there
    return bool(a.needs.keys() & b.needs.keys() or b.needs.keys() & set(a.roots) or a.inlined.keys() & b.inlined.keys())


def joined(a: Group, b: Group, stored: set[Value]) -> Group | None:
    """Two related kernels as one, or None when one nest cannot compute both."""
    for domain in (a.domain, b.domain) if b.domain.kind == "free" else (b.domain, a.domain):
        try:
            return group_of([*a.roots, *b.roots], domain, stored)
        except NeedsBuffer:
            continue
    return None


def _compatible(a: Domain, b: Domain) -> bool:
    if "k" in (a.kind, b.kind):
        return a.kind == b.kind and a.extents == b.extents and [e for _, e in a.reduced] == [e for _, e in b.reduced]
    if a.kind == "c" and b.kind == "c":
        return a.extents == b.extents
    rows_a, rows_b = a.extents[0], b.extents[0]
    return a.size == b.size or (a.kind == "c" and b.size == rows_a) or (b.kind == "c" and a.size == rows_b)
