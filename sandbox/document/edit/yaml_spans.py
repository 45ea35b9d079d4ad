"""Spans of a YAML text, from the events of PyYAML."""

from __future__ import annotations

from typing import Any

import yaml

from sandbox.document import yaml as yaml_text
from sandbox.document.edit.span import EditRefused, Span, SpanKind, Spans
from sandbox.document.positions import Fault
from sandbox.spec import KeyPath

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read(text: str) -> tuple[object, Spans]:
    """Raises EditRefused."""
    try:
        data, _ = yaml_text.parse(text)
    except Fault as fault:
        raise EditRefused(fault.message, fault.offset) from None
    return data, _YamlSpans(text).read()


class _Frame:
    """A list or mapping whose end has not been read yet."""

    __slots__ = ("block", "end", "is_map", "key", "keys", "number", "obstacle", "own_key", "start")

    def __init__(self, keys: KeyPath, is_map: bool, block: bool, start: int, obstacle: str) -> None:
        self.keys, self.is_map, self.block, self.start, self.obstacle = keys, is_map, block, start, obstacle
        self.key: tuple[str, int, int] | None = None  # of a mapping: the key whose value comes next
        self.own_key = (start, start)
        self.number = 0
        self.end = start


class _YamlSpans:
    """Scans a text that the strict reader has accepted."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.spans: Spans = {}
        self.open: list[_Frame] = []

    def read(self) -> Spans:
        for event in yaml.parse(self.text, Loader=_LOADER):
            assert event.start_mark is not None and event.end_mark is not None  # the parser sets both
            start, end = event.start_mark.index, event.end_mark.index
            match event:
                case yaml.ScalarEvent():
                    self._scalar(event, start, end)
                case yaml.AliasEvent():
                    keys, key = self._next(start)
                    self._add(keys, Span(start, end, *key, obstacle="it is an alias"))
                case yaml.CollectionStartEvent():
                    self._open(event, start)
                case yaml.CollectionEndEvent():
                    frame = self.open.pop()
                    stop = frame.end if frame.block else end
                    kind: SpanKind = "map" if frame.is_map else "list"
                    span = Span(frame.start, stop, *frame.own_key, kind, frame.block, frame.obstacle)
                    self._add(frame.keys, span)
        return self.spans

    def _scalar(self, event: yaml.ScalarEvent, start: int, end: int) -> None:
        frame = self.open[-1] if self.open else None
        if frame is not None and frame.is_map and frame.key is None:
            frame.key = (event.value, start, end)
            return
        obstacle = _obstacle(event)
        if event.style in ("|", ">"):
            obstacle = obstacle or "it is a text of several lines"
            end = start + len(self.text[start:end].rstrip())
        elif "\n" in self.text[start:end]:
            obstacle = obstacle or "it is a text of several lines"
        keys, key = self._next(start)
        self._add(keys, Span(start, end, *key, obstacle=obstacle))

    def _open(self, event: yaml.CollectionStartEvent, start: int) -> None:
        keys, key = self._next(start)
        is_map = isinstance(event, yaml.MappingStartEvent)
        frame = _Frame(keys, is_map, not event.flow_style, start, _obstacle(event))
        frame.own_key = key
        self.open.append(frame)

    def _next(self, start: int) -> tuple[KeyPath, tuple[int, int]]:
        """The key path of the value that starts here, and the start and end of its last key."""
        if not self.open:
            return (), (start, start)
        frame = self.open[-1]
        if frame.is_map and frame.key is not None:
            name, key_start, key_end = frame.key
            frame.key = None
            return (*frame.keys, name), (key_start, key_end)
        frame.number += 1
        return (*frame.keys, frame.number - 1), (start, start)

    def _add(self, keys: KeyPath, span: Span) -> None:
        self.spans[keys] = span
        if self.open:
            self.open[-1].end = max(self.open[-1].end, span.end)


def _obstacle(event: Any) -> str:
    if event.anchor is not None:
        return "it has an anchor"
    return "it has a tag" if event.tag is not None else ""
