"""Padding must not shape ranges: which activations a mask is laid over, and which arguments are masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from sashiko.diagnostics.errors import CalibrationError, InputError
from sashiko.quant import PRESETS, ActivationScheme, OpScheme, QuantizedModule, Scheme, quantize
from sashiko.quant.masking import ANY, fitted
from tests.quant.models import EncoderDecoder, bert, sequences, tokens
from tests.sweeps import swept

STATIC = [name for name, scheme in PRESETS.items() if scheme.default.label == "int8"]


class Encoder(nn.Module):
    """Self-attention with a mask; x: [B, S, 8]. `flat`: the last layer works on [B * S, 8]."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.first, self.qkv, self.last, self.flat = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(8, 4), flat

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).masked_fill(attention_mask[:, None, None, :] == 0, -1e4)
        h = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        if not self.flat:
            return torch.as_tensor(self.last(h))
        return torch.as_tensor(self.last(h.reshape(-1, 8)).unflatten(0, h.shape[:2]))


def padded(garbage: float, dtype: torch.dtype = torch.int64) -> list[dict[str, torch.Tensor]]:
    """The same data under the masks; `garbage` times noise where they are 0."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for batch, length in ((3, 7), (2, 5), (4, 9)):
        x = torch.randn(batch, length, 8, generator=generator)
        mask = torch.arange(length)[None] < torch.randint(2, length, (batch, 1), generator=generator)
        noise = torch.randn(batch, length, 8, generator=generator) * garbage
        batches.append({"x": torch.where(mask[..., None], x, noise), "attention_mask": mask.to(dtype)})
    return batches


def scales(small: QuantizedModule) -> list[tuple[float, int]]:
    return [(r.scale, r.zero_point) for item in small.record.sites for r in item.ranges]


@pytest.mark.parametrize(("preset", "flat"), swept(
    [*((name, False) for name in STATIC), ("int8-symmetric", True)],
    [("int8-static", False), ("int8-symmetric", True)],
))
def test_garbage_in_padding_changes_nothing(preset: str, flat: bool) -> None:
    model = Encoder(flat).eval()
    found = [scales(quantize(model, padded(garbage), preset=preset)) for garbage in (1.0, 1e4)]
    assert found[0] == found[1] and len(found[0]) == 3
    assert scales(quantize(model, padded(1e4), preset=preset, mask=False)) != found[0]


@pytest.mark.parametrize("operation", ["matmul", "attention"])
def test_heads_are_masked_too(operation: str) -> None:
    """[batch, heads, position, features] and its transpose, with as many heads as there are positions in a batch."""

    class Heads(nn.Module):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            q = x.unflatten(-1, (2, 4)).transpose(1, 2)
            if operation == "attention":
                return nn.functional.scaled_dot_product_attention(q, q, q, attention_mask[:, None, None, :] > 0)
            return q @ q.transpose(-1, -2)

    scheme = Scheme(OpScheme(ActivationScheme("minmax")), operations=("matmul", "attention"))
    data = [padded(garbage) for garbage in (0.0, 1e4)]
    short = {"x": torch.ones(2, 2, 8) * 5, "attention_mask": torch.tensor([[1, 0], [1, 0]])}
    found = [scales(quantize(Heads().eval(), [*batches, short], preset=scheme)) for batches in data]
    assert found[0] == found[1] and found[0][0][0] == pytest.approx(5 / 127)


def test_tokens_of_padding_do_not_count() -> None:
    model = bert()
    batches = [tokens(3, 12), tokens(2, 7)]
    other = [{**b, "input_ids": torch.where(b["attention_mask"] > 0, b["input_ids"], 99 - b["input_ids"])} for b in batches]
    kept = [scales(quantize(model, data, preset="int8-minmax")) for data in (batches, other)]
    # Attention adds exact zeros for masked keys, in the same order; only the pooler's rows are not under the mask, and these are real.
    assert kept[0] == kept[1] and len(kept[0]) > 10


@pytest.mark.parametrize("dtype", swept((torch.int32, torch.bool, torch.float32), (torch.int32, torch.bool)))
def test_types_of_masks(dtype: torch.dtype) -> None:
    model = Encoder().eval()
    assert scales(quantize(model, padded(1e4, dtype))) == scales(quantize(model, padded(1.0)))


class Named(nn.Module):
    """The mask is not used, so that its sizes have nothing to do with those of x as far as the program knows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, keep: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.fc(x) + length.sum())


def named(garbage: float) -> list[Any]:
    return [(b["x"], b["attention_mask"], torch.ones(3)) for b in padded(garbage)]


def test_a_named_mask() -> None:
    model = Named().eval()

    def found(garbage: float, mask: str | None) -> list[tuple[float, int]]:
        return scales(quantize(model, named(garbage), preset="int8-symmetric", mask=mask))

    assert found(1e4, "keep") == found(1.0, "keep")
    assert found(1e4, None) != found(1.0, None)
    with pytest.raises(InputError, match="'padding' is not an argument"):
        quantize(model, named(1.0), mask="padding")
    with pytest.raises(InputError, match="'length' is not a tensor of"):
        quantize(model, named(1.0), mask="length")
    with pytest.raises(InputError, match="mask=True"):
        quantize(model, named(1.0), mask=True)  # type: ignore[arg-type]


def test_other_values() -> None:
    model = Encoder().eval()
    additive = [{**b, "attention_mask": b["attention_mask"] * 3} for b in padded(2.0)]
    assert scales(quantize(model, additive)) == scales(quantize(model, additive, mask=False))
    with pytest.raises(CalibrationError, match="batch 1: the mask 'attention_mask' holds other values than 0 and 1"):
        quantize(model, additive, mask="attention_mask")


def test_nothing_but_padding() -> None:
    batches = [{**b, "attention_mask": torch.zeros_like(b["attention_mask"])} for b in padded(1.0)]
    small = quantize(Encoder().eval(), batches, preset="int8-symmetric")
    assert small.record.sites == () and {left.reason for left in small.record.left_out} >= {"calibration gave it no values"}


@pytest.mark.parametrize(
    ("shape", "fixed", "expected"),
    [
        ((2, 3, 8), (), (2, 3)),
        ((2, 3, 4, 8), (2, 3), (2, 3)),
        ((6, 8), (1,), (6,)),
        ((2, 4, 3, 8), (1, 3), (2, 1, 3)),
        ((2, 4, 8, 3), (1, 2), (2, 1, 1, 3)),
        ((2, 4, 3, 3), (1,), (2, 1, 3)),
        ((2, 3, 3, 8), (1, 3), (2, 1, 3)),  # three heads: a fixed size, so no position
        ((2, 3, 3, 8), (), None),  # which is which?
        ((2, 3), (), None),  # a last dimension holds features
        ((6, 8), (0, 1), None),
        ((3, 2, 8), (), (3, 2)),
        ((3, 2, 4, 8), (2, 3), (3, 2)),
        ((4, 3, 8), (), None),
        ((8,), (), None),
        ((), (), None),
    ],
)
def test_layouts(shape: Sequence[int], fixed: Sequence[int], expected: Sequence[int] | None) -> None:
    symbols: list[set[str]] = [set() if axis in fixed else {ANY} for axis in range(len(shape))]
    found = fitted(torch.ones(2, 3), (ANY, ANY), shape, symbols)
    assert (found if found is None else tuple(found.shape)) == expected


@pytest.mark.parametrize(
    ("shape", "symbols", "expected"),
    [
        ((2, 3, 8), ("b", "s", ""), (2, 3)),
        ((2, 3, 8), ("b", "t", ""), None),
        ((3, 2, 8), ("s", "b", ""), (3, 2)),
        ((3, 2, 8), ("t", "b", ""), None),
        ((6, 8), ("bs", ""), (6,)),
        ((6, 8), ("bt", ""), None),
        ((2, 3, 3, 8), ("b", "t", "s", ""), (2, 1, 3)),
    ],
)
def test_layouts_by_symbols(shape: Sequence[int], symbols: Sequence[str], expected: Sequence[int] | None) -> None:
    found = fitted(torch.ones(2, 3), ("b", "s"), shape, [set(each) for each in symbols])
    assert (found if found is None else tuple(found.shape)) == expected


@pytest.mark.parametrize("target", swept([6, 7], [7]))
def test_a_decoder_has_its_own_positions(target: int) -> None:
    """As many as the encoder, or not: what is padding there counts here, unless the decoder has a mask of its own."""
    model = EncoderDecoder().eval()

    def found(source: float, of_target: float, **more: torch.Tensor) -> dict[str, float]:
        small = quantize(model, [{**sequences(target, source, of_target), **more}], preset="int8-minmax")
        return {item.site.name: item.ranges[0].scale for item in small.record.sites}

    plain, noisy = found(1.0, 1.0), found(100.0, 1.0)
    assert plain == noisy and len(plain) == 5
    y = sequences(target, 1.0, 100.0)["decoder_x"]
    assert found(1.0, 100.0)["decoder"] == pytest.approx(y.abs().max().item() / 127)
    own = (torch.arange(target) < 3).long().expand(3, target).contiguous()
    assert found(100.0, 100.0, decoder_attention_mask=own) == found(1.0, 1.0, decoder_attention_mask=own)


def test_a_batch_behind_its_positions() -> None:
    """[position, batch, features]: that there are as many of both does not make it [batch, position, features]."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.fc((x + attention_mask[..., None]).transpose(0, 1)))

    x, mask = torch.ones(4, 4, 8), torch.ones(4, 4, dtype=torch.int64)
    x[3, 0], x[0, 3], mask[0, 3] = 5.0, 9.0, 0
    (scale, _), = scales(quantize(Turned().eval(), [(x, mask)], preset="int8-minmax"))
    assert scale == pytest.approx(6 / 127)


@pytest.mark.parametrize("batch", swept((3, 7), (3,)))
def test_attention_of_torch(batch: int) -> None:
    """It computes with [position, batch, features], and with [position * batch, features]."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.last(self.layer(x, src_key_padding_mask=attention_mask == 0)))

    model, x = Layer().eval(), torch.randn(batch, 7, 8)
    mask = torch.arange(7).expand(batch, 7) < torch.arange(batch)[:, None] + 1
    found = [quantize(model, [(torch.where(mask[..., None], x, garbage), mask)], preset="int8-minmax") for garbage in (0.0, 1e4)]
    assert scales(found[0]) == scales(found[1]) and len(scales(found[0])) == 5
    assert found[0].record.notes == ()


def test_what_is_observed_whole_is_noted() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.windows, self.pooled = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x * attention_mask[..., None]
            return self.windows(x.unflatten(1, (-1, 3)).flatten(0, 1)), self.pooled(x[:, 0])

    batches = [(torch.randn(4, 9, 8), torch.ones(4, 9))]
    notes = quantize(Windows().eval(), batches, preset="int8-minmax").record.notes
    assert notes == ("padding was observed with the rest, for the layout does not tell where it is: windows",)
    assert quantize(Windows().eval(), batches, preset="int8-minmax", mask=False).record.notes == ()
