"""The ledger: what it writes, what it refuses, and what happens if its file cannot be written."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.ledger.file import LedgerBounds, LedgerFile, LedgerUnusable, open_file
from runner.ledger.ledger import Ledger, open_ledger
from runner.ledger.rows import (
    UNKNOWN,
    Accepted,
    DeliveriesFull,
    Delivery,
    DeliveryConflict,
    DeliveryTooLarge,
    Effect,
    EndOfCall,
    KeyReused,
    digest,
    has_place,
    hook_id,
)
from runner.ledger.schema import MIGRATIONS
from sandbox.identity.accounts import is_private_group
from tests.tables import check_rows

EVENT = '{"type":"run.completed"}'


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "serve/ledger.db")


@pytest.fixture
def file(path: str, clock: Clock) -> Iterator[LedgerFile]:
    made = open_file(path, clock=clock, chance=lambda: 0.0, busy_seconds=0.0)
    yield made
    made.close()


def call(name: str, key: str | None = None, effect: Effect = "unknown", given: Any = None) -> Accepted:
    return Accepted(name, "demo", "echo", "tool", "uid:1000", digest(given), effect, key)


# --- calls --------------------------------------------------------------------------------------------------


def test_a_call_is_written_before_it_runs_and_has_one_outcome(file: LedgerFile, clock: Clock) -> None:
    accepted = file.do(LedgerFile.accept, call("one", given={"b": 1, "a": 2}))
    assert accepted.fresh and accepted.row.ended is None
    assert accepted.row.input_bytes == len('{"a":2,"b":1}')
    assert accepted.row.input_digest == digest({"a": 2, "b": 1}).digest  # whatever the order of keys
    clock.now += 1
    clock.now += 1
    ended = EndOfCall("ok", digest("answer"), '{"a":1}', '"answer"', 1e9 + 1)
    assert file.do(LedgerFile.end, "one", ended)
    assert not file.do(LedgerFile.end, "one", EndOfCall("crashed"))  # the first outcome stays
    row = file.invocation("one")
    assert row is not None
    assert (row.accepted, row.started, row.ended, row.code) == (1e9, 1e9 + 1, 1e9 + 2, "ok")
    assert row.answer is None  # kept only for those who may ask again by a key


def test_a_key_repeats_the_answer_and_not_the_call(file: LedgerFile) -> None:
    assert file.do(LedgerFile.accept, call("one", "k")).fresh
    again = file.do(LedgerFile.accept, call("two", "k"))
    assert (again.fresh, again.row.id, again.row.ended) == (False, "one", None)  # it is in flight
    file.do(LedgerFile.end, "one", EndOfCall("ok", digest(5), "{}", "5"))
    again = file.do(LedgerFile.accept, call("three", "k"))
    assert (again.fresh, again.row.id, again.row.answer) == (False, "one", "5")
    with pytest.raises(KeyReused):
        file.do(LedgerFile.accept, call("four", "k", given="other"))
    other = call("five", "k")._replace(caller="uid:1001")
    assert file.do(LedgerFile.accept, other).fresh  # keys belong to their callers


def test_a_lost_call_runs_again_only_if_its_effect_allows(path: str) -> None:
    effects: dict[Effect, bool] = {
        "read_only": True,
        "idempotent_write": True,
        "non_idempotent_write": False,
        "unknown": False,
    }
    before = open_file(path)
    for effect in effects:
        before.do(LedgerFile.accept, call(effect, f"key-{effect}", effect))
    before.close()  # as a killed daemon leaves it: test_crash.py kills one
    after = open_file(path)
    try:
        for effect, again in effects.items():
            repeated = call(f"again-{effect}", f"key-{effect}", effect)
            accepted = after.do(LedgerFile.accept, repeated)
            assert accepted.fresh == again, effect
            first = after.invocation(effect)
            assert first is not None and first.code == UNKNOWN
            assert first.repeated_by == (repeated.id if again else None)
    finally:
        after.close()


# --- deliveries ---------------------------------------------------------------------------------------------


def names() -> Any:
    numbers = iter(range(1000))
    return lambda: f"call-{next(numbers)}"


def test_a_delivery_is_retried_by_the_schedule_and_dies_after_the_last_attempt(
    file: LedgerFile, clock: Clock
) -> None:
    name = names()
    delivery = Delivery("d1", "demo", "hook", EVENT)
    assert file.do(LedgerFile.enqueue, delivery).state == "queued"
    assert file.do(LedgerFile.enqueue, delivery).state == "queued"  # twice is once
    with pytest.raises(DeliveryConflict):
        file.do(LedgerFile.enqueue, delivery._replace(hook="other"))
    waits = []
    for number in range(1, 6):
        (attempt,) = file.do(LedgerFile.claim, 10, name)
        assert (attempt.number, attempt.delivery.id) == (number, "d1")
        assert file.do(LedgerFile.claim, 10, name) == []  # never twice at once
        state = file.do(LedgerFile.settle, attempt, "retry", EndOfCall("crashed"), "no")
        due = file.do(LedgerFile.next_due)
        assert (state, due is None) == (("queued", False) if number < 5 else ("dead", True))
        if due is not None:
            waits.append(due - clock.now)
            clock.now = due - 0.01
            assert file.do(LedgerFile.claim, 10, name) == []  # not before its time
            clock.now = due
    assert waits == [10.0, 20.0, 40.0, 80.0]
    (dead,) = file.deliveries("dead")
    assert (dead.id, dead.attempt, dead.code, dead.reason, dead.event) == ("d1", 5, "crashed", "no", EVENT)
    # A person repeats it: the attempts go on counting, and a round begins.
    file.do(LedgerFile.repeat, "d1")
    (attempt,) = file.do(LedgerFile.claim, 10, name)
    assert attempt.number == 6
    assert file.do(LedgerFile.settle, attempt, "acked", EndOfCall("ok")) == "acked"
    assert file.do(LedgerFile.settle, attempt, "dead", EndOfCall("ok")) == "acked"  # settled before
    for wrong in ("d1", "d2"):
        with pytest.raises(DeliveryConflict):
            file.do(LedgerFile.repeat, wrong)
    assert [row.attempt for row in reversed(file.invocations(most=10))].count(None) == 0


def test_a_delivery_in_flight_is_due_again_after_a_crash_with_the_next_attempt(
    path: str, clock: Clock
) -> None:
    name = names()
    for number in range(1, 6):
        file = open_file(path, clock=clock, chance=lambda: 0.0)
        if number == 1:
            file.do(LedgerFile.enqueue, Delivery("d1", "demo", "hook", EVENT))
        clock.now += 1000
        (attempt,) = file.do(LedgerFile.claim, 10, name)
        assert attempt.number == number
        file.close()
    file = open_file(path, clock=clock)
    try:
        assert [row.reason for row in file.deliveries("dead")] == ["the daemon ended before the call did"]
        assert {row.code for row in file.invocations()} == {UNKNOWN}
    finally:
        file.close()


def test_plugins_that_are_busy_get_no_delivery(file: LedgerFile) -> None:
    for plugin in ("a", "b"):
        file.do(LedgerFile.enqueue, Delivery(plugin, plugin, "hook", EVENT))
    claimed = file.do(LedgerFile.claim, 10, names(), ["a"])
    assert [attempt.delivery.id for attempt in claimed] == ["b"]
    assert file.next_due(["a"]) is None and file.next_due() is not None


# --- bounds -------------------------------------------------------------------------------------------------


def test_what_has_ended_is_removed_by_age_and_what_has_not_stays(path: str, clock: Clock) -> None:
    file = open_file(path, clock=clock, bounds=LedgerBounds(days=2))
    for each in ("ended", "open"):
        file.do(LedgerFile.accept, call(each))
        file.do(LedgerFile.enqueue, Delivery(each, "demo", "hook", EVENT))
    file.do(LedgerFile.end, "ended", EndOfCall("ok"))
    (attempt, *_) = file.do(LedgerFile.claim, 1, names())
    assert attempt.delivery.id == "ended"
    file.do(LedgerFile.settle, attempt, "acked", EndOfCall("ok"))
    file.do(LedgerFile.note, "connection", "uid:1")
    clock.now += 2 * 86400 + 1
    file.do(LedgerFile.prune)
    assert [row.id for row in file.invocations()] == ["open"]
    assert [row.id for row in file.deliveries()] == ["open"]
    assert file.audit() == []
    file.close()


def test_a_full_ledger_drops_its_oldest_rows_and_stays_below_its_size(path: str, clock: Clock) -> None:
    size = 1 << 20
    file = open_file(path, clock=clock, bounds=LedgerBounds(size=size))
    file.do(LedgerFile.accept, call("open"))
    for number in range(600):  # of 4 KB each
        clock.now += 1
        file.do(LedgerFile.note, "refusal", "x" * 4000, str(number))
    newest = file.audit(most=1000)
    assert newest[0].plugin == "599" and 50 < len(newest) < 300
    assert [row.id for row in file.invocations()] == ["open"]
    file.close()
    assert os.stat(path).st_size <= size


def test_many_refusals_push_out_nothing_else(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.ledger.file._MOST_AUDITED", 10)
    file = open_file(path)
    file.do(LedgerFile.note, "grant", "configuration")
    for number in range(30):
        file.do(LedgerFile.note, "refusal", str(number))
    file.do(LedgerFile.prune)
    assert [row.caller for row in file.audit("refusal")] == [str(number) for number in range(29, 19, -1)]
    assert len(file.audit("grant")) == 1
    # An org that changes its bindings again and again pushes out its own rows.
    for caller in ("uid:0", *["org:alpha"] * 30, "org:beta"):
        file.do(LedgerFile.note, "control", caller)
    file.do(LedgerFile.prune)
    assert Counter(row.caller for row in file.audit("control")) == {
        "uid:0": 1,
        "org:alpha": 10,
        "org:beta": 1,
    }
    file.close()


def test_the_caller_with_most_bytes_loses_its_rows_first(path: str, clock: Clock) -> None:
    file = open_file(path, clock=clock, bounds=LedgerBounds(size=1 << 20))

    def add(name: str, caller: str, answer: str) -> None:
        clock.now += 1
        file.do(LedgerFile.accept, call(name)._replace(caller=caller, key=name))
        file.do(LedgerFile.end, name, EndOfCall("ok", answer=answer))

    add("early", "org:beta", "kept")
    file.do(LedgerFile.note, "control", "org:beta")
    for number in range(50):
        add(f"large{number}", "org:alpha", "x" * 60_000)
    rows = {row.id: row for row in file.invocations(most=1000)}
    assert rows["early"].answer == "kept" and len(file.audit("control")) == 1
    assert "large0" not in rows and "large49" in rows  # the control: something had to go
    file.close()


def test_an_event_for_several_hooks_is_stored_for_all_of_them_or_none(path: str) -> None:
    file = open_file(path, bounds=LedgerBounds(size=400_000))
    hooks = [("one", "h"), ("two", "h"), ("two", "other")]
    event = Delivery("e1", "", "", EVENT)
    rows = file.do(LedgerFile.enqueue_all, event, hooks)
    assert [(row.plugin, row.hook) for row in rows] == hooks and len({row.id for row in rows}) == 3
    assert all(row.id.startswith("e1~") and (row.state, row.event) == ("queued", EVENT) for row in rows)
    # Twice is once, also if other hooks want it by now, and after attempts.
    assert len(file.do(LedgerFile.claim, 1, lambda: "call_1")) == 1
    for wanted in (hooks, [("three", "h")], []):
        again = file.do(LedgerFile.enqueue_all, event, wanted)
        assert sorted(row.id for row in again) == sorted(row.id for row in rows)
    assert {row.state for row in again} == {"queued", "running"}
    with pytest.raises(DeliveryConflict):
        file.do(LedgerFile.enqueue_all, event._replace(event="{}"), hooks)
    # Other ids that begin with this one are not of this event, and a delivery with one of its ids is refused.
    file.do(LedgerFile.enqueue, Delivery("e2~x", "one", "h", EVENT))
    file.do(LedgerFile.enqueue, Delivery(hook_id("e2", "two", "h"), "one", "h", EVENT))
    with pytest.raises(DeliveryConflict):
        file.do(LedgerFile.enqueue_all, event._replace(id="e2"), hooks)
    stored = {row.id for row in file.deliveries(most=1000) if row.id.startswith("e2~")}
    assert stored == {"e2~x", hook_id("e2", "two", "h")}
    # One plugin after the other gets it, each once. Afterwards nobody knows what "all" would mean.
    for _ in range(2):
        for name, most in (("one", 1), ("two", 2)):
            named = Delivery("e4", name, "", EVENT)
            rows = file.do(LedgerFile.enqueue_all, named, [each for each in hooks if each[0] == name])
            assert [row.plugin for row in rows] == [name] * most
    with pytest.raises(DeliveryConflict, match="by their names"):
        file.do(LedgerFile.enqueue_all, event._replace(id="e4"), hooks)
    # A plugin that had it among all does not get it again by its name; one that was not there then does.
    assert len(file.do(LedgerFile.enqueue_all, event._replace(plugin="one"), [("one", "new")])) == 1
    (late,) = file.do(LedgerFile.enqueue_all, event._replace(plugin="three"), [("three", "h")])
    assert (late.plugin, late.event) == ("three", EVENT)
    assert len(file.do(LedgerFile.enqueue_all, event, hooks)) == 3
    # No room for the last: none is stored, and none counts.
    large = Delivery("e3", "", "", json.dumps("x" * 33_300))
    for _ in range(3):
        with pytest.raises(DeliveriesFull):
            file.do(LedgerFile.enqueue_all, large, hooks)
    assert len(file.do(LedgerFile.enqueue_all, large, hooks[:2])) == 2
    # There will never be room.
    with pytest.raises(DeliveryTooLarge):
        file.do(LedgerFile.enqueue_all, large._replace(id="e5"), [*hooks, ("four", "h")])
    with pytest.raises(DeliveryTooLarge):
        file.do(LedgerFile.enqueue, Delivery("e6", "one", "h", json.dumps("x" * 100_000)))
    file.close()


def test_a_plugin_with_many_deliveries_leaves_places_to_others(path: str, clock: Clock) -> None:
    file = open_file(path, clock=clock)
    for number in range(40):
        file.do(LedgerFile.enqueue, Delivery(f"a{number}", "slow", "h", EVENT))
    clock.now += 1
    for late in ("other", "third"):
        file.do(LedgerFile.enqueue, Delivery(late, late, "h", EVENT))
    name = names()
    begun = [each.delivery.plugin for each in file.do(LedgerFile.claim, 16, name, (), Counter())]
    assert Counter(begun) == {"slow": 8, "other": 1, "third": 1}
    # Places that became free are not for it either, as long as its eight run.
    assert file.do(LedgerFile.claim, 6, name, (), Counter(begun)) == []
    assert not has_place("slow", Counter(begun), 16) and has_place("other", Counter(begun), 16)
    assert has_place("late", Counter(slow=8, other=4, third=3), 16)  # the last place
    # The control: without shares the first ones get all.
    begun = [each.delivery.plugin for each in file.do(LedgerFile.claim, 16, name)]
    assert begun == ["slow"] * 16
    file.close()


def test_an_org_with_many_bindings_leaves_places_and_room_to_others(path: str, clock: Clock) -> None:
    file = open_file(path, clock=clock, bounds=LedgerBounds(size=400_000))

    def enqueue(name: str, plugin: str, org: str, event: str = EVENT) -> None:
        file.do(LedgerFile.enqueue, Delivery(name, plugin, "h", event, json.dumps({"org_id": org})))

    for number in range(20):
        enqueue(f"a{number}", f"binding:a{number}", "alpha")
    clock.now += 1
    enqueue("b", "binding:b", "beta")
    begun = file.do(LedgerFile.claim, 16, names(), (), Counter())
    orgs = Counter(json.loads(each.delivery.context)["org_id"] for each in begun)
    assert orgs == {"alpha": 8, "beta": 1}
    assert file.do(LedgerFile.next_due) == clock.now - 1  # of alpha, which waits for its own
    assert file.do(LedgerFile.next_due, (), clock.now) is None
    # The room: 100,000 bytes for all, and half of what others leave for one org.
    large = json.dumps("x" * 9_000)
    for number in range(5):
        enqueue(f"large{number}", f"binding:a{number}", "alpha", large)
    with pytest.raises(DeliveriesFull, match="its share"):
        enqueue("more", "binding:a5", "alpha", large)
    enqueue("room", "binding:b", "beta", large)
    # The control: plugins of the operator's do not share.
    for number in range(4):
        enqueue(f"own{number}", "demo", "alpha", large)
    with pytest.raises(DeliveriesFull, match="no room"):
        enqueue("more", "demo", "alpha", large)
    file.close()


def test_deliveries_that_wait_leave_room_for_calls(path: str) -> None:
    file = open_file(path, bounds=LedgerBounds(size=400_000))
    file.do(LedgerFile.accept, call("early"))
    file.do(LedgerFile.end, "early", EndOfCall("ok"))

    def enqueue(name: str) -> None:
        file.do(LedgerFile.enqueue, Delivery(name, "demo", "hook", json.dumps("x" * 9_000)))

    for number in range(11):  # 100,000 bytes are a quarter
        enqueue(str(number))
    with pytest.raises(DeliveriesFull):
        enqueue("one more")
    enqueue("10")  # a known one takes no room
    file.do(LedgerFile.accept, call("late"))
    assert {row.id for row in file.invocations()} == {"early", "late"}
    file.close()
    # The next daemon counts what it finds. What has ended takes no room of those that wait.
    file = open_file(path, bounds=LedgerBounds(size=400_000))
    with pytest.raises(DeliveriesFull):
        enqueue("one more")
    (attempt,) = file.do(LedgerFile.claim, 1, lambda: "call_1")
    file.do(LedgerFile.settle, attempt, "dead", EndOfCall("plugin_error"))
    enqueue("one more")
    with pytest.raises(DeliveriesFull):
        file.do(LedgerFile.repeat, attempt.delivery.id)
    file.close()


def test_a_ledger_that_only_holds_what_has_not_ended_is_full_and_says_so(path: str) -> None:
    file = open_file(path, bounds=LedgerBounds(size=300_000))

    def fill() -> None:
        for number in range(10_000):
            file.do(LedgerFile.accept, call(str(number) + "x" * 1000))

    with pytest.raises(LedgerUnusable, match="is full") as caught:
        fill()
    assert "make room" in caught.value.hint
    stored = file.invocations(most=1000)
    assert len(stored) > 5 and {row.ended for row in stored} == {None}
    file.close()


# --- the file itself ----------------------------------------------------------------------------------------


def _newer(path: Path) -> None:
    open_file(str(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cookies (name)")
    connection.close()
    path.chmod(0o600)


def _damaged(path: Path) -> None:
    open_file(str(path)).close()
    raw = bytearray(path.read_bytes())
    raw[4096:] = os.urandom(len(raw) - 4096)
    path.write_bytes(raw)


def _text(path: Path) -> None:
    path.write_text("this is no database, and long enough to be read as one" * 100)
    path.chmod(0o600)


def _open_mode(path: Path) -> None:
    path.touch()
    path.chmod(0o644)


def _open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def _sticky_folder(path: Path) -> None:
    path.parent.chmod(0o1777)


def _group_folder(path: Path) -> None:
    os.chown(path.parent, -1, 54399)
    path.parent.chmod(0o770)


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _folder(path: Path) -> None:
    path.mkdir()


def test_a_ledger_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o700)
    with pytest.raises(LedgerUnusable, match="would not survive the daemon"):
        open_file(":memory:")
    assert not list(tmp_path.iterdir())
    open_file("./:memory:").close()  # the control: a file may have that name
    assert Path(":memory:").stat().st_size


def test_a_file_that_cannot_be_trusted_or_read_is_refused(tmp_path: Path) -> None:
    rows = {
        _newer: "has version 99",
        _foreign: "is the database of another program",
        _damaged: "is damaged",
        _text: "is damaged",
        _open_mode: "others than its owner",
        _open_folder: "can be written by its group or by everybody",
        _sticky_folder: "everybody can write to the folder",
        **({_group_folder: "can be written by its group"} if os.geteuid() == 0 else {}),
        _link: "cannot be opened",
        _folder: "cannot be opened",
    }

    def check(spoil: Any, message: str) -> None:
        folder = tmp_path / spoil.__name__
        folder.mkdir(mode=0o700)
        spoil(folder / "ledger.db")
        with pytest.raises(LedgerUnusable, match=message) as caught:
            open_file(str(folder / "ledger.db"))
        assert caught.value.hint

    check_rows(rows, check)


def test_a_folder_of_the_users_own_group_is_used(tmp_path: Path) -> None:
    """As in a home with umask 002."""
    if not is_private_group(tmp_path.stat().st_gid):
        pytest.skip("this user has no group of its own")
    tmp_path.chmod(0o770)
    open_file(str(tmp_path / "ledger.db")).close()


def test_file_and_log_belong_to_their_user_alone(file: LedgerFile, path: str) -> None:
    file.do(LedgerFile.note, "connection", "uid:1")
    found = {each.name: each.stat().st_mode & 0o777 for each in Path(path).parent.iterdir()}
    assert set(found) == {"ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock"}
    assert set(found.values()) == {0o600} and Path(path).parent.stat().st_mode & 0o777 == 0o700


def test_a_second_writer_is_refused_while_the_first_lives(path: str) -> None:
    first = open_file(path)
    with pytest.raises(LedgerUnusable, match="another process uses the ledger"):
        open_file(path)
    first.close()
    open_file(path).close()


def test_an_older_file_gets_the_steps_that_it_lacks(path: str) -> None:
    file = open_file(path)
    file.do(LedgerFile.accept, call("one"))
    file.close()
    newer = (*MIGRATIONS, ("ALTER TABLE audit ADD COLUMN later TEXT", "CREATE TABLE more (x)"))
    open_file(path, migrations=newer).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    assert connection.execute("SELECT id, code FROM invocations").fetchall() == [("one", UNKNOWN)]
    connection.close()
    broken = (*newer, ("CREATE TABLE another (x)", "CREATE TABLE more (x)"))
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        open_file(path, migrations=broken)
    open_file(path, migrations=newer).close()  # nothing of the step that failed was kept
    connection = sqlite3.connect(path)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    connection.close()
    assert "more" in tables and "another" not in tables


# --- on trio ------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_an_outcome_that_cannot_be_written_is_written_later_and_once(path: str) -> None:
    async with open_ledger(path, busy_seconds=0.0) as ledger:
        await ledger.accept(call("one"))
        await ledger.enqueue(Delivery("d", "demo", "hook", EVENT))
        (attempt,) = await ledger.claim(1, lambda: "two")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # another program holds the lock
        await ledger.end("one", EndOfCall("ok"))  # does not fail: the caller gets its answer
        await ledger.settle(attempt, "acked", EndOfCall("ok"))
        assert ledger.owed == 2 and "is locked by another program" in ledger.fault
        with pytest.raises(LedgerUnusable, match="is locked"):
            await ledger.accept(call("three"))  # told, and not run
        assert not await ledger.flush()
        other.execute("ROLLBACK")
        other.close()
        assert await ledger.flush()
        assert (ledger.owed, ledger.fault) == (0, "")
        row = await ledger.do(LedgerFile.invocation, "one")
        assert row is not None and row.code == "ok"
        assert await ledger.do(LedgerFile.invocation, "three") is None
        delivery = await ledger.do(LedgerFile.delivery, "d")
        assert delivery is not None and delivery.state == "acked"


@pytest.mark.trio
async def test_calls_at_once_share_transactions_and_a_cancelled_caller_loses_none(path: str) -> None:
    transactions = []

    async def accept(ledger: Ledger, number: int) -> None:
        with trio.CancelScope() as scope:
            if number % 2:
                scope.cancel()
            await ledger.accept(call(str(number), key="same" if number in (7, 8) else None))
        await ledger.end(str(number), EndOfCall("ok"))

    async with open_ledger(path) as ledger:
        ledger._file._connection.set_trace_callback(
            lambda text: transactions.append(text) if text == "COMMIT" else None
        )
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(accept, ledger, number)
        rows = await ledger.do(LedgerFile.invocations, most=1000)
    # 7 and 8 had one key: one of them was the other.
    assert len(rows) == 99 and {row.code for row in rows} == {"ok"}
    assert len(transactions) < 100


@pytest.mark.trio
async def test_a_refused_order_does_not_undo_its_neighbours(path: str) -> None:
    refused = []

    async def repeat(ledger: Ledger, name: str) -> None:
        try:
            await ledger.do(LedgerFile.repeat, name)
        except DeliveryConflict:
            refused.append(name)

    async with open_ledger(path) as ledger:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(repeat, ledger, str(number))
                nursery.start_soon(ledger.note, "grant", str(number))
        assert len(refused) == 10
        assert len(await ledger.do(LedgerFile.audit)) == 10
