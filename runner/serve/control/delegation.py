"""Credentials for the gateway of an org, which a call by one of its bindings gets.

A command of the operator's makes one token for each call. On its stdin it is told, as JSON, for which call,
with which scopes and for how many seconds; on its stdout it says {"token": …, "expires_in": …} and, if there
are fewer, the scopes that the token has. A token that lives longer than its call may is refused. It is held
in memory until the call is over, hidden where the plugin repeats it, and in no file: the audit has who got
which scopes, for how long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from runner.ledger.ledger import Ledger
from runner.ledger.rows import BINDING
from runner.ledger.sqlite_file import DatabaseUnusable
from runner.protocol import wire
from runner.protocol.disguise.forms import SHORTEST
from runner.protocol.host_services import Delegation, DelegationRequest, HostError
from runner.serve.control.settings import OrgApiGateway
from runner.serve.token_command import TokenCommandFailed, run_token_command

AUDIT = "delegation"  # the kind of its rows
_INTERNAL = -32603
_NONE = Delegation("", "", ())  # the plugin gets no gateway

# Called with the id of a call and its token, before anybody else gets the token. Returns whose call it is, or
# None if it is over.
Hold = Callable[[str, str], Awaitable[str | None]]


class BindingApiGateway:
    """The gateway service of the plugins of one binding. `find`: the settings of its org, as they are now."""

    def __init__(
        self, binding: str, find: Callable[[], OrgApiGateway | None], hold: Hold, ledger: Ledger
    ) -> None:
        self._binding, self._find, self._hold, self._ledger = binding, find, hold, ledger

    async def delegate(self, request: DelegationRequest) -> Delegation:
        gateway = self._find()
        if gateway is None:
            return _NONE
        seconds = math.ceil(request.seconds)
        asked = {
            "invocation_id": request.call,
            "binding_id": self._binding,
            "org_id": request.org,
            "project_id": request.project or None,
            "base_url": gateway.url,
            "scopes": list(request.scopes),
            "seconds": seconds,
        }
        try:
            said = await run_token_command(gateway.token_command, json.dumps(asked).encode())
        except TokenCommandFailed as failed:
            raise HostError(_INTERNAL, str(failed)) from None
        token, scopes, lives = _read(said, request, max(float(seconds), gateway.token_lifetime))
        caller = await self._hold(request.call, token)
        if caller is None:
            raise HostError(_INTERNAL, "the call is over")
        told = {**asked, "scopes": list(scopes), "expires_in": lives}
        try:
            await self._ledger.note(AUDIT, caller, BINDING + self._binding, json.dumps(told))
        except DatabaseUnusable:
            raise HostError(_INTERNAL, "it cannot be written to the audit") from None
        return Delegation(gateway.url, token, scopes)


def _read(said: bytes, request: DelegationRequest, most: float) -> tuple[str, tuple[str, ...], float]:
    """The token, its scopes and the seconds that it lives. Raises HostError. No message has any of it."""
    try:
        found: Any = wire.decode(said)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("token"), str) or not found["token"]:
        raise HostError(_INTERNAL, "its token_command did not write a JSON object with a token")
    if len(found["token"]) < SHORTEST:  # it would be in records and logs
        raise HostError(_INTERNAL, f"its token has fewer than {SHORTEST} characters: it could not be hidden")
    lives = found.get("expires_in")
    if isinstance(lives, bool) or not isinstance(lives, int | float) or not lives > 0:
        raise HostError(_INTERNAL, "its token_command did not say in expires_in how many seconds it lives")
    if lives > most:
        message = f"its token would live for {lives:g} s, and may for {most:g} s: gateway_token_lifetime"
        raise HostError(_INTERNAL, f"{message} allows more")
    scopes = found.get("scopes", list(request.scopes))
    if not isinstance(scopes, list) or not all(isinstance(each, str) for each in scopes):
        raise HostError(_INTERNAL, "the scopes that its token_command wrote are not a list of texts")
    return found["token"], tuple(scopes), float(lives)
