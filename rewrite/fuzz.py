"""The automatic test of a rule: both sides of its equation, on random graphs, in the reference interpreter."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from ..diagnostics.errors import InvalidGraph
from ..graph.dims import evaluate
from ..graph.interpret import Kernels, run
from ..graph.ir import Graph, Value
from ..graph.text import to_text
from .driver import apply, check
from .generate import SYMBOLS, generate, random_tensor
from .match import Matcher
from .rule import Rule


@dataclass(frozen=True)
class Fuzzed:
    """How often a rule was tried, and how often it applied (and both sides agreed)."""

    rule: str
    tried: int
    fired: int


def fuzz(rule: Rule, samples: int = 40, seed: int = 0, kernels: Kernels | None = None) -> Fuzzed:
    """Compares both sides of the rule on `samples` random graphs, from its example and from its pattern in turn.

    kernels: meaning of custom calls in the replacement. Raises InvalidGraph when the sides disagree in type or value, or when the rule
    alone does not come to rest.
    """
    rng = random.Random(f"{rule.name} {seed}")
    fired = 0
    for sample in range(samples):
        root = rule.example(rng) if rule.example is not None and sample % 2 == 0 else generate(rule.equation.left, rng)
        if root is not None:
            fired += _compare(rule, _graph(root), rng, kernels)
    return Fuzzed(rule.name, samples, fired)


def _graph(root: Value) -> Graph:
    """The graph of one value, over the inputs it reads."""
    inputs = [v for v in Graph((), (root,)).order if v.op == "input"]
    return Graph(tuple(sorted(inputs, key=lambda v: getattr(v.attrs, "index", 0))), (root,), "sample")


def _compare(rule: Rule, graph: Graph, rng: random.Random, kernels: Kernels | None) -> bool:
    root = graph.outputs[0]
    applied = rule.try_at(root, graph, Matcher(graph)) if root.op in rule.root_ops else None
    if applied is None:
        return False
    check(applied)
    data = [random_tensor(rng, v.dtype, tuple(evaluate(d, SYMBOLS) for d in v.shape), rule.ulp == 0) for v in graph.inputs]
    left = run(graph, data, SYMBOLS, kernels)[0]

    def agree(other: Graph) -> None:
        error = difference(left, run(other, data, SYMBOLS, kernels)[0])
        if error > rule.ulp:
            raise InvalidGraph(f"rule {rule.name}: the sides differ by {error:.3g} ulp, {rule.ulp} are allowed, on\n{to_text(graph)}")

    agree(Graph(graph.inputs, (applied.replacement,)))
    agree(apply(graph, (rule,)))
    return True


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference in units of the last place of the largest finite element; infinite when shapes, types or NaN differ."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return float("inf")
    if not left.is_floating_point():
        return 0.0 if torch.equal(left, right) else float("inf")
    a, c = left.double(), right.double()
    finite = a.isfinite() & c.isfinite()
    same = (a == c) | (a.isnan() & c.isnan())
    if not bool((same | finite).all()):
        return float("inf")
    if bool(same.all()):
        return 0.0
    largest = float(a[finite].abs().max())
    error = float((a - c)[finite].abs().max())
    return error / max(largest * torch.finfo(left.dtype).eps, torch.finfo(left.dtype).tiny)
