"""The operator's secrets for one plugin, and how they are kept out of everything that is shown or kept.

A plugin has its secrets and may repeat them: in an error, in a notice, on its stderr. There the texts of the
secrets are replaced. That catches honest plugins; a plugin that wants to betray a secret can encode it.

A text is replaced before it is cut or escaped. A text that somebody else has escaped is recognised as JSON,
as Python prints it, and as our own messages show it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from sandbox.document.diagnostic import printable

# Characters. A shorter text is not replaced: it would be found in words that are no secret.
SHORTEST = 8

MARK = "[secret]"  # not longer than the shortest text it replaces


class Secrets(Mapping[str, Any]):
    """JSON by name. Its text, in a traceback or a log, shows none of them."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})
        # The longest first: one secret may be a part of another.
        self._texts = sorted(set(_texts_in(self._values)), key=len, reverse=True)
        self._raw = [text.encode("utf-8", "replace") for text in self._texts]

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
        return max(map(len, self._raw), default=0)

    def hide(self, text: str) -> str:
        for secret in self._texts:
            text = text.replace(secret, MARK)
        return text

    def hide_in_bytes(self, data: bytes) -> bytes:
        for secret in self._raw:
            data = data.replace(secret, MARK.encode())
        return data

    def hide_in(self, value: Any) -> Any:
        """The same for JSON, with its keys."""
        if not self._texts:
            return value
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {self.hide_in(key): self.hide_in(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide_in(each) for each in value]
        if isinstance(value, int | float) and any(self.hide(text) != text for text in _number_texts(value)):
            return MARK
        return value


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        # A key of several lines may be printed line by line, and any text as a string of JSON.
        for text in (value, *value.splitlines()):
            if len(text.strip()) >= SHORTEST:
                yield from _forms_of(text.strip())
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each)
    elif isinstance(value, int | float):
        yield from (text for text in _number_texts(value) if len(text) >= SHORTEST)


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
