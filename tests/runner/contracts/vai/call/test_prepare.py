"""Calls before anything is started: what they become, and why some are refused."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runner.contracts.vai import CONTRACT
from runner.contracts.vai.call.prepare import with_delegation
from runner.plugin import Plugin
from runner.protocol.dialect import CallRefused
from runner.protocol.host_services import Delegation, DelegationRequest
from tests.runner.contracts.vai.package import (
    BINDING,
    CONFIG,
    SCHEMAS,
    SECRET,
    SECRETS,
    bound,
    make_package,
    prepare_call,
    refusal,
)

TOKEN = "vai_dlg_0123456789"
URL = "https://api.example.com/v1"
EVENT = {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}}
QUERY = {"query": "outage"}


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return make_package(tmp_path)


def tool(plugin: Plugin, **rest: Any) -> Any:
    rest = {"secrets": SECRETS, "config": None if "options" in rest else CONFIG, **rest}
    return prepare_call(plugin, "jira_search", QUERY, **rest)


def tool_refusal(plugin: Plugin, **rest: Any) -> tuple[str, str]:
    rest = {"secrets": SECRETS, "config": None if "options" in rest else CONFIG, **rest}
    return refusal(plugin, "jira_search", QUERY, **rest)


def test_a_prepared_call(plugin: Plugin) -> None:
    options = bound()
    prepared = tool(plugin, options=options, context={"invocation_id": "inv_1", "trace_id": "tr_1"})
    assert (prepared.call.kind, prepared.call.name) == ("tool", "jira_search")
    assert prepared.call.context == {
        "invocation_id": "inv_1",
        "trace_id": "tr_1",
        "tool_execution_id": prepared.call.input["tool_execution_id"],
        "org_id": "org_123",
        "project_id": "proj_123",
        "binding_id": "bind_123",
        "deadline_at": prepared.call.input["context"]["deadline_at"],
    }
    assert prepared.call.input["context"]["org_id"] == "org_123"
    assert prepared.call.input["config"] == {"base_url": "https://acme.example", "max_results": 10}
    assert prepared.options == {
        **options,
        "export": "jira_search",
        "invocation_id": "inv_1",
        "timeout": "20.0",
        "output_schema": prepared.options["output_schema"],
    }
    assert json.loads(prepared.options["output_schema"]) == SCHEMAS["output.json"]
    assert (prepared.contents, prepared.delegation) == ({}, None)
    assert dict(prepared.secrets) == SECRETS


def test_a_refused_call_keeps_the_ids_that_were_made(plugin: Plugin) -> None:
    for given, options in (({"query": 3}, bound()), (QUERY, bound(status="disabled"))):
        with pytest.raises(CallRefused) as refused:
            prepare_call(
                plugin, "jira_search", given, secrets=SECRETS, options=options, context={"run_id": "run_1"}
            )
        known = refused.value.context or {}
        assert known["run_id"] == "run_1" and known["trace_id"].startswith("tr_")
        assert known["invocation_id"].startswith("inv_")
        assert known["tool_execution_id"].startswith("toolx_")


def test_the_contract_prepares(plugin: Plugin) -> None:
    given = tool(plugin)
    again = CONTRACT.prepared_calls.prepare(
        plugin, given.call._replace(kind="tool", input=QUERY, context={}), seconds=None, options={},
        secrets=SECRETS, config=CONFIG, now=0.0,
    )  # fmt: skip
    assert again.call.input["context"]["deadline_at"] == "1970-01-01T00:00:20.000Z"


@pytest.mark.parametrize(
    ("name", "kind", "said", "hint"),
    [
        ("jira_serch", "export", "no export 'jira_serch'", "did you mean 'jira_search'?"),
        ("none", "hook", "no export 'none'", "it exports slack_notify"),
        ("plain", "hook", "plain is a tool", "--kind tool"),
        ("plain", "wrong", "plain is a tool", "--kind tool"),
    ],
)
def test_an_export_that_is_not_there(plugin: Plugin, name: str, kind: str, said: str, hint: str) -> None:
    with pytest.raises(CallRefused) as refused:
        prepare_call(plugin, name, kind=kind)
    event: Any = refused.value.event
    assert event.code == "tool_not_exposed"
    assert said in event.message
    assert hint in event.hint


def test_the_kind_may_be_named(plugin: Plugin) -> None:
    assert prepare_call(plugin, "plain", kind="tool").call.kind == "tool"


# --- time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "policy", "timeout", "deadline"),
    [
        (None, {}, "20.0", "2026-03-12T19:00:20.250Z"),
        (5, {}, "5.0", "2026-03-12T19:00:05.250Z"),
        (60.0, {}, "20.0", "2026-03-12T19:00:20.250Z"),
        (None, {"timeout_ms": 1500}, "1.5", "2026-03-12T19:00:01.750Z"),
        (1.0, {"timeout_ms": 1500}, "1.0", "2026-03-12T19:00:01.250Z"),
        (float("inf"), {}, "20.0", "2026-03-12T19:00:20.250Z"),
    ],
)
def test_the_lowest_time_limit_holds(
    plugin: Plugin, seconds: float | None, policy: dict[str, Any], timeout: str, deadline: str
) -> None:
    prepared = tool(plugin, options=bound(policy=policy), seconds=seconds)
    assert prepared.options["timeout"] == timeout
    assert prepared.call.input["context"]["deadline_at"] == deadline


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_at_all(plugin: Plugin, seconds: float) -> None:
    assert "--timeout" in tool_refusal(plugin, seconds=seconds)[1]


# --- configuration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ({"config": {"base_url": 3}}, "/base_url"),
        ({"config": None}, "base_url"),
        ({"config": []}, "not an object"),
        ({"config": {"base_url": {1}}}, "not JSON"),
        ({"config": {}, "options": bound()}, "leave --config out"),
        ({"options": bound(config={})}, "binding.json:10:"),
    ],
)
def test_a_configuration_that_is_not_used(plugin: Plugin, rest: dict[str, Any], said: str) -> None:
    code, message = tool_refusal(plugin, **rest)
    assert code == "binding.invalid"
    assert said in message


def test_a_configuration_without_a_schema_is_sent_as_it_is(plugin: Plugin) -> None:
    assert prepare_call(plugin, "plain", config={"a": 1}).call.input["config"] == {"a": 1}
    assert "config" not in prepare_call(plugin, "plain", config={}).call.input


# --- the binding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "context", "code"),
    [
        ({"package_version": "9.9.9"}, {}, "binding.invalid"),
        ({"export_id": "plain", "secrets": {}, "config": {}}, {}, "binding.invalid"),
        ({}, {"org_id": "org_9"}, "binding.invalid"),
        ({}, {"project_id": "proj_9"}, "binding.invalid"),
        ({"secrets": {}}, {}, "binding.secret_missing"),
        ({"secrets": {}, "status": "disabled"}, {}, "binding.secret_missing"),
        ({"status": "disabled"}, {}, "binding.inactive"),
        ({"rollout": {"traffic_percent": 0}}, {}, "binding.inactive"),
        ({"status": "disabled"}, {"org_id": "org_9"}, "binding.invalid"),
        ({"status": "disabled", "config": {}}, {}, "binding.invalid"),
    ],
)
def test_a_binding_that_is_not_used(
    plugin: Plugin, changes: dict[str, Any], context: dict[str, str], code: str
) -> None:
    found, message = tool_refusal(plugin, options=bound(**changes), context=context)
    assert found == code
    assert message.startswith("binding.json:")


def test_all_faults_are_in_the_data(plugin: Plugin) -> None:
    with pytest.raises(CallRefused) as refused:
        tool(plugin, options=bound(config={"a": 1, "b": 2}))
    event: Any = refused.value.event
    assert (event.call, event.kind) == (0, "failed")
    assert len(event.data["faults"]) >= 2


def test_a_rollout_follows_the_session(plugin: Plugin) -> None:
    options = bound(rollout={"traffic_percent": 50})

    def is_in(**context: str) -> bool:
        try:
            tool(plugin, options=options, context=context)
        except CallRefused:
            return False
        return True

    first = [is_in(session_id=f"s{number}") for number in range(20)]
    assert True in first
    assert False in first
    assert [is_in(session_id=f"s{number}") for number in range(20)] == first


# --- secrets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [
        ({"secrets": {}}, "binding.secret_missing", "--secret jira_token=@FILE"),
        ({"secrets": {"jira_token": ""}}, "binding.secret_missing", "empty"),
        ({"secrets": {}, "options": bound()}, "binding.secret_missing", "--secret jira_token=@FILE"),
        ({"secrets": {**SECRETS, "jira_tokn": "x"}}, "binding.invalid", "did you mean 'jira_token'"),
        ({"options": bound(secrets={"jira_token": None})}, "binding.invalid", "leaves the secret slot"),
    ],
)
def test_secrets_that_do_not_fit(plugin: Plugin, rest: dict[str, Any], code: str, said: str) -> None:
    found, message = tool_refusal(plugin, **rest)
    assert found == code
    assert said in message


def test_a_slot_that_the_binding_leaves_empty(plugin: Plugin) -> None:
    prepared = tool(plugin, options=bound(secrets={"jira_token": None}), secrets={})
    assert "secrets_dir" not in prepared.call.input["context"]


def test_secrets_of_other_exports_do_no_harm(plugin: Plugin) -> None:
    assert dict(prepare_call(plugin, "plain", secrets=SECRETS).secrets) == SECRETS


# --- credentials --------------------------------------------------------------------------------------------


def hook(plugin: Plugin, **rest: Any) -> Any:
    return prepare_call(plugin, "slack_notify", EVENT, **rest)


def test_a_token_that_was_given(plugin: Plugin) -> None:
    prepared = hook(plugin, options={"gateway_url": URL}, secrets={"--gateway-token": TOKEN})
    assert prepared.call.input["context"]["gateway"] == {
        "base_url": URL,
        "delegation_token": TOKEN,
        "scopes": ["runs:read"],
    }
    assert prepared.delegation is None
    assert prepared.options["gateway_url"] == URL
    assert prepared.secrets["--gateway-token"] == TOKEN


def test_a_token_that_is_asked_for(plugin: Plugin) -> None:
    prepared = hook(plugin, seconds=3.0, context={"invocation_id": "inv_1", "org_id": "o"})
    assert "gateway" not in prepared.call.input["context"]
    assert "gateway_url" not in prepared.options
    assert prepared.delegation == DelegationRequest(("runs:read",), 5.0, "inv_1", "o", "")
    completed = with_delegation(prepared, Delegation(URL, TOKEN, ("runs:read",)))
    gateway = completed.call.input["context"].pop("gateway")
    assert gateway == {"base_url": URL, "delegation_token": TOKEN, "scopes": ["runs:read"]}
    assert completed.call.input == prepared.call.input  # nothing else has changed
    assert completed.options == {**prepared.options, "gateway_url": URL}
    assert completed.secrets["--gateway-token"] == TOKEN
    assert completed.delegation is None


def test_a_token_lives_until_the_end_of_the_grace(plugin: Plugin) -> None:
    for name, seconds in (("slack_notify", 15.0 + 2.0), ("triage", 1800.0 + 10.0)):
        prepared = prepare_call(plugin, name, EVENT if name == "slack_notify" else {})
        assert prepared.delegation is not None
        assert prepared.delegation.seconds == seconds


def test_scopes_are_those_of_manifest_and_binding(plugin: Plugin) -> None:
    policy = {"gateway_api_scopes": ["chains:read", "admin"]}
    options = bound(export_id="triage", secrets={}, config={}, policy=policy)
    prepared = prepare_call(plugin, "triage", {}, options=options)
    assert prepared.delegation == DelegationRequest(
        ("chains:read",), 1810.0, prepared.call.context["invocation_id"], "org_123", "proj_123"
    )
    none = bound(export_id="triage", secrets={}, config={}, policy={"gateway_api_scopes": []})
    assert prepare_call(plugin, "triage", {}, options=none).delegation is None


@pytest.mark.parametrize(
    ("name", "url", "token", "said"),
    [
        ("plain", URL, TOKEN, "no gateway_api_scopes"),
        ("plain", "", TOKEN, "no gateway_api_scopes"),
        ("plain", URL, None, "no gateway_api_scopes"),
        ("triage", URL, None, "give both or none"),
        ("triage", "", TOKEN, "give both or none"),
        ("triage", "http://api.example.com", TOKEN, "use https"),
        ("triage", URL, "", "token is empty"),
        ("triage", URL, TOKEN + "\n", "token is empty, or has"),
    ],
)
def test_credentials_that_are_not_used(
    plugin: Plugin, name: str, url: str, token: str | None, said: str
) -> None:
    secrets = {} if token is None else {"--gateway-token": token}
    code, message = refusal(plugin, name, {}, options={"gateway_url": url} if url else {}, secrets=secrets)
    assert code == "auth.invalid_delegation"
    assert said in message
    assert TOKEN not in message


@pytest.mark.parametrize(
    "delegation",
    [
        Delegation(URL, TOKEN, ("runs:read", "runs:write")),
        Delegation(URL, TOKEN, ("admin",)),
        Delegation(URL, "", ("runs:read",)),
        Delegation(URL, "a b", ("runs:read",)),
        Delegation("ftp://x.example", TOKEN, ("runs:read",)),
        Delegation(URL, TOKEN, None),  # type: ignore[arg-type]
        Delegation(None, TOKEN, ("runs:read",)),  # type: ignore[arg-type]
    ],
)
def test_a_delegation_that_is_not_used(plugin: Plugin, delegation: Delegation) -> None:
    with pytest.raises(CallRefused) as refused:
        with_delegation(hook(plugin), delegation)
    assert refused.value.event.code == "auth.invalid_delegation"


def test_a_delegation_without_scopes_is_no_gateway(plugin: Plugin) -> None:
    completed = with_delegation(hook(plugin), Delegation(URL, TOKEN, ()))
    assert "gateway" not in completed.call.input["context"]
    assert completed.delegation is None


def test_a_delegation_that_nobody_asked_for(plugin: Plugin) -> None:
    with pytest.raises(CallRefused):
        with_delegation(prepare_call(plugin, "plain"), Delegation(URL, TOKEN, ("a",)))


# --- what must not be seen ----------------------------------------------------------------------------------


def test_no_secret_is_in_the_text_of_a_prepared_call(plugin: Plugin) -> None:
    options = {**bound(), "gateway_url": URL}
    given = tool(plugin, options=bound())
    with_token = hook(plugin, options={"gateway_url": URL}, secrets={**SECRETS, "--gateway-token": TOKEN})
    asked = with_delegation(hook(plugin, secrets=SECRETS), Delegation(URL, TOKEN, ("runs:read",)))
    assert SECRET not in json.dumps(options)
    for prepared in (given, with_token, asked):
        assert dict(prepared.secrets).items() & {("jira_token", SECRET)}  # a search can find it
        for text in (repr(prepared), str(prepared), f"{prepared}", "%r %s" % (prepared.call, prepared.call)):  # noqa: UP031
            assert SECRET not in text
            assert TOKEN not in text
    assert TOKEN in json.dumps(with_token.call.input)  # and only there
    assert SECRET not in json.dumps(given.call.input)


def test_schemas_that_cannot_be_used(plugin: Plugin) -> None:
    for name in ("output", "input"):
        file = Path(plugin.root or "", f"schemas/{name}.json")
        kept = file.read_text()
        file.write_text('{"$ref": "https://example.com/x"}')
        code, message = tool_refusal(plugin)
        assert code == "asset.invalid_schema"
        assert f"schemas/{name}.json" in message
        assert "nothing is fetched" in message
        file.write_text(kept)
    assert tool(plugin)


# --- anything at all ----------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1e308,
        2**63,
        "",
        "x",
        "../..",
        "a\0b",
        "\ud800",
        "\u202e",
        "secret://org_123/x",
    ),
    *([], [None], ["x", 3], [[]], {}, {"": None}, {"id": {}, "kind": []}, {"$ref": "#"}, "x" * 5000),
)


def changed(random: Random, value: Any) -> Any:
    """The value, with a place of it made odd."""
    choice = random.random()
    if isinstance(value, dict) and value and choice < 0.8:
        key = random.choice(sorted(value))
        if choice < 0.1:
            return {each: value[each] for each in value if each != key}
        return {**value, key: changed(random, value[key])}
    if isinstance(value, list) and value and choice < 0.8:
        return [*value[1:], changed(random, value[0])]
    return random.choice(ODD)


INPUTS: dict[str, Any] = {
    "jira_search": QUERY,
    "slack_notify": {**EVENT, "occurred_at": "2026-03-12T19:00:00Z", "summary": {"task": "x"}},
    "window": {
        "source": {
            "chain_id": "c",
            "projection": {"blocks": [{}], "pinned_items": [{}], "token_estimate": 3},
        },
        "target": {"max_input_tokens": 3},
        "policy": {"retain_system": True},
    },
    "triage": {
        "mode": "start",
        "target": {"session_id": "s"},
        "trigger": {"type": "x", "input": [{}]},
        "policy": {"max_depth": 3},
    },
}
POLICY = {
    "timeout_ms": 5, "max_concurrency": 2, "network": "none", "egress": ["x.example:443"],
    "filesystem": "none", "gateway_api_scopes": ["runs:read"],
}  # fmt: skip


def test_nothing_that_is_written_raises_anything_else(plugin: Plugin) -> None:
    random = Random(14)
    made = 0
    messages: list[str] = []
    for _ in range(1500):
        name = random.choice(sorted(INPUTS))
        record = {**BINDING, "export_id": name, "policy": POLICY}
        if name != "jira_search":
            record |= {"secrets": {}, "config": {}}
        context = {"invocation_id": "inv_1", "session_id": "s", "org_id": "org_123"}
        parts = [INPUTS[name], record, context, CONFIG]
        place = random.randrange(4)
        parts[place] = changed(random, parts[place])
        options = {} if place == 3 else {"binding": json.dumps(parts[1]), "binding_file": "b.json"}
        try:
            prepared = prepare_call(
                plugin,
                name,
                parts[0],
                context=parts[2] if isinstance(parts[2], dict) else {},
                options=options,
                secrets=SECRETS if name == "jira_search" else {},
                config=None if options else parts[3],
            )
        except CallRefused as error:
            messages.append(error.event.message)
        else:
            made += 1
            assert json.loads(json.dumps(prepared.call.input))["export_id"] == name
    assert made > 100
    assert len(messages) > 100
    assert all(message.isprintable() and len(message) < 2000 for message in messages)
