"""How an index expression varies over the lanes of a vector: the analysis that decides between splat, vector and gather access.

The column axis is the symbol `c`. At a point, `c` is the base column of the vector and lane i stands for column c + i; the base is a
multiple of the number of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..graph.dims import Atom, Dim, Func, Poly, Symbol, divides, product, symbols

Varies = Callable[[str], bool]


def by_column(deps: Sequence[frozenset[str]]) -> Varies:
    """Whether what an index names, `c` or the value of node n as `%n`, differs from column to column. deps: the axes of each node."""
    return lambda name: name == "c" or (name.startswith("%") and "c" in deps[int(name[1:])])


@dataclass(frozen=True)
class LaneForm:
    """index at lane i == index at lane 0 + i * step + offsets[i]; `offsets` is empty for zeros. `step` does not vary over lanes."""

    step: Dim = 0
    offsets: tuple[int, ...] = ()

    @property
    def uniform(self) -> bool:
        return self.step == 0 and not self.offsets

    @property
    def contiguous(self) -> bool:
        return self.step == 1 and not self.offsets


def atom_dim(atom: Atom) -> Dim:
    return Poly((((atom,), 1),))


def monomial(atoms: tuple[Atom, ...], factor: int = 1) -> Dim:
    """factor * product of atoms."""
    return product([factor, *map(atom_dim, atoms)])


def varies_over_lanes(atom: Atom, varies: Varies) -> bool:
    return any(varies(s.name) for s in symbols(atom_dim(atom)))


def aligned(index: Dim, lanes: int) -> bool:
    """Whether lane 0, whose column is a multiple of `lanes`, is at one too, wherever else the index leads."""
    return isinstance(index, Poly) and all(factor % lanes == 0 or _is_column(mono) for mono, factor in index.terms)


def _is_column(mono: tuple[Atom, ...]) -> bool:
    return len(mono) == 1 and isinstance(mono[0], Symbol) and mono[0].name == "c"


def lane_form(index: Dim, lanes: int, varies: Varies) -> LaneForm | None:
    """The form of `index`, or None when lanes must be computed one by one. `varies(name)`: whether a symbol differs between lanes."""
    if not isinstance(index, Poly) or not lanes:
        return LaneForm()
    step: Dim = 0
    offsets = [0] * lanes
    for mono, factor in index.terms:
        varying = [a for a in mono if varies_over_lanes(a, varies)]
        forms = [_atom_form(a, lanes, varies) for a in varying]
        if None in forms:
            return None
        moving = [(a, f) for a, f in zip(varying, forms) if f is not None and not f.uniform]
        if not moving:
            continue
        if len(moving) > 1:
            return None
        atom, form = moving[0]
        others = list(mono)
        others.remove(atom)
        scale = monomial(tuple(others), factor)
        step = step + scale * form.step
        if form.offsets:
            if not isinstance(scale, int):
                return None
            offsets = [total + scale * each for total, each in zip(offsets, form.offsets)]
    if not any(offsets):
        return LaneForm(step)
    if isinstance(step, int):
        return LaneForm(0, tuple(each + lane * step for lane, each in enumerate(offsets)))
    return LaneForm(step, tuple(offsets))


def _atom_form(atom: Atom, lanes: int, varies: Varies) -> LaneForm | None:
    if not isinstance(atom, Func):
        return LaneForm(1) if atom.name == "c" else None
    if atom.kind not in ("floordiv", "mod"):
        return None
    top = lane_form(atom.args[0], lanes, varies)
    bottom = lane_form(atom.args[1], lanes, varies)
    if top is None or bottom is None or not bottom.uniform:
        return None
    if top.uniform:
        return LaneForm()
    divisor = atom.args[1]
    if top.offsets or not isinstance(top.step, int) or top.step < 1:
        return None
    span = top.step * lanes
    if divides(span, divisor) and _multiple(atom.args[0], span, lanes, varies):
        # The whole vector lies within one run of `divisor`.
        return LaneForm() if atom.kind == "floordiv" else LaneForm(top.step)
    if top.step == 1 and begins_run(atom, lanes, varies) and isinstance(divisor, int):
        each = (lane // divisor if atom.kind == "floordiv" else lane % divisor for lane in range(lanes))
        return LaneForm(0, tuple(each))
    return None


def begins_run(atom: Func, lanes: int, varies: Varies) -> bool:
    """Whether lanes are whole runs of the divisor: lane 0 is at a multiple of it."""
    divisor = atom.args[1]
    return isinstance(divisor, int) and divisor > 0 and lanes % divisor == 0 and _multiple(atom.args[0], divisor, lanes, varies)


def _multiple(index: Dim, of: int, lanes: int, varies: Varies) -> bool:
    """Whether index at lane 0 is a multiple of `of`: a term in `c` alone, or its remainder by a multiple, counts `lanes` times its step."""
    if not isinstance(index, Poly):
        return index % of == 0
    for mono, factor in index.terms:
        form = _atom_form(mono[0], lanes, varies) if len(mono) == 1 else None
        if form is not None and isinstance(form.step, int) and not form.offsets and form.step and factor * form.step * lanes % of == 0:
            continue
        if not divides(of, monomial(mono, factor)):
            return False
    return True


def moves(atom: Atom) -> bool:
    """Whether an atom grows by one from a row to the next of a run: the row itself, and what is left of it after division."""
    return is_row(atom) or (isinstance(atom, Func) and atom.kind == "mod" and is_row(atom.args[0]))


def is_row(term: Dim | Atom) -> bool:
    """Whether a term is the number of the row."""
    if isinstance(term, Poly) and len(term.terms) == 1 and term.terms[0][1] == 1 and len(term.terms[0][0]) == 1:
        term = term.terms[0][0][0]
    return isinstance(term, Symbol) and term.name == "r"


def functions(index: Dim) -> Iterator[Func]:
    """The functions of positions in an expression, inner ones first."""
    for mono, _ in index.terms if isinstance(index, Poly) else ():
        for atom in mono:
            if isinstance(atom, Func):
                for argument in atom.args:
                    yield from functions(argument)
                yield atom


def row_run(indices: Iterable[Dim], rows: Dim) -> Dim | None:
    """So many rows, from a multiple of it on, have the same quotients by all that rows are divided by in expressions; None: there are no
    such runs. It divides the number of rows."""
    found = {rows, *(run for index in indices for run in _runs(index))}
    whole = [run for run in found if run is not None]
    return None if None in found else next((run for run in whole if all(divides(run, other) for other in whole)), None)


def _runs(index: Dim) -> Iterator[Dim | None]:
    """What the row is divided by; None where it is part of an expression in another way."""
    for atom in functions(index):
        names = {s.name for argument in atom.args for s in symbols(argument)}
        if "r" not in names:
            continue
        if atom.kind in ("floordiv", "mod") and is_row(atom.args[0]) and "r" not in {s.name for s in symbols(atom.args[1])}:
            yield atom.args[1]
        elif names & {"c", "k"} or any(name.startswith("%") for name in names) or not _stays(atom):
            yield None


def same_in_run(index: Dim) -> bool:
    """Whether an expression is the same at all rows of a run: the row is in it only as a quotient."""
    atoms = [atom for mono, _ in index.terms for atom in mono] if isinstance(index, Poly) else []
    return all(_stays(atom) for atom in atoms if "r" in {s.name for s in symbols(atom_dim(atom))})


def _stays(atom: Atom) -> bool:
    if not isinstance(atom, Func) or moves(atom):
        return False
    return (atom.kind == "floordiv" and is_row(atom.args[0])) or all(map(same_in_run, atom.args))
