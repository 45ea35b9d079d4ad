"""What a worker believes of a message, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.fleet import names
from runner.fleet.client import FleetPlugin, plugins_of, presence_of
from runner.fleet.messages import BadMessage, FleetCall, decode_call, encode_call, stored_call

NOW = 1_800_000_000.0
CALL = FleetCall("c1", "notes", "add", NOW + 60, {"text": "milk"}, "tool", {"agent_id": "a"}, 5.0, False)
LEAST: dict[str, Any] = {"id": "c1", "plugin": "notes", "tool": "add", "deadline": NOW}


def test_a_call_survives_the_bus() -> None:
    assert decode_call(encode_call(CALL), NOW) == CALL
    least = FleetCall("c1", "notes", "add", NOW)
    assert set(json.loads(encode_call(least))) == set(LEAST)
    assert decode_call(json.dumps(LEAST).encode(), NOW) == least
    assert stored_call(CALL._asdict()) == CALL
    assert stored_call({"id": "c1"}) is None and stored_call(None) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"policy": "open"}, "unknown key 'policy'"),
        ({"limits": {}}, "unknown key 'limits'"),
        ({"env": {"A": "b"}}, "unknown key 'env'"),
        ({"caller": "root"}, "unknown key 'caller'"),
        ({"effect": "read_only"}, "unknown key 'effect'"),
        ({"id": ""}, "id"),
        ({"id": 7}, "id"),
        ({"id": "x" * 257}, "id"),
        ({"tool": "x" * 4097}, "tool"),
        ({"kind": ["hook"]}, "kind"),
        ({"context": []}, "context"),
        ({"retry": 1}, "retry"),
        ({"deadline": True}, "deadline"),
        ({"deadline": NOW + names.MOST_SECONDS + 3601}, "deadline"),
        ({"seconds": -1}, "seconds"),
        ({"seconds": names.MOST_SECONDS + 1}, "seconds"),
    ],
)
def test_a_message_that_is_no_call(change: dict[str, Any], word: str) -> None:
    with pytest.raises(BadMessage, match=word):
        decode_call(json.dumps({**LEAST, **change}).encode(), NOW)


def test_bytes_that_are_no_call() -> None:
    for raw in (b"", b"[]", b"{", b'{"id": NaN}', b"[" * 5000, b'{"id":"a","id":"b"}'):
        with pytest.raises(BadMessage):
            decode_call(raw, NOW)
    with pytest.raises(BadMessage, match="no deadline"):
        decode_call(b'{"id":"a","plugin":"b","tool":"c"}', NOW)


def test_the_bound_is_exact() -> None:
    room = names.MOST_BODY_BYTES - len(encode_call(CALL._replace(input="")))
    raw = encode_call(CALL._replace(input="x" * room))
    assert len(raw) == names.MOST_BODY_BYTES
    assert decode_call(raw, NOW).input == "x" * room
    with pytest.raises(BadMessage, match=str(names.MOST_BODY_BYTES)):
        encode_call(CALL._replace(input="x" * (room + 1)))
    with pytest.raises(BadMessage, match=str(names.MOST_BODY_BYTES)):
        decode_call(raw + b" ", NOW)


def test_an_id_cannot_leave_its_part_of_a_subject() -> None:
    for hostile in ("a.b", "*", ">", "a b", "a\r\nPUB x", "", "x" * 129, "ä"):
        assert not names.is_token(hostile)
        assert names.is_token(names.key_of(hostile))
    assert names.key_of("call_1~2") == "call_1~2"
    assert names.key_of("a.b") != names.key_of("a-b")


def test_a_message_id_needs_the_users_key() -> None:
    assert names.message_id("a", "c", b"1") == names.message_id("a", "c", b"1")
    assert (
        len({names.message_id(*each) for each in (("a", "c", b"1"), ("b", "c", b"1"), ("a", "c", b"2"))}) == 3
    )


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b"7",
        b'{"plugins": 7}',
        b'{"plugins": [7, {"name": "a"}, {"digest": "*"}]}',
        b'{"since": "x", "slots": Infinity}',
        b'{"plugins": [{"name": 1, "digest": "d", "durable": 5, "held": []}]}',
    ],
)
def test_a_worker_may_say_anything_about_itself(said: bytes) -> None:
    row = presence_of(said)
    found = list(plugins_of([] if row is None else [row]))
    assert found in ([], [FleetPlugin("", "d")])
