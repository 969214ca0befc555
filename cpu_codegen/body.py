"""The SIMD emitter of a body: values of nodes at points, in registers.

Whoever owns the loops (`loops.py`, the contraction generators) says where: it makes points, provides what comes from outside
(accumulators, results of reductions), and asks for stores. Every value is emitted once in the scope where it is first needed:

    emitter = BodyEmitter(fn, target, body, slots)
    with emitter.scope():  # the inside of a loop
        point = Point(lanes, {"r": row, "c": column}, mask)
        emitter.provide(acc_node, accumulator)
        emitter.stores(point)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from ..diagnostics.errors import InvalidGraph
from ..platforms.target import Target
from ..stitch.loops import Body, Node
from . import convert, elementwise, lookup, rounding
from .addresses import Addresses
from .builder import I32, Function, Val, const
from .division import any_lane
from .scopes import Point, Scopes
from .slots import Slots
from .transfers import Transfers

__all__ = ["BodyEmitter", "Point"]


class BodyEmitter:
    """Emits the nodes of `body` into `fn`. Buffer i of the body is operand `buffer_offset + i` of the kernel. Gives scalars for nodes that
    do not depend on the column, vectors of the point's lanes for the others."""

    def __init__(self, fn: Function, target: Target, body: Body, slots: Slots, buffer_offset: int = 0) -> None:
        self.fn, self.target, self.body, self.slots = fn, target, body, slots
        self.deps = body.deps
        self.sources = body.sources
        self._chains = rounding.chains(body)
        self._order = [tuple(sorted(axes)) for axes in self.deps]
        self._scopes = Scopes(fn)
        self._given: dict[int, Val] = {}
        self._kept: dict[int, Val] = {}
        self._addresses = Addresses(fn, slots, self._scopes, self.deps, self.sources, self.value, self._has)
        self._transfers = Transfers(fn, target, slots, self._addresses, self.operand, buffer_offset)
        self.store_deps = tuple(self._addresses.needs(store.index).axes for store in body.stores)
        self.column_stores = tuple(n for n, axes in enumerate(self.store_deps) if "c" in axes)
        self.all_checks = tuple(n for n, node in enumerate(body.nodes) if node.op == "check")
        self.depth_checks = tuple(n for n in self.all_checks if "k" in self.deps[n])
        self._outside = sum(1 << n for n, node in enumerate(body.nodes) if node.op in ("acc", "reduce", "scan"))
        loads = sum(1 << n for n, node in enumerate(body.nodes) if node.op == "load") | self._outside
        self._has_load = [bits & loads != 0 for bits in self.sources]

    # -- what the owner of the loops says --------------------------------------------------------------------------
    def scope(self) -> AbstractContextManager[None]:
        """A region (loop body, branch) whose values are not used after it."""
        return self._scopes.inner()

    @contextmanager
    def assuming(self, body: Body) -> Iterator[None]:
        """A region where `body`, with the same nodes under the same numbers, says how they are computed: what was known stays so."""
        before, self.body = self.body, body
        yield
        self.body = before

    def provide(self, node: int, value: Val) -> None:
        """From here on `node` is `value`, until provided again; what was computed from an earlier value is forgotten."""
        self._scopes.forget(1 << node)
        self._given[node] = value

    def remember(self, node: int, point: Point, value: Val) -> None:
        """`node` is `value` at this point, in the scope that is open, and is nothing elsewhere that was provided before."""
        self._given.pop(node, None)
        self._scopes.put(self._key(node, point), value, self.sources[node])

    def is_known(self, node: int, point: Point) -> bool:
        """Whether a value needs no code, or only a load of what was kept."""
        return node in self._kept or (self.deps[node] <= point.axes.keys() and self._known(node, point) is not None)

    def keep(self, node: int, pointer: Val) -> None:
        """`node` is read from an array over the columns, which begins at `pointer` and holds its values."""
        self._kept[node] = pointer

    def release(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self._kept.pop(node, None)

    # -- values ----------------------------------------------------------------------------------------------------
    def value(self, node: int, point: Point) -> Val:
        """The value of `node` at `point`: a scalar when it does not depend on the column."""
        if (known := self._known(node, point)) is None:
            self.compute([node], point)
            known = self._known(node, point)
        assert known is not None
        return known

    def compute(self, nodes: Sequence[int], point: Point) -> None:
        """Computes nodes that are not known, with all that they need, in the order of the body."""
        missing, pending = set(nodes), list(nodes)
        while pending:
            for operand in self._inner_operands(pending.pop()):
                if operand not in missing and self._known(operand, point) is None:
                    missing.add(operand)
                    pending.append(operand)
        for each in sorted(missing):
            self._compute(each, point)

    def side_by_side(self, nodes: Iterable[int], points: Sequence[Point]) -> None:
        """Computes nodes that vary with the column, at several points a step at a time; of those that end a chain, what it rounds."""
        inner = [self._chains[n].node if n in self._chains else n for n in nodes if n not in self._given and n not in self._kept]
        self.fn.side_by_side([partial(self.compute, [n for n in inner if "c" in self.deps[n]], point) for point in points])

    def operand(self, node: int, lanes: int, point: Point) -> Val:
        """The value in every lane."""
        spec = self.body.nodes[node]
        if spec.op == "const":
            return convert.constant(spec.dtype, spec.value, lanes)
        if spec.op == "param" and node not in self._given:
            return self.slots.number(int(spec.value), lanes)
        value = self.value(node, point)
        if not lanes or value.ty.lanes:
            return value
        key = ("splat", node, lanes, *(point.axes[a].ref for a in self._order[node]))
        return self._scopes.find(key) or self._scopes.put(key, self.fn.splat(value, lanes), self.sources[node])

    def _known(self, node: int, point: Point) -> Val | None:
        if node in self._given:
            return self._given[node]
        if self.body.nodes[node].op in ("const", "param"):
            return self.operand(node, 0, point)
        return self._scopes.find(self._key(node, point))

    def _key(self, node: int, point: Point) -> tuple[object, ...]:
        refs = tuple(point.axes[a].ref for a in self._order[node])
        if "c" not in self.deps[node]:
            return (node, *refs)
        return (node, *refs, point.lanes, point.mask.ref if point.mask else "")

    def _inner_operands(self, node: int) -> tuple[int, ...]:
        """What must be known before `node` is computed; reductions and kept values see to their own."""
        if node in self._kept or self.body.nodes[node].op in ("reduce", "scan"):
            return ()
        chain = self._chains.get(node)
        return self.body.operands(node) if chain is None else (chain.node,)

    def _compute(self, node: int, point: Point) -> Val:
        lanes = point.lanes if "c" in self.deps[node] else 0
        if not self.deps[node] and not self._has_load[node]:
            with self._scopes.entry():
                return self._scopes.put(self._key(node, point), self._emit(node, 0, point), self.sources[node])
        return self._scopes.put(self._key(node, point), self._emit(node, lanes, point), self.sources[node])

    def _emit(self, n: int, lanes: int, point: Point) -> Val:
        node = self.body.nodes[n]
        if n in self._kept:
            return self._transfers.load_at(self._kept[n], node.dtype, lanes, point)
        match node.op:
            case "load":
                guard = self.value(node.args[0], point) if node.args else None
                return self._transfers.load(node, lanes, point, guard)
            case "index":
                return self._index(node, lanes, point)
            case "reduce" | "scan" | "acc":
                raise InvalidGraph(f"%{n} ({node.op}) was not provided", "code generation")
            case "cast":
                return self._cast(n, lanes, point)
            case "bitcast":
                return convert.bitcast(self.fn, self.operand(node.args[0], lanes, point), node.dtype)
            case "lookup":
                table = self.slots.table(int(node.value), node.count, self.target.lanes(32))
                return lookup.emit(self.fn, self.target, table, self.operand(node.args[0], lanes, point))
            case "check":
                self._check(self.operand(node.args[0], lanes, point), point)
                return const(I32, 0)
        nodes = self.body.nodes
        if node.op == "div" and (inverse := rounding.exact_inverse(nodes[node.args[1]])) is not None:
            return self.fn.mul(self.operand(node.args[0], lanes, point), convert.constant(node.dtype, inverse, lanes))
        args = [self.operand(a, lanes, point) for a in node.args]
        if rounding.contracts(nodes, node):
            return self.fn.contracted(node.op, args[0], args[1])
        numbers = [rounding.never_nan(nodes, a) for a in node.args]
        return elementwise.apply(self.fn, self.target, node.op, nodes[node.args[-1]].dtype, args, numbers)

    def _cast(self, n: int, lanes: int, point: Point) -> Val:
        node = self.body.nodes[n]
        chain = self._chains.get(n)
        if chain is not None:
            x = self.operand(chain.node, lanes, point)
            return rounding.emit(self.fn, self.target, chain, self._zero(chain), x, node.dtype)
        source = self.body.nodes[node.args[0]].dtype
        return convert.cast(self.fn, self.target, self.operand(node.args[0], lanes, point), source, node.dtype)

    def _index(self, node: Node, lanes: int, point: Point) -> Val:
        value = self._addresses.vector(node.index, point) if lanes else self._addresses.scalar(node.index, point)
        return value if node.dtype.bits == 64 else self.fn.convert("trunc", value, value.ty.of("i32"))

    def _check(self, ok: Val, point: Point) -> None:
        bad = self.fn.xor(ok, const(ok.ty, True))
        if ok.ty.lanes and point.mask is not None:
            bad = self.fn.and_(bad, point.mask)
        self.fn.store(const(I32, 1), self._transfers.memory.only_if(any_lane(self.fn, bad), self.slots.status()))

    @property
    def streams(self) -> bool:
        """Whether stores go around the caches: `intrinsics.stores_done` is due at the end."""
        return self._transfers.memory.streamed

    def address(self, node: int, point: Point) -> Val:
        """Where a load reads at a point."""
        return self._transfers.address(self.body.nodes[node], point)

    # -- effects ---------------------------------------------------------------------------------------------------
    def save(self, node: int, pointer: Val, point: Point) -> None:
        """Writes a value into an array over the columns, for `keep`. The array has room for whole vectors."""
        value = self.operand(node, point.lanes, point)
        self._transfers.store_at(value, pointer, self.body.nodes[node].dtype, point)

    def row_loads(self, lanes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The loads that read whole rows, column beside column: from where the number of the row says, and from where other loads say."""
        loads = [(n, node) for n, node in enumerate(self.body.nodes) if node.op == "load" and not node.args and self.deps[n] == {"r", "c"}]
        beside = [(n, self._addresses.needs(node.index).sources) for n, node in loads if self._transfers.contiguous(node, lanes)]
        looked_up = tuple(n for n, sources in beside if sources and not sources & self._outside)
        return tuple(n for n, sources in beside if not sources), looked_up

    def reach(self, loads: Iterable[int], point: Point, axes: str) -> None:
        """Computes now the parts of the addresses of loads that need no other axes."""
        for node in (self.body.nodes[n] for n in loads):
            self._transfers.reach(node.buffer, node.dtype, node.index, point, frozenset(axes))

    def fetch(self, loads: Iterable[int], point: Point, results: bool = False) -> None:
        """Asks for what loads will read at a point, which may be beyond the end. results: and for where these go."""
        for n in loads:
            self._transfers.fetch(self.body.nodes[n], point)
        for spec in self.body.stores if results else ():
            self._transfers.fetch_place(spec, self.body.nodes[spec.node].dtype, point)

    def load_square(self, node: int, points: Sequence[Point], rows: Val | None, left: Val | None) -> None:
        """`Transfers.load_square` for as many points as there are lanes."""
        for point, value in zip(points, self._transfers.load_square(self.body.nodes[node], points[0], rows, left), strict=True):
            self.remember(node, point, value)

    def beside(self, first: Point, point: Point, count: int) -> None:
        """Says that the row of a point is `count` after another, and their quotients by all that rows are divided by are the same."""
        for index in self.body.indices:
            self._addresses.beside(index, first, point, count)

    def joins(self, n: int, lanes: int) -> int:
        """How many vectors beside each other a store by columns makes one register of."""
        spec = self.body.stores[n]
        return self._transfers.joins(spec, self.body.buffers[spec.buffer], lanes)

    def stores_beside(self, points: Sequence[Point], which: Sequence[int]) -> None:
        """Emits stores at points beside each other, row after row. Narrower elements than what they are made of fill registers together."""
        counts = {n: self.joins(n, points[0].lanes) for n in which}
        parts: dict[int, list[Val]] = {n: [] for n in which}
        for at, point in enumerate(points):
            for n, count in counts.items():
                group = points[at // count * count :][:count]
                if count == 1 or len(group) < count or any(each.mask is not None for each in group):
                    self.stores(point, (n,))
                    continue
                parts[n].append(self.unjoined(n, point))
                if len(parts[n]) == count:
                    self._transfers.store_joined(self.body.stores[n], self.joined(n, parts[n]), group)
                    parts[n] = []

    def _zero(self, chain: rounding.Chain) -> rounding.Zero:
        return rounding.Zero(self.fn, self.slots, self._scopes, self.body.nodes[chain.zero] if chain.zero >= 0 else None)

    def _chain(self, n: int) -> rounding.Chain | None:
        """The chain that a store ends, if that is computed here."""
        node = self.body.stores[n].node
        return None if node in self._given or node in self._kept else self._chains.get(node)

    def unjoined(self, n: int, point: Point) -> Val:
        """What a store stores at a point, or what a chain that ends there rounds."""
        spec, chain = self.body.stores[n], self._chain(n)
        return self.operand(spec.node if chain is None else chain.node, point.lanes, point)

    def joined(self, n: int, parts: Sequence[Val]) -> Val:
        """What a store stores, of what `unjoined` gave for vectors beside each other."""
        spec, chain = self.body.stores[n], self._chain(n)
        dtype = self.body.buffers[spec.buffer]
        if chain is None:
            return self.fn.concatenate([convert.to_memory(self.fn, part, dtype) for part in parts])
        return rounding.emit_joined(self.fn, self.target, chain, self._zero(chain), parts, dtype)

    def stores(self, point: Point, which: Iterable[int] | None = None) -> None:
        """Emits the stores whose index depends on the column and the checks that do, or the given stores (positions)."""
        for n in self.column_stores if which is None else which:
            spec = self.body.stores[n]
            guard = self.value(spec.guard, point) if spec.guard >= 0 else None
            lanes = point.lanes if "c" in self.store_deps[n] else 0
            self._transfers.store(spec, self.body.buffers[spec.buffer], lanes, point, guard)
        if which is None:
            self.checks(point, [n for n in self.all_checks if "c" in self.deps[n] and "k" not in self.deps[n]])

    def checks(self, point: Point, which: Iterable[int]) -> None:
        """Emits check nodes."""
        for n in which:
            self.value(n, point)

    def prepare(self, roots: Iterable[int], stores: Iterable[int], point: Point, axes: str) -> None:
        """Computes now, for use in inner scopes, what the values of nodes `roots` and the given stores need that depends on no other axes
        than `axes`: values, splats for the point's lanes, and the outer parts of addresses."""
        within = frozenset(axes)
        nodes = self.body.nodes
        seen, pending = set(), [*roots]
        for n in stores:
            spec = self.body.stores[n]
            pending += [spec.node] + ([spec.guard] if spec.guard >= 0 else [])
            self._transfers.reach(spec.buffer, self.body.buffers[spec.buffer], spec.index, point, within)
        for root in pending:
            if self.deps[root] <= within and self._is_ready(root, point):
                self.operand(root, point.lanes, point)
        while pending:
            n = pending.pop()
            if n in seen or n in self._given or n in self._kept or self.deps[n] <= within:
                continue
            seen.add(n)
            pending += self.body.operands(n)
        for n in sorted(seen):
            node = nodes[n]
            if node.op == "load":
                self._transfers.reach(node.buffer, node.dtype, node.index, point, within)
            for operand in node.args:
                if self.deps[operand] <= within and self._is_ready(operand, point):
                    self.operand(operand, point.lanes if "c" in self.deps[n] else 0, point)

    def _has(self, sources: int, point: Point) -> bool:
        """Whether all of these nodes that must be provided have been."""
        wanted = sources & self._outside
        return all(self.is_known(n, point) for n in range(wanted.bit_length()) if wanted >> n & 1)

    def _is_ready(self, node: int, point: Point) -> bool:
        """Whether everything that must be provided for a value has been."""
        if not self.sources[node] & self._outside:
            return True
        pending, seen = [node], set()
        while pending:
            n = pending.pop()
            if n in seen or self.is_known(n, point):
                continue
            if self._outside >> n & 1:
                return False
            seen.add(n)
            pending += self.body.operands(n)
        return True
