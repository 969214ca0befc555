"""HTML by construction: what is not `Markup` is text, and is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = ("meta", "rect", "line", "path", "br")


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


def element(name: str, /, *children: str | Iterable[str], **attributes: object) -> Markup:
    """`<name attributes>children</name>`. Attributes: `class_` is class, `stroke_width` is stroke-width; None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items() if value is not None
    )
    inside = "".join(escaped(child) if isinstance(child, str) else "".join(map(escaped, child)) for child in children)
    return Markup(f"<{name}{written}/>" if name in _VOID else f"<{name}{written}>{inside}</{name}>")


def escaped(text: str) -> Markup:
    """Text as HTML; HTML as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(text))
