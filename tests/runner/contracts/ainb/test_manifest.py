"""ainb manifests: each rule with its place; flags that become binds; folders of plugins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runner.contracts.ainb import manifest
from runner.contracts.ainb.declared import CAPABILITIES, declared_by
from runner.manifest.load import load, load_all, plugins_in
from runner.plugin import Entrypoint, Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import parse
from sandbox.spec import EnvRequest, Network, PathRequest
from tests.conftest import Caller

HOME = "/home/somebody"
PLUGIN = '[plugin]\nname = "demo"\nversion = "1.0.0"\nabi_version = 2\n'

Write = Callable[..., Path]


def read(text: str) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    return manifest.read(parse("/dist/plugins/demo/manifest.toml", text.encode(), "toml"), home=HOME)


def plugin(text: str = "") -> Plugin:
    found, diagnostics = read(PLUGIN + text)
    assert found is not None, [d.text() for d in diagnostics]
    return found


FULL = """\
[plugin]
name = "burndown"
version = "2.0.0-rc.1"
abi_version = 2
description = "Shows what was used."

[capabilities]
read_sessions = true
write_plugin_data = true
event_bus = ["usage.*", "ui.state"]
network = ["api.example.com"]
spawn_subprocess = false
read_claude_logs = true
read_codex_logs = false
read_paths = ["~/notes", "/srv/data"]
"secrets:read" = true

[provides]
screens = ["burndown"]
commands = ["burndown: refresh"]
cli_namespaces = ["burndown"]
snapshots = ["usage.totals"]

[subscribes]
snapshots = ["usage.data", "ui.state"]
latest_state = ["ui.state"]

[lifecycle]
spawn = "eager"
idle_reap_secs = 0

[[config]]
key = "theme"
kind = "enum"
label = "Theme"
default = "dark"
choices = ["dark", "light"]
"""


def test_everything_a_manifest_can_say() -> None:
    found, diagnostics = read(FULL)
    assert not diagnostics and found is not None
    assert (found.id, found.version, found.contract) == ("burndown", "2.0.0-rc.1", "ainb")
    assert found.entrypoint == Entrypoint("./burndown", (), "/dist/plugins/demo")
    granted = (
        *("read_sessions", "write_plugin_data", "event_bus", "network", "read_claude_logs"),
        *("read_paths", "secrets:read"),
    )
    assert found.capabilities == granted
    declared = declared_by(found)
    assert declared.lists == {
        "event_bus": ("usage.*", "ui.state"),
        "network": ("api.example.com",),
        "read_paths": ("~/notes", "/srv/data"),
    }
    assert (declared.screens, declared.cli_namespaces) == (("burndown",), ("burndown",))
    assert (declared.subscribes, declared.latest_state) == (("usage.data", "ui.state"), ("ui.state",))
    roots = (f"{HOME}/.agents-in-a-box/sessions", f"{HOME}/.claude/projects")
    assert declared.fs_roots == (*roots, f"{HOME}/notes", "/srv/data")
    assert [(path.path, path.access, path.required) for path in found.spec.paths] == [
        ("${state_dir}", "write", True),
        (f"{HOME}/.agents-in-a-box/sessions", "read", False),
        (f"{HOME}/.claude/projects", "read", False),
        (f"{HOME}/notes", "read", False),
        ("/srv/data", "read", False),
    ]
    env = {request.name: request.value for request in found.spec.env}
    assert env == {"AINB_HOME": "${state_dir}", "XDG_DATA_HOME": "${state_dir}", "HOME": HOME}
    at = ("capabilities", "network")
    assert found.spec.network == Network("allowlist", ("api.example.com:443",), at, required=False)
    assert dict(found.lifecycle)["spawn"] == "eager" and dict(found.lifecycle)["idle_reap"] == "never"


def test_the_smallest_manifest() -> None:
    found = plugin()
    assert found.capabilities == () and found.spec.paths == () and found.spec.env == ()
    assert found.spec.network == Network("none", where=("plugin",))
    assert dict(found.lifecycle)["spawn"] == "lazy" and dict(found.lifecycle)["idle_reap"] == 600.0
    assert declared_by(found).cli_namespaces == ()


@pytest.mark.parametrize("name", CAPABILITIES)
@pytest.mark.parametrize(("value", "is_granted"), [("true", True), ("false", False), ("[]", False)])
def test_each_capability(name: str, value: str, is_granted: bool) -> None:
    found, _ = read(f'{PLUGIN}[capabilities]\n"{name}" = {value}\n')
    assert found is not None and (name in found.capabilities) is is_granted
    found, _ = read(f'{PLUGIN}[capabilities]\n"{name}" = ["/srv/a"]\n')
    assert found is not None and declared_by(found).lists == {name: ("/srv/a",)}


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("", "missing_key", 1),
        ('name = "demo"\n', "missing_key", 1),
        ('[plugin]\nname = "demo"\nversion = "1.0.0"\n', "missing_key", 1),  # every v1 manifest
        (PLUGIN.replace("2\n", "1\n"), "abi_incompatible", 4),
        (PLUGIN.replace("2\n", "3\n"), "abi_incompatible", 4),
        (PLUGIN.replace("2\n", '"2"\n'), "invalid_type", 4),
        (PLUGIN.replace("2\n", "true\n"), "invalid_type", 4),
        (PLUGIN.replace("2\n", "-1\n"), "invalid_value", 4),
        (PLUGIN.replace("1.0.0", "1.0"), "plugin_version", 3),
        (PLUGIN.replace("1.0.0", ""), "invalid_value", 3),
        (PLUGIN.replace('"demo"', '""'), "invalid_value", 2),
        (PLUGIN.replace("demo", "host"), "plugin_name", 2),
        (PLUGIN.replace("demo", "../demo"), "plugin_name", 2),
        (PLUGIN.replace("demo", "a/b"), "plugin_name", 2),
        (PLUGIN.replace("demo", ".."), "plugin_name", 2),
        (PLUGIN.replace("demo", "d" * 65), "plugin_name", 2),
        (PLUGIN + "[capabilities]\nnetwork = 'all'\n", "invalid_type", 6),
        (PLUGIN + "[capabilities]\nnetwork = 1\n", "invalid_type", 6),
        (PLUGIN + "[capabilities]\nnetwork = ['a', 1]\n", "invalid_type", 6),
        (PLUGIN + "[capabilities]\nread_paths = ['relative']\n", "sandbox_relative_path", 6),
        (PLUGIN + "[capabilities]\nread_paths = ['/etc/shadow']\n", "denylist", 6),
        (PLUGIN + "[capabilities]\nread_paths = ['~/.ssh']\n", "denylist", 6),
        (PLUGIN + "[provides]\nscreens = 'a'\n", "invalid_type", 6),
        (PLUGIN + "[provides]\ncli_namespaces = ['']\n", "name_blank", 6),
        (PLUGIN + "[subscribes]\ntopics = []\n", "unknown_subscription", 6),
        (PLUGIN + "[subscribes]\nlatest_state = ['x']\n", "latest_state", 6),
        (PLUGIN + "[lifecycle]\nspawn = 'Eager'\n", "invalid_value", 6),
        (PLUGIN + "[lifecycle]\nidle_reap_secs = -1\n", "invalid_value", 6),
        (PLUGIN + "[lifecycle]\nidle_reap_secs = 4294967296\n", "invalid_value", 6),
        (PLUGIN + "[[config]]\nkey = 'a'\nkind = 'float'\nlabel = 'A'\n", "invalid_value", 7),
        (PLUGIN + "[[config]]\nkey = 'a'\nkind = 'int'\n", "missing_key", 5),
    ],
)
def test_each_rule(text: str, rule: str, line: int) -> None:
    found, diagnostics = read(text)
    assert found is None
    (fault,) = [each for each in diagnostics if each.severity == "error"]
    assert (fault.rule, fault.line) == (rule, line)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[statusline]\ntext = 'v1'\n", "unknown_key"),
        ("[capabilities]\nsecret_store_get = true\n", "unknown_key"),
        ("[capabilities]\nread_paths = true\n", "capability_list"),
        ("[capabilities]\nunix_socket_dial = true\n", "capability_list"),
        ("[capabilities]\nnetwork = ['*.example.com']\n", "network_host"),
        ("[capabilities]\nnetwork = ['exa mple']\n", "network_host"),
        ("[subscribes]\nsnapshots = ['a']\n", "subscription_denied"),
    ],
)
def test_warnings(text: str, rule: str) -> None:
    found, (warning,) = read(PLUGIN + text)
    assert found is not None and (warning.severity, warning.rule) == ("warning", rule)


def test_a_list_of_too_many_ports_is_a_warning_because_the_host_still_fetches() -> None:
    hosts = [f"n{port}.example:{port}" for port in range(1, 66)]
    found, (warning,) = read(PLUGIN + f"[capabilities]\nnetwork = {hosts}\n")
    assert found is not None and (warning.severity, warning.rule) == ("warning", "network_ports")
    assert "names 65 ports; 64 are the most" in warning.message
    assert read(PLUGIN + f"[capabilities]\nnetwork = {hosts[:64]}\n")[1] == ()


def test_flags_become_binds_and_the_home_to_find_them() -> None:
    found = plugin("[capabilities]\nread_codex_logs = true\n")
    at = ("capabilities", "read_codex_logs")
    request = PathRequest(f"{HOME}/.codex/sessions", "read", required=False, where=at, follow=True)
    assert found.spec.paths == (request,)
    assert found.spec.env == (EnvRequest("HOME", HOME, where=at),)


def test_another_contract_has_a_plugin_table_too(tmp_path: Path) -> None:
    """By its content, under a file name that tells nothing."""
    path = tmp_path / "some.toml"
    path.write_text(PLUGIN)
    found = load(str(path)).plugin
    assert found is not None and found.contract == "ainb"


# --- files --------------------------------------------------------------------------------------------------


def put(root: Path, name: str, text: str = "", *, binary: bool = True) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "manifest.toml").write_text(text or PLUGIN.replace("demo", name))
    if binary:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def rules(folder: Path) -> list[str]:
    return [each.rule for read in load_all(str(folder)) for each in read.diagnostics]


def test_folder_and_executable_have_the_plugins_name(tmp_path: Path) -> None:
    assert rules(put(tmp_path, "good")) == []
    assert rules(put(tmp_path, "lacking", binary=False)) == ["executable_missing"]
    assert rules(put(tmp_path, "other", PLUGIN)) == ["plugin_folder", "executable_missing"]
    (tmp_path / "good" / "good").chmod(0o644)
    assert rules(tmp_path / "good") == ["executable_missing"]


def test_a_folder_of_plugins(tmp_path: Path) -> None:
    put(tmp_path, "one")
    put(tmp_path, "two", "[plugin]\n")
    put(tmp_path, "three")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "one")
    assert [Path(folder).name for folder in plugins_in(str(tmp_path))] == ["one", "three", "two"]
    assert plugins_in(str(tmp_path / "one")) == () and plugins_in(str(tmp_path / "none")) == ()
    found = load_all(str(tmp_path))
    assert [each.plugin.id for each in found if each.plugin is not None] == ["one", "three"]
    (fault,) = load(str(tmp_path)).diagnostics
    assert fault.rule == "plugin_root" and "one, three, two" in fault.message


def test_check_of_a_folder_of_plugins(plugin_dir: Path, runner_as_user: Caller) -> None:
    put(plugin_dir, "one")
    put(plugin_dir, "two", "[plugin]\n")
    done = runner_as_user("check", plugin_dir)
    assert done.returncode == 20
    assert f"{plugin_dir}: ok: one 1.0.0 (ainb)" in done.stdout and "two/manifest.toml" in done.stdout
    document = json.loads(runner_as_user("check", "--format", "json", plugin_dir).stdout)
    assert [each["id"] for each in document["files"][0]["plugins"]] == ["one"]


def test_the_editors_schema_accepts_what_we_accept() -> None:
    schema = manifest.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    data: dict[str, Any] = parse("/x.toml", FULL.encode(), "toml").data
    validator.validate(data)
    for wrong in ({"capabilities": {"network": "all"}}, {"lifecycle": {"spawn": "Eager"}}):
        assert not validator.is_valid({**data, **wrong}), wrong
