"""Operations that take more than a formula, compiled with nothing left to PyTorch, against eager on the values that are special to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.diagnostics.errors import Unsupported
from tests.driver.functions import Apply, agree, left
from tests.sweeps import swept


def test_the_largest_in_order() -> None:
    """NaN first, each element once however many are equal, of these the first ones first."""
    torch.manual_seed(0)
    inf, nan = float("inf"), float("nan")
    x = torch.randn(6, 9)
    x[0, :3], x[1, 2:7], x[2], x[3, 1], x[3, 5], x[4, 3:6] = nan, -inf, -inf, inf, nan, 4.0
    fast = sashiko.compile(Apply(lambda x: tuple(x.topk(6))).eval(), (x,), strict=True)
    values, places = fast(x)
    assert torch.equal(values.nan_to_num(99.0), x.topk(6)[0].nan_to_num(99.0))
    assert torch.equal(x.gather(1, places).nan_to_num(99.0), values.nan_to_num(99.0))
    assert places[0, :3].tolist() == [0, 1, 2] and places[2].tolist() == list(range(6)) and places[4, :3].tolist() == [3, 4, 5]
    agree(lambda x: x.softmax(-1).topk(2), torch.randn(4, 3, 8))
    agree(lambda x, k: (x.topk(3, 0)[1], k.topk(2)[0], x.bfloat16().topk(1)[0]), torch.randn(5, 20), torch.randint(-9, 9, (3, 7)))
    agree(lambda x: (x.topk(3, largest=False)[0], x.topk(9)[0]), x.nan_to_num())


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_short_rows_in_order(axis: int, descending: bool) -> None:
    """Equal elements keep their order, and NaN is the largest."""
    torch.manual_seed(0)
    inf, nan = float("inf"), float("nan")
    x = torch.randn(3, 13, 5)
    x[0, 3], x[1, :4], x[1, 6:8], x[2, 1:5], x[2, 9, 1], x[2, 10, 1] = nan, inf, -inf, 0.5, -0.0, 0.0
    agree(lambda x, y, z: tuple(v.sort(stable=True, dim=axis, descending=descending) for v in (x, y, z)),
          x, x.bfloat16(), torch.randint(-3, 4, x.shape, dtype=torch.int8))
    agree(lambda x: (x.argsort(stable=True, dim=axis, descending=descending), x.sum(1).argsort(-1, descending)), x > 0)


def test_long_rows_in_order() -> None:
    """NaN is the greatest, equal elements keep their order, 0 and -0 are equal."""
    torch.manual_seed(0)
    x = torch.randn(3, 70, 2)
    x[0, ::5], x[0, ::7], x[1, ::3], x[2, ::4], x[2, 1::4] = 0.0, -0.0, float("nan"), float("inf"), float("-inf")
    for given in (x, x.double(), x.half(), torch.randint(-9, 9, x.shape), x > 0, torch.randint(0, 99, x.shape, dtype=torch.uint8)):
        agree(lambda x: (*x.sort(stable=True, dim=1), *x.sort(stable=True, dim=1, descending=True)), given)
    agree(lambda x: tuple(x.sort()), torch.tensor(2.5))
    agree(lambda x: tuple(x.sort()), torch.zeros(2, 0))
    length = Dim("length", min=0, max=5000)
    fast = agree(lambda x: x.argsort(dim=-1, stable=True), x[:, :, 0], dynamic_shapes=({1: length},))
    for n in (0, 1, 65, 5000):
        ids = torch.randint(0, 60, (3, n)).float()
        assert torch.equal(fast(ids), ids.argsort(dim=-1, stable=True))


def test_the_first_of_many_in_order() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3000).cumsum(1)  # the largest so far comes again and again
    given = torch.cat([x, -x, x.round(), torch.arange(6000.0).view(2, -1)])
    given[1, 7], given[1, 9] = float("nan"), float("-inf")
    for count in (1, 3, 9, 200, 2000):
        fast = sashiko.compile(Apply(lambda x, count=count: (x.topk(count), x.topk(count, largest=False))).eval(), (given,), strict=True)
        for (values, places), largest in zip(fast(given), (True, False), strict=True):
            assert torch.equal(values.nan_to_num(1e9), given.topk(count, largest=largest)[0].nan_to_num(1e9))
            assert torch.equal(places, given.argsort(dim=-1, stable=True, descending=largest)[:, :count])


def test_what_stands_in_the_middle() -> None:
    """The lower one of two; a NaN where there is one, or counted out."""
    torch.manual_seed(0)
    x = torch.randn(4, 33, 6)
    x[0, 3, 2] = x[0, 7, 2] = x[2, 0, 5] = float("nan")
    agree(lambda x: (x.median(1), x.median(-1, keepdim=True), x.median(), x.nanmedian(1), x.nanmedian(), x[1].kthvalue(4, 0)), x)
    agree(lambda x: (x.quantile(torch.tensor([0.1, 0.5]), 1), x.nanquantile(0.3, 1), x.msort()), x)
    agree(lambda x: (x.median(0)[0], x.median(), x.kthvalue(1)[0]), torch.randint(-9, 9, (31, 40)))
    agree(lambda x: (x.median(), x.kthvalue(1)), torch.tensor(3.5))


@pytest.mark.parametrize("name", ["sinh", "cosh", "asinh", "acosh", "atanh", "asin", "acos"])
def test_hyperbolic_functions_and_inverses(name: str) -> None:
    """Of numbers of every size, near 1, beyond the domain; 4 roundings at most."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(500) * size for size in (1e-9, 1e-3, 0.3, 1.0, 10.0, 80.0, 1e10, 1e19, 1e38)])
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1 + 2e-7, 1 - 1e-7, 89.2, -89.2, 200.0])])
    function = getattr(torch, name)
    found = sashiko.compile(Apply(function).eval(), (x,), strict=True)(x)
    torch.testing.assert_close(found, function(x.double()).float(), rtol=5e-7, atol=0, equal_nan=True)
    if function(torch.tensor(0.0)) == 0:
        assert torch.equal(found[x == 0].signbit(), x[x == 0].signbit())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@torch.no_grad()
def test_bags_of_equal_length(mode: str) -> None:
    bag = nn.EmbeddingBag(30, 12, mode=mode).eval()
    ids = torch.randint(0, 30, (5, 7))
    for model in (bag, torch.compile(bag, backend="sashiko", options={"strict": True})):
        assert_close(model(ids), bag(ids))
    assert_close(sashiko.compile(bag, (ids,), strict=True)(ids), bag(ids))
    with pytest.raises(IndexError):
        sashiko.compile(bag, (ids,), strict=True)(ids + 25)


def test_positions_without_elements_have_any_rank() -> None:
    agree(lambda x, i: (x.gather(0, i), x[:, :1].gather(1, i[:, None]) + 1.0), torch.randn(4, 3), torch.zeros(0, dtype=torch.int64))


def test_windows_along_an_axis() -> None:
    agree(lambda x: (x.unfold(1, 5, 5) * 2, x.unfold(0, 2, 1), x.unfold(-1, 4, 3).softmax(-1)), torch.randn(3, 20))


def test_an_assertion_of_the_model_is_kept(tmp_path: Path) -> None:
    ids = torch.tensor([1, 4, 0, 6])
    model = Apply(lambda i: F.one_hot(i, 7).float().mean(0)).eval()
    fast = agree(model.function, ids)
    fast.save(tmp_path / "hot.sashiko")
    compiled = torch.compile(model, backend="sashiko", options={"strict": True})
    compiled(ids)
    for each in (fast, sashiko.load(tmp_path / "hot.sashiko"), compiled):
        assert_close(each(ids), model(ids))
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            each(ids + 1)


def test_a_transformer_with_a_mask_is_captured() -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    x, y, mask = torch.randn(2, 6, 16), torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        fast = sashiko.compile(model, {"src": x, "tgt": y, "tgt_mask": mask})
        for given in (mask, torch.randn(5, 5)):
            assert_close(fast(src=x, tgt=y, tgt_mask=given), model(x, y, tgt_mask=given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("count", [257, 300, 1023, 1024])
def test_many_numbers_in_order(count: int, right: bool) -> None:
    """Found by halves: equal ones, numbers beyond both ends, and NaN."""
    ends, x = torch.randn(count).sort()[0], torch.randn(7, 30)
    ends[20:25] = ends[20]
    x[0, :6] = torch.tensor([ends[20], ends[0], ends[-1], float("nan"), float("inf"), float("-inf")])
    agree(lambda e, x: torch.searchsorted(e, x, right=right), ends, x)
    whole = torch.randint(-50, 50, (count,)).sort()[0]
    agree(lambda e, x: torch.bucketize(x, e, right=right, out_int32=True), whole, torch.randint(-60, 60, (40,)))


def test_the_largest_of_bags_of_any_length() -> None:
    model = nn.EmbeddingBag(50, 16, mode="max", padding_idx=3).eval()
    words, starts = torch.randint(0, 50, (40,)), torch.tensor([0, 0, 7, 7, 8, 30])
    fast = sashiko.compile(model, (words, starts))
    for offsets in (starts, torch.tensor([0, 40, 40, 40, 40, 40]), torch.tensor([0, 1, 2, 3, 4, 5])):
        assert_close(fast(words, offsets), model(words, offsets), rtol=0, atol=0)
    assert left(fast) == []
    with pytest.raises(IndexError):
        fast(words, starts + 1)
    single = nn.EmbeddingBag(50, 1, mode="max").eval()
    assert_close(sashiko.compile(single, (words, starts))(words, starts), single(words, starts))


@pytest.mark.parametrize("bags", [Dim("bags", min=3), Dim.AUTO])
@torch.no_grad()
def test_as_many_bags_as_it_happens(bags: Any) -> None:
    """Their number has no bound."""
    model = nn.EmbeddingBag(50, 8, mode="mean", padding_idx=0).eval()
    words, starts = torch.randint(0, 50, (30,)), torch.tensor([0, 0, 9, 14, 21, 21, 22])
    fast = sashiko.compile(model, (words, starts[:4]), strict=True, dynamic_shapes=({0: Dim("words")}, {0: bags}))
    backend = torch.compile(model, backend="sashiko", dynamic=True, options={"strict": True})
    for count in (4, 3, 7):
        for each in (fast, backend):
            assert_close(each(words[count:], starts[:count]), model(words[count:], starts[:count]))


def test_a_mean_over_as_many_places_as_features() -> None:
    """The reduction inside runs over another axis of the same length."""
    agree(lambda x: F.layer_norm(x, (16,)).mean(1), torch.randn(2, 16, 16))
    agree(lambda x: F.normalize(x.softmax(-1).sum(1), dim=-1), torch.randn(2, 16, 16))


@pytest.mark.parametrize(("channels", "groups"), swept([(40, 8), (20, 2), (32, 2), (6, 6), (7, 1)], [(40, 8), (6, 6)]))
def test_groups_of_channels(channels: int, groups: int) -> None:
    """Statistics of numbers far from 0, too; in channels-last memory, where the channels of a group are no whole vectors."""
    w, c = torch.randn(channels), torch.randn(channels)
    for dtype, shift in ((torch.float32, 0.0), (torch.float32, 100.0), (torch.bfloat16, 0.0)):
        x = torch.randn(2, channels, 9, 7) + shift
        exact = F.group_norm(x.to(dtype).double(), groups, w.double(), c.double())
        for memory in (torch.contiguous_format, torch.channels_last):
            image = x.to(dtype).to(memory_format=memory)
            model = Apply(lambda x: F.group_norm(x, groups, w.to(x.dtype), c.to(x.dtype))).eval()
            got = sashiko.compile(model, (image,))(image)
            tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-6 if not shift else 1e-4
            assert (got.double() - exact).abs().max() <= tolerance * exact.abs().max()


def test_groups_of_an_unknown_number_of_channels() -> None:
    """Left to PyTorch where it is not known of their number that they fall into groups."""
    for groups in (1, 2):
        model = Apply(lambda x, groups=groups: F.group_norm(x, groups).relu()).eval()
        fast = sashiko.compile(model, (torch.randn(2, 6, 5),), dynamic_shapes=(({0: Dim.AUTO, 1: Dim.AUTO},),))
        for shape in ((2, 6, 5), (3, 10, 5)):
            x = torch.randn(shape)
            assert_close(fast(x), model(x))


def test_numbers_read_from_tensors() -> None:
    """`item()` of a float is a Python float, which promotes nothing; the code reads it in each call."""
    k, x = torch.tensor([2.5, 3.0]), torch.randn(3)
    fast = agree(lambda x, t: (x * t.item(), x.bfloat16() * t.item(), torch.full((2, 2), t.item()), x.int() * t[0].item()), x, k[:1])
    assert_close(fast(x, k[1:])[2], torch.full((2, 2), 3.0))
    assert_close(fast(x, k[1:])[1], x.bfloat16() * 3.0)


def test_whole_numbers_read_from_tensors() -> None:
    """`item()` of integers is a Python int, which promotes no float and no integer."""
    n, x = torch.tensor([3, 2, 4]), torch.randn(3, 4)

    def numbers(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        most, total = n.max().item(), n.sum().item()
        return x * most, x.bfloat16() + (2 * most - 1), torch.full((2, 2), total), n * most, n.to(torch.int8) + most, x * (total / 2)

    agree(numbers, x, n)


@pytest.mark.parametrize(("function", "wrong"), [
    (lambda x, k: x * (1 / k.item()), 0.0), (lambda x, k: x * k.item() ** -1, 0.0), (lambda x, k: x * k.item() ** 2.0, None),
    (lambda x, k: x * abs(k.item()) ** 0.5 * 2.0 ** k.item(), None), (lambda x, k: x * math.floor(k.item()), math.nan),
    (lambda x, k: x * math.ceil(k.item()), math.inf),
], ids=["quotient", "power", "square", "root", "floor", "ceil"])  # fmt: skip
def test_numbers_that_python_does_not_have(function: Callable[..., torch.Tensor], wrong: float | None) -> None:
    x, k = torch.randn(3), torch.tensor(2.5)
    fast = agree(function, x, k)
    assert_close(fast(x, -k), function(x, -k))
    if wrong is not None:
        with pytest.raises((ZeroDivisionError, ValueError, OverflowError)):
            function(x, torch.tensor(wrong))
        with pytest.raises(RuntimeError, match=r"divided by 0, not finite or not real: \w+\.py:\d+"):
            fast(x, torch.tensor(wrong))


def _fits(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    torch._check(n.max().item() <= x.shape[1])
    return x * 2


def _is_a_size(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    most = n.max().item()
    torch._check(most == x.shape[1])
    return x.reshape(-1, most) * most


def _is_small(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    torch._check((n / 2).max().item() < 2.5)
    return x + 1


def _has_a_two(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    torch._check((n == 2).any().item())
    return x - 1


def _is_not_above_two(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    least = n.min().item()
    torch._check(torch.sym_not(least > 2) & (least < 6))
    return x + least


@pytest.mark.parametrize("function", [_fits, _is_a_size, _is_small, _has_a_two, _is_not_above_two])
def test_what_a_model_says_of_data_is_checked_in_each_call(function: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    x, n = torch.randn(3, 4), torch.tensor([3, 2, 4])
    fast = agree(function, x, n)
    fast.save(tmp_path / "said.sashiko")
    for each in (fast, sashiko.load(tmp_path / "said.sashiko")):
        assert_close(each(x, n), function(x, n))
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            each(x, n + 1)


@pytest.mark.parametrize(("mode", "aligned"), swept(
    [(mode, aligned) for mode in ("bilinear", "nearest", "bicubic") for aligned in (False, True)],
    [("bilinear", False), ("nearest", True), ("bicubic", True)],
))
def test_images_of_any_size_are_sampled(mode: str, aligned: bool) -> None:
    """Also those of a single pixel, and points far outside."""
    torch.manual_seed(0)

    def each(x: torch.Tensor, points: torch.Tensor) -> list[torch.Tensor]:
        return [F.grid_sample(x, points, mode, padding, aligned) for padding in ("zeros", "border", "reflection")]

    shapes = ({2: Dim("height", min=1, max=99), 3: Dim("width", min=1, max=99)}, {1: Dim("points", max=99)})
    fast = agree(each, torch.randn(2, 16, 20, 30), torch.randn(2, 9, 7, 2), dynamic_shapes=shapes)
    for height, width, points in ((5, 64, 33), (1, 2, 4), (1, 1, 5)):
        given = torch.randn(2, 16, height, width), 3 * torch.randn(2, points, 7, 2)
        assert_close(fast(*given), each(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [lambda x, n: x.roll(n.max().item(), 0), lambda x, n: F.leaky_relu(x, n.max().item())])
def test_where_a_number_must_be_known_it_cannot_be_read(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(Unsupported, match=r"takes a number computed from sizes or data(.|\n)*hint: torch.compile"):
        sashiko.compile(Apply(function).eval(), (torch.randn(3, 4), torch.tensor([3, 2])))


@pytest.mark.parametrize("function", [lambda n: (n, n.max().item()), lambda n: (n, n.max().item() > 3), lambda n: (n, n.any().item())])
def test_numbers_of_data_are_no_results(function: Callable[..., Any]) -> None:
    with pytest.raises(Unsupported, match="returns a number computed from sizes or data"):
        sashiko.compile(Apply(function).eval(), (torch.tensor([3, 2]),))


def test_a_size_that_depends_on_data_is_refused_with_its_place() -> None:
    with pytest.raises(Unsupported, match=r"the size u\d+ depends on the data") as caught:
        sashiko.compile(Apply(lambda n: torch.arange(n.max().item())).eval(), (torch.tensor([3, 2]),))
    assert caught.value.where


@pytest.mark.parametrize("free", [({1, 2}, {1}), ({0, 1, 2}, {0, 1, 2}), ({1, 2}, {1, 2}), ({0, 2}, set())])
@pytest.mark.parametrize("flat", [False, True])
def test_weights_and_windows_whose_sizes_come_with_the_call(free: tuple[set[int], set[int]], flat: bool) -> None:
    """Results in another order of axes than those of the product, or of PyTorch's convolution, whose sizes are quotients."""

    def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = F.conv1d(x, w, None, 2)
        return result.reshape(-1) if flat else result

    model = Apply(convolved).eval()
    sizes = tuple(dict.fromkeys(axes, Dim.AUTO) for axes in free)
    fast = sashiko.compile(model, (torch.randn(3, 8, 7), torch.randn(5, 8, 2)), dynamic_shapes=(sizes,))
    for length, channels in ((7, 8), (12, 8), (9, 6 if 1 in free[1] else 8)):
        args = torch.randn(3, channels, length), torch.randn(5, channels, 2)
        assert_close(fast(*args), model(*args), rtol=1e-5, atol=1e-5)
