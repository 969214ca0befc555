"""Executes stitched programs with torch, point by point over whole domains: the meaning of the loop IR, without any code generator."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sashiko.graph.dims import Dim, Func, Poly, Symbol, evaluate
from sashiko.graph.interpret import ELEMENTWISE
from sashiko.graph.ir import Value
from sashiko.graph.types import boolean
from sashiko.stitch.loops import Body, LoopKernel, Node
from sashiko.stitch.program import ContractionItem, LoopItem, Program, Strided
from sashiko.stitch.views import unmerged

Env = Mapping[str, int]
Grid = dict[str, torch.Tensor]


def index_value(dim: Dim, env: Mapping[str, torch.Tensor | int]) -> torch.Tensor | int:
    """An index expression at every point of the domain."""
    if not isinstance(dim, Poly):
        return dim
    total: torch.Tensor | int = 0
    for mono, coefficient in dim.terms:
        term: torch.Tensor | int = coefficient
        for atom in mono:
            term = term * (env[atom.name] if isinstance(atom, Symbol) else _func(atom, env))
        total = total + term
    return total


def _func(atom: Func, env: Mapping[str, torch.Tensor | int]) -> torch.Tensor | int:
    a, b = (torch.as_tensor(index_value(x, env)) for x in atom.args)
    if atom.kind == "floordiv":
        return torch.div(a, b, rounding_mode="floor")
    return {"mod": torch.remainder, "min": torch.minimum, "max": torch.maximum}[atom.kind](a, b)


class BodyRun:
    """Evaluates a body over a grid; axis order is (r, c, k)."""

    def __init__(
        self,
        body: Body,
        buffers: list[torch.Tensor],
        sizes: tuple[int, int, int],
        env: Env,
        params: tuple[float, ...],
        acc: torch.Tensor | None = None,
    ) -> None:
        self.body, self.buffers, self.params, self.acc, self.sizes = body, buffers, params, acc, sizes
        grids = {
            "r": torch.arange(sizes[0]).view(-1, 1, 1),
            "c": torch.arange(sizes[1]).view(1, -1, 1),
            "k": torch.arange(sizes[2]).view(1, 1, -1),
        }
        self.env: dict[str, torch.Tensor | int] = {**env, **grids}
        self.values: list[torch.Tensor] = []
        self.failed = False

    def run(self) -> bool:
        """Evaluate and store; True when a check failed."""
        for n, node in enumerate(self.body.nodes):
            self.values.append(self.node(node))
            self.env[f"%{n}"] = self.values[-1]
        for store in self.body.stores:
            if store.buffer < 0:
                continue
            at = torch.as_tensor(index_value(store.index, self.env))
            value = self.values[store.node]
            at, value = torch.broadcast_tensors(at, value)
            self.buffers[store.buffer][at.reshape(-1)] = value.reshape(-1)
        return self.failed

    def node(self, node: Node) -> torch.Tensor:
        args = [self.values[a] for a in node.args]
        dtype = node.dtype.torch
        if node.op == "load":
            at = torch.as_tensor(index_value(node.index, self.env))
            data = self.buffers[node.buffer]
            if not args:
                assert at.numel() == 0 or (int(at.min()) >= 0 and int(at.max()) < data.numel()), f"out of range: {node}"
                return data[at]
            guard, other = args
            at, guard = torch.broadcast_tensors(at, guard)
            return torch.where(guard, data[torch.where(guard, at, 0)] if data.numel() else other, other)
        if node.op == "const":
            return torch.tensor(node.value, dtype=dtype).view(1, 1, 1)
        if node.op == "param":
            return torch.tensor(self.params[int(node.value)], dtype=dtype).view(1, 1, 1)
        if node.op == "index":
            return (
                torch.as_tensor(index_value(node.index, self.env)).to(dtype).view(-1, 1, 1)
                if isinstance(node.index, int)
                else torch.as_tensor(index_value(node.index, self.env)).to(dtype) + torch.zeros(1, 1, 1, dtype=dtype)
            )
        if node.op == "acc":
            assert self.acc is not None
            return self.acc
        if node.op == "check":
            self.failed |= not bool(args[0].all())
            return args[0]
        if node.op == "cast":
            return args[0].to(dtype)
        if node.op == "lookup":
            numbers = node.numbers or self.params[int(node.value) : int(node.value) + node.count]
            return torch.tensor(numbers)[args[0].view(torch.int32).long() % len(numbers)]
        if node.op == "reduce":
            axis = "rck".index(node.axis)
            shape = list(args[0].shape)
            shape[axis] = self.sizes[axis]
            return _reduce(node, args[0].expand(shape), axis)
        if node.op == "scan":
            shape = [*args[0].shape[:1], self.sizes[1], *args[0].shape[2:]]
            return (torch.cumsum if node.kind == "sum" else torch.cumprod)(args[0].expand(shape), 1, dtype=dtype)
        return ELEMENTWISE[node.op](*args)


def _reduce(node: Node, x: torch.Tensor, axis: int) -> torch.Tensor:
    if node.kind in ("argmax", "argmin"):
        return (torch.argmax if node.kind == "argmax" else torch.argmin)(x, axis, keepdim=True)
    if node.kind in ("max", "min"):
        return (torch.amax if node.kind == "max" else torch.amin)(x, axis, keepdim=True)
    if node.kind in ("any", "all"):
        return (torch.any if node.kind == "any" else torch.all)(x, axis, keepdim=True)
    return (torch.sum if node.kind == "sum" else torch.prod)(x, axis, keepdim=True, dtype=node.dtype.torch)


def run_kernel(kernel: LoopKernel, buffers: list[torch.Tensor], env: Env) -> bool:
    sizes = tuple(1 if d is None else evaluate(d, env) for d in (kernel.rows, kernel.cols, kernel.depth))
    return BodyRun(kernel.body, buffers, (sizes[0], sizes[1], sizes[2]), env, kernel.params).run()


def _view(strided: Strided, buffer: torch.Tensor, shape: tuple[Dim, ...], env: Env) -> torch.Tensor:
    sizes = [evaluate(d, env) for d in shape]
    return buffer.as_strided(sizes, [evaluate(s, env) for s in strided.strides], evaluate(strided.offset, env))


def _operand(strided: Strided, buffer: torch.Tensor, value: Value, env: Env) -> torch.Tensor:
    """What a pointer points to, in the shape of the operand: a left operand in pieces has more axes than that."""
    source = unmerged(value) if len(strided.strides) > value.tensor.rank else value
    return _view(strided, buffer, source.shape, env).reshape([evaluate(d, env) for d in value.shape])


def _contraction(item: ContractionItem, memory: dict[Value, torch.Tensor], env: Env) -> bool:
    anchor = item.anchor
    operands = [_operand(p, memory[p.value], v, env) for p, v in zip(item.pointers, anchor.inputs)]
    buffers = [memory[v] for v in item.operands]
    wide = [o.long() if not o.dtype.is_floating_point else o.float() if o.dtype != torch.float64 else o for o in operands]
    if anchor.op == "attention":
        q, k, v = wide
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        acc = q @ k.transpose(-1, -2)
        run = BodyRun(item.epilogue, buffers, (acc[..., 0].numel(), acc.shape[-1], 1), env, item.params, acc.reshape(-1, acc.shape[-1], 1))
        failed = run.run()
        score = run.values[item.epilogue.stores[0].node].expand(acc[..., 0].numel(), acc.shape[-1], 1).reshape(acc.shape)
        weights = (
            torch.nan_to_num(torch.softmax(score, -1), nan=0.0) if bool((score == -torch.inf).all(-1).any()) else torch.softmax(score, -1)
        )
        result = (weights @ v).to(anchor.dtype.torch)
        memory[anchor].copy_((result if anchor.tensor.order is None else result.permute(anchor.tensor.order)).reshape(-1))
        return failed
    acc = wide[0] @ (wide[1].transpose(-1, -2) if anchor.op.endswith("linear") else wide[1])
    acc = acc.to(anchor.dtype.torch)
    flat = acc.reshape(-1, acc.shape[-1], 1)
    return BodyRun(item.epilogue, buffers, (flat.shape[0], flat.shape[1], 1), env, item.params, flat).run()


def run_program(program: Program, given: Mapping[Value, torch.Tensor], env: Env) -> tuple[list[torch.Tensor], bool]:
    """Outputs of a segment, and whether an index was out of range. `given`: tensors of the inputs and constants."""
    memory: dict[Value, torch.Tensor] = {v: t.contiguous().reshape(-1) for v, t in given.items()}
    for value in program.stored:
        size = 1
        for d in value.shape:
            size *= evaluate(d, env)
        fill = False if value.dtype == boolean else 77
        memory[value] = torch.full((size,), fill, dtype=value.dtype.torch)
    failed = False
    for item in program.items:
        if isinstance(item, LoopItem):
            failed |= run_kernel(item.kernel, [memory[v] for v in item.operands], env)
        else:
            failed |= _contraction(item, memory, env)
    outputs = []
    for value in program.outputs:
        order = value.tensor.order
        sizes = [evaluate(d, env) for d in value.shape]
        if order is None:
            outputs.append(memory[value].reshape(sizes))
        else:
            physical = memory[value].reshape([sizes[a] for a in order])
            outputs.append(physical.permute([order.index(a) for a in range(len(order))]))
    return outputs, failed
