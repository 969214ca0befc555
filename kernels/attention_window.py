"""Which keys a block of queries looks at: none before the first and after the last that one of them may see.

The score of a key is -inf unless all conditions hold, of which some are

    key <= position, position <= key      positions follow from the number of the query, as in causal masks and sliding windows, or are
                                          data, as for caches that are not full yet: the least and the largest of the block count
    others, of data                       such as masks in memory, of padding or of anything else: vectors of keys are asked one after the
                                          other, from both ends, until a query of the block sees one
    mask > HIDDEN                         where that is added. A key beneath it has no weight if there is another one: this is asked of
                                          each query, for those that see none weigh all keys alike
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING

from ..cpu_codegen.body import BodyEmitter
from ..cpu_codegen.builder import F32, I1, I64, Function, Val, const, i64
from ..cpu_codegen.division import any_lane
from ..cpu_codegen.scopes import Point
from ..cpu_codegen.slots import Slots
from ..graph.dims import symbols
from ..graph.positions import HIDDEN
from ..graph.types import f32
from ..platforms.target import Target
from ..stitch.loops import Body, Node
from .attention_score import Axes, keys_across, over, queries_across
from .attention_spec import FIRST_SCORE_BUFFER, AttentionSpec

if TYPE_CHECKING:
    from .attention_few import Few
    from .attention_stream import Stream

_BEYOND = {"le": 0, "lt": 1, "ge": 0, "gt": 1}  # how far the smaller one is from the larger one at least
_LEAST = 256  # keys from which on every query of a block is asked, which takes a few hundredths of the time for so many


@dataclass(frozen=True)
class Conditions:
    """first, last: nodes of positions, and how far from them the first or last key is that is seen. others: nodes that are true where
    a key is seen, or numbers that are added, `HIDDEN` or less where it is not. every: all of these nodes. added: whether some are added."""

    first: tuple[tuple[int, int], ...]
    last: tuple[tuple[int, int], ...]
    others: tuple[int, ...]
    every: tuple[int, ...]
    added: bool


def conditions(axes: Axes, body: Body) -> Conditions:
    """Those of the score of a body over these axes that tell which keys need not be looked at."""
    first, last, others = list[tuple[int, int]](), list[tuple[int, int]](), list[int]()
    nodes, every = body.nodes, _hiding(body)

    def is_key(n: int) -> bool:
        return nodes[n].op == "index" and nodes[n].index == axes.key

    def is_position(n: int) -> bool:
        return nodes[n].dtype.kind == "int" and axes.of_key not in body.deps[n]

    for n in every:
        op, args = nodes[n].op, nodes[n].args
        small, large = args if op in ("le", "lt") else args[::-1] if op in _BEYOND else (n, n)
        if is_key(small) and is_position(large):
            last.append((large, _BEYOND[op]))
        elif is_key(large) and is_position(small):
            first.append((small, _BEYOND[op]))
        else:
            others.append(n)
    return Conditions(tuple(first), tuple(last), tuple(others), every, any(nodes[n].dtype == f32 for n in every))


def _hiding(body: Body) -> tuple[int, ...]:
    """The nodes that have to be true, or numbers above `HIDDEN`, for a score that counts. Numbers only where there is nothing else that may
    hide a key: what is asked of a query that sees no key must be all that counts."""
    nodes, found, known = body.nodes, list[int](), True
    products = sum(1 << n for n, node in enumerate(nodes) if node.op == "acc")
    at = body.stores[0].node
    while True:
        node = nodes[at]
        if node.op == "where" and nodes[node.args[2]].op == "const" and nodes[node.args[2]].value == float("-inf"):
            stack, at = [node.args[0]], node.args[1]
            while stack:
                n = stack.pop()
                if nodes[n].op == "and":
                    stack += nodes[n].args
                elif body.sources[n] & products or _looked_up(body, n):
                    known = False
                else:
                    found.append(n)
        elif node.op == "add" and node.dtype == f32:
            added, at = sorted(node.args, key=lambda n: body.sources[n] & products)
            if body.sources[added] & products:
                break
            if _may_hide(body, added):
                found.append(added)
        else:
            break
    known = known and not any(node.op == "load" or _hides(node) for node in _made_of(body, at))
    return tuple(n for n in found if known or nodes[n].dtype != f32)


def _made_of(body: Body, n: int) -> list[Node]:
    """What a value is computed from, with itself."""
    return [node for each, node in enumerate(body.nodes) if body.sources[n] >> each & 1]


def _hides(node: Node) -> bool:
    return node.op == "const" and node.value <= HIDDEN


def _looked_up(body: Body, n: int) -> bool:
    """Whether a value is read from where data says, which is checked where keys are looked at."""
    loads = [node for node in _made_of(body, n) if node.op == "load"]
    return any(s.name.startswith("%") for node in loads for s in symbols(node.index))


def _may_hide(body: Body, n: int) -> bool:
    """Whether what is added to scores may hide keys: with a number that does, or as a mask in memory, which is not looked up in a table as
    biases are."""
    node = body.nodes[n]
    if _looked_up(body, n):
        return False
    if any(map(_hides, _made_of(body, n))):
        return True
    return node.op == "load" or (node.op in ("add", "cast") and any(_may_hide(body, each) for each in node.args))


def seen_keys(stream: Stream) -> tuple[Val, Val]:
    """The first key, of a block or of the stream's `unit`, and where they end. There is one at least, if there are any."""
    fn, spec, total = stream.fn, stream.spec, stream.slots.dim(stream.spec.s)
    found = conditions(queries_across(spec), stream.score.body)
    begin, end = _positions(fn, total, found, partial(_extreme, stream))
    if found.others:
        emitter = BodyEmitter(fn, stream.target, over(keys_across(spec), spec), stream.slots, FIRST_SCORE_BUFFER)
        block = Block(fn, stream.target, spec, stream.slots, emitter, stream.head, stream.first, stream.rows)
        begin, end = block.asked(found, begin, end, stream.once)
        end = fn.smax(end, fn.smin(total, i64(1)))
    if stream.once or not (found.first or found.others):
        return i64(0), end
    step = i64(stream.tiling.block if stream.by_blocks else stream.unit)
    begin = fn.smax(fn.smin(begin, fn.sub(end, i64(1))), i64(0))
    return fn.mul(fn.udiv(begin, step), step), end


def seen_by_few(few: Few, begin: Val, end: Val) -> tuple[Val, Val]:
    """The first of these keys that one of few queries may see, and where they end; there may be none."""
    fn, total, emitter = few.fn, few.slots.dim(few.spec.s), few.score.emitter
    found = conditions(few.axes, few.score.body)

    def extreme(node: int, kind: str) -> Val:
        values = [emitter.operand(node, 0, few.point(i64(query))) for query in range(few.queries)]
        values = [value if value.ty == I64 else fn.convert("sext", value, I64) for value in values]
        return reduce(lambda x, y: fn.intrinsic(kind, I64, [x, y]), values)

    since, until = _positions(fn, total, found, extreme)
    end = fn.smin(end, until)
    begin = fn.smin(fn.smax(begin, since), end)
    if not found.others:
        return begin, end
    block = Block(fn, few.target, few.spec, few.slots, emitter, few.head, i64(0), i64(few.queries))
    begin, end = block.asked(found, begin, end)
    return begin, fn.smax(begin, end)


def _positions(fn: Function, total: Val, found: Conditions, extreme: Callable[[int, str], Val]) -> tuple[Val, Val]:
    """Where the keys of positions begin and end; one of those before that end is there at least."""
    begin, end = i64(0), total
    for node, beyond in found.last:
        seen = fn.add(fn.smin(extreme(node, "smax"), total), i64(1 - beyond))
        end = fn.smin(end, fn.smax(seen, i64(1)))
    for node, beyond in found.first:
        begin = fn.smax(begin, fn.add(fn.smin(extreme(node, "smin"), total), i64(beyond)))
    return begin, end


Step = Callable[[Val], tuple[Val, Val, Val]]
"""Of an end of keys: the first key of the vector beside it, the end without this, and whether there are any up to the other end."""


@dataclass(frozen=True)
class Block:
    """Some queries of a head, from `first` on, whose keys are asked. emitter: of a body over (head, query, key) with keys across."""

    fn: Function
    target: Target
    spec: AttentionSpec
    slots: Slots
    emitter: BodyEmitter
    head: Val
    first: Val
    count: Val

    def asked(self, found: Conditions, begin: Val, end: Val, once: bool = False) -> tuple[Val, Val]:
        """Where keys begin and end that some query sees, of those between. once: it does not matter where they begin."""
        lanes, part = self.target.lanes(32), (begin, end)
        alike = [n for n in found.others if "k" not in self.emitter.deps[n]]
        if alike:
            part = self._ends(alike, i64(1), lanes, part, once)
        if len(alike) < len(found.others):
            part = self._ends(found.others, self.count, max(lanes, _LEAST), part, once)
        return self._unless_one_sees_none(found.every, (begin, end), part) if found.added else part

    def _ends(self, nodes: Sequence[int], queries: Val, least: int, part: tuple[Val, Val], once: bool) -> tuple[Val, Val]:
        """Where those keys of a part begin and end for which all nodes hold, for one of so many queries. As many keys are asked about at
        once as a vector has lanes: whole vectors of keys that there are, if need be of some that are in no part, which can only make them
        more. least: keys in all, below which nothing is asked."""
        fn, total = self.fn, self.slots.dim(self.spec.s)
        if isinstance(self.spec.s, int) and self.spec.s < least:
            return part
        step, begin, end = i64(self.target.lanes(32)), *part

        def from_behind(at: Val) -> tuple[Val, Val, Val]:
            before = fn.sub(at, step)
            return fn.smax(before, i64(0)), before, fn.icmp("sgt", at, begin)

        def ask() -> list[Val]:
            until = self._moved(partial(self._some_see, nodes, queries), end, from_behind)
            return [begin if once else self._moved(partial(self._some_see, nodes, queries), begin, self._from_before(until)), until]

        since, until = fn.branch(fn.icmp("sge", total, i64(least)), ask, lambda: list(part))
        return since, until

    def _from_before(self, end: Val) -> Step:
        fn, step = self.fn, i64(self.target.lanes(32))
        last = fn.sub(self.slots.dim(self.spec.s), step)
        return lambda at: (fn.smin(at, last), fn.add(at, step), fn.icmp("slt", at, end))

    def _unless_one_sees_none(self, nodes: Sequence[int], whole: tuple[Val, Val], part: tuple[Val, Val]) -> tuple[Val, Val]:
        """The part of the keys, or the whole if a query sees none of the part."""
        fn, place = self.fn, self.fn.alloca(8)

        def check() -> list[Val]:
            fn.store(self.first, place)
            end = fn.add(self.first, self.count)

            def sees_none() -> Val:
                query = fn.load(I64, place)
                at = self._moved(lambda key: any_lane(fn, self._seen(nodes, query, key)), part[0], self._from_before(part[1]))
                none, following = fn.icmp("sge", at, part[1]), fn.add(query, i64(1))
                fn.store(fn.select(none, i64(-1), following), place)
                return fn.or_(none, fn.icmp("sge", following, end))

            fn.until(sees_none)
            none = fn.icmp("slt", fn.load(I64, place), i64(0))
            return [fn.select(none, all_, some) for all_, some in zip(whole, part, strict=True)]

        less = fn.or_(*(fn.icmp("ne", all_, some) for all_, some in zip(whole, part, strict=True)))
        begin, end = fn.branch(less, check, lambda: list(whole))
        return begin, end

    def _moved(self, sees: Callable[[Val], Val], start: Val, step: Step) -> Val:
        """An end of the keys, moved while it is within its bounds and nothing `sees` the vector of keys beside it."""
        fn, place = self.fn, self.fn.alloca(8)
        fn.store(start, place)

        def ask() -> Val:
            at = fn.load(I64, place)
            vector, following, within = step(at)
            done = fn.or_(sees(vector), fn.xor(within, const(I1, True)))
            fn.store(fn.select(done, at, following), place)
            return done

        fn.until(ask)
        return fn.load(I64, place)

    def _some_see(self, nodes: Sequence[int], queries: Val, key: Val) -> Val:
        """Whether some of so many queries see some of a vector of keys."""
        fn, none = self.fn, const(I1.vec(self.target.lanes(32)), False)
        end = fn.add(self.first, queries)
        seen = fn.loop(self.first, end, 1, [none], lambda query, seen: [fn.or_(seen[0], self._seen(nodes, query, key))])
        return any_lane(fn, seen[0])

    def _seen(self, nodes: Sequence[int], query: Val, key: Val) -> Val:
        """Which of a vector of keys a query sees."""
        fn, lanes = self.fn, self.target.lanes(32)
        with self.emitter.scope():
            point = Point(lanes, {"r": self.head, "k": query, "c": key})
            values = [self.emitter.operand(n, lanes, point) for n in nodes]
        hides = const(F32.vec(lanes), HIDDEN)
        return reduce(fn.and_, [value if value.ty.scalar == "i1" else fn.fcmp("ugt", value, hides) for value in values])


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
