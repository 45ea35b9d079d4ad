"""The wall clock jumps between two steps of the ledger: no outcome is lost, and no delivery waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.ledger.file import LedgerFile, open_file
from runner.ledger.retry import Schedule, longest_pause
from runner.ledger.rows import UNKNOWN, Delivery, EndOfCall, InvocationRow
from tests.tables import check_rows

NOW = 1.8e9
JUMPS = {"an hour back": -3600.0, "ten years back": -3e8, "a minute on": 60.0, "ten years on": 3e8}


@pytest.mark.parametrize("kill", [False, True], ids=["goes on", "is killed"])
def test_a_call_in_flight_has_one_outcome(tmp_path: Path, kill: bool) -> None:
    def check(name: str, jump: float) -> None:
        clock = [NOW]
        path = str(tmp_path / f"{name} {kill}" / "ledger.db")
        file = open_file(path, clock=lambda: clock[0])
        call = InvocationRow("one", "demo", "tool", "tool", "uid:1", "key")
        file.do(LedgerFile.accept, call)
        file.do(LedgerFile.ask, "one", NOW)
        clock[0] += jump
        if kill:
            file.close()
            file = open_file(path, clock=lambda: clock[0])
        else:
            file.do(LedgerFile.end, "one", EndOfCall("ok", started=NOW))
            file.do(LedgerFile.prune)
        row = file.do(LedgerFile.invocation, "one")
        assert row is not None and row.code == (UNKNOWN if kill else "ok")
        # Its key still leads to it, so the call is not made twice.
        assert not file.do(LedgerFile.accept, call._replace(id="two")).fresh
        clock[0] = NOW  # and when the clock is right again
        file.do(LedgerFile.prune)
        assert file.do(LedgerFile.invocation, "one") is not None
        file.close()

    check_rows(JUMPS, check)


def test_a_delivery_waits_no_longer_than_its_schedule_says(tmp_path: Path) -> None:
    def check(name: str, jump: float) -> None:
        clock = [NOW]
        file = open_file(str(tmp_path / name / "ledger.db"), clock=lambda: clock[0], chance=lambda: 0.9)
        file.do(LedgerFile.enqueue, Delivery("one", "demo", "hook", '{"type":"run.completed"}'))
        (attempt,) = file.do(LedgerFile.claim, 1, lambda: "a")
        file.do(LedgerFile.settle, attempt, "retry", EndOfCall("crashed"))
        assert file.do(LedgerFile.claim, 1, lambda: "b") == []  # control: it is not due yet
        clock[0] += jump
        early = file.do(LedgerFile.claim, 1, lambda: "c")
        clock[0] += longest_pause(Schedule())
        late = file.do(LedgerFile.claim, 1, lambda: "d")
        assert [each.number for each in (*early, *late)] == [2]
        file.close()

    check_rows(JUMPS, check)
