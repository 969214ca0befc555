"""Tables and the picture of a run."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from sashiko.cli.app import run as launch
from sashiko.cli.bench import command, plot, show
from sashiko.cli.bench.compare import compare
from sashiko.cli.bench.record import Run
from sashiko.cli.bench.timing import Timing, measure, repeats, spread
from sashiko.diagnostics.errors import InputError
from tests.cli.bench.runs import EAGER, ours, row, run

PEER = row("openvino", "fp32", tuple(t / 2 for t in EAGER))
RUN = run(row("eager", "fp32", EAGER), PEER, row("inductor", "fp32", failure="no [compiler]"), ours(3.0, cosine=0.99, error=0.004))


def text(draw: object, *arguments: object) -> str:
    file = io.StringIO()
    assert callable(draw)
    draw(*arguments, Console(file=file, width=show.WIDTH))
    return file.getvalue()


def test_the_table_has_ratios_to_eager_and_to_the_best_peer() -> None:
    shown = text(show.show, RUN)
    line = next(line for line in shown.splitlines() if "sashiko int8" in line)
    for part in ("3.00 (", "1.50 (", "0.99000", "4.0e-03"):
        assert part in line
    assert "inductor fp32: no [compiler]" in shown


def test_the_best_peer_is_not_ours() -> None:
    assert show.best_peer(RUN.rows) == PEER.timing
    assert show.best_peer(run(ours(3.0)).rows) is None


def test_the_table_has_the_ratio_to_the_best_peer_in_the_same_precision() -> None:
    """Which may not be the fastest of all; there may be none."""
    rows = (row("eager", "fp32", EAGER), PEER, ours(1.5, precision="fp32"), row("openvino", "int8", tuple(t / 4 for t in EAGER)), ours(3.0))

    def alike(run: Run, name: str) -> str:
        return next(line for line in text(show.show, run).splitlines() if name in line).split("│")[5].strip()

    assert alike(run(*rows), "sashiko fp32").startswith("0.75 (") and alike(run(*rows), "sashiko int8").startswith("0.75 (")
    assert alike(RUN, "sashiko int8") == "-"


def test_what_is_far_from_eager_is_no_peer_of_what_is_not() -> None:
    wrong = row("openvino", "int8", tuple(t / 4 for t in EAGER), error=4e3)
    shown = text(show.show, run(row("eager", "fp32", EAGER), PEER, wrong, ours(3.0, error=0.01)))
    cells = next(line for line in shown.splitlines() if "sashiko int8" in line).split("│")
    assert cells[4].strip().startswith("1.50 (") and cells[5].strip() == "-"
    assert "openvino int8: its error of 4e+03 makes it no peer" in shown
    shown = text(show.show, run(row("eager", "fp32", EAGER), row("openvino", "int8", wrong.ms, error=0.7), ours(3.0, error=0.4)))
    assert next(line for line in shown.splitlines() if "sashiko int8" in line).split("│")[5].strip().startswith("0.75 (")


def test_names_are_no_markup() -> None:
    eager = row("eager", "fp32", EAGER, limit_ms=1.0, limited_by="[/most]")
    odd = run(eager, row("[/peer]", "int8", EAGER), row("[/broken]", "int8"), ours(3.0, precision="[/own]"))
    shown = text(show.show, odd) + text(show.show_comparison, compare(odd, odd))
    assert all(name in shown for name in ("[/most]", "[/peer] int8", "[/broken] int8")) and shown.count("sashiko [/own]") == 2


@pytest.mark.parametrize(("ms", "expected"), [(1234.5, "1234"), (12.345, "12.3"), (0.5, "0.5"), (0.01234, "0.0123")])
def test_numbers(ms: float, expected: str) -> None:
    assert show.number(ms) == expected


def test_comparisons_are_shown_with_verdicts() -> None:
    slower = run(row("eager", "fp32", EAGER), ours(2.0))
    assert "slower" in text(show.show_comparison, compare(RUN, slower))
    assert "faster" in text(show.show_comparison, compare(slower, RUN))
    broken = run(row("eager", "fp32", EAGER), row("sashiko", "int8", failure="no [tiles]"))
    assert "fails: no [tiles]" in text(show.show_comparison, compare(RUN, broken))


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert plot.speeds(RUN)["bert-mini\n8x64"] == {"openvino fp32": pytest.approx(2), "sashiko int8": pytest.approx(3, rel=0.01)}
    plot.draw(RUN, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["run.txt", "run"])
def test_pictures_without_a_format_are_refused_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(command, "measured", lambda options: pytest.fail("measured"))
    assert launch(["bench", "--models", "mlp", "--plot", str(tmp_path / name)]) == 2
    with pytest.raises(InputError, match=r"no format of pictures[\s\S]*png"):
        plot.draw(RUN, tmp_path / name)


def test_spread_and_ratios() -> None:
    values = [float(v) for v in range(11)]
    assert (spread(values).low, spread(values).median, spread(values).high) == (1, 5, 9)
    assert spread([2.0]).low == spread([2.0]).high == 2
    assert Timing((1.0, 2.0, 4.0)).ratio_to(Timing((2.0, 4.0, 8.0))) == 2


def test_candidates_of_one_process_take_turns() -> None:
    calls: list[str] = []
    found = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, seconds=1e-5)
    assert [len(timing.rounds) for timing in found.values()] == [3, 3]
    assert sum(x != y for x, y in pairwise(calls)) == 1 + 2 * 3  # warming up changes once, then every turn does
    assert repeats(0.01, 0.1) == 10 and repeats(5.0, 0.1) == 1
