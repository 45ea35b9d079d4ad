"""kaged manifests: each rule with its place; capabilities, knobs and paths of the configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runner.contracts.kaged import files, manifest
from runner.contracts.kaged.declared import DeclaredTool, declared_by
from runner.plugin import Entrypoint, Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import parse
from sandbox.spec import Network, PathRequest
from tests.tables import one_case

HOME = "/home/somebody"
SCHEMA = {"type": "object"}


def described(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": "demo",
        "version": "0.1.0",
        "kaged_api": 1,
        "description": "a demo",
        "command": ["./plugin.py"],
        "tools": [{"name": "echo", "description": "says it again", "parameters_schema": SCHEMA}],
    }
    data.update(changes)
    return {key: value for key, value in data.items() if value is not ...}


def read(
    data: object, config: Any = None, options: Mapping[str, str] | None = None
) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    text = data if isinstance(data, str) else json.dumps(data, indent=1)  # JSON is YAML
    document = parse("/plugins/demo/kaged-plugin.yaml", text.encode(), "yaml")
    return manifest.read(document, home=HOME, config=config, options=options)


def plugin(config: Any = None, options: Mapping[str, str] | None = None, **changes: Any) -> Plugin:
    found, diagnostics = read(described(**changes), config, options)
    assert found is not None, [d.text() for d in diagnostics]
    return found


def faults(config: Any = None, options: Mapping[str, str] | None = None, **changes: Any) -> list[str]:
    """The rules of all diagnostics."""
    return [diagnostic.rule for diagnostic in read(described(**changes), config, options)[1]]


# --- a whole manifest ---------------------------------------------------------------------------------------

FULL = """\
name: memory-markdown
version: 0.1.1            # a string: two dots
kaged_api: 1
description: Keeps notes as Markdown.
author: somebody
license: MIT
homepage: https://example.com/memory
command: ["/usr/bin/env", bun, ./src/main.ts]
env:
  LOG_LEVEL: info
capabilities:
  - kaged:storage:read
  - "net:[]"
methods: [memory-markdown.list_tags, notes.of.one.day]
notifications: [memory.changed]
config_schema:
  type: object
  properties:
    store: {type: string, default: "config:/memory"}
    keep: {type: integer}
system_config_schema:
  type: object
  properties: {token: {type: string}}
hooks: [on_session_start, pre_compact]
roles: [observer, compactor]
tools:
  - name: retain
    description: Keep a note.
    parameters_schema: {type: object, properties: {text: {type: string}}}
knobs:
  keep: {type: range, label: Keep, binds_to: config.keep, min: 1, max: 50, step: 0.5, default: 10}
shutdown_timeout_sec: 30
health_interval_sec: 300
hook_timeout_sec: 60
"""


def test_everything_a_manifest_can_say() -> None:
    found, diagnostics = read(FULL)
    assert not diagnostics and found is not None
    assert (found.id, found.version, found.contract) == ("memory-markdown", "0.1.1", "kaged")
    assert found.entrypoint == Entrypoint("/usr/bin/env", ("bun", "./src/main.ts"), "/plugins/demo")
    assert found.root == "/plugins/demo"
    assert found.capabilities == ("kaged:storage:read", "net:[]")
    declared = declared_by(found)
    assert declared.methods == ("memory-markdown.list_tags", "notes.of.one.day")
    assert declared.hooks == ("on_session_start", "pre_compact")
    assert declared.roles == ("observer", "compactor")
    assert declared.notifications == ("memory.changed",)
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    tool = DeclaredTool("memory-markdown.retain", "Keep a note.", schema)
    assert declared.tools == {"memory-markdown.retain": tool}
    assert declared.system_config_schema == {"type": "object", "properties": {"token": {"type": "string"}}}
    assert dict(found.timeouts) == {"handshake": 10.0, "call": 60.0, "hook": 60.0, "shutdown": 30.0}
    assert dict(found.lifecycle)["health_interval"] == 300.0 and dict(found.lifecycle)["health_answer"] == 5.0
    env = {request.name: request.value for request in found.spec.env}
    assert env == {
        "KAGED_CONFIG_ROOT": "${state_dir}/config",
        "KAGED_PROJECT_ROOT": "/plugins/demo",
        "KAGED_PROJECT_ID": "unknown",
        "LOG_LEVEL": "info",
    }


def test_defaults() -> None:
    found = plugin()
    assert dict(found.timeouts)["hook"] == 10.0 and dict(found.timeouts)["shutdown"] == 5.0
    assert dict(found.lifecycle)["health_interval"] == 30.0
    assert declared_by(found).roles == ()
    assert declared_by(plugin(hooks=["post_compact"])).roles == ("observer",)
    assert declared_by(plugin(hooks=["post_compact"], roles=[])).roles == ()
    assert found.spec.network == Network("none", (), ("capabilities",))
    assert found.spec.paths == (PathRequest("${state_dir}/config", "write", where=("name",)),)


def test_a_manifest_of_the_older_age() -> None:
    """Before hooks, tools and knobs: methods only."""
    assert declared_by(plugin(tools=..., methods=["demo.run"])).methods == ("demo.run",)


@pytest.mark.parametrize("kept", ["methods", "hooks", "tools"])
def test_one_of_methods_hooks_and_tools_is_enough(kept: str) -> None:
    tool = {"name": "a", "description": "", "parameters_schema": {}}
    values: dict[str, Any] = {"methods": ["a.b"], "hooks": ["pre_compact"], "tools": [tool]}
    assert faults(**{"methods": ..., "hooks": ..., "tools": ..., kept: values[kept]}) == []


# --- each rule ----------------------------------------------------------------------------------------------

TOOL = {"name": "a", "description": "", "parameters_schema": {}}
KNOB = {"type": "boolean", "label": "x", "binds_to": "config.flag"}
FLAG = {"type": "object", "properties": {"flag": {"type": "boolean"}}}


@one_case(
    ("changes", "rule", "key"),
    [
        ({"name": ...}, "missing_key", ""),
        ({"name": ""}, "invalid_value", "name"),
        ({"name": "Demo"}, "plugin_name", "name"),
        ({"name": "1demo"}, "plugin_name", "name"),
        ({"name": "de_mo"}, "plugin_name", "name"),
        ({"name": "d" * 65}, "plugin_name", "name"),
        ({"name": "demo\n"}, "plugin_name", "name"),
        ({"version": ...}, "missing_key", ""),
        ({"version": ""}, "invalid_value", "version"),
        ({"version": 1.0}, "invalid_type", "version"),
        ({"kaged_api": ...}, "missing_key", ""),
        ({"kaged_api": True}, "invalid_type", "kaged_api"),
        ({"kaged_api": "1"}, "invalid_type", "kaged_api"),
        ({"kaged_api": 1.0}, "invalid_type", "kaged_api"),
        ({"kaged_api": 0}, "invalid_value", "kaged_api"),
        ({"kaged_api": 2}, "api_incompatible", "kaged_api"),
        ({"description": ...}, "missing_key", ""),
        ({"description": ""}, "invalid_value", "description"),
        ({"description": "d" * 201}, "invalid_value", "description"),
        ({"homepage": "nowhere"}, "invalid_value", "homepage"),
        ({"command": ...}, "missing_key", ""),
        ({"command": []}, "invalid_value", "command"),
        ({"command": "./plugin.py"}, "invalid_type", "command"),
        ({"command": [" "]}, "command_missing", '" "'),
        ({"env": {"A": 1}}, "invalid_type", "A"),
        ({"env": {"A=B": ""}}, "env_name", "A=B"),
        ({"methods": ["one"]}, "method_name", '"one"'),
        ({"methods": ["a.b.c.d.e"]}, "method_name", '"a.b.c.d.e"'),
        ({"methods": ["A.b"]}, "method_name", '"A.b"'),
        ({"methods": ["a..b"]}, "method_name", '"a..b"'),
        ({"methods": ["kaged.mine"]}, "method_reserved", '"kaged.mine"'),
        ({"methods": ["system.mine"]}, "method_reserved", '"system.mine"'),
        ({"hooks": ["on_exit"]}, "invalid_value", '"on_exit"'),
        ({"tools": [{**TOOL, "name": "a.b"}]}, "tool_name", "name"),
        ({"tools": [{**TOOL, "name": "A"}]}, "tool_name", "name"),
        ({"tools": [TOOL, TOOL]}, "tool_duplicate", "name"),
        ({"tools": [{"name": "a", "description": ""}]}, "missing_key", "{"),
        ({"tools": [{**TOOL, "parameters_schema": {"type": 5}}]}, "schema_invalid", "parameters_schema"),
        ({"tools": [5]}, "invalid_type", "5"),
        ({"tools": ...}, "nothing_exposed", ""),
        ({"tools": [], "methods": [], "hooks": []}, "nothing_exposed", ""),
        ({"roles": ["king"]}, "invalid_value", '"king"'),
        ({"roles": ["compactor"]}, "role_hook", "roles"),
        ({"roles": ["compactor"], "hooks": ["post_compact"]}, "role_hook", "roles"),
        ({"notifications": [""]}, "notification_name", '""'),
        ({"config_schema": {"type": "nothing"}}, "schema_invalid", "config_schema"),
        ({"config_schema": {"$ref": "http://example.com/s"}}, "schema_invalid", "config_schema"),
        ({"system_config_schema": []}, "invalid_type", "system_config_schema"),
        ({"config_schema": FLAG, "system_config_schema": FLAG}, "config_overlap", "flag"),
        ({"shutdown_timeout_sec": 0}, "invalid_value", "shutdown_timeout_sec"),
        ({"shutdown_timeout_sec": 31}, "invalid_value", "shutdown_timeout_sec"),
        ({"shutdown_timeout_sec": 1.5}, "invalid_type", "shutdown_timeout_sec"),
        ({"health_interval_sec": 4}, "invalid_value", "health_interval_sec"),
        ({"health_interval_sec": 301}, "invalid_value", "health_interval_sec"),
        ({"hook_timeout_sec": 0}, "invalid_value", "hook_timeout_sec"),
        ({"hook_timeout_sec": 61}, "invalid_value", "hook_timeout_sec"),
        ({"hook_timeout_sec": True}, "invalid_type", "hook_timeout_sec"),
        ({"knobs": {"k": KNOB}}, "knob_binds_to", "binds_to"),
        ({"knobs": {"k": {**KNOB, "binds_to": "system_config.flag"}}}, "knob_binds_to", "binds_to"),
        ({"knobs": {"k": {**KNOB, "binds_to": "flag"}}, "config_schema": FLAG}, "knob_binds_to", "binds_to"),
        ({"knobs": {"k": {**KNOB, "type": "dial"}}, "config_schema": FLAG}, "invalid_value", "type"),
        (
            {"knobs": {"k": {"type": "boolean", "binds_to": "config.flag"}}, "config_schema": FLAG},
            "missing_key",
            "k",
        ),
        (
            {"knobs": {"k": {**KNOB, "type": "range", "min": 2, "max": 1}}, "config_schema": FLAG},
            "knob_range",
            "min",
        ),
        ({"knobs": {"k": {**KNOB, "type": "enum"}}, "config_schema": FLAG}, "knob_values", "k"),
    ],
)
def test_each_rule(changes: dict[str, Any], rule: str, key: str) -> None:
    data = described(**changes)
    found, diagnostics = read(data)
    assert found is None
    (fault,) = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    assert fault.rule == rule
    if key:
        line = json.dumps(data, indent=1).splitlines()[fault.line - 1]
        assert line.lstrip().lstrip('"').startswith(key.lstrip('"')), line


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"version": "one"}, "plugin_version"),
        ({"favourite_colour": "blue"}, "unknown_key"),
        ({"env": {"KAGED_PROJECT_ID": "mine"}}, "env_replaced"),
        ({"tools": [{**TOOL, "colour": 1}]}, "unknown_key"),
    ],
)
def test_warnings(changes: dict[str, Any], rule: str) -> None:
    found, (warning,) = read(described(**changes))
    assert found is not None and (warning.severity, warning.rule) == ("warning", rule)


def test_types_of_knob_and_field_are_not_compared() -> None:
    """A real manifest binds a range with steps of 0.5 to an integer, and its max is below the schema's."""
    schema = {"type": "object", "properties": {"keep": {"type": "integer", "maximum": 100}}}
    knob = {"type": "range", "label": "x", "binds_to": "config.keep", "min": 0, "max": 50, "step": 0.5}
    assert faults(config_schema=schema, knobs={"keep": knob}) == []


# --- capabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "path", "access"),
    [
        ("read:fs:/srv/data", "/srv/data", "read"),
        ("write:fs:/srv/data", "/srv/data", "write"),
        ("read:fs:/srv/with:colon", "/srv/with:colon", "read"),
        ("exec:git:/opt/git/bin/git", "/opt/git/bin/git", "read"),
        ("exec:/opt/git/bin/git:/opt/git/bin/git", "/opt/git/bin/git", "read"),
    ],
)
def test_paths_and_programs(capability: str, path: str, access: Any) -> None:
    found = plugin(capabilities=["kaged:storage:read", capability])
    file = capability.startswith("exec:")
    assert found.spec.paths[1:] == (PathRequest(path, access, where=("capabilities", 1), file=file),)
    assert found.capabilities == ("kaged:storage:read", capability)


@pytest.mark.parametrize(
    ("capabilities", "network"),
    [
        ([], Network("none", (), ("capabilities",))),
        (["net:[]"], Network("none", (), ("capabilities", 0))),
        (["net:API.example.com:443"], Network("allowlist", ("api.example.com:443",), ("capabilities",))),
        (
            ["net:a.example:80", "net:b.example:*", "net:a.example:80"],
            Network("allowlist", ("a.example:80", "b.example:*"), ("capabilities",)),
        ),
        (["net:10.0.0.1:80"], Network("allowlist", ("10.0.0.1:80",), ("capabilities",))),
        (["net:[2001:db8::1]:80"], Network("allowlist", ("[2001:db8::1]:80",), ("capabilities",))),
        (["net:*"], Network("open", (), ("capabilities", 0))),
        (["net:a.example:80", "net:*"], Network("open", (), ("capabilities", 1))),
    ],
)
def test_network(capabilities: list[str], network: Network) -> None:
    assert plugin(capabilities=capabilities).spec.network == network


@pytest.mark.parametrize(
    "capability",
    [
        *(
            "",
            "read",
            "read:fs",
            "read:fs:",
            "read:fs:data",
            "read:fs:./data",
            "write:fs:~/data",
            "read:/srv",
        ),
        *("exec:git", "exec:git:", "exec::/usr/bin/git", "exec:git:usr/bin/git", "exec:"),
        *("net", "net:", "net:example.com", "net::443", "net:example.com:0", "net:example.com:70000"),
        *("net:example.com:https", "net:example.com:", "net:*:443", "net:exa mple:1", "net:[]:1"),
        *("kaged:storage", "kaged:storage:admin", "kaged:", "KAGED:STORAGE:READ", "sudo", "net:* "),
    ],
)
def test_unparsable_capabilities(capability: str) -> None:
    data = described(capabilities=["kaged:storage:read", capability])
    found, (fault,) = read(data)
    assert found is None and fault.rule == "capability_invalid"
    assert repr(capability) in fault.message and fault.hint
    lines = json.dumps(data, indent=1).splitlines()
    assert json.loads(lines[fault.line - 1]) == capability


def test_at_most_64_ports_in_all() -> None:
    ports = [f"net:n{port}.example:{port}" for port in range(1, 66)]
    found, (fault,) = read(described(capabilities=ports))
    assert found is None and (fault.rule, fault.severity) == ("capability_invalid", "error")
    assert "names 65 ports; 64 are the most" in fault.message and "name fewer ports" in fault.hint
    assert plugin(capabilities=[*ports[:64], "net:a.example:64", "net:b.example:*"]).spec.network is not None


@pytest.mark.parametrize("other", ["net:*", "net:example.com:443", "net:example.com:*"])
def test_no_network_and_some_network(other: str) -> None:
    assert faults(capabilities=["net:[]", other]) == ["capability_invalid"]
    assert faults(capabilities=[other, "net:[]"]) == ["capability_invalid"]


@pytest.mark.parametrize(
    ("capability", "rule"),
    [
        ("read:fs:/etc/shadow", "denylist"),
        (f"write:fs:{HOME}/.ssh", "denylist"),
        ("exec:x:/root/x", "denylist"),
        ("read:fs:/srv/../etc/shadow", "sandbox_path_detour"),
    ],
)
def test_paths_that_no_plugin_gets(capability: str, rule: str) -> None:
    assert rule in faults(capabilities=[capability])


# --- what the configuration makes it write to ---------------------------------------------------------------

STORE = {"type": "object", "properties": {"store": {"type": "string"}, "other": {}}}
PATH_KNOB = {"type": "path", "label": "x", "binds_to": "config.store", "prefixes": ["config:/", "project:/"]}


def written(config: Any = None, *, project: Path | None = None, **changes: Any) -> list[str]:
    options = {} if project is None else {"project": str(project)}
    changes = {"config_schema": STORE, "knobs": {"store": PATH_KNOB}, **changes}
    return [request.path for request in plugin(config, options, **changes).spec.paths]


def test_a_path_knob_binds_the_folder_it_leads_to(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    config_root = "${state_dir}/config"
    assert written() == [config_root]
    assert written({"store": "config:/memory"}) == [config_root]  # below the config root
    assert written({"store": "project:/notes/a"}, project=root) == [config_root, f"{root}/notes/a"]
    knob = {**PATH_KNOB, "default": "project:/notes"}
    assert written(project=root, knobs={"store": knob}) == [config_root, f"{root}/notes"]
    schema = {"type": "object", "properties": {"store": {"default": "project:/s"}}}
    assert written(project=root, config_schema=schema) == [config_root, f"{root}/s"]
    # The configuration wins over the knob's default, and that over the schema's.
    given = written({"store": "project:/c"}, project=root, config_schema=schema, knobs={"store": knob})
    assert given == [config_root, f"{root}/c"]
    assert written(project=root, config_schema=schema, knobs={"store": knob}) == [
        config_root,
        f"{root}/notes",
    ]
    free = {key: value for key, value in PATH_KNOB.items() if key != "prefixes"}
    assert written({"store": "/srv/store"}, knobs={"store": free}) == [config_root, "/srv/store"]


def test_any_value_of_the_configuration_may_be_a_path(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    config = {"other": {"deep": ["x", "project:/deep"]}}
    assert f"{root}/deep" in written(config, project=root)
    assert written({"other": "projects:/x"}, project=root) == ["${state_dir}/config"]


@pytest.mark.parametrize(
    "value", ["project:/..", "project:/a/../b", "config:/../x", "config:/", "project:/a//b", "config:/./a"]
)
def test_a_path_does_not_leave_its_root(value: str, tmp_path: Path) -> None:
    changes = {"config_schema": STORE, "knobs": {"store": PATH_KNOB}}
    assert faults({"store": value}, {"project": str(tmp_path)}, **changes) == ["config_path"]
    assert faults({"other": value}, {"project": str(tmp_path)}, **changes) == ["config_path"]


@pytest.mark.parametrize(
    ("value", "hint"),
    [("project:/x", "--project DIR"), ("relative", "config:/"), ("/srv/x", "config:/ or project:/")],
)
def test_a_path_that_cannot_be_bound_is_refused(value: str, hint: str) -> None:
    """Its writes would vanish with the cage."""
    data = described(config_schema=STORE, knobs={"store": PATH_KNOB})
    found, (fault,) = read(data, {"store": value})
    assert found is None and fault.rule == "config_path" and hint in fault.hint


def test_denied_paths_of_a_configuration() -> None:
    free = {key: value for key, value in PATH_KNOB.items() if key != "prefixes"}
    assert faults({"store": "/etc"}, config_schema=STORE, knobs={"store": free}) == ["denylist"]


def test_the_project(tmp_path: Path) -> None:
    found = plugin(options={"project": str(tmp_path)})
    env = {request.name: request.value for request in found.spec.env}
    assert env["KAGED_PROJECT_ROOT"] == str(tmp_path.resolve())
    assert env["KAGED_PROJECT_ID"] == tmp_path.name == declared_by(found).project_id
    assert declared_by(found).project_root == str(tmp_path.resolve())
    named = plugin(options={"project": str(tmp_path), "project_id": "proj_1"})
    assert declared_by(named).project_id == "proj_1"
    assert faults(options={"project": str(tmp_path / "none")}) == ["project_missing"]
    assert faults(options={"project_id": "../x"}) == ["project_id"]


# --- the configuration itself -------------------------------------------------------------------------------


def test_a_configuration_that_does_not_fit() -> None:
    assert faults({"store": 5}, config_schema=STORE) == ["config_invalid"]
    assert faults(["store"], config_schema=STORE) == ["config_invalid"]
    assert faults({}, tools=[TOOL]) == ["config_unexpected"]
    assert faults({"store": "x"}, config_schema=STORE) == []


def test_a_fault_of_an_option_is_not_one_of_the_manifest() -> None:
    """The default of the manifest is its own fault; the same value of --config is not."""

    def places(config: Any = None, options: Mapping[str, str] | None = None, **more: Any) -> list[str]:
        return [d.place for d in read(described(**more), config, options)[1]]

    knobs = {"store": {"type": "path", "label": "s", "binds_to": "config.store", "prefixes": ["config:/"]}}
    assert places({"store": 5}, config_schema=STORE) == ["--config"]
    assert places({"store": "/srv"}, config_schema=STORE, knobs=knobs) == ["--config"]
    assert places({}, tools=[TOOL]) == ["--config"]
    assert places(options={"project": "/nowhere"}) == ["--project"]
    assert places(options={"project_id": "../x"}) == ["--project-id"]
    knobs["store"]["default"] = "/srv"
    assert all(place.startswith("/plugins/demo/") for place in places(config_schema=STORE, knobs=knobs))


def test_a_default_of_a_knob_that_does_not_fit_is_not_sent() -> None:
    knob = {"type": "text", "label": "s", "binds_to": "config.store", "default": 5}
    found, diagnostics = read(described(config_schema=STORE, knobs={"s": knob}))
    assert found is not None and declared_by(found).defaults == {}
    assert [(d.rule, d.severity) for d in diagnostics] == [("knob_default", "warning")]
    found, diagnostics = read(described(config_schema=STORE, knobs={"s": {**knob, "default": "x"}}))
    assert found is not None and declared_by(found).defaults == {"store": "x"} and diagnostics == ()


# --- files and editors --------------------------------------------------------------------------------------


def test_files_that_the_manifest_names(tmp_path: Path) -> None:
    data = described(capabilities=["exec:git:/nowhere/git", "exec:sh:/bin/sh"])
    document = parse(f"{tmp_path}/kaged-plugin.yaml", json.dumps(data).encode(), "yaml")
    found, _ = manifest.read(document)
    assert found is not None
    assert [d.rule for d in files.check_files(document, found)] == ["command_missing", "program_missing"]
    (tmp_path / "plugin.py").write_text("#!/bin/sh\n")
    (tmp_path / "plugin.py").chmod(0o644)
    rules = [d.rule for d in files.check_files(document, found)]
    assert rules == ["program_not_executable", "program_missing"]
    (tmp_path / "plugin.py").chmod(0o755)
    assert [d.rule for d in files.check_files(document, found)] == ["program_missing"]


def test_the_editors_schema_accepts_what_we_accept() -> None:
    schema = manifest.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(described())
    validator.validate(parse("/x.yaml", FULL.encode(), "yaml").data)
    wrongs: list[dict[str, Any]] = [
        {"kaged_api": 0},
        {"hook_timeout_sec": 61},
        {"command": []},
        {"name": ...},
    ]
    for wrong in wrongs:
        assert not validator.is_valid(described(**wrong)), wrong


# --- what a hostile manifest could make slow, and paths that could vanish ----------------------------------


def test_too_many_capabilities_and_paths(tmp_path: Path) -> None:
    assert faults(capabilities=[f"read:fs:/srv/{n}" for n in range(257)]) == ["capabilities_too_many"]
    assert faults(capabilities=[f"read:fs:/srv/{n}" for n in range(256)]) == []
    many = [f"project:/n{n}" for n in range(257)]
    options = {"project": str(tmp_path)}
    assert faults({"other": many}, options, config_schema=STORE) == ["config_too_large"]
    assert faults({"other": many[:256]}, options, config_schema=STORE) == []
    assert faults({"other": ["x"] * 10_001}, config_schema=STORE) == ["config_too_large"]


ANY = {"type": "object", "properties": {"store": {}}}


def test_paths_are_found_wherever_they_stand(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    assert f"{root}/notes" in written({"store": ["project:/notes"]}, project=root, config_schema=ANY)
    inner = {"type": "object", "properties": {"dir": {"default": "project:/deep"}}}
    schema = {"type": "object", "properties": {"store": {"type": "string"}, "nested": inner}}
    assert f"{root}/deep" in written(project=root, config_schema=schema)


@pytest.mark.parametrize("path", ["project:/a\0b", "config:/a\0", "/srv/\ud800"])
def test_characters_that_no_path_has(path: str, tmp_path: Path) -> None:
    free = {key: value for key, value in PATH_KNOB.items() if key != "prefixes"}
    changes = {"config_schema": STORE, "knobs": {"store": free}}
    assert faults({"store": path}, {"project": str(tmp_path)}, **changes) == ["config_path"]


def test_names_of_the_hosts_own_methods() -> None:
    check = {"name": "check", "description": "", "parameters_schema": {}}
    assert faults(name="health", tools=[check]) == ["tool_name"]
    assert faults(name="health", tools=[TOOL]) == []
    assert faults(methods=["health.check"]) == ["method_reserved"]
    assert faults(name="kaged") == faults(name="system") == ["plugin_name"]


def test_many_misspelled_knobs_get_few_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def suggest(word: str, known: list[str]) -> str:
        asked.append(len(known))
        return ""

    monkeypatch.setattr("runner.contracts.kaged.knobs.did_you_mean", suggest)
    fields = {"type": "object", "properties": {f"field{n}": {} for n in range(1000)}}
    knobs = {f"k{n}": {**KNOB, "binds_to": f"config.none{n}"} for n in range(1000)}
    assert len(faults(config_schema=fields, knobs=knobs)) == 201
    assert len(asked) <= 200 and max(asked) <= 100


def test_a_project_whose_name_is_not_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"b\xff")
    folder.mkdir()
    assert faults(options={"project": str(folder)}) == ["project_missing"]
