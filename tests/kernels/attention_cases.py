"""Attention problems as graphs with their data, the float64 answer, and how far a kernel may be from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.contract import BufferSlot, KernelCode, ParamSlot
from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph.dims import Dim, evaluate, product, symbol
from sashiko.graph.ir import Value
from sashiko.graph.ops import make
from sashiko.graph.types import DType, QParams, bf16, boolean, f16, f32, i64
from sashiko.kernels.attention_spec import AttentionCode, AttentionSpec, HeadStrides, dense
from sashiko.platforms.target import Target
from sashiko.stitch.contraction import item
from sashiko.stitch.program import Strided
from tests.emulation import Array, Buffer, Call, Runner
from tests.sweeps import swept

Emit = Callable[[Module, Target, AttentionSpec, str], AttentionCode]
ROUNDING = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""Half the distance between neighbours, relative."""


@dataclass(frozen=True)
class Case:
    """q [batch, heads, m, depth], k [batch, groups, s, depth], v [batch, groups, s, width].

    mask: none, hidden (keys of an item for all its queries, of others than the first all), positions (of the last of 30 keys that a query
    sees, [m], where some see none), padding (a [batch, s] integer tensor that becomes an additive mask inside the kernel), keep (bool
    [batch, 1, m, s] with rows that are all false), added (floats with -inf, [heads, m, s]), blocks (bool [m, s], true in blocks along the
    diagonal, but for a row), low (floats [batch, 1, m, s], -3e38 away from the diagonal, and in a row). fused: q, k, v are views of
    [batch, s, 3, heads, depth], so that m == s and groups == heads. across: the result is laid out as [batch, m, heads, width].
    dynamic: batch, m and s are symbols. counted: m is one of them.
    """

    name: str
    batch: int
    heads: int
    groups: int
    m: int
    s: int
    depth: int
    width: int
    mask: str = "none"
    fused: bool = False
    across: bool = False
    dynamic: bool = False
    counted: bool = True
    columns: bool = False
    """k and v are stored transposed, so that neighbours in a row are not neighbours in memory."""
    cap: float | None = None
    """Scores x before the mask are cap tanh(x / cap)."""
    before: int | None = None
    """Key j is seen by query i only when i + past - before <= j <= i + past + after, where the last keys are those of the queries."""
    after: int | None = None
    sinks: bool = False
    """Each head has one more key, of which the first has a score beyond all others."""

    @property
    def scale(self) -> float:
        return self.depth**-0.5 / (self.cap or 1.0)


CASES = (
    Case("plain", 2, 3, 3, 20, 37, 32, 32),
    Case("bert", 1, 2, 2, 64, 64, 32, 32, "padding", fused=True, across=True),
    Case("causal", 1, 2, 2, 45, 45, 16, 16, after=0, dynamic=True),
    Case("first_keys", 1, 1, 1, 10, 70, 64, 64, after=-60),
    Case("keep", 2, 2, 2, 33, 19, 80, 80, "keep", dynamic=True),
    Case("added", 1, 3, 3, 18, 50, 64, 48, "added"),
    Case("grouped", 2, 4, 2, 17, 29, 128, 128, "padding", across=True, dynamic=True),
    Case("decode", 2, 4, 1, 1, 133, 64, 64, "padding", sinks=True),
    Case("one_key", 1, 2, 2, 5, 1, 16, 16),
    Case("odd", 1, 1, 1, 7, 11, 13, 9, "keep", columns=True),
    Case("uneven", 1, 2, 2, 21, 13, 7, 5),
    Case("long", 1, 2, 2, 50, 515, 24, 40, "added", dynamic=True, sinks=True),
    Case("capped", 1, 4, 2, 19, 83, 64, 64, "keep", cap=0.8),
    Case("window", 1, 2, 1, 200, 200, 32, 32, before=20, after=0, dynamic=True),
    Case("near", 2, 1, 1, 130, 130, 16, 48, "keep", before=17, after=17),
    Case("after_past", 1, 2, 2, 37, 230, 64, 64, before=40, after=3, dynamic=True),
    Case("positions", 1, 2, 2, 70, 300, 32, 32, "positions", dynamic=True),
    Case("hidden", 2, 2, 1, 30, 300, 32, 32, "hidden", dynamic=True),
    Case("hidden_few", 2, 1, 1, 16, 37, 16, 16, "hidden"),
    Case("sinks", 2, 3, 3, 32, 40, 32, 32, dynamic=True, sinks=True),
    Case("step", 2, 6, 2, 1, 300, 64, 48, "hidden", across=True, dynamic=True, counted=False),
    Case("steps", 2, 2, 2, 3, 300, 40, 64, "positions", dynamic=True, counted=False, sinks=True),
    Case("short_step", 1, 3, 1, 1, 11, 13, 9, "keep", columns=True),
    Case("blocks", 1, 2, 2, 100, 300, 32, 32, "blocks", dynamic=True),
    Case("low", 2, 1, 1, 100, 290, 32, 32, "low"),
    Case("low_step", 2, 6, 2, 1, 270, 32, 32, "low"),
    Case("parts", 1, 6, 2, 1, 1300, 40, 64, "low", dynamic=True, counted=False, sinks=True),
    Case("parts_of_few", 2, 2, 2, 2, 1025, 32, 20, "hidden", across=True),
    Case("deep_step", 1, 1, 1, 2, 37, 300, 260, "added", cap=0.8),
    Case("alone", 2, 6, 2, 1, 300, 64, 48, "keep", across=True, dynamic=True, sinks=True),
    Case("alone_of_many", 2, 20, 1, 1, 70, 24, 16, "hidden", dynamic=True),
)
STEPS = ("step", "steps", "short_step", "parts", "parts_of_few", "deep_step")
_RARE = (
    "near", "after_past", "first_keys", "hidden_few", "blocks", "low_step", "parts_of_few", "alone_of_many", "one_key", "uneven", "capped",
)  # fmt: skip
_SHOWN = ("plain", "bert", "keep", "grouped", "odd", "long", "window", "hidden", "sinks", "low", "alone")
MOST = swept(CASES, [case for case in CASES if case.name not in _RARE])
MANY = swept(CASES, [case for case in CASES if case.name in _SHOWN])
SYMBOLS = {"B": symbol("B", 1, 64), "M": symbol("M", 1, 4096), "S": symbol("S", 1, 4096)}


@dataclass(frozen=True)
class Problem:
    """A case as a kernel meets it: arrays of q, k, v and of masks and sinks, and the result wanted, [batch, heads, m, width]."""

    case: Case
    spec: AttentionSpec
    arrays: tuple[Array, ...]
    masks: tuple[Array, ...]
    wanted: torch.Tensor
    tolerance: torch.Tensor
    dims: dict[str, int]


def to_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def problem(case: Case, dtype: DType, seed: int = 0, quantized: tuple[DType, QParams] | None = None) -> Problem:
    """quantized: the type of the result, and what its integers mean."""
    torch.manual_seed(seed)
    sizes: tuple[Dim, Dim, Dim] = (case.batch, case.m, case.s)
    if case.dynamic:
        sizes = (SYMBOLS["B"], SYMBOLS["S"] if case.fused or case.m == case.s else SYMBOLS["M"] if case.counted else case.m, SYMBOLS["S"])
    batch, m, s = sizes
    q, k, v, tensors, views = _operands(case, dtype, batch, m, s)
    mask, mask_input, mask_tensor, added = _mask(case, len(tensors), batch, m, s)
    sinks = torch.tensor([150.0, -1.0, 2.0, 5.0, 0.0, 3.0])[: case.heads].reshape(1, -1, 1, 1) if case.sinks else None
    sink = None if sinks is None else b.input_(len(tensors) + 1, f32, (1, case.heads, 1, 1))
    past = s - m
    ahead = torch.arange(case.s) - (torch.arange(case.m) + case.s - case.m)[:, None]  # how far a key is behind a query
    outside = torch.zeros_like(ahead, dtype=torch.bool)
    outside = outside if case.before is None else outside | (ahead < -case.before)
    added = added.masked_fill(outside if case.after is None else outside | (ahead > case.after), float("-inf"))
    before = None if case.before is None else case.before - past
    after = None if case.after is None else case.after + past
    anchor = b.attention(q, k, v, mask, sink, scale=case.scale, before=before, after=after, cap=case.cap)
    if quantized is not None:
        assert isinstance(anchor.attrs, A.AttentionAttrs)
        anchor = make("attention", *anchor.inputs, attrs=replace(anchor.attrs, dtype=quantized[0], qparams=quantized[1]))
    others = {value: data for value, data in ((mask_input, mask_tensor), (sink, sinks)) if value is not None and data is not None}
    inputs = {*tensors, *others}
    stitched = item(anchor, (anchor,), set(inputs), set(inputs))
    out = dense(case.heads, m, case.width)
    if case.across:
        out = HeadStrides(product((m, case.heads, case.width)), case.width, case.heads * case.width)
    q_at, k_at, v_at = (_strides(pointer) for pointer in stitched.pointers)
    sizes_of_heads = (batch, case.heads, case.groups, m, s, case.depth, case.width)
    spec = AttentionSpec(dtype, *sizes_of_heads, q_at, k_at, v_at, out, stitched.epilogue, stitched.params, stitched.result)
    arrays = tuple(to_array(tensors[pointer.value]) for pointer in stitched.pointers)
    masks = tuple(to_array(others[value]) for value in stitched.operands)
    scores = next(node.dtype for node in spec.score.nodes if node.op == "acc")
    wanted, tolerance = reference(views, case, dtype, scores, added, sinks)
    return Problem(case, spec, arrays, masks, wanted, tolerance, {"B": case.batch, "M": case.m, "S": case.s})


def _strides(view: Strided) -> HeadStrides:
    batch, head, row, col = view.strides
    return HeadStrides(batch, head, row, col, view.offset)


def _operands(
    case: Case, dtype: DType, batch: Dim, m: Dim, s: Dim
) -> tuple[Value, Value, Value, dict[Value, torch.Tensor], list[torch.Tensor]]:
    """Graph values of q, k, v; the inputs they are views of with their data; and q, k, v as tensors."""
    if case.fused:
        data = torch.randn(case.batch, case.s, 3, case.heads, case.depth).to(dtype.torch)
        source = b.input_(0, dtype, (batch, s, 3, case.heads, case.depth))
        parts = [b.reshape(b.slice_(source, 2, n, 1), (batch, s, case.heads, case.depth)) for n in range(3)]
        q, k, v = (b.permute(part, (0, 2, 1, 3)) for part in parts)
        return q, k, v, {source: data}, [data[:, :, n].transpose(1, 2) for n in range(3)]
    shapes = ((batch, case.heads, m, case.depth), (batch, case.groups, s, case.depth), (batch, case.groups, s, case.width))
    env = {"B": case.batch, "M": case.m, "S": case.s}
    values, tensors, views = [], {}, []
    for n, shape in enumerate(shapes):
        data = torch.randn([evaluate(extent, env) for extent in shape]).to(dtype.torch)
        views.append(data)
        if case.columns and n:
            source = b.input_(n, dtype, (*shape[:2], shape[3], shape[2]))
            values.append(b.permute(source, (0, 1, 3, 2)))
            data = data.transpose(2, 3)
        else:
            source = b.input_(n, dtype, shape)
            values.append(source)
        tensors[source] = data
    return values[0], values[1], values[2], tensors, views


def _mask(case: Case, number: int, batch: Dim, m: Dim, s: Dim) -> tuple[Value | None, Value | None, torch.Tensor | None, torch.Tensor]:
    """(mask value, its input, the input's data, what is added to scores)."""
    full = (case.batch, case.heads, case.m, case.s)
    low = float("-inf")
    if case.mask == "padding":
        data = (torch.arange(case.s) < max(1, case.s - 3)).long().repeat(case.batch, 1)
        source = b.input_(number, i64, (batch, s))
        kept = b.ne(b.reshape(source, (batch, 1, 1, s)), 0)
        mask = b.where(kept, b.full(0.0, f32), b.full(low, f32))
        return mask, source, data, torch.zeros(full).masked_fill(data[:, None, None] == 0, low)
    if case.mask == "positions":
        last = torch.arange(case.m) + case.s // 3
        last[0], last[1] = -5, 2**63 - 1
        source, keys = b.input_(number, i64, (m,)), b.iota(s, i64)
        end = b.reshape(source, (m, 1))
        seen = (torch.arange(case.s) <= last[:, None]) & (torch.arange(case.s) > last[:, None] - 30)
        mask = b.and_(b.le(keys, end), b.gt(keys, b.sub(end, 30)))
        return mask, source, last, torch.zeros(full).masked_fill(~seen, low)
    if case.mask == "hidden":
        seen = torch.zeros(case.batch, 1, 1, case.s, dtype=torch.bool)
        seen[0, ..., case.s // 3 : -case.s // 3] = torch.rand(case.s)[case.s // 3 : -case.s // 3] < 0.8
        source = b.input_(number, boolean, (batch, 1, 1, s))
        return source, source, seen, torch.zeros(full).masked_fill(~seen, low)
    if case.mask == "keep":
        data = torch.rand(case.batch, 1, case.m, case.s) < 0.6
        data[:, :, case.m // 2] = False
        source = b.input_(number, boolean, (batch, 1, m, s))
        return source, source, data, torch.zeros(full).masked_fill(~data, low)
    if case.mask == "added":
        floats = torch.randn(case.heads, case.m, case.s)
        floats[:, :, :2] = low
        floats[:, 1] = low
        source = b.input_(number, f32, (case.heads, m, s))
        return source, source, floats, floats.expand(full)
    if case.mask in ("blocks", "low"):
        places, keys = torch.arange(case.m)[:, None] * case.s // case.m, torch.arange(case.s)
        seen = (keys // 40 == places // 40) if case.mask == "blocks" else (keys - places).abs() <= 20
        seen[case.m // 2] = case.m == 1
        if case.mask == "blocks":
            source = b.input_(number, boolean, (m, s))
            return source, source, seen, torch.zeros(full).masked_fill(~seen, low)
        floats = torch.randn(case.batch, 1, case.m, case.s).masked_fill(~seen, -3e38)
        source = b.input_(number, f32, (batch, 1, m, s))
        return source, source, floats, floats.expand(full)
    return None, None, None, torch.zeros(full)


def reference(
    views: Sequence[torch.Tensor], case: Case, dtype: DType, scores_dtype: DType, added: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer in float64, and a bound of the error.

    With u the rounding of the arithmetic, which is that of the scores, a score is off by about sqrt(depth) u times the sum of its terms'
    sizes, a weight relatively by twice that, and a sum over s keys adds sqrt(s) u; 4 times that holds for all elements. Weights and
    results of 16 bits add their own rounding.
    """
    q, k, v = (x.double() for x in views)
    k, v = (x.repeat_interleave(case.heads // case.groups, 1) for x in (k, v))
    scale = case.depth**-0.5
    scores = q @ k.transpose(2, 3) * scale
    scores = (scores if case.cap is None else case.cap * torch.tanh(scores / case.cap)) + added.double()
    top = scores.amax(-1, keepdim=True) if sinks is None else torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = torch.exp(scores - torch.where(top == float("-inf"), torch.zeros_like(top), top))
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else torch.exp(sinks - top))
    wanted = torch.where(total == 0, torch.zeros_like(total), (weights @ v) / total)
    arithmetic = ROUNDING[scores_dtype.name]
    sizes = (q.abs() @ k.abs().transpose(2, 3)).amax() * scale
    largest = v.abs().amax()
    bound = 4 * arithmetic * (2 * math.sqrt(case.depth) * sizes + math.sqrt(case.s) + 4) * largest
    if dtype in (bf16, f16):
        bound = bound + ROUNDING[dtype.name] * (wanted.abs() + largest)
    return wanted, bound + torch.zeros_like(wanted)


def run(runner: Runner, emit: Emit, given: Problem) -> torch.Tensor:
    """Runs the kernels, the domain cut in two, and returns the result as [batch, heads, m, width]."""
    module, spec, case = Module(), given.spec, given.case
    code = emit(module, runner.target, spec, "attention")
    stored = given.arrays[0].dtype if spec.result is None else np.dtype(f"{spec.stored.kind}8")
    out = np.full(case.batch * case.heads * case.m * case.width, 77, stored)
    workspace = np.full(evaluate(code.workspace_bytes, given.dims), 0xFF, np.uint8)
    arrays = [*given.arrays, out, workspace, *given.masks]
    calls: list[Call] = []
    for kernel in (code.pack, code.run):
        if kernel is not None:
            calls += _calls(kernel, given.dims, arrays)
    result = torch.from_numpy(runner.run_calls(module.text(), arrays, calls)[3])
    if spec.stored == bf16:
        result = result.view(torch.int16).view(torch.bfloat16)
    shape = (case.batch, case.m, case.heads, case.width) if case.across else (case.batch, case.heads, case.m, case.width)
    result = result.view(shape)
    return result.transpose(1, 2) if case.across else result


def _calls(kernel: KernelCode, dims: dict[str, int], arrays: list[Array]) -> list[Call]:
    slots: list[Buffer | int] = []
    for slot in kernel.slots:
        if isinstance(slot, ParamSlot):
            slots.append(Buffer(len(arrays)))
            arrays.append(np.array(slot.values, np.float32))
        else:
            slots.append(Buffer(slot.index) if isinstance(slot, BufferSlot) else evaluate(slot.dim, dims))
    domain = evaluate(kernel.domain, dims)
    return [Call(kernel.symbol, tuple(slots), 0, domain // 2), Call(kernel.symbol, tuple(slots), domain // 2, domain)]


def check(got: torch.Tensor, given: Problem) -> None:
    error = (got.double() - given.wanted).abs()
    worst = (error / given.tolerance).max().item()
    assert not got.isnan().any() and worst <= 1, f"{given.case.name}: {worst:.2f} times the tolerance"


def check_quantized(got: torch.Tensor, given: Problem, qparams: QParams) -> None:
    """Each integer is what a number within the tolerance is rounded to."""
    (scale,), low, high = qparams.scale, qparams.qmin, qparams.qmax
    exact, room = given.wanted / scale + qparams.zero_point, given.tolerance / scale
    off = (got.double() - exact.clamp(low, high)).abs()
    assert bool((off <= room + 0.501).all()), f"{given.case.name}: {off.max():.3f} steps off"
    assert got.unique().numel() > 3, "the result is spread over several steps"
