"""The cache of compiled objects on disk.

A file is named by the hash of all that its content depends on, and its head repeats that key and a checksum of the content: a torn,
truncated, foreign or renamed file is ignored and made again. Files are put in place whole, so processes may share a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from .. import __version__
from ..diagnostics import dump, env
from ..diagnostics.warn import warn
from ..graph.encode import Json
from ..platforms.target import Target
from . import jit

T = TypeVar("T")
MAX_BYTES = 512 << 20
_MAGIC = b"sashiko object 1\n"
_DIGEST = 20
_HEAD = len(_MAGIC) + 2 * _DIGEST
_SUFFIX, _NOTE = ".o", ".json"
_warned: set[Path] = set()
"""Folders that cannot be written, as a warning has said."""


def key(ir_text: str, target: Target) -> str:
    """Returns the name of the cache entry: a hash of the code, the target, and the versions of everything that compiles it."""
    options = (target.schedule, str(target.reduces_strength))
    fields = (ir_text, target.triple, target.cpu, target.llvm_features, *options, jit.versions(), __version__, str(jit.OPT))
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for field in fields:
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def compiled(ir_text: str, target: Target) -> bytes:
    """Returns the object of `jit.compile_object`, from the cache where it is there. An unusable folder only costs time."""
    return _kept(ir_text, target, jit.compile_object)


def assembled(ir_text: str, target: Target) -> str:
    """Returns the text of `jit.assembly` likewise: PTX is what drivers take."""
    return _kept(ir_text, target, lambda *given: jit.assembly(*given).encode(), ".s").decode()


def _kept(ir_text: str, target: Target, make: Callable[[str, Target], bytes], suffix: str = _SUFFIX) -> bytes:
    name = key(ir_text, target)
    path = path_of(name, suffix)
    found = read(path, name)
    if found is not None:
        return found
    data = make(ir_text, target)
    write(path, name, data)
    return data


def path_of(name: str, suffix: str = _SUFFIX) -> Path:
    """Returns where the object named by a `key` is."""
    return folder() / f"{name}{suffix}"


def folder() -> Path:
    """Returns where the objects are; it may not exist yet."""
    return env.cache_dir() / "objects"


def read(path: Path, name: str) -> bytes | None:
    """Returns the content of an entry, or None when the file is absent or is not exactly what `write(path, name, ...)` made."""
    try:
        text = path.read_bytes()
    except OSError:
        return None
    payload = text[_HEAD:]
    if text[:_HEAD] != _head(name, payload):
        dump.say(1, f"ignored a damaged cache file: {path}")
        return None
    try:
        os.utime(path)  # what was used last goes last
    except OSError:
        dump.say(2, f"the cache file {path} cannot be marked as used")
    return payload


def note(name: str, data: Json) -> None:
    """Puts a note beside the objects, as `write` does."""
    write(path_of(name, _NOTE), name, json.dumps(data).encode())


def noted(name: str, understood: Callable[[Json], T]) -> T | None:
    """Returns what `understood` makes of a note, or None when there is none, or one that it can make nothing of: then it is made again."""
    path = path_of(name, _NOTE)
    payload = read(path, name)
    try:
        return None if payload is None else understood(json.loads(payload))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        dump.say(1, f"ignored a cache file that says nothing of use: {path}: {error!r}")
        return None


def write(path: Path, name: str, payload: bytes, limit: int = MAX_BYTES) -> None:
    """Puts an entry in place; nothing happens where the folder cannot be written, but for a warning, once, if it was asked for.
    Now and then removes the oldest entries."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_head(name, payload) + payload)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        dump.say(1, f"compiled code is not cached: {error}")
        if env.names_cache() and env.cache_dir() not in _warned:
            _warned.add(env.cache_dir())
            warn(f"sashiko cannot keep compiled code in SASHIKO_CACHE, {env.cache_dir()}: {error}")
        return
    # Names are hashes: one write in 32 looks at the whole folder.
    if int(name[:2], 16) % 32 == 0:
        evict(path.parent, limit)


def evict(where: Path, limit: int = MAX_BYTES) -> int:
    """Removes the entries used longest ago until at most `limit` bytes remain. Returns how many bytes were removed. What is no file, is
    another user's or is gone meanwhile, with the folder perhaps, is left alone."""
    entries = sorted(_entries(where))
    excess = sum(size for _, size, _ in entries) - limit
    removed = 0
    for _, size, path in entries:
        if removed >= excess:
            break
        with suppress(OSError):
            path.unlink(missing_ok=True)
            removed += size
    return removed


def _entries(where: Path) -> Iterator[tuple[int, int, Path]]:
    """Time of last use, size and path of the files in a folder."""
    with suppress(OSError):
        for path in where.iterdir():
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime_ns, status.st_size, path


def _head(name: str, payload: bytes) -> bytes:
    return _MAGIC + bytes.fromhex(name) + hashlib.blake2b(payload, digest_size=_DIGEST).digest()
