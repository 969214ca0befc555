"""The backend for `torch.compile(model, backend="sashiko")`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import UnspecializedNNModuleSource, is_from_unspecialized_param_buffer_source
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..diagnostics.collector import paused
from ..diagnostics.errors import InputError, Outdated, Unsupported
from ..diagnostics.surroundings import CPU
from ..diagnostics.warn import warn
from ..graph import flex
from ..graph.aten.recurrent import Layers
from ..graph.capture import from_fx
from ..graph.computed import refuse_writes
from ..graph.exporting import decompositions, said_causal
from ..graph.recurrence import CELLS
from ..platforms.host import default_target
from .aliases import merged, without_views
from .build import Options
from .eager import check, graphs
from .model import CompiledModel, build_model
from .pipeline import check_settings
from .settings import settle
from .versions import Version, Versions, Weights

Boxed = Callable[[list[Any]], Sequence[Any]]
# Dynamo would end a graph there and skip what is below. It asks before it knows the backend: it is told once for all of them, for whom the
# answer is right as well.
with suppress(ValueError):  # somebody has told it already
    torch.compiler.substitute_in_graph(torch.nn.modules.transformer._detect_is_causal_mask)(said_causal)
_SWEEP = 128  # calls after which versions that nobody uses are looked for


@dataclass(frozen=True)
class _Given:
    """A tensor that a graph was traced with. own: whether it is a parameter or buffer of a module."""

    tensor: torch.Tensor
    own: bool


def backend(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """Compile one graph of Dynamo. A graph whose results require gradients, as outside of `torch.no_grad()`, runs as PyTorch runs it, with
    a warning; so does a graph we cannot capture.

    Tensors are on the CPU, or all on one GPU: there products are PyTorch's, and what is around them are kernels of ours (docs/gpu.md).

    options: `precision` ("fp32", "bf16", "auto"; on CPUs) and `strict` (an operation without a native form raises), as in
    `sashiko.compile`; `cuda_graphs` (default True): whether calls on a GPU are recorded.
    """
    del mode  # there is one mode: as fast as we can
    usual = {"precision": "fp32", "strict": False, "cuda_graphs": True}
    settings = {**usual, **(options or {})}
    unknown = settings.keys() - usual.keys()
    if unknown:
        raise InputError(f"unknown options {sorted(unknown)}", hint="precision, strict and cuda_graphs are known")
    check_settings(**settings)
    refuse_writes(module.graph)  # which PyTorch would lose, too
    settle(module)
    try:
        return _traced(module, example_inputs, settings)
    except Unsupported as error:
        if settings["strict"]:
            raise
        _say_left(error)
        return module.forward


def _traced(module: GraphModule, example_inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """What AOTAutograd and our compilers make of a graph. Unsupported where what runs has to be the graph as Dynamo made it."""
    given = _weights(module, example_inputs)

    def training(graph: GraphModule, inputs: Sequence[Any]) -> Boxed:
        raise Unsupported("gradients may be asked for, which need PyTorch's own operations", hint="call the model under torch.no_grad()")

    def inference(graph: GraphModule, inputs: Sequence[Any]) -> Boxed:
        check(module, example_inputs)
        return _Inference(graph, inputs, _frozen(graph, given), settings).boxed()

    compiled = aot_autograd(
        fw_compiler=training,
        inference_compiler=inference,
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )
    with paused(), Layers() if _recurs(module) else nullcontext():
        return compiled(module, example_inputs)


def _say_left(error: Unsupported) -> None:
    advice = f": {error.hint}" if error.hint else ""
    warn(f"sashiko leaves a graph to PyTorch as a whole: {error.what}{advice}")


def _recurs(module: GraphModule) -> bool:
    """Whether a graph or one inside it has recurrent layers."""
    return not CELLS.keys().isdisjoint(_names(module)) or any(isinstance(each, torch.nn.RNNBase) for each in module.modules())


def _names(module: GraphModule) -> Iterator[str]:
    """The names of the functions and methods that a graph and those inside it call."""
    for graph in graphs(module):
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                yield (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).partition(".")[0]


def _box(call: Callable[..., Sequence[Any]]) -> Boxed:
    def boxed(arguments: list[Any]) -> Sequence[Any]:
        passed = list(arguments)
        arguments.clear()  # the caller's references end here, so that PyTorch can free what it no longer needs
        return call(*passed)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _plain(tensor: Any) -> list[Any]:
    """The tensors that a tensor is made of, such as the integers and scales of a quantized weight: AOTAutograd's graphs take these."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(tensor, name))]


def _weights(module: GraphModule, inputs: Sequence[Any]) -> list[_Given | None]:
    """Of the tensors that AOTAutograd's graphs take, those that are parameters, buffers or other attributes of modules. What else Dynamo
    calls static, as the tensors of caches, comes and goes."""
    weights: list[_Given | None] = []
    for node, tensor in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        source = getattr(node, "_dynamo_source", None)
        own = source is not None and is_from_unspecialized_param_buffer_source(source)
        kept = own or isinstance(tensor, torch.nn.Parameter) or isinstance(getattr(source, "base", None), UnspecializedNNModuleSource)
        weights += [_Given(plain, own) if kept else None for plain in _plain(tensor)]
    return weights


def _frozen(graph: GraphModule, given: Sequence[_Given | None]) -> dict[int, _Given]:
    """Inputs of the graph that are weights which it does not write, by position."""
    context = TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    placeholders = sum(node.op == "placeholder" for node in graph.graph.nodes)
    if metadata is None or placeholders != len(given):
        return {}
    fixed = {n: given[n] for n in metadata.static_input_indices if n < len(given)}
    return {n: g for n, g in fixed.items() if g is not None and not isinstance(g.tensor, FakeTensor) and _only_read(metadata, n)}


def _refuse_effects(graph: GraphModule) -> None:
    """Operations with effects (checks that raise, prints) are ordered by tokens that only PyTorch's own runtime passes."""
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Unsupported(": ".join(filter(None, (f"the graph uses {node.target}", node.meta.get(flex.WHY)))))


def _only_read(metadata: Any, position: int) -> bool:
    return position >= len(metadata.input_info) or not metadata.input_info[position].mutates_data


class _Inference:
    """One inference graph. Weights are frozen into the code. Calls may bring other ones, as those of a model's equal layers do: Dynamo
    has one graph for all of them. For each it is compiled once, and kept while it is used; where numbers that are part of the code change,
    such as scales when other weights are loaded, what is compiled next takes its place. What is another tensor again and again is an
    argument from then on."""

    def __init__(self, graph: GraphModule, inputs: Sequence[Any], frozen: dict[int, _Given], settings: Mapping[str, Any]) -> None:
        flex.spell_out(graph)
        self.graph, self.inputs, self.settings = graph, inputs, settings
        self.rest, self.places, self.views = without_views(graph)
        self.calls = 0
        self.versions = Versions(tuple(frozen), {n for n, weight in frozen.items() if weight.own})
        weights = tuple(weight.tensor for weight in frozen.values())
        self.native = self._version(self.versions, weights, (0,) * len(frozen)).model is not None

    def _version(self, versions: Versions, weights: Weights, exchanged: tuple[int, ...]) -> Version:
        with unset_fake_temporarily():  # Dynamo calls us in its world of fake tensors, where constants have no values
            made = Version(weights, self._compiled(dict(zip(versions.positions, weights, strict=True))), exchanged, self.calls)
        versions.add(made)
        return made

    def _first(self, versions: Versions, weights: Weights, arguments: Sequence[Any]) -> Version:
        """The version for weights that come for the first time."""
        exchanged = versions.exchanged(weights)
        settled = versions.settled(exchanged)
        if settled is versions:
            return self._version(versions, weights, exchanged)
        self.versions, weights = settled, _at(settled.positions, arguments)
        return self._version(settled, weights, (0,) * len(weights))

    def _compiled(self, frozen: dict[int, torch.Tensor]) -> CompiledModel | None:
        try:
            _refuse_effects(self.graph)
            captured = from_fx(self.rest, self.inputs, frozen)
            precision = self.settings["precision"]
            if captured.device != CPU and precision != "fp32":
                raise InputError(f"precision={precision!r} is for CPUs", hint="on a GPU, convert the model or use torch.autocast")
            options = Options(default_target(), precision, self.settings["strict"], name="dynamo", record=self.settings["cuda_graphs"])
            return build_model(captured, options)
        except Unsupported as error:
            if self.settings["strict"]:
                raise
            _say_left(error)
            return None

    def boxed(self) -> Boxed:
        return _box(self.call if self.native else self.graph.forward)

    def call(self, *arguments: Any) -> Sequence[Any]:
        versions = self.versions  # read once: a call in another thread may find that fewer inputs are weights
        weights = _at(versions.positions, arguments)
        version = versions.of(weights) or self._first(versions, weights, arguments)
        version.used = self.calls = self.calls + 1
        if self.calls % _SWEEP == 0 and len(versions) > 1:
            versions.forget(self.calls)
        if version.model is None:
            everything: Sequence[Any] = self.graph.forward(*arguments)
            return everything
        try:
            results: Sequence[Any] = version.model.call_flat(arguments)
        except Outdated:
            self._version(versions, version.weights, version.exchanged)
            return self.call(*arguments)
        return merged(results, self.places, self.views(*arguments, *results)) if self.places else results


def _at(positions: Sequence[int], arguments: Sequence[Any]) -> Weights:
    return tuple([arguments[n] for n in positions])
