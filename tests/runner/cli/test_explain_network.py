"""`runner explain --network`: who asked for a host, and what allows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.cli.shared.reachable_hosts import never_dialled
from sandbox.network import addresses
from tests.conftest import ROOT, Caller
from tests.tables import one_case

Write = Callable[..., Path]

HOSTS = ["api.example.com", "*.foo.org:80,443", "db.example.com:5432"]


@pytest.fixture
def config(plugin_dir: Path, write_file: Write) -> Path:
    entry = {"command": "/usr/bin/true", "x-sandbox": {"network": HOSTS}}
    return write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))


@pytest.fixture
def policy(plugin_dir: Path, write_file: Write) -> Path:
    text = (ROOT / "policies/default.toml").read_text()
    text = text.replace(
        'ceiling = "none"\nhosts = []', 'ceiling = "allowlist"\nhosts = ["*.example.com:443"]'
    )
    return write_file(plugin_dir / "operator" / "policy.toml", text)


def test_each_host_with_what_allows_it(runner_as: Caller, config: Path, policy: Path) -> None:
    said = runner_as("explain", "--network", "--policy", policy, config)
    first, *rest = said.stdout.splitlines()
    assert first.split() == [
        *("api.example.com:443", "asked", "by", "the", "manifest,"),
        *("allowed", "by", "hosts:", "*.example.com:443"),
    ]
    refused = [line.split(":")[0] for line in rest if "REFUSED" in line]
    assert refused == ["  REFUSED *.foo.org", "  REFUSED db.example.com"] and said.returncode == 21
    assert any("must not lead to private addresses" in line for line in rest)


def test_for_programs(runner_as: Caller, config: Path) -> None:
    said = runner_as("explain", "--network", "--format", "json", "--policy", "dev", config)
    told = json.loads(said.stdout)
    assert (told["mode"], told["private"], told["refused"]) == ("allowlist", True, [])
    assert [each["rule"] for each in told["hosts"]] == [
        *("api.example.com:443", "*.foo.org:80,443", "db.example.com:5432")
    ]
    assert {each["allowed_by"] for each in told["hosts"]} == {"hosts: *:*"}


def test_nothing_is_said_of_hosts_where_there_is_no_network(runner_as: Caller, config: Path) -> None:
    said = runner_as("explain", "--network", config)
    assert said.stdout.splitlines()[0] == "no network: loopback only"
    assert "REFUSED network allowlist" in said.stdout and said.returncode == 21


def test_the_limits_of_the_policy(runner_as: Caller, config: Path, policy: Path, write_file: Write) -> None:
    text = policy.read_text()
    own = text.replace("connections = 256", 'connections = 7\nrate = "2M"').replace(
        'idle = "10m"', 'idle = "90s"'
    )
    for given, words, numbers in (
        (
            text,
            "256 connections at once, any number of bytes, at any rate, closed after 10m",
            (256, None, 600),
        ),
        (
            own,
            "7 connections at once, any number of bytes, 2 MiB per second, closed after 1m30s",
            (7, 2 << 20, 90),
        ),
    ):
        write_file(policy, given)
        said = runner_as("explain", "--network", "--policy", policy, config)
        assert f"limits (under [network] in the policy): {words} without a byte" in said.stdout
        said = runner_as("explain", "--network", "--format", "json", "--policy", policy, config)
        limits = json.loads(said.stdout)["limits"]
        assert (limits["connections"], limits["rate"], limits["idle"]) == numbers and limits["bytes"] is None


@one_case(("asked", "shouted"), [("host", True), ("none", False)])
def test_the_hosts_own_network_is_shouted(
    runner_as: Caller, plugin_dir: Path, write_file: Write, asked: str, shouted: bool
) -> None:
    entry = {"command": "/usr/bin/true", "x-sandbox": {"network": asked}}
    config = write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))
    loud = "THIS PLUGIN HAS THE HOST'S OWN NETWORK"
    for options in (("--network",), ()):
        said = runner_as("explain", *options, "--policy", "dev", config)
        assert said.returncode == 0 and (loud in said.stdout) is shouted
    report = runner_as.home / "report.json"
    said = runner_as("exec", "--policy", "dev", "--report", report, config)
    assert said.returncode == 0 and said.stderr.count(loud) == shouted and bool(said.stderr) is shouted
    notes = [note["rule"] for note in json.loads(report.read_text())["notes"]]
    assert ("network_host" in notes) is shouted


NEVER = {
    "127.0.0.1:2525": "is this machine (loopback)",
    "[::1]:2525": "is this machine (loopback)",
    "*.localhost:2525": "is this machine (loopback)",
    "169.254.169.254:80": "serves the keys of cloud machines (metadata)",
    "10.1.2.3:2525": "",  # listed, and so dialled
    "notlocalhost:2525": "",
    "45.33.1.10:2525": "",
}


def test_what_is_listed_and_never_dialled(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    entry = {"command": "/usr/bin/true", "x-sandbox": {"network": list(NEVER)}}
    config = write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))
    told = json.loads(runner_as("explain", "--network", "--format", "json", "--policy", "dev", config).stdout)
    assert {each["rule"]: each["never_dialled"] for each in told["hosts"]} == NEVER
    shown = runner_as("explain", "--network", "--policy", "dev", config).stdout.splitlines()
    said = {line.split()[0]: line.partition("; NEVER DIALLED: it ")[2] for line in shown[: len(NEVER)]}
    assert said == NEVER


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("127.0.0.0/8:1", "is this machine (loopback)"),
        ("169.254.0.0/16:1", "is link-local"),
        ("10.0.0.0/8:1", ""),
        ("0.0.0.0/0:1", ""),
        ("*:1", ""),
        ("8.8.8.8:1", "is an address of this machine"),
        ("9.9.9.9:1", ""),
    ],
)
def test_ranges_and_own_addresses(rule: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_is_own", lambda address: str(address) == "8.8.8.8")
    assert never_dialled(rule) == reason


def test_it_does_not_go_with_a_command_line(runner_as: Caller, config: Path) -> None:
    said = runner_as("explain", "--network", "--format", "argv", config)
    assert said.returncode == 2 and "--network: it goes with --format text and json" in said.stderr
