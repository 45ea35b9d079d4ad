"""Who may do what on the bus: the server has policies/nats/fleet.conf, TLS, passwords and an nkey."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest
import trio
import trustme
from nats.aio.client import Client as NatsClient

from runner.fleet import names, operate
from runner.fleet.client import open_client
from runner.fleet.connection import NoFleet, connect, read_address
from runner.fleet.crossing import AsyncioThread, open_asyncio_thread
from runner.fleet.worker import FleetWorker, WorkerOptions
from sandbox.document.diagnostic import DocumentError
from tests.conftest import ROOT
from tests.runner.fleet.bus import Bus, bus_in
from tests.runner.fleet.inside import Functions, new_call

pytestmark = pytest.mark.needs("nats")
CONF = (ROOT / "policies/nats/fleet.conf").read_text()
PASSWORD = "correct-horse"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bus, Path]]:
    """A server with the users ops, worker, door and alice, and the files by which they connect."""
    folder = tmp_path_factory.mktemp("guarded")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    # A second submitter, made as the head of the file says.
    start, end = CONF.index("may_submit_door ="), CONF.index("# What the account")
    alice = CONF[start:end].replace("door", "alice")
    (folder / "fleet.conf").write_text(CONF + alice)
    ops, worker, door = (
        f"{{ user: {name}, password: {PASSWORD}, permissions: ${role} }}\n"
        for name, role in (("ops", "may_operate"), ("worker", "may_work"), ("door", "may_submit_door"))
    )
    extra = f"""
include "../fleet.conf"
accounts {{
  FLEET {{ jetstream: enabled, exports: $fleet_offers, users: [ {ops} {worker} ] }}
  DOOR {{ imports: $door_uses, users: [ {door} ] }}
  ALICE {{ imports: $alice_uses, users: [ {{ nkey: {public}, permissions: $may_submit_alice }} ] }}
}}
tls {{ cert_file: "{folder}/server.pem", key_file: "{folder}/server.pem" }}
"""
    with bus_in(folder, 1, extra, make=False, scheme="tls") as bus:
        for name in ("ops", "worker", "door", "alice"):
            key = "nkey" if name == "alice" else "password"
            (folder / f"{name}.key").write_bytes(bytes(seed) if name == "alice" else PASSWORD.encode())
            (folder / f"{name}.key").chmod(0o600)
            (folder / f"{name}.toml").write_text(
                f'servers = ["{bus.url}"]\nuser = "{name}"\n{key} = "@{name}.key"\nca = "ca.pem"\n'
                + 'api = "runner.api"\n' * (name in ("door", "alice"))
            )
        bus.make(str(folder / "ops.toml"))
        yield bus, folder


def test_the_roles_can_do_their_work(guarded: tuple[Bus, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with these permissions a fleet works."""
    folder = guarded[1]
    plain = Functions("plain", "e" * 64)

    async def act(thread: AsyncioThread) -> None:
        said: list[str] = []
        async with (
            connect(read_address(str(folder / "worker.toml")), "w", say=said.append) as bus,
            open_client(read_address(str(folder / "alice.toml")), say=said.append) as alice,
            open_client(read_address(str(folder / "door.toml")), say=said.append) as door,
            open_client(read_address(str(folder / "ops.toml")), say=said.append) as ops,
        ):
            worker = FleetWorker(bus, thread, plain, WorkerOptions("worker"), said.append)
            ready = asyncio.Event()
            task = asyncio.ensure_future(worker.run(ready.set))
            await asyncio.wait_for(ready.wait(), 60)
            for client, user in ((alice, "alice"), (door, "door")):
                found = await client.find("plain")
                told: list[Any] = []
                answer = await client.call(found, new_call("plain", "read"), on_progress=told.append)
                assert answer.document["value"] == [user, "read", None] and told
                stored = await client.call(found, new_call("plain", "put", call="same-id"), durable=True)
                assert stored.document["value"] == [user, "put", None]
                plain.begun = trio.Event()
                call = new_call("plain", "pay", {"hold": True})
                waiting = asyncio.ensure_future(client.call(found, call, durable=True))
                while not plain.begun.is_set():  # noqa: ASYNC110 -- an event of trio's, in another thread
                    await asyncio.sleep(0.01)
                await client.cancel(call.id)
                assert (await waiting).document["error"]["code"] == "cancelled"
            # The operator reads a plugin's stderr and resets it. A submitter asks in vain.
            plain.stderr = "of other people"
            for what, answers in (("logs", plain.stderr), ("reset", "idle")):
                heard: dict[str, str] = {}
                asked = (what, "plain", None, heard.__setitem__)
                monkeypatch.setattr("runner.fleet.operate._ASK_SECONDS", 60.0)
                assert await operate.ask_workers(ops, *asked) == {} and heard == {"worker": answers}
                heard.clear()
                monkeypatch.setattr("runner.fleet.operate._ASK_SECONDS", 0.2)
                failed = await operate.ask_workers(alice, *asked)
                assert heard == {} and "it does not answer" in failed["worker"]
                while not any(f"runner.{what}." in each for each in said):  # noqa: ASYNC110 -- no event
                    await asyncio.sleep(0.01)
            assert all("runner.logs." in each or "runner.reset." in each for each in said), said
            said.clear()
            await worker.drain(10)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert said == []

    async def main() -> None:
        async with open_asyncio_thread() as thread:
            await thread.run(act, thread)

    trio.run(main)
    assert plain.ran.count(("put", 1)) == 2  # the same id of two users is two calls


DIGEST = "e" * 64
# Who, what, and whether it publishes or subscribes. Each is refused, and an operator may do it.
REFUSED = [
    ("worker", "runner.call.alice.D", "publish"),
    ("worker", "runner.durable.alice.D", "publish"),
    ("worker", "runner.durable.worker.D", "publish"),
    ("worker", "runner.hint.D", "publish"),
    ("worker", "_INBOX.alice.x", "publish"),
    ("worker", "_INBOX.alice.>", "subscribe"),
    ("worker", "$KV.runner_flags.drain.x", "publish"),
    ("worker", "$JS.API.STREAM.CREATE.X", "publish"),
    ("worker", "$JS.API.STREAM.DELETE.RUNNER_RECORDS", "publish"),
    ("worker", "$JS.API.STREAM.PURGE.RUNNER_RECORDS", "publish"),
    ("worker", "$JS.API.CONSUMER.DURABLE.CREATE.KV_runner_calls.x", "publish"),
    ("worker", "runner.durable.>", "subscribe"),
    ("worker", "runner.logs.other.D", "publish"),
    ("worker", "runner.reset.other.D", "publish"),
    ("worker", "_INBOX.ops.>", "subscribe"),
    ("door", "runner.call.alice.D", "publish"),
    ("door", "runner.durable.alice.D", "publish"),
    ("door", "runner.cancel.alice.x", "publish"),
    ("door", "runner.ask.worker.alice.x", "publish"),
    ("door", "runner.logs.worker.D", "publish"),
    ("door", "runner.reset.worker.D", "publish"),
    ("door", "runner.logs.*.*", "subscribe"),
    ("door", "runner.dead.door.x", "publish"),
    ("door", "$JS.API.STREAM.MSG.DELETE.RUNNER_DEAD", "publish"),
    ("door", "$KV.runner_calls.door.x", "publish"),
    ("door", "$KV.runner_calls.alice.x", "publish"),
    ("door", "$KV.runner_workers.x", "publish"),
    ("door", "$KV.runner_flags.drain.x", "publish"),
    ("door", "$KV.runner_shares.door", "publish"),
    ("door", "$KV.runner_shares.*", "subscribe"),
    ("door", "runner.done.door.x", "publish"),
    ("door", "runner.records.door.x", "publish"),
    ("door", "runner.progress.alice.x", "publish"),
    ("door", "$JS.API.DIRECT.GET.KV_runner_calls.$KV.runner_calls.alice.same-id", "publish"),
    ("door", "$JS.API.DIRECT.GET.KV_runner_calls", "publish"),
    ("door", "$JS.API.STREAM.MSG.GET.KV_runner_calls", "publish"),
    ("door", "$JS.API.STREAM.INFO.KV_runner_calls", "publish"),
    ("door", "$JS.API.CONSUMER.CREATE.KV_runner_calls", "publish"),
    ("door", "$JS.API.CONSUMER.MSG.NEXT.RUNNER_CALLS.plugin_D", "publish"),
    ("door", "$JS.API.STREAM.MSG.GET.RUNNER_CALLS", "publish"),
    ("door", "$JS.ACK.RUNNER_CALLS.x", "publish"),
    ("door", "runner.api.DIRECT.GET.KV_runner_calls.$KV.runner_calls.alice.same-id", "publish"),
    ("door", "runner.api.DIRECT.GET.KV_runner_calls", "publish"),
    ("door", "_INBOX.alice.>", "subscribe"),
    ("door", "_INBOX.>", "subscribe"),
    ("door", "runner.done.alice.*", "subscribe"),
    ("door", "runner.progress.*.*", "subscribe"),
    ("door", "runner.call.*.*", "subscribe"),
    ("door", "$KV.runner_calls.>", "subscribe"),
]


async def violations(path: Path, rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The acts that the server refused."""
    heard: list[str] = []

    async def hear(error: Exception) -> None:
        heard.append(str(error).lower())

    async with connect(read_address(str(path)), "attacker") as bus:
        nc: NatsClient = bus.nc
        nc._error_cb = hear
        for _, subject, act in rows:
            # Nothing that an operator's control would break: no body, and nobody who hears the reply.
            whole = subject.replace("D", DIGEST) if subject.endswith(".D") else subject
            if act == "publish":
                await nc.publish(whole, b"")
            else:
                await nc.subscribe(whole)
            await nc.flush()
        # The server refused all of them by now; the client tells it in tasks of its own.
        last: list[str] = []
        while last != heard:
            last = list(heard)
            await nc.flush()

    def named(row: tuple[str, str, str]) -> str:
        subject = row[1].replace("D", DIGEST) if row[1].endswith(".D") else row[1]
        kind = "publish to" if row[2] == "publish" else "subscription to"
        return f'permissions violation for {kind} "{subject}"'.lower()

    return [row for row in rows if any(named(row) in each for each in heard)]


def test_what_each_role_may_not_do(guarded: tuple[Bus, Path]) -> None:
    folder = guarded[1]
    for who in ("worker", "door"):
        rows = [row for row in REFUSED if row[0] == who]
        assert asyncio.run(violations(folder / f"{who}.toml", rows)) == rows
    # The control. Deleting is left out.
    harmless = [row for row in REFUSED if "DELETE" not in row[1] and "PURGE" not in row[1]]
    assert asyncio.run(violations(folder / "ops.toml", harmless)) == []


def test_a_submitter_cannot_read_the_answer_of_another(guarded: tuple[Bus, Path]) -> None:
    """By the product's own client, with the user's name replaced."""
    folder = guarded[1]

    async def act() -> None:
        async with open_client(read_address(str(folder / "door.toml"))) as door:
            assert await door.result("same-id") is not None  # its own
            door.js._timeout = 1.0
            door._user = "alice"
            with pytest.raises(NoFleet):
                await door.result("same-id")

    asyncio.run(act())


# Requests that a submitter may make, and subjects for the answer where it would do harm.
ASKED = [
    "{}.STREAM.INFO.KV_runner_workers",
    "{}.CONSUMER.LIST.RUNNER_CALLS",
    "{}.DIRECT.GET.KV_runner_workers.$KV.runner_workers.ended",
    f"runner.durable.{{}}.{DIGEST}",
    "runner.ask.asked.{}.x",
    f"runner.call.{{}}.{DIGEST}",
]
HARMED = ["$KV.runner_flags.drain.{}", "$KV.runner_calls.alice.{}", "$JS.API.STREAM.DELETE.{}"]


def test_an_answer_does_no_harm_where_a_submitter_sends_it(guarded: tuple[Bus, Path]) -> None:
    """Servers do not ask whether a user may publish to the subject that it names for the answer."""
    folder = guarded[1]
    plain = Functions("plain", DIGEST)

    async def act(thread: AsyncioThread) -> None:
        async with (
            connect(read_address(str(folder / "ops.toml")), "ops") as ops,
            connect(read_address(str(folder / "door.toml")), "door") as door,
            connect(read_address(str(folder / "worker.toml")), "asked") as bus,
        ):

            async def harm(user: str) -> int:
                """How many of three are not as they were."""
                found = 0
                for stream, subject in zip(("flags", "calls"), HARMED, strict=False):
                    info = await ops.js.stream_info(
                        f"KV_runner_{stream}", subjects_filter=subject.format(user)
                    )
                    found += len(info.state.subjects or {})
                return found + (user not in {each.config.name for each in await ops.js.streams_info()})

            async def send(nc: NatsClient, api: str, user: str) -> None:
                for asked in ASKED:
                    subject = asked.format(user if asked.startswith("runner") else api)
                    for harmed in HARMED:
                        await nc.publish(subject, b"", reply=harmed.format(user))
                await nc.flush()

            for user in ("door", "ops"):
                await ops.js.add_stream(name=user, subjects=[user])
            await ops.js.publish("$KV.runner_workers.ended", b"", headers={"KV-Operation": "DEL"})
            worker = FleetWorker(bus, thread, plain, WorkerOptions("asked"), lambda text: None)
            ready = asyncio.Event()
            task = asyncio.ensure_future(worker.run(ready.set))
            await asyncio.wait_for(ready.wait(), 60)
            await send(door.nc, "runner.api", "door")
            # The control: in the account of the streams the same does all of it.
            await send(ops.nc, "$JS.API", "ops")
            while await harm("ops") < 3:  # noqa: ASYNC110 -- no event tells it
                await asyncio.sleep(0.01)
            await worker.drain(10)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await harm("door") == 0

    async def main() -> None:
        async with open_asyncio_thread() as thread:
            await thread.run(act, thread)

    trio.run(main)


def test_wrong_credentials_are_not_let_in(guarded: tuple[Bus, Path], tmp_path: Path) -> None:
    bus, folder = guarded

    async def connects(text: str) -> str:
        path = tmp_path / "address.toml"
        path.write_text(text.replace("URL", bus.url))
        try:
            async with connect(read_address(str(path)), "stranger"):
                return "in"
        except (NoFleet, ValueError, DocumentError) as error:
            return str(error)

    (tmp_path / "wrong.key").write_text("wrong-horse")
    (tmp_path / "wrong.key").chmod(0o600)
    (tmp_path / "open.key").write_text(PASSWORD)
    (tmp_path / "open.key").chmod(0o644)
    ca = f'ca = "{folder}/ca.pem"'
    rows = {
        f'servers = ["URL"]\n{ca}': "authorization",
        f'servers = ["URL"]\nuser = "door"\npassword = "@wrong.key"\n{ca}': "authorization",
        f'servers = ["URL"]\nuser = "door"\npassword = "@open.key"\n{ca}': "chmod 600",
        f'servers = ["URL"]\nuser = "door"\npassword = "{PASSWORD}"\n{ca}': "name of a file",
        f'servers = ["URL"]\nuser = "door"\npassword = "@{folder}/door.key"': "certificate",
        f'servers = ["URL"]\nuser = "a.b"\n{ca}': "part of subjects",
        f'servers = ["http://x"]\n{ca}': "nats://HOST:PORT",
        'user = "door"': "names no servers",
        'servers = ["URL"]\npasswort = "x"': "passwort",
        f'servers = ["URL"]\nuser = "door"\npassword = "@{folder}/door.key"\n{ca}': "in",
    }
    for text, word in rows.items():
        assert word.lower() in asyncio.run(connects(text)).lower(), text
    with pytest.raises(ValueError, match="no such file"):
        read_address(str(tmp_path / "none"))
    (tmp_path / "loose.toml").write_text('servers = ["nats://x"]')
    (tmp_path / "loose.toml").chmod(0o666)
    with pytest.raises(ValueError, match="is not used"):
        read_address(str(tmp_path / "loose.toml"))
    assert PASSWORD not in repr(read_address(str(folder / "door.toml")))
    assert names.is_token(read_address("nats://bob:secret@h,nats://i:1").user)
    assert read_address("nats://bob:secret@h,nats://i:1").servers == ("nats://h:4222", "nats://i:1")
