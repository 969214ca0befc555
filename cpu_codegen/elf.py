"""The symbols of a relocatable ELF object, as far as loading it needs them. Source: the System V ABI, chapter 4 (object files)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..diagnostics.errors import ArtifactError
from ..platforms.features import ARM, X86

_MACHINES = {62: X86, 183: ARM}
_RELOCATABLE, _SYMTAB = 1, 2
_LOCAL = 0


@dataclass(frozen=True)
class ObjectSymbols:
    """arch: of the code. defined, undefined: names of the global symbols, sorted."""

    arch: str
    defined: tuple[str, ...]
    undefined: tuple[str, ...]


def read_symbols(data: bytes) -> ObjectSymbols:
    """Returns the global symbols of a 64-bit little-endian relocatable object; ArtifactError when `data` is not one."""
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise ArtifactError(f"damaged object file: {error}", hint="delete the cache folder") from error


def _read(data: bytes) -> ObjectSymbols:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ArtifactError("not a 64-bit little-endian ELF object", hint="delete the cache folder")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != _RELOCATABLE or machine not in _MACHINES:
        raise ArtifactError(f"not a relocatable object for a known machine: type {kind}, machine {machine}", hint="delete the cache folder")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + size * n) for n in range(count)]
    defined: set[str] = set()
    undefined: set[str] = set()
    for section in sections:
        if section[1] != _SYMTAB:
            continue
        offset, length, names = section[4], section[5], sections[section[6]][4]
        # Entry 0 is reserved; an entry is name u32, info u8, other u8, section u16, value u64, size u64.
        for at in range(offset + 24, offset + length, 24):
            name, info, _, where = struct.unpack_from("<IBBH", data, at)
            if info >> 4 != _LOCAL:
                start = names + name
                text = data[start : data.index(b"\0", start)].decode()
                (defined if where else undefined).add(text)
    return ObjectSymbols(_MACHINES[machine], tuple(sorted(defined)), tuple(sorted(undefined)))
