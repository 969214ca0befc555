"""One file of tensors and metadata: safetensors, written whole or not at all, with a checksum. No pickle.

    metadata    format, version, made_by, checksum, and what the caller adds: strings
    NAME        tensors; JSON text and machine code are tensors of bytes
    ~pad.N      zeros: every entry starts at a multiple of 64, so that constants are used where the file is mapped

The checksum finds damage, not malice.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from .. import __version__
from ..diagnostics.errors import ArtifactError, InvalidGraph, SashikoError, Unsupported
from ..diagnostics.files import writing
from .encode import Json
from .types import FROM_TORCH

T = TypeVar("T")
_ALIGN = 64
_LENGTH_BYTES = 8
_HINT = "save the model again"
_DAMAGE = (
    *(SafetensorError, KeyError, IndexError, TypeError, ValueError),
    *(RuntimeError, AttributeError, AssertionError, OverflowError, RecursionError, SyntaxError),
)


def write(path: str | os.PathLike[str], kind: str, version: int, entries: Mapping[str, torch.Tensor], extra: Mapping[str, str]) -> None:
    """Writes a file; an older one is replaced whole, a pipe or device is written to. kind: the format's name. extra: more metadata.

    Raises Unsupported for tensors of a type that files cannot hold, InputError where the file cannot be written.
    """
    with writing(path):
        for name, tensor in entries.items():
            if tensor.dtype not in FROM_TORCH or tensor.dtype.is_complex:
                raise Unsupported(f"{name} is {tensor.dtype}, which has no form in a file")
        metadata = {"format": kind, "version": str(version), "made_by": f"sashiko {__version__}, torch {torch.__version__}", **extra}
        metadata["checksum"] = _checksum(metadata, entries)
        _write(Path(path), metadata, entries)


def kind_of(path: str | os.PathLike[str]) -> str:
    """The format's name that a file says it has. Errors as in `read`."""
    return _guarded(path, lambda: _metadata(path).get("format", ""))


def read(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    assemble: Callable[[Mapping[str, str], Mapping[str, torch.Tensor]], T],
    check: Callable[[Mapping[str, str]], object] = dict,
) -> T:
    """What `assemble` makes of a file's metadata and tensors. The tensors stay in the mapped file: do not change it while they are used.

    check: sees the metadata first and may raise. Raises ArtifactError when the file is damaged, something else, or from a newer
    version; FileNotFoundError when there is none, PermissionError when it may not be read.
    """

    def work() -> T:
        metadata = _metadata(path)
        _check_kind(metadata, kind, version)
        check(metadata)
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            entries = {name: file.get_tensor(name) for name in file.keys() if not name.startswith("~")}  # noqa: SIM118 - it is no dict
        if metadata.get("checksum") != _checksum(metadata, entries):
            raise ArtifactError("the file is damaged: its checksum is wrong", hint=_HINT)
        return assemble(metadata, entries)

    return _guarded(path, work)


def text_tensor(data: Json) -> torch.Tensor:
    """JSON as a tensor of bytes."""
    return bytes_tensor(json.dumps(data, allow_nan=False).encode())


def text_of(tensor: torch.Tensor) -> Json:
    """What `text_tensor` wrote."""
    return json.loads(tensor_bytes(tensor))


def bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _guarded(path: str | os.PathLike[str], work: Callable[[], T]) -> T:
    where = os.fspath(path)
    if not os.path.isfile(where):
        raise FileNotFoundError(f"there is no file {where}")
    with open(where, "rb"):  # PermissionError, where safetensors would say that there is no file
        pass
    try:
        return work()
    except ArtifactError as error:
        raise ArtifactError(error.what, where, error.hint) from error
    except (Unsupported, InvalidGraph) as error:
        raise ArtifactError(f"the file does not fit this installation: {error.what}", where, _HINT) from error
    except (SashikoError, *_DAMAGE) as error:
        raise ArtifactError(f"the file is damaged or no sashiko file: {error}", where, _HINT) from error


def _metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
        return dict(file.metadata() or {})


def _check_kind(metadata: Mapping[str, str], kind: str, version: int) -> None:
    if metadata.get("format") != kind:
        raise ArtifactError("the file is no saved sashiko model", hint="files are made by .save(path)")
    if int(metadata["version"]) > version:
        made_by = metadata.get("made_by", "a newer version")
        what = f"the file has format {metadata['version']} of {made_by}; this version reads up to {version}"
        raise ArtifactError(what, hint="update sashiko")


def _checksum(metadata: Mapping[str, str], entries: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    digest.update(json.dumps({k: v for k, v in metadata.items() if k != "checksum"}, sort_keys=True).encode())
    for name, tensor in sorted(entries.items()):
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
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGN)
    if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
        with open(path, "wb") as file:
            _fill(file, text, entries)
        return
    temporary = path.parent / f".sashiko{secrets.token_hex(8)}"
    file = open(temporary, "xb")  # noqa: SIM115 - with the permissions that any new file has; only one that was made here is removed below
    try:
        with file:
            _fill(file, text, entries)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _fill(file: IO[bytes], text: bytes, entries: Mapping[str, torch.Tensor]) -> None:
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    for tensor in entries.values():
        file.write(_view(tensor))
        file.write(bytes(-tensor.nbytes % _ALIGN))


def _layout(entries: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, list[int], int]]:
    """Name, safetensors type, shape and size of each entry and of the padding after it."""
    for number, (name, tensor) in enumerate(entries.items()):
        yield name, FROM_TORCH[tensor.dtype].name.upper(), list(tensor.shape), tensor.nbytes
        if tensor.nbytes % _ALIGN:
            rest = -tensor.nbytes % _ALIGN
            yield f"~pad.{number}", "U8", [rest], rest


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor, not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
