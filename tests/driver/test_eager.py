"""Graphs that PyTorch runs as Dynamo made them: windows that are written to, nested tensors, meta tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing import assert_close

import sashiko


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def left(what: str) -> AbstractContextManager[Any]:
    return pytest.warns(UserWarning, match=f"leaves a graph to PyTorch as a whole: .*{what}")


def of_an_argument(x: Tensor) -> Tensor:
    x.unfold(-1, 1, 2).add_(1)
    return x + 0


def of_a_part(x: Tensor) -> Tensor:
    y = x * 2
    y.unfold(1, 2, 3)[:, 0] = 5
    return y


def by_name(x: Tensor) -> Tensor:
    y = x.clone()
    nn.functional.relu(torch.ops.aten.unfold(y, 1, 2, 3), inplace=True)
    return y


def expanded(x: Tensor) -> Tensor:
    x.expand(2, -1, -1).fill_(7)
    return x + 0


def a_part_of_what_is_expanded(x: Tensor) -> Tensor:
    y = x[:, None].clone()
    part = torch.broadcast_to(y, (3, 2, 8))[:, 1]
    nn.functional.elu(part, 0.5, True)  # inplace
    part += 1
    return y


WINDOWS = [of_an_argument, of_a_part, by_name, expanded, a_part_of_what_is_expanded]


@pytest.mark.parametrize("function", WINDOWS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_to_windows(function: Callable[..., Any], mode: Callable[[], AbstractContextManager[None]]) -> None:
    with mode():
        x = torch.randn(3, 8)
        y = x.clone()
        with left("through windows"):
            assert_close(torch.compile(function, backend="sashiko")(x), function(y), rtol=0, atol=0)
        assert_close(x, y, rtol=0, atol=0)


def test_writes_to_windows_that_need_gradients() -> None:
    weight = nn.Parameter(torch.randn(8))

    def scaled(x: Tensor) -> Tensor:
        y = x * weight
        y.unfold(1, 2, 3).mul_(3)
        return y

    x = torch.randn(3, 8)
    (expected,) = torch.autograd.grad(scaled(x).sum(), weight)
    with left("gradients may be asked for"):
        (got,) = torch.autograd.grad(torch.compile(scaled, backend="sashiko")(x).sum(), weight)
    assert_close(got, expected)


def test_windows_that_are_read_are_compiled() -> None:
    """Also beside sums of frames, where what they saw is overwritten by its own name, and where what is expanded is only read."""
    window = torch.hann_window(16)

    def frames(x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(x.unfold(-1, 16, 4) * window).transpose(-1, -2)
        return torch.istft(spectrum, 16, 4, window=window), x

    def overwritten(x: Tensor) -> tuple[Tensor, Tensor]:
        seen = x.unfold(-1, 16, 4)
        x.add_(1)
        return seen * 2, x

    def masked(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (x > 0).expand(3, -1, -1)
        kept = mask & (x < 1)
        kept[:, 0] = False
        return kept, torch.zeros(mask.shape).fill_(1)

    for function in (frames, overwritten, masked):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("error", "sashiko")
            x = torch.randn(2, 64)
            assert_close(torch.compile(function, backend="sashiko")(x.clone()), function(x.clone()))


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(layer(x)) * 2


def test_nested_tensors() -> None:
    layer = nn.Linear(4, 4).eval()
    compiled = torch.compile(nested, backend="sashiko")
    for n in (3, 4, 5):
        x = torch.nested.nested_tensor([torch.randn(n, 4), torch.randn(5, 4)], layout=torch.jagged)
        with torch.no_grad(), left("a nested tensor") if n == 3 else warnings.catch_warnings():
            got = compiled(layer, x)
        assert_close(got.values(), nested(layer, x).values().detach())


def test_meta_tensors() -> None:
    def mixed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, torch.empty(3, device="meta") * 2

    with left("on meta"):
        got = torch.compile(lambda x: x * 2 + 1, backend="sashiko")(torch.randn(3, device="meta"))
    assert got.is_meta and got.shape == (3,)
    x = torch.randn(2, 3)
    with left("on meta"):
        one, other = torch.compile(mixed, backend="sashiko")(x)
    assert_close(one, x + 1)
    assert other.is_meta and other.shape == (3,)


def test_strict_raises() -> None:
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    for function, argument in ((of_an_argument, torch.randn(3, 8)), (lambda x: x * 2, x), (lambda x: x * 2, torch.randn(3, device="meta"))):
        with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="Unsupported"):
            torch.compile(function, backend="sashiko", options={"strict": True})(argument)


def test_a_model_compiled_by_itself_refuses_meta_tensors() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, torch.empty(3, device="meta") * 2

    with pytest.raises(sashiko.Unsupported, match="on meta"):
        sashiko.compile(Mixed().eval(), torch.randn(2, 3))


@torch.no_grad()
@pytest.mark.parametrize("backend", [sashiko.backend, lambda module, inputs: module.forward], ids=["sashiko", "another"])
def test_a_mask_that_may_be_causal_ends_no_graph(backend: Callable[..., Any]) -> None:
    decoder, graphs = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1).eval(), list[Any]()

    def counting(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return backend(module, inputs)

    compiled, x = torch.compile(decoder, backend=counting, dynamic=False), torch.randn(5, 2, 8)
    for mask in (nn.Transformer.generate_square_subsequent_mask(5), torch.randn(5, 5)):
        assert_close(compiled(x, x, tgt_mask=mask), decoder(x, x, tgt_mask=mask))
    assert len(graphs) == 1
