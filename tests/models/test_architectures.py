"""Architectures of `transformers` that nothing here was made for: a spread by default, all of them when slow tests run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers.utils import logging

from tests.models.architectures import Outcome, check, names
from tests.sweeps import swept

# Encoder, decoder, images, images with text, states in place of attention, and a check of data.
SPREAD = ("deberta-v2", "qwen3", "mobilenet_v2", "clip", "mamba", "flaubert")


@pytest.mark.parametrize("name", swept(SPREAD, ("qwen3",)))
def test_architecture(name: str) -> None:
    with torch.no_grad():
        outcome = check(name)
    assert (outcome.status, outcome.left) == ("right", ()), outcome


def summary(outcomes: Sequence[Outcome]) -> str:
    """The table that `make architectures` prints."""
    status = Counter(o.status for o in outcomes)
    right = [o for o in outcomes if o.status == "right"]
    left = Counter(operation for o in right for operation in o.left)
    return "\n".join([
        f"architectures {len(outcomes)}: " + ", ".join(f"{status[s]} {s}" for s in ("right", "wrong", "refused", "error", "skipped")),
        f"native as a whole {sum(not o.left for o in right)}; left to PyTorch elsewhere:",
        *(f"  in {count} {operation}" for operation, count in left.most_common()),
        *(f"{o.name}: {o.status}: {o.detail}" for o in outcomes if o.status in ("wrong", "refused", "error")),
    ])


@pytest.mark.slow
def test_every_architecture() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    with torch.no_grad():
        outcomes = [check(name) for name in names()]
    print(f"\n{summary(outcomes)}")
    assert [o for o in outcomes if o.status in ("wrong", "error")] == []
    assert sum(o.status == "right" for o in outcomes) > 150
