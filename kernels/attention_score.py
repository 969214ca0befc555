"""The score of attention as loop IR with an axis of its own for everything: r = head of the batch, k = key, c = query.

Queries are the vector axis: the maximum and the sum of a softmax are then plain vector operations, and keys and values
are read as they lie. Where there are few of them, keys are: c = key, k = query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cpu_codegen import convert
from ..cpu_codegen.body import BodyEmitter, Point
from ..cpu_codegen.builder import Function, Val, const
from ..cpu_codegen.slots import Slots
from ..graph.dims import Atom, Dim, Func, Poly, Symbol, divides, floordiv, maximum, minimum, mod, product, symbol, symbols
from ..graph.types import f32
from ..platforms.target import Target
from ..stitch.loops import Body
from .attention_spec import FIRST_SCORE_BUFFER, AttentionSpec


@dataclass(frozen=True)
class Axes:
    """The axes as index expressions; an axis of extent 1 is 0. of_query, of_key: what they are called."""

    head: Dim
    query: Dim
    key: Dim
    m: Dim
    of_query: str
    of_key: str


def axes_of(spec: AttentionSpec, of_query: str, of_key: str) -> Axes:
    heads = product((spec.batch, spec.heads))
    query = symbol(of_query, 0, None, spec.m) if spec.m != 1 else 0
    key = symbol(of_key, 0, None, spec.s) if spec.s != 1 else 0
    return Axes(symbol("r", 0, None, heads) if heads != 1 else 0, query, key, spec.m, of_query, of_key)


def queries_across(spec: AttentionSpec) -> Axes:
    """Those where queries are the vector axis."""
    return axes_of(spec, "c", "k")


def keys_across(spec: AttentionSpec) -> Axes:
    """Those where keys are."""
    return axes_of(spec, "k", "c")


def over(axes: Axes, spec: AttentionSpec) -> Body:
    """The body of the score over these axes instead of (row, column)."""
    nodes = tuple(replace(node, index=_moved(node.index, axes)) for node in spec.score.nodes)
    return replace(spec.score, nodes=nodes)


def _moved(index: Dim, axes: Axes) -> Dim:
    if not isinstance(index, Poly):
        return index
    total: Dim = 0
    for atoms, factor in index.terms:
        total = total + product((factor, *(_moved_atom(atom, axes) for atom in atoms)))
    return total


def _moved_atom(atom: Atom, axes: Axes) -> Dim:
    if isinstance(atom, Symbol):
        if atom.name == "r":
            return axes.head * axes.m + axes.query
        return axes.key if atom.name == "c" else Poly((((atom,), 1),))
    a, b = (_moved(arg, axes) for arg in atom.args)
    if atom.kind in ("min", "max"):
        return minimum(a, b) if atom.kind == "min" else maximum(a, b)
    return _divided(atom, a, b, axes)


def _divided(atom: Func, a: Dim, b: Dim, axes: Axes) -> Dim:
    """Quotient or remainder by a multiple of m in two steps, of which the first one takes the query off."""
    simple = floordiv if atom.kind == "floordiv" else mod
    if axes.m in (1, b) or not divides(axes.m, b) or not (symbols(axes.query) & symbols(a)):
        return simple(a, b)
    head, rest = floordiv(a, axes.m), floordiv(b, axes.m)
    return floordiv(head, rest) if atom.kind == "floordiv" else mod(head, rest) * axes.m + mod(a, axes.m)


def scaled(body: Body) -> tuple[int, int] | None:
    """(product, factor) where the score is a product times a number, or -inf where a mask says so: the factor is positive (see `_score` in
    `stitch/contraction.py`), so that the order of scores is that of products."""
    nodes = body.nodes
    at = body.stores[0].node
    while nodes[at].op == "where" and nodes[nodes[at].args[2]].op == "const" and nodes[nodes[at].args[2]].value == float("-inf"):
        at = nodes[at].args[1]
    if nodes[at].op != "mul" or nodes[nodes[at].args[0]].op != "acc" or nodes[nodes[at].args[1]].op not in ("const", "param"):
        return None
    return at, nodes[at].args[1]


class ScoreEmitter:
    """Turns products of queries and keys into scores, inside one function.

    unscaled: scores may lack the positive factor `factor` that they all have (None: they have none, or not all).
    """

    def __init__(self, fn: Function, target: Target, slots: Slots, body: Body, unscaled: bool) -> None:
        self.body = body
        self.result, *self._sinks = (store.node for store in body.stores)
        self.accumulators = [n for n, node in enumerate(body.nodes) if node.op == "acc"]
        found = scaled(body) if unscaled else None
        self._factor = None if found is None else found[1]
        self._products = self.accumulators if found is None else [*self.accumulators, found[0]]
        self.plain = self.result in self._products  # products are scores
        self.proportional = self.plain or found is not None  # scores are as many times larger as products are
        self.emitter = BodyEmitter(fn, target, body, slots, FIRST_SCORE_BUFFER)
        self._from_acc = sum(1 << n for n in self.accumulators)

    def reads_queries(self) -> bool:
        """Whether memory is read at positions that vary with the query, so that absent queries must be masked."""
        return any(node.op in ("load", "check") and "c" in self.body.deps[n] for n, node in enumerate(self.body.nodes))

    def factor(self, point: Point) -> Val | None:
        """What the scores are to be multiplied with, in every lane."""
        return None if self._factor is None else self.emitter.operand(self._factor, point.lanes, point)

    def sink(self, point: Point) -> Val | None:
        """The scores of the keys whose value is 0, in every lane; None where there are none."""
        return self.emitter.operand(self._sinks[0], point.lanes, point) if self._sinks else None

    def prepare(self, point: Point) -> None:
        """Computes what does not depend on the key, for use in loops over keys."""
        self.emitter.prepare([self.result], [], point, "r")
        for n, axes in enumerate(self.body.deps):
            plain = self.body.nodes[n].op not in ("check", "const", "param")
            if plain and "c" in axes and "k" not in axes and not self.emitter.sources[n] & self._from_acc:
                self.emitter.operand(n, point.lanes, point)

    def score(self, fn: Function, products: Val, point: Point) -> Val:
        """The f32 scores of the queries of `point` with its key, from their products."""
        for n in self._products:
            dtype = self.body.nodes[n].dtype
            self.emitter.provide(n, products if dtype == f32 else convert.cast(fn, self.emitter.target, products, f32, dtype))
        value = self.emitter.operand(self.result, point.lanes, point)
        self.emitter.checks(point, self.emitter.all_checks)
        dtype = self.body.nodes[self.result].dtype
        return value if dtype == f32 else convert.cast(fn, self.emitter.target, value, dtype, f32)


def minus_infinity(like: Val) -> Val:
    return const(like.ty, float("-inf"))
