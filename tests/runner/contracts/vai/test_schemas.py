"""Schemas come from inside the package, and nothing is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.vai.package.schemas import MOST_SCHEMA_BYTES, load_schema, with_defaults
from sandbox.document.diagnostic import DocumentError

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/word"}}}
WHOLE = {**SCHEMA, "$defs": {"word": {"type": "string"}}}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "package"
    (root / "schemas").mkdir(parents=True)
    (root / "schemas/x.json").write_text(json.dumps(WHOLE))
    (tmp_path / "outside.json").write_text(json.dumps(WHOLE))
    return root


def test_a_schema_with_references_inside_itself_is_used(package: Path) -> None:
    schema = load_schema(str(package), "schemas/x.json")
    assert schema.faults({"a": "b"}) == ()
    assert len(schema.faults({"a": 1})) == 1
    assert len(schema.faults({})) == 1
    assert schema.example() == {"a": "…"}


@pytest.mark.parametrize("link", ["x.json", "../schemas/x.json"])
def test_a_link_that_stays_inside_is_followed(package: Path, link: str) -> None:
    (package / "schemas/link.json").symlink_to(link)
    assert load_schema(str(package), "schemas/link.json").faults({"a": "b"}) == ()


def _link(target: str) -> Callable[[Path], Any]:
    return lambda path: path.symlink_to(target)


def _text(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


def _schema(value: Any) -> Callable[[Path], Any]:
    return _text(json.dumps(value))


@pytest.mark.parametrize(
    ("make", "rule", "said"),
    [
        pytest.param(_link("../../outside.json"), "link_outside", "out of the package", id="link"),
        pytest.param(_link("/etc/passwd"), "link_outside", "out of the package", id="absolute link"),
        pytest.param(_link("/proc/self/root/etc/passwd"), "link_outside", "out of", id="magic link"),
        pytest.param(_link("y.json"), "schema_missing", "symbolic links", id="loop"),
        pytest.param(os.mkfifo, "not_a_file", "regular file", id="fifo"),
        pytest.param(os.mkdir, "not_a_file", "regular file", id="folder"),
        pytest.param(_text(" " * MOST_SCHEMA_BYTES + "{"), "file_too_large", "limit", id="one byte over"),
        pytest.param(_text('{"a": 1,}'), "json_syntax", "comma", id="syntax"),
        pytest.param(_text("true"), "not_an_object", "object", id="no object"),
        pytest.param(_text("[" * 1000), "too_deep", "deeper", id="deep"),
        pytest.param(_schema({"type": "wrong"}), "schema_unusable", "cannot be used", id="no schema"),
        pytest.param(
            _schema({"$ref": "https://example.com/x.json"}),
            "schema_unusable",
            "outside of itself",
            id="remote",
        ),
        pytest.param(_schema({"$ref": "x.json"}), "schema_unusable", "outside of itself", id="another file"),
        pytest.param(_schema({"$ref": "file:///etc/passwd"}), "schema_unusable", "outside", id="file URL"),
        pytest.param(_schema({"$ref": "#"}), "schema_unusable", "back to itself", id="circle"),
    ],
)
def test_a_schema_that_is_not_used(package: Path, make: Callable[[Path], Any], rule: str, said: str) -> None:
    make(package / "schemas/y.json")
    with pytest.raises(DocumentError) as refused:
        load_schema(str(package), "schemas/y.json")
    fault = refused.value.diagnostics[0]
    assert (fault.rule, fault.file) == (rule, str(package / "schemas/y.json"))
    assert said in fault.message
    assert ("$defs" in fault.hint) == ("outside of itself" in fault.message)


@pytest.mark.parametrize(
    "name", ["schemas/none.json", "../outside.json", "schemas/x.json/y", "a\0b", "\ud800"]
)
def test_a_name_that_leads_nowhere(package: Path, name: str) -> None:
    with pytest.raises(DocumentError):
        load_schema(str(package), name)


def test_the_longest_schema_is_read(package: Path) -> None:
    text = json.dumps(WHOLE)
    (package / "schemas/y.json").write_text(text + " " * (MOST_SCHEMA_BYTES - len(text)))
    assert load_schema(str(package), "schemas/y.json").faults({"a": "b"}) == ()


def test_no_descriptor_is_left(package: Path) -> None:
    (package / "schemas/y.json").symlink_to("../../outside.json")
    before = os.listdir("/proc/self/fd")
    for name in ("schemas/x.json", "schemas/y.json", "schemas", "none"):
        try:
            load_schema(str(package), name)
        except DocumentError:
            continue
    assert len(os.listdir("/proc/self/fd")) == len(before)


PROPERTIES = {
    "properties": {
        "n": {"default": 1},
        "made": {"default": {}, "properties": {"deep": {"default": [1]}}},
        "given": {"properties": {"deep": {"default": 2}}},
        "plain": True,
        "list": {"items": {"properties": {"a": {"default": 1}}}},
        "ref": {"$ref": "#/$defs/x"},
    },
    "$defs": {"x": {"default": 9}},
}


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        ({}, {"n": 1, "made": {"deep": [1]}}),
        ({"n": None, "made": 3}, {"n": None, "made": 3}),
        ({"n": 0, "made": {"deep": 0}}, {"n": 0, "made": {"deep": 0}}),
        ({"given": {}, "list": [{}]}, {"n": 1, "made": {"deep": [1]}, "given": {"deep": 2}, "list": [{}]}),
    ],
)
def test_defaults(given: dict[str, Any], completed: dict[str, Any]) -> None:
    before = json.dumps([given, PROPERTIES])
    assert with_defaults(given, PROPERTIES) == completed
    with_defaults({}, PROPERTIES)["made"]["deep"].append(2)
    assert json.dumps([given, PROPERTIES]) == before  # neither was changed


def test_a_schema_without_properties_has_no_defaults() -> None:
    assert with_defaults({"a": 1}, {"properties": [], "default": {"b": 2}}) == {"a": 1}
