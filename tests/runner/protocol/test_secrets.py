"""The operator's secrets, hidden in what a plugin repeats."""

from __future__ import annotations

from typing import Any

import pytest

from runner.protocol.dialect import Setting
from runner.protocol.secrets import Secrets
from runner.session.record import SessionRecord
from tests.runner.contracts.kaged.conversation import NOTES

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
        ({"a": TOKEN}, TOKEN * 2, "[secret][secret]"),
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
        ({}, TOKEN, TOKEN),
    ],
)
def test_hide(values: dict[str, Any], text: str, shown: str) -> None:
    assert Secrets(values).hide(text) == shown
    assert Secrets(values).hide_in_bytes(text.encode()).decode() == shown


def test_hide_in_json() -> None:
    value = {TOKEN: [TOKEN, 1, None, {"x": f"is {TOKEN}"}]}
    assert Secrets({"a": TOKEN}).hide_in(value) == {"[secret]": ["[secret]", 1, None, {"x": "is [secret]"}]}
    assert Secrets().hide_in(value) is value
    numbers = [12345678, 12345678.0, 123456789, 2.5, 1, True, {"x": 12345678}]
    shown = ["[secret]", "[secret]", "[secret]", 2.5, 1, True, {"x": "[secret]"}]
    assert Secrets({"pin": 12345678, "rate": 2.5}).hide_in(numbers) == shown
    assert Secrets({"token": "12345678"}).hide_in(12345678) == "[secret]"


def test_a_line_on_stdout_hides_them_before_it_is_cut() -> None:
    record = SessionRecord()
    record.strayed("x" * 190 + TOKEN)  # the control: the beginning of it is shown
    assert TOKEN[:8] in record.noise
    record.secrets = Secrets({"a": TOKEN})
    record.strayed("x" * 190 + TOKEN)
    assert TOKEN[:8] not in record.noise


@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_stderr_hides_them_however_it_is_cut(pieces: int) -> None:
    record = SessionRecord()
    record.secrets = Secrets({"a": TOKEN})
    text = f"the token is {TOKEN}\n".encode()
    for start in range(0, len(text), pieces):
        record.wrote("stderr", text[start : start + pieces])
    assert record.stderr == "the token is [secret]\n"


def test_the_tail_of_stderr_never_begins_inside_a_secret() -> None:
    for extra in range(40):
        record = SessionRecord()
        record.secrets = Secrets({"a": TOKEN})
        record.wrote("stderr", TOKEN.encode() + b"x" * (8192 - 20 + extra))
        shown = record.stderr
        assert len(shown) <= 8192
        assert not any(shown.startswith(TOKEN[start:]) for start in range(len(TOKEN) - 1))
        assert shown.endswith("x" * 8000)
