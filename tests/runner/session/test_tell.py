"""Notifications that wait while a request is open: a session releases them when the request ends, however.

The process is a task of the test on the other ends of real pipes, and time is trio's autojump clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from runner.contracts.ainb.dialect import AinbDialect
from runner.contracts.ainb.messages import RULES
from runner.contracts.ainb.terms import WRITE_SECONDS
from runner.exceptions import PluginFailure
from runner.launch.remote.messages import Terms
from runner.protocol.bus import Room
from runner.protocol.dialect import Answer, Call, Notice, Setting
from runner.protocol.header_frames import HeaderFramer, header_frame
from runner.protocol.host_services import Emit, Services, Tell, Why
from runner.protocol.memory import DELIVERIES
from runner.protocol.service_guard import ServiceGuard
from runner.protocol.wire import decode, encode
from runner.session.outbox import MOST_EVENTS
from runner.session.session import Session
from runner.session.subscriber_lag import MOST_CALL_SECONDS, MOST_SECONDS, STEP_SECONDS
from sandbox.spec import Limits
from tests.runner.contracts.ainb.conversation import BURNDOWN, WELCOME, answer
from tests.runner.contracts.nexo.test_dialect import DEMO, ready
from tests.runner.session.piped_session import PipedCell

pytestmark = pytest.mark.trio

EVENT, KEY = "plugin/handle_event", "plugin/handle_key"
ESC = {"screen_id": "", "key": {"code": {"type": "esc"}}}
SLOW = Call("tool", "burn")


class Telling:
    """Services that tell the plugin something."""

    METHODS: dict[str, str] = {}  # noqa: RUF012 -- as the interface has it

    def __init__(self) -> None:
        self.tell: Tell | None = None
        self.detached = 0
        self.subscribers_have_room = trio.Event()
        self.subscribers_have_room.set()

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        raise AssertionError("there is no method to serve")

    def refused(self, method: str, why: Why) -> Answer:
        return Answer(error=(-32601, "method not found", None))

    def attach(self, tell: Tell, room: Room) -> None:
        self.tell = tell

    async def published(self) -> None:
        await self.subscribers_have_room.wait()

    def detach(self) -> None:
        self.detached += 1


class Plugin:
    """Answers plugin/init and plugin/shutdown, and nothing else. It reads while `reads` is set."""

    def __init__(self, cell: PipedCell) -> None:
        self.cell = cell
        self.heard: list[tuple[str, Any]] = []
        self.asked: list[dict[str, Any]] = []  # requests
        self.reads = trio.Event()
        self.services = Telling()

    async def stop_reading(self, session: Session) -> None:
        await trio.testing.wait_all_tasks_blocked()
        self.reads = trio.Event()
        session.tell(EVENT, {"topic": "wakes its reader", "payload": b""})
        await trio.testing.wait_all_tasks_blocked()

    def methods(self) -> list[str]:
        return [method for method, _ in self.heard]


@asynccontextmanager
async def live(*early: tuple[str, Any]) -> AsyncIterator[tuple[Session, Plugin]]:
    """`early`: what its services tell it before the handshake."""
    cell = PipedCell()
    plugin = Plugin(cell)
    plugin.reads.set()
    terms = Terms(BURNDOWN, Limits(), (), ("*",), "default", False)
    guard = ServiceGuard(plugin.services, Services(), ("*",))
    session = Session(cell, terms, AinbDialect(Setting(BURNDOWN)), guard, None)  # type: ignore[arg-type]
    guard.attach(session.tell, session.state.room)
    assert plugin.services.tell is not None
    for method, params in early:
        plugin.services.tell(method, params)

    async def run() -> None:
        framer = HeaderFramer(RULES)
        while True:
            await plugin.reads.wait()
            data = await cell.its_stdin.receive_some(1 << 20)
            if not data:
                break
            for raw in framer.feed(bytes(data)):
                message = decode(raw)
                plugin.heard.append((message.get("method", ""), message.get("params")))
                plugin.asked += [message] if "id" in message else []
                if message.get("method") in ("plugin/init", "plugin/shutdown"):
                    await cell.its_stdout.send_all(header_frame(encode(answer(message["id"], WELCOME))))
        cell.end()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        nursery.start_soon(session.tasks.run)
        try:
            await session.tasks.start()
            yield session, plugin
        finally:
            with trio.CancelScope(shield=True):
                plugin.reads.set()
                await session.close()
                session.tasks.stop()
                nursery.cancel_scope.cancel()
                await cell.aclose()


async def test_what_services_tell_before_the_handshake_comes_after_it(autojump_clock: Any) -> None:
    async with live((EVENT, {"topic": "t", "payload": b"1"}), (KEY, ESC)) as (_, plugin):
        await trio.testing.wait_all_tasks_blocked()
        assert plugin.methods() == ["plugin/init", KEY, EVENT]
    assert plugin.services.detached == 1


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_the_end_of_a_call_releases(autojump_clock: Any, end: str) -> None:
    async with live() as (session, plugin):

        async def call() -> None:
            if end == "cancelled":
                with trio.move_on_after(5.0):
                    await session.call(SLOW)
            else:
                with pytest.raises(PluginFailure):
                    await session.call(SLOW, seconds=5.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.sleep(1.0)
            session.tell(KEY, ESC)
            await trio.sleep(3.0)
            assert plugin.methods()[1:] == ["plugin/cli_dispatch"]
        await trio.testing.wait_all_tasks_blocked()
        # A plugin whose caller gave up may still be in the call. One whose time is up has had its chance.
        told = [KEY] if end == "expired" else []
        assert plugin.methods()[1:] == ["plugin/cli_dispatch", *told]


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_a_request_that_was_never_sent_releases_too(autojump_clock: Any, end: str) -> None:
    """The plugin does not read, so the request waits behind events that fill the pipe."""
    async with live() as (session, plugin):
        await plugin.stop_reading(session)
        for number in range(3):
            session.tell(EVENT, {"topic": str(number), "payload": bytes(100_000)})

        async def call() -> None:
            if end == "cancelled":
                with trio.move_on_after(1.5):
                    await session.call(SLOW)
            else:
                with pytest.raises(PluginFailure):
                    await session.call(SLOW, seconds=1.5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.sleep(1.0)
            session.tell(KEY, ESC)
        plugin.reads.set()
        await trio.testing.wait_all_tasks_blocked()
        methods = plugin.methods()[1:]
        assert "plugin/cli_dispatch" not in methods
        assert methods.count(EVENT) == 4 and methods.count(KEY) == 1
        assert methods.index(KEY) < len(methods) - 1  # it overtook what waited
        topics = [params["topic"] for method, params in plugin.heard if method == EVENT]
        assert topics[1:] == ["0", "1", "2"]


async def test_tell_never_raises(autojump_clock: Any) -> None:
    async with live() as (session, _):
        before = session.state.outbox.dropped
        session.tell("plugin/unknown", {})
        session.tell(EVENT, {"topic": 7})
        assert session.state.outbox.dropped == before + 2
    session.tell(EVENT, {"topic": "t", "payload": b""})  # it is over


# --- a plugin that does not read ----------------------------------------------------------------------------


async def test_a_plugin_that_stops_reading_is_ended(autojump_clock: Any) -> None:
    """Nobody waits for an answer of it: notifications alone fill its pipe."""
    async with live() as (session, plugin):
        await plugin.stop_reading(session)
        session.tell(EVENT, {"topic": "t", "payload": bytes(100_000)})
        await trio.sleep(WRITE_SECONDS - 0.1)
        assert not session.is_over
        await trio.sleep(0.2)
        with pytest.raises(PluginFailure) as failed:
            await session.ended()
        assert failed.value.outcome.cause == "write_stalled"
        assert "did not read what was sent to it for 2s" in failed.value.outcome.message


async def test_one_that_reads_slowly_is_not(autojump_clock: Any) -> None:
    async with live() as (session, plugin):
        await plugin.stop_reading(session)
        session.tell(EVENT, {"topic": "t", "payload": bytes(1 << 20)})
        for _ in range(5):
            await trio.sleep(WRITE_SECONDS - 0.1)
            await plugin.cell.its_stdin.receive_some(1 << 16)
        assert not session.is_over
        session.kill()


async def test_one_that_cannot_write_because_its_subscribers_are_slow_is_not(autojump_clock: Any) -> None:
    """Nothing is read from it meanwhile, so it may be unable to go on and read."""
    async with live() as (session, plugin):
        await plugin.stop_reading(session)
        plugin.services.subscribers_have_room = trio.Event()
        asked = {"jsonrpc": "2.0", "method": "host/anything", "params": {}}
        await plugin.cell.its_stdout.send_all(header_frame(encode(asked)))
        await trio.testing.wait_all_tasks_blocked()
        session.tell(EVENT, {"topic": "t", "payload": bytes(100_000)})
        await trio.sleep(3 * WRITE_SECONDS)
        assert not session.is_over
        plugin.services.subscribers_have_room.set()
        await trio.sleep(WRITE_SECONDS - 0.1)
        assert not session.is_over  # it has its time from now on
        await trio.sleep(WRITE_SECONDS + 0.2)
        assert session.is_over


CHUNK = bytes(9 << 20)  # 12 MiB as base64


@pytest.mark.parametrize(("page", "ended"), [(4 << 10, True), (2 << 20, False)])
async def test_a_slow_subscriber_does_not_keep_its_publishers(
    autojump_clock: Any, page: int, ended: bool
) -> None:
    """It reads a page a second, so it never stalls. Publishers wait, for some seconds in all, and then it is
    ended. The control reads more, and is waited for."""
    async with live() as (session, plugin):
        await plugin.stop_reading(session)
        for _ in range(4):
            session.tell(EVENT, {"topic": "t", "payload": CHUNK})
        waits: list[float] = []

        async def publish() -> None:
            while sum(waits) < 60 and not session.is_over:
                began = trio.current_time()
                await session.state.room()
                waits.append(trio.current_time() - began)
                session.tell(EVENT, {"topic": "t", "payload": bytes(1 << 20 if not ended else 1)})

        async def read() -> None:
            while not session.is_over:
                await trio.sleep(1.0)
                left = page
                while left > 0 and not session.is_over:
                    with trio.move_on_after(0.01):
                        left -= len(await plugin.cell.its_stdin.receive_some(min(left, 1 << 16)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await publish()
            assert session.is_over is ended
            if ended:
                assert sum(waits) <= MOST_SECONDS + 2 * STEP_SECONDS
                with pytest.raises(PluginFailure) as failed:
                    await session.ended()
                assert failed.value.outcome.cause == "fell_behind"
                assert "which read less than 1 MiB a second" in failed.value.outcome.message
            else:
                session.kill()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("seconds", "ended"), [(MOST_CALL_SECONDS - 5, False), (MOST_CALL_SECONDS + 5, True)]
)
async def test_publishers_wait_for_the_end_of_a_call(
    autojump_clock: Any, seconds: float, ended: bool
) -> None:
    """Six publications of 12 MiB do not end a subscriber that is within a call, and all arrive. If the call
    takes too long, they do."""
    async with live() as (session, plugin):

        async def call() -> None:
            if not ended:
                await session.call(SLOW, seconds=50)
                return
            with pytest.raises(PluginFailure) as failed:
                await session.call(SLOW, seconds=50)
            assert "gets no events while a call is open" in failed.value.outcome.message

        async def answer_late() -> None:
            await trio.sleep(seconds)
            if not session.is_over:
                ids = [message["id"] for message in plugin.asked if message.get("method") != "plugin/init"]
                done = answer(ids[0], {"exit_code": 0, "stdout": "", "stderr": ""})
                await plugin.cell.its_stdout.send_all(header_frame(encode(done)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(answer_late)
            for number in range(6):
                session.tell(EVENT, {"topic": f"t{number}", "payload": CHUNK})
                await session.state.room()
        await trio.testing.wait_all_tasks_blocked()
        assert session.is_over is ended
        if not ended:
            await trio.sleep(1)
            topics = [params["topic"] for method, params in plugin.heard if method == EVENT]
            assert topics == [f"t{number}" for number in range(6)]


async def test_one_for_which_too_much_waits_is_ended_and_loses_nothing_before(autojump_clock: Any) -> None:
    """Some wait because a call is open, and some because it does not read. Both count together."""
    chunk = bytes(9 << 20)  # 12 MiB as base64
    async with live() as (session, plugin):
        await plugin.stop_reading(session)
        for _ in range(3):  # one of them is being written
            session.tell(EVENT, {"topic": "t", "payload": chunk})

        async def call() -> None:
            with pytest.raises(PluginFailure) as failed:
                await session.call(SLOW)
            assert failed.value.outcome.cause == "fell_behind"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(1.0) as full:
                await session.state.room()
            assert not full.cancelled_caught  # 24 MiB of 64
            for _ in range(3):
                assert session.state.deliveries < DELIVERIES and not session.is_over
                session.tell(EVENT, {"topic": "t", "payload": chunk})
                with trio.move_on_after(0.1) as full:
                    await session.state.room()
                assert full.cancelled_caught
            session.tell(EVENT, {"topic": "t", "payload": chunk})
            assert session.is_over
            await session.state.room()  # nobody waits for one that is over


async def test_events_that_a_slow_plugin_misses_are_told_once_and_at_the_time() -> None:
    """nexo's: nothing is written here, as if the plugin read nothing."""
    cell = PipedCell()
    terms = Terms(DEMO, Limits(), (), ("*",), "default", False)
    session = Session(cell, terms, ready(), ServiceGuard(Telling(), Services(), ("*",)), None)  # type: ignore[arg-type]
    told: list[int] = []
    for number in range(MOST_EVENTS + 3):
        session.tell("broker.event", {"topic": "news.a", "payload": number})
        told.append(session.state.backlog._receive.statistics().current_buffer_used)
    # The first that is dropped is told, and not those after it.
    assert told == [0] * MOST_EVENTS + [1] * 3
    assert session.state.outbox.dropped == 3
    notice = await anext(session.events())
    assert isinstance(notice, Notice) and notice.kind == "dropped"
    assert notice.value["reason"] == "slow" and f"{MOST_EVENTS} events wait" in notice.value["why"]
    await cell.aclose()
