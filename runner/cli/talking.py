"""What `runner call` and `runner tools` have in common: a session, and what people are told of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio

from runner.cli.sink import ReportSink, SinkError
from runner.dialect import Call, Notice, Progress
from runner.prepare import Invocation
from runner.report import EXIT, Outcome, with_outcome
from runner.session import PluginError, PluginFailure, Session, dialect_of, open_session
from runner.zygote import Errand
from sandbox.diagnostic import printable
from sandbox.value import NamedTuple

# Of a plugin's last words, so many lines make the point.
_LAST_LINES = 12
# Before a terminal is told that it takes a while, and between two such words.
_A_WHILE = 1.0
_NOTICE_LENGTH = 2000


class Request(NamedTuple):
    invocation: Invocation
    call: Call
    seconds: float | None
    config: Any
    sink: ReportSink
    sent: Errand | None

    def session(self) -> AbstractAsyncContextManager[Session]:
        return open_session(
            self.invocation,
            environ=os.environ,
            call=self.call,
            seconds=self.seconds,
            config=self.config,
            sent=self.sent,
        )


class Voice:
    """What is said on stdout (results) and on stderr (everything else)."""

    def __init__(self, verb: str, *, as_json: bool, events: bool) -> None:
        self.verb = verb
        self.as_json = as_json
        self._events = events
        self._terminal = sys.stderr.isatty() and not events and not as_json
        self._line = ""

    def result(self, value: Any) -> None:
        pretty = None if self.as_json or not sys.stdout.isatty() else 2
        print(json.dumps(value, ensure_ascii=False, indent=pretty), flush=True)

    def event(self, event: Notice | Progress) -> None:
        if isinstance(event, Progress):
            self._say_json({"event": "progress", "value": event.value})
            return
        self._say_json({"event": event.kind, "value": event.value})
        if not self._events and not self.as_json:
            text = event.value if isinstance(event.value, str) else _compact(event.value)
            self._say(f"runner: {event.kind}: {printable(text[:_NOTICE_LENGTH])}")

    def failure(self, error: PluginError | PluginFailure) -> None:
        outcome, tail = error.outcome, error.stderr
        if self.as_json:
            document: dict[str, Any] = {**outcome._asdict(), "stderr_tail": tail}
            document.pop("denials")
            document["diagnostics"] = [each._asdict() for each in outcome.diagnostics]
            if isinstance(error, PluginError):
                document.update(kind=error.kind, data=error.data)
            self._say(_compact(document))
            return
        if isinstance(error, PluginError):
            kind = f", {error.kind}" if error.kind else ""
            self._say(f"runner: plugin_error ({error.code}{kind}): {printable(error.message)}")
            return
        if outcome.diagnostics or outcome.denials:
            self._say("\n".join(error.explanation))  # each with its place
        else:
            cause = f" ({outcome.cause})" if outcome.cause else ""
            hint = f"; {outcome.hint}" if outcome.hint else ""
            text = f"{outcome.code} in {outcome.phase}{cause}: {outcome.message}{hint}"
            self._say(f"runner: {printable(text)}")
        self._last_words(tail)

    def _last_words(self, tail: str) -> None:
        lines = tail.splitlines()
        if lines:
            self._say("  its stderr ends with:")
            for line in lines[-_LAST_LINES:]:
                self._say(f"  | {printable(line)}")

    def _say_json(self, document: Mapping[str, Any]) -> None:
        if self._events:
            self._say(_compact(document))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it
            self.hush()
            print(text, file=sys.stderr, flush=True)

    # --- the line that shows a terminal that something happens ----------------------------------------------

    @asynccontextmanager
    async def showing(self, what: str) -> AsyncIterator[None]:
        """While the body runs. Nothing where nobody watches."""
        if not self._terminal:
            yield
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick, what)
            yield
            nursery.cancel_scope.cancel()
        self.hush()

    async def _tick(self, what: str) -> None:
        began = trio.current_time()
        while True:
            await trio.sleep(_A_WHILE)
            self._draw(f"{what} … {trio.current_time() - began:.0f} s {self._line}")

    def progress(self, value: Mapping[str, Any]) -> None:
        done, total, message = value.get("progress"), value.get("total"), value.get("message")
        if isinstance(done, int | float) and isinstance(total, int | float) and total > 0:
            self._line = f"{100 * done / total:.0f} %"
        elif isinstance(done, int | float):
            self._line = f"{done:g}"
        if isinstance(message, str):
            self._line += f" {message}"

    def _draw(self, text: str) -> None:
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(2).columns - 1
            print(f"\r\x1b[K{printable(text)[:width]}", end="", file=sys.stderr, flush=True)
            self._drawn = True

    _drawn = False

    def hush(self) -> None:
        if self._drawn:
            self._drawn = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str)


# --- one call -------------------------------------------------------------------------------------------


def call_once(request: Request, voice: Voice) -> int:
    async def work(session: Session) -> None:
        value = await session.call(request.call, seconds=request.seconds, on_progress=voice.progress)
        if session.is_one_shot:
            await session.conclude()  # before anything is printed: it may take the answer back
        voice.hush()
        voice.result(value)

    return _converse(request, voice, f"{request.call.kind} {request.call.name}", work)


def list_all(request: Request, voice: Voice) -> int:
    async def work(session: Session) -> None:
        found: dict[str, Any] = {"tools": await session.call(request.call)}
        if not session.is_one_shot:
            for what in getattr(dialect_of(session.prepared.plugin.contract), "LISTS", ()):
                with contextlib.suppress(PluginError):  # it has none of these
                    if what != "tools":
                        found[what] = await session.call(Call("list", what))
        else:
            await session.conclude()
        voice.hush()
        identity = session.identity
        assert identity is not None
        if voice.as_json or not sys.stdout.isatty():
            about = {"id": identity.id, "version": identity.version, "protocol": identity.protocol}
            voice.result({"plugin": {**about, "contract": session.prepared.plugin.contract}, **found})
        else:
            print("\n".join(_listing(session, found)), flush=True)

    return _converse(request, voice, "tools", work)


def _listing(session: Session, found: Mapping[str, Any]) -> list[str]:
    identity = session.identity
    assert identity is not None
    lines = [printable(f"{identity.id} {identity.version} ({session.prepared.plugin.contract})")]
    for what, entries in found.items():
        if not entries:
            continue
        lines += ["", f"{what.replace('_', ' ')}:"]
        for entry in entries:
            name = entry.get("name") or entry.get("uri") or entry.get("uriTemplate") or ""
            about = str(entry.get("description") or entry.get("title") or "").strip().splitlines()
            lines.append(f"  {printable(str(name))}" + (f"  {printable(about[0])[:90]}" if about else ""))
    return lines


def _converse(request: Request, voice: Voice, what: str, work: Any) -> int:
    outcome, report = trio.run(_conversation, request, voice, what, work)
    try:
        if request.sink.wanted:
            request.sink.write(report)
    except SinkError as error:
        print(f"runner {voice.verb}: {error}", file=sys.stderr)
    return EXIT[outcome.code]


async def _conversation(
    request: Request, voice: Voice, what: str, work: Any
) -> tuple[Outcome, dict[str, Any]]:
    outcome = Outcome("ok", "call", "the plugin answered")
    report: dict[str, Any] = {}
    async with trio.open_nursery() as nursery:
        number = await nursery.start(_cancelled_by_signals, nursery.cancel_scope)
        try:
            async with voice.showing(what), _session(request, voice) as session:
                await work(session)
            report = with_outcome(session.report or {}, outcome)
        except* (PluginError, PluginFailure) as group:
            [error] = _leaves(group)
            outcome, report = error.outcome, error.report or {}
            voice.hush()
            voice.failure(error)
        nursery.cancel_scope.cancel()
    if number:
        outcome = Outcome("cancelled", "call", f"ended by signal {number[0]}", f"signal:{number[0]}")
        voice.hush()
        voice.failure(PluginFailure(outcome))
        report = with_outcome(report, outcome)
    return outcome, report


@asynccontextmanager
async def _session(request: Request, voice: Voice) -> AsyncIterator[Session]:
    """With its events told as they come."""
    async with request.session() as session, trio.open_nursery() as nursery:

        async def tell() -> None:
            async for event in session.events():
                voice.event(event)

        nursery.start_soon(tell)
        yield session
        nursery.cancel_scope.cancel()


def _leaves(group: BaseExceptionGroup[Any]) -> list[Any]:
    found: list[Any] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found[:1]


async def _cancelled_by_signals(
    scope: trio.CancelScope, *, task_status: trio.TaskStatus[list[int]] = trio.TASK_STATUS_IGNORED
) -> None:
    numbers: list[int] = []
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as arrived:
        task_status.started(numbers)
        async for number in arrived:
            numbers.append(number)
            scope.cancel()


# --- many calls -----------------------------------------------------------------------------------------


def call_many(request: Request, voice: Voice, repeat: int, concurrency: int) -> int:
    tally = Tally(repeat)
    began, ended = trio.run(_many, request, voice, tally, min(repeat, concurrency))
    voice.hush()
    voice.result(tally.summary(ended - began))
    if tally.first is not None:
        voice.failure(tally.first)
        return EXIT[tally.first.outcome.code]
    return 0 if tally.done == repeat else EXIT["cancelled"]


class Tally:
    def __init__(self, left: int) -> None:
        self.left = left
        self.done = 0
        self.seconds: list[float] = []
        self.codes: Counter[str] = Counter()
        self.first: PluginError | PluginFailure | None = None

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def count(self, seconds: float | None, error: PluginError | PluginFailure | None = None) -> None:
        self.done += 1
        self.codes["ok" if error is None else error.outcome.code] += 1
        self.first = self.first or error
        if seconds is not None:
            self.seconds.append(seconds)

    def summary(self, wall: float) -> dict[str, Any]:
        ordered = sorted(self.seconds)

        def at(part: float) -> float | None:
            return (
                round(1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3) if ordered else None
            )

        latency = {f"p{int(part * 100)}": at(part) for part in (0.5, 0.9, 0.99)}
        return {
            "calls": self.done,
            "outcomes": dict(self.codes),
            "seconds": round(wall, 3),
            "per_second": round(self.done / wall, 1) if wall else None,
            "latency_ms": {"min": at(0.0), **latency, "max": at(1.0)},
        }


async def _many(request: Request, voice: Voice, tally: Tally, concurrency: int) -> tuple[float, float]:
    clock: list[float] = []
    ready = Counter[str]()
    go = trio.Event()

    async def worker() -> None:
        arrived = False
        try:
            while tally.left > 0:
                try:
                    async with request.session() as session:
                        if not arrived:
                            arrived = True
                            await _together()
                        while tally.take():
                            if not await _one(session):
                                break  # a new session for the next
                            if session.is_one_shot:
                                break
                except PluginFailure as failure:
                    if tally.take() or not arrived:
                        tally.count(None, failure)
        finally:
            if not arrived:
                ready["gone"] += 1
                _start_if_all()

    async def _together() -> None:
        """The clock starts when all sessions are warm."""
        ready["warm"] += 1
        _start_if_all()
        await go.wait()

    def _start_if_all() -> None:
        if ready.total() >= concurrency and not clock:
            clock.append(trio.current_time())
            go.set()

    async def _one(session: Session) -> bool:
        began = trio.current_time()
        try:
            await session.call(request.call, seconds=request.seconds)
            if session.is_one_shot:
                await session.conclude()
        except PluginError as error:
            tally.count(trio.current_time() - began, error)
        except PluginFailure as error:
            tally.count(None, error)
            return False
        else:
            tally.count(trio.current_time() - began)
        return True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancelled_by_signals, nursery.cancel_scope)
        async with voice.showing(f"{request.call.name} × {tally.left}"), trio.open_nursery() as workers:
            for _ in range(concurrency):
                workers.start_soon(worker)
        nursery.cancel_scope.cancel()
    now = trio.current_time()
    return (clock[0] if clock else now), now
