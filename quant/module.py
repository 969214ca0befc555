"""The module that `quantize` returns, and the gate in front of it.

An exported graph is only right for inputs like those it was traced with: sizes that the model branches on are fixed in it, and so is
every argument that is not a tensor. The gate accepts calls as the model's own `forward` does, and refuses the rest with a reason.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode
from torch.utils import _pytree as pytree

from ..diagnostics.errors import ArtifactError, InputError, Unsupported
from ..diagnostics.files import writing
from ..graph.asked import told
from ..graph.captured import same_value
from ..graph.device import device_of
from ..graph.dims import Dim, symbol
from ..graph.exporting import any_names, quiet
from ..graph.nesting import parts
from ..graph.symbols import Assumed, require
from .record import QuantRecord

_GATE = "sashiko.gate"
_RECORD = "sashiko.quant"
_PLACE = "call of the quantized model"
# What to do about a call, or a batch of calibration, that the program is not for.
_ALIKE = "make it like the first batch, by padding where it is a size, or quantize the model from a batch that is like it, too"
_TYPICAL = "let the first batch be a typical one, with no size of 1 in a dimension that varies"
ONE_WAY = "a program takes one way: quantize the model from a batch of these sizes, too"


@dataclass(frozen=True)
class FreeDim:
    """A dimension that may vary; dimensions of the same symbol are equal. Sizes 0 and 1 are always within the range. seen: its size in
    the call that was exported; 0 where that is not known."""

    symbol: str
    low: int
    high: int | None
    seen: int = 0


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor: element type, for each dimension its size or its freedom, and where in the argument it is, as `parts` says."""

    dtype: torch.dtype
    dims: tuple[int | FreeDim, ...]
    path: str = ""

    def mismatch(self, value: object, sizes: dict[str, int]) -> str:
        """Why `value` does not fit, or an empty string. `sizes` collects what the symbols stand for in this call."""
        if not isinstance(value, torch.Tensor):
            return f"is a {type(value).__name__}, not a tensor"
        # One integer type serves as well as another: they index and compare alike.
        if value.dtype != self.dtype and not (_is_integer(value.dtype) and _is_integer(self.dtype)):
            return f"is {value.dtype}, and was {self.dtype} in calibration"
        if value.dim() != len(self.dims):
            return f"has {value.dim()} dimensions, and had {len(self.dims)} in calibration"
        for axis, dim in enumerate(self.dims):
            size = value.shape[axis]
            if isinstance(dim, int):
                if size != dim:
                    return f"has size {size} in dimension {axis}, where the program is fixed to {dim}"
            elif (dim.low > 2 and size < dim.low) or (dim.high is not None and size > dim.high):
                return f"has size {size} in dimension {axis}, outside {dim.low}..{dim.high or 'any'} where the program is valid"
            # Size 1 may stretch against any other, as in the model itself.
            elif size != 1 and sizes.setdefault(dim.symbol, size) != size:
                return f"has size {size} in dimension {axis}, which must equal another argument's {sizes[dim.symbol]}"
        return ""

    def advice(self, value: object) -> str:
        """What to do about a `value` that does not fit."""
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        return _TYPICAL if any(size != 1 == dim for size, dim in zip(shape, self.dims)) else _ALIKE


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


@dataclass(frozen=True)
class ConstantLeaf:
    """What is part of the program: number, string, None; and where in the argument it is, as `parts` says."""

    value: object
    path: str = ""

    def mismatch(self, value: object, sizes: dict[str, int]) -> str:
        """Why `value` does not fit, or an empty string."""
        if not same_value(value, self.value):
            return f"is {value!r:.60}, and was {self.value!r} in calibration, which is part of the program"
        return ""

    def advice(self, value: object) -> str:
        """What to do about a `value` that does not fit."""
        return _ALIKE


Leaf = TensorLeaf | ConstantLeaf


@dataclass(frozen=True)
class Gate:
    """How calls are bound and checked.

    order: names that positional arguments bind to, in the order of the model's `forward`.
    arguments: name and leaves of every argument of the graph, in the graph's order.
    omitted: arguments of `forward` that calibration did not give, with their defaults; they may be given only as that default.
    assumed: what must hold of the sizes, whose symbols are those of the free dimensions, and the symbols that are computed from them.
    """

    order: tuple[str, ...]
    arguments: tuple[tuple[str, tuple[Leaf, ...]], ...]
    omitted: tuple[tuple[str, object], ...]
    assumed: tuple[Assumed, ...] = ()

    @property
    def free(self) -> list[FreeDim]:
        """The dimensions that may vary, of all arguments."""
        leaves = (leaf for _, part in self.arguments for leaf in part if isinstance(leaf, TensorLeaf))
        return [dim for leaf in leaves for dim in leaf.dims if isinstance(dim, FreeDim)]

    def check_symbols(self) -> None:
        """Raises ArtifactError for assumptions on what is no size and is not computed from sizes."""
        try:
            require(self.assumed, {dim.symbol: dim.seen for dim in self.free})
        except KeyError as error:
            raise ArtifactError(f"the program assumes something of {error}, which is no size") from error
        except InputError:  # sizes of calibration may be unknown
            return

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.arguments)

    def signature(self) -> inspect.Signature:
        """Of the quantized `forward`, without self. Names behind an omitted one can only be given by keyword."""
        kinds = inspect.Parameter
        expected = self.order[: len(self.names)]
        parameters = [
            kinds(n, kinds.POSITIONAL_OR_KEYWORD if self.names[: i + 1] == expected[: i + 1] else kinds.KEYWORD_ONLY)
            for i, n in enumerate(self.names)
        ]
        return inspect.Signature(parameters)

    def arrange(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values in the graph's order. Raises InputError when a call does not fit the program."""
        if len(args) > len(self.order):
            raise InputError(f"{len(args)} positional arguments were given, at most {len(self.order)} fit", _PLACE, self._hint())
        values = dict(kwargs)
        for name, value in zip(self.order, args):
            if name in values:
                raise InputError(f"argument {name!r} was given twice", _PLACE, self._hint())
            values[name] = value
        for name, default in self.omitted:
            if name in values and same_value(values[name], default):
                del values[name]
        if len(values) != len(self.arguments) or any(name not in values for name in self.names):
            raise InputError(f"the arguments do not fit, {self._misfit(values)}", _PLACE, self._hint())
        sizes: dict[str, int] = {}
        for name, leaves in self.arguments:
            self._check(name, leaves, values[name], sizes)
        env = {**{dim.symbol: 1 for dim in self.free}, **sizes}  # sizes of 1 are no symbol's value: they stretch
        with told(self.assumed, env, self._places(values, env)):
            require(self.assumed, env, ONE_WAY)
        return [values[name] for name in self.names]

    def _places(self, values: Mapping[str, Any], env: Mapping[str, int]) -> Iterator[tuple[str, Dim]]:
        """The free sizes in a call and what they are called, but for those of 1 that stretch."""
        for name, leaves in self.arguments:
            given = parts(values[name])
            for leaf in leaves:
                for axis, dim in enumerate(leaf.dims if isinstance(leaf, TensorLeaf) else ()):
                    if isinstance(dim, FreeDim) and given[leaf.path].shape[axis] == env[dim.symbol]:
                        yield f"{name}{leaf.path}.shape[{axis}]", symbol(dim.symbol)

    def _misfit(self, given: Collection[str]) -> str:
        """Why these are not the arguments of the program, by their names."""
        if missing := [name for name in self.names if name not in given]:
            return f"missing: {', '.join(missing)}"
        if fixed := [f"{name}={default!r:.60}" for name, default in self.omitted if name in given]:
            return f"fixed to the default, which calibration left them at: {', '.join(fixed)}"
        return f"unknown to the program: {', '.join(name for name in given if name not in self.names)}"

    def _check(self, name: str, leaves: tuple[Leaf, ...], value: Any, sizes: dict[str, int]) -> None:
        given = parts(value)
        if given.keys() != {leaf.path for leaf in leaves}:
            held, holds = (", ".join(f"{name}{path}" for path in paths) or "nothing" for paths in ([f.path for f in leaves], given))
            raise InputError(f"argument {name!r} holds {holds:.200}, and held {held:.200} in calibration", _PLACE, self._hint())
        for leaf in leaves:
            why = leaf.mismatch(given[leaf.path], sizes)
            if why:
                what = f"argument {name!r} {why}" if not leaf.path else f"argument {name!r}: {name}{leaf.path} {why}"
                raise InputError(what, _PLACE, leaf.advice(given[leaf.path]))

    def _hint(self) -> str:
        return f"the program was calibrated with ({', '.join(self.names)})"


class QuantizedModule(GraphModule):
    """A model in simulated int8: `quantized_decomposed` operators around float linears, int8 weights in buffers.

    It is called as the model was, and has its own copy of every parameter. `record` says what was quantized.
    """

    @classmethod
    def build(cls, attributes: Mapping[str, torch.Tensor], graph: Graph, gate: Gate, record: QuantRecord | None = None) -> QuantizedModule:
        """attributes: every get_attr target of the graph."""
        module = cls(dict(attributes), graph, "QuantizedModule")
        module.meta[_GATE] = gate
        module.meta[_RECORD] = record
        module.eval()
        module.recompile()
        return module

    @property
    def record(self) -> QuantRecord:
        record = self.meta[_RECORD]
        assert isinstance(record, QuantRecord)
        return record

    @record.setter
    def record(self, record: QuantRecord) -> None:
        self.meta[_RECORD] = record

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the module to one file that `sashiko.load` reads without the model or its data.

        Raises Unsupported for an argument, result or operation that has no form in a file.
        """
        from .save import save

        save(self, path)

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """What was quantized with which numbers and what was not, as plain text. path: also write it there as one HTML page."""
        from .reporting import page, report

        if path is not None:
            with writing(path):
                Path(path).write_text(page(self.record), encoding="utf-8")
        return report(self)

    def recompile(self) -> PythonCode:
        """Regenerates `forward` and puts the gate in front of it."""
        read = (str(node.target) for node in self.graph.nodes if node.op == "get_attr")
        with any_names() if any(iskeyword(part) for name in read for part in name.split(".")) else nullcontext():
            code = super().recompile()
        gate = getattr(self, "meta", {}).get(_GATE)
        if gate is not None:
            cls: Any = type(self)  # GraphModule makes one class for each instance, and names those of copies after itself
            cls.__name__ = QuantizedModule.__name__
            cls.forward = _gated(cls.forward, gate)
        return code

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedModule:
        """As of any module, but for another element type, which is refused: the program casts to those that it was exported with."""
        for tensor in {t.dtype: t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()}.values():
            wanted = fn(tensor.new_empty(0)).dtype
            if wanted != tensor.dtype:
                what = f"a quantized module of {tensor.dtype} cannot be converted to {wanted}"
                hint = "quantize the converted model" + (', or compile with precision="bf16"' if wanted == torch.bfloat16 else "")
                raise Unsupported(what, type(self).__name__, hint)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __copy__(self) -> QuantizedModule:
        """Another module of the same tensors, as of any module; what is set in one, its record, too, is not set in the other."""
        result: QuantizedModule = self.__new__(type(self))
        result.__dict__.update(self.__dict__, meta=dict(self.meta))
        result.recompile()  # its class is its own
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModule:
        with quiet():
            result = super().__deepcopy__(memo)
        assert isinstance(result, QuantizedModule)
        result.recompile()  # the copy's meta arrives after its first recompile
        result.train(self.training)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        from .pickling import restore, state

        return restore, state(self)


def gate_of(module: QuantizedModule) -> Gate:
    """How calls of a quantized module are checked."""
    gate = module.meta[_GATE]
    assert isinstance(gate, Gate)
    return gate


def check_converted(model: object, place: str = "") -> None:
    """Raises InputError for a model of which a part, or the whole, still trains."""
    from .qat import QATModule

    for name, part in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(part, QATModule):
            what = f"{name or 'the model'} still trains: its quantizers have no integers"
            raise InputError(what, place, "take what its convert() returns")


@cache
def _own_names() -> frozenset[str]:
    """What modules of these classes have, some of which torch makes of every exported model: a GraphModule."""
    from .qat import QATModule

    return frozenset(dir(QATModule({}, Graph())))


def is_hidden(name: str) -> bool:
    """Whether a quantized module has something of its own in the place of an attribute of this name."""
    return name.partition(".")[0] in _own_names()


def attribute_name(name: str) -> str:
    """What an attribute of the model is called in a quantized module: one that would be hidden, such as "report.weight", has an underscore
    behind the first part, and one that has some already has one more."""
    first, dot, rest = name.partition(".")
    ends = range(len(first.rstrip("_")), len(first) + 1)
    return f"{first}_{dot}{rest}" if any(is_hidden(first[:end]) for end in ends) else name


def _gated(planned: Callable[..., Any], gate: Gate) -> Callable[..., Any]:
    def forward(self: QuantizedModule, *args: Any, **kwargs: Any) -> Any:
        given = gate.arrange(args, kwargs)
        kind = device_of(pytree.tree_leaves(given)).type
        if not torch.is_autocast_enabled(kind):
            return planned(self, *given)
        with torch.autocast(kind, enabled=False):  # the program has its casts, for the types that it was exported with
            return planned(self, *given)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([own, *gate.signature().parameters.values()])  # type: ignore[attr-defined]
    return forward
