"""Code found by the kernels' specifications: the same code, nothing emitted, and nothing found where anything differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.cpu_codegen import cache
from sashiko.cpu_codegen.builder import Module
from sashiko.diagnostics.errors import InvalidGraph
from sashiko.driver import recall
from sashiko.graph.dims import symbol
from sashiko.graph.types import f32
from sashiko.kernels.spec import GemmSpec, dense
from sashiko.platforms.catalogue import X86_64_V3, X86_64_V4
from sashiko.stitch.loops import Body, LoopKernel, Node, Store
from tests.test_layout import imports, place, sources

pytestmark = pytest.mark.usefixtures("private_cache")


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one text with every module of kernels that is written out."""
    seen: list[str] = []
    real = Module.text

    def noted(module: Module) -> str:
        text = real(module)
        if "run_plan" not in module.functions:
            seen.append(text)
        return text

    monkeypatch.setattr(Module, "text", noted)
    return seen


class Block(nn.Module):
    """Attention, products, normalization, a softmax over rows: every kind of kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return torch.softmax(self.norm(x + nn.functional.gelu(self.out(mixed))), -1)


def block() -> tuple[nn.Module, torch.Tensor, Callable[[], sashiko.CompiledModel]]:
    model, x = Block().eval(), torch.randn(2, 5, 32)
    free = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=64)},)
    return model, x, lambda: sashiko.compile(model, (x,), dynamic_shapes=free)


def notes() -> list[Path]:
    return sorted(cache.folder().glob("*.json"))


def test_the_second_time_no_text_is_written(emitted: list[str]) -> None:
    model, x, compiled = block()
    first = compiled()
    assert len(emitted) == 1
    second = compiled()
    assert len(emitted) == 1 and len(notes()) == 1
    assert second.executable.plan.segments == first.executable.plan.segments  # slots, domains and scratch memory are the same
    assert second.executable.code.kernels == first.executable.code.kernels
    assert first.built is not None and second.built is not None and second.built.notes == first.built.notes
    other = torch.randn(3, 7, 32)
    assert torch.equal(second(other), first(other))
    torch.testing.assert_close(second(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_other_precisions(precision: str, emitted: list[str]) -> None:
    model, x = Block().eval(), torch.randn(2, 5, 32)
    if precision == "int8":
        model, precision = sashiko.quantize(model, [(x,)] * 2), "fp32"
    first, second = (sashiko.compile(model, (x,), precision=precision) for _ in range(2))
    assert len(emitted) == 1
    assert second.executable.plan.segments == first.executable.plan.segments
    assert torch.equal(second(x), first(x))


@torch.no_grad()
def test_layers_share_code(emitted: list[str]) -> None:
    """Those of one shape, quantized by what each row holds, too."""

    def written(layers: int) -> int:
        parts = [part for _ in range(layers) for part in (nn.Linear(32, 32), nn.LayerNorm(32))]
        model, x = nn.Sequential(*parts).eval(), torch.randn(4, 32)
        sashiko.compile(sashiko.quantize(model, [x], preset="int8"), (x,))
        return emitted[-1].count("\ndefine")

    few, many = written(3), written(6)
    assert few == many, (few, many)


def test_what_is_damaged_or_gone_is_made_again(emitted: list[str]) -> None:
    _, x, compiled = block()
    expected = compiled()(x)
    (note,) = notes()
    note.write_bytes(note.read_bytes()[:-9])
    assert torch.equal(compiled()(x), expected) and len(emitted) == 2
    for path in cache.folder().glob("*.o"):
        path.unlink()
    assert torch.equal(compiled()(x), expected) and len(emitted) == 3
    assert torch.equal(compiled()(x), expected) and len(emitted) == 3


@pytest.mark.parametrize("content", [b"{}", b"no JSON", b"null", b'{"object": "", "codes": []}'])
def test_what_says_nothing_of_use_is_made_again(content: bytes, emitted: list[str]) -> None:
    model, x = nn.Softmax(-1).eval(), torch.randn(2, 5)
    sashiko.compile(model, (x,))
    (note,) = notes()
    cache.write(note, note.stem, content)
    for _ in range(2):
        torch.testing.assert_close(sashiko.compile(model, (x,))(x), model(x))
    assert len(emitted) == 2


def test_the_sources_that_name_a_note_are_all_that_it_follows_from() -> None:
    """Of the package: what says how something is told, kept or asked for changes no code."""
    named, folders = {*recall.GENERATORS, "diagnostics"}, {*recall.GENERATORS} - {"driver"}
    ours = [path for path in sources() if place(path).split("/")[0] in folders or place(path) == "driver/recall.py"]
    used = {item.module.split(".")[1] for path in ours for item in imports(path) if item.module.startswith("sashiko.")}
    assert used <= {*named, "__version__"}


def test_dumps_show_the_text(emitted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, compiled = block()
    compiled()
    monkeypatch.setenv("SASHIKO_DUMP", str(tmp_path / "dump"))
    compiled()
    assert len(emitted) == 2
    assert "define" in (tmp_path / "dump" / "Block" / "90_llvm.txt").read_text()
    assert "\tret" in (tmp_path / "dump" / "Block" / "91_assembly.txt").read_text()


def test_the_ladder_shows_what_its_page_says(
    emitted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, compiled = block()
    choices, code = ("graph Block\n", "segment 0: native, "), ("kernel loop0_", "define void @", "\tret")
    for level, shown in ((1, ()), (2, ()), (3, choices), (4, (*choices, *code))):
        monkeypatch.setenv("SASHIKO_DEBUG", str(level))
        compiled()
        text = capsys.readouterr().err
        assert [part for part in (*choices, *code) if part in text] == list(shown), level
    assert len(emitted) == 2, "what was compiled before is compiled again only to show it"


def loop(value: float, high: int = 9) -> LoopKernel:
    columns = symbol("n", 1, high)
    nodes = (Node("load", f32, index=symbol("c", 0, None, columns), buffer=0), Node("const", f32, value=value), Node("mul", f32, (0, 1)))
    return LoopKernel("", Body(nodes, (Store(1, nodes[0].index, 2),), (f32, f32)), None, columns)


def test_names_differ_in_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Body((), (), ())
    product = GemmSpec(f32, f32, 4, 16, 8, dense(4, 8), empty)
    wanted = [
        {loop(2.0): "a"}, {loop(2.0): "b"}, {loop(0.0): "a"}, {loop(-0.0): "a"}, {loop(2.0, 10): "a"}, {loop(2.0): "a", loop(3.0): "b"},
        {loop(3.0): "b", loop(2.0): "a"}, {product: "fma"}, {product: "mkl"}, {replace(product, m=5): "fma"},
    ]
    names = {recall.name_of(kernels, X86_64_V3) for kernels in wanted}
    assert recall.name_of({loop(2.0): "a"}, X86_64_V3) in names
    names |= {recall.name_of(wanted[0], target) for target in (X86_64_V4, replace(X86_64_V3, l2=X86_64_V3.l2 + 1))}
    monkeypatch.setattr(recall, "SOURCES", "other generators")
    names.add(recall.name_of(wanted[0], X86_64_V3))
    assert len(names) == len(wanted) + 3


def test_a_specification_is_spelled_or_refused() -> None:
    with pytest.raises(InvalidGraph, match="specification holds"):
        recall.name_of({replace(loop(2.0), params=(object(),)): "a"}, X86_64_V3)  # type: ignore[arg-type]
