"""How an invocation ended: one row for each line of the contract's table, and the record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from runner.contracts.vai.declared import (
    Declared,
    DeclaredExport,
    EffectClass,
    Permissions,
    details_of,
)
from runner.contracts.vai.outcome import (
    ATTEMPTS,
    MOST_ISOLATED,
    MOST_WORKERS,
    InvocationEnd,
    Status,
    concurrent,
    ending,
    record,
    reuses,
)
from runner.outcome import Code, Outcome, Phase, schema
from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallEnd, Refusal
from sandbox.spec import SandboxSpec
from tests.tables import one_case


def tool(effect: EffectClass = "unknown", **more: Any) -> DeclaredExport:
    return DeclaredExport("fetch", "tool", "fetch", effect_class=effect, **more)


READ, IDEMPOTENT = tool("read_only"), tool("idempotent_write")
WRITE, UNKNOWN = tool("non_idempotent_write"), tool()
HOOK = DeclaredExport("on_run", "hook", "on_run", execution_class="worker")
COMPACTOR = DeclaredExport("shrink", "compactor", "shrink", execution_class="worker")
HARNESS = DeclaredExport("drive", "harness", "drive")

REPEATABLE = (READ, IDEMPOTENT, HOOK, COMPACTOR)
EFFECTFUL = (WRITE, UNKNOWN, HARNESS)
ALL = (*REPEATABLE, *EFFECTFUL)


def ended(
    code: Code, phase: Phase = "call", cause: str = "", *, written: bool = True, **more: Any
) -> CallEnd:
    return CallEnd(Outcome(code, phase, "said", cause), written=written, **more)


def no(code: str, kind: str, **more: Any) -> CallEnd:
    return ended("plugin_error", cause=code, refusal=Refusal(1, code, "no", kind), **more)


FAILED: Status = "failed"
RETRYABLE: Status = "retryable_failure"

# What happened, and the ending that every kind of export has of it.
SAME: tuple[tuple[str, CallEnd, InvocationEnd], ...] = (
    ("succeeded", ended("ok"), InvocationEnd("succeeded")),
    ("a tool's error is for the model", ended("ok", value={"is_error": True}), InvocationEnd("succeeded")),
    ("it says failed", no("failed", "failed"), InvocationEnd("failed")),
    ("it says failed, and why", no("acme.broken", "failed"), InvocationEnd("failed", "acme.broken")),
    ("it says cancelled", no("cancelled", "cancelled"), InvocationEnd("cancelled")),
    (
        "it says retryable_failure",
        no("acme.busy", "retryable_failure"),
        InvocationEnd(RETRYABLE, "acme.busy"),
    ),
    (
        "output schema",
        ended("malformed_response", cause="invalid_output"),
        InvocationEnd(FAILED, "tool.invalid_output"),
    ),
    *(
        (
            code,
            ended("invalid_call", written=False, refusal=Refusal(0, code, "no")),
            InvocationEnd(FAILED, code),
        )
        for code in (
            *("tool.invalid_input", "binding.invalid", "binding.secret_missing", "binding.inactive"),
            *("asset.payload_too_large", "auth.delegation_failed"),
        )
    ),
    *(
        (
            f"{cause} before the request",
            ended("malformed_response", "handshake", cause, written=False),
            InvocationEnd(FAILED, code),
        )
        for cause, code in (
            ("invalid_frame", "protocol.invalid_frame"),
            ("bad_json", "protocol.invalid_frame"),
            ("cut_short", "protocol.invalid_frame"),
            ("unexpected_frame", "protocol.unexpected_frame"),
            ("frame_too_large", "protocol.frame_too_large"),
        )
    ),
    (
        "hello mismatch",
        ended("handshake_failed", "handshake", "identity_mismatch", written=False),
        InvocationEnd(FAILED, "protocol.identity_mismatch"),
    ),
    (
        "another protocol",
        ended("protocol_version_mismatch", "handshake", "unsupported_version", written=False),
        InvocationEnd(FAILED, "protocol.unsupported_version"),
    ),
    (
        "cannot start",
        ended("launch_failed", "launch", written=False),
        InvocationEnd(RETRYABLE, "runner.launch_failed"),
    ),
    (
        "no cage",
        ended("sandbox_unavailable", "plan", written=False),
        InvocationEnd(RETRYABLE, "runner.launch_failed"),
    ),
    (
        "may not start",
        ended("policy_denied", "policy", written=False),
        InvocationEnd(FAILED, "runner.refused"),
    ),
    ("no such export", ended("tool_not_exposed", written=False), InvocationEnd(FAILED, "tool.not_found")),
    (
        "it says before the request that it does not know the protocol",
        no("protocol.unsupported_version", "error", written=False),
        InvocationEnd(FAILED, "protocol.unsupported_version"),
    ),
    (
        "overloaded",
        ended("overloaded", "launch", written=False),
        InvocationEnd(RETRYABLE, "runner.overloaded"),
    ),
    (
        "no hello",
        ended("timeout", "handshake", "deadline", written=False),
        InvocationEnd(RETRYABLE, "runner.hello_timeout"),
    ),
    *(
        (
            f"deadline in {phase}",
            ended("timeout", phase, "deadline_exceeded", written=False),
            InvocationEnd(RETRYABLE, "runner.deadline_exceeded"),
        )
        for phase in ("launch", "handshake", "call")
    ),
    (
        "died before the request",
        ended("crashed", "handshake", "exit:1", written=False),
        InvocationEnd(RETRYABLE, "runner.crashed"),
    ),
    (
        "limit before the request",
        ended("crashed", "handshake", "oom", written=False),
        InvocationEnd(FAILED, "runner.resource_exhausted"),
    ),
    (
        "cancelled before",
        ended("cancelled", "launch", written=False),
        InvocationEnd("cancelled", "runner.cancelled"),
    ),
    (
        "a bug of ours",
        ended("internal", "launch", written=False),
        InvocationEnd(RETRYABLE, "runner.internal"),
    ),
)


@one_case(("end", "expected"), [row[1:] for row in SAME], ids=[row[0] for row in SAME])
@one_case("export", ALL, ids=lambda export: f"{export.kind}-{export.effect_class}")
def test_the_table(export: DeclaredExport, end: CallEnd, expected: InvocationEnd) -> None:
    assert ending(export, end) == expected


# What happened after the request was written, and the code. The status depends on the export.
BY_EFFECT: tuple[tuple[CallEnd, str], ...] = (
    (no("acme.lost", "error"), "acme.lost"),
    (ended("malformed_response", cause="invalid_frame"), "protocol.invalid_frame"),
    (ended("malformed_response", cause="bad_json"), "protocol.invalid_frame"),
    (ended("malformed_response", cause="unexpected_frame"), "protocol.unexpected_frame"),
    (ended("malformed_response", cause="frame_too_large"), "protocol.frame_too_large"),
    (ended("crashed", cause="exit:0"), "runner.crashed"),
    (ended("crashed", cause="stdout_closed"), "runner.crashed"),
    (ended("timeout", cause="deadline_exceeded"), "runner.deadline_exceeded"),
    (ended("timeout", "invocation", "deadline"), "runner.deadline_exceeded"),
    (ended("internal", cause="monitor"), "runner.internal"),
)


# What is never repeated, whatever the export does.
LASTING = (
    *("protocol.unsupported_version", "protocol.identity_mismatch"),
    "protocol.invalid_response",
)


@pytest.mark.parametrize("code", LASTING)
@pytest.mark.parametrize("export", ALL, ids=lambda export: f"{export.kind}-{export.effect_class}")
def test_lasting_failures_are_not_retryable(export: DeclaredExport, code: str) -> None:
    said, found = no(code, "error"), ended("malformed_response", cause=code.partition(".")[2])
    assert ending(export, said) == ending(export, found) == InvocationEnd(FAILED, code, export in EFFECTFUL)


@one_case(("end", "code"), BY_EFFECT, ids=lambda each: each if isinstance(each, str) else "")
@one_case("export", ALL, ids=lambda export: f"{export.kind}-{export.effect_class}")
def test_after_the_request_the_effect_decides(export: DeclaredExport, end: CallEnd, code: str) -> None:
    expected = InvocationEnd(RETRYABLE, code) if export in REPEATABLE else InvocationEnd(FAILED, code, True)
    assert ending(export, end) == expected


# The status is the same for all, and whether the work was done may be unknown.
LOST: tuple[tuple[CallEnd, InvocationEnd], ...] = (
    (
        ended("malformed_response", cause="invalid_response"),
        InvocationEnd(FAILED, "protocol.invalid_response"),
    ),
    *(
        (ended("crashed", cause=cause), InvocationEnd(FAILED, "runner.resource_exhausted"))
        for cause in ("oom", "pids", "disk", "output", "cpu_time", "file_size")
    ),
    (ended("cancelled", cause="given_up"), InvocationEnd("cancelled", "runner.cancelled")),
)


@one_case(("end", "expected"), LOST)
@one_case("export", ALL, ids=lambda export: f"{export.kind}-{export.effect_class}")
def test_work_that_may_have_been_done(export: DeclaredExport, end: CallEnd, expected: InvocationEnd) -> None:
    assert ending(export, end) == expected._replace(unknown=export in EFFECTFUL)


# --- the record ---------------------------------------------------------------------------------------------


def package(*exports: DeclaredExport, chosen: str = "") -> Plugin:
    details = details_of(Declared(exports, chosen))
    plugin = "acme/devkit", "0.1.0", "vai", "Devkit", "", "/p/vai-plugin.toml", "/p", None
    return Plugin(*plugin, SandboxSpec(enabled=True), details=details)


def recorded(export: DeclaredExport, end: CallEnd, **context: Any) -> dict[str, Any]:
    call = Call(export.kind, export.id, {"input": {}}, context)
    found = record(package(export), call, end, {"invocation_id": "inv_1"})
    json.dumps(found)
    return dict(found)


def test_the_record_of_a_success() -> None:
    end = ended("ok", began=1_000_000_000.5, ended=1_000_000_002.0, events=3, dropped_events=1)
    asked = Permissions("egress", "scratch", ("runs:read",), ("token",))
    found = recorded(
        READ._replace(permissions=asked), end, org_id="org_1", trace_id="tr_1", tool_execution_id="tx_1"
    )
    permissions = {
        "network": "egress",
        "filesystem": "scratch",
        "gateway_api_scopes": ["runs:read"],
        "secret_slots": ["token"],
    }
    assert found == {
        "invocation_id": "inv_1",
        "export": {"kind": "tool", "id": "fetch"},
        "binding_id": None,
        "package": {"id": "acme/devkit", "version": "0.1.0"},
        "execution_class": "isolated",
        "started_at": "2001-09-09T01:46:40.500Z",
        "ended_at": "2001-09-09T01:46:42.000Z",
        "status": "succeeded",
        "code": None,
        "execution_outcome": None,
        "retryable": False,
        "retry": None,
        "retry_count": 0,
        "org_id": "org_1",
        "project_id": None,
        "session_id": None,
        "chain_id": None,
        "run_id": None,
        "trace_id": "tr_1",
        "execution_id": None,
        "tool_execution_id": "tx_1",
        "compaction_id": None,
        "delivery_id": None,
        "events": 3,
        "dropped_events": 1,
        "permissions": {"declared": permissions, "effective": {**permissions, "egress": ["*"]}},
        "checkpoint": None,
        "late": None,
    }


CRASHED = ended("crashed", cause="exit:1")
NOT_SENT = ended("crashed", "handshake", "exit:1", written=False)


@pytest.mark.parametrize(
    ("export", "end", "context", "keep"),
    [
        (HOOK, CRASHED, {"delivery_id": "del_1", "attempt": 2}, {"delivery_id": "del_1"}),
        (READ, CRASHED, {"tool_execution_id": "tx_1"}, {"tool_execution_id": "tx_1"}),
        (IDEMPOTENT, CRASHED, {"tool_execution_id": "tx_1"}, {"tool_execution_id": "tx_1"}),
        (COMPACTOR, CRASHED, {"compaction_id": "c_1"}, {"compaction_id": "c_1"}),
        (WRITE, NOT_SENT, {"tool_execution_id": "tx_1"}, {"tool_execution_id": "tx_1"}),
        (HARNESS, NOT_SENT, {"invocation_id": "inv_2"}, {"invocation_id": "inv_2"}),
        (WRITE, CRASHED, {}, None),
        (UNKNOWN, no("acme.busy", "retryable_failure"), {}, None),
        (HARNESS, CRASHED, {}, None),
        (READ, no("failed", "failed"), {}, None),
        (HOOK, CRASHED, {"attempt": ATTEMPTS}, None),
        (HOOK, ended("handshake_failed", "handshake", "identity_mismatch", written=False), {}, None),
    ],
)
def test_only_failures_that_may_pass_are_retryable(
    export: DeclaredExport, end: CallEnd, context: dict[str, Any], keep: dict[str, str] | None
) -> None:
    found = recorded(export, end, **context)
    attempt = context.get("attempt", 1)
    assert found["retryable"] is (keep is not None) and found["retry_count"] == attempt - 1
    if keep is not None:
        assert found["retry"]["keep"] == keep and found["retry"]["attempt"] == attempt + 1
        assert found["retry"]["backoff_seconds"] == 10 * 2 ** (attempt - 1)


def test_a_late_answer_is_kept() -> None:
    answer = {"content": [], "checkpoint": 1}
    assert recorded(READ, ended("cancelled", late=answer))["late"] == answer
    assert recorded(HARNESS, ended("cancelled", late=answer))["late"] == {"content": []}  # the rest is above
    body = {"status": "failed", "result": answer}
    assert recorded(HARNESS, ended("timeout", late=body))["late"] == {**body, "result": {"content": []}}


@pytest.mark.parametrize(
    ("end", "checkpoint"),
    [
        (ended("timeout", late={"checkpoint": {"kind": "k"}}), {"kind": "k"}),
        (
            ended("timeout", late={"status": "cancelled", "result": {"checkpoint": {"kind": "k"}}}),
            {"kind": "k"},
        ),
        (no("cancelled", "cancelled"), None),
        (ended("timeout", late="no object"), None),
        (ended("timeout", late={"result": [1]}), None),
    ],
)
def test_the_checkpoint_of_a_harness_is_kept(end: CallEnd, checkpoint: object) -> None:
    assert recorded(HARNESS, end)["checkpoint"] == checkpoint
    assert recorded(READ, end)["checkpoint"] is None


def test_an_export_that_does_not_exist_has_a_record() -> None:
    refused = ended("invalid_call", written=False, refusal=Refusal(0, "tool.not_found", "no"))
    found = record(package(READ), Call("export", "absent"), refused, {})
    assert (found["status"], found["code"], found["execution_class"]) == ("failed", "tool.not_found", None)
    assert found["permissions"] == {"declared": None, "effective": None}


REFUSED = ended("invalid_call", written=False, refusal=Refusal(0, "tool.invalid_input", "no"))


@pytest.mark.parametrize(
    "given",
    [
        {"org_id": "evil", "trace_id": 5, "run_id": {"a": 1}, "attempt": -7},
        {"context": {"org_id": "evil", "trace_id": "evil"}, "target": {"session_id": "evil"}},
    ],
)
def test_the_input_of_a_call_says_nothing_about_its_ids(given: Any) -> None:
    found = record(package(READ), Call("tool", "fetch", given, {"org_id": "org_1"}), REFUSED, {})
    assert (found["org_id"], found["trace_id"], found["run_id"]) == ("org_1", None, None)
    assert (found["session_id"], found["retry_count"]) == (None, 0)


@pytest.mark.parametrize("value", [{"a": 1}, 5, "", "x" * 257, "a\nb", None, ["x"]])
def test_a_record_has_only_ids_that_could_be_sent(value: Any) -> None:
    keys = ("invocation_id", "trace_id", "org_id", "run_id", "tool_execution_id", "binding_id")
    given = Call("tool", "fetch", None, {**dict.fromkeys(keys, value), "session_id": "s" * 256})
    options = {"binding": json.dumps({"binding_id": value})}
    found = record(package(READ), given, REFUSED, options)
    assert {found[key] for key in keys} == {None} and found["session_id"] == "s" * 256


@pytest.mark.parametrize(
    ("attempt", "count"), [(1, 0), (3, 2), (0, 0), (-5, 0), (True, 0), ("2", 0), (2**31, 0)]
)
def test_the_retry_count_of_a_refused_call(attempt: Any, count: int) -> None:
    found = record(package(HOOK), Call("hook", "on_run", None, {"attempt": attempt}), REFUSED, {})
    assert found["retry_count"] == count


BOUND = {
    "binding_id": "b",
    "package_id": "acme/devkit",
    "package_version": "0.1.0",
    "export_id": "fetch",
    "scope": {"org_id": "o"},
    "secrets": {},
    "status": "active",
}
GATEWAY = "https://gateway.example.com"


@pytest.mark.parametrize(
    ("network", "policy", "url", "hosts"),
    [
        ("none", None, "", []),
        ("none", None, GATEWAY, ["gateway.example.com:443"]),
        ("egress", None, "", ["*"]),  # those of the policy
        ("egress", {}, GATEWAY, ["*", "gateway.example.com:443"]),
        ("egress", {"egress": ["a.example", "b.example:8443"]}, "", ["a.example:443", "b.example:8443"]),
        ("egress", {"network": "none"}, "", []),
        ("egress", {"gateway_api_scopes": []}, GATEWAY, ["*"]),  # without a scope there is no gateway
        ("none", None, "nonsense", []),  # the call was refused
    ],
)
def test_effective_permissions_show_the_hosts(
    network: Any, policy: dict[str, Any] | None, url: str, hosts: list[str]
) -> None:
    export = READ._replace(permissions=Permissions(network, "none", ("runs:read",), ()))
    options = {} if policy is None else {"binding": json.dumps({**BOUND, "policy": policy})}
    options |= {"gateway_url": url} if url else {}
    found = record(package(export), Call("tool", "fetch"), ended("ok"), options)
    assert found["permissions"]["effective"]["egress"] == hosts
    assert "egress" not in found["permissions"]["declared"]


def test_a_binding_that_is_nested_too_deeply_has_no_id() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    found = record(package(READ), Call("tool", "fetch"), REFUSED, {"binding": f'{{"binding_id": {deep}}}'})
    assert found["binding_id"] is None and found["permissions"]["effective"] is None


def test_records_fit_the_schema_of_reports() -> None:
    """The controls: a record with what the input of a call once could put there does not."""
    valid = Draft202012Validator(schema()["properties"]["invocation"])
    wrongs: list[dict[str, Any]] = [{"trace_id": 5}, {"org_id": {}}, {"retry_count": -8}, {"status": "ack"}]
    ends = (CRASHED, NOT_SENT, REFUSED, ended("ok"), ended("timeout", late={"checkpoint": {"kind": "k"}}))
    for export in ALL:
        for end in ends:
            found = recorded(export, end, session_id="s_1", attempt=2)
            assert not list(valid.iter_errors(found))
            for wrong in wrongs:
                assert list(valid.iter_errors({**found, **wrong}))


@pytest.mark.parametrize(
    ("export", "workers", "isolated"),
    [
        (READ, 0, MOST_ISOLATED),
        (READ._replace(max_concurrency=4), 0, 4),
        (READ._replace(execution_class="worker"), MOST_WORKERS, MOST_ISOLATED),
        (READ._replace(execution_class="worker", max_concurrency=2), 2, 2),
        (READ._replace(execution_class="inline", max_concurrency=2), 2, 2),
        (
            READ._replace(execution_class="worker", permissions=Permissions(filesystem="scratch")),
            0,
            MOST_ISOLATED,
        ),
    ],
)
def test_processes_of_an_export(export: DeclaredExport, workers: int, isolated: int) -> None:
    chosen = package(export, chosen=export.id)
    assert (reuses(chosen), concurrent(chosen)) == (workers, isolated)
    assert reuses(package(export)) == 0  # none was chosen
