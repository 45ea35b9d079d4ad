"""What a manifest's capabilities and configuration become in a real cage, as root and as a user."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from runner.outcome import EXIT
from sandbox.document.read import parse
from tests.conftest import SPARE_UID, Caller
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")

Write = Callable[..., Path]

PROGRAM = "#!/usr/bin/python3\nimport os, sys, subprocess\n"
# Behaves like the published memory plugin: it resolves its `store` by itself and makes the folder.
STORES = f"""{PROGRAM}
config_root, project_root = os.environ["KAGED_CONFIG_ROOT"], os.environ["KAGED_PROJECT_ROOT"]
store = sys.argv[1]
if store.startswith("config:/"):
    folder = f"{{config_root}}/{{store[8:]}}/{{os.environ['KAGED_PROJECT_ID']}}"
else:
    folder = f"{{project_root}}/{{store[9:]}}"
os.makedirs(folder, exist_ok=True)
number = len([name for name in os.listdir(folder) if name.endswith(".md")])
with open(f"{{folder}}/{{number}}.md", "w") as file:
    file.write("a note")
print(number)
"""


class Plugin:
    def __init__(self, folder: Path, caller: Caller, write: Write) -> None:
        self.folder, self.caller, self.write = folder, caller, write

    def make(self, program: str, **changes: Any) -> None:
        data = {
            "name": "demo",
            "version": "0.1.0",
            "kaged_api": 1,
            "description": "a demo",
            "command": ["./plugin.py"],
            "methods": ["demo.run"],
            **changes,
        }
        self.write(self.folder / "plugin" / "kaged-plugin.yaml", json.dumps(data))
        self.write(self.folder / "plugin" / "plugin.py", program, 0o755)

    def policy(self, text: str) -> Path:
        return self.write(self.folder / "policy.toml", f"version = 1\n{text}")

    def project(self) -> Path:
        """A folder of an ordinary user, as projects are."""
        folder = self.folder / "project"
        folder.mkdir()
        return folder

    def give(self) -> None:
        """Everything but the plugin's state is the caller's, and a project never root's."""
        os.chown(self.folder, self.caller.uid, self.caller.uid)
        for path in self.folder.iterdir():
            if path.name == "project" and self.caller.name == "root":
                for each in (path, *path.rglob("*")):
                    os.chown(each, SPARE_UID, SPARE_UID)
            elif path.name != "state":
                self.caller.give(path)

    def exec(self, *options: str | Path) -> CompletedProcess[str]:
        self.give()
        state = self.folder / "state"
        return self.caller("exec", "--state-dir", state, *options, self.folder / "plugin")

    def explain(self, *options: str | Path) -> dict[str, Any]:
        self.give()
        told = self.caller(
            "explain",
            "--format",
            "json",
            "--state-dir",
            self.folder / "state",
            *options,
            self.folder / "plugin",
        )
        document: dict[str, Any] = json.loads(told.stdout)
        return document


@pytest.fixture
def plugin(plugin_dir: Path, runner_as: Caller, write_file: Write) -> Plugin:
    return Plugin(plugin_dir, runner_as, write_file)


STORE = {"type": "object", "properties": {"store": {"type": "string", "default": "config:/memory"}}}
KNOB = {"type": "path", "label": "Store", "binds_to": "config.store", "prefixes": ["config:/", "project:/"]}
# What the published plugin declares. It says nothing of the folder it writes to.
DECLARED = ["kaged:storage:read", "net:[]"]


def test_what_is_stored_below_the_config_root_survives(plugin: Plugin) -> None:
    plugin.make(
        STORES,
        capabilities=DECLARED,
        command=["./plugin.py", "config:/memory"],
        config_schema=STORE,
        knobs={"store": KNOB},
    )
    told = [plugin.exec().stdout for _ in range(3)]
    assert told == ["0\n", "1\n", "2\n"]
    assert (plugin.folder / "state/config/memory/unknown/2.md").read_text() == "a note"


def test_a_write_beside_it_fails_instead_of_vanishing(plugin: Plugin) -> None:
    """The control: a config root that nothing is bound to."""
    plugin.make(
        STORES,
        capabilities=DECLARED,
        command=["./plugin.py", "config:/memory"],
        env={"KAGED_CONFIG_ROOT": "/var/kaged"},
    )
    done = plugin.exec()
    assert done.returncode == 1 and "Read-only file system" in done.stderr


def test_a_folder_of_the_project_is_bound(plugin: Plugin) -> None:
    project = plugin.project()
    plugin.write(project / "secret.txt", "not for the plugin")
    plugin.write(project / "notes/0.md", "an old note")
    looks = f"print(os.listdir({str(project)!r}))\n"
    plugin.make(
        STORES + looks,
        capabilities=DECLARED,
        command=["./plugin.py", "project:/notes"],
        config_schema=STORE,
        knobs={"store": KNOB},
    )
    config = ("--config", '{"store": "project:/notes"}')
    unnamed = plugin.exec(*config)
    assert unnamed.returncode == 126 and "--project DIR" in unnamed.stderr
    denied = plugin.exec(*config, "--project", project)
    assert denied.returncode == 126 and "write_ceiling" in denied.stderr
    policy = plugin.policy(f'[write]\nceiling = ["${{state_dir}}", "{project}"]\n')
    done = plugin.exec("--policy", policy, *config, "--project", project)
    assert done.stdout == "1\n['notes']\n", done.stderr
    assert (project / "notes/1.md").read_text() == "a note"


def test_a_folder_that_is_missing_is_not_made(plugin: Plugin) -> None:
    project = plugin.project()
    plugin.make(STORES, command=["./plugin.py", "project:/notes"], config_schema=STORE, knobs={"store": KNOB})
    policy = plugin.policy(f'[write]\nceiling = ["${{state_dir}}", "{project}"]\n')
    config = ("--policy", policy, "--config", '{"store": "project:/notes"}', "--project", project)
    refused = plugin.exec(*config)
    assert refused.returncode == 126 and f"{project}/notes" in refused.stderr
    assert not (project / "notes").exists()


def test_paths_and_programs_of_capabilities(plugin: Plugin) -> None:
    data, tool = plugin.folder / "data", plugin.folder / "tools/say"
    plugin.write(data / "a.txt", "a")
    plugin.write(tool, "#!/bin/sh\necho said\n", 0o755)
    plugin.write(plugin.folder / "tools/other", "#!/bin/sh\necho other\n", 0o755)
    program = f"""{PROGRAM}
print(os.path.exists({str(data)!r}), os.path.exists({str(tool)!r}))
if os.path.exists({str(data)!r}):
    print(open({str(data / "a.txt")!r}).read(), os.listdir({str(tool.parent)!r}))
    print(subprocess.run([{str(tool)!r}], capture_output=True, text=True).stdout.strip())
    try:
        open({str(data / "b.txt")!r}, "w")
    except OSError as error:
        print(error.strerror)
"""
    plugin.make(program)
    assert plugin.exec().stdout == "False False\n"  # the control: without capabilities it has nothing
    plugin.make(program, capabilities=[f"read:fs:{data}", f"exec:say:{tool}"])
    refused = plugin.exec()
    assert refused.returncode == 126 and "read_ceiling" in refused.stderr
    policy = plugin.policy(f'[read]\nceiling = ["{plugin.folder}"]\n[write]\nceiling = ["${{state_dir}}"]\n')
    done = plugin.exec("--policy", policy)
    assert done.stdout == "True True\na ['say']\nsaid\nRead-only file system\n", done.stderr


@one_case(
    ("capability", "mode", "hosts"),
    [
        ("net:api.example.com:443", "allowlist", ["api.example.com:443"]),
        ("net:example.com:*", "allowlist", ["example.com:*"]),
        ("net:*", "open", []),
    ],
)
def test_network_by_name_reaches_the_grant(
    plugin: Plugin, capability: str, mode: str, hosts: list[str]
) -> None:
    plugin.make(PROGRAM, capabilities=[capability])
    policy = plugin.policy('[network]\nceiling = "open"\n[write]\nceiling = ["${state_dir}"]\n')
    told = plugin.explain("--policy", policy)
    assert told["grant"]["network"] == {"mode": mode, "hosts": hosts}
    # Every port needs nftables, which not every kernel has.
    assert told["outcome"]["code"] in (
        ("ok",) if hosts == ["api.example.com:443"] else ("ok", "sandbox_unavailable")
    )
    assert plugin.explain()["outcome"]["code"] == "policy_denied"


def test_no_network_even_where_the_policy_gives_every_plugin_one(plugin: Plugin) -> None:
    """A manifest without a net: capability asks for none."""
    plugin.make(f"{PROGRAM}print(sorted(os.listdir('/sys/class/net')) if os.path.isdir('/sys') else 'no')\n")
    policy = plugin.policy(
        '[network]\ndefault = "host"\nceiling = "host"\n[write]\nceiling = ["${state_dir}"]\n'
    )
    assert plugin.explain("--policy", policy)["grant"]["network"]["mode"] == "none"


def test_the_lifecycle_is_explained(plugin: Plugin) -> None:
    plugin.make(PROGRAM, health_interval_sec=45)
    assert plugin.explain()["lifecycle"]["health_interval"] == 45
    text = plugin.caller("explain", "--state-dir", plugin.folder / "state", plugin.folder / "plugin").stdout
    assert "health interval" in text and "45" in text


def test_a_configuration_for_a_contract_whose_cage_does_not_depend_on_it(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    manifest = write_file(
        plugin_dir / "mcp.json", json.dumps({"mcpServers": {"a": {"command": "/usr/bin/true"}}})
    )
    for verb in ("check", "explain"):
        done = runner_as_user(verb, "--config", "{}", manifest)
        assert done.returncode == EXIT["manifest_invalid"]
        assert "config_foreign" in done.stdout + done.stderr
    broken = runner_as_user("explain", "--config", "{", manifest)
    assert broken.returncode == 2 and "--config" in broken.stderr


def test_a_folder_is_no_program(plugin: Plugin) -> None:
    plugin.write(plugin.folder / "tools/secret.txt", "not asked for")
    plugin.make(PROGRAM, capabilities=[f"exec:tool:{plugin.folder}/tools"])
    policy = plugin.policy(f'[read]\nceiling = ["{plugin.folder}"]\n[write]\nceiling = ["${{state_dir}}"]\n')
    done = plugin.exec("--policy", policy)
    assert done.returncode == 126 and "not_a_file" in done.stderr


def test_a_program_that_does_not_exist_below_usr(plugin: Plugin) -> None:
    plugin.make(PROGRAM, capabilities=["exec:tool:/usr/bin/there-is-no-such-tool"])
    done = plugin.exec()
    assert done.returncode == 126 and "missing_path" in done.stderr
    plugin.make(PROGRAM, capabilities=["exec:sh:/usr/bin/env"])
    assert plugin.exec().returncode == 0


def test_many_denials_are_positioned_with_one_parse(
    plugin_dir: Path, write_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.manifest import load

    data = {
        "name": "demo",
        "version": "0.1.0",
        "kaged_api": 1,
        "description": "a demo",
        "command": ["./plugin.py"],
        "methods": ["demo.run"],
        "capabilities": [f"read:fs:/nope/{number}" for number in range(200)],
    }
    path = write_file(plugin_dir / "kaged-plugin.yaml", json.dumps(data, indent=1))
    found = load.load(str(path)).plugin
    assert found is not None
    parsed: list[str] = []

    def count(path: str, *rest: Any, **limits: Any) -> Any:
        parsed.append(path)
        return parse(path, *rest, **limits)

    monkeypatch.setattr(load, "parse", count)
    lines = [load.position(found, request.where)[0] for request in found.spec.paths[1:]]
    assert lines == list(range(lines[0], lines[0] + 200)) and len(parsed) == 1


def test_stdin_of_exec_is_the_plugins(plugin: Plugin) -> None:
    plugin.make(PROGRAM)
    done = plugin.exec("--config", "-")
    assert done.returncode == 2 and "--config @FILE" in done.stderr
