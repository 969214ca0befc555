"""Running sums, products and extremes along the columns of a row: what is carried from one vector to the next, and the totals inside a
vector."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.types import DType
from ..platforms.target import Target
from ..stitch.loops import Node
from . import elementwise
from .body import BodyEmitter, Point
from .builder import Val, const
from .reduce import Reduction, State


class Scan(Reduction):
    """One scan node of a body. Its state is the result at the last column so far, in every lane; vectors come one after the other."""

    def __init__(self, emitter: BodyEmitter, target: Target, position: int, node: Node, dtype: DType) -> None:
        super().__init__(emitter.fn, target, node, dtype, False)
        self._emitter, self._node, self._arg = emitter, position, node.args[0]
        self._loses_nan = self.watches = False  # NaN is joined to all that follows

    @property
    def restarts(self) -> bool:
        return False

    def follow(self, state: State, point: Point) -> State:
        """The state after the columns of `point`, where the node is known from now on."""
        fn, lanes = self._fn, point.lanes
        x = self._emitter.operand(self._arg, lanes, point)
        neutral = const(x.ty, self._neutral())
        if point.mask is not None:
            x = fn.select(point.mask, x, neutral)
        each = self._one_by_one if lanes and self.kind == "prod" and self.dtype.is_float else self._in_steps
        result = each(state[0], x, neutral)
        self._emitter.remember(self._node, point, result)
        return [fn.shuffle(result, result, [lanes - 1] * lanes) if lanes else result]

    def _in_steps(self, before: Val, x: Val, neutral: Val) -> Val:
        """Inside a vector each lane joins the one 1, 2, 4, .. before it (Hillis and Steele, "Data parallel algorithms", 1986), so that
        only the last step waits for the vector before."""
        step, lanes = 1, x.ty.lanes
        while step < lanes:
            x = self._joined(self._fn.shuffle(x, neutral, [lane - step if lane >= step else lanes for lane in range(lanes)]), x)
            step *= 2
        return self._joined(before, x)

    def _one_by_one(self, before: Val, x: Val, neutral: Val) -> Val:
        """Products of floats as PyTorch computes them: those of later elements alone could overflow or vanish where all together do not,
        and 0 times infinity is no number."""
        last, result = self._fn.extract(before, 0), x
        for lane in range(x.ty.lanes):
            last = self._fn.mul(last, self._fn.extract(x, lane))
            result = self._fn.insert(result, last, lane)
        return result

    def across(self, state: State) -> State:
        return [self._fn.extract(v, 0) if v.ty.lanes else v for v in state]

    def _joined(self, before: Val, x: Val) -> Val:
        op = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}[self.kind]
        return elementwise.apply(self._fn, self._target, op, self.dtype, [before, x])


def scans_of(emitter: BodyEmitter, roots: Sequence[int]) -> list[Scan]:
    """The scans that nodes need at every column, operands first. Reductions are known by then."""
    nodes = emitter.body.nodes
    pending, seen = list(roots), set[int]()
    while pending:
        n = pending.pop()
        if n not in seen and nodes[n].op != "reduce":
            seen.add(n)
            pending += emitter.body.operands(n)
    found = sorted(n for n in seen if nodes[n].op == "scan")
    return [Scan(emitter, emitter.target, n, nodes[n], nodes[n].dtype) for n in found]


def followed(scans: Sequence[Scan], point: Point, states: Sequence[State]) -> list[State]:
    """The states of the scans after one more point; `states` begins with theirs."""
    return [scan.follow(state, point) for scan, state in zip(scans, states)]
