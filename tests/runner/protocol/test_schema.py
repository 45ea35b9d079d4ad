"""Untrusted schemas: correct results for honest ones, bounded cost for hostile ones, and no network
access."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.protocol import schema as schemas
from runner.protocol.schema import MOST_FAULTS, Schema
from runner.protocol.schema_cost import SchemaFault
from tests.conftest import ROOT
from tests.tables import one_case

TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "n": {"type": "integer"}},
}
ANY_JSON = {
    "$defs": {
        "any": {
            "anyOf": [
                {"type": ["string", "number", "boolean", "null"]},
                {"type": "array", "items": {"$ref": "#/$defs/any"}},
                {"type": "object", "additionalProperties": {"$ref": "#/$defs/any"}},
            ]
        }
    },
    "$ref": "#/$defs/any",
}
TUPLE_07 = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]}


@pytest.mark.parametrize(
    ("schema", "value", "faults"),
    [
        (True, object, ["(the value): it cannot be checked: Unsupported type"]),
        (True, 1, []),
        (False, 1, ["(the value): "]),
        ({"type": "string"}, "a", []),
        ({"type": "string"}, 1, ["(the value): it has to be a string"]),
        ({"properties": {"a/b~c": {"type": "string"}}}, {"a/b~c": 1}, ["/a~1b~0c: "]),
        ({"properties": {"\x1b": {"type": "string"}}}, {"\x1b": 1}, ["/\ufffd: "]),
        ({"items": {"type": "string"}}, [1, "a", 2], ["/0: ", "/2: "]),
        ({"items": {"type": "string"}}, [1] * 50, [f"/{number}: " for number in range(MOST_FAULTS)]),
        (
            {"required": ["a"], "properties": {"path": {}}, "additionalProperties": False},
            {"pth": 1},
            [
                "(the value): the key 'pth' is unknown here; did you mean 'path'?",
                "(the value): the key 'a' is missing",
            ],
        ),
        ({"additionalProperties": False}, {"b": 1}, ["(the value): nothing is allowed here"]),
        (
            {"properties": {"a": {}}, "additionalProperties": False},
            {"q": 1, "\x1b": 1},
            ["(the value): unknown keys: 'q', '\\x1b'"],
        ),
        ({"oneOf": [{"type": "string"}]}, 1, ["(the value): it has to be a string"]),
        ({"oneOf": [True, True]}, 1, ["(the value): it fits more than one of the schemas in 'oneOf'"]),
        (TREE, {"left": {"right": {"n": 1}}}, []),
        (TREE, {"left": {"right": {"n": "1"}}}, ["/left/right/n: "]),
        (ANY_JSON, {"a": [1, {"b": [None, "c"]}]}, []),
        (TUPLE_07, ["a", 1], []),
        (TUPLE_07, [1], ["/0: "]),
        ({"$defs": {"s": {"$anchor": "here", "type": "string"}}, "$ref": "#here"}, 1, ["(the value): "]),
        ({"$defs": {"a/b": {"type": "string"}}, "items": {"$ref": "#/$defs/a~1b"}}, [1], ["/0: "]),
        ({"$defs": {"a b": {"type": "string"}}, "items": {"$ref": "#/$defs/a%20b"}}, [1], ["/0: "]),
        ({"$schema": "http://127.0.0.1:9/unheard-of", "prefixItems": [{"type": "string"}]}, [1], ["/0: "]),
        ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, {"a": 1}, []),
        ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, {"b": 1}, ["(the value): "]),
        ({"format": "email"}, "x", []),
        ({"pattern": "^[a-z]{1,64}$"}, "abc", []),
        ({"pattern": "^[a-z]{1,64}$"}, "ABC", ["(the value): "]),
        ({"propertyNames": {"pattern": "^a"}}, {"b": 1}, ["(the value): "]),
        ({"dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, {"a": 1}, ["(the value): "]),
        ({"properties": {"$ref": {"type": "string"}, "enum": {"type": "string"}}}, {"$ref": 1}, ["/$ref: "]),
        ({"enum": [{"$ref": "http://127.0.0.1:9/"}]}, {"$ref": "http://127.0.0.1:9/"}, []),
        ({"type": "string"}, "\ud800", ["(the value): it cannot be checked: "]),
        ({"type": "object"}, {1: 2}, ["(the value): it cannot be checked: "]),
    ],
)
def test_faults(schema: Any, value: Any, faults: list[str]) -> None:
    found = Schema(schema).faults(value)
    assert len(found) == len(faults)
    for sentence, beginning in zip(found, faults, strict=True):
        assert sentence.startswith(beginning) and sentence.isprintable()


_NONE_OF = "it fits none of the schemas in 'anyOf'"
_MORE = "it has more items than its schema allows"


@one_case(
    ("schema", "value", "words"),
    [
        ({"type": ["string", "null"]}, 1, "it has to be null or a string"),
        ({"const": {"a": "ä"}}, 1, 'it has to be {"a": "ä"}'),
        ({"enum": ["a", 1]}, "b", 'it has to be one of "a", 1'),
        ({"enum": list(range(11))}, "b", "it has to be one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …"),
        ({"minProperties": 1}, {}, "it has less than 1 key"),
        ({"maxProperties": 0}, {"a": 1}, "it has more than 0 keys"),
        ({"propertyNames": {"maxLength": 2}}, {"abc": 1}, 'the key "abc" is longer than 2 characters'),
        ({"uniqueItems": True}, [1, 1], "the same item is in it twice"),
        ({"contains": {"const": 1}}, [2], "too few or too many of its items fit the schema in 'contains'"),
        ({"not": {"const": 1}}, 1, "it must not fit the schema in 'not'"),
        ({"unevaluatedItems": False}, [1], _MORE),
        ({**TUPLE_07, "additionalItems": False}, ["a", 1], _MORE),
        # An optional argument of a server in Python.
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 1, "it has to be a string or null"),
        (
            {"anyOf": [{"type": "string"}, {"enum": [1, 2]}]},
            3,
            f"{_NONE_OF}: it has to be a string; or it has to be one of 1, 2",
        ),
        ({"anyOf": [{"items": {"const": 1}}, {"type": "null"}]}, [2], _NONE_OF),
        ({"anyOf": [{"anyOf": [{"const": 1}]}, {"type": "null"}]}, 2, _NONE_OF),
    ],
)
def test_plain_words(schema: Any, value: Any, words: str) -> None:
    assert Schema(schema).faults(value) == (f"(the value): {words}",)


def test_a_type_that_there_is_not() -> None:
    with pytest.raises(SchemaFault, match=r'/type: .* one of "array", "boolean", .*"string"; or '):
        Schema({"type": "str"})


def test_faults_do_not_repeat_the_value() -> None:
    (fault,) = Schema({"type": "integer"}).faults("the secret")
    assert "secret" not in fault


def chain(length: int) -> dict[str, Any]:
    """Each refers to the next one, and the last to the members of its value, again from the first."""
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$defs": {**links, f"a{length}": {"items": {"$ref": "#"}}}, "$ref": "#/$defs/a0"}


def doubling(levels: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 4} for i in range(levels)}
    return {"$defs": {**links, f"a{levels}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def deep(keyword: str, levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {keyword: schema}
    return schema


def listed(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@one_case(
    ("schema", "why"),
    [
        (None, "has to be a boolean or an object"),
        (5, "has to be a boolean or an object"),
        ([], "has to be a boolean or an object"),
        ({"type": "nonsense"}, "/type: "),
        ({"minLength": -1}, "/minLength: "),
        ({"multipleOf": 0}, "/multipleOf: "),
        ({"minimum": float("nan")}, "/minimum: "),
        ({"minimum": 10**5000}, "large integer"),
        ({"const": "\ud800"}, "UTF-8"),
        ({1: 2}, "not JSON"),
        ({"a": object()}, "Unsupported"),
        ({"$ref": "#"}, "leads back"),
        ({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, "leads back"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "leads back",
        ),
        ({"$dynamicAnchor": "x", "$dynamicRef": "#x"}, "not supported"),
        ({"properties": {"a": {"$recursiveRef": "#"}}}, "not supported"),
        ({"$ref": "#/$defs/none"}, "not there"),
        ({"allOf": [{"type": "string"}], "$ref": "#/allOf/9"}, "not there"),
        ({"$ref": "#none"}, "not there"),
        ({"$defs": {"a": {"$dynamicAnchor": "x"}}, "$ref": "#x"}, "not there"),
        ({"$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}}, "$ref": "#x"}, "two places"),
        ({"$schema": "http://json-schema.org/draft-04/schema", "items": {"id": "urn:x"}}, "a nested id"),
        ({"$ref": "http://127.0.0.1:9/x"}, "outside of itself"),
        ({"$ref": "file:///etc/hostname"}, "outside of itself"),
        ({"$ref": "other.json"}, "outside of itself"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "outside of itself"),
        ({"$defs": {"a": {"$ref": "http://127.0.0.1:9/x"}}}, "lead nowhere|outside"),
        ({"properties": {"a": {"$id": "http://127.0.0.1:9/x", "$ref": "#"}}}, r"nested \$id"),
        (deep("items", 200), "nested"),
        (deep("not", 100_000), "nested"),
        (chain(40), "chain of more than"),
        (chain(2000), "chain of more than"),
        ({"properties": {f"p{i}": {"type": "string"} for i in range(100_000)}}, "too large"),
        ({"description": "x" * (1 << 21)}, "too large"),
        ({"allOf": [{"pattern": f"a{i}"} for i in range(300)]}, "regular expressions"),
        ({"allOf": [{"pattern": "a" * 1000 + str(i)} for i in range(40)]}, "too long"),
        ({"patternProperties": {r"\w" * 600: {}}}, "too many classes"),
        ({"patternProperties": {"(?=a)": {}}}, "regex"),
        ({"not": {"pattern": "(?=a)"}}, "cannot be left out"),
        ({"if": {"properties": {"a": {"pattern": "(?=a)"}}}, "then": {}}, "cannot be left out"),
    ],
)
def test_refused(schema: Any, why: str) -> None:
    with pytest.raises(SchemaFault, match=why) as caught:
        Schema(schema)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_a_circle_in_python_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["items"] = circle
    wide: list[Any] = []
    for _ in range(60):
        wide = [wide, wide]
    for schema in (circle, {"const": wide}):
        with pytest.raises(SchemaFault, match=r"nested|too large"):
            Schema(schema)


@pytest.mark.parametrize("pattern", ["^(?!a)b", r"(a)\1", "(a{1000}){1000}", "(" * 5000 + ")" * 5000, "("])
def test_a_pattern_that_is_not_linear_is_left_out_and_reported(pattern: str) -> None:
    schema = Schema({"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]})
    assert schema.unchecked == (pattern,)
    assert schema.faults({"a": "anything"}) == ()
    assert schema.faults({"a": 1}) == ("/a: it has to be a string",)


@pytest.mark.parametrize(
    ("schema", "value", "fault"),
    [
        ({"pattern": "^(a+)+$"}, "a" * 50_000 + "b", "does not match"),
        ({"pattern": "a[ab]{400}c"}, "ab" * 500_000, "cannot be checked"),
        (doubling(3), "a", ""),
        (doubling(3), 1, "has to be a"),
        (doubling(15), "a", "cannot be checked"),
        ({"allOf": [{"items": {"$ref": "#"}}] * 2}, listed(8), ""),
        ({"allOf": [{"items": {"$ref": "#"}}] * 2}, listed(100), "cannot be checked"),
        (
            {"unevaluatedItems": False, "allOf": [{"items": {"$ref": "#"}}]},
            [listed(20)] * 9,
            "cannot be checked",
        ),
        (chain(20), listed(120), ""),
        ({"items": {"$ref": "#"}}, listed(100), ""),
        ({"items": {"$ref": "#"}}, listed(100_000), "nested"),
        ({"items": {"$ref": "#"}}, [listed(1)] * 200_000, ""),
        ({"items": {"type": "string"}}, [1] * 500_000, "too large to say where"),
        ({"items": {"type": "integer"}}, [1] * 500_000, ""),
        ({"allOf": [{"type": "string"}] * 1000}, ["x" * 1000] * 4000, "too large to say where"),
        ({"items": {"enum": [{"a": i} for i in range(3000)]}}, [{"a": -1}] * 3000, "too large to say where"),
        (
            {"items": {"enum": [*range(9000), *map(str, range(9000))]}},
            [-1, "x"] * 100_000,
            "cannot be checked",
        ),
        ({"items": {"required": [str(i) for i in range(9000)]}}, [{}] * 100_000, "cannot be checked"),
        ({"items": {"multipleOf": 1e-308}}, [1e308] * 100_000, "cannot be checked"),
        ({"items": {"multipleOf": 0.01}}, [0.07, 19.99] * 100, ""),
        ({"uniqueItems": True}, [{"a": i} for i in range(50_000)], ""),
    ],
)
def test_costs_are_known_in_advance(schema: Any, value: Any, fault: str) -> None:
    found = Schema(schema).faults(value)
    assert (fault in found[0]) if fault else found == ()


CRASH = """
import jsonschema_rs, json, sys
value = 1
for _ in range(128):
    value = [value]
schema = json.load(sys.stdin)
list(jsonschema_rs.Draft202012Validator(schema).iter_errors(value))
"""


def test_the_bound_on_chains_is_needed() -> None:
    """The positive control of `refers on`: without the limit this crashes the process."""
    ended = subprocess.run(
        [sys.executable, "-c", CRASH],
        input=json.dumps(chain(20_000)),
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.returncode < 0


@given(
    st.recursive(
        st.sampled_from(
            [True, False, {}, {"type": "string"}, {"$ref": "#"}, {"$ref": "#/items"}, {"const": [1]}]
        ),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).flatmap(
                lambda several: st.sampled_from([{key: several} for key in ("allOf", "anyOf", "oneOf")])
            ),
            st.dictionaries(
                st.sampled_from(
                    ["items", "not", "additionalProperties", "contains", "unevaluatedItems", "if"]
                ),
                inner,
                max_size=3,
            ),
            st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(
                lambda members: {"properties": members}
            ),
        ),
        max_leaves=8,
    ),
    st.recursive(
        st.sampled_from([1, "a", None]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=10,
    ),
)
@settings(deadline=None)
def test_agrees_with_the_validator(document: Any, value: Any) -> None:
    import jsonschema_rs

    try:
        schema = Schema(document)
    except SchemaFault:
        return
    faults = schema.faults(value)
    assert len(faults) <= MOST_FAULTS
    if not any("cannot be checked" in fault for fault in faults):
        assert (faults == ()) is jsonschema_rs.Draft202012Validator(document).is_valid(value)


# --- nothing is fetched ----------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        self.seen: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.seen.append(self.path)
        body = b'{"type": "string"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- its name there
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


REMOTE: dict[str, Callable[[str], Any]] = {
    "$ref": lambda url: {"$ref": f"{url}/a"},
    "items": lambda url: {"items": {"$ref": f"{url}/a#/$defs/x"}},
    "unused": lambda url: {"$defs": {"a": {"$ref": f"{url}/a"}}},
    "$id": lambda url: {"$id": f"{url}/a", "properties": {"a": {"$ref": "b"}}},
    "$id inside": lambda url: {"properties": {"a": {"$id": f"{url}/a", "properties": {"b": {"$ref": "b"}}}}},
    "$schema": lambda url: {"$schema": f"{url}/a", "type": "string"},
    "$schema inside": lambda url: {"$defs": {"a": {"$id": "urn:x", "$schema": f"{url}/a"}}},
    "$vocabulary": lambda url: {"$vocabulary": {f"{url}/a": True}, "type": "string"},
    "$dynamicRef": lambda url: {"$dynamicRef": f"{url}/a"},
    "draft 7": lambda url: {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": f"{url}/a"},
    "draft 4": lambda url: {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"a": {"id": f"{url}/a", "items": {"$ref": "b"}}},
    },
}


@pytest.mark.parametrize("case", REMOTE)
def test_nothing_is_fetched(case: str, server: Server) -> None:
    try:
        Schema(REMOTE[case](server.url)).faults({"a": [1]})
    except SchemaFault:
        pass
    assert server.seen == []


def test_the_validator_alone_would_fetch(server: Server) -> None:
    """The positive control: the same schema with the validator's default settings."""
    import jsonschema_rs

    assert not jsonschema_rs.Draft202012Validator(REMOTE["$ref"](server.url)).is_valid(1)
    assert server.seen == ["/a"]


def test_no_file_is_read(tmp_path: Path) -> None:
    import jsonschema_rs

    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}')
    schema = {"$defs": {"unused": {"$ref": file.as_uri()}}, "items": {"$ref": file.as_uri()}}
    assert not jsonschema_rs.Draft202012Validator(schema).is_valid([1])
    with pytest.raises(SchemaFault, match="outside of itself"):
        Schema(schema)


def test_references_outside_the_graph_are_refused_by_the_retriever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph holds the used schemas only. The validator also reads the unused ones, and asks only our
    retriever."""
    asked: list[str] = []

    def notice(uri: str) -> Any:
        asked.append(uri)
        raise ValueError("no")

    monkeypatch.setattr(schemas, "_refuse_to_fetch", notice)
    with pytest.raises(SchemaFault):
        Schema(REMOTE["unused"]("http://127.0.0.1:9"))
    assert asked == ["http://127.0.0.1:9/a"]


def test_importing_us_does_not_import_the_validator() -> None:
    program = "import sys, runner.protocol.schema; sys.exit('jsonschema_rs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
