"""The ledger's writer is killed at every statement. Every accepted call has exactly one outcome afterwards,
and every delivery ends."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.ledger.file import LedgerFile, open_file
from runner.ledger.retry import Schedule
from runner.ledger.rows import NOT_STARTED, UNKNOWN, EndOfCall
from runner.ledger.schema import MIGRATIONS
from tests.conftest import ROOT, TEMP_PREFIX

ACTS = st.tuples(
    st.sampled_from(("accept", "accept", "ask", "ask", "end", "enqueue", "claim", "settle", "repeat")),
    st.integers(0, 3),
)
# Opening takes some 30 statements and each act about 5. Higher numbers kill it after all acts.
RUNS = st.lists(st.tuples(st.lists(ACTS, max_size=12), st.integers(1, 110)), min_size=1, max_size=4)


class Writer:
    """Runs acts in a process that is killed at a statement. Returns what it said before."""

    def __init__(self) -> None:
        argv = [sys.executable, str(Path(__file__).parent / "writer.py")]
        env = {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd="/"
        )

    def run(self, **order: Any) -> list[list[Any]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        said: list[list[Any]] = json.loads(self.process.stdout.readline())
        return said


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    with made.process:
        made.process.communicate()


@settings(max_examples=100)
@given(runs=RUNS)
def test_every_accepted_call_has_one_outcome_wherever_its_writer_is_killed(
    writer: Writer, runs: list[tuple[list[tuple[str, int]], int]]
) -> None:
    # In memory, where there is one: the writer is killed, not the machine, so nothing depends on a sync.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix=TEMP_PREFIX, dir=memory) as folder:
        check_runs(writer, Path(folder) / "ledger.db", runs)


def check_runs(writer: Writer, path: Path, runs: list[tuple[list[tuple[str, int]], int]]) -> None:
    said: list[list[Any]] = []
    now = 1e9
    for number, (acts, crash_at) in enumerate(runs):
        said += writer.run(path=str(path), run=number, acts=acts, crash_at=crash_at, now=now)
        now += 1000.0
    assert [words for words in said if words[0] == "bug"] == []
    file = open_file(str(path), clock=lambda: now, chance=lambda: 0.0)
    try:
        check_calls(file, said)
        check_deliveries(file, said)
        check_shares(file)
        drain(file)
        check_shares(file)
    finally:
        file.close()


def check_calls(file: LedgerFile, said: list[list[Any]]) -> None:
    rows = {row.id: row for row in file.invocations(most=1000)}
    assert all(row.ended is not None and row.code for row in rows.values())
    accepted = [words[1] for words in said if words[0] == "accepted"]
    ran = Counter(words[1] for words in said if words[0] == "ran")
    assert set(accepted) <= set(rows) and set(ran) <= set(accepted) and set(ran.values()) <= {1}
    ended = {words[1]: words[2] for words in said if words[0] == "ended"}
    ending = {words[1] for words in said if words[0] == "ending"}
    asking = {words[1] for words in said if words[0] == "asking"}
    assert {name: rows[name].code for name in ended} == ended
    assert {rows[name].code for name in set(ran) - ending} <= {UNKNOWN}
    assert {rows[name].code for name in set(accepted) - asking - ending} <= {NOT_STARTED}
    # A key has one call that counts. Another came only if the first was not asked, which left the key free,
    # or after its outcome was lost, and then only if its effect may be repeated.
    for row in rows.values():
        is_free = row.code in (NOT_STARTED, "launch_failed")
        assert is_free == (row.started is None) and not (is_free and row.id in ran), row
        assert (row.repeated_by == "") == (is_free and row.key is not None), row
        if row.repeated_by:
            assert row.code == UNKNOWN and rows[row.repeated_by].effect == "read_only"


def check_deliveries(file: LedgerFile, said: list[list[Any]]) -> None:
    rows = {row.id: row for row in file.deliveries(most=1000)}
    assert {words[1] for words in said if words[0] == "queued"} <= set(rows)
    assert not [row for row in rows.values() if row.state == "running"]
    begun = [(words[1], words[2]) for words in said if words[0] == "attempt"]
    assert len(set(begun)) == len(begun)  # no attempt twice
    for name, row in rows.items():
        numbers = [number for other, number in begun if other == name]
        assert numbers == sorted(numbers) and max(numbers, default=0) <= row.attempt
        # Every attempt, also one that nobody heard of before the kill, is a call with an outcome.
        calls = [each for each in file.invocations(most=1000) if each.delivery == name]
        assert sorted(each.attempt or 0 for each in calls) == list(range(1, row.attempt + 1))
        last = [words[3] for words in said if words[0] == "settled" and words[1] == name]
        if row.state == "acked":
            assert "acked" in last or [words for words in said if words[0] == "settling" and words[1] == name]
        if last and last[-1] == "acked":
            assert row.state == "acked"


def check_shares(file: LedgerFile) -> None:
    """What is counted is what is there."""
    counted = file._connection.execute("SELECT * FROM shares").fetchall()
    sums: list[Any] = []
    for statement in MIGRATIONS[1]:
        if statement.startswith("INSERT INTO shares "):  # as for a file of the version before
            sums += file._connection.execute(statement.removeprefix("INSERT INTO shares ")).fetchall()
    assert sorted(counted) == sorted(sums)


def drain(file: LedgerFile) -> None:
    """Every delivery ends in ack or dead letter after at most as many attempts as a round has."""
    names = iter(range(100_000))
    while (due := file.do(LedgerFile.next_due)) is not None:
        file.clock = itertools.repeat(due).__next__
        for attempt in file.do(LedgerFile.claim, 10, lambda: f"drain-{next(names)}"):
            file.do(LedgerFile.settle, attempt, "retry", EndOfCall("crashed"))
    for row in file.deliveries(most=1000):
        assert row.state in ("acked", "dead")
        assert row.state == "acked" or row.attempt - row.round <= Schedule().attempts


def test_the_writer_without_a_kill_ends_every_call(writer: Writer, tmp_path: Path) -> None:
    """The control: with no kill, outcomes are what the acts say, and none is unknown."""
    calls = [("accept", 0), ("accept", 1), ("ask", 0), ("ask", 0), ("end", 0), ("end", 0)]
    acts = [*calls, ("enqueue", 0), ("claim", 0), ("settle", 0)]
    said = writer.run(path=str(tmp_path / "ledger.db"), run=0, acts=acts, crash_at=0, now=1e9)
    assert said[-1] == ["finished"]
    assert ["settled", "delivery-0", 1, "acked"] in said
    file = open_file(str(tmp_path / "ledger.db"), clock=lambda: 1e9)
    codes = Counter(row.code for row in file.invocations())
    file.close()
    assert codes == {"ok": 3}


def test_a_disk_without_room_is_told_and_loses_no_outcome(writer: Writer, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    acts = [("accept", 0), ("ask", 0), ("end", 0), ("enqueue", 0), ("claim", 0), ("settle", 0)] * 40
    said = writer.run(path=str(path), run=0, acts=acts, crash_at=0, now=1e9, file_size=400_000)
    told = {words[1] for words in said if words[0] == "unusable"}
    assert told == {f"the ledger {path} cannot be read or written: disk I/O error"}
    assert len([words for words in said if words[0] == "ended"]) > 3  # there was room at first
    file = open_file(str(path), clock=lambda: 1e9)
    check_calls(file, said)
    check_deliveries(file, said)
    file.close()
