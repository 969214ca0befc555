"""`torch.compile(backend="sashiko")` on a GPU against eager. `make gpu` runs these where there is one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu import Block
from torch import nn

import sashiko
from sashiko.diagnostics.errors import InputError

pytestmark = pytest.mark.gpu
WIDTHS = (1, 3, 8, 31, 32, 33, 64, 100, 128, 255, 768, 1000, 1024, 2047, 4096, 5000, 8192, 20000)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def check(model: Callable[..., Any], *args: torch.Tensor, tolerance: float = 2e-6, **options: Any) -> None:
    """Three calls, the last ones as a CUDA graph where calls are recorded; relative to the largest number of a result."""
    expected = model(*[a.clone() for a in args])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a graph that is left to PyTorch as a whole
        compiled = torch.compile(model, backend=sashiko.backend, **options)
        made = [compiled(*[a.clone() for a in args]) for _ in range(4)]
    for got in made:
        for a, b in zip(*([each] if isinstance(each, torch.Tensor) else each for each in (got, expected)), strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            if a.dtype.is_floating_point:
                large = b.double().nan_to_num(posinf=0, neginf=0).abs().max().item() if b.numel() else 1.0
                torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance * large, equal_nan=True)
            else:
                assert torch.equal(a, b)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows(width: int) -> None:
    check(lambda x: torch.softmax(x, -1), normal(37, width))
    check(lambda x: (x.sum(-1), x.amax(-1), x.argmax(-1), x.argmin(-1), (x > 0).any(-1), x.prod(-1)), normal(19, width), tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_transposed(dtype: torch.dtype) -> None:
    for rows, columns in ((1, 9), (33, 65), (128, 256), (1000, 77)):
        check(lambda x: x.t().contiguous() + 1, (normal(rows, columns) * 8).to(dtype), tolerance=0)
    images = (normal(3, 20, 8, 12) * 8).to(dtype)
    check(lambda x: (x + 1).permute(0, 2, 3, 1).contiguous(), images, tolerance=0)
    check(lambda x: (x + 1).contiguous(), images.to(memory_format=torch.channels_last), tolerance=0)


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 1000])
def test_few_columns(rows: int) -> None:
    check(lambda x: F.layer_norm(x, (24,)) + x.mean(-1, keepdim=True), normal(rows, 24))


def test_columns() -> None:
    check(lambda x: (x.sum(0), x.amax(1), x.mean((0, 2))), normal(30, 40, 50), tolerance=1e-5)
    check(lambda x: (x.sum(), x.sum(0), x.bfloat16().amax()), normal(4096, 1024), tolerance=1e-5)


def test_not_numbers() -> None:
    x = torch.tensor([[1.0, float("nan"), 2.0, 3.0], [1.0, float("-inf"), 2.0, 2.0]] * 20, device="cuda")
    check(lambda x: (x.amax(-1), x.argmax(-1), torch.softmax(x, -1), F.gelu(x)), x)
    check(lambda x, m: torch.softmax(x.masked_fill(m, float("-inf")), -1), normal(8, 64, 64), torch.rand(8, 64, 64, device="cuda") > 0.7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float64, 1e-12)])
def test_types(dtype: torch.dtype, tolerance: float) -> None:
    check(lambda x: F.silu(x) * torch.softmax(x, -1) + F.layer_norm(x, (768,)), normal(512, 768, dtype=dtype), tolerance=tolerance)
    check(lambda x: (x.sin() + x.exp()).sum(-1), normal(64, 100, dtype=dtype), tolerance=4 * tolerance)


def test_integers() -> None:
    check(lambda x: (x * 3 + 1) // 7 + (x % 5), torch.randint(-1000, 1000, (100, 100), device="cuda"))
    check(lambda x: (x + x) >> 1, torch.randint(-100, 100, (100, 101), device="cuda", dtype=torch.int8))


def test_places() -> None:
    check(lambda x, i: torch.gather(x, 1, i) + 1, normal(20, 30), torch.randint(0, 30, (20, 7), device="cuda"))
    check(lambda w, i: F.layer_norm(F.embedding(i, w), (64,)), normal(1000, 64), torch.randint(0, 1000, (4, 50), device="cuda"))
    check(lambda x, y: F.pad(torch.cat([x, y * 2], 1), (1, 2, 3, 4)) + 1, normal(3, 5, 7, 8), normal(3, 4, 7, 8))
    check(lambda x: (x.transpose(1, 2).reshape(4, -1) * 2).reshape(4, 60, 20).transpose(1, 2) + 1, normal(4, 20, 60))
    check(lambda x: x[1:] + x.flip(0)[1:], normal(8, 63))


def test_images() -> None:
    check(lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1)), normal(2, 8, 32, 32))
    images = normal(2, 8, 16, 16)
    check(lambda x: (F.interpolate(x, scale_factor=2, mode="bilinear"), F.interpolate(x, scale_factor=2)), images, tolerance=1e-5)
    check(lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)), normal(2, 32, 16, 16), normal(32), normal(32))


def test_left_to_pytorch() -> None:
    check(lambda x: (torch.sort(x, -1)[0] + 1, x.cumsum(-1) * 2, torch.topk(x, 3)[0]), normal(8, 64))
    check(lambda x: x[x > 0] * 2, normal(8, 64))


def test_writes() -> None:
    check(lambda x: x.add_(1) * 2, normal(8, 64))
    x, y = normal(8, 64), normal(8, 64)
    expected = x + y
    torch.compile(lambda x, y: x.add_(y), backend=sashiko.backend)(x, y)
    assert torch.equal(x, expected)


def test_where_tensors_begin() -> None:
    """Vectors are read at multiples of their size; a tensor may begin anywhere."""
    check(lambda x: F.layer_norm(x[1:], (64,)) + 1, normal(8, 64))
    compiled, x = torch.compile(lambda x: torch.softmax(x, -1) + 1, backend=sashiko.backend), normal(8 * 64 + 1)
    for start in (0, 1):
        view = x[start : start + 512].view(8, 64)
        torch.testing.assert_close(compiled(view), torch.softmax(view, -1) + 1)


def test_made_there() -> None:
    check(lambda x: x + torch.arange(x.shape[1], device=x.device) + torch.full((64,), 2.0, device=x.device), normal(8, 64))


def test_sizes() -> None:
    compiled = torch.compile(lambda x: torch.softmax(x + 1, -1), backend=sashiko.backend, dynamic=True)
    for rows in (3, 17, 40):
        x = normal(rows, rows + 5)
        torch.testing.assert_close(compiled(x), torch.softmax(x + 1, -1))


def test_transformer() -> None:
    model = nn.Sequential(Block(256, 4), Block(256, 4)).cuda().eval()
    check(model, normal(2, 64, 256), tolerance=1e-5)
    check(model.bfloat16(), normal(2, 64, 256, dtype=torch.bfloat16), tolerance=2e-2)


def test_convolutions() -> None:
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.SiLU(), nn.AdaptiveAvgPool2d(1))
    check(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10)).cuda().eval(), normal(4, 3, 32, 32), tolerance=1e-4)


def test_weights_are_followed() -> None:
    """By what was recorded, too; and what is recorded gives every caller its own result."""
    model = nn.Sequential(Block(256, 4), Block(256, 4)).cuda().eval()
    compiled, x, y = torch.compile(model, backend=sashiko.backend), normal(2, 64, 256), normal(2, 64, 256)
    for _ in range(3):
        for _ in range(5):
            first, second = compiled(x), compiled(y)
            torch.testing.assert_close(first, model(x), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(second, model(y), rtol=1e-4, atol=1e-4)
        model[0].up.weight.mul_(1.5)
        model[1].norm.bias.add_(1)


def test_streams() -> None:
    model = nn.Sequential(Block(256, 4), Block(256, 4)).cuda().eval()
    compiled, x, y = torch.compile(model, backend=sashiko.backend), normal(2, 64, 256), normal(2, 64, 256)
    for _ in range(4):
        compiled(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = [compiled(y) for _ in range(10)]
    here = [compiled(x) for _ in range(10)]
    torch.cuda.synchronize()
    for results, given in ((there, y), (here, x)):
        for each in results:
            torch.testing.assert_close(each, model(given), rtol=1e-4, atol=1e-4)


def test_inside_of_another_recording() -> None:
    compiled, x = torch.compile(lambda x: torch.softmax(x, -1) + 1, backend=sashiko.backend), normal(64, 1000)
    compiled(x)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compiled(x)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        y = compiled(x)
    x.copy_(normal(64, 1000))
    graph.replay()
    torch.testing.assert_close(y, torch.softmax(x, -1) + 1)


def test_index_out_of_range() -> None:
    compiled, w = torch.compile(lambda w, i: F.embedding(i, w) * 2, backend=sashiko.backend), normal(10, 8)
    compiled(w, torch.tensor([1, 2], device="cuda"))
    compiled(w, torch.tensor([1, 20], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="in an earlier call"):
        compiled(w, torch.tensor([1, 2], device="cuda"))
    assert compiled(w, torch.tensor([1, 2], device="cuda")).shape == (2, 8)


def test_options() -> None:
    with pytest.raises(Exception, match="is for CPUs") as raised:
        torch.compile(lambda x: x + 1, backend=sashiko.backend, options={"precision": "bf16"})(normal(3))
    assert isinstance(raised.value.__cause__ or getattr(raised.value, "inner_exception", None), InputError)


def test_autocast() -> None:
    model = nn.Sequential(Block(256, 4), Block(256, 4)).cuda().eval()
    compiled, x = torch.compile(model, backend=sashiko.backend), normal(2, 64, 256)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
