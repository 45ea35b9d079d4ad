"""Sessions with a plugin that gets a moment after a cancellation, on real pipes and an autojump clock.

The plugin is a task of the test. It reads {"id": N, "do": NAME} and {"cancel": N, "why": REASON}, and writes
{"id": N, "did": VALUE}, {"id": N, "no": CODE, "body": DATA} or {"about": N, ...}.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from runner.launch.remote.messages import Terms
from runner.plugin import Plugin
from runner.protocol import frames, wire
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Dialect,
    Events,
    Identity,
    Message,
    Progress,
    Ready,
    Refusal,
    Reply,
    Send,
    ShutdownSteps,
    Violation,
)
from runner.protocol.frames import LineFramer
from runner.protocol.host_services import NoHostMethods, Services
from runner.protocol.service_guard import ServiceGuard
from runner.session.pending import Deadline
from runner.session.session import Session
from sandbox.spec import Limits, SandboxSpec
from tests.runner.session.piped_session import PipedCell

PLUGIN = Plugin("graced", "1", "toy", "graced", "", "/graced.json", "/", None, SandboxSpec(enabled=True))
GRACE = 2.0


class GracedDialect(Dialect):
    one_shot = False
    patience = None
    handshake_seconds = 10.0

    def __init__(self) -> None:
        self.dropped = 0

    @property
    def counters(self) -> dict[str, int]:
        return {"dropped_events": self.dropped}

    def framer(self) -> LineFramer:
        return LineFramer(1 << 20)

    def read(self, raw: bytes) -> Message:
        value, cause, detail, weight = wire.message(raw)
        return Message(value, cause or "", detail, raw[:80], weight)

    def opening(self) -> Events:
        return (Send(frames.line(wire.encode({"hello": "host"}))),)

    def silence(self) -> Events:
        return ()

    def feed(self, message: Message) -> Events:
        said = message.value
        if message.fault or not isinstance(said, dict):
            return (Violation("malformed_response", f"no object: {message.raw!r}", "bad_json"),)
        if "hello" in said:
            return (Ready(Identity(str(said["hello"]))),)
        if "about" in said:
            return (Progress(said["about"], said),)
        if "no" in said:
            return (
                Refusal(said["id"], said["no"], f"no: {said.get('why', '')}", "failed", said.get("body")),
            )
        return (Reply(said["id"], said["did"]),)

    def seconds(self, call: Call) -> float:
        return 20.0

    def call(self, token: int, call: Call) -> Events:
        if call.name == "refused":
            raise CallRefused(Refusal(token, "unfit", "it does not fit", "unfit"))
        said = {"id": token, "do": call.name, "with": call.input}
        return (Send(frames.line(wire.encode(said))),)

    def cancel(self, token: int, reason: str) -> Events:
        return (Send(frames.line(wire.encode({"cancel": token, "why": reason}))),)

    def expired(self, token: int, why: str) -> Events:
        return ()

    def notify(self, method: str, params: Any) -> Events:
        return ()

    def answer(self, ticket: int, answer: Answer) -> Events:
        return ()

    def emit(self, ticket: int, value: Any) -> Events:
        return ()

    def shutdown_steps(self) -> ShutdownSteps:
        return ShutdownSteps(exit=5.0, terminate=1.0)

    def grace(self, call: Call) -> float:
        return GRACE


class GracedPlugin:
    """What a plugin of these tests does with a message, and what it was told: (seconds, message)."""

    def __init__(self, cell: PipedCell, handle: Handle) -> None:
        self.cell = cell
        self.heard: list[tuple[float, dict[str, Any]]] = []
        self.reads_once = False  # it reads nothing more
        self.ends_with_its_stdin = True
        self._handle = handle
        self.began = trio.current_time()
        self.scope = trio.CancelScope(shield=True)  # a process of its own is not cancelled with its caller

    async def say(self, message: object) -> None:
        await self.cell.its_stdout.send_all(json.dumps(message).encode() + b"\n")

    @property
    def cancels(self) -> list[tuple[float, str]]:
        return [(at, said["why"]) for at, said in self.heard if "cancel" in said]

    async def run(self) -> None:
        kept = b""
        with self.scope:
            async with trio.open_nursery() as nursery:
                while data := await self.cell.its_stdin.receive_some(65536):
                    *lines, kept = (kept + bytes(data)).split(b"\n")
                    for line in lines:
                        message = json.loads(line)
                        self.heard.append((round(trio.current_time() - self.began, 3), message))
                        nursery.start_soon(self._handle, self, message)
                    if self.reads_once:
                        await trio.sleep_forever()
                nursery.cancel_scope.cancel()
        if self.ends_with_its_stdin:
            self.cell.end()


Handle = Callable[[GracedPlugin, dict[str, Any]], Awaitable[None]]


async def obliging(plugin: GracedPlugin, message: dict[str, Any]) -> None:
    """Answers at once, except a call of "hang" before it is cancelled."""
    if "hello" in message:
        await plugin.say({"hello": "plugin"})
    elif message.get("do") == "hang":
        return
    elif message.get("do") == "fail":
        await plugin.say({"id": message["id"], "no": "broken"})
    elif message.get("do") == "sleep":
        await trio.sleep(message["with"])
        await plugin.say({"id": message["id"], "did": "slept"})
    elif message.get("do") == "die":
        plugin.cell.end()
    elif "cancel" in message:
        await plugin.say({"id": message["cancel"], "no": "cancelled", "body": {"status": "cancelled"}})
    else:
        await plugin.say({"id": message["id"], "did": message["with"]})


@asynccontextmanager
async def graced(
    handle: Handle = obliging, limits: Limits | None = None, deadline: Deadline | None = None
) -> AsyncIterator[tuple[Session, GracedPlugin]]:
    cell = PipedCell()
    terms = Terms(PLUGIN, limits or Limits(), (), ("*",), "default", False)
    guard = ServiceGuard(NoHostMethods(), Services(), ("*",))
    session = Session(cell, terms, GracedDialect(), guard, None)  # type: ignore[arg-type]
    plugin = GracedPlugin(cell, handle)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(plugin.run)
        nursery.start_soon(session.tasks.run)
        try:
            await session.tasks.start(deadline)
            yield session, plugin
        finally:
            with trio.CancelScope(shield=True):
                await session.close()
                session.tasks.stop()
                plugin.scope.cancel()
                await cell.aclose()
