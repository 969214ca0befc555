"""One call of an exported program, node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from .calibrate import selection
from .program import Call, Program, scratch_attributes


class Run(Interpreter):
    """Several runs of one program may advance side by side; none sees what another writes to buffers.

    env: the values that are still to be read, by node. select: the mask of an activation, by its node and value. batch: the name of what
    it runs on.
    """

    def __init__(self, program: Program, call: Call) -> None:
        super().__init__(torch.nn.Module(), graph=program.graph)
        values = program.gate.arrange(call.args, call.kwargs)
        self.args_iter = iter(program.graph.process_inputs(*values))
        self.select = selection(program.masks, dict(zip(program.gate.names, values, strict=True)), call.name)
        self.batch = call.name
        self._attributes = scratch_attributes(program)

    def fetch_attr(self, target: str) -> Any:
        return self._attributes[target]

    def step(self, node: Node) -> None:
        """Computes a node; all before it must have been computed."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # as in a call of the program as a module
            self.env[node] = self.run_node(node)

    def forget(self, node: Node) -> None:
        """Drops what `node` was the last to read."""
        for last in self.user_to_last_uses.get(node, ()):
            del self.env[last]

    def finish(self) -> list[Any]:
        """Computes everything. Returns the results as a flat list."""
        for node in self.graph.nodes:
            self.step(node)
            self.forget(node)
        result = self.env[self.graph.output_node()]
        return list(result) if isinstance(result, (list, tuple)) else [result]


def output_values(graph: Graph) -> list[Any]:
    """What `Run.finish` returns, as nodes; values that are not computed as they are."""
    (returned,) = graph.output_node().args
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def attribute(module: GraphModule, name: str) -> Any:
    """The value of a get_attr target."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value
