"""What a model asks of its sizes by itself. torch takes every free size for 2 or more, and answers without a guard what is so for all of
those; graphs serve 1 as well (`small_sizes.py`). Where the answer is another one for 1, the model is run with such sizes, and where what
was traced gives other results, calls with them are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, combinations
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch._prims_common import is_contiguous_for_memory_format_or_false
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..diagnostics.errors import Unsupported
from .alone import alone
from .examples import called
from .refusals import is_the_users

Sizes = frozenset[sympy.Symbol]
_ASKED: WeakKeyDictionary[ShapeEnv, dict[Sizes, None]] = WeakKeyDictionary()
_REFUSED: WeakKeyDictionary[ShapeEnv, list[Sizes]] = WeakKeyDictionary()
_OWN = "write to a clone of it, or compile from an example with sizes for which it is a copy"
_MOST = 4  # free sizes of one question


@contextmanager
def recorded() -> Iterator[None]:
    """Notes of which sizes a model that is traced asks something to which 1 would be another answer."""
    kinds: tuple[Any, ...] = torch.SymBool, torch.SymInt
    with alone():
        symbolic_shapes.uninteresting_files().add(__file__)  # guards are known by what asks, which is not this file
        before = [kind.__bool__ for kind in kinds]

        def asking(plain: Callable[[Any], bool]) -> Callable[[Any], bool]:
            def asked(question: Any) -> bool:
                answer = plain(question)
                if is_the_users(sys._getframe(1).f_code.co_filename):
                    note(question.node, answer)
                return answer

            return asked

        for kind, plain in zip(kinds, before, strict=True):
            kind.__bool__ = asking(plain)
        try:
            with _Contiguity():
                yield
        finally:
            for kind, plain in zip(kinds, before, strict=True):
                kind.__bool__ = plain


class _Contiguity(TorchFunctionMode):
    """Where a model asks whether a tensor is contiguous, it asks whether sizes are 1, or 0: PyTorch does not look at the strides then."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.is_contiguous:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name == "__torch_function__":
                frame = frame.f_back
            if is_the_users(frame.f_code.co_filename):
                for question in (size <= 1 for size in args[0].shape):
                    if isinstance(question, torch.SymBool):
                        note(question.node, bool(question))
                for env, symbol in _of_strides(args[0]):
                    _ASKED.setdefault(env, {})[frozenset({symbol})] = None
                if args[0].layout is torch.strided:
                    return _lies(args[0], (kwargs or {}).get("memory_format", torch.contiguous_format))
        return func(*args, **(kwargs or {}))


_ORDERS = {torch.channels_last: (1, 3, 2, 0), torch.channels_last_3d: (1, 4, 3, 2, 0)}


def _lies(tensor: torch.Tensor, order: torch.memory_format) -> bool:
    """Whether a tensor lies without gaps in an order. Sizes are asked for it, of which torch takes no note (`oblivious.py`)."""
    axes, expected = _ORDERS.get(order, range(tensor.ndim - 1, -1, -1)), 1
    if len(axes) != tensor.ndim:
        return False
    for axis in axes:
        if tensor.shape[axis] != 1:
            if tensor.stride(axis) != expected:
                return 0 in tensor.shape
            expected = expected * tensor.shape[axis]
    return True


def _known(env: Any) -> Mapping[sympy.Basic, Any]:
    """The example's number of each symbol."""
    found: Mapping[sympy.Basic, Any] = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # before torch 2.11
    return found


def note(node: Any, answer: bool) -> None:
    """Takes note that sizes are asked something, if they could be 1 and the answer another one then."""
    env = node.shape_env
    known = _known(env)
    sizes: dict[Any, Any] = {symbol: known.get(symbol) for symbol in node.expr.free_symbols}
    if None in sizes.values() or len(sizes) > _MOST:
        return
    small = [symbol for symbol in sizes if symbol.is_positive and env.var_to_range[symbol].lower <= 2]
    for some in chain.from_iterable(combinations(small, count) for count in range(1, len(small) + 1)):
        if _asked(node.expr, {**sizes, **dict.fromkeys(some, 1)}) != answer:
            _ASKED.setdefault(env, {})[frozenset(some)] = None


def _asked(expr: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> bool | None:
    """The answer for these sizes; None where there is none, as by a division by 0."""
    try:
        return bool(expr.subs(sizes))
    except (ArithmeticError, TypeError, ValueError):
        return None


def check(
    model: torch.nn.Module, program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any],
    spelled: Callable[[ShapeEnv], Callable[[sympy.Symbol], object]],
) -> None:
    """Finds out which of these sizes of a traced model may be 1, alone, as far as it asked, and all together. spelled: what is equal for
    sizes that are equal in each call."""
    for env in [*_ASKED]:
        inputs = _inputs(program, env)
        if inputs:
            found = sorted(_ASKED.pop(env), key=lambda sizes: (len(sizes), str(sorted(sizes, key=str))))
            every, alike = _all_of(inputs), spelled(env)
            for sizes in dict.fromkeys(_with_equal(some, every, alike) for some in (*found, frozenset().union(*found), every)):
                if not any(sizes >= other for other in _REFUSED.get(env, ())) and not _serves(model, program, inputs, sizes, args, kwargs):
                    _REFUSED.setdefault(env, []).append(sizes)


def _with_equal(sizes: Sizes, every: Sizes, spelled: Callable[[sympy.Symbol], object]) -> Sizes:
    """With those that cannot be another number."""
    known = [*map(spelled, sizes)]
    return sizes.union(size for size in every if spelled(size) in known)


def refuse(tensors: Iterable[tuple[torch.Tensor, torch.memory_format]]) -> None:
    """Refuses calls where a size of one of these is 1 that is not, or a size that its strides are made of, or where it lies without gaps
    in this order. Unsupported for an example where it does so, unless that is so in all calls."""
    for tensor, order in tensors:
        sizes: Sequence[Any] = tensor.shape
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.has_hint() and size != 1 and isinstance(size.node.expr, sympy.Symbol):
                _REFUSED.setdefault(size.node.shape_env, []).append(frozenset({size.node.expr}))  # others become guards by being asked
        for env, symbol in _of_strides(tensor):
            _REFUSED.setdefault(env, []).append(frozenset({symbol}))
        if not is_contiguous_for_memory_format_or_false(tensor, memory_format=order) and _lies(tensor, order):
            raise Unsupported("the model writes to what is a view for some sizes, these among them, and a copy for others", hint=_OWN)


def _of_strides(tensor: torch.Tensor) -> Iterator[tuple[ShapeEnv, sympy.Symbol]]:
    """The sizes that a tensor's strides are made of and that are not 1."""
    strides: Sequence[Any] = tensor.stride()
    for node in (stride.node for stride in strides if isinstance(stride, torch.SymInt)):
        yield from ((node.shape_env, one) for one in node.expr.free_symbols if _known(node.shape_env).get(one) not in (None, 1))


def refused(env: ShapeEnv | None) -> Sequence[Sizes]:
    """Sizes that must not all be 1, since the model takes another way then."""
    return () if env is None else _REFUSED.get(env, ())


def _inputs(program: ExportedProgram, env: ShapeEnv) -> list[Any]:
    """The fake arguments of a program, if they are of this environment; else none."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    kinds = (spec.kind for spec in program.graph_signature.input_specs)
    metas = [node.meta.get("val") for node, kind in zip(nodes, kinds, strict=True) if kind == InputKind.USER_INPUT]
    ours = any(isinstance(m, torch.Tensor) and getattr(getattr(m, "fake_mode", None), "shape_env", None) is env for m in metas)
    return metas if ours else []


def _free(metas: Iterable[Any]) -> Iterator[Any]:
    sizes: Iterator[Any] = chain.from_iterable(meta.shape for meta in metas if isinstance(meta, torch.Tensor))
    return (size for size in sizes if isinstance(size, torch.SymInt))


def _all_of(inputs: Iterable[Any]) -> Sizes:
    """The free sizes that may be 1: a question that was not reached may be about others than those that were."""
    exprs = [(size.node.expr, size.node.shape_env) for size in _free(inputs)]
    return frozenset(e for e, env in exprs if isinstance(e, sympy.Symbol) and env.var_to_range[e].lower <= 2)


def _serves(
    model: torch.nn.Module, program: ExportedProgram, inputs: Sequence[Any], sizes: Sizes, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    leaves, form = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if len(leaves) != len(inputs) or any(isinstance(meta, torch.SymInt) for meta in inputs):
        return False
    if any(not isinstance(e := size.node.expr, sympy.Symbol) and e.free_symbols & sizes for size in _free(inputs)):
        return False
    small = [_narrowed(leaf, meta, sizes) for leaf, meta in zip(leaves, inputs, strict=True)]
    traced = program.module(check_guards=False)
    alike = [_alike(model, traced, pytree.tree_unflatten(given, form)) for given in (small, [*map(_varied, small)])]
    return alike[0] is True and alike[1] is not False  # the model need not bear other numbers than its example


def _narrowed(leaf: Any, meta: Any, sizes: Collection[sympy.Symbol]) -> Any:
    """An argument where these sizes are 1."""
    for axis, size in enumerate(meta.shape) if isinstance(leaf, torch.Tensor) else ():
        if isinstance(size, torch.SymInt) and size.node.expr in sizes:
            leaf = leaf.narrow(axis, 0, 1)
    return leaf


def _varied(leaf: Any) -> Any:
    """Other numbers: an example of zeros, or a mask of ones, may not tell two ways from one another."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        more = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(0))
        return (leaf.double() + more).to(leaf.dtype)  # the narrowest floats are not added
    numbers = leaf.clone(memory_format=torch.contiguous_format)
    numbers.view(-1)[::2] = 0
    return numbers


def _alike(model: torch.nn.Module, traced: torch.nn.Module, arguments: Any) -> bool | None:
    """Whether both give the same, and write the same; None where the model itself does not bear the arguments."""
    results: list[Any] = []
    for each in (model, traced):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), arguments)
        try:
            results.append(pytree.tree_leaves((called(each, args, kwargs), args, kwargs)))
        except Exception:
            return None if each is model else False
    try:
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5, equal_nan=True)
    except AssertionError:
        return False
    return True
