"""The arguments of a call: what is accepted, and what the error says otherwise."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import gcd
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..diagnostics.errors import PADDED, InputError
from ..diagnostics.surroundings import CPU
from ..graph.binding import solve
from ..graph.dims import Dim
from ..graph.types import Order, inverse
from .plan import Input, InputTensor

Argument = torch.Tensor | int
TRACED = "pass a plain tensor; what traces or transforms a model takes the original one, not the compiled"
# Types whose data is really where `data_ptr` says. Other subclasses are looked at more closely.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# The address of a tensor without memory is its offset in its storage. Only those below this one are worth asking what is there.
LOW = 1 << 32


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
    if argument.is_nested:
        raise InputError(f"{name}: expected a dense tensor, got a nested one", hint=PADDED)
    if argument.layout is not torch.strided:
        raise InputError(f"{name}: expected a dense tensor, got {argument.layout}", hint="convert it with .to_dense()")
    tensor = argument
    if isinstance(argument, FakeTensor) or lacks_memory(argument):
        raise _without_data(name, argument)
    if type(argument) not in PLAIN:
        tensor = argument.as_subclass(torch.Tensor)
    tensor = tensor.resolve_neg()
    order = spec.type.order
    if not dense or order is None or tensor.dim() != len(order):  # which `bind` speaks of
        return tensor.detach().contiguous() if dense else tensor
    return tensor.detach().permute(order).contiguous().permute(inverse(order))


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements, but nowhere to keep them."""
    return tensor.numel() > 0 and (_pointer(tensor) == 0 or not tensor.untyped_storage().nbytes())


def _without_data(name: str, tensor: torch.Tensor) -> InputError:
    """What is said of a tensor that lacks memory."""
    try:
        freed = not isinstance(tensor, FakeTensor) and not tensor.untyped_storage().nbytes()
    except NotImplementedError:
        freed = False
    if freed:
        return InputError(f"{name}: its data is not allocated", hint="its storage was freed, as by resize_(0): pass it with its data")
    kind = "tensor inside a transform of torch.func" if type(tensor) in PLAIN else type(tensor).__name__
    return InputError(f"{name}: a {kind} has no data of its own", hint=TRACED)


def in_order(tensor: torch.Tensor, order: Order | None) -> torch.Tensor:
    """The tensor with its axes in that order; None: as they are."""
    return tensor if order is None else tensor.permute(order)


def lies_in(tensor: torch.Tensor, order: Order | None) -> bool:
    """Whether a tensor is dense with its axes in that order in memory; row by row for None, or one with other axes than there should be."""
    return in_order(tensor, order if order is None or tensor.dim() == len(order) else None).is_contiguous()


def refuse_shared(inputs: Sequence[Input], arguments: Sequence[Any], written: Set[int], touched: Set[int]) -> None:
    """InputError where one of the `written` arguments has memory in common with another that is `touched`, read or written. The code was
    made for tensors apart: it no longer tells what is read before a write from what is read after it."""
    before: list[tuple[int, int]] = []
    for start, stop, n in _spans(arguments, touched):
        before = [(end, other) for end, other in before if end > start]
        for _, other in before:
            if (n in written or other in written) and _meet(arguments[other], arguments[n]):
                one, two = (described(position, inputs[position]) for position in sorted((n, other)))
                raise InputError(f"{one} and {two} share memory, and the model writes into it", hint="pass a clone of one of them")
        before.append((stop, n))


def _spans(arguments: Sequence[Any], positions: Set[int]) -> list[tuple[int, int, int]]:
    """(address, end, position) of the tensors at these positions that have memory, in order of their addresses."""
    tensors = [(n, arguments[n]) for n in positions if n < len(arguments) and isinstance(arguments[n], torch.Tensor)]
    return sorted([(start, start + _extent(t), n) for n, t in tensors if (start := _pointer(t)) and t.numel()])


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))) * tensor.itemsize


def _meet(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether elements of both lie at the same place: slices of one tensor may lie between one another. `first` begins first."""
    ahead = second.data_ptr() - first.data_ptr()
    axes = _nested(first, second)
    if axes is not None and ahead % first.itemsize == 0:
        return _reached(ahead // first.itemsize, axes)
    unit = gcd(ahead, first.itemsize, second.itemsize)
    taken = torch.zeros(max(_extent(first), ahead + _extent(second)) // unit, dtype=torch.bool, device=CPU)

    def places(tensor: torch.Tensor, offset: int) -> torch.Tensor:
        units = tensor.itemsize // unit
        return taken.as_strided((*tensor.shape, units), (*[step * units for step in tensor.stride()], 1), offset // unit)

    places(first, 0).fill_(True)
    return bool(places(second, ahead).any())


def _nested(first: torch.Tensor, second: torch.Tensor) -> list[tuple[int, int, int]] | None:
    """(step, least, greatest) of each axis, how many steps an element of `first` may be ahead of one of `second`, if both lie by the same
    steps and each step goes beyond all that smaller ones reach, as in slices of one tensor; None if not."""
    if first.itemsize != second.itemsize or first.stride() != second.stride():
        return None
    sizes = zip(first.stride(), first.shape, second.shape)
    axes = sorted([(step, 1 - two, one - 1) for step, one, two in sizes if step and max(one, two) > 1], reverse=True)
    reach = 0
    for step, least, greatest in reversed(axes):
        if reach >= step:
            return None
        reach += step * max(-least, greatest)
    return axes


def _reached(distance: int, axes: Sequence[tuple[int, int, int]]) -> bool:
    """Whether so many elements are a sum of steps along the axes."""
    if not axes:
        return distance == 0
    step, least, greatest = axes[0]
    return any(least <= n <= greatest and _reached(distance - n * step, axes[1:]) for n in (distance // step, distance // step + 1))


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
