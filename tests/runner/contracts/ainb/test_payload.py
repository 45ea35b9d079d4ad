"""Bytes in JSON: exact base64, or integers."""

from __future__ import annotations

import base64
import binascii
import random
from typing import Any

import pytest

from runner.contracts.ainb.payload import BadPayload, decode, encode


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ("", b""),
        ("aGk=", b"hi"),
        ("aA==", b"h"),
        ("aGkh", b"hi!"),
        ("+/+/", b"\xfb\xff\xbf"),
        ([], b""),
        ([0, 104, 255], b"\0h\xff"),
        (b"decoded before", b"decoded before"),
    ],
)
def test_payloads(value: Any, data: bytes) -> None:
    assert decode(value) == data


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("-_-_", id="url-safe"),
        pytest.param("aGk", id="no padding"),
        pytest.param("aA=", id="half of the padding"),
        pytest.param("aGkh====", id="too much padding"),
        pytest.param("====", id="only padding"),
        pytest.param("a===", id="one character"),
        pytest.param("aGk=aGk=", id="goes on behind the padding"),
        pytest.param("aA=h", id="padding inside"),
        pytest.param("aGkh\n\n\n\n", id="line breaks"),
        pytest.param("aG kh==", id="a space"),
        pytest.param(" aGk", id="a space in front"),
        pytest.param("aGl=", id="bits behind the last byte, two bytes"),
        pytest.param("aH==", id="bits behind the last byte, one byte"),
        pytest.param("aGkö", id="beyond ascii"),
        pytest.param("aGk\0", id="NUL"),
        pytest.param([256], id="256"),
        pytest.param([-1], id="-1"),
        pytest.param([True], id="true"),
        pytest.param([1.0], id="a float"),
        pytest.param(["1"], id="a string"),
        pytest.param([[1]], id="nested"),
        pytest.param(None, id="null"),
        pytest.param(1, id="a number"),
        pytest.param({"0": 1}, id="an object"),
    ],
)
def test_wrong_payloads_are_refused(value: Any) -> None:
    with pytest.raises(BadPayload):
        decode(value)


def test_whatever_is_taken_is_exactly_what_would_be_written() -> None:
    """Checked with random texts of the alphabet, its neighbours and padding."""
    chance = random.Random(13)
    taken = 0
    for _ in range(20000):
        text = "".join(chance.choices("AQgwab/+=-", weights=[4] * 8 + [3, 1], k=chance.choice([4, 4, 8, 12])))
        try:
            data = decode(text)
        except BadPayload:
            # The control: what the reference writes is never refused.
            try:
                assert base64.b64encode(base64.b64decode(text)).decode() != text
            except binascii.Error:
                pass
            continue
        taken += 1
        assert encode(data) == text
    assert taken > 1000
