"""Contexts: the memory of running calls. Each call takes one, so calls from several threads have one each."""

from __future__ import annotations

from .constants import ConstantSet
from .frames import Frame, Machine, Pattern, Site
from .memory import Arena
from .plan import NativeSegment
from .records import ShapeRecord

MAX_FRAMES = 64  # frames that a context keeps, and shapes that an executable keeps


class Context:
    """The arena and the frames of one call at a time. The arena has the size of the largest shape so far. All frames are for the same
    constants, since each keeps the memory of its own."""

    def __init__(self) -> None:
        self._arena = Arena(0)
        self._patterns: dict[tuple[int, int, bool], Pattern] = {}
        self.frames: dict[tuple[ShapeRecord, int, int, bool], Frame] = {}
        self.latest: Frame | None = None
        self._tick = 0

    def frame(
        self, record: ShapeRecord, at: int, segment: NativeSegment, machine: Machine, constants: ConstantSet, threads: int, watch: bool
    ) -> Frame:
        """The frame of segment `at`, made when this context has none for this shape, these constants and this many threads.

        It is `latest` then. A caller may take that one from `frames` by itself, if its constants are the right ones.
        """
        key = (record, at, threads, watch)
        frame = self.frames.get(key)
        if frame is None or frame.constants is not constants:
            shape = record.segments[at]
            assert shape is not None, "a frame is for a native segment"
            if self.latest is not None and self.latest.constants is not constants:
                self._forget()
            self._reserve(record.arena_bytes)
            frame = self._written(key[1:], segment, machine, Site(shape, record.numbers, self._arena.address, constants, threads, watch))
            self.frames[key] = frame
            if len(self.frames) > MAX_FRAMES:
                del self.frames[min(self.frames, key=lambda k: self.frames[k].used or self._tick + 1)]
        self.latest = frame
        self._tick += 1
        frame.used = self._tick
        return frame

    def _written(self, key: tuple[int, int, bool], segment: NativeSegment, machine: Machine, site: Site) -> Frame:
        pattern = self._patterns.get(key)
        frame = None if pattern is None else pattern.frame(site)
        if frame is None:
            pattern = self._patterns[key] = Pattern(segment, machine, site)
            frame = pattern.frame(site)
            assert frame is not None, "a pattern fits the shape that it was made for"
        return frame

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._arena.nbytes:
            # Every frame holds addresses in the old arena, which goes first so that two never exist at once.
            self._forget()
            self._arena = Arena(0)
            self._arena = Arena(nbytes)

    def _forget(self) -> None:
        self.frames.clear()
        self._patterns.clear()
        self.latest = None
