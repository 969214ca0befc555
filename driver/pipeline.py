"""The passes, in order: the table of contents of the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..cpu_codegen.math.normal import looked_up
from ..diagnostics.errors import InputError
from ..graph.ir import Graph, Value
from ..graph.passes import Pass
from ..graph.simplify import canonical, cse
from ..graph.sites import site_of
from ..graph.types import bf16, f32
from ..graph.updates import concatenated, read_between_writes, separated
from ..kernels import x86_words
from ..kernels.table import unsigned_step
from ..platforms.target import Target
from ..rewrite import RuleSet, Trace, apply
from ..rewrite.query import is_weight
from ..rewrite.rules import CANONICAL, INTEGER, WEIGHTS
from ..rewrite.rules.bands import by_bands
from ..rewrite.rules.moments import in_blocks
from ..rewrite.rules.permutes import sink_permutes
from ..rewrite.rules.precision import lower_precision
from ..rewrite.rules.residuals import rounded_once
from ..rewrite.rules.results import quantized_results
from ..rewrite.rules.scales import scaled_before
from ..rewrite.rules.short import shorten
from ..rewrite.rules.tables import tabulate
from ..rewrite.rules.unsigned import unsigned_rows
from ..rewrite.rules.weighted import sums_of_bytes
from ..stitch.constants import constant_values, own_results
from ..stitch.expand import expand_contractions, expand_unsupported
from ..stitch.steps import together
from .contractions import few_queries, has_kernel, is_dot, panel_in_place, worth_rounding

PRECISIONS = ("fp32", "bf16", "auto")
_TILE_ROWS = 16  # of tile registers, which take as long for fewer


def check_settings(precision: object, **flags: object) -> None:
    """InputError for what is no precision, and for flags that are neither True nor False."""
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}", hint=f"one of {', '.join(PRECISIONS)}")
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise InputError(f"{name} is {given!r:.60}", hint="True or False")


def fast_bf16(target: Target, product: Value) -> bool:
    """Whether a product is faster in bf16 than in fp32 on a target: it multiplies bf16 natively, or 16-bit integers in its place, which are
    made of constant weights before, and of the operands of attention if these are many; or rows of bf16 have fewer digits that integer
    weights are multiplied by. product: may be the sum of a depthwise convolution, which waits for its image."""
    if target.bf16_dots or any(target.has(feature) for feature in ("amx_bf16", "bf16")):
        return True
    if not target.word_pairs or product.inputs[0].dtype != f32:  # f16 has more digits
        return False
    if product.op == "attention":
        return worth_rounding(product)
    if product.op not in ("linear", "group_linear", "routed_linear"):
        return product.op == "reduce"
    weight = product.inputs[1]
    if not weight.dtype.is_float:
        return target.byte_dots
    return is_weight(weight) and x86_words.enough(target, *weight.shape[-2:])


def passes(
    precision: str, target: Target, rules: RuleSet = (), trace: Trace | None = None, wide: frozenset[str] = frozenset(),
    writes: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Pass, ...]:
    """Everything that happens to a graph before it is cut into kernels.

    rules: the user's own, tried before ours. wide: names of operations that stay in fp32 whatever the precision. writes: numbers of
    outputs, and of the inputs that are overwritten with them.
    """

    def rewrite(name: str, chosen: RuleSet) -> Pass:
        return Pass(name, lambda graph: apply(graph, chosen, trace))

    def narrows(product: Value) -> bool:
        chosen = precision == "bf16" or (precision == "auto" and fast_bf16(target, product))
        return chosen and not is_dot(product) and not few_queries(product, target) and site_of(product.origin) not in wide

    def narrowed(graph: Graph) -> Graph:
        return rounded_once(lower_precision(graph, bf16, narrows), bf16)

    def spelled_out(graph: Graph) -> Graph:
        whole = read_between_writes(graph)
        panel = panel_in_place(target)
        return expand_unsupported(
            graph, lambda value: has_kernel(value, target, value in whole, panel), lambda value: has_kernel(value, target)
        )

    step = unsigned_step(target)
    return (
        Pass("bands", lambda graph: by_bands(graph, narrows, _TILE_ROWS if target.has("amx_tile") else 1)),
        Pass("canonical", canonical),
        Pass("updates", lambda graph: concatenated(graph, writes)),
        Pass("cse", cse),
        Pass("permutes", sink_permutes),
        rewrite("rewrite", (*rules, *CANONICAL)),  # the user's first: they are written over the operations that capture gives
        rewrite("integer", INTEGER),
        rewrite("weights", WEIGHTS),
        *((Pass("precision", narrowed),) if precision != "fp32" else ()),
        Pass("unsupported", spelled_out),
        Pass("contractions", expand_contractions),
        *((Pass("unsigned", lambda graph: unsigned_rows(graph, step)),) if step else ()),
        *((Pass("bytes", sums_of_bytes),) if target.byte_dots else ()),
        *((Pass("tables", lambda graph: tabulate(graph, target.lookup_entries)),) if target.lookup_entries else ()),
        Pass("attention", lambda graph: quantized_results(graph, constant_values(graph.outputs))),
        Pass("scales", lambda graph: scaled_before(graph, constant_values(graph.outputs))),
        Pass("short", lambda graph: shorten(graph, looked_up(target))),
        Pass("fold", canonical),
        Pass("moments", in_blocks),
        Pass("share", cse),
        Pass("steps", together),
        Pass("memory", lambda graph: separated(graph, writes)),
        Pass("results", lambda graph: own_results(graph, writes)),
    )
