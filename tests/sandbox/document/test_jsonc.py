"""JSON with comments and trailing commas: what is added to JSON, what is not, and where everything stands."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.document import jsonc, positions
from sandbox.document.diagnostic import DocumentError
from sandbox.document.read import Document, parse

MIB = 1 << 20


def read(text: str) -> Document:
    return parse("f", text.encode(), "jsonc")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ('{"a": 1}', {"a": 1}),
        ('// x\n{"a": 1} // y', {"a": 1}),
        ('{"a": /* x */ 1, /* } */}', {"a": 1}),
        ('{"a": [1, 2,],}', {"a": [1, 2]}),
        ('{"a": [1, // one\n 2, /* two */ // more\n ]\n, }', {"a": [1, 2]}),
        ('{"a": "// no comment", "b": "/* nor */ this",}', {"a": "// no comment", "b": "/* nor */ this"}),
        ('{"a": "\\"// no", "b": "x,}"}', {"a": '"// no', "b": "x,}"}),
        ('{"a": 1//x\r\n,}', {"a": 1}),
        ('{"a": true/**/}', {"a": True}),
        ("{/* {{ */}", {}),
        ('{"a": {"b": [],},}', {"a": {"b": []}}),
        ('{"a": "é", /* é\u2028 */ "b": 1}', {"a": "é", "b": 1}),
    ],
)
def test_comments_and_trailing_commas_are_read(text: str, data: dict[str, Any]) -> None:
    assert read(text).data == data


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("{,}", 1, 2),
        ('{"a": [,]}', 1, 8),
        ('{"a": [1,,]}', 1, 10),
        ('{"a": 1,,}', 1, 9),
        ('{"a":,}', 1, 6),
        ("{'a': 1}", 1, 2),
        ("{a: 1}", 1, 2),
        ('{"a": 1 "b": 2}', 1, 9),
        ('{"a": 1 # x\n}', 1, 9),
        ('{"a": 1 / 2}', 1, 9),
        ('{"a": 1} /* open', 1, 10),
        ('{"a": 1, /* /* */ */ }', 1, 19),
        ('{"a": "x // y\n"}', 1, 14),
        ('{"a": "open // ', 1, 7),
        ('{"a": 1},', 1, 9),
        ("/", 1, 1),
        ('{"a": NaN,}', 1, 7),
        ('{"a": 0x10}', 1, 8),
        ('{"a"/**/b: 1}', 1, 9),
    ],
)
def test_all_else_is_as_wrong_as_in_json(text: str, line: int, column: int) -> None:
    with pytest.raises(DocumentError) as caught:
        read(text)
    [fault] = caught.value.diagnostics
    assert (fault.rule, fault.line, fault.column) == ("json_syntax", line, column)
    assert "not JSON" not in fault.hint


def test_json_itself_stays_strict() -> None:
    for text in ('{"a": 1,}', '{"a": 1} // x', '{/**/"a": 1}'):
        with pytest.raises(DocumentError):
            parse("f", text.encode(), "json")


def test_keys_appear_once() -> None:
    with pytest.raises(DocumentError, match="appears twice"):
        read('{"a": 1, // x\n "a": 2}')


def test_positions_are_those_of_the_text() -> None:
    found = read('{ // one\r\n /* two\n three */ "a": [1, /* x */ 2,],\n "b": {"c": 3,},\n}')
    assert found.where(("a",)) == (3, 11)
    assert found.where(("a", 1)) == (3, 28)
    assert found.where(("b", "c")) == (4, 8)


_TEXTS = st.sampled_from(["", "//", "/*", "*/", ",]", '"', "\\"])
_PAD = st.sampled_from(["", " ", "\n", "// x\n", "/* , } */", "/**/", "/*\n*/ "])


@settings(max_examples=400, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-9, 9)
        | st.sampled_from(["", "//", "/*", "*/", ",]", '"', "\\"]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab/*,"), inner, max_size=3)
        ),
        max_leaves=12,
    ),
    st.data(),
)
def test_comments_between_the_words_change_nothing(value: Any, data: st.DataObject) -> None:
    plain = json.dumps({"root": value})
    words = re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', plain)
    text = ""
    before = ""
    for word in words:
        if word in ("]", "}") and before not in ("[", "{") and data.draw(st.booleans()):
            text += "," + data.draw(_PAD)
        text += word + data.draw(_PAD)
        before = word
    assert read(text).data == {"root": value}
    assert len(jsonc.without_comments(text)) == len(text)
    assert [at for at, c in enumerate(jsonc.without_comments(text)) if c == "\n"] == [
        at for at, c in enumerate(text) if c == "\n"
    ]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(['"', "/", "*", "\\", ",", "[", "]", "{", "}", ":", "1", "a", "\n", " ", "//"]))
)
def test_any_text_is_a_document_or_a_refusal(bits: list[str]) -> None:
    text = "".join(bits)
    try:
        lines = str(read(text).data)
    except DocumentError as error:
        lines = "".join(each.text() for each in error.diagnostics)
    assert "\n" not in lines
    # What JSON takes, this takes, and reads alike.
    try:
        strict = parse("f", text.encode(), "json").data
    except DocumentError:
        return
    assert read(text).data == strict


HOSTILE = {
    "comments": (b"//\n" * (MIB // 3 - 10) + b"{}", None),
    "closed comments": (b"/**/" * (MIB // 4 - 10) + b"{}", None),
    "comments never closed": (b"/*" * (MIB // 2), "json_syntax"),
    "slashes": (b"/" * MIB, "json_syntax"),
    "stars": (b"/*" + b"*" * (MIB - 4) + b"/", "json_syntax"),
    "brackets": (b"[" * MIB, "too_deep"),
    "closing brackets": (b"]" * MIB, "json_syntax"),
    "commas": (b"{" + b"," * (MIB - 1), "json_syntax"),
    "items": (b'{"a":[' + b"1," * 500_000 + b"]}", "too_many_values"),
    "as many as allowed": (b'{"a":[' + b"1,/**/" * (positions.VALUE_LIMIT - 2) + b"]}", None),
    "escapes never closed": (b'{"a":"' + b"\\n" * (MIB // 2 - 10), "json_syntax"),
    "digits": (b'{"a":' + b"9" * (MIB - 10) + b"}", "number_too_large"),
    "commas and comments": (b'{"a":[1' + b",//\n" * (MIB // 4 - 10), "json_syntax"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_cost_little(name: str) -> None:
    raw, rule = HOSTILE[name]
    started = time.process_time()
    found = None
    try:
        parse("f", raw, "jsonc")
    except DocumentError as error:
        found = error.diagnostics[0].rule
    spent = time.process_time() - started
    assert found == rule
    assert spent < 20  # what is quadratic takes minutes, on any machine
