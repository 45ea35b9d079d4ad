"""Which launches may share a process: one row for each thing that makes two of them differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.mcp.sharing import keeps_nothing
from runner.gateway.shared import sharing_key
from runner.lifecycle.spec import Spec
from runner.plugin import Entrypoint, Plugin
from sandbox.spec import SandboxSpec
from tests.conftest import ROOT
from tests.runner.gateway.test_shared import TELLER

pytestmark = pytest.mark.launches
HIDDEN = {"hide": ["TOKEN@api.example.com"], "network": ["api.example.com:443"]}


class Shelf:
    """A program, files that name it, and a policy with a host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "server.py"
        self.program.write_bytes(TELLER.read_bytes())
        self.program.chmod(0o755)
        self.environ = {"HOME": "/nowhere", "PATH": "/usr/bin:/bin", "TOKEN": "one", "UNUSED": "one"}
        text = (ROOT / "policies/default.toml").read_text()
        network = 'ceiling = "allowlist"\nhosts = ["api.example.com:443"]'
        text = text.replace('ceiling = "none"\nhosts = []', network)
        text = text.replace('ceiling = ["LANG"', 'ceiling = ["TOKEN", "LANG"')
        text = text.replace("[read]\ndefault = []\nceiling = []", f'[read]\nceiling = ["{folder}/work"]')
        self.policy = self.write("policy.toml", text)
        asking = text.replace('host = ["broker', 'host = ["elicitation/*", "broker')
        self.asking = self.write("asking.toml", asking)
        assert asking != text and network in text

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    def key(
        self,
        name: str = "one.json",
        environ: Mapping[str, str] | None = None,
        entry: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | None = None,
        server: str = "s",
        **more: Any,
    ) -> str | None:
        """The rest: fields of a Spec."""
        asked = {"x-sandbox": {"shared": True, **(sandbox or {})}}
        whole = {"command": str(self.program), "args": ["a"], "cwd": "/usr", **asked, **(entry or {})}
        path = self.write(name, json.dumps({"mcpServers": {server: whole}}))
        given = {**self.environ, **(environ or {})}
        spec = Spec("s", path, contract="mcp", environ=given, policy=self.policy)
        return sharing_key(spec._replace(**more))


def test_what_makes_two_launches_differ(plugin_dir: Path) -> None:
    shelf = Shelf(plugin_dir)
    plain, hidden = shelf.key(), shelf.key(sandbox=HIDDEN)
    assert plain and hidden and plain != hidden
    rows: dict[str, tuple[Callable[[], str | None], str | None]] = {
        "the same again": (shelf.key, plain),
        "another file": (lambda: shelf.key("two.json"), plain),
        "a variable that it does not get": (lambda: shelf.key(environ={"UNUSED": "two"}), plain),
        "the same credential": (lambda: shelf.key("two.json", sandbox=HIDDEN), hidden),
        "not declared": (lambda: shelf.key(entry={"x-sandbox": {}}), None),
        "declared otherwise": (lambda: shelf.key(sandbox={"shared": False}), None),
        "it may ask its client": (lambda: shelf.key(policy=shelf.asking), None),
        "staged writes": (lambda: shelf.key(staged=True), None),
        "a launch that is refused": (lambda: shelf.key(entry={"command": "/nowhere"}), None),
    }
    wrong = [name for name, (key, expected) in rows.items() if key() != expected]
    assert wrong == []
    others: dict[str, str | None] = {
        "another argument": shelf.key(entry={"args": ["b"]}),
        "another folder": shelf.key(entry={"cwd": "/usr/bin"}),
        "a variable of the entry": shelf.key(entry={"env": {"A": "1"}}),
        "its other value": shelf.key(entry={"env": {"A": "2"}}),
        "a variable that the policy passes on": shelf.key(environ={"TZ": "UTC"}),
        "another limit": shelf.key(limits={"memory": "64M"}),
        "another policy": shelf.key(policy="strict"),
        "another credential": shelf.key(sandbox=HIDDEN, environ={"TOKEN": "two"}),
        "another name": shelf.key(server="t"),
        "a state directory": shelf.key(entry={"args": ["${state_dir}"]}),
        "that of another file": shelf.key("two.json", entry={"args": ["${state_dir}"]}),
    }
    assert None not in others.values(), others
    assert len({plain, hidden, *others.values()}) == 2 + len(others), others


def test_a_folder_counts_by_what_it_is_and_a_file_by_its_content(plugin_dir: Path) -> None:
    shelf, work = Shelf(plugin_dir), plugin_dir / "work"
    work.mkdir()
    reads = {"read": [str(work)]}
    before = shelf.key(sandbox=reads)
    assert None is not before != shelf.key()
    (work / "new").touch()
    assert shelf.key(sandbox=reads) == before
    work.rename(plugin_dir / "was")
    work.mkdir()
    assert before != shelf.key(sandbox=reads) is not None
    before = shelf.key()
    shelf.program.write_bytes(TELLER.read_bytes() + b"\n")
    assert before != shelf.key() is not None


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["uvx", "mcp-server-git", "--repository", "."], True),
        (["npx", "-y", "@modelcontextprotocol/server-filesystem@2025.1.1", "/x"], True),
        (["npx", "-y", "--package=evil", "mcp-server-filesystem"], False),
        (["npx", "-y", "@modelcontextprotocol/server-everything"], False),
        (["/home/ada/.venv/bin/mcp-server-time"], True),
        (["/usr/bin/python3", "-m", "mcp_server_time"], False),
    ],
)
def test_known_servers(words: list[str], known: bool) -> None:
    entrypoint = Entrypoint(words[0], tuple(words[1:]))
    plugin = Plugin("s", "", "mcp", "s", "", "/m", None, entrypoint, SandboxSpec())
    assert keeps_nothing(plugin) is known
    assert keeps_nothing(plugin._replace(details={"shared": not known})) is not known
