"""Whole models for machines that this one need not be: plans of every target of the catalogue, and results on tile registers.

Where the host has no AMX but everything else of such a machine, its tile instructions are emulated and the rest runs as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partialmethod
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sashiko
from sashiko.diagnostics.errors import ArtifactError, InputError
from sashiko.kernels.amx import TileInstructions
from sashiko.platforms import host as detection
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX, X86_64_V3, X86_64_VNNI
from sashiko.platforms.target import Target
from tests.kernels.tile_emulation import EmulatedTiles
from tests.sweeps import swept

WORDS, WIDTH, HEADS = 100, 64, 2
AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})


class Block(nn.Module):
    """A transformer layer: attention under a mask, and a feed-forward network."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        x = self.first(x + self.out(mixed.transpose(1, 2).flatten(-2)))
        result: torch.Tensor = self.second(x + self.narrow(F.gelu(self.wide(x))))
        return result


class Encoder(nn.Module):
    """Layers over embedded tokens, some of which are padding."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(layers))

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, padding[:, None, None, :])
        return x


class Decoder(nn.Module):
    """Two causal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, None)
        return x


class Convolutions(nn.Module):
    """A strided convolution, one with a window, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 4, stride=4), nn.Conv2d(16, 48, 3, padding=1), nn.Linear(48, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.body(F.relu(self.stem(images)))).mean((2, 3)))


def inputs(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """3 sequences of 37, an odd length, the second one half padding; or 2 images."""
    if isinstance(model, Convolutions):
        return (torch.randn(2, 3, 32, 32),)
    ids, padding = torch.randint(0, WORDS, (3, 37)), torch.ones(3, 37, dtype=torch.bool)
    padding[1, 18:] = False
    return (ids, padding) if isinstance(model, Encoder) else (ids,)


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """This machine with AMX, its own or emulated."""
    machine = detection.host()
    if not machine.features >= AMX:
        if not machine.has("avx512_vnni", "avx512bw"):
            pytest.skip("this machine lacks avx512_vnni, which code for AMX uses beside the tiles")
        machine = replace(machine, features=machine.features | AMX)
        report = detection.HostReport(machine, ())
        monkeypatch.setattr(detection, "host_report", lambda: report)
        for operation in ("configure", "release", "zero", "load", "dot", "store"):
            monkeypatch.setattr(TileInstructions, operation, partialmethod(emulated, operation))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # they would share the emulated registers
        yield machine
        torch.set_num_threads(threads)
    else:
        yield machine


def emulated(instructions: TileInstructions, operation: str, *args: Any) -> None:
    """The same on emulated registers, which have the shape of `instructions`."""
    getattr(tiles().shaped(instructions.rows, instructions.width), operation)(*args)


@cache
def tiles() -> EmulatedTiles:
    """One for the process: code that is found in its cache has their address."""
    return EmulatedTiles()


@cache
def prepared(precision: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A layer, quantized where `precision` is a preset, and its inputs."""
    model = Encoder(layers=1).eval()
    example = inputs(model)
    return (model if precision == "bf16" else sashiko.quantize(model, [example], preset=precision)), example


@pytest.mark.parametrize("precision", swept(("bf16", "int8", "int8-static"), ("bf16", "int8")))
@pytest.mark.parametrize("target", CATALOGUE, ids=lambda target: target.name)
def test_every_target_has_a_plan(target: Target, precision: str) -> None:
    """A wrong plan is refused by the compiler itself (`runtime/verify.py`)."""
    model, example = prepared(precision)
    compiled = sashiko.compile(model, example, precision="bf16" if precision == "bf16" else "auto", target=target)
    assert "0 left to PyTorch" in sashiko.explain(compiled)


@pytest.mark.parametrize("target", [NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX], ids=lambda target: target.name)
def test_code_for_another_machine_is_saved_and_never_run(target: Target, tmp_path: Path) -> None:
    if not target.why_not_on(detection.host()):
        pytest.skip(f"this machine runs code for {target.name}")
    model, x = nn.Sequential(nn.Linear(WIDTH, 3), nn.GELU()).eval(), torch.randn(2, WIDTH)
    compiled = sashiko.compile(model, (x,), target=target)
    with pytest.raises(InputError, match=f"compiled for {target.name}: .*this machine"):
        compiled(x)
    file = tmp_path / "model.sashiko"
    compiled.save(file)
    assert file.stat().st_size > 1000
    with pytest.raises(ArtifactError, match="for another machine"):
        sashiko.load(file)


@pytest.mark.parametrize("bound", [{"preset": "auto"}, {"target_error": 0.1}], ids=str)
def test_a_search_for_a_machine_that_cannot_be_measured_is_refused_at_once(bound: dict[str, Any]) -> None:
    target = next(target for target in CATALOGUE if target.why_not_on(detection.host()))
    batches = (pytest.fail("a batch was asked for") for _ in range(1))
    with pytest.raises(InputError, match=r"a search measures on this machine(.|\n)*quantize\(target=") as caught:
        sashiko.quantize_and_compile(nn.Linear(8, 8).eval(), batches, target=target, **bound)
    assert target.why_not_on(detection.host()) in caught.value.what


@pytest.mark.parametrize("kind", [Encoder, Decoder, Convolutions])
@torch.no_grad()
def test_a_model_in_bf16_on_tiles(amx: Target, kind: type[nn.Module]) -> None:
    model = kind().eval()
    example = inputs(model)
    compiled = sashiko.compile(model, example, precision="bf16", target=amx)
    explanation = sashiko.explain(compiled)
    assert "_amxbf16" in explanation
    assert kind is Convolutions or "attention_bf16_bf16_amxbf16" in explanation
    expected = model(*example)
    difference = (compiled(*example) - expected).norm() / expected.norm()
    assert difference < 4 * 2**-8  # some ten roundings to bf16 in a row, which do not add up


@pytest.mark.parametrize(
    ("kind", "preset"), swept(list(product((Encoder, Decoder), ("int8", "int8-static"))), [(Decoder, "int8")])
)
@torch.no_grad()
def test_a_quantized_model_on_tiles(amx: Target, kind: type[nn.Module], preset: str) -> None:
    model = kind().eval()
    example = inputs(model)
    small = sashiko.quantize(model, [example], preset=preset)
    compiled = sashiko.compile(small, example, precision="auto", target=amx)
    explanation = sashiko.explain(compiled)
    assert "_amxint8" in explanation and "attention_bf16_bf16_amxbf16" in explanation
    simulated, expected = small(*example), model(*example)
    # Beside what int8 costs anyway, attention in bf16.
    most = (simulated - expected).norm() + 4 * 2**-8 * expected.norm()
    assert (compiled(*example) - expected).norm() < most


@pytest.mark.parametrize(
    ("target", "isa", "quantized"),
    swept(
        [(target, isa, quantized) for target, isa in ((X86_64_V3, "avx2madd"), (X86_64_VNNI, "avx512vnni")) for quantized in (False, True)],
        [(X86_64_V3, "avx2madd", False), (X86_64_VNNI, "avx512vnni", True)],
    ),
    ids=lambda p: getattr(p, "name", p),
)
@torch.no_grad()
def test_auto_takes_bf16_where_integers_stand_for_it(target: Target, isa: str, quantized: bool) -> None:
    if target.why_not_on(detection.host()):
        pytest.skip(f"this machine runs no code for {target.name}")
    model = Encoder().eval()
    example = inputs(model)
    chosen = sashiko.quantize(model, [example], target=target) if quantized else model
    exact, compiled = (sashiko.compile(chosen, example, precision=precision, target=target) for precision in ("fp32", "auto"))
    explanation = sashiko.explain(compiled)
    assert f"attention_bf16_bf16_{isa}" in explanation and "attention_f32" not in explanation
    assert "attention_f32" in sashiko.explain(exact)
    assert bool(re.search(f"gemm_f32_bf16_bf16_.*_{isa}", explanation)) != quantized
    expected = exact(*example)
    difference = (compiled(*example) - expected).norm() / expected.norm()
    # Two layers, of which each rounds queries, keys, values and results, and what its products read.
    assert 0 < difference < 4 * 2**-8
