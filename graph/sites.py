"""Names of operations that survive from an FX graph to the steps of the plan.

Whoever makes an FX graph may name its operations (`name_node`). torch.export carries the name along; capture appends it to the `origin` of
the values, which every rewrite hands on: `model.py:12 in encoder.query`. So each step of a plan says which operation of the model it is.
"""

from __future__ import annotations

import re

from torch.fx import Node

_CUSTOM = "custom"  # what torch.export and FX interpreters copy to every node made from a node
_KEY = "sashiko.site"
_NAMED = re.compile(r"(?:^|.* )in (\S+)$")


def name_node(node: Node, name: str) -> None:
    """Names an operation; nodes that share its metadata are not affected."""
    node.meta[_CUSTOM] = {**(node.meta.get(_CUSTOM) or {}), _KEY: name}


def copy_name(source: Node, target: Node) -> None:
    """Gives `target` the name of `source`, if it has one."""
    name = _name(source)
    if name:
        name_node(target, name)


def with_name(origin: str, node: Node) -> str:
    """`file.py:12 in name`; `origin` as it is for a node without a name."""
    name = _name(node)
    return f"{origin} in {name}".lstrip() if name else origin


def site_of(origin: str) -> str:
    """The name within an origin; empty without one."""
    found = _NAMED.match(origin)
    return found[1] if found else ""


def _name(node: Node) -> str:
    custom = node.meta.get(_CUSTOM)
    return str(custom.get(_KEY, "")) if isinstance(custom, dict) else ""
