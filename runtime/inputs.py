"""The arguments of a call: what is accepted, and what the error says otherwise."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..diagnostics.errors import InputError
from ..diagnostics.surroundings import CPU
from ..graph.dims import Dim
from ..graph.memory_format import inverse
from ..graph.symbols import solve
from ..graph.types import Order
from .plan import Input, InputTensor

Argument = torch.Tensor | int
TRACED = "pass a plain tensor; what traces or transforms a model takes the original one, not the compiled"
# Types whose data is really where `data_ptr` says. Other subclasses are looked at more closely.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def checked(inputs: Sequence[Input], arguments: Sequence[Any], dense: bool, device: torch.device = CPU) -> tuple[Argument, ...]:
    """Returns the arguments as plain tensors and ints of the declared types, copied where `dense` asks for memory in the declared order.

    InputError for a wrong number, type, dtype or device; shapes are checked by `bind`.
    """
    if len(arguments) != len(inputs):
        raise InputError(f"expected {len(inputs)} arguments, got {len(arguments)}", hint="pass what the model was compiled with, flattened")
    return tuple(_checked(n, spec, argument, dense, device) for n, (spec, argument) in enumerate(zip(inputs, arguments, strict=True)))


def _checked(position: int, spec: Input, argument: Any, dense: bool, device: torch.device) -> Argument:
    name = described(position, spec)
    if not isinstance(spec, InputTensor):
        if isinstance(argument, bool) or not isinstance(argument, int):
            raise InputError(f"{name}: expected an int, got {type(argument).__name__}")
        return int(argument)
    if not isinstance(argument, torch.Tensor):
        raise InputError(f"{name}: expected a tensor, got {type(argument).__name__}")
    wanted = spec.type.dtype.torch
    if argument.dtype is not wanted:
        hint = f"convert it with .to({wanted}), or compile for the other dtype"
        raise InputError(f"{name}: expected {wanted}, got {argument.dtype}", hint=hint)
    if argument.device != device:
        where, how = ("the CPU", ".cpu()") if device == CPU else (device, f'.to("{device}")')
        raise InputError(f"{name}: expected a tensor on {where}, got one on {argument.device}", hint=f"move it with {how}")
    if argument.layout is not torch.strided:
        raise InputError(f"{name}: expected a dense tensor, got {argument.layout}", hint="convert it with .to_dense()")
    tensor = argument
    if isinstance(argument, FakeTensor) or (_pointer(argument) == 0 and argument.numel()):
        kind = "tensor inside a transform of torch.func" if type(argument) in PLAIN else type(argument).__name__
        raise InputError(f"{name}: a {kind} has no data of its own", hint=TRACED)
    if type(argument) not in PLAIN:
        tensor = argument.as_subclass(torch.Tensor)
    tensor = tensor.resolve_neg()
    order = spec.type.order
    if not dense or order is None or tensor.dim() != len(order):  # which `bind` speaks of
        return tensor.detach().contiguous() if dense else tensor
    return tensor.detach().permute(order).contiguous().permute(inverse(order))


def in_order(tensor: torch.Tensor, order: Order | None) -> torch.Tensor:
    """The tensor with its axes in that order; None: as they are."""
    return tensor if order is None else tensor.permute(order)


def lies_in(tensor: torch.Tensor, order: Order | None) -> bool:
    """Whether a tensor is dense with its axes in that order in memory; row by row for None, or one with other axes than there should be."""
    return in_order(tensor, order if order is None or tensor.dim() == len(order) else None).is_contiguous()


def apart(inputs: Sequence[Input], arguments: tuple[Any, ...], written: Set[int]) -> tuple[Any, ...]:
    """The arguments; where one of `written` shares memory with others, copies of them, since it is not known which is read when.

    Those that do not lie as declared are copied before anything is written.
    """
    orders = [spec.type.order if isinstance(spec, InputTensor) else None for spec in inputs]
    tensors = [(n, t) for n, (t, order) in enumerate(zip(arguments, orders)) if isinstance(t, torch.Tensor) and lies_in(t, order)]
    spans = sorted([(start := _pointer(t), start + t.nbytes, n) for n, t in tensors])
    shared: set[int] = set()
    end, last = 0, -1
    for start, stop, n in spans:
        if start < end:
            shared |= {n, last}
        if stop > end:
            end, last = stop, n
    return tuple([t.clone() if n in shared else t for n, t in enumerate(arguments)]) if shared & written else arguments


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def described(position: int, spec: Input) -> str:
    """How messages call an argument."""
    return f"argument {position} ({spec.label!r})" if spec.label else f"argument {position}"


def bind(inputs: Sequence[Input], arguments: Sequence[Argument]) -> dict[str, int]:
    """The values of the symbols in the declared shapes. InputError when a rank or a size does not fit."""
    pairs: list[tuple[Dim, int, str]] = []
    for position, (spec, argument) in enumerate(zip(inputs, arguments, strict=True)):
        name = described(position, spec)
        if not isinstance(spec, InputTensor):
            pairs.append((spec.dim, int(argument), name))
        elif isinstance(argument, torch.Tensor):
            shape = spec.type.shape
            if argument.dim() != len(shape):
                expected = f"[{', '.join(map(str, shape))}]"
                raise InputError(f"{name}: expected {len(shape)} dimensions, {expected}, got {argument.dim()}, {list(argument.shape)}")
            pairs += [(dim, size, f"{name}, dimension {axis}") for axis, (dim, size) in enumerate(zip(shape, argument.shape, strict=True))]
    return solve(pairs)
