"""A run goes into a file and comes back, and a file that is none is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from sashiko.cli.bench import record
from sashiko.cli.bench.record import Row, Run
from sashiko.diagnostics.errors import ArtifactError, InputError
from tests.cli.bench.runs import EAGER, MACHINE, ours, row, run

RUN = run(
    row("eager", "fp32", EAGER, limit_ms=1.0, limited_by="fp32 products", cold_s=0.1, error=0.0, peak_mib=400.5),
    row("openvino", "int8", failure="openvino is not installed"),
    ours(3.0, quantize_s=1.5, cold_s=2.0, cached_s=0.5, error=4.2e-3, cosine=0.994, limited_by="int8 products", limit_ms=0.5),
)


def test_a_run_comes_back_from_json() -> None:
    back = record.from_json(record.to_json(RUN))
    assert dataclasses.replace(back, rows=()) == dataclasses.replace(RUN, rows=())
    for before, after in zip(RUN.rows, back.rows, strict=True):
        assert after.ms == pytest.approx(before.ms, abs=1e-6)
        assert dataclasses.replace(after, ms=()) == dataclasses.replace(before, ms=())


def test_rounding_keeps_small_numbers() -> None:
    back = record.from_json(record.to_json(run(row("eager", "fp32", (1.23456789e-5,), error=1.5e-7))))
    assert back.rows[0].ms[0] == pytest.approx(1.23456789e-5, rel=1e-3)
    assert back.rows[0].error == 1.5e-7


def test_the_file_says_where_it_is_from() -> None:
    data = json.loads(record.to_json(RUN))
    assert data["schema"] == record.SCHEMA
    assert data["command"] == "sashiko bench"
    assert data["machine"]["cpu"] == "Some CPU"
    assert data["versions"] == {"sashiko": "0.1.0", "torch": "2.13.0"}
    assert {p["kind"] for p in data["peaks"]["products"]} == {"fp32", "bf16", "int8"}


def changed(**fields: Any) -> str:
    """The file of `RUN` with other fields; `row`: of its first row."""
    data = json.loads(record.to_json(RUN))
    data["rows"][0] |= fields.pop("row", {})
    return json.dumps(data | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "no saved benchmark"),
        ("{}", "no saved benchmark"),
        ("[1]", "no saved benchmark"),
        (changed(schema=99), "schema is 99"),
        (changed(rows=[{"colour": 1}]), "no saved benchmark"),
        (changed(row={"ms": [10.0, 9.0]}), "not the same number of rounds"),
        (changed(row={"ms": [10.0, 9.0, 0, 9.0, 9.0]}), "not a positive number"),
        (changed(row={"ms": [10.0, 9.0, math.nan, 9.0, 9.0]}), "not a positive number"),
        (changed(row={"ms": ["fast"] * 5}), "'fast' in the file is no float"),
        (changed(row={"ms": 10.0}), "no saved benchmark"),
        (changed(row={"framework": 3}), "no saved benchmark"),
        (changed(row={"threads": "two"}), "no saved benchmark"),
        (changed(peaks=json.loads(changed())["peaks"] | {"products": []}), "no peaks"),
    ],
)
def test_what_is_no_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        record.from_json(text, "old.json")


def test_a_missing_file_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="absent"):
        record.load(tmp_path / "absent.json")


def test_of_peak_is_the_least_time_over_the_median() -> None:
    assert RUN.rows[0].of_peak == pytest.approx(0.1)
    assert RUN.rows[1].of_peak is None


def test_this_machine_and_its_versions() -> None:
    machine = record.this_machine()
    assert machine.cores >= 1 and machine.l1d > 0 and machine.features
    assert {"sashiko", "torch", "llvmlite"} <= dict(record.versions()).keys()


def test_scripts_tell_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks/vendors.py", "--kinds", "fp32, bf16"])
    assert record.story()["command"] == "benchmarks/vendors.py --kinds 'fp32, bf16'"
    assert {"machine", "versions"} < record.story().keys() and record.story("make accuracy")["command"] == "make accuracy"


def test_runs_of_one_machine_are_put_together() -> None:
    other = dataclasses.replace(RUN, command="sashiko bench --models b", rows=(row("eager", "fp32", EAGER, model="b"),))
    both = record.together([RUN, other])
    assert both.rows == (*RUN.rows, *other.rows)
    assert both.command == f"{RUN.command}; {other.command}"
    foreign = dataclasses.replace(other, machine=dataclasses.replace(MACHINE, cpu="Other CPU"))
    with pytest.raises(InputError, match="Other CPU"):
        record.together([RUN, foreign])


def test_rows_that_did_not_take_turns_stay_apart() -> None:
    again = run(row("eager", "fp32", (30.0, 20.0, 10.0)), row("eager", "fp32", (1.0,), model="b"))
    both = record.together([RUN, again])
    assert [(title.endswith(", run 2"), rows) for title, rows in groups(both)] == [
        (False, list(RUN.rows)), (True, [dataclasses.replace(again.rows[0], run=2)]), (False, [again.rows[1]]),
    ]
    more = record.together([record.from_json(record.to_json(both)), again])
    assert [row.run for row in more.rows] == [*(row.run for row in both.rows), 3, 2]


def groups(run: Run) -> list[tuple[str, list[Row]]]:
    return [(record.title(*group), rows) for group, rows in run.groups().items()]
