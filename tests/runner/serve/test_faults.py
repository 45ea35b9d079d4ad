"""Faults around a daemon, step by step. Each has a message, and no outcome is lost or doubled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.ledger.rows import NOT_STARTED, UNKNOWN
from runner.serve.client import Client, NoDaemon
from tests.conftest import Caller, descendants, vanished
from tests.runner.serve.served import Served, put_plugins, serving, serving_by
from tests.runner.serve.shelf import put_example
from tests.runner.serve.test_serve import event
from tests.tables import check_rows, wait_for

pytestmark = pytest.mark.launches
COUNTER = "kaged0"


@pytest.fixture
def shelf(plugin_dir: Path, nothing_left: None) -> Path:
    (plugin_dir / "plugins").mkdir()
    put_plugins(plugin_dir / "plugins")
    return plugin_dir


def health(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = served.ask("GET", "/health")[1]
    return found


@contextmanager
def call_in_flight(served: Served) -> Iterator[str]:
    """A call that waits until it is cancelled. Yields its id."""
    with Client(served.socket) as client:
        given = {"tool": "reader", "input": {"do": "wait"}}
        headers = {"Accept": "text/event-stream"}
        told = client.request("POST", "/plugins/acme.devkit/calls", given, headers).events()
        name, accepted = next(told)
        assert name == "accepted"
        assert wait_for(lambda: served.ask("GET", f"/calls/{accepted['id']}")[1]["started"] is not None)
        yield accepted["id"]
        assert [name for name, _ in told] == ["error"]


# --- the ledger ---------------------------------------------------------------------------------------------


def check_refused_and_owed(served: Served, broken: Iterator[str], call: str) -> None:
    """While the ledger cannot be written, no call is accepted and an outcome waits; later it is written."""
    words = next(broken)
    status, found = served.call("greeter", "greet", {"name": "x"})
    assert (status, found["error"]["code"]) == (503, "ledger"), found
    assert words in found["error"]["message"] and found["error"]["hint"], found
    assert served.ask("DELETE", f"/calls/{call}")[0] == 202
    assert wait_for(lambda: health(served)["ledger"]["owed"] == 1)
    status, told = served.ask("GET", "/health")
    assert (status, told["status"]) == (503, "unavailable") and words in told["ledger"]["fault"]
    next(broken, None)
    assert wait_for(lambda: health(served)["status"] == "ok")
    assert health(served)["ledger"]["owed"] == 0
    assert served.ask("GET", f"/calls/{call}")[1]["code"] == "cancelled"
    assert served.call("greeter", "greet", {"name": "x"})[0] == 200


def test_a_ledger_that_goes_bad_under_a_daemon_refuses_calls_and_keeps_outcomes(
    runner_as: Caller, shelf: Path
) -> None:
    ledger = shelf / "ledger/ledger.db"

    def largest_file(size: str) -> None:
        # By the caller: root may lack CAP_SYS_RESOURCE, without which it cannot do this to another's process.
        words = ("prlimit", f"--pid={served.process.pid}", f"--fsize={size}:")
        subprocess.run([*runner_as.prefix, *words], check=True)

    def disk_full() -> Iterator[str]:
        size = (shelf / "ledger/ledger.db-wal").stat().st_size
        largest_file(str(size))
        yield "cannot be read or written: disk I/O error"
        largest_file("unlimited")

    def removed(name: str) -> Iterator[str]:
        path = shelf / "ledger" / name
        path.rename(path.with_suffix(".away"))
        yield "was removed or replaced while it was in use"
        path.with_suffix(".away").rename(path)

    def replaced() -> Iterator[str]:
        path = ledger.with_suffix(".away")
        ledger.rename(path)
        shutil.copyfile(path, ledger)
        yield "was removed or replaced while it was in use"
        path.rename(ledger)

    with serving(runner_as, shelf) as served:
        rows: dict[str, Iterator[str]] = {
            "disk full": disk_full(),
            "ledger removed": removed("ledger.db"),
            "log of the ledger removed": removed("ledger.db-wal"),
            "ledger replaced": replaced(),
        }

        def check(_: str, broken: Iterator[str]) -> None:
            with call_in_flight(served) as call:
                check_refused_and_owed(served, broken, call)

        check_rows(rows, check)
        served.end()


def test_outcomes_that_cannot_be_written_at_the_end_are_told_and_unknown(
    runner_as: Caller, shelf: Path
) -> None:
    ledger = shelf / "ledger/ledger.db"
    with serving(runner_as, shelf, "--drain", "100ms") as served, call_in_flight(served) as call:
        ledger.rename(ledger.with_suffix(".away"))
        served.process.terminate()
        _, err = served.process.communicate(timeout=60)
        assert served.process.returncode == 0
    assert f"1 outcome could not be written: the ledger {ledger} was removed" in err.decode()
    assert "Traceback" not in err.decode()
    ledger.with_suffix(".away").rename(ledger)
    with serving(runner_as, shelf) as served:
        assert served.ask("GET", f"/calls/{call}")[1]["code"] == UNKNOWN
        served.end()


# --- sockets and configurations -----------------------------------------------------------------------------


def test_a_second_daemon_is_refused_and_the_first_goes_on(runner_as: Caller, shelf: Path) -> None:
    with serving(runner_as, shelf) as served:
        start = ("serve", "--config", str(shelf / "plugins"))
        rows: dict[tuple[str, ...], tuple[int, str]] = {
            ("--socket", served.socket, "--ledger", str(shelf / "ledger/other.db")): (
                2,
                "another daemon listens there; stop it, or name another path",
            ),
            ("--socket", str(shelf / "run/other"), "--ledger", str(shelf / "ledger/ledger.db")): (
                10,
                "another process uses the ledger",
            ),
        }

        def check(words: tuple[str, ...], wanted: tuple[int, str]) -> None:
            done = runner_as(*start, *words)
            assert done.returncode == wanted[0] and wanted[1] in done.stderr, done
            assert "Traceback" not in done.stderr
            assert served.call("greeter", "greet", {"name": "x"})[0] == 200

        check_rows(rows, check)
        assert sorted(os.listdir(shelf / "run")) == ["serve.sock"]
        served.end()


def test_a_daemon_whose_socket_was_taken_away_leaves_that_of_another(runner_as: Caller, shelf: Path) -> None:
    with serving(runner_as, shelf) as first:
        os.unlink(first.socket)
        with pytest.raises(NoDaemon):
            first.ask("GET", "/health")
        with serving(runner_as, shelf, "--ledger", str(shelf / "ledger/second.db")) as second:
            first.end()
            assert health(second)["status"] == "ok"
            second.end()
    assert not os.path.exists(second.socket)


def test_a_configuration_that_vanishes_keeps_its_plugins_and_is_told(runner_as: Caller, shelf: Path) -> None:
    folder, away = shelf / "plugins", shelf / "away"
    with serving(runner_as, shelf) as served:
        assert served.call("greeter", "greet", {"name": "x"})[0] == 200
        before = served.plugin("greeter")["pids"]
        folder.rename(away)
        assert wait_for(lambda: health(served)["configuration"])
        (fault,) = health(served)["configuration"]
        assert fault == {"path": str(folder), "message": "there is no such file or folder"}
        assert set(served.states()) == {"greeter", "acme.devkit"}
        assert served.call("greeter", "greet", {"name": "x"})[0] == 200
        away.rename(folder)
        assert wait_for(lambda: not health(served)["configuration"])
        assert served.plugin("greeter")["pids"] == before
        # One of its plugins alone is meant: it goes.
        shutil.rmtree(folder / "words")
        assert wait_for(lambda: set(served.states()) == {"acme.devkit"})
        assert f"{folder}: there is no such file or folder" in served.end()


# --- a daemon that is killed at a step ----------------------------------------------------------------------

# Runs the command line, and is killed right before or after a method is called for the first time.
_KILLED = """
import functools, importlib, os, signal, sys
when, module, owner, name = sys.argv[1].split()
owner = getattr(importlib.import_module(module), owner)
method = getattr(owner, name)
@functools.wraps(method)
async def killed(self, *args, **named):
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = await method(self, *args, **named)
    if result != []:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, killed)
from runner.cli import main
sys.exit(main(sys.argv[2:]))
"""
LEDGER, SUPERVISOR = "runner.ledger.ledger Ledger", "runner.lifecycle.supervisor Supervisor"
CELL = "runner.lifecycle.supervised SupervisedPlugin"


@contextmanager
def killed_at(step: str, caller: Caller, folder: Path, *options: str) -> Iterator[Served]:
    """A daemon that is killed at a step."""

    def start(*words: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        argv = [*caller.prefix, *caller.python, "-c", _KILLED, step, *words, *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env={**caller.environ, **env}, stdout=pipe, stderr=pipe, cwd="/")

    with serving_by(start, caller, folder) as served:
        yield served
        served.process.communicate(timeout=60)
        assert served.process.returncode == -9


@pytest.mark.broad  # some 25 s: the ledger's own crash test is in the ordinary suite
def test_a_daemon_killed_at_any_step_of_a_call_neither_loses_nor_doubles_it(
    runner_as: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    """The plugin counts how often it ran. Each step has a key of its own."""
    # Step -> the code in the ledger, how often it has run, the answer when the key is repeated, and how often
    # it has run then.
    rows: dict[str, tuple[str | None, int, int, int]] = {
        f"before {LEDGER} accept": (None, 0, 200, 1),
        f"after {LEDGER} accept": (NOT_STARTED, 0, 200, 1),
        f"before {SUPERVISOR} call": (NOT_STARTED, 0, 200, 1),
        f"after {CELL} _cell_for": (NOT_STARTED, 0, 200, 1),  # the plugin is launched
        f"before {LEDGER} ask": (NOT_STARTED, 0, 200, 1),
        f"after {LEDGER} ask": (UNKNOWN, 0, 409, 0),
        f"after {SUPERVISOR} call": (UNKNOWN, 1, 409, 1),
        f"before {LEDGER} end": (UNKNOWN, 1, 409, 1),
        f"after {LEDGER} end": ("ok", 1, 200, 1),
    }
    (plugin_dir / "plugins").mkdir()
    put_example("kaged", COUNTER, plugin_dir / "plugins")
    ran = 0

    def counted(served: Served) -> int:
        status, found = served.call(COUNTER, "count", {})
        assert status == 200, found
        return int(found["value"]["greeted"])

    def check(step: str, wanted: tuple[str | None, int, int, int]) -> None:
        nonlocal ran
        with killed_at(step, runner_as, plugin_dir) as served, pytest.raises(NoDaemon):
            served.call(COUNTER, "greet", {"name": "you"}, Idempotency_Key=step)
        with serving(runner_as, plugin_dir) as served:
            calls = served.ask("GET", "/calls?most=1000")[1]["calls"]
            codes = [each["code"] for each in calls if each["key"] == step]
            before = counted(served) - ran
            status, found = served.call(COUNTER, "greet", {"name": "you"}, Idempotency_Key=step)
            after = counted(served) - ran
            ran += after
            served.end()
        assert (codes, before, status, after) == ([wanted[0]] if wanted[0] else [], *wanted[1:]), found

    check_rows(rows, check)


@pytest.mark.broad  # some 25 s: the ledger's own crash test is in the ordinary suite
def test_a_daemon_killed_at_any_step_of_a_delivery_ends_it_and_counts_every_attempt(
    runner_as: Caller, shelf: Path
) -> None:
    # Step -> None if the delivery is not known after the next start; else its state, or why it waits, and its
    # attempts.
    rows: dict[str, tuple[str, int] | None] = {
        f"before {LEDGER} enqueue": None,
        f"after {LEDGER} enqueue": ("acked", 1),
        f"after {LEDGER} claim": (NOT_STARTED, 1),
        f"before {SUPERVISOR} call": (NOT_STARTED, 1),
        f"before {LEDGER} ask": (NOT_STARTED, 1),
        f"after {LEDGER} ask": (UNKNOWN, 1),
        f"before {LEDGER} settle": (UNKNOWN, 1),
        f"after {LEDGER} settle": ("acked", 1),
    }

    def check(step: str, wanted: tuple[str, int] | None) -> None:
        given = {"id": step, "plugin": "acme.devkit", "hook": "notify", "event": event({})}
        with killed_at(step, runner_as, shelf) as served:
            try:
                served.ask("POST", "/deliveries", given)
            except NoDaemon:
                pass
        path = f"/deliveries/{step.replace(' ', '%20')}"
        with serving(runner_as, shelf) as served:
            if wanted is None:
                assert served.ask("GET", path)[0] == 404
            else:
                state = "acked" if wanted[0] == "acked" else "queued"
                assert wait_for(lambda: served.ask("GET", path)[1]["state"] == state)
                found = served.ask("GET", path)[1]
                calls = served.ask("GET", "/calls?most=1000")[1]["calls"]
                attempts = [each["attempt"] for each in calls if each["delivery"] == step]
                assert (found["attempt"], attempts) == (wanted[1], [1])
                if state == "queued":
                    assert (found["code"], found["due"] > found["created"]) == (wanted[0], True)
                assert served.ask("DELETE", path)[0] == 200  # else the next daemon may be killed by this one
            served.end()

    check_rows(rows, check)


@pytest.mark.broad  # some 10 s: that a killed daemon leaves no parked cell is in the ordinary suite
def test_a_daemon_killed_while_a_cell_is_parked_or_released_leaves_nothing_and_tells_the_call(
    runner_as: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    (plugin_dir / "plugins").mkdir()
    put_example("rune", "rune0", plugin_dir / "plugins")
    for path in (plugin_dir / "plugins").rglob("*"):
        os.utime(path, (1e9, 1e9))
    (plugin_dir / "settings.toml").write_text("[rune0]\neager = true\n")
    (plugin_dir / "settings.toml").chmod(0o644)
    settings = ("--settings", str(plugin_dir / "settings.toml"))
    parking = "runner.session.parking Parking"
    rows = {f"{when} {parking} _release": NOT_STARTED for when in ("before", "after")}

    def check(step: str, wanted: str) -> None:
        others = descendants()
        with killed_at(step, runner_as, plugin_dir, *settings) as served:
            assert wait_for(lambda: served.plugin("rune0")["parked"] == 1)
            below = descendants() - others
            with pytest.raises(NoDaemon):
                served.call("rune0", "greet", {"name": "you"}, Idempotency_Key=step)
        assert len(below) > 4 and vanished(below)
        with serving(runner_as, plugin_dir, *settings) as served:
            calls = served.ask("GET", "/calls")[1]["calls"]
            assert [each["code"] for each in calls if each["key"] == step] == [wanted]
            assert served.call("rune0", "greet", {"name": "you"})[0] == 200
            served.end()

    check_rows(rows, check)
