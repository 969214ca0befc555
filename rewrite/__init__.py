"""The pattern engine: rules that are equations, one driver, and reasons where a rule does not apply. docs/patterns.md is the manual."""

from __future__ import annotations

from .driver import Trace, apply, explain
from .equation import parse_equation, parse_pattern
from .match import Mismatch
from .rule import Match, Rule, RuleSet, equation, rule

__all__ = ["Match", "Mismatch", "Rule", "RuleSet", "Trace", "apply", "equation", "explain", "parse_equation", "parse_pattern", "rule"]
