"""Saved models: the same results after loading, and an error for every file that is not right."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.contract import KernelCode
from sashiko.diagnostics.errors import ArtifactError, InputError, Unsupported
from sashiko.graph import dims
from sashiko.graph.attrs import Slot
from sashiko.graph.encode import Json
from sashiko.graph.types import TensorType, f32
from sashiko.platforms.target import Target
from sashiko.runtime import encode_plan
from sashiko.runtime import save as saved
from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.plan import AtenStep, ConstantSource, InputInt, InputTensor, Operand, OutputDim, OutputTensor, Plan, Repeat, Step
from sashiko.runtime.save import load, save

ATEN = torch.ops.aten


@pytest.fixture
def model(code: Code, chain: type) -> Executable:
    """sort((x + w) * 2), with every class of a plan in it."""
    c = chain(rows=3, cols=4)
    (x,) = c.inputs(1)
    weight = torch.nn.Parameter(torch.randn(3, 4))
    w = c.constant(ConstantSource((weight,), lambda: weight, "weight"))
    c.sources.append(ConstantSource((), lambda: torch.tensor([True, False, True]), "mask"))
    total = c.step("add", [x, w], c.arena())
    c.step("scale", [total], c.buffer("output", 0), 2.0, reuse=True)
    work = dims.ceildiv(dims.symbol("n", 0), 2) + 1
    c.steps[:] = [replace(s, alternative=KernelCode(s.kernel.symbol, s.kernel.slots, 3, 1, work)) for s in c.steps]
    sort = AtenStep(ATEN.sort.default, (Slot(0),), (("descending", True),), (1,), (2, None), "no native sort", True, dense=(0,))
    inputs = (InputTensor("x", TensorType(f32, (3, 4)), 0), InputInt("n", dims.symbol("n", 0)))
    outputs = (OutputTensor(2), OutputDim(dims.symbol("n", 0) * 3), OutputTensor(7))
    return Executable(Plan(inputs, outputs, (c.segment([0], [1]), sort), tuple(c.sources), ((7, 1),)), code)


def same(a: Executable, b: Executable) -> bool:
    x = torch.randn(3, 4)
    first, second = a(x, 4), b(x, 4)
    return all(torch.equal(p, q) if isinstance(p, torch.Tensor) else p == q for p, q in zip(first, second, strict=True))  # type: ignore[arg-type]


def test_round_trip(model: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.sashiko"
    save(model, path, {"tree": "[*]"})
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no temporary file is left"

    def no_compiler(*_: object) -> bytes:
        raise AssertionError("loading compiles nothing")

    monkeypatch.setattr(jit, "compile_object", no_compiler)
    loaded = load(path)
    assert loaded.notes == {"tree": "[*]"}
    assert same(model, loaded.executable)
    save(loaded.executable, tmp_path / "again", {"tree": "[*]"})
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_files_have_the_permissions_of_any_other(model: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask is the process's: what another thread makes while it is a different one would have these permissions."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            (tmp_path / "other").touch()
            for _ in range(2):  # a new file, and one in its place
                save(model, tmp_path / "model.sashiko")
                assert (tmp_path / "model.sashiko").stat().st_mode == (tmp_path / "other").stat().st_mode
    finally:
        os.umask(before)


def test_what_cannot_be_finished_leaves_the_older_file(model: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.sashiko"
    save(model, path)
    older = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        save(model, path, {"tree": "[*]"})
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and path.read_bytes() == older


def test_constants_stay_in_the_file_and_are_aligned(model: Executable, tmp_path: Path) -> None:
    path = tmp_path / "model.sashiko"
    save(model, path)
    loaded = load(path).executable
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path.name)]
    for tensor in loaded.constants():
        assert tensor.data_ptr() % 64 == 0
        assert any(int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in maps)
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("constants.0"), model.constants()[0])


def test_a_changed_byte_anywhere_is_noticed(model: Executable, tmp_path: Path) -> None:
    path = tmp_path / "model.sashiko"
    save(model, path)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    # Padding and blanks carry nothing: a change in them is harmless and may pass.
    spots = [0, 3, 9, 40, header // 2, header + 5, header + 700]
    for name in ("plan", "runner", "kernels.0", "constants.0", "constants.1"):
        low, high = json.loads(good[8:header])[name]["data_offsets"]
        spots += [header + low, header + (low + high) // 2, header + high - 1]
    for spot in spots:
        bad = bytearray(good)
        bad[spot] ^= 0x55
        path.write_bytes(bad)
        with pytest.raises(ArtifactError):
            load(path)


FOREIGN = (b"", b"PK\x03\x04 a zip", b"\x80\x04pickle" * 20, b"\x00" * 4000)


@pytest.mark.parametrize("content", FOREIGN, ids=["empty", "zip", "pickle", "zeros"])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model"
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_truncated_files(model: Executable, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(model, path)
    good = path.read_bytes()
    for length in (4, 100, len(good) // 2, len(good) - 64, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(ArtifactError):
            load(path)


def rewritten(path: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Changes the metadata of a saved file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    change(head["__metadata__"])
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def test_a_newer_version(model: Executable, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(model, path)
    rewritten(path, lambda m: m.update(version="99", made_by="sashiko 9.9"))
    with pytest.raises(ArtifactError, match=r"format 99 of sashiko 9\.9"):
        load(path)


def test_constants_that_are_too_small(model: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As no `save` writes them: the checksum is right."""
    path = tmp_path / "model"
    _, mask = model.constants()
    monkeypatch.setattr(model, "constants", lambda: (torch.randn(3, 3), mask))
    save(model, path)
    with pytest.raises(ArtifactError, match="constant 0 has 36 bytes, the plan says 48"):
        load(path)


def test_another_safetensors_file(model: Executable, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(model, path)
    rewritten(path, lambda m: m.update(format="pt"))
    with pytest.raises(ArtifactError, match="no saved sashiko model"):
        load(path)


def test_a_machine_that_lacks_features(model: Executable, tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(target, features=frozenset(), cpu="generic", vector_bits=128)
    if not target.features:
        pytest.skip("this machine has no features that another one could lack")
    path = tmp_path / "model"
    save(model, path)
    monkeypatch.setattr("sashiko.runtime.save.host", lambda: small)
    with pytest.raises(ArtifactError, match=f"lacks {', '.join(sorted(target.features))[:20]}"):
        load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        load(tmp_path / "nothing")


def test_what_has_no_form_in_a_file(code: Code, tmp_path: Path) -> None:
    kind = TensorType(f32, (2,))
    for target, args in ((torch.sin, (Slot(0),)), (ATEN.add.Tensor, (Slot(0), torch.ones(2)))):
        step = AtenStep(target, args, (), (0,), (1,), "left to PyTorch")
        executable = Executable(Plan((InputTensor("x", kind, 0),), (OutputTensor(1),), (step,)), code)
        with pytest.raises(Unsupported, match="cannot be saved"):
            save(executable, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_the_same_after_a_round_trip(model: Executable) -> None:
    data = json.loads(json.dumps(encode_plan.plan_json(model.plan), allow_nan=False))
    again = encode_plan.plan_from(data, model.constants())
    assert again.inputs == model.plan.inputs and again.outputs == model.plan.outputs
    assert again.segments[0] == model.plan.segments[0]
    assert encode_plan.plan_json(again) == encode_plan.plan_json(model.plan)


def test_a_plan_from_before_stores_around_the_caches(model: Executable) -> None:
    data = json.loads(json.dumps(encode_plan.plan_json(model.plan)))
    for step in (step for segment in data["segments"] for step in segment.get("steps", ())):
        del step["large"], step["large_from"]
    assert encode_plan.plan_from(data, model.constants()).segments[0] == model.plan.segments[0]


@pytest.mark.parametrize("version", [2, 4])
def test_a_file_from_before(version: int, model: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runner reads frames of another form and must not run. Before version 5 no step is repeated, in version 2 they are in sections."""

    def as_it_was(plan: Plan) -> Json:
        data = encode_plan.plan_json(plan)
        for segment in (segment for segment in data["segments"] if "steps" in segment):
            del segment["repeats"]
            if version == 2:
                segment["sections"] = [{"steps": segment.pop("steps"), "units": 3, "block_units": 2, "grain": 1}]
        return data

    monkeypatch.setattr(saved, "VERSION", version)
    monkeypatch.setattr(saved, "plan_json", as_it_was)
    own, model.code = model.code, replace(model.code, runner=b"for other frames")
    save(model, tmp_path / "model")
    monkeypatch.undo()
    loaded = load(tmp_path / "model").executable
    assert same(model, loaded)
    assert loaded.plan.segments[0] == model.plan.segments[0] and loaded.code == own


def test_a_file_without_orders_of_results(model: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 5 has orders of segments' inputs instead, all of them row-major."""

    def as_it_was(plan: Plan) -> Json:
        data = encode_plan.plan_json(plan)
        for output in (output for output in data["outputs"] if output and "value" in output):
            del output["order"]
        for segment in (segment for segment in data["segments"] if "steps" in segment):
            segment["orders"] = []
        return data

    monkeypatch.setattr(saved, "VERSION", 5)
    monkeypatch.setattr(saved, "plan_json", as_it_was)
    save(model, tmp_path / "model")
    monkeypatch.undo()
    loaded = load(tmp_path / "model").executable
    assert same(model, loaded) and loaded.plan.outputs == model.plan.outputs and loaded.code == model.code


def test_repeated_steps(code: Code, repeated: Callable[..., Plan], tmp_path: Path) -> None:
    model = Executable(repeated(True), code)
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model").executable
    assert loaded.plan.segments == model.plan.segments
    x, state = torch.rand(9, 4), torch.rand(4)
    assert all(map(torch.equal, loaded(x, state), model(x, state)))


def test_steps_are_all_saved() -> None:
    """A field that is added to a step, an operand or a repeat must be added to its JSON form, too."""
    names = {"kernel", "operands", "writes", "label", "alternative", "reuses", "large", "large_from"}
    assert set(Step.__dataclass_fields__) == names
    assert set(Operand.__dataclass_fields__) == {"buffer", "offset", "stride", "later"}
    assert set(Repeat.__dataclass_fields__) == {"first", "end", "times"}
