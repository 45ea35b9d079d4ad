"""What is said to whoever called: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from runner.exceptions import PluginError, PluginFailure
from runner.outcome import outcome_document
from runner.protocol.dialect import Notice, Progress
from sandbox.document.diagnostic import printable, quoted
from sandbox.files import write_all
from sandbox.spec import Note
from sandbox.streams.endpoints import sink_for

# Of a plugin's last words, so many lines make the point.
_LAST_LINES, _LAST_WIDTH = 12, 500
# Before a terminal is told that it takes a while, and between two such words.
_A_WHILE = 1.0
_NOTICE_LENGTH = 2000
_LINE_LENGTH = 500  # of what a plugin says about its progress; a terminal's line has no room for more
# For who reads our stderr.
_PATIENCE = 2.0


class Output:
    """What is said on stdout (results) and on stderr (everything else)."""

    def __init__(self, verb: str, *, as_json: bool, events: bool) -> None:
        self.verb = verb
        self.as_json = as_json
        self._events = events
        self._terminal = sys.stderr.isatty() and not events and not as_json
        self._line = ""
        self._sink = sink_for(2)
        self._deaf = False  # whoever should read our stderr
        self._failed = False
        self.has_told = False
        self.unheard: OSError | None = None  # why nobody got the result
        self.shows_published = False  # what the plugin publishes is the result, line by line
        self.lines = 0

    def result(self, value: Any) -> None:
        if sys.stdout.isatty():
            pretty = None if self.as_json else 2
            self.tell(_shown(json.dumps(value, ensure_ascii=False, indent=pretty)))
        else:
            self.tell(json.dumps(value, ensure_ascii=False))

    def line(self, value: Any) -> None:
        """One of several results, which end with the time for them."""
        told = self.has_told
        text = json.dumps(value, ensure_ascii=False)
        self.tell(_shown(text) if sys.stdout.isatty() else text)
        self.has_told = told
        self.lines += self.unheard is None

    def tell(self, text: str) -> None:
        """On stdout, in UTF-8 whatever the locale: programs read it. Half a surrogate pair stays escaped."""
        self.hush()
        try:
            # Not by sys.stdout: interrupted by a signal, its buffer forgets what the pipe did not take.
            write_all(1, text.encode("utf-8", "backslashreplace") + b"\n")
        except OSError as error:
            self.unheard = error
        self.has_told = True

    def event(self, event: Notice | Progress) -> None:
        if isinstance(event, Progress):
            self._say_json({"event": "progress", "value": event.value})
            return
        if event.kind == "ended" and not self._events:
            return  # what it means for who asked is told with the answer, or instead of it
        if self._events or (self.as_json and event.kind == "hook_failed"):
            self._say(_compact({"event": event.kind, "value": event.value}))
        elif event.kind == "hook_failed":
            self._say(f"runner: {printable(_hook_failed(event.value))}")
        elif not self.as_json:
            text = event.value if isinstance(event.value, str) else _compact(event.value)
            self._say(f"runner: {event.kind}: {printable(text[:_NOTICE_LENGTH])}")

    def warn(self, text: str) -> None:
        if not self.as_json:
            self._say(f"runner: {printable(text)}")

    def note(self, note: Note) -> None:
        """About the launch. In a report it is anyway."""
        self._say_json({"event": "note", "value": note._asdict()})
        if not self._events and not self.as_json:
            self._say(f"runner: {printable('; '.join(text for text in (note.message, note.hint) if text))}")

    def failure(self, error: PluginError | PluginFailure, notes: Iterable[Note] = ()) -> None:
        """Once: who was told before the end is not told again. `notes`: where there is no report yet."""
        if self._failed:
            return
        self._failed = self.has_told = True
        self.hush()
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
        self.last_words(error.stderr)
        if isinstance(error, PluginFailure):
            told = (error.report or {}).get("notes", ())
            for note in notes or (Note(**document) for document in told):
                if not note.urgent:  # else it was told before
                    self.note(note)

    def last_words(self, tail: str) -> None:
        lines = [] if self.as_json else tail.splitlines()
        if lines:
            self._say("  its stderr ends with:")
            for line in lines[-_LAST_LINES:]:
                self._say(f"  | {printable(line[-_LAST_WIDTH:])}")

    def _say_json(self, document: Mapping[str, Any]) -> None:
        if self._events:
            self._say(_compact(document))

    def _say(self, text: str) -> None:
        self.hush()
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        """Without waiting for long: who does not read our stderr must not hold up the clocks. From then on
        nothing more is said there."""
        data = text.encode(sys.stderr.encoding or "utf-8", "backslashreplace")
        until = time.monotonic() + _PATIENCE
        try:
            while data and not self._deaf:
                try:
                    data = data[self._sink.write(data[: select.PIPE_BUF]) :]
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(self._sink.fd, select.POLLOUT)
                    poll.poll(max(0.0, until - time.monotonic()) * 1000)
                    self._deaf = time.monotonic() >= until
        except OSError:  # nobody reads it
            self._deaf = True

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
        else:
            self._line = ""
        if isinstance(message, str):
            self._line += f" {message[:_LINE_LENGTH]}"

    def _draw(self, text: str) -> None:
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(2).columns - 1
            self._write(f"\r\x1b[K{printable(text)[:width]}")
            self._drawn = True

    _drawn = False

    def hush(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write("\r\x1b[K")


def _hook_failed(value: Mapping[str, Any]) -> str:
    passes = "lets its message pass" if value["on_failure"] == "continue" else "stops its message"
    rule = f'on_failure = "{value["on_failure"]}" under [hooks] in the policy'
    return f"hook_failed: the hook {quoted(value['hook'])} failed: {value['why']}; {rule} {passes}"


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
        "notes": (error.report or {}).get("notes", []),
        "stderr_tail": error.stderr,
    }
    if isinstance(error, PluginError):
        document.update(kind=error.kind, data=error.data)
    return document
