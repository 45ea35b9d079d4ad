"""A plugin on a machine with an internet of its own (scripts/internet/)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from runner.outcome import schema
from tests.conftest import ROOT, Caller
from tests.internet import Internet, internet, world  # noqa: F401 -- fixtures

Write = Callable[..., Path]

PYTHON = "/usr/bin/python3"


@dataclasses.dataclass
class Ran:
    """How a plugin ended, and what its report says of the network."""

    process: subprocess.CompletedProcess[str]
    report: dict[str, Any]

    @property
    def stdout(self) -> str:
        return self.process.stdout

    @property
    def network(self) -> dict[str, Any]:
        found: dict[str, Any] = self.report["network"]
        return found

    def verdicts(self, kind: str = "connections") -> list[tuple[str, int, str]]:
        return [(each["name"], each["port"], each["verdict"]) for each in self.network[kind]]


@dataclasses.dataclass
class Plugin:
    """Any command as a plugin with a list of hosts, under a policy that allows them."""

    internet: Internet
    caller: Caller
    folder: Path
    write: Write

    def __call__(
        self,
        hosts: Sequence[str] | str,
        *command: str,
        network: str = 'ceiling = "open"\nhosts = ["*:*"]',
        more_policy: str = "",
        environ: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        input: str | None = None,  # noqa: A002 -- named as in subprocess.run
        timeout: float = 60.0,
    ) -> Ran:
        report = self.caller.home / "report.json"
        process = self.caller(
            "exec",
            *("--policy", self.policy(network, more_policy), "--report", report),
            *options,
            self.manifest(hosts, *command),
            input=input,
            timeout=timeout,
            env=environ,
        )
        told = json.loads(report.read_text())
        report.unlink()
        assert [*Draft202012Validator(schema()).iter_errors(told)] == []
        return Ran(process, told)

    def manifest(self, hosts: Sequence[str] | str, *command: str) -> Path:
        asked = hosts if isinstance(hosts, str) else list(hosts)
        entry = {"command": command[0], "args": list(command[1:]), "x-sandbox": {"network": asked}}
        return self.write(self.folder / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))

    def policy(self, network: str, more: str = "") -> Path:
        text = (ROOT / "policies/default.toml").read_text()
        plain = 'ceiling = "none"\nhosts = []\nprivate = "deny"'
        changed = text.replace(plain, network)
        assert changed != text
        return self.write(self.folder / "operator" / "policy.toml", f"{changed}\n{more}")

    def python(self, hosts: Sequence[str] | str, script: str, *args: str, **more: Any) -> Ran:
        return self(hosts, PYTHON, "-I", "-c", script, *args, **more)


@pytest.fixture
def plugin(internet: Internet, runner_as: Caller, plugin_dir: Path, write_file: Write) -> Plugin:  # noqa: F811
    return Plugin(internet, internet.on_machine(runner_as), plugin_dir, write_file)
