"""What the contract says about bindings, rollouts, retries and records, one row for each statement.

The numbers of sections are those of the contract's text. What a cage is not needed for is asked of functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.contracts.vai.binding import is_selected
from runner.contracts.vai.outcome import ATTEMPTS, BACKOFF_FACTOR, BACKOFF_SECONDS
from runner.exceptions import PluginError, PluginFailure
from runner.ledger.retry import Schedule, next_try
from runner.outcome import Outcome
from runner.protocol.dialect import CallEnd, Refusal
from runner.serve.control.database import BindingRow
from runner.serve.control.events import event_id, read_event
from runner.serve.control.records import read_query, record_row
from runner.serve.deliveries import verdict_of
from runner.serve.desk import CallAnswer
from runner.serve.refusal import Refused
from runner.session.account import CallAccount
from tests.runner.serve.control.plane import Plane, plane, put_devkit, until
from tests.tables import check_rows

SESSIONS = [f"session-{number}" for number in range(1000)]


def included(binding: str, percent: int, key: str = "session_id") -> set[str]:
    return {each for each in SESSIONS if is_selected(binding, {key: each}, percent)}


def chosen(context: dict[str, str]) -> bool:
    return is_selected("bind_1", context, 50)


# A session that 50 percent include, and one that they leave out.
IN = next(each for each in SESSIONS if chosen({"session_id": each}))
OUT = next(each for each in SESSIONS if not chosen({"session_id": each}))

# §11 and A28
ROLLOUT: Mapping[str, Callable[[], bool]] = {
    "0 percent leave everybody out": lambda: not included("bind_1", 0),
    "100 percent leave nobody out": lambda: len(included("bind_1", 100)) == 1000,
    "25 percent are a quarter": lambda: 230 <= len(included("bind_1", 25)) <= 270,
    "1 percent are few": lambda: 1 <= len(included("bind_1", 1)) <= 25,
    "the same session always gets the same": lambda: included("bind_1", 25) == included("bind_1", 25),
    "more percent include all of fewer": lambda: included("bind_1", 25) <= included("bind_1", 50),
    "another binding includes others": lambda: included("bind_1", 25) != included("bind_2", 25),
    "the session goes before the run": lambda: chosen({"session_id": IN, "run_id": OUT}),
    "the run goes before the delivery": lambda: chosen({"run_id": IN, "delivery_id": OUT}),
    "the delivery goes before the invocation": lambda: chosen({"delivery_id": IN, "invocation_id": OUT}),
    "a session that is left out stays out": lambda: not chosen({"session_id": OUT, "run_id": IN}),
    "an empty id does not count": lambda: chosen({"session_id": "", "run_id": IN}),
    # Whoever chooses the ids of sessions can choose included ones: a rollout is no right.
    "ids can be ground": lambda: is_selected("bind_1", {"session_id": min(included("bind_1", 1))}, 1),
}


def failed(status: str | None) -> PluginFailure:
    error = PluginFailure(Outcome("crashed", "call", "…"))
    error.invocation = None if status is None else {"status": status}
    return error


# §6 and A26
RETRIES: Mapping[str, Callable[[], bool]] = {
    "a hook that failed retryably is tried again": lambda: verdict_of(failed("retryable_failure")) == "retry",
    "a hook that was cancelled is tried again": lambda: verdict_of(failed("cancelled")) == "retry",
    "a hook that failed is dead": lambda: verdict_of(failed("failed")) == "dead",
    "a failure without a record is tried again": lambda: verdict_of(failed(None)) == "retry",
    "an error without a record is dead": lambda: (
        verdict_of(PluginError(Refusal(0, "x", "…", "failed"))) == "dead"
    ),
    "5 attempts": lambda: Schedule().attempts == ATTEMPTS == 5,
    "10 seconds first": lambda: next_try(Schedule(), 1, 0.0, 0.0) == BACKOFF_SECONDS == 10,
    "then twice as long": lambda: next_try(Schedule(), 2, 0.0, 0.0) == 10 * BACKOFF_FACTOR == 20,
    "80 seconds before the fifth": lambda: next_try(Schedule(), 4, 0.0, 0.0) == 80,
    "jitter only adds": lambda: 10 < (next_try(Schedule(), 1, 0.0, 0.99) or 0) <= 12.5,
    "none after the fifth": lambda: next_try(Schedule(), 5, 0.0, 0.0) is None,
}


def event(**given: Any) -> tuple[Any, str]:
    found = {"type": "run.completed", "subject": {"kind": "run", "id": "r"}}
    return read_event({"id": "e", "event": found, **given}, "acme")


def refuses(act: Callable[[], Any]) -> bool:
    try:
        act()
    except (ValueError, Refused):
        return True
    return False


EVENTS: Mapping[str, Callable[[], bool]] = {
    "its type is the event's": lambda: event()[1] == "run.completed",
    "its org is the caller's": lambda: json.loads(event()[0].context) == {"org_id": "acme"},
    "ids that apply are kept": lambda: (
        json.loads(event(run_id="r", project_id="p")[0].context)["run_id"] == "r"
    ),
    "no other key": lambda: refuses(lambda: event(plugin="x")),
    "no id that cannot be printed": lambda: refuses(lambda: event(session_id="\n")),
    "no id without end": lambda: refuses(lambda: event(session_id="s" * 257)),
    "the same id in another org is another event": lambda: event_id("acme", "e") != event_id("rival", "e"),
    "orgs and ids cannot be mixed up": lambda: event_id("a", "b/c") != event_id("a/b", "c"),
    "the same id in the same org is the same": lambda: event_id("acme", "e") == event()[0].id,
}

QUERIES: Mapping[str, Callable[[], bool]] = {
    "RFC 3339": lambda: read_query({"since": "1970-01-01T00:01:00Z"}).since == 60.0,
    "another zone": lambda: read_query({"since": "1970-01-01T02:01:00+02:00"}).since == 60.0,
    "seconds since 1970": lambda: read_query({"until": "60.5"}).until == 60.5,
    "a limit has a limit": lambda: read_query({"limit": "99999999"}).most == 1000,
    "at least one": lambda: read_query({"limit": "0"}).most == 1,
    "no time without a zone": lambda: refuses(lambda: read_query({"since": "2026-01-01T00:00:00"})),
    "no day that there is not": lambda: refuses(lambda: read_query({"since": "2026-02-31T00:00:00Z"})),
    "no time without end": lambda: refuses(lambda: read_query({"since": "9" * 12})),
    "no negative cursor": lambda: refuses(lambda: read_query({"after": "-1"})),
    "no digits of other scripts": lambda: refuses(lambda: read_query({"after": "١"})),
    "no unknown status": lambda: refuses(lambda: read_query({"status": "ok"})),
    "no unknown key": lambda: refuses(lambda: read_query({"order": "up"})),
}


@pytest.mark.parametrize(
    "rows", [ROLLOUT, RETRIES, EVENTS, QUERIES], ids=["rollout", "retries", "events", "queries"]
)
def test_functions(rows: Mapping[str, Callable[[], bool]]) -> None:
    def check(name: str, act: Callable[[], bool]) -> None:
        assert act()

    check_rows(rows, check)


def test_a_record_has_a_most() -> None:
    """What a plugin sizes is left out of a record that is too long, and the record says so."""
    binding = BindingRow("b", "acme", "", "p", "e", "tools", 1, 100, "{}")
    account = CallAccount()
    account.stderr = "e" * 60_000
    invocation = {"status": "cancelled", "project_id": None, "late": "x" * 60_000, "checkpoint": "c" * 60_000}
    end = CallEnd(Outcome("cancelled", "call", "…"), began=1.0, ended=2.0)
    row = record_row("call_1", binding, invocation, end, account, 0)
    found = json.loads(row.document)
    assert len(row.document) <= 64 << 10
    assert (found["left_out"], found["late"], found["checkpoint"]) == (["late", "checkpoint"], None, None)
    assert found["stderr_tail"] == account.stderr
    small = record_row("call_1", binding, {**invocation, "late": 1, "checkpoint": 2}, end, account, 0)
    assert "left_out" not in json.loads(small.document)  # the same without the large parts
    # The text of an error is the plugin's too.
    for text, kept in (("x" * 12_000_000, 16 << 10), ("\U0001f600" * 1_000_000, 500)):
        error = end._replace(outcome=Outcome("plugin_error", "call", text, text))
        row = record_row("call_1", binding, invocation, error, account, 0)
        found = json.loads(row.document)
        assert len(row.document) <= 64 << 10 and found["outcome"]["message"].startswith(text[:kept])


# --- §13, §4 and §7 in real cages ---------------------------------------------------------------------------

CONTEXT = {"session_id": "s", "chain_id": "c", "run_id": "r", "trace_id": "t"}
COMPACTION = {"source": {"chain_id": "c", "projection": {"blocks": []}}, "target": {"max_input_tokens": 1}}
INPUTS: Mapping[str, Any] = {"search": {}, "triage": {}, "window": COMPACTION}

# The fields of §13: what the record of each call by a binding has.
FIELDS: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    "invocation_id": lambda found: found["invocation_id"].startswith("call_"),
    "export kind": lambda found: found["export"]["kind"] in ("tool", "hook", "compactor", "harness"),
    "export id": lambda found: found["export"]["id"] == found["binding_id"].removeprefix("of "),
    "package_id": lambda found: found["package"]["id"] == "acme/devkit",
    "version": lambda found: found["package"]["version"] == "0.1.0",
    "execution_class": lambda found: found["execution_class"] in ("isolated", "worker"),
    "start": lambda found: found["started_at"].endswith("Z"),
    "end": lambda found: found["started_at"] <= found["ended_at"],
    "terminal status": lambda found: found["status"] == "succeeded",
    "retry count": lambda found: found["retry_count"] == 0,
    "org": lambda found: found["org_id"] == "acme",
    "project": lambda found: found["project_id"] is None,
    "session": lambda found: found["session_id"] == "s",
    "chain": lambda found: found["chain_id"] == "c",
    "run": lambda found: found["run_id"] == "r",
    "trace_id": lambda found: found["trace_id"] == "t",
    "execution_id of a harness": lambda found: bool(found["execution_id"]) is _is(found, "harness"),
    "tool_execution_id of a tool": lambda found: bool(found["tool_execution_id"]) is _is(found, "tool"),
    "compaction_id of a compactor": lambda found: bool(found["compaction_id"]) is _is(found, "compactor"),
    "delivery_id of a hook": lambda found: bool(found["delivery_id"]) is _is(found, "hook"),
    "code": lambda found: found["code"] is None,
    "declared permissions": lambda found: "network" in found["permissions"]["declared"],
    "permissions after the binding": lambda found: "network" in found["permissions"]["effective"],
    "what the policy granted": lambda found: _lives(found) or found["granted"]["network"]["mode"] == "none",
    "exit code": lambda found: _lives(found) or found["exit"]["code"] == 0,
    "no signal": lambda found: _lives(found) or found["exit"]["signal"] is None,
    "processor time": lambda found: _lives(found) or found["usage"]["cpu_user"] >= 0,
    "largest memory": lambda found: _lives(found) or found["usage"]["max_rss"] > 0,
    "bytes in": lambda found: found["usage"]["bytes_in"] > 0,
    "bytes out": lambda found: _lives(found) or found["usage"]["bytes_out"] > 0,
    "events": lambda found: found["events"] == 0,
    "dropped events": lambda found: found["dropped_events"] == 0,
    "stderr tail": lambda found: isinstance(found["stderr_tail"], str),
    "no input and no output": lambda found: "value" not in found and "input" not in found,
    "revision of the binding": lambda found: found["binding_revision"] == 1,
}


def _is(found: dict[str, Any], kind: str) -> bool:
    return bool(found["export"]["kind"] == kind)


def _lives(found: dict[str, Any]) -> bool:
    """Its process serves further calls, so that its end and its use are not known."""
    return (
        found["execution_class"] == "worker" and found["permissions"]["declared"]["filesystem"] != "scratch"
    )


@pytest.mark.launches
@pytest.mark.trio
async def test_records_and_processes(plugin_dir: Path, tmp_path: Path, nothing_left: None) -> None:
    async with plane(tmp_path / "state") as made:
        await made.add_package(put_devkit(plugin_dir / "devkit"))
        with trio.fail_after(300):
            await _the_record_of_each_kind(made)
            await _processes(made)


async def _the_record_of_each_kind(made: Plane) -> None:
    for export in ("search", "triage", "window", "notify"):
        await made.bind(f"of {export}", export)
    for export, given in INPUTS.items():
        answer = await made.call(f"of {export}", given, CONTEXT)
        assert answer.status == 200, answer.document
    given = {"type": "run.completed", "subject": {"kind": "run", "id": "r"}}
    await made.send("acme", id="e", event=given, **CONTEXT)
    while len(records := await made.records()) < 4:  # noqa: ASYNC110 -- the deliveries have no event for it
        await trio.sleep(0.01)

    def check(name: str, act: Callable[[dict[str, Any]], bool]) -> None:
        for found in records:
            assert act(found), found

    check_rows(FIELDS, check)
    assert {each["export"]["kind"] for each in records} == {"tool", "harness", "compactor", "hook"}
    (told,) = (json.loads(each["stderr_tail"]) for each in records if _is(each, "hook"))
    body = told["body"]
    assert (body["attempt"], body["context"]["org_id"], body["event"]["type"]) == (1, "acme", "run.completed")
    assert body["delivery_id"].partition("~")[0] == event_id("acme", "e")
    assert (
        "scratch_dir" not in body["context"] and "gateway" not in body["context"]
    )  # A16; nobody gives a token


async def _processes(made: Plane) -> None:
    """§4, A9 and A21: a worker serves calls of one binding, and max_concurrency counts for each binding."""
    for name in ("one", "two"):
        scope = {"org_id": "acme", "project_id": name}
        await made.bind(name, "reader", scope=scope, policy={"max_concurrency": 1, "timeout_ms": 15_000})
    served = []
    for name in ("one", "one", "two"):
        found = (await made.call(name)).document["value"]["structured_output"]
        served.append(found["served"])
        assert found["body"]["context"]["project_id"] == name
    assert served == [1, 2, 1]
    answers: list[CallAnswer] = []
    seen: list[Any] = []

    async def wait() -> None:
        answers.append(await made.call("one", {"do": "wait", "count": 1}, seen=seen))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await until(lambda: bool(seen))
        refused = await made.call("one")
        assert (refused.status, refused.document["invocation"]["code"]) == (429, "runner.overloaded")
        assert (await made.call("two")).status == 200
        (call,) = made.desk._in_flight
        made.desk.cancel(call, None)
    assert answers[0].document["error"]["code"] == "cancelled"
