"""What a call takes at least on this machine, from the work in it and the measured peaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...kernels.peaks import Peaks
    from .cases import Example

_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Work:
    """What a call of a model does. operations: multiplications and additions of matrix products, convolutions, attention and recurrent
    layers.

    weights: how many numbers their weights are (tables of embeddings are not read as a whole, and of experts those that are chosen).
    moved: bytes of inputs and results.
    """

    operations: int
    weights: int
    moved: int


@dataclass(frozen=True)
class Limit:
    """The least milliseconds of a call, and what sets them, such as "int8 products" or "read from L3"."""

    ms: float
    by: str


def kind(precision: str) -> str:
    """The kind of products of a precision: every preset of quantization computes in int8."""
    return precision if precision in _BYTES else "int8"


def limit(work: Work, precision: str, threads: int, peaks: Peaks) -> Limit:
    """The larger of two times: that of all products at their peak, and that of moving weights, inputs and results once.

    They are moved at the bandwidth of the level that holds them all. The cores count as `threads` times one.
    """
    products = kind(precision)
    weights = work.weights * _BYTES.get(products, 1)
    level = peaks.holding(weights + work.moved)
    reads = weights > work.moved
    computed = work.operations / peaks.giga(products)
    moved = (weights + work.moved) / (level.read if reads else level.copy)
    by = f"{products} products" if computed >= moved else f"{'read from' if reads else 'copy in'} {level.level}"
    return Limit(max(computed, moved) / threads * 1e-6, by)


def work_of(example: Example) -> Work:
    """Runs the example once under torch's counter of operations."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

    from ...graph.aten.experts import GROUPED

    def attention(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(sdpa_flop(q, k, v))

    def recurrent(x: Any, w: Any, w_state: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(2 * math.prod(x[:2]) * (math.prod(w) + math.prod(w_state)))

    def grouped(x: Any, w: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(2 * math.prod(x) * w[-1])

    unread = 0

    class Experts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal unread
            if func.overloadpacket is GROUPED:
                w, ends = args[1], args[2]
                unread += w.numel() // len(w) * int((ends.diff(prepend=ends.new_zeros(1)) == 0).sum())
            return func(*args, **(kwargs or {}))

    # torch's table knows the attention of GPUs only, no products of groups, and no layer of oneDNN's.
    aten: Any = torch.ops.aten
    layers: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention, aten.mkldnn_rnn_layer: recurrent, GROUPED: grouped,
    }
    experts = Experts()  # type: ignore[no-untyped-call]
    example.model.requires_grad_(False)  # the counter follows gradients, and a view of a parameter may have none here
    with experts, FlopCounterMode(display=False, custom_mapping=layers) as counter, torch.no_grad():
        results = torch.utils._pytree.tree_leaves(example.model(*example.args))
    modules = (module for module in example.model.modules() if not isinstance(module, torch.nn.Embedding))
    weights = {id(p): p.numel() for module in modules for p in module.parameters(recurse=False)}
    tensors = [t for t in (*example.args, *results) if isinstance(t, torch.Tensor)]
    return Work(counter.get_total_flops(), sum(weights.values()) - unread, sum(t.numel() * t.element_size() for t in tensors))
