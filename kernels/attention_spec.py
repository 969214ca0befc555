"""What an attention kernel is asked to compute, and what a generator gives back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..cpu_codegen.contract import KernelCode
from ..graph.dims import Dim, product
from ..graph.types import DType
from ..stitch.loops import Body

Q, K, V, OUT, WORKSPACE = range(5)
FIRST_SCORE_BUFFER = 5


@dataclass(frozen=True)
class HeadStrides:
    """Element (b, h, i, j) of an operand lies offset + b * batch + h * head + i * row + j * col elements from the start of its buffer."""

    batch: Dim
    head: Dim
    row: Dim
    col: Dim = 1
    offset: Dim = 0


def dense(heads: Dim, rows: Dim, cols: Dim) -> HeadStrides:
    """Strides of row-major [batch, heads, rows, cols]."""
    return HeadStrides(product((heads, rows, cols)), rows * cols, cols)


@dataclass(frozen=True)
class AttentionSpec:
    """out[b, h, i, :] = sum over j of softmax_j(score(b, h, i, j)) * v[b, h // (heads // groups), j, :].

    q [batch, heads, m, depth], k [batch, groups, s, depth], v [batch, groups, s, width], out [batch, heads, m, width], all of `dtype`.
    score: a body over r = (b * heads + h) * m + i and c = j whose `acc` node is q[b, h, i, :] . k[b, h // (heads // groups), j, :];
    the node of its first store is the score, that of a second one, if any, the score of one more key, whose value is 0. A row whose scores
    are all -inf gives 0, a row with a NaN gives NaN.
    Operands: q, k, v, out, workspace, then the buffers of the body. params: the numbers of the bodies. result: None, or a body that makes
    what is stored, elements of its only buffer, of the `acc` node alone; `dtype` is that of q, k and v then.
    """

    dtype: DType
    batch: Dim
    heads: Dim
    groups: Dim
    m: Dim
    s: Dim
    depth: int
    width: int
    q: HeadStrides
    k: HeadStrides
    v: HeadStrides
    out: HeadStrides
    score: Body
    params: tuple[float, ...] = field(default=())
    result: Body | None = None

    @property
    def stored(self) -> DType:
        """The type of the elements of the result."""
        return self.dtype if self.result is None else self.result.buffers[0]

    @property
    def rows(self) -> Dim:
        """How many rows the result has."""
        return product((self.batch, self.heads, self.m))

    @property
    def all_groups(self) -> Dim:
        """How many heads k and v have, those of all items together."""
        return product((self.batch, self.groups))

    @property
    def work(self) -> Dim:
        """Multiplications of the whole."""
        return product((self.rows, self.s, self.depth + self.width))


def heads_as_queries(spec: AttentionSpec) -> AttentionSpec:
    """The same attention with the heads of a group as its queries, where each has one query: they share keys and values, and so vectors.

    Rows of the result keep their numbers, so the body needs no change.
    """
    if spec.m != 1 or spec.heads == spec.groups or not (isinstance(spec.heads, int) and isinstance(spec.groups, int)):
        return spec
    many = spec.heads // spec.groups

    def moved(strides: HeadStrides) -> HeadStrides:
        return replace(strides, head=strides.head * many, row=strides.head)

    return replace(spec, heads=spec.groups, m=many, q=moved(spec.q), out=moved(spec.out))


@dataclass(frozen=True)
class AttentionCode:
    """The generated kernels. pack: runs before `run` and fills the workspace, None when `run` reads k and v in place.

    Both take all operands. workspace_bytes: size of the workspace operand, 64-byte aligned; its content means nothing between calls.
    """

    run: KernelCode
    pack: KernelCode | None = None
    workspace_bytes: Dim = 0
