"""The operator's secrets, hidden in what a plugin repeats."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus, unquote_plus

import pytest

from runner.protocol.dialect import Setting
from runner.protocol.disguise import needles as needles_module
from runner.protocol.disguise.finder import SecretFinder
from runner.protocol.disguise.forms import MOST_LINES
from runner.protocol.secrets import Secrets
from runner.session.record import SessionRecord
from tests.runner.contracts.kaged.conversation import NOTES
from tests.tables import one_case

TOKEN = "a-token-of-mine"
KEY = "-----BEGIN KEY-----\n  MIIEvQIBADANBgkq\nhkiG9w0BAQEFAAOC\n-----END KEY-----\n"


def test_their_text_shows_none_of_them() -> None:
    secrets = Secrets({"token": TOKEN})
    setting = Setting(NOTES, secrets=secrets)
    for text in (repr(secrets), str(secrets), repr(setting)):
        assert TOKEN not in text
    assert dict(secrets) == {"token": TOKEN}


@pytest.mark.parametrize(
    ("values", "text", "shown"),
    [
        ({"a": TOKEN}, f"<{TOKEN}>", "<[secret]>"),
        ({"a": TOKEN}, TOKEN * 2, "[secret]"),
        ({"a": {"b": [TOKEN]}}, TOKEN, "[secret]"),
        ({"a": "12345678"}, "12345678", "[secret]"),
        ({"a": "1234567"}, "1234567", "1234567"),  # too short to be sure
        ({"a": TOKEN, "b": f"{TOKEN}-longer"}, f"{TOKEN}-longer", "[secret]"),
        ({"a": 'say "hello"'}, r"{\"x\": \"say \"hello\"\"}", r"{\"x\": \"[secret]\"}"),
        ({"a": "geheimnisträger"}, r"geheimnistr\u00e4ger", "[secret]"),
        ({"a": KEY}, "MIIEvQIBADANBgkq", "[secret]"),
        ({"a": KEY}, KEY.strip(), "[secret]"),
        ({"a": 12345678}, "the pin is 12345678!", "the pin is [secret]!"),
        ({"a": 1234567}, "1234567", "1234567"),
        ({"a": {"b": [-1234567]}}, "-1234567", "[secret]"),
        ({"a": 12345.678}, "12345.678", "[secret]"),
        ({"a": 12345678.0}, "12345678", "[secret]"),
        ({"a": True, "b": None, "c": 10**5000}, "True None", "True None"),
        ({"a": "it's a secret"}, repr("it's a secret"), '"[secret]"'),
        ({"a": "it's a secret"}, repr('"it\'s a secret"'), "'\"[secret]\"'"),
        ({"a": "back\\slashed"}, repr(["back\\slashed"]), "['[secret]']"),
        ({"a": "geheimnisträger"}, ascii("geheimnisträger"), "'[secret]'"),
        ({"a": "geheimnisträger"}, repr("geheimnisträger".encode()), "b'[secret]'"),
        ({"a": "bell\x07 and escape\x1b"}, r"bell\x07 and escape\x1b", "[secret]"),
        ({"a": "bell\x07 and escape\x1b"}, "bell\x07 and escape\x1b", "[secret]"),
        ({"a": "right\u202eleft"}, r"right\u202eleft", "[secret]"),
        ({"a": "short\ntx"}, json.dumps("short\ntx"), '"[secret]"'),
        ({"a": 'a %bc"de'}, json.dumps('a %bc"de'), '"[secret]"'),
        ({"a": "no-break\u00a0ä"}, repr("no-break\u00a0ä"), "'[secret]'"),
        ({"a": "100%abcd\\\\x"}, json.dumps(json.dumps("100%abcd\\\\x")), r'"\"[secret]\""'),
        ({}, TOKEN, TOKEN),
    ],
)
def test_hide(values: dict[str, Any], text: str, shown: str) -> None:
    assert Secrets(values).hide(text) == shown
    assert Secrets(values).hide_in_bytes(text.encode()).decode() == shown


ODD = "pä ss/wörd+&=?~"
LONG = "".join(f"word-{number:03}-" for number in range(40))


def encodings(text: str) -> Iterator[tuple[str, str]]:
    raw = text.encode()
    for offset in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            for around in ((b"", b""), (b"user:", b""), (b"x" * offset, b":rest of it")):
                whole = encode(around[0][:offset] + raw + around[1]).decode()
                yield f"base64 at {offset}", whole
                yield f"base64 at {offset} without padding", whole.rstrip("=")
    quoted = [quote(text), quote(text, safe=""), quote(text, safe="!*'()~"), quote_plus(text)]
    quoted.append("".join(f"%{byte:02X}" for byte in raw))
    for each in quoted:
        yield "percent", each
        yield "percent in lower case", re.sub("%..", lambda match: match[0].lower(), each)
    yield "hex", raw.hex()
    yield "hex in upper case", raw.hex().upper()
    for columns in (16, 64, 76):
        wrapped = textwrap.wrap(base64.b64encode(b"in front " + raw).decode(), columns)
        yield "base64 in lines", "\n".join(wrapped)
        yield "base64 in lines of another system", "\r\n".join(wrapped)


def remains(text: str, shown: str) -> bool:
    """Whether four characters of the secret can be read from what is shown, as it is or decoded."""
    candidates = [shown, unquote_plus(shown)]
    for part in re.split(r"\[secret\]|[\r\n]", shown):
        for offset in range(4):
            letters = re.sub("[^A-Za-z0-9+/_-]", "", part)[offset:].replace("-", "+").replace("_", "/")
            letters = letters[: len(letters) // 4 * 4]
            candidates.append(base64.b64decode(letters).decode("latin-1"))
        with contextlib.suppress(ValueError):
            candidates.append(bytes.fromhex(part).decode("latin-1"))
    pieces = [text[at : at + 4] for at in range(len(text) - 3)]
    return any(piece in candidate for piece in pieces for candidate in candidates)


@pytest.mark.parametrize("text", [TOKEN, ODD, LONG, "12345678", "a token with spaces", "x" * 9])
def test_hide_in_other_encodings(text: str) -> None:
    secrets = Secrets({"a": text})
    for name, encoded in encodings(text):
        shown = secrets.hide(f"<{encoded}>")
        assert "[secret]" in shown and not remains(text, shown), (name, encoded, shown)
        assert Secrets({"a": text.encode()}).hide(f"<{encoded}>") == shown
        assert Secrets({"a": f"{text}\n"}).hide(f"<{encoded}>") == shown


def test_text_without_a_secret_stays() -> None:
    secrets = Secrets({"a": TOKEN, "b": ODD})
    other = f"{base64.b64encode(b'something else')!r} %41%42 a+b {b'else'.hex()}\nthe next line\r\n"
    assert secrets.hide(other) == other
    assert secrets.hide(f"100% of {TOKEN}+1") == "100% of [secret]+1"


def test_bytes_that_are_no_text() -> None:
    raw = b"\xff\x00\x80binary\xfe key"
    secrets = Secrets({"a": raw})
    for data in (raw, base64.b64encode(raw), raw.hex().encode(), repr(raw).encode()):
        assert b"[secret]" in secrets.hide_in_bytes(data)
    assert secrets.hide(base64.b64encode(raw).decode()) == "[secret]"


LINES = ["user=m\u00fcller-at-home", "password=hunter2-hunter2", "token=abcdefgh12345678"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("end", ["", "\n", "\0", "\r\n\0"])
def test_each_line_of_a_file_in_another_encoding(encoding: str, end: str) -> None:
    bom = "\ufeff" if encoding == "utf-16-be" else ""
    secrets = Secrets({"a": (bom + "\r\n".join(LINES) + end).encode(encoding)})
    for line in LINES:
        assert secrets.hide(f"<{line}>") == "<[secret]>"
        assert secrets.hide(f"<{line[::-1]}>") == f"<{line[::-1]}>"  # the control
    assert Secrets({"a": f"{bom}{LINES[1]}{end}".encode(encoding)}).hide(f"<{LINES[1]}>") == "<[secret]>"


def test_a_file_with_a_line_end() -> None:
    """The file is delivered as it is. It is hidden with and without the end of its line."""
    for text in (TOKEN, f"{TOKEN}\n", f"{TOKEN}\r\n"):
        shown = Secrets({"a": f"{TOKEN}\n"}).hide(f"<{text}>")
        assert shown.strip() in ("<[secret]>", "<[secret]\n>", "<[secret]\r\n>")
        encoded = base64.b64encode(text.encode()).decode()
        assert not remains(TOKEN, Secrets({"a": f"{TOKEN}\n"}).hide(encoded))


def test_hide_in_json() -> None:
    value = {TOKEN: [TOKEN, 1, None, {"x": f"is {TOKEN}"}]}
    assert Secrets({"a": TOKEN}).hide_in(value) == {"[secret]": ["[secret]", 1, None, {"x": "is [secret]"}]}
    assert Secrets().hide_in(value) is value
    numbers = [12345678, 12345678.0, 123456789, 2.5, 1, True, {"x": 12345678}]
    shown = ["[secret]", "[secret]", "[secret]", 2.5, 1, True, {"x": "[secret]"}]
    assert Secrets({"pin": 12345678, "rate": 2.5}).hide_in(numbers) == shown
    assert Secrets({"token": "12345678"}).hide_in(12345678) == "[secret]"


def test_hide_in_json_with_many_texts() -> None:
    secrets = Secrets({"a": TOKEN})
    value = [{"": "\0", f"k{TOKEN}": [quote(TOKEN), "é", 7.0]}, "\0" * 40, [], {}, "x"] * 3
    shown = [{"": "\0", "k[secret]": ["[secret]", "é", 7.0]}, "\0" * 40, [], {}, "x"] * 3
    assert secrets.hide_in(value) == shown


def test_a_line_on_stdout_that_is_cut_in_a_secret() -> None:
    secrets = Secrets({"a": TOKEN})
    for shown in range(4, len(TOKEN)):
        record = SessionRecord()
        record.note_stray("x" * (198 - shown) + TOKEN)
        assert record.noise.endswith(f"x{TOKEN[:shown]}…")  # the control
        assert secrets.hide(record.noise).endswith("x[secret]…")  # as SessionState shows it


@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_stderr_hides_them_however_it_is_cut(pieces: int) -> None:
    record = SessionRecord()
    record.secrets = Secrets({"a": TOKEN})
    text = f"the token is {TOKEN}\n".encode()
    for start in range(0, len(text), pieces):
        record.count_output("stderr", text[start : start + pieces])
    assert record.stderr == "the token is [secret]\n"


def test_what_is_kept_of_stderr_is_bounded() -> None:
    record = SessionRecord()
    record.secrets = Secrets({"a": TOKEN})
    most = 2 * (8192 + record.secrets.longest)
    text = b"".join(b"%07d " % number for number in range(8192))
    moved = 0
    for start in range(0, len(text), 7):
        before = len(record._tail)
        record.count_output("stderr", text[start : start + 7])
        moved += len(record._tail) < before
        assert len(record._tail) <= most + 7
    assert text.decode().endswith(record.stderr) and len(record.stderr) == 8192
    assert 0 < moved <= len(text) // 8192  # not at each write


def test_the_tail_of_stderr_never_begins_inside_a_secret() -> None:
    for extra in range(40):
        record = SessionRecord()
        record.secrets = Secrets({"a": TOKEN})
        record.count_output("stderr", TOKEN.encode() + b"x" * (8192 - 20 + extra))
        shown = record.stderr
        assert len(shown) <= 8192
        assert not any(shown.startswith(TOKEN[start:]) for start in range(len(TOKEN) - 1))
        assert shown.endswith("x" * 8000)


@pytest.mark.parametrize("encode", [str.encode, lambda text: base64.b64encode(text.encode())])
def test_a_secret_that_breaks_off(encode: Callable[[str], bytes]) -> None:
    """Its writer was ended in the middle of it."""
    whole = encode(LONG)
    for length in (4, 9, 100, len(whole) - 1):
        record = SessionRecord()
        record.count_output("stderr", b"key: " + whole[:length])
        assert record.stderr == f"key: {whole[:length].decode()}"  # the control
        record.secrets = Secrets({"a": LONG})
        assert record.stderr == "key: [secret]"


def test_the_tail_never_begins_inside_an_encoded_secret() -> None:
    for encoded in (base64.b64encode(LONG.encode()), LONG.encode().hex().encode(), quote(LONG).encode()):
        for extra in range(0, 3 * len(LONG) + 40, 37):
            record = SessionRecord()
            record.secrets = Secrets({"a": LONG})
            record.count_output("stderr", encoded + b"." * (8192 - 20 + extra))
            assert set(record.stderr.replace("[secret]", "")) <= {"."}


def test_many_places_where_a_large_secret_might_begin() -> None:
    """Bounded work, and nothing is shown that might be one."""
    large = "abcd" * 10_000 + "end"
    secrets = Secrets({"a": large})
    tail = secrets.hide_in_tail(b"before " + b"abcd" * 5000 + b"!", cut=False)
    assert tail == b"before [secret]!"


# --- layers of notation -------------------------------------------------------------------------------------

MIXED = "p?~w/Other=Secret+!"
BINARY = b"\xff\x00\x80bin\\ary\xfe key\x1f"


def mime(raw: bytes, columns: int = 12, end: str = "\n") -> str:
    return end.join(textwrap.wrap(base64.b64encode(raw).decode(), columns))


def all_percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def in_mixed_case(text: str) -> str:
    return "".join(each.upper() if number % 3 else each for number, each in enumerate(text))


def latin(raw: bytes) -> str:
    return raw.decode("latin-1")


Write = Callable[[bytes], str]

# How a secret is written. What has the same form and is no secret stays as it is.
WRITTEN: list[tuple[str, Write]] = [
    ("base64 in a URL", lambda raw: quote(base64.b64encode(raw), safe="")),
    ("base64 in a URL in a URL", lambda raw: quote(quote(base64.b64encode(raw), safe=""), safe="")),
    ("hex in a URL", lambda raw: quote(raw.hex(":"), safe="")),
    ("percent signs in lines", lambda raw: "\n".join(textwrap.wrap(all_percent(latin(raw)), 7))),
    ("percent signs in a text of JSON, in lines", lambda raw: "\\n".join(textwrap.wrap(quote(raw), 7))),
    ("base64 in lines, in a text of JSON", lambda raw: json.dumps(mime(raw))),
    ("base64 in lines, in a text of Python", lambda raw: repr(mime(raw, end="\r\n"))),
    ("base64 in lines, in JSON in JSON", lambda raw: json.dumps(json.dumps(mime(raw)))),
    ("base64 with another alphabet in lines", lambda raw: mime(raw).replace("+", "-").replace("/", "_")),
    ("base64 of JSON with \\/", lambda raw: base64.b64encode(raw).decode().replace("/", "\\/")),
    ("JSON with \\/", lambda raw: json.dumps(latin(raw)).replace("/", "\\/")),
    ("JSON in JSON", lambda raw: json.dumps(json.dumps(latin(raw)))),
    ("JSON with every character escaped", lambda raw: "".join(f"\\u{byte:04x}" for byte in raw)),
    ("Rust", lambda raw: "".join(f"\\u{{{byte:x}}}" for byte in raw)),
    ("latin-1", latin),
    ("latin-1 as Python prints it", lambda raw: repr(latin(raw))),
    ("latin-1 as Python prints it in ASCII", lambda raw: ascii(latin(raw))),
    ("backslashes for what is no UTF-8", lambda raw: raw.decode(errors="backslashreplace")),
    ("surrogates for what is no UTF-8", lambda raw: raw.decode(errors="surrogateescape")),
    ("surrogates as JSON", lambda raw: json.dumps(raw.decode(errors="surrogateescape"))),
    ("nothing for what is no UTF-8", lambda raw: raw.decode(errors="ignore")),
    ("a mark for what is no UTF-8", lambda raw: raw.decode(errors="replace")),
    ("bytes as Python prints them", repr),
    ("hex in mixed case", lambda raw: in_mixed_case(raw.hex())),
    ("hex with colons", lambda raw: raw.hex(":")),
    ("hex with dashes in upper case", lambda raw: raw.hex("-").upper()),
    ("hex in groups and lines", lambda raw: "\n".join(textwrap.wrap(raw.hex(" ", 2), 15))),
]


@one_case(("name", "write"), WRITTEN, ids=[name for name, _ in WRITTEN])
@one_case("raw", [MIXED.encode(), BINARY], ids=["text", "binary"])
def test_hide_in_layers_of_notation(raw: bytes, name: str, write: Write) -> None:
    secrets = Secrets({"a": raw})
    for before, after in (("", ""), ("key=", "&x=1"), ('{"a": "', '"}\n'), ("\n", "\nmore\n")):
        written = f"{before}{write(raw)}{after}"
        shown = secrets.hide(written)
        quotes = "b'\"\\"
        rest = shown.removeprefix(before).removesuffix(after)
        assert rest.strip(quotes) == "[secret]", (written, shown)
        assert secrets.hide_in({"k": [written, 1]}) == {"k": [shown, 1]}
        # The control: one character of it is another, in the middle and at each end.
        for place in (1, len(raw) // 2, len(raw) - 2):
            other = raw[:place] + b"#" + raw[place + 1 :]
            assert secrets.hide(f"{before}{write(other)}{after}") == f"{before}{write(other)}{after}"


@pytest.mark.parametrize("write", [write for _, write in WRITTEN], ids=[name for name, _ in WRITTEN])
def test_secrets_that_overlap(write: Write) -> None:
    one, two = "overlapping-first", "first-and-second"
    both = "overlapping-first-and-second"
    shown = Secrets({"a": one, "b": two}).hide(write(both.encode()))
    assert shown.strip("b'\"\\") == "[secret]"


@pytest.mark.parametrize("write", [write for _, write in WRITTEN], ids=[name for name, _ in WRITTEN])
def test_the_beginning_of_a_secret_at_the_end_of_a_tail(write: Write) -> None:
    secrets = Secrets({"a": LONG})
    written = write(LONG.encode())
    for length in (len(written) // 3, len(written) // 2):
        shown = secrets.hide_in_tail(f"key: {written[:length]}".encode(), cut=False).decode()
        # What may stand behind it: a line end or a separator, escaped.
        assert re.fullmatch(r"key: [\"\\]*b?'?\[secret\][\\rn\n%3A:-]{0,4}", shown), (written[:length], shown)
        assert secrets.hide(f"key: {written[:length]}…', cut") == f"{shown}…', cut"
    other = f"key: {write(LONG[::-1].encode())[: len(written) // 2]}… more".encode()
    assert secrets.hide_in_tail(other, cut=False) == other


WIDE: list[Write] = [
    lambda raw: re.sub("..", lambda two: f"%25%{ord(two[0][0]):x}%{ord(two[0][1]):x}", raw.hex()),
    lambda raw: "".join(f"\\U{byte:08x}" for byte in raw),
    lambda raw: "".join(f"\\u{ord(digit):04x}" for digit in raw.hex()),
]


@pytest.mark.parametrize("write", WIDE, ids=["percent twice", "U", "hex"])
def test_a_tail_that_begins_in_the_widest_notations(write: Write) -> None:
    secrets, written = Secrets({"a": TOKEN}), write(TOKEN.encode()).encode()
    rest = b"." * (secrets.longest + 50)
    assert secrets.hide_in_tail(written + rest, cut=False) == b"[secret]" + rest  # the control
    for start in range(len(written)):
        shown = secrets.hide_in_tail(written[start:] + rest, cut=True)
        assert set(shown) == set(b"."), (written[start:], shown)


# --- bounded work -------------------------------------------------------------------------------------------


def count_needles(secrets: Secrets) -> int:
    assert secrets._finder is not None
    return sum(map(len, secrets._finder.sought))


def test_the_lines_that_are_looked_for_are_bounded() -> None:
    few = Secrets({"a": "\n".join(f"line {number:06}" for number in range(MOST_LINES))})
    many = Secrets({"a": "\n".join(f"line {number:06}" for number in range(100 * MOST_LINES))})
    assert count_needles(few) >= MOST_LINES
    # What comes on top are the parts of the text as a whole.
    assert count_needles(many) < 3 * count_needles(few)


def test_the_longest_lines_are_looked_for() -> None:
    lines = [f"line {number:06}" for number in range(2 * MOST_LINES)]
    text = "\n".join([*lines[:300], "the longest line of them", *lines[300:]])
    secrets = Secrets({"a": text})
    assert secrets.hide("<the longest line of them>") == "<[secret]>"
    assert secrets.hide(f"<{text}>") == "<[secret]>"
    shown = [line for line in lines if secrets.hide(f"<{line}>") != "<[secret]>"]
    assert len(shown) == MOST_LINES + 1


def test_each_place_of_a_text_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many needles there are."""

    class Counting(dict[int, Any]):
        looked_up = 0

        def __contains__(self, key: object) -> bool:
            Counting.looked_up += 1
            return super().__contains__(key)

    for number in (1, 1000):
        sought = needles_module.Needles(b"needle-%06d" % each for each in range(number))
        sought._by_window = Counting(sought._by_window)
        Counting.looked_up = 0
        assert sought.find(b"." * 5000 + b"needle-000000" + b"." * 5000) == [(5000, 5013)]
        assert Counting.looked_up == 10_013 - needles_module.WINDOW + 1


def test_a_text_that_is_too_much_work_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = Secrets({"a": "aaaaaaaab"})
    text = "start " + "a" * 5000
    assert secrets.hide(text) == text
    monkeypatch.setattr(needles_module, "MOST_COMPARISONS", 100)
    shown = secrets.hide(text)
    assert shown == "start " + "a" * 100 + "[secret]"
    assert secrets.hide_in(["x", text, "start y"]) == ["x", shown, "start y"]


def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are searched from now on."""
    lengths: list[int] = []

    def find(self: SecretFinder, data: bytes, *, at_end: bool = False) -> list[tuple[int, int]]:
        lengths.append(len(data))
        return real(self, data, at_end=at_end)

    real = SecretFinder.find
    monkeypatch.setattr(SecretFinder, "find", find)
    return lengths


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ([0] * 10_000, 0),  # in the share of its length as JSON
        (["", "short", None, True, {}, []] * 10_000, 0),
        (["a text that repeats"] * 10_000, 0.01),
        ([0.123456789 + number for number in range(10_000)], 1),
        ([f"text {number:05}" for number in range(10_000)], 1),
        ([1e308] * 10_000, 0),
        ([1e20 + 1e5 * number for number in range(10_000)], 2.5),
        ([10**5 * number for number in range(10_000)], 1),
    ],
    ids=["zeros", "short", "repeated", "fractions", "texts", "exponents", "large", "integers"],
)
def test_what_is_searched_of_a_value_is_not_longer_than_the_value(
    monkeypatch: pytest.MonkeyPatch, value: list[Any], most: float
) -> None:
    lengths = searched(monkeypatch)
    secrets = Secrets({"a": TOKEN})
    assert secrets.hide_in(value) is value  # nothing is found, and nothing is copied
    assert len(lengths) == 1 and lengths[0] <= most * len(json.dumps(value))
    assert secrets.hide_in([*value, TOKEN]) == [*value, "[secret]"]  # the control


def test_a_plugin_cannot_blank_a_report() -> None:
    """The secret is a file of lines that begin alike. The plugin asks for names that begin like them, until
    not every line can be compared with each place."""
    keys = "\n".join(f"api_key_{number:03}=Zx{7919 * number:08x}qq" for number in range(40))
    secrets = Secrets({"file": keys.encode()})
    names = [f"{number}.{'.'.join(['api_key_'] * 26)}" for number in range(400)]
    report = {"schema": "runner.report.v1", "network": {"questions": names}, "outcome": {"code": "crashed"}}
    assert sum(name.count("api_key_") for name in names) * 40 > needles_module.MOST_COMPARISONS
    shown = secrets.hide_in({**report, "said": keys.splitlines()[39]})
    assert shown["said"] == "[secret]"
    questions = shown["network"].pop("questions")
    assert {**shown, "said": ""} == {**report, "network": {}, "said": ""}
    # What is hidden is a place where a line might stand, in the name itself. The first ones are compared.
    assert questions[0] == names[0] or questions[-1] == names[-1]
    assert all(each == name or "[secret]" in each for each, name in zip(questions, names, strict=True))


def test_a_secret_in_a_text_of_several_blocks() -> None:
    secrets = Secrets({"a": TOKEN})
    for place in range((256 << 10) - 2 * len(TOKEN), (256 << 10) + 2, 5):
        for written in (TOKEN, quote(base64.b64encode(TOKEN.encode()), safe="")):
            text = "." * place + written + "." * 300_000
            assert secrets.hide(text) == "." * place + "[secret]" + "." * 300_000


def test_a_large_secret_is_one_mark() -> None:
    large = "".join(f"{number:x}\u00e4" for number in range(100_000))
    secrets = Secrets({"a": large})
    for written in (large, quote(large), base64.b64encode(large.encode()).decode(), large.encode().hex()):
        assert secrets.hide(f"<{written}>") == "<[secret]>"
    assert secrets.longest < 64 << 10  # so much longer is the tail that is kept of stderr


def test_secrets_that_are_handed_on_are_not_read_again() -> None:
    first = Secrets({"a": TOKEN})
    assert Secrets(first)._finder is first._finder and dict(Secrets(first)) == dict(first)


def test_without_secrets_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.protocol.disguise.finder.Forms", None)
    monkeypatch.setattr("runner.protocol.disguise.finder.views_of", None)
    none = Secrets()
    assert (none.hide("x"), none.hide_in_bytes(b"x"), none.hide_in_tail(b"x", cut=True)) == ("x", b"x", b"x")
    assert none.longest == 0 and none.hide_in(["x"]) == ["x"]
