"""Which keys a block of queries looks at: none before the first and after the last that one of them may see.

The score of a key is -inf unless all conditions hold, of which some are

    key <= position, position <= key      positions follow from the number of the query, as in causal masks and sliding windows, or are
                                          data, as for caches that are not full yet: the least and the largest of the block count
    of the key alone                      such as those of padding: keys are asked one after the other, from both ends, until one is seen
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING

from ..cpu_codegen.builder import I64, Function, Val, const, i64
from ..cpu_codegen.division import any_lane
from ..cpu_codegen.scopes import Point
from ..stitch.loops import Body
from .attention_score import Axes, queries_across

if TYPE_CHECKING:
    from .attention_few import Few
    from .attention_stream import Stream

_BEYOND = {"le": 0, "lt": 1, "ge": 0, "gt": 1}  # how far the smaller one is from the larger one at least


@dataclass(frozen=True)
class Conditions:
    """first, last: nodes of positions, and how far from them the first or last key is that is seen. keys: nodes that say of a key whether
    it is seen, whatever the query."""

    first: tuple[tuple[int, int], ...]
    last: tuple[tuple[int, int], ...]
    keys: tuple[int, ...]


def conditions(axes: Axes, body: Body) -> Conditions:
    """Those of the score of a body over these axes that tell which keys need not be looked at."""
    first, last, keys = list[tuple[int, int]](), list[tuple[int, int]](), list[int]()
    nodes = body.nodes
    products = sum(1 << n for n, node in enumerate(nodes) if node.op == "acc")

    def is_key(n: int) -> bool:
        return nodes[n].op == "index" and nodes[n].index == axes.key

    def is_position(n: int) -> bool:
        return nodes[n].dtype.kind == "int" and axes.of_key not in body.deps[n]

    for n in _hiding(body):
        op, args = nodes[n].op, nodes[n].args
        small, large = args if op in ("le", "lt") else args[::-1] if op in _BEYOND else (n, n)
        if body.sources[n] & products:
            continue
        if is_key(small) and is_position(large):
            last.append((large, _BEYOND[op]))
        elif is_key(large) and is_position(small):
            first.append((small, _BEYOND[op]))
        elif axes.of_query not in body.deps[n]:
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
    found = conditions(queries_across(stream.spec), stream.score.body)
    begin, end = _positions(fn, total, found, partial(_extreme, stream))
    end = _asked(stream, found.keys, end, i64(1), -1) if found.keys else end
    if stream.once or not (found.first or found.keys):
        return i64(0), end
    begin = _asked(stream, found.keys, begin, fn.sub(end, i64(1)), 1) if found.keys else begin
    step = i64(stream.tiling.block if stream.by_blocks else stream.unit)
    begin = fn.smax(fn.smin(begin, fn.sub(end, i64(1))), i64(0))
    return fn.mul(fn.udiv(begin, step), step), end


def seen_by_few(few: Few) -> tuple[Val, Val]:
    """The first key that one of few queries may see, and where they end; there may be none."""
    fn, total, emitter = few.fn, few.slots.dim(few.spec.s), few.score.emitter
    found = conditions(few.axes, few.score.body)

    def extreme(node: int, kind: str) -> Val:
        values = [emitter.operand(node, 0, few.point(i64(query))) for query in range(few.queries)]
        values = [value if value.ty == I64 else fn.convert("sext", value, I64) for value in values]
        return reduce(lambda x, y: fn.intrinsic(kind, I64, [x, y]), values)

    begin, end = _positions(fn, total, found, extreme)
    begin = fn.smin(begin, end)
    if found.keys and not (isinstance(few.spec.s, int) and few.spec.s < few.lanes):
        enough = fn.icmp("sge", total, i64(few.lanes))
        begin, end = fn.branch(enough, lambda: _asked_lanes(few, found.keys, begin, end), lambda: [begin, end])
    return begin, end


def _positions(fn: Function, total: Val, found: Conditions, extreme: Callable[[int, str], Val]) -> tuple[Val, Val]:
    """Where the keys of positions begin and end; one of those before that end is there at least."""
    begin, end = i64(0), total
    for node, beyond in found.last:
        seen = fn.add(fn.smin(extreme(node, "smax"), total), i64(1 - beyond))
        end = fn.smin(end, fn.smax(seen, i64(1)))
    for node, beyond in found.first:
        begin = fn.smax(begin, fn.add(fn.smin(extreme(node, "smin"), total), i64(beyond)))
    return begin, end


def _asked_lanes(few: Few, keys: Sequence[int], begin: Val, end: Val) -> list[Val]:
    """Where keys begin and end that are all seen, of those between. As many are asked at once as a vector has lanes: whole vectors of keys
    that there are, if need be of some that were asked before, or that nothing is known of, which can only make them more."""
    fn, emitter, lanes = few.fn, few.score.emitter, few.lanes
    total = few.slots.dim(few.spec.s)

    def any_seen(first: Val) -> Val:
        with emitter.scope():
            point = Point(lanes, {"r": few.head, "c": first})
            return any_lane(fn, reduce(fn.and_, [emitter.operand(n, lanes, point) for n in keys]))

    def moved(start: Val, first: Callable[[Val], Val], following: Callable[[Val], Val], stop: Callable[[Val], Val]) -> Val:
        place = fn.alloca(8)
        fn.store(start, place)

        def ask() -> Val:
            at = fn.load(I64, place)
            done = fn.or_(stop(at), any_seen(first(at)))
            fn.store(fn.select(done, at, following(at)), place)
            return done

        fn.until(ask)
        return fn.load(I64, place)

    step, last = i64(lanes), fn.sub(total, i64(lanes))
    end = moved(end, lambda at: fn.smax(fn.sub(at, step), i64(0)), lambda at: fn.sub(at, step), lambda at: fn.icmp("sle", at, begin))
    begin = moved(begin, lambda at: fn.smin(at, last), lambda at: fn.add(at, step), lambda at: fn.icmp("sge", at, end))
    return [begin, fn.smax(end, begin)]


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
