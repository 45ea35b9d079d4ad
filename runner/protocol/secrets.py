"""The operator's secrets for one plugin, and how they are hidden in everything that is shown or stored.

A plugin has its secrets and may repeat them: in an error, in a notice, on its stderr. There the texts of the
secrets are replaced. That catches honest plugins; a plugin that wants to betray a secret can encode it in
ways that are not recognised.

A text that was escaped is recognised as JSON, as Python prints it, and as our own messages show it; in
base64, also in the middle of a longer text; in hex; and with percent signs, whichever of its characters are
written so. Each of them may be broken into lines, and escaped again. A text that was cut ends with "…"
(`cut` in sandbox/document/diagnostic.py), and the beginning of a secret before that is recognised too. So a
message may be made first, and hidden as a whole. runner/protocol/disguise/ has the rules.

The work for a text grows with its length alone. A plugin cannot make it grow with what it writes, nor an
operator with the number of secrets.

What a plugin writes to the stderr of `runner exec` goes to the caller's own stderr as it is. Only the end of
it that a report keeps is ours, and has no secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.protocol.disguise.finder import SecretFinder
    from runner.protocol.disguise.needles import Span

MARK = "[secret]"  # not longer than the shortest text it replaces
_MARK = MARK.encode()
_TEXT = re.compile(rb"[^\xff]+")  # what is not BETWEEN


class Secrets(Mapping[str, Any]):
    """Secrets by name, each JSON or bytes. Its repr shows no values, so tracebacks and logs do not either."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})
        # None: there are no secrets, as for most plugins. Those do not pay for the rules about disguises.
        self._finder: SecretFinder | None = None
        if isinstance(values, Secrets):
            self._finder = values._finder  # shared: building it is slow
        elif self._values:
            from runner.protocol.disguise.finder import SecretFinder

            self._finder = SecretFinder(self._values)

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
        """Bytes that have to be searched together to find any secret. Longer secrets are found in parts."""
        return 0 if self._finder is None else self._finder.longest

    def hide(self, text: str) -> str:
        if self._finder is None:
            return text
        return _decode(self.hide_in_bytes(text.encode("utf-8", "surrogatepass")))

    def hide_in_bytes(self, data: bytes) -> bytes:
        return data if self._finder is None else _replace_spans(data, self._finder.find(data))

    def hide_in_tail(self, data: bytes, *, cut: bool) -> bytes:
        """Hide secrets in the end of a longer text. `cut`: text before it is missing, perhaps the beginning
        of a secret, so `longest` bytes are left out at the start. A secret that breaks off at the end is
        hidden too: its writer may have been killed there."""
        if self._finder is None:
            return data
        data = _replace_spans(data, self._finder.find(data, at_end=True))
        return data[self.longest :] if cut else data

    def hide_in(self, value: Any) -> Any:
        """Hide secrets in JSON, keys included."""
        if self._finder is None:
            return value
        if isinstance(value, str):
            return self.hide(value)
        from runner.protocol.disguise.needles import BETWEEN, WINDOW

        # All different texts at once: a search has a cost of its own. A text that is too short has no secret.
        texts = [
            text for text in dict.fromkeys(_texts_of(value)) if len(text) >= WINDOW or not text.isascii()
        ]
        data = BETWEEN.join(text.encode("utf-8", "surrogatepass") for text in texts)
        spans = [part.span() for span in self._finder.find(data) for part in _TEXT.finditer(data, *span)]
        if not spans:
            return value
        hidden = map(_decode, _replace_spans(data, spans).split(BETWEEN))
        return _rebuild(value, dict(zip(texts, hidden, strict=True)))


def _replace_spans(data: bytes, spans: list[Span]) -> bytes:
    parts: list[bytes] = []
    done = 0
    for start, end in sorted(spans):
        if start > done or not parts:
            parts += [data[done:start], _MARK]
        done = max(done, end)
    return b"".join((*parts, data[done:])) if parts else data


# --- the texts of a value -----------------------------------------------------------------------------------


def _texts_of(value: Any) -> Iterator[str]:
    from runner.protocol.disguise.forms import number_texts

    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left.extend(each)
            left.extend(each.values())
        elif isinstance(each, list | tuple):
            left.extend(each)
        elif isinstance(each, int | float) and not isinstance(each, bool):
            yield from number_texts(each)


def _rebuild(value: Any, shown: Mapping[str, str]) -> Any:
    """The value with each text replaced by its entry in `shown`."""
    if isinstance(value, str):
        return shown.get(value, value)
    if isinstance(value, Mapping):
        return {_rebuild(key, shown): _rebuild(each, shown) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rebuild(each, shown) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        from runner.protocol.disguise.forms import number_texts

        return MARK if any(shown.get(text, text) != text for text in number_texts(value)) else value
    return value


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # a secret that is no text was found in the middle of a character
        return data.decode("utf-8", "replace")
