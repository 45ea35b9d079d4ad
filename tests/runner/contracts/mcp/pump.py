"""A dialect and a real server on plain pipes, with no cage and no session between them."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from runner.contracts.mcp import dialect as mcp
from runner.plugin import Entrypoint, Plugin
from runner.protocol.dialect import (
    Answer,
    Call,
    Dialect,
    Event,
    HostCall,
    Identity,
    Kind,
    Progress,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    Violation,
)
from sandbox.spec import Limits, SandboxSpec

# Until something that must come has come, on a machine that has other things to do.
PATIENCE = 120.0

E = TypeVar("E", bound=Event)
Host = Callable[[HostCall], Answer | None]


def setting(
    services: Sequence[str] = (), *, timeouts: dict[str, float] | None = None, handshake: float | None = None
) -> Setting:
    plugin = Plugin(
        id="demo",
        version="",
        contract="mcp",
        name="demo",
        description="",
        manifest="/conf/mcp.json",
        root=None,
        entrypoint=Entrypoint("server"),
        spec=SandboxSpec(),
        timeouts=tuple((timeouts or {}).items()),
    )
    return Setting(plugin, Limits(handshake=handshake), services=frozenset(services))


class Pump:
    """What a session does, one thing after the other."""

    def __init__(
        self,
        argv: Sequence[str],
        services: Sequence[str] = (),
        host: Host | None = None,
        *,
        handshake: float | None = None,
        loses_probe: bool = False,
        patient: bool = False,
    ) -> None:
        """`patient`: the server answers everything, however long a busy machine takes to start it."""
        self.dialect = mcp.make(setting(services, handshake=handshake))
        self._is_one: Dialect = self.dialect  # for type checkers
        self.events: list[Event] = []
        self._argv = argv
        self._host = host
        self._loses_probe = loses_probe
        self._patient = patient
        self._framer = self.dialect.framer()
        self._tokens = 0

    def __enter__(self) -> Pump:
        self.process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        opening = self.dialect.opening()
        if self._loses_probe:
            self.act(self.dialect.silence())
        else:
            self.act(opening)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def write(self, frame: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(frame)
        self.process.stdin.flush()

    def act(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, Send):
                self.write(event.frame)
            elif isinstance(event, HostCall) and self._host is not None:
                answer = self._host(event)
                if answer is not None:
                    self.act(self.dialect.answer(event.ticket, answer))

    def step(self) -> None:
        """What comes next, or silence."""
        assert self.process.stdout is not None
        patience = None if self._patient else self.dialect.patience
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE if patience is None else patience)
        if not ready:
            assert patience is not None, f"nothing came after {self.events}"
            self.act(self.dialect.silence())
            return
        data = os.read(self.process.stdout.fileno(), 65536)
        assert data, f"the server has ended: {self.process.wait(PATIENCE)}"
        for frame in self._framer.feed(data):
            self.act(self.dialect.feed(self.dialect.read(frame)))

    def until(self, kind: type[E] | tuple[type[E], ...], since: int = 0) -> E:
        """The first event of this kind, or of these, from number `since` on."""
        end = time.monotonic() + PATIENCE
        while True:
            for event in self.events[since:]:
                if isinstance(event, kind):
                    return event
            assert time.monotonic() < end, self.events[since:]
            self.step()

    def identity(self) -> Identity:
        ends: tuple[type[Ready | Violation], ...] = (Ready, Violation)
        found = self.until(ends)
        assert isinstance(found, Ready), found
        return found.identity

    def start(self, name: str, given: Any = None, kind: Kind = "tool") -> int:
        self._tokens += 1
        self.act(self.dialect.call(self._tokens, Call(kind, name, given)))
        return self._tokens

    def call(self, name: str, given: Any = None, kind: Kind = "tool") -> Reply | Refusal | Violation:
        since = len(self.events)
        token = self.start(name, given, kind)
        ends: tuple[type[Reply | Refusal | Violation], ...] = (Reply, Refusal, Violation)
        found = self.until(ends, since)
        assert found.call == token
        return found

    def value(self, name: str, given: Any = None, kind: Kind = "tool") -> Any:
        found = self.call(name, given, kind)
        assert isinstance(found, Reply), found
        return found.value

    def text(self, name: str, given: Any = None) -> str:
        return "".join(part["text"] for part in self.value(name, given)["content"])

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def progress(self) -> list[Any]:
        return [event.value["progress"] for event in self.of(Progress)]
