"""A prepared call and its cage: the options that prepare makes are those that the reader takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.vai import manifest
from runner.contracts.vai.call import requests
from runner.contracts.vai.call.prepare import with_delegation
from runner.plugin import Plugin
from runner.protocol.host_services import Delegation
from sandbox.document.read import parse
from sandbox.spec import MemoryFile
from tests.runner.contracts.vai.package import BINDING, prepare_call
from tests.runner.contracts.vai.test_manifest import SHOWN

URL = "https://api.example.com/v1"

Read = Callable[..., Plugin]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads the manifest that the authors of the format show, with the given options."""
    (tmp_path / "schemas").mkdir()
    for name in re.findall(r"schemas/(\w+\.json)", SHOWN):
        (tmp_path / "schemas" / name).write_text('{"type": "object"}')
    document = parse(str(tmp_path / "vai-plugin.toml"), SHOWN.encode(), "toml")

    def read(**options: str) -> Plugin:
        plugin, found = manifest.read(document, options=options)
        assert plugin is not None, found
        return plugin

    return read


def binding(export: str, **changes: Any) -> dict[str, str]:
    return {"binding": json.dumps({**BINDING, "export_id": export, "secrets": {}, **changes})}


def test_scratch_and_the_file_of_a_large_projection(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_INLINE_BYTES", 10)
    given = {"source": {"chain_id": "ch_1", "projection": {"blocks": [{"kind": "input", "content": []}]}}}
    prepared = prepare_call(read(), "coder_window", given)
    plugin = read(**prepared.options)
    context = prepared.call.input["context"]
    assert plugin.spec.scratch is not None
    assert plugin.spec.scratch.dest == context["scratch_dir"]
    path = prepared.call.input["source"]["projection"]["path"]
    assert plugin.spec.memory_files == (MemoryFile(path, 0o600),)
    assert list(prepared.contents) == [path]


def test_secrets_and_hosts_of_a_binding(read: Read) -> None:
    options = binding(
        "slack_notify",
        secrets={"slack_webhook": "secret://org_123/hook"},
        policy={"egress": ["hooks.example.com"]},
    )
    event = {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}}
    secrets = {"slack_webhook": "https://hooks.example.com/x"}
    prepared = prepare_call(read(), "slack_notify", event, options=options, secrets=secrets)
    plugin = read(**prepared.options)
    assert plugin.spec.memory_files == (MemoryFile("/sandbox/secrets/slack_webhook", secret="slack_webhook"),)
    assert plugin.spec.network is not None
    assert plugin.spec.network.hosts == ("hooks.example.com:443",)
    assert prepared.delegation is not None
    delegated = with_delegation(prepared, Delegation(URL, "token-of-16-chars", ("runs:read",)))
    network = read(**delegated.options).spec.network
    assert network is not None
    assert network.hosts == ("hooks.example.com:443", "api.example.com:443")


def test_a_slot_that_is_null_has_no_file(read: Read) -> None:
    options = binding("jira_search", secrets={"jira_token": None})
    prepared = prepare_call(read(), "jira_search", {"query": "x"}, options=options)
    assert read(**prepared.options).spec.memory_files == ()
