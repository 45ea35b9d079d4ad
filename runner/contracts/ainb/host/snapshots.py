"""One plugin on the bus: what it may read and publish there, its subscriptions, and its event streams."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from runner.contracts.ainb.declared import Declared
from runner.contracts.ainb.host.params import denied
from runner.contracts.ainb.notifications import SharedParams
from runner.contracts.ainb.payload import encode
from runner.protocol.bus import BusRefused, Room, Snapshot, SnapshotBus
from runner.protocol.host_services import HostError, Tell
from runner.protocol.jsonrpc import INVALID_PARAMS

# --- topics, by the grant and by their names ----------------------------------------------------------------

# What agents of the user do. Only an exact entry of a grant covers such a topic: neither `true` nor a
# wildcard does. Plugins never publish there.
FLEET = "fleet."
# Each plugin has its own, under its id: two plugins would overwrite each other's state.
UI_STATE = "ui.state"
# Asks the host to close the screen in front. Only the owner of that screen may ask.
UI_CLOSE = "ui.close_request"

_CLOSE_MOST_BYTES = 64 << 10  # of such a request's payload


def covers(entries: Sequence[str] | None, topic: str) -> bool:
    """Whether a grant covers the topic. None: the grant is `true`. An entry `x*` is a prefix."""
    if topic.startswith(FLEET):
        return entries is not None and topic in entries and not topic.endswith("*")
    if entries is None:
        return True
    return any(topic.startswith(entry[:-1]) if entry.endswith("*") else topic == entry for entry in entries)


def stored_topic(topic: str, plugin_id: str) -> str | None:
    """Under which topic a plugin's publication is stored. None: it may not publish there."""
    own = f"{UI_STATE}/{plugin_id}"
    if topic == UI_STATE:
        return own
    if topic.startswith((FLEET, UI_STATE + "/")) and topic != own:
        return None
    return topic


def asks_to_close(payload: bytes) -> str | None:
    """The screen that a payload on UI_CLOSE names. None: it names none."""
    if len(payload) > _CLOSE_MOST_BYTES:
        return None
    try:
        value: Any = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    screen = value.get("screen_id") if isinstance(value, dict) else None
    return screen if isinstance(screen, str) else None


# --- the plugin ---------------------------------------------------------------------------------------------

EVENT_BUS, EVENT_STREAM = "event_bus", "event_stream_subscribe"
EVENT = "plugin/handle_event"

STREAMS_MOST = 64  # of one plugin


class SnapshotClient:
    """The bus connection of one session. The caller has checked that the manifest has the capability; the
    methods check its list of topics. Each raises HostError."""

    def __init__(self, bus: SnapshotBus, plugin_id: str, declared: Declared, tell: Tell, room: Room) -> None:
        self.member = bus.join(plugin_id, self._deliver, room)
        self._bus = bus
        self._id = plugin_id
        self._declared = declared
        self._tell = tell
        self._subscribed: set[str] = set()
        self._streams: dict[str, str] = {}  # id -> topic
        self._published = ""  # the topic of the last publication, until its subscribers have room

    def get(self, topic: str) -> dict[str, Any]:
        self._require(EVENT_BUS, topic)
        found = self._bus.get(topic)
        if found is None:
            return {"payload": None, "version": 0}
        return {"payload": encode(found.payload), "version": found.version}

    def publish(self, topic: str, payload: bytes) -> None:
        self._require(EVENT_BUS, topic)
        stored = stored_topic(topic, self._id)
        if stored is None:
            raise denied(EVENT_BUS, topic=topic)
        if topic == UI_CLOSE:
            screen = asks_to_close(payload)
            if screen is None or screen != self._bus.focused_screen or screen not in self._declared.screens:
                raise HostError(INVALID_PARAMS, "the screen in front is not one of this plugin")
        try:
            self.member.publish(stored, payload)
        except BusRefused as refused:
            raise HostError(INVALID_PARAMS, str(refused)) from None
        self._published = stored

    async def published(self) -> None:
        """Wait until the subscribers of the last publication have room."""
        topic, self._published = self._published, ""
        if topic:
            await self._bus.room(topic, self.member)

    def subscribe(self, topic: str) -> dict[str, Any]:
        self._require(EVENT_BUS, topic)
        self._listen(topic)
        self._subscribed.add(topic)
        return {}

    def subscribe_declared(self) -> None:
        """The topics of the manifest that the grant covers."""
        for topic in self._declared.subscribes:
            try:
                self.subscribe(topic)
            except HostError:
                continue

    def open_stream(self, topic: str) -> dict[str, Any]:
        self._require(EVENT_STREAM, topic)
        if len(self._streams) >= STREAMS_MOST:
            raise HostError(INVALID_PARAMS, f"there are {STREAMS_MOST} streams already: cancel one")
        self._listen(topic)
        stream = secrets.token_hex(16)
        self._streams[stream] = topic
        found = self._bus.get(topic)
        return {"stream_id": stream, "version": 0 if found is None else found.version}

    def cancel(self, stream: str) -> None:
        topic = self._streams.pop(stream, None)
        if topic is not None and topic not in self._subscribed and topic not in self._streams.values():
            self.member.unsubscribe(topic)

    def close(self) -> None:
        """The session is over: nothing more is delivered, and its state of the screen is forgotten."""
        self.member.withdraw(f"{UI_STATE}/{self._id}")
        self.member.leave()
        self._subscribed.clear()
        self._streams.clear()

    def _require(self, capability: str, topic: str) -> None:
        if not covers(self._declared.lists.get(capability), topic):
            raise denied(capability, topic=topic)

    def _listen(self, topic: str) -> None:
        try:
            self.member.subscribe(topic)
        except BusRefused as refused:
            raise HostError(INVALID_PARAMS, str(refused)) from None

    def _deliver(self, snapshot: Snapshot) -> None:
        if snapshot.topic in self._subscribed:
            made = SharedParams({"topic": snapshot.topic, "payload": snapshot.payload})
            self._tell(EVENT, self._bus.rendered.setdefault(EVENT, made))
        for stream, topic in self._streams.items():
            if topic == snapshot.topic:
                self._tell(EVENT, {"topic": f"stream:{stream}", "payload": snapshot.payload})
