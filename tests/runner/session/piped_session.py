"""A session whose process is a task of the test, on the other ends of real pipes: for autojump clocks."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from runner.contracts.kaged.dialect import KagedDialect
from runner.launch.remote.messages import MonitorEnd, Terms
from runner.launch.remote.pipe import PipeReader
from runner.outcome import Outcome
from runner.protocol.dialect import Setting
from runner.protocol.host_services import Emit, NoHostMethods, Services
from runner.protocol.service_guard import ServiceGuard
from runner.session.session import Session
from sandbox.spec import Limits
from tests.runner.contracts.kaged.conversation import NOTES, WELCOME, answer, error


class PipedCell:
    """A cell whose process is this test."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self.stdin = trio.lowlevel.FdStream(pipes[0][1])
        self.stdout, self.stderr = (PipeReader(pipe[0]) for pipe in pipes[1:])
        self.its_stdin = trio.lowlevel.FdStream(pipes[0][0])
        self.its_stdout, self.its_stderr = (trio.lowlevel.FdStream(pipe[1]) for pipe in pipes[1:])
        self.has_ended: MonitorEnd | None = None
        self.ignores_signals = False
        self.signals: list[tuple[int, float]] = []  # with the time of each; 9 for the kill
        self._over = trio.Event()

    @property
    def runs(self) -> bool:
        return self.has_ended is None

    async def launched(self) -> Mapping[str, float]:
        return {}

    async def ended(self) -> MonitorEnd:
        await self._over.wait()
        assert self.has_ended is not None
        return self.has_ended

    def signal(self, number: int) -> None:
        self.signals.append((number, trio.current_time()))
        if not self.ignores_signals:
            self.end()

    def kill(self) -> None:
        if self.has_ended is None:
            self.signals.append((9, trio.current_time()))
            self.end()

    def end(self) -> None:
        """The process exits by itself."""
        if self.has_ended is None:
            self.has_ended = MonitorEnd(Outcome("ok", "run", "ended"), 0)
            self._over.set()

    async def aclose(self) -> None:
        for mine in (self.stdin, self.stdout, self.stderr):
            await mine.aclose()
        for stream in (self.its_stdin, self.its_stdout, self.its_stderr):
            await stream.aclose()


Answerer = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


class AskHost(NoHostMethods):
    """Whatever the plugin asks takes a minute."""

    METHODS = {"slow": "roots"}  # noqa: RUF012 -- as the interface has it

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        await trio.sleep(60.0)
        return {}


class _Roots:
    async def roots(self) -> Any:
        return []


class Rig:
    """A session, and the requests that its plugin got: method and time."""

    def __init__(self, session: Session, cell: PipedCell) -> None:
        self.session = session
        self.cell = cell
        self.heard: list[tuple[str, float]] = []
        self.stdin_closed = 0.0  # when the plugin saw it

    def beats(self) -> list[float]:
        return [when for method, when in self.heard if method == "health.check"]


@asynccontextmanager
async def live(
    answers: Answerer, limits: Limits | None = None, *, exits_after: float = 0.0
) -> AsyncIterator[Rig]:
    """A session with a plugin that handles one line after the other. `exits_after`: seconds after its stdin
    was closed."""
    cell = PipedCell()
    limits = limits or Limits()
    terms = Terms(NOTES, limits, (), ("*",), "default", False)
    guard = ServiceGuard(AskHost(), Services(roots=_Roots()), ("*",))
    session = Session(cell, terms, KagedDialect(Setting(NOTES, limits)), guard, None)  # type: ignore[arg-type]
    rig = Rig(session, cell)
    began = trio.current_time()

    async def plugin() -> None:
        kept = b""
        while data := await cell.its_stdin.receive_some(65536):
            *lines, kept = (kept + bytes(data)).split(b"\n")
            for line in lines:
                message = json.loads(line)
                rig.heard.append((message.get("method", ""), trio.current_time() - began))
                reply = answer(message.get("id"), WELCOME)
                if message.get("method") != "initialize":
                    reply = await answers(message) or {}
                if reply:
                    await cell.its_stdout.send_all(json.dumps(reply).encode() + b"\n")
        rig.stdin_closed = trio.current_time()
        await trio.sleep(exits_after)
        cell.end()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(plugin)
        nursery.start_soon(session.tasks.run)
        try:
            await session.tasks.start()
            yield rig
        finally:
            with trio.CancelScope(shield=True):
                await session.close()
                session.tasks.stop()
                nursery.cancel_scope.cancel()
                await cell.aclose()


async def like_the_reference(message: dict[str, Any]) -> dict[str, Any] | None:
    """It knows no health.check, and answers with an error."""
    if "id" not in message or "method" not in message:
        return None
    if message["method"] == "health.check":
        return error(message["id"], -32601, "Method not found")
    return answer(message["id"], {"status": "ok"})


def after(seconds: float, method: str) -> Answerer:
    """Takes so long for one method."""

    async def answers(message: dict[str, Any]) -> dict[str, Any] | None:
        if message.get("method") == method:
            await trio.sleep(seconds)
        return await like_the_reference(message)

    return answers
