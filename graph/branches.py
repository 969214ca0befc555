"""What a model asks of its sizes by itself. torch takes every free size for 2 or more, and answers without a guard what is so for all of
those; graphs serve 1 as well (`small_sizes.py`). Where the answer is another one for 1, the model is run with such a size, and where what
was traced gives another result, calls with it are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from .alone import alone
from .examples import called

_TORCH = torch.__path__[0]
_ASKED: WeakKeyDictionary[ShapeEnv, set[sympy.Symbol]] = WeakKeyDictionary()
_LARGER: WeakKeyDictionary[ShapeEnv, set[sympy.Symbol]] = WeakKeyDictionary()


@contextmanager
def recorded() -> Iterator[None]:
    """Notes of which sizes a model that is traced asks something to which 1 would be another answer."""
    kind: Any = torch.SymBool
    with alone():
        symbolic_shapes.uninteresting_files().add(__file__)  # guards are known by what asks, which is not this file
        before = kind.__bool__

        def asked(question: Any) -> bool:
            answer: bool = before(question)
            if not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
                _note(question.node, answer)
            return answer

        kind.__bool__ = asked
        try:
            yield
        finally:
            kind.__bool__ = before


def _note(node: Any, answer: bool) -> None:
    env = node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # before torch 2.11
    sizes = {symbol: known.get(symbol) for symbol in node.expr.free_symbols}
    for symbol in sizes:
        if symbol.is_positive and None not in sizes.values() and bool(node.expr.subs({**sizes, symbol: 1})) != answer:
            _ASKED.setdefault(env, set()).add(symbol)


def check(model: torch.nn.Module, program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Finds out which of these sizes of a traced model may be 1."""
    for env, symbols in [*_ASKED.items()]:
        inputs = _inputs(program, env)
        for symbol in symbols if inputs else ():
            if not _serves_one(model, program, inputs, symbol, args, kwargs):
                _LARGER.setdefault(env, set()).add(symbol)
        if inputs:
            del _ASKED[env]


def larger_than_one(env: ShapeEnv | None) -> list[sympy.Symbol]:
    """The sizes of which the model takes another way where they are 1."""
    return [] if env is None else sorted(_LARGER.get(env, ()), key=str)


def _inputs(program: ExportedProgram, env: ShapeEnv) -> list[Any]:
    """The fake arguments of a program, if they are of this environment; else none."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    kinds = (spec.kind for spec in program.graph_signature.input_specs)
    metas = [node.meta.get("val") for node, kind in zip(nodes, kinds, strict=True) if kind == InputKind.USER_INPUT]
    ours = any(isinstance(m, torch.Tensor) and getattr(getattr(m, "fake_mode", None), "shape_env", None) is env for m in metas)
    return metas if ours else []


def _serves_one(
    model: torch.nn.Module, program: ExportedProgram, inputs: Sequence[Any], symbol: sympy.Symbol, args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    leaves, form = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if len(leaves) != len(inputs):
        return False
    narrow = [_narrowed(leaf, meta, symbol) for leaf, meta in zip(leaves, inputs, strict=True)]
    if any(leaf is None for leaf, given in zip(narrow, leaves, strict=True) if given is not None):
        return False
    args, kwargs = pytree.tree_unflatten(narrow, form)
    try:
        wanted = pytree.tree_leaves(called(model, args, kwargs))
        found = pytree.tree_leaves(called(program.module(check_guards=False), args, kwargs))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5, equal_nan=True)
    except Exception:  # the model's own, or it does not take such a size at all; or the results differ
        return False
    return True


def _narrowed(leaf: Any, meta: Any, symbol: sympy.Symbol) -> Any:
    """An argument where the size is 1; None where that is not to be seen."""
    if not isinstance(leaf, torch.Tensor):
        return None if isinstance(meta, torch.SymInt) else leaf
    for axis, size in enumerate(meta.shape):
        if isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols:
            if size.node.expr != symbol:
                return None
            leaf = leaf.narrow(axis, 0, 1)
    return leaf
