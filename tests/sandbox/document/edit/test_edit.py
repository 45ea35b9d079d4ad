"""Texts before and after a change. What is not changed keeps every byte."""

from __future__ import annotations

import pytest

from sandbox.document.edit.change import (
    Change,
    DeleteKey,
    DropFirst,
    InsertList,
    Prepend,
    RenameKeys,
    SetNull,
    SetWord,
    SwapEntries,
    apply_changes,
    same,
)
from sandbox.document.edit.edit import edit_text, read_spans
from sandbox.document.edit.span import EditRefused, EditSyntax
from sandbox.document.edit.words import encode_word
from tests.tables import one_case

A = ("s", "a")
COMMAND, ARGS = (*A, "command"), (*A, "args")
Y, P = SetWord(COMMAND, "y"), Prepend(ARGS, ("p",))

NEW = SwapEntries(("s",), ("a", "c"), (("n", "[1]", [1]),))
SWAP = RenameKeys(A, (("x", "y"), ("y", "x")))

CASES: list[tuple[str, EditSyntax, str, tuple[Change, ...], str]] = [
    ("one entry for two", "json", '{"s": {"a": 1, "b": {}, "c": {}}}', (NEW,), '{"s": {"n": [1], "b": {}}}'),
    ("one for all", "json", '{"s": {\n "a": 1,\n "c": {}\n}}', (NEW,), '{"s": {\n "n": [1]\n}}'),
    (
        "one entry for two, with comments and trailing commas",
        "jsonc",
        '{"s": { /* a, */ "a": 1, // b,\n "b": 2 /* , */, // c,\n "c": 3,}}',
        (NEW,),
        '{"s": { /* a, */ "n": [1], // b,\n "b": 2 /* , */ // c,\n ,}}',
    ),
    (
        "two entries for one, of which one has its name",
        "json",
        '{"s": {\r\n  "a": 1}}',
        (SwapEntries(("s",), ("a",), (("a", "{ }", {}), ("b", "2", 2))),),
        '{"s": {\r\n  "a": { },\r\n  "b": 2}}',
    ),
    (
        "names of keys, of which each takes the place of another",
        "jsonc",
        '{"s": {"a": {"x" : 1, /* c */ "\\u0079": 2,}}}',
        (SWAP,),
        '{"s": {"a": {"y" : 1, /* c */ "x": 2,}}}',
    ),
    (
        "a name that needs quotes",
        "yaml",
        "s:\n  a: {x: 1, px 2: 3}\n",
        (RenameKeys(A, (("x", "true"), ("px 2", "x 2"))),),
        "s:\n  a: {'true': 1, x 2: 3}\n",
    ),
    (
        "a name of a dotted key",
        "toml",
        's.a."x" = 1\ns . a . p0 = 2 # c\n',
        (RenameKeys(A, (("x", "px"), ("p0", "0"))),),
        's.a."px" = 1\ns . a . 0 = 2 # c\n',
    ),
    (
        "a word, and a comment behind it",
        "jsonc",
        '{"s": {"a": {"command": "x" /* c */, }}}',
        (SetWord(COMMAND, "y"),),
        '{"s": {"a": {"command": "y" /* c */, }}}',
    ),
    (
        "before the first of a list on one line",
        "json",
        '{"s":{"a":{"args":["x","y"]}}}',
        (Prepend(ARGS, ("p", "q")),),
        '{"s":{"a":{"args":["p","q","x","y"]}}}',
    ),
    (
        "before the only one, which has a line of its own",
        "jsonc",
        '{"s": {"a": {"args": [ // c\r\n\t\t"x" // d\r\n]}}}',
        (Prepend(ARGS, ("p", "q")),),
        '{"s": {"a": {"args": [ // c\r\n\t\t"p",\r\n\t\t"q",\r\n\t\t"x" // d\r\n]}}}',
    ),
    (
        "into an empty list",
        "jsonc",
        '{"s": {"a": {"args": [ /* none */ ]}}}',
        (Prepend(ARGS, ("p", "q")),),
        '{"s": {"a": {"args": ["p", "q" /* none */ ]}}}',
    ),
    (
        "in place of null",
        "json",
        '{"s": {"a": {"args": null}}}',
        (Prepend(ARGS, ("p",)),),
        '{"s": {"a": {"args": ["p"]}}}',
    ),
    (
        "before a later item",
        "json",
        '{"s": {"a": {"args": ["x", "y"]}}}',
        (Prepend(ARGS, ("p",), 1),),
        '{"s": {"a": {"args": ["x", "p", "y"]}}}',
    ),
    (
        "a key behind another, on a line of its own",
        "json",
        '{"s": {"a": {\n  "command": "x",\n  "b": 1}}}',
        (InsertList(COMMAND, "args", ("p",)),),
        '{"s": {"a": {\n  "command": "x",\n  "args": ["p"],\n  "b": 1}}}',
    ),
    (
        "the first items gone, a comment between them and the rest kept",
        "jsonc",
        '{"s": {"a": {"args": ["p", /* a, b */ "q", // why\n "x"]}}}',
        (DropFirst(ARGS, 2),),
        '{"s": {"a": {"args": [ // why\n "x"]}}}',
    ),
    (
        "all items gone from a list that a host wrote anew",
        "json",
        '{"s": {"a": {"args": [\n "p",\n "q"\n]}}}',
        (DropFirst(ARGS, 2),),
        '{"s": {"a": {"args": []}}}',
    ),
    (
        "a list becomes null",
        "json",
        '{"s": {"a": {"args": ["p"]}}}',
        (SetNull(ARGS),),
        '{"s": {"a": {"args": null}}}',
    ),
    (
        "the first key deleted",
        "json",
        '{"s": {"a": {"args": ["p"], "b": 1}}}',
        (DeleteKey(ARGS),),
        '{"s": {"a": {"b": 1}}}',
    ),
    (
        "the only key deleted",
        "json",
        '{"s": {"a": {"args": ["p"]}}}',
        (DeleteKey(ARGS),),
        '{"s": {"a": {}}}',
    ),
    (
        "a byte order mark",
        "json",
        '\ufeff{"s": {"a": {"command": "é"}}}',
        (SetWord(COMMAND, "ü"),),
        '\ufeff{"s": {"a": {"command": "ü"}}}',
    ),
    (
        "an array over several lines, literal strings",
        "toml",
        "[s.a]\nargs = [ # c\n  'x', # d\n]\n",
        (Prepend(ARGS, ("p", 'say "q"')),),
        "[s.a]\nargs = [ # c\n  \"p\",\n  'say \"q\"',\n  'x', # d\n]\n",
    ),
    (
        "an inline table",
        "toml",
        "s.a = { command = 'x', b = 1 }\n",
        (InsertList(COMMAND, "args", ("p",)),),
        "s.a = { command = 'x', args = [\"p\"], b = 1 }\n",
    ),
    (
        "a dotted key with quotes",
        "toml",
        '[s]\n"a"."command" = """x"""\r\nb = 1\r\n',
        (SetWord(COMMAND, "y"), InsertList(COMMAND, "args", ("p",))),
        '[s]\n"a"."command" = "y"\r\n"a".args = ["p"]\r\nb = 1\r\n',
    ),
    (
        "a line deleted",
        "toml",
        '[s.a]\ncommand = "x"\nargs = ["p"]\n\n[t]\n',
        (DeleteKey(ARGS),),
        '[s.a]\ncommand = "x"\n\n[t]\n',
    ),
    (
        "a server in an array of tables",
        "toml",
        '[[s]]\nname = "a"\ncommand = "x"\n[[s]]\ncommand = "y"\n',
        (SetWord(("s", 1, "command"), "z"),),
        '[[s]]\nname = "a"\ncommand = "x"\n[[s]]\ncommand = "z"\n',
    ),
    (
        "a block list, as far right as its key",
        "yaml",
        "s:\n  a:\n    args:\n    # c\n    - x # d\n    - 'y'\n",
        (Prepend(ARGS, ("p", "--")),),
        "s:\n  a:\n    args:\n    # c\n    - p\n    - '--'\n    - x # d\n    - 'y'\n",
    ),
    (
        "a block list, further right",
        "yaml",
        "s:\r\n  a:\r\n    args:\r\n      - x",
        (Prepend(ARGS, ("yes", "1")),),
        "s:\r\n  a:\r\n    args:\r\n      - 'yes'\r\n      - '1'\r\n      - x",
    ),
    (
        "a flow list",
        "yaml",
        "s: {a: {args: [x, 'y']}}\n",
        (Prepend(ARGS, ("a, b",)),),
        "s: {a: {args: ['a, b', x, 'y']}}\n",
    ),
    (
        "a key of a flow mapping",
        "yaml",
        "s: {a: {command: x, b: 1}}\n",
        (InsertList(COMMAND, "args", ("p",)),),
        "s: {a: {command: x, args: [p], b: 1}}\n",
    ),
    (
        "a key behind the first of a list's item",
        "yaml",
        "s:\n  - command: x # c\n    b: 1\n",
        (InsertList(("s", 0, "command"), "args", ("p",)),),
        "s:\n  - command: x # c\n    args: [p]\n    b: 1\n",
    ),
    (
        "the first items of a block list gone",
        "yaml",
        "s:\n  a:\n    args:\n    - p\n    - q\n    # c\n    - x\n",
        (DropFirst(ARGS, 2),),
        "s:\n  a:\n    args:\n    - x\n",
    ),
    (
        "a key with a block list deleted",
        "yaml",
        "s:\n  a:\n    command: x\n    args:\n    - p\n    b: 1\n",
        (DeleteKey(ARGS),),
        "s:\n  a:\n    command: x\n    b: 1\n",
    ),
    (
        "a text of several lines among the arguments",
        "yaml",
        "s:\n  a:\n    args:\n    - -c\n    - |\n      one\n      two\n    b: 1\n",
        (Prepend(ARGS, ("p",)),),
        "s:\n  a:\n    args:\n    - p\n    - -c\n    - |\n      one\n      two\n    b: 1\n",
    ),
]


@pytest.mark.parametrize(
    ("syntax", "before", "changes", "after"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_change(syntax: EditSyntax, before: str, changes: tuple[Change, ...], after: str) -> None:
    assert edit_text(before, syntax, changes) == after


REFUSED: list[tuple[str, EditSyntax, str, Change, str]] = [
    ("an entry of that name", "json", '{"s": {"a": 1, "n": 2, "c": 3}}', NEW, "there is 'n' already"),
    ("an entry that is gone", "json", '{"s": {"a": 1}}', NEW, "not there"),
    ("entries of another syntax", "toml", "[s]\na = 1\nc = 2\n", NEW, "not there"),
    (
        "a name that is there",
        "json",
        '{"s": {"a": {"x": 1, "y": 2}}}',
        RenameKeys(A, (("x", "y"),)),
        "already",
    ),
    ("a key that is not there", "json", '{"s": {"a": {"y": 2}}}', RenameKeys(A, (("x", "z"),)), "not there"),
    ("an anchor", "yaml", "s:\n  a:\n    command: &c x\n", Y, "line 3: .*an anchor"),
    ("an alias", "yaml", "b: &b x\ns:\n  a:\n    command: *b\n", Y, "line 4: .*an alias"),
    (
        "an entry that is an alias",
        "yaml",
        "b: &b\n  command: x\ns:\n  a: *b\n",
        Y,
        "line 4: .*an alias",
    ),
    (
        "a list with an anchor",
        "yaml",
        "s:\n  a:\n    args: &a [x]\n",
        P,
        "line 3: .*anchor",
    ),
    (
        "an alias in a list",
        "yaml",
        "b: &b x\ns:\n  a:\n    args: [*b]\n",
        P,
        "line 4: .*alias",
    ),
    (
        "an entry that others repeat",
        "yaml",
        "s:\n  a: &a\n    command: x\n  b: *a\n",
        Y,
        "alter more than",
    ),
    (
        "several lines",
        "yaml",
        "s:\n  a:\n    command: x\n      y\n",
        Y,
        "line 3: .*several lines",
    ),
    (
        "block text",
        "yaml",
        "s:\n  a:\n    command: |\n      x\n",
        Y,
        "line 3: .*several lines",
    ),
    ("a tag", "yaml", "s:\n  a:\n    command: !!str x\n", Y, "line 3: .*a tag"),
    ("a null list", "yaml", "s:\n  a:\n    command: x\n    args:\n", P, "line 4: a list"),
    ("no list", "json", '{"s": {"a": {"args": "x"}}}', P, "line 1: a list"),
    ("no such key", "json", '{"s": {"a": {}}}', Y, "not there"),
    ("too few", "json", '{"s": {"a": {"args": ["x"]}}}', DropFirst(ARGS, 2), "too few"),
    ("too few before it", "json", '{"s": {"a": {"args": ["x"]}}}', Prepend(ARGS, ("p",), 1), "too few"),
    (
        "a key twice",
        "json",
        '{"s": {"a": 1},\n"s": {}}',
        Y,
        "line 2: the key 's' appears twice",
    ),
    ("no JSON", "json", '{"s": \n/x}', Y, "line 2: a value"),
    ("no TOML", "toml", "s = = 1", Y, "not TOML"),
    (
        "another way to write it that says something else",
        "json",
        '{"s": {"a": {"command": "x"}}}',
        SetWord(COMMAND, "y", '"y", "env": {}'),
        "alter more than",
    ),
]


@pytest.mark.parametrize(
    ("syntax", "before", "change", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_refused(syntax: EditSyntax, before: str, change: Change, message: str) -> None:
    with pytest.raises(EditRefused, match=message):
        edit_text(before, syntax, [change])


@one_case(
    "word",
    [
        *(
            "",
            "x",
            "--",
            "-",
            "---",
            "yes",
            "No",
            "null",
            "~",
            "1",
            "1.0",
            "0x1f",
            "-y",
            "--a=b",
            "a b",
            "a: b",
        ),
        *(
            "'",
            '"',
            "\\",
            "a'b\"c",
            "${X}",
            "{a}",
            "[b]",
            "#c",
            "a #c",
            "@scope/x@1.2",
            "%d",
            "*x",
            "&x",
            "!x",
        ),
        *(
            "é",
            "日本",
            "😀",
            "\u2028",
            "\x7f",
            "\x85",
            "\ufeff",
            "\t",
            "a\nb",
            "\x01",
            "\xa0",
            "C:\\x",
            "=x",
            "<<",
        ),
    ],
)
@one_case("syntax", ["json", "jsonc", "toml", "yaml"])
def test_every_syntax_reads_what_it_writes(syntax: EditSyntax, word: str) -> None:
    text = encode_word(word, syntax)
    assert "\n" not in text
    around = {"toml": f"k = [{text}, {text}]\n", "yaml": f"k: [{text}, {text}]\n"}
    data, _ = read_spans(around.get(syntax, f'{{"k": [{text}, {text}]}}'), syntax)
    assert data == {"k": [word, word]}
    if syntax == "yaml":
        assert read_spans(f"k:\n- {text}\n- {text}\n", syntax)[0] == {"k": [word, word]}


def test_a_change_leaves_the_data_it_is_given() -> None:
    data = {"s": {"a": {"command": "x", "args": ["y"]}}}
    after = apply_changes(data, (SetWord(COMMAND, "z"), P))
    assert data == {"s": {"a": {"command": "x", "args": ["y"]}}}
    assert after == {"s": {"a": {"command": "z", "args": ["p", "y"]}}}


def test_equal_to_python_is_not_the_same() -> None:
    assert same({"a": [1, None]}, {"a": [1, None]})
    assert not same(1, True)
    assert not same([1], [1.0])
    assert not same({"a": 1}, {"a": 1, "b": 2})
