"""From a model and one batch to an exported program: torch.export with as many free dimensions as the model allows."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from torch import nn
from torch._guards import detect_fake_mode
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..diagnostics.errors import CalibrationError, Unsupported
from ..graph import numbers
from ..graph.alone import alone
from ..graph.capture import assumptions
from ..graph.examples import called, first_line, unchanged
from ..graph.exporting import any_names, quiet, traced, tracing, without_writes
from ..graph.guards import ask
from ..graph.lower import PART_OF
from ..graph.nesting import parts
from ..graph.oblivious import oblivious
from ..graph.refusals import raised_at, translated
from . import edit
from .masking import MaskArgument
from .module import ConstantLeaf, FreeDim, Gate, Leaf, QuantizedModule, TensorLeaf
from .spelling import respell

# Operations in a quotient, remainder or the like in the expression of a size: of images of any size in encoders and detectors, and in what
# cuts images into windows as well. What goes beyond is to be found before torch has spent long on it.
_LONGEST = 24


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model. name: of the batch that it stands for, in messages."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = "the batch"

    def map(self, change: Any) -> Call:
        """The same call with `change` applied to every tensor."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def own(self) -> Call:
        """The same call with tensors of its own: whoever made it may use its memory again."""
        return self.map(lambda t: t.detach().clone())

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Program:
    """An exported model with tensors of its own, which writes to none but parameters, buffers and arguments, at its end.

    attributes: every get_attr target; parameters do not require gradients. fixed: which sizes could not be free and why, also a note.
    masks: the arguments that say which positions count.
    """

    graph: Graph
    attributes: Mapping[str, torch.Tensor]
    gate: Gate
    notes: tuple[str, ...]
    fixed: str = ""
    masks: tuple[MaskArgument, ...] = ()


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call as it was given, since hooks and wrappers of `forward` see what is by position and what by name; the names in the order of
    `forward`."""
    names = inspect.signature(model.forward).parameters
    return Call(args, {**{name: kwargs[name] for name in names if name in kwargs}, **kwargs})


def named(model: nn.Module, call: Call) -> Mapping[str, Any]:
    """The arguments by the names that `forward` has for them."""
    return {**inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments, **call.kwargs}


@alone()
def export(model: nn.Module, call: Call) -> Program:
    """Exports `model` for calls like `call`. The model is not changed and shares no memory with the program.

    Tried in this order, the first that exports and gives the model's own results on `call` wins: with a batch dimension of size 1
    doubled (a size of 1 would be fixed), with the sizes as they are (free lengths serve more than a free batch), with the batch dimension
    alone free, with every size fixed; then all of these again where the numbers among the model's buffers are known (`graph.numbers`), and
    become part of the program. Raises Unsupported when none does, and CalibrationError when the model itself fails on `call`.
    """
    try:
        expected = called(model, call.args, call.kwargs)
    except Exception as error:
        what = f"the model failed on {call.name}: {first_line(error)}"
        where = raised_at(error) or "calibration data"
        raise CalibrationError(what, where, "does model(*batch) work outside of quantize?") from error
    failures: list[Exception] = []
    with unchanged(model), tracing(), any_names():
        program = _exported(model, call, expected, failures) or _with_numbers(model, call, expected)
    if program is not None:
        return program
    reason = translated(failures[-1])
    what = f"{type(model).__name__} cannot be exported: {reason.what}"
    raise Unsupported(what, reason.where, reason.hint or "quantize the parts of the model that torch.export accepts") from failures[-1]


def _exported(model: nn.Module, call: Call, expected: Any, failures: list[Exception]) -> Program | None:
    """What the first attempt that succeeds gives; the reasons of the others are added to `failures`."""
    for example, axes, which in _attempts(call):
        why = translated(failures[-1]).what if failures else "calibrate with larger batches to free it"
        try:
            exported = without_writes(_torch_export(model, example, axes))
            program = _program(model, exported, f"{which}: {why}" if which else "")
        except Exception as error:  # torch.export raises whatever user code and its own passes raise
            failures.append(error)
            continue
        difference = _difference(program, call, expected)
        if not difference:
            return program
        failures.append(Unsupported(difference, type(model).__name__))
    return None


def _with_numbers(model: nn.Module, call: Call, expected: Any) -> Program | None:
    """The same where numbers among the model's buffers are known, if there are any."""
    if not numbers.are_in(model):
        return None
    try:
        with numbers.known(model) as found:
            program = _exported(model, call, expected, [])
    except Unsupported:
        return None
    if program is None:
        return None
    return replace(program, notes=(*program.notes, f"sizes depend on buffers, whose numbers are part of it: {found.names()}"))


def _attempts(call: Call) -> Iterator[tuple[Call, range, str]]:
    """Examples, the axes whose sizes are free in them, and what to tell the user of the others, before the reason."""
    shaped = [t for t in call.tensors() if t.dim()]
    every, batch = range(max((t.dim() for t in shaped), default=0)), range(1)
    all_but_batch = "all sizes but that of the batch are fixed to those of the first batch"
    ones = [t.shape[0] == 1 for t in shaped]
    single = bool(ones) and all(ones)
    larger = call.map(lambda t: torch.cat([t, t]) if t.dim() else t) if single else call
    if single:
        yield larger, every, ""
    yield call, every, "the batch dimension is fixed to 1 as in the first batch" if any(ones) else ""
    if single or not any(ones):
        yield larger, batch, all_but_batch
    yield call, range(0), "every size is fixed to that of the first batch"


def copied(graph: Graph) -> Graph:
    """The graph once more, to be changed."""
    with quiet():
        return copy.deepcopy(graph)


def scratch(program: Program) -> QuantizedModule:
    """The program to run; one that writes to its buffers gets copies of them, so that no state is carried over."""
    return QuantizedModule.build(scratch_attributes(program), program.graph, program.gate)


def scratch_attributes(program: Program) -> Mapping[str, torch.Tensor]:
    """What a run of the program reads and may write."""
    writes = any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in program.graph.nodes)
    return copy.deepcopy(dict(program.attributes)) if writes else program.attributes


class _PlainSizes(TorchFunctionMode):
    """Raises Unsupported once a size is a longer expression of the free ones than a model computes that serves many sizes. Windows that
    pad and cut an image of any size make each layer's sizes functions of those before: torch would reason about them for minutes. Sums
    and products, such as the number of places on all levels of a detector, are as easy as the functions in them.

    While sizes are such functions, torch does not keep what it finds for an operation to give it again for the same one: it would make
    each result twice, the second time from what it keeps, and reason about its sizes each time.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling() or not isinstance(result, torch.Tensor):  # it looks into this, too, for torch.cond
            return result
        sizes: tuple[object, ...] = tuple(result.shape)  # int or SymInt
        longest = max((_longest_function(size.node.expr) for size in sizes if isinstance(size, torch.SymInt)), default=0)
        if longest > _LONGEST:
            raise Unsupported(f"a size is a quotient or remainder of more than {_LONGEST} operations, too long to prove")
        mode = detect_fake_mode(result)
        if mode is not None:
            mode.cache_enabled = not longest
        return result


@lru_cache(maxsize=1 << 10)
def _longest_function(size: sympy.Expr) -> int:
    return max((int(part.count_ops()) for part in size.atoms(Application)), default=0)


def _torch_export(model: nn.Module, call: Call, axes: range) -> ExportedProgram:
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in call.tensors():
        # Sizes 0 and 1 are special to torch's symbolic shapes: they cannot be free.
        free = {axis: Dim.AUTO if size > 1 and axis in axes else Dim.STATIC for axis, size in enumerate(tensor.shape)}
        if Dim.AUTO in free.values():
            shapes[tensor] = free
    kwargs = dict(call.kwargs)
    dynamic_shapes = shapes.dynamic_shapes(model, call.args, kwargs) if axes else None
    # The fused inference path of torch's transformer layers hides their linears.
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # Sizes that are expressions where none is free come from data, and torch says whether it can capture what is done with them.
        with oblivious(), _PlainSizes() if axes else nullcontext():
            return traced(model, call.args, kwargs, dynamic_shapes)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _program(model: nn.Module, exported: ExportedProgram, fixed: str) -> Program:
    ask(exported.graph_module)
    edit.rename_attributes(exported)
    module = exported.module(check_guards=False)
    assert isinstance(module, GraphModule)
    edit.drop_statements(module)
    module.graph.eliminate_dead_code()  # an operation whose result nobody reads is none to quantize
    attributes = _own_attributes(module)
    _read_parts(module.graph, attributes)
    respell(module.graph, attributes)
    return Program(module.graph, attributes, _gate(model, exported, module), (fixed,) if fixed else (), fixed)


def _own_attributes(module: GraphModule) -> dict[str, torch.Tensor]:
    """Copies of all tensors the graph reads; tied ones stay tied. Submodules that hold nested graphs are kept as they are."""
    copies: dict[int, torch.Tensor] = {}
    attributes: dict[str, torch.Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value: Any = module
            for part in node.target.split("."):
                value = getattr(value, part)
            if isinstance(value, torch.Tensor) and id(value) not in copies:
                own = value.detach().clone()
                copies[id(value)] = nn.Parameter(own, requires_grad=False) if isinstance(value, nn.Parameter) else own
            attributes[node.target] = copies.get(id(value), value)
    return attributes


def _read_parts(graph: Graph, attributes: dict[str, Any]) -> None:
    """Makes attributes of the tensors that parameters are made of, such as the integers and scales of a weight that torchao quantized."""
    wholes: dict[str, Any] = {}
    parts: dict[tuple[str, str], Node] = {}
    for node in graph.find_nodes(op="call_function", target=PART_OF):
        whole, name = node.args
        if all(user.target is PART_OF for user in whole.users):
            if whole.target not in wholes:  # no attribute may lie below one that is a tensor
                wholes[whole.target] = attributes.pop(whole.target)
            if (whole.target, name) not in parts:
                with graph.inserting_before(node):
                    part = getattr(wholes[whole.target], name)
                    parts[whole.target, name] = edit.add_attribute(graph, attributes, f"{whole.target}.{name}", part, node)
            node.replace_all_uses_with(parts[whole.target, name])
            graph.erase_node(node)
    if parts:
        edit.drop_unread(graph, attributes)


def _gate(model: nn.Module, exported: ExportedProgram, module: GraphModule) -> Gate:
    ranges = {str(symbol): limits for symbol, limits in exported.range_constraints.items()}
    flat = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    spec = exported.call_spec.in_spec
    assert spec is not None
    args, kwargs = pytree.tree_unflatten([_leaf(value, ranges) for value in flat], spec)
    names = tuple(inspect.signature(module.forward).parameters)
    values = [*args, *kwargs.values()]
    arguments = tuple(
        (name, tuple(replace(leaf, path=path) for path, leaf in parts(value).items())) for name, value in zip(names, values, strict=True)
    )
    parameters = inspect.signature(model.forward).parameters.values()
    order = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    if names[: len(args)] != order[: len(args)]:  # some are of *args
        order = names
    omitted = tuple((p.name, p.default) for p in parameters if p.name not in names and p.default is not p.empty)
    return Gate(order, arguments, omitted, assumptions(exported))


def _leaf(value: object, ranges: Mapping[str, Any]) -> Leaf:
    if not isinstance(value, torch.Tensor):
        return ConstantLeaf(value)
    dims: list[int | FreeDim] = []
    sizes: tuple[object, ...] = tuple(value.shape)  # int or SymInt
    for size in sizes:
        text = str(size)  # a symbol that export found to be constant is still a SymInt, and prints as its number
        limits = ranges.get(text)
        if text.isdecimal():
            dims.append(int(text))
            continue
        seen = size.node.hint if isinstance(size, torch.SymInt) and size.node.has_hint() else 0
        # What is expressed by other sizes is as small as these let it be: torch traces for sizes from 2 on.
        low = int(limits.lower) if limits is not None and text.isidentifier() else 0
        high = int(limits.upper) if limits is not None and limits.upper.is_Integer and limits.upper < 2**62 else None
        dims.append(FreeDim(text, low, high, seen))
    return TensorLeaf(value.dtype, tuple(dims))


def _difference(program: Program, call: Call, expected: Any) -> str:
    """Why the program does not give the model's results on `call`, or an empty string."""
    try:
        with torch.random.fork_rng(devices=[]):
            actual = scratch(program)(*call.args, **call.kwargs)
    except Exception as error:
        return f"the exported program fails where the model does not: {first_line(error)}"
    ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        return "the exported program returns another structure than the model"
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor) and not _close(mine, other):
            return "the exported program gives other results than the model; does it keep state between calls?"
    return ""


def _close(mine: object, other: torch.Tensor) -> bool:
    if not isinstance(mine, torch.Tensor) or mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    # Same operators on the same data: only the order of sums may differ.
    tolerance = 1e3 * torch.finfo(other.dtype).eps if other.dtype.is_floating_point else 0.0
    return torch.allclose(mine.to_dense(), other.to_dense(), rtol=tolerance, atol=tolerance, equal_nan=True)
