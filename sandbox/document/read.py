"""Read and parse untrusted text files, within limits of time and memory.

Every way in which a file can be unusable (too large, too deep, too many values, not a file, not UTF-8, not
its format) raises one `DocumentError` with `Diagnostic`s, which have positions.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox import look
from sandbox.document.diagnostic import Diagnostic, DocumentError, Severity
from sandbox.spec import KeyPath
from sandbox.speed.typed import Literal

Format = Literal["toml", "json", "jsonc", "yaml"]  # jsonc: JSON with comments and trailing commas

SIZE_LIMIT = 1 << 20

FAULT_CONTEXT = 1024
FAULTS_SHOWN = 50

_INT_RANGE = range(-(1 << 63), 1 << 63)


class Document:
    """A parsed file. `where` turns the keys that lead to a value into a line and a column."""

    __slots__ = ("_ends", "_offsets", "_text", "data", "format", "path", "raw")

    def __init__(
        self,
        path: str,
        syntax: Format,
        raw: bytes,
        data: dict[str, object],
        text: str,
        offsets: dict[KeyPath, int],
    ) -> None:
        self.path = path
        self.format: Format = syntax
        self.raw = raw
        self.data = data
        self._text = text
        self._offsets = offsets
        self._ends: list[int] | None = None  # of the lines, found when first needed

    def where(self, keys: KeyPath) -> tuple[int, int]:
        """Line and column of a key, or of an item of an array.

        For keys that do not exist, those of the deepest existing ancestor: "missing" points at the table that
        lacks the key.
        """
        from bisect import bisect_left

        while keys and keys not in self._offsets:
            keys = keys[:-1]
        offset = self._offsets[keys] if keys else 0
        if self._ends is None:
            self._ends = [at for at, character in enumerate(self._text) if character == "\n"]
        line = bisect_left(self._ends, offset)
        return line + 1, offset - (self._ends[line - 1] if line else -1)

    def diagnostic(
        self, keys: KeyPath, rule: str, message: str, hint: str = "", severity: Severity = "error"
    ) -> Diagnostic:
        line, column = self.where(keys)
        return Diagnostic(self.path, line, column, rule, message, hint, severity)


# --- reading -----------------------------------------------------------------------------------


def read_bounded(path: str, *, limit: int = SIZE_LIMIT) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises DocumentError.

    The kind is checked before opening, because opening alone can block (a FIFO) or have effects (a tape, a
    watchdog). It is checked again after opening, because the name may have been swapped in between.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    look.note_content(path)
    try:
        _require_regular(path, look.stat(path).st_mode)
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status.st_mode)
        if status.st_size > limit:
            raise _too_large(path, limit, f"it has {status.st_size} bytes")
        raw = b""
        # Files below /proc report size 0, and a growing file exceeds the size that fstat reported.
        while len(raw) <= limit and (block := os.read(descriptor, limit + 1 - len(raw))):
            raw += block
    except OSError as error:
        raise _unreadable(path, error) from None
    finally:
        os.close(descriptor)
    if len(raw) > limit:
        raise _too_large(path, limit, f"it has more than {limit} bytes")
    return raw


def _too_large(path: str, limit: int, fact: str) -> DocumentError:
    return _file_error(path, "file_too_large", f"the file is too large: {fact}, the limit is {limit}")


def _file_error(path: str, rule: str, message: str, hint: str = "") -> DocumentError:
    return DocumentError(Diagnostic(path, 0, 0, rule, message, hint))


def _require_regular(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    kind = next((name for matches, name in kinds if matches(mode)), "no regular file")
    raise _file_error(path, "not_a_file", f"this is {kind}, a regular file is needed")


def _unreadable(path: str, error: OSError | ValueError) -> DocumentError:
    if isinstance(error, ValueError):
        return _file_error(path, "file_missing", "the path contains a NUL byte, so it names no file")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return _file_error(path, "file_missing", "there is no such file", "check the spelling of the path")
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = ""
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = f"uid {os.geteuid()} needs read permission on it and search permission on its directories"
    return _file_error(path, "file_unreadable", f"the file cannot be read: {reason}", hint)


# --- parsing -----------------------------------------------------------------------------------


def parse(
    path: str,
    raw: bytes,
    format: Format,  # noqa: A002 (the word callers expect)
    *,
    limit: int = SIZE_LIMIT,
    most_values: int | None = None,
) -> Document:
    """Parse bytes. Raises DocumentError. `most_values`: for JSON, where more than the usual limit is
    accepted."""
    if len(raw) > limit:
        raise _too_large(path, limit, f"it has {len(raw)} bytes")
    # Imported here: a launch with a cached manifest and policy parses nothing.
    from sandbox.document.positions import Fault, line_column

    text = _decode(path, raw)
    try:
        data, offsets = _read_text(text, format, most_values)
    except Fault as fault:
        line, column = fault.place or line_column(text, fault.offset)
        raise DocumentError(Diagnostic(path, line, column, fault.rule, fault.message, fault.hint)) from None
    if not isinstance(data, dict):
        message = f"the document is {_kind(data)}, an object is needed"
        hint = (
            "it has to consist of lines such as name: value"
            if format == "yaml"
            else 'it has to start with "{"'
        )
        raise DocumentError(Diagnostic(path, 1, 1, "not_an_object", message, hint))
    document = Document(path, format, raw, data, text, offsets)
    _check_values(document)
    return document


def parse_with_comments(
    path: str,
    raw: bytes,
    format: Format = "json",  # noqa: A002 (the word callers expect)
    *,
    limit: int = SIZE_LIMIT,
    most_values: int | None = None,
) -> Document:
    """`parse` for JSON of which not every program that reads it insists on JSON: if it is none, it may have
    comments and trailing commas. The document's format says which it is. Raises DocumentError."""
    try:
        return parse(path, raw, format, limit=limit, most_values=most_values)
    except DocumentError as error:
        strict = error
    try:
        return parse(path, raw, "jsonc", limit=limit, most_values=most_values)
    except DocumentError as error:
        # If it is no comment that is wrong, JSON's own message says more.
        if error.diagnostics[0][1:3] == strict.diagnostics[0][1:3]:
            raise strict from None
        raise


def _read_text(text: str, syntax: Format, most_values: int | None) -> tuple[object, dict[KeyPath, int]]:
    """The data, and the offset of each key and list item. Raises Fault."""
    from sandbox.document.positions import VALUE_LIMIT, Fault

    if syntax == "yaml":
        from sandbox.document import yaml as yaml_text

        return yaml_text.parse(text)
    if syntax == "jsonc":
        from sandbox.document import jsonc

        return jsonc.parse(text, most_values or VALUE_LIMIT)
    if syntax == "toml":
        from sandbox.document import toml as toml_text

        seen = toml_text.scan(text)
        # The text after the stop was not checked against limits, so the parser gets just enough to name the
        # fault.
        known = text if seen.stop is None else text[: seen.stop + FAULT_CONTEXT]
        data: object = toml_text.parse(known, seen.stop)
    else:
        from sandbox.document import json as json_text

        seen = json_text.scan(text, most_values or VALUE_LIMIT)
        data = json_text.parse(text)
    if seen.stop is not None:
        raise Fault(seen.stop, f"{syntax}_syntax", "the text from here on cannot be read")
    return data, seen.offsets


def _decode(path: str, raw: bytes) -> str:
    from sandbox.document.positions import line_column

    if raw.startswith(b"\xef\xbb\xbf"):
        message = "the file starts with a byte order mark"
        raise DocumentError(
            Diagnostic(path, 1, 1, "byte_order_mark", message, "save it as UTF-8 without BOM")
        )
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        message = "the file is UTF-16, UTF-8 is needed"
        raise DocumentError(Diagnostic(path, 1, 1, "invalid_utf8", message, "save it as UTF-8 without BOM"))
    nul = raw.find(b"\0")
    if nul >= 0:
        before = raw[:nul].decode("utf-8", "replace")
        line, column = line_column(before, len(before))
        message = f"there is a NUL byte at offset {nul}"
        raise DocumentError(Diagnostic(path, line, column, "nul_byte", message, "is this a text file?"))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        line, column = line_column(before, len(before))
        message = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8"
        raise DocumentError(
            Diagnostic(path, line, column, "invalid_utf8", message, "save the file as UTF-8")
        ) from None


def _kind(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _check_values(document: Document) -> None:
    """Refuse values that every syntax allows and that cannot be used: strings with NUL or lone surrogates,
    which no argument, path or variable can hold, and integers that do not fit 64 bits."""
    pending: list[tuple[KeyPath, object]] = [((), document.data)]
    found: dict[Diagnostic, None] = {}
    while pending:
        keys, value = pending.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                _check_value(document, (*keys, key), key, found)
                pending.append(((*keys, key), item))
        elif isinstance(value, list):
            pending.extend(((*keys, index), item) for index, item in enumerate(value))
        else:
            _check_value(document, keys, value, found)
    if not found:
        return
    ordered = sorted(found, key=lambda diagnostic: diagnostic[1:3])
    shown = ordered[:FAULTS_SHOWN]
    if len(ordered) > len(shown):
        message = f"{len(ordered) - len(shown)} more faults are not shown"
        shown.append(Diagnostic(document.path, 0, 0, "too_many_faults", message))
    raise DocumentError(*shown)


def _check_value(document: Document, keys: KeyPath, value: object, found: dict[Diagnostic, None]) -> None:
    if isinstance(value, str):
        if "\0" in value:
            message = "a string contains the character NUL, which no path, argument or variable can hold"
            found[document.diagnostic(keys, "nul_character", message)] = None
        elif not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            message = "a string contains half of a surrogate pair, which is no character"
            found[document.diagnostic(keys, "invalid_character", message)] = None
    elif isinstance(value, int) and value not in _INT_RANGE:
        message = "this integer does not fit into 64 bits"
        found[document.diagnostic(keys, "number_too_large", message)] = None
