"""Warnings about what a caller may want to change."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]
_BETWEEN = ("torch", "contextlib")  # call this package, and are called by it


def warn(text: str) -> None:
    """Shows a UserWarning that names the line of the user's that led here, through this package and torch."""
    level = found = 1
    frame = sys._getframe()
    inside = True
    while frame.f_back is not None:
        level, frame = level + 1, frame.f_back
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module == _PACKAGE:
            inside = True
        elif inside and module not in _BETWEEN:
            inside, found = False, level
    warnings.warn(text, stacklevel=found)
