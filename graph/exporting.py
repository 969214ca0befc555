"""torch.export with this project's decompositions, and its errors in this project's words (`refusals.py`)."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from inspect import isroutine
from itertools import chain
from keyword import iskeyword
from typing import Any, TypeVar

import torch
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..diagnostics.errors import BY_PARTS, PADDED, SPARSE, InputError, SashikoError, Unsupported
from ..diagnostics.warn import warn
from . import assertions, branches, flex, regions, views
from .alone import alone
from .aten import COMPLEX, COMPOSITES, QUANTIZED, TABLE, composite, pooling, recurrent, spaced
from .attributes import without_data
from .axes import check_axes, marks_kept, spelled_out
from .called_twice import changed
from .computed import refuse_writes
from .decompose import by_node, deciding
from .examples import refusal
from .guards import without_those_that_follow
from .lower import CHECKS, PART_OF
from .modes import in_training, to_evaluate
from .oblivious import oblivious
from .rebound import settled, storage
from .refusals import is_sparse, translated, written_outside
from .symbols import Symbols

# Composites of a computation and a check that raises (of a singular matrix, say). Taken apart, the check is an operation without a
# result, which a graph of values has no place for.
_CHECKED = {f"aten::linalg_{name}" for name in ("cholesky", "inv", "ldl_factor", "lu_factor", "solve")}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
CPU = "move it with .cpu(); on a GPU, torch.compile(model, backend=\"sashiko\") compiles what it finds there"
# What to do about attributes that forward changes.
AS_STATE = "a buffer that it writes into is kept, and torch.compile(model, backend=\"sashiko\") asks for such values"
T = TypeVar("T")


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions to give to AOTAutograd before `from_fx`: core ATen's, without the operations that have a row."""
    return {op: fn for op, fn in _core().items() if op not in TABLE}


def _core() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions of torch. It takes 50 ms to collect them, a tenth of that to count the operations that there are by now."""
    return _collected(len(torch._C._dispatch_get_all_op_names()))


@lru_cache(maxsize=1)
def _collected(operations: int) -> Mapping[Any, Callable[..., Any]]:
    return dict(torch.export.default_decompositions())


@alone()
def export(model: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
           dynamic_shapes: Any = None) -> ExportedProgram:
    """torch.export of a model in evaluation mode; the result is functional and decomposed, ready for `from_exported`.

    dynamic_shapes: as in torch.export. Raises InputError for a model in training mode, arguments that it fails with or dynamic_shapes
    that do not fit, Unsupported (with torch's reason and the user's line) for what torch.export cannot trace.
    """
    check_module(model)
    check_mode(model)
    example = tuple(args), dict(kwargs or {})
    check_axes(model, *example, dynamic_shapes)
    try:
        with torch.no_grad(), tracing():
            given = distinct(model, example)
            args, kwargs = pytree.tree_map_only(torch.Tensor, _dense, given) if dynamic_shapes else given
            with oblivious():
                program = traced(model, args, kwargs, dynamic_shapes)
            flex.spell_out(program.graph_module)
    except SashikoError:
        raise
    except Exception as error:
        told = refusal(model, *example, error)
        raise told from told.__cause__
    made = functional(program)
    flex.still_say(program.graph_module, made.graph_module)
    return made


def check_module(model: object) -> None:
    """InputError, with what to do, for what is no module on the CPU that torch can export, or has lazy modules that were never called."""
    if isinstance(model, ExportedProgram):
        raise InputError("expected a torch.nn.Module, got an ExportedProgram", hint="pass program.module()")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("expected a torch.nn.Module, got TorchScript", type(model).__name__, "pass the module that it was made from")
    if not isinstance(model, torch.nn.Module):
        hint = "wrap it in a module whose forward calls it" if isroutine(model) else "pass an instance" if isinstance(model, type) else ""
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}", hint=hint)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(f"{name} has no shape yet: its module is lazy", type(model).__name__, "call the model once first")
        if tensor.device.type != "cpu":
            raise InputError(f"{name} is on {tensor.device}", type(model).__name__, "give it numbers first" if tensor.is_meta else CPU)
    name = without_data(model)
    if name:
        hint = "a trace has stored it in the model, such as torch.export's: delete the attribute, or make the model again"
        raise InputError(f"{name} is a FakeTensor, which has no data", type(model).__name__, hint)


def check_mode(model: torch.nn.Module) -> None:
    """InputError for a model in training mode, unless it is the same there."""
    if names := in_training(model):
        what = f"the model is in training mode, where dropout and normalization differ: {names}"
        raise InputError(what, type(model).__name__, to_evaluate(model))


def traced(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    """What torch.export makes of a model, whose attributes stay as they were. A warning names what each call, or the first, would change
    there. Raises Unsupported for one whose first call alone writes into parameters, or its arguments into buffers."""

    def trace(shapes: Any = None) -> ExportedProgram:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)

    with marks_kept((args, kwargs)), spelled_out(model, args, kwargs, dynamic_shapes) as shapes:
        program, (always, once, written) = changed(model, lambda: settled(model, lambda: trace(shapes), trace), trace)
    if written:
        what = f"the first call alone writes into {written}, and what is made of it would in each call"
        raise Unsupported(what, type(model).__name__, "call the model once before")
    if always:
        warn(f"sashiko takes {', '.join(always)} for constant, which the model changes in each call: {AS_STATE}")
    if once:
        what = "as the first call finds it; the model changes it there, and computes something else in later calls"
        warn(f"sashiko takes {', '.join(once)} for constant {what}: call the model once before")
    branches.check(model, program, args, kwargs, lambda env: Symbols(env).unified().expression)
    return without_transforms(assertions.told(program))


def distinct(model: torch.nn.Module, arguments: T) -> T:
    """The arguments, none of which shares memory with another or is one of the model's own: a trace tells tensors apart by identity, and
    would take one for the other in all calls. InputError for one that is not on the CPU, nested or sparse."""
    own_ids, held = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}, set[int]()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            raise InputError(f"an argument is on {tensor.device}, expected a tensor on the CPU", "the example", CPU)
        if tensor.is_nested:
            raise InputError("an argument is a nested tensor, expected a dense one", "the example", PADDED)
        if is_sparse(tensor):
            raise InputError(f"an argument is a sparse tensor ({tensor.layout}), expected a dense one", "the example", SPARSE)
        if id(tensor) in own_ids or storage(tensor) in held:
            return tensor.detach().clone()
        held.add(storage(tensor))
        return tensor

    changed: T = pytree.tree_map_only(torch.Tensor, own, arguments)
    return changed


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies without gaps: torch traces the distances in memory of another one as sizes that no call tells."""
    return tensor if torch.ops.aten.is_non_overlapping_and_dense.default(tensor) else tensor.contiguous()


def _apart() -> dict[Any, Callable[..., Any]]:
    """The decompositions of operations without a row, but for those that are kept whole."""
    return {op: fn for op, fn in _core().items() if not (_is_taken(op) or _kept(op) or str(op) in QUANTIZED)}


@alone()
def functional(program: ExportedProgram) -> ExportedProgram:
    """The program with in-place operations, and everything else without a row, decomposed into functional core ATen.

    An operation that has a row, or checks its result, is kept whole. A program that needs none of it is returned as it is. Where it cannot
    be done node by node, torch traces the whole again, which takes longer than the first time; views are decomposed there all the same,
    or its functionalization could not see the aliasing.
    """
    apart = not any(_used_as_a_whole(node) for node in program.graph.nodes)
    if apart and all(_stays(node) for node in program.graph.nodes):
        return program
    table = _apart()
    table.update(recurrent.decompositions(table))
    return _decomposed(program, table, (lambda node: _stays(node) or _kept(node.target)) if apart else None)


@alone()
def without_writes(program: ExportedProgram) -> ExportedProgram:
    """The program with functional forms of its in-place operations, so that what an operation gave is what all who read it find;
    parameters, buffers and arguments are written at the end. Nothing else of it changes, unless torch has to trace it as a whole."""
    if not any(_writes(node) for node in program.graph.nodes):
        return program
    return _decomposed(program, {}, lambda node: not _writes(node))


def _decomposed(
    program: ExportedProgram, table: dict[Any, Callable[..., Any]], stays: Callable[[torch.fx.Node], bool] | None
) -> ExportedProgram:
    """The functional program, taken apart by `table` where a node does not stay. stays: None where it cannot be done node by node."""
    try:
        # torch asks things of sizes for its own sake, such as whether a result that is a view is like its base: no assumptions.
        with quiet(), oblivious(), torch.autocast("cpu", enabled=False):  # what it casts, the program does
            found = by_node(program, table, stays) if stays is not None else None
            # Without dropout: torch would copy there, and writes behind it would not reach what is before it.
            return found or _by_torch(by_node(program, {}, lambda node: True) or program, table)
    except Exception as error:
        raise written_outside(program, error) or translated(error) from error


def _is_taken(op: Any) -> bool:
    """Whether an operation has a row, and gives no view nor writes."""
    return op in TABLE and not any(argument.alias_info is not None for argument in op._schema.arguments)


def without_transforms(program: ExportedProgram) -> ExportedProgram:
    """The program with torch.vmap, torch.autocast and their like carried out: they are recorded as functions, or as regions, that change
    how operations are taken, which cannot be looked at one by one. Regions that change nothing become part of it. Raises Unsupported for
    one that gives what it is called with another shape."""
    regions.put_back(program)
    views.refuse_reshaped(program.graph)
    refuse_writes(program.graph)
    if torch.is_autocast_enabled("cpu"):  # it casts what composites are made of, such as the products in an einsum
        composites = {op: fn for op, fn in _apart().items() if op.has_kernel_for_dispatch_key(_COMPOSITE)}
        program = by_node(program, composites, lambda node: node.target not in composites) or program
    return _by_torch(program, {}) if regions.transform(program) else program


def _by_torch(program: ExportedProgram, table: dict[Any, Callable[..., Any]]) -> ExportedProgram:
    """The program as torch decomposes it as a whole."""
    views.refuse_windows(program.graph, f"write to slices of it instead, or to a clone of the view; or {BY_PARTS}")
    branches.refuse(deciding(program.graph))
    found: ExportedProgram = program.run_decompositions(table)
    return found


def _used_as_a_whole(node: torch.fx.Node) -> bool:
    """Whether a node is a tensor made of others and goes into an operation, of which only tracing it tells what it does with these."""
    made_of_others: bool = is_traceable_wrapper_subclass(node.meta.get("val"))
    return made_of_others and any(user.target is not PART_OF for user in node.users)


def _kept(op: object) -> bool:
    """Whether an operation without a row is not to be taken apart, either."""
    return isinstance(op, torch._ops.OpOverload) and op._schema.name in _CHECKED


def _writes(node: torch.fx.Node) -> bool:
    """Whether a node is an operation that writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def _stays(node: torch.fx.Node) -> bool:
    """Whether a node needs no decomposition: it writes nothing, so that it does not matter what is a view of what, and has a row."""
    op = node.target
    if node.op != "call_function" or isinstance(op, torch._ops.HigherOrderOperator):
        return node.op in ("placeholder", "output")
    if not isinstance(op, torch._ops.OpOverload):
        return True  # arithmetic of sizes, elements of tuples
    if op in composite.CONDITIONS and not composite.CONDITIONS[op](node):
        return False
    known = any(op in rows for rows in (TABLE, COMPOSITES, COMPLEX)) or str(op) in QUANTIZED
    known = known or op in CHECKS or op is PART_OF
    return known and not _writes(node)


def said_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Instead of nn.Transformer's function that looks whether the numbers of a mask are the causal ones, unless it is told. With False the
    mask is applied as it is, so that this decides about speed alone."""
    return is_causal is True


@contextmanager
def tracing() -> Iterator[None]:
    """What surrounds torch.export: its warnings of itself are hidden, and so is the graph as far as it came, which it prints where it
    fails; recurrent layers stay whole (`aten/recurrent.py`), axes stay free that are pooled (`aten/pooling.py`) or counted
    (`aten/spaced.py`), and torch does not look at numbers, which a trace has not: nn.Transformer at those of masks, and distributions
    whether their arguments are within bounds, unless their caller asks for it (Dynamo switches that off as well, for the whole process).
    """
    module: Any = torch.nn.modules.transformer
    distribution: Any = torch.distributions.Distribution
    exporter: Any = importlib.import_module("torch.export._trace")  # which torch.export imports when it is first called
    with alone():
        asking, validating = module._detect_is_causal_mask, distribution._validate_args
        distribution.set_default_validate_args(False)
        exporter.print = lambda *_, **__: None  # instead of the built-in function
        module._detect_is_causal_mask = said_causal
        try:
            with (quiet(), recurrent.Layers(), pooling.FreeAxes(), spaced.FreeSteps(), assertions.recorded(), branches.recorded(),
                  without_those_that_follow()):
                yield
        finally:
            module._detect_is_causal_mask = asking
            distribution.set_default_validate_args(validating)
            vars(exporter).pop("print", None)  # a model that compiles another as it is traced has


# What torch logs of what it then deals with, or raises: by the name of the logger, how it begins.
_LOGGED = {
    "torch.fx.experimental.symbolic_shapes": "Failed to reduce inequalities",
    "torch._subclasses.fake_tensor": "failed while attempting to run meta",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Hides what torch warns of about itself: it copies its own tree specifications by a deprecated type, nn.RNN keeps a second list of
    its parameters, and `_LOGGED` comes with tracebacks."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_LOGGED[record.name])

    loggers = [logging.getLogger(name) for name in _LOGGED]
    with alone():
        for logger in loggers:
            logger.addFilter(is_news)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r".*LeafSpec.*", FutureWarning)
                warnings.filterwarnings("ignore", r"The tensor attributes? self\.[\w.]*_flat_weights\[0\]", UserWarning)
                yield
        finally:
            for logger in loggers:
                logger.removeFilter(is_news)


@contextmanager
def any_names() -> Iterator[None]:
    """Lets the code that torch writes for a graph read modules that are named by words of Python, such as "class", as it does for "0"."""
    graphs: Any = torch.fx.graph
    if not hasattr(graphs, "_format_target"):  # a torch that writes code in another way says itself what it cannot name
        yield
        return
    with alone():
        before, graphs._format_target = graphs._format_target, _spelled
        try:
            yield
        finally:
            graphs._format_target = before


def _spelled(base: str, target: str) -> str:
    """How code reads an attribute of an attribute."""

    def read(found: str, name: str) -> str:
        return f"getattr({found}, {name!r})" if iskeyword(name) or not name.isidentifier() else f"{found}.{name}"

    return reduce(read, target.split("."), base)
