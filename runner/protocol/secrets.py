"""The operator's secrets for one plugin, and how they are kept out of everything that is shown or kept.

A plugin has its secrets and may repeat them: in an error, in a notice, on its stderr. There the texts of the
secrets are replaced. That catches honest plugins; a plugin that wants to betray a secret can encode it in
ways that nobody foresees.

A text is replaced before it is cut or escaped. A text that somebody else has escaped is recognised as JSON,
as Python prints it, and as our own messages show it; in base64, also in the middle of a longer text; in hex;
and with percent signs, whichever of its characters are written so. Each of them may be broken into lines.

What a plugin writes to the stderr of `runner exec` goes to the caller's own stderr as it is. Only the end of
it that a report keeps is ours, and has no secrets.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sandbox.document.diagnostic import printable

# Characters. A shorter text is not replaced: it would be found in words that are no secret.
SHORTEST = 8
# Characters of the beginning of a secret that are replaced at the end of a text that was cut off there.
_SHORTEST_BEGINNING = 4

MARK = "[secret]"  # not longer than the shortest text it replaces
_MARK = MARK.encode()

_MOST_COMPARISONS = 1000  # with the beginning of one secret

_LINE_END = re.compile(rb"\r?\n")
_PERCENT = re.compile(rb"%([0-9A-Fa-f]{2})")
_LETTER = rb"[A-Za-z0-9+/_-]"  # of base64


class Secrets(Mapping[str, Any]):
    """JSON by name, or bytes. Its text, in a traceback or a log, shows none of them."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})
        texts, pieces = set[bytes](), set[bytes]()
        for value in self._values.values():
            _collect(value, texts, pieces)
        for piece in pieces:
            texts.update((piece, piece.hex().encode(), piece.hex().upper().encode()))
        # The longest first, here and below: one secret may be a part of another.
        self._texts = sorted(texts, key=len, reverse=True)
        self._base64 = sorted(
            {found.text: found for piece in pieces for found in _base64_of(piece)}.values(),
            key=lambda found: len(found.text),
            reverse=True,
        )
        spaced = {piece.replace(b" ", b"+") for piece in pieces}  # as in a query of a URL
        self._pieces = sorted(pieces | spaced, key=len, reverse=True)
        longest = max(
            *(len(text) for text in self._texts[:1]),
            *(len(found.text) + 4 for found in self._base64[:1]),  # with a letter before it, and padding
            *(3 * len(piece) for piece in self._pieces[:1]),  # with percent signs
            *(0, 0),
        )
        self._longest = longest + longest // 16  # with line ends

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<{len(self)} secrets>"

    @property
    def longest(self) -> int:
        """Bytes of the longest text that is replaced."""
        return self._longest

    def hide(self, text: str) -> str:
        if not self._texts:
            return text
        return _decode(self.hide_in_bytes(text.encode("utf-8", "surrogatepass")))

    def hide_in_bytes(self, data: bytes) -> bytes:
        for text in self._texts:
            data = data.replace(text, _MARK)
        for found in self._base64:
            if found.text in data:
                data = found.pattern.sub(_MARK, data)
        if self._pieces and (b"%" in data or b"+" in data):
            data = _hide_written_otherwise(data, _PERCENT, _percent_meant, self._pieces)
        if self._texts and b"\n" in data.strip(b"\r\n"):
            texts = [*self._texts, *(found.text for found in self._base64)]
            data = _hide_written_otherwise(data, _LINE_END, lambda _: b"", texts)
        return data

    def hide_in_tail(self, data: bytes, *, cut: bool) -> bytes:
        """The same for the end of a longer text. `cut`: something stood before it, perhaps the beginning of a
        secret; as many bytes as the longest one has are left out then. What the text breaks off in is hidden
        too: its writer may have been ended there."""
        if not self._texts:
            return data
        data = self._hide_beginning(self.hide_in_bytes(data))
        return data[self.longest :] if cut else data

    def hide_in(self, value: Any) -> Any:
        """The same for JSON, with its keys."""
        if not self._texts:
            return value
        if isinstance(value, str):
            return self.hide(value)
        # All texts at once: one by one, each would be searched for every secret. No text can contain the
        # mark between them, since nobody knows it.
        between = f"\0{os.urandom(16).hex()}\0"
        texts = list(_texts_of(value))
        hidden = self.hide(between.join(texts)).split(between)
        return _rebuilt(value, zip(texts, hidden, strict=True))

    def _hide_beginning(self, data: bytes) -> bytes:
        """Replace the beginning of a secret with which the text ends."""
        texts = (*self._texts, *(found.text for found in self._base64))
        most = max((_length_of_beginning(data, text) for text in texts), default=0)
        return data[:-most] + _MARK if most else data


def _length_of_beginning(data: bytes, text: bytes) -> int:
    """How many bytes at the end of `data` are the beginning of `text`."""
    head = text[:_SHORTEST_BEGINNING]
    first = at = data.find(head, max(0, len(data) - len(text)))
    for _ in range(_MOST_COMPARISONS):
        if at < 0 or text.startswith(data[at:]):
            return len(data) - at if at >= 0 else 0
        at = data.find(head, at + 1)
    return len(data) - first  # too many places to look at: nothing is shown from the first on


def _hide_written_otherwise(
    data: bytes, notation: re.Pattern[bytes], meant: Callable[[re.Match[bytes]], bytes], texts: list[bytes]
) -> bytes:
    """Replace texts that are written in another notation. They are searched for in what is meant, which is
    shorter, and replaced in what is written."""
    places: list[int] = []  # in what is meant: where something shorter stands for what is written
    saved = [0]  # bytes before each place, and before the end

    def undo(match: re.Match[bytes]) -> bytes:
        short = meant(match)
        places.append(match.start() - saved[-1])
        saved.append(saved[-1] + len(match[0]) - len(short))
        return short

    plain = notation.sub(undo, data)
    spans: list[tuple[int, int]] = []
    for text in texts:
        at = plain.find(text)
        while at >= 0:
            spans.append((at, at + len(text)))
            at = plain.find(text, at + len(text))
    parts, done = [], 0
    for start, end in sorted(spans):
        begin = start + saved[bisect_left(places, start)]
        if begin >= done:
            parts += [data[done:begin], _MARK]
        done = max(done, end + saved[bisect_left(places, end)])
    return b"".join((*parts, data[done:])) if parts else data


def _percent_meant(match: re.Match[bytes]) -> bytes:
    return bytes((int(match[1], 16),))


class _Base64:
    """What of a text in base64 depends on the secret alone. `pattern` also covers the letter before and after
    it that depends on the secret in part, and the padding."""

    def __init__(self, text: bytes, before: bool, after: bool) -> None:
        self.text = text
        parts = (_LETTER + b"?" if before else b"", re.escape(text), _LETTER + b"?" if after else b"")
        self._source = b"".join((*parts, b"={0,2}"))
        self._compiled: re.Pattern[bytes] | None = None

    @property
    def pattern(self) -> re.Pattern[bytes]:
        """Compiled when it is found: most secrets are never seen."""
        self._compiled = self._compiled or re.compile(self._source)
        return self._compiled


def _base64_of(piece: bytes) -> Iterator[_Base64]:
    """The secret may begin at any of three places in a group of four letters."""
    for offset in range(3):
        first, bits = -(-8 * offset // 6), 8 * (offset + len(piece))
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield _Base64(encode(bytes(offset) + piece)[first : bits // 6], offset > 0, bits % 6 > 0)


# --- the texts of a secret ----------------------------------------------------------------------------------


def _collect(value: Any, texts: set[bytes], pieces: set[bytes]) -> None:
    """`texts`: to be replaced as they are. `pieces`: also in other encodings."""
    if isinstance(value, bytes):
        if len(value.strip()) >= SHORTEST:
            pieces.add(value.strip())
            texts.add(repr(value.strip())[2:-1].encode())
        with contextlib.suppress(UnicodeDecodeError):
            value = value.decode()
    if isinstance(value, str):
        # A key of several lines may be printed line by line, and any text as a string of JSON.
        for text in (value, *value.splitlines()):
            if len(text.strip()) >= SHORTEST:
                pieces.add(text.strip().encode("utf-8", "surrogatepass"))
                texts.update(form.encode("utf-8", "surrogatepass") for form in _forms_of(text.strip()))
    elif isinstance(value, Mapping):
        for each in value.values():
            _collect(each, texts, pieces)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, texts, pieces)
    elif isinstance(value, int | float):
        texts.update(text.encode() for text in _number_texts(value) if len(text) >= SHORTEST)


def _forms_of(text: str) -> Iterator[str]:
    """The text as it is, and as it looks after somebody has escaped it."""
    yield text
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield printable(text)
    for shown in (repr(text), ascii(text), repr(text.encode("utf-8", "replace"))[1:]):
        yield shown[1:-1]
        # As a part of a text that has both kinds of quotes.
        yield shown[1:-1] if shown[0] == "'" else shown[1:-1].replace("'", "\\'")


def _number_texts(value: Any) -> Iterator[str]:
    """A number as JSON; and without its fraction, if that is zero: other languages print none."""
    if isinstance(value, bool):
        return
    with contextlib.suppress(ValueError):  # an integer of more digits than Python converts: it is not sent
        yield json.dumps(value)
    if isinstance(value, float) and value.is_integer():
        yield str(int(value))


# --- the texts of a value -----------------------------------------------------------------------------------


def _texts_of(value: Any) -> Iterator[str]:
    """In the order in which `_rebuilt` takes them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts_of(key)
            yield from _texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_of(each)
    elif isinstance(value, int | float):
        yield from _number_texts(value)


def _rebuilt(value: Any, texts: Iterator[tuple[str, str]]) -> Any:
    """The value with each text replaced: pairs of what it was and what is shown."""
    if isinstance(value, str):
        return next(texts)[1]
    if isinstance(value, Mapping):
        return {_rebuilt(key, texts): _rebuilt(each, texts) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rebuilt(each, texts) for each in value]
    if isinstance(value, int | float):
        shown = [next(texts) for _ in _number_texts(value)]
        return MARK if any(before != after for before, after in shown) else value
    return value


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # a secret that is no text was found in the middle of a character
        return data.decode("utf-8", "replace")
