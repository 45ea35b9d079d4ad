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

from runner.ledger.file import (
    MOST_LIST_BYTES,
    LedgerBounds,
    LedgerFile,
    LedgerUnusable,
    Recovered,
    is_long,
    open_file,
)
from runner.ledger.ledger import Ledger, open_ledger
from runner.ledger.rows import (
    MOST_RECORD,
    MOST_TEXT,
    NOT_STARTED,
    UNKNOWN,
    DeliveriesFull,
    Delivery,
    DeliveryConflict,
    DeliveryTooLarge,
    Effect,
    EndOfCall,
    InvocationRow,
    KeyReused,
    KeysFull,
    digest,
    has_place,
    hook_id,
    record_of,
    row_of,
)
from runner.ledger.schema import APPLICATION_ID, MIGRATIONS
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest
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


def call(name: str, key: str | None = None, effect: Effect = "unknown", given: Any = None) -> InvocationRow:
    request = CallRequest("demo", "echo", given, "tool", caller="uid:1000", key=key)
    return row_of(name, request, digest(given), effect)


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
    file.do(LedgerFile.end, "one", EndOfCall("ok", digest(5), "{}", "5", started=1e9))
    again = file.do(LedgerFile.accept, call("three", "k"))
    assert (again.fresh, again.row.id, again.row.answer) == (False, "one", "5")
    with pytest.raises(KeyReused):
        file.do(LedgerFile.accept, call("four", "k", given="other"))
    other = call("five", "k")._replace(caller="uid:1001")
    assert file.do(LedgerFile.accept, other).fresh  # keys belong to their callers


def test_a_call_about_which_nobody_was_asked_leaves_its_key_and_its_room(path: str) -> None:
    file = open_file(path)

    def bytes_of_keys() -> Any:
        query = "SELECT IFNULL(SUM(bytes), 0) FROM shares WHERE room = 'keys'"
        return file._connection.execute(query).fetchone()[0]

    for number, code in enumerate(("launch_failed", "cancelled", "policy_denied", "timeout", "ok")):
        name = f"c{number}"
        assert file.do(LedgerFile.accept, call(name, "k")).fresh, code
        assert bytes_of_keys() > 0
        asked = 1e9 if code == "ok" else None
        file.do(LedgerFile.end, name, EndOfCall(code, record="{}", answer="5", started=asked))
        row = file.invocation(name)
        assert row is not None and (row.key, row.answer) == ("k", "5" if asked else None)
        assert (row.repeated_by, bytes_of_keys() > 0) == ((None, True) if asked else ("", False))
    # The control: the last one was asked, so that it has the key. Who has a free key may change its mind.
    assert not file.do(LedgerFile.accept, call("again", "k")).fresh
    file.do(LedgerFile.accept, call("before", "l"))
    file.do(LedgerFile.end, "before", EndOfCall("launch_failed"))
    assert file.do(LedgerFile.accept, call("after", "l", given="other")).fresh
    file.close()


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
        before.do(LedgerFile.ask, effect, 1e9)
    before.do(LedgerFile.accept, call("unasked", "free"))
    before.close()  # as a killed daemon leaves it: test_crash.py kills one
    after = open_file(path)
    try:
        assert after.recovered == Recovered(not_started=1, unknown=4)
        unasked = after.invocation("unasked")
        assert unasked is not None and (unasked.code, unasked.started) == (NOT_STARTED, None)
        # Two repeats at once run once.
        repeats = [lambda file, name=name: file.accept(call(name, "free")) for name in ("first", "second")]
        assert [(each.fresh, each.row.id) for each in after.write(repeats)] == [
            (True, "first"),
            (False, "first"),
        ]
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
    assert file.do(LedgerFile.settle, attempt, "acked", EndOfCall("ok", started=1e9)) == "acked"
    assert (
        file.do(LedgerFile.settle, attempt, "dead", EndOfCall("ok", started=1e9)) == "acked"
    )  # settled before
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
        if number % 2:
            file.do(LedgerFile.ask, attempt.invocation, clock.now)
        file.close()
    file = open_file(path, clock=clock)
    try:
        assert [row.reason for row in file.deliveries("dead")] == ["the daemon ended before the call did"]
        assert [row.id for row in file.recovered.dead] == ["d1"]
        codes = {row.attempt: row.code for row in file.invocations()}
        assert codes == {1: UNKNOWN, 2: NOT_STARTED, 3: UNKNOWN, 4: NOT_STARTED, 5: UNKNOWN}
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
    file.do(LedgerFile.end, "ended", EndOfCall("ok", started=1e9))
    (attempt, *_) = file.do(LedgerFile.claim, 1, names())
    assert attempt.delivery.id == "ended"
    file.do(LedgerFile.settle, attempt, "acked", EndOfCall("ok", started=1e9))
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
        file.do(LedgerFile.end, name, EndOfCall("ok", answer=answer, started=1e9))

    add("early", "org:beta", "kept")
    file.do(LedgerFile.note, "control", "org:beta")
    for number in range(50):
        add(f"large{number}", "org:alpha", "x" * 60_000)
    first = file.invocation("early")
    assert first is not None and first.answer == "kept" and len(file.audit("control")) == 1
    # The control: something had to go. It is the answers, and not the keys.
    rows = [file.invocation(f"large{number}") for number in range(50)]
    assert [row is not None and row.answer is not None for row in (rows[0], rows[49])] == [False, True]
    file.close()


@pytest.mark.parametrize(
    ("noisy", "hours", "twice"), [("other", 24, False), ("bank", 24, False), ("bank", 0, True)]
)
def test_what_plugins_write_does_not_make_the_ledger_forget_a_key(
    path: str, clock: Clock, noisy: str, hours: float, twice: bool
) -> None:
    """With no time for keys, which is the control, the call is made twice."""
    file = open_file(path, clock=clock, bounds=LedgerBounds(size=1 << 20, key_hours=hours))

    def make(name: str, key: str, plugin: str, record: str) -> bool:
        clock.now += 1
        fresh = file.do(LedgerFile.accept, call(name, key)._replace(plugin=plugin)).fresh
        if fresh:
            file.do(LedgerFile.end, name, EndOfCall("ok", answer="x" * 40_000, record=record, started=1e9))
        return fresh

    assert make("pay", "order-1", "bank", '"paid"')
    for number in range(60):
        assert make(f"n{number}", f"k{number}", noisy, json.dumps("x" * 60_000))
    clock.now += 23 * 3600
    file.do(LedgerFile.prune)
    assert make("pay again", "order-1", "bank", "{}") == twice
    assert os.stat(path).st_size <= 1 << 20
    file.close()


def test_a_caller_and_a_plugin_that_fill_the_keys_are_refused_and_others_are_not(
    path: str, clock: Clock
) -> None:
    file = open_file(path, clock=clock, bounds=LedgerBounds(size=1 << 20))
    numbers = iter(range(10_000))

    def fill(caller: str, plugin: str) -> int:
        """How many calls with keys were taken."""
        for made in range(2000):
            number = next(numbers)
            given = call(f"c{number}", f"k{number}")._replace(caller=caller, plugin=plugin)
            try:
                file.do(LedgerFile.accept, given)
                file.do(LedgerFile.end, given.id, EndOfCall("ok", answer="5" * 9000, started=1e9))
            except KeysFull:
                return made
        raise AssertionError("no end")

    # Each leaves a quarter of what it could have to the others: another plugin, and then another caller.
    taken = [fill(*each) for each in (("token", "a"), ("token", "b"), ("cert:CN=x", "a"), ("org:o", "c"))]
    assert all(each > 5 for each in taken) and taken[0] > taken[1] > 0 and taken[0] > taken[2] > taken[3]
    assert fill("token", "a") == 0 == fill("token", "b")
    # Keys that are known get their answers, and calls without a key are taken.
    known = call("again", "k0")._replace(caller="token", plugin="a")
    assert not file.do(LedgerFile.accept, known).fresh
    assert file.do(LedgerFile.accept, call("plain")).fresh
    file.do(LedgerFile.end, "plain", EndOfCall("ok", started=1e9))
    assert not file.do(LedgerFile.forget_keys)
    # After their time keys make room for new ones.
    clock.now += 24 * 3600 + 1
    assert file.do(LedgerFile.forget_keys) and fill("token", "a") > 0
    file.close()
    assert os.stat(path).st_size <= 1 << 20


@pytest.mark.trio
async def test_a_caller_far_above_its_share_gets_room_as_soon_as_its_keys_may_be_forgotten(
    path: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share becomes smaller when others come: then a few keys make no room."""
    monkeypatch.setattr("runner.ledger.file._PRUNED_AT_ONCE", 5)
    async with open_ledger(path, clock=clock, bounds=LedgerBounds(size=1 << 20)) as ledger:
        numbers = iter(range(10_000))

        async def accept(caller: str) -> None:
            number = next(numbers)
            await ledger.accept(call(f"c{number}", f"k{number}")._replace(caller=caller))
            await ledger.end(f"c{number}", EndOfCall("ok", started=1e9))

        async def fill(caller: str) -> None:
            for _ in range(2000):
                await accept(caller)

        for caller in ("org:early", "org:late"):
            with pytest.raises(KeysFull):
                await fill(caller)
        clock.now += 23 * 3600
        with pytest.raises(KeysFull):
            await accept("org:early")
        clock.now += 3601
        await accept("org:early")


def test_a_room_without_shares_is_the_first_callers(path: str, clock: Clock) -> None:
    """The control of the shares."""
    file = open_file(path, clock=clock, bounds=LedgerBounds(size=1 << 20, share=1.0))

    def accept(name: str, caller: str) -> None:
        file.do(LedgerFile.accept, call(name, name)._replace(caller=caller))
        file.do(LedgerFile.end, name, EndOfCall("ok", started=1e9))

    def fill() -> None:
        for number in range(2000):
            accept(str(number), "token")

    with pytest.raises(KeysFull):
        fill()
    with pytest.raises(KeysFull):
        accept("first", "org:o")
    file.close()


def test_a_record_is_bounded_whatever_a_plugin_writes() -> None:
    for text in ("x" * 12_000_000, "\U0001f600" * 1_000_000, "\0" * 100_000):
        record = record_of(Outcome("plugin_error", "call", text, hint=text), None)
        assert len(record) <= MOST_RECORD and json.loads(record)["outcome"]["message"].startswith(text[:1000])
    cut_text = json.loads(record_of(Outcome("plugin_error", "call", "x" * 20_000), None))["outcome"][
        "message"
    ]
    assert cut_text.endswith("… (cut here: it has 20000 characters)")
    whole = json.loads(record_of(Outcome("plugin_error", "call", "x" * MOST_TEXT), {"a": 1}))
    assert whole["outcome"]["message"] == "x" * MOST_TEXT and whole["invocation"] == {"a": 1}
    large = json.loads(record_of(Outcome("ok", "call", ""), {"late": "x" * 100_000}))
    assert large["invocation"] is None and "the rest of a record" in large["left_out"]


def test_lists_end_at_their_bytes_and_go_on_after_a_row(path: str, clock: Clock) -> None:
    file = open_file(path, clock=clock)
    for number in range(90):
        clock.now += number % 2  # two calls at the same time
        file.do(LedgerFile.accept, call(f"n{number}", f"k{number}"))
        file.do(
            LedgerFile.end,
            f"n{number}",
            EndOfCall("ok", record="5" * 60_000, answer="5" * 200_000, started=1e9),
        )
        file.do(LedgerFile.enqueue, Delivery(f"d{number}", "demo", "h", json.dumps("x" * 60_000)))
    calls: list[str] = []
    deliveries: list[str] = []
    while page := file.invocations(most=1000, after=calls[-1] if calls else None):
        calls += [row.id for row in page]
        assert sum(len(row.record or "") for row in page) < MOST_LIST_BYTES + 70_000
        assert {row.answer for row in page} == {None}
    while found := file.deliveries(most=1000, after=deliveries[-1] if deliveries else None):
        deliveries += [row.id for row in found]
        assert sum(len(row.event) for row in found) < MOST_LIST_BYTES + 70_000
    assert sorted(calls) == sorted(f"n{number}" for number in range(90)) == sorted(set(calls))
    assert sorted(deliveries) == sorted(f"d{number}" for number in range(90))
    assert calls[0] in ("n88", "n89") and deliveries[0] in ("d0", "d1")
    assert not is_long(file.invocations(most=5)) and is_long(file.invocations(most=1000))
    file.close()


def test_an_event_for_several_hooks_is_stored_for_all_of_them_or_none(path: str) -> None:
    file = open_file(path, bounds=LedgerBounds(size=1_600_000))
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
    large = Delivery("e3", "", "", json.dumps("x" * 17_000))
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
    file = open_file(path, clock=clock, bounds=LedgerBounds(size=1_600_000))

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
    file.close()


@pytest.mark.parametrize("share", [0.75, 1.0])
def test_a_caller_that_fills_what_waits_leaves_room_for_others(path: str, share: float) -> None:
    """The daemon's token posts for a plugin that is stopped. Without shares (the control) that stops the
    events of all orgs."""
    file = open_file(path, bounds=LedgerBounds(size=3_200_000, share=share))
    numbers = iter(range(10_000))

    def post(poster: str, plugin: str, size: int = 4000) -> None:
        event = json.dumps("x" * size)
        file.do(LedgerFile.enqueue, Delivery(f"d{next(numbers)}", plugin, "h", event, "{}", poster))

    def fill(poster: str, plugin: str, size: int) -> None:
        for number in range(500):
            post(poster, plugin.format(number), size)

    for event_size in (4000, 1):  # small ones take the rest
        with pytest.raises(DeliveriesFull, match="deliveries of token to the plugin stopped would take"):
            fill("token", "stopped", event_size)
    # What is removed makes room.
    row = file.do(LedgerFile.remove, "d0", "uid:0")
    assert (row.plugin, file.delivery("d0")) == ("stopped", None)
    (noted,) = file.audit("removal")
    assert (noted.caller, noted.plugin, json.loads(noted.detail)["delivery"]) == ("uid:0", "stopped", "d0")
    post("token", "stopped")
    others = [("token", "other"), ("org:alpha", "binding:a"), ("uid:0", "stopped")]
    if share == 1.0:
        for poster, plugin in others:
            with pytest.raises(DeliveriesFull):
                post(poster, plugin)
    else:
        for poster, plugin in others:
            post(poster, plugin)
        # Many bindings of one org are one caller.
        with pytest.raises(DeliveriesFull, match="org:alpha"):
            fill("org:alpha", "binding:{}", 4000)
        post("org:beta", "binding:b")
    file.close()


def test_hooks_with_dead_letters_and_nothing_of_orgs(
    file: LedgerFile, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = {
        "a": ("demo", "uid:0"),
        "b": ("demo", "uid:0"),
        "c": ("other", "token"),
        "d": ("binding:x", "org:alpha"),
        "e": ("demo", "org:alpha"),
        "waits": ("demo", "uid:0"),
    }
    name = names()
    for number, (each, (plugin, poster)) in enumerate(posted.items()):
        clock.now += 1
        file.do(LedgerFile.enqueue, Delivery(each, plugin, f"hook {plugin}", EVENT, poster=poster))
        if each != "waits":
            (attempt,) = file.do(LedgerFile.claim, 1, name)
            reason = f"{number} of {poster} " + "x" * 5000
            file.do(LedgerFile.settle, attempt, "dead", EndOfCall("plugin_error"), reason)
    found = [(row.plugin, row.hook, row.letters, row.at - 1e9, row.reason[:10]) for row in file.dead_hooks()]
    assert found == [
        ("", "", 2, 5.0, ""),  # of orgs
        ("other", "hook other", 1, 3.0, "2 of token"),
        ("demo", "hook demo", 2, 2.0, "1 of uid:0"),
    ]
    assert max(len(row.reason) for row in file.dead_hooks()) == 2000
    monkeypatch.setattr("runner.ledger.file.MOST_DEAD", 3)
    assert [(row.plugin, row.letters) for row in file.dead_hooks()] == [("", 2), ("other", 1)]


def test_a_delivery_that_was_removed_may_come_again(file: LedgerFile) -> None:
    delivery = Delivery("d1", "demo", "hook", EVENT)
    file.do(LedgerFile.enqueue, delivery)
    name = names()
    (attempt,) = file.do(LedgerFile.claim, 1, name)
    for wrong in ("d1", "none"):
        with pytest.raises(DeliveryConflict):
            file.do(LedgerFile.remove, wrong, "uid:0")
    file.do(LedgerFile.settle, attempt, "dead", EndOfCall("plugin_error"), "x" * 100_000)
    (dead,) = file.deliveries("dead")
    assert dead.reason is not None and len(dead.reason) < MOST_TEXT + 100
    with pytest.raises(DeliveryConflict, match="is dead, and not queued"):
        file.do(LedgerFile.remove, "d1", "uid:0", "queued")
    file.do(LedgerFile.remove, "d1", "uid:0", "dead")
    # Its attempts are still in the ledger, so that they go on counting.
    file.do(LedgerFile.enqueue, delivery)
    (attempt,) = file.do(LedgerFile.claim, 1, name)
    assert attempt.number == 2


def test_deliveries_that_wait_leave_room_for_calls(path: str) -> None:
    file = open_file(path, bounds=LedgerBounds(size=1_600_000))
    file.do(LedgerFile.accept, call("early"))
    file.do(LedgerFile.end, "early", EndOfCall("ok", started=1e9))

    def enqueue(name: str) -> None:
        file.do(LedgerFile.enqueue, Delivery(name, "demo", "hook", json.dumps("x" * 9_000)))

    for number in range(4):  # of 13,400 bytes; one caller's for one plugin have 56,250 of 100,000
        enqueue(str(number))
    with pytest.raises(DeliveriesFull):
        enqueue("one more")
    enqueue("3")  # a known one takes no room
    file.do(LedgerFile.accept, call("late"))
    assert {row.id for row in file.invocations()} == {"early", "late"}
    file.close()
    # The next daemon counts what it finds. What has ended takes no room of those that wait.
    file = open_file(path, bounds=LedgerBounds(size=1_600_000))
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
    assert connection.execute("PRAGMA user_version").fetchone() == (len(newer),)
    assert connection.execute("SELECT id, code FROM invocations").fetchall() == [("one", NOT_STARTED)]
    connection.close()
    broken = (*newer, ("CREATE TABLE another (x)", "CREATE TABLE more (x)"))
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        open_file(path, migrations=broken)
    open_file(path, migrations=newer).close()  # nothing of the step that failed was kept
    connection = sqlite3.connect(path)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    connection.close()
    assert "more" in tables and "another" not in tables


def test_of_an_older_file_keys_of_calls_that_never_ran_are_free(path: str, clock: Clock) -> None:
    """The version before wrote `started` for every call that had ended, and for no other one."""
    open_file(path, clock=clock, migrations=MIGRATIONS[:2]).close()
    connection = sqlite3.connect(path)
    rows = {
        "launch_failed": ("launch_failed", "{}", True),
        "perhaps stored": ("launch_failed", '{"outcome": {"cause": "no_fleet"}}', False),
        "quarantined": ("quarantined", None, True),
        "stopped": ("cancelled", '{"outcome": {"cause": "stopped"}}', True),
        "draining": ("cancelled", '{"outcome": {"cause": "draining"}}', False),
        "damaged": ("cancelled", "{", False),
        "crashed": ("crashed", "{}", False),
        "ok": ("ok", "{}", False),
        "in flight": (None, None, False),
    }
    for name, (code, record, _) in rows.items():
        ended = None if code is None else clock.now
        row = InvocationRow(
            *(name, "demo", "echo", "tool", "uid:1000", name, "unknown", None, None, clock.now, ended),
            *(ended, code, digest(None).digest, 4, None, None, record, '"kept"'),
        )
        connection.execute(f"INSERT INTO invocations VALUES ({', '.join('?' * len(row))})", row)
    connection.commit()
    connection.close()
    file = open_file(path, clock=clock)
    assert file.recovered == Recovered(unknown=1)  # nobody knows whether it was asked
    found = {name: file.do(LedgerFile.accept, call(f"again {name}", name)).fresh for name in rows}
    assert found == {name: is_free for name, (_, _, is_free) in rows.items()}
    for name, (code, _, is_free) in rows.items():
        row_now = file.invocation(name)
        assert row_now is not None and row_now.code == (code or UNKNOWN)
        assert (row_now.started is None) == is_free
    file.close()


def test_a_file_of_the_first_version_is_counted_and_its_records_are_bounded(path: str, clock: Clock) -> None:
    Path(path).parent.mkdir(mode=0o700)
    Path(path).touch(mode=0o600)
    connection = sqlite3.connect(path)
    for statement in MIGRATIONS[0]:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 1")
    for name, key, record in (("one", "k", "5" * 12_000_000), ("two", None, "7"), ("three", "l", None)):
        row = InvocationRow(
            *(name, "demo", "echo", "tool", "uid:1000", key, "unknown", None, None, clock.now, None),
            *(clock.now, "plugin_error", digest(None).digest, 4, None, None, record, '"kept"'),
        )
        connection.execute(f"INSERT INTO invocations VALUES ({', '.join('?' * len(row))})", row)
    for name, plugin in (("d1", "demo"), ("d2", "binding:b")):
        columns = (name, plugin, "h", EVENT, '{"org_id":"alpha"}', "queued", 0, 0, 1e9, 1e9, None, None, None)
        connection.execute(f"INSERT INTO deliveries VALUES ({', '.join('?' * 13)})", columns)
    connection.commit()
    connection.close()
    file = open_file(path, clock=clock)
    assert not file.do(LedgerFile.accept, call("again", "k")).fresh
    assert [(row.id, row.record) for row in file.invocations()] == [
        ("two", "7"),
        ("three", None),
        ("one", None),
    ]
    assert [(row.id, row.poster) for row in file.deliveries()] == [("d1", ""), ("d2", "org:alpha")]

    def shares() -> list[Any]:
        query = "SELECT room, owner, plugin, bytes FROM shares WHERE room != 'calls'"
        return file._connection.execute(query).fetchall()

    before = shares()
    assert [each[:3] for each in before] == [
        ("keys", "uid:1000", "demo"),
        ("waiting", "", "demo"),
        ("waiting", "org:alpha", "binding:b"),
    ]
    # What comes and goes is counted as what was there.
    file.do(LedgerFile.accept, call("new", "m"))
    file.do(LedgerFile.enqueue, Delivery("d3", "demo", "h", EVENT, '{"org_id":"alpha"}'))
    assert {(*each[:3], each[3]) for each in shares()} == {
        (*before[0][:3], before[0][3] * 3 // 2),
        (*before[1][:3], before[1][3] * 2),
        before[2],
    }
    file.do(LedgerFile.end, "new", EndOfCall("ok", started=1e9))
    for name in ("d1", "d2", "d3"):
        file.do(LedgerFile.remove, name, "uid:0")
    clock.now += 40 * 86400
    file.do(LedgerFile.prune)
    assert file.invocations() == []
    assert file._connection.execute("SELECT * FROM shares").fetchall() == []
    file.close()


# --- on trio ------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_an_outcome_that_cannot_be_written_is_written_later_and_once(path: str) -> None:
    async with open_ledger(path, busy_seconds=0.0) as ledger:
        await ledger.accept(call("one"))
        await ledger.enqueue(Delivery("d", "demo", "hook", EVENT))
        (attempt,) = await ledger.claim(1, lambda: "two")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # another program holds the lock
        await ledger.end("one", EndOfCall("ok", started=1e9))  # does not fail: the caller gets its answer
        await ledger.settle(attempt, "acked", EndOfCall("ok", started=1e9))
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
        await ledger.end(str(number), EndOfCall("ok", started=1e9))

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
