"""YAML, strictly: builds data from PyYAML's events, within limits.

Plain words mean what the core schema of YAML 1.2 says. Null is `null`, `Null`, `NULL`, `~` or nothing.
A boolean is `true` or `false` (also True, TRUE, …). An integer is decimal, `0o17` or `0x1f`. All other plain
words are strings: `yes`, `no`, `on`, `off`, `1:20`, `1_000`, `0b1` and `2024-01-01` too, which YAML 1.1 reads
otherwise. A word that is a number in both versions but not the same one (`0777`) is refused. So are .inf and
.nan.

Not all of YAML is accepted:
- tags: only !!null, !!bool, !!int, !!float, !!str, !!seq and !!map, on a value of that kind.
- keys are strings, and none appears twice. There are no merge keys (<<).
- one document, and no directive but `%YAML 1.2`.
- aliases repeat the value they name. The limits count every repetition, before anything is built.
- tabs are allowed in quoted text, block text and comments only. Lines end with LF or CRLF.

PyYAML's two parsers disagree about tabs and a few other characters, and so do the versions 1.1 and 1.2 of
YAML. Where they disagree, the document is refused, so that every accepted document means the same to all.

PyYAML's own composer and constructor are not used: the composer recurses once per level and has no limits.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from sandbox.document.diagnostic import quoted
from sandbox.document.positions import WORD_LIMIT, Fault, Positions, duplicate
from sandbox.spec import KeyPath

# Characters of text that all aliases of a document together may repeat: as many as a document may have.
REPEATED_LIMIT = 1 << 20

# A refused document up to this size is read again by the parser in Python, which takes up to a second.
_REREAD_CHARACTERS = 64 << 10

# The parser in C if PyYAML was built with it. Tests try both.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# An escape of a surrogate, or any other escape.
_ESCAPE = re.compile(r"\\(?:(?:u|U0000)[dD][89a-fA-F][0-9a-fA-F][0-9a-fA-F]|.)", re.DOTALL)


def parse(text: str) -> tuple[object, dict[KeyPath, int]]:
    """The data, and the offset of each key and list item."""
    check_characters(text)
    check_directives(text)
    try:
        root = _Composer(text, _LOADER).compose()
    except Fault:
        # Both parsers refuse the same documents, except rare ones such as {c:} and [!!str c:], which only the
        # one in C refuses. That one reads further ahead, so it may report a later fault. So the one in Python
        # reports the fault, unless that would take long.
        if _LOADER is not yaml.SafeLoader and len(text) <= _REREAD_CHARACTERS:
            _Composer(text, yaml.SafeLoader).compose()
        raise
    return (None, {}) if root is None else _expand(root)


class _YamlNode:
    """A value of the text. An alias refers to the same node again."""

    __slots__ = ("characters", "complete", "entries", "height", "kind", "scalar", "values")

    def __init__(self, kind: type, scalar: object = None, characters: int = 0) -> None:
        self.kind = kind
        self.scalar = scalar
        self.complete = kind not in (list, dict)
        self.entries: list[tuple[str | int, int, _YamlNode]] = []  # key or index, offset, value
        # With every alias expanded: values, characters of text, levels of nesting below this one.
        self.values, self.characters, self.height = 1, characters, 0 if self.complete else 1


class _OpenYamlNode:
    """A list or mapping whose end has not been read yet."""

    __slots__ = ("in_flow", "key", "keys", "node", "offset")

    def __init__(self, node: _YamlNode, offset: int, in_flow: bool) -> None:
        self.node, self.offset = node, offset
        self.in_flow = in_flow  # between brackets or braces
        self.keys: dict[str, int] = {}
        self.key: str | None = None  # of a mapping: the key whose value comes next


class _Composer:
    """Builds nodes from events."""

    def __init__(self, text: str, loader: Any) -> None:
        self._text = text
        self._loader = loader
        self._layout = Layout(text)
        self._seen = Positions()
        self._anchors: dict[str, _YamlNode] = {}
        self._open: list[_OpenYamlNode] = []
        self._repeated = 0
        self._root: _YamlNode | None = None

    def compose(self) -> _YamlNode | None:
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
            # Only the parser in C: it accepts %ed%a0%80 in a tag, which is not UTF-8.
            raise Fault(self._text.find("!", self._layout.checked), "yaml_tag", *_TAG_WORDS) from None
        except (ValueError, OverflowError):
            # Only the parser in Python: chr() refuses "\U00110000".
            raise _character_fault(loader.index - 2) from None
        except yaml.YAMLError as error:  # of the reader: check_characters has refused such text before
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
            at -= 1  # the parser in Python points after the backslash
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
        node = _YamlNode(kind)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._open.append(_OpenYamlNode(node, start, bool(event.flow_style)))
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
        node = _YamlNode(type(value), value, len(text))
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

    def _add(self, node: _YamlNode, offset: int) -> None:
        """Put a complete node into the list or mapping around it."""
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
        """Refuse "\\ud800" as the parser in C does. The one in Python makes a lone surrogate of it."""
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


def _expand(root: _YamlNode) -> tuple[object, dict[KeyPath, int]]:
    """Build the data. Nothing is shared: a list with two aliases becomes three lists."""
    offsets: dict[KeyPath, int] = {}
    if root.kind not in (list, dict):
        return root.scalar, offsets
    data: Any = root.kind()
    pending: list[tuple[KeyPath, _YamlNode, Any]] = [((), root, data)]
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


# --- scalars: the core schema of YAML 1.2, and messages for syntax errors -----------------------------------


_TAG = "tag:yaml.org,2002:"

# Tags, and the type of the value that each may be on.
PLAIN_TAGS: dict[str, type] = {
    **{f"{_TAG}{name}": str for name in ("null", "bool", "int", "float", "str")},
    f"{_TAG}seq": list,
    f"{_TAG}map": dict,
}

_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

# Possessive throughout (the *+), see json.py.
_DECIMAL = re.compile(r"[-+]?+[0-9]++")
_LEADING_ZERO = re.compile(r"[-+]?+0[0-9]++")
_BASED = re.compile(r"0o[0-7]++|0x[0-9a-fA-F]++")
_FLOAT = re.compile(r"[-+]?+(?:\.[0-9]++|[0-9]++\.[0-9]*+|[0-9]++)(?:[eE][-+]?+[0-9]++|)")
_NOT_FINITE = re.compile(r"[-+]?+\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def read_word(word: str, offset: int) -> object:
    """A plain scalar: null, a boolean, a number, else a string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if word[0] not in "+-.0123456789":
        return word
    if _DECIMAL.fullmatch(word):
        _check_length(word, offset)
        if _LEADING_ZERO.fullmatch(word):
            message = f"the number {quoted(word)} starts with a zero, which means octal to some programs"
            raise Fault(offset, "yaml_number", message, "write it without the zero, as 0o17, or in quotes")
        return int(word)
    if _BASED.fullmatch(word):
        _check_length(word, offset)
        return int(word[2:], 8 if word[1] == "o" else 16)
    if _FLOAT.fullmatch(word):
        _check_length(word, offset)
        number = float(word)
        if number in (float("inf"), float("-inf")):
            raise Fault(offset, "number_too_large", f"the number {quoted(word)} is too large")
        return number
    if _NOT_FINITE.fullmatch(word):
        raise Fault(
            offset,
            "yaml_number",
            f"{quoted(word)} is no number that can be used",
            "write it in quotes if a text is meant",
        )
    return word


def read_tagged(text: str, tag: str, offset: int) -> object:
    """A scalar with one of the plain tags."""
    name = tag.removeprefix(_TAG)
    if name == "str":
        return text
    value = read_word(text, offset)
    if name == "float" and type(value) is int:
        _check_float(value, text, offset)
        return float(value)
    kinds = {"null": type(None), "bool": bool, "int": int, "float": float}
    if type(value) is not kinds[name]:
        raise Fault(offset, "yaml_tag", f"the text {quoted(text)} is not what its tag !!{name} says")
    return value


def _check_float(value: int, text: str, offset: int) -> None:
    try:
        float(value)
    except OverflowError:
        raise Fault(offset, "number_too_large", f"the number {quoted(text)} is too large") from None


def _check_length(word: str, offset: int) -> None:
    if len(word) > WORD_LIMIT:
        message = f"a number of {len(word)} characters, the limit is {WORD_LIMIT}"
        raise Fault(offset, "number_too_large", message)


_QUOTE_HINT = """a text with a colon, a bracket or a star in it has to stand in quotes: "net:[]\""""
_KEY_HINT = "a key and its colon stand on one line, within 1024 characters"

# Parts of the messages of both parsers, with our message and hint. The first match counts.
_SYNTAX: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("end of stream",), "this string is not closed", ""),
    (("',' or ']'",), "a comma or the closing bracket is missing here", _KEY_HINT),
    (("',' or '}'",), "a comma or the closing brace is missing here", _KEY_HINT),
    (("expected ':'",), "a colon is missing after a key", _QUOTE_HINT),
    (
        ("mapping values are not", "unexpected ':'"),
        "a value may not start here",
        f"quote a text that contains a colon; {_KEY_HINT}",
    ),
    (("mapping keys are not",), "a key may not start here", "start it on a line of its own"),
    (("sequence entries are not",), "a list item may not start here", "start it on a line of its own"),
    (
        ("<block end>", "expected key", "'-' indicator", "document start>"),
        "this does not fit the lines above",
        "check the indentation, and quotes around texts",
    ),
    (("node content",), "a value is missing here", ""),
    (("cannot start any token",), "no value may start with this character", "write the text in quotes"),
    (
        ("document indicator", "document separator"),
        "the document ends inside of a string",
        "indent the lines of the string",
    ),
    (("unknown escape",), "this backslash escape does not exist in YAML", "write a backslash as \\\\"),
    (("hexadecimal", "hexdecimal"), "this escape needs more hexadecimal digits", ""),
    (
        ("indentation indicator", "comment or line break", "comment or a line break"),
        "this is no header of a block text",
        "write | or >, behind it only + or - and a digit from 1 to 9",
    ),
    (("alphabetic or numeric",), "a name of letters, digits, - and _ is needed here", ""),
    (("directive", "non-alphabetical"), "a directive may not stand here", "write a text with % in quotes"),
)


def syntax_words(problem: str) -> tuple[str, str]:
    """Our message and hint for a parser's message."""
    for parts, message, hint in _SYNTAX:
        if any(part in problem for part in parts):
            return message, hint
    return problem, ""


# --- layout: line breaks, directives, comments and tabs -----------------------------------------------------


# Possessive throughout (the *+), see json.py.
# What PyYAML refuses everywhere (control characters, also DEL and U+0080 to U+009F), U+FEFF, which only its
# parser in C refuses, and NEL, LS and PS, which are line breaks in YAML 1.1 only.
_FOREIGN = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_BARE_RETURN = re.compile(r"\r(?!\n)")
_BLANK = re.compile(r"[ \n\r]*+")
_COMMENT = re.compile(r"#[^\n]*+")
_LINE = re.compile(r"[^\n]*+")
_VERSION = re.compile(r"%YAML[ ]++1\.2[ \r]*+\n")
_PROPERTY = re.compile(r"[&!][^ \t\r\n]*+")  # an anchor or a tag
_HEADER = re.compile(r"[|>][-+0-9]*+")  # of a block text


def check_characters(text: str) -> None:
    """Refuse control characters and unusual line breaks. A line break that editors do not show could end a
    comment and hide a key after it."""
    found = _FOREIGN.search(text)
    returned = _BARE_RETURN.search(text)
    if found is not None and (returned is None or found.start() < returned.start()):
        code = ord(found[0])
        message = f"the character U+{code:04X} may not stand in YAML"
        raise Fault(found.start(), "yaml_syntax", message, f'write it as "\\u{code:04x}", in double quotes')
    if returned is not None:
        message = "a carriage return stands here without a line feed"
        raise Fault(returned.start(), "yaml_syntax", message, "end lines with LF or CRLF")


def check_directives(text: str) -> None:
    """Refuse all directives but %YAML 1.2. The parser must not see them: its work grows with the square of
    the number of %TAG lines."""
    at = skip_comments(text, 0)
    version = _VERSION.match(text, at)
    if version is not None:
        at = skip_comments(text, version.end())
    if text.startswith("%", at):
        message = "this directive cannot be used: only one line %YAML 1.2 may stand before the document"
        raise Fault(at, "yaml_directive", message, "remove the line")


def skip_comments(text: str, at: int) -> int:
    while True:
        blank = _BLANK.match(text, at)
        at = blank.end() if blank else at
        comment = _COMMENT.match(text, at)
        if comment is None:
            return at
        at = comment.end()


class Layout:
    """Checks the text between and inside the events of a parser, for what the two parsers treat
    differently."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.checked = 0  # the offset up to which the text was checked

    def check_space(self, end: int) -> None:
        """Refuse tabs between the last event and `end`, except in comments."""
        at = self.checked
        while (at := self._text.find("\t", at, end)) >= 0:
            line = max(self._text.rfind("\n", 0, at) + 1, self.checked)
            if self._text.find("#", line, at) < 0:
                raise tab_fault(at)
            found = _LINE.match(self._text, at)
            at = found.end() if found else end
        self.skip(end)

    def skip(self, end: int) -> None:
        self.checked = max(self.checked, end)

    def check_scalar(self, start: int, end: int, style: str | None, properties: int, in_flow: bool) -> None:
        """Check one scalar. `properties`: 0 to 2, for its anchor and its tag."""
        at = start
        for _ in range(properties):
            found = _PROPERTY.match(self._text, at)
            at = self._skip_space(found.end() if found else at)
        if style in ("|", ">"):
            self._check_header(at)
        else:
            self.check_space(min(at, end))
            if not style:
                self._check_plain(at, end, in_flow)
        self.skip(end)

    def _check_header(self, at: int) -> None:
        # Only the parser in C accepts a comment without a space before it.
        header = _HEADER.match(self._text, at)
        if header is not None and self._text.startswith("#", header.end()):
            raise Fault(header.end(), "yaml_syntax", *syntax_words("comment or line break"))
        line = _LINE.match(self._text, at)
        end = line.end() if line else at
        self.check_space(end)
        # Only the parser in Python accepts a tab in the first line, which determines the indentation unless a
        # digit in the header does.
        counted = header is not None and header[0].strip("|>+-")
        blank = _BLANK.match(self._text, end)
        if not counted and blank is not None and self._text.startswith("\t", blank.end()):
            raise tab_fault(blank.end())

    def _check_plain(self, at: int, end: int, in_flow: bool) -> None:
        # Only the parser in C accepts a tab between two words of a plain text.
        tab = self._text.find("\t", at, end)
        if tab >= 0:
            raise tab_fault(tab)
        # Between brackets, the parser in Python takes every "?" for an indicator.
        mark = self._text.find("?", at, end) if in_flow else -1
        if mark >= 0:
            message = "a question mark stands in a text without quotes, between brackets or braces"
            raise Fault(mark, "yaml_syntax", message, "write the text in quotes")

    def _skip_space(self, at: int) -> int:
        while True:
            at = skip_comments(self._text, at)
            if not self._text.startswith("\t", at):
                return at
            at += 1


def tab_fault(offset: int) -> Fault:
    hint = "use spaces; only texts in quotes, block texts and comments may have tabs"
    return Fault(offset, "yaml_syntax", "a tab stands here", hint)
