"""Symbolic integers: dimensions, strides and index expressions.

A `Dim` is a Python int or a `Poly`. Arithmetic on them gives canonical results, so equal expressions compare equal
and `product([B, S]) == product([S, B])` needs no solver. Floor division, remainder, minimum and maximum that do not
simplify become opaque atoms. Symbols carry their range, from which `bounds.py` proves what it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import gcd

from .bounds import bounds, less, non_negative
from .poly import Atom, Dim, Func, Monomial, Poly, Shape, Symbol, from_terms, product, single, symbol, symbols, terms_of

__all__ = [
    "Atom", "Dim", "Func", "Poly", "Shape", "Symbol", "bounds", "ceildiv", "coefficient", "divides", "evaluate", "floordiv",
    "less", "maximum", "minimum", "mod", "non_negative", "product", "rejoin", "substitute", "symbol", "symbols",
]


def _func(kind: str, *args: Dim) -> Dim:
    return Poly((((Func(kind, args),), 1),))


def _exact_quotient(a: Dim, b: Dim) -> Dim | None:
    """a / b when that is a polynomial."""
    if len(terms_of(b)) > 1:
        return _long_division(a, b)
    (divisor, scale), *_ = terms_of(b) or (((), 0),)
    if scale == 0:
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


def _long_division(a: Dim, b: Dim) -> Dim | None:
    """a / b by leading terms, as of sizes that are 4 n + 3."""
    leading = from_terms(dict([max(terms_of(b), key=_degree)]))
    quotient: Dim = 0
    while a != 0:
        part = _exact_quotient(from_terms(dict([max(terms_of(a), key=_degree)])), leading)
        if part is None:
            return None
        quotient, a = quotient + part, a - part * b
    return quotient


def _degree(term: tuple[Monomial, int]) -> tuple[int, list[str]]:
    """Terms are in the same order as their products with another one are."""
    return len(term[0]), [atom.key for atom in term[0]]


def divides(b: Dim, a: Dim) -> bool:
    """True when a % b == 0 is evident from the form of a and b."""
    return a == b or _exact_quotient(a, b) is not None


def _split(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """a == quotient * b + rest, with every term that b divides in the quotient."""
    if len(terms_of(b)) > 1:
        exact = _exact_quotient(a, b)
        return (0, a) if exact is None else (exact, 0)
    quotient: Dim = 0
    rest: Dim = 0
    for mono, coefficient in terms_of(a):
        term = from_terms({mono: coefficient})
        exact = _exact_quotient(term, b)
        quotient, rest = (quotient, rest + term) if exact is None else (quotient + exact, rest)
    return quotient, rest


def _common(a: Dim, b: Dim) -> tuple[int, int, Dim, Dim]:
    """(f, n, x, d) with b == f * d and a == f * (n * d + x) + s for a number 0 <= s < f: a // b == n + x // d and a % b == f * (x % d) + s.
    The number in x is from 0 to d - 1."""
    if not isinstance(b, int) or b <= 0:
        return 1, 0, a, b
    factor = gcd(b, *(coefficient for mono, coefficient in terms_of(a) if mono))
    if factor > 1:
        a, b = from_terms({mono: coefficient // factor for mono, coefficient in terms_of(a)}), b // factor
    mono, constant = terms_of(a)[-1]
    turns = 0 if mono else constant // b
    return factor, turns, a - turns * b, b


def _lacking(a: Dim, b: Dim) -> int:
    """How often b is to be added to a until it is known to be no less than 0; 0 where a has no lower bound."""
    return max(-((bounds(a)[0] or 0) // b), 0) if isinstance(b, int) and b > 0 else 0


def _from_above(a: Dim, b: Dim) -> bool:
    """Whether a // b is told as -((b - 1 - a) // b), as -n // 2 is: whichever needs less to be divided from 0 on."""
    if not isinstance(b, int) or b <= 0:
        return False
    here, there = ((bounds(x)[0] is None, _lacking(x, b), terms_of(x)[0][1] < 0) for x in (a, b - 1 - a))
    return there < here


def _quotients(value: Dim) -> list[tuple[Monomial, int, Dim, int]]:
    """(term, factor, x, divisor) of what is added up of quotients by known numbers."""
    found: list[tuple[Monomial, int, Dim, int]] = []
    for mono, factor in terms_of(value):
        if len(mono) == 1 and isinstance(mono[0], Func) and mono[0].kind == "floordiv":
            x, divisor = mono[0].args
            if isinstance(divisor, int) and divisor > 0:
                found.append((mono, factor, x, divisor))
    return found


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
    if smaller != rest:
        return quotient + turns + floordiv(smaller, divisor)
    if _from_above(rest, b):
        return quotient - floordiv(b - 1 - rest, b)
    turns = _lacking(rest, b)
    return quotient - turns + _func("floordiv", rest + turns * b, b)


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
        if (same := _same_for_all(rest, b)) is not None:
            return rest - same * b
    elif less(rest, 0) and non_negative(rest + b):
        return rest + b
    factor, turns, smaller, divisor = _common(rest, b)
    if smaller != rest:
        return factor * mod(smaller, divisor) + (rest - factor * (turns * divisor + smaller))
    if isinstance(b, int) and b > 0 and non_negative(b - 1 - rest):  # how far a size is from a multiple of b: both are b * ceil(size / b)
        return b * ceildiv(-rest, b) + rest
    return _func("mod", rest + _lacking(rest, b) * b, b)


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
