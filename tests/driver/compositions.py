"""Random compositions of operations, as functions that PyTorch runs: drawn step by step on real tensors.

What a right result may be is found by running the steps in f64, as they are and several times with every value disturbed by some
roundings of the type it has (Parker, Monte Carlo Arithmetic, 1997): a result is wrong when it is much farther from the one in f64 than the
disturbed ones are, or when it is another integer although none of them is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

Tensor = torch.Tensor
SIZES = (1, 2, 3, 7, 16, 17, 33, 64)
FLOATS = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 1e10)
LARGEST, MOST = 1e4, 1 << 15  # of a number and of a tensor: what follows a larger one would overflow, or take its time
RUNS, ROUNDINGS = 4, 8.0


@dataclass(frozen=True)
class Item:
    """A value: `fn` of the values numbered `args`, then cast; a leaf has a tensor instead, `given` as an argument or a constant."""

    text: str
    fn: Callable[..., Tensor] | None = None
    args: tuple[int, ...] = ()
    cast: torch.dtype | None = None
    tensor: Tensor | None = None
    given: bool = False


@dataclass
class Composition:
    """Values in order, and which of them are returned."""

    items: list[Item] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def arguments(self) -> tuple[Tensor, ...]:
        return tuple(item.tensor for item in self.items if item.given and item.tensor is not None)

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """What a model of this composition computes."""
        return tuple(self.values(iter(arguments), lambda item, value: value)[n] for n in self.outputs)

    def values(self, arguments: Iterator[Tensor], after: Callable[[Item, Tensor], Tensor]) -> list[Tensor]:
        """All values, each as `after` changes it before it is read."""
        values: list[Tensor] = []
        for item in self.items:
            if item.fn is None:
                assert item.tensor is not None
                value = next(arguments) if item.given else item.tensor
            else:
                value = item.fn(*(values[n] for n in item.args))
                value = value if item.cast is None else value.to(item.cast)
            values.append(after(item, value))
        return values

    def __str__(self) -> str:
        lines = []
        for n, item in enumerate(self.items):
            cast = f".to({item.cast})" if item.cast is not None else ""
            lines.append(f"v{n} = {item.text}({', '.join(f'v{a}' for a in item.args)}){cast}" if item.fn else f"v{n} = {item.text}")
        return "\n".join([*lines, f"return {', '.join(f'v{n}' for n in self.outputs)}"])


class Refused(Exception):
    """A draw that does not fit the values at hand."""


@dataclass
class Draw:
    """A composition in the making, with the values that eager gives. wild: its integers wrap, and numbers are of any size."""

    rng: random.Random
    wild: bool = False
    made: Composition = field(default_factory=Composition)
    values: list[Tensor] = field(default_factory=list)

    def leaf(self, dtype: torch.dtype, shape: Sequence[int], highest: int | None = None) -> int:
        """A new argument or constant; of integers in [0, highest) where that is given."""
        seeded = torch.Generator().manual_seed(self.rng.getrandbits(32))
        if highest is not None:
            tensor = torch.randint(0, highest, tuple(shape), generator=seeded).to(dtype)
        elif dtype.is_floating_point:
            tensor = torch.randn(tuple(shape), generator=seeded, dtype=torch.float64).to(dtype)
        else:
            tensor = torch.randint(0 if dtype in (torch.bool, torch.uint8) else -9, 2 if dtype == torch.bool else 10, tuple(shape),
                                   generator=seeded).to(dtype)
        if dtype.is_floating_point and tensor.numel() and self.rng.random() < 0.08:
            for special in SPECIAL[:-2] if dtype == torch.bfloat16 else SPECIAL:  # VCVTNEPS2BF16 takes subnormal numbers for zeros
                tensor.view(-1)[self.rng.randrange(tensor.numel())] = special
        if self.wild and highest is None and dtype != torch.bool and tensor.numel() and self.rng.random() < 0.5:
            # For f64 those of f32: where a quotient is beyond f64, PyTorch has no remainder.
            narrow = torch.float32 if dtype == torch.float64 else dtype
            limits = torch.finfo(narrow) if dtype.is_floating_point else torch.iinfo(dtype)
            for extreme in (limits.max, limits.min, limits.max // 2 + 1, limits.min // 3):
                tensor.view(-1)[self.rng.randrange(tensor.numel())] = extreme
        given = not self.values or self.rng.random() < 0.6
        turned = torch.rand((), generator=seeded) < 0.3
        order = torch.randperm(tensor.dim(), generator=seeded).tolist() if turned else list(range(tensor.dim()))
        tensor = tensor.permute(order).contiguous().permute([order.index(axis) for axis in range(tensor.dim())])
        text = f"{'argument' if given else 'constant'} {str(dtype)[6:]}{list(shape)} in order {order}"
        return self._append(Item(text, tensor=tensor, given=given), tensor)

    def _append(self, item: Item, value: Tensor) -> int:
        self.made.items.append(item)
        self.values.append(value)
        return len(self.values) - 1

    def step(self, text: str, fn: Callable[..., Tensor], *args: int, cast: torch.dtype | None = None) -> int:
        """Raises Refused for a result without elements, a large one, or one of large numbers."""
        result = fn(*(self.values[n] for n in args))
        result = result if cast is None else result.to(cast)
        finite = result[result.isfinite()]
        large = not self.wild and finite.numel() and float(finite.abs().max()) > LARGEST
        if not 0 < result.numel() <= MOST or result.dim() > 6 or large:
            raise Refused
        return self._append(Item(text, fn, args, cast), result)

    def pick(self, fits: Callable[[Tensor], bool] = lambda t: True) -> int:
        """One of the values that fit, a late one rather than an early one."""
        found = [n for n, value in enumerate(self.values) if fits(value)]
        if not found:
            raise Refused
        return found[max(self.rng.randrange(len(found)) for _ in range(2))]

    def floating(self, rank: int = 0) -> int:
        return self.pick(lambda t: t.is_floating_point() and t.dim() >= rank)

    def any_rank(self, rank: int = 1) -> int:
        return self.pick(lambda t: t.dim() >= rank)

    def partner(self, x: int, dtype: torch.dtype | None = None) -> int:
        """A value that broadcasts with x, of its dtype or the given one; often a new leaf."""
        like = self.values[x]
        dtype = like.dtype if dtype is None else dtype
        if self.rng.random() < 0.6:
            try:
                return self.pick(lambda t: t.dtype == dtype and t is not like and broadcasts(t, like))
            except Refused:
                pass
        shape = [1 if self.rng.random() < 0.25 else size for size in like.shape]
        return self.leaf(dtype, shape[self.rng.randint(0, len(shape)) if self.rng.random() < 0.3 else 0 :])

    def axis(self, x: int) -> int:
        rank = self.values[x].dim()
        return self.rng.randrange(-rank, rank) if rank else 0

    def axes(self, x: int) -> tuple[int, ...]:
        rank = self.values[x].dim()
        return tuple(sorted(self.rng.sample(range(rank), self.rng.randint(1, rank)))) if rank else ()


def broadcasts(x: Tensor, y: Tensor) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(x.shape), reversed(y.shape)))


def composed(seed: int, operations: Sequence[Callable[[Draw], object]], steps: int = 8, wild: bool = False) -> Composition:
    """A random composition of up to `steps` steps."""
    rng = random.Random(seed)
    draw = Draw(rng, wild)
    draw.leaf(rng.choice((*FLOATS[2:], *INTEGERS, torch.int16) if wild else FLOATS), [rng.choice(SIZES) for _ in range(rng.randint(1, 3))])
    for _ in range(6 * steps):
        if sum(item.fn is not None for item in draw.made.items) >= steps:
            break
        kept = len(draw.values)
        try:
            rng.choice(operations)(draw)
        except (Refused, RuntimeError, IndexError, ValueError):  # what eager refuses is no composition
            del draw.values[kept:], draw.made.items[kept:]
    made = draw.made
    used = {n for item in made.items for n in item.args}
    made.outputs = [n for n, item in enumerate(made.items) if item.fn is not None and (n not in used or rng.random() < 0.2)]
    return made


@contextmanager
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def wide(made: Composition, dtypes: Sequence[torch.dtype], noise: torch.Generator | None) -> list[Tensor]:
    """The outputs in f64. noise: disturbs each value by up to `ROUNDINGS` roundings of its dtype, which `dtypes` are."""
    types = iter(dtypes)

    def after(item: Item, value: Tensor) -> Tensor:
        dtype = next(types)
        value = value.double() if value.is_floating_point() else value
        if noise is None or not value.is_floating_point():
            return value
        info = torch.finfo(dtype)
        by = torch.rand(value.shape, generator=noise, dtype=torch.float64) * 2 - 1
        return value * (1 + ROUNDINGS * info.eps * by) + torch.where(value == 0, 0.0, info.tiny * info.eps * by)

    double = torch.float64
    items = [replace(i, cast=double if i.cast is not None and i.cast.is_floating_point else i.cast) for i in made.items]
    floats = {n for n, d in enumerate(dtypes) if d.is_floating_point}
    with double_by_default():
        values = Composition(items).values(iter(made.arguments()), after)
    return [values[n].double() if n in floats else values[n] for n in made.outputs]


def narrow(made: Composition) -> list[Tensor]:
    """The outputs with f32 for f64: what the formula of eager loses in f64 shows there, some 2**29 times as large."""

    def to_f32(item: Item, value: Tensor) -> Tensor:
        return value.float() if value.dtype == torch.float64 else value

    items = [replace(i, cast=torch.float32 if i.cast == torch.float64 else i.cast) for i in made.items]
    values = Composition(items).values(iter(made.arguments()), to_f32)
    return [values[n] for n in made.outputs]


def losses(eager: Sequence[Tensor], exact: Sequence[Tensor], in_f32: Sequence[Tensor]) -> list[Tensor]:
    """How far eager's own formula is from the exact result; in f64, which is exact by definition, as far as that of f32 tells."""
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return [(z.double() - y.double()).abs() * scale if x.dtype == torch.float64 else (x.double() - y.double()).abs()
            for x, y, z in zip(eager, exact, in_f32, strict=True)]


def wrong(made: Composition, got: Sequence[Tensor]) -> str | None:
    """What is wrong with these results, None where nothing is."""
    eager = made.values(iter(made.arguments()), lambda item, value: value)
    dtypes = [value.dtype for value in eager]
    exact = wide(made, dtypes, None)
    own = losses([eager[n] for n in made.outputs], exact, narrow(made))
    others = [wide(made, dtypes, torch.Generator().manual_seed(seed)) for seed in range(RUNS)]
    for place, n in enumerate(made.outputs):
        result, expected = got[place], eager[n]
        if result.dtype != expected.dtype or result.shape != expected.shape:
            return f"v{n}: {result.dtype}{list(result.shape)} for {expected.dtype}{list(expected.shape)}"
        bad = apart(result, expected, exact[place], [o[place] for o in others], own[place])
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            return (f"v{n}: {int(bad.sum())} of {bad.numel()} are wrong, at {at} {result[at].item()} for {expected[at].item()} "
                    f"(in f64 {exact[place][at].item()}, disturbed {[o[place][at].item() for o in others]})")
    return None


def apart(got: Tensor, eager: Tensor, exact: Tensor, others: Sequence[Tensor], own: Tensor) -> Tensor:
    """Where a result is neither what eager gives nor as near to the exact one as the disturbed ones are, or eager, which loses `own`."""
    if not got.is_floating_point():
        steady = torch.stack([o == exact for o in others]).all(0)
        # A comparison may be right where eager's operand is not; integers that do not fit their type are what eager makes of them.
        return (got != eager) & steady & ((got != exact) | (got.dtype != torch.bool))
    info, near = torch.finfo(got.dtype), got.double()
    spread = torch.stack([(o - exact).abs() for o in others])
    steady = torch.stack([o.isfinite() == exact.isfinite() for o in others]).all(0)
    # Where eager's formula loses digits that no disturbance of its operand shows, ours may lose as many.
    largest = exact[exact.isfinite()].abs().amax() if bool(exact.isfinite().any()) else exact.new_zeros(())
    lost = torch.minimum(own[own.isfinite()].amax(), 64 * info.eps * largest) if bool(own.isfinite().any()) else largest * 0
    bound = 3 * spread.nan_to_num(float("inf")).amax(0) + (32 if info.bits >= 32 else 2) * info.eps * exact.abs() + 3 * lost + info.tiny
    same = (near == exact) | (near.isnan() & exact.isnan()) | (got == eager) | (got.isnan() & eager.isnan())
    return steady & ~same & ~((near - exact).abs() <= bound)
