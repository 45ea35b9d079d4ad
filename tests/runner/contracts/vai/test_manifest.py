"""vai manifests: each rule with its place; files of the package; the verbs that read a manifest."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runner.contracts.vai import manifest
from runner.contracts.vai.declared import Declared, DeclaredExport, Permissions, declared_by, details_of
from runner.contracts.vai.package import files, machine
from runner.contracts.vai.terms import PACKAGE
from runner.manifest.load import load, load_all
from runner.plugin import Entrypoint, Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import parse
from tests.conftest import ROOT, Caller
from tests.tables import one_case

DEVKIT = ROOT / "tests/plugins/vai_devkit"

# The manifest that the authors of the format show: one export of each kind.
SHOWN = """\
api_version = "vai.plugin.v1"
package_id = "acme/devkit"
version = "0.1.0"
name = "Acme Dev Kit"
description = "Harnesses, tools, hooks, and compaction strategies"
license = "Apache-2.0"
source = "oci://ghcr.io/acme/devkit:0.1.0"

[runtime]
protocol = "vai.rpc.v1"
transport = "stdio"
entrypoint = ["./bin/plugin"]
os = ["linux", "darwin"]
arch = ["amd64", "arm64"]

[[exports]]
id = "triage"
kind = "harness"
display_name = "Triage Harness"
description = "Composite bug triage harness"
execution_class = "isolated"
default_timeout_ms = 1800000
max_concurrency = 4
config_schema = "schemas/triage_config.json"

[exports.permissions]
network = "egress"
filesystem = "scratch"
gateway_api_scopes = [
  "sessions:read", "chains:read",
  "chains:write", "runs:write",
  "compactions:write"
]
secret_slots = ["anthropic_key", "openai_key"]

[exports.harness]
mode = "composite"
fidelity = "checkpoint"
supports = ["continue", "branch_session", "compact", "tool"]

[[exports]]
id = "jira_search"
kind = "tool"
display_name = "Jira Search"
execution_class = "isolated"
default_timeout_ms = 20000
config_schema = "schemas/jira_search_config.json"

[exports.permissions]
network = "egress"
filesystem = "none"
gateway_api_scopes = []
secret_slots = ["jira_token"]

[exports.tool]
effect_class = "read_only"
streaming = false
input_schema = "schemas/jira_search_input.json"
output_schema = "schemas/jira_search_output.json"

[[exports]]
id = "slack_notify"
kind = "hook"
display_name = "Slack Notifier"
execution_class = "worker"
default_timeout_ms = 15000
config_schema = "schemas/slack_notify_config.json"

[exports.permissions]
network = "egress"
filesystem = "none"
gateway_api_scopes = ["runs:read"]
secret_slots = ["slack_webhook"]

[exports.hook]
subscribes_to = ["run.completed", "chain.compacted"]

[[exports]]
id = "coder_window"
kind = "compactor"
display_name = "Coder Window"
execution_class = "worker"
default_timeout_ms = 120000
config_schema = "schemas/coder_window_config.json"

[exports.permissions]
network = "none"
filesystem = "scratch"
gateway_api_scopes = []
secret_slots = []

[exports.compactor]
target_context = "coding"
supports_pinned_items = true
"""

# The smallest manifest, with its lines counted below.
LEAST = """\
api_version = "vai.plugin.v1"
package_id = "acme/least"
version = "1.0.0"
name = "Least"
[runtime]
protocol = "vai.rpc.v1"
entrypoint = ["bin/plugin"]
[[exports]]
id = "ask"
kind = "tool"
[exports.tool]
input_schema = "schemas/ask.json"
"""

MakePackage = Callable[..., Path]


def read(text: str, **options: str) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    return manifest.read(parse("/srv/package/vai-plugin.toml", text.encode(), "toml"), options=options)


def plugin(text: str, **options: str) -> Plugin:
    found, diagnostics = read(text, **options)
    assert found is not None, [d.text() for d in diagnostics]
    return found


def export(text: str) -> DeclaredExport:
    [found] = declared_by(plugin(text)).exports
    return found


def of_kind(kind: str, table: str = "", more: str = "") -> str:
    """The smallest manifest with an export of this kind. `more`: lines of the export."""
    head = LEAST.partition('id = "ask"')[0]
    return f'{head}id = "ask"\nkind = "{kind}"\n{more}{table}'


HARNESS = '[exports.harness]\nmode = "composite"\nfidelity = "lossless"\nsupports = []\n'
HOOK = '[exports.hook]\nsubscribes_to = ["run.completed"]\n'
TOOL = '[exports.tool]\ninput_schema = "a.json"\n'
TABLES = {"harness": HARNESS, "tool": TOOL, "hook": HOOK, "compactor": ""}


# --- what is read -------------------------------------------------------------------------------------------


def test_the_manifest_that_its_authors_show() -> None:
    found, diagnostics = read(SHOWN)
    assert found is not None and diagnostics == ()
    assert (found.id, found.version, found.name) == ("acme/devkit", "0.1.0", "Acme Dev Kit")
    assert found.contract == "vai" and found.description.startswith("Harnesses")
    assert found.entrypoint == Entrypoint("./bin/plugin", (), "/srv/package")
    assert found.root == "/srv/package" and found.root_inside == PACKAGE == "/sandbox/package"
    assert dict(found.timeouts) == {"handshake": 10.0, "shutdown": 5.0}
    declared = declared_by(found)
    assert (declared.chosen, declared.effective) == ("", None)
    assert (declared.os, declared.arch) == (("linux", "darwin"), ("amd64", "arm64"))
    triage, search, notify, window = declared.exports
    assert triage == DeclaredExport(
        "triage",
        "harness",
        "Triage Harness",
        "Composite bug triage harness",
        "isolated",
        1800.0,
        4,
        Permissions(
            "egress",
            "scratch",
            ("sessions:read", "chains:read", "chains:write", "runs:write", "compactions:write"),
            ("anthropic_key", "openai_key"),
        ),
        config_schema="schemas/triage_config.json",
        mode="composite",
        fidelity="checkpoint",
        supports=("continue", "branch_session", "compact", "tool"),
    )
    assert search == DeclaredExport(
        "jira_search",
        "tool",
        "Jira Search",
        timeout=20.0,
        permissions=Permissions("egress", slots=("jira_token",)),
        config_schema="schemas/jira_search_config.json",
        input_schema="schemas/jira_search_input.json",
        output_schema="schemas/jira_search_output.json",
        effect_class="read_only",
    )
    assert notify == DeclaredExport(
        "slack_notify",
        "hook",
        "Slack Notifier",
        execution_class="worker",
        timeout=15.0,
        permissions=Permissions("egress", scopes=("runs:read",), slots=("slack_webhook",)),
        config_schema="schemas/slack_notify_config.json",
        subscribes_to=("run.completed", "chain.compacted"),
    )
    assert window == DeclaredExport(
        "coder_window",
        "compactor",
        "Coder Window",
        execution_class="worker",
        timeout=120.0,
        permissions=Permissions("none", "scratch"),
        config_schema="schemas/coder_window_config.json",
        target_context="coding",
        supports_pinned_items=True,
    )
    names = dict(found.exports)
    assert names["tools"] == ("jira_search",) and names["harnesses"] == ("triage",)
    assert names["hooks"] == ("slack_notify",) and names["compactors"] == ("coder_window",)


def test_the_smallest_manifest() -> None:
    found, diagnostics = read(LEAST)
    assert found is not None and diagnostics == ()
    declared = declared_by(found)
    assert (declared.os, declared.arch) == ((), ())
    assert declared.exports == (
        DeclaredExport("ask", "tool", "ask", timeout=20.0, input_schema="schemas/ask.json"),
    )
    assert declared.exports[0].permissions == Permissions("none", "none", (), ())
    assert declared.exports[0].effect_class == "unknown"


@pytest.mark.parametrize(
    ("kind", "execution_class", "timeout"),
    [
        ("harness", "isolated", 1800.0),
        ("tool", "isolated", 20.0),
        ("hook", "worker", 15.0),
        ("compactor", "worker", 120.0),
    ],
)
def test_defaults_of_each_kind(kind: str, execution_class: str, timeout: float) -> None:
    found = export(of_kind(kind, TABLES[kind]))
    assert (found.kind, found.execution_class, found.timeout) == (kind, execution_class, timeout)
    own = 'execution_class = "inline"\ndefault_timeout_ms = 1500\n'
    found = export(of_kind(kind, TABLES[kind], own))
    assert (found.execution_class, found.timeout) == ("inline", 1.5)


def test_what_is_declared_survives_the_plugin() -> None:
    """The cache keeps a Plugin as plain values, and nothing of this contract reads it back."""
    declared = declared_by(plugin(SHOWN))
    narrowed = declared.exports[0]._replace(timeout=1.0, permissions=Permissions(slots=("a",)))
    whole = Declared(declared.exports, "triage", narrowed, ("linux",), ("arm64",))
    assert declared_by(plugin(SHOWN)._replace(details=details_of(whole))) == whole


# --- what is refused ----------------------------------------------------------------------------------------


def without(line: str, text: str = LEAST) -> str:
    assert line in text
    return text.replace(line, "")


def changed(old: str, new: str, text: str = LEAST) -> str:
    assert old in text
    return text.replace(old, new)


FAULTS: list[tuple[str, str, int, int]] = [
    # Who it is.
    (without('api_version = "vai.plugin.v1"\n'), "missing_key", 1, 1),
    (changed("vai.plugin.v1", "vai.plugin.v2"), "invalid_value", 1, 1),
    (without('package_id = "acme/least"\n'), "missing_key", 1, 1),
    (changed('"acme/least"', "7"), "invalid_type", 2, 1),
    (changed("acme/least", "least"), "package_id", 2, 1),
    (changed("acme/least", "acme/least/more"), "package_id", 2, 1),
    (changed("acme/least", "Acme/least"), "package_id", 2, 1),
    (changed("acme/least", "../least"), "package_id", 2, 1),
    (changed("acme/least", "acme/.."), "package_id", 2, 1),
    (changed("acme/least", "acme/least\\n"), "package_id", 2, 1),
    (changed("acme/least", "acme/" + "l" * 124), "package_id", 2, 1),
    (without('version = "1.0.0"\n'), "missing_key", 1, 1),
    (changed("1.0.0", "v1.0.0"), "package_version", 3, 1),
    (changed("1.0.0", "1.0"), "package_version", 3, 1),
    (changed("1.0.0", ""), "package_version", 3, 1),
    (without('name = "Least"\n'), "missing_key", 1, 1),
    (changed('"Least"', '""'), "invalid_value", 4, 1),
    (changed('name = "Least"', 'name = "Least"\ndescription = 1'), "invalid_type", 5, 1),
    (changed('name = "Least"', 'name = "Least"\nlicense = 1'), "invalid_type", 5, 1),
    (changed('name = "Least"', 'name = "Least"\nsource = []'), "invalid_type", 5, 1),
    # How it is started.
    (LEAST.partition("[runtime]")[0] + '[[exports]]\nid = "a"\nkind = "compactor"\n', "missing_key", 1, 1),
    (without('protocol = "vai.rpc.v1"\n'), "missing_key", 5, 2),
    (changed("vai.rpc.v1", "vai.rpc.v2"), "invalid_value", 6, 1),
    (changed("[runtime]\n", '[runtime]\ntransport = "http"\n'), "invalid_value", 6, 1),
    (without('entrypoint = ["bin/plugin"]\n'), "missing_key", 5, 2),
    (changed('["bin/plugin"]', '"bin/plugin"'), "invalid_type", 7, 1),
    (changed('["bin/plugin"]', "[]"), "invalid_value", 7, 1),
    (changed('["bin/plugin"]', "[1]"), "invalid_type", 7, 15),
    (changed('["bin/plugin"]', '["/usr/bin/python3"]'), "path_outside", 7, 15),
    (changed('["bin/plugin"]', '["../bin/plugin"]'), "path_outside", 7, 15),
    (changed('["bin/plugin"]', '["bin/../../plugin"]'), "path_outside", 7, 15),
    (changed('["bin/plugin"]', '["bin/"]'), "path_outside", 7, 15),
    (changed('["bin/plugin"]', '["."]'), "path_outside", 7, 15),
    (changed('["bin/plugin"]', '[""]'), "path_outside", 7, 15),
    (changed("bin/plugin", "b" * 256), "path_outside", 7, 15),
    (changed("bin/plugin", "b/" * 2047 + "bb"), "path_outside", 7, 15),
    (changed("bin/plugin", "assets/plugin"), "entrypoint_assets", 7, 15),
    (changed('["bin/plugin"]', f'["bin/plugin", "{"x" * 131072}"]'), "argument_too_long", 7, 29),
    (changed("[runtime]\n", "[runtime]\nos = []\n"), "invalid_value", 6, 1),
    (changed("[runtime]\n", '[runtime]\nos = "linux"\n'), "invalid_type", 6, 1),
    (changed("[runtime]\n", "[runtime]\narch = [64]\n"), "invalid_type", 6, 9),
    # Its exports.
    (LEAST.partition("[[exports]]")[0], "missing_key", 1, 1),
    (
        changed("[runtime]\n", "exports = []\n[runtime]\n", LEAST.partition("[[exports]]")[0]),
        "invalid_value",
        5,
        1,
    ),
    (changed("[[exports]]", "[exports]", LEAST.partition("[exports.tool]")[0]), "invalid_type", 8, 2),
    (without('id = "ask"\n'), "missing_key", 8, 3),
    (changed('"ask"', '"Ask"'), "export_id", 9, 1),
    (changed('"ask"', '"1ask"'), "export_id", 9, 1),
    (changed('"ask"', '"ask-it"'), "export_id", 9, 1),
    (changed('"ask"', '"ask\\n"'), "export_id", 9, 1),
    (changed('"ask"', f'"{"a" * 65}"'), "export_id", 9, 1),
    (LEAST + LEAST.partition("[[exports]]")[2].join(("[[exports]]", "")), "export_duplicate", 14, 1),
    (without('kind = "tool"\n'), "missing_key", 8, 3),
    (changed('"tool"', '"agent"'), "invalid_value", 10, 1),
    (of_kind("compactor", more="display_name = 1\n"), "invalid_type", 11, 1),
    (of_kind("compactor", more="description = 1\n"), "invalid_type", 11, 1),
    (of_kind("compactor", more='execution_class = "thread"\n'), "invalid_value", 11, 1),
    (of_kind("compactor", more="default_timeout_ms = 0\n"), "invalid_value", 11, 1),
    (of_kind("compactor", more="default_timeout_ms = -1\n"), "invalid_value", 11, 1),
    (of_kind("compactor", more="default_timeout_ms = 1.5\n"), "invalid_type", 11, 1),
    (of_kind("compactor", more="default_timeout_ms = true\n"), "invalid_type", 11, 1),
    (of_kind("compactor", more=f"default_timeout_ms = {2**31}\n"), "invalid_value", 11, 1),
    (of_kind("compactor", more="max_concurrency = 0\n"), "invalid_value", 11, 1),
    (of_kind("compactor", more="max_concurrency = 10001\n"), "invalid_value", 11, 1),
    (of_kind("compactor", more='config_schema = "/etc/passwd"\n'), "path_outside", 11, 1),
    (of_kind("compactor", more='config_schema = "../a.json"\n'), "path_outside", 11, 1),
    (of_kind("compactor", more="config_schema = {}\n"), "invalid_type", 11, 1),
    # What they ask for.
    (of_kind("compactor", '[exports.permissions]\nnetwork = "host"\n'), "invalid_value", 12, 1),
    (of_kind("compactor", '[exports.permissions]\nfilesystem = "home"\n'), "invalid_value", 12, 1),
    (of_kind("compactor", '[exports.permissions]\ngateway_api_scopes = "a:b"\n'), "invalid_type", 12, 1),
    (of_kind("compactor", '[exports.permissions]\ngateway_api_scopes = [""]\n'), "word_invalid", 12, 23),
    (of_kind("compactor", '[exports.permissions]\ngateway_api_scopes = ["a b"]\n'), "word_invalid", 12, 23),
    (
        of_kind("compactor", f'[exports.permissions]\ngateway_api_scopes = ["{"a" * 129}"]\n'),
        "word_invalid",
        12,
        23,
    ),
    (of_kind("compactor", '[exports.permissions]\nsecret_slots = ["Key"]\n'), "slot_name", 12, 17),
    (of_kind("compactor", '[exports.permissions]\nsecret_slots = ["a/b"]\n'), "slot_name", 12, 17),
    (of_kind("compactor", '[exports.permissions]\nsecret_slots = [".."]\n'), "slot_name", 12, 17),
    (of_kind("compactor", '[exports.permissions]\nsecret_slots = ["a", "a"]\n'), "slot_duplicate", 12, 22),
    (
        of_kind("compactor", f"[exports.permissions]\nsecret_slots = {[f's{n}' for n in range(65)]}\n"),
        "slots_too_many",
        12,
        1,
    ),
    # The table of each kind.
    (of_kind("harness"), "missing_key", 8, 3),
    (of_kind("harness", without('mode = "composite"\n', HARNESS)), "missing_key", 11, 10),
    (of_kind("harness", without('fidelity = "lossless"\n', HARNESS)), "missing_key", 11, 10),
    (of_kind("harness", without("supports = []\n", HARNESS)), "missing_key", 11, 10),
    (of_kind("harness", changed("lossless", "exact", HARNESS)), "invalid_value", 13, 1),
    (of_kind("harness", changed("[]", '["a b"]', HARNESS)), "word_invalid", 14, 13),
    (of_kind("tool"), "missing_key", 8, 3),
    (of_kind("tool", "[exports.tool]\nstreaming = true\n"), "missing_key", 11, 10),
    (of_kind("tool", TOOL + 'effect_class = "write"\n'), "invalid_value", 13, 1),
    (of_kind("tool", TOOL + "streaming = 1\n"), "invalid_type", 13, 1),
    (of_kind("tool", changed("a.json", "/a.json", TOOL)), "path_outside", 12, 1),
    (of_kind("tool", TOOL + 'output_schema = "b/../../a.json"\n'), "path_outside", 13, 1),
    (of_kind("hook"), "missing_key", 8, 3),
    (of_kind("hook", "[exports.hook]\n"), "missing_key", 11, 10),
    (of_kind("hook", "[exports.hook]\nsubscribes_to = []\n"), "invalid_value", 12, 1),
    (of_kind("compactor", "[exports.compactor]\nsupports_pinned_items = 1\n"), "invalid_type", 12, 1),
    (of_kind("compactor", "[exports.compactor]\ntarget_context = 1\n"), "invalid_type", 12, 1),
    *[
        (of_kind(kind, TABLES[other] or "[exports.compactor]\n", ""), "kind_table", 11, 10)
        for kind in TABLES
        for other in TABLES
        if kind != other
    ],
]


@one_case(("text", "rule", "line", "column"), FAULTS, ids=[f"{n}-{row[1]}" for n, row in enumerate(FAULTS)])
def test_a_fault_has_its_place(text: str, rule: str, line: int, column: int) -> None:
    found, diagnostics = read(text)
    assert found is None
    places = [(d.rule, d.line, d.column) for d in diagnostics if d.severity == "error"]
    assert (rule, line, column) in places, [d.text() for d in diagnostics]
    assert all(d.file == "/srv/package/vai-plugin.toml" for d in diagnostics)


def test_every_fault_is_found_at_once() -> None:
    text = changed("1.0.0", "1", changed("acme/least", "least", changed('"ask"', '"Ask"')))
    _, diagnostics = read(text + "streaming = 1\n")
    assert [d.rule for d in diagnostics] == ["package_id", "package_version", "export_id", "invalid_type"]


def test_a_nul_character_is_refused_before_any_rule() -> None:
    from sandbox.document.diagnostic import DocumentError

    with pytest.raises(DocumentError) as refused:
        read(changed("bin/plugin", "bin/\\u0000plugin"))
    assert refused.value.diagnostics[0].rule == "nul_character"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (changed("name =", "homepage = 1\nname ="), 4),
        (changed("[runtime]\n", "[runtime]\nmemory = 1\n"), 6),
        (changed('kind = "tool"', 'kind = "tool"\nretries = 3'), 11),
        (LEAST + "cost = 1\n", 13),
        (LEAST + "[exports.permissions]\ndevices = []\n", 14),
        (LEAST + "[more]\n", 13),
    ],
)
def test_an_unknown_key_is_a_warning(text: str, line: int) -> None:
    found, [warning] = read(text)
    assert found is not None and (warning.severity, warning.rule) == ("warning", "unknown_key")
    assert warning.line == line


def test_paths_are_written_without_detours() -> None:
    text = changed("schemas/ask.json", "./schemas//./ask.json", changed("bin/plugin", ".//bin/plugin"))
    found = plugin(text)
    assert found.entrypoint is not None and found.entrypoint.command == "./bin/plugin"
    assert declared_by(found).exports[0].input_schema == "schemas/ask.json"


def test_a_program_without_a_slash_is_a_file_of_the_package() -> None:
    """It is never looked up on PATH."""
    found = plugin(changed('["bin/plugin"]', '["python3", "-c", "1"]'))
    assert found.entrypoint == Entrypoint("./python3", ("-c", "1"), "/srv/package")
    assert found.root_parts == ("bin", "schemas", "vai-plugin.toml", "python3")


# --- the schema for editors ---------------------------------------------------------------------------------


def data(text: str) -> dict[str, Any]:
    return parse("/a.toml", text.encode(), "toml").data


@pytest.mark.parametrize("text", [SHOWN, LEAST, *(of_kind(kind, table) for kind, table in TABLES.items())])
def test_the_json_schema_accepts(text: str) -> None:
    schema = manifest.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data(text), schema)


@pytest.mark.parametrize(
    "text",
    [
        *(of_kind(kind) for kind in ("harness", "tool", "hook")),
        of_kind("compactor", HOOK),
        changed("acme/least", "least"),
        changed('"ask"', '"Ask"'),
        changed("vai.rpc.v1", "vai.rpc.v2"),
        LEAST.partition("[[exports]]")[0],
        LEAST + '[exports.permissions]\nsecret_slots = ["a", "a"]\n',
    ],
)
def test_the_json_schema_refuses(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data(text), manifest.json_schema())


# --- the files of the package -------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> MakePackage:
    def make(text: str = LEAST, **schemas: str) -> Path:
        root = tmp_path / "package"
        (root / "bin").mkdir(parents=True)
        (root / "schemas").mkdir()
        (root / "bin/plugin").write_text("#!/bin/sh\n")
        (root / "bin/plugin").chmod(0o755)
        (root / "vai-plugin.toml").write_text(text)
        for name, content in {"ask": '{"type": "object"}', **schemas}.items():
            (root / f"schemas/{name}.json").write_text(content)
        return root

    return make


def checked(root: Path) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    [only] = load_all(str(root))
    return only.plugin, only.diagnostics


def rules(root: Path) -> list[tuple[str, str, int]]:
    found, diagnostics = checked(root)
    assert found is None
    return [(d.rule, os.path.basename(d.file), d.line) for d in diagnostics]


def test_a_sound_package_has_no_faults(package: MakePackage) -> None:
    found, diagnostics = checked(package())
    assert found is not None and diagnostics == ()


def test_check_files_never_needs_a_binding(package: MakePackage) -> None:
    root = package(SHOWN.replace("schemas/", "schemas/ask.json#"))
    found, diagnostics = checked(root)
    assert found is None and {d.rule for d in diagnostics} == {"schema_missing"}
    assert len(diagnostics) == 6  # all exports are judged


def test_the_program_has_to_be_there(package: MakePackage) -> None:
    root = package()
    (root / "bin/plugin").chmod(0o644)
    assert rules(root) == [("program_not_executable", "vai-plugin.toml", 7)]
    (root / "bin/plugin").unlink()
    assert rules(root) == [("program_missing", "vai-plugin.toml", 7)]
    (root / "bin/plugin").mkdir()
    assert rules(root) == [("program_missing", "vai-plugin.toml", 7)]


@pytest.mark.parametrize(
    ("content", "rule", "file", "line"),
    [
        ('{\n"type": ', "json_syntax", "ask.json", 2),
        ("[]", "not_an_object", "ask.json", 1),
        ('{"type": "thing"}', "schema_invalid", "vai-plugin.toml", 12),
        ('{"$ref": "https://example.com/a.json"}', "schema_invalid", "vai-plugin.toml", 12),
        ('{"$ref": "other.json"}', "schema_invalid", "vai-plugin.toml", 12),
        ('{"$ref": "file:///etc/passwd"}', "schema_invalid", "vai-plugin.toml", 12),
        ('{"$ref": "#/$defs/missing"}', "schema_invalid", "vai-plugin.toml", 12),
        ('{"pattern": "' + "\\\\w" * 600 + '"}', "schema_invalid", "vai-plugin.toml", 12),
    ],
)
def test_a_schema_that_cannot_be_used(
    package: MakePackage, content: str, rule: str, file: str, line: int
) -> None:
    assert rules(package(ask=content, other="{}")) == [(rule, file, line)]


def test_a_schema_that_is_missing_or_no_file(package: MakePackage) -> None:
    root = package()
    (root / "schemas/ask.json").unlink()
    assert rules(root) == [("schema_missing", "vai-plugin.toml", 12)]
    os.mkfifo(root / "schemas/ask.json")
    assert rules(root) == [("not_a_file", "ask.json", 0)]


def test_a_pattern_that_is_not_checked_is_a_warning(package: MakePackage) -> None:
    found, [warning] = checked(package(ask='{"type": "string", "pattern": "(?=a)b"}'))
    assert found is not None and (warning.rule, warning.severity) == ("schema_pattern", "warning")


def test_links_out_of_the_package_are_refused(package: MakePackage, tmp_path: Path) -> None:
    root = package()
    (tmp_path / "outside.json").write_text("{}")
    (tmp_path / "outside").write_text("#!/bin/sh\n")
    (tmp_path / "outside").chmod(0o755)
    inside = root / "bin/again"
    inside.symlink_to("plugin")
    assert checked(root) == (checked(root)[0], ()) and checked(root)[0] is not None  # the control
    (root / "schemas/ask.json").unlink()
    (root / "schemas/ask.json").symlink_to("../../outside.json")
    assert rules(root) == [("link_outside", "vai-plugin.toml", 12), ("link_outside", "ask.json", 0)]
    (root / "schemas/ask.json").unlink()
    (root / "schemas/ask.json").write_text("{}")
    (root / "bin/plugin").unlink()
    (root / "bin/plugin").symlink_to(tmp_path / "outside")
    assert ("link_outside", "vai-plugin.toml", 7) in rules(root)
    (root / "bin/plugin").unlink()
    (root / "bin/plugin").symlink_to("again")  # a loop
    (root / "schemas/etc").symlink_to("/etc")
    found = rules(root)
    assert ("program_missing", "vai-plugin.toml", 7) in found and ("link_outside", "etc", 0) in found


def test_few_of_many_links_are_shown(package: MakePackage) -> None:
    root = package()
    for number in range(50):
        (root / f"bin/link{number}").symlink_to("/etc/passwd")
    assert len(rules(root)) == 20


def test_a_package_with_too_many_files_is_not_read_to_its_end(
    package: MakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_ENTRIES", 3)
    assert len(list(files.walk_package(str(package())))) == 3


# --- machines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("systems", "machines", "here", "cause"),
    [
        ((), (), "x86_64", None),
        (("linux",), ("amd64",), "x86_64", None),
        (("darwin", "linux"), ("arm64",), "aarch64", None),
        (("linux",), ("x86_64",), "x86_64", None),
        ((), ("riscv64",), "riscv64", None),
        (("darwin",), (), "x86_64", "wrong_os"),
        ((), ("arm64",), "x86_64", "wrong_arch"),
        ((), ("amd64",), "aarch64", "wrong_arch"),
        (("darwin",), ("arm64",), "x86_64", "wrong_os"),
    ],
)
def test_the_machine_it_was_built_for(
    systems: tuple[str, ...],
    machines: tuple[str, ...],
    here: str,
    cause: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = os.uname_result(("Linux", "host", "6.1", "#1", here))
    monkeypatch.setattr(os, "uname", lambda: named)
    fault = machine.machine_fault(Declared((), os=systems, arch=machines))
    assert (None if fault is None else fault.cause) == cause


def test_a_package_for_another_system_is_not_launched(
    runner_as_user: Caller, package: MakePackage, plugin_dir: Path
) -> None:
    root = package(changed("[runtime]\n", '[runtime]\nos = ["darwin"]\n'))
    root = root.rename(plugin_dir / "package")
    done = runner_as_user("exec", root)
    assert done.returncode == 126
    assert "launch_failed" in done.stderr and "darwin" in done.stderr and "os under [runtime]" in done.stderr
    done = runner_as_user("explain", root)
    assert done.returncode == 10 and "It would NOT be launched: launch_failed" in done.stdout
    done = runner_as_user("check", "--format", "json", root)
    [warning] = json.loads(done.stdout)["files"][0]["diagnostics"]
    assert done.returncode == 0 and (warning["rule"], warning["severity"]) == ("wrong_os", "warning")
    assert warning["line"] == 6


# --- verbs that start nothing -------------------------------------------------------------------------------


def test_tools_lists_every_export_from_the_manifest(runner_as_user: Caller, plugin_dir: Path) -> None:
    runner_as_user.give(plugin_dir)
    report = plugin_dir / "report.json"
    done = runner_as_user("tools", "--json", "--report", report, DEVKIT)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["plugin"] == {"id": "acme/devkit", "version": "0.1.0", "contract": "vai"}
    names = {kind: [each["name"] for each in found[kind]] for kind in found if kind != "plugin"}
    assert names == {
        "tools": ["search", "reader"],
        "hooks": ["notify"],
        "compactors": ["window"],
        "harnesses": ["triage"],
    }
    assert found["tools"][0]["input_schema"] == {"type": "object"}
    assert found["tools"][0]["effect_class"] == "read_only" and "output_schema" not in found["tools"][0]
    assert json.loads(report.read_text())["outcome"]["code"] == "ok"
    text = runner_as_user("tools", DEVKIT)
    assert text.returncode == 0 and "harnesses:\n  triage" in text.stdout


def test_tools_reads_no_schema_outside_of_the_package(package: MakePackage, tmp_path: Path) -> None:
    from runner.contracts.vai.package.catalogue import catalogue

    root = package()
    (tmp_path / "secret.json").write_text('{"title": "secret"}')
    (root / "schemas/ask.json").unlink()
    (root / "schemas/ask.json").symlink_to(tmp_path / "secret.json")
    found = load(str(root)).plugin
    assert found is not None and "input_schema" not in catalogue(found)["tools"][0]


def test_it_is_recognised_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(LEAST)
    found = load(str(tmp_path / "other.toml")).plugin
    assert found is not None and found.contract == "vai"
    assert found.root_parts == ("bin", "schemas", "other.toml")


def test_the_plugin_of_the_tests_is_sound() -> None:
    found, diagnostics = checked(DEVKIT)
    assert found is not None and diagnostics == ()


# --- the page about it --------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/vai.md").read_text()


def test_the_manifest_of_the_page_is_read_without_a_word() -> None:
    [text] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    found, diagnostics = read(text)
    assert found is not None and diagnostics == ()
    jsonschema.validate(data(text), manifest.json_schema())


@pytest.mark.parametrize("module", ["manifest", "package/files", "package/lint"])
def test_the_page_has_every_rule(module: str) -> None:
    tree = ast.parse((ROOT / f"runner/contracts/vai/{module}.py").read_text())
    said: set[str] = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 2):
        name = ast.unparse(call.func)
        rule = call.args[3 if name == "Diagnostic" else 1]
        if name in ("faults.error", "faults.warn", "_about_file", "Diagnostic"):
            said |= {str(rule.value)} if isinstance(rule, ast.Constant) else set()
    of_all_contracts = {"missing_key"}
    assert len(said) > 4
    assert [rule for rule in sorted(said - of_all_contracts) if f"`{rule}`" not in PAGE] == []
