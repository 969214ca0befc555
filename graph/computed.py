"""Tensors that are computed whenever they are read, such as the weight of a layer that holds integers. What is written into one is lost:
it is refused where PyTorch runs the model, and where it is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.traceback import annotate
from torch.utils import _pytree as pytree

from ..diagnostics.errors import Unsupported
from .nodes import origin_of, tensors, written
from .rebound import storage

_MARK = "sashiko.computed"


def computed(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` gives, to be read only."""
    if torch.compiler.is_dynamo_compiling():
        with annotate({_MARK: True}):
            return make()
    with torch.inference_mode(False):  # where versions are counted
        found = make()
    if (mode := get_proxy_mode()) is not None:
        slot = get_proxy_slot(found, mode.tracer, None)
        if slot is not None:
            slot.proxy.node.meta["custom"] = {**(slot.proxy.node.meta.get("custom") or {}), _MARK: True}
    return found.as_subclass(ReadOnly) if type(found) is torch.Tensor else found


def refuse_writes(graph: Graph) -> None:
    """Unsupported for a traced graph, not yet functional, that writes into what was computed."""
    made = [node for node in graph.nodes if _MARK in (node.meta.get("custom") or {}) and node.op != "placeholder"]
    read_only = {storage(tensor) for node in made for tensor in tensors(node)}
    if not read_only:
        return
    for node in graph.nodes:
        if any(storage(tensor) in read_only - {0} for each in written(node) for tensor in tensors(each)):
            raise _lost(origin_of(node))


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        return storage(tensor)
    except NotImplementedError:  # of what torch.func wraps
        return None


def _lost(where: str = "") -> Unsupported:  # no TypeError, of which Python makes another operation
    what = "the model writes into the weight of a quantized layer, which is computed from integers: that would be lost"
    return Unsupported(what, where, "if its first call alone does so, call the model once before quantize_; or exclude the layer")


class ReadOnly(torch.Tensor):
    """What has its memory is read only, too, such as views and `.data`; all else that is computed of it is not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            before = [(t, t._version) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls)]
            if func != torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                result = func(*args, **(kwargs or {}))
                if all(t._version == version for t, version in before):
                    memory = {_memory(t) for t, _ in before}
                    return pytree.tree_map_only(torch.Tensor, lambda t: t.as_subclass(cls) if _memory(t) in memory else t, result)
        raise _lost()
