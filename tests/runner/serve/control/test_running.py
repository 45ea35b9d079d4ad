"""Calls by bindings, in real cages: their processes, changes, cancellation, secrets, records and events."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.contracts.vai.binding import is_selected
from runner.ledger.file import LedgerFile
from runner.ledger.rows import Delivery, DeliveryRow, InvocationRow
from runner.package.keys import make_key
from runner.protocol.calls import CallRequest
from runner.serve.control.running import BindingCall
from runner.serve.control.settings import ControlSettings
from runner.serve.desk import CallAnswer
from runner.serve.refusal import Refused
from tests.runner.serve.control.plane import SECRETS, Plane, plane, put_devkit, until

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]
WAIT = {"do": "wait", "count": 1}
STAY = {**WAIT, "then": "stay"}
PACKAGE = "acme~devkit@0.1.0"


@pytest.mark.trio
async def test_calls_by_bindings(plugin_dir: Path, tmp_path: Path) -> None:
    async with plane(tmp_path / "state") as made:
        folder = put_devkit(plugin_dir / "devkit", telling=True)
        await made.add_package(folder)
        for question in (
            _secrets_stay,
            _a_hidden_secret_needs_its_host,
            _a_change_counts_for_the_next_call,
            _a_disabled_binding_stops,
            _a_package_that_is_withdrawn_and_an_org_that_is_gone,
            _the_same_key_at_once,
            _calls_at_once_are_counted,
            _a_rollout,
            _changes_while_calls_begin,
        ):
            with trio.fail_after(300):
                await question(made)
        await _a_package_that_was_changed(made, folder)


@pytest.mark.trio
async def test_the_policy_of_the_daemon_counts(plugin_dir: Path, tmp_path: Path) -> None:
    """The package is the one of the test before, which runs there."""
    policy = tmp_path / "policy.toml"
    make_key(str(tmp_path / "key"), "one")
    policy.write_text(f'version = 1\n[packages]\nsignature = "required"\ntrust = "{tmp_path}/key.pub"\n')
    policy.chmod(0o644)
    async with plane(tmp_path / "state", str(policy)) as made:
        await made.add_package(put_devkit(plugin_dir / "devkit", telling=True))
        await made.bind("r", "reader")
        with trio.fail_after(300):
            assert _error(await made.call("r")) == (403, "policy_denied", "signature")


@pytest.mark.trio
async def test_events_of_orgs(plugin_dir: Path, tmp_path: Path) -> None:
    async with plane(tmp_path / "state") as made:
        await made.add_package(put_devkit(plugin_dir / "devkit", telling=True))
        with trio.fail_after(300):
            await _each_org_gets_its_own(made)
            await _a_binding_that_is_disabled_later_gets_nothing(made)
            await _calls_of_a_daemon_that_was_killed(made)


@pytest.mark.broad
@pytest.mark.trio
async def test_a_thousand_sessions(plugin_dir: Path, tmp_path: Path) -> None:
    """Each session is called twice, by a binding that serves a quarter of them."""
    async with plane(tmp_path / "state") as made:
        await made.add_package(put_devkit(plugin_dir / "devkit"))
        await made.bind("r", "reader", rollout={"traffic_percent": 25})
        served: list[list[int]] = []
        for _ in range(2):
            served.append([])
            for number in range(1000):
                with trio.fail_after(300):
                    answer = await made.call("r", context={"session_id": f"session-{number}"})
                if answer.status == 200:
                    served[-1].append(number)
                else:
                    assert _error(answer) == (400, "invalid_call", "binding.inactive")
        assert served[0] == served[1] and 230 <= len(served[0]) <= 270
        assert len(await made.records(status="succeeded", most=1000)) == 2 * len(served[0])


# --- calls --------------------------------------------------------------------------------------------------


async def _secrets_stay(made: Plane) -> None:
    await made.bind("a", "search", "acme")
    await made.bind("b", "search", "rival")
    told = {}
    for name in ("a", "b"):
        seen: list[Any] = []
        right = await made.call(name, {"do": "progress", "count": 2}, key=f"key of {name}", seen=seen)
        wrong = await made.call(name, {"do": "fail"})
        assert (right.status, wrong.status, len(seen)) == (200, 422, 2)
        rows = await made.ledger.do(LedgerFile.invocations, f"binding:{name}")
        kept = [right.document, wrong.document, seen, await made.records(binding=name)]
        told[name] = json.dumps([*kept, *rows])
        assert told[name].count("[secret]") > 5  # the plugin did repeat it, wherever it could
    assert not [secret for secret in SECRETS.values() for text in told.values() if secret in text]
    failed, answered = await made.records(binding="a")
    assert (failed["status"], failed["code"], failed["exit"]["code"]) == ("failed", "devkit.asked", 0)
    assert (answered["status"], answered["events"], answered["retry_count"]) == ("succeeded", 2, 0)
    assert answered["usage"]["max_rss"] > 0 and answered["usage"]["bytes_out"] > 0
    assert answered["granted"]["network"]["mode"] == "none"
    assert "[secret]" in answered["stderr_tail"]


async def _a_hidden_secret_needs_its_host(made: Plane) -> None:
    """The org hides it at a host that the export may not reach. Without that it is called as before."""
    usual, org = made.settings, made.settings.orgs["acme"]
    made.settings = ControlSettings({"acme": org._replace(hide=("api_key@api.example.com:443",))})
    refused = await made.call("a", {"do": "progress", "count": 2})
    assert refused.status == 403 and refused.document["error"]["cause"] == "credential_network"
    made.settings = usual
    assert (await made.call("a", {"do": "progress", "count": 2})).status == 200


async def _a_change_counts_for_the_next_call(made: Plane) -> None:
    def seen(answer: CallAnswer) -> tuple[int, Any]:
        found = answer.document["value"]["structured_output"]
        return found["pid"], found["body"]["config"]

    await made.bind("c", "reader", config={"version": 1})
    await made.bind("other", "reader", scope={"org_id": "acme", "project_id": "p"}, config={"version": 1})
    first = seen(await made.call("c"))
    assert seen(await made.call("c")) == first  # a worker serves one call after the other
    async with _running(made, ("c", WAIT)) as answers:
        await made.bind("c", "reader", config={"version": 2})
        assert seen(await made.call("c"))[1] == {"version": 2}
        (call,) = made.desk._in_flight  # the old one goes on
        assert made.desk.cancel(call, "org:rival") is False
        assert made.desk.cancel(call, "org:acme") is True
    assert answers[0].document["error"]["cause"] == "deleted"
    newest = next(each for each in await made.records(binding="c") if each["status"] == "cancelled")
    assert newest["stderr_tail"].count("told user_cancelled") == 1
    # The same export in another binding is another process, also with the same configuration.
    await until(lambda: len(_specs(made, "c")) == 1)  # the old one has ended
    await made.call("other")
    assert len({each.name.partition("#")[0] for each in made.supervisor.plugins()}) > 2


async def _a_disabled_binding_stops(made: Plane) -> None:
    scope = {"org_id": "acme", "project_id": "d"}
    await made.bind("d", "search", scope=scope)
    async with _running(made, ("d", WAIT), ("d", STAY)) as answers:
        await made.bind("d", "search", scope=scope, status="disabled")
        refused = await made.call("d")
        assert _error(refused) == (400, "invalid_call", "binding.inactive")
    assert {_error(each) for each in answers} == {(499, "cancelled", "binding_disabled")}
    stopped, *_ = records = [
        each for each in await made.records(binding="d") if each["status"] == "cancelled"
    ]
    assert sorted(each["code"] for each in records) == ["devkit.cancelled", "runner.cancelled"]
    for each in records:
        assert each["stderr_tail"].count("told binding_disabled") == 1
        assert each["exit"]["forced"] is (each["code"] == "runner.cancelled")  # it was killed after its grace
        assert each["outcome"]["cause"] == "binding_disabled"
    await until(lambda: not _specs(made, "d"))
    await made.bind("d", "search", scope=scope)
    assert (await made.call("d")).status == 200
    assert stopped["binding_revision"] == 1


async def _a_package_that_is_withdrawn_and_an_org_that_is_gone(made: Plane) -> None:
    async with _running(made, ("a", WAIT), ("b", WAIT)) as answers:
        known = made.settings
        made.settings = known._replace(orgs={"acme": known.orgs["acme"]})
        made.running.wake()
        await until(lambda: len(answers) == 1)
        assert _error(await made.call("b")) == (400, "invalid_call", "binding.inactive")
        assert len(answers) == 1  # the other org's goes on
        await _withdraw(made, 1)
        made.running.wake()
        refused = await made.call("a")
        assert _error(refused) == (400, "invalid_call", "binding.inactive")
    assert {_error(each)[2] for each in answers} == {"binding_disabled"}
    await _withdraw(made, 0)
    made.settings = known
    made.running.wake()


async def _withdraw(made: Plane, withdrawn: int) -> None:
    await made.database.submit(
        lambda file: file.change_package(PACKAGE, None, "operator", "withdrawn", withdrawn=withdrawn)
    )


async def _the_same_key_at_once(made: Plane) -> None:
    answers: list[CallAnswer] = []

    async def call() -> None:
        answers.append(await made.call("a", {"n": 1}, key="once"))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(call)
    again = await made.call("a", {"n": 1}, key="once")
    assert sorted(each.status for each in answers) == [200, 409]
    assert again.headers == {"Idempotency-Replayed": "true"}
    assert len({each.document["id"] for each in (*answers, again)}) == 1
    other = await made.call("b", {"n": 1}, key="once")  # a key belongs to the org
    assert other.status == 200 and other.headers == {}


async def _calls_at_once_are_counted(made: Plane) -> None:
    live = await made.running.find("a")
    assert live is not None
    results: list[Any] = []

    async def accept() -> None:
        call, target = CallRequest(live.name, live.row.export, {}), BindingCall(made.running, live)
        try:
            results.append(await made.desk.accept(call, target))
        except Refused as refused:
            results.append(refused.code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.serve.desk.MOST_CALLS", 1)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(accept)
    refused, (row,) = [each for each in results if each == "overloaded"], made.desk._in_flight
    assert len(refused) == 2
    await made.desk.abandon(next(each for each in results if each != "overloaded"))
    assert made.desk.in_flight == 0 and row.startswith("call_")


async def _a_rollout(made: Plane) -> None:
    await made.bind(
        "r", "reader", scope={"org_id": "acme", "project_id": "r"}, rollout={"traffic_percent": 25}
    )
    inside, outside = (next(_sessions("r", 25, included)) for included in (True, False))
    for _ in range(2):
        assert (await made.call("r", context={"session_id": inside})).status == 200
        left_out = await made.call("r", context={"session_id": outside})
        assert _error(left_out) == (400, "invalid_call", "binding.inactive")
        assert "25 percent leaves this call out" in left_out.document["error"]["message"]
    newest, *_ = await made.records(binding="r")
    assert (newest["code"], newest["session_id"], newest["exit"]) == ("binding.inactive", outside, None)


async def _changes_while_calls_begin(made: Plane) -> None:
    """Every call is made once, by one version of the binding or another, and the last version stays."""
    scope = {"org_id": "acme", "project_id": "changing"}
    versions: list[int] = []

    async def call() -> None:
        for _ in range(4):
            answer = await made.call("changing")
            assert answer.status == 200, answer.document
            versions.append(answer.document["value"]["structured_output"]["body"]["config"]["version"])

    policy = {"max_concurrency": 2}
    await made.bind("changing", "reader", scope=scope, policy=policy, config={"version": 0})
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(call)
        for version in range(1, 4):
            known = len(versions)
            await until(lambda known=known: len(versions) > known)  # type: ignore[misc]
            await made.bind("changing", "reader", scope=scope, policy=policy, config={"version": version})
    await call()
    assert len(versions) == 12 and versions[-4:] == [3, 3, 3, 3]
    await until(lambda: len(_specs(made, "changing")) == 1)


async def _a_package_that_was_changed(made: Plane, folder: Path) -> None:
    program = folder / "assets" / "added"
    program.write_text("by somebody else")
    refused = await made.call("a")
    assert _error(refused) == (403, "policy_denied", "package_changed")
    os.rename(folder, moved := f"{folder}.moved")
    assert str(folder) not in json.dumps((await made.call("a")).document)  # nor where the operator keeps it
    os.rename(moved, folder)
    newest, *_ = await made.records(binding="a")
    assert (newest["status"], newest["code"]) == ("failed", "runner.refused")
    program.unlink()
    assert (await made.call("a")).status == 200


# --- events -------------------------------------------------------------------------------------------------


def _event(**summary: Any) -> dict[str, Any]:
    return {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}, "summary": summary}


async def _each_org_gets_its_own(made: Plane) -> None:
    await made.bind("org", "notify", "acme")
    await made.bind("p1", "notify", scope={"org_id": "acme", "project_id": "p1"})
    await made.bind("theirs", "notify", "rival")
    await made.bind("tool", "reader", "acme")
    for org, name, given, expected in (
        ("acme", "evt", {}, "org"),
        ("rival", "evt", {}, "theirs"),  # the same id in another org is another event
        ("acme", "evt 1", {"project_id": "p1"}, "p1"),  # the project's own goes before the org's
        ("acme", "evt 2", {"project_id": "p2"}, "org"),
    ):
        sent = await made.send(org, id=name, event=_event(), **given)
        assert [plugin for plugin, _ in sent] == [f"binding:{expected}"]
        ended = await _ended(made, sent[0][1])
        assert (ended.state, ended.attempt) == ("acked", 1)
        assert await made.send(org, id=name, event=_event(), **given) == sent  # again: nothing changes
        newest, *_ = await made.records(binding=expected)
        assert (newest["delivery_id"], newest["retry_count"], newest["org_id"]) == (sent[0][1], 0, org)
        assert newest["status"] == "succeeded"
    failing = _event(do="fail", status="retryable_failure")
    sent = await made.send("acme", id="evt 3", event=failing)
    assert (await _ended(made, sent[0][1])).state == "dead"
    attempts = [each for each in await made.records(binding="org") if each["delivery_id"] == sent[0][1]]
    assert [each["retry_count"] for each in attempts] == [1, 0]
    assert await made.send("acme", id="evt 4", event={**_event(), "type": "chain.compacted"}) == []


async def _a_binding_that_is_disabled_later_gets_nothing(made: Plane) -> None:
    context = json.dumps({"org_id": "acme"})
    late = Delivery("late", "", "", json.dumps(_event()), context)
    await made.bind("org", "notify", "acme", status="disabled")
    (row,) = await made.ledger.enqueue_all(late, [("binding:org", "notify")])
    made.deliveries.wake()
    assert (await _ended(made, row.id)).state == "dead"
    newest, *_ = await made.records(binding="org")
    assert (newest["code"], newest["exit"], newest["delivery_id"]) == ("binding.inactive", None, row.id)
    assert await made.send("acme", id="evt 5", event=_event()) == []
    running = await made.send("rival", id="evt 6", event=_event(do="wait"))
    await until(lambda: "theirs" in made.running._calls)
    await made.bind("theirs", "notify", "rival", status="disabled")
    assert (await _ended(made, running[0][1])).state == "dead"
    newest, first, *_ = await made.records(binding="theirs")
    assert (first["status"], newest["code"]) == ("cancelled", "binding.inactive")


async def _calls_of_a_daemon_that_was_killed(made: Plane) -> None:
    for name, plugin in (("call_lost", "binding:tool"), ("call_idle", "binding:tool"), ("other", "plain")):
        await made.ledger.accept(InvocationRow(name, plugin, "reader", "tools", "org:acme"))
    await made.ledger.ask("call_lost", 1e9)
    await made.ledger.do(LedgerFile.recover)
    for _ in range(2):
        await made.running.record_lost(made.ledger)
        found = {each["invocation_id"]: each for each in await made.records(binding="tool")}
        assert {(name, each["status"], each["execution_outcome"]) for name, each in found.items()} == {
            ("call_lost", "failed", "unknown"),
            ("call_idle", "retryable_failure", None),
        }
        assert {(each["code"], each["org_id"]) for each in found.values()} == {("runner.crashed", "acme")}


# --- helpers ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _running(made: Plane, *calls: tuple[str, dict[str, Any]]) -> AsyncIterator[list[CallAnswer]]:
    """Make calls, and wait until each has sent its first event. They have ended when the context has."""
    answers: list[CallAnswer] = []
    seen: list[Any] = []

    async def call(name: str, given: dict[str, Any]) -> None:
        answers.append(await made.call(name, given, seen=seen))

    async with trio.open_nursery() as nursery:
        for each in calls:
            nursery.start_soon(call, *each)
        await until(lambda: len(seen) >= len(calls))
        yield answers


async def _ended(made: Plane, delivery: str) -> DeliveryRow:
    while True:
        row = await made.ledger.do(LedgerFile.delivery, delivery)
        if row is not None and row.state in ("acked", "dead"):
            return row
        await trio.sleep(0.01)


def _error(answer: CallAnswer) -> tuple[int, str, str]:
    error = answer.document["error"]
    return answer.status, error["code"], error["cause"]


def _specs(made: Plane, binding: str) -> list[str]:
    return [each.name for each in made.supervisor.plugins() if each.name.startswith(f"binding:{binding}#")]


def _sessions(binding: str, percent: int, included: bool) -> Iterator[str]:
    for number in range(1000):
        if is_selected(binding, {"session_id": f"s{number}"}, percent) is included:
            yield f"s{number}"
