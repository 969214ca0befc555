"""Derives the polynomials of `cpu_codegen/math/coefficients.py`: `python -P tests/cpu_codegen/math/fits.py` prints that table.

Method: minimax on a grid of Chebyshev points as a linear program (the coefficients and the largest error are its unknowns), which unlike
Remez' exchange needs no Haar condition and so stays right when some coefficients are fixed. They are rounded one after the other,
lowest power first, and the remaining ones are fitted again around the rounded ones.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mpmath as mp
import numpy as np
from scipy.optimize import linprog

mp.mp.dps = 40
Real = Callable[[mp.mpf], mp.mpf]
GRID, GRID_OF_PIECES = 1200, 60


@dataclass(frozen=True)
class Fit:
    """Minimizes max |weight(x) * (p(x) - value(x))| over p of `count` coefficients on [low, high]. bits: 24 or 53 of each coefficient."""

    name: str
    value: Real
    weight: Real
    low: float
    high: float
    count: int
    bits: int = 24


def _square(f: Real) -> Real:
    """A function of x as one of z = x^2."""
    return lambda z: f(mp.sqrt(z))


_LN2 = float(mp.log(2) / 2) * 1.001
_LOG_LOW, _LOG_HIGH = float(mp.sqrt(0.5) - 1) * 1.0001, float(mp.sqrt(2) - 1) * 1.0001
_QUARTER2 = float((mp.pi / 4) ** 2) * 1.012
TANH_SPLIT, ERF_SPLIT, ERF_LAST, NORMAL_LAST, NORMAL_STEP, NORMAL_CENTER = 0.5625, 0.8125, 4.0, 9.2, 0.1875, 1.0


def _log(base: mp.mpf | int | None) -> Real:
    scale = mp.mpf(1) if base is None else 1 / mp.log(base)
    return lambda f: scale * (mp.log1p(f) - f) / f**2


def _erfc_log2(a: mp.mpf) -> mp.mpf:
    return mp.log(mp.erfc(a), 2)


def _tail_weight(a: mp.mpf) -> mp.mpf:
    """Of an error in log2(2 tail(a)) / a: what it makes of the tail, which counts most where the tail is large and its rounding, too."""
    tail = mp.ncdf(-a)
    return a * tail * mp.log(2) * (tail + 0.12) * 2


FITS: tuple[Fit, ...] = (
    Fit("EXP", lambda r: (mp.expm1(r) - r) / r**2, lambda r: r**2 / mp.expm1(r), -_LN2, _LN2, 5),
    Fit("EXP_SHORT", lambda r: (mp.expm1(r) - r) / r**2, lambda r: r**2 / mp.exp(r), -_LN2, _LN2, 4),
    Fit("EXP2", lambda f: mp.expm1(f * mp.log(2)) / f, lambda f: f / 2**f, -0.501, 0.501, 6),
    Fit("LOG", _log(None), lambda f: f**2 / mp.log1p(f), _LOG_LOW, _LOG_HIGH, 9),
    Fit("LOG2", _log(2), lambda f: f**2 / mp.log1p(f), _LOG_LOW, _LOG_HIGH, 9),
    Fit("LOG10", _log(10), lambda f: f**2 / mp.log1p(f), _LOG_LOW, _LOG_HIGH, 9),
    Fit("SIN", _square(lambda r: (mp.sin(r) - r) / r**3), _square(lambda r: r**3 / mp.sin(r)), 0, _QUARTER2, 3),
    Fit("COS", _square(lambda r: (mp.cos(r) - 1 + r**2 / 2) / r**4), _square(lambda r: r**4 / mp.cos(r)), 0, _QUARTER2, 3),
    Fit("ATAN", _square(lambda a: (mp.atan(a) - a) / a**3), _square(lambda a: a**3 / mp.atan(a)), 0, 1, 9),
    Fit("TANH", _square(lambda x: (mp.tanh(x) - x) / x**3), _square(lambda x: x**3 / mp.tanh(x)), 0, (TANH_SPLIT * 1.001) ** 2, 4),
    Fit("ERF_NEAR", _square(lambda x: mp.erf(x) / x - 1), _square(lambda x: x / mp.erf(x)), 0, (ERF_SPLIT * 1.001) ** 2, 6),
    Fit("ERF_FAR", _erfc_log2, lambda a: mp.erfc(a) / mp.erf(a), ERF_SPLIT * 0.999, ERF_LAST, 7),
    Fit("NORMAL_TAIL", lambda a: mp.log(2 * mp.ncdf(-a), 2) / a, _tail_weight, 1e-5, 5.3, 8),
    Fit("NORMAL_SHORT", lambda a: mp.log(mp.ncdf(-a), 2), lambda a: mp.log(2), 0, NORMAL_LAST, 8),
    Fit("EXP2_SHORT", lambda f: mp.expm1(f * mp.log(2)) / f, lambda f: f / 2**f, -0.501, 0.501, 3),
    Fit("EXP2_SHORT_UP", lambda f: mp.expm1(f * mp.log(2)) / f, lambda f: f / 2**f, 1e-9, 1, 3),
    Fit("EXP2_WEIGHT", lambda f: mp.expm1(f * mp.log(2)) / f, lambda f: f / 2**f, -0.501, 0.501, 5),
    Fit("EXP2_WEIGHT_UP", lambda f: mp.expm1(f * mp.log(2)) / f, lambda f: f / 2**f, 1e-9, 1, 5),
    Fit("EXP2_SHORT_WEIGHT", lambda f: mp.mpf(2) ** f, lambda f: mp.mpf(2) ** -f, -0.501, 0.501, 4),
    Fit("EXP2_SHORT_WEIGHT_UP", lambda f: mp.mpf(2) ** f, lambda f: mp.mpf(2) ** -f, 0, 1, 4),
    Fit("LOG2_WIDE", lambda f: mp.log1p(f) / f / mp.log(2), lambda f: f / mp.log1p(f), _LOG_LOW, _LOG_HIGH, 12, 53),
    Fit("EXP2_WIDE", lambda f: 2**f, lambda f: 2**-f, -0.501, 0.501, 7, 53),
)


@dataclass(frozen=True)
class Pieces:
    """Polynomials of `degree` + 1 coefficients in x - center for value(x), |x - k step| <= step / 2 and x >= 0, for k below `count`, with
    the least largest error. The last piece is the constant `last`.
    """

    name: str
    value: Real
    step: float
    count: int
    degree: int
    center: float
    last: float
    grain: float  # what first coefficients are multiples of

    def fit(self, k: int) -> Fit:
        half = self.step / 2 * 1.001
        low, high = max(0.0, k * self.step - half) - self.center, k * self.step + half - self.center
        count = self.degree + 1 if k < self.count - 1 else 1
        return Fit(self.name, lambda t: self.value(t + self.center), lambda t: mp.mpf(1), low, high, count)

    def solve(self) -> list[tuple[float, ...]]:
        """The coefficients of each power, lowest first: one for each piece."""
        polynomials = [solve(self.fit(k), GRID_OF_PIECES, self.grain) for k in range(self.count - 1)]
        polynomials.append([self.last, *[0.0] * self.degree])
        return list(zip(*polynomials, strict=True))

    def error(self, table: Sequence[Sequence[float]]) -> float:
        """Returns the largest error of all pieces."""
        fits = [self.fit(k) for k in range(self.count)]
        return max(error(fit, p, grid(fit, GRID_OF_PIECES)) for fit, p in zip(fits, zip(*table, strict=True), strict=True))


PIECES: tuple[Pieces, ...] = (Pieces("NORMAL", lambda x: mp.ncdf(x) - mp.mpf(1) / 2, NORMAL_STEP, 32, 4, NORMAL_CENTER, 0.5, 2.0**-24),)


def grid(fit: Fit, count: int = GRID) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns Chebyshev points of the interval, the values and the weights there, in extended precision."""
    middle, half = (mp.mpf(fit.high) + fit.low) / 2, (mp.mpf(fit.high) - fit.low) / 2
    points = [middle + half * mp.cos(mp.pi * (2 * n + 1) / (2 * count)) for n in range(count)]
    parts = points, [fit.value(x) for x in points], [abs(fit.weight(x)) for x in points]
    x, v, w = (np.array([np.longdouble(mp.nstr(t, 25)) for t in part]) for part in parts)
    return x, v, w


def error(fit: Fit, coefficients: Sequence[float], at: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None) -> float:
    """Returns the largest weighted error of a polynomial, lowest power first."""
    x, v, w = at or grid(fit)
    return float(np.abs(_residual(x, v, w, coefficients)).max())


def solve(fit: Fit, points: int = GRID, grain: float = 0.0) -> list[float]:
    """Returns the rounded coefficients, lowest power first. grain: what the first one is a multiple of; 0: rounded as the others are."""
    at = grid(fit, points)
    known: list[float] = []
    best = _interpolated(fit)
    for n in range(fit.count):
        best = known + _minimax(at, known, best[n:])
        exact = float(np.round(best[n] / grain) * grain) if grain and not n else best[n]
        known.append(float(np.float32(exact)) if fit.bits == 24 else float(exact))
    return known


def _residual(x: np.ndarray, v: np.ndarray, w: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    total = np.zeros_like(x)
    for c in reversed(coefficients):
        total = total * x + np.longdouble(c)
    return w * (total - v)


def _interpolated(fit: Fit) -> list[float]:
    """A first polynomial, through the Chebyshev nodes."""
    middle, half = (mp.mpf(fit.high) + fit.low) / 2, (mp.mpf(fit.high) - fit.low) / 2
    nodes = [middle + half * mp.cos(mp.pi * (2 * n + 1) / (2 * fit.count)) for n in range(fit.count)]
    matrix = mp.matrix(fit.count, fit.count)
    for row, x in enumerate(nodes):
        for column in range(fit.count):
            matrix[row, column] = x**column
    return [float(c) for c in mp.lu_solve(matrix, mp.matrix([fit.value(x) for x in nodes]))]


def _minimax(at: tuple[np.ndarray, np.ndarray, np.ndarray], known: list[float], free: list[float]) -> list[float]:
    """Returns the free coefficients with the smallest largest error: a linear program in their changes and the bound."""
    x, v, w = at
    for _ in range(2):  # the second time from a closer start, so that the solver's tolerance counts less
        residual = _residual(x, v, w, [*known, *free])
        unit = np.abs(residual).max()
        columns = np.stack([w * x ** (len(known) + n) for n in range(len(free))], 1)
        scale = np.abs(columns).max(0)
        a = (columns / scale).astype(np.float64)
        ones = np.ones((len(x), 1))
        r = (residual / unit).astype(np.float64)
        found = linprog(
            [0.0] * len(free) + [1.0],
            A_ub=np.block([[a, -ones], [-a, -ones]]),
            b_ub=np.concatenate([-r, r]),
            bounds=[(None, None)] * len(free) + [(0, None)],
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        free = [float(c + np.longdouble(d) * unit / s) for c, d, s in zip(free, found.x, scale)]
    return free


def table() -> str:
    lines = []
    for fit in FITS:
        coefficients = solve(fit)
        largest = error(fit, coefficients)
        text = textwrap.fill(", ".join(repr(c) for c in coefficients), 120, initial_indent="    ", subsequent_indent="    ")
        lines.append(f"# error 2^{np.log2(largest):.1f}\n{fit.name} = (\n{text},\n)")
    for pieces in PIECES:
        found = pieces.solve()
        rows = [", ".join(repr(c) for c in row) for row in found]
        text = "\n".join(f"    (\n{textwrap.fill(r, 120, initial_indent=' ' * 8, subsequent_indent=' ' * 8)},\n    )," for r in rows)
        lines.append(f"# error 2^{np.log2(pieces.error(found)):.1f}\n{pieces.name} = (\n{text}\n)")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
