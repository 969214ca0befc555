"""Loop kernels to functions that a GPU launches.

Without reductions of columns every element of the domain is a thread's: neighbours have neighbouring columns, so that their accesses
are joined. Where something is read the other way, as when it is transposed, a warp takes a few rows of a few columns instead. With
reductions the threads of a group share a row: each takes every so many columns, in as many passes as the reductions require, and what
they found is merged after each (`threads.py`). A row of few columns stays in registers between its passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..cpu_codegen import index, schedule
from ..cpu_codegen.body import BodyEmitter, Point
from ..cpu_codegen.builder import Module, Val, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.depth import Depth
from ..cpu_codegen.reduce import Reduction, State, flatten, reductions_of, results, unflatten
from ..cpu_codegen.slots import Slots
from ..diagnostics.errors import Unsupported
from ..graph.dims import Dim, bounds, ceildiv, floordiv, substitute, symbols
from ..platforms.gpu import WARP
from ..platforms.target import Target
from ..stitch.loops import LoopKernel, axis
from .threads import Group, KernelFunction, block, thread

THREADS = 256
VECTOR = 16
"""Bytes that a thread reads or writes at once, and of which the addresses of all buffers are multiples."""
_MOST_THREADS = 1024
_PATCH = (4, 8)
"""Rows and columns that a warp takes at once where reads lie side by side along the rows: of f32, 16 bytes read and 32 written."""
_STEPS = 4  # patches of a warp, one below the other: they read what is left of the cache lines of the first
_IN_REGISTERS = 32  # elements of a thread that are kept between passes
_ELEMENTS, _VECTORS = 4, 2  # of a row that a thread takes at least, so that few threads wait for one another


_WORDS = 512  # of 8 bytes: what a kernel of PTX before 8.1 has for parameters, of which one is for the status


@dataclass(frozen=True)
class LaunchCode(KernelCode):
    """A kernel for a GPU. The domain is that of elements, of rows or of tiles; a block of `threads` takes `each` of them."""

    threads: int = THREADS
    each: int = THREADS

    def blocks(self, domain: int) -> int:
        """How many blocks are launched."""
        return -(-domain // self.each)


def refusal(kernel: LoopKernel) -> str:
    """Why a kernel has no code for GPUs, or an empty string."""
    if kernel.body.accumulates:
        return "its elements are accumulated one after the other"
    if any(node.op == "scan" for node in kernel.body.nodes):
        return "it sums up along a row"
    return ""


def emit_launch(module: Module, target: Target, kernel: LoopKernel) -> LaunchCode:
    """Adds the kernel's function to the module. Raises Unsupported for what `refusal` names, and for more operands than a launch takes."""
    if reason := refusal(kernel):
        raise Unsupported(f"{kernel.name} has no code for GPUs: {reason}")
    before = set(module.declarations)
    code = _Writer(module, target, kernel).write()
    own = before | module.functions.keys()
    outside = [name for name in module.declarations if name not in own and not name.startswith("llvm.")]
    if outside:
        raise Unsupported(f"{kernel.name} has no code for GPUs: it calls {', '.join(outside)} of the C library")
    if len(code.slots) >= _WORDS:
        many = f"{len(code.slots)} operands and sizes, and a launch takes {_WORDS - 1}"
        raise Unsupported(f"{kernel.name} has no code for GPUs: it has {many}")
    return code


class _Writer:
    """Emits one kernel. `unit`: how many columns a thread takes at once, as lanes of vectors where it is more than 1."""

    def __init__(self, module: Module, target: Target, kernel: LoopKernel) -> None:
        self._target, self._kernel, self._body = target, kernel, kernel.body
        self._fn = KernelFunction(module, kernel.name)
        self._slots = Slots(self._fn, kernel.params)
        self._emitter = BodyEmitter(self._fn, target, kernel.body, self._slots)
        self._depth = None
        if kernel.depth is not None:
            self._depth = Depth(self._emitter, self._slots.dim(kernel.depth), kernel.depth if isinstance(kernel.depth, int) else None)
        columns = self._emitter.column_stores
        self._column_stores = columns
        self._other_stores = tuple(n for n in range(len(self._body.stores)) if n not in columns)
        self._plan = schedule.passes(self._body, columns)
        self._checks = [n for n in self._emitter.all_checks if not self._body.deps[n] & {"c", "k"}]
        self._unit = unit_of(kernel)
        self._lanes = self._unit if self._unit > 1 else 0

    def write(self) -> LaunchCode:
        kernel, fn = self._kernel, self._fn
        rows: Dim = 1 if kernel.rows is None else kernel.rows
        if any(each.reductions for each in self._plan):
            threads, each = self._by_rows(rows)
            domain = rows
        elif is_across(kernel):
            threads, each, domain = self._by_tiles(rows)
        else:
            threads = each = THREADS
            domain = rows * self._units
            self._by_elements(domain)
        fn.ret()
        fn.launched(1 + len(self._slots.order), threads)
        return LaunchCode(kernel.name, self._slots.order, domain, 1, schedule.work(kernel), threads, each)

    @property
    def _units(self) -> Dim:
        """Of a row."""
        return floordiv(self._kernel.cols, self._unit)

    # -- a thread for every element, or vector ---------------------------------------------------------------------------
    def _by_elements(self, domain: Dim) -> None:
        fn, kernel = self._fn, self._kernel
        number = fn.add(fn.mul(block(fn), i64(THREADS)), thread(fn))

        def element() -> list[Val]:
            column, axes = number, dict[str, Val]()
            if kernel.rows is not None:
                units = self._slots.dim(self._units)
                axes, column = {"r": fn.udiv(number, units)}, fn.urem(number, units)
            return self._element(column, Point(self._lanes, {**axes, "c": fn.mul(column, i64(self._unit))}))

        fn.branch(fn.icmp("slt", number, self._slots.dim(domain)), element)

    def _element(self, column: Val, point: Point) -> list[Val]:
        with self._emitter.scope():
            if self._other_stores or self._checks:  # once a row: by the thread that has its first column
                self._fn.branch(self._fn.icmp("eq", column, i64(0)), lambda: self._once(point))
            self._stored(point, self._column_stores)
            self._emitter.checks(point, [n for each in self._plan for n in each.checks])
        return []

    def _by_tiles(self, rows: Dim) -> tuple[int, int, Dim]:
        """The threads of a block, the tiles that it takes, and the number of tiles. The warps of a block are side by side."""
        fn, columns, (high, wide) = self._fn, self._kernel.cols, _PATCH
        height, width = high * _STEPS, THREADS // high
        across = ceildiv(columns, width)
        tile, at = block(fn), thread(fn)
        lane, beside = fn.urem(at, i64(WARP)), self._slots.dim(across)
        first = fn.add(fn.mul(fn.udiv(tile, beside), i64(height)), fn.udiv(lane, i64(wide)))
        in_tile = fn.add(fn.mul(fn.udiv(at, i64(WARP)), i64(wide)), fn.urem(lane, i64(wide)))
        column = fn.add(fn.mul(fn.urem(tile, beside), i64(width)), in_tile)
        exists = fn.icmp("slt", column, self._slots.dim(columns))
        for step in range(_STEPS):
            row = fn.add(first, i64(step * high))
            inside = fn.and_(exists, fn.icmp("slt", row, self._slots.dim(rows)))
            fn.branch(inside, partial(self._element, column, Point(0, {"r": row, "c": column})))
        return THREADS, 1, ceildiv(rows, height) * across

    def _once(self, point: Point) -> list[Val]:
        with self._emitter.scope():
            self._emitter.checks(point.scalar, self._checks)
            self._stored(point.scalar, self._other_stores)
        return []

    def _stored(self, point: Point, which: Sequence[int]) -> None:
        stores = [self._body.stores[n] for n in which]
        self._resolve([m for each in stores for m in (each.node, each.guard) if m >= 0], [point])
        self._emitter.stores(point, which)

    def _resolve(self, roots: Sequence[int], points: Sequence[Point]) -> None:
        if self._depth is not None and points:
            self._depth.resolve(roots, points)

    # -- threads that share a row --------------------------------------------------------------------------------------
    def _by_rows(self, rows: Dim) -> tuple[int, int]:
        """The threads of a block, and the rows that it takes."""
        fn, size = self._fn, _group_size(self._units, _VECTORS if self._lanes else _ELEMENTS)
        each = max(1, THREADS // size) if size <= WARP else 1
        threads = size * each
        at = thread(fn)
        group = Group(fn, size, fn.urem(at, i64(size)))
        row = fn.add(fn.mul(block(fn), i64(each)), fn.udiv(at, i64(size)))
        count = self._slots.dim(rows)
        # All threads of a warp exchange values: those beyond the last row compute that one, too, and store nothing.
        inside = fn.icmp("slt", row, count)
        point = Point(self._lanes, {"r": fn.smin(row, fn.sub(count, i64(1)))})
        with self._emitter.scope():
            columns = self._kernel.cols
            if isinstance(columns, int) and -(-columns // (size * self._unit)) * self._unit <= _IN_REGISTERS:
                self._from_registers(columns, group, point, inside)
            else:
                self._from_memory(group, point, inside)
            first = fn.and_(inside, fn.icmp("eq", group.lane, i64(0)))
            if self._other_stores or self._checks:
                fn.branch(first, lambda: self._once(point))
        return threads, each

    def _reductions(self, each: schedule.Pass) -> list[Reduction]:
        return reductions_of(self._fn, self._target, self._body, each.reductions, bounds(self._kernel.cols)[1])

    def _updated(
        self, each: schedule.Pass, reductions: list[Reduction], point: Point, states: list[State], mask: Val | None
    ) -> list[State]:
        fn, lanes, found = self._fn, self._lanes, list[State]()
        every = None if mask is None else fn.splat(mask, lanes)
        for n, reduction, state in zip(each.reductions, reductions, states, strict=True):
            x = self._emitter.operand(self._body.nodes[n].args[0], lanes, point)
            position = fn.splat(point.axes["c"], lanes) if reduction.needs_position else None
            if position is not None and lanes:
                position = fn.add(position, fn.lane_ids(position.ty))
            found.append(reduction.update(state, x, position, every))
        return found

    def _known(self, each: schedule.Pass, reductions: list[Reduction], states: list[State], group: Group, row: Point) -> None:
        whole = [group.across(reduction, reduction.across(state)) for reduction, state in zip(reductions, states, strict=True)]
        for n, value in zip(each.reductions, results(reductions, whole), strict=True):
            self._emitter.remember(n, row, value)

    def _effects(self, each: schedule.Pass, point: Point) -> list[Val]:
        with self._emitter.scope():
            self._emitter.checks(point, each.checks)
            if each.stores:
                self._emitter.stores(point, self._column_stores)
        return []

    def _from_registers(self, columns: int, group: Group, row: Point, inside: Val) -> None:
        """A row whose columns are written out: their points are the same in all passes, so that values are known from the one before.
        Beyond the last column a thread computes the last ones again."""
        fn, unit = self._fn, self._unit
        points: list[Point] = []
        masks: list[Val | None] = []
        for start in range(0, columns, group.size * unit):
            place = fn.add(fn.mul(group.lane, i64(unit)), i64(start))
            whole = start + group.size * unit <= columns
            masks.append(None if whole else fn.icmp("slt", place, i64(columns)))
            points.append(row.at(c=place if whole else fn.smin(place, i64(columns - unit))))
        for each in self._plan:
            reductions = self._reductions(each)
            states = [reduction.identity(self._lanes) for reduction in reductions]
            self._resolve(each.roots(self._body, self._column_stores), points)
            for point, mask in zip(points, masks, strict=True):
                states = self._updated(each, reductions, point, states, mask)
            self._known(each, reductions, states, group, row)
            for point, mask in zip(points, masks, strict=True):
                if each.stores or each.checks:
                    allowed = inside if mask is None else fn.and_(inside, mask)
                    fn.branch(allowed, partial(self._effects, each, point))

    def _from_memory(self, group: Group, row: Point, inside: Val) -> None:
        """A row that is read again in each pass."""
        fn, columns = self._fn, self._slots.dim(self._kernel.cols)
        for each in self._plan:
            reductions = self._reductions(each)
            start = [reduction.identity(self._lanes) for reduction in reductions]
            column = partial(self._column, each, reductions, start, row, inside)
            begin, step = fn.mul(group.lane, i64(self._unit)), group.size * self._unit
            states = unflatten(fn.loop(begin, columns, step, flatten(start), column), start)
            self._known(each, reductions, states, group, row)

    def _column(
        self, each: schedule.Pass, reductions: list[Reduction], start: list[State], row: Point, inside: Val, c: Val, carried: list[Val]
    ) -> list[Val]:
        with self._emitter.scope():
            point = row.at(c=c)
            self._resolve(each.roots(self._body, self._column_stores), [point])
            states = self._updated(each, reductions, point, unflatten(carried, start), None)
            if each.stores or each.checks:
                self._fn.branch(inside, partial(self._effects, each, point))
        return flatten(states)


def unit_of(kernel: LoopKernel) -> int:
    """How many columns a thread takes at once: as many as lie in 16 bytes, if all that is read and written of a row lies side by side."""
    body = kernel.body
    if kernel.depth is not None or not isinstance(kernel.cols, int):
        return 1
    varying = tuple("c" in deps for deps in body.deps)

    def varies(name: str) -> bool:
        return name == "c" or (name.startswith("%") and varying[int(name[1:])])

    read = (node for n, node in enumerate(body.nodes) if node.op == "load" and varying[n])
    loads = [(node.index, body.buffers[node.buffer], bool(node.args)) for node in read]
    stores = [(s.index, body.buffers[s.buffer], s.guard >= 0) for s in body.stores if any(varies(x.name) for x in symbols(s.index))]
    unit = VECTOR // max((dtype.bytes for _, dtype, _ in (*loads, *stores)), default=VECTOR)
    for at, _, guarded in (*loads, *stores):
        form = index.lane_form(at, unit, varies)
        if guarded or form is None or not (form.uniform or (form.contiguous and index.aligned(at, unit))):
            return 1
    return unit if kernel.cols % unit == 0 else 1


def is_across(kernel: LoopKernel) -> bool:
    """Whether something is read side by side along the rows, and far apart along the columns."""
    if kernel.rows is None or kernel.depth is not None or unit_of(kernel) > 1:
        return False
    turned = {"r": axis("c", kernel.rows), "c": axis("r", kernel.cols)}
    for at in (node.index for node in kernel.body.nodes if node.op == "load"):
        known = not any(each.name.startswith("%") for each in symbols(at))
        along, across = (index.lane_form(form, _PATCH[1], "c".__eq__) for form in (at, substitute(at, turned)))
        apart = along is None or not (along.uniform or along.contiguous)
        if known and apart and across is not None and across.contiguous:
            return True
    return False


def _group_size(units: Dim, least: int) -> int:
    """How many threads share a row: a power of two, at least so many units for each."""
    if not isinstance(units, int):
        return THREADS
    size = 1
    while size < _MOST_THREADS and size * least < units:
        size *= 2
    return size
