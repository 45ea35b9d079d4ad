"""Matching answers to calls: by direction, once, and never by an id that only looks equal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.protocol import jsonrpc
from runner.protocol.jsonrpc import (
    INTERNAL_ERROR,
    MOST_TICKETS,
    Incoming,
    Peer,
    RpcError,
    RpcNotification,
    RpcRequest,
    RpcResult,
    RpcStray,
)


def asked(peer: Peer, plugin_id: Any, method: str = "m") -> RpcRequest:
    incoming = peer.receive({"jsonrpc": "2.0", "id": plugin_id, "method": method})
    assert isinstance(incoming, RpcRequest)
    return incoming


@pytest.mark.parametrize(
    ("message", "incoming"),
    [
        ({"id": 1, "result": 5}, RpcResult("token", 5)),
        ({"id": 1, "result": None}, RpcResult("token", None)),
        ({"id": 1, "result": 5, "error": None}, RpcResult("token", 5)),
        ({"id": 1, "error": {"code": -1, "message": "no"}}, RpcError("token", -1, "no")),
        ({"id": 1, "result": 5, "error": {"code": -1, "message": "no"}}, RpcError("token", -1, "no")),
        ({"id": 1, "error": {"code": -1, "message": "no", "data": [1]}}, RpcError("token", -1, "no", [1])),
        ({"id": 1, "error": {"code": True, "message": 5}}, RpcError("token", INTERNAL_ERROR, "")),
        ({"id": 1, "error": {}}, RpcError("token", INTERNAL_ERROR, "")),
        ({"id": 1, "error": "no"}, RpcError("token", INTERNAL_ERROR, "an error that is not an object", "no")),
        (
            {"id": 1, "error": False},
            RpcError("token", INTERNAL_ERROR, "an error that is not an object", False),
        ),
        ({"id": 2, "result": 5}, RpcStray("unknown")),
        ({"id": 0, "result": 5}, RpcStray("unknown")),
        ({"id": -1, "result": 5}, RpcStray("unknown")),
        ({"id": 2**64, "result": 5}, RpcStray("unknown")),
        ({"id": 1.0, "result": 5}, RpcStray("unknown")),
        ({"id": True, "result": 5}, RpcStray("unknown")),
        ({"id": "1", "result": 5}, RpcStray("unknown")),
        ({"id": None, "error": {"code": -32700, "message": "parse"}}, RpcStray("unknown")),
        ({"id": [1], "result": 5}, RpcStray("unknown")),
        ({"id": {}, "result": 5}, RpcStray("unknown")),
        ({"id": 1, "method": "m"}, RpcRequest(1, "m", None)),
        ({"id": 1, "method": "m", "params": {"a": 1}, "result": 5}, RpcRequest(1, "m", {"a": 1})),
        ({"id": None, "method": "m"}, RpcRequest(1, "m", None)),
        ({"method": "m", "params": [1]}, RpcNotification("m", [1])),
        ({"method": "m", "result": 1}, RpcNotification("m", None)),
        ({"id": 1, "method": ""}, RpcStray("not_rpc", "neither a request nor an answer")),
        ({"id": 1, "method": 5}, RpcStray("not_rpc", "neither a request nor an answer")),
        ({"id": 1}, RpcStray("not_rpc", "neither a request nor an answer")),
        ({"result": 1}, RpcStray("not_rpc", "neither a request nor an answer")),
        ({}, RpcStray("not_rpc", "neither a request nor an answer")),
        ([{"id": 1, "result": 5}], RpcStray("not_rpc", "not an object")),
        (None, RpcStray("not_rpc", "not an object")),
        ("id", RpcStray("not_rpc", "not an object")),
    ],
)
def test_incoming_messages(message: Any, incoming: Incoming) -> None:
    peer = Peer()
    peer.request("token", "method")
    assert peer.receive(message) == incoming
    # Only its own answer ends a call.
    assert (peer.waits_for("token") is None) is isinstance(incoming, RpcResult | RpcError)
    assert (peer.late, peer.unknown) == (0, int(incoming == RpcStray("unknown")))


def test_outgoing_messages() -> None:
    peer = Peer(first_id=7)
    assert json.loads(peer.request("a", "m")) == {"jsonrpc": "2.0", "id": 7, "method": "m"}
    assert json.loads(peer.request("b", "m", [])) == {"jsonrpc": "2.0", "id": 8, "method": "m", "params": []}
    assert json.loads(peer.notification("m")) == {"jsonrpc": "2.0", "method": "m"}
    assert json.loads(peer.notification("m", {})) == {"jsonrpc": "2.0", "method": "m", "params": {}}
    first, second = asked(peer, "x").ticket, asked(peer, "y").ticket
    assert json.loads(peer.result(second, None) or b"") == {"jsonrpc": "2.0", "id": "y", "result": None}
    error = {"code": 1, "message": "no", "data": False}
    assert json.loads(peer.error(first, 1, "no", False) or b"") == {
        "jsonrpc": "2.0",
        "id": "x",
        "error": error,
    }
    assert peer.result(first, 1) is None and peer.error(second, 1, "") is None and peer.result(99, 1) is None


def test_one_number_in_two_directions_is_two_calls() -> None:
    peer = Peer()
    peer.request("ours", "m")
    ticket = asked(peer, 1).ticket
    assert peer.receive({"id": 1, "result": "theirs"}) == RpcResult("ours", "theirs")
    assert json.loads(peer.result(ticket, "ours") or b"")["id"] == 1


def test_late_answers_differ_from_unknown_ones() -> None:
    peer = Peer()
    peer.request("a", "m")
    peer.request("b", "m")
    assert peer.forget("a") == 1 and peer.forget("a") is None
    assert peer.receive({"id": 1, "result": 0}) == RpcStray("late", "1")
    assert peer.receive({"id": 2, "result": 0}) == RpcResult("b", 0)
    assert peer.receive({"id": 2, "result": 0}) == RpcStray("late", "2")  # answered twice
    assert peer.receive({"id": 3, "result": 0}) == RpcStray("unknown")
    assert (peer.late, peer.unknown) == (2, 1)


def test_an_answer_with_another_id_is_told_while_a_request_waits() -> None:
    peer = Peer()
    peer.receive({"id": 1, "result": 0})
    peer.request("a", "m")
    assert peer.noise == ""  # it came before
    peer.request("b", "m")
    for number, shown in (("2", "'2'"), (None, "null"), (True, "true"), ([1], "of another type")):
        peer.receive({"id": number, "result": 0})
        assert peer.noise == (f"it sent an answer with the id {shown}, and the open request has the number 2")
    peer.receive({"id": "\x1b[2J" + "x" * 10_000, "result": 0})
    assert peer.noise.isprintable() and len(peer.noise) < 200
    peer.receive({"id": 1, "result": 0})
    peer.receive({"id": 2, "result": 0})
    peer.request("c", "m")
    assert peer.noise == ""


def test_a_token_can_be_used_again() -> None:
    peer = Peer()
    peer.request("ping", "m")
    peer.request("ping", "m")
    assert peer.waits_for("ping") == 2
    assert peer.receive({"id": 1, "result": 0}) == RpcResult("ping", 0)
    assert peer.waits_for("ping") == 2
    assert peer.forget("ping") == 2


def test_a_request_that_cannot_be_encoded_is_not_pending() -> None:
    peer = Peer()
    with pytest.raises(ValueError, match="JSON"):
        peer.request("a", "m", object())
    assert peer.waits_for("a") is None
    assert json.loads(peer.request("a", "m"))["id"] == 1


def test_an_answer_that_cannot_be_sent_closes_its_ticket() -> None:
    peer = Peer()
    ticket = asked(peer, "x").ticket
    with pytest.raises(ValueError, match="JSON"):
        peer.result(ticket, object())
    assert peer.asked_as(ticket) is None and peer.drop("x") is None


IDS = [0, 1, 1.0, True, False, None, "1", "", [1], [1.0], {"a": 1}, 2**64 - 1, -(2**63), 0.5, "é"]


@pytest.mark.parametrize("plugin_id", IDS)
def test_a_plugins_id_is_sent_back_unchanged_and_cancels_only_its_own_request(plugin_id: Any) -> None:
    peer = Peer()
    tickets = {asked(peer, other).ticket: other for other in IDS}
    dropped = peer.drop(plugin_id)
    assert dropped is not None and repr(tickets[dropped]) == repr(plugin_id)
    assert peer.result(dropped, 1) is None and peer.drop(plugin_id) is None
    for ticket, other in tickets.items():
        if ticket != dropped:
            assert repr(peer.asked_as(ticket)) == repr(other)
            assert repr(json.loads(peer.result(ticket, 1) or b"")["id"]) == repr(other)


def test_of_two_requests_with_one_id_the_oldest_is_cancelled() -> None:
    peer = Peer()
    first, second = asked(peer, "x").ticket, asked(peer, "x").ticket
    assert peer.drop("x") == first
    assert peer.asked_as(second) == "x"
    assert peer.drop("x") == second and peer.drop("x") is None


def test_too_many_questions() -> None:
    peer = Peer()
    tickets = [asked(peer, number).ticket for number in range(MOST_TICKETS)]
    assert len(set(tickets)) == MOST_TICKETS
    for _ in range(2):
        assert peer.receive({"id": "more", "method": "m"}) == RpcStray("too_many", "1024 questions are open")
    assert peer.receive({"method": "m"}) == RpcNotification("m", None)  # keeps nothing
    assert peer.result(tickets[500], None) is not None
    assert asked(peer, "more").ticket not in tickets


def test_long_ids_do_not_fill_memory() -> None:
    peer = Peer()
    long = "x" * (jsonrpc.MOST_IDS // 4 - 2)
    tickets = [asked(peer, long).ticket for _ in range(4)]
    stray = peer.receive({"id": 1, "method": "m"})
    assert isinstance(stray, RpcStray) and stray.why == "too_many"
    assert peer.result(tickets[0], 1) is not None
    assert asked(peer, 1)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
messages = values | st.dictionaries(st.sampled_from(["id", "method", "params", "result", "error"]), values)


@given(st.lists(messages, max_size=20))
def test_every_message_is_classified(several: list[Any]) -> None:
    peer = Peer()
    for token in range(3):
        peer.request(token, "m")
    ended = []
    for message in several:
        incoming = peer.receive(message)
        if isinstance(incoming, RpcResult | RpcError):
            ended.append(incoming.token)
        elif isinstance(incoming, RpcRequest):
            assert peer.asked_as(incoming.ticket) == message["id"]
    assert len(ended) == len(set(ended))
    assert [token for token in range(3) if peer.waits_for(token) is None] == sorted(map(int, map(str, ended)))


@pytest.mark.parametrize("params", [None, {}, {"a": 1}])
def test_members_that_are_encoded_already_are_part_of_the_params(params: Any) -> None:
    peer = Peer()
    whole = {**(params or {}), "b": {"c": [2]}, "d": "}"}
    raw = peer.request("a", "m", params, b'"b":{"c":[2]},"d":"}"')
    assert json.loads(raw) == {"jsonrpc": "2.0", "id": 1, "method": "m", "params": whole}
    echo = {"jsonrpc": "2.0", "id": 1, "method": "m", "params": whole}
    assert peer.receive(echo) == RpcStray("echo", "our own question came back")
    assert isinstance(peer.receive({**echo, "params": {**whole, "d": "{"}}), RpcRequest)
    assert isinstance(peer.receive({**echo, "params": {"a": 1}}), RpcRequest)


def test_an_echo_is_not_an_answer() -> None:
    """A program that sends back what it receives. The ids of both sides may still be equal."""

    def ask(number: int, method: str, params: Any = None) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}

    peer = Peer()
    peer.request("a", "initialize", {"version": "1"})
    assert peer.receive(ask(1, "initialize", {"version": "1"})) == RpcStray(
        "echo", "our own question came back"
    )
    assert isinstance(peer.receive(ask(1, "initialize", {"version": "2"})), RpcRequest)
    peer.error(1, -32603, "not yet wired")
    echo = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "not yet wired"}}
    assert peer.receive(echo) == RpcStray("echo", "our own error came back as an answer")
    assert peer.waits_for("a") == 1
    assert peer.receive({**echo, "error": {"code": -32603, "message": "its own"}}) == RpcError(
        "a", -32603, "its own"
    )
    peer.request("b", "ping")
    assert isinstance(peer.receive(ask(2, "ping")), RpcRequest)  # as both sides may
    assert peer.receive({"jsonrpc": "2.0", "id": 2, "result": {}}) == RpcResult("b", {})


def test_an_error_that_the_plugin_passes_on() -> None:
    """Its own request 1 failed, and therefore our request 1 does."""
    peer = Peer(passes_errors=True)
    peer.request("ours", "init", {})
    asked = peer.receive({"jsonrpc": "2.0", "id": 1, "method": "subscribe"})
    assert isinstance(asked, RpcRequest)
    peer.error(asked.ticket, -32001, "denied")
    passed_on = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32001, "message": "denied"}}
    assert peer.receive(passed_on) == RpcError("ours", -32001, "denied")
