"""What a program takes for granted of sizes, told by where these are among the arguments of a call, not by symbols."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import gcd

from ..diagnostics.errors import InputError
from .binding import in_parts
from .dims import Dim, evaluate, floordiv, mod, substitute, symbol
from .guards import another_way, listed
from .poly import from_terms, terms_of
from .symbols import Assumed, Assumption

Places = Iterable[tuple[str, Dim]]
"""Sizes, and what their places are called: `x.shape[0]`."""


@contextmanager
def told(assumed: Iterable[Assumed], env: Mapping[str, int], places: Places) -> Iterator[None]:
    """What `require` raises here for these numbers of symbols, it raises in the words of the caller."""
    try:
        yield
    except InputError as error:
        places, known = tuple(places), dict(env)
        names = _by_places(places)
        numbers = {**env, **{place: evaluate(dim, env) for place, dim in places}}
        for each in assumed:
            if isinstance(each, Assumption):
                if not each.holds(known):
                    text = _text(each, names)
                    raise another_way(text, _in(text, numbers), error.hint) from None
                continue
            text = each.substituted("", names).text
            try:
                known[each.name] = numbers[text] = each.number(known)
            except (ArithmeticError, ValueError) as failure:
                raise InputError(f"the model computes {text} of its sizes, here {listed(_in(text, numbers))}: {failure}") from failure
            names[each.name] = symbol(text)
        raise


def _by_places(places: Places) -> dict[str, Dim]:
    """The symbols of sizes as what they are of the places, the first where there are several."""
    names: dict[str, Dim] = {}
    for place, dim in places:
        parts = in_parts(dim)
        if parts is not None:
            count, whole, beyond, first = parts
            size = symbol(place) - first
            names.setdefault(whole.name, floordiv(size, count))
            if beyond is not None:
                names.setdefault(beyond.name, mod(size, count))
    return names


def _text(assumption: Assumption, names: Mapping[str, Dim]) -> str:
    """An assumption without numbers that all of it has for a factor, and without signs."""
    terms = terms_of(substitute(assumption.dim, names))
    common = gcd(*(factor for _, factor in terms))
    more, less = (from_terms({mono: abs(factor) // common for mono, factor in terms if (factor > 0) == side}) for side in (True, False))
    return f"{more} {assumption.relation} {less}"


def _in(text: str, numbers: Mapping[str, int]) -> dict[str, int]:
    """The numbers that a text is about."""
    return {name: number for name, number in numbers.items() if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)}
