"""Models and memory-bound operations on a GPU: eager, Inductor, Inductor with CUDA graphs, and Sashiko, in turn in one process.

    python -P benchmarks/gpu.py [--only chains,models] [--json F]

Microseconds of one call: `alone` by CUDA events around it, which sees what Python takes before the first launch; `in a row` with the clock
around many, which sees the slower one of Python and the GPU. `first`: seconds to the first result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import sashiko
from sashiko.cli.values import file_to_write, one_of, several

CALLS = 50
Model = Callable[..., Any]


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv, self.out = heads, nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def chains() -> Iterator[tuple[str, Model, tuple[torch.Tensor, ...]]]:
    x = torch.randn(16384, 4096, device="cuda")
    half, row = x.bfloat16(), torch.randn(4096, device="cuda")
    yield "x + 1", lambda x: x + 1, (x,)
    yield "gelu(x + bias)", lambda x, b: F.gelu(x + b), (x, row)
    yield "layer norm", lambda x, w, b: F.layer_norm(x, (4096,), w, b), (x, row, row)
    yield "softmax", lambda x: torch.softmax(x, -1), (x,)
    yield "gelu(x + bias), bf16", lambda x, b: F.gelu(x + b), (half, row.bfloat16())
    yield "residual and RMS norm, bf16", lambda x, y, w: (F.rms_norm(x + y, (4096,), w), x + y), (half, half.flip(0), row.bfloat16())
    yield "softmax of 512, bf16", lambda x: torch.softmax(x, -1), (half.view(-1, 512),)
    yield "transposed + 1", lambda x: x.t().contiguous() + 1, (x,)
    yield "transposed + 1, bf16", lambda x: x.t().contiguous() + 1, (half,)
    yield "images to channels last", lambda x: (x + 1).permute(0, 2, 3, 1).contiguous() * 2, (torch.randn(32, 256, 56, 56, device="cuda"),)
    yield "sums of columns", lambda x: x.sum(0), (x,)


def models() -> Iterator[tuple[str, Model, tuple[torch.Tensor, ...]]]:
    for width, heads, shape, dtype in ((768, 12, (8, 128), torch.float32), (1024, 16, (8, 512), torch.bfloat16)):
        model = nn.Sequential(*[Block(width, heads) for _ in range(6)]).cuda().to(dtype).eval()
        name = f"6 layers of {width}, {shape[0]}x{shape[1]}, {str(dtype).removeprefix('torch.')}"
        yield name, model, (torch.randn(*shape, width, device="cuda", dtype=dtype),)


CASES = {"chains": chains, "models": models}


def candidates(model: Model) -> dict[str, Model]:
    return {
        "eager": model,
        "Inductor": torch.compile(model),
        "Inductor, CUDA graphs": torch.compile(model, mode="reduce-overhead"),
        "Sashiko": torch.compile(model, backend=sashiko.backend),
    }


def alone(call: Callable[[], Any]) -> float:
    took = []
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(took)


def in_a_row(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e6


def measured(model: Model, arguments: tuple[torch.Tensor, ...]) -> dict[str, dict[str, float]]:
    """Each candidate's times, and its largest difference from eager, relative to eager's largest number."""
    expected = model(*arguments)
    expected = expected[0] if isinstance(expected, tuple) else expected
    rows: dict[str, dict[str, float]] = {}
    for name, candidate in candidates(model).items():
        torch._dynamo.reset()
        start = time.perf_counter()
        candidate(*arguments)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        for _ in range(5):  # what is recorded is so by now
            result = candidate(*arguments)
        result = result[0] if isinstance(result, tuple) else result
        error = ((result - expected).abs().max() / expected.abs().max()).item()
        rows[name] = {
            "alone_us": alone(lambda call=candidate: call(*arguments)), "in_a_row_us": in_a_row(lambda call=candidate: call(*arguments)),  # type: ignore[misc]
            "first_s": first, "error": error,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=several(one_of(CASES)), default=",".join(CASES), help="comma-separated: " + ", ".join(CASES))
    parser.add_argument("--json", type=file_to_write)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("high")
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv), "cases": {}}
    for kind in options.only:
        for name, model, arguments in CASES[kind]():
            rows = found["cases"][name] = measured(model, arguments)
            print(name)
            for candidate, row in rows.items():
                print(f"    {candidate:24} " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
