"""Every row of the ATen tables against eager, on calls recorded from torch's operator database and on calls of our own.

A call becomes a graph of one node, is captured, verified and interpreted; no backend is involved.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Container, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sashiko.graph import interpret
from sashiko.graph.aten import TABLE
from sashiko.graph.aten.pointwise import ROWS as POINTWISE
from sashiko.graph.capture import Captured, from_fx
from sashiko.graph.verify import verify
from tests.graph.calls import AROUND, BAGS, EXPERT_CALLS, FOLDED, FUSED, PUTS, RECURRENCES, SAMPLED
from tests.graph.eager import Recorded, copied, cubic_weights, order_of_sums, own_error, reference, rounded_fractions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the database exercises deprecated functions too

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
FIRST_ONLY = {  # the other results are for training
    aten.log_sigmoid_forward.default, aten._native_batch_norm_legit_no_training.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default,
    aten.embedding_bag.padding_idx, aten._embedding_bag.default, aten._embedding_bag_forward_only.default,
}
ANY_OF_EQUAL = {  # of equal elements eager finds any; and which argument is the axis
    aten.topk.default: 2, aten.kthvalue.default: 2, aten.median.dim: 1, aten.nanmedian.dim: 1, aten.sort.default: 1,
}
UNDEFINED = {op for op in TABLE if "empty" in str(op)}  # their content is whatever was in memory


def found_at(call: Recorded, places: torch.Tensor) -> torch.Tensor:
    """The elements at the places that a call found."""
    x, at = call.args[0], ANY_OF_EQUAL[call.target]
    axis = call.args[at] if len(call.args) > at else -1
    return torch.take_along_dim(x, places if places.dim() == x.dim() else places.unsqueeze(axis), axis) if x.dim() else x


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps copies of the arguments of every call that has a row."""

    def __init__(self, rows: Container[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.calls: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.rows and all(plain(t) for t in tree_flatten((args, kwargs or {}))[0]):
            self.calls.append(Recorded(func, *tree_map(copied, (args, dict(kwargs or {})))))
        return func(*args, **(kwargs or {}))


def plain(item: Any) -> bool:
    """No sparse tensors, no complex halves: those are refused as a whole. No giants: they only take time."""
    if isinstance(item, torch.Tensor):
        return item.layout == torch.strided and item.dtype != torch.complex32 and item.numel() < 1 << 18
    return item is not torch.complex32


def check(call: Recorded) -> str | None:
    """Compares one call with eager. Returns why it was left to PyTorch, None when it has a native form."""
    leftovers = compared(call).leftovers
    return leftovers[0].reason if leftovers else None


def compared(call: Recorded) -> Captured:
    """A call as it is captured, compared with eager. A range is a tensor that the graph makes itself; so are indices that are expanded."""
    graph = Graph()
    tensors: list[torch.Tensor] = []
    nodes: list[Any] = []
    leaves, spec = tree_flatten((call.args, call.kwargs))
    for leaf in leaves:
        nodes.append(graph.placeholder(f"x{len(tensors)}") if isinstance(leaf, torch.Tensor) else leaf)
        if isinstance(leaf, torch.Tensor):
            nodes[-1].meta["val"] = leaf
            tensors.append(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64 and 0 in leaf.stride():
            tensors[-1] = nodes[-1].meta["val"] = leaf[tuple(slice(None) if step else slice(1) for step in leaf.stride())]
            nodes[-1] = graph.call_function(aten.expand.default, (nodes[-1], leaf.shape))
            nodes[-1].meta["val"] = leaf
        if isinstance(leaf, range):
            nodes[-1] = graph.call_function(aten.arange.start_step, (leaf.start, leaf.stop, leaf.step))
            nodes[-1].meta["val"] = copied(leaf)
    args, kwargs = tree_unflatten(nodes, spec)
    expected = reference(call)
    node = graph.call_function(call.target, args, kwargs)
    node.meta["val"] = expected
    outputs, wanted = [node], [expected]
    if not isinstance(expected, torch.Tensor):
        native = [i for i, e in enumerate(expected) if isinstance(e, torch.Tensor) and (i == 0 or call.target not in FIRST_ONLY)]
        outputs = [graph.call_function(operator.getitem, (node, i)) for i in native]
        wanted = [expected[i] for i in native]
    graph.output(outputs)
    captured = from_fx(SimpleNamespace(graph=graph), tensors)  # type: ignore[arg-type] # a GraphModule would compile itself to Python
    verify(captured.graph)
    results = captured.results(tensors, interpret.run(captured.graph, tensors), {})
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if call.target in ANY_OF_EQUAL and got is not results[0]:
            got, want = (found_at(call, places) for places in (got, want))
        if call.target not in UNDEFINED:
            bound = tolerance(want.dtype)
            near = bound + order_of_sums(call)
            near += rounded_fractions(call) if "upsample" in str(call.target) else 0.0
            near += cubic_weights(call) if "bicubic" in str(call.target) or call.target is aten.grid_sampler_2d.default else 0.0
            near += own_error(call) if call.target in {op for op, _ in FUSED} else 0.0
            torch.testing.assert_close(got, want, equal_nan=True, rtol=bound, atol=near, msg=lambda m: f"{call.target}: {m}")
    return captured


def tolerance(dtype: torch.dtype) -> float:
    """Some roundings of the dtype: a formula may associate otherwise than eager's kernel does."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    return (2 if dtype in (torch.bfloat16, torch.float16) else 16) * torch.finfo(dtype).eps


def recorded(
    counts: dict[torch.dtype, int], dtypes: Sequence[torch.dtype] = DTYPES, rows: Container[Any] = TABLE
) -> Iterator[tuple[Any, list[Recorded]]]:
    """The calls with a row that the first samples of every operator make: counts[dtype] of them, 1 where it has no entry."""
    for op in op_db:
        for dtype in dtypes:
            if dtype not in op.dtypes or op.name.startswith("jiterator"):
                continue
            torch.default_generator.manual_seed(0)  # torch.manual_seed records the call stack each time
            # op.sample_inputs would walk the call stack for every sample, which takes minutes under pytest.
            for sample in itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), counts.get(dtype, 1)):
                with Recorder(rows) as recorder:
                    op(sample.input, *sample.args, **sample.kwargs)
                yield op, recorder.calls


torch.manual_seed(0)
X, Y, M = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.rand(2, 3, 4) < 0.5
K, V = torch.arange(-12, 12).reshape(2, 3, 4), torch.randn(4)
Q, KEEP = torch.randn(2, 4, 5, 8), torch.rand(5, 5) < 0.8
# Attention over several batch axes, with masks that share some of them.
MANY, MASKS = torch.randn(2, 3, 4, 5, 8), (None, KEEP, torch.randn(3, 1, 5, 5), torch.rand(2, 1, 1, 1, 5) < 0.8, torch.randn(1, 1, 4, 5, 5))
WHOLE = torch.randint(-128, 128, (20, 24), dtype=torch.int8)
IMAGE = torch.randn(2, 3, 8, 6)
PATCHES = (torch.randn(2, 3, 8, 6), torch.randn(5, 3, 4, 2), torch.randn(5), [4, 2], [0, 0], [1, 1], False, [0, 0], 1)
RESIZED = (((IMAGE[0], [13], 2.3), (IMAGE[0], None, [1.7])), ((IMAGE, [16, 3], None, 0.5), (IMAGE.bfloat16(), None, [2.0, 3.0])),
           ((IMAGE[:, None], [3, 5, 6]), (IMAGE[:, None], None, [1.0, 2.0, 2.5])))
NEAREST = tuple((getattr(getattr(aten, f"{name}{rank}d"), form), args) for name in ("upsample_nearest", "_upsample_nearest_exact")
                for rank, both in enumerate(RESIZED, 1) for form, args in zip(("default", "vec"), both))
POSITIONAL: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.gt.Scalar, (X, 0.1)),
    (aten.ge.Scalar, (K, 2)),
    (aten.lt.Scalar, (K, 2.5)),
    (aten.special_erf.default, (X,)),
    (aten.square.default, (X,)),
    (aten.fmod.Scalar, (K, 5)),
    (aten.remainder.Scalar, (K, -5)),
    (aten.floor_divide.default, (X, Y)),
    (aten.pow.Scalar, (2.5, X)), (aten.pow.Scalar, (2, torch.arange(-2, 67))), (aten.pow.Scalar, (2, M)),
    (aten.bitwise_and.Scalar, (K, 6)),
    (aten.bitwise_or.Scalar, (K, 6)),
    (aten.bitwise_xor.Scalar, (K, 6)),
    (aten.bitwise_left_shift.Tensor_Scalar, (K, 3)),
    (aten.bitwise_right_shift.Tensor_Scalar, (K, 2)),
    (aten.__lshift__.Scalar, (K, 3)), (aten.__rshift__.Scalar, (K, 2)),
    (aten.clamp.default, (X, -0.5, 0.5)),
    (aten.clamp.default, (K, 0.5, None)),
    (aten.clamp_max.default, (X, 0.2)),
    (aten.relu6.default, (X * 9,)),
    (aten.where.ScalarSelf, (M, 1.5, X)),
    (aten.where.ScalarOther, (M, X, 2)),
    (aten.where.Scalar, (M, 1.5, 2)),
    (aten.any.dims, (M, [0, 2])),
    (aten.all.dims, (M, [0, 1])),
    (aten._is_all_true.default, (M,)), (aten._is_any_true.default, (M,)),
    (aten.softmax.int, (X, 1)),
    (aten.softmax.int, (X.bfloat16(), 1, torch.float32)),
    (aten.log_softmax.int, (X, -1)),
    (aten.reshape.default, (X, [3, -1])),
    (aten.flatten.using_ints, (X, 1)), (aten.unflatten.int, (X, 2, [2, -1])), (aten.view_as.default, (X, X[None])),
    (aten.reshape_as.default, (X.transpose(0, 2), X)),
    (aten.contiguous.default, (X,)),
    (aten.lift_fresh_copy.default, (X,)),
    (torch.ops.prims.convert_element_type.default, (X, torch.bfloat16)),
    (aten.chunk.default, (X, 2, 2)),
    (aten.linear.default, (X, torch.randn(5, 4), torch.randn(5))),
    (aten.linear.default, (X.bfloat16(), torch.randn(5, 4).bfloat16())),
    (aten.matmul.default, (X, V)),
    (aten.matmul.default, (V, torch.randn(2, 4, 3))),
    (aten.matmul.default, (X, torch.randn(4, 3))),
    (aten.scaled_dot_product_attention.default, (Q, Q[:, :, :3], Q[:, :, :3])),
    (aten.scaled_dot_product_attention.default, (Q[:, 0], Q[:, 1], Q[:, 2], torch.randn(2, 5, 5), 0.0, False)),
    (aten.scaled_dot_product_attention.default, (Q, Q, Q, None, 0.0, True)),
    (aten._fused_rms_norm.default, (X, [4], V, None)),
    (aten._fused_rms_norm.default, (X, [3, 4], None, 1e-5)),
    (aten._native_batch_norm_legit_no_training.default, (X, torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3), 0.1, 1e-5)),
    (aten._unsafe_index.Tensor, (X, [None, torch.tensor([2, -1])])),
    (aten.index.Tensor, (X, [torch.tensor([[1], [0]]), None, K[0, :, 0] % 4])),
    (aten.fill.Tensor, (X, torch.tensor(3.0))),
    (aten.copy.default, (X, V)),
    (aten.arange.start, (2, 9)), (aten.arange.start_step, (0.5, 3.0, 0.25)),
    (aten.rsub.Scalar, (X, 2.0, 3.0)),
    (aten.convolution.default, PATCHES),
    (aten.convolution.default, (IMAGE, torch.randn(5, 3, 3, 2), None, [2, 1], [1, 2], [1, 3], False, [0, 0], 1)),
    (aten.convolution.default, (IMAGE, torch.randn(3, 1, 3, 3), torch.randn(3), [2], [1], [1], False, [0], 3)),
    (aten.convolution.default, (IMAGE[0], torch.randn(5, 8, 1), torch.randn(5), [2], [0], [1], False, [0], 1)),
    (aten.max_pool2d_with_indices.default, (IMAGE, [3, 2], [2, 3], [1, 0], [2, 1], True)),
    (aten.max_pool2d_with_indices.default, (IMAGE[0], [3])),
    (aten.avg_pool1d.default, (IMAGE[0], [3], [2], [1], True, False)),
    (aten.avg_pool2d.default, (IMAGE, [3, 2], [2, 2], [1, 1], True, True)),
    (aten.avg_pool2d.default, (IMAGE, [3], [2], [1], True, False)),
    (aten.avg_pool2d.default, (IMAGE, [3], [1], [0], False, True, 4)),
    (aten.convolution.default, (IMAGE, torch.randn(3, 5, 3, 2), torch.randn(5), [2, 1], [1, 2], [1, 3], True, [1, 0], 1)),
    (aten._native_batch_norm_legit.no_stats, (IMAGE, torch.randn(3), torch.randn(3), True, 0.1, 1e-5)),
    (aten._adaptive_avg_pool2d.default, (IMAGE, [4, 2])),
    (aten._adaptive_avg_pool2d.default, (IMAGE, [5, 11])),
    *NEAREST,
    (aten.upsample_linear1d.default, (IMAGE[0], [13], False, 2.3)),
    (aten.upsample_bilinear2d.default, (IMAGE, [16, 3], False, None, 0.5)),
    (aten.upsample_trilinear3d.default, (IMAGE[:, None], [3, 5, 6], True)),
    (aten.upsample_linear1d.vec, (IMAGE[0], None, False, [1.7])),
    (aten.upsample_bilinear2d.vec, (IMAGE.bfloat16(), [9, 1], True, None)),
    (aten.upsample_trilinear3d.vec, (IMAGE[:, None], None, False, [1.0, 2.0, 2.5])),
    (aten._adaptive_avg_pool3d.default, (IMAGE, [3, 4, 2])),
)
OWN: tuple[Recorded, ...] = (
    *(Recorded(op, args, {}) for op, args in BAGS),
    *(Recorded(op, args, {}) for op, args in FUSED),
    *(Recorded(op, args, {}) for op, args in POSITIONAL),
    *(Recorded(op, args, {}) for op, args in (*PUTS, *RECURRENCES, *EXPERT_CALLS, *SAMPLED, *FOLDED, *AROUND)),
    Recorded(aten.true_divide.Tensor, (X, Y), {}),
    Recorded(aten.argsort.default, (X, 1, True), {}),
    *(Recorded(op, (K > 4,), {"stable": True, "dim": 1, "descending": True}) for op in (aten.sort.stable, aten.argsort.stable)),
    Recorded(aten.div.Scalar_mode, (X, 0.3), {"rounding_mode": "floor"}),
    Recorded(aten.div.Tensor_mode, (X, Y), {"rounding_mode": "trunc"}),
    Recorded(aten.scaled_dot_product_attention.default, (Q, Q[:, :2], Q[:, :2], KEEP), {"scale": 0.2, "enable_gqa": True}),
    *(Recorded(aten.histc.default, (X, bins, -1.0, 1.5), {}) for bins in (5, 50)),
    *(Recorded(aten._int_mm.default, (WHOLE, y), {}) for y in (WHOLE[:8].t(), WHOLE.t()[:, :8].contiguous())),
    *(Recorded(aten.scaled_dot_product_attention.default, (MANY, MANY[:1], MANY[:, :1], m), {}) for m in MASKS),
    *(Recorded(aten.scaled_dot_product_attention.default, (MANY, *[MANY[:, :, :2]] * 2, m), {"enable_gqa": True}) for m in MASKS),
    Recorded(aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, Q, Q), {"attn_mask": torch.zeros(5, 5), "scale": 0.1}),
)

# Rows that leave some calls to PyTorch say so with one of these; a reason that is not listed is news.
REASONS = ("complex numbers", "a product of integer matrices", "integer division by", "a vector norm of order", "pow of integers", "bool",
           "a scalar", "is used", "roll over", "depends on the data", "out of range", "comparing", "may be empty", "with a step",
           "of unknown", "attention", "sub of bool", "a convolution in groups", "a convolution of", "sampling of", "sums over windows of",
           "pooling of", "resizing of", "without elements", "windows of a scalar", "the largest of", "the smallest of",
           "many elements in order", "a histogram of", "bins between", "put together", "means of integers", "many numbers", "bags whose",
           "adds where")


def test_rows_agree_with_eager() -> None:
    """A few samples per operator and dtype; every row must be reached with a native form at least once."""
    native: set[Any] = set()
    budget: dict[Any, int] = {}
    for _, calls in recorded({torch.float32: 2}):
        for call in calls:
            key = (call.target, next((t.dtype for t in tree_flatten(call.args)[0] if isinstance(t, torch.Tensor)), None))
            budget[key] = budget.get(key, 0) + 1
            if budget[key] <= 5:
                reason = check(call)
                native |= {call.target} if reason is None else set()
                assert reason is None or any(r in reason for r in REASONS), f"{call.target}: {reason}"
    for call in OWN:
        reason = check(call)
        assert reason is None or call.args[0] is Q, f"{call.target}: {reason}"
        native |= {call.target} if reason is None else set()
    assert {str(op) for op in TABLE if op not in native} == set()


@pytest.mark.slow
def test_rows_agree_with_eager_on_all_samples() -> None:
    for _, calls in recorded(dict.fromkeys(DTYPES, 40)):
        for call in calls:
            check(call)


EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.5, 1e-40, 1e30, -1e30, math.inf, -math.inf, math.nan]


def tensor_only(op: Any) -> int:
    """How many tensors an operation takes when it needs nothing else; 0 for any other."""
    required = [a for a in op._schema.arguments if not a.has_default_value()]
    return len(required) if all(str(a.type) == "Tensor" for a in required) else 0


OTHER = (aten._prelu_kernel.default, aten.log_sigmoid_forward.default, aten.clamp.default, aten.clamp.Tensor)
ELEMENTWISE = [op for op in POINTWISE if tensor_only(op) in (1, 2) and op not in OTHER]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ELEMENTWISE, ids=str)
def test_elementwise_rows_agree_on_infinities_nan_and_signed_zero(op: Any, dtype: torch.dtype) -> None:
    """Every pair of special numbers."""
    # Eager hands gelu to oneDNN, which makes NaN of infinity where the formula gives infinity.
    edges = [e for e in EDGES if not (op is aten.gelu.default and math.isinf(e))]
    pairs = torch.tensor(list(itertools.product(edges, edges)), dtype=dtype)
    operands = tuple(pairs[:, i].contiguous() for i in range(tensor_only(op)))
    if "bitwise" in str(op):
        operands = tuple(o.nan_to_num(0.0, 9.0, -9.0).clamp(-9, 9).int() for o in operands)
    assert check(Recorded(op, operands, {})) is None


def test_a_row_falls_back_when_a_result_it_does_not_make_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FIRST_ONLY", set())
    assert check(Recorded(aten.log_sigmoid_forward.default, (torch.randn(4).requires_grad_(),), {})) == "result number 1 is used"


def test_a_wrong_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, aten.exp.default, TABLE[aten.expm1.default])
    with pytest.raises(AssertionError):
        check(Recorded(aten.exp.default, (torch.randn(4),), {}))


def test_a_row_of_the_wrong_type_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, aten.exp.default, TABLE[aten.isnan.default])
    reason = check(Recorded(aten.exp.default, (torch.randn(4),), {}))
    assert reason is not None and "PyTorch says" in reason


@pytest.mark.parametrize("divisor", [0, -1, "tensor"])
def test_integer_division_that_could_trap_is_left_to_pytorch(divisor: Any) -> None:
    other = torch.tensor([3, 5]) if divisor == "tensor" else divisor
    target = aten.remainder.Tensor if divisor == "tensor" else aten.remainder.Scalar
    if divisor == 0:
        with pytest.raises(RuntimeError):  # eager raises, and so would the call that was left to it
            check(Recorded(target, (torch.tensor([7, -7]), 0), {}))
    else:
        assert check(Recorded(target, (torch.tensor([7, -7]), other), {})) is not None


def test_windows_of_which_many_overlap_stay_with_pytorch() -> None:
    few, many = (Recorded(aten.unfold_backward.default, (torch.randn(6, n), [n + 5], 0, n, 1), {}) for n in (64, 65))
    assert check(few) is None and "65 overlap" in (check(many) or "")
