"""What capture hands on: the graph, and how a call of the user's model maps to its inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..diagnostics.errors import InputError
from ..diagnostics.surroundings import CPU
from .asked import told
from .binding import solve
from .dims import Dim, Shape, evaluate, symbols
from .floats import Definition
from .ir import Graph, Value
from .nesting import difference
from .symbols import Assumed, require
from .types import DType, Order


@dataclass(frozen=True)
class TensorInput:
    """A tensor of the call, which is graph.inputs[index] even when nothing reads it. order: how the example lay in memory, None for row by
    row."""

    name: str
    index: int
    dtype: DType
    shape: Shape
    order: Order | None = None


@dataclass(frozen=True)
class IntInput:
    """An integer of the call that is the value of `dim` (a symbol, or a fixed number)."""

    name: str
    dim: Dim


@dataclass(frozen=True)
class FixedInput:
    """A Python value that the graph was specialized on; a call must pass an equal one."""

    name: str
    value: Any


Input = TensorInput | IntInput | FixedInput


@dataclass(frozen=True, eq=False)
class StateInput:
    """A buffer or parameter that the model writes: an input of the graph (number `index`) that the runtime binds to `tensor` itself."""

    name: str
    index: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class SymbolSource:
    """Where a symbol's number comes from in a call: size `axis` of flat input `position`, or the integer there when axis is None."""

    name: str
    position: int
    axis: int | None
    lo: int
    hi: int | None


@dataclass(frozen=True)
class GraphOutput:
    """Result number `index` of the graph. order: how the model's own lies in memory, None for row by row."""

    index: int
    order: Order | None = None


@dataclass(frozen=True, eq=False)
class FixedOutput:
    """A Python value, or a parameter or buffer of the model handed out as it is."""

    value: Any


@dataclass(frozen=True)
class SymbolicOutput:
    """An integer computed from the input sizes."""

    dim: Dim


@dataclass(frozen=True)
class InputOutput:
    """The flat input number `position`, handed back as it is."""

    position: int


OutputSpec = GraphOutput | FixedOutput | SymbolicOutput | InputOutput


@dataclass(frozen=True)
class Mutation:
    """After a run, graph output `output` is copied into graph input `input` (a buffer, parameter or argument that the model writes)."""

    output: int
    input: int


@dataclass(frozen=True)
class Check:
    """Graph output `output` is one bool. Where it is false after a run, the model raises RuntimeError with the message."""

    output: int
    message: str


@dataclass(frozen=True)
class Leftover:
    """An operation left to PyTorch: its name, the reason, and the user's file:line."""

    op: str
    reason: str
    origin: str


_ONLY, _EITHER = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True)
class Parameters:
    """What the arguments of a model are called. names: of those that may be given by position, in order. defaults: of those that may be
    left out. positional_only: how many of the names, the first ones, are not for callers."""

    names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    positional_only: int = 0

    @classmethod
    def of(cls, call: Callable[..., Any]) -> Parameters:
        """Those of a function."""
        every = inspect.signature(call).parameters.values()
        only, either = ([p.name for p in every if p.kind is kind] for kind in (_ONLY, _EITHER))
        return cls((*only, *either), {p.name: p.default for p in every if p.default is not p.empty}, len(only))

    def arranged(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int, named: Sequence[str]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments with `count` by position and those `named` by name, where that is the same call; else as they are. What was
        captured without an argument is right for its default alone. Those that have no names, as of *args, stay where they are."""
        unnamed = max(len(args), count) > len(self.names)
        if (unnamed and len(args) != count) or kwargs.keys() & self.names[: len(args)]:
            return args, kwargs
        if (kwargs.keys() | named) & set(self.names[: self.positional_only]):  # only **kwargs takes such a name, for another argument
            return args, kwargs
        given = {**self.defaults, **dict(zip(self.names, args)), **kwargs}
        wanted = (*self.names[:count], *named)
        if any(name not in given for name in wanted):
            return args, kwargs
        if any(not same_value(given[name], self.defaults.get(name, self)) for name in given.keys() - set(wanted)):
            return args, kwargs
        by_position = [*(given[name] for name in self.names[:count]), *args[len(self.names) :]]
        return by_position, {name: given[name] for name in named}


NAMELESS = Parameters()
_ALIKE = "give the arguments that the example had"  # what to do about others


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured model.

    graph.inputs: the tensors among `inputs`, in order, then the tensors of `state`. graph.outputs: those that `outputs` name, then those
    that `mutations` and `checks` name. `in_spec`/`out_spec` are pytree specs of (args, kwargs) and of the result; None after `from_fx`,
    where calls are flat. `baked`: constants whose numbers went into the graph itself (scales); it is wrong once they change. `assumed`:
    what must hold of the sizes of a call, and the symbols that are computed from them. parameters: what the model calls its arguments.
    device: where all its tensors are.
    """

    graph: Graph
    inputs: tuple[Input, ...]
    state: tuple[StateInput, ...]
    outputs: tuple[OutputSpec, ...]
    mutations: tuple[Mutation, ...]
    symbols: tuple[SymbolSource, ...]
    leftovers: tuple[Leftover, ...]
    in_spec: pytree.TreeSpec | None = None
    out_spec: pytree.TreeSpec | None = None
    baked: tuple[Value, ...] = ()
    checks: tuple[Check, ...] = ()
    assumed: tuple[Assumed, ...] = ()
    parameters: Parameters = NAMELESS
    device: torch.device = CPU

    @property
    def places(self) -> Iterator[tuple[str, Dim]]:
        """The sizes and numbers among the inputs, and what they are called."""
        for spec in self.inputs:
            if isinstance(spec, TensorInput):
                yield from ((f"{spec.name}.shape[{axis}]", dim) for axis, dim in enumerate(spec.shape))
            elif isinstance(spec, IntInput):
                yield spec.name, spec.dim

    @property
    def declared(self) -> list[Dim]:
        """Symbols that no tensor's shape has: of integer arguments, and computed from others."""
        return [*(i.dim for i in self.inputs if isinstance(i, IntInput)), *(d.dim for d in self.assumed if isinstance(d, Definition))]

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat inputs of a call. Raises InputError when the arguments are nested or named otherwise than when captured."""
        assert self.in_spec is not None, "a graph from from_fx is called with flat inputs"
        return flatten_call(self.in_spec, args, kwargs, self.parameters)

    def bind(self, flat: Sequence[Any]) -> tuple[list[torch.Tensor], dict[str, int]]:
        """The graph's input tensors and the symbols' numbers for one call. Raises InputError saying which argument does not fit."""
        if len(flat) != len(self.inputs):
            raise InputError(f"called with {len(flat)} inputs, captured with {len(self.inputs)}")
        tensors: list[torch.Tensor] = []
        pairs: list[tuple[Dim, int, str]] = []
        for spec, value in zip(self.inputs, flat, strict=True):
            if isinstance(spec, TensorInput):
                pairs += _tensor_pairs(spec, value, self.device)
                tensors.append(value)
            elif isinstance(spec, IntInput):
                pairs.append((spec.dim, int(value), f"argument {spec.name}"))
            elif not same_value(value, spec.value):
                raise InputError(f"argument {spec.name} is {value!r}, captured with {spec.value!r}", hint="capture again for another value")
        env = solve(pairs)
        with told(self.assumed, env, self.places):
            env = require(self.assumed, env)
        return [*tensors, *(s.tensor for s in self.state)], env

    def results(self, flat: Sequence[Any], outputs: Sequence[Any], env: Mapping[str, int]) -> Any:
        """What the model returns, from the flat inputs and the graph's outputs of one call."""
        for check in self.checks:
            if not outputs[check.output]:
                raise RuntimeError(check.message)
        found: list[Any] = []
        for spec in self.outputs:
            if isinstance(spec, GraphOutput):
                found.append(outputs[spec.index])
            elif isinstance(spec, InputOutput):
                found.append(flat[spec.position])
            else:
                found.append(evaluate(spec.dim, env) if isinstance(spec, SymbolicOutput) else spec.value)
        return found if self.out_spec is None else pytree.tree_unflatten(found, self.out_spec)


def same_value(value: Any, fixed: Any) -> bool:
    """True for the same object, or an equal Python value of the same type, NaN for NaN but not 0.0 for -0.0; tensors are not compared."""
    if value is fixed:
        return True
    if isinstance(value, torch.Tensor) or type(value) is not type(fixed):
        return False
    return repr(value) == repr(fixed) if isinstance(value, (float, complex)) else bool(value == fixed)


def flatten_call(spec: pytree.TreeSpec, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Parameters = NAMELESS) -> list[Any]:
    """The leaves of a call's arguments, by position or by name as `parameters` says, whatever they were when captured. Raises InputError
    when others are there than `spec` says, or they are nested otherwise."""
    count, named = spec.child(0).num_children, list(spec.child(1).context)
    if len(args) != count or kwargs.keys() != set(named):
        args, kwargs = parameters.arranged(args, kwargs, count, named)
    if sorted(named) != sorted(kwargs):
        what = f"called with keyword arguments {sorted(kwargs)}, compiled for {sorted(named)}"
        raise InputError(what, hint=_ALIKE)
    given = (tuple(args), {n: kwargs[n] for n in named})
    flat, found = pytree.tree_flatten(given)
    if found == spec:
        return list(flat)
    if len(args) != count:
        raise InputError(f"called with {len(args)} positional arguments that do not fit the {count} compiled for", hint=_ALIKE)
    try:  # dictionaries may have their keys in another order
        flat = spec.flatten_up_to(given)
    except ValueError:
        flat = [given]
    if not all(map(pytree.tree_is_leaf, flat)):
        why = difference(spec, *given, parameters.names)
        raise InputError(f"called with arguments nested otherwise than compiled for, {why}", hint=_ALIKE)
    return list(flat)


def _tensor_pairs(spec: TensorInput, value: Any, device: torch.device) -> list[tuple[Dim, int, str]]:
    """One equation per dimension of a tensor argument, after checking what is no equation."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"argument {spec.name} is a {type(value).__name__}, expected a tensor")
    if value.dtype != spec.dtype.torch:
        wanted = spec.dtype.torch
        raise InputError(f"argument {spec.name} is {value.dtype}, captured with {wanted}", hint=f"convert it with .to({wanted})")
    if value.device != device:
        raise InputError(f"argument {spec.name} is on {value.device}, captured on {device}")
    if value.dim() != len(spec.shape):
        raise InputError(f"argument {spec.name} has {value.dim()} dimensions, captured with {len(spec.shape)}")
    sizes = zip(spec.shape, value.shape, strict=True)
    return [(dim, size, f"argument {spec.name}, dimension {axis}") for axis, (dim, size) in enumerate(sizes)]


def symbol_sources(inputs: Sequence[Input]) -> tuple[SymbolSource, ...]:
    """The first place where each symbol can be read off directly."""
    found: dict[str, SymbolSource] = {}
    for position, spec in enumerate(inputs):
        sizes: list[tuple[int | None, Dim]] = []
        if isinstance(spec, TensorInput):
            sizes = list(enumerate(spec.shape))
        elif isinstance(spec, IntInput):
            sizes = [(None, spec.dim)]
        for axis, dim in sizes:
            symbol = plain_symbol(dim)
            if symbol is not None and symbol[0] not in found:
                found[symbol[0]] = SymbolSource(symbol[0], position, axis, symbol[1], symbol[2])
    return tuple(found.values())


def plain_symbol(dim: Dim) -> tuple[str, int, int | None] | None:
    """(name, lo, hi) when `dim` is one symbol and nothing else."""
    unknown = symbols(dim)
    if len(unknown) != 1:
        return None
    (symbol,) = unknown
    return (symbol.name, symbol.lo, symbol.hi) if str(dim) == symbol.name else None
