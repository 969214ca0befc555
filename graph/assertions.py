"""What a model asserts of the numbers in its tensors, so that a trace of it does so in each call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.symbol import SymT, symbol_is_type

from .alone import alone
from .nodes import origin_of

_ASYNC, _SCALAR = torch.ops.aten._assert_async, torch.ops.aten._assert_scalar.default
_WITH_MESSAGE = {_ASYNC.default: _ASYNC.msg, _SCALAR: _SCALAR}
_POWERS = (torch.SymFloat.__pow__.__code__, torch.SymFloat.__rpow__.__code__)


@contextmanager
def recorded() -> Iterator[None]:
    """Lets torch.export record `assert` and `torch._check` of a number that `item()` reads. torch knows an assertion by its bytecode,
    whose exception may have a message; and writes those of integers into the graph, but forgets those of floats."""
    bytecode: Any = importlib.import_module("torch._dynamo.symbolic_convert")

    def defer(env: ShapeEnv, expression: Any, message: str, fx_node: torch.fx.Node | None = None) -> bool:
        holds = deferred(env, expression, message, fx_node)
        floats = any(symbol_is_type(s, SymT.UNBACKED_FLOAT) for s in expression.free_symbols)
        if holds and floats and get_proxy_mode() is not None and not _of_a_power():
            condition = torch.SymBool(SymNode(expression, env, bool, None))  # type: ignore[no-untyped-call]
            _SCALAR(condition, f"Runtime assertion failed for expression {expression}")  # as torch says it of integers
        return holds

    with alone():
        asserting, deferred = bytecode.get_assert_bytecode_sequence, ShapeEnv.guard_or_defer_runtime_assert
        # What follows the jump by which torch knows an assertion: the exception is loaded, and behind that a message, or none.
        bytecode.get_assert_bytecode_sequence = lambda with_msg: asserting(with_msg)[:1]
        ShapeEnv.guard_or_defer_runtime_assert = defer  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            bytecode.get_assert_bytecode_sequence = asserting
            ShapeEnv.guard_or_defer_runtime_assert = deferred  # type: ignore[method-assign]


def _of_a_power() -> bool:
    """Whether torch itself asserts that the base of a power is no less than 0, which it may well be where the exponent is whole."""
    frame = sys._getframe()
    while frame is not None and frame.f_code not in _POWERS:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def told(program: ExportedProgram) -> ExportedProgram:
    """The program, whose assertions say where they are. One without a message would be removed as a call whose result nobody uses."""
    for node in program.graph.nodes:
        if node.target in _WITH_MESSAGE:
            condition, message = (*node.args, "an assertion of the model does not hold")[:2]
            where = f": {origin_of(node)}".removesuffix(": ")
            node.target, node.args = _WITH_MESSAGE[node.target], (condition, f"{str(message).removesuffix(where)}{where}")
    program.graph_module.recompile()
    return program
