from __future__ import annotations

import base64
import itertools
import json
import random
from urllib.parse import quote, quote_plus, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.broker.echo import EchoFilter, Replacements, spellings
from sandbox.broker.placeholder import make_placeholder
from tests.sandbox.broker.rig import PLACEHOLDER, VALUE
from tests.tables import one_case

ODD, ODD_PLACEHOLDER = b"a/b+c=d~e!f g%h-1234567890AB", b"z/y+x=w~v!u t%s-0987654321ZY"


def spelled(value: bytes) -> list[bytes]:
    """The value as servers repeat it, in the midst of other things."""
    return [
        b"<" + value + b">",
        *(base64.b64encode(b"user"[:shift] + value + b":more") for shift in range(4)),
        *(base64.urlsafe_b64encode(b"~?>"[:shift] + value) for shift in range(4)),
        quote(value, safe="").encode(),
        quote(value, safe="").lower().encode() if value.islower() else quote(value, safe="/").encode(),
        "".join(f"%{byte:02x}" for byte in value).encode(),
        "".join(f"%{byte:02X}" for byte in value).encode(),
        json.dumps(value.decode()).replace("/", "\\/").encode(),
    ]


def all_of(value: bytes) -> list[bytes]:
    """What must not be found: every spelling, found by other means than those of the filter."""
    found = [value]
    for shift in range(3):
        for table in (base64.b64encode, base64.urlsafe_b64encode):
            found.append(table(bytes(shift) + value)[4:-4])
    found += ["".join(f"%{byte:{kind}}" for byte in value).encode() for kind in ("02x", "02X")]
    found += [quote(value, safe=safe).encode() for safe in ("", "/")]
    found.append(value.replace(b"/", b"\\/"))
    return found


@pytest.mark.parametrize(("value", "placeholder"), [(VALUE, PLACEHOLDER), (ODD, ODD_PLACEHOLDER)])
@pytest.mark.parametrize("step", [0, 1, 3, 17])
def test_a_repeated_value_becomes_the_placeholder(value: bytes, placeholder: bytes, step: int) -> None:
    for text in spelled(value):
        assert any(each in text for each in all_of(value)), text  # the control
        echo = EchoFilter(Replacements([(value, placeholder)]))
        pieces = [text[at : at + step] for at in range(0, len(text), step)] if step else [text]
        found = b"".join([echo.feed(piece) for piece in pieces] + [echo.flush()])
        assert len(found) == len(text)
        assert not [each for each in all_of(value) if each in found], (text, found)


def test_a_placeholder_stays_as_it_was() -> None:
    echo = EchoFilter(Replacements([(VALUE, PLACEHOLDER)]))
    assert echo.feed(PLACEHOLDER + b"\n") == PLACEHOLDER + b"\n"
    assert echo.feed(VALUE + b"\n") == PLACEHOLDER + b"\n"


@one_case(
    ("text", "held"),
    [
        (b"data: x\n\n", 0),  # an event is passed on at once
        (b'{"a": "b"}', 0),
        (b"data: " + VALUE[:10], 10),
        (b"data: " + b"unrelated1", 10),  # as much: else the delay would tell how much of it is right
        (b"x" * 1000, len(VALUE) * 9 - 1),  # each character of %41 may be an escape too
    ],
)
def test_only_what_could_be_a_part_of_any_value_is_held_back(text: bytes, held: int) -> None:
    echo = EchoFilter(Replacements([(VALUE, PLACEHOLDER)]))
    assert len(text) - len(echo.feed(text)) == held
    assert len(echo.flush()) == held


@given(st.binary(max_size=60), st.lists(st.integers(0, 120), max_size=6), st.booleans())
def test_what_is_held_back_does_not_depend_on_the_value(noise: bytes, cuts: list[int], first: bool) -> None:
    """Of two values with the same placeholder, each text is passed on in the same pieces."""
    other = make_placeholder(VALUE)
    text = noise + (VALUE if first else other)[:20] + noise
    sizes = []
    for value in (VALUE, other):
        echo = EchoFilter(Replacements([(value, PLACEHOLDER)]))
        places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
        sizes.append([len(echo.feed(text[a:b])) for a, b in itertools.pairwise(places)])
    assert sizes[0] == sizes[1]


def test_a_value_that_is_a_part_of_another_one() -> None:
    short, long = b"abcdefgh12345678", b"xabcdefgh12345678y"
    pairs = [(short, b"bcdefghi23456789"), (long, b"qbcdefghi99999999z")]
    assert Replacements(pairs).replace(long + b" " + short) == b"qbcdefghi99999999z bcdefghi23456789"


# What the plugin itself has hidden ends as a known value begins, or begins as it ends.
FRONT, FRONT_PLACEHOLDER = b"q1w2e3r4t5z6u7i8" + VALUE[:6], b"Q9W8E7R6T5Z4U3I2" + PLACEHOLDER[:6]
REAR, REAR_PLACEHOLDER = VALUE[-6:] + b"q1w2e3r4t5z6u7i8", PLACEHOLDER[-6:] + b"Q9W8E7R6T5Z4U3I2"
ALL = [(FRONT, FRONT_PLACEHOLDER), (VALUE, PLACEHOLDER), (REAR, REAR_PLACEHOLDER)]


@one_case(
    "text",
    [
        FRONT + VALUE[6:],
        VALUE + REAR[6:],
        FRONT + VALUE[6:] + REAR[6:],
        VALUE[:20] + VALUE,
        "".join(f"%{byte:02x}" for byte in FRONT + VALUE[6:]).encode(),
        quote(FRONT).encode() + "".join(f"%{byte:02X}" for byte in VALUE[6:] + REAR[6:]).encode(),
        base64.b64encode(FRONT[:-6] + VALUE + REAR[6:]),
    ],
)
def test_values_that_overlap(text: bytes) -> None:
    rests = [VALUE[6:26], *(base64.b64encode(bytes(shift) + VALUE)[12:40] for shift in range(3))]
    assert [rest for rest in rests if rest in unquote_to_bytes(text)]  # the control
    for step in (1, 3, 7, 30, 1000):
        echo = EchoFilter(Replacements(ALL))
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        found = b"".join([echo.feed(piece) for piece in pieces] + [echo.flush()])
        assert len(found) == len(text)
        for seen in (found, unquote_to_bytes(found)):
            assert not [rest for rest in rests if rest in seen], (step, seen)


@pytest.mark.parametrize("value", [VALUE, ODD])
@pytest.mark.parametrize("step", [1, 4, 50, 1000])
def test_any_character_may_be_an_escape(value: bytes, step: int) -> None:
    placeholder = PLACEHOLDER if value is VALUE else ODD_PLACEHOLDER
    chance = random.Random(47)
    for _ in range(50):
        text = b"%%4<" + b"".join(
            (b"%%%02x" if chance.random() < 0.5 else b"%%%02X") % byte
            if byte == ord("%") or chance.random() < 0.3
            else bytes((byte,))
            for byte in value
        )
        assert unquote_to_bytes(text).endswith(value)  # the control
        echo = EchoFilter(Replacements([(value, placeholder)]))
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        found = b"".join([echo.feed(piece) for piece in pieces] + [echo.flush()])
        assert len(found) == len(text)
        assert unquote_to_bytes(found) == b"%%4<" + placeholder


@one_case(
    "text",
    [
        quote_plus(ODD).encode(),
        quote(ODD, safe=" ").replace("~", "%7E").replace(" ", "+").encode(),  # as browsers do
        quote(ODD, safe="!").replace("~", "%7e").encode(),
        quote(base64.b64encode(b"user:" + ODD)).encode(),
        quote(quote(ODD)).encode(),
        b"/x?y=%" + quote(ODD).encode(),
    ],
)
def test_odd_encoders(text: bytes) -> None:
    found = Replacements([(ODD, ODD_PLACEHOLDER)]).replace(text)
    assert len(found) == len(text)
    for seen in (found, unquote_to_bytes(found), unquote_to_bytes(unquote_to_bytes(found))):
        for each in all_of(ODD):
            assert each not in seen and each not in seen.replace(b"+", b" ")


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        Replacements([(b"abcd/efgh", b"abcdefghi")])
    assert len(spellings(VALUE)) == len(spellings(PLACEHOLDER))
