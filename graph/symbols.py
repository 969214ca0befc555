"""Symbolic integers between three worlds: torch's sympy expressions, this project's `Dim`s, and the numbers of one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.functions import Mod, PythonMod
from torch.utils._sympy.value_ranges import bound_sympy

from ..diagnostics.errors import BY_PARTS, InputError, Unsupported
from . import dims, floats
from .branches import refused
from .dims import Dim, Symbol
from .equalities import apart, fixed, joined, narrowed, parts, solved, told
from .floats import Definition
from .guards import another_way, guards, same
from .poly import UNBOUNDED
from .refusals import place_of

_FUNCTIONS: dict[str, Callable[..., Dim]] = {
    "FloorDiv": dims.floordiv, "CleanDiv": dims.floordiv, "CeilDiv": dims.ceildiv,
    "Mod": dims.mod, "PythonMod": dims.mod, "Min": dims.minimum, "Max": dims.maximum, "Identity": lambda x: x,
    "ModularIndexing": lambda x, step, size: dims.mod(dims.floordiv(x, step), size),
}

_RELATIONS: dict[str, Callable[[int, int], bool]] = {"==": operator.eq, "!=": operator.ne, ">=": operator.ge}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {"floordiv": operator.floordiv, "mod": operator.mod, "min": min, "max": max}


@dataclass(frozen=True)
class Assumption:
    """What tracing took for granted of the sizes, because the model, or PyTorch, decided by it: dim == 0, dim != 0 or dim >= 0."""

    dim: Dim
    relation: str

    def holds(self, env: Mapping[str, int]) -> bool:
        try:
            return bool(_RELATIONS[self.relation](_number(self.dim, env), 0))
        except ZeroDivisionError:  # what is divided by is 0 only where an assumption before this one fails
            return False

    @property
    def evident(self) -> bool:
        """Whether it holds for all numbers in the ranges of its symbols, by what is known of these."""
        low, high = dims.bounds(self.dim)
        if self.relation == ">=":
            return low is not None and low >= 0
        return low == high == 0 if self.relation == "==" else (low or 0) > 0 or (high or 0) < 0

    def __str__(self) -> str:
        return f"{self.dim} {self.relation} 0"


def _number(dim: Dim, env: Mapping[str, int]) -> int:
    """The number that `dim` is under `env`, in Python's arithmetic, so that sizes of a model being traced are served too."""
    if isinstance(dim, int):
        return dim
    total = 0
    for mono, coefficient in dim.terms:
        for atom in mono:
            known = env[atom.name] if isinstance(atom, Symbol) else _ARITHMETIC[atom.kind](*(_number(a, env) for a in atom.args))
            coefficient = coefficient * known
        total = total + coefficient
    return total


Assumed = Assumption | Definition


def require(
    assumptions: Iterable[Assumed], env: Mapping[str, int], hint: str = "compile it for an example of these sizes, too",
) -> dict[str, int]:
    """The numbers of all symbols, those that are defined included. Raises InputError for sizes that another program would be traced for;
    `asked.told` puts it into the caller's words."""
    env = dict(env)
    for assumption in assumptions:
        if isinstance(assumption, Definition):
            try:
                env[assumption.name] = assumption.number(env)
            except (ArithmeticError, ValueError) as error:  # as the model itself would raise
                raise InputError(f"the model computes {assumption} of its sizes, here {env}: {error}") from error
        elif not assumption.holds(env):
            raise another_way(assumption, env, hint)
    return env


@dataclass
class Symbols:
    """Translates sympy to Dims for one capture. `ranges`: bounds that replace those of the shape environment, by symbol name.

    Symbols that torch proved equal become one; every symbol has one range, so that equal dimensions are equal objects.
    A size of 0 is left out of every range: reductions over nothing and divisions by a size have no good native form.
    """

    env: ShapeEnv | None
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    found: dict[str, Dim] = field(default_factory=dict)
    computed: dict[sympy.Expr, Definition] = field(default_factory=dict)
    same: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)

    def unified(self) -> Symbols:
        """These, where what is equal by what torch takes for granted is one, too. torch does not look at that again once it has found more:
        that b * n == c * m, and then that b == c; nor at the quotients that views ask for. A size that is divided without a remainder is a
        multiple of another number."""
        asked = [e for e in guards(self.env) if isinstance(e, sympy.Rel) and not free_unbacked_symbols(e)]
        equal = [e for e in asked if isinstance(e, sympy.Eq)]
        while found := same([(self._simplified(e.lhs), self._simplified(e.rhs)) for e in equal if len(e.free_symbols) > 1]):
            self.same[found[1]] = found[0]
        sizes = [e for e in asked if all(symbol.is_positive for symbol in e.free_symbols)]  # an argument may be 0 or less
        self._spell(narrowed(self._zeros(sizes)))
        self._spell(parts(self._zeros(sizes), self._at_least(sizes)))
        for zero in self._zeros(sizes):
            self._spell(told(zero))
        self._spell(parts(self._zeros(sizes), self._at_least(sizes)))
        while pair := next(filter(None, (joined(zero, self.found.keys()) for zero in solved([*self._zeros(sizes)]))), None):
            self._spell(pair)
        for zero in self._zeros(sizes):
            self._spell(fixed(zero))
        return self

    def decided_at(self, size: torch.SymInt) -> str:
        """The line of the model that first took for granted what a size is equal to; empty where PyTorch alone did."""
        asked = self._unified(size.node.expr).free_symbols
        found = self.env.guards if self.env is not None else ()
        equal = (g.sloc.framework_loc for g in found if isinstance(g.expr, sympy.Eq) and asked & self._unified(g.expr).free_symbols)
        return next(filter(None, map(place_of, equal)), "")

    def _spell(self, spelled: Mapping[str, Dim]) -> None:
        self.found = {name: dims.substitute(dim, spelled) for name, dim in self.found.items()}

    def _zeros(self, asked: Iterable[sympy.Rel]) -> Iterator[Dim]:
        """What is 0 by these, as it is told by now, but for what is computed in floats. torch simplifies away what it takes for granted."""
        for e in asked:
            left, right = self._unified(e.lhs), self._unified(e.rhs)
            ratio = left.args[0] / left.args[1] if isinstance(left, Mod | PythonMod) and right == 0 else None
            if isinstance(e, sympy.Eq):
                sides = self._as_told(*((left, right) if ratio is None else ratio.as_numer_denom()))
                if sides is not None:
                    yield from apart(*sides) if ratio is None else [dims.mod(*map(dims.product, sides))]
            else:
                yield from (more for more in self._at_least([e]) if dims.bounds(more)[1] == 0)

    def _at_least(self, asked: Iterable[sympy.Rel]) -> Iterator[Dim]:
        """What is no less than 0 by these, and no equation says."""
        for e in asked:
            if not isinstance(e, sympy.Eq) and e.lhs.is_integer and e.rhs.is_integer:
                swapped = isinstance(e, (sympy.Le, sympy.Lt))
                for factors in self._as_told(self._unified(e.rhs - e.lhs if swapped else e.lhs - e.rhs)) or ():
                    more = dims.product(factors)
                    low, high = dims.bounds(more)
                    if isinstance(e, (sympy.Ge, sympy.Le)):
                        yield more
                    elif not isinstance(e, sympy.Ne) or low == 0:
                        yield more - 1
                    elif high == 0:
                        yield -1 - more

    def _as_told(self, *exprs: sympy.Expr) -> tuple[list[Dim], ...] | None:
        """The factors of these, as they are told by now; None for what is computed in floats, or has no integer form."""
        with suppress(Unsupported):
            found = tuple(map(self._factors, exprs))
            if not self.computed:
                return found
        self.computed.clear()  # their symbols may be spelled in another way yet
        return None

    def dim(self, size: int | torch.SymInt) -> Dim:
        """The Dim of a size. Raises Unsupported for one that depends on data."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        if size.node.expr.is_number:
            return int(size.node.expr)
        return self.expression(size.node.expr)

    def argument(self, number: torch.SymInt) -> Dim:
        """The Dim of an integer argument, which may be 0 or negative, other than sizes, as far as torch has found."""
        expr = self._simplified(number.node.expr)
        if isinstance(expr, sympy.Symbol) and expr.name not in self.found:
            self.found[expr.name] = dims.symbol(expr.name, *self._range(expr))
        return self.dim(number)

    def depends_on_data(self, size: int | torch.SymInt) -> bool:
        """Whether a size is what data say and not, by a check of the model, a size of the inputs."""
        return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(self._simplified(size.node.expr)))

    def _unified(self, expr: sympy.Expr) -> sympy.Expr:
        expr = expr if self.env is None else self.env.replace(expr)
        while self.same.keys() & expr.free_symbols:
            expr = expr.xreplace(self.same)
        return expr

    def _simplified(self, expr: sympy.Expr) -> sympy.Expr:
        return expr if self.env is None else self.env.simplify(self._unified(expr))

    def expression(self, expr: sympy.Expr) -> Dim:
        """The Dim of a sympy expression, of symbols that `assumptions` defines where it has no polynomial form. Raises Unsupported."""
        expr = self._simplified(expr)
        if free_unbacked_symbols(expr):
            raise Unsupported(f"the size {expr} depends on the data, not on the shapes of the inputs", hint=BY_PARTS)
        return self._translate(expr)

    def definitions(self) -> tuple[Definition, ...]:
        """The symbols that are computed from others, as far as they were asked for."""
        return tuple(self.computed.values())

    def assumptions(self) -> tuple[Assumed, ...]:
        """The definitions, and what tracing took for granted of the sizes beyond their ranges. Raises Unsupported for what has no integer
        form."""
        found: dict[Assumption, None] = {}
        for expr in guards(self.env):
            assert self.env is not None
            if self.env._maybe_evaluate_static(expr, axioms=()) is None and not free_unbacked_symbols(expr):
                try:
                    found.update(dict.fromkeys(self._assumed(expr)))
                except Unsupported as error:
                    what = f"the model, or PyTorch, decides by {expr}, which cannot be asked of the sizes of a call"
                    raise Unsupported(what, hint="declare the sizes with torch.export.Dim, whose range torch.export decides for") from error
        larger = (Assumption(self.expression(sum(sizes) - len(sizes)), "!=") for sizes in refused(self.env))
        return (*self.definitions(), *(a for a in found if not self._as_traced(a).evident), *larger)

    def _as_traced(self, assumption: Assumption) -> Assumption:
        """The assumption with the ranges that torch traces for, which are often from 2 on. What is evident of them it takes for granted
        without a guard, as far as its own arithmetic shows it."""
        ranges = self.env.var_to_range.items() if self.env is not None else ()
        traced = {symbol.name: dims.symbol(symbol.name, *integer_bounds(bounds)) for symbol, bounds in ranges}
        return replace(assumption, dim=dims.substitute(assumption.dim, traced))

    def _assumed(self, expr: Any) -> Iterator[Assumption]:
        if isinstance(expr, sympy.And):
            for part in expr.args:
                yield from self._assumed(part)
        elif isinstance(expr, sympy.Or):
            yield Assumption(self._zero_where(expr), "==")
        elif isinstance(expr, sympy.Rel) and not (expr.lhs.is_integer and expr.rhs.is_integer):
            yield Assumption(self._defined(expr) - 1, "==")
        elif isinstance(expr, (sympy.Eq, sympy.Ne)):
            yield Assumption(self.expression(expr.lhs - expr.rhs), "==" if isinstance(expr, sympy.Eq) else "!=")
        elif isinstance(expr, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
            more = self.expression(expr.gts - expr.lts)
            yield Assumption(more - 1 if isinstance(expr, (sympy.Gt, sympy.Lt)) else more, ">=")
        else:
            raise Unsupported(f"{expr} is no comparison of sizes")

    def _zero_where(self, expr: Any) -> Dim:
        """What is 0 where `expr` holds and nowhere else."""
        if isinstance(expr, sympy.Or):
            return dims.product(self._zero_where(part) for part in expr.args)
        total: Dim = 0
        for assumption in self._assumed(expr):
            dim = assumption.dim
            if assumption.relation == ">=":
                dim = dims.minimum(dim, 0)
            elif assumption.relation == "!=":
                dim = dims.maximum(1 - dim * dim, 0)
            total = total + dim * dim
        return total

    def _factors(self, expr: sympy.Expr) -> list[Dim]:
        """What an expression is the product of."""
        powers = ((base, exponent) if exponent.is_Integer and exponent > 0 else (base**exponent, 1)
                  for base, exponent in expr.as_powers_dict().items())
        return [factor for base, exponent in powers for factor in [self._translate(base)] * int(exponent)]

    def _translate(self, expr: sympy.Expr) -> Dim:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, sympy.Symbol):
            return self._symbol(expr)
        if isinstance(expr, sympy.Add):
            total: Dim = 0
            for term in expr.args:
                total = total + self._translate(term)
            return total
        if isinstance(expr, sympy.Mul):
            return dims.product(self._translate(factor) for factor in expr.args)
        if isinstance(expr, sympy.Pow) and isinstance(expr.exp, sympy.Integer) and int(expr.exp) > 0:
            return dims.product([self._translate(expr.base)] * int(expr.exp))
        if floats.is_whole(expr):
            exact = floats.exact(expr, self._translate)
            return self._defined(expr) if exact is None else exact
        rule = _FUNCTIONS.get(type(expr).__name__)
        if rule is None:
            raise Unsupported(f"the size {expr} has no integer form here ({type(expr).__name__})")
        first, *rest = [self._translate(arg) for arg in expr.args]
        if type(expr).__name__ in ("Min", "Max"):
            for other in rest:
                first = rule(first, other)
            return first
        return rule(first, *rest)

    def _defined(self, expr: Any) -> Dim:
        """A symbol for a float that is made an int, or for a relation of floats: 1 where it holds, otherwise 0."""
        if expr not in self.computed:
            tree = floats.tree_of(expr, self._translate)
            if tree is None:
                raise Unsupported(f"{expr} is computed in a way that is not known here")
            low, high = (0, 1) if isinstance(expr, sympy.Rel) else self._bounds(expr)
            self.computed[expr] = Definition(f"float{len(self.computed)}", tree, low, high)
        return self.computed[expr].dim

    def _bounds(self, expr: sympy.Expr) -> tuple[int, int | None]:
        if self.env is None:
            return -UNBOUNDED, None
        span = bound_sympy(expr, self.env.var_to_range)
        low = _within(span.lower)
        return -UNBOUNDED if low is None else low, _within(span.upper)

    def _symbol(self, symbol: sympy.Symbol) -> Dim:
        name = symbol.name
        if name not in self.found:
            low, high = self._range(symbol)
            self.found[name] = dims.symbol(name, max(low, 1), high)
        return self.found[name]

    def _range(self, symbol: sympy.Symbol) -> tuple[int, int | None]:
        """Where the symbol is, and all that are the same."""
        low, high = self._own_range(symbol)
        for other in (other for other, kept in self.same.items() if kept == symbol):
            least, most = self._range(other)
            low, high = max(low, least), most if high is None else high if most is None else min(high, most)
        return low, high

    def _own_range(self, symbol: sympy.Symbol) -> tuple[int, int | None]:
        if symbol.name in self.ranges:
            return self.ranges[symbol.name]
        bounds = self.env.var_to_range.get(symbol) if self.env is not None else None
        return (0, None) if bounds is None else integer_bounds(bounds)


def integer_bounds(bounds: Any) -> tuple[int, int | None]:
    """(low, high) of torch's ValueRanges; None where there is no upper bound, or one larger than any tensor."""
    low = _within(bounds.lower)
    return -UNBOUNDED if low is None else low, _within(bounds.upper)


def _within(bound: Any) -> int | None:
    """A bound that is one: finite, and no larger than any tensor."""
    return int(bound) if isinstance(bound, (int, sympy.Integer)) and abs(int(bound)) < UNBOUNDED else None
