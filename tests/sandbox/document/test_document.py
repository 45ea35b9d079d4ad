"""Untrusted documents: bounded in every dimension, and each refusal is one line with its position."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pkgutil
import re
import resource
import socket
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from re._parser import SubPattern  # type: ignore[import-not-found]
from re._parser import parse as parse_pattern
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runner
import sandbox
from sandbox.document import json as json_text
from sandbox.document import jsonc, positions
from sandbox.document import toml as toml_text
from sandbox.document import yaml as yaml_text
from sandbox.document.diagnostic import Diagnostic, DocumentError, printable, quoted
from sandbox.document.read import Document, Format, parse, read_bounded
from sandbox.spec import KeyPath
from tests.tables import one_case

MIB = 1 << 20


def refusal(raw: bytes, format: Format) -> Diagnostic:  # noqa: A002
    with pytest.raises(DocumentError) as caught:
        parse("f", raw, format)
    [diagnostic] = caught.value.diagnostics
    assert "\n" not in diagnostic.text()
    return diagnostic


# --- reading ------------------------------------------------------------------------------------------


def test_a_file_is_read_up_to_the_limit_and_not_one_byte_further(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"x" * 100)
    assert read_bounded(str(path), limit=100) == b"x" * 100
    with pytest.raises(DocumentError) as caught:
        read_bounded(str(path), limit=99)
    [diagnostic] = caught.value.diagnostics
    assert diagnostic.rule == "file_too_large"
    assert "100" in diagnostic.message and "99" in diagnostic.message


def test_a_file_of_100_mb_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with path.open("wb") as file:
        file.truncate(100 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DocumentError, match="104857600"):
        read_bounded(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_file_that_lies_about_its_size_is_still_bounded() -> None:
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(DocumentError, match="more than 10 bytes"):
        read_bounded("/proc/self/maps", limit=10)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _directory(path: Path) -> None:
    path.mkdir()


def _link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_fifo, "a FIFO"),
        (_socket, "a socket"),
        (_directory, "a directory"),
        (_link_to_device, "a character device"),
    ],
)
def test_only_regular_files_are_read_and_none_of_them_blocks(tmp_path: Path, make: Any, kind: str) -> None:
    path = tmp_path / "m"
    make(path)
    started = time.monotonic()
    with pytest.raises(DocumentError) as caught:
        read_bounded(str(path))
    assert time.monotonic() - started < 30
    [diagnostic] = caught.value.diagnostics
    assert diagnostic.rule == "not_a_file" and kind in diagnostic.message


@pytest.mark.parametrize(("name", "rule"), [("missing", "file_missing"), ("a\0b", "file_missing")])
def test_a_missing_file_is_reported(tmp_path: Path, name: str, rule: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read_bounded(f"{tmp_path}/{name}")
    assert [d.rule for d in caught.value.diagnostics] == [rule]


def test_an_unreadable_file_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    path.write_text("x")

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    # Root can read everything, so the kernel's answer is given by hand.
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(DocumentError) as caught:
        read_bounded(str(path))
    [diagnostic] = caught.value.diagnostics
    assert diagnostic.rule == "file_unreadable"
    assert "Permission denied" in diagnostic.message and str(os.geteuid()) in diagnostic.hint


# --- what is refused, and where ---------------------------------------------------------------------------

REFUSED: list[tuple[Format, bytes, str, int, int]] = [
    ("toml", b"a = 1\nb = \n", "toml_syntax", 2, 5),
    ("toml", b"a = 1\n[a\n", "toml_syntax", 2, 3),
    ("toml", b"a = 2024-13-01", "toml_syntax", 1, 9),
    ("toml", b'a = "never closed', "toml_syntax", 1, 5),
    ("toml", b'a = """\nnever\nclosed', "toml_syntax", 1, 5),
    ("toml", b"x = 1\n\n  x = 2\n", "duplicate_key", 3, 3),
    ("toml", b"[t]\nx = {a = 1, a = 2}\n", "duplicate_key", 2, 13),
    ("toml", b"[t]\n[t]\n", "toml_syntax", 2, 3),
    ("toml", b"a = 99999999999999999999", "number_too_large", 1, 1),
    ("toml", b'a = ["x", "\\u0000"]', "nul_character", 1, 11),
    ("toml", b'\xc3\xa4 = "\xff"', "invalid_utf8", 1, 6),
    ("toml", b"a = 1\nb\x00", "nul_byte", 2, 2),
    ("toml", b"\xef\xbb\xbfa = 1", "byte_order_mark", 1, 1),
    ("toml", b"\xff\xfea\x00", "invalid_utf8", 1, 1),
    ("json", b"", "json_syntax", 1, 1),
    ("json", b'{\n  "a": 1,\n}', "json_syntax", 3, 1),
    ("json", b'{"a": [\n  1,\n\n ]}', "json_syntax", 4, 2),
    ("json", b'{"a": 1} x', "json_syntax", 1, 10),
    ("json", b'{"a": [1 2]}', "json_syntax", 1, 10),
    ("json", b'{"a": "b', "json_syntax", 1, 7),
    ("json", b'{"a": NaN}', "json_syntax", 1, 7),
    ("json", b'{"a": -Infinity}', "json_syntax", 1, 7),
    ("json", b'{"a": 1e999}', "number_too_large", 1, 7),
    ("json", b'{"a": 9223372036854775808}', "number_too_large", 1, 2),
    ("json", b'{"a": 1,\n "\\u0061": 2}', "duplicate_key", 2, 2),
    ("json", b'{"a": {"b": [{"c": 1, "c": 1}]}}', "duplicate_key", 1, 23),
    ("json", b'{"a": "\\u0000"}', "nul_character", 1, 2),
    ("json", b'{"a": ["\\ud800"]}', "invalid_character", 1, 8),
    ("json", b"[1]", "not_an_object", 1, 1),
    ("json", b"\xef\xbb\xbf{}", "byte_order_mark", 1, 1),
    ("yaml", b"", "not_an_object", 1, 1),
    ("yaml", b"a: 1\nb: ]\n", "yaml_syntax", 2, 4),
    ("yaml", b"a: [1,\n  2\n", "yaml_syntax", 3, 1),
    ("yaml", b'a: "never closed', "yaml_syntax", 1, 4),
    ("yaml", b"x: 1\n\nx: 2\n", "duplicate_key", 3, 1),
    ("yaml", b't:\n  x: {a: 1, "\\u0061": 2}\n', "duplicate_key", 2, 13),
    ("yaml", b"a: 99999999999999999999", "number_too_large", 1, 1),
    ("yaml", b"a: 1e999", "number_too_large", 1, 4),
    ("yaml", b'a: ["x", "\\u0000"]', "nul_character", 1, 10),
    ("yaml", b'a: ["\\ud800"]', "invalid_character", 1, 6),
    ("yaml", b'\xc3\xa4: "\xff"', "invalid_utf8", 1, 5),
    ("yaml", b"a: 1\nb\x00", "nul_byte", 2, 2),
    ("yaml", b"- 1", "not_an_object", 1, 1),
    ("yaml", b"\xef\xbb\xbfa: 1", "byte_order_mark", 1, 1),
    ("yaml", b"\xff\xfea\x00", "invalid_utf8", 1, 1),
]


@one_case(("format", "raw", "rule", "line", "column"), REFUSED)
def test_each_refusal_has_its_rule_and_position(
    format: Format,  # noqa: A002
    raw: bytes,
    rule: str,
    line: int,
    column: int,
) -> None:
    diagnostic = refusal(raw, format)
    assert (diagnostic.rule, diagnostic.line, diagnostic.column) == (rule, line, column)


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        ("toml", b'a = "\\u0000"\n[t]\nb = ["x", "\\u0000"]\n"\\u0000c" = 99999999999999999999\n'),
        ("json", b'{"a": "\\u0000",\n\n"b": ["\\u0000"],\n"\\u0000c": 99999999999999999999}'),
        ("yaml", b'a: "\\0"\n\nb: ["\\0"]\n"\\0c": 99999999999999999999\n'),
    ],
)
def test_all_unusable_values_are_reported(format: Format, raw: bytes) -> None:  # noqa: A002
    with pytest.raises(DocumentError) as caught:
        parse("f", raw, format)
    assert [(d.rule, d.line) for d in caught.value.diagnostics] == [
        ("nul_character", 1),
        ("nul_character", 3),
        ("nul_character", 4),
        ("number_too_large", 4),
    ]


def test_at_most_fifty_unusable_values_are_reported() -> None:
    with pytest.raises(DocumentError) as caught:
        parse("f", b'{"a": [' + b",".join([b'"\\u0000"'] * 15_000) + b"]}", "json")
    *shown, last = caught.value.diagnostics
    assert [d.column for d in shown] == list(range(8, 8 + 50 * 9, 9))
    assert (last.rule, last.message) == ("too_many_faults", "14950 more faults are not shown")


def test_the_largest_integers_that_fit_are_accepted() -> None:
    assert parse("f", b"a = 9223372036854775807", "toml").data == {"a": 2**63 - 1}
    assert parse("f", b'{"a": -9223372036854775808}', "json").data == {"a": -(2**63)}
    assert parse("f", b"a: 0x7fffffffffffffff", "yaml").data == {"a": 2**63 - 1}


# --- bounds -------------------------------------------------------------------------------------------------


def _deep(count: int) -> dict[str, tuple[Format, bytes]]:
    return {
        "arrays": ("toml", b"a = " + b"[" * count + b"]" * count),
        "inline tables": ("toml", b"a = " + b"{a = " * (count - 1) + b"{}" + b"}" * (count - 1)),
        "dotted key": ("toml", b".".join([b"a"] * count) + b" = 1"),
        "header": ("toml", b"[" + b".".join([b"a"] * count) + b"]"),
        "header and key": ("toml", b"[" + b".".join([b"a"] * (count - 2)) + b"]\nx.y = 1"),
        "JSON arrays": ("json", b'{"a":' + b"[" * (count - 1) + b"]" * (count - 1) + b"}"),
        "JSON objects": ("json", b'{"a":' * (count - 1) + b"{}" + b"}" * (count - 1)),
        "YAML brackets": ("yaml", b"a: " + b"[" * (count - 1) + b"]" * (count - 1)),
        "YAML lists": ("yaml", b"a:\n" + b"- " * (count - 1) + b"x"),
        "YAML mappings": ("yaml", b"".join(b" " * level + b"a:\n" for level in range(count))),
        "YAML alias": (
            "yaml",
            b"a: &a " + b"[" * (count // 2) + b"]" * (count // 2) + b"\n"
            b"b: " + b"[" * (count - count // 2 - 1) + b"*a" + b"]" * (count - count // 2 - 1),
        ),
    }


@pytest.mark.parametrize("shape", _deep(1))
def test_nesting_is_bounded_exactly(shape: str) -> None:
    # A TOML array at key "a" lies one level below the key.
    allowed = positions.DEPTH_LIMIT - (shape in ("arrays", "inline tables"))
    format_, raw = _deep(allowed)[shape]
    parse("f", raw, format_)
    format_, raw = _deep(allowed + 1)[shape]
    assert refusal(raw, format_).rule == "too_deep"


HOSTILE: dict[str, tuple[Format, bytes, str | None]] = {
    "100k arrays": ("toml", b"a = " + b"[" * 100_000, "too_deep"),
    "100k inline tables": ("toml", b"a = " + b"{a = " * 100_000, "too_deep"),
    "100k dotted segments": ("toml", b".".join([b"a"] * 100_000) + b" = 1", "too_deep"),
    "100k header segments": ("toml", b"[" + b".".join([b"a"] * 100_000) + b"]", "too_deep"),
    "many long headers": (
        "toml",
        b"".join(b"[%s]\n" % b".".join([b"a%d" % i] * 60) for i in range(3_000)),
        "too_many_values",
    ),
    "many long keys": (
        "toml",
        b"[%s]\n" % b".".join([b"t"] * 30)
        + b"".join(b"%s = 1\n" % b".".join([b"a%d" % i] * 30) for i in range(5_000)),
        "too_many_values",
    ),
    "a long key behind nonsense": ("toml", b"?\n" + b".".join([b"a"] * 400_000) + b" = 1", "toml_syntax"),
    "many keys": ("toml", b"".join(b"a%d=1\n" % i for i in range(90_000)), "too_many_values"),
    "many tables": ("toml", b"[[a]]\n" * 170_000, "too_many_values"),
    "many items": ("toml", b"a = [" + b"1," * 500_000 + b"]", "too_many_values"),
    "as many keys as allowed": ("toml", b"".join(b"a%d=1\n" % i for i in range(positions.VALUE_LIMIT)), None),
    "as many tables as allowed": ("toml", b"[[a]]\n" * positions.VALUE_LIMIT, None),
    "one long string": ("toml", b'a = "' + b"x" * (MIB - 10) + b'"', None),
    "escapes": ("toml", b'a = "' + b"\\n" * (MIB // 2 - 10) + b'"', None),
    "long escapes": ("toml", b'a = """' + b"\\n" * (MIB // 2 - 10) + b'"""', None),
    "quotes in a long string": ("toml", b'a = """' + b'""x' * (MIB // 3 - 10) + b'"""', None),
    "escapes never closed": ("toml", b'a = "' + b"\\n" * (MIB // 2 - 10), "toml_syntax"),
    "long string never closed": ("toml", b'a = """' + b'""x' * (MIB // 3 - 10), "toml_syntax"),
    "quotes in a long literal": ("toml", b"a = '''" + b"''x" * (MIB // 3 - 10) + b"'''", None),
    "long literal never closed": ("toml", b"a = '''" + b"''x" * (MIB // 3 - 10), "toml_syntax"),
    "long escapes never closed": ("toml", b'a = """' + b"\\n" * (MIB // 2 - 10), "toml_syntax"),
    "comments": ("toml", b"#\n" * (MIB // 2), None),
    "blank lines": ("toml", b" \n" * (MIB // 2), None),
    "comments in an array": ("toml", b"a = [" + b" #\n" * (MIB // 3 - 5) + b"]", None),
    "digits": ("toml", b"a = " + b"9" * (MIB - 10), "number_too_large"),
    "hexadecimal digits": ("toml", b"a = 0x" + b"f" * (MIB - 10), "number_too_large"),
    "a long key": ("toml", b"a" * (MIB - 10) + b" = 1", "key_too_long"),
    "JSON arrays": ("json", b"[" * MIB, "too_deep"),
    "JSON objects": ("json", b'{"a":' * 200_000, "too_deep"),
    "JSON keys": ("json", b"{%s}" % b",".join(b'"a%d":1' % i for i in range(90_000)), "too_many_values"),
    "JSON items": ("json", b'{"a":[' + b"1," * 500_000 + b"1]}", "too_many_values"),
    "JSON escapes": ("json", b'{"a":"' + b"\\n" * (MIB // 2 - 10) + b'"}', None),
    "JSON escapes never closed": ("json", b'{"a":"' + b"\\n" * (MIB // 2 - 10), "json_syntax"),
    "JSON digits": ("json", b'{"a":' + b"9" * (MIB - 10) + b"}", "number_too_large"),
    "JSON spaces": ("json", b"{" + b" " * (MIB - 10) + b"}", None),
    "too large": ("json", b" " * (MIB + 1), "file_too_large"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_cost_little(name: str) -> None:
    format_, raw, rule = HOSTILE[name]
    assert len(raw) <= MIB or rule in ("too_deep", "too_many_values", "file_too_large")
    started = time.process_time()
    try:
        parse("f", raw[:MIB] if rule != "file_too_large" else raw, format_)
        found = None
    except DocumentError as error:
        [diagnostic] = error.diagnostics
        found = diagnostic.rule
        assert len(diagnostic.text()) < 500
    assert found == rule
    assert time.process_time() - started < 20  # what is quadratic takes minutes, on any machine


PACKAGES = (runner, sandbox)
_ONE_CHARACTER = {"IN", "LITERAL", "NOT_LITERAL", "ANY", "CATEGORY"}


def _repeats(parsed: Any) -> Iterator[tuple[str, bool]]:
    """The kind of each repetition in a pattern, and whether it repeats one character."""
    for operation, argument in parsed:
        name = str(operation)
        if name.endswith("_REPEAT"):
            body = argument[2]
            yield name, len(body) == 1 and str(body[0][0]) in _ONE_CHARACTER
        pending = [argument]
        while pending:  # patterns inside of this one, in whichever tuple or list they lie
            part = pending.pop()
            if isinstance(part, SubPattern):
                yield from _repeats(part)
            elif isinstance(part, (tuple, list)):
                pending.extend(part)


def _patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                module = importlib.import_module(found.name)
                for name, value in vars(module).items():
                    if isinstance(value, re.Pattern):
                        yield f"{found.name}.{name}", value


def test_possessive_patterns_repeat_single_characters_only() -> None:
    """Python before 3.11.5 (Debian 12 has 3.11.2) matches possessive groups wrongly: CPython issue 106052."""
    found = 0
    for name, pattern in _patterns():
        for kind, single in _repeats(parse_pattern(pattern.pattern, pattern.flags)):
            assert kind != "POSSESSIVE_REPEAT" or single, name
            found += kind == "POSSESSIVE_REPEAT"
    assert found


@pytest.mark.parametrize("module", [json_text, jsonc, toml_text, yaml_text])
def test_the_scanners_patterns_never_backtrack(module: ModuleType) -> None:
    """So a match takes time linear in its length, on any text."""
    patterns = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    assert patterns
    for pattern in patterns:
        if pattern.pattern.endswith(r"\Z"):  # reads the messages of tomllib, not the document
            continue
        for kind, _ in _repeats(parse_pattern(pattern.pattern, pattern.flags)):
            assert kind == "POSSESSIVE_REPEAT", pattern.pattern


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["toml", "json", "jsonc", "yaml"]))
def test_any_bytes_are_a_document_or_a_refusal(raw: bytes, format_: Format) -> None:
    try:
        found = parse("f", raw, format_).data
    except DocumentError as error:
        found = {d.text(): d for d in error.diagnostics}
        lines = "".join(found)
        assert found and "\n" not in lines
    assert isinstance(found, dict)


_TOML_WORDS = "a b . = [ ] [[ ]] { } , \" ' \"\"\" ''' \\ # 1 1.5 true 2024-01-01 - _ \t \r\n é \\n"
_TOML_LINES = (" ", "\n", 'a = "x"\n', "[t]\n", "[[u]]\n", "k = [1, {x = 2}]\n", "a.b = 1\n")
_TOML_BITS = st.sampled_from((*_TOML_WORDS.split(" "), *_TOML_LINES))


@settings(max_examples=500, deadline=None)
@given(st.lists(_TOML_BITS, max_size=25).map("".join))
def test_every_document_that_tomllib_accepts_is_scanned_to_the_end(text: str) -> None:
    """The limits hold only for text that our scan understood, so it must understand all that tomllib
    does."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        with pytest.raises(DocumentError):
            parse("f", text.encode(), "toml")
        return
    found = parse("f", text.encode(), "toml")
    assert found.data == data
    _check_positions(found, text)


_STRING_BITS = ('"', "'", "\\", "n", "\n")


@pytest.mark.parametrize("quote", ['"', "'", '"""', "'''"])
def test_toml_strings_end_where_tomllib_ends_them(quote: str) -> None:
    accepted = 0
    for bits in (bits for count in range(6) for bits in itertools.product(_STRING_BITS, repeat=count)):
        text = f"a = {quote}{''.join(bits)}{quote}\nb = 1\n"
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            continue
        accepted += 1
        seen = toml_text.scan(text)
        assert (seen.stop, seen.offsets) == (None, {("a",): 0, ("b",): text.rindex("b")}), (text, data)
    assert accepted > 50


def test_json_strings_end_where_the_standard_parser_ends_them() -> None:
    accepted = 0
    for bits in (bits for count in range(7) for bits in itertools.product(_STRING_BITS, repeat=count)):
        text = f'["{"".join(bits)}",1]'
        try:
            data = json.loads(text)
        except ValueError:
            continue
        accepted += 1
        seen = json_text.scan(text)
        assert (seen.stop, seen.offsets) == (None, {(0,): 1, (1,): len(text) - 2}), (text, data)
    assert accepted > 50


_KEYS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(_KEYS, _VALUES, max_size=4), st.sampled_from([None, 2]), st.booleans())
def test_json_is_read_back_and_every_key_has_a_position(
    data: dict[str, Any], indent: int | None, ascii_: bool
) -> None:
    text = json.dumps(data, indent=indent, ensure_ascii=ascii_)
    found = parse("f", text.encode(), "json")
    assert found.data == data
    _check_positions(found, text)


def _check_positions(found: Document, text: str) -> None:
    """Every path of the data has a position, and the key is at that position."""
    lines = text.split("\n")
    pending: list[tuple[KeyPath, object]] = [((), found.data)]
    while pending:
        keys, value = pending.pop()
        if keys:
            line, column = found.where(keys)
            assert keys in found._offsets
            rest = lines[line - 1][column - 1 :]
            if isinstance(keys[-1], str):
                assert rest.startswith(('"', "'", keys[-1]))
        if isinstance(value, dict):
            pending.extend(((*keys, key), item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend(((*keys, index), item) for index, item in enumerate(value))


# --- positions --------------------------------------------------------------------------------------------

TOML = b'''\
top = 1
"qu.oted" = 'x'  # not [a.table]
long = """
[not.a.table]
x = 1
"""

[plugin]
id = "a"
dotted . key = 2
inline = { x = 1, y = [ { z = 1 }, "b" ] }

  [plugin.sandbox]
  paths = [
    # "comment",
    "/a", '/b',
    "\xc3\xa4", "/c",
  ]

[[tools]]
name = "first"
[tools.schema]
type = "object"
[[tools]]
name = "second"
[tools.schema]
type = "second"
[[tools.nested]]
n = 1
'''


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ((), (1, 1)),
        (("top",), (1, 1)),
        (("qu.oted",), (2, 1)),
        (("long",), (3, 1)),
        (("not", "a", "table"), (1, 1)),
        (("plugin",), (8, 2)),
        (("plugin", "id"), (9, 1)),
        (("plugin", "missing"), (8, 2)),
        (("plugin", "dotted"), (10, 1)),
        (("plugin", "dotted", "key"), (10, 10)),
        (("plugin", "inline", "x"), (11, 12)),
        (("plugin", "inline", "y"), (11, 19)),
        (("plugin", "inline", "y", 0, "z"), (11, 27)),
        (("plugin", "inline", "y", 1), (11, 36)),
        (("plugin", "sandbox"), (13, 11)),
        (("plugin", "sandbox", "paths"), (14, 3)),
        (("plugin", "sandbox", "paths", 0), (16, 5)),
        (("plugin", "sandbox", "paths", 1), (16, 11)),
        (("plugin", "sandbox", "paths", 3), (17, 10)),
        (("plugin", "sandbox", "paths", 9), (14, 3)),
        (("tools",), (20, 3)),
        (("tools", 0, "name"), (21, 1)),
        (("tools", 0, "schema", "type"), (23, 1)),
        (("tools", 1), (24, 3)),
        (("tools", 1, "name"), (25, 1)),
        (("tools", 1, "schema", "type"), (27, 1)),
        (("tools", 1, "nested", 0, "n"), (29, 1)),
    ],
)
def test_where_in_toml(keys: KeyPath, place: tuple[int, int]) -> None:
    assert parse("f", TOML, "toml").where(keys) == place


def test_where_counts_windows_line_ends() -> None:
    assert parse("f", TOML.replace(b"\n", b"\r\n"), "toml").where(("plugin", "sandbox", "paths", 3)) == (
        17,
        10,
    )


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ((), (1, 1)),
        (("a",), (2, 3)),
        (("a", 1), (2, 12)),
        (("a", 1, "b"), (2, 13)),
        (("a", 1, "c"), (2, 12)),
        (("ü", "x\n"), (3, 9)),
    ],
)
def test_where_in_json(keys: KeyPath, place: tuple[int, int]) -> None:
    raw = '{\n  "a": [1, {"b": 2}],\n  "ü": {"x\\n": null}}'.encode()
    # "ü" is one column though two bytes.
    assert parse("f", raw, "json").where(keys) == place


# --- text -------------------------------------------------------------------------------------------------


def test_text_leaves_out_a_place_that_does_not_exist() -> None:
    assert Diagnostic("f", 3, 4, "r", "m").text() == "f:3:4: r: m"
    assert Diagnostic("f", 0, 0, "r", "m").text() == "f: r: m"


def test_untrusted_text_cannot_control_the_terminal() -> None:
    assert printable("plain äß") == "plain äß"
    assert printable("\x1b[2J\n\r\t\x7f\x9b") == "\\x1b[2J\\n\\r\\t\\x7f\\x9b"
    assert printable("a\u202eb\u2028\udcff\U000e0041") == "a\\u202eb\\u2028\\udcff\\U000e0041"
    assert quoted("x" * 100, 10) == "'xxxxxxxxx…'"
    assert "\n" not in Diagnostic("a\nb", 1, 1, "r", "m\x1b[0m").text()
