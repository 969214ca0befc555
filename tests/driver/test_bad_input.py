"""What does not fit: a clear exception that says what and where, or a correct result. Never a crash, never a stale result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.cpu_codegen import cache
from sashiko.quant import QuantizedModule
from tests.driver.functions import Apply


class Classifier(nn.Module):
    """A normalized two-layer network over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.down(self.norm(torch.relu(self.up(x)))), -1)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().eval()


@pytest.fixture(scope="module")
def compiled(model: nn.Module) -> sashiko.CompiledModel:
    """Serves 1 to 8 batches of 0 to 6 rows."""
    shapes = ({0: Dim("batch", min=1, max=8), 1: Dim("rows", max=6)},)
    return sashiko.compile(model, (torch.randn(3, 5, 16),), dynamic_shapes=shapes)


WRONG_CALLS: list[tuple[str, Callable[[], tuple[Any, ...]], str]] = [
    ("no argument", lambda: (), "0 positional arguments that do not fit the 1"),
    ("two arguments", lambda: (torch.randn(3, 5, 16), torch.randn(1)), "2 positional arguments that do not fit the 1"),
    ("a list of tensors", lambda: ([torch.randn(3, 5, 16)],), "x"),
    ("a number", lambda: (1.5,), "x.*expected a tensor.*float"),
    ("an array", lambda: (torch.randn(3, 5, 16).numpy(),), "x.*expected a tensor.*ndarray"),
    ("too many batches", lambda: (torch.randn(9, 5, 16),), r"x.*dimension 0.*9(.|\n)*8"),
    ("too many rows", lambda: (torch.randn(3, 7, 16),), r"x.*dimension 1.*7(.|\n)*6"),
    ("another width", lambda: (torch.randn(3, 5, 15),), r"x.*dimension 2.*15(.|\n)*16|x.*dimension 2.*16(.|\n)*15"),
    ("another rank", lambda: (torch.randn(3, 16),), "x.*2.*3"),
    ("double", lambda: (torch.randn(3, 5, 16).double(),), "x.*float32.*float64"),
    ("integers", lambda: (torch.ones(3, 5, 16, dtype=torch.long),), "x.*float32.*int64"),
    ("another device", lambda: (torch.randn(3, 5, 16, device="meta"),), "x.*CPU.*meta"),
    ("sparse", lambda: (torch.randn(3, 5, 16).to_sparse(),), "x.*dense.*sparse"),
    ("nested, strided", lambda: (torch.nested.nested_tensor([torch.randn(5, 16)] * 3, layout=torch.strided),), "x.*dense.*nested"),
    ("nested, jagged", lambda: (torch.nested.nested_tensor([torch.randn(5, 16)] * 3, layout=torch.jagged),), "x.*dense.*nested"),
]


@pytest.mark.parametrize(("make", "says"), [c[1:] for c in WRONG_CALLS], ids=[c[0] for c in WRONG_CALLS])
def test_wrong_arguments(compiled: sashiko.CompiledModel, make: Callable[[], tuple[Any, ...]], says: str) -> None:
    with pytest.raises(sashiko.InputError, match=says) as caught:
        compiled(*make())
    assert isinstance(caught.value, (TypeError, ValueError))


def test_after_wrong_arguments_right_ones_work(model: nn.Module, compiled: sashiko.CompiledModel) -> None:
    x = torch.randn(3, 5, 16)
    with pytest.raises(sashiko.InputError):
        compiled(x.double())
    with torch.no_grad():
        assert_close(compiled(x), model(x))


def test_steps_that_are_run_no_times(compiled: sashiko.CompiledModel) -> None:
    x = torch.randn(3, 5, 16)
    for name in ("repeat", "again"):
        settings: dict[str, Any] = {name: 1}
        assert compiled.times(x, **settings)
        with pytest.raises(sashiko.InputError, match=f"{name} is 0"):
            compiled.times(x, **{name: 0})


FREED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x[:4],
    "from some offset on": lambda x: x[2:6],
    "transposed": lambda x: x[:4].t().contiguous().t(),
    "a parameter": lambda x: nn.Parameter(x[:4]),
}


@pytest.mark.parametrize("name", FREED)
@pytest.mark.parametrize("step", [lambda x, y: x + y, lambda x, y: torch.linalg.inv(y) @ x], ids=["native", "left to PyTorch"])
def test_a_tensor_whose_memory_was_freed(step: Callable[..., torch.Tensor], name: str) -> None:
    fast = sashiko.compile(Apply(step).eval(), (torch.randn(4, 4), torch.eye(4)))
    freed = FREED[name](torch.randn(8, 4))
    memory = freed.untyped_storage()
    memory.resize_(0)
    for n, arguments in enumerate(((freed, torch.eye(4)), (torch.eye(4), freed))):
        with pytest.raises(sashiko.InputError, match=rf"argument {n} \('.*'\): its data is not allocated"):
            fast(*arguments)
    memory.resize_(4 * 4 * 8)
    freed.detach().copy_(torch.eye(4))
    assert_close(fast(freed, torch.eye(4)), step(freed, torch.eye(4)))


UNUSUAL: list[tuple[str, Callable[[], torch.Tensor]]] = [
    ("transposed", lambda: torch.randn(16, 5, 3).permute(2, 1, 0)),
    ("every second row", lambda: torch.randn(3, 10, 16)[:, ::2]),
    ("part of rows", lambda: torch.randn(3, 5, 32)[..., 7:23]),
    ("expanded", lambda: torch.randn(1, 1, 16).expand(4, 6, 16)),
    ("not aligned", lambda: torch.randn(1 + 3 * 5 * 16)[1:].view(3, 5, 16)),
    ("a conjugate view", lambda: torch.randn(3, 5, 16, dtype=torch.complex64).conj().imag),
    ("no rows", lambda: torch.randn(3, 0, 16)),
    ("one row", lambda: torch.randn(1, 1, 16)),
    ("NaN", lambda: torch.full((2, 3, 16), float("nan"))),
    ("infinity", lambda: torch.full((2, 3, 16), float("-inf"))),
    ("denormals", lambda: torch.randn(2, 3, 16) * 1e-41),
]


@pytest.mark.parametrize("make", [c[1] for c in UNUSUAL], ids=[c[0] for c in UNUSUAL])
def test_unusual_tensors(model: nn.Module, compiled: sashiko.CompiledModel, make: Callable[[], torch.Tensor]) -> None:
    x = make()
    with torch.no_grad():
        assert_close(compiled(x), model(x), equal_nan=True)


class OverNothing(nn.Module):
    """Reductions, products and index arithmetic over a dimension that may be empty, some with results that are not empty."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = torch.cat([x.t().reshape(-1), torch.ones(5)])
        return x.sum(0), x.sum(), x.mean(0), x @ x.t(), x.t() @ x, torch.cat([x, x + 1]), x.softmax(-1), x.softmax(0), turned, x.amax(1)


def test_a_dimension_without_elements() -> None:
    model = OverNothing().eval()
    compiled = sashiko.compile(model, (torch.randn(4, 3),), dynamic_shapes=({0: Dim("rows", max=6)},))
    for rows in (0, 1, 6):
        x = torch.randn(rows, 3)
        assert_close(compiled(x), model(x), equal_nan=True)
    empty = torch.randn(0, 3)
    assert_close(sashiko.compile(model, (empty,))(empty), model(empty), equal_nan=True)


def _twice_or_once(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] % 2 == 0 else x


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (_twice_or_once, (2, 6), (1, 3, 5)),
        (lambda x: x * 2 if x.shape[0] ** 2 > 9 else x, (5, 40), (1, 2, 3)),
        (lambda x: x.chunk(2, 0)[-1] + 1, (5, 7), (1,)),
        (lambda x: x.reshape(-1, 2, x.shape[1]) + 1, (6, 8), (1, 3, 5)),
        (lambda x: x.unflatten(0, (2, -1)) + 1, (6, 8), (1, 3, 5)),
        (lambda x: x.softmax(0) @ x.T, (1, 2, 9), ()),
    ],
)
def test_sizes_that_another_program_is_captured_for(
    tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor], right: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    fast = sashiko.compile(Apply(function).eval(), (torch.randn(4, 3),), dynamic_shapes=(({0: Dim.AUTO},),))
    fast.save(tmp_path / "model")
    loaded = sashiko.load(tmp_path / "model")
    for size in right:
        x = torch.randn(size, 3)
        assert_close(fast(x), function(x))
        assert_close(loaded(x), function(x))
    for size in wrong:
        for model in (fast, loaded):
            with pytest.raises(sashiko.InputError, match=f"captured where .* = {size}|size {size}, expected a multiple of 2 from 2"):
                model(torch.randn(size, 3))


class _Deciding(nn.Module):
    """Even numbers of rows from 4 to 20, or another result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x)
        return _twice_or_once(y) if 3 < x.shape[0] <= 20 else y - 1


def test_sizes_that_another_program_is_quantized_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Deciding().eval()
    small = sashiko.quantize(model, [torch.randn(4, 8), torch.randn(10, 8)])
    small.save(tmp_path / "small")
    loaded = sashiko.load(tmp_path / "small")
    fast = sashiko.compile(small, (torch.randn(6, 8),), dynamic_shapes=({0: Dim.AUTO},))
    x = torch.randn(20, 8)
    for quantized in (small, loaded, fast):
        assert_close(quantized(x), model(x), rtol=0.05, atol=0.05)
        for rows in (2, 5, 22):
            with pytest.raises(sashiko.InputError):
                quantized(torch.randn(rows, 8))
    with pytest.raises(sashiko.InputError):
        sashiko.compile(small, (torch.randn(5, 8),))


def test_an_index_out_of_range() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8)).eval()
    compiled = sashiko.compile(model, (torch.zeros(2, 3, dtype=torch.long),))
    good = torch.tensor([[0, 9, 3], [1, 2, 4]])
    for bad in (10, -1, 2**40, -(2**63)):
        ids = good.clone()
        ids[1, 2] = bad
        with pytest.raises(IndexError, match=r"index is out of range in .*take"):
            compiled(ids)
        with torch.no_grad():
            assert_close(compiled(good), model(good))


class Summed(nn.Module):
    """The rows of a table along the axis that is summed, the columns by indices of their own for each row."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x.gather(2, ids).sum(1)


def test_an_index_out_of_range_under_a_sum_of_rows() -> None:
    model, x, good = Summed().eval(), torch.randn(2, 9, 16), torch.randint(0, 16, (2, 9, 5))
    compiled = sashiko.compile(model, (x, good), strict=True)
    for place in ((0, 0, 0), (1, 8, 4)):
        ids = good.clone()
        ids[place] = 16
        with pytest.raises(IndexError, match=r"index is out of range in .*gather"):
            compiled(x, ids)
        assert_close(compiled(x, good), model(x, good))


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own."""
    monkeypatch.setenv("SASHIKO_CACHE", str(tmp_path))
    yield cache.folder()


DAMAGES: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("empty", lambda data: b""),
    ("cut", lambda data: data[: len(data) // 2]),
    ("one bit", lambda data: data[: (at := len(data) // 2)] + bytes([data[at] ^ 4]) + data[at + 1 :]),
    ("something else", lambda data: os.urandom(len(data))),
]


def test_a_damaged_cache_file_is_made_again(objects: Path, model: nn.Module) -> None:
    x = torch.randn(3, 16)
    with torch.no_grad():
        expected = model(x)
    sashiko.compile(model, (x,))
    good = {path: path.read_bytes() for path in objects.iterdir()}
    assert good, "compiling fills the cache"
    for name, damage in DAMAGES:
        for path, data in good.items():
            path.write_bytes(damage(data))
        assert_close(sashiko.compile(model, (x,))(x), expected, msg=name)
        assert {path: path.read_bytes() for path in objects.iterdir()} == good, name


def test_a_cache_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 16)
    for n, compiled in enumerate((lambda: sashiko.compile(model, (x,)), lambda: torch.compile(model, backend="sashiko"))):
        (tmp_path / str(n)).write_text("")
        monkeypatch.setenv("SASHIKO_CACHE", str(tmp_path / str(n)))
        with torch.no_grad(), pytest.warns(UserWarning, match="SASHIKO_CACHE"):
            assert_close(compiled()(x), model(x))


def test_files_that_cannot_be_written(tmp_path: Path, model: nn.Module, compiled: sashiko.CompiledModel) -> None:
    (tmp_path / "file").write_text("")
    small = sashiko.quantize(model, [torch.randn(3, 16)], progress=False)
    assert isinstance(small, QuantizedModule)
    wrong = {
        tmp_path / "absent" / "name": f"no folder {tmp_path / 'absent'}",
        tmp_path / "file" / "name": f"no folder {tmp_path / 'file'}",
        tmp_path: f"{tmp_path} is a folder",
        "": "is a folder",
        "/proc/name": "/proc/name cannot be written: No such file",
    }
    for write in (compiled.save, small.save, small.report):
        for path, message in wrong.items():
            with pytest.raises(sashiko.InputError, match=message):
                write(path)
        for strange in (os.fsencode(tmp_path / "name"), f"{tmp_path}/a\0b", 3):
            with pytest.raises(sashiko.InputError, match="is no path of a file"):
                write(strange)  # type: ignore[arg-type]
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_damaged_artifact(tmp_path: Path, compiled: sashiko.CompiledModel) -> None:
    path = tmp_path / "model.sashiko"
    compiled.save(path)
    good = path.read_bytes()
    for _, damage in DAMAGES:
        path.write_bytes(damage(good))
        with pytest.raises(sashiko.ArtifactError, match=r"model\.sashiko(.|\n)*save the model again|no saved sashiko model"):
            sashiko.load(path)
    with pytest.raises(FileNotFoundError, match="absent"):
        sashiko.load(tmp_path / "absent")
    with pytest.raises(sashiko.ArtifactError):
        sashiko.load(__file__)


def broken() -> Iterator[torch.Tensor]:
    yield torch.randn(3, 16)
    raise OSError("the disk is gone")


BAD_DATA: list[tuple[str, Callable[[], Any], str]] = [
    ("empty list", list, "empty"),
    ("used generator", lambda: iter(()), "empty"),
    ("a tensor", lambda: torch.randn(3, 16), "Tensor, not an iterable of batches"),
    ("None", lambda: None, "NoneType, not an iterable of batches"),
    ("NaN", lambda: [torch.randn(3, 16), torch.full((3, 16), float("nan"))], "batch 2: argument 'x' holds NaN"),
    ("infinity", lambda: [torch.full((3, 16), float("inf"))], "batch 1: argument 'x' holds infinity"),
    ("with labels", lambda: [(torch.randn(3, 16), 1)], r"batch 1 does not fit forward.*\n(.|\n)*leave out labels"),
    ("wrong name", lambda: [{"y": torch.randn(3, 16)}], "batch 1 does not fit forward"),
    ("wrong width", lambda: [torch.randn(3, 16), torch.randn(3, 15)], "batch 2 does not fit the program"),
    ("wrong width from the start", lambda: [torch.randn(3, 15)], "the model failed on batch 1"),
    ("wrong dtype", lambda: [torch.randn(3, 16), torch.ones(3, 16, dtype=torch.long)], "batch 2 .*int64"),
    ("no tensor", lambda: [("text",)], "batch 1 holds no tensor"),
    ("another device", lambda: [torch.randn(3, 16, device="meta")], r"batch 1 holds a tensor on meta"),
    ("nested", lambda: [torch.nested.nested_tensor([torch.randn(3, 16)], layout=torch.jagged)], "batch 1 holds a nested tensor"),
    ("a failing iterator", broken, "raised OSError while producing batch 2: the disk is gone"),
]


@pytest.mark.parametrize(("make", "says"), [c[1:] for c in BAD_DATA], ids=[c[0] for c in BAD_DATA])
def test_calibration_data(model: nn.Module, make: Callable[[], Any], says: str) -> None:
    with pytest.raises(sashiko.CalibrationError, match=says):
        sashiko.quantize_and_compile(model, make())
