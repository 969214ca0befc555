"""The parts of nested arguments, by where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def parts(value: object) -> dict[str, Any]:
    """The leaves of an argument by where they are, such as `[0]['key']`; one that is no container is at the empty path.

    The leaves of a container type that does not name its parts are numbered.
    """
    if isinstance(value, torch.Tensor):
        return {"": value}
    try:
        return {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(value)}
    except ValueError:  # a type registered without keys
        return {f"<{number}>": leaf for number, leaf in enumerate(pytree.tree_leaves(value))}


def difference(spec: pytree.TreeSpec, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> str:
    """What is there that `spec`, of as many arguments by position and the same by name, does not have, and what is not. names: of those by
    position."""
    try:
        had_args, had_kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    except Exception:  # of a class that is not made of anything
        return "in containers that cannot tell their parts"
    labels = [*names[: len(args)], *(f"argument {number}" for number in range(len(names), len(args)))]
    pairs = [*zip(labels, had_args, args, strict=True), *((name, had_kwargs[name], kwargs[name]) for name in had_kwargs)]
    missing, unknown, kinds = list[str](), list[str](), list[str]()
    for name, had, given in pairs:
        before, now = parts(had), parts(given)
        missing += [f"{name}{path}" for path in before if path not in now]
        unknown += [f"{name}{path}" for path in now if path not in before]
        if type(had) is not type(given) and not isinstance(had, int):
            kinds.append(f"{name} is a {type(given).__name__}, and was a {type(had).__name__}")
    said = [f"missing: {', '.join(missing)}"] if missing else []
    said += [f"unknown: {', '.join(unknown)}"] if unknown else []
    return f"{'; '.join(said or kinds) or 'their containers are of other types':.300}"
