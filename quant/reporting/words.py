"""Schemes in words, for people who read a report."""

from __future__ import annotations

from ..scheme import ActivationScheme, OpScheme, Override, Scheme, WeightScheme

_RANGES = {
    "minmax": "all values seen",
    "average": "the mean extremes of the batches",
    "mse": "least squared error",
    "entropy": "least divergence",
}


def in_words(scheme: OpScheme) -> str:
    """What happens to an operation: activations, then weights."""
    if scheme.weight is None:
        return f"computed in {scheme.floating}"
    activation = "activations in floating point" if scheme.activation is None else _activation(scheme.activation)
    return f"{activation}; {_weight(scheme.weight)}"


def scheme_words(scheme: Scheme) -> tuple[tuple[str, str], ...]:
    """Name and value of everything that was asked for."""
    smooth = scheme.smooth
    pairs = [("default", f"{scheme.default.label}: {in_words(scheme.default)}"), ("operations", ", ".join(scheme.operations))]
    pairs += [(f"override {_where(o)}", f"{o.scheme.label}: {in_words(o.scheme)}") for o in scheme.overrides]
    if smooth is not None:
        pairs.append(("SmoothQuant", "alpha searched for" if smooth.alpha is None else f"alpha {smooth.alpha:g}"))
    if scheme.correct_bias:
        pairs.append(("biases", "corrected by the mean error"))
    if scheme.outliers is not None:
        pairs.append(("outliers", f"in floating point below {scheme.outliers:g} dB"))
    return tuple(pairs)


def _activation(scheme: ActivationScheme) -> str:
    kind = "int8" if scheme.signed else "uint8"
    if scheme.granularity == "row":
        return f"activations {kind}, a scale per row found in each call"
    chosen = f"{scheme.percentile:g} % of the values" if scheme.observer == "percentile" else _RANGES[scheme.observer]
    return f"activations {kind}, range of {chosen}"


def _weight(scheme: WeightScheme) -> str:
    spread = f"group of {scheme.group}" if scheme.granularity == "group" else scheme.granularity
    extras = [name for name, wanted in (("clipped", scheme.clip != "none"), ("compensated (GPTQ)", scheme.compensate)) if wanted]
    return ", ".join((f"weights int{scheme.bits} per {spread}", *extras))


def _where(override: Override) -> str:
    where = override.where
    return where if isinstance(where, str) else where.__qualname__ if isinstance(where, type) else f"/{where.pattern}/"
