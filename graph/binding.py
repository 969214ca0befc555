"""The numbers of one call behind the symbols of its sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..diagnostics.errors import InputError
from . import dims
from .dims import Dim, Symbol
from .ir import Value

_AS_COMPILED = "other sizes are free where dynamic_shapes says so and the model lets them be: compile it for an example of these, too"


def bind_symbols(inputs: Sequence[Value], tensors: Sequence[torch.Tensor], known: Mapping[str, int] | None = None) -> dict[str, int]:
    """The numbers behind the symbols in the inputs' shapes, read from the tensors of one call.

    Raises InputError when the tensors' number, ranks or sizes do not fit the inputs.
    """
    if len(inputs) != len(tensors):
        raise InputError(f"the graph takes {len(inputs)} tensors, got {len(tensors)}")
    pairs: list[tuple[Dim, int, str]] = []
    for number, (value, tensor) in enumerate(zip(inputs, tensors, strict=True)):
        label = f"input {number}{f' ({value.name})' if value.name else ''}"
        if value.tensor.rank != tensor.dim():
            raise InputError(f"{label} has {tensor.dim()} dimensions instead of {value.tensor.rank}")
        pairs += [(dim, int(tensor.shape[axis]), f"{label}, dimension {axis}") for axis, dim in enumerate(value.shape)]
    return solve(pairs, known)


def solve(pairs: Iterable[tuple[Dim, int, str]], known: Mapping[str, int] | None = None) -> dict[str, int]:
    """Values of all symbols such that each expression is the number beside it. The text says where the number comes from.

    Solves expressions that are linear in one unknown symbol, or in the two that `equalities.parts` makes of one, repeatedly. Raises
    InputError for a contradiction, a symbol out of its range, or an expression that cannot be solved.
    """
    env: dict[str, int] = dict(known or {})
    found: dict[str, str] = {}
    waiting = list(pairs)
    while waiting:
        left = [pair for pair in waiting if not _settle(*pair, env, found)]
        if len(left) == len(waiting):
            raise InputError(f"{left[0][2]}: cannot solve {left[0][0]} = {left[0][1]}")
        waiting = left
    return env


def _settle(dim: Dim, size: int, where: str, env: dict[str, int], found: dict[str, str]) -> bool:
    """True when `dim` is known to be `size`, perhaps after learning one symbol. found: where each was learnt."""
    rest = dims.substitute(dim, env)
    if isinstance(rest, int):
        if rest != size:
            plain = found.get(str(dim), "")
            expected = f"{rest}, the size of {plain}" if plain else rest if dim == rest else f"{dim} = {rest}"
            raise InputError(f"{where} has size {size}, expected {expected}", hint=_AS_COMPILED if dim == rest else "")
        return True
    parts = in_parts(rest)
    if parts is None:
        return False
    count, whole, beyond, first = parts
    number, remainder = divmod(size - first, count)
    # Like torch's tracing, ours reasons with sizes of at least 1; a size of 0 is served too, since loops over it do nothing
    # (`small_sizes.py` has what does not bear it). Of a multiple more is known, such as that it is at least 2.
    least = 0 if whole.lo == 1 and count == 1 else whole.lo
    if remainder > (0 if beyond is None else beyond.hi or 0) or number < least or (whole.hi is not None and number > whole.hi):
        raise InputError(f"{where} has size {size}, expected {_expected(*parts)}", hint=_AS_COMPILED)
    for symbol, value in ((whole, number), (beyond, remainder)):
        if symbol is not None:
            env[symbol.name], found[symbol.name] = value, where
    return True


def in_parts(dim: Dim) -> tuple[int, Symbol, Symbol | None, int] | None:
    """(count, whole, beyond, first) of count * whole + beyond + first, where beyond is less than count; None for what is something else."""
    slopes: dict[Symbol, int] = {}
    rest = dim
    for one in dims.symbols(dim):
        slope, rest = dims.coefficient(rest, one.name) or (0, 0)
        if not isinstance(slope, int) or slope == 0:
            return None
        slopes[one] = slope
    if not isinstance(rest, int) or len(slopes) not in (1, 2):
        return None
    whole, *others = sorted(slopes, key=lambda one: -slopes[one])
    count, beyond = slopes[whole], others[0] if others else None
    if beyond is not None and (slopes[beyond] != 1 or beyond.lo != 0 or beyond.hi is None or beyond.hi >= count):
        return None
    return count, whole, beyond, rest


def _expected(count: int, whole: Symbol, beyond: Symbol | None, first: int) -> str:
    """What count * whole + beyond + first may be."""
    limit = f"from {count * whole.lo + first}{' on' if whole.hi is None else f' to {count * whole.hi + first}'}"
    if count == 1 and not first:
        return f"one {limit}"
    rests = f"{first}" if beyond is None else f"{first} to {first + (beyond.hi or 0)}"
    return f"a multiple of {count} {limit}" if rests == "0" else f"{rests} more than a multiple of {count}, {limit}"
