"""YAML, strictly: PyYAML's events become data within limits.

Plain words mean what the core schema of YAML 1.2 says. Null is `null`, `Null`, `NULL`, `~` or nothing.
A boolean is `true` or `false` (also True, TRUE, …). An integer is decimal, `0o17` or `0x1f`. All other plain
words are strings: `yes`, `no`, `on`, `off`, `1:20`, `1_000`, `0b1` and `2024-01-01` too, which YAML 1.1 reads
otherwise. A word that is a number in both versions but not the same one (`0777`) is refused. So are .inf and
.nan.

Less is accepted than YAML has:
- tags: only !!null, !!bool, !!int, !!float, !!str, !!seq and !!map, on a value of that kind.
- keys are strings, and none appears twice. There are no merge keys (<<).
- one document, and no directive but `%YAML 1.2`.
- aliases repeat what they name. The limits count every repetition, before anything is built.
- tabs stand in quoted text, block text and comments only. Lines end with LF or CRLF. See yaml_layout.py.

Data come from events, and not from PyYAML's composer and constructor: the composer recurses once per level,
and counts nothing.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from sandbox.document.diagnostic import quoted
from sandbox.document.positions import WORD_LIMIT, Fault, Positions, duplicate
from sandbox.document.yaml_layout import Layout, check_characters, check_directives, skip_comments, tab_fault
from sandbox.document.yaml_words import PLAIN_TAGS, read_tagged, read_word, syntax_words
from sandbox.spec import KeyPath

# Characters of text that all aliases of a document together may repeat: as many as a document may have.
REPEATED_LIMIT = 1 << 20

# A refused document up to this size is read again by the parser in Python, which takes up to a second.
_RETOLD_CHARACTERS = 64 << 10

# The parser in C if PyYAML was built with it. Tests try both.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Of a surrogate, or any.
_ESCAPE = re.compile(r"\\(?:(?:u|U0000)[dD][89a-fA-F][0-9a-fA-F][0-9a-fA-F]|.)", re.DOTALL)


def parse(text: str) -> tuple[object, dict[KeyPath, int]]:
    """The data, and the offset of each key and list item."""
    check_characters(text)
    check_directives(text)
    try:
        root = _Composer(text, _LOADER).compose()
    except Fault:
        # Both parsers refuse the same documents, but for odd ones such as {c:} and [!!str c:], which only the
        # one in C refuses. That one looks further ahead, so it may report another of several faults. The
        # one in Python tells the fault, unless that would take long.
        if _LOADER is not yaml.SafeLoader and len(text) <= _RETOLD_CHARACTERS:
            _Composer(text, yaml.SafeLoader).compose()
        raise
    return (None, {}) if root is None else _expand(root)


class _Written:
    """A value as it stands in the text. An alias is the same node once more."""

    __slots__ = ("characters", "complete", "entries", "height", "kind", "scalar", "values")

    def __init__(self, kind: type, scalar: object = None, characters: int = 0) -> None:
        self.kind = kind
        self.scalar = scalar
        self.complete = kind not in (list, dict)
        self.entries: list[tuple[str | int, int, _Written]] = []  # key or index, offset, value
        # With every alias expanded: values, characters of text, levels of nesting below this one.
        self.values, self.characters, self.height = 1, characters, 0 if self.complete else 1


class _Open:
    """A list or mapping whose end was not seen yet."""

    __slots__ = ("in_flow", "key", "keys", "node", "offset")

    def __init__(self, node: _Written, offset: int, in_flow: bool) -> None:
        self.node, self.offset = node, offset
        self.in_flow = in_flow  # between brackets or braces
        self.keys: dict[str, int] = {}
        self.key: str | None = None  # of a mapping: the key whose value comes next


class _Composer:
    """From events to nodes."""

    def __init__(self, text: str, loader: Any) -> None:
        self._text = text
        self._loader = loader
        self._layout = Layout(text)
        self._seen = Positions()
        self._anchors: dict[str, _Written] = {}
        self._open: list[_Open] = []
        self._repeated = 0
        self._root: _Written | None = None

    def compose(self) -> _Written | None:
        loader = self._loader(self._text)
        try:
            while True:
                event = self._next(loader)
                if isinstance(event, yaml.StreamEndEvent):
                    self._layout.check_space(len(self._text))
                    return self._root
                self._take(event, event.start_mark.index, event.end_mark.index)
        finally:
            loader.dispose()

    def _next(self, loader: Any) -> Any:
        try:
            return loader.get_event()
        except yaml.MarkedYAMLError as error:
            raise self._syntax_fault(error) from None
        except UnicodeDecodeError:
            # Of the parser in C only: it takes %ed%a0%80 in a tag, which is no UTF-8.
            raise Fault(self._text.find("!", self._layout.checked), "yaml_tag", *_TAG_WORDS) from None
        except (ValueError, OverflowError):
            # Of the parser in Python only: chr() refuses what "\U00110000" names.
            raise _character_fault(loader.index - 2) from None
        except yaml.YAMLError as error:  # of a reader, which check_characters leaves nothing to refuse
            raise Fault(0, "yaml_syntax", f"the text cannot be read: {error}", place=(0, 0)) from None

    def _syntax_fault(self, error: yaml.MarkedYAMLError) -> Fault:
        started = error.context_mark.index if error.context_mark is not None else 0
        at = error.problem_mark.index if error.problem_mark is not None else started
        problem, context = error.problem or "", error.context or ""
        if "invalid Unicode character escape" in problem:
            return _character_fault(at - 2)
        if self._text.startswith("\t", at):
            return tab_fault(at)
        if "tag" in context or "tag handle" in problem:
            return Fault(started, "yaml_tag", *_TAG_WORDS)
        if "quoted scalar" in context and "end of stream" in problem:
            at = started
        elif "unknown escape" in problem and self._text.startswith("\\", at - 1):
            at -= 1  # the parser in Python points behind the backslash
        return Fault(at, "yaml_syntax", *syntax_words(problem))

    # --- events ----------------------------------------------------------------------------------------

    def _take(self, event: yaml.Event, start: int, end: int) -> None:
        self._layout.check_space(start)
        match event:
            case yaml.ScalarEvent():
                self._take_scalar(event, start, end)
            case yaml.AliasEvent():
                self._take_alias(str(event.anchor), start)
            case yaml.CollectionStartEvent():
                self._layout.check_space(end)
                self._open_node(event, start)
            case yaml.CollectionEndEvent():
                frame = self._open.pop()
                frame.node.complete = True
                self._add(frame.node, frame.offset)
            case yaml.DocumentStartEvent() if self._root is not None:
                raise _document_fault(start)
            case yaml.DocumentEndEvent():
                self._layout.check_space(end)
                at = skip_comments(self._text, end)
                # Before the parser reads more: see check_directives.
                if self._text.startswith(("---", "%"), at):
                    raise _document_fault(at)
        self._layout.skip(end)

    def _open_node(self, event: yaml.CollectionStartEvent, start: int) -> None:
        kind: type = dict if isinstance(event, yaml.MappingStartEvent) else list
        _check_tag(event.tag, kind, start)
        self._refuse_as_key(start, "a list" if kind is list else "a mapping")
        self._seen.value(start, len(self._open))
        node = _Written(kind)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._open.append(_Open(node, start, bool(event.flow_style)))
        self._seen.depth(start, len(self._open))

    def _take_scalar(self, event: yaml.ScalarEvent, start: int, end: int) -> None:
        tag, text = event.tag, event.value
        _check_tag(tag, str, start)
        in_flow = bool(self._open) and self._open[-1].in_flow
        properties = (event.anchor is not None) + (tag is not None)
        self._layout.check_scalar(start, end, event.style, properties, in_flow)
        if event.style == '"' and not text.isascii():
            self._check_surrogates(text, start, end)
        is_word = tag is None and not event.style
        value: object = text
        if tag is not None:
            value = read_tagged(text, tag, start)
        elif is_word:
            value = read_word(text, start)
        node = _Written(type(value), value, len(text))
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        if self._wants_key():
            if is_word and text == "<<":
                hint = "repeat the keys here; quote it if a key of that name is meant"
                raise Fault(start, "yaml_merge_key", "the merge key << cannot be used", hint)
            self._take_key(value, text, start)
        else:
            self._seen.value(start, len(self._open))
            self._add(node, start)

    def _take_key(self, value: object, text: str, start: int) -> None:
        if not isinstance(value, str):
            message = f"the key {quoted(text)} is not a string" if text else "a key is missing here"
            raise Fault(start, "yaml_key", message, "write the key in quotes")
        if len(text) > WORD_LIMIT:
            message = f"a key of {len(text)} characters, the limit is {WORD_LIMIT}"
            raise Fault(start, "key_too_long", message)
        frame = self._open[-1]
        if text in frame.keys:
            raise duplicate(start, text)
        frame.keys[text] = start
        frame.key = text
        frame.node.characters += len(text)

    def _take_alias(self, name: str, start: int) -> None:
        self._refuse_as_key(start, "an alias")
        node = self._anchors.get(name)
        if node is None:
            message = f"the alias {quoted('*' + name)} has no anchor before it"
            raise Fault(start, "yaml_alias", message, "quote it if a text is meant")
        if not node.complete:
            message = f"the alias {quoted('*' + name)} stands inside of the value it names"
            raise Fault(start, "yaml_alias", message, "a value cannot contain itself")
        self._repeated += node.characters
        if self._repeated > REPEATED_LIMIT:
            message = f"aliases repeat more than {REPEATED_LIMIT} characters"
            raise Fault(start, "yaml_alias", message, "use fewer aliases of long texts")
        self._seen.values += node.values - 1
        self._seen.value(start, len(self._open) + node.height)
        self._add(node, start)

    def _wants_key(self) -> bool:
        return bool(self._open) and self._open[-1].node.kind is dict and self._open[-1].key is None

    def _refuse_as_key(self, offset: int, what: str) -> None:
        if self._wants_key():
            message = f"{what} is the key here, a string is needed"
            raise Fault(offset, "yaml_key", message, "write the key in quotes")

    def _add(self, node: _Written, offset: int) -> None:
        """Puts a complete node into the list or mapping around it."""
        if not self._open:
            self._root = node
            return
        frame = self._open[-1]
        around = frame.node
        if frame.key is None:
            around.entries.append((len(around.entries), offset, node))
        else:
            around.entries.append((frame.key, frame.keys[frame.key], node))
            frame.key = None
        around.values += node.values
        around.characters += node.characters
        around.height = max(around.height, node.height + 1)

    def _check_surrogates(self, value: str, start: int, end: int) -> None:
        """The parser in C refuses "\\ud800". The one in Python makes half a character of it."""
        if any("\ud800" <= character <= "\udfff" for character in value):
            for found in _ESCAPE.finditer(self._text, start, end):
                if len(found[0]) > 2:
                    raise _character_fault(found.start())


_TAG_WORDS = (
    "this tag cannot be used",
    "remove it; known are !!str, !!int, !!float, !!bool, !!null, !!seq and !!map, on a value of that kind",
)


def _check_tag(tag: str | None, kind: type, offset: int) -> None:
    if tag is not None and PLAIN_TAGS.get(tag) is not kind:
        raise Fault(offset, "yaml_tag", *_TAG_WORDS)


def _character_fault(offset: int) -> Fault:
    message = "this escape is no character, or half of a surrogate pair"
    return Fault(offset, "invalid_character", message, "write the character itself, or \\U with eight digits")


def _document_fault(offset: int) -> Fault:
    message = "a second document starts here, a file has one"
    return Fault(offset, "yaml_documents", message, "remove what follows")


def _expand(root: _Written) -> tuple[object, dict[KeyPath, int]]:
    """Data that share nothing: a list with two aliases becomes three lists."""
    offsets: dict[KeyPath, int] = {}
    if root.kind not in (list, dict):
        return root.scalar, offsets
    data: Any = root.kind()
    pending: list[tuple[KeyPath, _Written, Any]] = [((), root, data)]
    while pending:
        path, node, made = pending.pop()
        for key, offset, child in node.entries:
            here = (*path, key)
            offsets[here] = offset
            value = child.scalar
            if child.kind in (list, dict):
                value = child.kind()
                pending.append((here, child, value))
            if node.kind is list:
                made.append(value)
            else:
                made[key] = value
    return data, offsets
