"""A run as data and as JSON: the command, the machine, the versions, and every round of every row."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...diagnostics.errors import ArtifactError, InputError
from .frameworks import OURS, YARDSTICK
from .timing import Timing, allowed_cores

if TYPE_CHECKING:
    from ...kernels.peaks import Peaks

SCHEMA = 1
Group = tuple[str, str, int, int]
"""A model, a shape, a number of threads, and a run of these."""
_PACKAGES = ("sashiko", "torch", "transformers", "llvmlite", "openvino", "nncf", "onnxruntime", "onnxscript", "torchao")


@dataclass(frozen=True)
class Row:
    """One candidate on one model. ms: of each round, empty when there is a `failure`.

    limit_ms, limited_by: the least a call takes at this machine's peaks, and which of them. quantize_s: calibration; cold_s: compilation to
    the first result with empty caches; cached_s: again in another process. error: relative, cosine: mean over rows, both against
    eager fp32. peak_mib: the most memory of the process. None: not measured. run: which of several runs of the same, from 1, that were put
    together.
    """

    model: str
    shape: str
    threads: int
    framework: str
    precision: str
    ms: tuple[float, ...] = ()
    failure: str = ""
    limit_ms: float | None = None
    limited_by: str = ""
    quantize_s: float | None = None
    cold_s: float | None = None
    cached_s: float | None = None
    error: float | None = None
    cosine: float | None = None
    peak_mib: float | None = None
    run: int = 1

    @property
    def name(self) -> str:
        return f"{self.framework} {self.precision}"

    @property
    def group(self) -> Group:
        """What the rows that take turns have in common."""
        return self.model, self.shape, self.threads, self.run

    @property
    def ours(self) -> bool:
        return self.framework == OURS

    @property
    def yardstick(self) -> bool:
        """Whether this is what all others are compared with."""
        return (self.framework, self.precision) == (YARDSTICK, "fp32")

    @property
    def timing(self) -> Timing | None:
        return Timing(self.ms) if self.ms else None

    @property
    def of_peak(self) -> float | None:
        """The least time over the measured one."""
        return self.limit_ms / Timing(self.ms).median if self.ms and self.limit_ms is not None else None


@dataclass(frozen=True)
class Machine:
    """Where a run took place. Sizes in bytes."""

    cpu: str
    features: tuple[str, ...]
    cores: int
    l1d: int
    l2: int
    l3: int
    system: str


@dataclass(frozen=True)
class Run:
    """Everything about one run. versions: (package, version) of what is installed."""

    command: str
    machine: Machine
    versions: tuple[tuple[str, str], ...]
    peaks: Peaks
    rows: tuple[Row, ...]

    def groups(self) -> dict[Group, list[Row]]:
        """The rows of each model, shape and number of threads in each run of them."""
        found: dict[Group, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found


def title(model: str, shape: str, threads: int, run: int = 1) -> str:
    """A group of rows in words. Of a model of one's own only the file's name."""
    several = (f", {threads} threads" if threads > 1 else "") + (f", run {run}" if run > 1 else "")
    return f"{Path(model).name} {shape}".strip() + several


def yardstick(rows: Iterable[Row]) -> Timing | None:
    """The times of eager fp32 among the rows of a group."""
    return next((row.timing for row in rows if row.yardstick), None)


def this_machine() -> Machine:
    from ...platforms.host import cpu_model, host

    target = host()
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return Machine(cpu_model(), tuple(sorted(target.features)), allowed_cores(), target.l1d, target.l2, target.l3, system)


def versions() -> tuple[tuple[str, str], ...]:
    """The installed ones of the packages that matter."""
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def story(command: str = "") -> dict[str, Any]:
    """What the JSON of a script in `benchmarks/` begins with: its command (that of this process), the machine, the versions."""
    return {"command": command or shlex.join(sys.argv), "machine": dataclasses.asdict(this_machine()), "versions": dict(versions())}


def to_json(run: Run) -> str:
    """The run as a file; numbers to a millionth, which is more than any clock gives."""
    data = {"schema": SCHEMA, **dataclasses.asdict(run), "versions": dict(run.versions)}
    return json.dumps(_rounded(data), indent=1) + "\n"


def from_json(text: str, where: str = "") -> Run:
    """Raises ArtifactError when the text is not what `to_json` makes."""
    try:
        data = json.loads(text)
        schema = data["schema"]
        if schema == SCHEMA:
            return _run(data)
    except (ValueError, KeyError, TypeError, AttributeError, ArtifactError) as error:
        why = error.what if isinstance(error, ArtifactError) else repr(error)
        raise ArtifactError(f"this is no saved benchmark: {why}", where, "give a file that `sashiko bench --json` wrote") from error
    raise ArtifactError(f"the schema is {schema}, this version reads {SCHEMA}", where, "measure again")


def _run(data: dict[str, Any]) -> Run:
    from ...kernels.peaks import Peaks
    from ...quant.plain import from_plain

    machine, peaks = from_plain(Machine, data["machine"]), from_plain(Peaks, data["peaks"])
    run = Run(str(data["command"]), machine, tuple(data["versions"].items()), peaks, from_plain(tuple[Row, ...], data["rows"]))
    if not peaks.products:
        raise ArtifactError("it has no peaks")
    for group, rows in run.groups().items():
        if not all(0 < ms < math.inf for row in rows for ms in row.ms):
            raise ArtifactError(f"a time of {title(*group)} is not a positive number")
        if len({len(row.ms) for row in rows if row.ms}) > 1:
            raise ArtifactError(f"the rows of {title(*group)} have not the same number of rounds")
    return run


def load(path: Path) -> Run:
    """The run in a file; ArtifactError when there is none."""
    try:
        return from_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", str(path)) from error
    except UnicodeDecodeError as error:
        raise ArtifactError("this is no saved benchmark", str(path), "give a file that `sashiko bench --json` wrote") from error


def together(runs: Sequence[Run]) -> Run:
    """Several runs as one, with the machine, versions and peaks of the first. Rows that did not take turns stay in groups of their own.

    InputError when they are of different machines.
    """
    first = runs[0]
    for run in runs[1:]:
        if (run.machine.cpu, run.machine.features) != (first.machine.cpu, first.machine.features):
            raise InputError(f"one run is of {first.machine.cpu}, another of {run.machine.cpu}", "bench --from", "give runs of one machine")
    rows: list[Row] = []
    for run in runs:
        last = {row.group[:-1]: row.run for row in rows}
        rows += [dataclasses.replace(row, run=last.get(row.group[:-1], 0) + row.run) for row in run.rows]
    return dataclasses.replace(first, command="; ".join(run.command for run in runs), rows=tuple(rows))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if abs(value) >= 1e-3 else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return value
