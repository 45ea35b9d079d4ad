"""Edit a text in place: comments, formatting, line ends and all other values stay as they are.

Each change becomes a few splices of the text. The result is parsed again. If it is not exactly the data that
was wanted, the edit is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sandbox.document.diagnostic import quoted
from sandbox.document.edit import json_spans, toml_spans, yaml_spans
from sandbox.document.edit.change import (
    Change,
    DeleteKey,
    DropFirst,
    InsertList,
    Prepend,
    RenameKeys,
    SetNull,
    SetWord,
    SwapEntries,
    apply_changes,
    same,
)
from sandbox.document.edit.span import EditRefused, EditSyntax, Span, Spans, children
from sandbox.document.edit.words import encode_word
from sandbox.document.positions import line_column
from sandbox.spec import KeyPath

_MARK = "\ufeff"  # a byte order mark, which some editors write
_READERS = {
    "json": json_spans.read,
    "jsonc": json_spans.read,
    "toml": toml_spans.read,
    "yaml": yaml_spans.read,
}
_SEPARATOR = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
_BLANK = re.compile(r"[ \t\r\n]*")
_DASH = re.compile(r"-[ ]+\Z")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _is_plain_name(text: str) -> bool:
    """Whether it can be part of a key in every syntax, with or without quotes."""
    return _PLAIN_NAME.fullmatch(text) is not None


class Splice(NamedTuple):
    start: int
    end: int
    text: str


def read_spans(text: str, syntax: EditSyntax) -> tuple[object, Spans]:
    """The data, and the span of each value. Raises EditRefused."""
    return _READERS[syntax](text)


def edit_text(text: str, syntax: EditSyntax, changes: Sequence[Change]) -> str:
    """Make the changes, and return the new text. Raises EditRefused, whose message names the line."""
    mark = _MARK if text.startswith(_MARK) else ""
    body = text[len(mark) :]
    try:
        data, spans = read_spans(body, syntax)
        editor = _Editor(body, syntax, spans)
        splices = [splice for change in changes for splice in editor.splices(change)]
        data = apply_changes(data, changes)
        result = _apply_splices(body, splices)
    except EditRefused as refused:
        line, _ = line_column(body, refused.offset)
        raise EditRefused(f"line {line}: {refused.message}", refused.offset) from None
    try:
        found, _ = read_spans(result, syntax)
    except EditRefused:
        found = None
    if not same(found, data):
        raise EditRefused("the change would alter more than the command and its arguments")
    return mark + result


def _apply_splices(text: str, splices: Sequence[Splice]) -> str:
    ordered = sorted(splices, key=lambda splice: splice.start)
    parts, at = [], 0
    for splice in ordered:
        if splice.start < at:
            raise EditRefused("two changes touch the same place", splice.start)
        parts += [text[at : splice.start], splice.text]
        at = splice.end
    return "".join((*parts, text[at:]))


class _Editor:
    def __init__(self, text: str, syntax: EditSyntax, spans: Spans) -> None:
        self.text, self.syntax, self.spans = text, syntax, spans
        self._children = children(spans)

    def splices(self, change: Change) -> list[Splice]:
        match change:
            case SetWord(keys, word, as_written):
                span = self._span(keys, "scalar")
                return [Splice(span.start, span.end, as_written or encode_word(word, self.syntax))]
            case SetNull(keys):
                span = self._span(keys, "list")
                return [Splice(span.start, span.end, "null")]
            case Prepend(keys, words, before):
                return [self._prepend(keys, words, before)]
            case DropFirst(keys, count):
                return [self._drop_first(keys, count)]
            case InsertList(after, key, words):
                return [self._insert_list(after, key, words)]
            case DeleteKey(keys):
                return [self._delete_key(keys)]
            case RenameKeys(keys, names):
                return self._rename_keys(keys, names)
            case SwapEntries(keys, old, new):
                return self._swap_entries(keys, old, [(name, text) for name, text, _ in new])

    def _span(self, keys: KeyPath, kind: str) -> Span:
        """The span of a value to change. Raises EditRefused for a value inside an alias, which has no text of
        its own."""
        self._check_own(keys)
        span = self.spans.get(keys)
        if span is None:
            raise EditRefused("a value to be changed is not there")
        if span.obstacle:
            raise EditRefused(f"this cannot be edited in place: {span.obstacle}", span.start)
        if span.kind != kind:
            raise EditRefused(f"a {kind} is needed here", span.start)
        return span

    def _check_own(self, keys: KeyPath) -> None:
        for length in range(1, len(keys) + 1):
            around = self.spans.get(keys[:length])
            if around is not None and around.obstacle == "it is an alias":
                raise EditRefused(f"this cannot be edited in place: {around.obstacle}", around.start)

    # --- lists -----------------------------------------------------------------------------------------

    def _prepend(self, keys: KeyPath, words: Sequence[str], before: int) -> Splice:
        texts = [encode_word(word, self.syntax) for word in words]
        span = self.spans.get(keys)
        if span is not None and self.text[span.start : span.end] == "null" and self.syntax != "yaml":
            return Splice(span.start, span.end, f"[{', '.join(texts)}]")
        span = self._span(keys, "list")
        items = self._children.get(keys, [])
        if not items:
            return Splice(span.start + 1, span.start + 1, ", ".join(texts))
        self._check_plain(items)
        if before >= len(items):
            raise EditRefused("this list has too few items", span.start)
        if span.block:
            first = self._dash(self.spans[items[before]])
            line = self._line_start(first)
            indent = self.text[line:first]
            if indent.strip(" "):
                raise EditRefused("this list cannot be edited in place: it starts behind other text", first)
            lines = "".join(f"- {text}{self._newline(first)}{indent}" for text in texts)
            return Splice(first, first, lines)
        first = self.spans[items[before]].start
        separator = self._separator(span, items)
        return Splice(first, first, "".join(text + separator for text in texts))

    def _separator(self, span: Span, items: Sequence[KeyPath]) -> str:
        """The text between two items of this list."""
        if len(items) > 1:
            between = self.text[self.spans[items[0]].end : self.spans[items[1]].start]
            if _SEPARATOR.fullmatch(between):
                return between
        gap = self.text[span.start + 1 : self.spans[items[0]].start]
        if "\n" in gap:
            first = self.spans[items[0]].start
            line = self._line_start(first)
            if not self.text[line:first].strip(" \t"):
                return f",{self._newline(first)}{self.text[line:first]}"
        return ", "

    def _drop_first(self, keys: KeyPath, count: int) -> Splice:
        span = self._span(keys, "list")
        items = self._children.get(keys, [])
        if count > len(items):
            raise EditRefused("this list has too few items", span.start)
        self._check_plain(items[:count])
        gone, kept = items[:count], items[count:]
        first = self.spans[gone[0]].start
        if span.block:
            first = self._dash(self.spans[gone[0]])
            if not kept:
                return Splice(first, span.end, "[]")
            return Splice(first, self._dash(self.spans[kept[0]]), "")
        last = self.spans[gone[-1]].end
        if kept:
            start = self.spans[kept[0]].start
            if _SEPARATOR.fullmatch(self.text[last:start]):
                return Splice(first, start, "")
            comma = self._comma(last, start)  # a comment between them stays
            return Splice(first, comma + 1, "")
        # No item is left. `_prepend` writes into an empty list directly after its bracket.
        rest = self.text[last : span.end - 1]
        if first == span.start + 1 and "," not in rest:
            return Splice(first, last, "")
        if re.fullmatch(r"[\s,]*", self.text[span.start + 1 : first] + rest):
            return Splice(span.start, span.end, "[]")
        comma = self._comma(last, span.end - 1)
        return Splice(first, comma + 1 if comma < span.end - 1 else last, "")

    def _comma(self, start: int, end: int) -> int:
        """The offset of the comma between two values, outside of comments; `end` if there is none."""
        at = start
        while at < end and self.text[at] != ",":
            if self.text.startswith("//", at) or self.text[at] == "#":
                at = self.text.find("\n", at, end)
                if at < 0:
                    return end
            elif self.text.startswith("/*", at):
                at = self.text.find("*/", at, end) + 1
            at += 1
        return at

    def _check_plain(self, items: Sequence[KeyPath]) -> None:
        for keys in items:
            span = self.spans[keys]
            if span.obstacle and "lines" not in span.obstacle:
                raise EditRefused(f"this cannot be edited in place: {span.obstacle}", span.start)

    # --- keys ------------------------------------------------------------------------------------------

    def _insert_list(self, after: KeyPath, key: str, words: Sequence[str]) -> Splice:
        span = self._span(after, "scalar")
        around = self.spans.get(after[:-1])
        items = f"[{', '.join(encode_word(word, self.syntax) for word in words)}]"
        own_lines = self.syntax in ("toml", "yaml") and (around is None or around.block)
        if not own_lines:
            if self.syntax in ("json", "jsonc"):
                return Splice(
                    span.end,
                    span.end,
                    f",{self._line_break_before(span)}{encode_word(key, self.syntax)}: {items}",
                )
            return Splice(span.end, span.end, f", {key}{' = ' if self.syntax == 'toml' else ': '}{items}")
        start = self._line_start(span.key_start)
        before = self.text[start : span.key_start]
        if self.syntax == "toml":
            # A dotted key keeps its prefix: `server.args` comes after `server.command`.
            line = f"{before}{self._key_prefix(span)}{key} = {items}"
        else:
            line = f"{' ' * len(before)}{key}: {items}"
        end = self.text.find("\n", span.end)
        newline = self._newline(span.end)
        if end < 0:
            return Splice(len(self.text), len(self.text), newline + line)
        return Splice(end + 1, end + 1, line + newline)

    def _rename_keys(self, keys: KeyPath, names: Sequence[tuple[str, str]]) -> list[Splice]:
        self._check_own(keys)
        renamed = {old for old, _ in names}
        taken = {each[-1] for each in self._children.get(keys, [])} - renamed
        splices: list[Splice] = []
        for old, new in names:
            span = self.spans.get((*keys, old))
            if span is None:
                raise EditRefused("a key to be changed is not there")
            if new in taken:
                raise EditRefused(f"there is {quoted(new)} already; remove one of them", span.key_start)
            taken.add(new)
            splices.append(self._rename_key(span, old, new))
        return splices

    def _rename_key(self, span: Span, old: str, new: str) -> Splice:
        """If a prefix is added or removed, the spelling of the rest of the key stays."""
        start, end = span.key_start, span.key_end
        if self.syntax == "toml":
            start += len(self._key_prefix(span))
        word = self.text[start:end]
        quote = word[:1] if word[:1] in ("'", '"') else ""
        if not quote and word != old:  # there is an anchor or a tag before it
            raise EditRefused("this key cannot be edited in place", start)
        start += len(quote)
        if new.endswith(old) and _is_plain_name(new.removesuffix(old)):
            return Splice(start, start, new.removesuffix(old))
        gone = old.removesuffix(new)
        if old.endswith(new) and self.text.startswith(gone, start) and (quote or self._is_key(new)):
            return Splice(start, start + len(gone), "")
        return Splice(start - len(quote), end, encode_word(new, self.syntax))

    def _is_key(self, word: str) -> bool:
        """Whether this can be a key without quotes."""
        text = f"{{{word}: 1}}" if self.syntax == "yaml" else f"{word} = 1"
        try:
            return same(read_spans(text, self.syntax)[0], {word: 1})
        except EditRefused:
            return False

    def _swap_entries(
        self, keys: KeyPath, old: Sequence[str], new: Sequence[tuple[str, str]]
    ) -> list[Splice]:
        siblings = self._children.get(keys, [])
        gone = [each for each in siblings if each[-1] in old]
        if self.syntax not in ("json", "jsonc") or not gone or len(gone) != len(old):
            raise EditRefused("entries to be changed are not there")
        for name, _ in new:
            if (*keys, name) in siblings and name not in old:
                taken = self.spans[(*keys, name)].key_start
                raise EditRefused(f"there is {quoted(name)} already; rename one of them", taken)
        first = self.spans[gone[0]]
        separator = f",{self._line_break_before(first)}"
        texts = [f"{encode_word(name, self.syntax)}: {text}" for name, text in new]
        splices = [Splice(first.key_start, first.end, separator.join(texts))]
        for each in gone[1:]:
            before, span = self.spans[siblings[siblings.index(each) - 1]].end, self.spans[each]
            if _SEPARATOR.fullmatch(self.text[before : span.key_start]):
                splices.append(Splice(before, span.end, ""))
                continue
            comma = self._comma(before, span.key_start)  # a comment between them stays
            splices += [Splice(comma, comma + 1, ""), Splice(span.key_start, span.end, "")]
        return splices

    def _line_break_before(self, span: Span) -> str:
        """The line break and indentation before a key on a line of its own, else a space."""
        line = self._line_start(span.key_start)
        indent = self.text[line : span.key_start]
        return self._newline(span.key_start) + indent if line and not indent.strip(" \t") else " "

    def _key_prefix(self, span: Span) -> str:
        written_key = self.text[span.key_start : span.key_end]
        last = re.search(r"(?:[A-Za-z0-9_-]+|\"(?:[^\"\\]|\\.)*\"|'[^']*')\Z", written_key)
        return written_key[: last.start()] if last else ""

    def _delete_key(self, keys: KeyPath) -> Splice:
        span = self.spans.get(keys)
        if span is None:
            raise EditRefused("a value to be changed is not there")
        if span.obstacle:
            raise EditRefused(f"this cannot be edited in place: {span.obstacle}", span.start)
        around = self.spans.get(keys[:-1])
        if self.syntax in ("toml", "yaml") and (around is None or around.block):
            return self._delete_lines(span)
        siblings = self._children.get(keys[:-1], [])
        number = siblings.index(keys)
        if number:
            before = self.spans[siblings[number - 1]].end
            if _SEPARATOR.fullmatch(self.text[before : span.key_start]):
                return Splice(before, span.end, "")
        if number + 1 < len(siblings):
            following = self.spans[siblings[number + 1]].key_start
            if _SEPARATOR.fullmatch(self.text[span.end : following]):
                return Splice(span.key_start, following, "")
            return Splice(span.key_start, self._comma(span.end, following) + 1, "")
        if number:
            raise EditRefused("a comment stands before this key; remove the key by hand", span.key_start)
        return Splice(span.key_start, span.end, "")

    def _delete_lines(self, span: Span) -> Splice:
        start = self._line_start(span.key_start)
        end = self.text.find("\n", span.end)
        rest = self.text[span.end : end if end >= 0 else len(self.text)]
        if self.text[start : span.key_start].strip(" \t") or rest.strip(" \t\r"):
            raise EditRefused("this key shares its lines; remove it by hand", span.key_start)
        if end >= 0:
            return Splice(start, end + 1, "")
        # The last line has no line end, so the line before it must lose its own.
        start -= 2 if self.text.startswith("\r\n", start - 2) else 1 if start else 0
        return Splice(max(start, 0), len(self.text), "")

    # --- lines -----------------------------------------------------------------------------------------

    def _line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def _newline(self, at: int) -> str:
        """The line end that the text uses near `at`."""
        end = self.text.find("\n", at)
        if end < 0:
            end = self.text.rfind("\n", 0, at)
        return "\r\n" if end > 0 and self.text[end - 1] == "\r" else "\n"

    def _dash(self, span: Span) -> int:
        line = self._line_start(span.start)
        found = _DASH.search(self.text, line, span.start)
        if found is None:
            raise EditRefused("this item stands on another line than its dash", span.start)
        return found.start()
