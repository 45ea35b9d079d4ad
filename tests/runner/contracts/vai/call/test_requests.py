"""The body of each kind of request, as it goes on the wire."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.vai.call import requests
from runner.contracts.vai.call.requests import with_pinned
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.wire import encode
from tests.runner.contracts.vai.package import CONFIG, SECRETS, make_package, prepare_call, refusal

AT = {"invocation_id": "inv_1", "trace_id": "tr_1"}


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return make_package(tmp_path)


def body(plugin: Plugin, name: str, given: Any = None, **rest: Any) -> Any:
    rest["context"] = {**AT, **rest.get("context", {})}
    return json.loads(json.dumps(prepare_call(plugin, name, given, **rest).call.input))


def test_a_tool(plugin: Plugin) -> None:
    found = body(
        plugin,
        "jira_search",
        {"query": "outage"},
        context={"tool_execution_id": "toolx_1", "session_id": "s1"},
        secrets=SECRETS,
        config=CONFIG,
    )
    assert found == {
        "export_id": "jira_search",
        "context": {
            **AT,
            "session_id": "s1",
            "deadline_at": "2026-03-12T19:00:20.250Z",
            "secrets_dir": "/sandbox/secrets",
        },
        "config": {"base_url": "https://acme.example", "max_results": 10},
        "tool_execution_id": "toolx_1",
        "input": {"query": "outage"},
    }


@pytest.mark.parametrize("given", [None, {}, [1], "text", 0, False])
def test_a_tool_without_schemas_takes_anything(plugin: Plugin, given: Any) -> None:
    found = body(plugin, "plain", given)
    assert found["input"] == ({} if given is None else given)
    assert "config" not in found
    assert "secrets_dir" not in found["context"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, '--input \'{"query": "…"}\''),
        ({}, "query"),
        ({"query": 3}, "/query: "),
        ([], "(the value)"),
    ],
)
def test_an_input_that_does_not_fit(plugin: Plugin, given: Any, said: str) -> None:
    code, message = refusal(plugin, "jira_search", given, secrets=SECRETS, config=CONFIG)
    assert code == "tool.invalid_input"
    assert "does not fit schemas/input.json" in message
    assert said in message


@pytest.mark.parametrize(
    "given",
    [{1, 2}, float("nan"), "\ud800", {"a": object()}, pytest.param(10**5000, id="long number")],
)
def test_input_that_is_no_json_is_refused(plugin: Plugin, given: Any) -> None:
    code, message = refusal(plugin, "plain", given)
    assert code == "tool.invalid_input"
    assert "not JSON" in message


def test_endlessly_nested_input_is_refused(plugin: Plugin) -> None:
    given: list[Any] = []
    given.append(given)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for each in (given, deep):
        assert refusal(plugin, "plain", each)[0] == "tool.invalid_input"


def test_input_that_is_too_large_is_refused(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_BODY_BYTES", 1000)
    assert len(body(plugin, "plain", "x" * 500)["input"]) == 500
    assert refusal(plugin, "plain", "x" * 1000)[0] == "asset.payload_too_large"


# --- hook ---------------------------------------------------------------------------------------------------

EVENT = {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}}


def test_a_hook(plugin: Plugin) -> None:
    event = {**EVENT, "occurred_at": "2026-03-12T19:00:00Z", "summary": {"task": "x"}, "more": [1]}
    rest: Any = {"context": {"attempt": 2}, "options": {"delivery_id": "del_1"}}
    assert body(plugin, "slack_notify", event, **rest) == {
        "export_id": "slack_notify",
        "context": {**AT, "deadline_at": "2026-03-12T19:00:15.250Z"},
        "delivery_id": "del_1",
        "attempt": 2,
        "event": event,
    }


def test_what_a_hook_gets_when_nothing_is_said(plugin: Plugin) -> None:
    found = body(plugin, "slack_notify", EVENT)
    assert found["attempt"] == 1
    assert found["delivery_id"].startswith("del_")
    assert found["event"] == {**EVENT, "occurred_at": "2026-03-12T19:00:00.250Z", "summary": {}}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (None, "the input is missing"),
        ([], "the input is not an object"),
        ({}, "no type"),
        ({**EVENT, "type": 3}, "no type"),
        ({**EVENT, "type": "run.complete"}, "does not subscribe to 'run.complete': did you mean"),
        ({"type": "run.completed"}, "subject is missing"),
        ({**EVENT, "subject": {"kind": "run"}}, "needs a kind and an id"),
        ({**EVENT, "subject": {"kind": "run", "id": 3}}, "needs a kind and an id"),
        ({**EVENT, "occurred_at": "yesterday"}, "RFC 3339"),
        ({**EVENT, "summary": "x"}, "summary is not an object"),
    ],
)
def test_an_event_that_is_not_delivered(plugin: Plugin, event: Any, said: str) -> None:
    code, message = refusal(plugin, "slack_notify", event)
    assert code == "hook.invalid_input"
    assert said in message
    example = json.loads(message.partition("--input '")[2].removesuffix("'"))
    assert body(plugin, "slack_notify", example)["event"]["type"] == "run.completed"  # the example works


# --- compactor ----------------------------------------------------------------------------------------------

BLOCK = {"kind": "input", "content": [{"type": "text", "text": "hello"}]}
PIN = {"kind": "system", "content": [{"type": "text", "text": "keep me"}]}


def source(**projection: Any) -> dict[str, Any]:
    return {"source": {"chain_id": "ch_1", "projection": projection}}


def test_a_compactor(plugin: Plugin) -> None:
    given = {
        **source(blocks=[BLOCK], pinned_items=[PIN], token_estimate=7),
        "target": {"max_input_tokens": 9, "target_model": "m"},
        "policy": {"retain_open_tasks": False},
    }
    assert body(plugin, "window", given, context={"compaction_id": "cmp_1"}) == {
        "export_id": "window",
        "context": {
            **AT,
            "chain_id": "ch_1",
            "deadline_at": "2026-03-12T19:02:00.250Z",
            "scratch_dir": "/sandbox/scratch/inv_1",
        },
        "compaction_id": "cmp_1",
        "source": {
            "chain_id": "ch_1",
            "projection": {
                "transport": "inline",
                "blocks": [BLOCK],
                "pinned_items": [PIN],
                "token_estimate": 7,
            },
        },
        "target": {"max_input_tokens": 9, "target_model": "m"},
        "policy": {"retain_system": True, "retain_open_tasks": False},
    }


def test_what_a_compactor_gets_when_nothing_is_said(plugin: Plugin) -> None:
    given = {"source": {"projection": {"blocks": [BLOCK]}}}
    found = body(plugin, "window", given, context={"chain_id": "ch_2"})
    assert found["source"]["chain_id"] == "ch_2"
    assert found["source"]["projection"]["pinned_items"] == []
    assert found["source"]["projection"]["token_estimate"] == len(encode(given)) // 4
    assert found["target"] == {}
    assert "chain_id" not in body(plugin, "window", given)["source"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "the input is missing"),
        ({}, "source is missing"),
        ({"source": {}}, "projection of source is missing"),
        ({**source(), "sauce": 1}, "unknown key 'sauce': did you mean 'source'"),
        ({**source(), "context": {}}, "unknown key 'context'"),
        (source(transport="artifact", path="/etc/passwd"), "the runner chooses the transport"),
        (source(blocks={}), "blocks of the projection"),
        (source(blocks=["text"]), "blocks of the projection"),
        (source(pinned_items=None), "pinned_items of the projection"),
        ({**source(), "target": None}, "target is missing"),
        ({**source(), "policy": []}, "policy is not an object"),
    ],
)
def test_a_compaction_that_is_not_asked_for(plugin: Plugin, given: Any, said: str) -> None:
    code, message = refusal(plugin, "window", given)
    assert code == "compactor.invalid_input"
    assert said in message
    example = json.loads(message.partition("--input '")[2].removesuffix("'"))
    assert body(plugin, "window", example)["source"]["projection"]["transport"] == "inline"


def test_a_large_projection_is_a_file(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_INLINE_BYTES", 500)
    given = source(blocks=[BLOCK] * 20, pinned_items=[PIN], token_estimate=7)
    prepared = prepare_call(plugin, "window", given, context=AT)
    path = "/sandbox/scratch/inv_1/projection.json"
    assert prepared.options["artifact"] == path
    (content,) = prepared.contents.values()
    assert prepared.call.input["source"] == {
        "chain_id": "ch_1",
        "projection": {
            "transport": "artifact",
            "path": path,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
        },
    }
    assert list(prepared.contents) == [path]
    assert json.loads(content) == {"blocks": [BLOCK] * 20, "pinned_items": [PIN], "token_estimate": 7}
    assert "hello" not in repr(prepared)  # nor megabytes of it in a traceback


def test_the_limit_of_an_inline_projection(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    given = source(blocks=[BLOCK], token_estimate=7)
    size = len(json.dumps({**given["source"]["projection"], "pinned_items": []}, separators=(",", ":")))
    for most, transport in ((size, "inline"), (size - 1, "artifact")):
        monkeypatch.setattr(requests, "MOST_INLINE_BYTES", most)
        assert body(plugin, "window", given)["source"]["projection"]["transport"] == transport


def test_without_scratch_it_is_inline_or_too_large(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_INLINE_BYTES", 500)
    given = source(blocks=[BLOCK] * 20)
    prepared = prepare_call(plugin, "forgetful", given)
    assert prepared.call.input["source"]["projection"]["transport"] == "inline"
    assert prepared.contents == {}
    assert "artifact" not in prepared.options
    monkeypatch.setattr(requests, "MOST_BODY_BYTES", 1000)
    code, message = refusal(plugin, "forgetful", given)
    assert code == "asset.payload_too_large"
    assert 'filesystem = "scratch"' in message
    assert prepare_call(plugin, "window", given).contents
    monkeypatch.setattr(requests, "MOST_ARTIFACT_BYTES", 1000)
    assert refusal(plugin, "window", given)[0] == "asset.payload_too_large"


def test_pinned_items_that_are_not_supported(plugin: Plugin) -> None:
    given = source(blocks=[BLOCK], pinned_items=[PIN])
    call = prepare_call(plugin, "forgetful", given).call
    assert call.input["source"]["projection"]["pinned_items"] == []
    result = {"seed_blocks": [BLOCK], "summary": {"text": "x"}}
    assert with_pinned(call, result) == {"seed_blocks": [PIN, BLOCK], "summary": {"text": "x"}}
    assert result["seed_blocks"] == [BLOCK]
    others: tuple[Any, ...] = (None, [], {"seed_blocks": 3}, {})
    for other in others:
        assert with_pinned(call, other) == other
    supported = prepare_call(plugin, "window", given).call
    assert with_pinned(supported, result) == result
    assert with_pinned(Call("tool", "x"), result) == result


# --- harness ------------------------------------------------------------------------------------------------


def test_a_harness(plugin: Plugin) -> None:
    given = {
        "mode": "continue",
        "target": {"session_id": "s1", "chain_id": "c1", "execution_id": "exec_1"},
        "trigger": {"type": "timer", "input": [{"type": "text", "text": "go"}]},
        "policy": {"max_depth": 4},
        "checkpoint": {"kind": "checkpoint", "data": {}},
    }
    prepared = prepare_call(plugin, "triage", given, context=AT)
    assert prepared.call.input == {
        "export_id": "triage",
        "context": {
            **AT,
            "session_id": "s1",
            "chain_id": "c1",
            "deadline_at": "2026-03-12T19:30:00.250Z",
            "scratch_dir": "/sandbox/scratch/inv_1",
        },
        **given,
        "policy": {"max_depth": 4, "max_child_runs": 0, "allow_compaction": False},
    }
    assert prepared.call.context["execution_id"] == "exec_1"


def test_what_a_harness_gets_when_nothing_is_said(plugin: Plugin) -> None:
    found = body(plugin, "triage", context={"session_id": "s1"})
    assert found["mode"] == "start"
    assert found["target"].pop("execution_id").startswith("exec_")
    assert found["target"] == {"session_id": "s1"}
    assert found["trigger"] == {"type": "user_request", "input": []}
    assert found["policy"] == {"max_depth": 1, "max_child_runs": 0, "allow_compaction": False}
    assert "checkpoint" not in found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the input is not an object"),
        ({"mode": "resume"}, "does not support the mode 'resume': it has start, continue, compact"),
        ({"mode": 3}, "does not support the mode '3'"),
        ({"mode": None}, "does not support the mode"),
        ({"triger": {}}, "unknown key 'triger': did you mean 'trigger'"),
        ({"target": []}, "target is not an object"),
        ({"trigger": "go"}, "trigger is not an object"),
        ({"trigger": {"input": "go"}}, "not a list of blocks"),
        ({"policy": 3}, "policy is not an object"),
    ],
)
def test_a_run_that_is_not_started(plugin: Plugin, given: Any, said: str) -> None:
    code, message = refusal(plugin, "triage", given)
    assert code == "harness.invalid_input"
    assert said in message
    assert "an example: --input" in message
