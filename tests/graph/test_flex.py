"""`flex_attention`, beside PyTorch's own form of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import sashiko
from sashiko.graph.exporting import export
from sashiko.graph.flex import flex_attention as OPERATION
from tests.sweeps import swept

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
Mask = Callable[[Any, Any, Any, Any], Any]
CAUSAL: Mask = lambda b, h, i, j: i >= j  # noqa: E731


class Attends(nn.Module):
    """The functions are made of tensors of the model and of the call."""

    def __init__(self, score: Callable[..., Any] | None, mask: Callable[..., Mask] | None) -> None:
        super().__init__()
        self.score, self.mask = score, mask
        self.register_buffer("slopes", torch.rand(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Any:
        block = None
        if self.mask is not None:
            block = create_block_mask(self.mask(documents), q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
        score = None if self.score is None else self.score(self.slopes)
        return flex_attention(q, k, v, score_mod=score, block_mask=block, enable_gqa=q.shape[1] != k.shape[1])


SCORES: dict[str, Callable[..., Any] | None] = {
    "plain": None,
    "slopes": lambda slopes: lambda s, b, h, i, j: s + (j - i) * slopes[h],
    "powers": lambda slopes: lambda s, b, h, i, j: (i * 0.01 + s) - j * 0.5 ** (h + 1),
    "kept": lambda slopes: lambda s, b, h, i, j: torch.where(i - j < 9, s, -float("inf")),
    "capped": lambda slopes: lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "scaled": lambda slopes: lambda s, b, h, i, j: s * slopes[h] + s,
}
MASKS: dict[str, Callable[..., Mask] | None] = {
    "all": None,
    "causal": lambda documents: CAUSAL,
    "documents": lambda documents: lambda b, h, i, j: (i >= j) & (documents[b, i] == documents[b, j]),
    "window or start": lambda documents: lambda b, h, i, j: (i >= j) & ((i - j < 5) | (j < 2)),
    "heads": lambda documents: lambda b, h, i, j: (h % 2 == 0) | ~(i < j),
}


def example(length: int = 40, groups: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, length, 16), torch.randn(2, groups, length, 16), torch.randn(2, groups, length, 16)
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.randint(0, 3, (2, length)).sort(-1)[0]


def left(model: nn.Module, args: tuple[Tensor, ...]) -> int:
    return len(export(model.eval(), args).graph.find_nodes(op="call_function", target=OPERATION))


@pytest.mark.parametrize(("score", "mask"), swept(
    [*((score, "all") for score in SCORES), ("slopes", "documents"), ("capped", "documents")],
    [*((score, "all") for score in ("plain", "powers", "kept")), ("capped", "documents")],
))
def test_functions_of_scores(score: str, mask: str) -> None:
    """Products around a softmax of what is added to scores that are multiplied, too."""
    model, args = Attends(SCORES[score], MASKS[mask]).eval(), example(groups=2)
    fast = sashiko.compile(model, args, strict=True)
    assert ("  attention_" in sashiko.explain(fast)) == (score != "scaled")
    torch.testing.assert_close(fast(*args), model(*args), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mask", swept(MASKS, ("causal", "window or start", "heads")))
def test_functions_of_places(mask: str) -> None:
    model, args = Attends(SCORES["plain"], MASKS[mask]).eval(), example()
    fast = sashiko.compile(model, args, strict=True)
    torch.testing.assert_close(fast(*args), model(*args), rtol=1e-5, atol=2e-6)
    assert "attention" in sashiko.explain(fast) and "1 kernels" in sashiko.explain(fast)


def test_of_a_dynamo_graph() -> None:
    for score, mask in (("slopes", "causal"), ("capped", "documents")):
        model, args = Attends(SCORES[score], MASKS[mask]).eval(), example()
        fast = torch.compile(model, backend="sashiko", options={"strict": True})
        with torch.no_grad():
            torch.testing.assert_close(fast(*args), model(*args), rtol=1e-5, atol=2e-6)


def test_of_any_length_and_narrow_floats() -> None:
    block = Attends(SCORES["slopes"], lambda documents: lambda b, h, i, j: documents[b, j] > 0)
    model, args = block.eval(), example()
    length = Dim("length", min=2, max=100)
    shapes = ({2: length}, {2: length}, {2: length}, {1: length})
    fast = sashiko.compile(model, args, dynamic_shapes=shapes, strict=True)
    for n in (2, 33, 100):
        given = example(n)  # a row of which no score is kept is 0
        torch.testing.assert_close(fast(*given), model(*given), rtol=1e-5, atol=2e-6)
    given = example(dtype=torch.float64)
    for score in ("slopes", "capped"):
        wide = Attends(SCORES[score], MASKS["causal"]).eval()
        torch.testing.assert_close(sashiko.compile(wide, given, strict=True)(*given), wide(*given))
    given = example(dtype=torch.bfloat16)
    found = sashiko.compile(model, given, strict=True)(*given)
    torch.testing.assert_close(found.double(), model(*[x.double() for x in given]).double(), rtol=2e-2, atol=2e-2)


def test_what_pytorch_computes() -> None:
    class Sums(Attends):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Any:
            return flex_attention(q, k, v, return_lse=True)

    rows = torch.rand(4, 3)
    partly = Attends(lambda slopes: lambda s, b, h, i, j: s + rows[h].sum(), None)
    args = example()
    for model, why in ((Sums(None, None).eval(), "are asked for"), (partly.eval(), "indexed along all its axes")):
        assert left(model, args) == 1
        fast = sashiko.compile(model, args)
        torch.testing.assert_close(fast(*args), model(*args))
        assert why in sashiko.explain(fast)
        with pytest.warns(UserWarning, match=why), torch.no_grad():
            torch.compile(model, backend="sashiko")(*args)


def test_blocks_that_are_given_are_those_of_the_mask() -> None:
    """PyTorch's eager form keeps what the mask keeps, whatever the blocks are."""
    q, k, v, _ = example(256)
    numbers, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    block = BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=128, mask_mod=CAUSAL)

    class Given(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flex_attention(q, k, v, block_mask=block)

    torch.testing.assert_close(sashiko.compile(Given().eval(), (q, k, v), strict=True)(q, k, v), Given()(q, k, v), rtol=1e-5, atol=2e-6)
