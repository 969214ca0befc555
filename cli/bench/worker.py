"""One candidate in a process of its own: it builds and compiles its model, then times calls when it is told to.

So the peak of its memory and the seconds of its compilation are its own, its settings disturb nobody, and when it dies only a row is lost.
The process starts by importing this file, so it imports nothing heavy before it is pinned and its caches are set.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...diagnostics import env

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .limits import Work

REASON_LENGTH = 200
FAREWELL = 5  # seconds that a process has to end by itself


@dataclass(frozen=True)
class Job:
    """What a worker compiles. folder: of its caches, shared with a second worker for the same job. counts: whether it counts the work.

    tune: seconds that ours may measure its products.
    """

    framework: str
    precision: str
    model: str
    shape: tuple[int, ...]
    threads: int
    folder: str
    counts: bool = False
    tune: float = 0.0


@dataclass(frozen=True)
class Ready:
    """A compiled model. quantize_s: seconds to calibrate. compile_s: from the model to the first result, conversion included.

    call_s: about what a call takes. answer: all results one after another; width: of their last dimension.
    """

    quantize_s: float
    compile_s: float
    call_s: float
    answer: npt.NDArray[np.float32]
    width: int
    work: Work | None


@dataclass(frozen=True)
class Failed:
    """Why there is no compiled model."""

    reason: str


class Worker:
    """The parent's side. Leaving the `with` block ends the process."""

    def __init__(self, job: Job, patience: float) -> None:
        """patience: seconds after which a silent worker is given up."""
        self.job, self._patience = job, patience
        self._log = tempfile.NamedTemporaryFile(prefix="sashiko-bench-", suffix=".log")  # noqa: SIM115  # closed in __exit__
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, job, self._log.name))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(FAREWELL)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(FAREWELL)
        self._log.close()

    def ready(self) -> Ready | Failed:
        """Waits for the compilation."""
        reply: Ready | Failed = self._reply()
        return reply

    def turn(self, times: int) -> float | Failed:
        """Seconds of one of `times` calls, at least one."""
        return self._ask(times)

    def peak(self) -> float | Failed:
        """The most memory the process ever held, in MiB."""
        return self._ask(0)

    def _ask(self, times: int) -> float | Failed:
        try:
            self._connection.send(times)
        except OSError:
            return Failed(self._last_words())
        reply: float | Failed = self._reply()
        return reply

    def _reply(self) -> Any:
        """The next thing that the child sends, or why there is none."""
        try:
            if self._connection.poll(self._patience):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            return Failed(self._last_words())
        return Failed(f"no answer in {self._patience:.0f} seconds")

    def _last_words(self) -> str:
        """Why a process that is gone went."""
        code = self._process.exitcode
        how = f"ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        lines = [line for line in Path(self._log.name).read_text(errors="replace").splitlines() if line.strip()]
        return shortened(f"the process {how}{': ' + lines[-1] if lines else ''}")


def serve(connection: Connection, job: Job, log: str) -> None:
    """The child's side: one `Ready` or `Failed`, then a number of seconds for each number of calls, and the peak for 0."""
    _quiet(log)
    folder = Path(job.folder)
    (folder / "files").mkdir(parents=True, exist_ok=True)
    env.override(
        {
            "SASHIKO_CACHE": str(folder / "sashiko"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(job.threads),
        }
    )
    try:
        reply, call = build(job)
    except Exception as error:  # whatever a library raises is the reason of the row
        connection.send(Failed(reason_of(error)))
        return
    connection.send(reply)
    from .timing import turn

    try:
        while times := connection.recv():
            connection.send(turn(call, times))
        connection.send(peak_mib())
    except (EOFError, OSError):
        return  # the parent wants no more; an ordinary end lets libraries clean up


def build(job: Job) -> tuple[Ready, Callable[[], object]]:
    """Compiles the model of a job in this process, and the call to time."""
    import torch

    from . import cases, frameworks, limits
    from .timing import pin, seconds_of

    pin(job.threads)
    torch.set_grad_enabled(False)
    random.seed(0)
    torch.manual_seed(0)
    example = cases.find(job.model).make(job.shape)
    framework = frameworks.FRAMEWORKS[job.framework](job.threads, Path(job.folder) / "files", job.tune)
    framework.load()
    start = time.perf_counter()
    source = framework.quantize(example, job.precision) if limits.kind(job.precision) == "int8" else example.model
    quantized = time.perf_counter()
    run = framework.compile(source, example, job.precision)
    flat(run(*example.args))
    compiled = time.perf_counter()
    answers = [flat(run(*args)) for args in example.judged]
    import numpy as np

    def call() -> object:
        return run(*example.args)

    work = limits.work_of(example) if job.counts else None
    answer = np.concatenate([values for values, _ in answers])
    return Ready(quantized - start, compiled - quantized, seconds_of(call), answer, answers[0][1], work), call


def flat(result: Any) -> tuple[npt.NDArray[np.float32], int]:
    """All numbers of a result one after another, copied, and the size of the last dimension of its first tensor."""
    import numpy as np
    import torch

    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None]
    arrays = [leaf.float().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf, np.float32) for leaf in leaves]
    return np.concatenate([array.reshape(-1) for array in arrays]), arrays[0].shape[-1] if arrays[0].ndim else 1


def reason_of(error: BaseException) -> str:
    """An exception as one line for a table."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return f"{error.name} is not installed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shortened(f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__)


def shortened(text: str) -> str:
    """The beginning of a text, without the control characters of terminals."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return plain if len(plain) <= REASON_LENGTH else plain[: REASON_LENGTH - 3] + "..."


def peak_mib(status: Path = Path("/proc/self/status")) -> float:
    """The most memory this process held, in MiB. Linux's `ru_maxrss` begins with that of the parent, so it is the second choice."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.M)
    except OSError:
        found = None
    if found:
        return int(found[1]) / 1024
    # Bytes on macOS, KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _quiet(log: str) -> None:
    """What libraries print goes to a file, where the last words of a dead process are looked up."""
    sys.stdout.flush()
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
