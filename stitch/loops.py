"""The loop IR: what stitching produces and every code generator consumes.

A `LoopKernel` is a straight list of nodes evaluated at every point of a domain of up to three axes:

    r  rows: the parallel axis, cut into [begin, end) by the caller
    c  columns: the vector axis
    k  a sequential reduction axis (only in kernels that reduce over an axis that is not the vector axis)

    for r in [begin, end):            rows kernels                     flat kernels:  for c in [begin, end): stores
        for c: stage 0 reductions
        for c: stage 1 reductions ...
        for c: stores

A `reduce` node turns a per-point value into one value for each row (axis "c") or each (r, c) point (axis "k"). A node is
evaluated in the innermost loop it depends on. Nothing here knows an instruction set.

Index expressions are `graph.dims` polynomials over the axis symbols, dimension symbols and, for gathers, values of other
nodes (symbols named `%n`, n the node's position). All indices count elements from the start of the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from ..graph.attrs import equal_to_itself
from ..graph.dims import Dim, symbol, symbols
from ..graph.types import DType, f32


@dataclass(frozen=True)
class Node:
    """One value of the body. `args` are positions of earlier nodes.

    op            args             fields used
    load          [guard, other]   buffer, index: element of a buffer; where guard (bool) is false nothing is read and `other` is the value
    const                          value
    param                          value: which of the kernel's numbers; the same code serves instances with other numbers. kind: what is
                                   known of all of them, see `hoist_numbers`
    index                          index: the integer value of an index expression, dtype i64 or i32
    acc                            the accumulator that a contraction hands to its epilogue (r = row, c = column of the result)
    reduce        x                kind: sum prod max min any all argmax argmin; axis "c" or "k"; dtype of the result
    scan          x                kind: sum prod max min; the same of a row's columns up to this one (axis "c")
    check         ok (bool)        sets the status word when false for any active lane (an index out of range); no value
    cast          x                to dtype, as torch's .to()
    bitcast       x                same bits, other dtype
    lookup        x                numbers: the one that the low bits of x choose, a power of two of them. Hoisted they are numbers of the
                                   kernel: value is the position of the first, count how many
    otherwise an elementwise operation of graph.ops (add, mul, exp, where, ...) computed in the dtype of its arguments. kind of a sub:
                                   exact, where it is 0 for some elements, and no product may go into it unrounded
    """

    op: str
    dtype: DType
    args: tuple[int, ...] = ()
    buffer: int = -1
    index: Dim = 0
    value: float | int | bool = 0
    kind: str = ""
    axis: str = ""
    numbers: tuple[float, ...] = ()
    count: int = 0


@dataclass(frozen=True)
class Store:
    """buffer[index] = node, at every point the index depends on (once a row when `c` is not in it). `guard`: node or -1.

    `streams`: the buffer is larger than the caches and not read again soon, and it starts at a multiple of the vector's size.
    """

    buffer: int
    index: Dim
    node: int
    guard: int = -1
    streams: bool = False


@dataclass(frozen=True, eq=False)
class Body:
    """Nodes in evaluation order, and stores. `buffers[i]` is the element type of buffer i; written ones are in `stores`."""

    nodes: tuple[Node, ...]
    stores: tuple[Store, ...]
    buffers: tuple[DType, ...]

    @cached_property
    def _exact(self) -> tuple[object, ...]:
        """What makes two bodies equal. The text of numbers tells 0.0 from -0.0 and 1 from True, which == does not."""
        return self.nodes, self.stores, self.buffers, tuple([repr(n.value) for n in self.nodes if n.op == "const"])

    @cached_property
    def _hash(self) -> int:
        return hash(self._exact)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Body) and self._hash == other._hash and self._exact == other._exact)

    @cached_property
    def accumulates(self) -> bool:
        """Whether elements are made of what was in their place, where others may have been stored before: one row follows another."""
        written = {store.buffer for store in self.stores}
        return any(node.op == "load" and node.buffer in written for node in self.nodes)

    @cached_property
    def deps(self) -> tuple[frozenset[str], ...]:
        """Axes that each node's value varies with, a subset of {r, c, k}; reductions drop their axis."""
        result: list[frozenset[str]] = []
        for node in self.nodes:
            axes: set[str] = set()
            for s in symbols(node.index):
                axes |= result[int(s.name[1:])] if s.name.startswith("%") else {s.name} & {"r", "c", "k"}
            for arg in node.args:
                axes |= result[arg]
            if node.op == "acc":
                axes |= {"r", "c"}
            if node.op == "scan":
                axes.add("c")
            if node.op == "reduce":
                axes -= {node.axis}
            result.append(frozenset(axes))
        return tuple(result)

    @property
    def indices(self) -> tuple[Dim, ...]:
        """All index expressions."""
        return (*[node.index for node in self.nodes], *[store.index for store in self.stores])

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """For each node a bit for itself and for every node it depends on."""
        result: list[int] = []
        for n in range(len(self.nodes)):
            bits = 1 << n
            for operand in self.operands(n):
                bits |= result[operand]
            result.append(bits)
        return tuple(result)

    @cached_property
    def _operands(self) -> tuple[tuple[int, ...], ...]:
        through_index = [sorted(int(s.name[1:]) for s in symbols(node.index) if s.name.startswith("%")) for node in self.nodes]
        return tuple(node.args + tuple(more) for node, more in zip(self.nodes, through_index))

    def operands(self, position: int) -> tuple[int, ...]:
        """Every node that `position` reads, through arguments and through its index expression."""
        return self._operands[position]


def in_place(body: Body) -> tuple[tuple[int, int], ...]:
    """Pairs (written, read) of buffers that may be the same memory: each element is read once, at the place where what is computed from
    it is stored. Nothing may be reduced, for a reduction reads elements again that are stored by then."""
    if any(node.op == "reduce" for node in body.nodes):
        return ()
    found: list[tuple[int, int]] = []
    for store in body.stores:
        below = _below(body, store.node)
        for buffer in dict.fromkeys(body.nodes[n].buffer for n in below if body.nodes[n].op == "load"):
            loads = [n for n, node in enumerate(body.nodes) if node.op == "load" and node.buffer == buffer]
            alike = body.buffers[buffer].bytes == body.buffers[store.buffer].bytes and store.guard < 0
            if alike and loads[0] in below and len(loads) == 1 and body.nodes[loads[0]].index == store.index:
                found.append((store.buffer, buffer))
    return tuple(found)


def _below(body: Body, position: int) -> set[int]:
    """A node and every node that it is computed from."""
    seen: set[int] = set()
    stack = [position]
    while stack:
        at = stack.pop()
        if at not in seen:
            seen.add(at)
            stack.extend(body.operands(at))
    return seen


@dataclass(frozen=True)
class LoopKernel:
    """A body and its domain. `rows` None: a flat kernel, the caller cuts the columns. `depth`: extent of axis k, or None."""

    name: str
    body: Body
    rows: Dim | None
    cols: Dim
    depth: Dim | None = None
    params: tuple[float, ...] = ()

    def __str__(self) -> str:
        head = f"kernel {self.name}: r < {self.rows}, c < {self.cols}" + (f", k < {self.depth}" if self.depth is not None else "")
        return "\n".join([head, *body_lines(self.body)])


def body_lines(body: Body) -> list[str]:
    """Readable text of a body, one line for each node and store."""
    lines = []
    for n, node in enumerate(body.nodes):
        args = ", ".join(f"%{a}" for a in node.args)
        extra = {
            "load": f"b{node.buffer}[{node.index}] ",
            "const": f"{node.value}",
            "param": f"{node.value}",
            "lookup": f"{node.numbers or f'{node.count} from {node.value}'} by ",
            "index": f"{node.index}",
            "reduce": f"{node.kind} over {node.axis} of ",
            "scan": f"{node.kind} up to {node.axis} of ",
        }.get(node.op, "")
        lines.append(f"  %{n} = {node.op} {extra}{args} : {node.dtype}")
    for store in body.stores:
        guard = f" if %{store.guard}" if store.guard >= 0 else ""
        lines.append(f"  b{store.buffer}[{store.index}] = %{store.node}{guard}")
    return lines


ROW: Dim = symbol("r")
COLUMN: Dim = symbol("c")


def axis(name: str, extent: Dim) -> Dim:
    """The axis symbol with its extent, so that `c % extent` and friends simplify."""
    return symbol(name, 0, None, extent)


@dataclass
class BodyBuilder:
    """Appends nodes, giving the position of an equal node when there is one (common subexpressions are shared)."""

    nodes: list[Node] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    buffers: list[DType] = field(default_factory=list)
    _known: dict[tuple[Node, str], int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        key = (node, repr(node.value))  # 0.0 == -0.0 and 1 == True, but they are different constants
        position = self._known.setdefault(key, len(self.nodes))
        if position == len(self.nodes):
            self.nodes.append(node)
        return position

    def op(self, name: str, dtype: DType, *args: int) -> int:
        return self.add(Node(name, dtype, args))

    def const(self, value: float | int | bool, dtype: DType) -> int:
        return self.add(Node("const", dtype, value=equal_to_itself(value)))

    def cast(self, arg: int, dtype: DType) -> int:
        return arg if self.nodes[arg].dtype == dtype else self.add(Node("cast", dtype, (arg,)))

    def buffer(self, dtype: DType) -> int:
        self.buffers.append(dtype)
        return len(self.buffers) - 1

    def load(self, buffer: int, index: Dim, guard: int = -1, other: int = -1) -> int:
        args = (guard, other) if guard >= 0 else ()
        return self.add(Node("load", self.buffers[buffer], args, buffer=buffer, index=index))

    def node_index(self, position: int) -> Dim:
        """The value of an integer node as a term of an index expression."""
        return symbol(f"%{position}")

    def store(self, buffer: int, index: Dim, node: int, guard: int = -1) -> None:
        self.stores.append(Store(buffer, index, node, guard))

    def finish(self) -> Body:
        return Body(tuple(self.nodes), tuple(self.stores), tuple(self.buffers))


# Immediate in the code: the plainest numbers, and the bounds of 8-bit integers, which rounding and clamping are recognized by.
_PLAIN = (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 127.0, -127.0, 128.0, -128.0, 255.0, float("inf"), float("-inf"))


def is_whole(value: float) -> bool:
    """Whether f32 holds a number and those near it as integers."""
    return abs(value) < 1 << 22 and value == int(value)


def _kind(value: float) -> str:
    return "" if not is_whole(value) else "natural" if value >= 0 else "whole"


def hoist_numbers(body: Body) -> tuple[Body, tuple[float, ...]]:
    """Replace f32 constants other than the plainest by parameters, so that layers that differ in scales share code.

    The zero points of quantization are of kind "natural", or "whole" below 0: rounding is recognized by them.
    """
    values: list[float] = []
    nodes: list[Node] = []
    rounded = {n for node in body.nodes if node.op == "add" and any(body.nodes[a].op == "round" for a in node.args) for n in node.args}
    for n, node in enumerate(body.nodes):
        if node.op == "const" and node.dtype == f32 and node.value not in _PLAIN and node.value == node.value:
            values.append(float(node.value))
            node = Node("param", f32, value=len(values) - 1, kind=_kind(node.value) if n in rounded else "")
        if node.op == "lookup":
            hoisted = replace(node, numbers=(), value=len(values), count=len(node.numbers))
            values.extend(node.numbers)
            node = hoisted
        nodes.append(node)
    return replace(body, nodes=tuple(nodes)), tuple(values)
