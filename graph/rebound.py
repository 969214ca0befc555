"""Buffers that forward binds to other tensors, while torch traces it.

torch looks at those of the outermost module alone, and takes a buffer that is None for one that has a place among the arguments of the
graph. Here a buffer of any module that is bound to a tensor like its own is written into instead, at the end of forward. What stands where
there was nothing, or something of another shape, is made in each call, as a table is that the first call makes.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils import _pytree as pytree

from ..diagnostics.errors import Unsupported
from .attributes import kept

_IN_PLACE = "write into the buffer instead, as by self.{}.copy_(...)"
_CALLED = "call the model once before, so that it is made; or register it with the tensor that it begins with"
_WHOLE = "register it with a tensor that is as large as it gets, and write into parts of that"
_SIZES = ("sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "_like", "new_empty", "new_full", "new_ones", "new_zeros")


class Made(NamedTuple):
    """A buffer that forward made anew from the numbers in its arguments, and how large."""

    module: torch.nn.Module
    name: str
    sizes: list[Any]
    dtype: torch.dtype


class _Change(NamedTuple):
    module: torch.nn.Module
    name: str
    old: Tensor | None
    new: Tensor | None

    def is_alike(self) -> bool:
        old, new = self.old, self.new
        return old is not None and new is not None and old.dtype == new.dtype and tuple(old.shape) == tuple(new.shape)


def settled(model: torch.nn.Module, trace: Callable[[], ExportedProgram], again: Callable[[], ExportedProgram]) -> ExportedProgram:
    """The program that a trace of the model gives, whose buffers are then what they were. again: a trace of just the same arguments.
    Raises Unsupported for a buffer that cannot stay the tensor that it is, or that is made from the arguments of the first call."""
    with _watched(model) as watch:
        program = trace()
    if not watch.made:
        return program
    names: set[str] = set()
    with tried(model):
        for module, name, sizes, dtype in watch.made:
            module._buffers[name] = torch.zeros(sizes, dtype=dtype)
        names.update(_written_only(again()))
    for module, name, *_ in watch.made:
        if watch.path(module, name) not in names:
            raise watch.refused(module, name, "makes the buffer {} from its arguments, and finds it made in later calls", _CALLED)
    return program


@contextmanager
def tried(model: torch.nn.Module) -> Iterator[None]:
    """For a trace that is to tell something, which may fail, warns of nothing, and leaves the model as it was."""
    with kept(model), suppress(Exception), warnings.catch_warnings(), _watched(model):
        warnings.simplefilter("ignore")
        yield


def _written_only(program: ExportedProgram) -> Iterator[str]:
    """The names of buffers whose numbers a program does not read."""
    for node in program.graph.find_nodes(op="placeholder"):
        if all(user.target is torch.ops.aten.copy_.default and user.args[1] is not node and not user.users for user in node.users):
            yield program.graph_signature.inputs_to_buffers.get(node.name, "")


@contextmanager
def _watched(model: torch.nn.Module) -> Iterator[_Watch]:
    exporter: Any = importlib.import_module("torch.export._trace")
    watch = _Watch(model)
    before, exporter.register_buffer_assignment_hook = exporter.register_buffer_assignment_hook, _not_by_torch
    hooks = model.register_forward_pre_hook(watch.begin, prepend=True), model.register_forward_hook(watch.end, with_kwargs=True)
    try:
        yield watch
    finally:
        exporter.register_buffer_assignment_hook = before
        for hook in hooks:
            hook.remove()


class _Watch:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.made: list[Made] = []
        self.depth = 0  # a model may call itself
        self.before: dict[torch.nn.Module, tuple[dict[str, Tensor | None], set[str]]] = {}

    def begin(self, *_: object) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        modules = (module for module in self.model.modules() if not isinstance(module, torch.jit.ScriptModule))
        self.before = {module: (dict(module._buffers), set(module._non_persistent_buffers_set)) for module in modules}

    def end(self, _: object, args: Any, kwargs: Any, result: Any) -> Any:
        self.depth -= 1
        changes = [change for module, (held, _) in self.before.items() for change in _changes(module, held)]
        if self.depth or not changes:
            return result
        self._check(changes, [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
        written = [change for change in changes if change.is_alike()]
        ours = {storage(change.old) for change in written}
        # What is a view of a buffer is what it was, whatever the buffer becomes.
        result, values = pytree.tree_map_only(
            Tensor, lambda t: t.clone() if storage(t) in ours else t, (result, [change.new for change in written])
        )
        for change, value in zip(written, values, strict=True):
            assert change.old is not None
            change.old.copy_(value)
        for module, (held, apart) in self.before.items():
            module._buffers.clear()
            module._buffers.update(held)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(apart)
        return result

    def _check(self, changes: list[_Change], arguments: list[Tensor]) -> None:
        held = [tensor for module, (own, _) in self.before.items() for tensor in (*own.values(), *module._parameters.values())]
        storages = [storage(tensor) for tensor in held]
        for change in changes:
            module, name, old, new = change
            if new is None:
                raise self.refused(module, name, f"binds the buffer {{}} to None, where {_told(old)} was", _IN_PLACE.format(name))
            if change.is_alike():
                if storages.count(storage(old)) > 1:
                    what = "binds the buffer {} to another tensor, while another buffer or parameter shares its memory"
                    raise self.refused(module, name, what, _IN_PLACE.format(name))
            elif old is not None and storage(new) in made_of([old]):
                hint = _WHOLE if old.dtype == new.dtype else f"register it as a tensor of {_dtype(new)} to begin with"
                raise self.refused(module, name, f"makes {_told(new)} of the buffer {{}}, {_told(old)}, for later calls", hint)
            elif storage(new) in made_of(arguments):
                self.made.append(Made(module, name, [_hint(size) for size in new.shape], new.dtype))

    def path(self, module: torch.nn.Module, name: str) -> str:
        prefix = next((prefix for prefix, each in self.model.named_modules() if each is module), "")
        return f"{prefix}.{name}".removeprefix(".")

    def refused(self, module: torch.nn.Module, name: str, what: str, hint: str) -> Unsupported:
        return Unsupported(f"forward {what.format(self.path(module, name))}", type(module).__name__, hint)


def _changes(module: torch.nn.Module, held: Mapping[str, Tensor | None]) -> Iterator[_Change]:
    for name in {**held, **module._buffers}:
        old, new = held.get(name), module._buffers.get(name)
        if new is not old:
            yield _Change(module, name, old, new)


def made_of(sources: Iterable[Tensor]) -> set[int]:
    """The memory of tensors that depend on the numbers in these, as far as the trace has come. What is written into one is an operation
    that gives it."""
    mode = get_proxy_mode()
    assert mode is not None
    found = {storage(tensor) for tensor in sources}
    dependent: set[torch.fx.Node] = set()
    for node in mode.tracer.graph.nodes:
        tensors = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        reads = any(read in dependent or _holds(read, found) for read in node.all_input_nodes)
        if reads and not any(sign in str(node.target) for sign in _SIZES):
            dependent.add(node)
            found.update(map(storage, tensors))
    return found - {0}


def _holds(node: torch.fx.Node, storages: set[int]) -> bool:
    return any(isinstance(leaf, Tensor) and storage(leaf) in storages for leaf in pytree.tree_leaves(node.meta.get("val")))


def storage(tensor: Tensor | None) -> int:
    """What tells the memory of a tensor from that of others; 0 where there is none."""
    return tensor.untyped_storage()._cdata if tensor is not None and tensor.layout is torch.strided else 0


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size  # asking for the number itself would fix it


def _told(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"a tensor of {_dtype(tensor)} {list(tensor.shape)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _not_by_torch(model: torch.nn.Module, _: object) -> Any:
    """Instead of what torch does about the outermost module. A graph of torch.fx is interpreted there, without the hooks of `settled`."""

    is_graph = isinstance(model, torch.fx.GraphModule)

    def look(module: torch.nn.Module, name: str, tensor: Tensor | None) -> None:
        held = module._buffers.get(name)
        if is_graph and held is not None and tensor is not held:
            raise Unsupported(f"forward binds the buffer {name} to another tensor", type(module).__name__, _IN_PLACE.format(name))

    return register_module_buffer_registration_hook(look)
