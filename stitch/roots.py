"""Which values get a buffer before any kernel is formed, and which anchor (contraction) computes which elementwise values.

A contraction hands its accumulators to an epilogue. A value is in the epilogue of anchor `a` when it is computed from a's result
by elementwise operations at the same position, and nothing else it needs depends on `a`, be it by way of another anchor's epilogue.
Where such a value meets anything else (a reduction, a view that moves elements, another contraction, an output) it is stored: that is
its `root`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from ..graph.dims import Dim, product
from ..graph.ir import Value
from ..graph.ops import OPS
from .views import VIEWS, affine, axes, in_pieces, offset, strip, unmerged

WITH_EPILOGUE = ("linear", "group_linear", "int_linear", "routed_linear", "matmul", "int_matmul")
PIECEWISE = ("linear", "group_linear", "int_linear")  # their left operand may lie in pieces
WHOLE = ("argsort", "recurrence", "call")  # their operands are read as they are, dense and row-major
ANCHORS = (*WITH_EPILOGUE, "attention", *WHOLE)


@dataclass
class Roots:
    """`stored`: values with a buffer (anchors' operands and results, outputs). `epilogue`: value -> the anchor that computes it."""

    stored: dict[Value, None] = field(default_factory=dict)  # insertion-ordered set
    epilogue: dict[Value, Value] = field(default_factory=dict)


class _Precedence:
    """Which anchors are computed before which, as bit sets of their positions in `order`.

    An anchor is one kernel with its epilogue, so it comes after whatever the epilogue reads, and all its results do: those that nothing
    of this is needed for, too. Of two branches that end in a sum with each other, only one can compute its sum in place.
    """

    def __init__(self, order: Iterable[Value]) -> None:
        self.position = {value: n for n, value in enumerate(order)}
        self._below: dict[Value, int] = {}  # the anchors that a value is computed from
        self._later: dict[Value, int] = {}  # the anchors whose epilogues read what is computed from this one, or from a later one

    def add(self, value: Value) -> None:
        """All operands must be there."""
        self._below[value] = self._of(value.inputs)
        if value.op in ANCHORS:
            self._below[value] |= 1 << self.position[value]
            self._later[value] = 0

    def _of(self, values: Iterable[Value]) -> int:
        return reduce(or_, (self._below.get(v, 0) for v in values), 0)

    def may_read(self, anchor: Value, operand: Value) -> bool:
        """Whether the epilogue of an anchor can wait for an operand: nothing of it is computed from the anchor."""
        return not self._below.get(operand, 0) & (1 << self.position[anchor] | self._later[anchor])

    def reads(self, anchor: Value, operands: Iterable[Value]) -> None:
        """The epilogue of an anchor reads these as well."""
        earlier = self._of(operands)
        later = 1 << self.position[anchor] | self._later[anchor]
        for other in self._later if earlier else ():
            if earlier >> self.position[other] & 1 or earlier & self._later[other]:
                self._later[other] |= later


def segment_order(outputs: Iterable[Value], available: set[Value]) -> list[Value]:
    """Values computed in a segment, operands first."""
    result: dict[Value, None] = {}
    stack: list[tuple[Value, bool]] = [(v, False) for v in reversed(list(outputs))]
    while stack:
        value, expanded = stack.pop()
        if expanded:
            result[value] = None
        elif value not in result and value not in available:
            stack.append((value, True))
            stack.extend((v, False) for v in reversed(value.inputs))
    return list(result)


def operand_root(operand: Value, available: set[Value], stored: dict[Value, None]) -> Value:
    """The value that must have a buffer so that `operand` is a strided view of it."""
    stop = available | stored.keys()
    index, names = axes(operand.shape, "x")
    root, at = strip(operand, index, stop)
    fits = affine(offset(root.tensor, at), operand.shape, names) is not None
    return root if (fits and OPS[root.op].group != "leaf") or (root in available and fits) else operand


def rows_root(operand: Value, available: set[Value], stored: dict[Value, None]) -> Value:
    """The same for rows that may lie in pieces. Where the elements of a piece are apart, the smallest view that brings them together is
    what must have a buffer, not the windows over it."""
    root = operand_root(operand, available, stored)
    if root is not operand or operand.op not in VIEWS or operand in available or operand in stored:
        return root
    chain = [unmerged(operand)]
    while chain[-1].op in VIEWS and chain[-1] not in available and chain[-1] not in stored:
        chain.append(chain[-1].inputs[0])
    for value in reversed(chain):
        moved = value.op in VIEWS and product(value.shape) == product(operand.shape)  # one copy is enough then
        has_memory = value in available or OPS[value.op].group != "leaf"
        if has_memory and not moved and in_pieces(operand, {value}) is not None:
            return value
    return operand


def find_roots(outputs: tuple[Value, ...], available: set[Value]) -> Roots:
    """Analyse one segment: `outputs` are stored, `available` values (inputs, constants, earlier segments) exist already."""
    roots = Roots()
    order = segment_order(outputs, available)
    precedence = _Precedence(order)

    def source(value: Value) -> Value | None:
        return roots.epilogue.get(value)

    def store(value: Value) -> None:
        while value not in available and (value.op == "reshape" or _widens(value)):
            value = value.inputs[0]
        if value not in available:
            roots.stored[value] = None

    def flush(values: Iterable[Value]) -> None:
        for value in values:
            if source(value) is not None:
                store(value)

    for value in order:
        precedence.add(value)
        if value.op in ANCHORS:
            flush(value.inputs)
            for operand in read_by_pointer(value):
                root = operand if value.op in WHOLE else _root_of(operand, value, available, roots.stored)
                if root not in available:
                    roots.stored[root] = None
            if value.op in WITH_EPILOGUE:
                roots.epilogue[value] = value
            else:
                roots.stored[value] = None
        elif OPS[value.op].group == "update":
            if value.op in ("border", "joined"):
                roots.stored.update(dict.fromkeys(value.inputs))  # as they are: each has its place there
            else:
                flush(value.inputs)
            roots.stored[value] = None
        elif value.op == "reshape":
            anchor = source(value.inputs[0])
            if anchor is not None:
                roots.epilogue[value] = anchor
        elif OPS[value.op].group == "elementwise":
            anchor = _joint_anchor(value, roots, precedence)
            others = [v for v in value.inputs if source(v) is not anchor]
            if anchor is not None:
                roots.epilogue[value] = anchor
                precedence.reads(anchor, others)
                for part in _reduced_parts(others, product(anchor.shape), available, roots):
                    store(part)
            flush(others)
        else:
            flush(value.inputs)
    for value in outputs:
        flush([value])
        if value not in available:
            roots.stored[value] = None
    return roots


def _widens(value: Value) -> bool:
    return value.op == "cast" and value.inputs[0].dtype.bits < value.dtype.bits


def _root_of(operand: Value, anchor: Value, available: set[Value], stored: dict[Value, None]) -> Value:
    if anchor.op == "routed_linear" and operand is anchor.inputs[2]:
        return operand  # numbers side by side
    if anchor.op in PIECEWISE and operand is anchor.inputs[0]:
        root = rows_root(operand, available, stored)
        # What is packed of bytes that are apart takes several times as long as storing them side by side.
        return operand if operand.dtype.bits == 8 and _apart(operand, root) else root
    root = operand_root(operand, available, stored)
    # Attention reads its keys again for every block of queries, by rows: one copy is cheaper than elements that are apart.
    return operand if anchor.op == "attention" and _apart(operand, root) else root


def _apart(operand: Value, root: Value) -> bool:
    """Whether neighbours in the rows of a view of `root` are no neighbours in memory."""
    index, names = axes(operand.shape, "x")
    steps = affine(offset(root.tensor, strip(operand, index, {root})[1]), operand.shape, names)
    return steps is not None and operand.shape[-1] != 1 and steps[1][-1] != 1


def read_by_pointer(anchor: Value) -> tuple[Value, ...]:
    """Operands that the kernel of an anchor reads from memory itself; the mask of attention goes through a loop body."""
    if anchor.op == "attention":
        return anchor.inputs[:3]
    return anchor.inputs


def _reduced_parts(operands: list[Value], size: Dim, available: set[Value], roots: Roots) -> list[Value]:
    """What an epilogue of `size` elements reads that is smaller and comes from a reduction, such as one number for each row.

    The reduction must be stored in any case; storing what is computed from it keeps the arithmetic out of every tile.
    """
    found: list[Value] = []
    stack, seen = list(operands), set[Value]()
    while stack:
        value = stack.pop()
        if value in seen or _has_buffer(value, available, roots):
            continue
        seen.add(value)
        if product(value.shape) == size:
            stack.extend(value.inputs)
        elif _from_reduction(value, available, roots):
            found.append(value)
    return found


def _has_buffer(value: Value, available: set[Value], roots: Roots) -> bool:
    return value in available or value in roots.stored or value in roots.epilogue


def _from_reduction(value: Value, available: set[Value], roots: Roots) -> bool:
    """Whether a reduction would be evaluated with `value`."""
    stack, seen = [value], set[Value]()
    while stack:
        value = stack.pop()
        if OPS[value.op].group == "reduce" and not _has_buffer(value, available, roots):
            return True
        if value not in seen and not _has_buffer(value, available, roots):
            seen.add(value)
            stack.extend(value.inputs)
    return False


def _joint_anchor(value: Value, roots: Roots, precedence: _Precedence) -> Value | None:
    """The anchor whose epilogue can compute an elementwise value, if any: the latest one among its operands."""
    candidates = [roots.epilogue[v] for v in value.inputs if v in roots.epilogue]
    if not candidates:
        return None
    anchor = max(candidates, key=lambda v: precedence.position[v])
    size = product(value.shape)
    for operand in value.inputs:
        if roots.epilogue.get(operand) is anchor:
            if product(operand.shape) != size:
                return None  # broadcast up: the result has more elements than the accumulators
        elif not precedence.may_read(anchor, operand):
            return None
    return anchor
