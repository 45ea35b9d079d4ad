"""The bus by itself: versions, order, no echo, and its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import trio

from runner.protocol import bus as module
from runner.protocol.bus import (
    HOST,
    KEPT_MOST_BYTES_EACH,
    PAYLOAD_MOST_BYTES,
    SUBSCRIPTIONS_MOST,
    TOPIC_MOST_BYTES,
    TOPICS_MOST_EACH,
    BusRefused,
    Member,
    Snapshot,
    SnapshotBus,
)


class Peer:
    """A member that keeps what it gets."""

    def __init__(self, bus: SnapshotBus, name: str, *topics: str) -> None:
        self.got: list[Snapshot] = []
        self.member: Member = bus.join(name, self.got.append, trio.lowlevel.checkpoint)
        for topic in topics:
            self.member.subscribe(topic)

    @property
    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.got]


@pytest.fixture
def bus() -> Iterator[SnapshotBus]:
    made = SnapshotBus()
    yield made
    held = sum(len(each.payload) for each in made._kept.values())
    assert held <= made.held  # what is counted is at least what is there
    assert sum(made._held_by.values()) == made.held
    assert sum(made._topics_of.values()) == len(made._kept) == len(made._owners)


def test_only_the_last_payload_is_kept_and_versions_count_over_all_topics(bus: SnapshotBus) -> None:
    one, two = Peer(bus, "one"), Peer(bus, "two")
    assert bus.get("a") is None
    assert [one.member.publish("a", b"1"), two.member.publish("b", b"2"), bus.publish("a", b"3")] == [1, 2, 3]
    assert bus.get("a") == Snapshot("a", b"3", 3, HOST)
    assert bus.get("b") == Snapshot("b", b"2", 2, "two")


def test_every_publication_is_delivered_in_order_to_each_subscriber_but_its_publisher(
    bus: SnapshotBus,
) -> None:
    one, two, other = Peer(bus, "one", "a", "b"), Peer(bus, "two", "a"), Peer(bus, "other", "c")
    one.member.publish("a", b"1")
    two.member.publish("a", b"2")
    bus.publish("a", b"3")
    bus.publish("a", b"3")  # equal payloads are two publications
    assert two.payloads == [b"1", b"3", b"3"]
    assert one.payloads == [b"2", b"3", b"3"]
    assert other.payloads == []
    assert [each.publisher for each in one.got] == ["two", HOST, HOST]


def test_a_subscription_is_a_set_and_starts_without_the_current_value(bus: SnapshotBus) -> None:
    bus.publish("a", b"before")
    peer = Peer(bus, "peer", "a", "a")
    bus.publish("a", b"after")
    assert peer.payloads == [b"after"]
    peer.member.unsubscribe("a")
    bus.publish("a", b"later")
    assert peer.payloads == [b"after"]


def test_a_member_that_left_gets_nothing_and_what_it_published_stays(bus: SnapshotBus) -> None:
    peer = Peer(bus, "peer", "a")
    peer.member.publish("b", b"mine")
    peer.member.leave()
    bus.publish("a", b"1")
    assert peer.got == []
    assert bus.get("b") == Snapshot("b", b"mine", 1, "peer")
    assert bus._readers == {} and bus._members == {}


def test_two_sessions_of_one_plugin_hear_each_other(bus: SnapshotBus) -> None:
    """Not the id but the connection is the publisher that gets no echo."""
    one, two = Peer(bus, "same", "a"), Peer(bus, "same", "a")
    one.member.publish("a", b"1")
    assert (one.payloads, two.payloads) == ([], [b"1"])


def test_a_value_is_withdrawn_only_by_the_member_that_published_it(bus: SnapshotBus) -> None:
    one, two = Peer(bus, "same"), Peer(bus, "same")
    two.member.publish("a", b"1")
    one.member.withdraw("a")
    assert bus.get("a") is not None
    two.member.withdraw("a")
    assert bus.get("a") is None and bus.held == 0


# --- bounds -------------------------------------------------------------------------------------------------


def test_a_payload_has_a_longest(bus: SnapshotBus) -> None:
    peer = Peer(bus, "peer")
    peer.member.publish("a", bytes(PAYLOAD_MOST_BYTES))
    with pytest.raises(BusRefused, match="payload has"):
        peer.member.publish("a", bytes(PAYLOAD_MOST_BYTES + 1))
    found = bus.get("a")
    assert found is not None and found.version == 1


def test_a_topic_has_a_longest_name_in_bytes(bus: SnapshotBus) -> None:
    peer = Peer(bus, "peer", "a" * TOPIC_MOST_BYTES)
    peer.member.publish("é" * (TOPIC_MOST_BYTES // 2), b"")
    for topic in ("a" * (TOPIC_MOST_BYTES + 1), "é" * (TOPIC_MOST_BYTES // 2 + 1)):
        with pytest.raises(BusRefused, match="topic is longer"):
            peer.member.publish(topic, b"")
        with pytest.raises(BusRefused, match="topic is longer"):
            peer.member.subscribe(topic)


def test_one_publisher_cannot_fill_the_bus(bus: SnapshotBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_MOST_BYTES_EACH", 10_000)
    greedy, other = Peer(bus, "greedy"), Peer(bus, "other")
    refused = 0
    for number in range(10):
        try:
            greedy.member.publish(f"t{number}", bytes(2000))
        except BusRefused:
            refused += 1
    assert refused == 7 and bus.held <= 10_000
    other.member.publish("mine", bytes(5000))
    # A topic of its own can still be renewed, and one that another takes over is no longer counted as its.
    greedy.member.publish("t0", bytes(2000))
    other.member.publish("t1", b"")
    greedy.member.publish("new", bytes(1500))
    # One more than fits is refused, and the old value stays.
    with pytest.raises(BusRefused, match="of greedy would keep more"):
        greedy.member.publish("t0", bytes(9000))
    found = bus.get("t0")
    assert found is not None and len(found.payload) == 2000


def test_all_publishers_together_cannot_fill_the_host(
    bus: SnapshotBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_MOST_BYTES", 50_000)
    greedy = [Peer(bus, f"p{number}") for number in range(12)]
    for number in range(200):
        for peer in greedy:
            with suppress(BusRefused):
                peer.member.publish(f"{peer.member.id}.{number}", bytes(100))
    assert 40_000 < bus.held <= 50_000
    # However many there are, they leave something: one publisher has at most half of what the others do.
    free = 50_000 - bus.held
    late = Peer(bus, "late")
    late.member.publish("a", bytes(free // 2 - 600))
    with pytest.raises(BusRefused, match="topics of late would keep more"):
        late.member.publish("b", bytes(free // 2 - 600))


def test_topics_without_payload_are_bounded_too(bus: SnapshotBus) -> None:
    peer = Peer(bus, "peer")
    for number in range(TOPICS_MOST_EACH):
        peer.member.publish(f"t{number}", b"")
    with pytest.raises(BusRefused, match="topics already"):
        peer.member.publish("one more", b"")
    peer.member.publish("t0", b"again")
    assert bus.version == TOPICS_MOST_EACH + 1


def test_subscriptions_are_bounded(bus: SnapshotBus) -> None:
    peer = Peer(bus, "peer", *(f"t{number}" for number in range(SUBSCRIPTIONS_MOST)))
    peer.member.subscribe("t0")
    with pytest.raises(BusRefused, match="subscriptions already"):
        peer.member.subscribe("one more")


def test_what_is_counted_covers_what_python_holds() -> None:
    """Measured: the bytes of a bus full of small topics, beside its own count."""
    import tracemalloc

    bus = SnapshotBus()
    member = bus.join("peer", lambda _: None, trio.lowlevel.checkpoint)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(TOPICS_MOST_EACH):
            member.publish("x" * 1000 + str(number), b"y" * 100)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0 < used <= bus.held <= KEPT_MOST_BYTES_EACH


# --- for code of the host -----------------------------------------------------------------------------------


@pytest.mark.trio
async def test_the_host_reads_a_topic(bus: SnapshotBus) -> None:
    peer = Peer(bus, "peer")
    with bus.subscribe("a") as news:
        peer.member.publish("a", b"1")
        peer.member.publish("b", b"2")
        bus.publish("a", b"own")
        peer.member.publish("a", b"3")
        assert [(await anext(news)).payload, (await anext(news)).payload] == [b"1", b"3"]
    peer.member.publish("a", b"4")
    assert [each async for each in news] == []
    assert bus._readers == {}


@pytest.mark.trio
async def test_a_reader_that_waits_is_woken(bus: SnapshotBus, autojump_clock: trio.abc.Clock) -> None:
    peer = Peer(bus, "peer")
    got: list[bytes] = []

    async def read() -> None:
        async for each in news:
            got.append(each.payload)

    news = bus.subscribe("a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.sleep(1)
        peer.member.publish("a", b"1")
        await trio.sleep(1)
        assert got == [b"1"]
        news.close()


@pytest.mark.trio
async def test_a_reader_that_falls_behind_gets_an_error_and_no_gap(bus: SnapshotBus) -> None:
    slow, peer = bus.subscribe("a"), Peer(bus, "peer")
    quick = Peer(bus, "quick", "a")
    chunk = bytes(8 << 20)
    for number in range(10):
        peer.member.publish("a", b"%d:" % number + chunk)
    assert len(quick.got) == 10
    peer.member.publish("a", b"small")  # it would fit, but there is a gap before it
    # 64 MiB less what each costs besides.
    assert [(await anext(slow)).payload[:2] for _ in range(7)] == [b"%d:" % number for number in range(7)]
    with pytest.raises(BusRefused, match="waited to be read"):
        await anext(slow)
    assert slow._bytes == 0


@pytest.mark.trio
async def test_a_publisher_waits_for_room_but_not_for_ever(bus: SnapshotBus, autojump_clock: object) -> None:
    slow, peer = bus.subscribe("a"), Peer(bus, "peer", "a")
    chunk = bytes(8 << 20)
    waits = []

    async def publish() -> None:
        for number in range(20):
            peer.member.publish("a", b"%d:" % number + chunk)
            began = trio.current_time()
            await bus.room("a", peer.member)
            waits.append(trio.current_time() - began)
        slow.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish)
        got = []
        async for each in slow:
            await trio.sleep(0.1)
            got.append(each.payload.partition(b":")[0])
    assert got == [b"%d" % number for number in range(20)]
    assert 0 < max(waits) < 1 and waits[0] == 0
    # One that reads nothing is waited for, and then not any more.
    stuck, began = bus.subscribe("a"), trio.current_time()
    for _ in range(4):
        peer.member.publish("a", chunk)
    await bus.room("a", peer.member)
    assert trio.current_time() - began == module.ROOM_SECONDS
    nursery_done = trio.current_time()
    stuck.close()  # nobody reads it any more
    await bus.room("a", peer.member)
    assert trio.current_time() == nursery_done


@pytest.mark.trio
async def test_actions_are_found_by_name_and_the_host_comes_first(bus: SnapshotBus) -> None:
    async def of_host(payload: bytes) -> bytes:
        return b"host " + payload

    async def of_peer(payload: bytes) -> bytes:
        return b"peer " + payload

    assert bus.find_action("a") is None
    one, two = Peer(bus, "one"), Peer(bus, "two")
    one.member.actions = two.member.actions = {"a": of_peer}
    found = bus.find_action("a")
    assert found is not None and found[1] == "one"
    bus.register_action("a", of_host)
    found = bus.find_action("a")
    assert found is not None and found[1] is None and await found[0](b"x") == b"host x"
    with pytest.raises(ValueError, match="registered already"):
        bus.register_action("a", of_host)
    one.member.leave()
    # What a plugin offers that need not run: nobody takes an action from the plugin of its name.
    for plugin in ("b", "c"):
        bus.offer(plugin, {"b": of_peer, "both": of_peer, plugin: of_peer})
    assert [found[1] for name in "bc" if (found := bus.find_action(name))] == ["b", "c"]
    with pytest.raises(BusRefused, match="2 plugins have the action"):
        bus.find_action("both")
    bus.publish("of host", b"1")
    Peer(bus, "c").member.publish("of c", b"1")
    bus.retract("c")
    found = bus.find_action("both")
    assert found is not None and found[1] == "b"
    assert bus.find_action("c") is None and bus.get("of c") is None and bus.get("of host") is not None


def test_no_circle_of_plugins_waits_for_itself(bus: SnapshotBus) -> None:
    with bus.awaited("b", by="a"), bus.awaited("b", by="a"), bus.awaited("c", by="b"):
        for by in ("b", "c"):
            with pytest.raises(BusRefused, match="waits for an action of"), bus.awaited("a", by=by):
                raise AssertionError("it is a circle")
        with bus.awaited("c", by="a"), bus.awaited("d", by="c"):
            pass
    with bus.awaited("a", by="c"), bus.awaited("c", by="b"):
        pass
    assert bus._waits == {}


def test_nothing_of_a_publication_is_left_for_the_next(bus: SnapshotBus) -> None:
    """Also if delivering it failed: the next one may be for others, and on another topic."""
    seen = []

    def deliver(snapshot: Snapshot) -> None:
        seen.append(bus.rendered.setdefault("event", snapshot.payload))
        if snapshot.topic == "a":
            raise MemoryError

    member = bus.join("reader", deliver, trio.lowlevel.checkpoint)
    for topic in ("a", "b"):
        member.subscribe(topic)
    with pytest.raises(MemoryError):
        bus.publish("a", b"1")
    bus.publish("b", b"2")
    assert seen == [b"1", b"2"]
