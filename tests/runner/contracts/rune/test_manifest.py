"""rune bundles: each rule with the place it points at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runner.contracts.rune import files, manifest
from runner.plugin import Entrypoint, Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import parse
from sandbox.spec import EnvRequest, SandboxSpec


def bundle(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "plugin_id": "demo",
        "plugin_version": "1",
        "protocol_version": "rterm.plugin.v1",
        "process": {"command": "./plugin.py"},
        "tools": [{"name": "demo.echo"}],
    }
    data.update(changes)
    return {key: value for key, value in data.items() if value is not ...}


def read(data: object) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    text = json.dumps(data, indent=1)
    return manifest.read(parse("/bundles/demo/rterm-plugin.json", text.encode(), "json"))


def plugin(**changes: Any) -> Plugin:
    found, diagnostics = read(bundle(**changes))
    assert found is not None, [d.text() for d in diagnostics]
    return found


def test_the_smallest_bundle() -> None:
    assert plugin() == Plugin(
        id="demo",
        version="1",
        contract="rune",
        name="demo",
        description="",
        manifest="/bundles/demo/rterm-plugin.json",
        root="/bundles/demo",
        entrypoint=Entrypoint("/bundles/demo/plugin.py", (), "/bundles/demo", bare_environment=True),
        spec=SandboxSpec(enabled=True),
        exports=(("tools", ("demo.echo",)),),
        timeouts=(("invocation", 5.0), ("launch", 2.0), ("handshake", 2.0), ("teardown", 0.5)),
    )


def test_everything_a_bundle_can_say() -> None:
    found, diagnostics = read(
        bundle(
            plugin_id=" demo ",
            display_name="Demo",
            description="d",
            capabilities=[" workspace:read", "net", "", "net"],
            process={
                "command": " python3 ",
                "args": ["-u", "x"],
                "dir": "sub",
                "env": ["A=1", "B=x=y", "C="],
            },
            tools=[
                {
                    "name": "a",
                    "description": "d",
                    "input_schema": {"type": "object"},
                    "output_schema": {},
                    "capabilities": ["net"],
                    "approval_tier": "dangerous",
                    "mutating": True,
                    "target_kind": "widget",
                },
                {"name": "b", "approval_tier": "", "target_kind": None, "capabilities": None},
            ],
        )
    )
    assert diagnostics == () and found is not None
    assert found.id == "demo" and found.name == "Demo"
    assert found.capabilities == ("workspace:read", "net")
    assert found.entrypoint == Entrypoint("python3", ("-u", "x"), "/bundles/demo/sub", bare_environment=True)
    assert [request[:2] for request in found.spec.env] == [("A", "1"), ("B", "x=y"), ("C", "")]
    assert found.spec.env[1] == EnvRequest("B", "x=y", True, ("process", "env", 1))
    assert found.exports == (("tools", ("a", "b")),)


@pytest.mark.parametrize(
    ("process", "command", "directory"),
    [
        ({"command": "bin/x"}, "/bundles/demo/bin/x", "/bundles/demo"),
        ({"command": "./bin/../x"}, "/bundles/demo/x", "/bundles/demo"),
        ({"command": "./x", "dir": "sub"}, "/bundles/demo/x", "/bundles/demo/sub"),
        ({"command": "/usr/bin/python3"}, "/usr/bin/python3", "/bundles/demo"),
        ({"command": "x", "dir": "/bundles/demo/sub"}, "x", "/bundles/demo/sub"),
        ({"command": "x", "dir": "."}, "x", "/bundles/demo"),
        ({"command": "x", "dir": " "}, "x", "/bundles/demo"),
    ],
)
def test_command_and_directory_hang_on_the_bundle(
    process: dict[str, str], command: str, directory: str
) -> None:
    found = plugin(process=process).entrypoint
    assert found is not None and (found.command, found.directory) == (command, directory)


RULES: list[tuple[str, dict[str, Any], str, int, int]] = [
    ("id blank", {"plugin_id": " "}, "plugin_id", 2, 2),
    ("id path", {"plugin_id": "a/b"}, "plugin_id", 2, 2),
    ("id dots", {"plugin_id": ".."}, "plugin_id", 2, 2),
    ("id long", {"plugin_id": "a" * 129}, "plugin_id", 2, 2),
    ("id control", {"plugin_id": "a\x1bb"}, "plugin_id", 2, 2),
    ("version blank", {"plugin_version": ""}, "plugin_version", 3, 2),
    ("protocol", {"protocol_version": "rterm.plugin.v2"}, "protocol_version", 4, 2),
    ("command blank", {"process": {"command": " "}}, "command_missing", 6, 3),
    ("command missing", {"process": {}}, "missing_key", 5, 2),
    ("no process", {"process": ...}, "missing_key", 1, 1),
    ("no tools", {"tools": ...}, "missing_key", 1, 1),
    ("empty tools", {"tools": []}, "tools_missing", 8, 2),
    ("tool blank", {"tools": [{"name": " "}]}, "tool_name", 10, 4),
    ("tool twice", {"tools": [{"name": "a"}, {"name": "a"}]}, "tool_duplicate", 13, 4),
    ("tier", {"tools": [{"name": "a", "approval_tier": "saf"}]}, "invalid_value", 11, 4),
    ("target", {"tools": [{"name": "a", "target_kind": "x"}]}, "invalid_value", 11, 4),
    ("schema", {"tools": [{"name": "a", "input_schema": "x"}]}, "invalid_type", 11, 4),
    (
        "tool capability",
        {"tools": [{"name": "a", "capabilities": ["x"]}], "capabilities": ["y"]},
        "tool_capability",
        12,
        5,
    ),
    ("command escapes", {"process": {"command": "../x"}}, "path_outside", 6, 3),
    ("dir escapes", {"process": {"command": "x", "dir": "a/../../b"}}, "path_outside", 7, 3),
    ("dir outside", {"process": {"command": "x", "dir": "/bundles/demo2"}}, "path_outside", 7, 3),
    ("env form", {"process": {"command": "x", "env": ["A"]}}, "env_entry", 8, 4),
    ("env name", {"process": {"command": "x", "env": ["=1"]}}, "env_name", 8, 4),
    ("env type", {"process": {"command": "x", "env": {"A": "1"}}}, "invalid_type", 7, 3),
    ("long argument", {"process": {"command": "x", "args": ["a" * 131072]}}, "argument_too_long", 8, 4),
    ("long vector", {"process": {"command": "x", "args": ["a" * 131071] * 4}}, "arguments_too_long", 5, 2),
]


@pytest.mark.parametrize(("what", "changes", "rule", "line", "column"), RULES, ids=[row[0] for row in RULES])
def test_each_rule_points_at_its_place(
    what: str, changes: dict[str, Any], rule: str, line: int, column: int
) -> None:
    found, diagnostics = read(bundle(**changes))
    assert found is None
    assert [(d.rule, d.line, d.column) for d in diagnostics] == [(rule, line, column)]


def test_tool_capabilities_are_free_when_the_plugin_declares_none() -> None:
    plugin(tools=[{"name": "a", "capabilities": ["x"]}])


def test_every_fault_in_one_pass() -> None:
    _, diagnostics = read({"plugin_id": "", "plugin_version": "", "protocol_version": "x", "process": {}})
    assert {d.rule for d in diagnostics} == {"plugin_id", "plugin_version", "protocol_version", "missing_key"}


def test_warnings_do_not_stop_a_plugin() -> None:
    found, diagnostics = read(bundle(proces={}, process={"command": "x", "env": ["A=1", "A=2"]}))
    assert found is not None
    assert [(d.rule, d.severity, d.hint) for d in diagnostics] == [
        ("env_duplicate", "warning", ""),
        ("unknown_key", "warning", "did you mean 'process'?"),
    ]
    assert [request[:2] for request in found.spec.env] == [("A", "2")]


def missing(folder: Path, process: dict[str, str]) -> list[tuple[str, int, int]]:
    """What check_files says of a bundle in `folder`."""
    text = json.dumps(bundle(process=process), indent=1)
    document = parse(str(folder / "rterm-plugin.json"), text.encode(), "json")
    found, diagnostics = manifest.read(document)
    assert found is not None and diagnostics == ()  # by its text alone it is right
    return [(d.rule, d.line, d.column) for d in files.check_files(document, found)]


def test_the_bundles_own_directory_and_command_have_to_be_there(tmp_path: Path) -> None:
    process = {"command": "bin/run", "dir": "work"}
    assert missing(tmp_path, process) == [
        ("process_command_missing", 6, 3),
        ("process_dir_missing", 7, 3),
    ]
    (tmp_path / "bin/run").mkdir(parents=True)
    (tmp_path / "work").touch()
    assert [rule for rule, _, _ in missing(tmp_path, process)] == [
        "process_command_missing",
        "process_dir_missing",
    ]
    (tmp_path / "bin/run").rmdir()
    (tmp_path / "bin/run").write_text("#!/bin/sh\n")
    (tmp_path / "bin/run").chmod(0o755)
    (tmp_path / "work").unlink()
    (tmp_path / "work").mkdir()
    assert missing(tmp_path, process) == []


@pytest.mark.parametrize("command", ["nosuch-program", "/nonexistent/program"])
def test_programs_of_the_system_are_not_looked_for(tmp_path: Path, command: str) -> None:
    assert missing(tmp_path, {"command": command}) == []


def test_the_schema_is_a_schema_and_agrees_with_the_reader() -> None:
    schema: Any = manifest.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(bundle(extra=1))
    assert not validator.is_valid(bundle(process={}))
    assert not validator.is_valid(bundle(tools=[{"name": "a", "approval_tier": "x"}]))
