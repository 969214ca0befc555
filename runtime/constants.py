"""Constants of a plan and the watch over the weights they come from.

A `ConstantSet` is immutable: the derived tensors, and the versions and storages that the watched weights had just before. A call takes
the set it finds and keeps it alive, so a refresh in another thread never pulls memory from under it.
"""

from __future__ import annotations

import array
import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..cpu_codegen import symbols
from ..diagnostics.errors import InputError
from ..diagnostics.surroundings import CPU, undisturbed
from ..gpu_codegen.loops import VECTOR
from .plan import ConstantSource
from .runner import CHANGED, HEADER, Absent, Runner
from .shared import in_common

NO_VERSION = -1
_WORD = 8  # bytes
_PIECE = 8 * _WORD


@dataclass(frozen=True)
class Seen:
    """What a watched tensor looked like: its version (NO_VERSION: it has none), the address of its data, and, where versions do not tell
    every change, some of these: pieces of which the last one begins at byte `last`."""

    version: int
    pointer: int
    sample: bytes = b""
    last: int = 0


def look(tensor: torch.Tensor, before: Seen | None = None) -> Seen:
    """The present state of a watched tensor. before: an earlier one. To ask for a version that does not exist takes 8 us."""
    has_none = before is not None and before.version == NO_VERSION
    return _seen(NO_VERSION if has_none else _version(tensor), tensor, tensor)


def _seen(version: int, tensor: torch.Tensor, data: torch.Tensor) -> Seen:
    pointer = data.data_ptr()
    return Seen(version, pointer, *(_sample(data, pointer) if version == NO_VERSION or _uncounted(tensor) else ()))


def _uncounted(tensor: torch.Tensor) -> bool:
    """Whether versions do not tell every change. Batch norm writes its statistics, vectors that are no parameters, without counting it."""
    return tensor.dim() == 1 and tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)


def _sample(tensor: torch.Tensor, pointer: int) -> tuple[bytes, int]:
    """What is at the beginning, in the middle and at the end of a tensor on the CPU, and where the last piece begins: other numbers differ
    there. To compare all of it in each call would take as long as to read it."""
    storage = tensor.untyped_storage()
    size = min(tensor.nbytes, storage.nbytes() - (pointer - storage.data_ptr())) if tensor.is_cpu else 0
    if size < _WORD:
        return ctypes.string_at(pointer, size) if size > 0 else b"", 0
    piece = min(_PIECE, size // _WORD * _WORD)
    last = size - piece
    return b"".join([ctypes.string_at(pointer + at, piece) for at in (0, last // 2, last)]), last


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made under inference mode; it never gets a version, whatever `is_inference()` says later
        return NO_VERSION


@dataclass(frozen=True)
class Watched:
    """Tensors that constants are derived from: as they were then, and their data of then. Keeping the data keeps its address from
    being given to other data, which would look unchanged."""

    seen: tuple[Seen, ...]
    held: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Watched:
        """The present state of tensors. What other threads change meanwhile is noticed at the next look."""
        held = tuple(tensor.detach() for tensor in tensors)
        return cls(tuple(map(_seen, map(_version, tensors), tensors, held)), held)


_WATCHED = WeakTensorKeyDictionary()
"""The tensors that are watched by any model."""


@lru_cache(maxsize=1)
def _count_steps() -> None:
    """Makes every step of an optimizer, from now on, count as a change of what models watch: fused kernels do not count what they write.
    What Dynamo traces of a step would count only while it is traced."""
    register_optimizer_step_post_hook(torch.compiler.disable(_count))  # type: ignore[no-untyped-call]


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Gradients may be gone by now. Parameters of other models are left alone: a count of what did not change would be an error in
    # backward passes that are still to come.
    watched = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in _WATCHED]
    torch.autograd.graph.increment_version(watched)


class Handles:
    """C handles of tensors, for native code that asks for their versions; they keep the tensors alive."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.addresses: list[int] = [_handle_address(h) for h in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))]
        weakref.finalize(self, _free, tuple(self.addresses))


def _handle_address(capsule: object) -> int:
    if isinstance(capsule, int):
        return capsule
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, None) or 0


def _free(addresses: tuple[int, ...]) -> None:
    free = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(symbols.address("aoti_torch_delete_tensor_object") or 0)
    for address in addresses:
        free(address)


class ConstantSet:
    """Derived constants. `pointers[i]` is the address of constant i; `watch` that of the watch words of runner.py; `frame` that of
    a frame that only watches. `in_python`: the watched tensors that native code does not look at."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], watched: Watched, handles: Sequence[int]) -> None:
        self.tensors = tensors
        self.pointers = tuple(tensor.data_ptr() for tensor in tensors)
        self._watched = watched
        self.seen = seen = watched.seen
        # Native code must not ask for a version that does not exist: that throws. It compares whole words.
        native = [n for n, state in enumerate(seen) if handles and state.version != NO_VERSION and not 0 < len(state.sample) < _WORD]
        self.in_python = tuple(n for n in range(len(seen)) if n not in set(native))
        self._samples = array.array("q", b"".join(seen[n].sample for n in native))
        at = self._samples.buffer_info()[0]
        words: list[int] = []
        for n in native:
            state, size = seen[n], len(seen[n].sample)
            words += (handles[n], state.version, state.pointer, at, size // (3 * _WORD), state.last)
            at += size
        self._rows = array.array("q", words or [0])
        self._watch = array.array("q", [self._rows.buffer_info()[0], len(native)])
        self.watch = self._watch.buffer_info()[0]
        self._frame = array.array("q", [0] * 7 + [self.watch] + [0] * (HEADER - 8))
        self.frame = self._frame.buffer_info()[0]


class Constants:
    """All constants of a plan. `current` is the set to use; `changed` and `refresh` follow the user's weights."""

    def __init__(self, sources: Sequence[ConstantSource], runner: Runner | Absent, device: torch.device = CPU) -> None:
        self._sources, self._device = tuple(sources), device
        self._run = runner.run
        watched = {id(tensor): tensor for source in sources for tensor in source.watched}
        self._watched = tuple(watched.values())
        self._position = {key: position for position, key in enumerate(watched)}
        if watched:
            _count_steps()
            for tensor in self._watched:
                _WATCHED[tensor] = None
        native = bool(watched) and runner.watch and _native_watch_available()
        self._handles = Handles(self._watched) if native else None
        now = Watched.of(self._watched)
        with undisturbed(device):
            self.current = self._set(tuple(_derived(source, None, device) for source in self._sources), now)

    def _set(self, tensors: tuple[torch.Tensor, ...], watched: Watched) -> ConstantSet:
        return ConstantSet(tensors, watched, self._handles.addresses if self._handles is not None else ())

    def changed_in_python(self, known: ConstantSet) -> bool:
        """Whether a weight that the native table does not hold has changed since `known`: 200 ns for each such weight, 1 us for one
        without a version."""
        return any(look(self._watched[n], known.seen[n]) != known.seen[n] for n in known.in_python)

    def changed(self, known: ConstantSet) -> bool:
        """Whether any weight has changed since `known`."""
        natively = self._handles is not None and self._run(known.frame) == CHANGED
        return natively or self.changed_in_python(known)

    def refresh(self) -> None:
        """Derives again what comes from changed weights. The caller holds a lock. InputError when one changed shape or dtype."""
        # First the look, then the derivation: a change in between is noticed by the next call.
        now = Watched.of(self._watched)
        before = self.current
        # What lies in the same memory has changed, too, whichever of its versions counts that: `.data` has one of its own.
        memory = [data.untyped_storage().data_ptr() for data in now.held]
        written = {memory[n] for n, state in enumerate(now.seen) if state != before.seen[n]}

        def tensor(source: ConstantSource, old: torch.Tensor) -> torch.Tensor:
            touched = any(memory[self._position[id(w)]] in written for w in source.watched)
            return _derived(source, old, self._device) if touched else old

        with undisturbed(self._device):
            tensors = tuple(tensor(source, old) for source, old in zip(self._sources, before.tensors, strict=True))
        self.current = self._set(tensors, now)


def _derived(source: ConstantSource, old: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        tensor = source.derive().detach()
    tensor = tensor.contiguous() if source.dense else tensor
    label = source.label or "a constant"
    if tensor.device != device:
        hint = f"a model compiled for {device} runs there; move the weights back or compile again"
        raise InputError(f"{label} is on {tensor.device}", hint=hint)
    if old is not None and (tensor.shape != old.shape or tensor.dtype != old.dtype):
        was, now = (f"{t.dtype}{list(t.shape)}" for t in (old, tensor))
        raise InputError(f"{label} was {was} when the model was compiled and is now {now}", hint="compile the model again")
    if tensor.is_cpu:
        return in_common(tensor, source.watched)
    return tensor.clone() if source.dense and tensor.data_ptr() % VECTOR else tensor


def _native_watch_available() -> bool:
    """Whether this torch gives C handles of tensors and a way to free them."""
    aoti = getattr(torch._C, "_aoti", None)
    return hasattr(aoti, "unsafe_alloc_void_ptrs_from_tensors") and bool(symbols.address("aoti_torch_delete_tensor_object"))
