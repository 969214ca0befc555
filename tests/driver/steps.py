"""The steps that random compositions are made of; see `compositions.py`. Each draws its operands and numbers, and raises Refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.driver.compositions import FLOATS, INTEGERS, SIZES, Draw, Refused, Tensor

PLAIN = (
    *("relu", "tanh", "sigmoid", "exp", "exp2", "expm1", "erf", "sin", "cos", "atan", "abs", "neg", "sign", "square"),
    *("floor", "ceil", "trunc", "round", "isnan", "isinf", "logical_not"),
)
ACTIVATIONS = (
    *("gelu", "silu", "elu", "softplus", "hardswish", "leaky_relu"),
    *("relu6", "mish", "logsigmoid", "hardsigmoid", "selu", "softsign"),
)
POSITIVE = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal")


def of_magnitude(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x.abs() + 0.5)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in PLAIN},
    **{name: getattr(F, name) for name in ACTIVATIONS},
    **{f"{name} of abs + 0.5": of_magnitude(getattr(torch, name)) for name in POSITIVE},
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "maximum", "minimum", "atan2")},
    "div": lambda x, y: x / (y.abs() + 0.5),
    "pow": lambda x, y: (x.abs() + 0.5) ** y.clamp(-2, 2),
    "fma": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "floor_divide": lambda x, y: torch.floor_divide(x, y.abs() + 0.5),
    "fmod": lambda x, y: torch.fmod(x, y.abs() + 0.5),
    "remainder": lambda x, y: torch.remainder(x, y.abs() + 0.5),
}
WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: getattr(torch, name) for name in ("add", "sub", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")
}
WHOLE_NUMBER: dict[str, Callable[[Tensor, int], Tensor]] = {
    "floor_divide": lambda x, k: torch.div(x, k, rounding_mode="floor"),
    "truncated": lambda x, k: torch.div(x, k, rounding_mode="trunc"),
    **{name: getattr(torch, name) for name in ("remainder", "fmod", "add", "mul", "clamp")},
    "shl": lambda x, k: x << abs(k) % 8,
    "shr": lambda x, k: x >> abs(k) % 8,
    "rsub": lambda x, k: k - x,
}
PROMOTED = ("add", "sub", "mul", "div", "eq", "lt", "ge")
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
REDUCE: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name) for name in ("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "any", "all", "count_nonzero")
}
ALONG: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name) for name in ("cumsum", "cumprod", "softmax", "log_softmax", "argmax", "argmin", "prod")
}


def unary(d: Draw) -> int:
    name = d.rng.choice(list(UNARY))
    return d.step(name, UNARY[name], d.floating())


def binary(d: Draw) -> int:
    name, x = d.rng.choice(list(BINARY)), d.floating()
    return d.step(name, BINARY[name], *d.rng.sample([x, d.partner(x)], 2))


def with_number(d: Draw) -> int:
    k, name = d.rng.choice((0.5, 2, -1.5, 3)), d.rng.choice(("add", "sub", "mul", "div", "pow", "clamp", "clamp_max", "fmod"))
    if name == "pow":
        return d.step(f"pow {k}", lambda x: (x.abs() + 0.5) ** k, d.floating())
    fn = getattr(torch, name)
    return d.step(f"{name} {k}", lambda x: fn(x, k), d.floating())


def whole(d: Draw) -> int:
    x = d.pick(lambda t: t.dtype in INTEGERS)
    if d.rng.random() < 0.5:
        name, k = d.rng.choice(list(WHOLE_NUMBER)), d.rng.choice((1, 2, 3, 7, 8, -2, -5))
        if d.values[x].dtype == torch.uint8:
            k = abs(k)
        return d.step(f"{name} {k}", lambda x: WHOLE_NUMBER[name](x, k), x)
    name = d.rng.choice(list(WHOLE))
    return d.step(name, WHOLE[name], *d.rng.sample([x, d.partner(x)], 2))


def compare(d: Draw) -> int:
    fn, x = getattr(torch, d.rng.choice(COMPARE)), d.any_rank(0)
    if d.rng.random() < 0.5:
        return d.step(f"{fn.__name__} 0.3", lambda x: fn(x, 0.3), x)
    return d.step(fn.__name__, fn, *d.rng.sample([x, d.partner(x)], 2))


def logic(d: Draw) -> int:
    fn, x = getattr(torch, d.rng.choice(("logical_and", "logical_or", "logical_xor"))), d.pick(lambda t: t.dtype == torch.bool)
    return d.step(fn.__name__, fn, x, d.partner(x))


def where(d: Draw) -> int:
    x = d.any_rank(0)
    c = d.partner(x, torch.bool)
    kind = d.rng.randrange(3)
    if kind == 0:
        return d.step("where", torch.where, c, *d.rng.sample([x, d.partner(x)], 2))
    fill = d.rng.choice((0, 1, 2))
    return d.step(f"masked_fill {fill}", lambda x, c: x.masked_fill(c, fill), x, c)


def reduce(d: Draw) -> int:
    name, x, keep = d.rng.choice(list(REDUCE)), d.any_rank(0), d.rng.random() < 0.5
    axes, fn = d.axes(x), REDUCE[name]
    if name == "count_nonzero":
        return d.step(f"{name} {axes}", lambda x: fn(x, axes), x)
    x = x if d.values[x].dtype.is_floating_point or name not in ("mean", "var", "std", "logsumexp") else d.floating(1)
    axes = d.axes(x)
    return d.step(f"{name} {axes} {keep}", lambda x: fn(x, axes, keepdim=keep), x)


def along(d: Draw) -> int:
    name = d.rng.choice(list(ALONG))
    x = d.floating(1) if name in ("softmax", "log_softmax") else d.any_rank()
    axis, fn = d.axis(x), ALONG[name]
    return d.step(f"{name} {axis}", lambda x: fn(x, axis), x)


def both(d: Draw) -> int:
    """max.dim, var_mean, topk and the like: one of their results."""
    x = d.floating(1)
    axis, k, of = d.axis(x), d.rng.choice((1, 2, 3, 20, 99)), d.rng.randrange(2)
    kind = d.rng.randrange(4)
    if kind == 0:
        return d.step(f"max {axis}", lambda x: x.max(axis)[of], x)
    if kind == 1:
        if of and bool(d.values[x].isinf().any()):
            raise Refused  # ARCHITECTURE.md: eager's mean of an infinity depends on where it stands
        return d.step(f"var_mean {axis}", lambda x: torch.var_mean(x, axis, keepdim=True)[of], x)
    if kind == 2:
        return d.step(f"topk {k} {axis}", lambda x: x.topk(min(k, x.shape[axis]), axis)[0], x)
    return d.step(f"norm {k} {axis}", lambda x: torch.linalg.vector_norm(x, 1 if k == 1 else 2 if k == 2 else float("inf"), axis), x)


def norm(d: Draw) -> int:
    x = d.floating(1)
    dtype, size = d.values[x].dtype, d.values[x].shape[-1:]
    w, c = d.leaf(dtype, size), d.leaf(dtype, size)
    kind = d.rng.randrange(3)
    if kind == 0:
        return d.step("layer_norm", lambda x, w, c: F.layer_norm(x, size, w, c), x, w, c)
    if kind == 1:
        return d.step("rms_norm", lambda x, w: F.rms_norm(x, size, w, 1e-5), x, w)
    x = d.floating(3)
    channels = d.values[x].shape[1]
    groups = d.rng.choice([g for g in (1, 2, 3, 7) if channels % g == 0])
    return d.step(f"group_norm {groups}", lambda x: F.group_norm(x, groups), x)


def permute(d: Draw) -> int:
    x = d.any_rank(2)
    order = d.rng.sample(range(d.values[x].dim()), d.values[x].dim())
    return d.step(f"permute {order}", lambda x: x.permute(order), x)


def reshape(d: Draw) -> int:
    x = d.any_rank()
    axis, rank = d.rng.randrange(d.values[x].dim()), d.values[x].dim()
    size = d.values[x].shape[axis]
    kind = d.rng.randrange(4)
    if kind == 0 and axis + 1 < rank:
        return d.step(f"flatten {axis}", lambda x: x.flatten(axis, axis + 1), x)
    if kind == 1:
        return d.step(f"unsqueeze {axis}", lambda x: x.unsqueeze(axis), x)
    if kind == 2:
        return d.step("reshape -1", lambda x: x.reshape(-1), x)
    factors = [f for f in (2, 3, 4, 7, 8) if size % f == 0]
    if not factors:
        raise Refused
    f = d.rng.choice(factors)
    return d.step(f"unflatten {axis} {f}", lambda x: x.unflatten(axis, (-1, f) if f % 2 else (f, -1)), x)


def cut(d: Draw) -> int:
    x = d.any_rank()
    axis = d.rng.randrange(d.values[x].dim())
    size = d.values[x].shape[axis]
    start, step = d.rng.randrange(size), d.rng.randint(1, 3)
    end = d.rng.randint(start + 1, size)
    before = (slice(None),) * axis
    kind = d.rng.randrange(5)
    if kind == 0:
        return d.step(f"select {axis} {start}", lambda x: x.select(axis, start), x)
    if kind == 1:
        return d.step(f"flip {axis}", lambda x: x.flip(axis), x)
    if kind == 2:
        return d.step(f"roll {start} {axis}", lambda x: x.roll(start, axis), x)
    if kind == 3:
        return d.step(f"part of chunk {axis}", lambda x: x.chunk(2, axis)[-1], x)
    return d.step(f"slice {axis} {start}:{end}:{step}", lambda x: x[(*before, slice(start, end, step))], x)


def join(d: Draw) -> int:
    x = d.any_rank()
    axis, like = d.rng.randrange(d.values[x].dim()), d.values[x]
    if d.rng.random() < 0.3:
        return d.step(f"stack {axis}", lambda x: torch.stack((x, x | x if x.dtype == torch.bool else x + x), axis), x)
    try:
        y = d.pick(lambda t: t.dtype == like.dtype and t.dim() == like.dim() and t is not like and all(
            p == q for n, (p, q) in enumerate(zip(t.shape, like.shape)) if n != axis))
    except Refused:
        y = d.leaf(like.dtype, [d.rng.choice(SIZES) if n == axis else s for n, s in enumerate(like.shape)])
    return d.step(f"cat {axis}", lambda *xs: torch.cat(xs, axis), *d.rng.choice(((x, y), (y, x), (x, y, x))))


def spread(d: Draw) -> int:
    x = d.any_rank()
    rank, axis = d.values[x].dim(), d.rng.randrange(d.values[x].dim())
    n, kind = d.rng.randint(2, 4), d.rng.randrange(5)
    if kind == 0:
        times = [d.rng.choice((1, 1, n)) for _ in range(rank)]
        return d.step(f"repeat {times}", lambda x: x.repeat(times), x)
    if kind == 1:
        return d.step(f"repeat_interleave {n} {axis}", lambda x: x.repeat_interleave(n, axis), x)
    if kind == 2:
        return d.step(f"expand {n}", lambda x: x.expand(n, *x.shape), x)
    amounts = [d.rng.choice((0, 1, 2, -1 if s > 4 else 0)) for s in d.values[x].shape for _ in range(2)]
    if kind == 3:
        return d.step(f"pad {amounts}", lambda x: F.pad(x, amounts, value=1), x)
    size = d.values[x].shape[axis]
    length, step = d.rng.randint(1, min(size, 4)), d.rng.randint(1, 3)
    return d.step(f"unfold {axis} {length} {step}", lambda x: x.unfold(axis, length, step), x)


def product(d: Draw) -> int:
    x = d.floating(2)
    like, n, kind = d.values[x], d.rng.choice(SIZES), d.rng.randrange(6)
    k = like.shape[-1]
    if kind == 0:
        return d.step("linear", F.linear, x, d.leaf(like.dtype, (n, k)), d.leaf(like.dtype, (n,)))
    if kind == 1:
        return d.step("matmul", torch.matmul, x, d.leaf(like.dtype, (k, n)))
    if kind == 2:
        return d.step("x @ x^T / k", lambda x: x @ x.transpose(-1, -2) / k, x)
    if kind == 3:
        return d.step("matmul", torch.matmul, d.leaf(like.dtype, (n, like.shape[-2])), x)
    if kind == 4:
        y = d.pick(lambda t: t.dtype == like.dtype and t.dim() >= 2 and t.shape[-2] == k)
        return d.step("matmul / k", lambda x, y: x @ y / k, x, y)
    x = d.pick(lambda t: t.is_floating_point() and t.dim() == 4)
    return d.step("attention", lambda q: F.scaled_dot_product_attention(q, q.roll(1, 2), q.flip(3), is_causal=n % 2 == 1), x)


def image(d: Draw) -> int:
    x = d.pick(lambda t: t.is_floating_point() and t.dim() in (3, 4))
    like, n, kind = d.values[x], d.rng.choice(SIZES[:5]), d.rng.randrange(4)
    two = like.dim() == 4
    side = d.rng.randint(1, 3)
    stride, padding = d.rng.randint(1, 2), d.rng.randint(0, side // 2)
    if kind <= 1:
        groups = d.rng.choice([g for g in (1, 2, 7, like.shape[1]) if like.shape[1] % g == 0])
        w = d.leaf(like.dtype, (n * groups, like.shape[1] // groups, *(side,) * (like.dim() - 2)))
        if padding and not bool(d.values[w].isfinite().all()):
            raise Refused  # what such a weight makes of padding alone is left out: ARCHITECTURE.md names it
        fn = F.conv2d if two else F.conv1d
        return d.step(f"conv {stride} {padding} {groups}", lambda x, w: fn(x, w, None, stride, padding, 1, groups), x, w)
    pools = (F.avg_pool2d, F.max_pool2d) if two else (F.avg_pool1d, F.max_pool1d)
    pool = pools[kind % 2]
    return d.step(f"{pool.__name__} {side} {stride} {padding}", lambda x: pool(x, side, stride, padding), x)


def look_up(d: Draw) -> int:
    x = d.any_rank()
    like, axis = d.values[x], d.rng.randrange(d.values[x].dim())
    size, n, kind = like.shape[axis], d.rng.choice(SIZES), d.rng.randrange(5)
    if kind == 0:
        return d.step(f"index_select {axis}", lambda x, i: x.index_select(axis, i), x, d.leaf(torch.int64, (n,), size))
    if kind == 1:
        shape = [n if a == axis else d.rng.randint(1, s) for a, s in enumerate(like.shape)]
        return d.step(f"gather {axis}", lambda x, i: x.gather(axis, i), x, d.leaf(torch.int64, shape, size))
    if kind == 2:
        i = d.leaf(torch.int64, (n, 2) if n < 10 else (n,), size)
        return d.step(f"x[{axis}:, i - size]", lambda x, i: x[(slice(None),) * axis + (i - size,)], x, i)
    if kind == 3 and like.dim() == 2:
        return d.step("embedding", lambda x, i: F.embedding(i, x), x, d.leaf(torch.int64, (3, n), like.shape[0]))
    i = d.pick(lambda t: t.dtype in (torch.int64, torch.int32) and t.dim() > 0)
    return d.step(f"x[{axis}: i % size]", lambda x, i: x[(slice(None),) * axis + (i.long() % size,)], x, i)


def update(d: Draw) -> int:
    x = d.any_rank()
    like, axis = d.values[x], d.rng.randrange(d.values[x].dim())
    size, kind = like.shape[axis], d.rng.randrange(4)
    start = d.rng.randrange(size)
    if kind == 3 and like.dtype != torch.bool:
        return together(d, x, axis)
    if kind == 0:
        return d.step(f"tril {start}", lambda x: x.tril(start - 1), d.any_rank(2))
    part = d.leaf(like.dtype, [1 if a == axis else s for a, s in enumerate(like.shape)])
    if kind == 1:
        return d.step(f"slice_scatter {axis} {start}", lambda x, p: torch.slice_scatter(x, p, axis, start, start + 1), x, part)
    i = d.leaf(torch.int64, (1,), size)
    return d.step(f"index_copy {axis}", lambda x, i, p: x.index_copy(axis, i, p), x, i, part)


def together(d: Draw, x: int, axis: int) -> int:
    """Elements that are put together with what is there, several in one place."""
    like, n, fused = d.values[x], d.rng.choice(SIZES), d.rng.random() < 0.5
    name, own = d.rng.choice(("sum", "amax", "amin", "mean" if like.is_floating_point() else "sum")), d.rng.random() < 0.5
    part = d.leaf(like.dtype, [n if a == axis else s for a, s in enumerate(like.shape)])
    i, shape = d.leaf(torch.int64, (n,), like.shape[axis]), [n if a == axis else 1 for a in range(like.dim())]

    def reduced(x: Tensor, i: Tensor, p: Tensor) -> Tensor:
        return x.scatter_reduce(axis, i.view(shape).expand_as(p), p, name, include_self=own)

    def added(x: Tensor, i: Tensor, p: Tensor) -> Tensor:
        return x.index_add(axis, i, p * 3 if fused else p)

    return d.step(*((f"index_add {axis}", added) if name == "sum" and own else (f"scatter {axis} {name} {own}", reduced)), x, i, part)


def cast(d: Draw) -> int:
    dtype = d.rng.choice((*FLOATS, *INTEGERS, torch.bool))
    return d.step("cast", lambda x: x, d.any_rank(0), cast=dtype)


def promoted(d: Draw) -> int:
    """Operands of two types, one of them perhaps a number or without axes."""
    name, x = d.rng.choice((*PROMOTED, "maximum", "atan2", "logical_and", "where", "cat", "clamp")), d.any_rank(0)
    if d.rng.random() < 0.4 and name in PROMOTED:
        k = d.rng.choice((True, 2, -3, 2.5, 1000))
        return d.step(f"{name} {k}", lambda x: getattr(torch, name)(x, k), x)
    dtype = d.rng.choice((*FLOATS, *INTEGERS, torch.int16, torch.bool))
    if name == "cat":
        return d.step("cat -1", lambda x, y: torch.cat((x, y), -1), *d.rng.sample([x, d.leaf(dtype, d.values[x].shape)], 2))
    y = d.leaf(dtype, ()) if d.rng.random() < 0.3 else d.partner(x, dtype)
    if name == "where":
        return d.step(name, torch.where, d.partner(x, torch.bool), *d.rng.sample([x, y], 2))
    if name == "clamp":
        return d.step(name, lambda x, y: torch.clamp(x, min=y), x, y)
    return d.step(name, getattr(torch, name), *d.rng.sample([x, y], 2))


OPERATIONS = (
    *(unary,) * 3, *(binary,) * 3, with_number, whole, compare, logic, where, *(reduce,) * 3, *(along,) * 2, both, norm, *(permute,) * 2,
    *(reshape,) * 2, *(cut,) * 2, join, spread, *(product,) * 2, image, *(look_up,) * 2, update, *(cast,) * 2, *(promoted,) * 2,
)
