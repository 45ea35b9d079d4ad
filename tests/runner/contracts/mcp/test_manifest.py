"""MCP configurations: choosing a server, and what its x-sandbox asks."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from runner.contracts.mcp import manifest
from runner.plugin import Entrypoint, Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import parse
from sandbox.spec import Limits, Network, PathRequest, SandboxSpec

HOME = "/home/me"


def read(data: object, server: str | None = None) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    text = json.dumps(data, indent=1)
    return manifest.read(parse("/conf/mcp.json", text.encode(), "json"), server=server, home=HOME)


def entry(**keys: Any) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    return read(
        {"mcpServers": {"demo": {"command": "uvx", **{k.replace("_", "-"): v for k, v in keys.items()}}}}
    )


def plugin(**keys: Any) -> Plugin:
    found, diagnostics = entry(**keys)
    assert found is not None, [d.text() for d in diagnostics]
    return found


def test_a_plain_entry_as_people_have_it() -> None:
    found, diagnostics = entry(args=["mcp-server-time"], env={"TZ": "UTC"})
    assert diagnostics == () and found is not None
    assert found == Plugin(
        id="demo",
        version="",
        contract="mcp",
        name="demo",
        description="",
        manifest="/conf/mcp.json",
        root=None,
        entrypoint=Entrypoint("uvx", ("mcp-server-time",), "/conf"),
        spec=SandboxSpec(enabled=True, env=found.spec.env),
    )
    assert [request[:3] for request in found.spec.env] == [("TZ", "UTC", True)]


def test_all_of_x_sandbox() -> None:
    found = plugin(
        env={"A": "1"},
        cwd="~/work",
        x_sandbox={
            "read": ["/srv/data", "~/docs", {"path": "/opt/maybe", "optional": True}],
            "write": ["${state_dir}", {"path": "/srv/out"}],
            "network": ["Api.example.com:443"],
            "env": ["TOKEN", "A"],
            "limits": {"memory": "64M", "pids": 40},
            "seccomp": "strict",
            "hide": ["TOKEN@Api.example.com", "github"],
        },
    )
    assert found.spec.hide == ("TOKEN@api.example.com:443", "github")
    for hide, network, told in (
        ("TOKEN@b.example", ["a.example"], "'TOKEN@b.example': its network does not have b.example:443"),
        ("TOKEN@b.example", ["GET b.example/x"], ""),
        ("AWS_SECRET_ACCESS_KEY@b.example", ["b.example"], "makes signatures and does not travel"),
        ("@b.example", ["b.example"], "has no name in front"),
    ):
        _, diagnostics = entry(x_sandbox={"network": network, "hide": [hide]})
        assert told in "".join(each.text() for each in diagnostics) and bool(diagnostics) == bool(told)
    at = ("mcpServers", "demo", "x-sandbox")
    assert found.spec.paths == (
        PathRequest("/srv/data", "read", True, (*at, "read", 0)),
        PathRequest("/home/me/docs", "read", True, (*at, "read", 1)),
        PathRequest("/opt/maybe", "read", False, (*at, "read", 2)),
        PathRequest("${state_dir}", "write", True, (*at, "write", 0)),
        PathRequest("/srv/out", "write", True, (*at, "write", 1)),
    )
    assert found.spec.network == Network("allowlist", ("api.example.com:443",), (*at, "network"))
    assert [request[:2] for request in found.spec.env] == [("A", "1"), ("TOKEN", None)]
    assert found.spec.limits == Limits(memory=64 << 20, pids=40)
    assert found.spec.seccomp == "strict"
    assert found.entrypoint is not None and found.entrypoint.directory == "/home/me/work"


OWN = {"command": "./server.py", "x-sandbox": {"read": ["${plugin_dir}"]}}


@pytest.mark.parametrize(
    ("path", "servers", "is_shown"),
    [
        ("/srv/greeter/mcp.json", {"a": OWN}, True),
        ("/srv/greeter/mcp.json", {"a": {**OWN, "command": "python3", "args": ["src/server.py"]}}, True),
        ("/srv/greeter/mcp.json", {"a": {"command": "./server.py"}}, None),
        ("/srv/greeter/mcp.json", {"a": OWN, "b": OWN, "c": {"command": "${plugin_dir}/c.py"}}, True),
        # The program is another one's.
        ("/srv/greeter/mcp.json", {"a": {**OWN, "command": "../server.py"}}, False),
        ("/srv/greeter/mcp.json", {"a": {**OWN, "command": "/srv/other/server.py"}}, False),
        ("/srv/greeter/mcp.json", {"a": {**OWN, "command": "python3", "args": ["-m", "server"]}}, False),
        ("/srv/greeter/mcp.json", {"a": {**OWN, "command": "npx", "args": ["./server"]}}, False),
        ("/srv/greeter/mcp.json", {"a": {**OWN, "command": "~/server.py"}}, False),
        ("/srv/greeter/mcp.json", {"a": {**OWN, "command": "${HOME}/server.py"}}, False),
        ("/srv/greeter/mcp.json", {"a": {**OWN, "cwd": "/srv"}}, False),
        # Another server of the file is not of this folder.
        ("/srv/greeter/mcp.json", {"a": OWN, "b": {"command": "npx", "args": ["-y", "other"]}}, False),
        ("/srv/greeter/mcp.json", {"a": OWN, "b": {"url": "https://example.com/mcp"}}, False),
        # The file is that of a host or of a project.
        ("/srv/greeter/.mcp.json", {"a": OWN}, False),
        ("/srv/greeter/.cursor/mcp.json", {"a": OWN}, False),
        ("/srv/greeter/.unknown/mcp.json", {"a": OWN}, False),
        (f"{HOME}/.config/Code/User/mcp.json", {"a": OWN}, False),
    ],
)
def test_the_folder_of_a_plugins_own_manifest_is_shown(
    path: str, servers: dict[str, Any], is_shown: bool | None
) -> None:
    """If the file asks for it. Everywhere else a policy or a person has to grant it."""
    document = parse(path, json.dumps({"mcpServers": servers}).encode(), "json")
    found, diagnostics = manifest.read(document, server="a", home=HOME)
    assert found is not None, diagnostics
    folder = path.rpartition("/")[0]
    assert found.shown_folder == (folder if is_shown else "")
    assert [each.path for each in found.spec.paths] == ([folder] if is_shown is False else [])
    assert found.root is None


@pytest.mark.parametrize("folder", [HOME, "/home", ""])
def test_a_home_is_no_plugins_own_folder(folder: str) -> None:
    document = parse(f"{folder}/mcp.json", json.dumps({"mcpServers": {"a": OWN}}).encode(), "json")
    found, (fault,) = manifest.read(document, home=HOME)
    assert (found, fault.rule, fault.severity) == (None, "denylist", "error")


def test_a_clients_timeout_is_no_limit() -> None:
    """Clients disagree whether it is seconds or milliseconds, and of what: it stays theirs."""
    assert plugin(timeout=60).spec.limits == Limits()
    assert plugin(timeout="soon").spec.limits == Limits()


@pytest.mark.parametrize(
    ("written", "network"),
    [(None, None), ("none", "none"), ("host", "host")],
)
def test_networks(written: str | None, network: str | None) -> None:
    found = plugin(x_sandbox={} if written is None else {"network": written}).spec.network
    assert (found.mode if found else None) == network


RULES: list[tuple[str, dict[str, Any], str, int, int]] = [
    # The entry is written with one key per line: command in line 4, the first other key in line 5.
    ("url", {"command": "", "url": "https://x"}, "server_not_stdio", 5, 4),
    ("http", {"command": "", "type": "http"}, "server_not_stdio", 5, 4),
    ("command and url", {"url": "https://x"}, "entry_invalid", 3, 3),
    ("command and http", {"type": "http"}, "entry_invalid", 3, 3),
    ("type", {"type": "carrier-pigeon"}, "invalid_value", 5, 4),
    ("blank command", {"command": " "}, "command_missing", 4, 4),
    ("command type", {"command": 1}, "invalid_type", 4, 4),
    ("args type", {"args": ["a", 1]}, "invalid_type", 7, 5),
    ("env name", {"env": {"A B": "1"}}, "env_name", 6, 5),
    ("env type", {"env": {"A": 1}}, "invalid_type", 6, 5),
    ("sandbox key", {"x_sandbox": {"reads": []}}, "sandbox_unknown_key", 6, 5),
    ("sandbox type", {"x_sandbox": []}, "invalid_type", 5, 4),
    ("limit key", {"x_sandbox": {"limits": {"mem": 1}}}, "limit_unknown", 7, 6),
    ("limit", {"x_sandbox": {"limits": {"memory": "x"}}}, "limit_value", 7, 6),
    ("limit without a unit", {"x_sandbox": {"limits": {"memory": 256}}}, "limit_value", 7, 6),
    ("second limit", {"x_sandbox": {"limits": {"pids": "9", "cpu": "x"}}}, "limit_value", 8, 6),
    ("another contract's word", {"x_sandbox": {"limits": {"mem_mb": 256}}}, "limit_unknown", 7, 6),
    ("limits type", {"x_sandbox": {"limits": 1}}, "invalid_type", 6, 5),
    ("read type", {"x_sandbox": {"read": "/x"}}, "invalid_type", 6, 5),
    ("read item", {"x_sandbox": {"read": [1]}}, "invalid_type", 7, 6),
    ("read object", {"x_sandbox": {"read": [{"optional": True}]}}, "missing_key", 7, 6),
    ("read object key", {"x_sandbox": {"read": [{"path": "/x", "opt": 1}]}}, "sandbox_unknown_key", 9, 7),
    ("optional type", {"x_sandbox": {"read": [{"path": "/x", "optional": 1}]}}, "invalid_type", 9, 7),
    ("relative", {"x_sandbox": {"read": ["docs"]}}, "sandbox_relative_path", 7, 6),
    ("other home", {"x_sandbox": {"read": ["~you/docs"]}}, "sandbox_relative_path", 7, 6),
    ("denied", {"x_sandbox": {"read": ["~/.ssh/id"]}}, "denylist", 7, 6),
    ("home itself", {"x_sandbox": {"write": ["~"]}}, "denylist", 7, 6),
    ("network", {"x_sandbox": {"network": "all"}}, "invalid_value", 6, 5),
    ("network type", {"x_sandbox": {"network": 1}}, "invalid_value", 6, 5),
    ("network item", {"x_sandbox": {"network": ["a:1", "b:0"]}}, "network_allowlist", 8, 6),
    ("env names", {"x_sandbox": {"env": ["A=1"]}}, "env_name", 7, 6),
    ("seccomp", {"x_sandbox": {"seccomp": "x"}}, "invalid_value", 6, 5),
]


def test_an_empty_list_of_hosts_is_no_network() -> None:
    found, [warning] = entry(x_sandbox={"network": []})
    assert found is not None and found.spec.network is not None and found.spec.network.mode == "none"
    assert (warning.rule, warning.severity, warning.line) == ("network_allowlist", "warning", 6)


@pytest.mark.parametrize(("what", "keys", "rule", "line", "column"), RULES, ids=[row[0] for row in RULES])
def test_each_rule_points_at_its_place(
    what: str, keys: dict[str, Any], rule: str, line: int, column: int
) -> None:
    found, diagnostics = entry(**keys)
    assert found is None
    assert [(d.rule, d.line, d.column) for d in diagnostics] == [(rule, line, column)]


def test_an_entry_without_a_command() -> None:
    _, [diagnostic] = read({"mcpServers": {"demo": {}}})
    assert (diagnostic.rule, diagnostic.line, diagnostic.column) == ("command_missing", 3, 3)
    for entry, hint in (({"command": " "}, ""), ({"comand": "x"}, "did you mean 'command' by 'comand'?")):
        _, [diagnostic] = read({"mcpServers": {"demo": entry}})
        assert (diagnostic.rule, diagnostic.hint) == ("command_missing", hint)


def test_an_entry_that_is_no_object() -> None:
    _, [diagnostic] = read({"mcpServers": {"demo": "x"}})
    assert (diagnostic.rule, diagnostic.line, diagnostic.column) == ("invalid_type", 3, 3)


def test_unknown_keys_of_an_entry_are_warnings_and_other_programs_keys_are_none_of_our_business() -> None:
    found, diagnostics = read(
        {"mcpServers": {"demo": {"command": "x", "comand": "y", "disabled": False}}, "theme": {"dark": True}}
    )
    assert found is not None
    assert [(d.rule, d.severity, d.line, d.hint) for d in diagnostics] == [
        ("unknown_key", "warning", 5, "did you mean 'command'?")
    ]


def test_variables_are_not_expanded_and_that_is_said() -> None:
    found, diagnostics = entry(env={"KEY": "${API_KEY}"}, args=["$1", "${HOME:-/x}"])
    assert found is not None and found.spec.env[0].value == "${API_KEY}"
    assert [d.rule for d in diagnostics] == ["variable_not_expanded"] * 2


def test_with_several_servers_one_has_to_be_named() -> None:
    data = {"mcpServers": {"time": {"command": "a"}, "git": {"command": "b"}}}
    found, [diagnostic] = read(data)
    assert found is None and diagnostic.rule == "server_needed"
    assert "'time', 'git'" in diagnostic.message and "--server" in diagnostic.hint
    found, _ = read(data, "git")
    assert found is not None and found.id == "git"
    found, [diagnostic] = read(data, "gti")
    assert found is None and diagnostic.rule == "server_unknown"
    assert "'time', 'git'" in diagnostic.message and diagnostic.hint == "did you mean 'git'?"


def test_a_fault_of_one_server_is_no_fault_of_another() -> None:
    found, diagnostics = read({"mcpServers": {"bad": {"url": "x"}, "good": {"command": "b"}}}, "good")
    assert found is not None and diagnostics == ()


@pytest.mark.parametrize("data", [{}, {"mcpServers": []}, {"mcpServers": {}}, {"mcpServers": None}])
def test_a_configuration_without_servers(data: object) -> None:
    found, [diagnostic] = read(data)
    assert found is None and diagnostic.rule == "servers_missing"


@pytest.mark.parametrize("name", ["", " ", "..", "a\nb", "\x1b[2J", "a" * 129])
def test_names_that_cannot_be_used(name: str) -> None:
    found, [diagnostic] = read({"mcpServers": {name: {"command": "x"}}})
    assert found is None and diagnostic.rule == "server_name"
    assert "\n" not in diagnostic.text() and "\x1b" not in diagnostic.text()


def test_the_schema_is_a_schema_and_agrees_with_the_reader() -> None:
    schema: Any = manifest.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)

    def valid(**keys: Any) -> bool:
        return validator.is_valid({"mcpServers": {"a": {"command": "x", **keys}}, "other": 1})

    assert valid(novelty=1)
    assert valid(**{"x-sandbox": {"read": ["/a", {"path": "/b", "optional": True}], "network": "none"}})
    assert not valid(**{"x-sandbox": {"reads": []}})
    assert not valid(**{"x-sandbox": {"limits": {"mem": 1}}})
    assert not valid(**{"x-sandbox": {"network": "all"}})
