"""bert-mini beside its peers, in one process on one pinned core: `make bench`.

A peer that is missing or fails is a line with its reason. Random weights, random tokens; errors are relative to eager fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

import torch
from rich.console import Console
from rich.table import Table
from timing import Timing, measure, one_core

import sashiko
from sashiko.platforms.host import host

Call = Callable[[], torch.Tensor]
Maker = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], Call]


class Bert(torch.nn.Module):
    """A BERT encoder without pooling: (input_ids, attention_mask) -> last hidden state."""

    def __init__(self, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.bert(ids, attention_mask=mask).last_hidden_state
        return result


def eager(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Call:
    return partial(model, ids, mask)


def ours(precision: str, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Call:
    return partial(sashiko.compile(model, (ids, mask), precision=precision), ids, mask)


def ours_int8(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Call:
    small = sashiko.quantize(model, [(torch.randint_like(ids, 30000), mask) for _ in range(4)], progress=False)
    return partial(sashiko.compile(small, (ids, mask), precision="auto"), ids, mask)


def inductor(dtype: torch.dtype | None, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Call:
    from torch._inductor import config

    config.freezing = True
    torch._dynamo.reset()
    fast = torch.compile(model)

    def call() -> torch.Tensor:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            result: torch.Tensor = fast(ids, mask)
            return result

    call()
    return call


def openvino(precision: str, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Call:
    import openvino as ov

    converted = ov.convert_model(model, example_input=(ids, mask), input=[list(ids.shape), list(mask.shape)])
    if precision == "int8":
        import nncf

        data = nncf.Dataset([{0: torch.randint_like(ids, 30000).numpy(), 1: mask.numpy()} for _ in range(4)])
        converted = nncf.quantize(converted, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=4)
    hint = "f32" if precision == "fp32" else "bf16"
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(converted, "CPU", settings).create_infer_request()
    inputs = [ids.numpy(), mask.numpy()]

    def call() -> torch.Tensor:
        return torch.from_numpy(next(iter(request.infer(inputs, share_inputs=True, share_outputs=True).values())))

    return call


ROWS: dict[str, Maker] = {
    "eager fp32": eager,
    "Inductor fp32": partial(inductor, None),
    "Inductor bf16": partial(inductor, torch.bfloat16),
    "OpenVINO fp32": partial(openvino, "fp32"),
    "OpenVINO bf16": partial(openvino, "bf16"),
    "OpenVINO int8": partial(openvino, "int8"),
    "Sashiko fp32": partial(ours, "fp32"),
    "Sashiko bf16": partial(ours, "bf16"),
    "Sashiko int8": ours_int8,
}


@dataclass
class Result:
    """One line: how long it took to build, its time, its error, or why it is missing."""

    name: str
    seconds: float = 0.0
    timing: Timing | None = None
    error: float = 0.0
    failure: str = ""


def run(batch: int, length: int, rounds: int, hidden: int, layers: int) -> list[Result]:
    torch.manual_seed(0)
    model = Bert(hidden, layers, hidden // 64).eval()
    ids, mask = torch.randint(0, 30000, (batch, length)), torch.ones(batch, length, dtype=torch.long)
    results, calls = [], dict[str, Call]()
    with torch.no_grad():
        reference = model(ids, mask)
        for name, make in ROWS.items():
            result = Result(name)
            results.append(result)
            start = time.perf_counter()
            try:
                call = make(model, ids, mask)
                result.seconds = time.perf_counter() - start
                result.error = float((call().float() - reference).norm() / reference.norm())
                calls[name] = call
            except Exception as error:
                result.failure = f"{type(error).__name__}: {error}"[:120]
        timings = measure(calls, rounds)
    for result in results:
        result.timing = timings.get(result.name)
    return results


def show(results: list[Result], title: str) -> None:
    peers = [r.timing for r in results if r.timing is not None and not r.name.startswith("Sashiko")]
    best = min(peers, key=lambda t: t.median)
    table = Table(title=title, title_justify="left")
    for head in ("", "ms", "spread", "against the best peer", "relative error", "build s"):
        table.add_column(head, justify="left" if not head else "right")
    for r in results:
        if r.timing is None:
            table.add_row(r.name, "-", "-", "-", "-", r.failure)
            continue
        spread = f"{min(r.timing.rounds):.2f} - {max(r.timing.rounds):.2f}"
        table.add_row(r.name, f"{r.timing.median:.2f}", spread, f"{r.timing.ratio_to(best):.2f}x", f"{r.error:.2e}", f"{r.seconds:.1f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    one_core()
    results = run(options.batch, options.length, options.rounds, options.hidden, options.layers)
    show(results, f"BERT, {options.layers} layers of {options.hidden}, {options.batch}x{options.length}, one thread")
    if options.json:
        options.json.write_text(json.dumps(record(options, results), indent=1) + "\n")


def record(options: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    """The run as JSON: the command, the machine, the versions, and every round in milliseconds."""
    chosen = {name: value for name, value in vars(options).items() if name != "json"}
    packages = ("torch", "openvino", "nncf", "transformers", "llvmlite")
    return {
        "command": " ".join(["make bench", f"ARGS='{' '.join(f'--{n} {v}' for n, v in chosen.items())}'"]),
        "machine": {"features": sorted(host().features), "l2": host().l2, "l3": host().l3},
        "versions": {"sashiko": sashiko.__version__, **{n: version(n) for n in packages}},
        "rows": [
            {
                "name": r.name,
                "ms": [round(t, 3) for t in r.timing.rounds] if r.timing else None,
                "error": r.error,
                "build_s": round(r.seconds, 2),
                "failure": r.failure,
            }
            for r in results
        ],
    }


if __name__ == "__main__":
    main()
