"""The library on asyncio: the same as on trio, with plugins in their cages."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import shutil
import signal
import subprocess
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import runner
from runner import aio, library, lifecycle, trio_thread
from runner.aio import lifecycle as aio_lifecycle
from runner.lifecycle import feed
from runner.protocol import bus
from runner.protocol.bus import PAYLOAD_MOST_BYTES
from runner.protocol.host_services import Services as ServicesOnTrio
from runner.session.backlog import MOST_EVENTS
from tests.conftest import ROOT, SYSTEM_PATH, Caller
from tests.runner.launch.monitored_plugins import is_sound

ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
SECONDS = 120
CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="")
TEXT = {"text": "hello"}
ECHO = [{"type": "text", "text": "hello"}]

Opened = Callable[..., Any]


@pytest.fixture
def shelf(plugin_dir: Path, sessions: None) -> Iterator[Path]:
    """Copies of the plugins, where a dropped uid can read them."""
    for name in ("nexo_bare", "mcp_bare", "rune_echo", "vai_devkit"):
        shutil.copytree(ROOT / "tests/plugins" / name, plugin_dir / name)
    for path in plugin_dir.rglob("*"):
        path.chmod(0o755)
    yield plugin_dir
    trio_thread.end()


def opened(path: Path, **more: Any) -> Any:
    return aio.open_plugin(path, environ=ENVIRON, **more)


def run(main: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), SECONDS))


# --- the two faces ------------------------------------------------------------------------------------------

# Awaited on asyncio only: `runner.call` blocks, and a bus belongs to trio's thread.
AWAITED = {"call", "SnapshotBus.publish", "SnapshotBus.forget"}
# All of a supervisor is on trio's thread.
AWAITED |= {f"Supervisor.{name}" for name in ("add", "plugins", "subscribe", "log_lines", "logs", "follow")}
# Names of the trio library that are of use only on trio.
ONLY_ON_TRIO = {
    "SnapshotBus": {"join", "find_action", "awaited", "offer", "retract"},
    "OpenPlugin": {"begin_call", "make", "on_stderr", "over", "parked", "pid"},
    "Services": {"offered"},
    "Supervisor": {"close", "deliver_notices", "end_feeds", "make"},
    "BoundedFeed": {"tell"},
}


def _shape(function: Any) -> tuple[list[tuple[Any, ...]], Any]:
    """Its parameters with kind, default and type, and its result. The two modules have types of the same
    name."""
    function = inspect.unwrap(function)
    hints = {name: _type(hint) for name, hint in typing.get_type_hints(function).items()}
    parameters = inspect.signature(function).parameters.values()
    shape = [(each.name, each.kind, each.default, hints.get(each.name)) for each in parameters]
    return shape, hints.get("return")


def _type(hint: Any) -> str:
    is_class = isinstance(hint, type) and typing.get_origin(hint) is None
    text = hint.__qualname__ if is_class else str(hint)
    modules = ("aio.lifecycle", "lifecycle.feed", "lifecycle.supervisor", "aio", "library")
    for module in (*modules, "protocol.bus", "protocol.host_services"):
        text = text.replace(f"runner.{module}.", "")
    for face in (aio, library):  # callbacks of runner.aio may be coroutine functions too
        text = text.replace(str(face.OnProgress), "OnProgress")
    return text


def _public(face: Any) -> dict[str, Any]:
    return {name: each for name, each in vars(face).items() if not name.startswith("_")}


def test_both_faces_have_the_same_names() -> None:
    assert aio.__all__ == library.__all__
    differ = {name for name in library.__all__ if getattr(aio, name) is not getattr(library, name)}
    assert differ == {"OpenPlugin", "Services", "SnapshotBus", "call", "open_plugin", "run"}
    assert runner.aio is aio
    assert aio_lifecycle.__all__ == lifecycle.__all__
    ours, theirs = vars(aio_lifecycle), vars(lifecycle)
    differ = {name for name in lifecycle.__all__ if ours[name] is not theirs[name]}
    assert differ == {"Supervisor", "open_supervisor"}


@pytest.mark.parametrize("name", ["call", "open_plugin", "run", "open_supervisor"])
def test_functions_have_the_same_signature(name: str) -> None:
    faces = (aio_lifecycle, lifecycle) if name == "open_supervisor" else (aio, library)
    ours, theirs = (getattr(face, name) for face in faces)
    assert _shape(ours) == _shape(theirs)
    assert inspect.iscoroutinefunction(inspect.unwrap(ours)) == (
        inspect.iscoroutinefunction(inspect.unwrap(theirs)) or name in AWAITED
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (aio.OpenPlugin, library.OpenPlugin),
        (aio.SnapshotBus, library.SnapshotBus),
        (aio.Subscription, bus.Subscription),
        (aio.Services, ServicesOnTrio),
        (aio_lifecycle.Supervisor, lifecycle.Supervisor),
        (aio_lifecycle.BoundedFeed, feed.BoundedFeed),
    ],
    ids=lambda each: f"{each.__module__}.{each.__name__}",
)
def test_classes_have_the_same_members(ours: Any, theirs: Any) -> None:
    name = ours.__name__
    only_on_trio = ONLY_ON_TRIO.get(name, set())
    instance_variables = {"version", "held", "focused_screen", "dropped"}  # properties here
    mine, other = _public(ours), _public(theirs)
    assert mine.keys() - {"on_trio"} - instance_variables == other.keys() - only_on_trio - instance_variables
    for member in mine.keys() & other.keys():
        one, two = mine[member], other[member]
        if isinstance(one, property):
            assert _shape(one.fget) == _shape(two.fget), member
        elif inspect.isfunction(one):
            assert _shape(one) == _shape(two), member
            awaited = inspect.iscoroutinefunction(two) or f"{name}.{member}" in AWAITED
            assert inspect.iscoroutinefunction(one) == awaited, member


def test_the_arguments_are_the_same() -> None:
    def fields(of: Any) -> dict[str, str]:
        # The module of trio's imports the bus for its types only.
        more = vars(bus) if of is ServicesOnTrio else None
        return {key: _type(hint) for key, hint in typing.get_type_hints(of, None, more).items()}

    for name in ("OpenArguments", "RunArguments", "Services"):
        assert fields(getattr(aio, name)) == fields(getattr(library, name)) != {}
    assert aio.Services._field_defaults == ServicesOnTrio._field_defaults


# --- a conversation -----------------------------------------------------------------------------------------


class Host:
    """Services of a program on asyncio."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.has_published = asyncio.Event()

    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        await asyncio.sleep(0)
        self.seen.append((asyncio.get_running_loop(), CALLER.get(), aio.Granted.current().method))
        if query == "refused":
            raise aio.HostError(-32000, "not today")
        if query == "broken":
            raise ZeroDivisionError("a bug, with a secret in its text")
        if query == "cancelled":
            raise asyncio.CancelledError
        in_thread = await asyncio.to_thread(lambda: aio.Granted.current().plugin.id)
        return [{"id": "1", "agent_id": agent_id, "content": f"{query} for {in_thread}"}]

    async def complete(
        self, request: Mapping[str, Any], delta: Callable[[str], Awaitable[None]] | None
    ) -> aio.Completion:
        for word in ("one", "two"):
            if delta is not None:
                await delta(word)
        return aio.Completion("one two")

    async def publish(self, event: Mapping[str, Any]) -> None:
        self.seen.append(event["topic"])
        self.has_published.set()


@pytest.mark.launches
def test_a_conversation_with_services(shelf: Path) -> None:
    """Services run on the loop of the task that opened the plugin, in its context. What they raise is
    answered, and ends nothing."""

    async def main() -> None:
        CALLER.set("ada")
        host = Host()
        services = aio.Services(memory=host, llm=host, broker=host)
        async with opened(shelf / "nexo_bare", services=services, config={"greeting": "hi"}) as plugin:
            CALLER.set("changed later")
            assert plugin.identity.id == plugin.plugin.id == "bare" and not plugin.report
            assert "bare_echo" in {tool["name"] for tool in await plugin.list()}
            assert (await plugin.call("bare_seen"))["config"] == {"greeting": "hi"}

            async def recall(query: str) -> Any:
                return await plugin.call("bare_recall", {"agent_id": "a", "query": query, "limit": 1})

            answer = await recall("x")
            assert answer["result"]["entries"][0]["content"] == "x for bare"
            assert host.seen == [(asyncio.get_running_loop(), "ada", "memory.recall")]
            assert (await recall("refused"))["error"]["message"] == "not today"
            assert (await recall("broken"))["error"]["message"] == "internal error: ZeroDivisionError"
            assert (await recall("cancelled"))["error"]["message"] == "internal error: RuntimeError"
            message = {"role": "user", "content": "count"}
            asked = {"provider": "p", "model": "m", "messages": [message], "stream": True}
            assert (await plugin.call("bare_complete", asked))["deltas"] == ["one", "two"]
            await plugin.call("bare_publish", {"topic": "shout.x", "event": {"payload": {}}})
            await host.has_published.wait()
            await plugin.notify("broker.event", {"topic": "news.x", "event": {"payload": {}}})
            with pytest.raises(aio.InvalidCall):
                await plugin.notify("no.such")
            texts = [str(number) for number in range(50)]
            answers = await asyncio.gather(*(plugin.call("bare_echo", {"text": text}) for text in texts))
            assert [answer["content"][0]["text"] for answer in answers] == texts
            for turns in range(10):  # cancelled before they are sent, while they wait, and when answered
                tasks = [asyncio.create_task(plugin.call("bare_echo", TEXT)) for _ in range(9)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                for task in tasks[::2]:
                    task.cancel()
                ends: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(end["content"] == ECHO for end in ends[1::2])
                assert all(isinstance(end, dict | asyncio.CancelledError) for end in ends[::2])
            waiting = [asyncio.create_task(plugin.call("bare_slow", {"seconds": 600})) for _ in range(3)]
            with pytest.raises(aio.PluginFailure) as caught:
                await plugin.call("bare_slow", {"seconds": 60}, seconds=0.1)
            assert caught.value.outcome.code == "timeout"
        left = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(end) for end in left} == {aio.PluginFailure}  # the plugin was closed
        report = plugin.report
        is_sound(report)
        assert report["session"]["host_calls"]["served"]["memory.recall"] == 4
        with pytest.raises(aio.PluginFailure):
            await plugin.call("bare_echo", TEXT)

    run(main)


@pytest.mark.launches
def test_one_call_and_all_that_can_be_wrong_with_it(shelf: Path) -> None:
    async def main() -> None:
        result = await aio.run(shelf / "nexo_bare", "bare_echo", TEXT, environ=ENVIRON)
        assert (result.value["content"], result.identity.id) == (ECHO, "bare")
        assert (await aio.call(shelf / "rune_echo", "echo", TEXT, environ=ENVIRON))["input"] == TEXT
        # An exception that leaves the context has the report, which is made on the way.
        with pytest.raises(aio.PluginError) as refused:
            async with opened(shelf / "nexo_bare") as plugin:
                await plugin.call("bare_fail", {"code": -33402, "message": "as told", "data": {}})
        assert refused.value.report is not None and refused.value.code == "-33402"
        with pytest.raises(ZeroDivisionError):
            async with opened(shelf / "nexo_bare") as plugin:
                raise ZeroDivisionError
        assert plugin.report is not None and plugin.report["outcome"]["code"] == "ok"
        with pytest.raises(aio.PluginFailure) as failed:
            await aio.run(shelf / "nowhere", "x", environ=ENVIRON)
        assert failed.value.outcome.code == "manifest_invalid"
        with pytest.raises(ValueError, match=r"^policy: its value is empty"):
            await aio.call(shelf / "nexo_bare", "x", policy="")
        with pytest.raises(ValueError, match=r"^services: it has to be a runner\.aio\.Services"):
            await aio.call(shelf / "nexo_bare", "x", services=runner.Services())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="sends its plugins none") as hidden:
            await aio.call(shelf / "nexo_bare", "x", secrets={"token": "sesame"}, environ=ENVIRON)
        frames = [frame for frame in hidden.traceback if "/runner/" in str(frame.path)]
        assert frames and not any("sesame" in repr(dict(frame.frame.f_locals)) for frame in frames)
        with pytest.raises(runner.NotOnTrio, match=r"use the same name of runner\.aio"):
            await runner.run(shelf / "nexo_bare", "x")
        with pytest.raises(runner.WouldBlock, match=r"use await runner\.aio\.call\(\.\.\.\) here"):
            runner.call(shelf / "nexo_bare", "x")

    run(main)


@pytest.mark.launches
def test_progress_and_events(shelf: Path) -> None:
    """Callbacks are plain or coroutine functions; all progress is told before the call returns, in order. A
    callback that fails ends its call. A reader that is cancelled loses no event."""

    async def main() -> None:
        async with opened(shelf / "mcp_bare", server="legacy") as plugin:
            plain: list[Any] = []
            awaited: list[Any] = []

            async def slowly(value: Mapping[str, Any]) -> None:
                await asyncio.sleep(0.01)
                awaited.append((value["progress"], CALLER.get()))

            CALLER.set("grace")
            await plugin.call("slow", {"steps": 3}, on_progress=plain.append)
            await plugin.call("slow", {"steps": 3, "seconds": 0}, on_progress=slowly)
            assert [value["progress"] for value in plain] == [1, 2, 3]
            assert awaited == [(1, "grace"), (2, "grace"), (3, "grace")]

            async def fails(value: Mapping[str, Any]) -> None:
                raise KeyError("in the callback")

            with pytest.raises(KeyError, match="in the callback"):
                await plugin.call("slow", {"steps": 1000, "seconds": 60}, on_progress=fails)
            with pytest.raises(aio.PluginError):
                await plugin.call("fail", on_progress=plain.append)
            events = plugin.events()
            read = [await anext(events) for _ in range(6)]
            assert all(isinstance(event, aio.Progress) for event in read)
            assert isinstance(await anext(events), aio.Progress)  # of the call whose callback failed
            for turns in range(40):
                reader = asyncio.ensure_future(anext(events))
                for _ in range(turns % 8):
                    await asyncio.sleep(0)
                reader.cancel()
                await asyncio.wait([reader])
                await plugin.call("log")
            # Nobody reads now: what waits is bounded.
            for _ in range(MOST_EVENTS):
                await plugin.call("log")
        rest = [event async for event in events]
        # One more if an event came just when its reader was cancelled: the iterator holds it.
        assert len(rest) - MOST_EVENTS in (0, 1)
        assert plugin.report is not None
        dropped = plugin.report["session"]["dropped"]["notices"]
        assert 0 < dropped <= 40  # of the 296, each was read, is in `rest`, or is counted

    run(main)


@pytest.mark.launches
def test_a_cancelled_call_of_a_package(shelf: Path) -> None:
    """The plugin is told and answers; the record of the call says so. Its next call gets a new process."""

    async def main() -> None:
        async with opened(shelf / "vai_devkit") as plugin:
            for times in (1, 2):
                asked = asyncio.Event()
                given = {"do": "wait", "count": 1}
                task = asyncio.create_task(
                    plugin.call("reader", given, on_progress=lambda _, asked=asked: asked.set())
                )
                await asked.wait()
                for _ in range(times):
                    task.cancel()
                    await asyncio.sleep(0)
                with pytest.raises(asyncio.CancelledError):
                    await task
                found = plugin.invocation
                assert found is not None
                assert (found["status"], found["code"]) == ("cancelled", "devkit.cancelled")
            assert (await plugin.call("reader", {}))["structured_output"]["served"] == 1

    run(main)


@pytest.mark.launches
def test_a_supervisor(shelf: Path) -> None:
    """A program survives the crash of its plugin. Services, events and progress are on the loop of the task
    that opened the supervisor, or made the call."""
    heard: list[tuple[Any, str]] = []
    host = Host()

    async def main() -> None:
        has_heard = asyncio.Event()

        async def hear(name: str, event: aio.Notice | aio.Progress) -> None:
            await asyncio.sleep(0)
            heard.append((asyncio.get_running_loop(), name))
            has_heard.set()

        numbers = {"respawn": True, "backoff": 0.05, "jitter": 0.0}
        made = partial(aio_lifecycle.Spec, environ=ENVIRON, numbers=numbers)
        async with aio_lifecycle.open_supervisor(on_event=hear) as supervisor:
            news = await supervisor.subscribe()
            await supervisor.add(made("bare", shelf / "nexo_bare", services=aio.Services(memory=host)))
            await supervisor.add(made("steps", shelf / "mcp_bare", server="legacy"))
            with pytest.raises(ValueError, match="already"):
                await supervisor.add(made("bare", shelf / "nexo_bare"))
            with pytest.raises(ValueError, match=r"runner\.aio\.Services"):
                await supervisor.add(made("other", shelf / "nexo_bare", services=ServicesOnTrio()))
            with pytest.raises(aio_lifecycle.UnknownPlugin):
                await supervisor.call("nobody", "bare_echo", TEXT)
            asked = {"agent_id": "ada", "query": "gears", "limit": 3}
            answer = (await supervisor.call("bare", "bare_recall", asked)).value
            assert answer["result"]["entries"][0]["content"] == "gears for bare"
            assert host.seen[0][0] is asyncio.get_running_loop()
            stepped = asyncio.Event()
            given = {"steps": 900, "seconds": 1}
            task = asyncio.create_task(
                supervisor.call("steps", "slow", given, on_progress=lambda _: stepped.set())
            )
            await stepped.wait()
            await has_heard.wait()
            assert heard[0] == (asyncio.get_running_loop(), "steps")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            slow = asyncio.create_task(supervisor.call("bare", "bare_slow", {"seconds": 600}))
            found: dict[str, aio_lifecycle.Status] = {}
            while not found or found["bare"].in_flight == 0:
                found = {each.name: each for each in await supervisor.plugins()}
            os.kill(found["bare"].pids[0], signal.SIGKILL)
            with pytest.raises(aio.PluginFailure) as failed:
                await slow
            assert failed.value.outcome.cause == "signal:9"
            assert (await supervisor.call("bare", "bare_echo", TEXT)).value["content"] == ECHO
            assert sum(each.restarts for each in await supervisor.plugins()) == 1
            assert "bare_echo" in {tool["name"] for tool in await supervisor.tools("bare")}
            await supervisor.stop("bare")
            with pytest.raises(aio_lifecycle.Unavailable) as refused:
                await supervisor.call("bare", "bare_echo", TEXT)
            assert refused.value.state == "stopped"
            log = await supervisor.follow("bare")
        happened = [each.what async for each in news if each.name == "bare" and each.what != "state"]
        assert happened == ["crashed", "respawning", "respawned"] and news.dropped == 0
        assert [piece async for piece in log] == []  # it has ended with its supervisor
        log.close()

    run(main)


@pytest.mark.launches
def test_cancelled_while_it_opens(shelf: Path) -> None:
    """At any moment: no process is left (`nothing_left`), and the next one opens."""

    async def opens_and_waits() -> None:
        async with opened(shelf / "nexo_bare"):
            await asyncio.Event().wait()

    async def main() -> None:
        thread = trio_thread.trio_side()
        assert isinstance(thread, trio_thread.TrioThread)
        for turns in (0, 1, 2, 3, 5, 10, 20, 40, 80):
            task = asyncio.create_task(opens_and_waits())
            for _ in range(turns):
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not thread.runs
        assert (await aio.call(shelf / "nexo_bare", "bare_echo", TEXT, environ=ENVIRON))["content"] == ECHO

    run(main)


@pytest.mark.launches
def test_two_loops_share_one_plugin_and_one_closes(shelf: Path) -> None:
    """A plugin may be called from any loop. It ends when the loop that opened it is closed, although nobody
    left its context."""
    ours, other = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def enter() -> tuple[Any, aio.OpenPlugin]:
        context = opened(shelf / "nexo_bare")
        return context, await context.__aenter__()

    context, plugin = ours.run_until_complete(enter())
    answer = other.run_until_complete(plugin.call("bare_echo", TEXT))
    assert answer["content"] == ECHO
    ours.close()

    async def until_it_ends() -> list[Any]:
        return [event async for event in plugin.events()]

    assert other.run_until_complete(asyncio.wait_for(until_it_ends(), SECONDS)) == []
    with pytest.raises(aio.PluginFailure):
        other.run_until_complete(plugin.call("bare_echo", TEXT))
    other.close()
    del context


def test_a_bus() -> None:
    """Shared with plugins, which live on trio. `subscribe` counts from when it is made."""

    async def main() -> None:
        topics = aio.SnapshotBus()
        here = trio_thread.trio_side()
        member = topics.on_trio.join("plugin", lambda snapshot: None, trio.lowlevel.checkpoint)

        async def publish(topic: str, payload: bytes) -> None:
            member.publish(topic, payload)

        assert await topics.publish("a", b"1") == topics.version == 1
        found = topics.get("a")
        assert found is not None and (found.payload, found.publisher) == (b"1", "host")
        with topics.subscribe("a") as news:
            for number in (2, 3):
                await here.run(publish, "a", b"%d" % number)
            assert [(await anext(news)).payload for _ in range(2)] == [b"2", b"3"]
            reader = asyncio.ensure_future(anext(news))
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
            await here.run(publish, "a", b"4")
        assert [each.payload async for each in news] == [b"4"]  # until it is closed
        large = bytes(PAYLOAD_MOST_BYTES)
        with topics.subscribe("b") as unread:  # too slow a reader is ended, and learns of it
            for _ in range(bus.WAITING_MOST_BYTES // PAYLOAD_MOST_BYTES + 2):
                await here.run(publish, "b", large)
            await asyncio.wait_for(topics.room("b"), SECONDS)
        with pytest.raises(aio.BusRefused, match="waited to be read"):
            [each async for each in unread]
        await topics.forget("a")
        assert topics.get("a") is None and topics.held > 0
        with pytest.raises(aio.BusRefused):
            topics.subscribe("x" * 2000)
        with pytest.raises(aio.BusRefused):
            await topics.publish("x" * 2000, b"")

        async def shout(payload: bytes) -> bytes:
            await asyncio.sleep(0)
            return payload.upper()

        topics.register_action("shout", shout)
        action = topics.on_trio.find_action("shout")
        assert action is not None and await here.run(action[0], b"abc") == b"ABC"
        topics.focused_screen = "mine"
        assert topics.on_trio.focused_screen == "mine"

    run(main)
    trio_thread.end()


# --- programs -----------------------------------------------------------------------------------------------


def _started(caller: Caller, folder: Path, program: str, *options: str) -> subprocess.Popen[str]:
    """Start a program of this caller beside the plugins; with "-m asyncio" it is typed into a console."""
    (folder / "host").mkdir(exist_ok=True)
    script = folder / "host/script.py"
    script.write_text(program)
    for path, mode in ((script.parent, 0o755), (script, 0o644)):
        path.chmod(mode)
    caller.give(folder)
    return subprocess.Popen(
        [*caller.prefix, *caller.python, *(options or ("host/script.py",))],
        cwd=folder,
        env=dict(caller.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


INTERRUPTED = """
import asyncio
import runner


def tell(progress):
    print(progress["message"], flush=True)


async def main():
    async with runner.aio.open_plugin("mcp_bare", server="legacy") as plugin:
        try:
            await plugin.call("slow", {"steps": 1000, "seconds": 600}, on_progress=tell, seconds=600)
        finally:
            print("left", plugin.report, flush=True)

try:
    LOOP
except KeyboardInterrupt as error:
    print(type(error).__name__, error.__cause__, flush=True)
"""


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("asyncio.run(main())", "left None\nKeyboardInterrupt None\n"),
        (
            "import uvloop; asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())",
            "left None\nKeyboardInterrupt None\n",
        ),
        # Without a Runner no task ends before the program does, which has an open plugin and a call in it.
        ("asyncio.new_event_loop().run_until_complete(main())", "KeyboardInterrupt None\n"),
    ],
    ids=["asyncio", "uvloop", "no Runner"],
)
def test_ctrl_c(runner_as: Caller, shelf: Path, loop: str, said: str) -> None:
    with _started(runner_as, shelf, INTERRUPTED.replace("LOOP", loop)) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "step 1\n"  # it is in the call now
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, out.replace("left None\n", "", "left" not in said)) == (0, said)
    assert [
        line for line in err.splitlines() if "Task was destroyed" not in line and "task: <" not in line
    ] == []


FORKED = """
import asyncio, atexit, os
import runner

ECHO = ("bare_echo", {"text": "hello"})


async def in_child(plugin):
    try:
        await plugin.call(*ECHO)
    except RuntimeError as error:
        print("child:", str(error)[:32], flush=True)
    async with runner.aio.open_plugin("nexo_bare") as own:
        print("child:", (await own.call(*ECHO))["content"], flush=True)


async def main():
    async with runner.aio.open_plugin("nexo_bare") as plugin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(in_child(plugin))
            atexit._run_exitfuncs()
            os._exit(7)  # a child that leaves the parent's loop in another way takes its epoll apart
        print("parent:", os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]))
        print("parent:", (await plugin.call(*ECHO))["content"])
    print("parent:", plugin.report["outcome"]["code"])


asyncio.run(main())
"""


def test_a_fork_with_an_open_plugin(runner_as: Caller, shelf: Path) -> None:
    out, err = _started(runner_as, shelf, FORKED).communicate(timeout=SECONDS)
    assert out.splitlines() == [
        "child: this was opened before a fork, b",
        f"child: {ECHO}",
        "parent: 7",
        f"parent: {ECHO}",
        "parent: ok",
    ]
    assert "Error" not in err.replace("DeprecationWarning", ""), err


CONSOLE = """\
import runner
context = runner.aio.open_plugin("nexo_bare")
plugin = await context.__aenter__()
print((await plugin.call("bare_echo", {"text": "hello"}))["content"])
print((await plugin.call("bare_slow", {"seconds": 0}))["slept"])
await context.__aexit__(None, None, None)
print(plugin.report["outcome"]["code"])
"""


def test_a_notebook(runner_as: Caller, shelf: Path) -> None:
    """Each line is a task of its own, as each cell of a notebook is. The console of asyncio is the one that
    Python brings along."""
    process = _started(runner_as, shelf, "", "-m", "asyncio")
    out, err = process.communicate(CONSOLE, timeout=SECONDS)
    assert out.replace(">>> ", "").split("\n") == [str(ECHO), "0", "False", "ok", ""]
    assert "Traceback" not in err, err


ON_ANYIO = """
import sys
import anyio
import runner


class Memory:
    async def recall(self, agent_id, query, limit):
        await anyio.sleep(0)  # works only on the backend that runs here
        return [{"id": "1", "agent_id": agent_id, "content": query}]


async def tell(progress):
    await anyio.sleep(0)
    print(progress["message"], flush=True)


async def main():
    services = runner.aio.Services(memory=Memory())
    async with anyio.create_task_group() as group:
        async with runner.aio.open_plugin("nexo_bare", services=services) as plugin:
            asked = {"agent_id": "a", "query": "gears", "limit": 1}
            print((await plugin.call("bare_recall", asked))["result"]["entries"][0]["content"])
            with anyio.move_on_after(0.2) as patience:
                await plugin.call("bare_slow", {"seconds": 600})
            print(patience.cancelled_caught, (await plugin.call("bare_slow", {"seconds": 0}))["slept"])
    async with runner.aio.open_plugin("mcp_bare", server="legacy") as plugin:
        await plugin.call("slow", {"steps": 2}, on_progress=tell)


anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_anyio_program(runner_as: Caller, shelf: Path, backend: str) -> None:
    process = _started(runner_as, shelf, ON_ANYIO, "host/script.py", backend)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (0, "gears\nTrue 0\nstep 1\nstep 2\n", "")
