"""What forward changes in the attributes of its model, and whether that makes a second call another one than the first. A trace is of one
call; all later ones are taken to be like it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .attributes import Place, State, kept, state
from .nodes import tensors, written
from .rebound import made_of, storage, tried

T = TypeVar("T")


class Changes(NamedTuple):
    """Names of attributes. always: those that each call changes. once: those that only the first changes, so that the next is another.
    written: the first of what `_Calls.written` names, an empty string without any."""

    always: list[str]
    once: list[str]
    written: str


def changed(model: torch.nn.Module, trace: Callable[[], T], again: Callable[[], object]) -> tuple[T, Changes]:
    """What tracing the model gives, and what forward changes. again: a trace of just the same arguments, in which the model is called twice
    where attributes have changed. What is stored alike in each call, collected, or made once does not make the second call another one;
    a number that each call changes may do that to a later one."""
    before, after = state(model), dict[Place, object]()
    hook = model.register_forward_hook(lambda *_: after.update(state(model)))  # torch.export itself puts attributes back
    try:
        with kept(model):
            made = trace()
    finally:
        hook.remove()
    places = [place for place, value in after.items() if before.get(place) != value]
    if not places:
        return made, Changes([], [], "")
    calls = _Calls(model)
    with tried(model):  # a model may raise at a certain number
        hook = model.register_forward_hook(calls.again, with_kwargs=True)
        try:
            again()
        finally:
            hook.remove()
    moved = [place for place in places if calls.second.get(place) != calls.first.get(place) or not calls.second]
    always = [place for place in moved if calls.differ or (_is_number(before.get(place)) and _is_number(after[place]))]
    once = places if calls.differ and not (calls.leans or always) else []
    written = f"{', '.join(calls.written[:3])}{' ...' if len(calls.written) > 3 else ''}"
    return made, Changes(_names(model, always), _names(model, once), written)


def _is_number(held: object) -> bool:
    return isinstance(held, tuple) and held[0] in (int, float)


def _names(model: torch.nn.Module, places: list[Place]) -> list[str]:
    prefixes = {module: prefix for prefix, module in model.named_modules()}
    return sorted(f"{prefixes.get(module, '')}.{name}".removeprefix(".") for module, name in places)


class _Done(Exception):
    """Ends a trace of which no more is needed."""


class _Calls:
    """Calls the model again at the end of its first call. differ: whether the second computes something else from the same arguments.
    leans: whether it reads tensors that the first made or wrote, which may be the same in another way, as a table is. written: parameters
    that the first writes into, and the second does not; and such buffers, if what is written depends on the numbers in the arguments."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.first: State = {}
        self.second: State = {}
        self.differ = self.leans = False
        self.written: list[str] = []

    def again(self, _: object, args: Any, kwargs: Any, result: Any) -> None:
        mode = get_proxy_mode()
        if self.first or mode is None:
            return
        self.first, end = state(self.model), len(mode.tracer.graph.nodes)
        dependent = made_of(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        results = result, self.model(*args, **kwargs)
        self.second = state(self.model)
        meanings = _Meanings(mode.tracer)
        first, second = meanings.of_calls(end, *results)
        self.differ, self.leans = first != second, meanings.leans
        once = first[1].keys() - second[1].keys()
        buffers = [(name, buffer) for name, buffer in self.model.named_buffers() if storage(buffer) in dependent]
        self.written = [name for name, tensor in (*self.model.named_parameters(), *buffers) if storage(tensor) in once]
        raise _Done


class _Meanings:
    """A number for what each node of two calls computes, the same for the same of the same. The second call finds in arguments and buffers
    what the first found, not what that has written there."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self.known: dict[object, int] = {}
        self.constants: list[Any] = []
        self.nodes: dict[torch.fx.Node, int] = {}
        self.written: dict[int, int] = {}  # what was last written to memory
        self.leans = False

    def of_calls(self, end: int, *results: Any) -> list[tuple[list[object], dict[int, int]]]:
        """What the results of calls are, and what each leaves in arguments and buffers. end: of the nodes of the first."""
        nodes = list(self.tracer.graph.nodes)
        given = {storage(leaf) for node in nodes if node.op == "placeholder" for leaf in tensors(node)}
        calls: list[tuple[list[object], dict[int, int]]] = []
        earlier: set[torch.fx.Node] = set()
        changed: set[int] = set()
        for part, result in zip((nodes[:end], nodes[end:]), results, strict=True):
            for node in part:
                self._add(node)
            read = {*chain.from_iterable(node.all_input_nodes for node in part), *filter(None, self._of(result))}
            self.leans = bool(read & earlier) or any(storage(leaf) in changed for node in read for leaf in tensors(node))
            calls.append((self._result(result), {where: what for where, what in self.written.items() if where in given}))
            earlier = {node for node in part if node.op == "call_function"}
            changed = {*self.written}
            self.written = {where: what for where, what in self.written.items() if where not in given}
        return calls

    def _add(self, node: torch.fx.Node) -> None:
        what: object = node.target
        if node.op == "get_attr":
            what = self._constant(attrgetter(str(node.target))(self.tracer.root))
        elif node.op == "call_function":
            what = str(node.target), repr(torch.fx.node.map_arg((node.args, node.kwargs), self._read))
        self.nodes[node] = number = self.known.setdefault((node.op, what), len(self.known))
        for value in written(node):
            self.nodes[node] = self.nodes[value]  # the same tensor: what was written is told of its memory
            self.written.update({storage(leaf): number for leaf in tensors(value)})

    def _read(self, node: torch.fx.Node) -> Any:
        return self.nodes[node], *(self.written.get(storage(leaf)) for leaf in tensors(node))

    def _constant(self, value: Any) -> int:
        for place, known in enumerate(self.constants):
            if known is value or _equal(known, value):
                return place
        self.constants.append(value)
        return len(self.constants) - 1

    def _of(self, result: Any) -> list[torch.fx.Node | None]:
        """The node of each tensor in a result."""
        leaves = pytree.tree_leaves(result)
        slots = [get_proxy_slot(leaf, self.tracer, None) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return [None if slot is None else slot.proxy.node for slot in slots]

    def _result(self, result: Any) -> list[object]:
        leaves = zip(pytree.tree_leaves(result), self._of(result), strict=True)
        return [repr(leaf) if node is None else self._read(node) for leaf, node in leaves]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.fx.GraphModule) and isinstance(other, torch.fx.GraphModule):
        return one.code == other.code
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor or one.dtype != other.dtype:
        return False
    with _disable_current_modes():
        return torch.equal(one, other)
