"""Examples of a call: which arguments they stand for, and why a model does not run with them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..diagnostics.errors import InputError, SashikoError, Unsupported
from .attributes import kept
from .nodes import written_by
from .rebound import storage
from .refusals import raised_at, translated
from .views import ON_A_VIEW

Held = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and what they held."""
FORMS = "a tensor is the only argument, a tuple or list has them by position, a dict by name"


def arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Positional and named arguments of the call that an example or a batch stands for: a tensor is the only argument, a tuple or list is
    positional, a mapping is by name. None: it is none of these."""
    if isinstance(given, Mapping):
        return (), {str(name): value for name, value in given.items()}
    if isinstance(given, torch.Tensor):
        return (given,), {}
    return (tuple(given), {}) if isinstance(given, (tuple, list)) else None


def example(given: Any, where: str = "") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`arguments` of `example_inputs`. Raises InputError for what is no example."""
    found = arguments(given)
    if found is None:
        hint = "pass a tensor, a tuple of positional or a dict of keyword arguments"
        raise InputError(f"example_inputs is a {type(given).__name__}", where, hint)
    return found


def misfit(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why the model's `forward` does not take such arguments, or an empty string."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f"does not fit forward{signature}: {error}"
    return ""


def refusal(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> SashikoError:
    """What to raise for a model that could not be traced with an example: the model itself may not run with it. `__cause__` says why."""
    told = translated(error)
    told.__cause__ = error
    if why := misfit(model, args, kwargs):
        return InputError(f"the example {why}", "example_inputs", FORMS)
    return told if isinstance(told, InputError) else failure(model, args, kwargs) or told


def failure(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SashikoError | None:
    """What the model itself raises with an example, if it does; or that it changes the shape of an argument, which torch stumbles on."""
    given = pytree.tree_leaves((tuple(args), dict(kwargs)))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (tuple(args), dict(kwargs)))
    own = pytree.tree_leaves((args, kwargs))
    try:
        called(model, args, kwargs)
    except SashikoError as error:  # of a quantized module, which says itself what does not fit
        return error
    except Exception as error:
        where = raised_at(error) or "example_inputs"
        hint = "" if any(map(_is_ours, model.modules())) else "it does so without sashiko, too"
        told = InputError(f"the model itself fails with this example: {first_line(error)}", where, hint)
        told.__cause__ = error
        return told
    if any(isinstance(tensor, torch.Tensor) and tensor.shape != before.shape for before, tensor in zip(given, own, strict=True)):
        return Unsupported("the model changes the shape of an argument in place", "", ON_A_VIEW)
    return None


def _is_ours(module: torch.nn.Module) -> bool:
    """Whether a module is what this package made of another one."""
    package = __name__.partition(".")[0]
    return any(kind.__module__.partition(".")[0] == package for kind in type(module).__mro__)


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Runs without gradients, and puts back attributes, buffers (caches, counters) and random numbers that a forward pass moves."""
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_inference()]
    with torch.no_grad(), kept(model), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)


def called(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the model itself returns. It is as it was afterwards, parameters that it writes into, too."""
    with unchanged(model), restored(model) as written:
        result = model(*args, **kwargs)
        own = {storage(tensor) for tensor, _ in written}
        return pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if storage(t) in own else t, result)


@contextmanager
def restored(model: torch.nn.Module) -> Iterator[Held]:
    """Puts back parameters and buffers that PyTorch writes into meanwhile, and tells which; those are copied that are written into."""
    tensors = [*chain(model.parameters(), model.buffers())]
    bound = [(t, t.data) for t in tensors if storage(t) == storage(t.data)]  # not of what is made of other tensors
    writes = _Writes(tensors)
    try:
        with writes:
            yield writes.before
    finally:
        for tensor, data in bound:
            if storage(tensor) != storage(data):
                tensor.data = data
        put_back(writes.before)


def put_back(held: Held) -> None:
    """Makes tensors what they were."""
    for tensor, value in held:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(value)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies tensors just before they are written into. Most models write into few or none, and `.data` leaves no trace of it."""

    supports_higher_order_operators = True  # as they are: torch would refuse them

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._left: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            self._left.setdefault(storage(tensor), []).append(tensor)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """What a model has compiled for itself, such as flex_attention, is not compiled under another mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for written in written_by(func, args, kwargs):
                if isinstance(written, torch.Tensor):
                    self.before += [(t, t.detach().clone()) for t in self._left.pop(storage(written), ())]
        return func(*args, **kwargs)


def first_line(error: Exception) -> str:
    """The kind of an exception, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return ": ".join((type(error).__name__, *lines[:1]))
