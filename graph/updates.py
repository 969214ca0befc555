"""Tensors that are written in place: which `put`s may write into the memory of what they update, and copies for all others.

`put` is a function: its result is another tensor than its operand. A cache is the user's tensor, though, and to write one row of it must
not take the time of copying all rows. So the compiler gives the result of `put` the memory of its operand, which is right where nothing
reads the operand afterwards:

    x                 an argument or a buffer that the model overwrites with the result
    put(x, ...)       what another put made of it
    copy(value)       the same numbers in memory that only this put reads

`separated` inserts the copies. Everything that comes before that pass sees plain functions, and so does the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from . import attrs as A
from . import build as b
from .dims import Dim, floordiv, minimum, non_negative, product
from .ir import Graph, Value, rebuild, with_inputs
from .ops import OPS, make
from .poly import non_negative_for_any
from .types import inverse

IN_PLACE = ("put", "border", "joined")
"""Operations whose result is in the memory of their first operand, and `joined` in that of all."""

_INLINED = ("view", "elementwise", "reduce", "index", "quant", "check")


def memory_of(value: Value) -> Value:
    """The value whose memory the result of a `put` is, in whatever shape; any other value is its own."""
    value = under(value)
    while value.op == "put":
        value = under(value.inputs[0])
    return value


def under(value: Value) -> Value:
    """What a value is the same memory of, in another shape."""
    while value.op == "reshape":
        value = value.inputs[0]
    return value


def padded_axis(border: Value) -> int:
    """The one axis along which a `border` is longer than its operand."""
    assert isinstance(border.attrs, A.PadAttrs)
    return next(axis for axis, amounts in enumerate(border.attrs.amounts) if amounts != (0, 0))


def around(border: Value, index: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Where an element of what is around the operand of a `border` is, along the axis that has something before and behind the elements;
    index: with the number among all of these."""
    assert isinstance(border.attrs, A.PadAttrs)
    axis = padded_axis(border)
    before, size = border.attrs.amounts[axis][0], border.inputs[0].shape[axis]
    behind = 1 if before == 0 else minimum(floordiv(index[axis], before), 1)
    return (*index[:axis], index[axis] + size * behind, *index[axis + 1 :])


class Counting(NamedTuple):
    """Positions start, start + step, ... for which no memory is read."""

    start: Dim
    step: int
    length: Dim


def counting(position: Value) -> Counting | None:
    """The positions of a value that counts along one axis; None for all others."""
    while position.op in ("reshape", "permute", "expand") or (position.op == "cast" and position.dtype.bits == 64):
        position = position.inputs[0]
    a = position.attrs
    if not isinstance(a, A.IotaAttrs) or isinstance(a.start, float) or not isinstance(a.step, int):
        return None
    return Counting(a.start, a.step, a.length)


def inside(position: Value, size: Dim) -> bool:
    """Whether positions are known to lie in [0, size)."""
    a = counting(position)
    if a is None:
        return False
    least, most = a.start, a.start + (a.length - 1) * a.step
    if a.step < 0:
        least, most = most, least
    return non_negative_for_any(least) and non_negative_for_any(size - 1 - most)


def slice_of(put: Value) -> tuple[int, Counting] | None:
    """The axis of a put of one whole slice, and the positions along it; None for all others."""
    assert isinstance(put.attrs, A.PutAttrs)
    if len(put.attrs.axes) != 1 or put.attrs.kind:
        return None
    (axis,), position, part = put.attrs.axes, put.inputs[2], put.inputs[1]
    a, behind = counting(position), part.tensor.rank - axis - 1
    alone = position.tensor.rank > behind and product(position.shape) == part.shape[axis] == position.shape[-behind - 1]
    return (axis, a) if a is not None and alone else None


def put_into_slice(value: Value) -> Value | None:
    """A slice of x, updated and put back where it was, is x updated there."""
    assert isinstance(value.attrs, A.PutAttrs)
    x, part, *positions = value.inputs
    outer, inner = slice_of(value), under(part)
    if outer is None or inner.op != "put":
        return None
    (axis, a), old = outer, under(inner.inputs[0])
    found = old.attrs
    if not isinstance(found, A.SliceAttrs) or old.inputs[0] is not x or old.shape != part.shape:
        return None
    if (found.axis, found.start, found.step) != (axis, a.start, a.step):
        return None
    whole = old.shape
    assert isinstance(inner.attrs, A.PutAttrs)
    if inner.attrs.kind:
        return None
    if inner.shape == whole and axis not in inner.attrs.axes:
        return b.put(x, inner.inputs[1], {axis: positions[0], **dict(zip(inner.attrs.axes, inner.inputs[2:]))})
    if whole[axis] != 1 or inner.shape != whole[:axis] + whole[axis + 1 :]:
        return None
    moved = {n + (n >= axis): b.unsqueeze(_full_rank(p, len(whole) - 1), axis) for n, p in zip(inner.attrs.axes, inner.inputs[2:])}
    return b.put(x, b.unsqueeze(inner.inputs[1], axis), {axis: positions[0], **moved})


def put_into_permuted(value: Value) -> Value | None:
    """put(permute(x), ...) = permute(put(x, ...))"""
    assert isinstance(value.attrs, A.PutAttrs)
    x, part, *positions = value.inputs
    if not isinstance(x.attrs, A.PermuteAttrs) or value.attrs.kind:  # which needs its last axis last
        return None
    order, rank = x.attrs.order, x.tensor.rank
    back = inverse(order)
    moved = {order[a]: b.permute(_full_rank(p, rank), back) for a, p in zip(value.attrs.axes, positions)}
    return b.permute(b.put(x.inputs[0], b.permute(part, back), moved), order)


def _full_rank(position: Value, rank: int) -> Value:
    return b.reshape(position, (*[1] * (rank - position.tensor.rank), *position.shape))


def in_place(graph: Graph, writes: Mapping[int, int]) -> dict[Value, int]:
    """The last of the `put`s over each input of the graph that may write into its memory, and the output that it is.

    writes: numbers of outputs, and of the inputs that are overwritten with them. Nothing may read what was there before once it is
    overwritten: either all that reads it are products that the put needs the result of, or nothing reads the result, and all puts
    over the input come last.
    """
    found: dict[Value, int] = {}
    late = late_puts(graph) if writes else set()
    for output, number in writes.items():
        chain = chain_of(graph.outputs[output])
        last = chain[-1]
        if last.op != "put" or chain[0] is not graph.inputs[number] or last in found:
            continue
        returned = {under(v) for n, v in enumerate(graph.outputs) if n != output}
        unread = last not in returned and late.issuperset(chain[1:])
        if returned.isdisjoint(chain[:-1]) and (unread or all(_read_before(graph, *pair) for pair in pairwise(chain))):
            found[last] = output
    return found


def chain_of(value: Value) -> list[Value]:
    """What a put updates, and all puts over it, in order."""
    chain = [under(value)]
    while chain[0].op == "put":
        chain.insert(0, under(chain[0].inputs[0]))
    return chain


def late_puts(graph: Graph) -> set[Value]:
    """Puts, and views between them, that nothing needs but outputs and other such puts."""
    late: set[Value] = set()
    for value in reversed(graph.order):
        put = value.op == "put" or (value.op == "reshape" and under(value).op == "put")
        if put and all(user in late and value not in user.inputs[1:] for user in graph.users[value]):
            late.add(value)
    return late


def _read_before(graph: Graph, value: Value, put: Value) -> bool:
    """Whether all that reads a value is there for products that `put` needs. What is computed element by element may be computed again
    where it is wanted; where anything else wants it, that may be too late."""
    needed: set[Value] | None = None
    followed: set[Value] = set()
    stack = [value]
    while stack:
        seen = stack.pop()
        for user in graph.users[seen]:
            if user is put and seen is put.inputs[0] and seen not in put.inputs[1:]:
                continue
            if OPS[user.op].group in _INLINED and not graph.is_output(user):
                if user not in followed:
                    followed.add(user)
                    stack.append(user)
                continue
            needed = needs(put) if needed is None else needed
            if OPS[user.op].group != "contraction" or user not in needed:
                return False
    return True


def read_between_writes(graph: Graph) -> set[Value]:
    """Contractions that read what a put overwrites, such as a layer's part of a cache: of them `_read_before` tells that they are first."""
    overwritten = {under(v.inputs[0]) for v in graph.order if v.op == "put"}

    def reads(value: Value) -> bool:
        while value not in overwritten and OPS[value.op].group in ("view", "elementwise") and value.inputs:
            value = value.inputs[0]
        return under(value) in overwritten

    return {v for v in graph.order if OPS[v.op].group == "contraction" and any(map(reads, v.inputs))} if overwritten else set()


def needs(value: Value) -> set[Value]:
    """Everything that a value is computed from."""
    seen: set[Value] = set()
    stack = list(value.inputs)
    while stack:
        each = stack.pop()
        if each not in seen:
            seen.add(each)
            stack += each.inputs
    return seen


def concatenated(graph: Graph, writes: Mapping[int, int]) -> Graph:
    """Puts of whole slices that are no in-place writes as concatenations, which fuse with what reads them."""
    kept = {v for last in in_place(graph, writes) for v in chain_of(last)}

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        value_now = with_inputs(value, inputs)
        return value_now if value.op != "put" or value in kept else _pieces(value_now) or value_now

    return rebuild(graph, visit)


def _pieces(put: Value) -> Value | None:
    """x before a slice, the slice's new content, x behind it."""
    found = slice_of(put)
    if found is None or found[1].step != 1:
        return None
    (axis, a), (x, part) = found, put.inputs[:2]
    first, after = a.start, x.shape[axis] - a.start - part.shape[axis]
    if not (non_negative(first) and non_negative(after)):
        return None  # whether it fits is seen when the sizes are
    with b.at(put.origin):
        around = (*_cut(x, axis, 0, first), part, *_cut(x, axis, first + part.shape[axis], after))
        return b.concat([p for p in around if p.shape[axis] != 0], axis)


def _cut(x: Value, axis: int, start: Dim, length: Dim) -> list[Value]:
    """A slice, in the pieces that x is put together of: many puts, one over the other, become one concatenation. As slices of the one
    before, its pieces would be computed twice for each further put."""
    sizes = [piece.shape[axis] for piece in x.inputs] if x.op == "concat" and x.attrs == A.AxisAttrs(axis) else []
    if not sizes or not isinstance(start, int) or not isinstance(length, int) or not all(isinstance(size, int) for size in sizes):
        return [b.slice_(x, axis, start, length)]
    result: list[Value] = []
    for piece, size in zip(x.inputs, sizes, strict=True):
        assert isinstance(size, int)
        low, high = max(start, 0), min(start + length, size)
        if low < high:
            result += _cut(piece, axis, low, high - low)
        start -= size
    return result


def separated(graph: Graph, writes: Mapping[int, int]) -> Graph:
    """Every put over memory that it may write into: of an input that the result overwrites, of another put, or a copy."""
    final = in_place(graph, writes)
    late = late_puts(graph)
    kept = {v: chain_of(last)[0] for last in final for v in chain_of(last)[1:]}
    bases = set(kept.values())

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        if value.op != "put":
            return with_inputs(value, inputs)
        target, given = under(inputs[0]), list(inputs[1:])
        base = kept.get(value)
        if base is None and not _left_alone(graph, value):
            target = _copy(target)
        elif base is not None and value in late:  # what is written is computed before anything is
            given = [new if bases.isdisjoint({old, *needs(old)}) else _copy(new) for old, new in zip(value.inputs[1:], given, strict=True)]
        return with_inputs(value, (target, *given))

    new = rebuild(graph, visit)
    updated = {memory_of(new.outputs[output]) for output in final.values()}
    outputs = [
        under(v) if n in final.values() else _copy(v) if _shares(v, n, writes, updated) else v for n, v in enumerate(new.outputs)
    ]
    return new if tuple(outputs) == new.outputs else Graph(new.inputs, tuple(outputs), new.name)


def _left_alone(graph: Graph, put: Value) -> bool:
    """Whether a put is over another one whose result nothing else reads."""
    value = put.inputs[0]
    while len(graph.users[value]) == 1 and not graph.is_output(value):
        if value.op != "reshape":
            return value.op == "put"
        value = value.inputs[0]
    return False


def _shares(value: Value, output: int, writes: Mapping[int, int], updated: set[Value]) -> bool:
    """Whether a result would be memory that the call, or a later one, writes into: an argument that has just been updated, or one that
    another argument is overwritten with."""
    memory = memory_of(value)
    return memory.op == "input" if output in writes else memory in updated


def _copy(value: Value) -> Value:
    return make("copy", value, origin=value.origin)
