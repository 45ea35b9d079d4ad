"""What stands between the words of a YAML document: line breaks, directives, comments and tabs.

PyYAML's two parsers disagree about tabs and a few other characters, and so do the versions 1.1 and 1.2 of
YAML. What they disagree about is refused here, so that a document means the same to each of them or nothing.
"""

from __future__ import annotations

import re

from sandbox.document.positions import Fault
from sandbox.document.yaml_words import syntax_words

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
    """A line break that an editor does not show as one could end a comment, and hide a key behind it."""
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
    """Before the parser sees them: its work grows with the square of the number of %TAG lines."""
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
    """Follows the events of a parser through the text, and checks what it passes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.checked = 0  # up to here

    def check_space(self, end: int) -> None:
        """No tab from where the last event ended to `end`, except in comments."""
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
        """`properties`: how many of an anchor and a tag it has."""
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
        # Only the parser in C takes a comment without a space before it.
        header = _HEADER.match(self._text, at)
        if header is not None and self._text.startswith("#", header.end()):
            raise Fault(header.end(), "yaml_syntax", *syntax_words("comment or line break"))
        line = _LINE.match(self._text, at)
        end = line.end() if line else at
        self.check_space(end)
        # Only the parser in Python takes a tab where the first line shows how far the text is indented.
        # A digit in the header says that instead.
        counted = header is not None and header[0].strip("|>+-")
        blank = _BLANK.match(self._text, end)
        if not counted and blank is not None and self._text.startswith("\t", blank.end()):
            raise tab_fault(blank.end())

    def _check_plain(self, at: int, end: int, in_flow: bool) -> None:
        # Only the parser in C takes a tab between two words of a plain text.
        tab = self._text.find("\t", at, end)
        if tab >= 0:
            raise tab_fault(tab)
        # Between brackets it is an indicator to the parser in Python, wherever it stands.
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
