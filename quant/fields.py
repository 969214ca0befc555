"""Fields of dataclasses against their annotations, which is how schemes refuse what is no scheme."""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..diagnostics.errors import InputError

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", NoneType: "None"}


def check_fields(made: object) -> None:
    """Raises InputError for the first field of a dataclass that is not what its annotation says. Lists become tuples."""
    owner: Any = type(made)
    for name, kind in _hints(owner).items():
        value = getattr(made, name)
        if not _fits(value, kind):
            raise InputError(f"{name}={value!r:.60} is not {_words(kind)}", owner.__name__)
        if isinstance(value, list):
            object.__setattr__(made, name, tuple(value))  # schemes are frozen


@cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)


def _fits(value: Any, kind: Any) -> bool:
    """Lists serve as tuples, whole numbers as numbers; True, False and NaN are no numbers."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_fits(item, parts[0]) for item in value)
    if origin is type:
        return isinstance(value, type) and issubclass(value, parts[0])
    if kind is float:
        return isinstance(value, (float, int)) and not isinstance(value, bool) and value == value
    return isinstance(value, origin or kind) and (kind is not int or not isinstance(value, bool))


def _words(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _listed([repr(part) for part in parts])
    if origin in (Union, UnionType):
        return _listed([_words(part) for part in parts])
    if origin is tuple:
        return f"a tuple in which each is {_words(parts[0])}"
    return _WORDS.get(kind) or f"{getattr(kind, '__name__', kind)}(...)"


def _listed(words: list[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
