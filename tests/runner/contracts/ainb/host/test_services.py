"""What an ainb plugin asks of its host, through the gate: params, grants, policy, answers, errors."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import trio

from runner.contracts.ainb.declared import CAPABILITIES, Declared
from runner.contracts.ainb.host.params import FIELDS, NOTIFICATIONS
from runner.contracts.ainb.host.services import NEEDED, granted
from runner.contracts.ainb.payload import encode
from runner.plugin import Allowance
from runner.protocol.bus import PAYLOAD_MOST_BYTES, SnapshotBus
from runner.protocol.host_services import HostError, Services
from tests.runner.contracts.ainb.host.desk import Desk, make_plugin

pytestmark = pytest.mark.trio

GOOD: dict[str, dict[str, Any]] = {
    "host/snapshot/get": {"topic": "a"},
    "host/snapshot/publish": {"topic": "a", "payload": "aGk="},
    "host/snapshot/subscribe": {"topic": "a"},
    "host/action/invoke": {"action": "open", "payload": ""},
    "host/log": {"level": "warn", "message": "hot"},
    "host/fs/read_dir": {"path": "/data"},
    "host/fs/read_file": {"path": "/data/x"},
    "host/network/fetch": {"url": "https://example.com/"},
    "host/event_stream_subscribe": {"topic": "a"},
    "host/event_stream_cancel": {"stream_id": "x"},
    "host/spawn_managed_subprocess": {"bin": "git"},
    "host/unix_socket_dial": {"path": "/s"},
    "host/unix_socket_send": {"stream_id": "x", "bytes": ""},
    "host/unix_socket_close": {"stream_id": "x"},
    "host/secret_store_get": {"scope": "global", "key": "k"},
    "host/workspace_list": {},
    "host/workspace_get_active": {},
    "host/workspace_set_active": {"workspace_id": "w"},
    "host/workspace_set_default": {"workspace_id": "w"},
    "host/workspace_create": {"slug": "w", "name": "W"},
    "host/workspace_delete": {"workspace_id": "w"},
}
REQUESTS = sorted(GOOD.keys() - NOTIFICATIONS)
EVERY_CAPABILITY = Declared(granted=CAPABILITIES)


def no_capability() -> Desk:
    return Desk(declared=Declared())


async def test_the_table_has_every_method() -> None:
    assert GOOD.keys() == FIELDS.keys() == Desk().methods.METHODS.keys()


# --- who may ask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(set(REQUESTS) & NEEDED.keys()))
async def test_each_request_needs_its_capability(method: str) -> None:
    expected = (-32001, f"capability denied: {NEEDED[method]}", None)
    assert await no_capability().error(method, GOOD[method]) == expected
    others = tuple(each for each in CAPABILITIES if each != NEEDED[method])
    assert await Desk(declared=Declared(granted=others)).error(method, GOOD[method]) == expected
    # The control: with the capability it is something else.
    answer = await Desk(declared=EVERY_CAPABILITY).ask(method, GOOD[method])
    assert answer.error is None or answer.error[0] != -32001


@pytest.mark.parametrize("method", ["host/fs/read_dir", "host/fs/read_file"])
async def test_files_need_a_granted_folder(method: str) -> None:
    code, message, _ = await no_capability().error(method, GOOD[method])
    assert (code, message) == (-32001, "capability denied: read_paths (no path-scoped fs read granted)")


@pytest.mark.parametrize("method", REQUESTS)
async def test_each_request_needs_the_policy(method: str) -> None:
    desk = Desk(declared=EVERY_CAPABILITY, allowed=("host/other",))
    code, message, data = await desk.error(method, GOOD[method])
    assert code == -32001 and message.startswith("capability denied: ")
    assert data == {"reason": f"the policy does not allow {method}: see host under [capabilities]"}
    assert desk.guard.refused == {method: 1}


@pytest.mark.parametrize("method", REQUESTS)
async def test_bad_params_come_before_a_missing_grant(method: str) -> None:
    """As in the tip of the reference: a plugin's author learns of the typo first."""
    faults = ["text", 7, True]
    if any(FIELDS[method]):
        faults += [None, {}, []]
        faults += [{**GOOD[method], name: {"not": "this"}} for name in GOOD[method]]
        faults += [
            {name: value for name, value in GOOD[method].items() if name != dropped}
            for dropped in GOOD[method]
        ]
    faults.append([1, 2, 3, 4, 5, 6])
    for params in faults:
        assert (await no_capability().error(method, params))[0] == -32602, params


@pytest.mark.parametrize("method", REQUESTS)
async def test_params_in_order_and_further_keys_are_taken(method: str) -> None:
    desk = Desk(declared=EVERY_CAPABILITY)
    good = await desk.ask(method, GOOD[method])
    extra = await desk.ask(method, {**GOOD[method], "comment": "ignored"})
    names = [field.name for field in FIELDS[method]]
    if method != "host/secret_store_get":  # its second one is optional, and is left out
        assert list(GOOD[method]) == names[: len(GOOD[method])]
        ordered = await desk.ask(method, list(GOOD[method].values()))
        assert (ordered.error is None) == (good.error is None)
    assert (extra.error is None) == (good.error is None)
    if good.error is not None and extra.error is not None:
        assert good.error[:2] == extra.error[:2]


@pytest.mark.parametrize("method", ["host/nothing", "plugin/render", "", "host/snapshot/get ", "x" * 100_000])
async def test_an_unknown_method(method: str) -> None:
    desk = Desk()
    code, message, data = await desk.error(method, {})
    assert (code, data) == (-32601, None)
    assert message == f"method not found: {method[:200]}"
    assert desk.note(method, {}) == []  # a notification is ignored
    assert desk.guard.refused == {"unknown": 2}


@pytest.mark.parametrize("method", sorted(NOTIFICATIONS))
async def test_a_notification_with_an_id_is_no_method(method: str) -> None:
    desk = Desk(declared=EVERY_CAPABILITY)
    assert (await desk.error(method, GOOD[method]))[:2] == (-32601, f"method not found: {method}")


@pytest.mark.parametrize("method", REQUESTS)
async def test_a_request_without_an_id_is_ignored(method: str) -> None:
    desk = Desk(declared=EVERY_CAPABILITY)
    assert desk.note(method, GOOD[method]) == []
    desk.publish("other", b"")
    assert desk.told == []


async def test_a_busy_host_says_so() -> None:
    desk = Desk()
    assert desk.methods.refused("host/snapshot/get", "busy").error == (
        -32603,
        "the host is busy: wait for the answers to some requests",
        None,
    )


# --- snapshots ----------------------------------------------------------------------------------------------


async def test_get_gives_what_was_published_last() -> None:
    bus = SnapshotBus()
    one, two = Desk(bus, "one"), Desk(bus, "two")
    assert await one.result("host/snapshot/get", {"topic": "a"}) == {"payload": None, "version": 0}
    assert two.publish("a", b"first") == two.publish("a", b"hi") == []
    assert await one.result("host/snapshot/get", {"topic": "a"}) == {"payload": "aGk=", "version": 2}
    # Its own publication too, and the id of the publisher is the connection's.
    assert await two.result("host/snapshot/get", {"topic": "a"}) == {"payload": "aGk=", "version": 2}
    found = bus.get("a")
    assert found is not None and found.publisher == "two"


async def test_an_array_of_integers_is_a_payload() -> None:
    desk = Desk()
    desk.note("host/snapshot/publish", {"topic": "a", "payload": [104, 105]})
    assert await desk.result("host/snapshot/get", {"topic": "a"}) == {"payload": "aGk=", "version": 1}


async def test_subscribers_get_each_publication_once_and_in_order() -> None:
    bus = SnapshotBus()
    publisher = Desk(bus, "publisher")
    readers = [Desk(bus, f"r{number}") for number in range(3)]
    other = Desk(bus, "other")
    for reader in (*readers, publisher):
        for _ in range(2):  # it is a set
            assert await reader.result("host/snapshot/subscribe", {"topic": "a"}) == {}
    await other.result("host/snapshot/subscribe", {"topic": "b"})
    chunks = [f"chunk {number}".encode() for number in range(100)]
    for chunk in chunks:
        publisher.publish("a", chunk)
    for reader in readers:
        assert reader.told == [("a", chunk) for chunk in chunks]
    assert publisher.told == [] and other.told == []


async def test_there_is_no_replay() -> None:
    bus = SnapshotBus()
    bus.publish("a", b"before")
    desk = Desk(bus)
    await desk.result("host/snapshot/subscribe", {"topic": "a"})
    assert desk.told == []


async def test_topics_of_the_manifest_are_subscribed_from_the_start() -> None:
    bus = SnapshotBus()
    desk = Desk(bus, declared=Declared(granted=("event_bus",), subscribes=("a", "b")))
    bus.publish("a", b"1")
    await desk.result("host/snapshot/subscribe", {"topic": "a"})
    bus.publish("a", b"2")
    bus.publish("b", b"3")
    assert desk.told == [("a", b"1"), ("a", b"2"), ("b", b"3")]


@pytest.mark.parametrize(
    ("declared", "allowed"),
    [
        (Declared(subscribes=("a",)), ("*",)),
        (Declared(granted=("event_bus",), lists={"event_bus": ("b",)}, subscribes=("a",)), ("*",)),
        (Declared(granted=("event_bus",), subscribes=("a",)), ("host/snapshot/get",)),
    ],
)
async def test_nobody_is_subscribed_without_the_grant(declared: Declared, allowed: tuple[str, ...]) -> None:
    bus = SnapshotBus()
    desk = Desk(bus, declared=declared, allowed=allowed)
    bus.publish("a", b"1")
    assert desk.told == []


async def test_subscriptions_end_with_the_session_and_begin_again() -> None:
    bus = SnapshotBus()
    declared = Declared(granted=("event_bus",), subscribes=("a",))
    first = Desk(bus, declared=declared)
    await first.result("host/snapshot/subscribe", {"topic": "b"})
    first.guard.detach()
    second = Desk(bus, declared=declared)
    bus.publish("a", b"1")
    bus.publish("b", b"2")
    assert (first.told, second.told) == ([], [("a", b"1")])
    assert first.publish("a", b"late") == [] and bus.version == 2
    assert (await first.error("host/snapshot/get", {"topic": "a"}))[0] == -32603


async def test_without_a_shared_bus_each_session_has_its_own() -> None:
    one, two = Desk(), Desk()
    one.publish("a", b"1")
    assert (await two.result("host/snapshot/get", {"topic": "a"}))["version"] == 0


@pytest.mark.parametrize(
    ("desk", "params"),
    [
        pytest.param(Desk(declared=Declared()), GOOD["host/snapshot/publish"], id="no capability"),
        pytest.param(Desk(allowed=()), GOOD["host/snapshot/publish"], id="not by the policy"),
        pytest.param(Desk(), {"topic": "a"}, id="no payload"),
        pytest.param(Desk(), {"topic": "a", "payload": "aGk"}, id="bad base64"),
        pytest.param(Desk(), {"topic": 1, "payload": ""}, id="bad topic"),
        pytest.param(Desk(), None, id="no params"),
        pytest.param(Desk(), {"topic": "a" * 2000, "payload": ""}, id="long topic"),
        pytest.param(Desk(), {"topic": "a", "payload": bytes(PAYLOAD_MOST_BYTES + 1)}, id="long payload"),
        pytest.param(Desk(), {"topic": "fleet.a", "payload": ""}, id="fleet"),
        pytest.param(Desk(), {"topic": "ui.state/other", "payload": ""}, id="state of another"),
    ],
)
async def test_a_publication_that_is_refused_is_dropped_counted_and_told(desk: Desk, params: Any) -> None:
    bus = desk.services.bus
    assert bus is not None
    for _ in range(5):
        desk.note("host/snapshot/publish", params)
    assert bus.version == 0 and bus.held == 0
    assert [each.kind for each in desk.notices] == ["dropped"] * 3
    assert [each.value["count"] for each in desk.notices] == [1, 2, 4]
    assert all(each.value["method"] == "host/snapshot/publish" for each in desk.notices)
    assert all(0 < len(each.value["reason"]) < 500 for each in desk.notices)


# --- topics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "topic", "covered"),
    [
        (None, "a", True),
        (None, "fleet.a", False),
        (("a",), "a", True),
        (("a",), "ab", False),
        (("a*",), "ab", True),
        (("a*",), "a", True),
        (("a*",), "b", False),
        (("*",), "anything", True),
        (("*",), "fleet.a", False),
        (("fleet.*",), "fleet.a", False),
        (("fleet.*",), "fleet.*", False),
        (("f*",), "fleet.a", False),
        (("fleet.a",), "fleet.a", True),
        (("fleet.a",), "fleet.ab", False),
        (("x", "b*"), "bc", True),
        (("a.*",), "a", False),
    ],
)
@pytest.mark.parametrize(
    ("capability", "method"),
    [
        ("event_bus", "host/snapshot/get"),
        ("event_bus", "host/snapshot/subscribe"),
        ("event_stream_subscribe", "host/event_stream_subscribe"),
    ],
)
async def test_a_list_scopes_the_grant(
    entries: tuple[str, ...] | None, topic: str, covered: bool, capability: str, method: str
) -> None:
    lists = {} if entries is None else {capability: entries}
    desk = Desk(declared=Declared(granted=(capability,), lists=lists))
    answer = await desk.ask(method, {"topic": topic})
    if covered:
        assert answer.error is None
    else:
        assert answer.error == (-32001, f"capability denied: {capability}", {"topic": topic})


async def test_nobody_publishes_for_the_fleet_even_with_an_exact_entry() -> None:
    bus = SnapshotBus()
    desk = Desk(bus, declared=Declared(granted=("event_bus",), lists={"event_bus": ("fleet.a", "b")}))
    desk.publish("fleet.a", b"1")
    assert bus.get("fleet.a") is None
    desk.publish("b", b"control")
    assert bus.get("b") is not None
    # But it may read what the host publishes there.
    await desk.result("host/snapshot/subscribe", {"topic": "fleet.a"})
    bus.publish("fleet.a", b"2")
    assert desk.told == [("fleet.a", b"2")]


async def test_the_state_of_each_plugins_screen_is_its_own_and_ends_with_it() -> None:
    bus = SnapshotBus()
    one, two = Desk(bus, "one"), Desk(bus, "two")
    one.publish("ui.state", b"1")
    two.publish("ui.state", b"2")
    one.publish("ui.state/two", b"forged")
    one.publish("ui.state/", b"nobody's")
    states = {name: bus.get(f"ui.state/{name}") for name in ("one", "two", "")}
    assert [state and state.payload for state in states.values()] == [b"1", b"2", None]
    assert bus.get("ui.state") is None
    one.publish("ui.state/one", b"its own name")
    assert (await two.result("host/snapshot/get", {"topic": "ui.state/one"}))["payload"] == encode(
        b"its own name"
    )
    one.guard.detach()
    assert bus.get("ui.state/one") is None and bus.get("ui.state/two") is not None


@pytest.mark.parametrize(
    ("focused", "payload", "honoured"),
    [
        ("main", b'{"screen_id": "main"}', True),
        ("", b'{"screen_id": ""}', False),
        ("other", b'{"screen_id": "other"}', False),  # in front, but another plugin's
        ("main", b'{"screen_id": "side"}', False),  # its own, but not in front
        ("main", b'"main"', False),
        ("main", b'{"screen_id": ["main"]}', False),
        ("main", b"[" * 60000, False),
        ("main", b'{"screen_id": "main"}' + b" " * 70000, False),
        ("main", b"\xff", False),
    ],
)
async def test_only_the_owner_of_the_screen_in_front_may_ask_to_close_it(
    focused: str, payload: bytes, honoured: bool
) -> None:
    bus = SnapshotBus()
    bus.focused_screen = focused
    desk = Desk(bus, declared=Declared(granted=("event_bus",), screens=("main", "side")))
    with bus.subscribe("ui.close_request") as requests:
        notices = desk.publish("ui.close_request", payload)
    got = [each.publisher async for each in requests]
    assert (got, [each.kind for each in notices]) == ((["notes"], []) if honoured else ([], ["dropped"]))


# --- event streams ------------------------------------------------------------------------------------------

STREAMER = Declared(granted=("event_bus", "event_stream_subscribe"))


async def test_a_stream_delivers_under_its_own_topic_until_it_is_cancelled() -> None:
    bus = SnapshotBus()
    bus.publish("a", b"0")
    desk = Desk(bus, declared=STREAMER)
    opened = await desk.result("host/event_stream_subscribe", {"topic": "a", "since_version": 0})
    assert opened["version"] == 1 and set(opened) == {"stream_id", "version"}
    stream = opened["stream_id"]
    for number in range(4):
        bus.publish("a", str(number).encode())
    desk.note("host/event_stream_cancel", {"stream_id": stream})
    bus.publish("a", b"5th")
    assert desk.told == [(f"stream:{stream}", str(number).encode()) for number in range(4)]
    assert bus._readers == {}


async def test_streams_and_subscriptions_do_not_end_each_other() -> None:
    bus = SnapshotBus()
    desk = Desk(bus, declared=STREAMER)
    one, two = [
        (await desk.result("host/event_stream_subscribe", {"topic": "a"}))["stream_id"] for _ in range(2)
    ]
    assert one != two
    await desk.result("host/snapshot/subscribe", {"topic": "a"})
    desk.note("host/event_stream_cancel", {"stream_id": one})
    bus.publish("a", b"1")
    assert desk.told == [("a", b"1"), (f"stream:{two}", b"1")]
    desk.note("host/event_stream_cancel", {"stream_id": two})
    bus.publish("a", b"2")
    assert desk.told[2:] == [("a", b"2")]


async def test_only_its_owner_cancels_a_stream() -> None:
    bus = SnapshotBus()
    one, two = Desk(bus, "one", STREAMER), Desk(bus, "two", STREAMER)
    stream = (await one.result("host/event_stream_subscribe", {"topic": "a"}))["stream_id"]
    assert two.note("host/event_stream_cancel", {"stream_id": stream}) == []
    bus.publish("a", b"1")
    assert one.told == [(f"stream:{stream}", b"1")]


async def test_streams_are_bounded_and_end_with_the_session() -> None:
    bus = SnapshotBus()
    desk = Desk(bus, declared=STREAMER)
    for _ in range(64):
        await desk.result("host/event_stream_subscribe", {"topic": "a"})
    assert (await desk.error("host/event_stream_subscribe", {"topic": "a"}))[0] == -32602
    desk.guard.detach()
    bus.publish("a", b"1")
    assert desk.told == []


# --- actions ------------------------------------------------------------------------------------------------


async def test_an_action_of_the_host() -> None:
    bus = SnapshotBus()

    async def shout(payload: bytes) -> bytes:
        return payload.upper()

    bus.register_action("shout", shout)
    desk = Desk(bus)
    asked = {"action": "shout", "payload": "aGk=", "timeout_ms": 5}
    assert await desk.result("host/action/invoke", asked) == {"payload": encode(b"HI")}


@pytest.mark.parametrize(("given", "payload"), [("text", b"text"), ({"base64": "/w=="}, b"\xff"), ("", b"")])
async def test_an_action_of_another_plugin(given: Any, payload: bytes) -> None:
    bus = SnapshotBus()
    Desk(bus, "zero", Declared(granted=("event_bus",), cli_namespaces=("other",)))
    doer = Desk(bus, "doer", Declared(cli_namespaces=("x", "open")))
    doer.answers = {"open": given}
    desk = Desk(bus)
    asked = {"action": "open", "payload": "aGk="}
    assert await desk.result("host/action/invoke", asked) == {"payload": encode(payload)}
    assert [(call.kind, call.name, call.input) for call in doer.asked] == [("action", "open", b"hi")]
    doer.guard.detach()
    assert (await desk.error("host/action/invoke", asked))[0] == -32602


async def test_a_plugin_that_refuses_an_action_is_heard() -> None:
    bus = SnapshotBus()
    doer = Desk(bus, "doer", Declared(cli_namespaces=("open",)))
    doer.answers = {"open": HostError(-32601, "method not found: host/action/invoke")}
    error = await Desk(bus).error("host/action/invoke", GOOD["host/action/invoke"])
    assert error == (-32601, "method not found: host/action/invoke", None)


async def test_no_plugin_invokes_itself_and_unknown_actions_are_bad_params() -> None:
    desk = Desk(declared=Declared(granted=("event_bus",), cli_namespaces=("open",)))
    code, message, _ = await desk.error("host/action/invoke", GOOD["host/action/invoke"])
    assert (code, message) == (-32602, "invalid params: the plugin itself does the action 'open'")
    code, message, _ = await desk.error("host/action/invoke", {"action": "ope", "payload": ""})
    assert (code, message) == (-32602, "invalid params: there is no action 'ope'")


@pytest.mark.parametrize(
    ("timeout_ms", "seconds"), [(1500, 1.5), (0, 60.0), (2**64 - 1, 60.0)], ids=["asked", "none", "too long"]
)
async def test_an_action_has_a_time_limit(
    timeout_ms: int, seconds: float, autojump_clock: trio.abc.Clock
) -> None:
    bus = SnapshotBus()
    ended = []

    async def hang(payload: bytes) -> bytes:
        try:
            await trio.sleep(3600)
        finally:
            ended.append(True)
        return b""

    bus.register_action("hang", hang)
    began = trio.current_time()
    asked = {"action": "hang", "payload": "", "timeout_ms": timeout_ms}
    assert await Desk(bus).error("host/action/invoke", asked) == (-32002, "action timed out: hang", None)
    assert trio.current_time() - began == pytest.approx(seconds)
    assert ended == [True]


async def test_an_action_within_its_time(autojump_clock: trio.abc.Clock) -> None:
    bus = SnapshotBus()

    async def slow(payload: bytes) -> bytes:
        await trio.sleep(0.9)
        return payload

    bus.register_action("slow", slow)
    asked = {"action": "slow", "payload": "aGk=", "timeout_ms": 1000}
    assert await Desk(bus).result("host/action/invoke", asked) == {"payload": "aGk="}


async def test_an_action_that_fails_or_answers_too_much_does_no_harm() -> None:
    bus = SnapshotBus()

    async def broken(payload: bytes) -> bytes:
        raise KeyError("secret")

    async def much(payload: bytes) -> bytes:
        return bytes(PAYLOAD_MOST_BYTES + 1)

    bus.register_action("broken", broken)
    bus.register_action("much", much)
    desk = Desk(bus)
    error = await desk.error("host/action/invoke", {"action": "broken", "payload": ""})
    assert error == (-32603, "internal error: KeyError", None)
    assert (await desk.error("host/action/invoke", {"action": "much", "payload": ""}))[0] == -32603


# --- what was granted ---------------------------------------------------------------------------------------

EVERY = Declared(
    CAPABILITIES,
    {"unix_socket_dial": ("/run/x",), "read_paths": ("/data",), "network": ("a.example",)},
    fs_roots=("/home/sessions", "/home/claude", "/home/codex", "/data"),
    flag_roots=("/home/sessions", "/home/claude", "/home/codex"),
)
READ_FLAGS = ("read_sessions", "read_claude_logs", "read_codex_logs", "read_paths")


@pytest.mark.parametrize(
    ("allowance", "allowed", "kept"),
    [
        (Allowance(), (), ()),
        (Allowance(state_dir="/state", readable=("/state",)), (), ("write_plugin_data",)),
        (Allowance(readable=("/home", "/data/x")), (), READ_FLAGS),
        (Allowance(readable=("/home/codex", "/database")), (), ("read_codex_logs",)),
        (Allowance(network="allowlist"), (), ("network",)),
        (Allowance(hosts=("*:443",)), (), ()),
        (Allowance(hosts=("*:443",)), ("host/network/fetch",), ("network",)),
        (Allowance(hosts=("b.example:443",)), ("host/*",), None),
        (Allowance(), ("host/snapshot/get",), ("event_bus",)),
        (Allowance(), ("host/event_stream_*",), ("event_stream_subscribe",)),
        (Allowance(), ("host/unix_socket_dial",), ("unix_socket_dial",)),
        # Nothing is started outside of the cage, and there are no secrets.
        (
            Allowance(),
            ("*",),
            ("event_bus", "event_stream_subscribe", "unix_socket_dial", "workspace:write"),
        ),
    ],
)
async def test_what_was_granted_is_what_policy_and_host_leave_of_the_manifest(
    allowance: Allowance, allowed: tuple[str, ...], kept: tuple[str, ...] | None
) -> None:
    def allows(method: str) -> bool:
        return any(fnmatch.fnmatchcase(method, pattern) for pattern in allowed)

    found = granted(make_plugin("notes", EVERY), allowance, allows)
    if kept is None:
        assert "network" not in found
    else:
        assert set(found) == {"spawn_subprocess", *kept}
        assert list(found) == sorted(found, key=CAPABILITIES.index)
    assert granted(make_plugin("none", Declared()), allowance, allows) == ()


# --- the log ------------------------------------------------------------------------------------------------

LEVELS = ["trace", "debug", "info", "warn", "error"]


@pytest.mark.parametrize(
    ("lowest", "kept"),
    [
        (None, ["warn", "error"]),
        ("trace", LEVELS),
        ("info", ["info", "warn", "error"]),
        ("error", ["error"]),
        ("off", []),
    ],
)
async def test_the_lowest_level_filters(lowest: str | None, kept: list[str]) -> None:
    desk = Desk(declared=Declared(), services=Services(log_level=lowest))
    for level in LEVELS:
        desk.note("host/log", {"level": level, "message": f"a {level}"})
    assert [(each.kind, each.value) for each in desk.notices] == [
        ("log", {"plugin": "notes", "level": level, "message": f"a {level}"}) for level in kept
    ]


@pytest.mark.parametrize("level", ["WARN", "fatal", "", "warning"])
async def test_a_message_with_another_level_is_dropped_and_told(level: str) -> None:
    desk = Desk()
    (notice,) = desk.note("host/log", {"level": level, "message": "x"})
    assert notice.kind == "dropped" and repr(level) in notice.value["reason"]


async def test_the_report_counts_what_was_refused_and_not_as_served() -> None:
    """By the manifest, by params, and by the policy alike."""
    topic = {"topic": "a", "payload": "eA=="}
    without = Desk(declared=Declared())
    for _ in range(3):
        without.note("host/snapshot/publish", topic)
    assert (without.guard.served, without.guard.refused) == ({}, {"host/snapshot/publish": 3})
    desk = Desk()
    desk.note("host/snapshot/publish", {"topic": 5})
    desk.note("host/snapshot/publish", topic)
    assert desk.guard.served == desk.guard.refused == {"host/snapshot/publish": 1}


@pytest.mark.parametrize("params", [None, {}, {"level": 1, "message": "x"}, {"level": "error"}])
async def test_a_bad_message_is_dropped_and_told(params: Any) -> None:
    assert [each.kind for each in Desk().note("host/log", params)] == ["dropped"]


async def test_a_message_and_its_fields_are_bounded() -> None:
    (notice,) = Desk().note("host/log", {"level": "warn", "message": "x" * 5000, "fields": {"a": [1]}})
    assert notice.value["message"] == "x" * 4096 and notice.value["cut"] == 904
    assert notice.value["fields"] == {"a": [1]}
    for fields in ("x" * 9000, ["x"] * 1000, {"a": {"b": "x" * 9000}}):
        (notice,) = Desk().note("host/log", {"level": "warn", "message": "m", "fields": fields})
        assert "fields" not in notice.value and notice.value["fields_left_out"] is True


async def test_a_level_of_the_host_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'warning' is none of trace"):
        Desk(services=Services(log_level="warning"))


# --- what this host does not do -----------------------------------------------------------------------------


def with_list(capability: str, *entries: str) -> Desk:
    return Desk(declared=Declared(granted=(capability,), lists={capability: entries}))


async def test_programs_outside_of_the_cage_are_not_started() -> None:
    method, capability = "host/spawn_managed_subprocess", "spawn_managed_subprocess"
    code, message, _ = await Desk(declared=Declared(granted=(capability,))).error(method, {"bin": "git"})
    assert (code, message) == (-32003, f"{capability} must be a list of programs, not true")
    desk = with_list(capability, "git")
    error = await desk.error(method, {"bin": "/bin/git", "argv": ["a"], "env_allowlist": [], "cwd": None})
    assert error == (-32001, f"capability denied: {capability}", {"bin": "/bin/git"})
    code, message, _ = await desk.error(method, {"bin": "git"})
    assert code == -32005 and "a program outside of the plugin's cage is not started" in message


async def test_there_is_no_secret_store() -> None:
    desk = with_list("secrets:read", "k")
    asked = {"scope": "workspace", "workspace_id": "w", "key": "other"}
    error = await desk.error("host/secret_store_get", asked)
    assert error == (-32001, "capability denied: secrets:read", {"key": "other"})
    asked = {"scope": "global", "key": "k"}
    assert (await desk.error("host/secret_store_get", asked))[0] == -32005
    desk = Desk(declared=Declared(granted=("secrets:read",)))
    assert (await desk.error("host/secret_store_get", asked))[0] == -32005


async def test_there_are_no_workspaces() -> None:
    desk = no_capability()
    listed = {"workspaces": [], "creation_disabled": True}
    assert await desk.result("host/workspace_list", None) == listed
    assert await desk.result("host/workspace_list", {}) == listed
    assert await desk.result("host/workspace_get_active", {}) == {"workspace_id": None}
    desk = Desk(declared=Declared(granted=("workspace:write",)))
    assert (await desk.error("host/workspace_create", {"slug": "a", "name": "A"}))[0] == -32008
    for method in ("host/workspace_set_active", "host/workspace_set_default", "host/workspace_delete"):
        error = await desk.error(method, {"workspace_id": "w"})
        assert error[:2] == (-32602, "invalid params: there is no workspace 'w'")
