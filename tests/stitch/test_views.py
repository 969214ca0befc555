"""Index functions of views."""

from __future__ import annotations

from sashiko.graph.dims import floordiv, mod, symbol
from sashiko.stitch.views import entangled

AXIS, SIZE = symbol("x0", 0, None, symbol("n", 1)), symbol("n", 1)


def test_divisions_of_positions_within_one_another_are_entangled_and_those_of_sizes_are_not() -> None:
    def nested(value: object) -> object:
        for step in (3, 5, 7):
            value = mod(value + 2, step * SIZE + 1)  # type: ignore[operator]
        return value

    assert entangled(nested(AXIS * SIZE))  # type: ignore[arg-type]
    whole = 4 * floordiv(floordiv(SIZE, 2) + 3, 4)
    assert not entangled(nested(SIZE)) and not entangled(AXIS + mod(2, whole))  # type: ignore[arg-type]
    assert not entangled(mod(AXIS + whole - mod(2, whole), whole))
    assert entangled(nested(AXIS + mod(2, whole)))  # type: ignore[arg-type]
