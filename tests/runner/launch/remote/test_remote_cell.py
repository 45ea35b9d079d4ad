"""A confined plugin as a trio host sees it: its streams, how far it came, how it ended, and nothing left."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Caller
from tests.limits.cage import Box
from tests.runner.launch import monitored_plugins
from tests.runner.launch.monitored_plugins import (
    CAT,
    SLEEPS,
    in_cage,
    invocation,
    is_sound,
    line,
    read,
    run,
    settled,
    summed,
)
from tests.tables import REPEAT, one_case

Write = Callable[..., Path]


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Box:
    runner_as.give(plugin_dir)
    return Box(runner_as, plugin_dir)


# --- a conversation ----------------------------------------------------------------------------------------


def echoes(given: dict[str, Any]) -> dict[str, Any]:
    async def act(cage: Any) -> dict[str, Any]:
        prepared = await cage.prepared()
        timings = await cage.launched()
        await cage.stdin.send_all(b"hello\n")
        said = await line(cage.stdout)
        early = cage.has_ended is not None
        await cage.stdin.aclose()
        rest = [await read(cage.stdout), await read(cage.stderr)]
        ended = await cage.ended()
        cage.signal(15)  # nobody is there any more
        cage.kill()
        return {
            "plugin": [prepared.plugin.id, prepared.plugin.contract, prepared.plugin.entrypoint.command],
            "limits": prepared.limits.deadline,
            "declare": [type(prepared.declare).__name__, type(prepared.host).__name__],
            "unsandboxed": prepared.unsandboxed,
            "timings": list(timings),
            "said": said,
            "early": early,
            "rest": rest,
            "ended": summed(ended),
            "again": summed(await cage.ended()) == summed(cage.has_ended),
            "explanation": ended.explanation,
            "report": ended.report,
        }

    return in_cage(given, act)


def test_a_conversation(box: Box) -> None:
    told = run(box, echoes, monitored_plugins.given(box, CAT, limits={"deadline": 1000.0}))
    assert told["plugin"] == ["plugin", "nexo", "./plugin"]
    assert told["limits"] == 1000.0
    assert told["declare"] == ["tuple", "tuple"] and told["unsandboxed"] is False
    assert told["timings"] == ["manifest", "policy", "plan", "launch"]
    assert (told["said"], told["early"], told["rest"]) == ("hello", False, ["", ""])
    assert told["ended"] == ["ok", "run", "", 0] and told["again"]
    assert told["explanation"] == []
    is_sound(told["report"])
    assert told["report"]["plugin"]["id"] == "plugin"
    assert list(told["report"]["timings"]) == ["manifest", "policy", "plan", "launch", "run", "teardown"]


def hears(given: dict[str, Any]) -> list[Any]:
    async def act(cage: Any) -> list[Any]:
        out, err = await read(cage.stdout), await read(cage.stderr)
        return [out, err, summed(await cage.ended())]

    return in_cage(given, act)


def test_streams_are_the_plugins_own(box: Box) -> None:
    """Opened anew by name, as shell scripts do, also by a plugin that runs under another uid."""
    code = "#!/bin/sh\necho out\necho more > /dev/stdout\necho err > /dev/stderr\nexit 7\n"
    out, err, ended = run(box, hears, monitored_plugins.given(box, code))
    assert (out, err) == ("out\nmore\n", "err\n")
    assert ended == ["crashed", "run", "exit:7", 7]


def test_what_a_plugin_left_running_is_no_reason_to_wait(box: Box) -> None:
    """stdout ends with the plugin's first process, although a child of it still has the pipe."""
    code = "#!/bin/sh\nsleep 1000 &\necho bye\n"
    assert run(box, hears, monitored_plugins.given(box, code)) == ["bye\n", "", ["ok", "run", "", 0]]


def test_a_plugin_that_closes_its_stdout_and_lives_is_seen(box: Box) -> None:
    """The pipe is the plugin's alone: neither bubblewrap nor the cell's init, the monitor or the fork server
    hold it.
    """

    def deaf(given: dict[str, Any]) -> list[Any]:
        import trio

        async def act(cage: Any) -> list[Any]:
            out = await line(cage.stdout)
            closed = await line(cage.stderr)
            ended_first = False
            with trio.move_on_after(30):
                ended_first = await cage.stdout.receive_some() == b""
            await cage.stdin.send_all(b"go\n")
            rest = [await read(cage.stderr), await read(cage.stdout)]
            return [out, closed, ended_first, rest, summed(await cage.ended())]

        return in_cage(given, act)

    code = "#!/bin/sh\necho last\nexec >&-\necho closed >&2\nread word\necho $word >&2\n"
    expected = ["last", "closed", True, ["go\n", ""], ["ok", "run", "", 0]]
    assert run(box, deaf, monitored_plugins.given(box, code)) == expected


def test_limits_of_a_conversation_are_the_sessions(box: Box) -> None:
    """Its stderr is not ours to count, and nobody else's either."""
    limits = {"output": 10, "output_lines": 1, "handshake": 5.0, "call": 6.0, "idle": 7.0, "teardown": 8.0}
    code = "#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do echo $i >&2; done\n"

    def reported(given: dict[str, Any]) -> list[Any]:
        async def act(cage: Any) -> list[Any]:
            err = await read(cage.stderr)
            ended = await cage.ended()
            return [err, summed(ended), ended.report]

        return in_cage(given, act)

    err, ended, report = run(box, reported, monitored_plugins.given(box, code, limits=limits))
    assert err == "1\n2\n3\n4\n5\n6\n7\n8\n9\n" and ended == ["ok", "run", "", 0]
    is_sound(report)
    held = {limit["name"]: (limit["enforced_by"], limit["effective"]) for limit in report["limits"]}
    for name in ("output", "output_lines", "handshake", "call", "idle"):
        assert held[name] == ("session", limits[name])
    assert held["teardown"] == ("clock", 8.0)
    assert report["stderr"] is None


# --- what never starts -------------------------------------------------------------------------------------


def refused(given: dict[str, Any]) -> dict[str, Any]:
    from runner.outcome import Failure

    async def act(cage: Any) -> dict[str, Any]:
        failures = []
        for wait in (cage.prepared, cage.launched):
            try:
                await wait()
            except Failure as failure:
                failures.append([failure.outcome.code, failure.exec_status])
        ended = await cage.ended()
        return {
            "failures": failures,
            "ended": summed(ended),
            "denials": [[type(d).__name__, d.rule, list(d.where)] for d in ended.outcome.denials],
            "diagnostics": [[type(d).__name__, d.rule, d.line] for d in ended.outcome.diagnostics],
            "explanation": ended.explanation,
            "report": ended.report,
            "streams": [await read(cage.stdout), await read(cage.stderr)],
        }

    return in_cage(given, act)


@one_case(
    ("spoil", "code"),
    [
        ("manifest", "manifest_invalid"),
        ("ceiling", "policy_denied"),
        ("program", "launch_failed"),
        ("nothing there", "manifest_invalid"),
        ("policy", "policy_invalid"),
    ],
)
def test_a_failure_before_the_launch_is_told_as_exec_tells_it(box: Box, spoil: str, code: str) -> None:
    given = monitored_plugins.given(box, CAT, read=("/srv",) if spoil == "ceiling" else ())
    folder = Path(given["manifest"])
    match spoil:
        case "manifest":
            (folder / "nexo-plugin.toml").write_text('[plugin]\nid = 1\nversion = "1.0.0"\n')
        case "program":
            (folder / "plugin").unlink()
        case "nothing there":
            given["manifest"] = str(folder / "nowhere.toml")
        case "policy":
            given["policy"] = "/nowhere/policy.toml"
    told = run(box, refused, given)
    said = box.caller("exec", "--policy", given["policy"], given["manifest"])
    assert told["ended"][0] == code
    assert told["ended"][3] == said.returncode
    assert "\n".join(told["explanation"]) + "\n" == said.stderr
    # A program that is missing is found missing before anything is decided for good.
    assert told["failures"] == [[code, said.returncode]] * 2
    is_sound(told["report"])
    assert told["streams"] == ["", ""]
    if code == "policy_denied":
        ((kind, rule, where),) = told["denials"]
        assert kind == "Denial" and rule == "read_ceiling" and where
    if spoil == "manifest":
        assert told["diagnostics"][0][0] == "Diagnostic"


def test_a_launch_that_fails_tells_why(box: Box) -> None:
    """Prepared, and then bubblewrap fails: what it said is in the message. The plugin's stderr has none."""

    def broken(given: dict[str, Any]) -> list[Any]:
        async def act(cage: Any) -> list[Any]:
            await cage.prepared()
            await cage.launched()
            err = await read(cage.stderr)
            return [err, (await cage.ended()).outcome.message, summed(await cage.ended())]

        return in_cage(given, act)

    # Fewer files than bubblewrap itself needs.
    err, message, ended = run(
        box, broken, monitored_plugins.given(box, "#!/bin/sh\n", limits={"open_files": 3})
    )
    assert err == "" and "it said: bwrap: " in message
    assert ended == ["launch_failed", "launch", "bubblewrap", 125]


# --- the end -----------------------------------------------------------------------------------------------


def asked(given: dict[str, Any], numbers: list[int]) -> list[Any]:
    """Once it runs it is sent these, each when it has said that the one before has arrived."""

    async def act(cage: Any) -> list[Any]:
        await line(cage.stdout)
        for number in numbers:
            cage.signal(number)
            if number != numbers[-1]:
                await line(cage.stdout)
        ended = await cage.ended()
        assert ended.report is not None
        how = ended.report["exit"]
        return [*summed(ended), how["ended_by"], how["forced"], how["signal"]]

    return in_cage(given, act)


TRAPS = '#!/bin/sh\ntrap "echo heard; {then}" TERM\necho runs\nwhile :; do sleep 0.05; done\n'


FORCED = ["cancelled", "teardown", "signal:15", 143, "signal", True, 15]


@one_case(
    ("code", "numbers", "teardown", "expected"),
    [
        (SLEEPS, [15], 1000.0, ["cancelled", "run", "signal:15", 143, "signal", False, 15]),
        (SLEEPS, [9], 1000.0, ["cancelled", "teardown", "signal:9", 137, "signal", True, 9]),
        (TRAPS.format(then="exit 0"), [15], 1000.0, ["ok", "run", "", 0, "signal", False, 15]),
        (TRAPS.format(then="exit 3"), [15], 1000.0, ["crashed", "run", "exit:3", 3, "signal", False, 15]),
        (TRAPS.format(then=":"), [15], 0.2, FORCED),
        (TRAPS.format(then=":"), [15, 15], 1000.0, FORCED),
        (TRAPS.format(then=":"), [15, 9], 1000.0, FORCED),
    ],
    ids=["term", "kill", "obeys", "fails", "ignores", "twice", "then-kill"],
)
def test_asked_to_end(box: Box, code: str, numbers: list[int], teardown: float, expected: list[Any]) -> None:
    told = monitored_plugins.given(box, code, limits={"teardown": teardown})
    assert run(box, asked, told, numbers) == expected


def test_killed_while_it_floods(box: Box) -> None:
    """Both pipes are full and nobody reads them."""

    def flooded(given: dict[str, Any]) -> list[Any]:
        async def act(cage: Any) -> list[Any]:
            await cage.launched()
            for stream in (cage.stdout, cage.stderr):
                await stream.receive_some(1)
            cage.kill()
            ended = await cage.ended()
            rest = await read(cage.stdout)
            return [summed(ended), len(rest) > 0]

        return in_cage(given, act)

    code = "#!/bin/sh\nyes >&2 &\nexec yes\n"
    assert run(box, flooded, monitored_plugins.given(box, code)) == [
        ["cancelled", "teardown", "signal:9", 137],
        True,
    ]


def test_a_deadline_is_the_monitors(box: Box) -> None:
    def expired(given: dict[str, Any]) -> list[Any]:
        async def act(cage: Any) -> list[Any]:
            return summed(await cage.ended())

        return in_cage(given, act)

    told = run(box, expired, monitored_plugins.given(box, SLEEPS, limits={"deadline": 1.0}))
    assert told == ["timeout", "invocation", "deadline", 124]


def left(given: dict[str, Any], how: str) -> list[Any]:
    """Leave with the plugin running; what comes out, and what is left of it."""
    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage
    from sandbox.cell.cell import descendants

    async def main() -> list[Any]:
        out = ""
        family: list[int] = []
        try:
            with trio.move_on_after(1000) as scope:
                async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
                    await line(cage.stdout)
                    monitor = cage._pid or 0
                    family = [monitor, *descendants(monitor)]
                    if how == "error":
                        raise KeyError("the body's")
                    if how == "cancelled":
                        scope.cancel()
                        await trio.sleep_forever()
            out = f"cancelled {scope.cancelled_caught}"
        except KeyError as error:
            out = repr(error)
        ended = cage.has_ended
        from runner.launch.remote import forkserver

        assert forkserver.current().is_alive()
        alive = settled(lambda: [pid for pid in family if exists(pid)])
        await aclose_forkserver()
        return [out, len(family) > 3, alive, summed(ended)]

    def exists(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return trio.run(main)


@one_case(
    ("how", "out"),
    [("leaves", "cancelled False"), ("error", 'KeyError("the body\'s")'), ("cancelled", "cancelled True")],
)
def test_leaving_ends_what_lives(box: Box, how: str, out: str) -> None:
    told = run(box, left, monitored_plugins.given(box, SLEEPS), how)
    assert told == [out, True, [], ["cancelled", "teardown", "signal:9", 137]]


def interrupted(given: dict[str, Any], steps: int) -> list[Any]:
    """Cancelled after ever longer times: on its way, launched, running. What is open before and after."""
    import os

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage
    from sandbox.cell.cell import children

    reached = [0, 0, 0]
    took = 0.0  # until it was launched, the last time that it was

    async def once(seconds: float) -> None:
        nonlocal took
        began = trio.current_time()
        with trio.move_on_after(seconds):
            async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
                reached[0] += 1
                await cage.prepared()
                reached[1] += 1
                await cage.launched()
                reached[2] += 1
                took = trio.current_time() - began
                await trio.sleep_forever()

    async def main() -> list[Any]:
        while not took:
            await once(1.0)  # the fork server, and what trio opens once
        await once(1.0)
        before = len(os.listdir("/proc/self/fd"))
        with trio.fail_after(100):
            with trio.CancelScope() as scope:
                scope.cancel()
                async with open_cage(invocation(given), environ={}):
                    pass
            for step in range(steps):
                await once(2 * took * step / steps)
        after = len(os.listdir("/proc/self/fd"))
        (forkserver,) = children(os.getpid())
        assert not settled(lambda: children(forkserver))
        await aclose_forkserver()
        return [after - before, reached[0] > reached[2] > 0, children(os.getpid())]

    return trio.run(main)


def test_cancelled_at_any_point(box: Box) -> None:
    assert run(box, interrupted, monitored_plugins.given(box, SLEEPS), 25 * REPEAT) == [0, True, []]


# --- many --------------------------------------------------------------------------------------------------


def many(given: dict[str, Any], count: int, at_once: int) -> list[Any]:
    import os

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage
    from sandbox.cell.cell import children

    said: list[str] = []

    async def one(number: int, room: Any) -> None:
        async with room, open_cage(invocation(given), environ=dict(os.environ)) as cage:
            await cage.stdin.send_all(b"%d\n" % number)
            await cage.stdin.aclose()
            out = await read(cage.stdout)
            ended = await cage.ended()
            said.append(f"{ended.outcome.code} {out.strip()}")

    async def batch(numbers: Any) -> None:
        room = trio.CapacityLimiter(at_once)
        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(one, number, room)

    async def main() -> list[Any]:
        await batch(range(1))
        before = len(os.listdir("/proc/self/fd"))
        with trio.fail_after(200):
            await batch(range(1, count))
        after = len(os.listdir("/proc/self/fd"))
        (forkserver,) = children(os.getpid())
        assert not settled(lambda: children(forkserver))
        held = sorted(os.listdir(f"/proc/{forkserver}/fd"), key=int)
        await aclose_forkserver()
        return [sorted(said, key=lambda word: int(word.split()[1])), after - before, held[:3], len(held)]

    return trio.run(main)


@pytest.mark.parametrize(("count", "at_once"), [(50 * REPEAT, 4), (65, 64)])
def test_many(box: Box, count: int, at_once: int) -> None:
    said, more, streams, held = run(box, many, monitored_plugins.given(box, CAT), count, at_once, timeout=300)
    assert said == [f"ok {number}" for number in range(count)]
    assert more == 0
    assert streams == ["0", "1", "2"] and held == 5  # and the sockets of orders and of plans


def test_a_host_full_of_threads(box: Box) -> None:
    """One of them starts the fork server and ends: neither that nor any plugin ends with it."""

    def crowded(given: dict[str, Any]) -> list[Any]:
        import threading

        import trio

        from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

        over = threading.Event()
        crowd = [threading.Thread(target=over.wait) for _ in range(30)]
        for thread in crowd:
            thread.start()

        def first() -> None:
            trio.run(echo, "first")

        said: list[str] = []

        async def echo(word: str, ending: Any = None) -> None:
            async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
                await cage.launched()
                if ending is not None:
                    await trio.to_thread.run_sync(ending.join)
                await cage.stdin.send_all(word.encode() + b"\n")
                said.append(await line(cage.stdout))

        starter = threading.Thread(target=first)
        starter.start()
        starter.join()

        async def main() -> None:
            other = threading.Thread(target=lambda: trio.run(echo, "other"))
            other.start()
            await echo("main", other)
            await aclose_forkserver()

        trio.run(main)
        over.set()
        return sorted(said)

    assert run(box, crowded, monitored_plugins.given(box, CAT)) == ["first", "main", "other"]


def test_a_child_of_the_host_has_its_own(box: Box) -> None:
    """A fork copies the module's state: the child must neither use nor keep what is its parent's."""

    def forked(given: dict[str, Any]) -> list[Any]:
        import os

        import trio

        from runner.launch.remote import forkserver
        from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

        async def echo(word: bytes) -> str:
            async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
                await cage.stdin.send_all(word + b"\n")
                return await line(cage.stdout)

        first = trio.run(echo, b"parent")
        mine = forkserver.current()
        pid = os.fork()
        if pid == 0:
            try:
                fresh = mine.orders.fileno() == -1 and trio.run(echo, b"child") == "child"
                trio.run(aclose_forkserver)
                os._exit(0 if fresh else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(pid, 0)
        again = trio.run(echo, b"again")
        same = forkserver.current() is mine
        trio.run(aclose_forkserver)
        return [first, status, again, same]

    assert run(box, forked, monitored_plugins.given(box, CAT)) == ["parent", 0, "again", True]


def test_an_environment_larger_than_a_message(box: Box) -> None:
    """And with a name that is no UTF-8."""

    def large(given: dict[str, Any]) -> list[Any]:
        import trio

        from runner.launch.remote.remote_cell import aclose_forkserver, open_cage
        from runner.launch.stages import Invocation
        from sandbox.spec import Overrides

        environ = {f"NAME_{number}": "x" * 1000 for number in range(300)}
        environ |= {"PATH": "/usr/bin:/bin", "WANTED": "caf\udce9"}

        async def main() -> list[Any]:
            asked = Invocation(
                given["manifest"], policy=given["policy"], overrides=Overrides(pass_env=("WANTED",))
            )
            async with open_cage(asked, environ=environ) as cage:
                out = b""
                while data := await cage.stdout.receive_some():
                    out += data
                ended = summed(await cage.ended())
            refused = []
            for name in ("", "A=B", "A\0"):
                try:
                    async with open_cage(asked, environ={name: "x"}):
                        pass
                except ValueError:
                    refused.append(name)
            await aclose_forkserver()
            return [out.decode("latin-1"), ended, refused]

        return trio.run(main)

    code = '#!/bin/sh\nprintf %s "$WANTED"\n'
    assert run(box, large, monitored_plugins.given(box, code)) == [
        "caf\xe9",
        ["ok", "run", "", 0],
        ["", "A=B", "A\0"],
    ]


def test_names_relative_to_the_hosts_folder(box: Box) -> None:
    def relative(given: dict[str, Any]) -> list[Any]:
        import os

        import trio

        from runner.launch.remote.remote_cell import aclose_forkserver, open_cage
        from runner.launch.stages import Invocation

        folder, name = os.path.split(given["manifest"])

        async def where(cwd: Any) -> Any:
            asked = Invocation(name, policy=given["policy"])
            async with open_cage(asked, environ={"PATH": "/usr/bin:/bin"}, cwd=cwd) as cage:
                return (await cage.ended()).outcome.code

        async def main() -> list[Any]:
            found = [await where(None), await where(folder), await where("/nowhere")]
            os.chdir(folder)
            found.append(await where(None))
            await aclose_forkserver()
            return found

        return trio.run(main)

    told = run(box, relative, monitored_plugins.given(box, "#!/bin/sh\n"))
    assert told == ["manifest_invalid", "ok", "launch_failed", "ok"]


def test_a_host_that_is_interrupted(box: Box) -> None:
    """^C: the exception comes out as it is, after the plugin has ended."""
    given = monitored_plugins.given(box, SLEEPS)

    def patient(given: dict[str, Any]) -> list[Any]:
        import os
        import signal

        async def act(cage: Any) -> None:
            await line(cage.stdout)
            os.kill(os.getpid(), signal.SIGINT)
            await cage.ended()

        try:
            in_cage(given, act)
        except KeyboardInterrupt:
            return ["interrupted"]
        return []

    assert run(box, patient, given) == ["interrupted"]


def test_an_unsandboxed_plugin(box: Box) -> None:
    given = monitored_plugins.given(box, "#!/bin/sh\nsleep 1000 &\nread word\necho $word\n", policy=_BARE)
    manifest = Path(given["manifest"]) / "nexo-plugin.toml"
    manifest.write_text(manifest.read_text().replace("enabled = true", "enabled = false"))
    told = run(box, echoes, given)
    assert told["unsandboxed"] is True
    assert (told["said"], told["ended"]) == ("hello", ["ok", "run", "", 0])


_BARE = 'version = 1\nunsandboxed = "allow"\n'


def test_nothing_of_trio_in_a_monitor() -> None:
    """What launches is single-threaded and small."""
    import sys

    program = "import sys, runner.launch.remote.forkserver\n"
    program += "print([n for n in ('trio', 'asyncio', 'pydantic') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
