"""Text generation with transformers: a token beside eager PyTorch and Inductor, with a static cache and with one that grows.

    python -P benchmarks/decode.py [--models llama,gpt2] [--caches static,growing] [--weights float,int8,int4] [--dtype fp32]
                                   [--tokens 32] [--rounds 9] [--quick] [--json F]

Models have random weights. Each candidate has a process of its own, in which `generate` calls the forward that it compiled with
`dynamic=True`; the first text, with empty caches of compiled code, is not counted. Then the candidates take turns of one text each, on one
pinned core. Those in fp32 must all say the same. Integer weights are those of `quantize_` here, and of torchao for Inductor
(Int8WeightOnlyConfig; IntxWeightOnlyConfig with int4 in groups of 64).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sashiko
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import Timing, pin
from sashiko.cli.values import count, file_to_write, one_of, several

BACKENDS = ("eager", "inductor", "sashiko")
BASE = "eager"
PROMPT = 9
CACHES: dict[str, str | None] = {"static": "static", "growing": None}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS = ("float", "int8", "int4")


@dataclass(frozen=True)
class Job:
    """One candidate: what compiles which model with which weights, and how many tokens a text has."""

    backend: str
    model: str
    cache: str
    tokens: int
    weights: str
    dtype: str


@dataclass(frozen=True)
class Row:
    """ms: of a token in each round. first_s: of the first text, compilation included."""

    model: str
    cache: str
    backend: str
    weights: str
    dtype: str
    ms: tuple[float, ...]
    first_s: float


def llama() -> Any:
    """4 layers with grouped heads, 25 million weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 8192}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, **size))


def gpt2() -> Any:
    """GPT-2 small."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def qwen2() -> Any:
    """The 0.5 billion weights and 24 layers of the smallest Qwen 2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, **size))


def mixture() -> Any:
    """A mixture of 16 experts, 4 for a token, in 8 layers: 0.2 billion weights, of which a token takes 0.06."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    size = {"hidden_size": 512, "moe_intermediate_size": 1024, "vocab_size": 8192, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=8, num_experts=16, num_experts_per_tok=4, **size, **heads))


def tiny() -> Any:
    """For a look at whether all of this works."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **size))


MODELS: Mapping[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2, "mixture": mixture, "tiny": tiny}


def quantized(model: Any, job: Job) -> Any:
    """The model with weights of integers, by whom the backend's users would take."""
    if job.backend == "sashiko":
        sashiko.quantize_(model, f"{job.weights}-weight")
        return model
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    quantize_(model, Int8WeightOnlyConfig() if job.weights == "int8" else IntxWeightOnlyConfig(torch.int4, PerGroup(64)))
    return model


def writer(job: Job) -> Callable[[], list[int]]:
    """A call that writes one text."""
    torch.manual_seed(0)
    model = MODELS[job.model]().eval().to(TYPES[job.dtype])
    if job.weights != "float":
        model = quantized(model, job)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    prompt = torch.randint(3, model.config.vocab_size, (1, PROMPT))
    options = {"max_new_tokens": job.tokens, "do_sample": False, "cache_implementation": CACHES[job.cache], "disable_compile": True}
    if job.backend != "eager":
        model.forward = torch.compile(model.forward, backend=job.backend, dynamic=True)

    def write() -> list[int]:
        said: list[int] = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, PROMPT:].tolist()
        return said

    return write


def serve(connection: Connection, job: Job) -> None:
    """The child's side: the first text and its seconds, with empty caches, then the seconds of one more whenever it is asked."""
    with TemporaryDirectory(prefix="sashiko-decode-") as folder:
        os.environ |= {"SASHIKO_CACHE": f"{folder}/sashiko", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        _serve(connection, job)


def _serve(connection: Connection, job: Job) -> None:
    pin()
    torch.set_grad_enabled(False)
    write = writer(job)
    start = time.perf_counter()
    connection.send((write(), time.perf_counter() - start))
    try:
        while connection.recv():
            start = time.perf_counter()
            write()
            connection.send(time.perf_counter() - start)
    except (EOFError, OSError):
        return  # the parent wants no more


def measure(jobs: Sequence[Job], rounds: int) -> list[Row]:
    """All candidates for one model and cache."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        connections, begun = [], []
        for job in jobs:  # each has the core to itself while it compiles
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs, job), daemon=True).start()
            theirs.close()
            connections.append(stack.enter_context(closing(ours)))
            begun.append(ours.recv())
        for job, (said, _) in zip(jobs, begun, strict=True):
            if job.weights == "float" and job.dtype == "fp32" and said != begun[0][0]:
                raise RuntimeError(f"{job.backend} writes another text than {jobs[0].backend}")
        found: list[list[float]] = [[] for _ in jobs]
        for number in range(rounds):
            for at in (*range(number % len(jobs), len(jobs)), *range(number % len(jobs))):
                connections[at].send(True)
                found[at].append(connections[at].recv() * 1e3 / jobs[at].tokens)
    return [
        Row(job.model, job.cache, job.backend, job.weights, job.dtype, tuple(ms), first)
        for job, ms, (_, first) in zip(jobs, found, begun, strict=True)
    ]


def table(rows: Sequence[Row]) -> Table:
    result = Table()
    for head in ("model", "cache", "", "weights", "ms a token", f"x {BASE}", "first text, s"):
        result.add_column(head, justify="left" if head in ("model", "cache", "", "weights") else "right")
    base = {(row.model, row.cache): Timing(row.ms) for row in rows if row.backend == BASE}
    for row in rows:
        timing = Timing(row.ms)
        speed = timing.speed(base[row.model, row.cache])
        told = f"{speed.median:.2f} [{speed.low:.2f}, {speed.high:.2f}]"
        weights = row.dtype if row.weights == "float" else f"{row.weights}, {row.dtype}"
        result.add_row(row.model, row.cache, row.backend, weights, f"{timing.median:.2f}", told, f"{row.first_s:.1f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=several(one_of(MODELS)), default="llama,gpt2", help=f"{', '.join(MODELS)}; default: %(default)s")
    parser.add_argument("--caches", type=several(one_of(CACHES)), default="static,growing", help="%(default)s")
    weights = f"of {', '.join(WEIGHTS)} (default: %(default)s); float ones are always there"
    parser.add_argument("--weights", type=several(one_of(WEIGHTS)), default="float", help=weights)
    parser.add_argument("--dtype", default="fp32", choices=tuple(TYPES), help="of the model and its other weights (default: %(default)s)")
    parser.add_argument("--vs", default="inductor", choices=("inductor", "none"), help="whether to compile with Inductor, too")
    parser.add_argument("--tokens", type=count, default=32)
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--quick", action="store_true", help="4 tokens, 3 rounds")
    parser.add_argument("--json", type=file_to_write, help="write all rounds to this file")
    options = parser.parse_args()
    tokens, rounds = (4, 3) if options.quick else (options.tokens, options.rounds)
    backends = [name for name in BACKENDS if name != "inductor" or options.vs == "inductor"]
    candidates = [(name, "float") for name in backends]
    candidates += [(name, each) for each in options.weights if each != "float" for name in backends if name != "eager"]
    rows: list[Row] = []
    for model in options.models:
        for cache in options.caches:
            rows += measure([Job(name, model, cache, tokens, each, options.dtype) for name, each in candidates], rounds)
    Console(width=120).print(table(rows))
    if options.json:
        run = {"prompt": PROMPT, "tokens": tokens, **story()}
        options.json.write_text(json.dumps(run | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
