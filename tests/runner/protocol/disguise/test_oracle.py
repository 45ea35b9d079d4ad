"""The search compared with a slow and obvious one, and each notation of docs/report.md tried at random."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from functools import reduce
from urllib.parse import quote, quote_plus

from hypothesis import example, given
from hypothesis import strategies as st

from runner.protocol.disguise.needles import CUT, SHORTEST_BEGINNING, Needles
from runner.protocol.secrets import Secrets

# --- where needles stand ------------------------------------------------------------------------------------

ALPHABET = bytes.maketrans(b"-_", b"+/")
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def places(text: bytes, needle: bytes, ends: list[int]) -> Iterator[range]:
    """Of all of a needle, and of its beginning before each of the ends."""
    for at in range(len(text)):
        if text.startswith(needle, at):
            yield range(at, at + len(needle))
    for end in ends:
        for length in range(SHORTEST_BEGINNING, min(len(needle), end + 1)):
            if text[end - length : end] == needle[:length]:
                yield range(end - length, end)


def ends_of(text: bytes, at_end: bool) -> list[int]:
    cuts = [at for at in range(len(text)) if text.startswith(CUT, at)]
    return [*cuts, len(text)] if at_end else cuts


def must_be_found(text: bytes, texts: set[bytes], encoded: set[bytes], at_end: bool) -> set[int]:
    ends, plain = ends_of(text, at_end), text.translate(ALPHABET)
    found = [each for needle in texts for each in places(text, needle, ends)]
    found += [each for needle in encoded for each in places(plain, needle, ends)]
    return {at for each in found for at in each}


def may_be_found(text: bytes, needles: set[bytes], at_end: bool) -> set[int]:
    """As base64, with a letter on each side and the padding behind it."""
    plain = text.translate(ALPHABET)
    found: set[int] = set()
    for needle in needles:
        for each in places(plain, needle.translate(ALPHABET), ends_of(text, at_end)):
            start, end = each.start, each.stop
            start -= start > 0 and plain[start - 1] in LETTERS
            end += end < len(plain) and plain[end] in LETTERS
            end += len(plain[end : end + 2]) - len(plain[end : end + 2].lstrip(b"="))
            found |= set(range(start, end))
    return found


NEEDLES = st.lists(
    st.binary(min_size=8, max_size=13).map(lambda raw: bytes(b"ab+-\xe2\x80"[x % 6] for x in raw))
)
ENCODED = st.lists(st.binary(min_size=8, max_size=13).map(lambda raw: bytes(b"ab+/"[x % 4] for x in raw)))


def test_a_merged_span_begins_with_the_letter_before_a_base64_needle() -> None:
    assert Needles([b"abcdefghi"], [b"abcdefgh"]).find(b"Xabcdefghi") == [(0, 10)]


@given(st.data(), NEEDLES, ENCODED, st.booleans())
def test_needles_stand_where_a_slow_search_finds_them(
    data: st.DataObject, texts: list[bytes], encoded: list[bytes], at_end: bool
) -> None:
    whole = [*texts, *encoded, *(text + CUT + b"ab" for text in texts[:1])]
    pieces = st.sampled_from([*whole, CUT, b"a", b"+", b"_", b"=", b" ", b"\xff"]) | st.sampled_from(
        [piece[:length] for piece in whole for length in (4, 7, 9)] or [b"ab"]
    )
    text = b"".join(data.draw(st.lists(pieces, max_size=8)))
    needles = Needles(texts, encoded)
    found = {at for span in needles.find(text, at_end=at_end) for at in range(*span)}
    assert must_be_found(text, set(texts), set(encoded), at_end) <= found
    assert found <= may_be_found(text, {*texts, *encoded}, at_end)


# --- however it is written ----------------------------------------------------------------------------------


def all_percent(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode())


def all_escaped(text: str) -> str:
    return "".join(f"\\u{ord(each):04x}" for each in text)


Write = Callable[[str], str]
# What depends on the secret alone of each is the whole, or all but a letter at each end.
INNER: dict[str, Write] = {
    "as it is": str,
    "base64": lambda text: base64.b64encode(text.encode()).decode().rstrip("="),
    "base64 of URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "base64 at 1": lambda text: base64.b64encode(b"." + text.encode()).decode().rstrip("=")[2:],
    "base64 at 2": lambda text: base64.b64encode(b".." + text.encode()).decode().rstrip("=")[3:],
    "hex": lambda text: text.encode().hex(),
    "hex in upper case": lambda text: text.encode().hex().upper(),
    "hex with colons": lambda text: text.encode().hex(":"),
    "hex with dashes": lambda text: text.encode().hex("-", 2),
    "hex with spaces": lambda text: text.encode().hex(" "),
}
OUTER: dict[str, Write] = {
    "JSON": lambda text: json.dumps(text)[1:-1],
    "JSON in UTF-8": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "Python": lambda text: repr(text)[1:-1],
    "Python in ASCII": lambda text: ascii(text)[1:-1],
    "escapes": all_escaped,
    "percent signs": quote,
    "percent signs for all": all_percent,
}
TEXTS = st.text("abcXYZ0189+/=-_.:äß€'\"", min_size=12, max_size=40)


@given(
    TEXTS,
    st.just("as it is") | st.sampled_from([*INNER]),
    st.lists(st.sampled_from([*OUTER]), max_size=2),
    st.integers(0, 80),
)
@example("a secret of mine", "as it is", [], 0)
@example("ein größeres Geheimnis", "as it is", ["Python in ASCII"], 0)
def test_a_secret_is_hidden_however_it_is_written(
    text: str, inner: str, outer: list[str], width: int
) -> None:
    written = reduce(lambda done, name: OUTER[name](done), outer, INNER[inner](text))
    if width > 3:
        written = "\n".join(written[at : at + width] for at in range(0, len(written), width))
    for shown in (
        Secrets({"a": text}).hide(f"<{written}>"),
        Secrets({"a": text.encode()}).hide_in_bytes(f"<{written}>".encode()).decode(),
        Secrets({"a": [text]}).hide_in({"x": f"<{written}>"})["x"],
    ):
        assert shown == "<[secret]>", written


@given(TEXTS)
def test_a_secret_in_a_query_of_a_url(text: str) -> None:
    spaced = f"{text} {text}"
    assert Secrets({"a": spaced}).hide(f"<{quote_plus(spaced)}>") == "<[secret]>"


@given(TEXTS, st.sampled_from([*INNER]), st.integers(8, 30))
def test_a_secret_that_breaks_off_is_hidden(text: str, inner: str, length: int) -> None:
    written = INNER[inner](text)[:length].rstrip(":- ")
    secrets = Secrets({"a": text})
    assert secrets.hide(f"<{written}…>") == "<[secret]…>"
    assert secrets.hide_in_tail(f"<{written}".encode(), cut=False) == b"<[secret]"


@given(TEXTS, st.text("abcXYZ0189+/=-_.:äß€'\"%\\\n", max_size=60))
def test_what_has_nothing_of_a_secret_stays(secret: str, text: str) -> None:
    secrets = Secrets({"a": f"##{secret}##"})
    assert secrets.hide(text) == text
