"""Many pieces of one shape side by side, such as what the steps of a loop give: they are computed together."""

from __future__ import annotations

from ..graph.ir import Value

_FEW = 8  # more pieces would be as many conditions at every point of the whole, and what they share would be computed for each


def by_pieces(value: Value) -> bool:
    """Whether a value is computed at the points of one of its pieces: a concatenation of many of one shape, such as the steps of a loop.

    All pieces are computed together, and what they share once: of a loop, what each step hands to the next stays in registers.
    """
    return value.op == "concat" and len(value.inputs) > _FEW and all(v.shape == value.inputs[0].shape for v in value.inputs)
