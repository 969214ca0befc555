"""Shapes that reshapes and broadcasting put side by side."""

from __future__ import annotations

from ..diagnostics.errors import InvalidGraph
from .dims import Dim, Shape, floordiv, product


def reshape_groups(shape: Shape, source: Shape) -> list[tuple[range, range]]:
    """The axes of a reshape to `shape` and of its source in the smallest groups of equal products, in order."""
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(shape) or j < len(source):
        start_i, start_j = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(source))
        while product(shape[start_i:i]) != product(source[start_j:j]):
            if i < len(shape) and (j >= len(source) or _smaller(product(shape[start_i:i]), product(source[start_j:j]))):
                i += 1
            elif j < len(source):
                j += 1
            else:
                break
        groups.append((range(start_i, i), range(start_j, j)))
    return groups


def broadcast(shapes: tuple[Shape, ...]) -> Shape:
    """The common shape of right-aligned operands. Raises InvalidGraph when two sizes differ and neither is 1."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, rank - len(shape)):
            if dim != 1 and result[axis] not in (1, dim):
                raise InvalidGraph(f"shapes {shapes} do not broadcast: {result[axis]} against {dim} on axis {axis}")
            result[axis] = dim if result[axis] == 1 else result[axis]
    return tuple(result)


def _smaller(a: Dim, b: Dim) -> bool:
    """Which side of a reshape group has to take in another axis; a guess only affects how large the groups get."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    degree_a = max((len(m) for m, _ in a.terms), default=0) if not isinstance(a, int) else 0
    degree_b = max((len(m) for m, _ in b.terms), default=0) if not isinstance(b, int) else 0
    return degree_a < degree_b if degree_a != degree_b else floordiv(b, a) != 0 and isinstance(a, int)
