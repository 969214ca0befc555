"""Saved quantized modules: the same after loading anywhere, an error for every file that is not right, and nothing in a file runs."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import sashiko
from sashiko.diagnostics.errors import ArtifactError, InputError, Unsupported
from sashiko.graph import container
from sashiko.quant import BF16, FP32, ActivationScheme, OpScheme, Override, QuantizedModule, Scheme, quantize, report
from sashiko.quant.encode import _FUNCTIONS, decode, encode
from sashiko.quant.module import gate_of
from sashiko.quant.save import FORMAT, VERSION
from tests.quant.models import Attention, bert, mlp, tokens


class Branching(nn.Module):
    """Nested graphs, arithmetic on sizes, a dict of a tuple as result; x: [B, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor, factor: float = 1.5) -> dict[str, Any]:
        with torch.no_grad():
            y = self.first(x) * factor
        y = torch.cond(y.sum() > 0, lambda y: y + self.scale, lambda y: y - 1, (y,))
        return {"a": self.second(y)[:, x.shape[0] // 2 :], "b": (y, x.shape[0] + 1)}


class Computed(nn.Module):
    """A linear whose weight is integers, cast in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("integers", torch.randint(-9, 10, (4, 8), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.integers.float())  # type: ignore[operator]


def convolutions() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 4))
    return model.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload, no-any-return]


def channels() -> nn.Sequential:
    """Weights whose strides along their one input channel are all that says which memory format they have."""
    first, second = nn.Conv2d(1, 9, 3), nn.Conv2d(9, 9, 3, groups=9)
    layers = (first.to(memory_format=torch.channels_last), nn.ReLU(), second, nn.Flatten(), nn.Linear(9 * 16, 4))  # type: ignore[call-overload]
    return nn.Sequential(*layers).eval()


EVERYTHING = Scheme(OpScheme(ActivationScheme("minmax")), operations=("linear", "convolution", "matmul", "attention", "embedding"))
SECOND = Scheme(overrides=(Override("0", FP32),), operations=("linear", "convolution"))
MIXED = Scheme(overrides=(Override(re.compile("^0"), BF16), Override(nn.Linear, OpScheme(None)), Override("2", OpScheme())))
CASES: dict[str, Callable[[], tuple[nn.Module, Any, str | Scheme]]] = {
    **{name: lambda name=name: (mlp(), torch.randn(5, 8), name) for name in ("int8", "int8-dynamic", "int4-weight")},  # type: ignore[misc]
    "mixed": lambda: (mlp(), torch.randn(5, 8), MIXED),
    "attention": lambda: (Attention().eval(), (torch.randn(2, 5, 16), torch.ones(2, 5)), EVERYTHING),
    "convolutions": lambda: (convolutions(), torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), EVERYTHING),
    "channels": lambda: (channels(), torch.randn(4, 1, 8, 8), SECOND),
    "computed": lambda: (nn.Sequential(Computed()).eval(), torch.randn(5, 8), "int8"),
    "branching": lambda: (Branching().eval(), torch.randn(4, 8), "int8"),
    "bf16": lambda: (mlp().to(torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16), "int8"),
    "bert": lambda: (bert(), tokens(3, 7), EVERYTHING),
}


def call(model: nn.Module, batch: Any) -> list[Any]:
    with torch.no_grad():
        result = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    return torch.utils._pytree.tree_leaves(result)


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) if isinstance(p, torch.Tensor) else p == q for p, q in zip(a, b, strict=True))


def saved(tmp_path: Path, name: str = "mlp") -> tuple[QuantizedModule, Any, Path]:
    model, batch, preset = CASES.get(name, CASES["int8"])()
    small = quantize(model, [batch], preset=preset)
    small.save(tmp_path / "small.sashiko")
    return small, batch, tmp_path / "small.sashiko"


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    small, batch, path = saved(tmp_path, name)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    other = sashiko.load(path)
    assert isinstance(other, QuantizedModule) and not other.training
    assert same(call(other, batch), call(small, batch))
    assert other.record == small.record and gate_of(other) == gate_of(small) and report(other) == report(small)
    assert list(other.state_dict()) == list(small.state_dict())
    assert [p.stride() for p in other.state_dict().values()] == [p.stride() for p in small.state_dict().values()]
    assert encode(other)[0] == encode(small)[0], "nothing is lost on the way"


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    small, _, path = saved(tmp_path)
    os.mkfifo(pipe := tmp_path / "pipe")
    read = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # a reader, so that nothing waits
    fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, 1 << 20)
    small.save(pipe)
    with open(read, "rb") as file:
        assert file.read() == path.read_bytes() and pipe.is_fifo()


NEW_PROCESS = """
import sys, torch, sashiko
small = sashiko.load(sys.argv[1])
for n, x in enumerate(torch.load(sys.argv[2])):
    result = small(x)
    assert torch.equal(result, torch.load(sys.argv[3])[n]), n
assert small.record.batches == 1 and "weight dB" in sashiko.quant.report(small)
fast = sashiko.compile(small, (torch.load(sys.argv[2])[0],))
assert fast(torch.load(sys.argv[2])[0]).shape == (5, 4)
"""


def test_a_new_process_without_the_model(tmp_path: Path) -> None:
    small, _, path = saved(tmp_path)
    inputs = [torch.randn(n, 8) for n in (5, 1, 17)]
    torch.save(inputs, tmp_path / "inputs")
    torch.save([small(x) for x in inputs], tmp_path / "outputs")
    command = [sys.executable, "-c", NEW_PROCESS, str(path), str(tmp_path / "inputs"), str(tmp_path / "outputs")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_gate_and_free_sizes_are_kept(tmp_path: Path) -> None:
    small, _, path = saved(tmp_path, "branching")
    assert small.record.notes == ()
    other = sashiko.load(path)
    for x in (torch.randn(9, 8), torch.randn(3, 8)):  # of 9 rows, all four columns are cut off
        assert same(call(other, x), call(small, x))
    for wrong in ((x[:, :7],), (x, 2.0), ()):
        with pytest.raises(InputError):
            other(*wrong)


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    small = quantize(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).eval(), [torch.randn(2, 8)])
    small.get_submodule("2").bias = small.get_parameter("0.bias")
    small.save(tmp_path / "tied")
    other = sashiko.load(tmp_path / "tied")
    assert other.get_parameter("0.bias") is other.get_parameter("2.bias")


def test_a_class_in_an_override_is_named_where_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    small = quantize(nn.Sequential(Own(8, 4)).eval(), [torch.randn(2, 8)], preset=Scheme(overrides=(Override(Own, OpScheme(None)),)))
    small.save(tmp_path / "own")
    (override,) = sashiko.load(tmp_path / "own").record.scheme.overrides
    assert override.where == f"{__name__}.{Own.__qualname__}"


def test_what_has_no_form_in_a_file(tmp_path: Path) -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    small = quantize(mlp(), [torch.randn(5, 8)])
    next(n for n in small.graph.nodes if n.op == "call_function").target = own
    with pytest.raises(Unsupported, match="own"):
        small.save(tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(8, 4)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: head(x) for name, head in self.heads.items()}


@pytest.mark.parametrize("name", ["en-de", "layer 1", "a/b", "é", "x@y", "{0}", "%s", "0", "class", "None"])
def test_names_that_are_no_identifiers(name: str, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    small = quantize(Named(name).eval(), [x])
    small.save(tmp_path / "small")
    for other in (sashiko.load(tmp_path / "small"), copy.deepcopy(small), sashiko.compile(small, x)):
        torch.testing.assert_close(other(x)[name], small(x)[name])
    assert [item.site.name for item in small.record.sites] == [f"heads.{name}"]


@pytest.mark.parametrize("name", ['a"b', "a'b", "a\\b", "a\nb", ""])
def test_names_that_are_no_text_of_a_program(name: str, tmp_path: Path) -> None:
    small = quantize(mlp(), [torch.randn(5, 8)])
    next(n for n in small.graph.nodes if n.op == "get_attr").target = f"0.{name}"
    setattr(small.get_submodule("0"), name, torch.zeros(4))
    with pytest.raises(Unsupported, match="name"):
        small.save(tmp_path / "small")


def test_damaged_files(tmp_path: Path) -> None:
    _, _, path = saved(tmp_path)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    low, high = next(entry["data_offsets"] for name, entry in json.loads(good[8:header]).items() if name == "tensor.0.weight_int8")
    spots = (0, 3, 40, header // 2, header + 5, header + low, header + high - 1)
    for bad in (*(good[:n] for n in (0, 4, 100, len(good) // 2, len(good) - 1)), *(_flipped(good, spot) for spot in spots)):
        path.write_bytes(bad)
        with pytest.raises(ArtifactError, match=re.escape(str(path))):
            sashiko.load(path)


def _flipped(data: bytes, spot: int) -> bytes:
    return data[:spot] + bytes([data[spot] ^ 0x55]) + data[spot + 1 :]


FOREIGN = (b"", b"PK\x03\x04 a zip", b"\x80\x04pickle" * 20, b"\x00" * 4000)


@pytest.mark.parametrize("content", FOREIGN, ids=["empty", "zip", "pickle", "zeros"])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(ArtifactError):
        sashiko.load(tmp_path / "model")


def test_newer_files_and_missing_ones(tmp_path: Path) -> None:
    container.write(tmp_path / "model", FORMAT, VERSION + 1, {"program": container.text_tensor({})}, {})
    with pytest.raises(ArtifactError, match="update sashiko"):
        sashiko.load(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match="nothing"):
        sashiko.load(tmp_path / "nothing")


MARK = "__import__('pathlib').Path('ran').touch()"
ATTACKS: dict[str, Callable[[Any], None]] = {
    "node name": lambda d: d["graph"]["nodes"][0].__setitem__(0, f"x\n{MARK}"),
    "argument name": lambda d: d["graph"]["call"].update(names=[f"x={MARK}"]),
    "placeholder": lambda d: _node(d, "placeholder").__setitem__(2, f"x={MARK}"),
    "attribute": lambda d: _node(d, "get_attr").__setitem__(2, f'0.bias"){MARK}("'),
    "own attribute": lambda d: _rename(d, f'0.bias"){MARK}("'),
    "line of an attribute": lambda d: _rename(d, f"0.bias\n{MARK}"),
    "keyword": lambda d: d["graph"]["call"].update({"in": d["graph"]["call"]["in"].replace("input", f"x':{MARK}, 'y")}),
    "function": lambda d: _node(d, "call_function").__setitem__(2, {"function": "os.system"}),
    "higher order": lambda d: _node(d, "call_function").__setitem__(2, {"higher_order": "print"}),
    "library": lambda d: _node(d, "call_function").__setitem__(2, {"operator": "load_library::x.default"}),
    "file": lambda d: _node(d, "call_function").__setitem__(2, {"operator": "aten::from_file.default"}),
    "script": lambda d: _node(d, "call_function").__setitem__(2, {"operator": "aten::save.default"}),
    "method": lambda d: _node(d, "call_function").__setitem__(1, "call_method"),
    "class": lambda d: d["record"]["scheme"].update(overrides=[{"where": {"class": "os.system"}, "scheme": 3}]),
}


def _node(data: Any, op: str) -> Any:
    return next(node for node in data["graph"]["nodes"] if node[1] == op)


def _rename(data: Any, name: str) -> None:
    """Gives an attribute that is read another name."""
    node, attributes = _node(data, "get_attr"), data["graph"]["attributes"]
    attributes[name] = attributes.pop(node[2])
    node[2] = name


@cache
def _small() -> QuantizedModule:
    return quantize(mlp(), [{"input": torch.randn(5, 8)}])


def program(tmp_path: Path, change: Callable[[Any], None]) -> Path:
    """A file with a right checksum and a changed program."""
    data, tensors = encode(_small())
    change(data)
    entries = {"program": container.text_tensor(data), **{f"tensor.{n}": t for n, t in tensors.items()}}
    container.write(tmp_path / "changed", FORMAT, VERSION, entries, {})
    return tmp_path / "changed"


@pytest.mark.parametrize("name", ATTACKS)
def test_files_run_no_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError):
        sashiko.load(program(tmp_path, ATTACKS[name]))
    assert not (tmp_path / "ran").exists()


def test_functions_are_arithmetic() -> None:
    assert {name.split(".")[0] for name in _FUNCTIONS} == {"operator", "math", "torch"}
    assert all(not name.startswith("torch.") or name.startswith("torch.sym_") for name in _FUNCTIONS)


def test_files_without_types_of_tensors_are_read(tmp_path: Path) -> None:
    def older(data: Any) -> None:
        for attribute in data["graph"]["attributes"].values():
            del attribute["type"]

    x = torch.randn(3, 8)
    assert torch.equal(sashiko.load(program(tmp_path, older))(x), _small()(x))


@pytest.fixture(scope="module")
def encoded() -> tuple[str, dict[str, torch.Tensor]]:
    data, tensors = encode(_small())
    return json.dumps(data), tensors


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_program_loads_or_is_refused(encoded: tuple[str, dict[str, torch.Tensor]], tmp_path: Path, data: Any) -> None:
    text, tensors = encoded
    root = json.loads(text)
    holder: Any = root
    while True:
        keys = sorted(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        holder = inner
    holder[key] = data.draw(st.sampled_from([None, -1, 10**30, "x; y", "", [], {}, 1.5, True, {"slot": 9999}, [[]], {"float": "nan"}]))
    path = tmp_path / "fuzzed"
    entries = {"program": container.text_tensor(root), **{f"tensor.{n}": t for n, t in tensors.items()}}
    container.write(path, FORMAT, VERSION, entries, {})
    try:
        assert isinstance(sashiko.load(path), QuantizedModule)
    except ArtifactError as error:
        assert str(path) in str(error)


def test_decoding_needs_its_tensors(encoded: tuple[str, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(KeyError):
        decode(json.loads(encoded[0]), {})
