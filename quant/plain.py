"""Frozen dataclasses as JSON and back, by their annotations. Fields that a file lacks get their defaults.

A class (of modules, in an override) is its qualified name; it is a class again where the process has it loaded, and stays a name elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from ..diagnostics.errors import ArtifactError
from ..graph.dims import Poly
from ..graph.encode import Json, template_from, template_json


def to_plain(value: Any) -> Json:
    """JSON of a dataclass whose fields are dataclasses, tuples, mappings, numbers, sizes, strings, patterns, classes, torch's names."""
    if is_dataclass(value) and not isinstance(value, Poly) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, re.Pattern):
        return {"pattern": value.pattern, "flags": value.flags}
    if isinstance(value, type):
        return {"class": f"{value.__module__}.{value.__qualname__}"}
    return template_json(value)


def from_plain(kind: Any, data: Json) -> Any:
    """The value of type `kind` of which `to_plain` made `data`. Raises ArtifactError or TypeError for what does not fit the type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and kind is not Poly:
        return _dataclass(kind, data)
    if origin in (Union, UnionType):
        return _one_of(arguments, data)
    if origin is tuple:
        parts = (arguments[0],) * len(_listed(data)) if arguments[1:] == (Ellipsis,) else arguments
        return tuple(from_plain(part, item) for part, item in zip(parts, _listed(data), strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: from_plain(arguments[1], item) for key, item in data.items()}
    if origin is Literal:
        return _fitting(data in arguments, data, kind)
    if origin is re.Pattern:
        return re.compile(str(data["pattern"]), int(data["flags"]))
    if origin is type:
        return _class(str(data["class"]))
    value = template_from(data)
    if kind is object:
        return value
    if kind is float:
        return _fitting(isinstance(value, (int, float)) and not isinstance(value, bool), value, kind)
    return _fitting(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), value, kind)


def _dataclass(kind: Any, data: Json) -> Any:
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    lacking = [name for name, f in known.items() if name not in data and f.default is MISSING and f.default_factory is MISSING]
    if lacking or data.keys() - known.keys():
        raise ArtifactError(f"a {kind.__name__} in the file has other fields: {', '.join([*lacking, *(data.keys() - known.keys())])}")
    return kind(**{name: from_plain(hints[name], item) for name, item in data.items()})


def _one_of(kinds: tuple[Any, ...], data: Json) -> Any:
    """The member of a union that the data has the form of."""
    for kind in kinds:
        if _looks(kind, data):
            return from_plain(kind, data)
    raise ArtifactError(f"{data!r:.60} in the file is none of {', '.join(getattr(kind, '__name__', str(kind)) for kind in kinds)}")


def _looks(kind: Any, data: Json) -> bool:
    if kind in (NoneType, bool, str, int):
        return type(data) is kind
    if kind is float:
        return isinstance(data, (int, float)) or (isinstance(data, dict) and data.keys() == {"float"})
    if not isinstance(data, dict):
        return False
    if kind is Poly:
        return data.keys() == {"dim"}
    if is_dataclass(kind):
        return data.keys() <= {f.name for f in fields(kind)}
    return data.keys() == ({"class"} if get_origin(kind) is type else {"pattern", "flags"})


def _listed(data: Json) -> list[Json]:
    return list(_fitting(isinstance(data, list), data, list))


def _fitting(fits: bool, value: Any, kind: Any) -> Any:
    if not fits:
        raise ArtifactError(f"{value!r:.60} in the file is no {getattr(kind, '__name__', kind)}")
    return value


def _class(name: str) -> type | str:
    """Looked up, never imported; a plain lookup, since modules may import more when they are asked for an attribute."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:split]))
        for part in parts[split:]:
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, type) and issubclass(found, torch.nn.Module):
            return found
    return name
