"""Every sequence of bytes gives a value or a WireFault, and a value equals that of a plain parser."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.contracts.mcp.dialect import FRAME_LIMIT
from runner.protocol import memory, wire
from runner.protocol.wire import MOST_DEPTH, MOST_MEMORY, MOST_VALUES, WireFault, decode, encode, message
from tests import elsewhere
from tests.conftest import ROOT
from tests.tables import one_case

IDENTITY = frozenset(("jsonrpc", "id", "method", "result", "error"))

CAUSES = {"bad_json", "bom", "bad_number", "too_deep", "too_many_values", "duplicate_key"}


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def combed(depth: int) -> bytes:
    """Deep only at the end, after many shallow brackets."""
    return b"[" + b"[[]]," * 500 + nested(depth - 1) + b"]"


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b" {} \r", {}),
        (b"[]", []),
        (b'"a"', "a"),
        (b"null", None),
        (b"-0", 0),
        (b"1e2", 100.0),
        (b"1e-999", 0.0),
        (b"1.7976931348623157e308", 1.7976931348623157e308),
        (b"18446744073709551615", 2**64 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b'"18446744073709551616 NaN 1e999"', "18446744073709551616 NaN 1e999"),
        (b'"\xff\xed\xa0\x80"', "\ufffd\ufffd\ufffd\ufffd"),
        (rb'"\ud800"', "\ufffd"),
        (rb'"\udc00x"', "\ufffdx"),
        (rb'"\uD83D\uDE00"', "\U0001f600"),
        (rb'"\ude00\ud83d"', "\ufffd\ufffd"),
        (rb'"\ud83d\ud83d\ude00\ude00"', "\ufffd\U0001f600\ufffd"),
        (rb'"\ud83d\\\ude00"', "\ufffd\\\ufffd"),
        (rb'"\\ud800 \\\\ud800 \\\ud800"', "\\ud800 \\\\ud800 \\\ufffd"),
        (rb'{"\ud800": "\ud55c"}', {"\ufffd": "\ud55c"}),
        (b'{"id": 1, "x": 2, "x": 3}', {"id": 1, "x": 3}),
        (b'{"id": 1, "result": {"id": 1, "id": 2}}', {"id": 1, "result": {"id": 2}}),
        (b'[{"id": 1, "id": 2}]', [{"id": 2}]),
        (b'{"id": "id", "x": ["id", "id"]}', {"id": "id", "x": ["id", "id"]}),
        (b'"' + b"[" * 200 + b'"', "[" * 200),
        (b'["' + b'[\\"' * 200 + b'"]', ['["' * 200]),
        (b'["' + b"[" * 99 + b'",' + b'"]",' * 99 + b"1]", ["[" * 99, *["]"] * 99, 1]),
    ],
)
def test_values(raw: bytes, value: Any) -> None:
    assert message(raw, identity=IDENTITY)[:3] == (value, None, "")


@one_case(
    ("raw", "cause"),
    [
        (b"", "bad_json"),
        (b" ", "bad_json"),
        (b"hello", "bad_json"),
        (b"{'a': 1}", "bad_json"),
        (b"{} {}", "bad_json"),
        (b"[1,]", "bad_json"),
        (b"01", "bad_json"),
        (b"1.", "bad_json"),
        (b'"\n"', "bad_json"),
        (b'"\x01\\ud800"', "bad_json"),
        (rb'"\ud8"', "bad_json"),
        (rb'"\x"', "bad_json"),
        (b'"', "bad_json"),
        (b"\xff", "bad_json"),
        (b"\xff\xfe1\x00", "bad_json"),
        ("1".encode("utf-16-le"), "bad_json"),
        (b"\xef\xbb\xbf1", "bom"),
        (b"\xef\xbb\xbf", "bom"),
        (b"NaN", "bad_number"),
        (b'{"a": [-Infinity]}', "bad_number"),
        (b"[1e999]", "bad_number"),
        (b"-1e+0000000309", "bad_number"),
        (b"1" + b"0" * 400 + b".5", "bad_number"),
        (b"1" + b"0" * 300 + b"E99", "bad_number"),
        (b"18446744073709551616", "bad_number"),
        (b"-9223372036854775809", "bad_number"),
        (b"9" * 5000, "bad_number"),  # CPython refuses more than 4300 digits with an error of its own
        (b"9" * 100000 + b" bottles", "bad_json"),
        (b"Infinity loop started", "bad_json"),
        (b"NaN, NaN", "bad_json"),
        (nested(MOST_DEPTH + 1), "too_deep"),
        (b'{"a":' * 129 + b"1" + b"}" * 129, "too_deep"),
        (combed(MOST_DEPTH + 1), "too_deep"),
        (b"[" * 1_000_000, "too_deep"),
        (b"[" + b"0," * MOST_VALUES + b"0]", "too_many_values"),
        (b"[" + b"[]," * (MOST_VALUES // 2 + 1) + b"0]", "too_many_values"),
        (b"[" + b"{}," * (MOST_MEMORY // 256) + b"0]", "too_many_values"),
        (('"' + "x" * (MOST_MEMORY // 8) + '😀"').encode(), "too_many_values"),
        (b'["\\\\",' + nested(MOST_DEPTH) + b"]", "too_deep"),
        (b'["\\"",' + nested(MOST_DEPTH) + b"]", "too_deep"),
        (b'{"id":1,"id":1}', "duplicate_key"),
        (b'{"a":{},"result":1,"\\u0072esult":2}', "duplicate_key"),
        (b'{"x":[' + b'"y",' * 500 + b'1],"id":1,"id":2}', "duplicate_key"),
        (b'{"id":1,"id":2', "bad_json"),
        (b'{"id":1,"id":NaN}', "bad_number"),
    ],
)
def test_faults(raw: bytes, cause: str) -> None:
    value, found, detail, _ = message(raw, identity=IDENTITY)
    assert (value, found) == (None, cause)
    assert detail.isprintable() and len(detail) < 200


@pytest.mark.parametrize("raw", [nested(MOST_DEPTH), combed(MOST_DEPTH), b'{"a":' * 128 + b"1" + b"}" * 128])
def test_the_greatest_depth_is_accepted(raw: bytes) -> None:
    assert decode(raw) == json.loads(raw)


def test_the_greatest_number_of_values_is_accepted() -> None:
    assert len(decode(b"[" + b"0," * (MOST_VALUES - 1) + b"0]")) == MOST_VALUES
    assert decode(b'["' + b"," * (MOST_VALUES + 1) + b'"]')  # these are one


def test_depth_does_not_depend_on_the_stack() -> None:
    def deeper(calls: int) -> tuple[Any, ...]:
        if calls:
            return deeper(calls - 1)
        return (message(nested(129))[1], message(nested(128))[1], message(nested(900))[1])

    assert deeper(0) == deeper(500) == ("too_deep", None, "too_deep")


def test_repeated_keys_are_faults_only_if_they_decide_the_kind_of_a_message() -> None:
    assert decode(b'{"id":1,"id":2}') == {"id": 2}


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
scalars = scalars.filter(lambda value: not (isinstance(value, float) and math.isinf(value)))
values = st.recursive(
    scalars | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(values)
@example({"id": 1, "result": {"id": 2}})
def test_encoded_values_are_decoded_again(value: Any) -> None:
    raw = encode(value)
    assert b"\n" not in raw
    assert decode(raw, identity=IDENTITY) == value
    # And from those who write otherwise.
    assert decode(json.dumps(value, indent=1).encode(), identity=IDENTITY) == value


pieces = st.lists(
    st.one_of(
        st.binary(max_size=4),
        st.sampled_from(
            [
                *(
                    b"{",
                    b"}",
                    b"[",
                    b"]",
                    b'"',
                    b":",
                    b",",
                    b"\\",
                    rb"\ud83d",
                    rb"\ude00",
                    rb"\u0069",
                    b'"id":',
                ),
                *(
                    b"1e",
                    b"999",
                    b"NaN",
                    b"-",
                    b".5",
                    b"9" * 20,
                    b" ",
                    b"[" * 130,
                    b"]" * 130,
                    b"\xef\xbb\xbf",
                ),
            ]
        ),
        values.map(encode),
    ),
    max_size=12,
).map(b"".join)


@given(pieces | st.binary())
def test_any_bytes_give_a_value_or_a_fault(raw: bytes) -> None:
    value, cause, detail, _ = message(raw, identity=IDENTITY)
    if cause is not None:
        assert value is None and detail and cause in CAUSES
        return
    assert decode(encode(value)) == value  # so there is nothing in it that is not JSON


messages = st.lists(
    st.sampled_from(
        [
            *(
                b'"id":1',
                b'"id"',
                b'"jsonrpc":"2.0"',
                b'"result":{"id":2}',
                b'"error":null',
                b'"a":[[["b"]]]',
            ),
            *(b'"\\u0069d":1', b"1234567890123456789", b'"x":99999999999999999999', b'"n":1e400', b"NaN"),
            *(
                b'"s":"\\ud800"',
                b'"t":"\xff"',
                b'"t":"\xc3\xa4"',
                b'"d":' + nested(127),
                b"{",
                b"}",
                b"[",
                b"]",
            ),
            *(
                b" ",
                b"\r",
                b"\n",
                b"\t",
                b"-",
                b"Infinity",
                b'"f":1.5',
                b"true",
                b'"',
                b"\xef\xbb\xbf",
                b"\x01",
            ),
        ]
    ),
    max_size=8,
).map(lambda members: b"{" + b",".join(members) + b"}")


@given(messages | pieces | st.binary())
def test_a_short_frame_is_judged_like_any_other(raw: bytes) -> None:
    """`message` has a short way for most short frames, and `decode` has not."""
    expected: tuple[Any, str | None, str]
    try:
        expected = decode(raw, identity=IDENTITY), None, ""
    except WireFault as fault:
        expected = None, fault.cause, fault.detail
    value, cause, detail, weight = message(raw, identity=IDENTITY)
    assert (repr(value), cause, detail) == (repr(expected[0]), *expected[1:])
    assert cause is not None or weight >= len(raw)


@given(pieces | values.map(encode) | pieces.map(lambda raw: b"[" + raw + b"]"))
def test_agrees_with_the_plain_parser(raw: bytes) -> None:
    """Except for numbers, depth and surrogates, where the plain parser has no limits."""
    value, cause, *_ = message(raw)
    text = raw.decode("utf-8", "replace")
    try:
        plain = json.loads(text)
    except ValueError:
        assert cause in ("bad_json", "bom", "too_deep")
    except RecursionError:
        assert cause in ("too_deep", "bom")
    else:
        assert cause != "bad_json"
        if cause is None:
            assert value == _mended(plain)


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_mended(inner) for inner in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(inner) for key, inner in value.items()}
    return value


@given(st.lists(st.sampled_from([*'[]{}"', '\\"', "\\\\", "a", ","]), max_size=60).map("".join))
def test_depth_equals_a_character_by_character_count(text: str) -> None:
    """Both counts stop where the text is no longer JSON."""
    depth = deepest = 0
    inside = escaped = False
    for letter in text:
        if inside:
            inside, escaped = escaped or letter != '"', not escaped and letter == "\\"
        elif letter == "\\":
            return  # no JSON: a parser ends here
        elif letter == '"':
            inside = True
        else:
            depth += (letter in "[{") - (letter in "]}")
            deepest = max(deepest, depth)
    padded = "[" * (MOST_DEPTH - deepest) + text
    assert (message(padded.encode())[1] == "too_deep") is False
    assert (message(("[" + padded).encode())[1] == "too_deep") is True


@pytest.mark.parametrize(
    "value",
    [math.nan, -math.inf, [math.inf], {"a": object()}, b"bytes", {1, 2}, {(1,): 2}, "\ud800", {"\udc00": 1}],
)
def test_values_that_are_not_json_are_not_encoded(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        encode(value)


def test_circular_values_are_not_encoded() -> None:
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (circle, deep):
        with pytest.raises(ValueError, match=r"."):
            encode(value)


def test_a_circle_does_not_cost_its_content_again_and_again() -> None:
    circle: dict[str, Any] = {"text": "x" * 100_000}
    circle["me"] = circle
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="Circular"):
            encode(circle)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    shared = ["x"]
    assert encode([shared, shared]) == b'[["x"],["x"]]'  # twice is not a circle, and nothing is left over


def test_encoding_is_compact_utf8() -> None:
    assert encode({"a": [1, "é\n\u2028"]}) == '{"a":[1,"é\\n\u2028"]}'.encode()


def test_a_fault_has_a_cause_and_a_detail() -> None:
    with pytest.raises(WireFault) as caught:
        decode(b"[NaN]")
    assert caught.value.cause == "bad_number"
    assert str(caught.value) == "bad_number: NaN is not a number in JSON"


def test_frames_can_be_read_in_several_threads() -> None:
    """The hooks of one frame collect nothing of another."""
    frames = [b"[" + b"12345678901234567890," * 2000 + last + b"]" for last in (b"1", b"NaN", b"1e999", b"2")]
    wrong: list[object] = []

    def read(raw: bytes, expected: str | None) -> None:
        for _ in range(10):
            cause = message(raw)[1]
            if cause != expected:
                wrong.append((raw[-8:], cause))

    outcomes = (None, "bad_number", "bad_number", None)
    threads = [threading.Thread(target=read, args=job) for job in zip(frames, outcomes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert wire.LEAST_INTEGER < 0 < wire.MOST_INTEGER


# --- Memory ------------------------------------------------------------------------------------------------

escapes = st.lists(
    st.sampled_from([rb"\ud83d", rb"\uDE00", rb"\u0069", rb"\ud8", b"\x01", b"\\", b"u", b"d", b"8", b"x"]),
    max_size=40,
).map(b"".join)


@given(escapes, st.integers(1, 40))
@example(rb"\ud83d\ude00" * 20, 6)
@example(rb"\ud83d\ude00" * 20, 7)
@example(rb"\ud83d\ude00\ude00" * 20, 13)
def test_chunk_borders_do_not_change_which_surrogates_are_lone(text: bytes, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_CHUNK_BYTES", chunk)
        assert wire._mend_surrogates(text) == wire._LONE.sub(wire._MENDED, text)


@given(
    st.lists(st.sampled_from([b'"', b"\x01", b"\xff", b"\x01" * 5]), max_size=60).map(b"".join),
    st.integers(1, 20),
)
def test_chunk_borders_do_not_change_which_strings_are_skipped(text: bytes, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_CHUNK_BYTES", chunk)
        assert wire._outside_of_strings(text) == b"".join(text.split(b'"')[::2])


@given(
    st.lists(st.sampled_from([b'"', b'"', b"[", b"id", b"\\", b'\\"', b"x" * 300]), max_size=150).map(
        b"".join
    )
)
@example(b'"' * 126)
@example(b'"' * 127)
@example(b'"' * 128)
def test_long_strings_are_left_out_of_the_outline_only_as_strings(text: bytes) -> None:
    usual = wire._outline(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_CHUNK_BYTES", -1)
        found = wire._outline(text)
    assert found.rest == usual.rest
    if usual.strings is None or found.strings is None:
        assert usual.strings is found.strings
    else:
        assert found.strings == [each if len(each) < 256 else b"" for each in usual.strings]


# How it begins, what fills it up to the limit, how it ends, and what becomes of it.
HOSTILE: Mapping[str, tuple[str, str, str, str | None]] = {
    "lone surrogates": ('["', r"ab\ud800", '"]', None),
    "lone surrogates without an end": ('["', r"ab\ud800", "", "bad_json"),
    "many strings with lone surrogates": ("[", r'"\ud800abcdefghijklmnop",', "0]", "too_many_values"),
    "one wide character": ('["', "x", '\U0001f600"]', None),
    "quotes": ("", '"', "", "too_many_values"),
    "two brackets in strings": ("", '"]]', "", "too_many_values"),
    "four brackets in strings": ("", '"]]]]', "", "bad_json"),
    "deep, and brackets in strings": ("[" * 129, '"]]]]', "", "too_deep"),
    "escapes that are keys": ('{"id":"', r"\u0069", '","id":1}', "duplicate_key"),
    "brackets": ("", "[", "", "too_many_values"),
}


def peaks(frames: dict[str, list[str]], length: int, chunk: int | None) -> dict[str, list[Any]]:
    """The largest memory growth of a new process for each of these, in bytes, and the outcome."""
    import json
    import os
    import resource

    from runner.protocol import wire

    if chunk is not None:
        setattr(wire, "_CHUNK_BYTES", chunk)  # noqa: B010 -- not exported

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    wire.message(b'{"id": "\\\\ud800"}', identity=frozenset(("id",)))
    found = {}
    for name, (begin, filling, end, _) in frames.items():
        read, write = os.pipe()
        if not (child := os.fork()):
            before = peak()
            first, part, last = begin.encode(), filling.encode(), end.encode()
            raw = first + part * ((length - len(first) - len(last)) // len(part)) + last
            cause = wire.message(raw, identity=frozenset(("id",))).cause
            os.write(write, json.dumps([peak() - before, cause]).encode())
            os._exit(0)
        os.close(write)
        found[name] = json.loads(os.read(read, 4096))
        os.close(read)
        os.waitpid(child, 0)
    return found


def peaks_elsewhere(frames: Mapping[str, Any], chunk: int | None = None) -> dict[str, list[Any]]:
    asked = json.dumps([dict(frames), FRAME_LIMIT, chunk])
    command = [sys.executable, "-c", elsewhere.program(peaks), asked]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=120, check=True)
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def test_reading_a_frame_stays_within_its_share_of_memory() -> None:
    found = peaks_elsewhere(HOSTILE)
    assert {name: cause for name, (_, cause) in found.items()} == {
        name: row[-1] for name, row in HOSTILE.items()
    }
    assert {name: grown >> 20 for name, (grown, _) in found.items() if grown > memory.FRAME} == {}
    assert all(grown > FRAME_LIMIT // 2 for grown, _ in found.values())  # so it is measured

    # The same, taken apart in one piece.
    names = ("lone surrogates", "four brackets in strings")
    loose = peaks_elsewhere({name: HOSTILE[name] for name in names}, 1 << 40)
    assert all(grown > memory.FRAME for grown, _ in loose.values())
    assert [cause for _, cause in loose.values()] == [found[name][1] for name in names]
