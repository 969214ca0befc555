"""From an FX graph of ATen calls to values: one walk, each call through its table row, or left to PyTorch with a reason."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import custom_ops  # noqa: F401  which defines the operator below
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..diagnostics.errors import BY_PARTS, SPARSE, InvalidGraph, Unsupported
from . import attrs as A
from . import build as b
from .aten import COMPLEX, COMPOSITES, NAMED, QUANTIZED, TABLE, Call, Pair, SymScalar
from .aten.complex_numbers import PARTS
from .captured import Leftover
from .device import CPU, refuse_products
from .flex import WHY
from .ir import Graph, Value
from .memory_format import lies_row_by_row
from .nodes import as_it_is, name_of, origin_of, schema_arguments
from .ops import make
from .randomness import draws
from .refusals import is_sparse
from .scalars import READ, computed, computed_with, condition, defined, of_data
from .symbols import Symbols
from .types import FROM_TORCH, TensorType, TupleType, Type, boolean

aten = torch.ops.aten
PART_OF = torch.ops.export.access_subclass_inner_tensor.default  # which torch.export writes for each tensor that a parameter is made of

# Calls that check what the captured sizes already say, or say something to other parts of PyTorch. They have no result.
_IGNORED: frozenset[Any] = frozenset({
    aten._assert_tensor_metadata.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default, torch._check,
})
_ASSERTED: frozenset[Any] = frozenset({aten._assert_async.default, aten._assert_async.msg})
CHECKS = _IGNORED | _ASSERTED | {aten._assert_scalar.default}  # calls without a result


@dataclass(frozen=True)
class Wrapped:
    """A tensor of the model that is made of others, such as the integers and scales of a quantized weight."""

    name: str
    tensor: torch.Tensor
    watched: bool

    def part(self, name: str) -> Value | Wrapped:
        return constant_value(getattr(self.tensor, name), f"{self.name}.{name}", self.watched)


def type_of(meta: Any, symbols: Symbols, device: torch.device = CPU, unused: frozenset[int] = frozenset()) -> Type:
    """The type of a fake result. unused: which elements of a tuple nobody asks for, such as the random seeds of attention on GPUs. Raises
    Unsupported for what no type describes."""
    if isinstance(meta, torch.Tensor):
        return tensor_type(meta, symbols, device)
    if isinstance(meta, (tuple, list)):
        known = (isinstance(m, torch.Tensor) and (n not in unused or m.dtype in FROM_TORCH) for n, m in enumerate(meta))
        return TupleType(tuple(tensor_type(m, symbols, device) if typed else None for m, typed in zip(meta, known)))
    raise Unsupported(f"a result of type {type(meta).__name__}")


def tensor_type(meta: torch.Tensor, symbols: Symbols, device: torch.device = CPU) -> TensorType:
    """The type of a fake tensor. Raises Unsupported for other devices, and layouts and dtypes that are not covered."""
    if meta.dtype not in FROM_TORCH:
        raise Unsupported(f"a tensor of {meta.dtype}")
    if meta.layout != torch.strided or meta.device != device:
        raise Unsupported(f"a tensor with layout {meta.layout} on {meta.device}", hint=SPARSE if is_sparse(meta) else "")
    return TensorType(FROM_TORCH[meta.dtype], tuple(symbols.dim(s) for s in meta.shape))


@dataclass
class Lowering:
    """The state of one walk: what each FX node became, and what was left to PyTorch."""

    symbols: Symbols
    device: torch.device = CPU
    env: dict[Node, Any] = field(default_factory=dict)
    leftovers: list[tuple[Value, Leftover]] = field(default_factory=list)
    copies: list[tuple[Value, Value]] = field(default_factory=list)
    random: list[Value] = field(default_factory=list)
    baked: list[Value] = field(default_factory=list)
    checks: list[tuple[Value, str]] = field(default_factory=list)
    read: dict[Node, SymScalar] = field(default_factory=dict)
    pairs: dict[Value, Pair] = field(default_factory=dict)

    def run(self, module: GraphModule) -> Any:
        """The output node's argument, with every node replaced. Placeholders must be in `env` already."""
        for node in module.graph.nodes:
            if node.op == "output":
                return self.resolve(node.args[0])
            if node.op == "get_attr":
                self.env[node] = self.attribute(module, str(node.target))
            elif node.op == "call_function":
                with b.at(origin_of(node)):
                    self.env[node] = self._expressed(node)
            elif node.op != "placeholder":
                raise Unsupported(f"FX node {node.op} {node.target}", origin_of(node))
        return ()

    def _expressed(self, node: Node) -> Any:
        """`call`; Unsupported where sizes are equal that we cannot show to be. Says where in the model."""
        try:
            return self.call(node)
        except Unsupported as error:
            raise error if error.where else Unsupported(error.what, origin_of(node), error.hint) from error
        except InvalidGraph as error:
            raise Unsupported(f"{name_of(node)}: {error.what}", origin_of(node)) from error

    def attribute(self, module: GraphModule, path: str) -> Any:
        found: Any = module
        for part in path.split("."):
            found = getattr(found, part)
        if isinstance(found, torch.Tensor):
            return constant_value(found, path, isinstance(found, torch.nn.Parameter), self.device)
        return found

    def resolve(self, item: Any) -> Any:
        """An FX argument with nodes replaced by what they became."""
        if isinstance(item, Node):
            if isinstance(self.env[item], Wrapped):
                raise Unsupported(f"the {type(self.env[item].tensor).__name__} {self.env[item].name} is used as a whole", origin_of(item))
            return self.env[item]
        if isinstance(item, (list, tuple)):
            return type(item)(self.resolve(i) for i in item) if type(item) in (list, tuple) else [self.resolve(i) for i in item]
        if isinstance(item, slice):
            return slice(self.resolve(item.start), self.resolve(item.stop), self.resolve(item.step))
        if isinstance(item, Mapping):
            return {k: self.resolve(v) for k, v in item.items()}
        return self.symbols.dim(item) if isinstance(item, torch.SymInt) else item

    def call(self, node: Node) -> Any:
        """What a call becomes: a Value, a tuple of Values, a Dim, a SymScalar, or None for an assertion."""
        meta = node.meta.get("val")
        if isinstance(meta, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            return self.number(node, meta)
        if node.target in _IGNORED:
            return None
        if node.target is aten._assert_scalar.default:
            return self.assert_number(node)
        if node.target is operator.getitem:
            return self.element(node) if node.users else None
        if node.target is aten.copy_.default:
            return self.copy(node)
        if node.target is PART_OF:
            return self.part(node)
        if node.target in _ASSERTED:
            message = str(node.args[1]) if len(node.args) > 1 else "an assertion of the model does not hold"
            self.checks.append((b.reshape(b.cast(self.resolve(node.args[0]), boolean), ()), message))
            return None
        if meta is None and not node.users:
            raise Unsupported(f"{name_of(node)} has an effect besides its result", origin_of(node))
        kind = type_of(meta, self.symbols, self.device, _unused(node, meta))
        try:
            return self.native(node, kind)
        except (Unsupported, InvalidGraph) as error:
            return self.leave(node, kind, error.what)

    def copy(self, node: Node) -> Value:
        """The write-back of an input at the end of a graph: (input, new value) in `copies`."""
        target, source = node.args[0], self.resolve(node.args[1])
        after = {n for n in node.graph.nodes if n > node}
        if not isinstance(target, Node) or target.op != "placeholder" or any(user in after for user in target.users):
            raise Unsupported("copy_ to something that is no input, or that is read again", origin_of(node))
        value: Value = self.env[target]
        source = b.expand(b.cast(source, value.dtype), value.shape)
        self.copies.append((value, source))
        return source

    def part(self, node: Node) -> Value | Wrapped:
        whole, name = self.env[node.args[0]], str(node.args[1])  # type: ignore[index]
        if not isinstance(whole, Wrapped):
            raise Unsupported("an argument is made of other tensors", origin_of(node), "only parameters and buffers may be")
        return whole.part(name)

    def number(self, node: Node, meta: Any) -> Any:
        """A Dim or a SymScalar; None for a bool that captured sizes decide, or that nobody asks for. What is read from a tensor is also
        computed where torch says that it is a size: the model may have said so, and checks it."""
        numbers = [self.read[a] if isinstance(a, Node) and a in self.read else self.resolve(a) for a in node.args]
        reads = node.target is READ or not self.read.keys().isdisjoint(node.all_input_nodes)
        if isinstance(meta, (torch.SymBool, bool)):
            asked = node.users and (reads or of_data(meta) or computed_with(node))
            result = condition(node, numbers) if asked else None
        elif isinstance(meta, (torch.SymInt, int)) and not self.symbols.depends_on_data(meta):
            if reads:
                self.read[node] = computed(node, numbers)
            return self.symbols.dim(meta)
        else:
            result = computed(node, numbers)
        if reads and result is not None:
            self.read[node] = result
            holds = defined(node, numbers)
            if holds is not None:
                self.checks.append((holds, f"a number of the model is divided by 0, not finite or not real: {origin_of(node)}"))
        return result

    def assert_number(self, node: Node) -> None:
        """What is said of sizes holds where it is captured; what is said of data is checked in each call."""
        said, message = node.args[0], str(node.args[1])
        if isinstance(said, Node) and isinstance(self.env[said], SymScalar):
            self.checks.append((self.env[said].value, message))

    def element(self, node: Node) -> Any:
        source, index = self.resolve(node.args[0]), int(node.args[1])  # type: ignore[arg-type]
        return b.get(source, index) if isinstance(source, Value) else source[index]

    def native(self, node: Node, kind: Type) -> Any:
        """The table row's result, checked against the type that torch says it has. Raises Unsupported with the reason."""
        if node.target is aten.as_strided.default and as_it_is(node):
            return self.resolve(node.args[0])
        row = TABLE.get(node.target) or COMPOSITES.get(node.target) or NAMED.get(name_of(node))
        arguments = [self.resolve(a) for a in schema_arguments(node)] if row is not None or node.target in COMPLEX else []
        used = frozenset(int(u.args[1]) for u in node.users if u.target is operator.getitem and u.users)  # type: ignore[arg-type]
        if any(t.dtype.kind == "complex" for t in (*tensors_of(kind), *operand_types(arguments))):
            if node.target not in COMPLEX:
                raise Unsupported("complex numbers")
            result = COMPLEX[node.target](Call(kind, used), *self.taken_apart(arguments))
        elif row is None:
            raise Unsupported(node.meta.get(WHY, "no native form"))
        else:
            call = Call(kind, used)
            result = row(call, *arguments)
            self.baked += call.decided
        if name_of(node) in QUANTIZED:
            self.baked += [a for a in arguments[1:] if isinstance(a, Value) and a.op == "constant"]
        made = [
            self.put_together(value, expected) if isinstance(value, Pair) and expected is not None else value
            for value, expected in zip(result if isinstance(result, tuple) else (result,), tensors_or_none(kind), strict=True)
        ]
        for value, expected in zip(made, tensors_or_none(kind), strict=True):
            if value is not None and replace(value.tensor, qparams=None) != expected:
                raise Unsupported(f"the native form would be {value.type}, PyTorch says {expected}")
        if self.device != CPU:
            refuse_products(made, arguments)
        return tuple(made) if isinstance(result, tuple) else made[0]

    def taken_apart(self, item: Any) -> Any:
        """Arguments with complex tensors as pairs. Of one that PyTorch makes, or has, it also makes the parts."""
        if isinstance(item, (list, tuple)):
            return [self.taken_apart(i) for i in item]
        if not isinstance(item, Value) or not isinstance(item.type, TensorType) or item.dtype.kind != "complex":
            return item
        if item not in self.pairs:
            kind, whole = TensorType(PARTS[item.dtype], (*item.shape, 2)), item
            if item.op == "input":
                whole = self.left(aten.resolve_conj.default, (item,), item.type)
            parts = self.left(aten.view_as_real.default, (whole,), kind)
            self.pairs[item] = Pair(*(b.reshape(b.slice_(parts, item.tensor.rank, n, 1), item.shape) for n in (0, 1)))
        return self.pairs[item]

    def put_together(self, pair: Pair, kind: TensorType) -> Value:
        """A complex tensor, which is made only where PyTorch reads it."""
        parts = Pair(b.expand(pair.re, kind.shape), b.expand(pair.im, kind.shape))
        whole = self.left(aten.complex.default, (parts.re, parts.im), kind)
        self.pairs[whole] = parts
        return whole

    def left(self, op: Any, operands: tuple[Value, ...], kind: Type) -> Value:
        """An operation between complex tensors, which PyTorch has, and their parts."""
        reason, where = "complex numbers", operands[0].origin
        attrs = A.AtenAttrs(op, tuple(A.Slot(n) for n in range(len(operands))), (), reason)
        value = make("aten", *operands, attrs=attrs, type=kind, origin=where, name=str(op))
        self.leftovers.append((value, Leftover(str(op), reason, where)))
        return value

    def leave(self, node: Node, kind: Type, reason: str) -> Value:
        """An `aten` value. Raises Unsupported when the call cannot run on its own."""
        where = origin_of(node)
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise Unsupported(f"{name_of(node)} writes to its operands", where)
        if node.target is aten.as_strided.default and not node.args[0].meta["val"].is_contiguous():  # type: ignore[union-attr]
            raise Unsupported("as_strided of a tensor that is not contiguous", where)
        operands: list[Value] = []
        # Values have no strides in the graph: what PyTorch views in the trace may lie otherwise.
        target = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target
        args = tuple(self.slots(self.resolve(a), operands, where) for a in node.args)
        kwargs = tuple((k, self.slots(self.resolve(a), operands, where)) for k, a in node.kwargs.items())
        # A copy that only changes how a tensor lies is the tensor itself here, which the caller or another call may have laid otherwise.
        traced = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        dense = {self.env[n] for n in traced if lies_row_by_row(n.meta["val"])}
        attrs = A.AtenAttrs(target, args, kwargs, reason, tuple(n for n, value in enumerate(operands) if value in dense))
        value = make("aten", *operands, attrs=attrs, type=kind, origin=where, name=name_of(node))
        self.leftovers.append((value, Leftover(name_of(node), reason, where)))
        if draws(node.target, node.args, node.kwargs):
            self.random.append(value)
        return value

    def slots(self, item: Any, operands: list[Value], where: str) -> Any:
        """An argument of an aten value: tensors become slots."""
        if isinstance(item, Value):
            operands.append(item)
            return A.Slot(len(operands) - 1)
        if isinstance(item, (list, tuple)):
            return type(item)(self.slots(i, operands, where) for i in item)
        if isinstance(item, SymScalar):
            raise Unsupported("an operation left to PyTorch takes a number computed from sizes or data", where, BY_PARTS)
        return item

    def check_random_order(self, graph: Graph) -> None:
        """Raises Unsupported when random operations would draw other numbers than eager does. What draws numbers that nothing uses is left
        out, unless others draw theirs after it."""
        drawn = [v for v in graph.order if v in self.random]
        if drawn != self.random[: len(drawn)]:
            raise Unsupported("several random operations whose order cannot be kept", self.random[0].origin, BY_PARTS)


def constant_value(tensor: torch.Tensor, name: str, watched: bool, device: torch.device = CPU) -> Value | Wrapped:
    """A constant; a single number of the model's own code becomes a `full`, which every pass understands, wherever it is."""
    made_of_others: bool = is_traceable_wrapper_subclass(tensor)
    if made_of_others:
        return Wrapped(name, tensor, watched)
    number = not watched and tensor.dim() == 0 and not tensor.is_complex()
    if tensor.dtype not in FROM_TORCH or tensor.layout != torch.strided or (tensor.device != device and not (number and tensor.is_cpu)):
        what = f"the tensor {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise Unsupported(what, hint=SPARSE if is_sparse(tensor) else "")
    if number:
        return b.full(tensor.item(), FROM_TORCH[tensor.dtype])
    return b.constant(tensor if watched else tensor.clone(), name, watched)  # folded in part: all of it is what it was at first


def _unused(node: Node, meta: Any) -> frozenset[int]:
    """Which elements of a node's tuple nobody asks for."""
    taken = {int(u.args[1]) for u in node.users if u.target is operator.getitem and u.users}  # type: ignore[arg-type]
    return frozenset(range(len(meta))) - taken if isinstance(meta, (tuple, list)) else frozenset()


def tensors_or_none(kind: Type) -> tuple[TensorType | None, ...]:
    return (kind,) if isinstance(kind, TensorType) else kind.elements


def tensors_of(kind: Type) -> list[TensorType]:
    return [t for t in tensors_or_none(kind) if t is not None]


def operand_types(arguments: Any) -> list[TensorType]:
    """Types of all values in nested arguments."""
    if isinstance(arguments, Value):
        return tensors_of(arguments.type)
    if isinstance(arguments, (list, tuple)):
        return [t for a in arguments for t in operand_types(a)]
    return []
