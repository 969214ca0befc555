"""Why a search left each operation in the precision it is in."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .found import SiteChoice
from .levels import FINE, FLOAT, LEVELS, NARROW, QUANTIZED, Lab, Unit
from .search import MIXED, Found


def choices(found: Found, lab: Lab) -> tuple[SiteChoice, ...]:
    """Every operation of the answer with its times, what it costs, and the reason for its precision."""
    units = {site.name: unit for unit in found.units for site in unit.sites}
    return tuple(_choice(site.name, units[site.name], found, lab) for site in lab.sites)


def _choice(name: str, unit: Unit, found: Found, lab: Lab) -> SiteChoice:
    site = next(s for s in unit.sites if s.name == name)
    labels = {level: lab.label(site, level) for level in LEVELS}
    times = found.times.get(unit.name, {})
    chosen = found.mix[name]
    error = next((found.errors[unit.name, level] for level in (chosen, QUANTIZED, FINE) if (unit.name, level) in found.errors), None)
    seconds = tuple((labels[level], times[level]) for level in LEVELS if level in times)
    reason = _reason(unit, chosen, labels, found, name in lab.quantized)
    return SiteChoice(name, labels[chosen], seconds, decibels(error), reason)


def decibels(error: float | None) -> float | None:
    """The signal-to-noise ratio of a squared relative error."""
    return None if error is None else math.inf if error <= 0.0 else -10.0 * math.log10(error)


def _reason(unit: Unit, chosen: str, labels: Mapping[str, str], found: Found, quantized: bool) -> str:
    name, times = unit.sites[0].name, found.times.get(unit.name, {})
    mixed = found.mixes.get(MIXED)
    begun = found.fastest[name]
    if (mixed is not None and mixed[name] != chosen) or (begun != chosen and begun in (NARROW, FLOAT)):
        return f"the model as a whole was faster in {found.chosen}"
    if FLOAT not in times:
        return "it has no time of its own"
    fused = f"one with {', '.join(s.name for s in unit.sites)}; " if len(unit.sites) > 1 else ""
    if chosen in (QUANTIZED, FINE):
        return f"{fused}{labels[chosen]} {_gain('saves', unit, chosen, found)}"
    if begun != chosen:
        return f"{fused}{labels[begun]} {_gain('would save', unit, begun, found)}"
    return fused + _not_faster(chosen, labels, times, quantized)


def _gain(verb: str, unit: Unit, level: str, found: Found) -> str:
    times = found.times[unit.name]
    error = decibels(found.errors.get((unit.name, level)))
    cost = "" if error is None else f", and alone leaves {error:.0f} dB of the result"
    return f"{verb} {_ms(times[FLOAT] - times[level])}{cost}"


def _not_faster(chosen: str, labels: Mapping[str, str], times: Mapping[str, float], quantized: bool) -> str:
    slow = [
        f"{labels[level]} was {'hardly' if times[level] < times[chosen] else 'not'} faster here "
        f"({_ms(times[level])} against {_ms(times[chosen])})"
        for level in (QUANTIZED, FINE) if level in times
    ]
    if not slow:
        slow = [f"there is no code for it in {labels[QUANTIZED]}" if quantized else "the scheme leaves it in floating point"]
    narrow = [f"bf16 saves {_ms(times[FLOAT] - times[NARROW])}"] if chosen == NARROW else []
    return "; ".join([*narrow, *slow])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
