"""The rules of the project, in the sets that the compiler applies."""

from __future__ import annotations

from ..rule import RuleSet
from . import algebra, attention, contraction, integer, quantize, routed, sums, views, weight_only, weighted

# Shorter graphs with the same operations: safe at any stage.
SIMPLIFY: RuleSet = (*algebra.RULES, *views.RULES)

# One spelling for every contraction, so that few kernels serve them.
CANONICAL: RuleSet = (*SIMPLIFY, *attention.RULES, *contraction.RULES, *sums.RULES, *routed.SPELLING)

# From quantize and dequantize pairs to integer kernels.
INTEGER: RuleSet = (*SIMPLIFY, *contraction.RULES, *quantize.RULES, *integer.RULES, *weighted.RULES, *routed.RULES)

# What is left then of quantized weights, with activations that are not: products of floats and integers.
WEIGHTS: RuleSet = (*SIMPLIFY, *weight_only.RULES, *routed.WEIGHT_RULES)

ALL: RuleSet = (*CANONICAL, *quantize.RULES, *integer.RULES, *weighted.RULES, *weight_only.RULES, *routed.RULES, *routed.WEIGHT_RULES)

__all__ = ["ALL", "CANONICAL", "INTEGER", "SIMPLIFY", "WEIGHTS"]
