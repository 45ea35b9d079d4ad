"""Parked cells for calls: who gets which, when they are thrown away, and what is launched instead."""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.launch.remote import forkserver
from runner.launch.stages import Invocation
from runner.library import OpenPlugin, open_plugin
from runner.session import parking as parking_module
from runner.session.parking import ParkedCell, ParkedFor, Parking, open_parking
from sandbox.cell.cell import descendants
from tests.conftest import ROOT, SYSTEM_PATH
from tests.runner.launch.monitored_plugins import is_sound

pytestmark = [pytest.mark.launches, pytest.mark.trio]

SECONDS = 120.0
EVENT = {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}, "summary": {}}


@pytest.fixture
def shelf(plugin_dir: Path, sessions: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of plugins. They were written a moment ago, and are relied on all the same."""
    for name in ("rune_echo", "vai_devkit"):
        shutil.copytree(ROOT / "tests/plugins" / name, plugin_dir / name)
    (plugin_dir / "policy.toml").write_text("version = 1\n")
    (plugin_dir / "home/.config/runner/approvals").mkdir(parents=True)
    for path in plugin_dir.rglob("*"):
        path.chmod(0o755)
    before, _, after = forkserver._START.partition("main(")
    settled = "import sandbox.look; sandbox.look.SETTLED_SECONDS = -3600.0; "
    monkeypatch.setattr(forkserver, "_START", f"{before}{settled}main({after}")
    monkeypatch.setattr(parking_module, "_TAKE_SECONDS", SECONDS)  # however busy the machine is
    return plugin_dir


def environ(shelf: Path) -> dict[str, str]:
    return {"PATH": SYSTEM_PATH, "HOME": str(shelf / "home"), "RUNNER_CACHE": "off"}


def invocation(shelf: Path, **more: Any) -> Invocation:
    return Invocation(str(shelf / "rune_echo"), policy=str(shelf / "policy.toml"), **more)


async def all_ready(parking: Parking) -> None:
    """Until no cell is on its way."""
    while on_way := [each for each in parking._cells if not each.ready.is_set()]:
        await on_way[0].ready.wait()
        await trio.testing.wait_all_tasks_blocked()


def parking_of(plugin: OpenPlugin) -> Parking:
    parking = plugin._settings.parking
    assert parking is not None
    return parking


# --- calls --------------------------------------------------------------------------------------------------


async def test_calls_of_a_plugin_take_parked_cells(shelf: Path) -> None:
    with trio.fail_after(SECONDS):
        async with open_plugin(shelf / "rune_echo", environ=environ(shelf), parked=2) as plugin:
            parking = parking_of(plugin)
            await all_ready(parking)
            assert parking.waiting == 2
            answers: list[Any] = []

            async def call(number: int) -> None:
                answers.append((await plugin.call("echo", {"n": number}))["input"])

            async with trio.open_nursery() as nursery:
                for number in range(3):  # more than are parked
                    nursery.start_soon(call, number)
            assert sorted(each["n"] for each in answers) == [0, 1, 2]
            assert parking.taken >= 2
            await all_ready(parking)
            await plugin.call("echo", {})
            assert plugin.report is not None
            is_sound(plugin.report)
            assert list(plugin.report["timings"])[3:6] == ["launch", "parked", "handshake"]
            assert plugin.report["outcome"]["code"] == "ok"


async def test_a_plugin_that_was_changed_a_moment_ago_is_parked_when_that_has_settled(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, began = shelf / "rune_echo/rterm-plugin.json", time.time()
    os.utime(manifest, (began, began + 86400.0))  # it cannot settle by itself
    faults: list[str] = []
    again = Parking._fill_later

    async def settle(parking: Parking, serves: ParkedFor) -> None:
        faults.append(parking.fault)
        os.utime(manifest, (began, began))
        await again(parking, serves)

    monkeypatch.setattr(Parking, "_fill_later", settle)
    monkeypatch.setattr(parking_module, "_AGAIN_SECONDS", 0.0)
    with trio.fail_after(SECONDS):
        async with open_parking(1) as parking:
            parking.fill(invocation(shelf), environ(shelf))
            while not parking.waiting:
                await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(faults) == 1 and "was changed a moment ago" in faults[0]


async def test_one_cell_serves_one_of_two_calls(shelf: Path) -> None:
    given = invocation(shelf), environ(shelf)
    found: list[bool] = []

    async def take(parking: Parking) -> None:
        async with parking.take(*given) as cell:
            found.append(cell is not None and cell._launched is not None)

    with trio.fail_after(SECONDS):
        async with open_parking(1) as parking:
            parking.fill(*given)
            await all_ready(parking)
            parking._most = 0  # no other takes its place
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take, parking)
                nursery.start_soon(take, parking)
        assert sorted(found) == [False, True] and parking.taken == 1


async def test_a_crowd_of_calls_starts_one_cell_at_a_time(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = invocation(shelf), environ(shelf)
    made: list[ParkedCell] = []
    on_way: list[int] = []
    found: list[bool] = []

    class Counted(ParkedCell):
        def __init__(self, serves: ParkedFor) -> None:
            super().__init__(serves)
            made.append(self)
            on_way.append(sum(not each.ready.is_set() for each in made))

    async def take(parking: Parking) -> None:
        async with parking.take(*given) as cell:
            found.append(cell is not None)

    monkeypatch.setattr(parking_module, "ParkedCell", Counted)
    with trio.fail_after(SECONDS):
        async with open_parking(2) as parking:
            parking.fill(*given)
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(take, parking)
    assert len(found) == 20 and any(found)  # the control: one has waited for a cell that was on its way
    assert set(on_way) == {1}


async def test_a_call_without_time_leaves_cells_to_others(shelf: Path) -> None:
    given = invocation(shelf), environ(shelf)
    with trio.fail_after(SECONDS):
        async with open_parking(1) as parking:
            parking.fill(*given)
            await all_ready(parking)
            async with parking.take(*given, until=trio.current_time()) as cell:
                assert cell is None and parking.waiting == 1
            async with parking.take(*given) as cell:  # the control
                assert cell is not None


async def test_a_cell_belongs_to_the_folder_of_its_launch(shelf: Path) -> None:
    """It is launched a moment after it was asked for. A relative path names another plugin by then."""
    other = shelf / "other"
    other.mkdir()
    shutil.copytree(shelf / "rune_echo", other / "rune_echo")
    given = Invocation("rune_echo", policy=str(shelf / "policy.toml")), environ(shelf)
    before = os.getcwd()
    try:
        with trio.fail_after(SECONDS):
            async with open_parking(1) as parking:
                os.chdir(shelf)
                parking.fill(*given)
                os.chdir(other)
                await all_ready(parking)
                assert parking.waiting == 1, parking.fault
                os.chdir(shelf)
                async with parking.take(*given) as cell:
                    assert cell is None
                await all_ready(parking)
                async with parking.take(*given) as cell:  # the control
                    assert cell is not None
                    terms = await cell.prepared()
                    assert terms.plugin.manifest == str(shelf / "rune_echo/rterm-plugin.json")
    finally:
        os.chdir(before)


async def test_a_cancelled_call_keeps_its_cell_until_it_has_ended(shelf: Path) -> None:
    """Also if all around it is cancelled: its plugin may have a grace."""
    given = invocation(shelf), environ(shelf)
    with trio.fail_after(SECONDS):
        with trio.CancelScope() as scope:
            async with open_parking(1) as parking:
                parking.fill(*given)
                await all_ready(parking)
                async with parking.take(*given) as cell:
                    assert cell is not None
                    scope.cancel()
                    with trio.CancelScope(shield=True):
                        await trio.testing.wait_all_tasks_blocked()
                    assert cell._asked is None and cell.has_ended is None
        assert scope.cancelled_caught
        assert cell is not None
        assert cell._asked == signal.SIGKILL and cell.has_ended is not None  # the control


async def test_a_cell_serves_no_other_plugin_and_no_other_caller(shelf: Path) -> None:
    invoked, variables = invocation(shelf), environ(shelf)
    others: list[Any] = [
        (invocation(shelf, args=("--other",)), variables, ("a",)),
        (Invocation(str(shelf / "rune_echo" / "declaring.json")), variables, ("a",)),
        (invoked, {**variables, "LANG": "C"}, ("a",)),
        (invoked, variables, ("b",)),
        (invoked, variables, ()),
    ]
    with trio.fail_after(SECONDS):
        async with open_parking(1) as parking:
            parking.fill(invoked, variables, ("a",))
            await all_ready(parking)
            for other in others:
                async with parking.take(*other) as cell:
                    assert cell is None and parking.waiting == 1
            before = os.getcwd()
            async with parking.take(invoked, variables, ("a",)) as cell:
                assert cell is not None
            await all_ready(parking)
            os.chdir(shelf)
            try:
                async with parking.take(invoked, variables, ("a",)) as cell:
                    assert cell is None  # its launch would be another one here
            finally:
                os.chdir(before)


# --- what they rest on --------------------------------------------------------------------------------------


def _swap(folder: Path) -> None:
    shutil.copytree(folder, f"{folder}.new")
    folder.rename(f"{folder}.old")
    Path(f"{folder}.new").rename(folder)


CHANGES: dict[str, Callable[[Path], object]] = {
    "policy": lambda shelf: (shelf / "policy.toml").write_text('version = 1\n[read]\nceiling = ["/usr"]\n'),
    "manifest": lambda shelf: (shelf / "rune_echo/rterm-plugin.json").touch(),
    "program": lambda shelf: _swap(shelf / "rune_echo"),
    "approval": lambda shelf: (shelf / "home/.config/runner/approvals/x.json").write_text("{}"),
}


async def test_cells_are_thrown_away_when_what_they_rest_on_has_changed(shelf: Path) -> None:
    given = invocation(shelf), environ(shelf)
    with trio.fail_after(SECONDS):
        async with open_parking(2) as parking:
            parking.fill(*given)
            await all_ready(parking)
            async with parking.take(*given) as cell:  # the control: nothing has changed
                assert cell is not None
            for number, (what, change) in enumerate(CHANGES.items()):
                parking._most = 1 if number else 2
                await all_ready(parking)
                assert parking.waiting == parking._most, parking.fault
                cells = [each.cell for each in parking._cells if each.cell is not None]
                change(shelf)
                async with parking.take(*given) as cell:
                    assert cell is None and parking.waiting == 0, what
                assert not any(each._launched for each in cells)


async def test_a_dead_cell_is_not_used(shelf: Path) -> None:
    given = invocation(shelf), environ(shelf)
    with trio.fail_after(SECONDS):
        async with open_parking(1) as parking:
            parking.fill(*given)
            await all_ready(parking)
            [parked] = parking._cells
            assert parked.cell is not None and parked.cell._pid is not None
            os.kill(descendants(parked.cell._pid)[0], signal.SIGKILL)
            await parked.ended.wait()
            assert parking.waiting == 0
            # One that dies while a call takes it: it is dead, and the parking was not told.
            parking.fill(*given)
            await all_ready(parking)
            [parked] = parking._cells
            assert parked.cell is not None and parked.cell._pid is not None
            init = os.pidfd_open(descendants(parked.cell._pid)[0])
            signal.pidfd_send_signal(init, signal.SIGKILL)
            assert select.select([init], [], [], SECONDS)[0]  # with all processes of its namespace
            os.close(init)
            async with parking.take(*given) as cell:
                assert cell is None


async def test_a_cell_that_nobody_takes_ends(shelf: Path) -> None:
    given = invocation(shelf), environ(shelf)
    with trio.fail_after(SECONDS):
        async with open_parking(1, seconds=0.0) as parking:
            parking.fill(*given)
            [parked] = parking._cells
            await parked.ended.wait()
            assert parked.cell is not None and parked.cell._launched is None
            assert parking._cells == []  # until the next call
            async with parking.take(*given) as cell:
                assert cell is None
            # A parking that is closed, and a call that is given up, while a cell is on its way.
            assert len(parking._cells) == 1
            with trio.move_on_after(0):
                async with parking.take(*given):
                    raise AssertionError("it was given up")


async def test_a_launch_that_hangs_ends(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = invocation(shelf), environ(shelf)
    with trio.fail_after(SECONDS):
        async with open_parking(1, seconds=10 * SECONDS) as parking:
            monkeypatch.setattr(parking_module, "AGE_SECONDS", 0.0)  # every launch takes longer
            parking.fill(*given)
            [parked] = parking._cells
            await parked.ended.wait()
            assert parking._cells == []
            monkeypatch.setattr(parking_module, "AGE_SECONDS", SECONDS)  # the control: it is tried again
            parking.fill(*given)
            await all_ready(parking)
            assert parking.waiting == 1, parking.fault


async def test_what_cannot_be_parked_is_launched(shelf: Path) -> None:
    with trio.fail_after(SECONDS):
        opening = open_plugin(shelf / "rune_echo", environ=environ(shelf), parked=1, limits={"disk": "10M"})
        async with opening as plugin:
            parking = parking_of(plugin)
            await all_ready(parking)
            assert "disk" in parking.fault and parking.waiting == 0
            assert (await plugin.call("echo", {"n": 1}))["input"] == {"n": 1}
            assert parking._cells == [] and parking.taken == 0  # it does not try again with each call
            assert plugin.report is not None and "parked" not in plugin.report["timings"]


# --- calls that are prepared --------------------------------------------------------------------------------


async def test_prepared_calls_have_cells_of_their_caller(shelf: Path) -> None:
    manifest = shelf / "vai_devkit/vai-plugin.toml"
    text = manifest.read_text()
    manifest.write_text(text.replace('kind = "hook"', 'kind = "hook"\nexecution_class = "isolated"'))
    opening = open_plugin(
        shelf / "vai_devkit", environ=environ(shelf), secrets={"api_key": "correct-horse"}, parked=1
    )
    ours, others = ({"org_id": f"org_{name}", "project_id": "prj_1"} for name in ("a", "b"))
    with trio.fail_after(SECONDS):
        async with opening as plugin:
            parking = parking_of(plugin)
            assert await plugin.call("notify", EVENT, context=ours) == {"status": "ack"}
            await all_ready(parking)
            assert (parking.waiting, parking.taken) == (1, 0), parking.fault
            await plugin.call("notify", EVENT, context=others)
            assert (parking.waiting, parking.taken) == (1, 0)
            await plugin.call("notify", EVENT, context=ours)
            assert parking.taken == 1
            assert plugin.report is not None and "parked" in plugin.report["timings"]
            assert plugin.invocation is not None and plugin.invocation["status"] == "succeeded"
            # A call with secrets in its cage has no parked one, nor has one whose process serves others.
            await all_ready(parking)
            await plugin.call("search", {"q": 1})
            await plugin.call("reader", {"n": 1})
            assert parking.taken == 1
            assert {dict(each.serves.invocation.options)["export"] for each in parking._cells} == {"notify"}
