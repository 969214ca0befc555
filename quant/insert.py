"""Rewrites an exported program into its quantized form, using the numbers that calibration found."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.aten.experts import EXPERTS
from . import edit, ops
from .constants import Constants
from .observers import Range, affine, covered
from .operands import FACTORS, Operands, operands, packet
from .placement import dynamic
from .record import ActivationRange, QuantSite, SiteResult
from .scheme import ActivationScheme, WeightScheme
from .weights import QuantizedWeight, quantize_weight

aten = torch.ops.aten

Weigher = Callable[[QuantSite, torch.Tensor, WeightScheme], QuantizedWeight]
"""From a site, its weight [N, K] and a scheme to the integers; `plain_weight` unless a method has something better."""
Ranges = Mapping[tuple[str, ActivationScheme], Range]
"""What calibration found for an activation, by the name of its node, under a scheme."""


def plain_weight(site: QuantSite, weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """Round to nearest."""
    return quantize_weight(weight, scheme)


def activation_range(scale: float, zero_point: int, scheme: ActivationScheme) -> ActivationRange:
    """What the record has of an activation with these numbers."""
    limits = covered(scale, zero_point, scheme)
    return ActivationRange(limits.low, limits.high, scale, zero_point)


def matrix_of(weight: torch.Tensor, found: Operands) -> torch.Tensor:
    """A weight [N, K], its output channels as rows, and as columns what products multiply one after the other: of a convolution its input
    channels last. Of experts those of all matrices, [E N, K]."""
    if found.operation == "experts":
        return (weight.transpose(1, 2) if found.transposed else weight).flatten(0, 1)
    matrix = weight.reshape(weight.shape[-2:]) if found.operation == "linear" else weight.movedim(1, -1).flatten(1)
    return matrix.t() if found.transposed else matrix


class Inserter:
    """One rewrite of one graph, in place. An activation gets one quantize/dequantize pair per scheme, a weight one set of buffers."""

    def __init__(
        self, graph: Graph, attributes: dict[str, Any], constants: Constants, ranges: Ranges, weigh: Weigher = plain_weight
    ) -> None:
        self.graph = graph
        self.attributes = attributes
        self.constants = constants
        self.ranges = ranges
        self.weigh = weigh
        self.made: dict[str, Node] = {}
        """The results of the sites, by their names."""
        self.nodes = {node.name: node for node in graph.nodes}
        self._activations: dict[tuple[Node, ActivationScheme], tuple[Node, ActivationRange | None]] = {}
        self._weights: dict[tuple[Node | str, bool, WeightScheme], tuple[Node, float]] = {}

    def run(self, sites: tuple[QuantSite, ...]) -> tuple[SiteResult, ...]:
        """Quantizes every site, in program order. Afterwards attributes hold exactly what the graph reads."""
        # The module that ran the calibration lacks the new buffers; the graph gets another owner after this.
        self.graph.owning_module = None
        results = tuple(self._site(site) for site in sites)
        self.graph.eliminate_dead_code()
        edit.drop_unread(self.graph, self.attributes)
        return results

    def _site(self, site: QuantSite) -> SiteResult:
        node = self.nodes[site.node]
        found = operands(node, self.constants)
        assert isinstance(found, Operands)
        with self.graph.inserting_before(node):
            if not site.scheme.quantized:
                result = self._narrow(node, found)
                noise = None
                ranges: tuple[ActivationRange, ...] = ()
            else:
                activations, ranges = self._activations_of(site, found, node)
                weight, noise = self._weight(found, site, node) if found.weight is not None else (None, None)
                result = self._quantized(node, found, site.scheme.activation, activations, weight)
        if result is not node:
            node.replace_all_uses_with(result)
            self.graph.erase_node(node)
        self.made[site.name] = result
        return SiteResult(site, ranges, noise)

    def _activations_of(self, site: QuantSite, found: Operands, like: Node) -> tuple[list[Node], tuple[ActivationRange, ...]]:
        chosen = site.scheme.activation
        if chosen is None:
            return list(found.activations), ()
        # Operations rewritten before have other names now; calibration knows the first.
        named = zip(found.activations, site.activations, strict=True)
        made = [self._activation(a, name, like, chosen) for a, name in named]
        return [node for node, _ in made], tuple(limits for _, limits in made if limits is not None)

    def _activation(self, activation: Node, name: str, like: Node, chosen: ActivationScheme) -> tuple[Node, ActivationRange | None]:
        key = activation, chosen
        if key not in self._activations:
            made = self._dynamic(activation, like, chosen) if dynamic(chosen) else self._static(activation, name, like, chosen)
            self._activations[key] = made
        return self._activations[key]

    def _static(self, activation: Node, name: str, like: Node, chosen: ActivationScheme) -> tuple[Node, ActivationRange]:
        limits = self.ranges[name, chosen]
        scale, zero_point = affine(limits, chosen)
        parameters = (scale, zero_point, chosen.qmin, chosen.qmax, chosen.dtype)
        q = self._call(ops.quantize_per_tensor, (self._float(activation, like), *parameters), like)
        return self._call(ops.dequantize_per_tensor, (q, *parameters), like), activation_range(scale, zero_point, chosen)

    def _dynamic(self, activation: Node, like: Node, chosen: ActivationScheme) -> tuple[Node, None]:
        real = self._float(activation, like)
        both = self._call(ops.choose_per_row, (real, not chosen.signed), like)
        low = -127 if chosen.signed else -128
        parameters = (*(self._call(operator.getitem, (both, i), like) for i in (0, 1)), low, 127, torch.int8)
        q = self._call(ops.quantize_per_row, (real, *parameters), like)
        return self._call(ops.dequantize_per_row, (q, *parameters, torch.float32), like), None

    def _float(self, node: Node, like: Node) -> Node:
        return node if node.meta["val"].dtype == torch.float32 else self._call(aten.to.dtype, (node, torch.float32), like)

    def _weight(self, found: Operands, site: QuantSite, like: Node) -> tuple[Node, float]:
        """The dequantized weight, [N, K] of a linear, in its own shape otherwise; operations with the same weight share it."""
        weight, scheme = found.weight, site.scheme.weight
        assert weight is not None and scheme is not None
        key = str(weight.target) if weight.op == "get_attr" else weight, found.transposed, scheme
        if key not in self._weights:
            value = self.constants.value(weight)
            matrix = matrix_of(value, found)
            quantized = self.weigh(site, matrix, scheme)
            if found.operation == "convolution":
                last = value.movedim(1, -1).shape
                values = quantized.values.reshape(last).movedim(-1, 1)
                # With the strides of a new tensor for dimensions of size 1, too: PyTorch chooses the strides of results by them.
                quantized = replace(quantized, values=values.clone(memory_format=torch.contiguous_format))
            base = weight.target if weight.op == "get_attr" else f"{site.name.split('#')[0]}.{weight.name}"
            read = self._read_weight(self._free_name(str(base)), quantized, scheme, like)
            if found.operation == "experts":
                read = self._call(aten.view.default, (read, [len(value), -1, matrix.shape[1]]), like)
            self._weights[key] = read, quantized.sqnr
        return self._weights[key]

    def _read_weight(self, name: str, quantized: QuantizedWeight, scheme: WeightScheme, like: Node) -> Node:
        zeros = torch.zeros(quantized.scales.shape, dtype=torch.int64)
        parts = {f"{name}_int{scheme.bits}": quantized.values, f"{name}_scale": quantized.scales, f"{name}_zero_point": zeros}
        self.attributes.update(parts)
        reads = [self._read(part, tensor, like) for part, tensor in parts.items()]
        if quantized.scales.dim() == 1:
            return self._call(ops.dequantize_per_channel, (*reads, 0, -scheme.qmax, scheme.qmax, torch.int8), like)
        group = quantized.values.shape[1] // quantized.scales.shape[1]
        return self._call(ops.dequantize_per_group, (*reads, -scheme.qmax, scheme.qmax, torch.int8, group, torch.float32), like)

    def _free_name(self, base: str) -> str:
        """A name under which a quantizer's buffers fit."""
        return edit.free_name(self.attributes, base, "_scale")

    def _quantized(
        self, node: Node, found: Operands, chosen: ActivationScheme | None, activations: list[Node], weight: Node | None
    ) -> Node:
        """The operation on its quantized operands; the node itself where these could be put in place."""
        if found.operation == "linear":
            return self._linear(node, found, activations[0], weight)
        if found.operation == "recurrence":
            assert weight is not None
            return self._recurrence(node, weight, "none" if chosen is None else "rows" if chosen.signed else "affine_rows")
        if found.operation == "experts":
            return self._experts(node, self._float(activations[0], node), weight)
        self._substitute(node, found, activations, weight)
        return node

    def _linear(self, node: Node, found: Operands, x: Node, w: Node | None) -> Node:
        """float32 linear; a bias that is not [N] is added after it, and narrower types are cast to and from float32."""
        bias = found.bias
        narrow = node.meta["val"].dtype != torch.float32
        if bias is not None and narrow:
            bias = self._call(aten.to.dtype, (bias, torch.float32), bias)
        vector = bias is not None and bias.meta["val"].dim() == 1 and str(bias.meta["val"].shape[0]) == str(node.meta["val"].shape[-1])
        result = self._call(aten.linear.default, (self._float(x, node), w, bias) if vector else (self._float(x, node), w), node)
        if bias is not None and not vector:
            result = self._call(aten.add.Tensor, (result, bias), node)
        return self._call(aten.to.dtype, (result, node.meta["val"].dtype), node) if narrow else result

    def _experts(self, node: Node, x: Node, w: Node | None) -> Node:
        """The product with matrices [E, N, K] in float32: of rows that choose one, or of a batch."""
        if packet(node) in FACTORS:
            product = self._call(aten.bmm.default, (x, self._call(aten.transpose.int, (w, 1, 2), node)), node)
        else:
            product = self._call(EXPERTS, (x, w, node.args[2]), node)
        return self._as(product, node, node)

    def _recurrence(self, node: Node, weight: Node, rounding: str) -> Node:
        """The same layer with another weight, its hidden state rounded before the product: a row of `graph/rows.py`."""
        return self._call(node.target, (*node.args[:3], weight, *node.args[4:6], rounding, *node.args[7:]), node)

    def _substitute(self, node: Node, found: Operands, activations: list[Node], weight: Node | None) -> None:
        """The same operation on the quantized operands, in its own type."""
        before = [*found.activations, *([found.weight] if found.weight is not None else [])]
        after = [*activations, *([weight] if weight is not None else [])]
        pairs = {old: self._as(new, old, node) for old, new in zip(before, after, strict=True)}
        node.args = tuple(pairs.get(a, a) if isinstance(a, Node) else a for a in node.args)

    def _narrow(self, node: Node, found: Operands) -> Node:
        """The same operation with its tensors in bf16, and its result in the type it had."""
        if found.operation == "recurrence":
            assert found.weight is not None
            weight = self._call(aten.to.dtype, (found.weight, torch.bfloat16), node)
            return self._recurrence(node, self._float(weight, node), "bf16")
        floats = [n for n in node.all_input_nodes if n.meta["val"].dtype == torch.float32]
        pairs = {n: self._call(aten.to.dtype, (n, torch.bfloat16), node) for n in floats}
        args = tuple(pairs.get(a, a) if isinstance(a, Node) else a for a in node.args)
        made = self._call(node.target, args, node, node.kwargs)
        return self._as(made, node, node)

    def _as(self, node: Node, old: Node, like: Node) -> Node:
        """`node` in the type of `old`."""
        dtype = old.meta["val"].dtype
        return node if node.meta["val"].dtype == dtype else self._call(aten.to.dtype, (node, dtype), like)

    def _read(self, name: str, tensor: torch.Tensor, like: Node) -> Node:
        return edit.read(self.graph, name, tensor, like)

    def _call(self, target: Any, args: tuple[Any, ...], like: Node, kwargs: Mapping[str, Any] | None = None) -> Node:
        return edit.call(self.graph, target, args, like, kwargs)
