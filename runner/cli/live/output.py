"""What `call` and `tools` print: results on stdout, events where --events says, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from runner.cli.shared.text import fit, note_text
from runner.contracts.contract import CommandOutput
from runner.exceptions import PluginError, PluginFailure
from runner.outcome import Advice, outcome_document
from runner.protocol.dialect import Notice, Progress
from sandbox.document.diagnostic import printable, quoted
from sandbox.files import write_all
from sandbox.spec import Note
from sandbox.streams.endpoints import sink_for

if TYPE_CHECKING:
    from runner.cli.shared.events_file import EventsFile

# How much of the plugin's stderr is shown with a failure: lines, and characters of each.
_STDERR_LINES, _STDERR_WIDTH = 12, 500
# After this time a terminal shows a progress line, which is redrawn as often.
_PROGRESS_AFTER_SECONDS = 1.0
_NOTICE_CHARACTERS = 2000
_PROGRESS_CHARACTERS = 500  # of a plugin's own progress message
# A reader of our stderr that takes longer than this gets nothing more. While a plugin runs it is the time for
# a whole line; afterwards, when there are no clocks to delay, for each part that a pipe takes at once.
_STDERR_WRITE_SECONDS = 2.0


_RESET = "\x1b[0m"
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,32}m")  # SGR: colours, bold, reset


class Output:
    def __init__(self, verb: str, *, as_json: bool, events: EventsFile | None = None) -> None:
        self.verb = verb
        self.as_json = as_json
        self._events = events
        self._mixed = events is not None and events.is_stderr  # then events have no second line for people
        self._terminal = sys.stderr.isatty() and events is None and not as_json
        self._line = ""
        self._sink = sink_for(2)
        self._stderr_stuck = False  # nobody reads it
        self._failed = False
        self._advised = False
        self._told: set[str] = set()  # what was said about hosts while the plugin ran
        self.has_told = False
        self.unwritten: OSError | None = None  # why the result could not be written
        self.shows_published = False  # published events are the result, one per line
        self.lines = 0

    def result(self, value: Any) -> None:
        if sys.stdout.isatty():
            pretty = None if self.as_json else 2
            self.tell(_shown(json.dumps(value, ensure_ascii=False, indent=pretty)))
        else:
            self.tell(json.dumps(value, ensure_ascii=False))

    def command(self, command: CommandOutput) -> None:
        """Write the output of a plugin's command to our own streams, byte for byte. A terminal gets colours,
        and no other control sequences."""
        self.hush()
        try:
            write_all(1, _for_terminal(command.stdout) if sys.stdout.isatty() else command.stdout)
        except OSError as error:
            self.unwritten = error
        self._write(_for_terminal(command.stderr) if sys.stderr.isatty() else command.stderr)
        self.has_told = True

    def line(self, value: Any) -> None:
        """Print one of several results."""
        told = self.has_told
        text = json.dumps(value, ensure_ascii=False)
        self.tell(_shown(text) if sys.stdout.isatty() else text)
        self.has_told = told
        self.lines += self.unwritten is None

    def tell(self, text: str) -> None:
        """Write to stdout, in UTF-8 whatever the locale: programs read it. A lone surrogate stays escaped."""
        self.hush()
        try:
            # Not through sys.stdout: a signal that interrupts it loses what the pipe did not take.
            write_all(1, text.encode("utf-8", "backslashreplace") + b"\n")
        except OSError as error:
            self.unwritten = error
        self.has_told = True

    def event(self, event: Notice | Progress) -> None:
        kind = "progress" if isinstance(event, Progress) else event.kind
        self._tell_event(kind, event.value)
        if kind == "advice":
            self._told.add(event.value["what"])
            self._say_text(Advice(**event.value).text)
            return
        if kind in ("progress", "ended", "network"):
            return  # the answer or the failure says the same; the report has all connections
        if kind == "hook_failed":
            if self.as_json and not self._mixed:
                self._say(_compact({"event": kind, "value": event.value}))
            else:
                self._say_text(_hook_failed(event.value))
        elif self._events is None:
            text = event.value if isinstance(event.value, str) else _compact(event.value)
            self._say_text(f"{kind}: {text[:_NOTICE_CHARACTERS]}")

    def warn(self, text: str) -> None:
        if not self.as_json:
            self._say(f"runner: {printable(text)}")

    def note(self, note: Note) -> None:
        """A note about the launch. The report has it too."""
        self._tell_event("note", note._asdict())
        self._say_text(note_text(note))

    def record(self, record: Mapping[str, Any]) -> None:
        """The contract's own record of a call that has an answer. The document of a failure has it too."""
        self._tell_event("invocation", record)
        if self.as_json and not self._mixed:
            self._say(_compact({"event": "invocation", "value": record}), last=True)

    def drain_events(self) -> None:
        """Write waiting events after the plugin has ended. May wait for their reader."""
        if self._events is not None:
            self._events.drain()

    def failure(self, error: PluginError | PluginFailure, notes: Iterable[Note] = ()) -> None:
        """Print a failure, once. `notes`: of the launch, where there is no report yet."""
        if self._failed:
            self._advise(error)
            return
        self._failed = self.has_told = True
        self.hush()
        if self.as_json:
            self._say(_compact(_document(error)), last=True)
            return
        outcome = error.outcome
        if (
            isinstance(error, PluginFailure)
            and error.explanation
            and (outcome.diagnostics or outcome.denials)
        ):
            self._say("\n".join(error.explanation))  # it names the place of each
        else:
            cause = outcome.cause
            if isinstance(error, PluginError) and error.kind not in ("", cause):
                cause += f", {error.kind}"
            because = f" ({cause})" if cause else ""
            hint = f"; {outcome.hint}" if outcome.hint else ""
            self._say(
                f"runner: {printable(f'{outcome.code} in {outcome.phase}{because}: {outcome.message}{hint}')}"
            )
        self.stderr_tail(error.stderr)
        told = (error.report or {}).get("notes", ())
        for note in notes or (Note(**document) for document in told):
            # Urgent ones were printed at the start. A plugin may return an error because it could not reach a
            # host.
            if note.urgent or note.message in self._told:
                continue
            if isinstance(error, PluginFailure) or note.rule == "network":
                self.note(note)
        self._advise(error)

    def _advise(self, error: PluginError | PluginFailure) -> None:
        """Print advice about the cage. It is known when the plugin has ended, which may be after the failure
        was printed."""
        if self.as_json or self._advised or error.report is None:
            return
        self._advised = True
        for each in error.advice:
            if each.what in self._told:
                continue
            self._tell_event("advice", each._asdict())
            self._say_text(each.text)

    def stderr_tail(self, tail: str) -> None:
        lines = [] if self.as_json else tail.splitlines()
        if lines:
            self._say("  its stderr ends with:")
            for line in lines[-_STDERR_LINES:]:
                self._say(f"  | {printable(line[-_STDERR_WIDTH:])}")

    def _tell_event(self, kind: str, value: Any) -> None:
        if self._events is not None:
            self._events.write(kind, value)

    def _say_text(self, text: str) -> None:
        """Print a line for people that an event has too."""
        if not self.as_json and not self._mixed:
            self._say(f"runner: {printable(text)}")

    def _say(self, text: str, *, last: bool = False) -> None:
        self.hush()
        shown = text if self.as_json else fit(text, sys.stderr)
        self._write(f"{shown}\n".encode(sys.stderr.encoding or "utf-8", "backslashreplace"), last=last)

    def _write(self, data: bytes, *, last: bool = False) -> None:
        """Write to stderr. A slow reader must not delay the clocks: after a bounded wait nothing more is
        written there. `last`: the plugin has ended, so there are no clocks, and the wait is bounded for each
        part of a long line."""
        until = time.monotonic() + _STDERR_WRITE_SECONDS
        left = memoryview(data)  # a slice of it copies nothing
        try:
            while left and not self._stderr_stuck:
                try:
                    left = left[self._sink.write(bytes(left[: select.PIPE_BUF])) :]
                    if last:
                        until = time.monotonic() + _STDERR_WRITE_SECONDS
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(self._sink.fd, select.POLLOUT)
                    poll.poll(max(0.0, until - time.monotonic()) * 1000)
                    self._stderr_stuck = time.monotonic() >= until
        except OSError:  # nobody reads it
            self._stderr_stuck = True

    # --- the progress line on a terminal --------------------------------------------------------------------

    @asynccontextmanager
    async def showing(self, what: str) -> AsyncIterator[None]:
        """Show a progress line while the body runs. Only on a terminal."""
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
            await trio.sleep(_PROGRESS_AFTER_SECONDS)
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
            self._line += f" {message[:_PROGRESS_CHARACTERS]}"

    def _draw(self, text: str) -> None:
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(2).columns - 1
            self._write(f"\r\x1b[K{printable(text)[:width]}".encode(errors="backslashreplace"))
            self._drawn = True

    _drawn = False

    def hush(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write(b"\r\x1b[K")


def _hook_failed(value: Mapping[str, Any]) -> str:
    failed = f"hook_failed: the hook {quoted(value['hook'])} failed: {value['why']}"
    if "on_failure" not in value:
        return f"{failed}; it contributes nothing, and the session goes on"
    passes = "lets its message pass" if value["on_failure"] == "continue" else "stops its message"
    rule = f'on_failure = "{value["on_failure"]}" under [hooks] in the policy'
    return f"{failed}; {rule} {passes}"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str)


def _for_terminal(raw: bytes) -> bytes:
    """Untrusted output of a command. Lines, tabs and colours stay; other control characters are escaped."""
    parts = _COLOUR.split(raw.decode("utf-8", "replace"))
    colours = _COLOUR.findall(raw.decode("utf-8", "replace"))
    shown = ["".join(c if c in "\n\t" else printable(c) for c in part) for part in parts]
    text = "".join(a + b for a, b in zip(shown, (*colours, ""), strict=True))
    return (text + _RESET if colours else text).encode()  # a colour must not reach what others print


def _shown(text: str) -> str:
    """JSON for a terminal: control characters become their JSON escapes."""
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
        "advice": [each._asdict() for each in error.advice],
        "stderr_tail": error.stderr,
    }
    if isinstance(error, PluginError):
        document.update(kind=error.kind, data=error.data)
    if error.invocation is not None:
        document["invocation"] = error.invocation
    return document
