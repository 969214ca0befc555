"""Choosing from an ordered table of kernels: the first row that accepts, and why the rows before it do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..platforms.target import Target


class Row(Protocol):
    """What every row of a kernel table has. `when`: None, or the reason why the row does not apply."""

    @property
    def name(self) -> str: ...

    @property
    def when(self) -> Callable[[Target, Any], str | None]: ...


RowT = TypeVar("RowT", bound=Row)


@dataclass(frozen=True)
class Selection(Generic[RowT]):
    """The row that computes something, and the rows before it with the reasons why they do not."""

    kernel: RowT
    refusals: tuple[tuple[str, str], ...]


def first_accepting(rows: Iterable[RowT], target: Target, spec: Any) -> Selection[RowT]:
    """The first row that accepts `spec` on `target`; the last one of a table accepts everything."""
    refusals: list[tuple[str, str]] = []
    for row in rows:
        reason = row.when(target, spec)
        if reason is None:
            return Selection(row, tuple(refusals))
        refusals.append((row.name, reason))
    raise AssertionError("the last row accepts everything")


def lacks(target: Target, features: Iterable[str]) -> str | None:
    """Why a row that needs these features does not apply to `target`."""
    needed = tuple(features)
    missing = [name for name in needed if not target.has(name)]
    if missing:
        return f"{target.name} lacks {', '.join(missing)}"
    if "avx512_bf16" in needed and not target.bf16_dots:
        return "dot products of bf16 are half as fast as products of widened numbers on Intel's processors from Sapphire Rapids on"
    return None
