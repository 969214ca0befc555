"""Errors of torch.export in this project's words."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from traceback import FrameSummary
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..diagnostics.errors import BY_PARTS, SPARSE, InputError, SashikoError, Unsupported

# What to do about errors of torch, by a part of their text.
KNOWN = (
    (
        "register a pytree",
        "return tuples, lists and dicts of tensors; torch.export.register_dataclass makes a dataclass known, and models of transformers "
        "return no cache with use_cache=False",
    ),
    (
        "PackedParams",
        "torch.ao.quantization has packed its weights for itself; quantize the model it was made from, by sashiko.quantize or by torchao's "
        "quantize_",
    ),
    ("_apply(): Couldn't swap", BY_PARTS),  # a model that casts its own weights while it runs
    (
        "Unsupported input type",
        "pass tensors and numbers, or tuples, lists and dicts of them; torch.export.register_dataclass makes a dataclass known",
    ),
    ("on inference tensor", "model.requires_grad_(False) helps, for weights that were made under inference_mode"),
)
_BY_DATA = ("data-dependent", "tuple of ints,but got FakeTensor")  # the second where a size is one
_OF_SPARSE = ("Cannot access storage of Sparse", "aten._to_sparse")
UNPACKED = f"give it the padded tensor, and mask what it makes beyond the lengths; or {BY_PARTS}"
_NOT_THE_USERS = frozenset({"torch", "sympy", __name__.partition(".")[0], *sys.stdlib_module_names})
_LIBRARY, _OURS = os.path.join(sysconfig.get_path("stdlib"), ""), os.path.join(os.path.dirname(__file__), "")
# Of tensors that are written and held outside of modules.
_OUTSIDE = ("is mutated in the forward method", "expected compiled_fn to be GraphModule")
# Of what is not known to be torch's fault: the model itself may raise.
PERHAPS_BY_PARTS = f"where the model itself runs with these arguments, {BY_PARTS}"
# Of dynamic_shapes: signs of them, where torch's advice about itself begins, how many of its reasons to tell, and how it names sizes
# that were 0 or 1 in the example.
_OF_SIZES = ("Suggested fixes", "Constraints violated", "dynamic_shapes", "user-specified ranges")
_OTHER_WAYS, _ADVICE, _MOST = "The error above occurred when calling", " If you're using", 3
# What to do about a condition that torch cannot prove, or that not all sizes meet.
_UNPROVEN = "satisfy the generated guard"
_AUTO = "torch.export.Dim.AUTO takes such conditions for granted, and the sizes of each call are checked"
_SMALL = (
    re.compile(r"marked (.+?) as dynamic but your code specialized it to be a constant \([01]\)"),
    re.compile(r"inferred a static shape of [01] for dimension (.+?)\.(?:\s|$)"),
)


def translated(error: Exception) -> SashikoError:
    """torch's error as one of ours: its first sentence, and the last place outside torch that its text names."""
    if isinstance(error, SashikoError):
        return error
    text = str(error)
    short = (_first_sentence(text) or type(error).__name__)[:300]
    frames = [(p, n) for p, n in re.findall(r'File "([^"]+)", line (\d+)', text) if is_the_users(p)]
    where = f"{frames[-1][0]}:{frames[-1][1]}" if frames else raised_at(error)
    if type(error).__name__ == "ConstraintViolationError" or any(sign in text for sign in _OF_SIZES):
        return _of_sizes(text, where or _fixed_at(error))
    if any(isinstance(item, PackedSequence) for item in _held(error, "torch.nn.modules.rnn")):
        what = "a recurrent layer is given a PackedSequence, whose sizes are in its data"
        return Unsupported(f"PyTorch cannot capture this model: {what}", where, UNPACKED)
    given = (item for item in _held(error, "torch._subclasses.fake_tensor") if isinstance(item, torch.Tensor))
    said, hint = f"{type(error).__name__}: {short}", next((what for sign, what in KNOWN if sign in text), PERHAPS_BY_PARTS)
    if any(sign in text for sign in _OF_SPARSE) or any(map(is_sparse, given)):
        said, hint = f"it has a sparse tensor ({said})", SPARSE
    elif any(sign in text for sign in _BY_DATA) or "DataDependent" in type(error).__name__:
        said, hint = f"it branches on its data, or makes sizes of them ({said})", BY_PARTS
    return Unsupported(f"PyTorch cannot capture this model: {said}", where, hint)


def _first_sentence(text: str) -> str:
    """The first line, and those that go on with it, as where sympy wraps what it says."""
    said, *more = text.strip().splitlines() or [""]
    for line in more:
        if said.endswith((".", ":", "!", "?")) or not line[:1].islower():
            break
        said += f" {line.strip()}"
    return said.strip()


def _of_sizes(text: str, where: str) -> InputError:
    """What torch says of dynamic_shapes: in its words, with what it found to be constant or which condition it needs, but for its advice on
    other ways to export."""
    said, _, fixes = text.partition(_OTHER_WAYS)[0].partition("Suggested fixes:")
    first, *reasons = [line.strip().partition(_ADVICE)[0] for line in said.splitlines() if line.strip()] or [text]
    told = dict.fromkeys(reason.removeprefix("- ") for reason in reasons if reason.startswith("- "))
    what = " ".join((first.partition(" For more information")[0], *list(told)[:_MOST]))[:600]
    small = dict.fromkeys(name for sign in _SMALL for name in sign.findall(said))
    hints = [f"torch.export takes a size of 0 or 1 for a constant; give an example with at least 2 for {', '.join(small)}"] if small else []
    hints += [line.strip() for line in fixes.splitlines() if line.strip() and line.partition(" = ")[0].strip() not in small]
    hints += [_AUTO] if _UNPROVEN in said else []
    hint = "\n  ".join(hints) or "see the documentation of torch.export's dynamic_shapes"
    return InputError(f"dynamic_shapes do not fit the model: {what}", where, hint[:600])


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of some elements and their places."""
    return str(tensor.layout).startswith("torch.sparse")


def _held(error: Exception, module: str) -> Iterator[Any]:
    """What the functions of a module that raised an exception, or passed it on, had in hand."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("__name__") == module:
            yield from pytree.tree_leaves([*step.tb_frame.f_locals.values()], lambda item: isinstance(item, PackedSequence))
        step = step.tb_next


def _fixed_at(error: Exception) -> str:
    """Where a free size became a constant, if the model's own code made it one, as by a branch; of operations torch knows its own line."""
    context = error.__context__
    step = context.__traceback__ if context is not None else None
    while step is not None:
        env: Any = step.tb_frame.f_locals.get("shape_env")
        for symbol, place in getattr(env, "replacements_slocs", {}).items():
            if env.replacements[symbol].is_number and (found := place_of(place.framework_loc)):
                return found
        step = step.tb_next
    return ""


def place_of(frame: object) -> str:
    """file:line of a frame that torch keeps, if it is of the model's own code."""
    return f"{frame.filename}:{frame.lineno}" if isinstance(frame, FrameSummary) and is_the_users(frame.filename) else ""


def is_the_users(path: str) -> bool:
    """Whether a file is part of neither torch nor Python nor of what traces here; other packages may well be where a model comes from."""
    python = path.startswith(_LIBRARY) and "-packages" not in path
    return not (python or path.startswith(_OURS) or re.search(r"[/\\]torch[/\\]", path))


def raised_at(error: Exception) -> str:
    """The innermost frame of the traceback that is neither torch's nor Python's nor ours."""
    where, step = "", error.__traceback__
    while step is not None:
        path, module = step.tb_frame.f_code.co_filename, str(step.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _NOT_THE_USERS and not path.startswith("<"):
            where = f"{path}:{step.tb_lineno}"
        step = step.tb_next
    return where


def written_outside(program: ExportedProgram, error: Exception) -> Unsupported | None:
    """What torch's error means where the model writes into a tensor that a plain object holds; None for any other."""
    if not any(sign in str(error) for sign in _OUTSIDE):
        return None
    signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
    buffers = {tensors[name].data_ptr(): name for name in signature.buffers if tensors[name].numel()}
    twice = [buffers[at] for name in signature.lifted_tensor_constants if (at := tensors[name].data_ptr()) in buffers]
    if twice:
        hint = "use it as the buffer everywhere, or pass torch.export.export(model, arguments, strict=True).module(): both are one there"
        return Unsupported(f"the model writes into its buffer {twice[0]}, which an object that is no module holds, too", hint=hint)
    if _OUTSIDE[0] in str(error):
        hint = f"make it a buffer by register_buffer, and use it as that attribute; or {BY_PARTS}"
        return Unsupported("the model writes into a tensor that is neither a buffer nor an argument", hint=hint)
    return None
