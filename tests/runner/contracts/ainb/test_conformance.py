"""The conformance axes of ainb, by their intent, with our own canaries in the cage, as root and as a user.

A12 (crash recovery) and A13 (quarantine) are left out: both need a supervisor, which starts a plugin again.
The thirteen others are here, under their names. The canary of most of them behaves like the contract's Rust
SDK (tests/plugins/ainb_canaries/canary.py).
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.runner.contracts.ainb.canaries import Nest
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def nest(plugin_dir: Path, runner_as: Caller) -> Nest:
    return Nest(plugin_dir, runner_as)


def converse(folder: str, policy: str, steps: list[list[Any]], services: dict[str, Any]) -> list[Any]:
    """Open the plugin, take the steps one by one, and close it. Returns what came of each step, [level,
    message] of each message of its log, and the report.

    render W H        the value
    cli NS ARGV       stdout, or [code, message] of an error, or [code, cause] of a failure
    quickly NS ARGV   the same, given up after three seconds
    publish T TEXT    the host publishes it
    stored T          what the bus has there
    notify M PARAMS   tell the plugin something
    """
    import os

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver
    from runner.library import Notice, PluginError, PluginFailure, Services, open_plugin
    from runner.protocol.bus import SnapshotBus

    bus = SnapshotBus()
    found: list[Any] = []

    async def call(plugin: Any, seconds: float | None, name: str, *argv: str) -> Any:
        try:
            value = await plugin.call(name, {"argv": list(argv)}, seconds=seconds)
            return value["stdout"]
        except PluginError as error:
            return [error.code, error.message]
        except PluginFailure as failure:
            return [failure.outcome.code, failure.outcome.cause]

    async def take(plugin: Any, act: str, *given: Any) -> Any:
        if act == "render":
            return await plugin.call("", {"width": given[0], "height": given[1]}, kind="render", seconds=60.0)
        if act in ("cli", "quickly"):
            return await call(plugin, 3.0 if act == "quickly" else None, *given)
        if act == "publish":
            return bus.publish(given[0], given[1].encode())
        if act == "notify":
            return await plugin.notify(given[0], given[1])
        if act == "stored":
            snapshot = bus.get(given[0])
            return snapshot and snapshot.payload.decode()
        raise AssertionError(act)

    async def main() -> None:
        with trio.fail_after(150):
            opened = open_plugin(
                folder, policy=policy, services=Services(bus=bus, **services), environ=dict(os.environ)
            )
            async with opened as plugin:
                for step in steps:
                    found.append(await take(plugin, *step))
            events = [event async for event in plugin.events()]  # what it said until its end
        said = [event.value for event in events if isinstance(event, Notice) and event.kind == "log"]
        logs = [[each["level"], each["message"]] for each in said]
        found.extend((logs, plugin.report))
        await aclose_forkserver()

    trio.run(main)
    return found


def run(nest: Nest, folder: str, *steps: list[Any], **services: Any) -> list[Any]:
    *found, _, report = run_logged(nest, folder, *steps, **services)
    return [*found, report]


def run_logged(nest: Nest, folder: str, *steps: list[Any], **services: Any) -> list[Any]:
    found: list[Any] = elsewhere.run(
        nest.caller, converse, folder, str(nest.policy), list(steps), services, timeout=240
    )
    return found


def ask(method: str, **params: Any) -> list[Any]:
    return ["ask", method, json.dumps(params)]


# --- the axes -----------------------------------------------------------------------------------------------


def test_a01_the_manifest(nest: Nest) -> None:
    withheld = {"network": ["a.example"], "spawn_managed_subprocess": ["/bin/true"], "read_paths": True}
    folder = nest.put(
        "a01", namespaces=["a01"], screens=["main"], capabilities={"event_bus": ["cts.*"], **withheld}
    )
    checked = nest.caller("check", folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    drawn, told, report = run(nest, folder, ["render", 1, 1], ["cli", "a01", "init"])
    assert drawn["lines"] == ["A"]
    # What it is told is what its manifest says. Of its capabilities these are what it was granted.
    init = json.loads(told)
    assert init["granted_capabilities"] == ["event_bus"]
    assert (init["abi_version"], init["config"], init["host"]["kind"]) == (2, None, "cli")
    assert init["manifest_path"] == f"{folder}/manifest.toml"
    assert report["session"]["identity"] == {"id": "a01", "version": "0.0.1", "protocol": "2"}
    # The other form of the answer to plugin/init: in the first one the manifest agrees, in the second not.
    folder = nest.put("a01text", namespaces=["a01text"], capabilities={"event_bus": True})
    _, report = run(nest, folder, ["cli", "a01text", "test"])
    assert report["session"]["identity"] == {"id": "a01text", "version": "0.0.1", "protocol": "2"}
    file = Path(folder, "manifest.toml")
    file.write_text(file.read_text().replace("event_bus = true", ""))
    done = nest.caller("call", folder, "a01text", "--", "test")
    assert done.returncode == 11 and "another capabilities.event_bus than its manifest.toml" in done.stderr


@one_case("name", ["a02", "a02split"])
def test_a02_framing(plugin_dir: Path, runner_as: Caller, name: str) -> None:
    """The second one writes seven bytes at a time: frames come in thousands of pieces."""
    nest = Nest(plugin_dir, runner_as)
    drawn, report = run(nest, nest.put(name), ["render", 80, 24])
    assert (drawn["width"], drawn["height"], len(drawn["cells"])) == (80, 24, 1920)
    assert drawn["lines"] == ["".join(str((x + y) % 10) for x in range(80)) for y in range(24)]
    assert report["outcome"]["code"] == "ok"


@one_case(
    ("said", "cause"),
    [
        (b"Content-Length: 16777217\r\n\r\n", "frame_too_large"),
        (b"Content-Length: 2\n\n{}", "bad_header"),
        (b"Content-Length: 2\r\nContent-Type: json\r\n\r\n{}", "bad_header"),
        (b"Content-Length: 0x2\r\n\r\n{}", "bad_header"),
        (b"hello, world\r\n", "bad_header"),
        (b"X" * 8193, "frame_too_large"),
    ],
)
def test_a02_a_frame_that_breaks_the_rules_ends_the_plugin(
    plugin_dir: Path, runner_as: Caller, said: bytes, cause: str
) -> None:
    nest = Nest(plugin_dir, runner_as)
    folder = nest.put("a02", namespaces=["a02"])
    failed, report = run(nest, folder, ["cli", "a02", "write", base64.b64encode(said).decode()])
    assert failed == ["malformed_response", cause]
    assert (report["outcome"]["code"], report["outcome"]["cause"]) == ("malformed_response", cause)


def test_a04_a_denied_capability(nest: Nest) -> None:
    """Its own error reaches the caller. And what it has no grant for is refused, with that code."""
    own, got, subscribed, _ = run(
        nest,
        nest.put("a04", namespaces=["a04"]),
        ["cli", "a04", "fail", "-32001"],
        ["cli", "a04", *ask("host/snapshot/get", topic="t")],
        ["cli", "a04", *ask("host/snapshot/subscribe", topic="t")],
    )
    assert own == ["-32001", "as it was told"]
    for each in (got, subscribed):
        assert json.loads(each) == {"error": {"code": -32001, "message": "capability denied: event_bus"}}
    # The control: with the grant it is answered.
    granted, _ = run(
        nest,
        nest.put("granted", namespaces=["a04"], capabilities={"event_bus": True}),
        ["cli", "a04", *ask("host/snapshot/get", topic="t")],
    )
    assert json.loads(granted) == {"result": {"payload": None, "version": 0}}


def test_a05_determinism(nest: Nest) -> None:
    *drawn, _ = run(nest, nest.put("a05"), *[["render", 10, 5]] * 10)
    assert len(drawn) == 10 and drawn[0]["lines"][1] == "BCDEFGHIJK"
    assert len({json.dumps(each) for each in drawn}) == 1


def test_a06_publish_then_get(nest: Nest) -> None:
    """It publishes before it answers plugin/init."""
    stored, got, _ = run(
        nest,
        nest.put("a06", capabilities={"event_bus": True}, namespaces=["a06"]),
        ["stored", "cts.a06"],
        ["cli", "a06", *ask("host/snapshot/get", topic="cts.a06")],
    )
    assert stored == "a06-payload"
    payload = base64.b64encode(b"a06-payload").decode()
    assert json.loads(got) == {"result": {"payload": payload, "version": 1}}


@one_case("declared", [(), ("cts.a07",)])
def test_a07_subscribe_and_delivery(plugin_dir: Path, runner_as: Caller, declared: tuple[str, ...]) -> None:
    """It subscribes inside plugin/init and waits for the reply. With a declared subscription as well, an
    event still arrives once."""
    nest = Nest(plugin_dir, runner_as)
    grants = {"event_bus": True}
    folder = nest.put("a07", capabilities=grants, namespaces=["a07"], subscribes=declared)
    _, _, told, report = run(
        nest,
        folder,
        ["publish", "cts.a07", "event-data"],
        ["publish", "cts.other", "not for it"],
        ["cli", "a07", "told"],
    )
    assert json.loads(told) == [["cts.a07", "event-data"]]
    assert report["session"]["dropped"]["events"] == 0


def test_a08_timeouts(nest: Nest) -> None:
    """The caller's own clock ends a call, and the plugin's own ends its question."""
    folder = nest.put("a08", namespaces=["a08"], capabilities={"event_bus": True})
    late, _ = run(nest, folder, ["quickly", "a08", "slow"])
    assert late == ["timeout", "deadline"]
    found = elsewhere.run(
        nest.caller,
        invoke,
        folder,
        nest.put("acting", "fixture.py", namespaces=["fast", "slow"], capabilities={"event_bus": True}),
        str(nest.policy),
    )
    assert found["fast"] == {"result": {"payload": base64.b64encode(b"cba").decode()}}
    assert found["slow"] == {"error": {"code": -32002, "message": "action timed out: slow"}}
    assert found["own"] == {"payload": "cba"}
    assert found["early"] == "early"  # what the other one published before its plugin/init arrived
    assert found["exit"] == [0, False]


def invoke(asking: str, acting: str, policy: str) -> dict[str, Any]:
    """Two plugins on one bus: one asks for actions of the other."""
    import base64
    import json
    import os

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver
    from runner.library import Services, open_plugin
    from runner.protocol.bus import SnapshotBus

    bus = SnapshotBus()
    found: dict[str, Any] = {}
    common: dict[str, Any] = {"policy": policy, "services": Services(bus=bus), "environ": dict(os.environ)}

    async def main() -> None:
        with trio.fail_after(100):
            async with open_plugin(acting, **common) as actor, open_plugin(asking, **common) as asker:
                for action, milliseconds in (("fast", 30_000), ("slow", 200)):
                    params = {"action": action, "timeout_ms": milliseconds}
                    params["payload"] = base64.b64encode(b"abc").decode()
                    argv = ["ask", "host/action/invoke", json.dumps(params)]
                    value = await asker.call("a08", {"argv": argv})
                    found[action] = json.loads(value["stdout"])
                found["own"] = await actor.call("fast", {"text": "abc"}, kind="action")
                early = bus.get("cts.early")
                found["early"] = early and early.payload.decode()
        report = actor.report or {}
        found["exit"] = [report["exit"]["code"], report["session"]["forced"]]
        await aclose_forkserver()

    trio.run(main)
    return found


def test_a09_the_log_filter(nest: Nest) -> None:
    for level, kept in (("warn", ["warn", "error"]), ("trace", ["trace", "debug", "info", "warn", "error"])):
        folder = nest.put("a09", namespaces=["a09"]) if level == "warn" else str(nest.root / "a09")
        drawn, logs, _ = run_logged(nest, folder, ["render", 1, 1], log_level=level)
        assert drawn["lines"] == ["L"]
        assert logs == [[each, f"at {each}"] for each in kept]


def test_a10_the_path_guard(nest: Nest) -> None:
    granted, secret = nest.root / "granted", nest.root / "secret"
    for path in (granted, secret):
        path.mkdir(mode=0o755)
        (path / "file").write_text("inside")
        (path / "file").chmod(0o644)
    (granted / "link").symlink_to(secret)
    folder = nest.put("a10", namespaces=["a10"], capabilities={"read_paths": [str(granted)]})
    nest.policy.write_text(
        f'version = 1\n[capabilities]\nhost = ["host/*"]\n[read]\nceiling = ["{granted}", "{secret}"]\n'
    )
    paths = ["granted/file", "secret/file", "granted/../secret/file", "granted/link/file", "granted/missing"]
    asked = [ask("host/fs/read_file", path=f"{nest.root}/{path}") for path in paths]
    *found, own, _ = run(
        nest, folder, *(["cli", "a10", *each] for each in asked), ["cli", "a10", "fail", "-32601"]
    )
    answers = [json.loads(each) for each in found]
    assert answers[0] == {"result": {"bytes": base64.b64encode(b"inside").decode()}}
    assert [each["error"]["code"] for each in answers[1:]] == [-32001, -32001, -32001, -32602]
    assert own == ["-32601", "as it was told"]


@pytest.mark.both_callers
def test_a10_a_root_that_is_a_link_of_the_users_own(nest: Nest) -> None:
    """It works if the policy allows what it leads to. Else it is left out, and the hint says what to allow.
    Root follows no link but root's in root's folders."""
    real, link = nest.root / "dotfiles", nest.root / "link"
    real.mkdir(mode=0o755)
    (real / "file").write_text("inside")
    link.symlink_to(real)
    os.lchown(link, nest.caller.uid, nest.caller.uid)
    folder = nest.put("a10", namespaces=["a10"], capabilities={"read_paths": [str(link)]})
    steps = (
        ["cli", "a10", "cat", f"{link}/file"],
        ["cli", "a10", *ask("host/fs/read_file", path=f"{link}/file")],
    )
    for ceiling in ([str(link)], [str(nest.root)], [str(link), str(real)]):  # a folder above is no yes
        text = f'version = 1\n[capabilities]\nhost = ["host/*"]\n[read]\nceiling = {json.dumps(ceiling)}\n'
        nest.policy.write_text(text)
        shown, read, report = run(nest, folder, *steps)
        notes = [note for note in report["notes"] if note["rule"] == "link"]
        if nest.caller.uid != 0 and str(real) in ceiling:
            assert (shown, notes) == ("inside", [])
            assert json.loads(read) == {"result": {"bytes": base64.b64encode(b"inside").decode()}}
            continue
        assert shown == "No such file or directory"
        assert json.loads(read)["error"]["code"] == -32001
        assert f"{link} is not shown: it is a symbolic link to {real}" in notes[0]["message"]
        remedy = f'"{real}" in ceiling' if nest.caller.uid != 0 else "put the folder itself there"
        assert remedy in notes[0]["hint"]
        if nest.caller.uid != 0:
            assert f"runner allow {folder} --read {real}, or " in notes[0]["hint"]


@one_case("program", ["canary.py", "fixture.py"])
def test_a11_shutdown(plugin_dir: Path, runner_as: Caller, program: str) -> None:
    """The canary answers and exits when stdin is closed. The fixture exits at once, without an answer."""
    nest = Nest(plugin_dir, runner_as)
    (report,) = run(nest, nest.put("a11", program))
    assert report["outcome"]["code"] == "ok"
    assert (report["exit"]["code"], report["exit"]["ended_by"]) == (0, None)  # by itself
    assert (report["session"]["forced"], report["session"]["farewell_error"]) == (False, "")


def test_a14_the_output_of_a_command(nest: Nest) -> None:
    folder = nest.put("a14", namespaces=["echo"])
    stdout, _ = run(nest, folder, ["cli", "echo", "test"])
    assert stdout == "hello\n"
    called = nest.caller("call", "--policy", nest.policy, folder, "echo", "--", "test")
    assert (called.returncode, called.stdout) == (0, "hello\n"), called.stderr


# --- chunks, and the deadlock -------------------------------------------------------------------------------

CHUNKS = 60


def burst(publisher: str, subscriber: str, policy: str, chunks: int) -> dict[str, Any]:
    """A plugin publishes chunks back to back to another one, which then gets a key after a burst of
    the host's."""
    import json
    import os

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver
    from runner.library import Services, open_plugin
    from runner.protocol.bus import SnapshotBus

    bus = SnapshotBus()
    found: dict[str, Any] = {}
    common: dict[str, Any] = {"policy": policy, "services": Services(bus=bus), "environ": dict(os.environ)}
    key = {"screen_id": "", "key": {"code": {"type": "esc"}}}

    async def main() -> None:
        with trio.fail_after(150):
            async with (
                open_plugin(subscriber, **common) as reader,
                open_plugin(publisher, **common) as writer,
            ):
                # More than may wait for a plugin, for one that needs some time for each.
                await reader.call("reader", {"argv": ["pause", "0.05"]})
                argv = ["publish", "cts.chunks", str(chunks), str(2 << 20)]
                await writer.call("writer", {"argv": argv})
                await reader.call("reader", {"argv": ["pause", "0"]})
                value = await reader.call("reader", {"argv": ["told"]})
                found["chunks"] = json.loads(value["stdout"])
                # Nothing here waits: the pipe takes one chunk at most, and the rest is in the queue.
                for number in range(chunks):
                    bus.publish("cts.chunks", b"%d:" % number + bytes(100_000))
                await reader.notify("plugin/handle_key", key)
                value = await reader.call("reader", {"argv": ["told"]})
                found["with_key"] = json.loads(value["stdout"])[chunks:]
        found["reports"] = [reader.report, writer.report]
        await aclose_forkserver()

    trio.run(main)
    return found


def test_chunks_arrive_in_order_exactly_once_and_a_key_before_their_tail(nest: Nest) -> None:
    grants = {"event_bus": True}
    subscriber = nest.put("chunks", capabilities=grants, namespaces=["reader"])
    publisher = nest.put("source", capabilities=grants, namespaces=["writer"])
    found = elsewhere.run(nest.caller, burst, publisher, subscriber, str(nest.policy), CHUNKS, timeout=240)
    in_order = [["cts.chunks", f"{number}:"] for number in range(CHUNKS)]
    assert found["chunks"] == in_order
    topics = [topic for topic, _ in found["with_key"]]
    assert topics.count("plugin/handle_key") == 1
    assert topics.index("plugin/handle_key") < CHUNKS // 2  # before chunks that were published before it
    assert [each for each in found["with_key"] if each[0] == "cts.chunks"] == in_order
    assert [report["session"]["dropped"]["events"] for report in found["reports"]] == [0, 0]


def contend(folder: str, policy: str, rounds: int) -> dict[str, Any]:
    """Calls whose handlers ask the host something, while the host publishes to the plugin all the time."""
    import json
    import os

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver
    from runner.library import Services, open_plugin
    from runner.protocol.bus import SnapshotBus

    bus = SnapshotBus()
    published = 0

    async def main() -> dict[str, Any]:
        nonlocal published
        async with trio.open_nursery() as nursery:

            async def publish() -> None:
                nonlocal published
                while True:
                    bus.publish("cts.a07", b"%d" % published)
                    published += 1
                    await trio.sleep(0.002)

            # From before its start: an event between its two questions inside plugin/init would be the end.
            nursery.start_soon(publish)
            with trio.fail_after(120):
                async with open_plugin(
                    folder, policy=policy, services=Services(bus=bus), environ=dict(os.environ)
                ) as plugin:
                    argv = ["ask", "host/snapshot/get", json.dumps({"topic": "cts.a07"})]
                    for _ in range(rounds):
                        value = await plugin.call("a07", {"argv": argv}, seconds=30.0)
                        assert json.loads(value["stdout"])["result"]["version"]
                    nursery.cancel_scope.cancel()
                    with trio.CancelScope(shield=True):
                        value = await plugin.call("a07", {"argv": ["told"]}, seconds=30.0)
        told = [int(text) for _, text in json.loads(value["stdout"])]
        with trio.CancelScope(shield=True):
            await aclose_forkserver()
        dropped = (plugin.report or {})["session"]
        return {"told": told, "published": published, "session": dropped}

    return trio.run(main)


def test_a_plugin_of_the_sdk_never_hangs_on_an_event(nest: Nest) -> None:
    """Without the rule of §5 one event in the hands of the reading task would hang each of these calls."""
    folder = nest.put("a07", capabilities={"event_bus": True}, namespaces=["a07"], subscribes=["cts.a07"])
    found = elsewhere.run(nest.caller, contend, folder, str(nest.policy), 100, timeout=240)
    told = found["told"]
    assert told and told == sorted(set(told))  # in order, each once
    assert found["session"]["calls"] == {"ok": 101, "refused": 0, "failed": 0}
