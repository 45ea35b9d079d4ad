"""Configurations that no host would write: each is read, or refused with a place in the file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts.mcp import CONTRACT, manifest
from runner.contracts.mcp.hosts.find import host_by_content
from runner.contracts.mcp.hosts.table import HOSTS
from sandbox.document.read import parse
from tests.runner.contracts.mcp.hosts.test_hosts import HOME

_WORDS = (
    *(
        "",
        "x",
        "..",
        "a/b",
        "${A}",
        "${A:-",
        "$A",
        "${env:A}",
        "{env:",
        "{file:/etc/shadow}",
        "${input:}",
        "~",
    ),
    *(
        "runner",
        "run",
        "--wrapped",
        "--",
        "stdio",
        "http",
        "local",
        "/home/me/x:y",
        "\u202e",
        "${{ secrets.A }}",
    ),
)
_KEYS = (
    *(
        "command",
        "args",
        "env",
        "envFile",
        "cwd",
        "type",
        "url",
        "disabled",
        "enabled",
        "name",
        "cmd",
        "envs",
    ),
    *(
        "environment",
        "env_vars",
        "env_keys",
        "config",
        "settings",
        "path",
        "x-sandbox",
        "transport",
        "servers",
    ),
    *("mcpServers", "projects", "read", "write", "network", "limits", "inputs", "a b", "", "/p"),
)
_VALUES = st.recursive(
    st.sampled_from((None, True, False, 0, 1.5, *_WORDS)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5),
    max_leaves=20,
)
_PLACES = sorted({place for host in HOSTS for place in (*host.files, *host.project_files)})


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(HOSTS), st.sampled_from(_PLACES), _VALUES, st.sampled_from((None, *_WORDS)))
def test_any_configuration_is_read_or_refused(host: Any, place: str, value: Any, server: str | None) -> None:
    data = value
    for key in reversed(host.servers[-1]):
        data = {"/p" if key == "*" else key: data}
    path = place.replace("~", HOME).replace("*", "x")
    path = path if path.startswith("/") else f"/src/{path.lstrip('$')}"
    document = parse(path, json.dumps(data).encode(), "json")
    for syntax in ("json", "jsonc", "toml", "yaml"):
        document.format = syntax
        host_by_content(document)
        CONTRACT.recognises(document)
    document.format = host.syntax
    labels = manifest.servers(document)
    manifest.remarks(document)
    for chosen in (None, server, *labels[:3]):
        read, diagnostics = manifest.read(document, server=chosen, home=HOME)
        assert read is not None or any(each.severity == "error" for each in diagnostics)
        assert all("\n" not in each.text() for each in diagnostics)
        if read is not None:
            CONTRACT.configurations.fill(read, lambda name: None, lambda path, where: "")
            CONTRACT.configurations.wrapped(read, {})


@pytest.mark.parametrize("count", [19_000])
def test_thousands_of_remote_servers_are_not_all_named(count: int) -> None:
    data = {"mcpServers": {f"s{number}": {"url": "x"} for number in range(count // 2)}}
    document = parse("/x/mcp.json", json.dumps(data).encode(), "json")
    assert len(manifest.remarks(document)) == 21
