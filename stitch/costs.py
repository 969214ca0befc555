"""What is not computed twice."""

from __future__ import annotations

from collections.abc import Iterator

from ..graph import attrs as A
from ..graph.dims import Dim, bounds, product
from ..graph.ir import Value
from ..graph.ops import OPS, TRANSCENDENTAL
from .views import ROW, VIEWS, axes, is_divided, strided, strip

# Operations that are not repeated where their result could be stored and loaded.
EXPENSIVE = {*TRANSCENDENTAL, "piecewise", "reduce", "scan", "take", "gather", "remainder", "fmod"}
CHEAP_OPS = 6  # elementwise operations that are repeated rather than stored and loaded
PASS = 8  # a pass of its own over what is stored, in elementwise operations
SHUFFLED = 4  # elements apart: as far as they are loaded together and put in order
WRITTEN_TERMS = 64  # elements of a window that are written out; from so many on it would be asked of each whether it is in the image


def is_expensive(value: Value, stored: set[Value]) -> bool:
    """Whether evaluating `value` twice costs more than storing and loading it."""
    count = 0
    for v in _below(value, stored):
        if (v in stored and v is not value) or OPS[v.op].group == "leaf":
            continue
        count += v.op not in VIEWS
        if v.op in EXPENSIVE or count > CHEAP_OPS:
            return True
    return False


def reads(value: Value, stored: set[Value]) -> bool:
    """Whether anything but numbers and ranges is below `value`."""
    return any(v in stored or v.op in ("input", "constant") for v in _below(value, stored))


def _below(value: Value, stored: set[Value]) -> Iterator[Value]:
    """`value` and what it is computed from, down to what is stored, each once."""
    stack, seen = [value], {value}
    while stack:
        v = stack.pop()
        yield v
        if v is value or v not in stored:
            new = [operand for operand in v.inputs if operand not in seen]
            seen.update(new)
            stack.extend(dict.fromkeys(new))


def are_scattered(table: Value, read: Dim, stored: set[Value]) -> bool:
    """Whether so many elements are read of the rows of a view, and they lie apart, that putting them together first takes less time: then
    they are read by whole vectors."""
    held = product(table.shape)
    return isinstance(held, int) and isinstance(read, int) and read >= 2 * held and _lie_apart(table, stored)


def rows_stored_apart(view: Value, stored: set[Value]) -> Value | None:
    """What a permutation would store element by element, each far from the last, although it is read row by row: rows that are looked up
    somewhere. It takes less time to store the rows, and to put them in order by a kernel that does nothing else. None: there are none."""
    if not isinstance(view.attrs, A.PermuteAttrs) or view.attrs.order[-1] == len(view.attrs.order) - 1 or view.inputs[0] in stored:
        return None
    source = view.inputs[0]
    width = source.shape[-1]
    if not isinstance(width, int) or width < ROW or (bounds(product(view.shape))[0] or 0) < ROW * ROW:
        return None
    looked_up = [v.inputs[0] for v in _below(source, stored) if v.op in ("take", "gather") and v.shape[-1] == width]
    return source if looked_up and not any(_lie_apart(table, stored) for table in looked_up) else None


def _lie_apart(view: Value, stored: set[Value]) -> bool:
    """Whether the elements of the rows of a view lie apart in memory, where they are enough for vectors."""
    width = view.shape[-1] if view.tensor.rank else 1
    found = strided(view, stored) if view not in stored and isinstance(width, int) and width >= ROW else None
    return found is not None and found[2][-1] != 1


def is_shuffled(view: Value, stored: set[Value]) -> bool:
    """Whether the parts of what is concatenated take turns in a view, as shuffled channels do: of each element it is asked which part
    it is of."""
    if view.op != "reshape" or view in stored:
        return False
    source, at = strip(view, axes(view.shape, "x")[0], stored)
    return source.op == "concat" and source not in stored and isinstance(source.attrs, A.AxisAttrs) and is_divided(at[source.attrs.axis])


def below_windows(view: Value, stored: set[Value]) -> Value | None:
    """What is below windows that overlap, and would be computed for each of them although that takes longer than a pass of its own, or
    what they would read by single elements, since these lie apart along the image as along its rows; None: nothing."""
    factor, elements, source = 1.0, 1, view
    step, image = 1, view
    while source not in stored and (source.op in VIEWS or source.op == "pad"):
        if source.op == "pad" and elements >= WRITTEN_TERMS and factor > PASS:
            return source
        if factor > 1 and is_shuffled(source, stored):
            return source
        if isinstance(source.attrs, A.WindowAttrs):
            factor *= max(1.0, source.attrs.size / source.attrs.step)
            elements *= source.attrs.size
            step, image = max(step, source.attrs.step), source.inputs[0]
        source = source.inputs[0]
    if step > SHUFFLED and _lie_apart(image, stored):
        return image
    if factor == 1.0 or source in stored:
        return None
    work = -1
    for value in _below(source, stored):
        work += value.op not in VIEWS
        if value not in stored and value.op in EXPENSIVE:
            return value
    return source if work > 1 and (factor - 1) * work > PASS else None  # one operation is done while its operand is loaded
