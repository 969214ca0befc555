"""Large results: memory used again when nobody holds it, never before, and never more of it than one call needs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.memory import HUGE
from sashiko.runtime.records import LARGE, OutputShape
from sashiko.runtime.results import Results

ROWS, COLUMNS = LARGE // 4096, 1024


def output(rows: int = ROWS, dtype: torch.dtype = torch.float32, strides: tuple[int, int] = (COLUMNS, 1)) -> OutputShape:
    return OutputShape((rows, COLUMNS), strides, dtype, rows * COLUMNS * dtype.itemsize)


def one(results: Results, rows: int = ROWS) -> torch.Tensor:
    shape = output(rows)
    (tensor,) = results.make([shape], shape.nbytes)
    return tensor


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda t: t,
    "a view": lambda t: t[3:, ::2],
    "detached": torch.Tensor.detach,
    "an array": torch.Tensor.numpy,
    "a tensor of an array": lambda t: torch.from_numpy(t.numpy()),
    "a capsule": torch.from_dlpack,
    "a storage": torch.Tensor.untyped_storage,
    "set": lambda t: torch.empty(0).set_(t.untyped_storage()),
    "a tuple of views": lambda t: t.unbind(),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
def test_memory_that_somebody_holds_is_not_given_again(hold: Callable[[torch.Tensor], object]) -> None:
    results = Results()
    first = one(results)
    address = first.data_ptr()
    held = hold(first)
    del first
    second = one(results)
    assert second.data_ptr() != address
    del held
    assert one(results).data_ptr() == address


def test_moved_data_is_another_memory() -> None:
    results = Results()
    first = one(results)
    address = first.data_ptr()
    first.fill_(1)
    first.share_memory_()
    second = one(results)
    assert second.data_ptr() == address != first.data_ptr()
    second.fill_(2)
    assert bool((first == 1).all())


def test_a_result_is_a_tensor_like_any_other() -> None:
    results = Results()
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64):
        kind = output(4 * ROWS, dtype)
        (tensor,) = results.make([kind], kind.nbytes)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (kind.shape, kind.strides, dtype)
        assert tensor.data_ptr() % HUGE == 0
        assert tensor.untyped_storage().nbytes() == kind.nbytes and tensor.storage_offset() == 0
        assert not tensor._is_view() and tensor._version == 0 and tensor.is_leaf and not tensor.requires_grad
        tensor.zero_()
        assert tensor._version == 1
        with torch.device("meta"):
            assert results.make([kind], kind.nbytes)[0].is_cpu
    transposed = output(strides=(1, ROWS))
    (tensor,) = results.make([transposed], transposed.nbytes)
    assert tensor.stride() == (1, ROWS) and tensor.t().is_contiguous()
    weight = torch.ones(COLUMNS, requires_grad=True)
    tensor.mul_(weight)
    tensor.sum().backward()
    assert weight.grad is not None


def test_a_loop_takes_turns_with_two_pieces() -> None:
    results = Results()
    seen = set()
    tensor = one(results)
    for _ in range(10):
        tensor = one(results)
        seen.add(tensor.data_ptr())
    assert len(seen) == 2


def test_no_more_is_kept_than_one_call_needs() -> None:
    results = Results()
    held = [one(results) for _ in range(5)]
    held += [one(results, 2 * ROWS)]
    del held
    assert sum(arena.nbytes for arena in results._idle) <= 2 * LARGE
    assert not results._lent
    small, other = output(ROWS), output(2 * ROWS)
    pair = results.make([small, other], small.nbytes + other.nbytes)
    addresses = [tensor.data_ptr() for tensor in pair]
    del pair
    pair = results.make([small, other], small.nbytes + other.nbytes)
    assert [tensor.data_ptr() for tensor in pair] == addresses


def test_nearly_equal_shapes_share_and_others_do_not() -> None:
    results = Results()
    address = one(results, 4 * ROWS).data_ptr()
    assert one(results, 3 * ROWS).data_ptr() == address
    small = one(results, ROWS)
    assert small.data_ptr() != address
    assert one(results, 4 * ROWS).data_ptr() == address


def test_small_results_are_torch_s_own() -> None:
    results = Results()
    kinds = [output(), output(ROWS - 1)]
    large, small = results.make(kinds, kinds[0].nbytes)
    assert small.untyped_storage().resizable() and not large.untyped_storage().resizable()
    with pytest.raises(RuntimeError, match="not resizable"):
        large.resize_(4 * ROWS, COLUMNS)


@pytest.mark.usefixtures("own_garbage")
def test_results_outlive_the_model(affine: Executable, expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], code: Code) -> None:
    executable = Executable(affine.plan, code)
    x, y = torch.randn(2 * ROWS, COLUMNS), torch.randn(2 * ROWS, COLUMNS)
    (kept,) = executable(x, y)
    (dropped,) = executable(x, y)
    assert isinstance(kept, torch.Tensor)
    del dropped
    (idle,) = executable._results._idle
    memory = weakref.ref(idle)
    del idle, executable
    gc.collect()
    assert memory() is None
    torch.testing.assert_close(kept, expected(x, y), rtol=0, atol=0)


@pytest.mark.usefixtures("own_garbage")
def test_two_threads_never_get_one_memory(affine: Executable, expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    start = threading.Barrier(4)

    def caller(seed: int) -> bool:
        x, y = torch.full((ROWS, COLUMNS), float(seed)), torch.full((ROWS, COLUMNS), 0.5)
        wanted = expected(x, y)
        right = True
        start.wait()
        kept = None
        for _ in range(60):
            (got,) = affine(x, y)
            assert isinstance(got, torch.Tensor)
            right &= torch.equal(got, wanted) and (kept is None or torch.equal(kept, wanted))
            kept = got
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(caller, range(4)))
    gc.collect()
    assert sum(arena.nbytes for arena in affine._results._idle) <= LARGE
    assert not affine._results._lent
