"""What is known of an expression of sizes for all numbers in the ranges of its symbols: its bounds, and what is less than what."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import gcd

from .poly import UNBOUNDED, Atom, Dim, Func, Monomial, Poly, Symbol, from_terms, product, symbols, terms_of


@lru_cache(maxsize=1 << 14)
def bounds(value: Dim) -> tuple[int | None, int | None]:
    """Inclusive integer bounds (None: unbounded): those of each term by itself, or of what is left where quotients are measured by what
    they are of."""
    low, high = _interval(value)
    parts = {mono: factor for mono, factor in terms_of(value) if mono}
    if _may_cancel(parts):
        times, beside = gcd(*parts.values()), terms_of(value)[-1][1] if len(terms_of(value)) > len(parts) else 0
        least, less_most = (_least({mono: factor // by for mono, factor in parts.items()}) for by in (times, -times))
        low = max((end for end in (low, None if least is None else beside + times * least) if end is not None), default=None)
        high = min((end for end in (high, None if less_most is None else beside - times * less_most) if end is not None), default=None)
    return low, high


def _may_cancel(terms: Mapping[Monomial, int]) -> bool:
    """Whether there are quotients among the terms, and something grows where something else shrinks."""
    quotients = [atom for mono in terms if len(terms) > 1 for atom in mono if isinstance(atom, Func) and _divisor(atom)]
    return bool(quotients) and (len({factor > 0 for factor in terms.values()}) > 1 or not all(_grows(atom.args[0]) for atom in quotients))


def _grows(value: Dim) -> bool:
    inner = (atom.args[0] for mono, _ in terms_of(value) for atom in mono if isinstance(atom, Func) and _divisor(atom))
    return all(factor > 0 for mono, factor in terms_of(value) if mono) and all(map(_grows, inner))


def _least(terms: dict[Monomial, int]) -> int | None:
    """A lower bound, as x // k is between (x - k + 1) / k and x / k. Where x // 4 is among the terms, (x + 4) // 8 is a quotient of it."""
    scale = 1
    while (found := _next_quotient(terms)) is not None:
        mono, quotient = found
        x, divisor = quotient.args[0], _divisor(quotient)
        inner, whole = 1, x
        for atom in (atom for one in terms for atom in one if isinstance(atom, Func)):
            if inner < (by := _divisor(atom)) < divisor and divisor % by == 0:
                apart = x - atom.args[0]
                if isinstance(apart, int) and apart % by == 0:
                    inner, whole = by, Poly((((atom,), 1),)) + apart // by
        by, factor = divisor // inner, terms.pop(mono)
        times = by // gcd(by, factor)
        scale, factor, terms = scale * times, factor * times // by, {one: each * times for one, each in terms.items()}
        rest = list(mono)
        rest.remove(quotient)
        for one, each in terms_of(from_terms({tuple(rest): factor}) * (whole - (by - 1 if factor > 0 else 0))):
            terms[one] = terms.get(one, 0) + each
    low = _interval(from_terms(terms))[0]
    return None if low is None else -(-low // scale)


def _next_quotient(terms: Mapping[Monomial, int]) -> tuple[Monomial, Func] | None:
    """(term, quotient) of the one by the largest number."""
    found = (
        (mono, atom) for mono, factor in terms.items() for atom in mono
        if factor and isinstance(atom, Func) and _divisor(atom) and (len(mono) == 1 or all(map(_is_size, mono)))
    )
    return max(found, key=lambda one: _divisor(one[1]), default=None)


def _is_size(atom: Atom) -> bool:
    low = _atom_bounds(atom)[0]
    return low is not None and low >= 0


def _divisor(atom: Atom) -> int:
    """The number that a quotient is by; 0 where it is none by a known one."""
    by = atom.args[1] if isinstance(atom, Func) and atom.kind == "floordiv" else 0
    return by if isinstance(by, int) and by > 0 else 0


def _interval(value: Dim) -> tuple[int | None, int | None]:
    """Each term by itself."""
    if not isinstance(value, Poly):
        return value, value
    spans = {atom: _atom_bounds(atom) for mono, _ in value.terms for atom in mono}
    terms = value.terms
    if any(len(mono) > 1 for mono, _ in terms) and any(factor < 0 for _, factor in terms):
        # From the least numbers on, so that less is taken from a product with the same factor; of sizes from 1 on, which may be 0, from 0.
        sure = {atom for atom in spans if all(s.lo != 1 for s in symbols(Poly((((atom,), 1),))))}
        least = {atom: max(low or 0, 0) if atom in sure else 0 for atom, (low, _) in spans.items()}
        moved = (product([factor, *(Poly((((atom,), 1),)) + least[atom] for atom in mono)]) for mono, factor in terms)
        terms = terms_of(sum(moved))
        spans = {atom: (low and low - least[atom], None if high is None else high - least[atom]) for atom, (low, high) in spans.items()}
    low: int | None = 0
    high: int | None = 0
    for mono, coefficient in terms:
        lo, hi = spans[mono[0]] if len(mono) == 1 else (1, 1)
        for a_lo, a_hi in (spans[atom] for atom in mono if len(mono) > 1):
            if a_lo is None or a_lo < 0:
                lo, hi = None, None
                break
            lo = None if lo is None else lo * a_lo
            hi = None if hi is None or a_hi is None else hi * a_hi
        if coefficient < 0:
            lo, hi = hi, lo
        low = None if low is None or lo is None else low + coefficient * lo
        high = None if high is None or hi is None else high + coefficient * hi
    return low, high


def _atom_bounds(atom: Atom) -> tuple[int | None, int | None]:
    if isinstance(atom, Symbol):
        hi = atom.hi
        if hi is None and atom.extent is not None:
            extent_hi = bounds(atom.extent)[1]
            hi = None if extent_hi is None else extent_hi - 1
        return (None if atom.lo <= -UNBOUNDED else atom.lo), hi
    spans = [bounds(a) for a in atom.args]
    (a_lo, a_hi), (b_lo, b_hi) = spans[0], spans[-1]
    if atom.kind == "mod":
        return 0, None if b_hi is None else b_hi - 1
    if atom.kind == "floordiv":
        if by := _divisor(atom):
            return (None if a_lo is None else a_lo // by), (None if a_hi is None else a_hi // by)
        if a_lo is None or a_lo < 0 or b_lo is None or b_lo < 1:
            return None, None
        return (0 if b_hi is None else a_lo // b_hi), (None if a_hi is None else a_hi // b_lo)
    los, his = [s[0] for s in spans], [s[1] for s in spans]
    if atom.kind == "min":
        known = [h for h in his if h is not None]
        return (None if None in los else min(x for x in los if x is not None)), (min(known) if known else None)
    known = [x for x in los if x is not None] + ([0] if atom.args[0] + atom.args[1] == 0 else [])
    return (max(known) if known else None), (None if None in his else max(h for h in his if h is not None))


def non_negative(value: Dim) -> bool:
    low = bounds(value)[0]
    return low is not None and low >= 0


def less(a: Dim, b: Dim) -> bool:
    """True when a < b is proved for every value in range."""
    if (bounds(b - a)[0] or 0) > 0:
        return True
    if isinstance(a, Poly) and len(a.terms) == 1 and a.terms[0][1] == 1 and len(a.terms[0][0]) == 1:
        atom = a.terms[0][0][0]
        if isinstance(atom, Symbol) and atom.extent is not None:
            return atom.extent == b or non_negative(b - atom.extent)
        if isinstance(atom, Func) and atom.kind == "mod":
            return atom.args[1] == b
    greatest = _greatest(a)
    return greatest != a and (bounds(b - greatest)[0] or 0) > 0


def _greatest(value: Dim) -> Dim:
    """No less than `value`: every axis that adds to it is at its end."""
    total: Dim = 0
    for mono, factor in terms_of(value):
        term: Dim = factor
        grows = factor > 0 and all(map(_is_size, mono))
        for atom in mono:
            end = atom.extent if grows and isinstance(atom, Symbol) else None
            term = term * (Poly((((atom,), 1),)) if end is None else end - 1)
        total = total + term
    return total
