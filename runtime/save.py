"""Saved models: one safetensors file with the plan as JSON, the machine code, and the constants. No pickle.

    metadata     format, version, target, the versions that made it, checksum
    plan         JSON text (u8)
    runner       object file (u8)
    kernels.N    object files (u8)
    constants.N  the derived constants, in their own type and shape
    ~pad.N       zeros: every entry starts at a multiple of 64, so that constants are used where the file is mapped

The machine code runs as it is, so open only files from a source you trust, as with any program. The checksum finds damage, not malice.
Loading needs no compiler; the weights are those of the moment of saving and no longer follow a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .. import __version__
from ..diagnostics.errors import ArtifactError, InvalidGraph, Unsupported
from ..graph.types import FROM_TORCH
from ..platforms.host import host
from ..platforms.target import Target
from .arena import ALIGN
from .encode import Json
from .encode_plan import plan_from, plan_json
from .executable import Code, Executable

FORMAT = "sashiko"
VERSION = 1
_MAX_HEADER = 8  # bytes of the number before the header
_HINT = "save the model again"


@dataclass(frozen=True)
class Loaded:
    """What `load` found: the model, and the notes that the caller of `save` gave."""

    executable: Executable
    notes: Mapping[str, Json]


def save(executable: Executable, path: str | os.PathLike[str], notes: Mapping[str, Json] | None = None) -> None:
    """Writes a model to one file; an older file is replaced whole. `notes`: JSON that `load` gives back.

    Unsupported when a call left to PyTorch has no form in a file. The weights are saved as they are now.
    """
    plan, code = executable.plan, executable.code
    text = json.dumps({"plan": plan_json(plan), "notes": dict(notes or {})}, allow_nan=False).encode()
    entries = {"plan": _bytes_tensor(text), "runner": _bytes_tensor(code.runner)}
    entries.update((f"kernels.{n}", _bytes_tensor(data)) for n, data in enumerate(code.kernels))
    entries.update((f"constants.{n}", tensor) for n, tensor in enumerate(executable.constants()))
    target = asdict(code.target) | {"features": sorted(code.target.features)}
    made_by = f"sashiko {__version__}, torch {torch.__version__}"
    metadata = {"format": FORMAT, "version": str(VERSION), "made_by": made_by, "target": json.dumps(target)}
    metadata["checksum"] = _checksum(metadata, entries.items())
    _write(Path(path), metadata, entries)


def load(path: str | os.PathLike[str]) -> Loaded:
    """Reads a model that `save` wrote. Its constants stay in the mapped file: do not change the file while the model is used.

    ArtifactError when the file is damaged, something else, from a newer version, or for a machine with other features.
    """
    where = os.fspath(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {where}")
    try:
        with safe_open(where, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            target = _target(metadata, where)
            names = [name for name in file.keys() if not name.startswith("~")]  # noqa: SIM118 - it is no dict
            entries = {name: file.get_tensor(name) for name in names}
        if metadata.get("checksum") != _checksum(metadata, sorted(entries.items(), key=_rank)):
            raise ArtifactError("the file is damaged: its checksum is wrong", where, _HINT)
        return _assemble(entries, target)
    except ArtifactError as error:
        raise ArtifactError(error.what, where, error.hint) from error
    except (Unsupported, InvalidGraph) as error:
        raise ArtifactError(f"the file does not fit this installation: {error.what}", where, _HINT) from error
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ArtifactError(f"the file is damaged or no sashiko file: {error}", where, _HINT) from error


def _target(metadata: Mapping[str, str], where: str) -> Target:
    """The target of a file that this version and this machine can use."""
    if metadata.get("format") != FORMAT:
        raise ArtifactError("the file is no saved sashiko model", where, "files are made by .save(path)")
    if int(metadata["version"]) > VERSION:
        made_by = metadata.get("made_by", "a newer version")
        what = f"the file has format {metadata['version']} of {made_by}; this version reads up to {VERSION}"
        raise ArtifactError(what, where, "update sashiko")
    fields: dict[str, Any] = json.loads(metadata["target"])
    target = Target(**(fields | {"features": frozenset(fields["features"])}))
    reason = target.why_not_on(host())
    if reason:
        raise ArtifactError(f"the file is for another machine: {reason}", where, "compile it on this one, or with a target= like it")
    return target


def _assemble(entries: Mapping[str, torch.Tensor], target: Target) -> Loaded:
    data = json.loads(_tensor_bytes(entries["plan"]))
    constants = [entries[f"constants.{n}"] for n in range(len(data["plan"]["constants"]))]
    count = sum(name.startswith("kernels.") for name in entries)
    kernels = tuple(_tensor_bytes(entries[f"kernels.{n}"]) for n in range(count))
    plan = plan_from(data["plan"], constants)
    return Loaded(Executable(plan, Code(kernels, _tensor_bytes(entries["runner"]), target)), data["notes"])


def _rank(item: tuple[str, torch.Tensor]) -> tuple[int, int]:
    """The order in which `save` has the entries."""
    name, _, number = item[0].partition(".")
    return ("plan", "runner", "kernels", "constants").index(name), int(number or 0)


def _checksum(metadata: Mapping[str, str], entries: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    digest.update(json.dumps({k: v for k, v in metadata.items() if k != "checksum"}, sort_keys=True).encode())
    for name, tensor in entries:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_view(tensor))
    return digest.hexdigest()


def _write(path: Path, metadata: Mapping[str, str], entries: Mapping[str, torch.Tensor]) -> None:
    head: dict[str, Json] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, nbytes in _layout(entries):
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(head).encode()
    text += b" " * (-(len(text) + _MAX_HEADER) % ALIGN)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".sashiko")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(_MAX_HEADER, "little") + text)
            for tensor in entries.values():
                file.write(_view(tensor))
                file.write(bytes(-tensor.nbytes % ALIGN))
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _layout(entries: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, list[int], int]]:
    """Name, safetensors type, shape and size of each entry and of the padding after it."""
    for number, (name, tensor) in enumerate(entries.items()):
        yield name, FROM_TORCH[tensor.dtype].name.upper(), list(tensor.shape), tensor.nbytes
        if tensor.nbytes % ALIGN:
            rest = -tensor.nbytes % ALIGN
            yield f"~pad.{number}", "U8", [rest], rest


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
