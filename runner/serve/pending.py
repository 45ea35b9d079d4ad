"""Confirmations that wait for a person: may this call be made, may this plugin reach that host.

Each is answered once, by the operator on the daemon's unix socket. Without an answer in its time it is a no.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import trio

Remembered = Literal["once", "session", "always"]
REMEMBERED: tuple[Remembered, ...] = get_args(Remembered)
MOST_PENDING = 64
MOST_OF_OWNER = 8  # so that neither a client nor a plugin takes the places of all
HOST_SECONDS = 3600.0  # for which a host that was refused is listed: nobody waits for the answer


class Confirmation(NamedTuple):
    """What a person is shown. No text of it is a plugin's own, but for the names of plugin and tool."""

    kind: Literal["call", "host"]
    client: str
    plugin: str
    subject: str  # the public name of the tool, or the host
    lines: tuple[str, ...] = ()  # the arguments, as they are shown
    command: str = ""  # what allows a host

    @property
    def owner(self) -> str:
        """Who makes confirmations of this kind as often as it likes."""
        return f"the client {self.client}" if self.kind == "call" else f"the plugin {self.plugin}"


class Consent(NamedTuple):
    allowed: bool
    remembered: Remembered = "once"
    by: str = ""  # who decided, or why nobody did
    decided: bool = True  # False: nobody was asked


class _Pending:
    def __init__(self, confirmation: Confirmation, seconds: float) -> None:
        self.id = f"q{secrets.token_hex(4)}"
        self.confirmation = confirmation
        self.asked = time.time()
        self.until = trio.current_time() + seconds
        self.consent = Consent(False, by="nobody answered in time")
        self.done = trio.Event()


class PendingConfirmations:
    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self._denied: set[tuple[str, str]] = set()  # plugins and hosts to which a person said no
        # Called with each confirmation and its row of `list`: a webhook tells them elsewhere.
        self.on_asked: Callable[[dict[str, Any]], None] = lambda row: None

    def list(self) -> list[dict[str, Any]]:
        self._forget_hosts()
        return [_row(each) for each in self._pending.values()]

    async def ask(self, confirmation: Confirmation, seconds: float) -> Consent:
        """Wait for an answer. If this task is cancelled, the confirmation is gone."""
        if fault := self._fault(confirmation):
            return Consent(False, by=fault, decided=False)
        pending = self._add(confirmation, seconds)
        try:
            with trio.move_on_at(pending.until):
                await pending.done.wait()
            return pending.consent
        finally:
            self._pending.pop(pending.id, None)

    def note(self, confirmation: Confirmation) -> None:
        """List a host that was refused. Each once, and not after a no: its plugin may try again and again."""
        known = any(each.confirmation[:4] == confirmation[:4] for each in self._pending.values())
        denied = (confirmation.plugin, confirmation.subject) in self._denied
        if not known and not denied and not self._fault(confirmation):
            self._add(confirmation, HOST_SECONDS)

    def decide(self, number: str, consent: Consent) -> dict[str, Any]:
        """Returns the row of the confirmation. Raises KeyError: there is none, or it has its answer."""
        pending = self._pending.pop(number)
        if trio.current_time() >= pending.until:
            raise KeyError(number)
        if pending.confirmation.kind == "host" and not consent.allowed:
            self._denied.add((pending.confirmation.plugin, pending.confirmation.subject))
        pending.consent = consent
        pending.done.set()
        return _row(pending)

    def _add(self, confirmation: Confirmation, seconds: float) -> _Pending:
        pending = _Pending(confirmation, seconds)
        self._pending[pending.id] = pending
        self.on_asked(_row(pending))
        return pending

    def _fault(self, confirmation: Confirmation) -> str:
        self._forget_hosts()
        if len(self._pending) >= MOST_PENDING:
            return f"{MOST_PENDING} confirmations wait for an answer, which is the most"
        of_owner = sum(each.confirmation.owner == confirmation.owner for each in self._pending.values())
        if of_owner >= MOST_OF_OWNER:
            owner = confirmation.owner
            return f"{MOST_OF_OWNER} confirmations about {owner} wait for an answer, which is the most"
        return ""

    def _forget_hosts(self) -> None:
        now = trio.current_time()
        self._pending = {number: each for number, each in self._pending.items() if now < each.until}


def _row(pending: _Pending) -> dict[str, Any]:
    left = max(0.0, pending.until - trio.current_time())
    return {
        "id": pending.id,
        "asked": pending.asked,
        "seconds": round(left, 3),
        **pending.confirmation._asdict(),
    }
