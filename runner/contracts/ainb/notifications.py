"""Notifications to the plugin: events, keys, the mouse, actions.

    plugin/handle_key      screen_id, key, generation
    plugin/handle_mouse    screen_id, mouse, generation
    plugin/handle_action   action_id, payload
    plugin/handle_event    topic, payload (bytes)

A plugin of the Rust SDK handles them in the task that reads its stdin, behind the lock that its requests
hold. If one arrives while a request is in its hands, and the request then asks its host for something, the
answer is never read, and the plugin hangs for ever. So they wait here while a request of ours is open, and
leave when the last one is answered, given up or expired: keys first, then the mouse, then the rest in the
order in which it came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from runner.contracts.ainb import payload
from runner.protocol import wire
from runner.protocol.dialect import CallRefused, Events, Lane, Notice, Refusal, Send
from runner.protocol.memory import delivery_cost
from sandbox.document.diagnostic import quoted

HANDLE_EVENT = "plugin/handle_event"
HANDLE_KEY = "plugin/handle_key"
HANDLE_MOUSE = "plugin/handle_mouse"
HANDLE_ACTION = "plugin/handle_action"

LANES: Mapping[str, Lane] = {
    HANDLE_KEY: "key",
    HANDLE_MOUSE: "mouse",
    HANDLE_ACTION: "delivery",
    HANDLE_EVENT: "delivery",
}

# How many wait while a request is open. Of keys and mouse events the oldest is dropped and counted: a person
# wants the newest. Of the rest nothing is dropped, because a publication in chunks is worthless without one
# of them: the session ends a plugin for which too much waits (DELIVERIES).
MOST_KEYS = 64
MOST_MOUSE = 64

_MOST_U8, _MOST_U16, _MOST_U64 = 2**8 - 1, 2**16 - 1, 2**64 - 1
_KEY_KINDS = ("press", "repeat", "release")
_PLAIN_KEYS = tuple(
    "enter tab back_tab esc backspace delete up down left right home end page_up page_down".split()
)
_MOUSE_BUTTONS = ("left", "right", "middle")
_PRESSED = ("down", "up", "drag")
_UNPRESSED = ("moved", "scroll_up", "scroll_down", "scroll_left", "scroll_right")


class SharedParams(dict[str, Any]):
    """Params of a notification to several plugins. Its frame is made once: with 20 subscribers, 12 MiB for
    each would keep the whole daemon for seconds, and wait there in 20 copies."""

    frame = b""


class HeldNotifications:
    """Notifications that wait, as whole frames."""

    def __init__(self) -> None:
        self._keys: deque[bytes] = deque()
        self._mouse: deque[bytes] = deque()
        self._deliveries: deque[bytes] = deque()
        self.bytes = 0  # of the deliveries
        self.dropped: dict[str, int] = {}

    def put(self, lane: Lane, frame: bytes) -> Events:
        if lane == "key":
            return self._replace("keys_dropped", self._keys, MOST_KEYS, frame)
        if lane == "mouse":
            return self._replace("mouse_dropped", self._mouse, MOST_MOUSE, frame)
        self._deliveries.append(frame)
        self.bytes += delivery_cost(frame)
        return ()

    def release(self) -> list[Send]:
        found = [
            *(Send(frame, "key") for frame in self._keys),
            *(Send(frame, "mouse") for frame in self._mouse),
            *(Send(frame, "delivery") for frame in self._deliveries),
        ]
        self.clear()
        return found

    def clear(self) -> None:
        self._keys.clear()
        self._mouse.clear()
        self._deliveries.clear()
        self.bytes = 0

    def _replace(self, kind: str, queue: deque[bytes], most: int, frame: bytes) -> Events:
        queue.append(frame)
        if len(queue) <= most:
            return ()
        queue.popleft()
        return self._drop(kind)

    def _drop(self, kind: str) -> Events:
        """A notice for the first, the second, the fourth, the eighth, …"""
        count = self.dropped[kind] = self.dropped.get(kind, 0) + 1
        if count & (count - 1):
            return ()
        why = "they wait until the plugin has answered, and more than that do not fit"
        return (Notice("dropped", {"reason": kind.removesuffix("_dropped"), "count": count, "why": why}),)


# --- params -----------------------------------------------------------------------------------------------


def make_params(method: str, given: Any, generation: int) -> dict[str, Any]:
    """The params on the wire. `generation`: where one is needed and none given. Raises CallRefused."""
    if method not in _MAKERS:
        message = f"there is no notification {quoted(method)}; there are {', '.join(_MAKERS)}"
        raise CallRefused(Refusal(0, "-32601", message, "unsupported"))
    try:
        return _MAKERS[method](_table(given, "the params"), generation)
    except _ParamsFault as misfit:
        raise CallRefused(Refusal(0, "-32602", f"{method}: {misfit}", "invalid_params")) from None


def encode_message(method: str, params: Mapping[str, Any]) -> bytes:
    """The body of the frame, of params from make_params. Raises ValueError if they are not JSON."""
    if method == HANDLE_EVENT:
        # Base64 needs no escapes. Looking for some takes two thirds of the time for a payload of 2 MiB.
        topic, data = wire.encode(params["topic"]), params["payload"].encode("ascii")
        return b'{"jsonrpc":"2.0","method":"%b","params":{"topic":%b,"payload":"%b"}}' % (
            HANDLE_EVENT.encode(),
            topic,
            data,
        )
    return wire.encode({"jsonrpc": "2.0", "method": method, "params": params})


def make_payload(value: Any) -> str:
    """Base64 of what a caller gives as bytes: base64, integers, {"text": TEXT}, or nothing. Raises
    BadPayload."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if list(value) != ["text"] or not isinstance(value["text"], str):
            raise payload.BadPayload('is an object other than {"text": "…"}')
        return payload.encode(value["text"].encode("utf-8", "replace"))
    return payload.encode(payload.decode(value))


class _ParamsFault(Exception):
    """What is wrong with the params."""


def _event(given: Mapping[str, Any], generation: int) -> dict[str, Any]:
    _known(given, ("topic", "payload"))
    try:
        data = make_payload(given.get("payload"))
    except payload.BadPayload as fault:
        raise _ParamsFault(f"payload {fault}") from None
    return {"topic": _text(given, "topic"), "payload": data}


def _action(given: Mapping[str, Any], generation: int) -> dict[str, Any]:
    _known(given, ("action_id", "payload"))
    return {"action_id": _text(given, "action_id"), "payload": given.get("payload")}


def _key(given: Mapping[str, Any], generation: int) -> dict[str, Any]:
    _known(given, ("screen_id", "key", "generation"))
    key = _table(given.get("key"), "key")
    _known(key, ("code", "mods", "kind"))
    kind = key.get("kind", "press")
    if kind not in _KEY_KINDS:
        raise _ParamsFault(f"key.kind is none of {', '.join(_KEY_KINDS)}")
    return {
        "screen_id": _text(given, "screen_id"),
        "key": {
            "code": _key_code(_table(key.get("code"), "key.code")),
            "mods": _number(key, "mods", _MOST_U8),
            "kind": kind,
        },
        "generation": _number(given, "generation", _MOST_U64, generation),
    }


def _key_code(code: Mapping[str, Any]) -> dict[str, Any]:
    kind = code.get("type")
    if kind == "char":
        _known(code, ("type", "ch"))
        character = code.get("ch")
        if not isinstance(character, str) or len(character) != 1 or "\ud800" <= character <= "\udfff":
            raise _ParamsFault("key.code.ch is not one character")
        return {"type": "char", "ch": character}
    if kind == "f":
        _known(code, ("type", "n"))
        if "n" not in code:
            raise _ParamsFault("key.code.n is missing: the number of the function key")
        return {"type": "f", "n": _number(code, "n", _MOST_U8)}
    _known(code, ("type",))
    if kind == "insert":
        raise _ParamsFault("key.code.type is insert, which plugins of ABI 2 do not know")
    if kind not in _PLAIN_KEYS:
        raise _ParamsFault(f"key.code.type is none of char, f, {', '.join(_PLAIN_KEYS)}")
    return {"type": kind}


def _mouse(given: Mapping[str, Any], generation: int) -> dict[str, Any]:
    _known(given, ("screen_id", "mouse", "generation"))
    mouse = _table(given.get("mouse"), "mouse")
    _known(mouse, ("kind", "col", "row", "mods"))
    for place in ("col", "row"):
        if place not in mouse:
            raise _ParamsFault(f"mouse.{place} is missing")
    return {
        "screen_id": _text(given, "screen_id"),
        "mouse": {
            "kind": _mouse_kind(_table(mouse.get("kind"), "mouse.kind")),
            "col": _number(mouse, "col", _MOST_U16),
            "row": _number(mouse, "row", _MOST_U16),
            "mods": _number(mouse, "mods", _MOST_U8),
        },
        "generation": _number(given, "generation", _MOST_U64, generation),
    }


def _mouse_kind(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind in _UNPRESSED:
        _known(given, ("type",))
        return {"type": kind}
    if kind not in _PRESSED:
        raise _ParamsFault(f"mouse.kind.type is none of {', '.join((*_PRESSED, *_UNPRESSED))}")
    _known(given, ("type", "button"))
    button = _table(given.get("button"), "mouse.kind.button")
    _known(button, ("type",))
    if button.get("type") not in _MOUSE_BUTTONS:
        raise _ParamsFault(f"mouse.kind.button.type is none of {', '.join(_MOUSE_BUTTONS)}")
    return {"type": kind, "button": {"type": button["type"]}}


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    HANDLE_EVENT: _event,
    HANDLE_KEY: _key,
    HANDLE_MOUSE: _mouse,
    HANDLE_ACTION: _action,
}


def _table(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _ParamsFault(f"{name} is missing or not an object")
    return value


def _known(given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    stray = next((key for key in given if key not in keys), None)
    if stray is not None:
        raise _ParamsFault(f"{quoted(str(stray))} is not a key here; known are {', '.join(keys)}")


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise _ParamsFault(f"{name} is missing or not a string")
    return value


def _number(given: Mapping[str, Any], name: str, most: int, default: int = 0) -> int:
    value = given.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise _ParamsFault(f"{name} is not an integer from 0 to {most}")
    return value
