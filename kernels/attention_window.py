"""Which keys a block of queries looks at: none before the first and after the last that one of them may see.

The score of a key is -inf unless all conditions hold, of which some are

    key <= position, position <= key      positions follow from the number of the query, as in causal masks and sliding windows, or are
                                          data, as for caches that are not full yet: the least and the largest of the block count
    of the key alone                      such as those of padding: keys are asked one after the other, from both ends, until one is seen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from ..cpu_codegen.builder import I64, Val, const, i64
from ..cpu_codegen.scopes import Point
from ..stitch.loops import Body
from .attention_score import axes_of
from .attention_spec import AttentionSpec

if TYPE_CHECKING:
    from .attention_stream import Stream

_BEYOND = {"le": 0, "lt": 1, "ge": 0, "gt": 1}  # how far the smaller one is from the larger one at least


@dataclass(frozen=True)
class Conditions:
    """first, last: nodes of positions, and how far from them the first or last key is that is seen. keys: nodes that say of a key whether
    it is seen, whatever the query."""

    first: tuple[tuple[int, int], ...]
    last: tuple[tuple[int, int], ...]
    keys: tuple[int, ...]


def conditions(spec: AttentionSpec, body: Body) -> Conditions:
    """Those of the score of a body over (head, key, query) that tell which keys need not be looked at."""
    first, last, keys = list[tuple[int, int]](), list[tuple[int, int]](), list[int]()
    axes, nodes = axes_of(spec), body.nodes
    products = sum(1 << n for n, node in enumerate(nodes) if node.op == "acc")

    def is_key(n: int) -> bool:
        return nodes[n].op == "index" and nodes[n].index == axes.key

    def is_position(n: int) -> bool:
        return nodes[n].dtype.kind == "int" and "k" not in body.deps[n]

    for n in _hiding(body):
        op, args = nodes[n].op, nodes[n].args
        small, large = args if op in ("le", "lt") else args[::-1] if op in _BEYOND else (n, n)
        if body.sources[n] & products:
            continue
        if is_key(small) and is_position(large):
            last.append((large, _BEYOND[op]))
        elif is_key(large) and is_position(small):
            first.append((small, _BEYOND[op]))
        elif "c" not in body.deps[n]:
            keys.append(n)
    return Conditions(tuple(first), tuple(last), tuple(keys))


def _hiding(body: Body) -> list[int]:
    """The nodes that have to be true for a score that is not -inf."""
    nodes, found = body.nodes, list[int]()
    at = body.stores[0].node
    while nodes[at].op == "where":
        condition, at, other = nodes[at].args
        if nodes[other].op != "const" or nodes[other].value != float("-inf"):
            break
        stack = [condition]
        while stack:
            n = stack.pop()
            if nodes[n].op == "and":
                stack += nodes[n].args
            else:
                found.append(n)
    return found


def seen_keys(stream: Stream) -> tuple[Val, Val]:
    """The first key, of a block or of the stream's `unit`, and where they end. There is one at least, if there are any."""
    fn, total = stream.fn, stream.slots.dim(stream.spec.s)
    found = conditions(stream.spec, stream.score.body)
    begin, end = i64(0), total
    for node, beyond in found.last:
        seen = fn.add(fn.smin(_extreme(stream, node, "smax"), total), i64(1 - beyond))
        end = fn.smin(end, fn.smax(seen, i64(1)))
    for node, beyond in found.first if not stream.once else ():
        begin = fn.smax(begin, fn.add(fn.smin(_extreme(stream, node, "smin"), total), i64(beyond)))
    if found.keys:
        end = _asked(stream, found.keys, end, i64(1), -1)
        begin = begin if stream.once else _asked(stream, found.keys, begin, fn.sub(end, i64(1)), 1)
    if stream.once or not (found.first or found.keys):
        return begin, end
    step = i64(stream.tiling.block if stream.by_blocks else stream.unit)
    begin = fn.smax(fn.smin(begin, fn.sub(end, i64(1))), i64(0))
    return fn.mul(fn.udiv(begin, step), step), end


def _extreme(stream: Stream, node: int, kind: str) -> Val:
    """The smallest or largest of the positions of all queries."""
    fn, ty = stream.fn, I64.vec(stream.tiling.lanes)
    worst = const(ty, 2**62 if kind == "smin" else -(2**62))
    found = []
    for point in stream.points:
        value = stream.score.emitter.operand(node, point.lanes, point)
        value = value if value.ty == ty else fn.convert("sext", value, ty)
        found.append(value if point.mask is None else fn.select(point.mask, value, worst))
    joined = reduce(lambda x, y: fn.intrinsic(kind, ty, [x, y]), found)
    return fn.call(f"llvm.vector.reduce.{kind}.{ty.mangled}", I64, [joined])


def _asked(stream: Stream, keys: Sequence[int], start: Val, stop: Val, step: int) -> Val:
    """Where keys begin (step 1) or end (-1) that are all seen, from `start` on; `stop` where none is before."""
    fn, emitter = stream.fn, stream.score.emitter
    place = fn.alloca(8)
    fn.store(start, place)

    def ask() -> Val:
        at = fn.load(I64, place)
        key = at if step > 0 else fn.sub(at, i64(1))
        with emitter.scope():
            point = Point(0, {"r": stream.head, "k": key})
            seen = reduce(fn.and_, [emitter.operand(n, 0, point) for n in keys])
        done = fn.or_(seen, fn.icmp("eq", at, stop))
        fn.store(fn.select(done, at, fn.add(at, i64(step))), place)
        return done

    def found() -> list[Val]:
        fn.until(ask)
        return []

    within = fn.icmp("slt", start, stop) if step > 0 else fn.icmp("sgt", start, stop)
    fn.branch(within, found)
    return fn.load(I64, place)
