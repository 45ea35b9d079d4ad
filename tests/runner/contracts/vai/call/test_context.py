"""Ids, times and credentials of an invocation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.contracts.vai.call.context import (
    INVALID_DELEGATION,
    HiddenText,
    describe,
    identify,
    is_timestamp,
    make_api_gateway,
    timestamp,
)
from runner.contracts.vai.declared import Kind
from runner.protocol.api_gateway import api_gateway_host
from runner.protocol.dialect import Call, CallRefused
from runner.protocol.wire import encode
from tests.runner.contracts.vai.package import COMPACTOR, NOW, PLAIN, TOOL


def ids(kind: Kind, context: dict[str, Any] | None = None, **options: str) -> dict[str, Any]:
    return identify(Call("export", "x", None, context or {}), kind, options, {})


@pytest.mark.parametrize(
    ("kind", "own", "prefix"),
    [
        ("tool", "tool_execution_id", "toolx_"),
        ("hook", "delivery_id", "del_"),
        ("compactor", "compaction_id", "cmp_"),
        ("harness", "execution_id", "exec_"),
    ],
)
def test_ids_are_made(kind: Kind, own: str, prefix: str) -> None:
    first, second = ids(kind), ids(kind)
    made = {"invocation_id": "inv_", "trace_id": "tr_", own: prefix}
    assert set(first) == set(made) | ({"attempt"} if kind == "hook" else set())
    for key, beginning in made.items():
        assert first[key].startswith(beginning)
        assert first[key] != second[key]


def test_ids_are_taken_from_the_context_the_options_and_the_input() -> None:
    context = {"invocation_id": "inv_1", "org_id": "o", "session_id": None, "attempt": 2}
    found = ids("hook", context, invocation_id="inv_2", delivery_id="del_1")
    assert found["invocation_id"] == "inv_1"
    assert (found["org_id"], found["delivery_id"], found["attempt"]) == ("o", "del_1", 2)
    assert "session_id" not in found  # null is the same as nothing
    call = Call("export", "x", None, {"session_id": "s1"})
    named = {"session_id": "s2", "chain_id": "c2", "execution_id": "exec_1"}
    found = identify(call, "harness", {}, named)
    assert (found["session_id"], found["chain_id"], found["execution_id"]) == ("s1", "c2", "exec_1")


@pytest.mark.parametrize(
    ("kind", "context", "said"),
    [
        ("tool", {"invocation_id": "../x"}, "'../x' cannot be the id of an invocation"),
        ("tool", {"invocation_id": ".."}, "'..' cannot be the id of an invocation"),
        ("tool", {"invocation_id": ".hidden"}, "beginning with a letter or a digit"),
        ("tool", {"invocation_id": "a/b"}, "it names a folder"),
        ("tool", {"invocation_id": "a\nb"}, "printable"),
        ("tool", {"invocation_id": "inv_1\n"}, "printable"),
        ("tool", {"invocation_id": "a" * 129}, "128 at most"),
        ("tool", {"invocation_id": "é"}, "it names a folder"),
        ("tool", {"invocation_id": ""}, "invocation_id is not a text"),
        ("tool", {"session_id": 3}, "session_id is not a text"),
        ("tool", {"session_id": "s" * 257}, "session_id is not a text"),
        ("tool", {"agent_id": "x"}, "agent_id"),
        ("tool", {"attempt": 2}, "attempt"),
        ("compactor", {"tool_execution_id": "x"}, "tool_execution_id"),
        ("hook", {"attempt": 0}, "attempt is not an integer"),
        ("hook", {"attempt": True}, "attempt is not an integer"),
        ("hook", {"attempt": "2"}, "attempt is not an integer"),
        ("hook", {"attempt": 2**31}, "from 1 to 2147483647: correct it in --context"),
        ("hook", {"trace_id": ""}, "correct it in --context"),
        ("tool", {"delivery_id": "del_1"}, "which is an option of its own: give --delivery-id"),
    ],
)
def test_a_wrong_context(kind: Kind, context: dict[str, Any], said: str) -> None:
    with pytest.raises(CallRefused) as refused:
        ids(kind, context)
    assert refused.value.event.code == f"{kind}.invalid_input"
    assert said in refused.value.event.message


@pytest.mark.parametrize("name", ["a", "inv_123", "A.b-c_d", "0" * 128])
def test_a_right_invocation_id(name: str) -> None:
    assert ids("tool", {"invocation_id": name})["invocation_id"] == name


def test_a_delivery_is_a_hooks() -> None:
    assert ids("hook", {"delivery_id": "del_1"})["delivery_id"] == "del_1"
    with pytest.raises(CallRefused) as refused:
        ids("tool", delivery_id="del_1")
    assert "--delivery-id is for hooks" in refused.value.event.message


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(CallRefused) as refused:
        ids("hook", delivery_id="del\n1")
    assert refused.value.event.message.endswith("correct --delivery-id")


def test_keys_that_do_not_apply_are_left_out() -> None:
    known = {"invocation_id": "inv_1", "trace_id": "tr_1", "tool_execution_id": "x"}
    plain = {"invocation_id": "inv_1", "trace_id": "tr_1", "deadline_at": "2026-03-12T19:00:00.250Z"}
    assert describe(known, PLAIN, NOW) == plain
    assert describe(known, TOOL, NOW) == {**plain, "secrets_dir": "/sandbox/secrets"}
    assert describe(known, COMPACTOR, NOW) == {**plain, "scratch_dir": "/sandbox/scratch/inv_1"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (NOW, "2026-03-12T19:00:00.250Z"),
        (1e300, "9999-12-31T23:59:59.000Z"),
        (float("inf"), "9999-12-31T23:59:59.000Z"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text
    assert is_timestamp(text)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("2026-03-12T19:00:00Z", True),
        ("2026-03-12t19:00:00.123456789+05:30", True),
        ("2026-03-12T19:00:00", False),
        ("2026-03-12 19:00:00Z", False),
        ("20260312T190000Z", False),
        ("2026-02-30T19:00:00Z", False),
        ("2026-03-12T25:00:00Z", False),
        ("2026-03-12T19:00:00Z\n", False),
        ("now", False),
        (3, False),
        (None, False),
    ],
)
def test_timestamps_are_told_from_other_texts(text: Any, right: bool) -> None:
    assert is_timestamp(text) is right


# --- credentials -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://api.example.com", "api.example.com:443"),
        ("HTTPS://API.example.com:8443/v1/", "api.example.com:8443"),
        ("https://[2001:db8::1]/x", "[2001:db8::1]:443"),
        ("http://localhost:8080", "localhost:8080"),
        ("http://127.0.0.1", "127.0.0.1:80"),
        ("http://[::1]:81", "[::1]:81"),
    ],
)
def test_a_gateways_url(url: str, host: str) -> None:
    assert api_gateway_host(url) == host
    assert make_api_gateway(url, "t", ["a"])["base_url"] == url


@pytest.mark.parametrize(
    "url",
    [
        *("", "api.example.com", "https://", "ftp://x.example", "file:///etc", "https:/x.example", None, 3),
        *("http://api.example.com", "http://127.evil.example", "http://10.0.0.1", "http://0x7f000001"),
        *("https://user@x.example", "https://x.example?q=1", "https://x.example#f", "https://x.example?"),
        *("https://x.example:0", "https://x.example:99999", "https://x.example:a", "https://[::1"),
        *("https://a b.example", "https://x.example\n", "https://x.example\\@y.example", "https://é.example"),
        "https://x.example/" + "a" * 2048,
    ],
)
def test_a_url_that_no_gateway_has(url: Any) -> None:
    with pytest.raises(ValueError, match=r"^(is|has) "):
        api_gateway_host(url)
    with pytest.raises(CallRefused) as refused:
        make_api_gateway(url, "t", ["a"])
    assert refused.value.event.code == INVALID_DELEGATION


@pytest.mark.parametrize("token", ["", "two words", "line\n", "é", "a\0b", "x" * 20_000, None, 3])
def test_a_token_that_cannot_be_sent(token: Any) -> None:
    with pytest.raises(CallRefused) as refused:
        make_api_gateway("https://x.example", token, ["a"])
    assert refused.value.event.code == INVALID_DELEGATION
    assert not token or str(token) not in refused.value.event.message


def test_a_token_is_sent_and_not_shown() -> None:
    gateway = make_api_gateway("https://x.example", "vai_dlg_1234", ("a", "b"))
    assert "vai_dlg" not in repr(gateway)
    assert "vai_dlg" not in str(gateway)
    assert gateway["delegation_token"] == "vai_dlg_1234"
    for text in (encode(gateway).decode(), json.dumps(gateway), json.dumps(gateway, indent=1)):
        assert json.loads(text) == {
            "base_url": "https://x.example",
            "delegation_token": "vai_dlg_1234",
            "scopes": ["a", "b"],
        }
    assert isinstance(gateway["delegation_token"], HiddenText)
