"""Warnings about what a caller may want to change."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn(text: str) -> None:
    """Shows a UserWarning that names the innermost line outside of this package, as Python 3.12 does by `skip_file_prefixes`."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
