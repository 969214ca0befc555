"""Index expressions to code: scalars, vectors and pointers, each part computed in the outermost place it allows.

An expression is split by what its terms depend on: nothing (one slot of the kernel), then r, k, and c. Partial sums are remembered
in the scope where they are first asked for, so asking for the outer parts before a loop takes them out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..graph.dims import Atom, Dim, Func, Poly, bounds, non_negative, symbols
from . import index as forms
from .access import lane_offsets
from .builder import I64, Function, Ty, Val, const, const_vec, i64
from .scopes import Key, Point, Scopes
from .slots import Slots

# Evaluated from the outside in; a part that depends on c changes most often.
_RANK = {"r": 1, "k": 2, "c": 4}
_I32 = 1 << 31
NodeValue = Callable[[int, Point], Val]


@dataclass(frozen=True)
class Needs:
    """What an expression varies with: axes, and the bits of the nodes whose values it contains."""

    axes: frozenset[str]
    sources: int

    @property
    def rank(self) -> int:
        return sum(_RANK[axis] for axis in self.axes)


@dataclass(frozen=True)
class Level:
    """Terms of an expression that vary with the same things, and their sum with all terms outside them."""

    part: Dim
    needs: Needs
    total: Dim
    total_needs: Needs


class Addresses:
    """Emits index expressions of one body. `deps` and `sources`: of each node; `value(n, point)` gives a node's integer value;
    `ready(sources, point)`: whether what comes from elsewhere among these, such as a reduction, has been provided."""

    def __init__(
        self, fn: Function, slots: Slots, scopes: Scopes, deps: tuple[frozenset[str], ...], sources: tuple[int, ...], value: NodeValue,
        ready: Callable[[int, Point], bool],
    ) -> None:
        self._fn, self._slots, self._scopes, self._value, self._ready = fn, slots, scopes, value, ready
        self._deps, self._sources, self._varies = deps, sources, forms.by_column(deps)
        self._needs: dict[Dim, Needs] = {}
        self._forms: dict[tuple[Dim, int], forms.LaneForm | None] = {}
        self._known_levels: dict[Dim, tuple[Level, ...]] = {}

    # -- analysis -----------------------------------------------------------------------------------------------
    def needs(self, index: Dim) -> Needs:
        found = self._needs.get(index)
        if found is None:
            axes: frozenset[str] = frozenset()
            sources = 0
            for s in symbols(index):
                if s.name.startswith("%"):
                    node = int(s.name[1:])
                    axes |= self._deps[node]
                    sources |= self._sources[node]
                elif s.name in _RANK:
                    axes |= {s.name}
            found = self._needs[index] = Needs(axes, sources)
        return found

    def form(self, index: Dim, lanes: int) -> forms.LaneForm | None:
        key = (index, lanes)
        if key not in self._forms:
            self._forms[key] = forms.lane_form(index, lanes, self._varies)
        return self._forms[key]

    def _key(self, kind: str, index: Dim, axes: frozenset[str], point: Point) -> Key:
        return (kind, index, *(point.axes[a].ref for a in sorted(axes)), point.lanes if "c" in axes else 0)

    def _levels(self, index: Dim) -> tuple[Level, ...]:
        """The parts of a polynomial from the outside in; a plain number comes last, where it folds into the instruction."""
        known = self._known_levels.get(index)
        if known is not None:
            return known
        parts: dict[int, Dim] = {}
        number: Dim = 0 if isinstance(index, Poly) else index
        for mono, factor in index.terms if isinstance(index, Poly) else ():
            if not mono:
                number = factor
                continue
            term = forms.monomial(mono, factor)
            rank = 2 * self.needs(term).rank + (1 if self.needs(term).sources else 0)
            parts[rank] = parts.get(rank, 0) + term
        levels: list[Level] = []
        total: Dim = 0
        for part in [part for _, part in sorted(parts.items())] + [number]:
            if part != 0:
                total = total + part
                levels.append(Level(part, self.needs(part), total, self.needs(total)))
        self._known_levels[index] = tuple(levels)
        return self._known_levels[index]

    # -- scalars ------------------------------------------------------------------------------------------------
    def scalar(self, index: Dim, point: Point) -> Val:
        """The i64 value of an expression at a point (at lane 0)."""
        value = i64(0)
        for level in self._levels(index):
            key = self._key("i", level.total, level.total_needs.axes, point)
            known = self._scopes.find(key)
            if known is None:
                known = self._fn.add(value, self._part(level.part, level.needs, point))
                self._scopes.put(key, known, level.total_needs.sources)
            value = known
        return value

    def _part(self, part: Dim, needs: Needs, point: Point) -> Val:
        """Terms that depend on the same things: products of atoms with factors that are known when the shapes are."""
        if not needs.axes and not needs.sources:
            return self._slots.dim(part)
        key = self._key("t", part, needs.axes, point)
        known = self._scopes.find(key)
        if known is not None:
            return known
        assert isinstance(part, Poly)
        factors: dict[tuple[Atom, ...], Dim] = {}
        for mono, factor in part.terms:
            fixed = tuple(a for a in mono if self._is_fixed(a))
            moving = tuple(a for a in mono if not self._is_fixed(a))
            factors[moving] = factors.get(moving, 0) + forms.monomial(fixed, factor)
        total = i64(0)
        for moving, scale in factors.items():
            term = self._slots.dim(scale)
            for atom in moving:
                term = self._fn.mul(self._atom(atom, point), term)
            total = self._fn.add(total, term)
        return self._scopes.put(key, total, needs.sources)

    def _is_fixed(self, atom: Atom) -> bool:
        needs = self.needs(forms.atom_dim(atom))
        return not needs.axes and not needs.sources

    def _atom(self, atom: Atom, point: Point) -> Val:
        if not isinstance(atom, Func):
            if not atom.name.startswith("%"):
                return point.axes[atom.name]
            return self._as_i64(self._value(int(atom.name[1:]), point))
        if atom.kind == "mod" and point.lanes and forms.begins_run(atom, point.lanes, self._varies):
            return i64(0)
        dim = forms.atom_dim(atom)
        needs = self.needs(dim)
        key = self._key("f", dim, needs.axes, point)
        known = self._scopes.find(key)
        if known is None:
            a, b = (self.scalar(arg, point) for arg in atom.args)
            # As something of its own to LLVM, which would otherwise divide again at each use, in the innermost loop.
            known = self._scopes.put(key, self._fn.freeze(self._function(atom, a, b)), needs.sources)
        return known

    def _function(self, atom: Func, a: Val, b: Val) -> Val:
        fn = self._fn
        if atom.kind in ("min", "max"):
            return fn.smin(a, b) if atom.kind == "min" else fn.smax(a, b)
        if not isinstance(atom.args[1], int):
            b = fn.smax(b, i64(1))  # the size of an empty tensor: nothing is read through this index, but the division must not trap
        if non_negative(atom.args[0]):
            return fn.udiv(a, b) if atom.kind == "floordiv" else fn.urem(a, b)
        rest = fn.rem(a, b)
        below = fn.icmp("slt", rest, i64(0))
        if atom.kind == "mod":
            return fn.select(below, fn.add(rest, b), rest)
        quotient = fn.div(a, b)
        return fn.select(below, fn.sub(quotient, i64(1)), quotient)

    def _as_i64(self, value: Val) -> Val:
        return value if value.ty.scalar == "i64" else self._fn.convert("sext", value, value.ty.of("i64"))

    def beside(self, index: Dim, first: Point, point: Point, count: int) -> None:
        """Functions of the row at a point, from those at another one: its row is `count` further on in the same run of all divisors."""
        for atom in forms.functions(index):
            dim = forms.atom_dim(atom)
            needs = self.needs(dim)
            if needs.axes == {"r"} and self._scopes.find(key := self._key("f", dim, needs.axes, point)) is None:
                value = self._atom(atom, first)
                self._scopes.put(key, self._fn.add(value, i64(count)) if forms.moves(atom) else value, needs.sources)

    # -- vectors ------------------------------------------------------------------------------------------------
    def vector(self, index: Dim, point: Point) -> Val:
        """The i64 value of an expression at every lane."""
        fn, lanes = self._fn, point.lanes
        form = self.form(index, lanes)
        if form is not None:
            base = fn.splat(self.scalar(index, point), lanes)
            if form.uniform:
                return base
            offsets = self.offsets(form, point)
            return fn.add(base, offsets if offsets.ty == base.ty else fn.convert("sext", offsets, base.ty))
        assert isinstance(index, Poly)
        uniform: Dim = 0
        total: Val | None = None
        for mono, factor in index.terms:
            moving = [a for a in mono if forms.varies_over_lanes(a, self._varies)]
            if not moving:
                uniform = uniform + forms.monomial(mono, factor)
                continue
            term = fn.splat(self.scalar(forms.monomial(tuple(a for a in mono if a not in moving), factor), point), lanes)
            for atom in moving:
                term = fn.mul(term, self._atom_vector(atom, point))
            total = term if total is None else fn.add(total, term)
        assert total is not None
        return total if uniform == 0 else fn.add(total, fn.splat(self.scalar(uniform, point), lanes))

    def offsets(self, form: forms.LaneForm, point: Point) -> Val:
        """Where the lanes are relative to lane 0; 32-bit numbers where they are constants (LLVM sign-extends indices)."""
        lanes = point.lanes
        each = form.offsets or (0,) * lanes
        if isinstance(form.step, int):
            return lane_offsets([form.step * lane + each[lane] for lane in range(lanes)])
        ids = const_vec(I64.vec(lanes), range(lanes))
        steps = self._fn.mul(self._fn.splat(self.scalar(form.step, point), lanes), ids)
        return self._fn.add(steps, const_vec(I64.vec(lanes), each)) if form.offsets else steps

    def _atom_vector(self, atom: Atom, point: Point) -> Val:
        fn, lanes = self._fn, point.lanes
        if not isinstance(atom, Func):
            if atom.name == "c":
                return fn.add(fn.splat(point.axes["c"], lanes), const_vec(I64.vec(lanes), range(lanes)))
            return self._as_i64(self._value(int(atom.name[1:]), point))
        a, b = atom.args
        if atom.kind in ("min", "max"):
            left, right = self.vector(a, point), self.vector(b, point)
            return fn.smin(left, right) if atom.kind == "min" else fn.smax(left, right)
        top, bottom = self.form(a, lanes), self.form(b, lanes)
        at_least = bounds(b)[0]
        if top is not None and top.step == 1 and not top.offsets and bottom is not None and bottom.uniform and (at_least or 0) >= lanes:
            return self._wrapping_once(atom, point)
        if isinstance(b, int) and 0 < b < _I32 and non_negative(a) and (bounds(a)[1] or _I32) < _I32:
            return self._by_number(atom.kind, self.vector(a, point), b)
        left, right = self.vector(a, point), self.vector(b, point)
        # Indices are far below 2^52, where the floor of the quotient in double is exact.
        wide = left.ty.of("double")
        ratio = fn.div(fn.convert("sitofp", left, wide), fn.convert("sitofp", right, wide))
        quotient = fn.convert("fptosi", fn.intrinsic("floor", wide, [ratio]), left.ty)
        return quotient if atom.kind == "floordiv" else fn.sub(left, fn.mul(quotient, right))

    def _by_number(self, kind: str, value: Val, divisor: int) -> Val:
        """Quotient or remainder of what fits into 31 bits: LLVM multiplies instead, which it cannot do in 64 bits."""
        fn, narrow = self._fn, value.ty.of("i32")
        number = fn.convert("trunc", value, narrow)
        result = fn.udiv(number, const(narrow, divisor)) if kind == "floordiv" else fn.urem(number, const(narrow, divisor))
        return fn.convert("zext", result, value.ty)

    def _wrapping_once(self, atom: Func, point: Point) -> Val:
        """(base + lane) // divisor or % divisor, where the divisor is at least the number of lanes: it wraps at most once."""
        fn, lanes = self._fn, point.lanes
        a, b = atom.args
        divisor = fn.splat(self.scalar(b, point), lanes)
        rest = fn.splat(self._atom(Func("mod", (a, b)), point), lanes)
        moved = fn.add(rest, const_vec(I64.vec(lanes), range(lanes)))
        wraps = fn.icmp("sge", moved, divisor)
        if atom.kind == "mod":
            return fn.select(wraps, fn.sub(moved, divisor), moved)
        quotient = fn.splat(self._atom(Func("floordiv", (a, b)), point), lanes)
        return fn.select(wraps, fn.add(quotient, const(I64.vec(lanes), 1)), quotient)

    # -- pointers -----------------------------------------------------------------------------------------------
    def pointer(self, buffer: int, element: Ty, index: Dim, point: Point, within: frozenset[str] | None = None) -> Val:
        """Address of element `index` of a buffer (at lane 0). `within`: stop before the parts that need other axes than these, or what
        is not there yet."""
        pointer = self._slots.buffer(buffer)
        for level in self._levels(index):
            if within is not None and not (level.needs.axes <= within and self._ready(level.needs.sources, point)):
                break
            key = ("p", buffer, *self._key("p", level.total, level.total_needs.axes, point))
            known = self._scopes.find(key)
            if known is None:
                offset = self._part(level.part, level.needs, point)
                known = pointer if offset.ref == "0" else self._fn.gep(pointer, offset, element)
                self._scopes.put(key, known, level.total_needs.sources)
            pointer = known
        return pointer
