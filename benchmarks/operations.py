"""Single operations beside PyTorch: what a network is made of besides its products, alone, as eager calls them.

    python -P benchmarks/operations.py [--only images,rows] [--rounds 9] [--quick] [--json F]

A network fuses most of these; here each pays for its own memory traffic, and for a call. Images are given and returned row by row, or with
their channels last (`last`), as the operation itself would return them. fp32, one pinned core, candidates in turn, random operands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import sashiko
from sashiko.cli.bench.record import story
from sashiko.cli.bench.timing import Timing, measure, pin
from sashiko.cli.values import count, file_to_write, one_of, several

Operation = tuple[Callable[..., object], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """One operation. ms, eager_ms: of each round."""

    part: str
    name: str
    ms: tuple[float, ...]
    eager_ms: tuple[float, ...]


class Applied(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def _of_columns(x: Tensor, y: Tensor) -> Tensor:
    """As for the gradient of a weight."""
    return x.mT @ y


def _of_images() -> dict[str, Operation]:
    """Of 8 images of 64 channels, 56 x 56."""
    x = torch.randn(8, 64, 56, 56)
    functions: dict[str, Callable[..., object]] = {
        "pad by zeros": partial(F.pad, pad=(3, 3, 3, 3)),
        **{f"pad, {mode}": partial(F.pad, pad=(3, 3, 3, 3), mode=mode) for mode in ("reflect", "replicate", "circular")},
        **{f"twice as large, {mode}": partial(F.interpolate, scale_factor=2, mode=mode) for mode in ("nearest", "bilinear", "bicubic")},
        "half as large, bilinear": partial(F.interpolate, scale_factor=0.5, mode="bilinear"),
        **{f"largest of {n} x {n}, {s}": partial(F.max_pool2d, kernel_size=n, stride=s, padding=n // 2) for n, s in ((3, 2), (5, 1))},
        **{f"mean of {n} x {n}": partial(F.avg_pool2d, kernel_size=n) for n in (2, 7)},
        "mean of all": partial(F.adaptive_avg_pool2d, output_size=1),
        "group norm": partial(F.group_norm, num_groups=8),
        "instance norm": F.instance_norm,
        "softmax over channels": partial(torch.softmax, dim=1),
        "pixel shuffle": partial(F.pixel_shuffle, upscale_factor=2),
        "roll": partial(torch.roll, shifts=(3, 3), dims=(2, 3)),
        "patches of 3 x 3": partial(F.unfold, kernel_size=3, padding=1),
        "to the other order": lambda x: x.contiguous(
            memory_format=torch.contiguous_format if x.is_contiguous(memory_format=torch.channels_last) else torch.channels_last
        ),
        "depthwise 3 x 3": nn.Conv2d(64, 64, 3, padding=1, groups=64),
        "depthwise 7 x 7": nn.Conv2d(64, 64, 7, padding=3, groups=64),
        "convolution 3 x 3": nn.Conv2d(64, 64, 3, padding=1),
        "convolution 1 x 1": nn.Conv2d(64, 128, 1),
    }
    last = x.to(memory_format=torch.channels_last)
    return {f"{name}{' (last)' if image is last else ''}": (f, (image,)) for name, f in functions.items() for image in (x, last)}


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cosines - second * sines, second * cosines + first * sines), -1).flatten(-2)


def _of_rows() -> dict[str, Operation]:
    """Of 8 x 128 rows of 768."""
    x, heads, matrix = torch.randn(8, 128, 768), torch.randn(8, 128, 12, 64), torch.randn(512, 1024)
    angles = torch.randn(128, 1, 32)
    functions: dict[str, Callable[..., object]] = {
        "transpose": lambda x: x.transpose(1, 2).contiguous(),
        "queries, keys and values across": lambda x: tuple(part.contiguous() for part in x.unflatten(2, (3, 4, 64)).permute(2, 0, 3, 4, 1)),
        "heads apart": lambda x: x.view(8, 128, 12, 64).transpose(1, 2).contiguous(),
        "layer norm": partial(F.layer_norm, normalized_shape=(768,)),
        "RMS norm": partial(F.rms_norm, normalized_shape=(768,)),
        "softmax": partial(torch.softmax, dim=-1),
        "GELU": F.gelu,
        "sum of rows": partial(torch.sum, dim=1),
        "largest, where": partial(torch.max, dim=-1),
        "running sum": partial(torch.cumsum, dim=-1),
        "reversed": partial(torch.flip, dims=(-1,)),
        "every fourth": lambda x: x[..., ::4] + 1,
        "largest of 4": partial(F.max_pool1d, kernel_size=4),
        "twice as long, linear": partial(F.interpolate, scale_factor=2, mode="linear"),
    }
    return {
        **{name: (f, (x,)) for name, f in functions.items()},
        "rotary embedding of pairs": (_rotated, (heads, angles.cos(), angles.sin())),
        "buckets of 32": (torch.bucketize, (matrix, torch.linspace(-3, 3, 32))),
        "table of 512 rows": (F.embedding, (torch.randint(0, 512, (4096,)), matrix)),
        "sums over 1024 x 4096": (partial(torch.sum, dim=0), (torch.randn(1024, 4096),)),
    }


def _of_products() -> dict[str, Operation]:
    """Of activations with activations."""

    def attention(heads: int, groups: int, length: int) -> Operation:
        query, key, value = torch.randn(1, heads, 1, 128), torch.randn(1, groups, length, 128), torch.randn(1, groups, length, 128)
        return partial(F.scaled_dot_product_attention, enable_gqa=heads != groups), (query, key, value)

    def across(heads: int, size: int, places: int, channels: bool) -> Operation:
        """Of a convolution's result, channels first: of the places, or of the channels, to each other."""

        def attention(x: Tensor) -> Tensor:
            q, k, v = x.view(3, 1, heads, size, places).unbind(0)
            return F.scaled_dot_product_attention(*((q, k, v) if channels else (t.transpose(2, 3) for t in (q, k, v))))

        return attention, (torch.randn(1, 3 * heads * size, places),)

    windows, hidden = [torch.randn(64, 3, 49, 32) for _ in range(3)], torch.where(torch.rand(64, 1, 49, 49) < 0.5, -100.0, 0.0)
    return {
        "64 windows of 49, half hidden by -100": (F.scaled_dot_product_attention, (*windows, hidden)),
        "attention over 784 places of an image": across(8, 32, 784, channels=False),
        "attention over 32 channels": across(3, 32, 3136, channels=True),
        **{f"{m} rows, 1024 x 4096": (torch.matmul, (torch.randn(m, 1024), torch.randn(1024, 4096))) for m in (1, 2, 4, 8, 16, 64)},
        **{f"{m} rows, transposed, 768 x 768": (_of_columns, (torch.randn(768, m), torch.randn(768, 768))) for m in (64, 768)},
        **{f"96 of {m} rows, 128 x 64": (torch.matmul, (torch.randn(96, m, 128), torch.randn(96, 128, 64))) for m in (1, 4, 8, 128)},
        "2048 of 8 x 8": (torch.matmul, (torch.randn(2048, 8, 8), torch.randn(2048, 8, 8))),
        "256 of 3 x 3, 3 x 100": (torch.matmul, (torch.randn(256, 3, 3), torch.randn(256, 3, 100))),
        "one query, 32 heads, 1024 keys": attention(32, 32, 1024),
        "one query, 4 heads to a key, 1024 keys": attention(32, 8, 1024),
        "one query, 16 heads to a key, 1024 keys": attention(32, 2, 1024),
    }


def _of_attention() -> dict[str, Operation]:
    """Of 8 heads of 64."""

    def heads(items: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(items, 8, queries, 64), torch.randn(items, 8, keys, 64), torch.randn(items, 8, keys, 64)

    def by_distance(seen: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        """seen: by how many places a key is behind a query."""

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(keys - queries))

        return attention

    def until(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[2]) <= last[:, None])

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = torch.cat([q @ k.mT / 8, sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (20 * (q @ k.mT / 160).tanh()).softmax(-1) @ v

    def padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])

    return {
        "512 x 512": (F.scaled_dot_product_attention, heads(1, 512, 512)),
        "2048 x 2048, no later keys": (by_distance(lambda behind: behind <= 0), heads(1, 2048, 2048)),
        "2048 x 2048, 128 keys": (by_distance(lambda behind: (behind <= 0) & (behind > -128)), heads(1, 2048, 2048)),
        "2048 x 2048, 64 on either side": (by_distance(lambda behind: behind.abs() <= 64), heads(1, 2048, 2048)),
        "8 of 512 x 512, half of them padding": (padded, (*heads(8, 512, 512), torch.arange(512) < 64 * torch.arange(1, 9)[:, None])),
        "128 x 4096 of a cache, of which 512 are filled": (until, (*heads(1, 128, 4096), torch.arange(384, 512))),
        "1 x 4096 of a cache, of which 512 are filled": (until, (*heads(1, 1, 4096), torch.tensor([511]))),
        "1 x 4096 of a cache, 4 heads to a key": (shared, (torch.randn(1, 32, 1, 64), *heads(1, 1, 4096)[1:])),
        "512 x 512 with sinks": (with_sinks, (*heads(1, 512, 512), torch.randn(8))),
        "512 x 512, capped": (capped, heads(1, 512, 512)),
    }


def _of_graphs() -> dict[str, Operation]:
    """Of 3000 nodes of 64 features and 20000 edges; and bags."""
    nodes, weights, scores = torch.randn(3000, 64), torch.rand(20000, 1), torch.randn(20000, 4)
    begin, end = torch.randint(0, 3000, (2, 20000))
    bags = nn.EmbeddingBag(3000, 64, mode="max").eval()
    bags.requires_grad_(False)

    def softmax(scores: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        to, one = end[:, None].expand_as(scores), scores.new_zeros(3000, 4)
        weights = (scores - one.scatter_reduce(0, to, scores, "amax", include_self=False)[end]).exp()
        return weights / one.index_add(0, end, weights)[end]

    return {
        "sums over edges": (lambda x, i, s: x.index_add(0, i, s), (nodes, end, nodes[begin])),
        "largest over edges": (lambda x, i, s: x.scatter_reduce(0, i[:, None].expand_as(s), s, "amax"), (nodes, end, nodes[begin])),
        "weighted neighbours": (lambda x, i, j, w: torch.zeros_like(x).index_add(0, j, x[i] * w), (nodes, begin, end, weights)),
        "softmax over edges": (softmax, (scores, end)),
        "largest of bags": (bags, (begin, torch.arange(0, 20000, 20) + torch.randint(0, 20, (1000,)) * (torch.arange(1000) > 0))),
    }


def _of_order() -> dict[str, Operation]:
    """Of the scores of a vocabulary and of 8400 boxes, and of the experts of 4096 tokens."""
    vocabulary, boxes, experts = torch.randn(1, 50257), torch.randn(8, 8400), torch.randint(0, 64, (4096,))

    def nucleus(x: Tensor) -> Tensor:
        """The scores among those that make up 0.9 of the probability."""
        found, places = x.sort(dim=-1, descending=True)
        shares = found.softmax(-1)
        return torch.full_like(x, float("-inf")).scatter(-1, places, found.where(shares.cumsum(-1) - shares < 0.9, float("-inf")))

    return {
        "sort of 50257": (torch.sort, (vocabulary,)),
        "sort of 8 x 8400": (torch.sort, (boxes,)),
        "sort of 64 x 100": (torch.sort, (torch.randn(64, 100),)),
        "places of 4096 by 64 experts": (partial(torch.argsort, dim=-1, stable=True), (experts,)),
        "50 largest of 50257": (partial(torch.topk, k=50), (vocabulary,)),
        "300 largest of 8 x 8400": (partial(torch.topk, k=300), (boxes,)),
        "8 largest of 256 x 64": (partial(torch.topk, k=8), (torch.randn(256, 64),)),
        "largest scores that make up 0.9": (nucleus, (vocabulary,)),
        "medians of 64 x 1000": (partial(torch.median, dim=-1), (torch.randn(64, 1000),)),
        "places among 5000": (torch.searchsorted, (torch.randn(5000).sort()[0], torch.randn(100, 200))),
        "boxes of three sizes": (lambda *x: torch.cat(x, 1), tuple(torch.randn(8, n, 4) for n in (6400, 1600, 400))),
    }


PARTS: Mapping[str, Callable[[], dict[str, Operation]]] = {
    "images": _of_images, "rows": _of_rows, "products": _of_products, "attention": _of_attention, "graphs": _of_graphs, "order": _of_order,
}


def measured(part: str, name: str, operation: Operation, rounds: int, seconds: float) -> Row:
    function, args = operation
    model = (function if isinstance(function, nn.Module) else Applied(function)).eval()
    times = measure({"ours": partial(sashiko.compile(model, args), *args), "eager": partial(model, *args)}, rounds, seconds)
    return Row(part, name, times["ours"].rounds, times["eager"].rounds)


def table(rows: Sequence[Row]) -> Table:
    result = Table()
    for head in ("", "operation", "ms", "eager, ms", "x eager"):
        result.add_column(head, justify="left" if head in ("", "operation") else "right")
    for row in rows:
        ours, eager = Timing(row.ms), Timing(row.eager_ms)
        speed = ours.speed(eager)
        told = f"{speed.median:.2f} [{speed.low:.2f}, {speed.high:.2f}]"
        result.add_row(row.part, row.name, f"{ours.median:.3f}", f"{eager.median:.3f}", told, style="bold" if speed.median < 0.95 else "")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=several(one_of(PARTS)), default=",".join(PARTS), help="%(default)s")
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--quick", action="store_true", help="the first operation of each part, 3 short rounds")
    parser.add_argument("--json", type=file_to_write, help="write all rounds to this file")
    options = parser.parse_args()
    pin()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    rounds, seconds = (3, 0.01) if options.quick else (options.rounds, 0.02)
    chosen = {part: PARTS[part]() for part in options.only}
    operations = [(part, *item) for part, found in chosen.items() for item in list(found.items())[: 1 if options.quick else None]]
    rows = [measured(part, name, operation, rounds, seconds) for part, name, operation in operations]
    Console(width=140).print(table(rows))
    if options.json:
        run = story()
        options.json.write_text(json.dumps(run | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
