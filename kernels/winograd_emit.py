"""The functions of a convolution by minimal filtering (`winograd.py`): one kernel over strips of patches, and one over column panels.

    <name>.body         strips and panels of one matrix, block by block:
        <name>.patches      one strip into V
        packing of V        where tiles do not read rows
        products            16 of them for each group of panels, into M
        <name>.places       one strip of M into two lines of results
        <name>.epilogue     the loop IR of the epilogue over a line of results
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ..cpu_codegen import convert
from ..cpu_codegen.builder import F32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import BufferSlot
from ..graph.dims import product
from ..graph.types import DType, f32, u8
from ..platforms.target import Target
from . import finished
from .gemm import LHS, RHS, Cut, emit_entries, emit_epilogue
from .indexing import wanted_slots
from .micro import MicroKernel, Start, share_of, shares_of
from .pack_lhs import emit_pack_lhs
from .packing import int_of
from .spec import GemmCode, GemmSpec
from .tile import emit_tile, in_blocks
from .winograd import POINTS, SCALE, Image, Plan, plan

_ROWS = range(4)


def emit(module: Module, target: Target, spec: GemmSpec, micros: Sequence[MicroKernel], name: str) -> GemmCode:
    """Adds the functions of a convolution that `winograd.why_not` accepts, on the tallest of `micros`, and returns what they are."""
    made = plan(target, spec, micros)
    micro, packing, n = made.micro, made.micro.packing, int_of(spec.n)
    panels, packed = int_of(packing.panels(n)), int_of(packing.bytes(n, made.image.channels, made.micro.rhs)) * POINTS
    strips = product((made.image.images(spec.m), made.image.lines, made.strips))
    rows, columns = Cut(strips, 1), Cut(panels, micro.panels)
    used = emit_epilogue(module, target, spec, micro.acc_ty, micro.nr, name)
    dims = (strips, spec.m, packed, panels, columns.padded(spec.batch))
    wanted = wanted_slots(dims, spec.lhs_strides.batch)
    order = tuple(dict.fromkeys((*used, BufferSlot(LHS), BufferSlot(RHS), *wanted)))
    lanes = finished.lanes(micro)
    wide = lanes * made.micro.acc.bytes // made.micro.lhs.bytes  # elements of V in a vector
    _emit_patches(module, made, spec.lhs, gcd(wide, made.image.channels), f"{name}.patches")
    _emit_places(module, made, lanes, f"{name}.places")
    _Body(module, spec, made, target, name).emit()
    work = spec.batch * spec.m * (n * made.image.channels * 4)  # 16 multiplications for four results
    by_strips, by_panels = emit_entries(module, spec, micro, order, packed, name, rows, columns, work)
    return GemmCode(by_strips, by_panels, packing, None, packed * spec.weights)


def _emit_patches(module: Module, made: Plan, dtype: DType, lanes: int, name: str) -> None:
    """void name(ptr image, i64 strip, ptr v): V of one strip; those of all images are counted through."""
    fn = Function(module, name, VOID, [PTR, I64, PTR], internal=True)
    source, strip, v = fn.args
    image, element = made.image, convert.memory_type(dtype)
    number, y, begin = _place(fn, made, strip)
    start = fn.gep(source, fn.mul(number, i64(image.step)), element)
    # The last patches may reach beyond the image; what they have there is for results that nobody reads.
    apart = image.apart
    heights = [fn.smin(fn.add(y, i64(r * apart)), i64(image.height + 2 * apart - 1)) for r in _ROWS]
    lines = [fn.gep(start, fn.mul(height, i64(image.line)), element) for height in heights]
    end = fn.smin(fn.add(begin, i64(made.span)), i64(image.across))

    def read(place: Val) -> Val:
        value = fn.load(element.vec(lanes), place)
        if dtype.is_float:
            return value if dtype == f32 else convert.widen(fn, value, dtype)
        return fn.convert("zext" if dtype == u8 else "sext", value, made.micro.layout.element.vec(lanes))

    def patch(x: Val, _: list[Val]) -> list[Val]:
        first, most = _first(fn, image, x), i64(image.width + 2 * apart - 1)
        columns = [fn.mul(fn.smin(fn.add(first, i64(s * apart)), most), i64(image.pixel)) for s in _ROWS]
        to = fn.gep(v, fn.sub(x, begin), scale=made.pitch)

        def channels(c: Val, at_lines: list[Val]) -> list[Val]:
            # The lines step along: a place is the sum of one of them and a column, which is an address, and no 16 registers are needed.
            d = [[read(fn.gep(line, column, element)) for column in columns] for line in at_lines]
            half = list(zip(*[_differences(fn, column) for column in zip(*d)]))
            at = fn.gep(to, c, made.micro.layout.element)
            for r in _ROWS:
                for s, value in enumerate(_differences(fn, half[r])):
                    fn.store(value, fn.gep(at, i64((4 * r + s) * made.matrix)))
            return [fn.gep(line, i64(lanes), element) for line in at_lines]

        fn.loop(i64(0), i64(image.channels), lanes, lines, channels)
        return []

    fn.loop(begin, end, 1, [], patch)
    fn.ret()
    fn.finish()


def _place(fn: Function, made: Plan, strip: Val) -> tuple[Val, Val, Val]:
    """Of a strip: the number of its image, its first line of results, and its first patch in a line of them."""
    image, line = made.image, fn.udiv(strip, i64(made.strips))
    begin = fn.mul(fn.urem(strip, i64(made.strips)), i64(made.span))
    return fn.udiv(line, i64(image.lines)), _first(fn, image, fn.urem(line, i64(image.lines))), begin


def _first(fn: Function, image: Image, patch: Val) -> Val:
    """The first place of a patch along one axis."""
    apart = i64(image.apart)
    return fn.mul(patch, i64(2)) if image.apart == 1 else fn.add(patch, fn.mul(fn.udiv(patch, apart), apart))


def _differences(fn: Function, d: Sequence[Val]) -> list[Val]:
    """B^T d."""
    return [fn.sub(d[0], d[2]), fn.add(d[1], d[2]), fn.sub(d[2], d[1]), fn.sub(d[1], d[3])]


def _sums(fn: Function, m: Sequence[Val]) -> list[Val]:
    """A^T m."""
    return [fn.add(fn.add(m[0], m[1]), m[2]), fn.sub(fn.sub(m[1], m[2]), m[3])]


def _emit_places(module: Module, made: Plan, lanes: int, name: str) -> None:
    """void name(ptr m, ptr y): one strip of M as two lines of results, [2][2 * span][columns of a tile]."""
    fn = Function(module, name, VOID, [PTR, PTR], internal=True)
    m, y = fn.args
    nr, span, vector, apart = made.micro.nr, made.span, made.micro.acc_ty.vec(lanes), made.image.apart
    scale = SCALE.bit_length() - 1

    def patch(x: Val, _: list[Val]) -> list[Val]:
        source, to = fn.gep(m, x, scale=4 * nr), fn.gep(y, _first(fn, made.image, x), scale=4 * nr)
        for column in range(0, nr, lanes):
            points = [[fn.load(vector, fn.gep(source, i64((4 * r + s) * made.out + 4 * column))) for s in _ROWS] for r in _ROWS]
            half = zip(*[_sums(fn, each) for each in zip(*points)])
            for p, row in enumerate(half):
                for q, value in enumerate(_sums(fn, row)):
                    # Of integers it is SCALE times the result: what wrapped around on the way is right again.
                    result = value if made.micro.acc.is_float else fn.ashr(value, const(vector, scale))
                    fn.store(result, fn.gep(to, i64(4 * (nr * (2 * span * p + q * apart) + column))))
        return []

    fn.loop(i64(0), i64(span), 1, [], patch)
    fn.ret()
    fn.finish()


class _Body:
    """Writes the `<name>.body` of `gemm.emit_entries`, whose rows are strips; row_base is the number of its first row in the result."""

    def __init__(self, module: Module, spec: GemmSpec, made: Plan, target: Target, name: str) -> None:
        self.fn = Function(module, f"{name}.body", VOID, [PTR, PTR, PTR, *[I64] * 5], internal=True)
        self.made, self.micro, self.name, self.n = made, made.micro, name, int_of(spec.n)
        _, self.lhs, self.rhs, self.row_base, self.t0, self.t1, self.p0, self.p1 = self.fn.args
        packing, channels = made.micro.packing, made.image.channels
        self.panel_bytes = int_of(packing.panel_bytes(channels, self.micro.rhs))
        self.matrix_bytes = int_of(packing.bytes(self.n, channels, self.micro.rhs))
        # Weights that stay in L2 need no asking for. A strip of one tile asks for all the next ones, which lie in another matrix.
        streams = POINTS * self.matrix_bytes > target.l2 // 2
        self.shares = max(1, shares_of(-(-made.span // self.micro.mr))) if streams else 0
        blocks = in_blocks(self.micro, channels)
        self.tile = emit_tile(module, self.micro, Start.ZERO, self.micro.nr, made.pitch, self.shares, blocks=blocks)
        self.pack = emit_pack_lhs(module, target, self.micro, made.pitch, True) if made.grouped else ""
        self.v = self.fn.alloca(POINTS * made.matrix)
        self.groups = self.fn.alloca(POINTS * made.grouped) if made.grouped else self.v
        self.m = self.fn.alloca(POINTS * made.out)
        self.y = self.fn.alloca(2 * 2 * made.span * self.micro.nr * 4)

    def emit(self) -> None:
        fn = self.fn
        fn.loop(self.t0, self.t1, self.made.together, [], self._block)
        fn.ret()
        fn.finish()

    def _block(self, strip: Val, _: list[Val]) -> list[Val]:
        fn, made = self.fn, self.made
        count = fn.smin(fn.sub(self.t1, strip), i64(made.together))
        rows, size = fn.mul(count, i64(made.span)), made.span * self.micro.nr * 4

        def patches(i: Val, _: list[Val]) -> list[Val]:
            fn.call(f"{self.name}.patches", VOID, [self.lhs, fn.add(strip, i), fn.gep(self.v, i, scale=made.span * made.pitch)])
            return []

        def panels(p: Val, _: list[Val]) -> list[Val]:
            last = i64(self.n // self.micro.packing.nr - (self.n % self.micro.packing.nr == 0))
            starts = [fn.mul(fn.smin(fn.add(p, i64(j)), last), i64(self.panel_bytes)) for j in range(self.micro.panels)]
            self._products(rows, starts)
            fn.loop(i64(0), count, 1, [], lambda i, _: self._results(fn.add(strip, i), fn.gep(self.m, i, scale=size), p))
            return []

        fn.loop(i64(0), count, 1, [], patches)
        if made.grouped:
            fn.loop(i64(0), i64(POINTS), 1, [], lambda point, _: self._packed(point, rows))
        else:
            self._fill(rows)
        fn.loop(self.p0, self.p1, self.micro.panels, [], panels)
        return []

    def _fill(self, rows: Val) -> None:
        """Zeros in what the last tile reads beyond the patches: whatever was there may be numbers that are slow to multiply."""
        fn, made, lanes = self.fn, self.made, finished.lanes(self.micro)
        whole = fn.mul(fn.udiv(fn.add(rows, i64(self.micro.mr - 1)), i64(self.micro.mr)), i64(self.micro.mr))
        nothing = const(F32.vec(lanes), 0.0)

        def row(index: Val, _: list[Val]) -> list[Val]:
            def point(n: Val, _: list[Val]) -> list[Val]:
                place = fn.gep(fn.gep(self.v, n, scale=made.matrix), index, scale=made.pitch)

                def some(at: Val, _: list[Val]) -> list[Val]:
                    fn.store(nothing, fn.gep(place, at), 4)
                    return []

                return fn.loop(i64(0), i64(made.pitch), 4 * lanes, [], some)

            return fn.loop(i64(0), i64(POINTS), 1, [], point)

        fn.loop(rows, whole, 1, [], row)

    def _packed(self, point: Val, rows: Val) -> list[Val]:
        """A matrix of V, tile by tile, in the form that these read."""
        fn, made, micro, channels = self.fn, self.made, self.micro, i64(self.made.image.channels)
        source, target = fn.gep(self.v, point, scale=made.matrix), fn.gep(self.groups, point, scale=made.grouped)

        def tile(i: Val, _: list[Val]) -> list[Val]:
            valid, to = fn.smin(fn.sub(rows, i), i64(micro.mr)), fn.gep(target, fn.mul(i, channels), F32)
            place = fn.gep(source, i, scale=made.pitch)
            fn.call(self.pack, VOID, [place, i64(made.pitch), i64(4), valid, i64(micro.mr), channels, to])
            return []

        fn.loop(i64(0), rows, micro.mr, [], tile)
        return []

    def _products(self, rows: Val, starts: Sequence[Val]) -> None:
        """M of `rows` patches and the panels that begin `starts` bytes after those of each matrix."""
        fn, made, micro = self.fn, self.made, self.micro

        def point(n: Val, _: list[Val]) -> list[Val]:
            a, out = fn.gep(self.groups, n, scale=made.grouped or made.matrix), fn.gep(self.m, n, scale=made.out)
            rhs = fn.gep(self.rhs, n, scale=self.matrix_bytes)
            b = [fn.gep(rhs, start) for start in starts]

            def tile(i: Val, _: list[Val]) -> list[Val]:
                place, to = fn.gep(a, i, scale=4 * made.image.channels if made.grouped else made.pitch), fn.gep(out, i, scale=micro.nr * 4)
                steps = i64(made.image.channels // micro.step_k)
                following = share_of(fn, micro, self.shares, fn.udiv(i, i64(micro.mr)), steps, i64(self.matrix_bytes))
                fn.call(self.tile, VOID, [place, i64(made.pitch), to, steps, following, *b])
                return []

            fn.loop(i64(0), rows, micro.mr, [], tile)
            return []

        fn.loop(i64(0), i64(POINTS), 1, [], point)

    def _results(self, strip: Val, m: Val, p: Val) -> list[Val]:
        """The results of one strip, and their epilogue."""
        fn, made, image, nr = self.fn, self.made, self.made.image, self.micro.nr
        fn.call(f"{self.name}.places", VOID, [m, self.y])
        number, y, begin = _place(fn, made, strip)
        x = fn.mul(begin, i64(2))
        places = fn.smin(i64(2 * made.span), fn.sub(i64(image.width), x))
        row = fn.add(self.row_base, fn.add(fn.mul(fn.add(fn.mul(number, i64(image.height)), y), i64(image.width)), x))
        column = fn.mul(p, i64(self.micro.packing.nr))
        end = fn.smin(i64(self.n), fn.mul(self.p1, i64(self.micro.packing.nr)))
        columns = fn.smin(i64(nr), fn.sub(end, column))

        def line(q: Val, _: list[Val]) -> list[Val]:
            at, first = fn.gep(self.y, q, scale=2 * made.span * nr * 4), fn.add(row, fn.mul(q, i64(image.apart * image.width)))
            fn.call(f"{self.name}.epilogue", VOID, [fn.args[0], at, first, places, column, columns])
            return []

        below = fn.udiv(fn.sub(i64(image.height + image.apart - 1), y), i64(image.apart))
        fn.loop(i64(0), fn.smin(i64(2), below), 1, [], line)
        return []
