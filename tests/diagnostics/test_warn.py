"""A warning names the line that called into the package."""

from __future__ import annotations

import pytest

from sashiko.diagnostics.warn import warn


def test_warnings_name_the_callers_line() -> None:
    inside = {"__name__": "sashiko.driver.somewhere", "warn": warn}
    exec(compile("def inner(): warn('of a cache')\ndef outer(): inner()", "somewhere.py", "exec"), inside)
    with pytest.warns(UserWarning, match="of a cache") as found:
        inside["outer"]()  # type: ignore[operator]
    [shown] = found
    assert shown.filename == __file__ and shown.lineno == test_warnings_name_the_callers_line.__code__.co_firstlineno + 4
