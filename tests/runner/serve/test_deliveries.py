"""Deliveries to a real hook: acknowledged, retried with the next attempt, dead, and repeated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.contracts.vai import CONTRACT
from runner.launch.remote import forkserver
from runner.ledger.file import LedgerFile
from runner.ledger.ledger import Ledger, open_ledger
from runner.ledger.retry import Schedule
from runner.ledger.rows import DeliveryRow
from runner.lifecycle.spec import Spec
from runner.lifecycle.supervisor import Supervisor, open_supervisor
from runner.serve.deliveries import Deliveries, delivery_of
from runner.serve.metrics import Metrics
from tests.conftest import ROOT, SYSTEM_PATH

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]
ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}


def event(**summary: Any) -> dict[str, Any]:
    subject = {"kind": "run", "id": "run_1"}
    return {
        "type": "run.completed",
        "occurred_at": "2026-01-01T00:00:00Z",
        "subject": subject,
        "summary": summary,
    }


async def ended(ledger: Ledger, deliveries: Deliveries, name: str) -> DeliveryRow:
    """Wait until a delivery is acknowledged or dead. The schedule of these tests has no pauses."""
    while True:
        with trio.fail_after(60):
            row = await ledger.do(LedgerFile.delivery, name)
            if row is not None and row.state in ("acked", "dead"):
                return row
            await trio.sleep(0.01)


async def attempts(ledger: Ledger, name: str) -> list[tuple[int | None, str | None]]:
    rows = await ledger.do(LedgerFile.invocations, most=1000)
    return sorted((row.attempt, row.code) for row in rows if row.delivery == name)


@pytest.mark.trio
async def test_deliveries_end_in_ack_or_dead_letter(plugin_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests/plugins/vai_devkit", plugin_dir / "devkit")
    for path in (plugin_dir / "devkit").rglob("*"):
        path.chmod(0o755)
    schedule = Schedule(attempts=2, first_seconds=0.0)
    try:
        async with (
            open_ledger(str(tmp_path / "ledger.db"), schedule=schedule) as ledger,
            open_supervisor() as supervisor,
            trio.open_nursery() as nursery,
        ):
            supervisor.add(Spec("devkit", plugin_dir / "devkit", environ=ENVIRON))
            deliveries = Deliveries(supervisor, ledger, Metrics(), lambda name: CONTRACT.calls["hook"])
            nursery.start_soon(deliveries.run)
            await check(ledger, supervisor, deliveries)
            nursery.cancel_scope.cancel()
    finally:
        forkserver.close()


async def check(ledger: Ledger, supervisor: Supervisor, deliveries: Deliveries) -> None:
    async def post(name: str, hook: str = "notify", plugin: str = "devkit", **summary: Any) -> DeliveryRow:
        given = {"id": name, "plugin": plugin, "hook": hook, "event": event(**summary)}
        await ledger.enqueue(delivery_of(given))
        deliveries.wake()
        return await ended(ledger, deliveries, name)

    # Acknowledged, with its id and the first attempt.
    row = await post("good")
    assert (row.state, row.attempt) == ("acked", 1)
    seen = json.loads(supervisor.logs("devkit").splitlines()[0])["body"]
    assert (seen["delivery_id"], seen["attempt"]) == ("good", 1)
    # A crash and a retryable failure are tried again, until there is no attempt left.
    for name, summary in (
        ("crash", {"do": "exit"}),
        ("again", {"do": "fail", "status": "retryable_failure"}),
    ):
        row = await post(name, **summary)
        assert (row.state, row.attempt) == ("dead", 2)
        code = "crashed" if name == "crash" else "plugin_error"
        assert await attempts(ledger, name) == [(1, code), (2, code)]
    # What repeating does not heal is dead at once: the hook says so, or there is none.
    row = await post("never", do="fail")
    assert (row.state, row.attempt, row.code) == ("dead", 1, "plugin_error")
    row = await post("nowhere", hook="nothing")
    assert (row.state, row.attempt) == ("dead", 1)
    row = await post("unknown", plugin="nobody")
    assert (row.state, row.attempt) == ("dead", 2)
    # A person repeats a dead one: the attempts go on counting.
    await ledger.do(LedgerFile.repeat, "never")
    deliveries.wake()
    row = await ended(ledger, deliveries, "never")
    assert (row.state, row.attempt) == ("dead", 2)
    # Those of a plugin that a person stopped wait for it.
    await supervisor.stop("devkit")
    await ledger.enqueue(delivery_of({"id": "later", "plugin": "devkit", "hook": "notify", "event": event()}))
    deliveries.wake()
    assert (await post("other", plugin="nobody")).state == "dead"
    waiting = await ledger.do(LedgerFile.delivery, "later")
    assert waiting is not None and (waiting.state, waiting.attempt) == ("queued", 0)
    await supervisor.start("devkit")
    deliveries.wake()
    assert (await ended(ledger, deliveries, "later")).state == "acked"


def test_bodies_of_deliveries() -> None:
    good = {"plugin": "p", "hook": "h", "event": {}}
    made = delivery_of(good)
    assert made.id.startswith("del_") and (made.plugin, made.hook, made.event) == ("p", "h", "{}")
    for wrong in (
        {},
        {**good, "event": []},
        {**good, "context": "x"},
        {**good, "id": ""},
        {**good, "id": "x" * 257},
        {**good, "id": "a\nb"},
        {**good, "plugin": 5},
        {**good, "attempt": 2},
    ):
        with pytest.raises(ValueError, match=r"it has to be|have to be|unknown key"):
            delivery_of(wrong)
