"""The models that are measured, as a literal table: random weights from the configurations of transformers, unless said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...diagnostics.errors import InputError
from ..explain import load_example
from .encoder import batches, load_encoder, sentences

Shape = tuple[int, ...]
Tensors = tuple[torch.Tensor, ...]
CALIBRATION = 4  # batches of random inputs
SENTENCES = 64  # of the real encoder: as many to calibrate on and as many others to judge by


@dataclass(frozen=True)
class Example:
    """A model in evaluation mode and what it is called with, by position.

    args: of the timed call. batches: to calibrate on. judged: the calls whose results are compared with those of eager fp32.
    """

    model: nn.Module
    args: Tensors
    batches: tuple[Tensors, ...]
    judged: tuple[Tensors, ...]


@dataclass(frozen=True)
class Case:
    """One model. form: the names of the numbers in a shape, empty for a model that has one shape only. shapes: the usual ones, the first
    for a quick run. embeddings: results are rows whose cosine is worth telling."""

    name: str
    what: str
    form: str
    shapes: tuple[Shape, ...]
    make: Callable[[Shape], Example]
    embeddings: bool = False

    def fits(self, shape: Shape) -> bool:
        return len(shape) == len(self.form.split(" x ")) if self.form else not shape


def find(name: str) -> Case:
    """The case of that name, or the user's own by `FILE.py:FUNCTION`, as `sashiko explain` takes it."""
    if ":" in name:
        return Case(name, "your own", "", ((),), lambda shape: custom(name))
    for case in CASES:
        if case.name == name:
            return case
    raise InputError(f"there is no model {name!r}", "bench --models", f"known: {', '.join(c.name for c in CASES)}, or FILE.py:FUNCTION")


def checked(name: str) -> Case:
    """As `find`. What is wrong with a model of the user's own is told now; it is not kept, since each candidate makes its own."""
    case = find(name)
    if ":" in name:
        case.make(())
    return case


class Result(nn.Module):
    """A model of transformers that takes tensors by position and returns one tensor: a field of the model's output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], field: str) -> None:
        super().__init__()
        self.model, self.names, self.field = model, names, field

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(self.model(**dict(zip(self.names, args, strict=True))), self.field)
        return result


class Chain(nn.Module):
    """softmax(gelu(layer_norm(x + y)) + x) over the last dimension: nothing but memory traffic and elementwise functions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(nn.functional.gelu(self.norm(x + y)) + x, -1)


def random_example(model: nn.Module, make: Callable[[], Tensors]) -> Example:
    """An example on random inputs."""
    args = make()
    return Example(model.eval(), args, tuple(make() for _ in range(CALIBRATION)), (args,))


def _tokens(batch: int, length: int) -> Tensors:
    ids = torch.randint(0, 30000, (batch, length))
    return ids, torch.ones_like(ids)


def _bert(hidden: int, layers: int) -> Callable[[Shape], Example]:
    def make(shape: Shape) -> Example:
        from transformers import BertConfig, BertModel

        config = BertConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, intermediate_size=4 * hidden)
        bert = BertModel(config, add_pooling_layer=False)
        return random_example(Result(bert, ("input_ids", "attention_mask"), "last_hidden_state"), lambda: _tokens(*shape))

    return make


def _minilm(shape: Shape) -> Example:
    batch, length = shape
    encoder, tokenizer = load_encoder()
    texts = sentences()

    def calls(chosen: list[str]) -> tuple[Tensors, ...]:
        return tuple(tuple(item.values()) for item in batches(tokenizer, chosen[: max(1, len(chosen) // batch) * batch], batch, length))

    calibration, judged = calls(texts[:SENTENCES]), calls(texts[SENTENCES : SENTENCES + max(SENTENCES, batch)])
    return Example(encoder, judged[0], calibration, judged)


def _vit(shape: Shape) -> Example:
    from transformers import ViTConfig, ViTModel

    batch, size = shape
    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, image_size=size)
    vit = ViTModel(config, add_pooling_layer=False)
    return random_example(Result(vit, ("pixel_values",), "last_hidden_state"), lambda: (torch.randn(batch, 3, size, size),))


def _resnet50(shape: Shape) -> Example:
    from transformers import ResNetConfig, ResNetModel

    batch, size = shape
    model = Result(ResNetModel(ResNetConfig()), ("pixel_values",), "pooler_output")
    return random_example(model, lambda: (torch.randn(batch, 3, size, size),))


def _gpt2(shape: Shape) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = Result(GPT2LMHeadModel(GPT2Config(use_cache=False)), ("input_ids",), "logits")
    return random_example(model, lambda: (torch.randint(0, 50000, shape),))


def _chain(shape: Shape) -> Example:
    return random_example(Chain(shape[-1]), lambda: (torch.randn(shape), torch.randn(shape)))


def _mlp(shape: Shape) -> Example:
    width = shape[-1]
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return random_example(model, lambda: (torch.randn(shape),))


def _gemm(shape: Shape) -> Example:
    m, n, k = shape
    return random_example(nn.Linear(k, n), lambda: (torch.randn(m, k),))


class ByPosition(nn.Module):
    """A model called with tensors by position, as the peers call: those of one call, whose names and whatever is no tensor stay."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.model, self.training = model, model.training
        self.constants = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if one is None else one[0] for one in self.constants], self.spec)
        return self.model(*args, **kwargs)


def custom(source: str) -> Example:
    """The user's own model on its own inputs, which are its calibration data too."""
    from ...graph.examples import example
    from ...graph.exporting import check_mode, check_module

    model, inputs = load_example(source)
    check_module(model)
    check_mode(model)
    args, kwargs = example(inputs, source)
    tensors = tuple(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    plain = not kwargs and all(isinstance(item, torch.Tensor) for item in args)
    return Example(model if plain else ByPosition(model, args, kwargs), tensors, (tensors,), (tensors,))


_GEMMS: tuple[Shape, ...] = ((512, 256, 256), (512, 1024, 256), (512, 256, 1024), (64, 768, 768), (1, 768, 768), (1, 4096, 4096))
_TEXT = "batch x length"
_IMAGE = "batch x size"
CASES: tuple[Case, ...] = (
    Case("bert-mini", "BERT, 4 layers of 256", _TEXT, ((8, 64), (1, 64)), _bert(256, 4)),
    Case("bert-base", "BERT, 12 layers of 768", _TEXT, ((1, 128),), _bert(768, 12)),
    Case("minilm", "all-MiniLM-L6-v2, real weights, real sentences", _TEXT, ((8, 128), (1, 32)), _minilm, embeddings=True),
    Case("vit-s16", "ViT-S/16 without its classifier", _IMAGE, ((1, 224),), _vit),
    Case("resnet50", "ResNet-50 without its classifier", _IMAGE, ((1, 224),), _resnet50),
    Case("gpt2-small", "GPT-2 of 124 million, prefill", _TEXT, ((1, 128),), _gpt2),
    Case("chain", "add, LayerNorm, GELU, softmax: memory-bound", "rows x columns", ((512, 1024),), _chain),
    Case("mlp", "two small linear layers: what a call costs", "rows x width", ((1, 64),), _mlp),
    Case("gemm", "one linear layer", "M x N x K", _GEMMS, _gemm),
)


def parse_shape(text: str) -> Shape:
    """"8x64" as (8, 64)."""
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"{text!r} is not a shape", "bench --shapes", "positive numbers with x between them, such as 8x64")
    return tuple(map(int, parts))


def shape_text(shape: Shape) -> str:
    return "x".join(map(str, shape))
