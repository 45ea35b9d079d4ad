"""A call on the bus: what a submitter says, and all that a worker believes.

It has nothing about policy, limits, settings or secrets, and a key that is not known is refused. Who
submitted it is in the subject, where the server's permissions have checked it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from runner.fleet.names import MOST_BODY_BYTES, MOST_SECONDS, key_of
from runner.protocol import wire
from runner.protocol.calls import CallRequest

_MOST_NAME = 4096
_MOST_ID = 256
_MOST_KIND = 64


class BadMessage(ValueError):
    """A message that is no call."""


class FleetCall(NamedTuple):
    """A CallRequest as a message. The names of the fields are the keys on the bus."""

    id: str
    plugin: str
    tool: str
    deadline: float  # seconds since 1970: a call that has not begun then does not begin
    input: Any = None
    kind: str | None = None
    context: Mapping[str, Any] | None = None
    seconds: float | None = None  # the caller's limit; None: the contract's
    retry: bool = True  # False: the submitter repeats a hook that failed itself

    @property
    def key(self) -> str:
        return key_of(self.id)

    @property
    def request(self) -> CallRequest:
        return CallRequest(self.plugin, self.tool, self.input, self.kind, self.seconds, self.context)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "id": (str,),
    "plugin": (str,),
    "tool": (str,),
    "deadline": (int, float),
    "kind": (str, type(None)),
    "context": (dict, type(None)),
    "seconds": (int, float, type(None)),
    "retry": (bool,),
}
_MOST = {"id": _MOST_ID, "plugin": _MOST_NAME, "tool": _MOST_NAME, "kind": _MOST_KIND}


def encode_call(call: FleetCall) -> bytes:
    """Raises BadMessage if it is too large."""
    usual = FleetCall("", "", "", 0.0)
    given = {name: value for name, value in call._asdict().items() if value != getattr(usual, name)}
    raw = json.dumps({"id": call.id, **given}, separators=(",", ":")).encode()
    if len(raw) > MOST_BODY_BYTES:
        raise BadMessage(
            f"the call has {len(raw)} bytes; {MOST_BODY_BYTES} are the most on the bus of a fleet"
        )
    return raw


def stored_call(found: Any) -> FleetCall | None:
    """The call of a dead letter."""
    try:
        return (
            None
            if not isinstance(found, dict)
            else decode_call(json.dumps(found, separators=(",", ":")).encode(), found["deadline"])
        )
    except (BadMessage, KeyError, TypeError):
        return None


def decode_call(raw: bytes, now: float) -> FleetCall:
    """Raises BadMessage."""
    if len(raw) > MOST_BODY_BYTES:
        raise BadMessage(f"the message has {len(raw)} bytes; {MOST_BODY_BYTES} are the most")
    try:
        found = wire.decode(raw)
    except ValueError as error:
        raise BadMessage(f"the message is not JSON that can be used: {error}") from None
    if not isinstance(found, dict):
        raise BadMessage("the message is no JSON object")
    if strays := sorted(found.keys() - set(FleetCall._fields)):
        raise BadMessage(f"the message has the unknown key {strays[0][:60]!a}")
    if missing := [name for name in ("id", "plugin", "tool", "deadline") if name not in found]:
        raise BadMessage(f"the message has no {missing[0]}")
    for name, types in _TYPES.items():
        if name in found and (
            not isinstance(found[name], types) or (isinstance(found[name], bool) and types != (bool,))
        ):
            raise BadMessage(f"{name}: it has the wrong type")
        if name in _MOST and found.get(name) is not None and not 0 < len(found[name]) <= _MOST[name]:
            raise BadMessage(f"{name}: it has to have 1 to {_MOST[name]} characters")
    call = FleetCall(**found)
    # An hour for clocks that differ. Without a bound a call could wait for ever.
    if not math.isfinite(call.deadline) or call.deadline > now + MOST_SECONDS + 3600:
        raise BadMessage(f"deadline: it has to be within {MOST_SECONDS:g} seconds")
    if call.seconds is not None and not 0 <= call.seconds <= MOST_SECONDS:
        raise BadMessage(f"seconds: it has to be a number from 0 to {MOST_SECONDS:g}")
    return call
