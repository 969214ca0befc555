"""Reports: what was quantized with which numbers, and what was left out and why, as text and as a page."""

from .page import page
from .text import report

__all__ = ["page", "report"]
