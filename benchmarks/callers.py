"""Threads: one caller on one and two cores, and many callers at once.

    python -P benchmarks/callers.py [--models bert-base:8x128] [--precision fp32,bf16,int8] [--callers 64] [--seconds 3] [--json F]

Speed-up: the same call with one thread and with as many as there are cores, in turn. Callers: that many Python threads call one compiled
model at once; their calls a second over those of a single caller that has all cores, and the 99th percentile of their latency over the
fair share, which is the time of as many calls one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

import sashiko
from sashiko.cli.bench.cases import find, parse_shape
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import measure
from sashiko.cli.values import count, file_to_write, one_of, seconds, several, split
from sashiko.quant import PRESETS

Call = Callable[[], object]
PRECISIONS = ("fp32", "bf16", *PRESETS)


@dataclass(frozen=True)
class Row:
    """ms: of a call with one thread and with all cores. speedup: of the second over the first. throughput, p99: of many callers at once,
    against one caller and against the fair share."""

    model: str
    precision: str
    one_ms: float
    all_ms: float
    speedup: float
    throughput: float
    p99: float


def with_threads(threads: int, call: Call) -> object:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return call()


def at_once(call: Call, callers: int, seconds: float) -> tuple[float, list[float]]:
    """(calls a second, the seconds that each call took) of several threads that call for a while."""
    taken: list[list[float]] = [[] for _ in range(callers)]
    start, stop = threading.Barrier(callers + 1), threading.Event()

    def work(mine: list[float]) -> None:
        torch.set_grad_enabled(False)
        start.wait()
        while not stop.is_set():
            begin = time.perf_counter()
            call()
            mine.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(map(len, taken)) / (time.perf_counter() - begin), [t for mine in taken for t in mine]


def compiled(name: str, shape: str, precision: str) -> Call:
    torch.manual_seed(0)
    example = find(name).make(parse_shape(shape))
    model, kind = example.model, precision
    if precision not in ("fp32", "bf16"):
        model, kind = sashiko.quantize(model, example.batches, preset=precision, progress=False), "auto"
    return partial(sashiko.compile(model, example.args, precision=kind), *example.args)


def row(model: str, precision: str, callers: int, seconds: float) -> Row:
    name, shape = model.split(":")
    cores = len(os.sched_getaffinity(0))
    call = compiled(name, shape, precision)
    times = measure({str(n): partial(with_threads, n, call) for n in (1, cores)}, seconds=0.3)
    alone, _ = at_once(call, 1, seconds)
    together, taken = at_once(call, callers, seconds)
    fair = callers / alone
    p99 = statistics.quantiles(taken, n=100)[-1]
    one, all_ = times["1"], times[str(cores)]
    return Row(model, precision, one.median, all_.median, all_.ratio_to(one), together / alone, p99 / fair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=split, default="bert-base:8x128,bert-mini:1x64", help="%(default)s")
    parser.add_argument("--precision", type=several(one_of(PRECISIONS)), default="fp32,bf16,int8", help="%(default)s")
    parser.add_argument("--callers", type=count, default=64)
    parser.add_argument("--seconds", type=seconds, default=3.0)
    parser.add_argument("--json", type=file_to_write, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    table = Table()
    for head in ("model", "precision", "ms, 1 thread", "ms, all cores", "speed-up", f"{options.callers} callers", "p99 / fair share"):
        table.add_column(head, justify="left" if head in ("model", "precision") else "right")
    found = [row(m, p, options.callers, options.seconds) for m in options.models for p in options.precision]
    for r in found:
        cells = (f"{r.one_ms:.2f}", f"{r.all_ms:.2f}", f"{r.speedup:.2f}", f"{r.throughput:.0%}", f"{r.p99:.2f}")
        table.add_row(r.model, r.precision, *cells)
    Console(width=140).print(table)
    if options.json:
        run = {"callers": options.callers, **story()}
        options.json.write_text(json.dumps(run | {"rows": [dataclasses.asdict(r) for r in found]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
