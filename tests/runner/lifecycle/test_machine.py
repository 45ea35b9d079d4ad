"""The lifecycle machine on a clock of the test's own: tables of events, and what each leads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.registry import all_contracts, example_folder, find_contract
from runner.lifecycle.machine import (
    STATE_NAMES,
    Called,
    CellEnded,
    CellOpened,
    CellOver,
    CheckHealth,
    CloseCell,
    Command,
    Finished,
    HealthAnswered,
    HealthMissed,
    Hold,
    LifecycleEvent,
    LifecycleState,
    OpenCell,
    RefuseCalls,
    ReloadAsked,
    ResetAsked,
    ServeCall,
    StartAsked,
    StopAsked,
    Tell,
    Withdrawn,
    Woke,
    new_state,
    step,
    wake_at,
)
from runner.manifest.load import load
from runner.plugin import Entrypoint, Plugin
from runner.supervision import Supervision, fault_of
from sandbox.spec import SandboxSpec
from tests.tables import one_case

Lifecycle = dict[str, float | str]

LAZY = Supervision(jitter=0.0)
EAGER = LAZY._replace(eager=True)


class Life:
    """A plugin's state, and every command since it was added."""

    def __init__(self, numbers: Supervision, pending: str = "") -> None:
        self.now = 100.0
        self.state: LifecycleState = new_state(numbers, self.now, pending)
        self.commands: list[Command] = []
        self.take(Woke())

    def take(self, *events: LifecycleEvent) -> tuple[Command, ...]:
        """Returns the commands of the last event."""
        commands: tuple[Command, ...] = ()
        for event in events:
            self.state, commands = step(self.state, event, self.now)
            self.commands += commands
        return commands

    def wait(self) -> float:
        """Let the time pass until the machine asks to be woken. Returns the seconds."""
        until = wake_at(self.state)
        assert self.now <= until < math.inf, (self.now, self.state)
        passed, self.now = until - self.now, until
        self.take(Woke())
        return round(passed, 6)

    def crash(self, reason: str = "exit:1") -> tuple[Command, ...]:
        return self.take(CellEnded(self.state.cells[0].number, reason))

    @property
    def name(self) -> str:
        return self.state.name

    def told(self) -> list[tuple[str, int, float]]:
        return [(each.what, each.attempt, each.seconds) for each in self.commands if isinstance(each, Tell)]


# --- where events lead -------------------------------------------------------------------------------------

# Events after which a lazy plugin has each state.
WAYS: dict[str, Sequence[LifecycleEvent]] = {
    "idle": (),
    "starting": (StartAsked(),),
    "ready": (StartAsked(), CellOpened(1)),
    "backoff": (StartAsked(), CellEnded(1, "exit:1")),
    "quarantined": (StartAsked(),),
    "pending": (ReloadAsked(LAZY, "nobody approved it"),),
    "draining": (StartAsked(), CellOpened(1), Called(), StopAsked("somebody stopped it")),
    "stopped": (StopAsked("somebody stopped it"),),
}


def life_in(name: str) -> Life:
    numbers = LAZY._replace(respawn=False) if name == "quarantined" else LAZY
    life = Life(numbers)
    life.take(*WAYS[name])
    if name == "quarantined":
        life.crash()
    assert life.name == name
    return life


REFUSED = ("quarantined", "pending", "draining", "stopped")

# For each state: the state after a call, start, stop, reset, reload, and after the time has passed that the
# machine asked for ("": it asked for none).
TABLE: Sequence[tuple[str, str, str, str, str, str, str]] = (
    ("idle", "starting", "starting", "stopped", "idle", "idle", ""),
    ("starting", "starting", "starting", "draining", "starting", "draining", ""),
    ("ready", "ready", "ready", "draining", "ready", "draining", ""),
    ("backoff", "backoff", "starting", "stopped", "idle", "idle", "idle"),
    ("quarantined", "quarantined", "quarantined", "stopped", "idle", "idle", ""),
    ("pending", "pending", "pending", "stopped", "pending", "idle", ""),
    ("draining", "draining", "draining", "draining", "draining", "draining", "draining"),
    ("stopped", "stopped", "starting", "stopped", "stopped", "stopped", ""),
)


@one_case(("name", "call", "start", "stop", "reset", "reload", "time"), TABLE, ids=[row[0] for row in TABLE])
def test_every_state_and_what_a_person_may_ask(
    name: str, call: str, start: str, stop: str, reset: str, reload: str, time: str
) -> None:
    events: tuple[tuple[LifecycleEvent, str], ...] = (
        (Called(), call),
        (StartAsked(), start),
        (StopAsked("enough"), stop),
        (ResetAsked(), reset),
        (ReloadAsked(LAZY), reload),
    )
    for event, expected in events:
        life = life_in(name)
        commands = life.take(event)
        assert life.name == expected, event
        if isinstance(event, Called):
            refused = [each for each in commands if isinstance(each, RefuseCalls)]
            assert bool(refused) == (name in REFUSED) and life.state.waiting == (
                name in ("idle", "starting", "backoff")
            )
    life = life_in(name)
    if time:
        life.wait()
        assert life.name == time
    else:
        assert wake_at(life.state) == math.inf


def test_the_table_has_every_state() -> None:
    assert tuple(row[0] for row in TABLE) == STATE_NAMES


def test_a_lazy_plugin_starts_with_its_first_call_and_serves_it() -> None:
    life = Life(LAZY)
    assert (life.name, life.commands) == ("idle", [])
    assert life.take(Called()) == (OpenCell(1),)
    assert life.take(Called()) == ()  # the cell that starts has room for it
    assert life.take(CellOpened(1)) == (ServeCall(1), ServeCall(1))
    assert (life.name, life.state.in_flight, life.state.waiting) == ("ready", 2, 0)
    assert life.take(Called()) == (ServeCall(1),)


def test_an_eager_plugin_starts_by_itself_and_after_each_failure() -> None:
    life = Life(EAGER)
    assert life.commands == [OpenCell(1)]
    life.take(CellOpened(1))
    life.crash()
    assert life.name == "backoff" and life.wait() == 1.0
    assert life.name == "starting" and life.state.restarts == 1


def test_a_lazy_plugin_waits_for_a_call_after_its_pause() -> None:
    life = Life(LAZY)
    life.take(StartAsked(), CellOpened(1))
    life.crash()
    assert life.wait() == 1.0
    assert life.name == "idle" and life.take(Called()) == (OpenCell(2),)


def test_a_call_during_the_pause_waits_for_it() -> None:
    life = life_in("backoff")
    assert life.take(Called()) == () and life.state.waiting == 1
    life.wait()
    assert life.name == "starting"
    assert life.take(CellOpened(2))[-1] == ServeCall(2)


def test_calls_that_wait_for_a_start_get_its_failure() -> None:
    life = Life(LAZY)
    life.take(Called(), Called())
    assert RefuseCalls(2, "", "handshake", 1) in life.take(CellEnded(1, "handshake"))
    assert life.state.waiting == 0 and life.name == "backoff"


def test_a_call_that_was_given_up_starts_nothing_more() -> None:
    life = life_in("backoff")
    life.take(Called(), Withdrawn())
    life.wait()
    assert life.name == "idle"


def test_pauses_grow_to_their_cap_and_chance_shortens_them() -> None:
    numbers = LAZY._replace(eager=True, backoff=1.0, factor=3.0, backoff_most=20.0, failures=0)
    life = Life(numbers)
    pauses = []
    for _ in range(6):
        life.crash()
        pauses.append(life.wait())
    assert pauses == [1.0, 3.0, 9.0, 20.0, 20.0, 20.0]
    jittered = numbers._replace(jitter=0.5)
    assert [jittered.pause(4, chance) for chance in (0.0, 0.5, 1.0)] == [20.0, 15.0, 10.0]
    assert math.isfinite(jittered._replace(factor=1e300).pause(10**9, 1.0))


def test_healthy_time_starts_again_with_the_first_pause() -> None:
    life = Life(EAGER)
    for expected in (1.0, 2.0, 4.0):
        life.take(CellOpened(life.state.last_cell))
        life.crash()
        assert life.wait() == expected
    life.take(CellOpened(life.state.last_cell))
    assert life.wait() == EAGER.healthy and life.state.attempts == 0
    life.crash()
    assert life.wait() == 1.0


def test_the_failure_that_comes_with_the_healthy_time_counts_as_the_first() -> None:
    """The timer may come later than the event."""
    life = Life(EAGER)
    life.crash()
    life.wait()
    life.take(CellOpened(2))
    life.now += EAGER.healthy
    life.crash()
    assert life.state.attempts == 1


def test_failures_within_the_window_quarantine_until_reset() -> None:
    life = Life(EAGER._replace(failures=3, within=60.0))
    for _ in range(2):
        life.crash("exit:7")
        life.wait()
    life.take(Called())
    commands = life.crash("exit:7")
    assert life.name == "quarantined" and wake_at(life.state) == math.inf
    reason = "exit:7 (it failed 3 times within 60 seconds)"
    assert life.state.reason == reason and RefuseCalls(1, "quarantined", reason) in commands
    assert life.take(Called()) == (RefuseCalls(1, "quarantined", reason),)
    assert life.take(StartAsked()) == ()
    assert life.take(ResetAsked()) == (OpenCell(4),) and life.state.failures == ()


def test_failures_outside_of_the_window_do_not_count() -> None:
    life = Life(EAGER._replace(failures=3, within=60.0))
    for _ in range(6):
        life.crash()
        life.wait()
        life.now += 30.0
        assert len(life.state.failures) <= 2
    assert life.name == "starting"


def test_an_idle_cell_is_reaped_and_a_call_opens_the_next_when_it_has_ended() -> None:
    life = Life(LAZY._replace(idle=600.0))
    life.take(Called(), CellOpened(1))
    life.now += 1000.0  # the call takes long: it is not idle
    assert wake_at(life.state) == math.inf
    life.take(Finished(1))
    assert life.wait() == 600.0
    assert life.name == "draining" and life.commands[-1] == CloseCell(1)
    assert life.take(Called()) == ()  # never two cells beyond the limit
    assert life.take(CellEnded(1, "")) == (OpenCell(2),)
    assert life.state.attempts == 0 and life.told() == []


def test_an_eager_plugin_that_was_reaped_stays_away() -> None:
    life = Life(EAGER._replace(idle=5.0))
    life.take(CellOpened(1))
    life.wait()
    life.take(CellEnded(1, ""))
    assert life.name == "idle" and wake_at(life.state) == math.inf


def test_health_misses_in_a_row_restart_it() -> None:
    life = Life(LAZY._replace(health_call="ping", health_interval=30.0, health_misses=2))
    life.take(StartAsked(), CellOpened(1))
    assert life.wait() == 30.0 and CheckHealth(1) in life.commands
    assert wake_at(life.state) == math.inf  # while it is asked
    life.take(HealthMissed(1, "no answer"))
    assert life.wait() == 30.0
    life.take(HealthAnswered(1))
    for _ in range(2):
        assert life.wait() == 30.0
        life.take(HealthMissed(1, "no answer"))
    assert life.commands[-1] == CloseCell(1) and life.name == "draining"
    life.take(CellEnded(1, ""))
    assert (life.name, life.state.reason, life.state.attempts) == ("backoff", "no answer", 1)


def test_a_plugin_that_works_is_not_asked_whether_it_lives() -> None:
    life = Life(LAZY._replace(health_call="ping"))
    life.take(Called(), CellOpened(1))
    assert wake_at(life.state) == math.inf
    life.now += 500.0
    life.take(Finished(1))
    assert life.wait() == 60.0


def test_a_stop_lets_calls_finish_and_ends_at_its_deadline() -> None:
    life = Life(LAZY)
    life.take(Called(), Called(), CellOpened(1))
    assert life.take(StopAsked("enough", 5.0)) == ()
    assert life.take(Called()) == (RefuseCalls(1, "stopped", "enough"),)
    assert life.take(Finished(1)) == ()
    assert life.wait() == 5.0 and life.commands[-1] == CloseCell(1)
    life.take(CellEnded(1, "killed"))
    assert (life.name, life.state.reason, life.state.attempts) == ("stopped", "enough", 0)


def test_a_stop_without_calls_ends_at_once_also_a_start() -> None:
    for events in ((), (CellOpened(1),)):
        life = Life(EAGER)
        life.take(*events)
        assert life.take(StopAsked("enough")) == (CloseCell(1),)
        assert life.take(CellOpened(1)) == ()  # it came up meanwhile
        life.take(CellEnded(1, ""))
        assert life.name == "stopped"


def test_a_reload_keeps_calls_that_wait_and_takes_new_numbers() -> None:
    life = Life(LAZY._replace(calls=1))
    life.take(Called(), CellOpened(1), Called())
    assert life.take(ReloadAsked(LAZY._replace(calls=2))) == ()
    assert life.take(Finished(1)) == (CloseCell(1),)
    assert life.take(CellEnded(1, "")) == (OpenCell(2),)
    assert life.take(CellOpened(2)) == (ServeCall(2),) and life.state.numbers.calls == 2


def test_a_reload_without_an_approval_ends_in_pending_and_refuses() -> None:
    life = Life(LAZY)
    life.take(StartAsked(), CellOpened(1))
    assert life.take(ReloadAsked(LAZY, "its network is not approved")) == (CloseCell(1),)
    life.take(CellEnded(1, ""))
    assert life.name == "pending"
    assert life.take(Called()) == (RefuseCalls(1, "pending", "its network is not approved"),)
    life.take(ReloadAsked(EAGER))
    assert life.name == "starting"


def test_to_stop_and_start_a_pending_plugin_opens_no_cell() -> None:
    for events in (
        (ReloadAsked(LAZY, "nobody approved it"), StopAsked("enough")),
        (StopAsked("enough"), ReloadAsked(LAZY, "nobody approved it")),
    ):
        life = Life(LAZY)
        life.take(*events)
        assert life.name == "stopped"
        assert life.take(StartAsked(), ResetAsked(), StartAsked()) == ()
        assert (life.name, life.state.reason) == ("pending", "nobody approved it")
        life.take(ReloadAsked(LAZY), StartAsked())
        assert life.name == "starting"


def test_what_was_held_before_is_held_from_the_first_moment() -> None:
    """An eager plugin that was stopped, or in quarantine, in an earlier life of its supervisor."""
    ends: dict[Hold, LifecycleEvent] = {"stopped": StartAsked(), "quarantined": ResetAsked()}
    for hold, end in ends.items():
        for pending in ("", "nobody approved it"):
            state = new_state(EAGER, 0.0, pending)
            state, commands = step(state, ReloadAsked(EAGER, pending, hold, "why"), 0.0)
            assert (state.name, state.reason, commands) == (hold, "why", ())
            state, commands = step(state, Called(), 0.0)
            assert commands == (RefuseCalls(1, hold, "why"),)
            state, commands = step(state, end, 0.0)
            if pending:
                assert (state.name, state.reason, commands) == ("pending", pending, ())
            else:
                assert (state.name, commands) == ("starting", (OpenCell(1),))


def test_sessions_grow_with_the_calls_that_wait_up_to_their_limit() -> None:
    life = Life(LAZY._replace(sessions=3, calls=1, idle=60.0))
    assert life.take(Called()) == (OpenCell(1),)
    assert life.take(Called()) == (OpenCell(2),)
    assert life.take(CellOpened(1)) == (ServeCall(1),)
    assert life.take(Called()) == (OpenCell(3),)
    assert life.take(Called()) == () and life.state.waiting == 3
    assert life.take(Finished(1)) == (ServeCall(1),)
    # One of several fails: the others go on, and no call that waits is answered by it.
    assert [type(each) for each in life.take(CellEnded(2, "exit:1"))] == [Tell, Tell]
    assert life.name == "ready" and life.state.waiting == 2
    assert life.take(CellOpened(3)) == (Tell("respawned", 3, 1), ServeCall(3))
    life.wait()  # the pause
    assert life.commands[-1] == OpenCell(4)


def test_a_plugin_that_is_over_gets_no_call_and_fails_when_its_cell_has_ended() -> None:
    life = Life(LAZY)
    life.take(StartAsked(), CellOpened(1))
    assert life.take(CellOver(1), CellOver(1)) == () and life.name == "draining"  # a call sees it too
    assert life.take(Called()) == () and life.state.waiting == 1
    life.take(CellEnded(1, "crashed: exit:1"))
    assert (life.name, life.state.reason, life.state.waiting) == ("backoff", "crashed: exit:1", 1)
    # One that leaves anyway, or was told to, has not failed.
    for asked in (StopAsked("enough"), ReloadAsked(LAZY)):
        life = Life(LAZY)
        life.take(Called(), CellOpened(1), asked, CellOver(1), CellEnded(1, "exit:1"))
        assert life.state.attempts == 0


def test_events_about_a_cell_that_has_ended_change_nothing() -> None:
    life = life_in("backoff")
    before = life.state
    stale = (
        Finished(1),
        CellOpened(1),
        CellOver(1),
        CellEnded(1, "x"),
        HealthAnswered(1),
        HealthMissed(1, "x"),
    )
    assert life.take(*stale) == () and life.state == before


# --- the numbers of the contracts --------------------------------------------------------------------------


def plugin_of(contract: str, lifecycle: Lifecycle, **more: Any) -> Plugin:
    spec = SandboxSpec()
    return Plugin(
        id="demo",
        version="1",
        contract=contract,
        name="demo",
        description="",
        manifest="/m",
        root=None,
        entrypoint=Entrypoint("x"),
        spec=spec,
        lifecycle=tuple(lifecycle.items()),
        **more,
    )


NEXO: Lifecycle = {"respawn": "yes", "max_attempts": 3.0, "backoff": 1.0, "stderr_tail_lines": 2.0}


def test_nexo_respawns_with_doubled_pauses_and_gives_up_after_its_attempts() -> None:
    life = Life(find_contract("nexo").supervision(plugin_of("nexo", dict(NEXO))))
    life.take(CellOpened(1))
    pauses = []
    while life.name != "quarantined":
        life.crash()
        if life.name == "backoff":
            pauses.append(life.wait())
            life.take(CellOpened(life.state.last_cell))
    assert pauses == [1.0, 2.0, 4.0]
    assert life.told() == [
        *(("crashed", 1, 0.0), ("respawning", 1, 1.0), ("respawned", 1, 0.0)),
        *(("crashed", 2, 0.0), ("respawning", 2, 2.0), ("respawned", 2, 0.0)),
        *(("crashed", 3, 0.0), ("respawning", 3, 4.0), ("respawned", 3, 0.0)),
        *(("crashed", 4, 0.0), ("gave_up", 4, 0.0)),
    ]


# lifecycle of the manifest, seconds that the child lived, failures in a row after its crash
@one_case(
    ("backoff", "attempts", "lived", "failures"),
    [
        (1.0, 3.0, 5.9, 2),
        (1.0, 3.0, 6.0, 1),
        (0.1, 2.0, 0.39, 2),  # the reference host polls every half second, and never gives up on this one
        (0.1, 2.0, 0.4, 1),
        (300.0, 3.0, 599.0, 2),
        (300.0, 3.0, 600.0, 1),
    ],
)
def test_nexo_forgets_failures_of_a_child_that_lived(
    backoff: float, attempts: float, lived: float, failures: int
) -> None:
    given = NEXO | {"backoff": backoff, "max_attempts": attempts}
    life = Life(find_contract("nexo").supervision(plugin_of("nexo", given)))
    life.take(CellOpened(1))
    life.crash()
    life.wait()
    life.take(CellOpened(2))
    life.now += lived
    life.crash()
    assert life.state.attempts == failures


def test_nexo_a_failed_handshake_of_a_respawn_counts_as_an_attempt() -> None:
    life = Life(find_contract("nexo").supervision(plugin_of("nexo", dict(NEXO))))
    life.take(CellOpened(1))
    for _ in range(3):
        life.crash()
        life.wait()
    life.crash("handshake_failed")
    assert life.name == "quarantined" and "3 times in a row" in life.state.reason


def test_nexo_the_first_failure_is_not_retried_and_without_respawn_none_is() -> None:
    never_up = Life(find_contract("nexo").supervision(plugin_of("nexo", dict(NEXO))))
    never_up.crash("launch_failed")
    assert never_up.name == "quarantined" and "never came up" in never_up.state.reason
    once = Life(find_contract("nexo").supervision(plugin_of("nexo", {"respawn": "no"})))
    once.take(CellOpened(1))
    once.crash()
    assert once.name == "quarantined" and [what for what, _, _ in once.told()] == ["crashed", "gave_up"]


def test_nexo_a_stop_interrupts_the_pause_and_ends_a_child_that_came_up_meanwhile() -> None:
    life = Life(find_contract("nexo").supervision(plugin_of("nexo", dict(NEXO))))
    life.take(CellOpened(1))
    life.crash()
    life.take(StopAsked("enough"))
    assert life.name == "stopped" and wake_at(life.state) == math.inf


FACTS = {
    "exit_code": -1,
    "stderr": "one\n\ntwo\nthree\n",
    "attempt": 2,
    "seconds": 2.0,
    "total_uptime": 1.5,
    "uptime": 0.25,
    "time": 7.0,
    "pid": 42,
}
TAIL = ["two", "three"]


@one_case(
    ("what", "topic", "payload"),
    [
        ("crashed", "crashed", {"exit_code": -1, "stderr_tail": TAIL}),
        ("respawning", "respawning", {"attempt": 2, "backoff_ms": 2000}),
        ("respawned", "respawned", {"attempt": 2, "total_uptime_ms": 1500}),
        ("gave_up", "gave_up", {"attempts": 1, "last_exit_code": -1, "stderr_tail": TAIL}),
        (
            "restarted",
            "restarted_manually",
            {"previous_uptime_ms": 250, "restarted_at_ms": 7000, "new_pid": 42},
        ),
    ],
)
def test_nexo_tells_its_plugins(what: str, topic: str, payload: dict[str, Any]) -> None:
    notice = find_contract("nexo").lifecycle_notice(plugin_of("nexo", dict(NEXO)), what, FACTS)
    assert notice is not None
    method, params = notice
    assert method == "broker.event" and params["topic"] == f"plugin.lifecycle.demo.{topic}"
    assert params["event"] == {"source": "plugin.supervisor", "payload": {"plugin_id": "demo", **payload}}


def test_nexo_has_no_tail_of_stderr_where_the_manifest_asks_for_none() -> None:
    plugin = plugin_of("nexo", NEXO | {"stderr_tail_lines": 0.0})
    notice = find_contract("nexo").lifecycle_notice(plugin, "crashed", FACTS)
    assert notice is not None and notice[1]["event"]["payload"]["stderr_tail"] == []


AINB: Lifecycle = {
    "spawn": "lazy",
    "idle_reap": 600.0,
    "backoff_first": 1.0,
    "backoff_second": 4.0,
    "backoff_most": 16.0,
    "quarantine_failures": 3.0,
    "quarantine_within": 60.0,
}


def test_ainb_pauses_one_four_and_sixteen_seconds() -> None:
    numbers = find_contract("ainb").supervision(plugin_of("ainb", dict(AINB)))
    assert [numbers.pause(each, 0.0) for each in (1, 2, 3, 4)] == [1.0, 4.0, 16.0, 16.0]


def test_ainb_is_quarantined_by_three_failures_in_a_minute_and_reload_ends_that() -> None:
    numbers = find_contract("ainb").supervision(plugin_of("ainb", dict(AINB)))
    life = Life(numbers)
    for _ in range(2):
        life.take(Called(), CellOpened(life.state.last_cell))
        life.crash()
        life.wait()
        assert life.name == "idle"  # a lazy one waits for its next use
    life.take(Called(), CellOpened(life.state.last_cell))
    life.crash()
    assert life.name == "quarantined"
    life.take(ReloadAsked(numbers))
    assert life.name == "idle" and life.state.failures == () and life.state.attempts == 0


def test_ainb_an_eager_plugin_comes_back_by_itself() -> None:
    life = Life(find_contract("ainb").supervision(plugin_of("ainb", AINB | {"spawn": "eager"})))
    life.take(CellOpened(1))
    life.crash()
    assert life.wait() <= 1.0 and life.name == "starting"


@one_case(
    ("reap", "subscribes", "latest", "idle"),
    [
        (600.0, (), (), 600.0),
        ("never", (), (), 0.0),
        (600.0, ("a",), (), 0.0),
        (600.0, ("a",), ("a",), 600.0),
        (600.0, ("a", "b"), ("a",), 0.0),
    ],
)
def test_ainb_reaps_only_plugins_that_miss_nothing(
    reap: float | str, subscribes: tuple[str, ...], latest: tuple[str, ...], idle: float
) -> None:
    details = {"subscribes": subscribes, "latest_state": latest}
    plugin = plugin_of("ainb", AINB | {"idle_reap": reap}, details=details)
    assert find_contract("ainb").supervision(plugin).idle == idle


def test_kaged_restarts_and_is_disabled_after_five_crashes_in_ten_minutes() -> None:
    numbers = find_contract("kaged").supervision(plugin_of("kaged", {"health_interval": 45.0}))
    assert (numbers.health_interval, numbers.health_misses, numbers.calls) == (45.0, 1, 1)
    life = Life(numbers._replace(jitter=0.0))
    pauses = []
    while life.name != "quarantined":
        life.take(CellOpened(life.state.last_cell))
        life.crash("timeout: there was no answer to health.check within 5s")
        if life.name == "backoff":
            pauses.append(life.wait())
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert life.state.reason.startswith("timeout: there was no answer") and "5 times" in life.state.reason


def test_kaged_forgets_after_ten_minutes_up() -> None:
    life = Life(find_contract("kaged").supervision(plugin_of("kaged", {}))._replace(jitter=0.0))
    for _ in range(3):
        life.take(CellOpened(life.state.last_cell))
        life.crash()
        life.wait()
    life.take(CellOpened(life.state.last_cell))
    life.now += 600.0
    life.crash()
    assert life.state.attempts == 1 and len(life.state.failures) == 1


@pytest.mark.parametrize("name", [contract.name for contract in all_contracts()])
def test_the_numbers_of_every_contract_make_sense(name: str) -> None:
    """Those of its example's manifest, and those of a plugin without any."""
    folder = Path(example_folder(name))
    contract = find_contract(name)
    assert fault_of(contract.supervision(plugin_of(name, {}))) == ""
    if folder.is_dir():
        found = load(str(folder), contract=name).plugin
        assert found is not None and fault_of(contract.supervision(found)) == ""


@one_case(
    ("change", "word"),
    [
        ({"sessions": 0}, "sessions"),
        ({"backoff": 0.0}, "backoff"),
        ({"backoff": 90.0}, "backoff"),
        ({"factor": 0.5}, "factor"),
        ({"jitter": 1.5}, "jitter"),
        ({"idle": -1.0}, "idle"),
        ({"idle": math.nan}, "idle"),
        ({"drain": math.inf}, "drain"),
        ({"calls": 1.5}, "calls"),
        ({"eager": 1}, "eager"),
        ({"health_call": 3}, "health_call"),
        ({"health_call": "ping", "health_interval": 0.0}, "health_interval"),
        ({"queued": True}, "queued"),
    ],
)
def test_wrong_numbers_are_named(change: dict[str, Any], word: str) -> None:
    assert fault_of(Supervision()) == ""
    assert fault_of(Supervision()._replace(**change)).startswith(word)
