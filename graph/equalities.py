"""What the equations that a trace took for granted make of sizes: symbols that say it by themselves.

Shapes are computed again and again, from those of the inputs, by whatever changes the graph. So it is the inputs' sizes that are spelled in
another way: what follows from them is equal then without anybody asking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import gcd, lcm, prod

from .dims import Dim, Func, Poly, Symbol, coefficient, evaluate, floordiv, product, symbol, symbols
from .poly import Atom, Monomial, from_terms, terms_of

_TRACED = 2  # the least size that torch traces for
_LARGEST = 1024  # common multiple of divisors, as of the steps down a pyramid of images


def simplest(zero: Dim) -> Dim:
    """The same without numbers and sizes that are factors of all terms: none of them is 0."""
    if not isinstance(zero, Poly):
        return zero
    number = gcd(*(factor for _, factor in zero.terms))
    common = Counter[Atom](atom for atom in zero.terms[0][0] if isinstance(atom, Symbol) and atom.lo > 0)
    for mono, _ in zero.terms:
        common &= Counter[Atom](mono)
    return from_terms({tuple((Counter[Atom](mono) - common).elements()): factor // number for mono, factor in zero.terms})


def apart(left: Sequence[Dim], right: Sequence[Dim]) -> list[Dim]:
    """What is 0 where the products of both are equal. Where several sizes are each cut into parts, as those of an image into windows, that
    is asked of each by itself: n * (x // n) is no more than x, and so each is all of its parts where the products are equal."""
    zero = simplest(product(left) - product(right))
    whole, cut = sorted((Counter(left) - Counter(right), Counter(right) - Counter(left)), key=_number)
    sizes, quotients = (list[Dim](factor for factor in side.elements() if isinstance(factor, Poly)) for side in (whole, cut))
    times, beyond = divmod(_number(cut), _number(whole)) if _number(whole) > 0 else (0, 0)
    found: list[Dim] = []
    for size in sizes:
        counts = (n for n in range(2, min(times, _LARGEST) + 1) if times % n == 0 and floordiv(size, n) in quotients)
        count = next(counts, None)
        if count is None:
            return [zero]
        found.append(size - count * floordiv(size, count))
        quotients.remove(floordiv(size, count))
        times //= count
    return [zero] if quotients or beyond or times != 1 else found


def _number(factors: Counter[Dim]) -> int:
    return prod(factor for factor in factors.elements() if isinstance(factor, int))


def narrowed(zeros: Iterable[Dim]) -> dict[str, Dim]:
    """Symbols with the ranges that they have where each of `zeros` is 0: where max(a, b) == b, b is at least a."""
    found: dict[str, Dim] = {}
    for zero in zeros:
        for atom, value in _alone(zero):
            if isinstance(atom, Func) and atom.kind in ("min", "max") and value in atom.args:
                for other in atom.args:
                    _narrow(found, value - other if atom.kind == "max" else other - value)
    return found


def _narrow(found: dict[str, Dim], positive: Dim) -> None:
    """Takes note that an expression of one symbol is at least 0."""
    for one in symbols(positive) if len(symbols(positive)) == 1 else ():
        slope, rest = coefficient(positive, one.name) or (0, 0)
        if isinstance(slope, int) and isinstance(rest, int) and slope:
            known = next(iter(symbols(found.get(one.name, 0))), one)
            low = max(known.lo, -(rest // slope)) if slope > 0 else known.lo
            highs = [known.hi, rest // -slope if slope < 0 else None]
            found[one.name] = symbol(one.name, low, min((high for high in highs if high is not None), default=None))


def parts(zeros: Iterable[Dim], at_least: Iterable[Dim] = ()) -> dict[str, Dim]:
    """Symbols of which only some remainders are left where each of `zeros` is 0 and each of `at_least` no less, as a multiple and what is
    beyond it: 4 n where there is no remainder, and 4 n + m + 3, with m from 0 to 1, where it is 3 or 0."""
    asked: dict[Symbol, list[tuple[Dim, bool]]] = {}
    for dim, equal in (*((zero, True) for zero in zeros), *((more, False) for more in at_least)):
        if len(symbols(dim)) == 1 and 0 < lcm(*_divisors(dim)) <= _LARGEST:
            asked.setdefault(next(iter(symbols(dim))), []).append((dim, equal))
    found: dict[str, Dim | None] = {}
    for one, of_one in asked.items():
        if one.lo > 0:  # of remainders that are not one after the other, equations may leave some that are
            found[one.name] = _in_parts(one, of_one) or _in_parts(one, [each for each in of_one if each[1]])
    return {name: dim for name, dim in found.items() if dim is not None}


def _in_parts(one: Symbol, asked: list[tuple[Dim, bool]]) -> Dim | None:
    count = lcm(*(divisor for dim, _ in asked for divisor in _divisors(dim)))
    if not 1 < count <= _LARGEST:
        return None
    rests = set(range(count))
    for dim, equal in asked:
        at = [evaluate(dim, {one.name: size}) for size in range(count, 3 * count)]
        if at[:count] == at[count:]:  # it asks of the remainder alone
            rests = {rest for rest in rests if at[rest] == 0 or (at[rest] > 0 and not equal)}
    count = next(turn for turn in range(1, count + 1) if count % turn == 0 and all((rest + turn) % count in rests for rest in rests))
    rests = {rest for rest in rests if rest < count}
    firsts = [rest for rest in rests if (rest - 1) % count not in rests]
    if len(firsts) != 1:
        return None
    first, beyond = firsts[0], len(rests) - 1
    least = max(0, -((first + beyond - one.lo) // count))
    if count * least + first < one.lo:  # the first ones would be let in, too
        if one.lo > _TRACED:
            return None
        least += 1
    most = None if one.hi is None else (one.hi - first) // count
    if most is not None and one.hi is not None and (most < least or count * most + first + beyond > one.hi):
        return None  # the last ones would be let in, too
    return count * symbol(f"{one.name}_by_{count}", least, most) + symbol(f"{one.name}_rest", 0, beyond) + first


def _divisors(zero: Dim) -> Iterator[int]:
    """Those of quotients and remainders in what has nothing else in it but its symbol, times those inside; 0 if there is something else."""
    for mono, _ in terms_of(zero):
        for atom in mono:
            if isinstance(atom, Func):
                plain = atom.kind in ("floordiv", "mod") and len(mono) == 1 and isinstance(atom.args[1], int)
                yield atom.args[1] * lcm(*_divisors(atom.args[0])) if plain else 0  # type: ignore[misc]
            elif len(mono) > 1:
                yield 0


def told(zero: Dim) -> dict[str, Dim]:
    """A symbol, and the quotients, remainders or extremes that it is where `zero` is 0."""
    for atom, value in _alone(zero):
        if isinstance(atom, Symbol) and atom.lo <= _TRACED and atom.hi is None and _functions(value):
            return {atom.name: value}
    return {}


def solved(zeros: Sequence[Dim]) -> list[Dim]:
    """These, with functions of sizes as what one of them says that they are: where (n + m + 1) // 2 is n, and as many are left, m is n."""
    alone = (each for zero in zeros for each in _alone(zero))
    known = {atom: value for atom, value in alone if isinstance(atom, Func) and not _functions(value)}
    return [simplest(sum(_term(mono, factor, known) for mono, factor in terms_of(zero))) for zero in zeros]


def _term(mono: Monomial, factor: int, known: Mapping[Func, Dim]) -> Dim:
    others = tuple(atom for atom in mono if atom not in known)
    return product([from_terms({others: factor}), *(known[atom] for atom in mono if isinstance(atom, Func) and atom in known)])


def joined(zero: Dim, kept: Container[str] = ()) -> dict[str, Dim]:
    """Both symbols as one where `zero` is their difference: as one of `kept`, if it is."""
    pair = sorted(symbols(zero), key=lambda one: one.name not in kept)
    for atom, value in _alone(zero) if len(pair) == 2 else ():
        if atom == pair[1] and value == symbol(pair[0].name, pair[0].lo, pair[0].hi, pair[0].extent):
            low, high = max(one.lo for one in pair), min((one.hi for one in pair if one.hi is not None), default=None)
            return dict.fromkeys((one.name for one in pair), symbol(pair[0].name, low, high)) if high is None or low <= high else {}
    return {}


def fixed(zero: Dim) -> dict[str, Dim]:
    """A symbol, and the one number that it is where `zero` is 0."""
    for one in symbols(zero) if len(symbols(zero)) == 1 else ():
        slope, rest = coefficient(zero, one.name) or (0, 0)
        if isinstance(slope, int) and isinstance(rest, int) and slope and rest % slope == 0:
            number = -rest // slope
            if number >= one.lo and (one.hi is None or number <= one.hi):
                return {one.name: number}
    return {}


def _functions(value: Dim) -> list[Func]:
    return [atom for mono, _ in terms_of(value) for atom in mono if isinstance(atom, Func)]


def _alone(zero: Dim) -> Iterator[tuple[Atom, Dim]]:
    """What is a term by itself, with a factor of 1 or -1, and nowhere else, and what it is where `zero` is 0."""
    for mono, factor in terms_of(zero):
        if len(mono) == 1 and factor in (1, -1):
            rest = zero - from_terms({mono: factor})
            if not _holds(rest, mono[0]):
                yield mono[0], rest * -factor


def _holds(value: Dim, wanted: Atom) -> bool:
    here = any(wanted in mono for mono, _ in terms_of(value))
    return here or any(_holds(argument, wanted) for atom in _functions(value) for argument in atom.args)
