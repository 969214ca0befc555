"""Stitching one native segment: from values to kernels in execution order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..diagnostics.errors import InvalidGraph
from ..graph.ir import Value
from .contraction import item as contraction_item
from .contraction import lower_epilogue
from .costs import is_expensive
from .domain import Domain, finish
from .group import Group, form, group_of, joined, lower_group, related
from .lower import NeedsBuffer
from .program import CallItem, ContractionItem, LoopItem, Program
from .roots import ANCHORS, WHOLE, Roots, find_roots, read_by_pointer

MAX_STORES = 8  # outputs of one loop nest: more and their write streams evict each other from L1


def stitch(outputs: Sequence[Value], inputs: Iterable[Value], constants: Iterable[Value]) -> Program:
    """Form kernels for everything that `outputs` need. `inputs` and `constants` have memory already."""
    inputs, constants = tuple(inputs), tuple(constants)
    available = {*inputs, *constants}
    roots = find_roots(tuple(outputs), available)
    stored = available | roots.stored.keys()
    formed: dict[Value, Group] = {}
    while True:
        _form_all(roots, stored, available, formed)
        groups = _in_order(_distinct(formed))
        again = _repeated(_distinct(formed), stored)
        if not again:
            break
        joined_up = _join_all(groups, stored, again)
        if len(joined_up) < len(groups):  # one kernel computes it once, without a buffer
            formed = {key: group for group in joined_up for key in (group.roots if group.anchor is None else [group.anchor])}
            continue
        for value in again:
            roots.stored[value] = None
            stored.add(value)
        formed = {key: group for key, group in formed.items() if group.inlined.keys().isdisjoint(again)}
    ordered = _in_order(_join_all(groups, stored))
    ordered = _without_private_stores(ordered, outputs, stored)
    items = tuple(_item(group, n, stored) for n, group in enumerate(ordered) if group.roots[0].op != "joined")
    return Program(items, inputs, constants, tuple(outputs), tuple(v for group in ordered for v in group.roots))


def _distinct(formed: Mapping[Value, Group]) -> list[Group]:
    """Every group once: those that have been joined stand for several values."""
    return list(dict.fromkeys(formed.values()))


def _form_all(roots: Roots, stored: set[Value], available: set[Value], groups: dict[Value, Group]) -> None:
    """Adds the groups that are missing: one for each stored value, or for each anchor with its epilogue.

    Stores more values where lowering asks for it, and forms again what had one of them within it.
    """
    pending, late = list(roots.stored), set[Value]()
    while pending or late:
        if not pending:
            pending = _with_own(groups, late, stored)
            late.clear()
            continue
        value = pending.pop()
        anchor = value if value.op in ANCHORS else roots.epilogue.get(value)
        key = anchor or value
        if value in available or (key in groups and value in groups[key].roots):
            continue
        try:
            groups[key] = _form_anchor(anchor, roots, stored) if anchor is not None else form(value, stored)
        except NeedsBuffer as need:
            wanted = need.value
            if anchor is not None and (wanted is anchor or wanted in roots.stored):
                for v in [v for v, a in roots.epilogue.items() if a is anchor and v is not anchor]:
                    del roots.epilogue[v]  # the epilogue cannot be computed in place: store the plain result
                wanted = anchor
            if wanted is value and anchor is None:
                raise InvalidGraph(f"no kernel computes {value}: {need.why}", "stitching") from need
            roots.stored[wanted] = None
            stored.add(wanted)
            late.add(wanted)
            pending += [value, wanted]


def _with_own(groups: dict[Value, Group], late: set[Value], stored: set[Value]) -> list[Value]:
    """Takes out the kernels that compute for themselves what has a buffer since, or see through it, and gives their results."""
    stale = [key for key, group in groups.items() if _reaches(group, late - group.needs.keys(), stored)]
    return [root for key in stale for root in groups.pop(key).roots]


def _reaches(group: Group, late: set[Value], stored: set[Value]) -> bool:
    """Whether a kernel has one of these values below it, with nothing between that has a buffer."""
    stack, seen = list(group.roots), set[Value](group.roots)
    while stack:
        for operand in stack.pop().inputs:
            if operand not in seen:
                if operand in late:
                    return True
                seen.add(operand)
                if operand not in stored:
                    stack.append(operand)
    return False


def _form_anchor(anchor: Value, roots: Roots, stored: set[Value]) -> Group:
    members = [v for v in roots.stored if roots.epilogue.get(v) is anchor or v is anchor]
    if anchor.op in WHOLE:
        return Group(members, Domain(()), anchor, dict.fromkeys(anchor.inputs))
    made = lower_epilogue(anchor, members, stored)
    pointers = (_base(v, stored) for v in read_by_pointer(anchor))
    needs = dict.fromkeys([*(v for v in made.operands if v not in members), *pointers])
    return Group(members, Domain(()), anchor, needs, made.inlined)


def _base(operand: Value, stored: set[Value]) -> Value:
    while operand not in stored:
        operand = operand.inputs[0]
    return operand


def _repeated(groups: Iterable[Group], stored: set[Value]) -> list[Value]:
    """Expensive values that several kernels would compute, the outermost ones of each shared expression."""
    count: dict[Value, int] = {}
    for group in groups:
        for value in group.inlined:
            if value not in stored:
                count[value] = count.get(value, 0) + 1
    shared = {v for v, n in count.items() if n > 1 and is_expensive(v, stored)}
    inner = {operand for v in shared for operand in v.inputs}
    return [v for v in count if v in shared and v not in inner]


def _producers(groups: Sequence[Group]) -> dict[Value, Group]:
    return {root: group for group in groups for root in group.roots}


def _in_order(groups: Sequence[Group]) -> list[Group]:
    """Producers before consumers. Raises InvalidGraph for kernels that would wait for each other."""
    made = _producers(groups)
    result: dict[Group, None] = {}
    waiting = set[Group]()
    stack: list[tuple[Group, bool]] = [(g, False) for g in reversed(groups)]
    while stack:
        group, expanded = stack.pop()
        if expanded:
            result[group] = None
        elif group in waiting and group not in result:
            raise InvalidGraph(f"the kernel of {group.roots[0]} waits for itself", group.roots[0].origin)
        elif group not in result:
            waiting.add(group)
            stack.append((group, True))
            stack.extend((made[v], False) for v in group.needs if v in made and made[v] not in result and made[v] is not group)
    return _late_last(list(result))


def _late_last(groups: list[Group]) -> list[Group]:
    """What nothing reads is put last: others may still read what was there before."""
    late: list[Group] = []
    needed: set[Value] = set()
    for group in reversed(groups):
        if all(root.op == "put" and root not in needed for root in group.roots):
            late.insert(0, group)
        else:
            needed.update(group.needs)
    return [group for group in groups if group not in late] + late


def _join_all(groups: list[Group], stored: set[Value], sharing: Sequence[Value] | None = None) -> list[Group]:
    """Join kernels over one domain until no pair is left that shares data and may be joined. `groups`: producers before consumers.
    sharing: only kernels that would both compute one of these, and reduce nothing: what waits for a reduction is computed again in each
    pass after it."""
    refused: set[tuple[Group, Group]] = set()  # a pair that is no kernel stays none, whatever others are joined
    made = _producers(groups)
    at = 1
    while at < len(groups):
        partner = _partner(groups, at, stored, made, refused, sharing)
        if partner is None:
            at += 1
            continue
        first, both = partner
        made.update((root, both) for root in both.roots)
        start = groups.index(first)
        before, after = _split(groups[start + 1 : at], both)
        groups = [*groups[:start], *before, both, *after, *groups[at + 1 :]]
        at = start + len(before)  # what comes before it has been compared with everything before it
    return groups


def _split(between: Sequence[Group], group: Group) -> tuple[list[Group], list[Group]]:
    """Kernels in order, in two parts: those that `group` needs, by way of others too, and the rest."""
    needs = set(group.needs)
    before: list[Group] = []
    after: list[Group] = []
    for other in reversed(between):
        if needs.isdisjoint(other.roots):
            after.insert(0, other)
        else:
            before.insert(0, other)
            needs.update(other.needs)
    return before, after


def _partner(
    groups: list[Group], at: int, stored: set[Value], made: Mapping[Value, Group], refused: set[tuple[Group, Group]],
    sharing: Sequence[Value] | None,
) -> tuple[Group, Group] | None:
    """(earlier kernel, both as one) for kernel number `at`, if one of the earlier ones may take it in."""
    group = groups[at]
    mine = [v for v in sharing or () if v in group.inlined]
    if group.anchor is not None or (sharing is not None and (not mine or group.domain.reduced)):
        return None
    behind: set[Group] | None = None
    for number, earlier in enumerate(groups[:at]):
        if earlier.anchor is not None or (earlier, group) in refused:
            continue
        if mine and (earlier.domain.reduced or not any(v in earlier.inlined for v in mine)):
            continue
        if len(earlier.roots) + len(group.roots) <= MAX_STORES and related(earlier, group):
            behind = _behind(group, groups[number:at], made) if behind is None else behind
            both = joined(earlier, group, stored) if earlier not in behind else None
            if both is not None:
                return earlier, both
        refused.add((earlier, group))
    return None


def _without_private_stores(groups: list[Group], outputs: Sequence[Value], stored: set[Value]) -> list[Group]:
    """Kernels that were joined compute their shared work once, without a buffer for it: only what others read is stored."""
    read = {*outputs, *(value for group in groups for value in group.needs)}
    result: list[Group] = []
    for group in groups:
        kept = [root for root in group.roots if root in read]
        if group.anchor is None and kept and len(kept) < len(group.roots):
            group = _storing(group, kept, stored)
        result.append(group)
    return result


def _storing(group: Group, kept: list[Value], stored: set[Value]) -> Group:
    """The kernel with fewer results, where they can be computed without buffers for the others."""
    private = set(group.roots) - set(kept)
    try:
        smaller = group_of(kept, group.domain, stored - private)
    except NeedsBuffer:
        return group
    stored -= private
    return smaller


def _behind(group: Group, others: Sequence[Group], made: Mapping[Value, Group]) -> set[Group]:
    """Those of the other kernels that something needs which `group` needs."""
    among, result = set(others), set[Group]()
    stack = list({made[v] for v in group.needs if v in made} & among)
    while stack:
        for value in stack.pop().needs:
            needed = made.get(value)
            if needed in among and needed not in result:
                result.add(needed)
                stack.append(needed)
    return result


def _item(group: Group, number: int, stored: set[Value]) -> LoopItem | ContractionItem | CallItem:
    if group.anchor is not None and group.anchor.op in WHOLE:
        return CallItem(group.anchor)
    if group.anchor is not None:
        return contraction_item(group.anchor, group.roots, stored, stored)
    made = lower_group(group.roots, group.domain, stored)
    kernel = replace(finish(made.body, group.domain), name=f"k{number}_{group.roots[-1].op}")
    return LoopItem(kernel, made.operands, tuple(group.roots), tuple(made.inlined))
