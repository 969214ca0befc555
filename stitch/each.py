"""What is computed from a concatenation element by element, computed from each part: products then store what is wanted of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..graph.ir import Graph, Value, rebuild, with_inputs
from ..graph.ops import OPS, make
from .roots import WITH_EPILOGUE
from .steps import by_pieces

DEEPEST = 16  # concatenations within one another, which loops make of what they collect: more are left as they are
_MOST = 64  # operations that are looked at: an epilogue seldom has more


def of_each_part(graph: Graph) -> Graph:
    """The graph with operations of one operand before concatenations that nobody else wants, where some part is a product's."""
    return rebuild(graph, _Parts(graph).visit)


@dataclass
class _Parts:
    """own: concatenations of the new graph that have one user, and how deep they are."""

    graph: Graph
    own: dict[Value, int] = field(default_factory=dict)

    def visit(self, value: Value, inputs: tuple[Value, ...]) -> Value:
        alone = len(self.graph.users[value]) == 1 and not self.graph.is_output(value)
        if _is_of_each(value) and inputs[0] in self.own and is_made(inputs[0]):
            return self._sunk(value, inputs[0], alone)
        now = with_inputs(value, inputs)
        if alone and now.op == "concat" and not by_pieces(now):
            depth = 1 + max(self.own.get(part, 0) for part in now.inputs)
            if depth <= DEEPEST:
                self.own[now] = depth
        return now

    def _sunk(self, step: Value, now: Value, alone: bool) -> Value:
        if now not in self.own:
            return make(step.op, now, attrs=step.attrs, origin=step.origin)
        made = make("concat", *[self._sunk(step, part, True) for part in now.inputs], attrs=now.attrs, origin=now.origin)
        if alone:
            self.own[made] = self.own[now]
        return made


def _is_of_each(value: Value) -> bool:
    """Whether an element is computed from one other in the same way everywhere."""
    if OPS[value.op].group != "elementwise" or len(value.inputs) != 1:
        return False
    return value.tensor.qparams is None or value.tensor.qparams.axis is None


def is_made(value: Value) -> bool:
    """Whether the epilogue of a product computes a value, or part of what is put together in it."""
    pending, seen = [value], set[Value]()
    while pending and len(seen) < _MOST:
        value = pending.pop()
        if value.op in WITH_EPILOGUE:
            return True
        if value not in seen and (OPS[value.op].group == "elementwise" or value.op in ("concat", "pad", "reshape")):
            seen.add(value)
            pending.extend(value.inputs)
    return False
