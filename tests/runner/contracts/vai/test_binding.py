"""Binding records: each rule of a binding, in the order in which they are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.vai.binding import (
    INACTIVE,
    SECRET_MISSING,
    check_bindings,
    is_selected,
    narrow_export,
    read_binding,
)
from runner.contracts.vai.declared import DeclaredExport, Permissions
from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic
from tests.runner.contracts.vai.package import BINDING, EXPORTS, HARNESS, TOOL, bound, make_package


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return make_package(tmp_path)


def read(plugin: Plugin, **changes: Any) -> tuple[Any, tuple[Diagnostic, ...]]:
    return read_binding(bound(**changes)["binding"], "binding.json", plugin)


def test_the_record_of_the_contracts_text(plugin: Plugin) -> None:
    binding, found = read(plugin)
    assert found == ()
    assert binding.id == "bind_123"
    assert (binding.export, binding.org, binding.project) == ("jira_search", "org_123", "proj_123")
    assert binding.config == BINDING["config"]  # no defaults: the package's files are not read
    assert binding.slots == {"jira_token": "secret://org_123/jira_token"}
    assert (binding.active, binding.traffic_percent) == (True, 100)
    assert (binding.permissions, binding.egress, binding.timeout, binding.max_concurrency) == (None,) * 4
    assert narrow_export(TOOL, binding) == TOOL


def test_a_binding_may_leave_keys_out(plugin: Plugin) -> None:
    binding, found = read(plugin, scope={"org_id": "org_123"}, config=None, rollout=None)
    assert (binding.project, binding.config, binding.traffic_percent, found) == ("", {}, 100, ())


INVALID = "binding_invalid"

FAULTS: list[Any] = [
    ({"binding_id": None}, INVALID, "binding_id is missing"),
    ({"binding_id": 3}, INVALID, "binding_id has to be a text"),
    ({"binding_id": "a\nb"}, INVALID, "binding_id has to be a text"),
    ({"package_id": "acme/other"}, INVALID, "package_id is 'acme/other', and the package is 'acme/devkit'"),
    ({"package_id": None}, INVALID, "package_id is missing"),
    ({"package_version": "0.1.1"}, INVALID, "package_version is '0.1.1'"),
    ({"package_version": "0.1"}, INVALID, "package_version is '0.1'"),
    ({"export_id": "jira_serch"}, INVALID, "no export 'jira_serch'"),
    ({"scope": None}, INVALID, "scope is missing"),
    ({"scope": "org_123"}, INVALID, "scope is not an object"),
    ({"scope": {}}, INVALID, "org_id is missing"),
    ({"scope": {"org_id": "o" * 257}}, INVALID, "org_id has to be a text"),
    ({"scope": {"org_id": "org_123", "project_id": 3}}, INVALID, "project_id has to be a text"),
    ({"config": []}, INVALID, "config is not an object"),
    ({"secrets": {}}, SECRET_MISSING, "says nothing about the secret slot 'jira_token'"),
    ({"secrets": None}, SECRET_MISSING, "says nothing about the secret slot 'jira_token'"),
    ({"secrets": []}, INVALID, "secrets is not an object"),
    ({"secrets": {"jira_token": None, "other": None}}, INVALID, "no secret slot 'other'"),
    ({"secrets": {"jira_token": "hunter2hunter2"}}, INVALID, "no reference of the form"),
    ({"secrets": {"jira_token": "secret://org_9/x"}}, INVALID, "refers to the org 'org_9'"),
    ({"secrets": {"jira_token": "secret://org_123/"}}, INVALID, "no reference of the form"),
    ({"secrets": {"jira_token": 3}}, INVALID, "no reference of the form"),
    ({"status": None}, INVALID, "status is missing"),
    ({"status": "paused"}, INVALID, "neither active nor disabled"),
    ({"status": True}, INVALID, "status has to be a text"),
    ({"rollout": {"traffic_percent": 101}}, INVALID, "from 0 to 100"),
    ({"rollout": {"traffic_percent": -1}}, INVALID, "from 0 to 100"),
    ({"rollout": {"traffic_percent": True}}, INVALID, "from 0 to 100"),
    ({"rollout": {"traffic_percent": 50.0}}, INVALID, "from 0 to 100"),
    ({"rollout": 3}, INVALID, "rollout is not an object"),
    ({"policy": 3}, INVALID, "policy is not an object"),
    ({"policy": {"timeout_ms": 0}}, INVALID, "timeout_ms is not an integer above 0"),
    ({"policy": {"timeout_ms": "5s"}}, INVALID, "timeout_ms is not an integer above 0"),
    ({"policy": {"max_concurrency": 0}}, INVALID, "max_concurrency is not an integer"),
    ({"policy": {"network": "open"}}, INVALID, "network is none of none, egress"),
    ({"policy": {"filesystem": ["none"]}}, INVALID, "filesystem is none of none, scratch"),
    ({"policy": {"gateway_api_scopes": "runs:read"}}, INVALID, "not a list of strings"),
    ({"policy": {"egress": "example.com"}}, INVALID, "egress is not a list of strings"),
    ({"policy": {"egress": ["10.0.0.0/8:443"]}}, INVALID, "contains a slash"),
    ({"policy": {"egress": ["http://example.com"]}}, INVALID, "'http://example.com' "),
    ({"policy": {"egress": ["a.example"] * 257}}, INVALID, "egress has 257 hosts; 256 are the most"),
    ({"policy": {"egress": ["a.example:1-64", "b.example:65"]}}, INVALID, "egress names 65 ports; 64 are"),
]


@pytest.mark.parametrize(("changes", "rule", "said"), FAULTS)
def test_a_fault_is_named_with_its_place(
    plugin: Plugin, changes: dict[str, Any], rule: str, said: str
) -> None:
    binding, found = read(plugin, **changes)
    assert binding is None
    fault = next(fault for fault in found if fault.severity == "error")
    assert fault.rule == rule
    assert said in fault.message
    assert fault.file == "binding.json"
    text = bound(**changes)["binding"].splitlines()
    key = next(iter(changes))
    if changes[key] is not None:
        lines = [number for number, line in enumerate(text, 1) if f'"{key}"' in line]
        assert fault.line >= lines[0]
        assert fault.column >= 1


def test_a_secret_in_the_wrong_place_is_not_repeated(plugin: Plugin) -> None:
    _, found = read(plugin, secrets={"jira_token": "hunter2hunter2"})
    assert "hunter2" not in str(found)


# Each row alone is a fault of its step. Of two, the earlier one is reported.
ORDER: list[dict[str, Any]] = [
    {"package_id": "acme/other"},
    {"package_version": "9.9.9"},
    {"export_id": "none"},
    {"scope": {}},
    {"config": 3},
    {"secrets": {}},
    {"status": "paused"},
    {"rollout": {"traffic_percent": 200}},
    {"policy": {"network": "open"}},
]


@pytest.mark.parametrize("step", range(len(ORDER) - 1))
def test_the_steps_are_taken_in_order(plugin: Plugin, step: int) -> None:
    alone = read(plugin, **ORDER[step])[1]
    changes = {key: value for later in ORDER[step:] for key, value in later.items()}
    errors = [fault for fault in read(plugin, **changes)[1] if fault.severity == "error"]
    assert [fault.message for fault in errors] == [fault.message for fault in alone]
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "json_syntax"),
        ("[]", "not_an_object"),
        ('{"a": 1, "a": 2}', "duplicate_key"),
        ("{" * 200, "json_syntax"),
        ('{"binding_id": "\ud800"}', "invalid_utf8"),
        ('{"binding_id": NaN}', "json_syntax"),
        (" " * (1 << 20) + "{}", "file_too_large"),
    ],
)
def test_texts_that_are_no_binding_are_refused(plugin: Plugin, text: str, rule: str) -> None:
    binding, found = read_binding(text, "", plugin)
    assert binding is None
    assert found[0].rule == rule
    assert found[0].file == "the binding"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"polcy": {}}, "'polcy' is not a key of a binding"),
        ({"scope": {"org_id": "org_123", "team": "x"}}, "'team' is not a key of a scope"),
        ({"rollout": {"percent": 3}}, "'percent' is not a key of a rollout"),
        ({"policy": {"limits": {}}}, "'limits' is not a key of the policy"),
    ],
)
def test_unknown_keys_are_warned_about(plugin: Plugin, changes: dict[str, Any], word: str) -> None:
    binding, (warning,) = read(plugin, **changes)
    assert binding is not None
    assert (warning.severity, warning.rule) == ("warning", "unknown_key")
    assert word in warning.message


# --- it only narrows ----------------------------------------------------------------------------------------


def of_harness(plugin: Plugin, **policy: Any) -> tuple[DeclaredExport, Any, list[str]]:
    """The harness as a binding with this policy narrows it, its hosts, and the rules of the warnings."""
    binding, found = read(plugin, export_id="triage", secrets={}, policy=policy)
    assert binding is not None, found
    return narrow_export(HARNESS, binding), binding.egress, [fault.rule for fault in found]


DECLARED = HARNESS.permissions


@pytest.mark.parametrize(
    ("policy", "permissions", "timeout", "most"),
    [
        ({}, DECLARED, 1800.0, 4),
        ({"timeout_ms": 1500, "max_concurrency": 2}, DECLARED, 1.5, 2),
        ({"timeout_ms": 1800000, "max_concurrency": 4}, DECLARED, 1800.0, 4),
        ({"network": "none"}, DECLARED._replace(network="none"), 1800.0, 4),
        ({"filesystem": "none"}, DECLARED._replace(filesystem="none"), 1800.0, 4),
        (
            {"gateway_api_scopes": ["runs:write", "chains:read"]},
            DECLARED._replace(scopes=("chains:read", "runs:write")),
            1800.0,
            4,
        ),
        ({"gateway_api_scopes": []}, DECLARED._replace(scopes=()), 1800.0, 4),
    ],
)
def test_a_policy_narrows(
    plugin: Plugin, policy: dict[str, Any], permissions: Permissions, timeout: float, most: int
) -> None:
    export, _, warnings = of_harness(plugin, **policy)
    assert (export.permissions, export.timeout, export.max_concurrency) == (permissions, timeout, most)
    assert warnings == []


@pytest.mark.parametrize(
    "policy",
    [
        {"timeout_ms": 1800001},
        {"max_concurrency": 5},
        {"filesystem": "assets_ro"},
        {"gateway_api_scopes": [*DECLARED.scopes, "sessions:read"]},
    ],
)
def test_a_wider_value_is_not_used(plugin: Plugin, policy: dict[str, Any]) -> None:
    export, _, warnings = of_harness(plugin, **policy)
    assert export == HARNESS
    assert warnings == ["binding_wider"]


def test_a_wider_network_is_not_used(plugin: Plugin) -> None:
    window = next(export for export in EXPORTS if export.id == "window")
    policy = {"network": "egress", "egress": ["example.com"]}
    binding, found = read(plugin, export_id="window", secrets={}, policy=policy)
    assert narrow_export(window, binding) == window
    assert binding.egress is None
    assert [fault.rule for fault in found] == ["binding_wider", "binding_wider"]


@pytest.mark.parametrize(
    ("hosts", "rules"),
    [
        (["api.example.com", "api.example.com:443"], ("api.example.com:443",)),
        (["*.Example.com:8443", "[2001:db8::1]:*"], ("*.example.com:8443", "[2001:db8::1]:*")),
        (["a.example:1-64", "b.example:*"], ("a.example:1-64", "b.example:*")),
        ([], ()),
    ],
)
def test_hosts(plugin: Plugin, hosts: list[str], rules: tuple[str, ...]) -> None:
    assert of_harness(plugin, egress=hosts)[1] == rules


def test_a_host_limit_without_one_is_the_bindings(plugin: Plugin) -> None:
    binding, _ = read(plugin, policy={"max_concurrency": 9})
    assert narrow_export(TOOL, binding).max_concurrency == 9


def test_a_slot_that_is_null_is_gone(plugin: Plugin) -> None:
    binding, found = read(plugin, secrets={"jira_token": None})
    assert found == ()
    assert narrow_export(TOOL, binding).permissions.slots == ()
    assert narrow_export(TOOL, None) == TOOL


# --- when a call is made ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "context", "rule", "said"),
    [
        ({}, {"export_id": "plain"}, INVALID, "is for the export 'jira_search'"),
        ({}, {"org_id": "org_9"}, INVALID, "the call is for org_id 'org_9'"),
        ({}, {"project_id": "proj_9"}, INVALID, "the call is for project_id 'proj_9'"),
        ({"status": "disabled"}, {"org_id": "org_9"}, INVALID, "the call is for org_id"),  # scope comes first
        ({"status": "disabled"}, {}, INACTIVE, "disabled"),
        ({"status": "disabled", "rollout": 3}, {}, INACTIVE, "disabled"),
        ({"status": "disabled", "secrets": {}}, {}, SECRET_MISSING, "jira_token"),
        ({"rollout": {"traffic_percent": 0}}, {}, INACTIVE, "0 percent"),
    ],
)
def test_a_call_is_left_out(
    plugin: Plugin, changes: dict[str, Any], context: dict[str, str], rule: str, said: str
) -> None:
    text = bound(**changes)["binding"]
    binding, found = read_binding(text, "b", plugin, context=context)
    assert binding is None
    assert [(fault.rule, said in fault.message) for fault in found] == [(rule, True)]


def test_a_disabled_binding_can_be_looked_at(plugin: Plugin) -> None:
    binding, (warning,) = read(plugin, status="disabled")
    assert (binding.active, warning.severity) == (False, "warning")


def test_the_calls_own_scope_may_be_the_same_or_absent(plugin: Plugin) -> None:
    text = bound()["binding"]
    for context in ({}, {"org_id": "org_123"}, {"org_id": "org_123", "project_id": "proj_123"}):
        assert read_binding(text, "b", plugin, context=context)[0] is not None
    wide = bound(scope={"org_id": "org_123"})["binding"]
    assert read_binding(wide, "b", plugin, context={"project_id": "proj_9"})[0] is not None


@pytest.mark.parametrize(
    ("config", "said", "line"),
    [
        ({"base_url": 3}, "/base_url", 11),
        ({}, "base_url", 10),
        ({"base_url": "x", "other": 1}, "other", 10),
        ({"base_url": "x", "retry": {"times": "x"}}, "/retry/times", 13),
    ],
)
def test_the_configuration_is_held_against_its_schema(
    plugin: Plugin, config: dict[str, Any], said: str, line: int
) -> None:
    text = bound(config=config)["binding"]
    assert read_binding(text, "b", plugin)[0] is not None  # by the text alone
    binding, (fault,) = read_binding(text, "b", plugin, files=True)
    assert binding is None
    assert said in fault.message
    assert (fault.rule, fault.line) == (INVALID, line), text


def test_the_configuration_gets_its_defaults(plugin: Plugin) -> None:
    config = {"base_url": "x", "retry": {}}
    binding, _ = read_binding(bound(config=config)["binding"], "b", plugin, files=True)
    assert binding is not None
    assert binding.config == {"base_url": "x", "max_results": 10, "retry": {"times": 3}}


def test_an_unusable_schema_is_a_fault_of_the_binding(plugin: Plugin) -> None:
    Path(plugin.root or "", "schemas/config.json").write_text(json.dumps({"$ref": "https://x.example/"}))
    binding, (fault,) = read_binding(bound()["binding"], "b", plugin, files=True)
    assert binding is None
    assert "outside of itself" in fault.message
    assert "schemas/config.json" in fault.message


# --- rollout ------------------------------------------------------------------------------------------------


def test_a_session_is_always_treated_alike() -> None:
    first = {"session_id": "s1", "run_id": "r1", "invocation_id": "i1"}
    answers = [is_selected("b", first, percent) for percent in range(101)]
    assert answers[0] is False
    assert answers[100] is True
    assert answers == sorted(answers)  # a larger rollout leaves nobody out that a smaller one has
    for other in ({"session_id": "s1"}, {**first, "run_id": "r2", "invocation_id": "i2"}):
        assert [is_selected("b", other, percent) for percent in range(101)] == answers


@pytest.mark.parametrize("key", ["session_id", "run_id", "delivery_id", "invocation_id"])
def test_about_as_many_as_the_percentage_says(key: str) -> None:
    chosen = sum(is_selected("bind_1", {key: f"id_{number}"}, 30) for number in range(1000))
    assert 240 < chosen < 360  # the hash is fixed, so this never changes


def test_another_binding_chooses_others() -> None:
    ids = [{"session_id": f"s{number}"} for number in range(200)]
    assert [is_selected("a", each, 50) for each in ids] != [is_selected("b", each, 50) for each in ids]


# --- several in one file ------------------------------------------------------------------------------------


def record(name: str, *, project: str = "", org: str = "org_123", **changes: Any) -> dict[str, Any]:
    scope = {"org_id": org} | ({"project_id": project} if project else {})
    secrets = {"jira_token": f"secret://{org}/jira_token"}
    return {**BINDING, "binding_id": name, "scope": scope, "secrets": secrets, **changes}


ORG, ONE, TWO = record("org"), record("one", project="p1"), record("two", project="p2", status="disabled")
FOREIGN = record("foreign", org="org_9")
NEWER = record("newer", project="p1", package_version="0.2.0")


@pytest.mark.parametrize(
    ("records", "scope", "chosen"),
    [
        ([ORG, ONE], {"org_id": "org_123", "project_id": "p1"}, "one"),
        ([ONE, ORG], {"org_id": "org_123", "project_id": "p1"}, "one"),
        ([ORG, ONE], {"org_id": "org_123", "project_id": "p7"}, "org"),
        ([ORG, ONE], {"org_id": "org_123"}, "one"),
        ([ORG, ONE], {}, "one"),
        ([ORG, FOREIGN], {"org_id": "org_9"}, "foreign"),
        ([ORG, NEWER], {"project_id": "p1"}, "org"),  # of another version
        ([ORG, record("other", export_id="triage")], {}, "org"),
        ([ORG, TWO], {"project_id": "p2"}, "the binding is disabled"),  # and not the org's in its place
        ([ORG, ONE, TWO], {}, "several bindings are for acme/devkit 0.1.0"),
        ([ORG, FOREIGN], {}, "several bindings are for acme/devkit 0.1.0"),
        ([ORG, ORG], {}, "several bindings are for acme/devkit 0.1.0"),
        ([ORG, ONE], {"org_id": "org_7"}, "none of the bindings is for acme/devkit 0.1.0"),
        ([ONE], {"project_id": "p7"}, "none of the bindings is for acme/devkit 0.1.0"),
        ([], {}, "none of the bindings is for acme/devkit 0.1.0"),
        (["x", 3, None], {}, "none of the bindings is for acme/devkit 0.1.0"),
    ],
)
def test_of_several_the_project_beats_the_org(
    plugin: Plugin, records: list[Any], scope: dict[str, str], chosen: str
) -> None:
    text = json.dumps({"bindings": records}, indent=1)
    context = {**scope, "export_id": "jira_search", "session_id": "s"}
    binding, found = read_binding(text, "bindings.json", plugin, context=context)
    if binding is None:
        assert chosen in found[0].message and found[0].line > 0
        return
    assert (binding.id, found) == (chosen, ())
    assert binding.record == next(each for each in records if each["binding_id"] == chosen)


def test_a_fault_of_one_of_several_has_its_place(plugin: Plugin) -> None:
    wrong = record("one", project="p1", config={"base_url": 3})
    text = json.dumps({"bindings": [ORG, wrong]}, indent=1)
    lines = text.splitlines()
    context = {"export_id": "jira_search", "project_id": "p1"}
    _, [fault] = read_binding(text, "bindings.json", plugin, files=True, context=context)
    assert '"base_url": 3' in lines[fault.line - 1]
    [checked] = check_bindings(text, "bindings.json", plugin)
    assert checked.line == fault.line
    assert check_bindings(json.dumps({"bindings": [ORG, ONE]}), "", plugin) == ()
