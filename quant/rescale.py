"""A program in which the inputs of some linears are divided by constants, and their weights multiplied: the same function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from .constants import Constants
from .edit import add_attribute, call, drop_unread
from .operands import FACTORS, Operands, operands, packet
from .program import Program, copied
from .record import Placement, QuantSite

aten = torch.ops.aten


def rescalable(node: Node, constants: Constants) -> torch.Tensor | None:
    """The weight of a linear, float32 [N, K]; None where its inputs cannot be multiplied one by one (a matrix repeated for a batch)."""
    found = operands(node, constants)
    if not isinstance(found, Operands) or found.operation != "linear" or found.weight is None:
        return None
    if found.weight is not node.args[FACTORS[packet(node)][1]]:
        return None
    value = constants.value(found.weight)
    matrix = value.reshape(value.shape[-2:]).to(torch.float32)
    return matrix.t() if found.transposed else matrix


class Rescaling:
    """Changes a copy of a program, activation by activation. Names of nodes stay.

    A weight that something else reads too is left alone, and the linears get one of their own.
    """

    def __init__(self, program: Program, placement: Placement) -> None:
        self._program = program
        self._graph = copied(program.graph)
        self._attributes = dict(program.attributes)
        self._constants = Constants(self._graph, self._attributes)
        self._nodes = {node.name: node for node in self._graph.nodes}
        self._sites = {site.node: site for site in placement.sites}

    def program(self) -> Program:
        drop_unread(self._graph, self._attributes)
        return replace(self._program, graph=self._graph, attributes=self._attributes)

    def divide(self, name: str, sites: Sequence[QuantSite], factors: torch.Tensor) -> str:
        """Divides an activation by factors [K] for the linears of these sites. Returns the name of the quotient.

        Its producer takes the division over when nobody else reads its result: the gain and bias of a layer norm, the weight and bias of
        a linear with scales by channel. Else it is a multiplication of its own.
        """
        activation, linears = self._nodes[name], [self._nodes[site.node] for site in sites]
        self._multiply_weights(linears, sites, factors)
        reads = sum(argument is activation for user in activation.users for argument in user.args)
        if set(activation.users) <= set(linears) and reads == len(linears) and self._absorb(activation, factors):
            return name
        dtype = activation.meta["val"].dtype
        with self._graph.inserting_before(linears[0]):
            inverse = add_attribute(self._graph, self._attributes, f"{name}_smoothing", factors.reciprocal().to(dtype), linears[0])
            quotient = call(self._graph, aten.mul.Tensor, (activation, inverse), linears[0])
        for linear in linears:
            linear.update_arg(FACTORS[packet(linear)][0], quotient)
        return quotient.name

    def _multiply_weights(self, linears: Sequence[Node], sites: Sequence[QuantSite], factors: torch.Tensor) -> None:
        for along in (factors, factors[:, None]):  # of weights [N, K], and of those [K, N]: one parameter may be read as both
            pairs = [(n, site) for n, site in zip(linears, sites, strict=True) if (packet(n) == "linear") is (along is factors)]
            done: dict[Node | str, Node] = {}
            for linear, site in pairs:
                position = FACTORS[packet(linear)][1]
                weight = linear.args[position]
                assert isinstance(weight, Node)
                key = str(weight.target) if weight.op == "get_attr" else weight
                if key not in done:
                    value = self._constants.value(weight) * along.to(weight.meta["val"].dtype)
                    done[key] = self._replaced(weight, value, f"{site.name.split('#')[0]}.weight", linear, [n for n, _ in pairs])
                linear.update_arg(position, done[key])

    def _absorb(self, producer: Node, factors: torch.Tensor) -> bool:
        """Whether the producer now gives its result divided."""
        kind = packet(producer)
        if kind == "layer_norm" and len(producer.args) > 1 and len(list(producer.args[1])) == 1:  # type: ignore[arg-type]
            return self._scale_channels(producer, 2, factors, ones=True)
        site = self._sites.get(producer.name)
        whole = site is not None and site.scheme.weight is not None and site.scheme.weight.granularity == "tensor"
        return kind == "linear" and not whole and self._scale_channels(producer, 1, factors, ones=False)

    def _scale_channels(self, producer: Node, first: int, factors: torch.Tensor, ones: bool) -> bool:
        """Divides the gain or weight at `first` and the bias after it. ones: a missing gain is 1."""
        gain, bias = (*producer.args[first : first + 2], None, None)[:2]
        given = [part for part in (gain, bias) if isinstance(part, Node)]
        if producer.kwargs or not all(map(self._constants.is_constant, given)):
            return False
        along = factors if ones else factors[:, None]
        values = {part: self._constants.value(part) for part in given}
        if isinstance(gain, Node) and values[gain].dim() != along.dim():
            return False

        def divided(part: Node, by: torch.Tensor) -> Node:
            value = values[part] / by.to(values[part].dtype)
            return self._replaced(part, value, f"{producer.name}.{part.name}", producer, (producer,))

        if isinstance(gain, Node):
            gain = divided(gain, along)
        elif ones:
            with self._graph.inserting_before(producer):
                value = factors.reciprocal().to(producer.meta["val"].dtype)
                gain = add_attribute(self._graph, self._attributes, f"{producer.name}.weight", value, producer)
        if isinstance(bias, Node):
            bias = divided(bias, factors)
        producer.args = (*producer.args[:first], gain, bias, *producer.args[first + 2 :])
        return True

    def _replaced(self, old: Node, value: torch.Tensor, base: str, like: Node, users: Sequence[Node]) -> Node:
        """Reads `value`, under the old name when all who read that are `users`, and as nothing else. A parameter stays one."""
        sources = [self._attributes[name] for name in self._constants.sources(old)]
        if any(isinstance(source, torch.nn.Parameter) for source in sources):
            value = torch.nn.Parameter(value, requires_grad=False)
        reads = [(node, user) for node in self._graph.nodes if node.op == "get_attr" and node.target == old.target for user in node.users]
        once = len({user for _, user in reads}) == sum(user.args.count(node) for node, user in reads)
        if old.op == "get_attr" and once and {user for _, user in reads} <= set(users):
            self._attributes[str(old.target)] = value
            return old
        with self._graph.inserting_before(like):
            return add_attribute(self._graph, self._attributes, str(old.target) if old.op == "get_attr" else base, value, like)
