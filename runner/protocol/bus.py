"""The bus of one host process: plugins and the host publish on topics, and subscribers get each publication.

A topic holds its last payload only. A publication goes to all current subscribers of its topic, in the order
of publication, and never back to its publisher. Several sessions share a bus if they are given the same one
(Services.bus).

Plugins decide what they publish, so everything is bounded. The values that topics hold are counted by
publisher and together. What waits for a plugin is bounded by its session (session/session.py), and what waits
for a reader in the host by its Subscription. A subscriber gets every publication: a plugin that publishes
waits while a subscriber has no room (`SnapshotBus.room`), and a subscriber that still falls behind is ended
with an error. Publications are never left out from the middle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import trio

HOST = "host"  # the publisher's id of the host's own publications. No plugin may have it

# Bytes of one payload: as base64, with its topic and the rest of the message, it fits into a frame of 16 MiB.
PAYLOAD_MOST_BYTES = (12 << 20) - (64 << 10)
TOPIC_MOST_BYTES = 1024
# Bytes that the topics of a bus hold: of one publisher, and together. The topic itself counts too. One
# publisher never has more than half of what the others leave: so there is always room for one more.
KEPT_MOST_BYTES_EACH = 64 << 20
KEPT_MOST_BYTES = 256 << 20
TOPICS_MOST_EACH = 1024
SUBSCRIPTIONS_MOST = 1024  # of one member
# Bytes that a topic costs beside its payload and its name.
_TOPIC_BYTES = 512

# Bytes of publications that wait for one reader in the host. More end its subscription.
WAITING_MOST_BYTES = 64 << 20
# How long a publisher waits for a reader in the host, for each publication.
ROOM_SECONDS = 5.0


class Snapshot(NamedTuple):
    topic: str
    payload: bytes
    version: int  # counts the publications on all topics of the bus, from 1
    publisher: str  # the id of a plugin, or HOST


class BusRefused(Exception):
    """A request exceeds a limit of the bus. The text is a whole sentence."""


Deliver = Callable[[Snapshot], None]
# Waits until a subscriber has room for more, or was waited for long enough.
Room = Callable[[], Awaitable[None]]
Handler = Callable[[bytes], Awaitable[bytes]]


class Member:
    """One connection to a bus: a plugin's session, from its start to its end."""

    def __init__(self, bus: SnapshotBus, name: str, deliver: Deliver, room: Room) -> None:
        self.id = name
        self.deliver = deliver
        self.room = room
        self.topics: set[str] = set()
        self.actions: Mapping[str, Handler] = {}
        self._bus = bus

    def publish(self, topic: str, payload: bytes) -> int:
        """Publish, and return the version. Raises BusRefused."""
        return self._bus._store(topic, payload, self.id, self)

    def subscribe(self, topic: str) -> None:
        """Subscribe to future publications. The current value is not delivered. Raises BusRefused."""
        check_topic(topic)
        if topic not in self.topics and len(self.topics) >= SUBSCRIPTIONS_MOST:
            raise BusRefused(f"there are {SUBSCRIPTIONS_MOST} subscriptions already, which is the most")
        self.topics.add(topic)
        self._bus._readers.setdefault(topic, {})[self] = None

    def unsubscribe(self, topic: str) -> None:
        self.topics.discard(topic)
        readers = self._bus._readers.get(topic, {})
        readers.pop(self, None)
        if not readers:
            self._bus._readers.pop(topic, None)

    def withdraw(self, topic: str) -> None:
        """Drop the topic's value, if it is from this member."""
        if self._bus._owners.get(topic) is self:
            self._bus.forget(topic)

    def leave(self) -> None:
        """End the connection. Its published values stay."""
        for topic in tuple(self.topics):
            self.unsubscribe(topic)
        self._bus._members.pop(self, None)


class Subscription(AsyncIterator[Snapshot]):
    """A topic, for code of the host: `with bus.subscribe(TOPIC) as news: async for each in news: …`.

    It begins when it is made. If more than WAITING_MOST_BYTES wait for its reader, it ends: the reader gets
    what was published until then, and after that BusRefused is raised.
    """

    def __init__(self, bus: SnapshotBus, topic: str) -> None:
        self._waiting: deque[Snapshot] = deque()
        self._bytes = 0
        self._changed = trio.Event()
        self._read = trio.Event()  # replaced by those who wait for room
        self._closed = False
        self._overrun = False
        self._member = Member(bus, HOST, self._take, self._room)
        self._member.subscribe(topic)

    def _take(self, snapshot: Snapshot) -> None:
        size = _cost(snapshot.topic, snapshot.payload)
        if self._bytes + size > WAITING_MOST_BYTES:
            self._overrun = True
            self.close()
            return
        self._waiting.append(snapshot)
        self._bytes += size
        self._changed.set()

    async def _room(self) -> None:
        with trio.move_on_after(ROOM_SECONDS):
            await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        while self._bytes >= WAITING_MOST_BYTES // 2 and not self._closed:
            if self._read.is_set():
                self._read = trio.Event()
            await self._read.wait()

    async def __anext__(self) -> Snapshot:
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self._overrun:
                raise BusRefused(f"more than {WAITING_MOST_BYTES} bytes waited to be read: this ended it")
            if self._closed:
                raise StopAsyncIteration
            self._changed = trio.Event()
            await self._changed.wait()
        snapshot = self._waiting.popleft()
        self._bytes -= _cost(snapshot.topic, snapshot.payload)
        self._read.set()
        return snapshot

    def close(self) -> None:
        """Stop the subscription. Publications that are waiting can still be read."""
        self._member.leave()
        self._closed = True
        self._changed.set()
        self._read.set()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SnapshotBus:
    def __init__(self) -> None:
        self.version = 0  # of the last publication on any topic
        self.held = 0  # bytes of all values
        # The screen that the host shows in front. Only its owner may ask the host to close it.
        self.focused_screen = ""
        self._kept: dict[str, Snapshot] = {}
        self._owners: dict[str, Member | None] = {}  # topic -> who published its value; None: the host
        self._held_by: dict[str, int] = {}  # bytes by publisher
        self._topics_of: dict[str, int] = {}  # number of topics by publisher
        self._readers: dict[str, dict[Member, None]] = {}  # by topic, in the order of subscription
        self._members: dict[Member, None] = {}  # in the order of joining
        # What subscribers made of the publication that is being delivered: they share it.
        self.rendered: dict[str, Any] = {}
        self._actions: dict[str, Handler] = {}  # the host's own
        self._offers: dict[str, Mapping[str, Handler]] = {}  # by plugin, whether it runs or not
        self._waits: dict[str, Counter[str]] = {}  # plugin -> plugins whose actions it waits for

    # --- for code of the host -------------------------------------------------------------------------------

    def publish(self, topic: str, payload: bytes) -> int:
        """Publish as the host, and return the publication's version. Raises BusRefused."""
        return self._store(topic, payload, HOST, None)

    async def room(self, topic: str, publisher: Member | None = None) -> None:
        """Wait until the topic's subscribers have room for more. Each bounds the wait: a plugin that keeps
        publishers for too long is ended (session/subscriber_lag.py). Plugins that publish wait here. Code of
        the host that publishes much should: a subscriber for which too much waits is ended."""
        for reader in tuple(self._readers.get(topic, ())):
            if reader is not publisher:
                await reader.room()

    def get(self, topic: str) -> Snapshot | None:
        """The last publication on the topic, or None."""
        return self._kept.get(topic)

    def subscribe(self, topic: str) -> Subscription:
        """What plugins publish on the topic from now on. The host's own publications are not echoed."""
        return Subscription(self, topic)

    def forget(self, topic: str) -> None:
        """Drop the topic's value. Subscribers are not told."""
        kept = self._kept.pop(topic, None)
        if kept is not None:
            self._owners.pop(topic, None)
            self._count(kept.publisher, -_cost(kept.topic, kept.payload), -1)

    def register_action(self, name: str, handler: Handler) -> None:
        """Let plugins invoke `name` (host/action/invoke): the handler gets the payload and returns one. It
        goes before a plugin's action of the same name. Raises ValueError if the name is taken."""
        if name in self._actions:
            raise ValueError(f"the action {name!r} is registered already")
        self._actions[name] = handler

    # --- for the services of a session ----------------------------------------------------------------------

    def join(self, name: str, deliver: Deliver, room: Room) -> Member:
        """`name`: the plugin's id. `deliver` is called with each publication for the member, at once. It must
        not raise. `room` waits until the member has room for more."""
        member = Member(self, name, deliver, room)
        self._members[member] = None
        return member

    def find_action(self, name: str) -> tuple[Handler, str | None] | None:
        """The handler of an action, and the id of the plugin that does it; None: the host does. Raises
        BusRefused if it is not clear which plugin is meant."""
        if name in self._actions:
            return self._actions[name], None
        offering = [plugin for plugin, actions in self._offers.items() if name in actions]
        if len(offering) > 1 and name not in offering:
            # Each plugin chooses the names of its actions. Neither the alphabet nor a race decides.
            raise BusRefused(f"{len(offering)} plugins have the action, and none of them has its name")
        if offering:
            plugin = name if name in offering else offering[0]
            return self._offers[plugin][name], plugin
        for member in self._members:
            if name in member.actions:
                return member.actions[name], member.id
        return None

    @contextmanager
    def awaited(self, plugin: str, by: str) -> Iterator[None]:
        """While an action of `plugin` runs for the plugin `by`. Raises BusRefused if `plugin` waits for `by`
        itself, directly or through others: each would wait for the other until its time is up."""
        seen, new = {by}, [plugin]
        while new:
            each = new.pop()
            if each == by:
                raise BusRefused(f"{plugin} waits for an action of {by} itself")
            if each not in seen:
                seen.add(each)
                new += self._waits.get(each, ())
        waits = self._waits.setdefault(by, Counter())
        waits[plugin] += 1
        try:
            yield
        finally:
            waits[plugin] -= 1
            if not waits[plugin]:
                del waits[plugin]
            if not waits:
                self._waits.pop(by, None)

    # --- for a host that knows plugins before they run ------------------------------------------------------

    def offer(self, plugin: str, actions: Mapping[str, Handler]) -> None:
        """The actions of a plugin, which need not run: a handler may start it. Of several plugins with an
        action, that of the action's name has it."""
        self._offers[plugin] = actions

    def retract(self, plugin: str) -> None:
        """The plugin is no longer known: its actions and its values are forgotten."""
        self._offers.pop(plugin, None)
        for topic in [topic for topic, kept in self._kept.items() if kept.publisher == plugin]:
            self.forget(topic)

    # --- inside ---------------------------------------------------------------------------------------------

    def _store(self, topic: str, payload: bytes, publisher: str, member: Member | None) -> int:
        check_topic(topic)
        if len(payload) > PAYLOAD_MOST_BYTES:
            raise BusRefused(f"the payload has {len(payload)} bytes, and the most is {PAYLOAD_MOST_BYTES}")
        before = self._kept.get(topic)
        cost = _cost(topic, payload)
        mine = before if before is not None and before.publisher == publisher else None
        freed = 0 if before is None else _cost(topic, before.payload)
        held = self._held_by.get(publisher, 0) - (freed if mine is not None else 0)
        others = self.held - held - freed
        most = min(KEPT_MOST_BYTES_EACH, (KEPT_MOST_BYTES - others) // 2)
        if held + cost > most:
            raise BusRefused(f"the topics of {publisher} would keep more than {most} bytes")
        if mine is None and self._topics_of.get(publisher, 0) >= TOPICS_MOST_EACH:
            raise BusRefused(f"{publisher} has {TOPICS_MOST_EACH} topics already, which is the most")
        self.forget(topic)
        self.version += 1
        snapshot = Snapshot(topic, payload, self.version, publisher)
        self._kept[topic] = snapshot
        self._owners[topic] = member
        self._count(publisher, cost, 1)
        self.rendered.clear()  # never left of a publication before: that may have another topic
        for reader in tuple(self._readers.get(topic, ())):
            # The host is one publisher, however many Subscriptions it has.
            if reader is not member and not (member is None and reader.id == HOST):
                reader.deliver(snapshot)
        self.rendered.clear()
        return snapshot.version

    def _count(self, publisher: str, size: int, topics: int) -> None:
        self.held += size
        for counts, change in ((self._held_by, size), (self._topics_of, topics)):
            counts[publisher] = counts.get(publisher, 0) + change
            if not counts[publisher]:
                del counts[publisher]


def check_topic(topic: str) -> None:
    """Raises BusRefused if the topic is too long."""
    if len(topic) > TOPIC_MOST_BYTES or len(topic.encode("utf-8", "replace")) > TOPIC_MOST_BYTES:
        raise BusRefused(f"the topic is longer than {TOPIC_MOST_BYTES} bytes")


def _cost(topic: str, payload: bytes) -> int:
    # A character of a Python string takes up to four bytes.
    return len(payload) + 4 * len(topic) + _TOPIC_BYTES
