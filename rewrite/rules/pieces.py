"""A function of one number as a few polynomials, good enough for a result that is rounded to 8 bits, or to few digits later.

The interval outside of which nothing changes is cut into pieces of one length. In each of them the polynomial agrees with the function
at the Chebyshev nodes, which is nearly the best there is (Trefethen, Approximation Theory and Approximation Practice, 2013, ch. 15).
What comes out is compared with the function on a dense grid, as computed in f32: `fit` gives nothing that is off by more than `ERROR`.

Without a factor nothing changes once the result is saturated. A result that is multiplied by factors of many sizes is saturated in one
channel long before it is in another: there the interval ends where the function has become a line, which has a piece of its own. So does
that of a result in f32, of which the polynomials have as many digits as are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...graph import attrs as A
from ...graph.polynomials import piecewise, polynomials
from ...graph.types import DType, QParams, f32

Function = Callable[[torch.Tensor], torch.Tensor]
ERROR = 1 / 16  # of a step, before rounding: of many results at most so many differ, by one
_TAIL = 1 / 64  # of a step: what is left to change outside the interval
_APART = 1 / 64  # of a step: how far the code may be from the polynomials here, by fused roundings and between the numbers that are tried
SPREAD = 2.0**20  # of the magnitudes of factors, the greatest over the least
_LINE = 2.0**20  # from here on a function that ever becomes a line is one
_LEADING = 2.0**-126  # a coefficient that makes infinity of an infinite number, and nothing of others
_DEGREES = (2, 3, 4, 5)
_RELATIVE = 2.0**-12  # error of results in f32, of which few digits count
_LARGEST = torch.finfo(torch.float32).max
_REACH = 2.0**20  # the widest interval, and the farthest from 0 in pieces, whose numbers are the low bits of a float


@dataclass(frozen=True)
class Rounding:
    """What becomes of the function: integers of `dtype` from `least` to `greatest`. nan: whether NaN becomes `least`, else 0.

    largest: the greatest magnitude of factors that the function is multiplied with, before `zero` is added; the least is `SPREAD` times
    smaller. None: there are none, and the function has both in it.
    """

    dtype: DType
    qparams: QParams | None
    least: int
    greatest: int
    nan: bool
    largest: float | None = None
    zero: int = 0

    def saturated(self, y: torch.Tensor) -> torch.Tensor:
        """Before rounding: beyond these bounds nothing changes, and up to half a step there is room for the error."""
        return y.clamp(self.least - 0.25, self.greatest + 0.25)

    def error(self, y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """How far off the result is with y in place of `exact`, in steps before rounding, with the worst of all factors."""
        if self.largest is None:
            return (self.saturated(y) - self.saturated(exact)).abs()
        # From a magnitude of `room` on the result is saturated, whatever the sign of the factor and the zero point are.
        room = self.greatest - self.least + 1.0
        worst = (room / exact.abs()).clamp(max=self.largest)
        always = (worst < self.largest / SPREAD) & (y * exact.sign() >= exact.abs() * (1 - ERROR / room))
        return torch.where(always, 0.0, (y - exact).abs() * worst)


@dataclass(frozen=True)
class Digits:
    """What becomes of the function: its number, of which few digits count. absolute: an error that is fine even where that is nearly 0."""

    absolute: float = 0.0
    dtype: DType = f32
    qparams: QParams | None = None
    zero: int = 0

    def error(self, y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """How far off y is, where `ERROR` is as far as it may be."""
        allowed = (exact.abs() * _RELATIVE).clamp(min=max(self.absolute, 2.0**-126))
        return torch.where(y == exact.float(), 0.0, (y - exact).abs() / allowed * ERROR)


Goal = Rounding | Digits


def fit(function: Function, goal: Goal, pieces: int) -> A.PiecewiseAttrs | None:
    """The polynomials of `function`, or None where so few cannot follow it.

    function: of tensors of f32 or f64, elementwise; in steps where it is rounded. pieces: a power of two. Takes 1 to 3 ms.
    """
    if isinstance(goal, Digits):
        goal = replace(goal, absolute=max(goal.absolute, 4 * _noise(function)))
    interval = _interval(function, goal)
    if interval is None:
        return None
    for degree in _DEGREES if isinstance(goal, Rounding) else _DEGREES[:3]:
        found = _fitted(function, goal, interval, pieces, degree)
        if found is not None:
            return found
    return None


def of_units(a: A.PiecewiseAttrs) -> A.PiecewiseAttrs:
    """The same polynomials of x * density: their pieces are of length 1. A coefficient that makes something infinite still does."""

    def scaled(number: float, power: int) -> float:
        return math.copysign(max(abs(_single(number / a.density**power)), _LEADING), number) if number else 0.0

    coefficients = tuple(tuple(scaled(number, power) for number in row) for power, row in enumerate(a.coefficients))
    low, high = _within(a.low * a.density, a.high * a.density, a.first, a.last)
    low, high = a.low if a.low == -math.inf else _single(low), a.high if a.high == math.inf else _single(high)
    return replace(a, low=low, high=high, density=1.0, coefficients=coefficients)


def _within(low: float, high: float, first: int, last: int) -> tuple[float, float]:
    """Bounds in lengths of a piece, moved into the first piece and the last one. Rounded to the next piece, they would be looked up at the
    other end of the table."""
    least, most = (k + side * (0.5 - max(1, abs(k)) * 2.0**-22) for k, side in ((first, -1), (last, 1)))
    return max(low, least), min(high, most)


def _noise(function: Function) -> float:
    """How far off the function is in f32 where that has few digits of it, as 1 + erf(x) has where it is nearly 0."""
    x = torch.linspace(-16, 16, 4096, dtype=torch.float32)
    y, exact = function(x).double(), function(x.double())
    error = (y - exact).abs()
    return float(error.where(error > exact.abs() * _RELATIVE, 0.0).max())


@dataclass(frozen=True)
class _Interval:
    """Where the function is no line. ends: the (value at 0, slope) of the lines beyond. alone: whether one has a piece of its own: it is
    not flat, or the function has no number at the infinity of that side (`open`), where x itself may then be infinite."""

    low: float
    high: float
    open: tuple[bool, bool]
    ends: tuple[tuple[float, float], tuple[float, float]]

    @property
    def alone(self) -> tuple[bool, bool]:
        return self.open[0] or self.ends[0][1] != 0, self.open[1] or self.ends[1][1] != 0


def _probes() -> torch.Tensor:
    """Numbers of all sizes, f64."""
    sizes = torch.cat([torch.exp2(torch.arange(-24, 128, 1 / 4, dtype=torch.float64)), torch.tensor([_LARGEST], dtype=torch.float64)])
    return torch.cat([-sizes.flip(0), torch.zeros(1, dtype=torch.float64), sizes])


def _interval(function: Function, goal: Goal) -> _Interval | None:
    x = _probes()
    y = function(x)
    if bool(y.isnan().any()):
        return None
    if isinstance(goal, Rounding) and goal.largest is None:
        ends = tuple((float(goal.saturated(y[n])), 0.0) for n in (0, -1))
    else:
        ends = _lines(function)
    moved = [_moved(goal, x, y, end) for end in ends]
    if not moved[0].numel() or not moved[1].numel():
        return None
    left, right = int(moved[0][0]), int(moved[1][-1])
    if left == 0 or right == len(x) - 1:
        return None
    low = _edge(function, goal, float(x[left - 1]), float(x[left]), ends[0])
    high = _edge(function, goal, float(x[right + 1]), float(x[right]), ends[1])
    if high - low > _REACH:
        return None
    infinite = function(torch.tensor([-math.inf, math.inf], dtype=torch.float32)).isnan()
    found = _Interval(low, high, (bool(infinite[0]), bool(infinite[1])), (ends[0], ends[1]))
    return None if isinstance(goal, Digits) and found.alone[0] != found.alone[1] else found


def _lines(function: Function) -> tuple[tuple[float, float], ...]:
    """The lines that the function is far to the left and to the right, if it is any there."""
    near, far = (function(torch.tensor([-x, x], dtype=torch.float64)) for x in (_LINE, 2 * _LINE))
    return tuple((float(2 * a - b), float(b - a) / x) for a, b, x in zip(near, far, (-_LINE, _LINE)))


def _moved(goal: Goal, x: torch.Tensor, y: torch.Tensor, line: tuple[float, float]) -> torch.Tensor:
    """Where the function y(x) is not the line."""
    return (goal.error(line[0] + line[1] * x, y) > _TAIL).nonzero().flatten()


def _edge(function: Function, goal: Goal, outside: float, inside: float, end: tuple[float, float]) -> float:
    """The last number on the way from outside where the function is what it is beyond."""
    for _ in range(2):
        x = torch.linspace(outside, inside, 65, dtype=torch.float64)
        moved = _moved(goal, x, function(x), end)
        at = max(int(moved[0]), 1) if moved.numel() else 64
        outside, inside = float(x[at - 1]), float(x[at])
    return outside


def _layout(interval: _Interval, pieces: int) -> tuple[float, int, int] | None:
    """Pieces for each unit, and the first and the last that reach into the interval. Piece k is where round(x density) = k."""
    count = pieces - sum(interval.alone)
    width = interval.high - interval.low
    best: tuple[float, int] | None = None
    about = math.floor(interval.low * count / width + 0.5)
    for first in (about, about + 1):
        edges = ((interval.low, first - 0.5), (interval.high, first + count - 0.5))
        density = min((number / x for x, number in edges if x * number > 0), default=0.0)
        fits = interval.low * density >= first - 0.500001 and interval.high * density <= first + count - 0.499999
        if fits and density > 0 and (best is None or density > best[0]):
            best = density, first
    if best is None or abs(best[1]) > _REACH:
        return None
    return _single(best[0] * (1 - 2.0**-23)), best[1], best[1] + count - 1


def _fitted(function: Function, goal: Goal, interval: _Interval, pieces: int, degree: int) -> A.PiecewiseAttrs | None:
    layout = _layout(interval, pieces)
    if layout is None:
        return None
    density, first, last = layout
    centers = torch.arange(first, last + 1, dtype=torch.float64) / density
    half = 0.5 / density
    nodes = torch.cos(math.pi * (torch.arange(degree + 1, dtype=torch.float64) + 0.5) / (degree + 1))
    values = function(centers[:, None] + half * nodes)
    local = torch.linalg.solve(torch.linalg.vander(nodes), values.T)  # of powers of (x - center) / half
    table = torch.zeros(degree + 1, pieces, dtype=torch.float64)
    table[:, torch.arange(first, last + 1) % pieces] = _shifted(local, centers, half)
    digits = isinstance(goal, Digits)
    if digits and first <= 0 <= last and not function(torch.zeros(1, dtype=torch.float64)):
        table[:, 0] = _through_zero(function, half, degree)
    low, high = (units / density for units in _within(interval.low * density, interval.high * density, first, last))
    if interval.alone[0]:
        low, first = (first - 1) / density if digits else -math.inf, first - 1
        table[:, first % pieces] = _line(interval, 0, degree, digits)
    if interval.alone[1]:
        high, last = (last + 1) / density if digits else math.inf, last + 1
        table[:, last % pieces] = _line(interval, 1, degree, digits)
    coefficients = tuple(tuple(row) for row in table.float().tolist())
    bounds = _single(low), _single(high)
    found = A.PiecewiseAttrs(goal.dtype, goal.qparams, *bounds, density, first, last, coefficients, zero=goal.zero)
    if isinstance(goal, Digits):
        found = replace(found, line=interval.alone[0])
        return found if _follows(function, goal, interval, found) else None
    return _verified(function, goal, interval, found)


def _through_zero(function: Function, half: float, degree: int) -> torch.Tensor:
    """The coefficients of the piece around 0, where the function is 0: its digits count however small it is."""
    x = half * torch.cos(math.pi * (torch.arange(degree, dtype=torch.float64) + 0.5) / degree)
    quotient = torch.linalg.solve(torch.linalg.vander(x), function(x) / x)
    return torch.cat([torch.zeros(1, dtype=torch.float64), quotient])


def _line(interval: _Interval, side: int, degree: int, digits: bool) -> torch.Tensor:
    """The coefficients of the line on one side. digits: the last product is with x itself, and there is a line on both sides.

    Otherwise, where the function has a number at infinity, no coefficient of 0 is multiplied by that.
    """
    offset, slope = interval.ends[side]
    line = torch.zeros(degree + 1, dtype=torch.float64)
    line[:2] = torch.tensor([offset, slope], dtype=torch.float64)
    if not interval.open[side] and not digits:
        line[degree] = math.copysign(_LEADING, slope) * (1 if side else (-1) ** (degree + 1))
    return line


def _single(number: float) -> float:
    """Rounded to f32."""
    return float(torch.tensor(number, dtype=torch.float32))


def _shifted(local: torch.Tensor, centers: torch.Tensor, half: float) -> torch.Tensor:
    """Coefficients of powers of x from those of (x - center) / half, a column for each piece: Horner's scheme on polynomials."""
    result = torch.zeros_like(local)
    for row in reversed(local):
        times_x = torch.cat([torch.zeros_like(result[:1]), result[:-1]])
        result = (times_x - result * centers) / half
        result[0] += row
    return result


def _follows(function: Function, goal: Digits, interval: _Interval, found: A.PiecewiseAttrs) -> bool:
    """Whether the polynomials are good enough everywhere, and infinite or none where the function is. It may be 0 at 0 and nowhere else."""
    x = _numbers(interval, found)
    y, exact = polynomials(x, found).double(), function(x.double())
    crosses = (exact[:-4] * exact[1:-3] < 0) & (x[:-4] * x[1:-3] > 0)
    close = bool((goal.error(y[:-3], exact[:-3]) <= ERROR).all() and not crosses.any())
    return close and bool(torch.isclose(y[-3:], exact[-3:], rtol=_RELATIVE, atol=goal.absolute, equal_nan=True).all())


def _numbers(interval: _Interval, found: A.PiecewiseAttrs) -> torch.Tensor:
    """Many of those in and around the interval, some of all sizes, and at the end infinity, its opposite and none."""
    width = interval.high - interval.low
    dense = torch.linspace(interval.low - width / 2, interval.high + width / 2, 64 * len(found.coefficients[0]), dtype=torch.float64)
    special = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    return torch.cat([dense, _probes(), special]).float()


def _verified(function: Function, rounding: Rounding, interval: _Interval, found: A.PiecewiseAttrs) -> A.PiecewiseAttrs | None:
    """The polynomials with the saturation they need, if they are good enough everywhere."""
    x = _numbers(interval, found)
    y = polynomials(x, found)
    if not bool((rounding.error(y[:-3].double(), function(x[:-3].double())) <= ERROR).all()):
        return None
    finite = y[~y.isnan()]
    room = 0.5 - _APART  # up to half a step beyond an end is rounded to it
    beyond = rounding.largest is not None or bool((finite < rounding.least - room).any() or (finite > rounding.greatest + room).any())
    if rounding.nan and (beyond or rounding.least != 0):
        found = replace(found, least=rounding.least, greatest=rounding.greatest if beyond else None)
    elif beyond:
        return None
    largest = rounding.largest
    factors = (1.0,) if largest is None else (largest, largest / SPREAD, -largest)
    real = function(x)
    return found if all(_agrees(real, x, rounding, found, factor) for factor in factors) else None


def _agrees(y: torch.Tensor, x: torch.Tensor, rounding: Rounding, found: A.PiecewiseAttrs, factor: float) -> bool:
    """Whether the integers are those of the function y(x), or the next ones; `factor` counts where there are factors."""
    real = y if rounding.largest is None else y * factor + rounding.zero
    expected = torch.round(rounding.saturated(real))
    expected = torch.where(real.isnan(), torch.full_like(expected, rounding.least if rounding.nan else 0), expected)
    got = piecewise(x, found, None if rounding.largest is None else torch.tensor(factor, dtype=torch.float32)).float()
    return bool(((got == expected) | ((got - expected).abs() <= 1) & ~real.isnan()).all())
