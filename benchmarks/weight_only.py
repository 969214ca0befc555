"""Products with quantized weights and few rows, where reading the weights takes the time, and GPT-2 small decoding with them.

    python -P benchmarks/weight_only.py [--only products,decode] [--rows 1,4,8] [--threads N] [--quick] [--json F]

Products: stacks of square layers, one after the other, whose weights fit L2, fit L3, or are several times larger than it as far as the
machine's memory allows. What a stack reads per second is compared with what a plain loop reads from the same number of bytes. Decoding:
greedy tokens per second. Candidates take turns on pinned cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import sashiko
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import Timing, measure, pin
from sashiko.cli.values import count, file_to_write, one_of, several
from sashiko.cpu_codegen import bandwidth
from sashiko.platforms.host import host
from sashiko.quant import PRESETS

# Bytes of a weight in memory; int4 in groups of 64 with an f32 scale each. What is multiplied with them is fp32 where nothing is said.
CANDIDATES = {
    "fp32": 4.0, "bf16": 2.0, "int8-weight": 1.0, "int8-weight, bf16": 1.0, "int4-weight": 0.5 + 4 / 64, "int4-weight, bf16": 0.5 + 4 / 64,
}
BASE = "int8-weight"
_CACHED = 128  # tokens that a cache has room for
_COPIES = 16  # of the weights in fp32 that all candidates and their making take, at most
Step = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Product:
    """One candidate on one stack. ms: of one layer in each round; layer_bytes: its weights; read: 10^9 bytes per second of a plain loop."""

    level: str
    size: int
    rows: int
    candidate: str
    layer_bytes: float
    ms: tuple[float, ...]
    read: float

    @property
    def giga(self) -> float:
        """10^9 bytes of weights per second."""
        return self.layer_bytes / Timing(self.ms).median / 1e6


@dataclass(frozen=True)
class Decode:
    """Greedy decoding. ms: of one token in each round; same: share of tokens that are those of fp32."""

    candidate: str
    tokens: int
    ms: tuple[float, ...]
    same: float


class DecodeStep(nn.Module):
    """(token [1] i64, position [1] i64, keys, values [layers, heads, length, depth] f32)
    -> (next token [1] i64, its key and value in each layer [layers, heads, depth]).

    The cache is read and not written: the token's own key and value take part beside it, and the caller puts them at their position.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.heads, self.depth = config.n_head, config.n_embd // config.n_head

    def forward(
        self, token: torch.Tensor, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        body = self.model.transformer
        x = body.wte(token) + body.wpe(position)
        unseen = torch.arange(keys.shape[2]) >= position
        own_keys, own_values = [], []
        for key, value, block in zip(keys, values, body.h):
            q, k, v = block.attn.c_attn(block.ln_1(x)).view(3, self.heads, self.depth)
            q = q * self.depth**-0.5
            # With one row these products are sums over what is in memory anyway, which needs no packing.
            score = torch.cat(((key * q.unsqueeze(1)).sum(-1).masked_fill(unseen, float("-inf")), (q * k).sum(-1, keepdim=True)), 1)
            weight = score.softmax(-1)
            mixed = (weight[:, :-1].unsqueeze(2) * value).sum(1) + weight[:, -1:] * v
            x = x + block.attn.c_proj(mixed.view(1, -1))
            x = x + block.mlp.c_proj(block.mlp.act(block.mlp.c_fc(block.ln_2(x))))
            own_keys.append(k)
            own_values.append(v)
        return self.model.lm_head(body.ln_f(x)).argmax(-1), torch.stack(own_keys), torch.stack(own_values)


def gpt2() -> DecodeStep:
    """GPT-2 small with random weights, in evaluation mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return DecodeStep(GPT2LMHeadModel(GPT2Config())).eval()


def first_inputs(step: DecodeStep) -> tuple[torch.Tensor, ...]:
    """The beginning of a text, with an empty cache."""
    config = step.model.config
    cache = torch.zeros(config.n_layer, config.n_head, _CACHED, step.depth)
    return torch.tensor([11]), torch.tensor([0]), cache, cache.clone()


@torch.no_grad()
def greedy(step: Step, inputs: tuple[torch.Tensor, ...], tokens: int) -> list[int]:
    """The most likely `tokens` after the first, one step each; at most as many as the cache has room for."""
    token, position, keys, values = inputs
    position, found = position.clone(), []
    for at in range(tokens):
        position.fill_(at)
        token, key, value = step(token, position, keys, values)
        keys[:, :, at], values[:, :, at] = key, value
        found.append(int(token))
    return found


def narrowed(model: nn.Module, inputs: tuple[torch.Tensor, ...], candidate: str) -> nn.Module:
    """The model with the candidate's weights, rounded to the nearest: compensated ones take minutes more and the same time to run."""
    if candidate in ("fp32", "bf16"):
        return model
    scheme = PRESETS[candidate.removesuffix(", bf16")]
    plain = dataclasses.replace(scheme.default.weight, clip="none", compensate=False)
    rounded = dataclasses.replace(scheme, default=dataclasses.replace(scheme.default, weight=plain))
    return sashiko.quantize(model, [inputs], preset=rounded)


def compiled(model: nn.Module, inputs: tuple[torch.Tensor, ...], candidate: str) -> Callable[..., object]:
    """Native code for a narrowed model."""
    return sashiko.compile(model, inputs, precision="bf16" if candidate.endswith("bf16") else "fp32")


def levels(quick: bool) -> Iterator[tuple[str, int, int]]:
    """(level, size of a layer, layers): weights of int8 that fit L2, fit L3, and do not fit anything."""
    target = host()
    yield "L2", 512, 1
    if target.l3 > 4 * target.l2:
        yield "L3", 2048, 1
    size = 2048 if quick else 4096
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _COPIES
    wanted, most = max(2, -(-3 * target.l3 // (size * size))), max(2, room // (size * size * 4))
    if most < wanted:
        print(f"memory allows stacks of {most * size * size >> 20} MiB in int8, beside {target.l3 >> 20} MiB of L3")
    yield "memory", size, min(wanted, most)


def products(rows: Sequence[int], quick: bool) -> list[Product]:
    found: list[Product] = []
    for level, size, layers in levels(quick):
        model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))).eval()
        for m in rows:
            x = torch.randn(m, size)
            # One after the other: where caches are large, models that simulate all forms do not fit memory.
            stacks = {name: partial(compiled(narrowed(model, (x,), name), (x,), name), x) for name in CANDIDATES}
            times = measure(stacks, rounds=3 if quick else 9, seconds=0.1 if quick else 0.3)
            for name, timing in times.items():
                layer_bytes = CANDIDATES[name] * size * size
                [plain] = bandwidth.measure(host(), ((level, max(1 << 14, int(layer_bytes) * layers)),))
                ms = tuple(t / layers for t in timing.rounds)
                found.append(Product(level, size, m, name, layer_bytes, ms, plain.read))
    return found


def decoding(tokens: int, rounds: int) -> list[Decode]:
    model = gpt2()
    inputs = first_inputs(model)
    steps = {name: compiled(narrowed(model, inputs, name), inputs, name) for name in CANDIDATES}

    def text(step: Callable[..., object]) -> list[int]:
        return greedy(step, first_inputs(model), tokens)  # type: ignore[arg-type]

    said = {name: text(step) for name, step in steps.items()}
    times = measure({name: partial(text, step) for name, step in steps.items()}, rounds, seconds=0)
    agree = {name: sum(a == b for a, b in zip(words, said["fp32"])) / tokens for name, words in said.items()}
    return [Decode(name, tokens, tuple(t / tokens for t in timing.rounds), agree[name]) for name, timing in times.items()]


def product_table(found: Sequence[Product], level: str, rows: int) -> Table:
    here = [p for p in found if (p.level, p.rows) == (level, rows)]
    base = next(p for p in here if p.candidate == BASE)
    table = Table(title=f"{rows} x {here[0].size} x {here[0].size}, weights in {level}", title_justify="left")
    for head in ("", "us a layer", "GB/s", "of a plain loop", f"x {BASE}"):
        table.add_column(head, justify="right" if head else "left")
    for p in here:
        speed = Timing(p.ms).ratio_to(Timing(base.ms))
        table.add_row(p.candidate, f"{Timing(p.ms).median * 1e3:.0f}", f"{p.giga:.1f}", f"{p.giga / p.read:.0%}", f"{speed:.2f}")
    return table


def decode_table(found: Sequence[Decode]) -> Table:
    base = next(Timing(d.ms) for d in found if d.candidate == "bf16")
    table = Table(title="GPT-2 small, batch 1, greedy", title_justify="left")
    for head in ("", "ms a token", "tokens/s", "x bf16", "same tokens as fp32"):
        table.add_column(head, justify="right" if head else "left")
    for d in found:
        timing = Timing(d.ms)
        table.add_row(d.candidate, f"{timing.median:.2f}", f"{1e3 / timing.median:.1f}", f"{timing.ratio_to(base):.2f}", f"{d.same:.0%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=several(one_of(("products", "decode"))), default="products,decode", help="%(default)s")
    parser.add_argument("--rows", type=several(count), default="1,4,8", help="%(default)s")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--quick", action="store_true", help="smaller stacks, fewer tokens, short turns")
    parser.add_argument("--json", type=file_to_write, help="write all rounds to this file")
    options = parser.parse_args()
    pin(options.threads)
    console = Console()
    found = products(options.rows, options.quick) if "products" in options.only else []
    for level, m in dict.fromkeys((p.level, p.rows) for p in found):
        console.print(product_table(found, level, m))
    texts = decoding(8 if options.quick else 32, 3 if options.quick else 7) if "decode" in options.only else []
    if texts:
        console.print(decode_table(texts))
    if options.json:
        run = {"threads": options.threads, **story()}
        run |= {"products": [dataclasses.asdict(p) for p in found], "decode": [dataclasses.asdict(d) for d in texts]}
        options.json.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
