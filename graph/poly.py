"""Polynomials in canonical form, the symbolic integers of `dims.py`: the types and their ring operations.

Division is not among them: `dims.floordiv` and `dims.mod` prove what they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Union


@dataclass(frozen=True)
class Symbol:
    """An unknown non-negative integer in [lo, hi]; an axis of a loop also knows the `extent` it stays below."""

    name: str
    lo: int = 0
    hi: int | None = None
    extent: Dim | None = None

    @cached_property
    def key(self) -> str:
        return self.name


@dataclass(frozen=True)
class Func:
    """An opaque integer function of other expressions; `kind` is floordiv, mod, min or max."""

    kind: str
    args: tuple[Dim, ...]

    @cached_property
    def key(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.args))})"


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
        merged: dict[Monomial, int] = {}
        for mono_a, a in self.terms:
            for mono_b, b in terms_of(other):
                mono = tuple(sorted(mono_a + mono_b, key=_atom_key))
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
    kept = {mono: c for mono, c in terms.items() if c}
    if not kept:
        return 0
    if len(kept) == 1 and () in kept:
        return kept[()]
    return Poly(tuple(sorted(kept.items(), key=lambda item: (len(item[0]) == 0, tuple(a.key for a in item[0])))))


def symbol(name: str, lo: int = 0, hi: int | None = None, extent: Dim | None = None) -> Dim:
    """The expression that is just one unknown; a symbol whose range is one value is that value."""
    if hi is not None and hi == lo:
        return lo
    return Poly((((Symbol(name, lo, hi, extent),), 1),))


def product(dims: Iterable[Dim]) -> Dim:
    """Product of dimensions; 1 for none."""
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return result


def symbols(value: Dim) -> set[Symbol]:
    """All symbols in an expression."""
    found: set[Symbol] = set()
    for mono, _ in terms_of(value):
        for atom in mono:
            if isinstance(atom, Symbol):
                found.add(atom)
            else:
                for arg in atom.args:
                    found |= symbols(arg)
    return found
