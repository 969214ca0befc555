"""Saved models: one file with the plan as JSON, the machine code, and the constants; `graph/container.py` says how it is laid out.

    plan         JSON text
    runner       object file
    kernels.N    object files
    constants.N  the derived constants, in their own type and shape

The machine code runs as it is, so open only files from a source you trust, as with any program.
Loading needs no compiler; the weights are those of the moment of saving and no longer follow a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..diagnostics.errors import ArtifactError
from ..graph import container
from ..graph.encode import Json
from ..platforms.host import host
from ..platforms.target import Target
from .encode_plan import plan_from, plan_json
from .executable import Code, Executable, with_runner
from .plan import NativeSegment, Plan

FORMAT = "sashiko"
VERSION = 8
_OWN_RUNNER = 5  # the runner of an older file reads frames of another form


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
    entries = {
        "plan": container.text_tensor({"plan": plan_json(plan), "notes": dict(notes or {})}),
        "runner": container.bytes_tensor(code.runner),
        **{f"kernels.{n}": container.bytes_tensor(data) for n, data in enumerate(code.kernels)},
        **{f"constants.{n}": tensor for n, tensor in enumerate(executable.constants())},
    }
    target = asdict(code.target) | {"features": sorted(code.target.features)}
    container.write(path, FORMAT, VERSION, entries, {"target": json.dumps(target)})


def load(path: str | os.PathLike[str]) -> Loaded:
    """Reads a model that `save` wrote. Its constants stay in the mapped file: do not change the file while the model is used.

    ArtifactError when the file is damaged, something else, from a newer version, or for a machine with other features.
    """
    return container.read(path, FORMAT, VERSION, _assemble, _target)


def _target(metadata: Mapping[str, str]) -> Target:
    """The target of a file that this machine can use."""
    fields: dict[str, Any] = json.loads(metadata["target"])
    target = Target(**(fields | {"features": frozenset(fields["features"])}))
    reason = target.why_not_on(host())
    if reason:
        raise ArtifactError(f"the file is for another machine: {reason}", hint="compile it on this one, or with a target= like it")
    return target


def _assemble(metadata: Mapping[str, str], entries: Mapping[str, torch.Tensor]) -> Loaded:
    data = container.text_of(entries["plan"])
    constants = [entries[f"constants.{n}"] for n in range(len(data["plan"]["constants"]))]
    count = sum(name.startswith("kernels.") for name in entries)
    kernels = tuple(container.tensor_bytes(entries[f"kernels.{n}"]) for n in range(count))
    plan, target = plan_from(data["plan"], constants), _target(metadata)
    _check_sizes(plan, constants)
    fits = int(metadata["version"]) >= _OWN_RUNNER
    code = Code(kernels, container.tensor_bytes(entries["runner"]), target) if fits else with_runner(kernels, target)
    return Loaded(Executable(plan, code), data["notes"])


def _check_sizes(plan: Plan, constants: Sequence[torch.Tensor]) -> None:
    """ArtifactError where a constant has fewer bytes than kernels would read of it."""
    for segment in plan.segments:
        for buffer in segment.buffers if isinstance(segment, NativeSegment) else ():
            if buffer.kind == "constant" and isinstance(buffer.nbytes, int) and constants[buffer.index].nbytes < buffer.nbytes:
                what = f"constant {buffer.index} has {constants[buffer.index].nbytes} bytes, the plan says {buffer.nbytes}"
                raise ArtifactError(what, hint="save the model again")
