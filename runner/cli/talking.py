"""What `runner call` and `runner tools` have in common: a session, and what people are told of it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import trio

from runner.cli.sink import ReportSink, SinkError
from runner.dialect import Call, Notice, Progress
from runner.prepare import Invocation
from runner.report import EXIT, Outcome, outcome_document, with_outcome
from runner.session import PluginError, PluginFailure, Session, dialect_of, entries, open_session
from runner.zygote import Errand
from sandbox.diagnostic import did_you_mean, printable, quoted
from sandbox.value import NamedTuple

_T = TypeVar("_T")

# Of a plugin's last words, so many lines make the point.
_LAST_LINES, _LAST_WIDTH = 12, 500
# Before a terminal is told that it takes a while, and between two such words.
_A_WHILE = 1.0
_NOTICE_LENGTH = 2000
# For a list of names that is only meant to help.
_ADVICE_SECONDS = 5.0
_ADVICE_NAMES = 20


class Request(NamedTuple):
    invocation: Invocation
    call: Call
    seconds: float | None
    config: Any
    sink: ReportSink
    sent: Errand | None

    def session(self, made: Callable[[Session], None] | None = None) -> AbstractAsyncContextManager[Session]:
        return open_session(
            self.invocation,
            environ=os.environ,
            call=self.call,
            seconds=self.seconds,
            config=self.config,
            sent=self.sent,
            made=made,
        )


class Voice:
    """What is said on stdout (results) and on stderr (everything else)."""

    def __init__(self, verb: str, *, as_json: bool, events: bool) -> None:
        self.verb = verb
        self.as_json = as_json
        self._events = events
        self._terminal = sys.stderr.isatty() and not events and not as_json
        self._line = ""
        self.has_told = False
        self.unheard: OSError | None = None  # why nobody got the result

    def result(self, value: Any) -> None:
        if sys.stdout.isatty():
            pretty = None if self.as_json else 2
            self.tell(_shown(json.dumps(value, ensure_ascii=False, indent=pretty)))
        else:
            self.tell(json.dumps(value, ensure_ascii=False))

    def tell(self, text: str) -> None:
        """On stdout, in UTF-8 whatever the locale: programs read it. Half a surrogate pair stays escaped."""
        self.hush()
        self.has_told = True
        try:
            sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace") + b"\n")
            sys.stdout.buffer.flush()
        except OSError as error:
            self.unheard = error

    def event(self, event: Notice | Progress) -> None:
        if isinstance(event, Progress):
            self._say_json({"event": "progress", "value": event.value})
            return
        self._say_json({"event": event.kind, "value": event.value})
        if not self._events and not self.as_json:
            text = event.value if isinstance(event.value, str) else _compact(event.value)
            self._say(f"runner: {event.kind}: {printable(text[:_NOTICE_LENGTH])}")

    def failure(self, error: PluginError | PluginFailure) -> None:
        if self.as_json:
            self._say(_compact(_document(error)))
            return
        outcome = error.outcome
        if (
            isinstance(error, PluginFailure)
            and error.explanation
            and (outcome.diagnostics or outcome.denials)
        ):
            self._say("\n".join(error.explanation))  # each with its place
        else:
            cause = outcome.cause
            if isinstance(error, PluginError) and error.kind not in ("", cause):
                cause += f", {error.kind}"
            because = f" ({cause})" if cause else ""
            hint = f"; {outcome.hint}" if outcome.hint else ""
            self._say(
                f"runner: {printable(f'{outcome.code} in {outcome.phase}{because}: {outcome.message}{hint}')}"
            )
        self._last_words(error.stderr)

    def _last_words(self, tail: str) -> None:
        lines = tail.splitlines()
        if lines:
            self._say("  its stderr ends with:")
            for line in lines[-_LAST_LINES:]:
                self._say(f"  | {printable(line[-_LAST_WIDTH:])}")

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


def _shown(text: str) -> str:
    """JSON for a terminal: what would steer one becomes the escape it also has in JSON."""
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def _document(error: PluginError | PluginFailure) -> dict[str, Any]:
    """A failure for programs."""
    outcome = error.outcome
    grant = (error.report or {}).get("grant") or {}
    document: dict[str, Any] = {
        **outcome_document(outcome),
        "diagnostics": [each._asdict() for each in outcome.diagnostics],
        "denials": grant.get("denials", []),
        "stderr_tail": error.stderr,
    }
    if isinstance(error, PluginError):
        document.update(kind=error.kind, data=error.data)
    return document


# --- one call -------------------------------------------------------------------------------------------


def call_once(request: Request, voice: Voice) -> int:
    async def work(session: Session) -> None:
        try:
            value = await session.call(request.call, seconds=request.seconds, on_progress=voice.progress)
        except PluginError as error:
            raise await _advised(session, request.call, error) from None
        if session.is_one_shot:
            await session.conclude()  # before anything is printed: it may take the answer back
        voice.result(value)

    return _converse(request, voice, f"{request.call.kind} {request.call.name}", work)


# Where a plugin can be asked what there is of a kind, and under which key the name is.
_LISTED = {"tool": ("tools", "name"), "prompt": ("prompts", "name"), "resource": ("resources", "uri")}


async def _advised(session: Session, call: Call, error: PluginError) -> PluginError | PluginFailure:
    """A "no" may mean that there is no such thing: then say what there is. Or that its input is wrong."""
    if error.kind == "invalid_arguments":
        error.outcome = error.outcome._replace(hint="runner tools --json shows what it takes")
    what, key = _LISTED.get(call.kind, ("", ""))
    contract = dialect_of(session.prepared.plugin.contract)
    if call.kind not in contract.KINDS:
        hint = f"--kind can be {', '.join(contract.KINDS)} here"
        error.outcome = error.outcome._replace(hint=hint)
        return error
    if not hasattr(contract, "LISTS") or not what:
        return error  # it knew before it asked
    try:
        found = entries(await session.call(Call("list", what), seconds=_ADVICE_SECONDS))
    except (PluginError, PluginFailure):
        return error
    names = [printable(str(entry.get(key, ""))) for entry in found]
    if call.name in names:
        return error
    shown = ", ".join(map(quoted, names[:_ADVICE_NAMES])) + (", …" if len(names) > _ADVICE_NAMES else "")
    hint = did_you_mean(call.name, names) or (f"there are {shown}" if names else f"it has no {what} at all")
    if call.kind == "resource":  # may be one of a template's
        error.outcome = error.outcome._replace(hint=hint)
        return error
    message = f"the plugin has no {call.kind} {quoted(call.name)}: {error.message}"
    return PluginFailure(Outcome("tool_not_exposed", "call", message, call.kind, hint))


# What a manifest alone tells: nobody can be asked for these.
_DECLARED = ("hooks", "channels", "llm_providers", "memory_backends")


def list_all(request: Request, voice: Voice) -> int:
    async def work(session: Session) -> None:
        found = await _everything(session)
        if session.is_one_shot:
            await session.conclude()
        identity, contract = session.identity, session.prepared.plugin.contract
        assert identity is not None
        if voice.as_json:
            about = {"id": identity.id, "version": identity.version, "protocol": identity.protocol}
            voice.result({"plugin": {**about, "contract": contract}, **found})
        else:
            title = printable(" ".join(filter(None, (identity.id, identity.version, f"({contract})"))))
            voice.tell("\n".join((title, *_listing(found))))

    return _converse(request, voice, "tools", work)


async def _everything(session: Session) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"tools": []}
    with contextlib.suppress(PluginError):  # it has none
        found["tools"] = entries(await session.call(Call("list", "tools")))
    identity, plugin = session.identity, session.prepared.plugin
    assert identity is not None
    for what in getattr(dialect_of(plugin.contract), "LISTS", ()):
        capability = "resources" if what == "resource_templates" else what
        if capability in identity.details:  # who does not offer it may not even answer
            with contextlib.suppress(PluginError):
                found[what] = entries(await session.call(Call("list", what)))
    for what, names in plugin.exports:
        if what in _DECLARED:
            found[what] = [{"name": name} for name in names]
    return found


def _listing(found: Mapping[str, list[Any]]) -> list[str]:
    lines = []
    for what, listed in found.items():
        if not listed and what == "tools":
            lines += ["", "no tools"]
        elif listed:
            lines += ["", f"{what.replace('_', ' ')}:"]
            names = [_name(entry) for entry in listed]
            width = min(_WIDEST, max(map(len, names)))
            for name, entry in zip(names, listed, strict=True):
                lines.append(f"  {name:<{width}}  {_about(entry)}".rstrip())
    return lines


_WIDEST, _ABOUT = 40, 90


def _name(entry: Mapping[str, Any]) -> str:
    """As `call` wants it."""
    return printable(str(entry.get("uri") or entry.get("uriTemplate") or entry.get("name") or ""))


def _about(entry: Mapping[str, Any]) -> str:
    lines = str(entry.get("description") or entry.get("title") or "").strip().splitlines()
    return printable(lines[0])[:_ABOUT] if lines else ""


def _running(work: Callable[..., Awaitable[_T]], *given: Any) -> _T:
    gc.freeze()  # what was imported stays: nobody need look through it for garbage
    gc.enable()
    return trio.run(work, *given)


def _converse(request: Request, voice: Voice, what: str, work: Any) -> int:
    outcome, report = _running(_conversation, request, voice, what, work)
    if request.sink.wanted:
        try:
            request.sink.write(report)
        except SinkError as error:
            with contextlib.suppress(OSError):
                print(f"runner {voice.verb}: {error}", file=sys.stderr)
    return EXIT[outcome.code]


async def _conversation(
    request: Request, voice: Voice, what: str, work: Any
) -> tuple[Outcome, dict[str, Any]]:
    seen: list[Session] = []
    failed: PluginError | PluginFailure | None = None

    def heed(first: bool) -> None:
        if voice.has_told or not first:  # what is left is a farewell, which nobody wants to wait for
            for session in seen:
                session.kill()

    async with _interruptible(heed) as numbers:
        try:
            async with voice.showing(what), _session(request, voice, seen) as session:
                await work(session)
        except* (PluginError, PluginFailure) as group:
            [failed] = _leaves(group)
    if failed is None and not voice.has_told and numbers:
        failed = _interrupted(numbers[0])
        failed.stderr = seen[0].stderr if seen else ""
    if failed is None and voice.unheard is not None:
        failed = _unheard(voice.unheard)
    outcome = Outcome("ok", "call", "the plugin answered") if failed is None else failed.outcome
    report = (failed.report if failed is not None else None) or (seen[0].report if seen else None)
    if failed is not None:
        failed.report = report
        voice.hush()
        if not isinstance(voice.unheard, BrokenPipeError):  # `| head` is no accident
            voice.failure(failed)
    return outcome, with_outcome(report or _bare_report(request.invocation, outcome), outcome)


def _interrupted(number: int) -> PluginFailure:
    return PluginFailure(Outcome("cancelled", "call", f"ended by signal {number}", f"signal:{number}"))


def _unheard(error: OSError) -> PluginFailure:
    """It answered, for nothing."""
    if isinstance(error, BrokenPipeError):
        return PluginFailure(Outcome("cancelled", "call", "nobody reads the result any more", "stdout"))
    message = f"the plugin answered, but stdout does not take it: {error.strerror}"
    return PluginFailure(Outcome("internal", "call", message, "stdout", "make room where stdout leads"))


def _bare_report(invocation: Invocation, outcome: Outcome) -> dict[str, Any]:
    """Of who was interrupted before anything was known."""
    from runner.account import report
    from runner.prepare import Prepared

    return report(Prepared(invocation), outcome, None, EXIT[outcome.code])


@asynccontextmanager
async def _session(request: Request, voice: Voice, seen: list[Session]) -> AsyncIterator[Session]:
    """With its events told as they come: from before the handshake on, and all of them."""
    failed: PluginError | PluginFailure | None = None
    async with trio.open_nursery() as nursery:

        def made(session: Session) -> None:
            seen.append(session)
            nursery.start_soon(tell, session)

        async def tell(session: Session) -> None:
            async for event in session.events():
                voice.event(event)

        try:
            async with request.session(made) as session:
                yield session
        except (PluginError, PluginFailure) as error:
            failed = error  # past the nursery, which would not let the last events be told
    if failed is not None:
        raise failed


def _leaves(group: BaseExceptionGroup[Any]) -> list[Any]:
    found: list[Any] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found[:1]


@asynccontextmanager
async def _interruptible(heed: Callable[[bool], None]) -> AsyncIterator[list[int]]:
    """The first signal that comes cancels the body. `heed` is told of each, and whether it is the first."""
    numbers: list[int] = []
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as arrived:
        async with trio.open_nursery() as nursery:
            body = trio.CancelScope()

            async def listen() -> None:
                async for number in arrived:
                    numbers.append(number)
                    body.cancel()
                    heed(len(numbers) == 1)

            nursery.start_soon(listen)
            with body:
                yield numbers
            nursery.cancel_scope.cancel()


# --- many calls -----------------------------------------------------------------------------------------


def call_many(request: Request, voice: Voice, repeat: int, concurrency: int) -> int:
    tally = Tally(repeat)
    wall, numbers = _running(_many, request, voice, tally, min(repeat, concurrency))
    voice.result(tally.summary(wall))
    if tally.first is not None:
        voice.failure(tally.first)
        return EXIT[tally.first.outcome.code]
    if tally.done < repeat:
        cancelled = _interrupted(numbers[0] if numbers else signal.SIGTERM)
        voice.failure(cancelled)
        return EXIT["cancelled"]
    if voice.unheard is not None:
        failed = _unheard(voice.unheard)
        if not isinstance(voice.unheard, BrokenPipeError):
            voice.failure(failed)
        return EXIT[failed.outcome.code]
    return 0


class Tally:
    def __init__(self, wanted: int) -> None:
        self.wanted = self.left = wanted
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


# A launch that fails for one of these fails the same way every time.
_FOR_GOOD = ("manifest_invalid", "policy_denied", "sandbox_unavailable")


async def _many(request: Request, voice: Voice, tally: Tally, concurrency: int) -> tuple[float, list[int]]:
    """How long it took, from when all sessions were warm, and the signals that came meanwhile."""
    clock: list[float] = []
    living: list[Session] = []
    ready = Counter[str]()
    go = trio.Event()

    async def worker() -> None:
        arrived = False
        try:
            while tally.left > 0:
                try:
                    async with request.session(living.append) as session:
                        if not arrived:
                            arrived = True
                            await _together()
                        while tally.take():
                            if not await _one(session):
                                break  # a new session for the next
                            if session.is_one_shot:
                                break
                except PluginFailure as failure:
                    if tally.take():
                        tally.count(None, failure)
                    if failure.outcome.code in _FOR_GOOD:
                        tally.left = 0
                finally:
                    living[:] = [session for session in living if session.report is None]
        finally:
            if not arrived:
                ready["gone"] += 1
                _start_if_all()

    async def _together() -> None:
        ready["warm"] += 1
        _start_if_all()
        await go.wait()

    def _start_if_all() -> None:
        if ready.total() >= concurrency and not clock:
            clock.append(trio.current_time())
            go.set()

    async def _one(session: Session) -> bool:
        """Whether the session can be used again."""
        began = trio.current_time()
        try:
            await session.call(request.call, seconds=request.seconds)
            if session.is_one_shot:
                await session.conclude()
        except PluginError as error:
            error.stderr = session.stderr
            tally.count(trio.current_time() - began, error)
        except PluginFailure as error:
            error.stderr = session.stderr
            tally.count(None, error)
            return not session.is_over
        else:
            tally.count(trio.current_time() - began)
        voice.progress({"progress": tally.done, "total": tally.wanted})
        return True

    def heed(first: bool) -> None:
        if not first:
            for session in living:
                session.kill()

    what = f"{request.call.name} × {tally.wanted}"
    async with _interruptible(heed) as numbers, voice.showing(what), trio.open_nursery() as workers:
        for _ in range(concurrency):
            workers.start_soon(worker)
    now = trio.current_time()
    return now - (clock[0] if clock else now), numbers
