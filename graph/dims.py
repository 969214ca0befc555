"""Symbolic integers: dimensions, strides and index expressions.

A `Dim` is a Python int or a `Poly`. Arithmetic on them gives canonical results, so equal expressions compare equal
and `product([B, S]) == product([S, B])` needs no solver. Floor division, remainder, minimum and maximum that do not
simplify become opaque atoms. Symbols carry their range, which is all that the proofs in this file use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import gcd

from .poly import Atom, Dim, Func, Monomial, Poly, Shape, Symbol, from_terms, product, single, symbol, symbols, terms_of

__all__ = [
    "Atom", "Dim", "Func", "Poly", "Shape", "Symbol", "bounds", "ceildiv", "coefficient", "divides", "evaluate", "floordiv",
    "less", "maximum", "minimum", "mod", "non_negative", "product", "rejoin", "substitute", "symbol", "symbols",
]


def _func(kind: str, *args: Dim) -> Dim:
    return Poly((((Func(kind, args),), 1),))


@lru_cache(maxsize=1 << 14)
def bounds(value: Dim) -> tuple[int | None, int | None]:
    """Inclusive integer bounds (None: unbounded) by interval arithmetic over the symbols' ranges."""
    spans = [_interval(value)]
    quotients = _quotients(value) if len(terms_of(value)) > 1 or None in spans[0] else []
    for mono, factor, x, divisor in quotients:
        for inner in {1, *(other for *_, other in quotients)}:
            b = divisor // inner
            if b > 1 and divisor % inner == 0 and factor % b == 0:  # k b (x // b) lies between k (x - b + 1) and k x, x a quotient, too
                times, rest = factor // b, value - from_terms({mono: factor})
                ends = [_interval(rest + times * (floordiv(x, inner) - lack)) for lack in (0, b - 1)][:: -1 if times > 0 else 1]
                spans.append((ends[0][0], ends[1][1]))
    if len(spans) == 1:
        return spans[0]
    lows, highs = ([end for end in found if end is not None] for found in zip(*spans, strict=True))
    return max(lows, default=None), min(highs, default=None)


def _quotients(value: Dim) -> list[tuple[Monomial, int, Dim, int]]:
    """(term, factor, x, divisor) of what is added up of quotients by known numbers."""
    found: list[tuple[Monomial, int, Dim, int]] = []
    for mono, factor in terms_of(value):
        if len(mono) == 1 and isinstance(mono[0], Func) and mono[0].kind == "floordiv":
            x, divisor = mono[0].args
            if isinstance(divisor, int) and divisor > 0:
                found.append((mono, factor, x, divisor))
    return found


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
        lo: int | None = 1
        hi: int | None = 1
        for a_lo, a_hi in (spans[atom] for atom in mono):
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
        return atom.lo, hi
    spans = [bounds(a) for a in atom.args]
    (a_lo, a_hi), (b_lo, b_hi) = spans[0], spans[-1]
    if atom.kind == "mod":
        return 0, None if b_hi is None else b_hi - 1
    if atom.kind == "floordiv":
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
        grows = factor > 0 and all((least := _atom_bounds(atom)[0]) is not None and least >= 0 for atom in mono)
        for atom in mono:
            end = atom.extent if grows and isinstance(atom, Symbol) else None
            term = term * (Poly((((atom,), 1),)) if end is None else end - 1)
        total = total + term
    return total


def _exact_quotient(a: Dim, b: Dim) -> Dim | None:
    """a / b when b is one monomial that divides every term of a."""
    (divisor, scale), *rest = terms_of(b) or (((), 0),)
    if rest or scale == 0:
        return None
    quotient: dict[Monomial, int] = {}
    for mono, coefficient in terms_of(a):
        left = list(mono)
        for atom in divisor:
            if atom not in left:
                return None
            left.remove(atom)
        if coefficient % scale:
            return None
        quotient[tuple(left)] = quotient.get(tuple(left), 0) + coefficient // scale
    return from_terms(quotient)


def divides(b: Dim, a: Dim) -> bool:
    """True when a % b == 0 is evident from the form of a and b."""
    return a == b or _exact_quotient(a, b) is not None


def _split(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """a == quotient * b + rest, with every term that b divides in the quotient."""
    quotient: Dim = 0
    rest: Dim = 0
    for mono, coefficient in terms_of(a):
        term = from_terms({mono: coefficient})
        exact = _exact_quotient(term, b)
        quotient, rest = (quotient, rest + term) if exact is None else (quotient + exact, rest)
    return quotient, rest


def _common(a: Dim, b: Dim) -> tuple[int, int, Dim, Dim]:
    """(f, n, x, d) with b == f * d and a == f * (n * d + x) + s for a number 0 <= s < f: a // b == n + x // d and a % b == f * (x % d) + s.
    The number in x is between -d and d, where x is no less than 0 for that: sizes that are equal are in one form then."""
    if not isinstance(b, int) or b <= 0:
        return 1, 0, a, b
    factor = gcd(b, *(coefficient for mono, coefficient in terms_of(a) if mono))
    if factor > 1:
        a, b = from_terms({mono: coefficient // factor for mono, coefficient in terms_of(a)}), b // factor
    mono, constant = terms_of(a)[-1]
    turns = 0 if mono else constant // b if constant > 0 else -(-constant // b)
    return (factor, turns, a - turns * b, b) if turns < 0 or (turns and non_negative(a - turns * b)) else (factor, 0, a, b)


def _of_quotient(a: Dim, b: Dim) -> tuple[Dim, Dim] | None:
    """(x, d) with a // b == x // d where a quotient is among the terms of a: (x // p + k) // q == (x + k * p) // (p * q) for positive p, q.
    In positions of loops other terms stay apart, as code looks there for what a quotient of the row is."""
    inner = single(a, "floordiv")
    if inner is not None:
        return (inner[0], inner[1] * b) if all((low := bounds(by)[0]) is not None and low >= 0 for by in (inner[1], b)) else None
    for mono, factor, x, by in _quotients(a) if isinstance(b, int) and b > 0 else ():
        if factor == 1 and all(s.extent is None for s in symbols(a)):
            return x + (a - from_terms({mono: 1})) * by, by * b
    return None


@lru_cache(maxsize=1 << 14)
def floordiv(a: Dim, b: Dim) -> Dim:
    """a // b, simplified when terms divide exactly or the remainder is provably in [0, b) or [-b, 0). What nothing can be divided by
    gives 0: only positions in a tensor without elements are divided by its size."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b else 0
    if b == 1 or a == b:
        return a if b == 1 else 1
    quotient, rest = _split(a, b)
    if rest == 0 or (non_negative(rest) and less(rest, b)):
        return quotient
    if less(rest, 0) and non_negative(rest + b):
        return quotient - 1
    if (same := _same_for_all(rest, b)) is not None:
        return quotient + same
    if (inner := _of_quotient(rest, b)) is not None:
        return quotient + floordiv(*inner)
    _, turns, smaller, divisor = _common(rest, b)
    return quotient + turns + (_func("floordiv", rest, b) if smaller == rest else floordiv(smaller, divisor))


def _same_for_all(rest: Dim, b: Dim) -> int | None:
    """rest // b where that is the same for all numbers in the ranges; a call may bring a size of 0 where the least is 1."""
    if not isinstance(b, int) or b <= 0 or any(s.lo == 1 for s in symbols(rest)):
        return None
    low, high = bounds(rest)
    return low // b if low is not None and high is not None and low // b == high // b else None


def rejoin(value: Dim) -> Dim:
    """Undo splits: t * b * (x // b) + t * (x % b) becomes t * x."""
    changed = True
    while changed and isinstance(value, Poly):
        changed = False
        for mono, factor in value.terms:
            split = next((a for a in mono if isinstance(a, Func) and a.kind == "mod"), None)
            if split is None:
                continue
            left = list(mono)
            left.remove(split)
            scale = from_terms({tuple(left): factor})
            x, by = split.args
            joined = value - from_terms({mono: factor}) - scale * by * floordiv(x, by) + scale * x
            if (_functions(joined), len(terms_of(joined))) < (_functions(value), len(value.terms)):
                value, changed = joined, True
                break
    return value


def _functions(value: Dim) -> int:
    """How many functions are in an expression, those inside of others included."""
    found = [atom for mono, _ in terms_of(value) for atom in mono if isinstance(atom, Func)]
    return len(found) + sum(_functions(arg) for atom in found for arg in atom.args)


def mod(a: Dim, b: Dim) -> Dim:
    """a % b, simplified as `floordiv` is."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b if b else 0
    if b == 1 or a == b:
        return 0
    rest = _split(a, b)[1]
    if rest == 0 or (non_negative(rest) and less(rest, b)):
        return rest
    if isinstance(b, int):
        whole = _congruent(rest, b)
        if whole != rest:
            return mod(whole, b)
        most = bounds(rest)[1]
        if most is not None and most <= 0:  # how far a size is from a multiple of b: together they are b * ceil(size / b)
            return b * ceildiv(-rest, b) + rest
        if (same := _same_for_all(rest, b)) is not None:
            return rest - same * b
    elif less(rest, 0) and non_negative(rest + b):
        return rest + b
    factor, turns, smaller, divisor = _common(rest, b)
    return _func("mod", rest, b) if smaller == rest else factor * mod(smaller, divisor) + (rest - factor * (turns * divisor + smaller))


def _congruent(a: Dim, b: int) -> Dim:
    """a without remainders by multiples of b: another number of the same remainder by b."""
    for mono, factor in terms_of(a):
        inner = single(from_terms({mono: 1}), "mod")
        if inner is not None and isinstance(inner[1], int) and inner[1] % b == 0:
            return _congruent(a + factor * (inner[0] - from_terms({mono: 1})), b)
    return a


def minimum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if a == b or non_negative(b - a):
        return a
    return b if non_negative(a - b) else _func("min", a, b)


def maximum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if a == b or non_negative(a - b):
        return a
    return b if non_negative(b - a) else _func("max", a, b)


def ceildiv(a: Dim, b: Dim) -> Dim:
    return floordiv(a + b - 1, b)


_FOLD: Mapping[str, Callable[[Dim, Dim], Dim]] = {"floordiv": floordiv, "mod": mod, "min": minimum, "max": maximum}


def substitute(value: Dim, env: Mapping[str, Dim]) -> Dim:
    """Replace symbols by name; with ints for all of them the result is an int."""
    if not isinstance(value, Poly):
        return value
    result: Dim = 0
    for mono, coefficient in value.terms:
        term: Dim = coefficient
        for atom in mono:
            if isinstance(atom, Symbol):
                new = env.get(atom.name)
                term = term * (Poly((((atom,), 1),)) if new is None else new)
            else:
                term = term * _FOLD[atom.kind](*(substitute(a, env) for a in atom.args))
        result = result + term
    return result


def evaluate(value: Dim, env: Mapping[str, int]) -> int:
    """The number that `value` is under `env`. Raises KeyError naming a symbol that env lacks."""
    result = substitute(value, env)
    if isinstance(result, Poly):
        raise KeyError(", ".join(sorted(s.name for s in symbols(result) if s.name not in env)))
    return result


@lru_cache(maxsize=1 << 12)
def coefficient(value: Dim, name: str) -> tuple[Dim, Dim] | None:
    """(c, rest) with value == c * symbol + rest, or None when the symbol occurs any other way."""
    slope: Dim = 0
    rest: Dim = 0
    for mono, factor in terms_of(value):
        here = [a for a in mono if isinstance(a, Symbol) and a.name == name]
        others = tuple(a for a in mono if a not in here)
        if any(name in {s.name for s in symbols(from_terms({(a,): 1}))} for a in others) or len(here) > 1:
            return None
        if here:
            slope = slope + from_terms({others: factor})
        else:
            rest = rest + from_terms({mono: factor})
    return slope, rest
