"""Events of a plugin about an open request, and their limits.

    progress    what a person may read. At most MOST_PROGRESS for one request, and MOST_PER_SECOND; the rest
                is dropped
    others      carry content. They are not measured by the second, since a piece that is missing spoils the
                rest. But they have a limit too, so that the plugin does not decide how many there are. A tool
                that does not declare streaming may send none

No event may be longer than EVENT_LIMIT. What is dropped is counted, and a Notice says so for the first, the
second, the fourth, the eighth, … The response counts all the same: events only inform.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from runner.contracts.vai.messages import EVENT_LIMIT, LongEvent
from runner.protocol.dialect import Events, Notice, Progress
from sandbox.document.diagnostic import printable, quoted

MOST_PROGRESS = 1000  # for one request
MOST_PER_SECOND = 100  # of progress
MOST_CONTENT = 100_000  # for one request
PROGRESS = "progress"

TYPE = re.compile(r"[a-z][a-z0-9_.]{0,127}")


def fault_of_event(value: Mapping[str, Any]) -> str:
    """Returns why a frame with an event is invalid, or ''."""
    if not isinstance(value.get("request_id"), str):
        return "its request_id is missing or not a string"
    event = value.get("event")
    if not isinstance(event, dict):
        return "its event is missing or not an object"
    if not isinstance(event.get("type"), str):
        return "the type of its event is missing or not a string"
    return ""


class EventCount:
    """The events of one conversation. Requests are served one at a time, so the limits of one request are
    counted from `begin` on."""

    def __init__(self) -> None:
        self.passed = 0
        self.dropped = 0
        self.last_drop = ""  # why
        self._token = 0
        self._takes_content = True
        self._sequence = self._progress = self._content = 0  # of this request
        self._began = 0.0  # when the request's first event came
        self._second = 0.0  # when the second began that is being counted
        self._in_second = 0

    def begin(self, token: int, *, takes_content: bool) -> None:
        self._token = token
        self._takes_content = takes_content
        self._sequence = self._progress = self._content = 0

    def take(self, event: Mapping[str, Any], at: float) -> Events:
        """An event of the open request; `at`: when it was read."""
        self._count_one(at)
        kind = event["type"]
        if TYPE.fullmatch(kind) is None:
            return self.drop(
                "bad_type", f"{quoted(kind)} cannot be the type of an event: it has to match {TYPE.pattern}"
            )
        if kind == PROGRESS:
            if why := self._excess(event, at):
                return self.drop("progress", why)
        elif why := self._excess_content(kind):
            return self.drop("content", why)
        self.passed += 1
        told = {**event, "sequence": self._sequence, "seconds": round(at - self._began, 6)}
        return (Progress(self._token, told),)

    def take_long(self, event: LongEvent, at: float) -> Events:
        self._count_one(at)
        why = f"an event of {event.size} bytes is longer than {EVENT_LIMIT}"
        return self.drop("too_long", why)

    def drop(self, reason: str, why: str) -> Events:
        self.dropped += 1
        self.last_drop = printable(why)
        if self.dropped & (self.dropped - 1):
            return ()
        return (Notice("dropped", {"reason": reason, "why": self.last_drop, "count": self.dropped}),)

    def _count_one(self, at: float) -> None:
        """Number an event. Dropped events get a number too, so that a reader notices gaps."""
        if not self._sequence:
            self._began = at
        self._sequence += 1

    def _excess(self, event: Mapping[str, Any], at: float) -> str:
        """Returns why a progress event is dropped, or ''."""
        if not isinstance(event.get("message"), str | None):
            return "the message of a progress event is not a string"
        if self._progress >= MOST_PROGRESS:
            return f"more than {MOST_PROGRESS} progress events for one request"
        # The clock is the session's, which does not go back. If it did, a new second would begin.
        if not 0 <= at - self._second < 1:
            self._second, self._in_second = at, 0
        if self._in_second >= MOST_PER_SECOND:
            return f"more than {MOST_PER_SECOND} progress events in one second"
        self._in_second += 1
        self._progress += 1
        return ""

    def _excess_content(self, kind: str) -> str:
        if not self._takes_content:
            return f"{quoted(kind)} carries content, and the export does not declare streaming = true"
        if self._content >= MOST_CONTENT:
            return f"more than {MOST_CONTENT} events with content for one request"
        self._content += 1
        return ""
