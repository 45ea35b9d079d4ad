"""YAML: one meaning by either parser of PyYAML, and hostile text costs little."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.document import positions
from sandbox.document import yaml as yaml_text
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.document.read import Document, parse
from sandbox.spec import KeyPath
from tests.conftest import ROOT
from tests.tables import one_case

MIB = 1 << 20

# Built with libyaml on every machine that has PyYAML's wheels; the tests do not need it.
LOADERS = [yaml.SafeLoader, *([yaml.CSafeLoader] if hasattr(yaml, "CSafeLoader") else [])]
with_each_parser = pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)


@contextmanager
def _using(loader: type, retold: int = yaml_text._REREAD_CHARACTERS) -> Iterator[None]:
    before = yaml_text._LOADER, yaml_text._REREAD_CHARACTERS
    yaml_text._LOADER, yaml_text._REREAD_CHARACTERS = loader, retold
    try:
        yield
    finally:
        yaml_text._LOADER, yaml_text._REREAD_CHARACTERS = before


def read(text: str | bytes, loader: type = yaml.SafeLoader) -> Document:
    with _using(loader):
        return parse("f", text.encode() if isinstance(text, str) else text, "yaml")


def refusal(text: str | bytes, loader: type = yaml.SafeLoader) -> Diagnostic:
    with pytest.raises(DocumentError) as caught:
        read(text, loader)
    [diagnostic] = caught.value.diagnostics
    assert "\n" not in diagnostic.text() and len(diagnostic.text()) < 500
    return diagnostic


def test_the_parser_in_c_is_used_where_pyyaml_has_it() -> None:
    assert LOADERS[-1] is yaml_text._LOADER


# --- what words mean --------------------------------------------------------------------------------------

WORDS: list[tuple[str, object]] = [
    *((word, None) for word in ("", "~", "null", "Null", "NULL", "!!null ''", "!!null null")),
    *((word, True) for word in ("true", "True", "TRUE", "!!bool true")),
    *((word, False) for word in ("false", "False", "FALSE")),
    ("0", 0),
    ("-0", 0),
    ("+12", 12),
    ("-12", -12),
    ("0o17", 15),
    ("0x1F", 31),
    ("!!int 5", 5),
    ("!!int '5'", 5),
    ("1.5", 1.5),
    (".5", 0.5),
    ("5.", 5.0),
    ("1e3", 1000.0),
    ("-1.5E-3", -0.0015),
    ("!!float 5", 5.0),
    # Strings, although YAML 1.1 reads something else.
    *((word, word) for word in ("yes", "Yes", "no", "NO", "on", "off", "y", "n", "nULL", "tRUE", "=", "<<")),
    *((word, word) for word in ("1:20", "190:20:30", "1_000", "0b11", "-0x1f", "0o8", "0x", "1e", "+", ".")),
    *((word, word) for word in ("2024-01-01", "2024-01-01T10:00:00Z", "1.2.3", "inf", "nan", "0x1_0")),
    ("'1'", "1"),
    ('"true"', "true"),
    ("!!str 5", "5"),
    ("!!str", ""),
    ("!<tag:yaml.org,2002:str> 5", "5"),
    ("|-\n  1", "1"),
    (">-\n  a\n  b\n", "a b"),
    ("'it''s'", "it's"),
    ('"\\N\\L\\P\\/\\x41\\u00e9\\U0001f600\\\n  x"', "\x85\u2028\u2029/Aé😀x"),
    ("'a\tb'", "a\tb"),
    ("|-\n a\tb", "a\tb"),
    ("x # tab\tin a comment", "x"),
    ("!!seq [1]", [1]),
    ("!!map {b: 1}", {"b": 1}),
    ("[http://x/y]", ["http://x/y"]),
    ("{b: c,}", {"b": "c"}),
    ("{b, c}", {"b": None, "c": None}),
    ("[b: c]", [{"b": "c"}]),
]


@with_each_parser
@one_case(("text", "value"), WORDS, ids=[repr(text) for text, _ in WORDS])
def test_scalars_have_the_values_of_yaml_1_2(text: str, value: object, loader: type) -> None:
    found = read(f"a: {text}\n", loader).data["a"]
    assert found == value and type(found) is type(value)


# --- what is refused, and where ---------------------------------------------------------------------------

REFUSED = [
    # Words that two versions of YAML read as two numbers, and numbers that JSON does not have.
    ("a: 0777", "yaml_number", 1, 4),
    ("a: -08", "yaml_number", 1, 4),
    ("a: .inf", "yaml_number", 1, 4),
    ("a: -.INF", "yaml_number", 1, 4),
    ("a: .nan", "yaml_number", 1, 4),
    (f"a: {'9' * 1025}", "number_too_large", 1, 4),
    (f"a: 0x{'9' * 1025}", "number_too_large", 1, 4),
    (f"a: !!float {'9' * 400}", "number_too_large", 1, 4),
    # Tags.
    ("a: !foo 1", "yaml_tag", 1, 4),
    ("a: ! 1", "yaml_tag", 1, 4),
    ("a:\n  - !!python/object/apply:os.system ['true']", "yaml_tag", 2, 5),
    ("a: !!python/name:os.system", "yaml_tag", 1, 4),
    ("a: !!binary aGk=", "yaml_tag", 1, 4),
    ("a: !!timestamp 2024-01-01", "yaml_tag", 1, 4),
    ("a: !!set {b, c}", "yaml_tag", 1, 4),
    ("a: !!omap [b: 1]", "yaml_tag", 1, 4),
    ("a: !e!x 1", "yaml_tag", 1, 4),
    ("a: !%ed%a0%80 1", "yaml_tag", 1, 4),
    ("a: !<x 1", "yaml_tag", 1, 4),
    ("a: !!int x", "yaml_tag", 1, 4),
    ("a: !!bool 1", "yaml_tag", 1, 4),
    ("a: !!null x", "yaml_tag", 1, 4),
    ("a: !!int 1.5", "yaml_tag", 1, 4),
    ("a: !!seq x", "yaml_tag", 1, 4),
    ("a: !!str [x]", "yaml_tag", 1, 4),
    # Keys.
    ("a: {1: 2}", "yaml_key", 1, 5),
    ("true: 1", "yaml_key", 1, 1),
    ("~: 1", "yaml_key", 1, 1),
    (": 1", "yaml_syntax", 1, 1),
    ("? \n: 1", "yaml_key", 1, 2),
    ("[a]: 1", "yaml_key", 1, 1),
    ("? {a: 1}\n: 1", "yaml_key", 1, 3),
    ("a: &a x\n*a : 1", "yaml_key", 2, 1),
    ("!!int 1: 1", "yaml_key", 1, 1),
    ("a: {<<: {b: 1}}", "yaml_merge_key", 1, 5),
    ("b: &b {}\n<<: *b", "yaml_merge_key", 2, 1),
    (f"? {'k' * 1025}\n: 1", "key_too_long", 1, 3),
    ("a: {b: 1, 'b': 2}", "duplicate_key", 1, 11),
    # Aliases.
    ("a: *b", "yaml_alias", 1, 4),
    ("a: &a [1, *a]", "yaml_alias", 1, 11),
    ("a: &a\n  b:\n    c: *a", "yaml_alias", 3, 8),
    # Documents and directives.
    ("---\na: 1\n---\nb: 1", "yaml_documents", 3, 1),
    ("a: 1\n--- x", "yaml_documents", 2, 1),
    ("a: 1\n...\n# c\n%TAG ! x\n---\n", "yaml_documents", 4, 1),
    ("%YAML 1.1\n---\na: 1", "yaml_directive", 1, 1),
    ("# c\n%TAG ! tag:x\n---\na: 1", "yaml_directive", 2, 1),
    ("%YAML 1.2\n%YAML 1.2\n---\na: 1", "yaml_directive", 2, 1),
    # Characters that hide something, or that only one of the parsers takes.
    ("a: 1 #\rb: 2", "yaml_syntax", 1, 7),
    ("a: 1 #\x85b: 2", "yaml_syntax", 1, 7),
    ("a: 1 #\u2028b: 2", "yaml_syntax", 1, 7),
    ("a: '\u2029'", "yaml_syntax", 1, 5),
    ("a: '\ufeff'", "yaml_syntax", 1, 5),
    ("a: '\x1b'", "yaml_syntax", 1, 5),
    ("a: '\x7f'", "yaml_syntax", 1, 5),
    ("a:\tb", "yaml_syntax", 1, 3),
    ("a: b\tc", "yaml_syntax", 1, 5),
    ("a:\n\tb: 1", "yaml_syntax", 2, 1),
    ("a: b\t# c", "yaml_syntax", 1, 5),
    ("a: |\t\n b", "yaml_syntax", 1, 5),
    ("a: |\n \tb", "yaml_syntax", 2, 2),
    ("a: !!str\tb", "yaml_syntax", 1, 9),
    ("a: [\tb]", "yaml_syntax", 1, 5),
    ("a: |#\n b", "yaml_syntax", 1, 5),
    ("a: [b?c]", "yaml_syntax", 1, 6),
    ('a: "\\ud83d\\ude00"', "invalid_character", 1, 5),
    ('a: "\\\\\\ud800"', "invalid_character", 1, 7),
    ('a: "\\U00110000"', "invalid_character", 1, 5),
    ('a: "é\\U0000dfff"', "invalid_character", 1, 6),
    # Syntax.
    ("é: [é, 😀, é", "yaml_syntax", 1, 12),
    ("a: 1\r\nb: ]\r\n", "yaml_syntax", 2, 4),
    ("a: b: c", "yaml_syntax", 1, 5),
    ("a: 1\n b: 2", "yaml_syntax", 2, 3),
    ("  a: 1\n b: 2", "yaml_syntax", 2, 2),
    ("a:\n  b: 1\n c: 2", "yaml_syntax", 3, 2),
    ("- a\nb: 1", "yaml_syntax", 2, 1),
    ("a: - b", "yaml_syntax", 1, 4),
    ("a\nb: 1", "yaml_syntax", 2, 2),
    ("a: @x", "yaml_syntax", 1, 4),
    ("a: `x`", "yaml_syntax", 1, 4),
    ("a: %x", "yaml_syntax", 1, 4),
    ("a: 1\n%x", "yaml_documents", 2, 1),
    ("a: 'x", "yaml_syntax", 1, 4),
    ("a: '\n---\n'", "yaml_syntax", 2, 1),
    ('a: "\\q"', "yaml_syntax", 1, 5),
    ('a: "\\xzz"', "yaml_syntax", 1, 7),
    ("a: |0\n x", "yaml_syntax", 1, 5),
    ("a: |x\n x", "yaml_syntax", 1, 5),
    ("a: & x", "yaml_syntax", 1, 5),
    ("a: &x &y 1", "yaml_syntax", 1, 7),
    ("a: {b: 1", "yaml_syntax", 1, 9),
    ("...\na: 1", "yaml_syntax", 1, 1),
]
REFUSED_NAMES = [repr(row[0])[:40] for row in REFUSED]


@with_each_parser
@one_case(("text", "rule", "line", "column"), REFUSED, ids=[repr(row[0])[:40] for row in REFUSED])
def test_each_refusal_has_its_rule_and_position(
    text: str, rule: str, line: int, column: int, loader: type
) -> None:
    found = refusal(text, loader)
    assert (found.rule, found.line, found.column) == (rule, line, column)
    # In our words: PyYAML says "expected" and "found".
    assert (
        not any(word in found.message for word in ("expected", "found", "<", "token"))
        or "<<" in found.message
    )


@one_case("text", [row[0] for row in REFUSED], ids=REFUSED_NAMES)
def test_each_refusal_has_the_same_words_by_either_parser(text: str) -> None:
    assert len({refusal(text, loader) for loader in LOADERS}) == 1


@with_each_parser
def test_a_large_document_is_not_read_again_for_its_words(loader: type) -> None:
    """The words may differ there. The rule and the line do not."""
    text = "a: 1\n" + "#\n" * yaml_text._REREAD_CHARACTERS + "]"
    found = refusal(text, loader)
    assert (found.rule, found.line) == ("yaml_syntax", yaml_text._REREAD_CHARACTERS + 2)


@with_each_parser
@pytest.mark.parametrize(
    "text",
    [
        "%YAML 1.2\n---\na: 1\n",
        "# c\n\n%YAML 1.2\r\n# c\n---\na: 1\n",
        "--- {a: 1}",
        "a: 1\n...\n# c\n\n",
        "a: 1\n...\n...\n",
        "? a\n: 1\n",
        "&k a: &v 1\n",
    ],
)
def test_other_ways_to_write_a_document(text: str, loader: type) -> None:
    assert read(text, loader).data == {"a": 1}


# --- positions --------------------------------------------------------------------------------------------

PLACES = """\
top: 1
"qu.oted": 'x'  # not: a key
long: |
  not: a key

plugin:
  id: a
  list:
  - x
  -
    - ä: 1
      b: &anchor {c: [d, 😀, e]}
  - {y: 1, "z": [ 2, 3 ]}
again:
  - *anchor
folded: >-
  a
  b
empty:
? last
: - 1
"""


@with_each_parser
@one_case("line_end", ["\n", "\r\n"])
@one_case(
    ("keys", "place"),
    [
        ((), (1, 1)),
        (("top",), (1, 1)),
        (("qu.oted",), (2, 1)),
        (("long",), (3, 1)),
        (("not",), (1, 1)),
        (("plugin",), (6, 1)),
        (("plugin", "id"), (7, 3)),
        (("plugin", "missing"), (6, 1)),
        (("plugin", "list"), (8, 3)),
        (("plugin", "list", 0), (9, 5)),
        (("plugin", "list", 1), (11, 5)),
        (("plugin", "list", 1, 0), (11, 7)),
        (("plugin", "list", 1, 0, "ä"), (11, 7)),
        (("plugin", "list", 1, 0, "b"), (12, 7)),
        (("plugin", "list", 1, 0, "b", "c"), (12, 19)),
        (("plugin", "list", 1, 0, "b", "c", 1), (12, 26)),
        (("plugin", "list", 1, 0, "b", "c", 2), (12, 29)),
        (("plugin", "list", 2), (13, 5)),
        (("plugin", "list", 2, "z"), (13, 12)),
        (("plugin", "list", 2, "z", 1), (13, 22)),
        (("plugin", "list", 9), (8, 3)),
        (("again", 0), (15, 5)),
        # What an alias repeats stands where it was written.
        (("again", 0, "c"), (12, 19)),
        (("again", 0, "c", 2), (12, 29)),
        (("folded",), (16, 1)),
        (("empty",), (19, 1)),
        (("last",), (20, 3)),
        (("last", 0), (21, 5)),
    ],
)
def test_where(keys: KeyPath, place: tuple[int, int], line_end: str, loader: type) -> None:
    assert read(PLACES.replace("\n", line_end), loader).where(keys) == place


@with_each_parser
def test_an_alias_is_a_copy(loader: type) -> None:
    found: Any = read("a: &a {b: [1]}\nc: *a\nd: [*a, *a]\n", loader).data
    assert found == {"a": {"b": [1]}, "c": {"b": [1]}, "d": [{"b": [1]}, {"b": [1]}]}
    found["a"]["b"].append(2)
    assert found["c"] == found["d"][0] == found["d"][1] == {"b": [1]}


# --- bounds -----------------------------------------------------------------------------------------------


@with_each_parser
def test_aliases_are_counted_as_often_as_they_stand(loader: type) -> None:
    rows = (positions.VALUE_LIMIT - 5) // 4  # the mapping, two lists and two texts; 4 values for each alias
    text = "a: &a [x, [y]]\nb: [" + "*a, " * (rows - 1)
    assert len(json.dumps(read(text + "]", loader).data)) > 60_000
    assert refusal(text + "*a, *a, *a]", loader).rule == "too_many_values"


@with_each_parser
def test_the_text_that_aliases_repeat_is_bounded(loader: type) -> None:
    word = "x" * 1024
    text = f"a: &a {word}\nb: [" + "*a, " * (yaml_text.REPEATED_LIMIT // 1024)
    read(text + "]", loader)
    found = refusal(text + "*a]", loader)
    assert (found.rule, found.line, found.column) == ("yaml_alias", 2, 5 + 4 * 1024)


@with_each_parser
def test_keys_count_as_text_that_aliases_repeat(loader: type) -> None:
    text = f"a: &a {{{'k' * 1000}: 1}}\nb: [" + "*a, " * (yaml_text.REPEATED_LIMIT // 1000 + 1) + "]"
    assert refusal(text, loader).rule == "yaml_alias"


def _laughs(_: int) -> bytes:
    """9 to the power of 60 texts, in 4 KB."""
    levels = (b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 61))
    return b"a0: &a0 [lol]\n" + b"".join(levels)


def _repeat(unit: bytes, head: bytes = b"", tail: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def _numbered(row: bytes, head: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: (
        head + b"".join(row % number for number in range((size - len(head)) // (len(row) + 3)))
    )


HOSTILE: dict[str, tuple[Callable[[int], bytes], str | None]] = {
    "brackets": (_repeat(b"["), "too_deep"),
    "brackets on lines": (_repeat(b"[\n"), "too_deep"),
    "braces": (_repeat(b"{"), "yaml_key"),
    "braces with keys": (_repeat(b"{a: "), "too_deep"),
    "dashes": (_repeat(b"- "), "too_deep"),
    "question marks": (_repeat(b"? "), "yaml_key"),
    "indentation": (lambda _: b"".join(b" " * i + b"a:\n" for i in range(700)), "too_deep"),
    "aliases of aliases": (_laughs, "too_many_values"),
    "a chain of aliases": (
        lambda _: b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (i, i, i - 1) for i in range(1, 9000)),
        "too_deep",
    ),
    "aliases of a long text": (
        lambda size: _repeat(b"*a,", b"a: &a " + b"x" * (size // 2) + b"\nb: [", b"]")(size),
        "yaml_alias",
    ),
    "aliases of a wide list": (
        _repeat(b"*a,", b"a: &a [" + b"1," * 9_000 + b"]\nb: [", b"]"),
        "too_many_values",
    ),
    "aliases of nothing": (_repeat(b"a: *b\n"), "yaml_alias"),
    "anchors side by side": (_repeat(b"&a "), "yaml_syntax"),
    "anchors": (_numbered(b"- &a%d\n"), "too_many_values"),
    "tags side by side": (_repeat(b"! "), "yaml_tag"),
    "a long tag": (_repeat(b"x", b"a: !"), "yaml_tag"),
    "an escaped tag": (_repeat(b"%41", b"a: !"), "yaml_tag"),
    "a long anchor": (_repeat(b"x", b"a: &"), None),
    "a long alias": (_repeat(b"x", b"a: *"), "yaml_alias"),
    "%TAG": (_numbered(b"%%TAG !a%d! b\n"), "yaml_directive"),
    "%TAG at the end": (_numbered(b"%%TAG !a%d! b\n", b"a: 1\n...\n"), "yaml_documents"),
    "documents": (_repeat(b"---\n"), "yaml_documents"),
    "ends of documents": (_repeat(b"...\n", b"a: 1\n"), None),
    "plain text": (_repeat(b"x", b"a: "), None),
    "plain words": (_repeat(b"x ", b"a: "), None),
    "plain lines": (_repeat(b" x\n", b"a: x\n"), None),
    "quoted text": (_repeat(b"x", b'a: "', b'"'), None),
    "quoted text never closed": (_repeat(b"x", b'a: "'), "yaml_syntax"),
    "escapes": (_repeat(b"\\n", b'a: "', b'"'), None),
    "escapes never closed": (_repeat(b"\\n", b'a: "'), "yaml_syntax"),
    "quotes in quotes": (_repeat(b"''", b"a: '", b"'"), None),
    "empty lines in quotes": (_repeat(b"\n", b'a: "', b'"'), None),
    "block text": (_repeat(b" x\n", b"a: |\n"), None),
    "folded text": (_repeat(b" x\n", b"a: >\n"), None),
    "empty block text": (_repeat(b"\n", b"a: |\n"), None),
    "a long key": (_repeat(b"x", b"", b": 1"), "yaml_syntax"),
    "a long quoted key": (_repeat(b"x", b'"', b'": 1'), "yaml_syntax"),
    "a long explicit key": (_repeat(b"x", b"? ", b"\n: 1"), "key_too_long"),
    "words without a colon": (_repeat(b"word\n"), "not_an_object"),
    "comments": (_repeat(b"#\n", b"a: 1\n"), None),
    "tabs in a comment": (_repeat(b"\t", b"a: 1 #"), None),
    "blank lines": (_repeat(b"\r\n", b"a: 1"), None),
    "tabs": (_repeat(b"\t"), "yaml_syntax"),
    "digits": (_repeat(b"9", b"a: "), "number_too_large"),
    "digits and a letter": (_repeat(b"9", b"a: ", b"x"), None),
    "an exponent": (_repeat(b"9", b"a: 1e"), "number_too_large"),
    "the same key": (_repeat(b"a: 1\n"), "duplicate_key"),
    "keys": (_numbered(b"a%d: 1\n"), "too_many_values"),
    "keys between braces": (_numbered(b"a%d: 1,", b"{"), "too_many_values"),
    "items": (_repeat(b"1,", b"a: ["), "too_many_values"),
    "empty items": (_repeat(b"-\n", b"a:\n"), "too_many_values"),
    "commas": (_repeat(b",", b"a: ["), "yaml_syntax"),
    "colons": (_repeat(b": "), "yaml_syntax"),
    "too large": (lambda _: b"a: " + b"x" * MIB, "file_too_large"),
}


@functools.cache
def _ordinary_cost(loader: type, size: int) -> float:
    """Processor seconds for a document of long texts."""
    row = b"key%05d: some words that describe what this key is good for, and some more of them\n"
    raw = b"".join(row % number for number in range(size // (len(row) + 1)))
    started = time.process_time()
    read(raw, loader)
    return time.process_time() - started


@with_each_parser
@one_case("name", HOSTILE)
def test_hostile_documents_cost_little(name: str, loader: type) -> None:
    """Measured against an ordinary document, because the parser in Python and a busy machine are slow."""
    make, rule = HOSTILE[name]
    # The parser in Python reads a document that is not refused to its end.
    size = MIB if loader is not yaml.SafeLoader else MIB // (32 if rule is None else 4)
    raw = make(size)
    assert len(raw) <= size or rule == "file_too_large"
    ordinary = _ordinary_cost(loader, size)
    started = time.process_time()
    if rule is None:
        read(raw, loader)
    else:
        assert refusal(raw, loader).rule == rule
    assert time.process_time() - started < 1 + 20 * ordinary


@with_each_parser
@pytest.mark.parametrize("name", ["aliases of aliases", "aliases of a long text"])
def test_hostile_aliases_take_little_memory(name: str, loader: type) -> None:
    raw = HOSTILE[name][0](MIB // 8)
    refusal("a: [", loader)  # imports
    tracemalloc.start()
    try:
        refusal(raw, loader)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


# --- any text ---------------------------------------------------------------------------------------------

_BITS = (
    "a b 1 : - ? [ ] { } , # ' \" & * ! !!str !!map !!int !x !a!b !%ed%a0%80 &a *a | > |- |2 |# % %a --- ... "
    "\\ \\n \\ud800 \\U00110000 \\x4 é 😀 << ~ null 0o7 07 1e5 .5 .inf @ ` = ?b a?b a:b -a"
)
_SPACES = (" ", "  ", "\t", "\n", "\n  ", "\n    ", "\r\n", "\n- ", "\n---\n", "\n...\n", ": ", "- ", ", ")
_LINES = ("a: 1\n", "b: ", "- &a x\n", "k: |\n ", "k: >-\n  ", "[*a, ", " #", "\x85", "\ufeff", "%YAML 1.2\n")
_PARTS = (*_BITS.split(" "), *_SPACES, *_SPACES, *_LINES)
_TEXTS = st.lists(st.sampled_from(_PARTS), max_size=20).map("".join)


def _outcome(raw: bytes, loader: type, retold: int = yaml_text._REREAD_CHARACTERS) -> object:
    with _using(loader, retold):
        try:
            found = parse("f", raw, "yaml")
        except DocumentError as error:
            lines = [diagnostic.text() for diagnostic in error.diagnostics]
            assert lines and not any("\n" in line for line in lines)
            return error.diagnostics
        return json.dumps(found.data), found._offsets


@settings(max_examples=500, deadline=None)
@given(_TEXTS, st.booleans())
def test_either_parser_reads_the_same_and_refuses_the_same(text: str, below: bool) -> None:
    raw = (f"a: 1\nk: {text}" if below else text).encode()
    outcomes = [_outcome(raw, loader) for loader in LOADERS]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    # Without the second reading too, except for words and places.
    alone = _outcome(raw, LOADERS[-1], retold=0)
    refused = isinstance(outcomes[0], tuple) and isinstance(outcomes[0][0], Diagnostic)
    assert (isinstance(alone, tuple) and isinstance(alone[0], Diagnostic)) == refused
    assert refused or alone == outcomes[0]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode), st.sampled_from(LOADERS))
def test_any_bytes_are_a_document_or_a_refusal(raw: bytes, loader: type) -> None:
    assert _outcome(raw, loader)


# Not what YAML refuses raw. In ASCII, JSON writes characters beyond U+FFFF as two escapes, which are refused.
_CHARACTERS = st.characters(
    max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc", "Cn"], exclude_characters="\u2028\u2029\ufeff"
) | st.sampled_from("\n\t\r\x01\x1f\"\\/:#-?,[]{}&*!|>'%@` ")
_STRINGS = st.text(_CHARACTERS, max_size=6)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _STRINGS
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_STRINGS, inner, max_size=3),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(_STRINGS, _VALUES, max_size=4),
    st.sampled_from([(None, None), (2, None), (None, (",", ":")), (1, (" ,", " : "))]),
    st.booleans(),
    st.sampled_from(LOADERS),
)
def test_json_is_read_as_by_the_json_parser(
    data: dict[str, Any], shape: tuple[int | None, tuple[str, str] | None], ascii_: bool, loader: type
) -> None:
    raw = json.dumps(data, indent=shape[0], separators=shape[1], ensure_ascii=ascii_).encode()
    as_json, as_yaml = parse("f", raw, "json"), read(raw, loader)
    assert json.dumps(as_yaml.data) == json.dumps(as_json.data)
    assert as_yaml._offsets == as_json._offsets


def test_yaml_is_imported_only_for_yaml() -> None:
    program = (
        "import sys; from sandbox.document.read import parse;"
        "parse('f', b'{}', 'json'); parse('f', b'', 'toml');"
        "print('yaml' in sys.modules, end=' '); parse('f', b'a: 1', 'yaml'); print('yaml' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False True\n"
