"""The demo: a sentence encoder with real weights in four precisions, its speed beside its accuracy.

Calibrated on 64 sentences, judged on the others, which are in `cli/bench/sentences.txt`. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.export import Dim

import sashiko
from sashiko.cli.bench.encoder import Agreement, agreement, batches, embed, load_encoder, sentences
from sashiko.cli.bench.timing import Timing, measure, pin

CALIBRATION = 64
SHAPES = ((8, 128), (1, 32))


@dataclass
class Row:
    """One line of the table: a way to run the encoder."""

    name: str
    call: Callable[..., torch.Tensor]
    seconds: float | None = None
    native: int | None = None
    left: int | None = None
    agreement: Agreement | None = None
    timings: dict[tuple[int, int], Timing] = field(default_factory=dict)


def compiled(name: str, model: torch.nn.Module, example: dict[str, torch.Tensor], precision: str) -> Row:
    """Compile for every batch size to 64 and length to 256, and count what is native."""
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=1, max=256)
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    start = time.perf_counter()
    fast = sashiko.compile(model, example, dynamic_shapes=shapes, precision=precision)
    seconds = time.perf_counter() - start
    assert fast.built is not None
    ops = [v.op for v in fast.built.graph.order if v.op not in ("input", "constant", "full")]
    return Row(name, fast, seconds, sum(op != "aten" for op in ops), ops.count("aten"))


def rows(encoder: torch.nn.Module, tokenizer: Any, texts: list[str], progress: Progress) -> list[Row]:
    """Eager and the three precisions."""
    task = progress.add_task("compiling", total=4)
    example = next(batches(tokenizer, texts[:8]))
    result = [Row("eager fp32", encoder)]
    for precision in ("fp32", "bf16"):
        result.append(compiled(f"Sashiko {precision}", encoder, example, precision))
        progress.advance(task)
    small = sashiko.quantize(encoder, batches(tokenizer, texts[:CALIBRATION]), preset="int8", progress=False)
    progress.advance(task)
    result.append(compiled("Sashiko int8", small, example, "auto"))
    progress.advance(task)
    return result


def judge(row: Row, tokenizer: Any, held_out: list[str], reference: torch.Tensor) -> None:
    row.agreement = agreement(reference, embed(row.call, batches(tokenizer, held_out)))


def time_all(table: list[Row], progress: Progress, rounds: int) -> None:
    """Time all rows side by side at both shapes, with random token ids."""
    task = progress.add_task("timing", total=len(SHAPES) * len(table) * rounds)
    for batch, length in SHAPES:
        ids = torch.randint(1000, 20000, (batch, length))
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        calls = {row.name: partial(row.call, **example) for row in table}
        with torch.no_grad():
            found = measure(calls, rounds, advance=partial(progress.advance, task))
        for row in table:
            row.timings[batch, length] = found[row.name]


def show(table: list[Row], console: Console) -> None:
    view = Table(title="all-MiniLM-L6-v2, one thread", title_justify="left")
    for head in (
        "",
        *(f"{b}x{s} ms" for b, s in SHAPES),
        *(f"{b}x{s} speed-up" for b, s in SHAPES),
        "mean cosine",
        "min cosine",
        "same neighbour",
        "compile s",
        "native ops",
        "left to PyTorch",
    ):
        view.add_column(head, justify="left" if not head else "right")
    base = table[0]
    for row in table:
        a = row.agreement
        view.add_row(
            row.name,
            *(f"{row.timings[s].median:.2f}" for s in SHAPES),
            *(f"{row.timings[s].ratio_to(base.timings[s]):.2f}x" for s in SHAPES),
            *(("-",) * 3 if a is None else (f"{a.mean_cosine:.5f}", f"{a.min_cosine:.5f}", f"{a.same_neighbour:.1%}")),
            "-" if row.seconds is None else f"{row.seconds:.1f}",
            "-" if row.native is None else str(row.native),
            "-" if row.left is None else str(row.left),
        )
    console.print(view)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(0)
    console = Console(width=max(Console().width, 150))
    pin()
    encoder, tokenizer = load_encoder()
    texts = sentences()
    held_out = texts[CALIBRATION:]
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        table = rows(encoder, tokenizer, texts, progress)
        task = progress.add_task("judging", total=len(table))
        reference = embed(encoder, batches(tokenizer, held_out))
        for row in table[1:]:
            judge(row, tokenizer, held_out, reference)
            progress.advance(task)
        progress.advance(task)
        time_all(table, progress, rounds=9)
    show(table, console)
    console.print(
        f"{len(texts)} sentences, calibrated on {CALIBRATION}, judged on the other {len(held_out)}; "
        f"cosine and nearest neighbours against eager fp32. torch {torch.__version__}, sashiko {sashiko.__version__}."
    )


if __name__ == "__main__":
    main()
