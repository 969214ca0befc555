"""Where to quantize: every operation that a scheme names, with the scheme that the overrides give it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch.fx import Graph, Node

from ..diagnostics.errors import InputError
from ..graph.filtering import Filtering
from ..graph.memory_format import known
from ..graph.nodes import schema_arguments
from ..platforms.target import Target
from .constants import Constants
from .operands import Operands, operands, packet
from .record import LeftOut, Placement, QuantSite
from .routing import routers
from .scheme import FP32, ActivationScheme, OpScheme, Override, Scheme, Where

_UNNAMED = {
    "convolution": "the scheme leaves convolutions in floating point",
    "recurrence": "the scheme leaves products with a hidden state in floating point",
    "experts": "the scheme leaves experts in floating point",
    "matmul": "both factors are activations, which the scheme leaves in floating point",
    "attention": "attention multiplies activations with activations, which the scheme leaves in floating point",
}
_WEIGHTS_ALONE = ("linear", "recurrence", "experts", "embedding")
_ROUTER = "it chooses among other values, and a rounding could choose something else; an override quantizes it"
_LEAST_GROUP = 8
_COUNTED = ("linear", "convolution", "experts")
# Of all multiplications. Products with all bits take 1.6 times as long on a Zen 3 (docs/decisions/0010-sums-in-16-bits.md).
_CHEAP = 0.03
EXCLUDED = "excluded by the caller"


def place(
    graph: Graph, constants: Constants, scheme: Scheme, target: Target, exclude: Iterable[Where] = (), sized: bool = True
) -> Placement:
    """Finds every operation. target: the machine it is for. exclude: overrides to fp32, stronger than those of the scheme. sized: whether
    images will be as large as the example's.

    Raises InputError for an override or an exclude that matches nothing.
    """
    excluded = tuple(Override(where, FP32) for where in exclude)
    overrides = (*scheme.overrides, *excluded)
    classes = {override.where: _names_of(override.where) for override in overrides if isinstance(override.where, type)}
    used: set[int] = set()
    sites: list[QuantSite] = []
    left: list[LeftOut] = []
    everything = list(_operations(graph, constants))
    operations = {node: found for node, found, *_ in everything}
    at = {node: where for node, _, _, where in everything}
    of_bytes = _of_bytes(operations, constants, target, sized)
    choosing = routers(graph, (where for node, where in at.items() if packet(node) != "embedding"), constants)
    owners = {node: owner for node, _, owner, _ in everything if packet(node) != "embedding" or "embedding" in scheme.operations}
    names = dict.fromkeys(owners.values(), 0)
    for node, owner in owners.items():
        found, name = operations[node], _unique(owner, names)
        hits = [i for i, override in enumerate(overrides) if _matches(override.where, name, owner, at[node], classes)]
        used.update(hits)
        reason = found if isinstance(found, str) else ""
        if isinstance(found, Operands):
            chosen = overrides[hits[-1]].scheme if hits else scheme.default
            site = _site(node, name, owner, found, chosen, constants, node in of_bytes)
            chosen, why = fitted(chosen, site.operation, site.features[0], target.sums16 and site.integers)
            site = replace(site, scheme=chosen)
            reason = _refusal(site, scheme, by_caller=bool(hits) and overrides[hits[-1]] in excluded) or why
            if not hits and node in choosing and site.scheme.quantized and site.features[1] <= site.features[0]:
                reason = reason or _ROUTER
            if not reason:
                sites.append(site)
        if reason:
            left.append(LeftOut(name, packet(node) or str(node.target), reason, source_of(node)))
    check_used(overrides, used, names)
    return Placement(tuple(sites), tuple(left))


def _operations(
    graph: Graph, constants: Constants, within: Node | None = None
) -> Iterator[tuple[Node, Operands | str, str, Node]]:
    """Every operation, also in the graphs that calls such as torch.cond are given: its operands, or why it cannot be quantized; its owner;
    and itself, or the call that it is inside of. within: the call of the whole graph that is given this one."""
    for node in graph.nodes:
        found, at = operands(node, constants), within or node
        if found is not None:
            name = getattr(at.target, "__name__", "").removesuffix("_impl")
            yield node, found if within is None else f"it is inside of {name}, which stays as it is", _owner(node, constants, at), at
        for inner, known_inside in constants.inside(node):
            yield from _operations(inner, known_inside, at)


def fitted(chosen: OpScheme, operation: str, features: int, small: bool) -> tuple[OpScheme, str]:
    """What a scheme means for a kind of operation with so many input features, and why it is none for it, or an empty string."""
    scheme = _grouped(_fitting(chosen, operation, small), features)
    return scheme, _misfit(operation, scheme) or _undivided(scheme, features)


def _fitting(chosen: OpScheme, operation: str, small: bool) -> OpScheme:
    """What a scheme means for a kind of operation on a machine: a scale for each row is for linears and experts; a table's activations are
    its indices. A hidden state has a scale for each row always: what one range for all times leaves of it would be fed back. Small weights
    are for activations of integers. small: whether they make the product faster."""
    weight, activation = chosen.weight, None if operation == "embedding" else chosen.activation
    if weight is None:
        return chosen
    if weight.sums16 == "auto":
        weight = replace(weight, sums16="most" if activation is not None and small else 1)
    if activation is not None and operation not in ("linear", "experts"):
        activation = replace(activation, granularity="row" if operation == "recurrence" else "tensor")
    return replace(chosen, activation=activation, weight=weight)


def _grouped(chosen: OpScheme, inputs: int) -> OpScheme:
    """The same with groups that divide the inputs of a product, where there are some of at least eight."""
    weight = chosen.weight
    if weight is None or weight.granularity != "group":
        return chosen
    return replace(chosen, weight=replace(weight, group=max(math.gcd(inputs, weight.group), _LEAST_GROUP)))


def _undivided(chosen: OpScheme, inputs: int) -> str:
    """Why groups are none for so many inputs, or an empty string."""
    weight = chosen.weight
    if weight is None or weight.granularity != "group" or inputs % weight.group == 0:
        return ""
    return f"groups of {weight.group} do not divide its {inputs} inputs"


def _of_bytes(operations: Mapping[Node, Operands | str], constants: Constants, target: Target, sized: bool) -> set[Node]:
    """The products of bytes, but for the cheapest: they have so little of the work that they may as well keep all bits. The first and the
    last layer of a network of images are often among them."""
    products = {node: found for node, found in operations.items() if isinstance(found, Operands) and found.weight is not None}
    convolutions = {node: found for node, found in products.items() if found.operation == "convolution"}
    of_bytes = set(products) - {node for node, found in convolutions.items() if _without_bytes(node, found, constants, target, sized)}
    work = {node: _multiplications(node, found, constants) for node, found in products.items() if found.operation in _COUNTED}
    total = sum(work.values())
    left = _CHEAP * total if math.isfinite(total) else 0.0
    for node in sorted((node for node in work if node in of_bytes), key=lambda node: work[node]):
        left -= work[node]
        if left < 0:
            break
        of_bytes.remove(node)
    return of_bytes


def _multiplications(node: Node, found: Operands, constants: Constants) -> float:
    """How many a product takes for data as large as the example; infinitely many where its size is computed from the data."""
    assert found.weight is not None
    weight, sizes = constants.value(found.weight).shape, [known(size) for size in node.meta["val"].shape]
    if found.operation == "convolution":
        each = math.prod(weight[1:])
    else:
        each = weight[-2] if found.transposed else weight[-1]
    return math.inf if None in sizes else float(each * math.prod(size or 0 for size in sizes))


def _without_bytes(node: Node, found: Operands, constants: Constants, target: Target, sized: bool) -> bool:
    """Whether a convolution multiplies no bytes: from one channel each it is sums in f32, and minimal filtering, which is for images of
    known size, multiplies 16 bits."""
    assert found.weight is not None
    shape = constants.value(found.weight).shape
    columns, channels, *window = shape
    if channels == 1 or window != [3, 3] or not sized:
        return bool(channels == 1)
    _, _, _, stride, _, dilation, *_ = schema_arguments(node)
    height, width = (known(size) for size in node.meta["val"].shape[-2:])
    one_for_each = all(n == 1 for n in (*stride, *dilation)) and found.activations[0].meta["val"].shape[-3] == channels
    if not one_for_each or not height or not width:
        return False
    return Filtering(height, width, channels, columns, integers=True).why_not(far=shape.numel() > target.l2) is None


def _site(
    node: Node, name: str, owner: str, found: Operands, scheme: OpScheme, constants: Constants, integers: bool
) -> QuantSite:
    weight, features = "", (0, 0)
    if found.weight is not None:
        shape = constants.value(found.weight).shape
        matrix = found.operation in ("linear", "experts")
        rows, columns = (shape[-2], shape[-1]) if matrix else (shape[0], math.prod(shape[1:]))
        features = (rows, columns) if found.transposed or found.operation == "embedding" else (columns, rows)
        sources = constants.sources(found.weight)
        weight = sources[0] if len(sources) == 1 else f"expression of {', '.join(sources)}"
    activations = tuple(a.name for a in found.activations)
    source = source_of(node)
    return QuantSite(name, found.operation, packet(node), scheme, node.name, activations, weight, features, source, integers, owner)


def _refusal(site: QuantSite, scheme: Scheme, by_caller: bool) -> str:
    """Why a site is left in fp32, or an empty string."""
    if by_caller:
        return EXCLUDED
    if site.operation not in scheme.operations:
        return _UNNAMED.get(site.operation, "the scheme leaves it in floating point")
    if site.scheme == FP32:
        return "the scheme keeps it in fp32"
    return ""


def _misfit(operation: str, scheme: OpScheme) -> str:
    """Why a kind of operation has no such scheme, or an empty string."""
    if scheme.activation is None and scheme.quantized and operation not in _WEIGHTS_ALONE:
        return f"weights alone are quantized in linears, recurrent layers, experts and tables, not in a {operation}"
    if scheme.weight is not None and scheme.weight.granularity == "group" and operation not in ("linear", "recurrence", "experts"):
        return f"weights in groups are for linears, recurrent layers and experts, not for {operation}"
    return ""


def dynamic(activation: ActivationScheme | None) -> bool:
    """Whether the scale is computed in each call, so that calibration has nothing to find out."""
    return activation is not None and activation.granularity == "row"


def check_used(overrides: tuple[Override, ...], used: set[int], names: Iterable[str]) -> None:
    for i, override in enumerate(overrides):
        if i not in used:
            wanted = override.where
            where = wanted if isinstance(wanted, str) else wanted.__name__ if isinstance(wanted, type) else wanted.pattern
            raise unknown(where, names, "quantize(exclude=...) or Override(...)")


def unknown(wanted: str, names: Iterable[str], where: str) -> InputError:
    """What to say of a name that no operation has."""
    close = difflib.get_close_matches(wanted, names, 3, 0.3)
    hint = f"did you mean {', '.join(close)}?" if close else "quantize(model, batches).report() lists the names"
    return InputError(f"{wanted!r} matches no operation of the model", where, hint)


def _owner(node: Node, constants: Constants, at: Node) -> str:
    """The owner of the parameter that is multiplied with, else the module that contains the operation, and its name. at: as in
    `_operations`."""
    for operand in node.all_input_nodes:
        if constants.is_constant(operand):
            sources = constants.sources(operand)
            if len(sources) == 1 and constants.value(operand).dim() >= 2:
                return sources[0].removesuffix(".weight")
    return ".".join(part for part in (module_path(at), node.name) if part)


def _unique(name: str, names: dict[str, int]) -> str:
    """The name of one more operation of an owner. names: how many operations have each, with those of all owners, which may be like
    "a#2" themselves."""
    names[name] += 1
    if names[name] == 1:
        return name
    while (made := f"{name}#{names[name]}") in names:
        names[name] += 1
    names[made] = 1
    return made


def _matches(where: Where, name: str, owner: str, node: Node, classes: Mapping[type, set[str]]) -> bool:
    """classes: the names of each class that is asked for, and of those that inherit from it."""
    if isinstance(where, (str, re.Pattern)):
        return is_named(where, name, owner)
    return any(_class_name(kind) in classes[where] for _, kind in _modules(node))


def is_named(where: str | re.Pattern[str], name: str, owner: str) -> bool:
    """Whether an operation is the one named, or in the module named, or has a name in which a pattern is found. owner: its name without
    the number of its repetition."""
    if isinstance(where, re.Pattern):
        return where.search(name) is not None
    return where in (name, owner) or owner.startswith(f"{where}.")


def _names_of(kind: type) -> set[str]:
    """The names of a class and of those that inherit from it."""
    below: list[type] = type.__subclasses__(kind)
    return {_class_name(kind)}.union(*(_names_of(each) for each in below))


def _class_name(kind: object) -> str:
    """Exported graphs name the class; traced ones hold it."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _modules(node: Node) -> list[tuple[str, object]]:
    """Qualified name and class of the modules whose `forward` the node comes from, the outermost first."""
    return list((node.meta.get("nn_module_stack") or {}).values())


def module_path(node: Node) -> str:
    """Qualified name of the module whose `forward` the node comes from; empty for the model itself or when unknown."""
    stack = _modules(node)
    return str(stack[-1][0]) if stack else ""


def source_of(node: Node) -> str:
    """`file:line` of the innermost frame in user code; empty when unknown, as where Dynamo wrote the code."""
    frames = re.findall(r'File "(?!<eval_with_key>)([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if "/torch/" not in file]
    return ":".join((own or frames or [("", "")])[-1]).strip(":")
