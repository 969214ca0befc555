"""How a model is called: the tree of its arguments, which of them the code takes, and the tree of its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.utils import _pytree as pytree

from ..diagnostics.errors import InputError, Unsupported
from ..graph.captured import NAMELESS, Captured, FixedInput, FixedOutput, GraphOutput, InputOutput, Parameters, flatten_call, same_value
from ..graph.encode import Json, template_from, template_json, tree_from, tree_json

_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Fixed:
    """An argument or result that is a Python value, the same in every call."""

    name: str
    value: Any


@dataclass(frozen=True)
class Result:
    """A result of the code (`kind` "result"), or an argument handed back ("argument"), by number."""

    kind: str
    number: int


@dataclass(frozen=True, eq=False)
class Signature:
    """arguments: for each leaf None when the code takes it, or the value it must have. results: leaves of what the model returns.

    writes: (result of the code, argument or state tensor that receives it). checks: (result of the code, a bool that must be true; message
    of the RuntimeError). in_spec, out_spec: None for flat calls. parameters: what the model calls its arguments.
    """

    arguments: tuple[Fixed | None, ...]
    results: tuple[Result | Fixed, ...]
    writes: tuple[tuple[int, int], ...] = ()
    in_spec: pytree.TreeSpec | None = None
    out_spec: pytree.TreeSpec | None = None
    checks: tuple[tuple[int, str], ...] = ()
    parameters: Parameters = NAMELESS

    @property
    def has_fixed(self) -> bool:
        return any(a is not None for a in self.arguments)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call's arguments. Raises InputError when they are nested or named otherwise than when captured."""
        return list(args) if self.in_spec is None else flatten_call(self.in_spec, args, kwargs, self.parameters)

    def taken(self, flat: Sequence[Any]) -> list[Any]:
        """The leaves that the code takes, after comparing the others with their fixed values."""
        if len(flat) != len(self.arguments):
            raise InputError(f"called with {len(flat)} arguments, compiled for {len(self.arguments)}")
        passed = []
        for fixed, value in zip(self.arguments, flat, strict=True):
            if fixed is None:
                passed.append(value)
            elif not same_value(value, fixed.value):
                raise InputError(
                    f"argument {fixed.name} is {value!r}, but the model was compiled for {fixed.value!r}",
                    hint="compile it again for this value",
                )
        return passed

    def assembled(self, flat: Sequence[Any], results: Sequence[Any]) -> Any:
        """What the model returns. Raises RuntimeError where an assertion of the model does not hold."""
        for number, message in self.checks:
            if not results[number]:
                raise RuntimeError(message)
        found = [r.value if isinstance(r, Fixed) else (results if r.kind == "result" else flat)[r.number] for r in self.results]
        return found if self.out_spec is None else pytree.tree_unflatten(found, self.out_spec)

    @cached_property
    def plain(self) -> tuple[int, tuple[str, ...]] | None:
        """How many arguments are given by position, and the names of the others; None where one of them is nested."""
        if self.in_spec is None:
            return len(self.arguments), ()
        positional, named = self.in_spec.children()
        nested = any(not child.is_leaf() for child in (*positional.children(), *named.children()))
        return None if nested else (positional.num_children, tuple(named.context))

    def direct(self) -> Callable[[tuple[Any, ...]], Any] | None:
        """How to return the code's results where they are all that a call takes; None: `assembled` takes more."""
        if self.writes or self.checks or any(isinstance(r, Result) and r.kind != "result" for r in self.results):
            return None
        spec, fixed = self.out_spec, any(isinstance(r, Fixed) for r in self.results)
        order = tuple(r.number for r in self.results if isinstance(r, Result))
        if fixed or (spec is not None and not spec.is_leaf() and any(not child.is_leaf() for child in spec.children())):
            return lambda results: self.assembled((), results)
        if spec is None:
            return lambda results: [results[n] for n in order]
        if spec.is_leaf():
            only = order[0]
            return lambda results: results[only]
        if spec.type is tuple:
            return lambda results: tuple([results[n] for n in order])
        made, context = pytree.SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
        return lambda results: made([results[n] for n in order], context)


def signature_of(captured: Captured) -> Signature:
    """The signature of a captured model; symbolic results follow the tensor results of the code, in order."""
    symbolic = iter(range(len(captured.graph.outputs), len(captured.graph.outputs) + len(captured.outputs)))
    results: list[Result | Fixed] = []
    for output in captured.outputs:
        if isinstance(output, GraphOutput):
            results.append(Result("result", output.index))
        elif isinstance(output, InputOutput):
            results.append(Result("argument", output.position))
        else:
            results.append(Fixed("", output.value) if isinstance(output, FixedOutput) else Result("result", next(symbolic)))
    arguments = tuple(Fixed(i.name, i.value) if isinstance(i, FixedInput) else None for i in captured.inputs)
    writes = tuple((m.output, m.input) for m in captured.mutations)
    checks = tuple((c.output, c.message) for c in captured.checks)
    return Signature(arguments, tuple(results), writes, captured.in_spec, captured.out_spec, checks, captured.parameters)


def to_json(signature: Signature) -> Json:
    """JSON for a file. Raises Unsupported when an argument or result tree has no form there."""
    trees = [None if s is None else tree_json(s) for s in (signature.in_spec, signature.out_spec)]
    return {
        "arguments": [None if a is None else _fixed_json(a) for a in signature.arguments],
        "results": [_fixed_json(r) if isinstance(r, Fixed) else [r.kind, r.number] for r in signature.results],
        "writes": [list(w) for w in signature.writes],
        "checks": [list(c) for c in signature.checks],
        "names": list(signature.parameters.names),
        "positional_only": signature.parameters.positional_only,
        "defaults": {name: template_json(value) for name, value in signature.parameters.defaults.items() if isinstance(value, _PLAIN)},
        "in_spec": trees[0],
        "out_spec": trees[1],
    }


def _fixed_json(fixed: Fixed) -> Json:
    if not isinstance(fixed.value, _PLAIN):
        raise Unsupported(f"{fixed.name or 'a result'} is a {type(fixed.value).__name__}, which cannot be written to a file")
    return {"name": fixed.name, "value": template_json(fixed.value)}


def from_json(data: Json) -> Signature:
    """What `to_json` wrote."""
    arguments = tuple(None if a is None else Fixed(a["name"], template_from(a["value"])) for a in data["arguments"])
    results = tuple(Fixed(r["name"], template_from(r["value"])) if isinstance(r, dict) else Result(r[0], r[1]) for r in data["results"])
    defaults = {name: template_from(value) for name, value in data.get("defaults", {}).items()}
    parameters = Parameters(tuple(data.get("names", ())), defaults, data.get("positional_only", 0))
    trees = [None if data[k] is None else tree_from(data[k]) for k in ("in_spec", "out_spec")]
    return Signature(arguments, results, tuple((o, i) for o, i in data["writes"]), trees[0], trees[1],
                     tuple((n, m) for n, m in data.get("checks", ())), parameters)
