"""Rewrites an exported program into its quantized form, using the numbers that calibration found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops
from .constants import Constants
from .observers import Range, affine
from .placement import Operands, operands
from .record import QuantSite, SiteResult
from .scheme import Scheme, WeightScheme

aten = torch.ops.aten


@dataclass(frozen=True)
class QuantizedWeight:
    """values: int8 [N, K] in [-127, 127]; scales: float32 [N], positive; sqnr: signal to quantization noise in decibels."""

    values: torch.Tensor
    scales: torch.Tensor
    sqnr: float


def quantize_weight(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """weight: float [N, K], finite. A channel that is zero throughout gets scale 1."""
    real = weight.detach().to(torch.float32)
    peak = real.abs().amax(1)
    if scheme.granularity == "tensor":
        peak = peak.amax().expand(real.shape[0])
    # Below 2^-126 the reciprocal would overflow; such weights round to zero, an error of less than 2^-126.
    scales = torch.where(peak > 0, (peak / 127).clamp_min(2.0**-126), torch.ones_like(peak)).contiguous()
    values = torch.clamp(torch.round(real / scales[:, None]), -127, 127).to(torch.int8)
    noise = (real.double() - values.double() * scales.double()[:, None]).square().sum().item()
    signal = real.double().square().sum().item()
    sqnr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal > 0 else -math.inf
    return QuantizedWeight(values, scales, sqnr)


class Inserter:
    """One rewrite of one graph, in place. Each activation gets one quantize/dequantize pair, each weight one set of buffers."""

    def __init__(self, graph: Graph, attributes: dict[str, Any], constants: Constants, scheme: Scheme) -> None:
        self.graph = graph
        self.attributes = attributes
        self.constants = constants
        self.scheme = scheme
        self.nodes = {node.name: node for node in graph.nodes}
        self._activations: dict[Node, Node] = {}
        self._weights: dict[tuple[Node | str, bool], tuple[Node, float]] = {}

    def run(self, ranges: Mapping[QuantSite, Range]) -> tuple[SiteResult, ...]:
        """Quantizes every site of `ranges`, in program order. Afterwards attributes hold exactly what the graph reads."""
        # The module that ran the calibration lacks the new buffers; the graph gets another owner after this.
        self.graph.owning_module = None
        results = tuple(self._site(site, limits) for site, limits in ranges.items())
        self.graph.eliminate_dead_code()
        read = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        for name in [n for n in self.attributes if n not in read]:
            del self.attributes[name]
        return results

    def _site(self, site: QuantSite, limits: Range) -> SiteResult:
        node = self.nodes[site.node]
        found = operands(node, self.constants)
        assert isinstance(found, Operands)
        scale, zero_point = affine(limits, self.scheme.activation)
        with self.graph.inserting_before(node):
            x = self._activation(found.activation, node, scale, zero_point)
            w, sqnr = self._weight(found, site, node)
            result = self._linear(node, x, w, found.bias)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
        return SiteResult(site, limits.low, limits.high, scale, zero_point, sqnr)

    def _activation(self, activation: Node, like: Node, scale: float, zero_point: int) -> Node:
        if activation not in self._activations:
            chosen = self.scheme.activation
            parameters = (scale, zero_point, chosen.qmin, chosen.qmax, chosen.dtype)
            q = self._call(ops.quantize_per_tensor, (activation, *parameters), like)
            self._activations[activation] = self._call(ops.dequantize_per_tensor, (q, *parameters), like)
        return self._activations[activation]

    def _weight(self, found: Operands, site: QuantSite, like: Node) -> tuple[Node, float]:
        """The dequantized weight [N, K]; products with the same weight share it."""
        key: tuple[Node | str, bool] = (str(found.weight.target) if found.weight.op == "get_attr" else found.weight, found.transposed)
        if key not in self._weights:
            value = self.constants.value(found.weight)
            matrix = value.reshape(value.shape[-2:])
            quantized = quantize_weight(matrix.t() if found.transposed else matrix, self.scheme.weight)
            base = found.weight.target if found.weight.op == "get_attr" else f"{site.name.split('#')[0]}.{found.weight.name}"
            name = self._free_name(str(base))
            parts = {
                f"{name}_int8": quantized.values,
                f"{name}_scale": quantized.scales,
                f"{name}_zero_point": torch.zeros(len(quantized.scales), dtype=torch.int64),
            }
            self.attributes.update(parts)
            reads = [self._read(part, tensor, like) for part, tensor in parts.items()]
            dequantized = self._call(ops.dequantize_per_channel, (*reads, 0, -127, 127, torch.int8), like)
            self._weights[key] = dequantized, quantized.sqnr
        return self._weights[key]

    def _free_name(self, base: str) -> str:
        """A name under which three buffers fit: it must not be, or lie below, an attribute that is a tensor."""
        parts = base.split(".")
        for i in range(1, len(parts)):
            if ".".join(parts[:i]) in self.attributes:
                base = base.replace(".", "_")
                break
        name, count = base, 1
        while f"{name}_int8" in self.attributes:
            count += 1
            name = f"{base}_{count}"
        return name

    def _linear(self, node: Node, x: Node, w: Node, bias: Node | None) -> Node:
        """float32 linear; a bias that is not [N] is added after it, and narrower types are cast to and from float32."""
        narrow = node.meta["val"].dtype != torch.float32
        if bias is not None and narrow:
            bias = self._call(aten.to.dtype, (bias, torch.float32), bias)
        vector = bias is not None and bias.meta["val"].dim() == 1 and str(bias.meta["val"].shape[0]) == str(node.meta["val"].shape[-1])
        result = self._call(aten.linear.default, (x, w, bias) if vector else (x, w), node)
        if bias is not None and not vector:
            result = self._call(aten.add.Tensor, (result, bias), node)
        return self._call(aten.to.dtype, (result, node.meta["val"].dtype), node) if narrow else result

    def _read(self, name: str, tensor: torch.Tensor, like: Node) -> Node:
        # `create_node`: `get_attr` would look for the attribute in the owning module, which gets it later.
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = like.meta["val"].fake_mode.from_tensor(tensor, static_shapes=True)
        return node

    def _call(self, target: Any, args: tuple[Any, ...], like: Node) -> Node:
        """A call placed where `like` comes from, with the type of its result worked out."""
        node = self.graph.call_function(target, args)
        for key in ("nn_module_stack", "stack_trace"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        with like.meta["val"].fake_mode:
            node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
        return node
