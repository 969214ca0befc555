"""Polynomials in canonical form, the symbolic integers of `dims.py`: the types and their ring operations.

Division is not among them: `dims.floordiv` and `dims.mod` prove what they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Union

UNBOUNDED = 1 << 48  # larger than any tensor


@dataclass(frozen=True)
class Symbol:
    """An unknown integer in [lo, hi], of any size where lo is -UNBOUNDED; an axis of a loop also knows the `extent` it stays below."""

    name: str
    lo: int = 0
    hi: int | None = None
    extent: Dim | None = None

    @property
    def key(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Func:
    """An opaque integer function of other expressions; `kind` is floordiv, mod, min or max."""

    kind: str
    args: tuple[Dim, ...]

    @cached_property
    def key(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.args))})"

    def __hash__(self) -> int:
        return hash(self.key)


Atom = Union[Symbol, Func]
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class Poly:
    """Sum of coefficient * product of atoms; never a plain constant (that is an int)."""

    terms: tuple[tuple[Monomial, int], ...]

    @cached_property
    def _hash(self) -> int:
        return hash(str(self))

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Dim) -> Dim:
        if isinstance(other, int) and not other:
            return self
        merged = dict(self.terms)
        for mono, coefficient in terms_of(other):
            merged[mono] = merged.get(mono, 0) + coefficient
        return from_terms(merged)

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + other * -1

    def __rsub__(self, other: Dim) -> Dim:
        return self * -1 + other

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, int):  # the order of terms stays
            return self if other == 1 else Poly(tuple((mono, c * other) for mono, c in self.terms)) if other else 0
        merged: dict[Monomial, int] = {}
        for mono_a, a in self.terms:
            for mono_b, b in other.terms:
                mono = tuple(sorted(mono_a + mono_b, key=_atom_key)) if mono_a and mono_b else mono_a or mono_b
                merged[mono] = merged.get(mono, 0) + a * b
        return from_terms(merged)

    __rmul__ = __mul__

    @cached_property
    def _text(self) -> str:
        parts = []
        for mono, coefficient in self.terms:
            factors = [a.key for a in mono]
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            parts.append("*".join(factors))
        return " + ".join(parts)

    @cached_property
    def _symbols(self) -> frozenset[Symbol]:
        atoms = {atom for mono, _ in self.terms for atom in mono}
        inner = [symbols(arg) for atom in atoms if isinstance(atom, Func) for arg in atom.args]
        return frozenset({atom for atom in atoms if isinstance(atom, Symbol)}).union(*inner)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return self._text


Dim = Union[int, Poly]
Shape = tuple[Dim, ...]


def _atom_key(atom: Atom) -> str:
    return atom.key


def terms_of(value: Dim) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(value, Poly):
        return value.terms
    return (((), int(value)),) if value else ()


def from_terms(terms: Mapping[Monomial, int]) -> Dim:
    kept = [item for item in terms.items() if item[1]]
    if not kept:
        return 0
    if len(kept) == 1:
        return Poly((kept[0],)) if kept[0][0] else kept[0][1]
    return Poly(tuple(sorted(kept, key=_term_key)))


def _term_key(term: tuple[Monomial, int]) -> tuple[bool, tuple[str, ...]]:
    """Terms in the order of their atoms' names, the constant last."""
    return (not term[0], tuple([a.key for a in term[0]]))


@lru_cache(maxsize=1 << 10)
def symbol(name: str, lo: int = 0, hi: int | None = None, extent: Dim | None = None) -> Dim:
    """The expression that is just one unknown; a symbol whose range is one value is that value."""
    if hi is not None and hi == lo:
        return lo
    return Poly((((Symbol(name, lo, hi, extent),), 1),))


def product(dims: Iterable[Dim]) -> Dim:
    """Product of dimensions; 1 for none."""
    factors = tuple(dims)
    for factor in factors:
        if isinstance(factor, Poly):
            return _product(factors)
    return prod(factors)


@lru_cache(maxsize=1 << 12)
def _product(factors: Shape) -> Dim:
    result: Dim = 1
    for factor in factors:
        result = result * factor
    return result


def symbols(value: Dim) -> frozenset[Symbol]:
    """All symbols in an expression."""
    return value._symbols if isinstance(value, Poly) else frozenset()


def single(value: Dim, kind: str) -> tuple[Dim, ...] | None:
    """The arguments of `value` when it is exactly one function of `kind`."""
    if isinstance(value, Poly) and len(value.terms) == 1:
        mono, factor = value.terms[0]
        if factor == 1 and len(mono) == 1 and isinstance(mono[0], Func) and mono[0].kind == kind:
            return mono[0].args
    return None


def non_negative_for_any(value: Dim) -> bool:
    """Whether an expression is known to be at least 0 whatever its symbols are: a call may bring a size below the least that proofs
    elsewhere rely on."""
    return all(factor >= 0 and all(map(_atom_for_any, mono)) for mono, factor in terms_of(value))


def _atom_for_any(atom: Atom) -> bool:
    if isinstance(atom, Symbol):
        return True
    known = [non_negative_for_any(arg) for arg in atom.args]
    return any(known) if atom.kind == "max" else known[-1] if atom.kind == "mod" else all(known)
