"""Diagnostic: one fault of a document, with its position."""

from __future__ import annotations

from sandbox.speed.typed import Iterable, Literal
from sandbox.speed.value import NamedTuple

Severity = Literal["error", "warning"]


def printable(text: str) -> str:
    """Make untrusted text safe to print on a terminal, on one line.

    Control characters, line separators, bidirectional overrides and lone surrogates (bytes of a file
    name that are not UTF-8, which print() would refuse) become escapes.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    if named is not None:
        return named
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quoted(text: str, limit: int = 60) -> str:
    """Make an untrusted word safe inside a message: escaped, bounded, in quotes."""
    return f"'{printable(cut(text, limit))}'"


def cut(text: str, limit: int) -> str:
    """Shorten to `limit` characters. The "…" tells the code that hides secrets that one may be cut there."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


class Diagnostic(NamedTuple):
    """One fault of one document. Line and column count from 1, in characters; 0 means none."""

    file: str
    line: int
    column: int
    rule: str
    message: str
    hint: str = ""
    severity: Severity = "error"

    @property
    def place(self) -> str:
        """`file:line:column`, the form that editors and terminals make clickable."""
        file = printable(self.file)
        return f"{file}:{self.line}:{self.column}" if self.line else file

    def text(self) -> str:
        return f"{self.place}: {self.rule}: {printable(self.message)}"


class DocumentError(Exception):
    """The document cannot be used at all; `diagnostics` says why."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("; ".join(d.text() for d in diagnostics))
        self.diagnostics = diagnostics


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint with the closest known word; empty if none is close."""
    close = nearest(word, known)
    return f"did you mean '{close}'?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The closest known word; empty if none is close."""
    if len(word) > 64:
        return ""
    import difflib  # only when there is a mistake to report

    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")
