"""int() and float() of free sizes, which Python makes plain numbers, those of the example: the code of a model that calls them is given
others of these names for the time of a trace."""

from __future__ import annotations

import dis
import gc
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

from .refusals import is_the_users

T = TypeVar("T")
_Globals = dict[str, Any]


class _Like(type):
    """A type that passes for the one that it is made of: in isinstance, beside others in a tuple, as a key."""

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, cls.__base__ or object)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.__base__ or object)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__base__

    def __hash__(cls) -> int:
        return hash(cls.__base__)


class _Int(int, metaclass=_Like):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return torch.sym_int(*args) if _is_free(args) else int(*args, **kwargs)  # type: ignore[no-untyped-call]


class _Float(float, metaclass=_Like):
    def __new__(cls, *args: Any) -> Any:
        return torch.sym_float(*args) if _is_free(args) else float(*args)  # type: ignore[no-untyped-call]


_NAMES: Mapping[str, type] = {"int": _Int, "float": _Float}


def _is_free(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and isinstance(args[0], (torch.SymInt, torch.SymFloat))


def with_free_numbers(trace: Callable[[], T]) -> T:
    """What `trace` gives, where int() and float() of a free number are free, too, as Dynamo takes them. A trace tells which modules call
    them, and the names mean something else in these alone, in the next trace. One that fails then in a way of its own does not count."""
    given: dict[tuple[int, str], _Globals] = {}
    made: tuple[T] | None = None
    failed: Exception | None = None
    while True:
        asked: dict[tuple[int, str], _Globals] = {}
        try:
            with _named(given), _noted(asked):
                made = (trace(),)
        except Exception as error:
            failed = error if failed is None or type(error) is type(failed) else failed
        given |= asked
        if not asked:
            if made is not None:
                return made[0]
            assert failed is not None
            raise failed


@contextmanager
def _named(given: Mapping[tuple[int, str], _Globals]) -> Iterator[None]:
    """Modules in which the names mean our types."""
    for (_, name), module in given.items():
        module[name] = _NAMES[name]
    try:
        yield
    finally:
        for (_, name), module in given.items():
            del module[name]


@contextmanager
def _noted(asked: dict[tuple[int, str], _Globals]) -> Iterator[None]:
    """Takes note of the modules of the model, not of torch or Python, that make free numbers plain by a name of Python's own type."""

    def noting(name: str, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(number: Any) -> Any:
            frame = sys._getframe(1)
            code, module = frame.f_code, frame.f_globals
            by_name = name in code.co_names and name not in module and is_the_users(code.co_filename)
            if by_name and not number.node.expr.is_number and not _told_apart(module, name):
                asked[id(module), name] = module
            return plain(number)

        return noted

    with ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat):
            for name in _NAMES:
                method = f"__{name}__"
                before = vars(kind).get(method)
                setattr(kind, method, noting(name, before or (lambda number: float(operator.index(number)))))
                stack.callback(*(delattr, kind, method) if before is None else (setattr, kind, method, before))
        yield


def _told_apart(module: _Globals, name: str) -> bool:
    """Whether a function of a module compares the type of that name by identity, which ours would not stand."""
    return any(_compares(found.__code__, name) for found in gc.get_referrers(module) if isinstance(found, FunctionType))


def _compares(code: CodeType, name: str) -> bool:
    inner = any(_compares(part, name) for part in code.co_consts if isinstance(part, CodeType))
    return inner or (
        name in code.co_names
        and any(step.argval == name and after.opname == "IS_OP" for step, after in pairwise(dis.get_instructions(code)))
    )
