"""The code of docs/patterns.md runs, in the order in which it is read, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "patterns.md"


def test_code_of_the_manual_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(MANUAL), "exec"), names)
    claimed = re.findall(r"^print\(.*\)\s+# (.*)$", "\n".join(blocks), re.MULTILINE)
    assert claimed and capsys.readouterr().out.splitlines() == claimed
