"""What tracing took for granted of sizes, without what it asked for the strides of results alone."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.functions import (
    CeilToInt,
    CleanDiv,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Mod,
    PythonMod,
    ToFloat,
    TruncToInt,
)
from torch.utils._sympy.value_ranges import bound_sympy

from ..diagnostics.errors import InputError

_ROUNDED = (FloorDiv, FloorToInt, TruncToInt, CeilToInt)
_ATTENTION = (torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
_FOR_STRIDES = {"_reshape_view_helper_core_alg", "matmul"}
"""Functions of PyTorch that reshape what may or may not be contiguous."""
_OF_ORDER = "ge", "_prims_common/__init__.py"
"""Where PyTorch asks which of two strides is larger, which it takes multiples for."""


def guards(env: ShapeEnv | None) -> tuple[sympy.Basic, ...]:
    """The guards of a trace, each once. That a reshape found sizes unequal is none: what it does then is right for equal ones, too. Nor is
    that a stride is a multiple of another."""
    found = env.guards if env is not None else ()
    return tuple(dict.fromkeys(guard.expr for guard in found if not _for_strides(guard)))


def ask(module: GraphModule) -> None:
    """Makes guards of what operations need of sizes that torch does not ask for as it traces them: keys of attention and their values are
    equally many, and a mask has the sizes of what it chooses from."""
    for node in module.graph.nodes:
        if node.target in _ATTENTION:
            key, value = (argument.meta["val"].shape for argument in node.args[1:3])
            _are_equal(key[-2:-1], value[-2:-1])
        elif node.target in (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
            (at, mask), *more = [(axis, index) for axis, index in enumerate(node.args[1]) if index is not None] or [(0, None)]
            if mask is not None and not more and mask.meta["val"].dtype in (torch.bool, torch.uint8):
                _are_equal(node.args[0].meta["val"].shape[at:], mask.meta["val"].shape)


@contextmanager
def without_those_that_follow() -> Iterator[None]:
    """torch.export looks at what it took for granted of declared sizes without what is true of all of them, and where sympy raises as it
    solves equations of quotients of quotients, without these: each call is asked for them."""
    exporter: Any = importlib.import_module("torch.export._trace")  # which torch.export imports when it is first called
    before = exporter.produce_guards_and_solve_constraints

    def produce(fake_mode: Any, *args: Any, **kwargs: Any) -> Any:
        env = fake_mode.shape_env
        if env is None:
            return before(fake_mode, *args, **kwargs)
        one = _declared_as_one(env, kwargs.get("equalities_inputs"))
        env.guards[:] = kept = [guard for guard in env.guards if not (_for_strides(guard) or follows(guard.expr.xreplace(one), env))]
        try:
            return before(fake_mode, *args, **kwargs)
        except NotImplementedError:
            env.guards[:] = others = [guard for guard in kept if not _is_beyond_sympy(guard.expr)]
            if len(others) == len(kept):
                raise
            return before(fake_mode, *args, **kwargs)
        finally:
            env.guards[:] = kept

    exporter.produce_guards_and_solve_constraints = produce
    try:
        yield
    finally:
        exporter.produce_guards_and_solve_constraints = before


def _declared_as_one(env: ShapeEnv, declared: Any) -> Mapping[sympy.Basic, sympy.Basic]:
    """Symbols of sizes that are declared to be equal, as the first of them: for a trace they are free of each other."""
    sources = {symbol: found[0] for symbol, found in env.var_to_sources.items() if found} if declared is not None else {}
    return {one: next(s for s in sources if declared.is_derived(sources[s], sources[one], lambda same: same)) for one in sources}


def _is_beyond_sympy(expr: sympy.Basic) -> bool:
    return isinstance(expr, sympy.Eq) and any(quotient.args[0].has(FloorDiv) for quotient in expr.atoms(FloorDiv))


def follows(expr: sympy.Basic, env: ShapeEnv) -> bool:
    """Whether a guard is true of all sizes in their ranges, as that half of a size is no more than it: torch's intervals do not show what
    sizes and what is rounded of them have in common, and it refuses declared sizes for such a guard."""
    if expr == sympy.true:
        return True
    if isinstance(expr, sympy.And):
        return all(follows(part, env) for part in expr.args)
    if isinstance(expr, sympy.Eq) and isinstance(expr.lhs, FloorDiv):
        whole, divisor = expr.lhs.args
        rest = whole - divisor * expr.rhs
        return all(follows(each, env) for each in (divisor > 0, rest >= 0, rest < divisor))
    if isinstance(expr, sympy.Ne):
        return any(follows(relation(*expr.args), env) for relation in (sympy.Gt, sympy.Lt))
    if not isinstance(expr, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt) or free_unbacked_symbols(expr):
        return False
    if env._maybe_evaluate_static(expr, axioms=()) == sympy.true:
        return True
    if not (expr.lhs.is_integer and expr.rhs.is_integer and expr.has(*_ROUNDED)):
        return False
    more = _without_rounding(expr.gts - expr.lts, env)
    fractions = more is None or any(not power.exp.is_positive for power in more.atoms(sympy.Pow))  # of a size: not in torch's intervals
    least = None if fractions else bound_sympy(more, env.var_to_range).lower
    # Numbers of sizes are whole; half of one is left for what Python's floats round.
    return least is not None and bool(least > (0.5 if isinstance(expr, sympy.Gt | sympy.Lt) else -0.5))


def _without_rounding(expr: sympy.Expr, env: ShapeEnv) -> sympy.Expr | None:
    """What an expression is not less than, in which nothing is rounded. None where that is not known."""
    total = sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(expr)):
        factor, rounded = term.as_coeff_Mul()
        if isinstance(rounded, _ROUNDED):
            inner = rounded.args[0] / rounded.args[1] if isinstance(rounded, FloorDiv) else rounded.args[0]
            if isinstance(rounded, TruncToInt) and not bound_sympy(inner, env.var_to_range).lower >= 0:
                return None
            up = isinstance(rounded, CeilToInt)
            rest = _without_rounding(factor * inner.replace(_is_exact, _exactly), env)
            if rest is None:
                return None
            total += rest - (abs(factor) if up == (factor < 0) else 0)
        elif term.has(*_ROUNDED):
            return None
        else:
            total += term
    return total


def _is_exact(expr: sympy.Basic) -> bool:
    return isinstance(expr, ToFloat | IntTrueDiv | FloatTrueDiv)


def _exactly(expr: sympy.Basic) -> sympy.Basic:
    """What a float is without its rounding."""
    return expr.args[0] if isinstance(expr, ToFloat) else expr.args[0] / expr.args[1]


def _are_equal(sizes: Sequence[int | torch.SymInt], others: Sequence[int | torch.SymInt]) -> None:
    for size, other in zip(sizes, others):
        equal: object = size == other  # bool or SymBool
        if isinstance(equal, torch.SymBool) and equal.node.hint:  # none of what data say, False where the example itself is wrong
            bool(equal)  # a guard where that is not known


def same(equal: Sequence[tuple[sympy.Expr, sympy.Expr]]) -> tuple[sympy.Symbol, sympy.Symbol] | None:
    """Two symbols that are one where each of `equal` is."""
    exact = {_fraction(left) for left, right in equal if isinstance(left, Mod | PythonMod) and right == 0}
    return next(filter(None, (_alike(*(_divided(side, exact) for side in sides)) for sides in equal)), None)


def _alike(left: sympy.Expr, right: sympy.Expr) -> tuple[sympy.Symbol, sympy.Symbol] | None:
    """The symbols that are one where the sides are equal. Factors are sizes, which are positive here: another number may be 0."""
    if left == right or not all(symbol.is_positive for symbol in (left * right).free_symbols) or 0 in (left, right):
        return None
    one, other = sorted((left / right).as_numer_denom(), key=str)
    return (one, other) if isinstance(one, sympy.Symbol) and isinstance(other, sympy.Symbol) else None


def _divided(expr: sympy.Expr, exact: Container[tuple[sympy.Expr, ...]]) -> sympy.Expr:
    """The same with quotients that have no remainder as fractions."""

    def is_whole(e: sympy.Basic) -> bool:
        return isinstance(e, CleanDiv) or (isinstance(e, FloorDiv) and _fraction(e) in exact)

    return expr.replace(is_whole, lambda e: e.args[0] / e.args[1])


def _fraction(quotient: sympy.Basic) -> tuple[sympy.Expr, ...]:
    """What is divided by what, without what both have in common."""
    found: tuple[sympy.Expr, ...] = (quotient.args[0] / quotient.args[1]).as_numer_denom()
    return found


def another_way(assumption: object, sizes: Mapping[str, object], hint: str) -> InputError:
    """What is said of sizes that another program would be traced for."""
    what = f"the model takes another way for these sizes: it was captured where {assumption}, and here {listed(sizes)}"
    return InputError(what, hint=hint)


def listed(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _for_strides(guard: Any) -> bool:
    place = guard.sloc.framework_loc
    if not isinstance(place, traceback.FrameSummary) or not place.filename.startswith(torch.__path__[0]):
        return False
    reshaped = isinstance(guard.expr, sympy.Ne) and place.name in _FOR_STRIDES
    return reshaped or (place.name == _OF_ORDER[0] and place.filename.endswith(_OF_ORDER[1]))
