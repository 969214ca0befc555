"""The sentences of the demo and the benchmarks: enough of them, all different, short and long ones mixed."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).resolve().parents[3] / "cli" / "bench" / "sentences.txt"


def test_sentences() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 240
    assert len(set(lines)) == len(lines)
    assert all(line == line.strip() and line for line in lines)
    words = [len(line.split()) for line in lines]
    assert min(words) >= 3 and max(words) <= 60
    assert sum(count <= 6 for count in words) >= 10 and sum(count >= 20 for count in words) >= 10
    assert lines != sorted(lines), "related sentences must not stand together"
