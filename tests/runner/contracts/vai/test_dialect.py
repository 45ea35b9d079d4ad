"""The conversation with a vai plugin, as tables: a frame of the plugin's, and what comes of it.

§ and A are the numbers of the contract's rules and of its open questions, as this project reads them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner import __version__
from runner.contracts.registry import make_dialect
from runner.contracts.vai import CONTRACT
from runner.contracts.vai.messages import BODY_LIMIT
from runner.protocol.dialect import (
    NEVER_SENT,
    Answer,
    Call,
    CallRefused,
    LateAnswer,
    Notice,
    Progress,
    Ready,
    Refusal,
    Reply,
    Setting,
    Violation,
)
from tests.runner.contracts.vai.conversation import (
    BODY,
    COMPACTOR,
    CONTENT,
    DEVKIT,
    HARNESS,
    HELLO,
    HOOK,
    HOST_HELLO,
    TOKEN,
    TOOL,
    WHO,
    called,
    dialect,
    event,
    frame,
    hear,
    ready,
    response,
    sent,
    succeeded,
)
from tests.tables import check_rows


def breach(events: Any) -> tuple[str, str]:
    """Code and cause of the one violation that ends the conversation."""
    (violation,) = events
    assert isinstance(violation, Violation) and violation.call is None, violation
    assert violation.message
    return violation.code, violation.cause


# --- §4, A4, A5: hello --------------------------------------------------------------------------------------


def test_the_host_says_hello_at_once() -> None:
    assert sent(dialect().opening()) == [
        {
            "protocol": "vai.rpc.v1",
            "type": "hello",
            "role": "host",
            "host": {"name": "runner", "version": __version__},
        }
    ]
    assert dialect().handshake_seconds == 10.0
    assert isinstance(make_dialect(CONTRACT, Setting(DEVKIT)), type(dialect()))


@pytest.mark.parametrize("plugin_first", [False, True])
def test_hello_in_either_order(plugin_first: bool) -> None:
    conversation = dialect()
    if not plugin_first:
        assert len(sent(conversation.opening())) == 1
    (came,) = hear(conversation, {**HELLO, "more": {"is": "ignored"}})
    assert isinstance(came, Ready)
    who = came.identity
    assert (who.id, who.version, who.protocol) == ("acme/devkit", "0.1.0", "vai.rpc.v1")
    assert who.tools == ("jira_search", "tail")
    if plugin_first:
        with pytest.raises(CallRefused):  # nothing is sent before our own hello
            conversation.call(1, TOOL)
        assert len(sent(conversation.opening())) == 1
    assert [each["type"] for each in sent(conversation.call(1, TOOL))] == ["request"]


HANDSHAKES = {
    "another package": (
        {"plugin": {**WHO, "package_id": "acme/other"}},
        "handshake_failed",
        "identity_mismatch",
    ),
    "another version": ({"plugin": {**WHO, "version": "0.1.1"}}, "handshake_failed", "identity_mismatch"),
    "a longer version": ({"plugin": {**WHO, "version": "0.1.0 "}}, "handshake_failed", "identity_mismatch"),
    "no package": ({"plugin": {"version": "0.1.0"}}, "handshake_failed", "invalid_frame"),
    "no version": ({"plugin": {"package_id": "acme/devkit"}}, "handshake_failed", "invalid_frame"),
    "a number as version": ({"plugin": {**WHO, "version": 1}}, "handshake_failed", "invalid_frame"),
    "no plugin": ({"plugin": None}, "handshake_failed", "invalid_frame"),
    "an array as plugin": ({"plugin": ["acme/devkit", "0.1.0"]}, "handshake_failed", "invalid_frame"),
    "no role": ({"role": None}, "handshake_failed", "invalid_frame"),
    "our own hello": ({"role": "host"}, "handshake_failed", "unexpected_frame"),
    "another protocol": ({"protocol": "vai.rpc.v2"}, "protocol_version_mismatch", "unsupported_version"),
    "capital letters": ({"protocol": "VAI.RPC.V1"}, "protocol_version_mismatch", "unsupported_version"),
    "no protocol": ({"protocol": None}, "malformed_response", "invalid_frame"),
    "a number as protocol": ({"protocol": 1}, "malformed_response", "invalid_frame"),
    "no type": ({"type": None}, "malformed_response", "invalid_frame"),
    "a response first": ({"type": "response", "id": "req_1"}, "handshake_failed", "unexpected_frame"),
    "an event first": ({"type": "event"}, "handshake_failed", "unexpected_frame"),
    "a request first": ({"type": "request"}, "handshake_failed", "unexpected_frame"),
    "an unknown type first": ({"type": "ready"}, "handshake_failed", "unexpected_frame"),
}


@pytest.mark.parametrize("plugin_first", [False, True])
def test_a_hello_that_is_refused(plugin_first: bool) -> None:
    def check(_: str, row: tuple[dict[str, Any], str, str]) -> None:
        conversation = dialect()
        if not plugin_first:
            conversation.opening()
        assert breach(hear(conversation, {**HELLO, **row[0]})) == row[1:]
        # Nothing else is sent, and nothing more counts.
        assert hear(conversation, HELLO, succeeded()) == []
        assert conversation.opening() == ()
        assert conversation.shutdown_steps().frames == ()

    check_rows(HANDSHAKES, check)


def test_the_claimed_package_is_kept_for_the_report() -> None:
    (violation,) = hear(dialect(), {**HELLO, "plugin": {**WHO, "package_id": "x" * 1000}})
    assert isinstance(violation, Violation)
    assert violation.plugin_id == "x" * 199 + "…"
    assert "package_id" in violation.hint


def test_a_long_event_before_hello() -> None:
    long = event(message="x" * 100_000)
    assert breach(hear(dialect(), long)) == ("handshake_failed", "unexpected_frame")


# --- §3: frames that end the conversation -------------------------------------------------------------------

BREACHES = {
    "not JSON": (b"hello", "bad_json"),
    "nothing but blanks": (b" ", "bad_json"),
    "an array": (b"[]", "invalid_frame"),
    "a number": (b"7", "invalid_frame"),
    "not UTF-8": (b'{"protocol": "\xff"}', "bad_json"),
    "something behind it": (json.dumps(succeeded()).encode() + b" {}", "bad_json"),
    "a byte order mark": (b"\xef\xbb\xbf" + json.dumps(succeeded()).encode(), "bom"),
    "too deep": (b"[" * 200_000, "too_deep"),
    "NaN": (b'{"protocol": NaN}', "bad_number"),
    "a number beyond 64 bits": (b'{"protocol": 18446744073709551616}', "bad_number"),
    "a number of 5000 digits": (b'{"protocol": %b}' % (b"9" * 5000), "bad_number"),
    "the id twice": (b'{"id": "req_1", ' + json.dumps(succeeded()).encode()[1:], "duplicate_key"),
    "ok twice": (b'{"ok": false, ' + json.dumps(succeeded()).encode()[1:], "duplicate_key"),
    "another protocol": ({**succeeded(), "protocol": "vai.rpc.v2"}, "unsupported_version"),
    "no protocol": ({"type": "response", "id": "req_1"}, "invalid_frame"),
    "no type": ({"protocol": "vai.rpc.v1"}, "invalid_frame"),
    "a number as type": (frame("response") | {"type": 1}, "invalid_frame"),
    "an unknown type": (frame("log", message="x"), "unexpected_frame"),
    "a type in capital letters": (frame("Response", id="req_1"), "unexpected_frame"),
    "a second hello": (HELLO, "unexpected_frame"),
    "our hello": (HOST_HELLO, "unexpected_frame"),
    "a request": (frame("request", id="p1", op="tool.invoke", body={}), "unexpected_frame"),
    "a cancel": (frame("cancel", request_id="req_1"), "unexpected_frame"),
    "a shutdown": (frame("shutdown"), "unexpected_frame"),
    "a response without id": (frame("response", ok=True, body={}), "invalid_frame"),
    "an event without request_id": (frame("event", event={"type": "progress"}), "invalid_frame"),
    "an event with a number": (event(1), "invalid_frame"),
    "a long event with a number": (event(1, message="x" * 100_000), "invalid_frame"),
    "an event that is text": (frame("event", request_id="req_1", event="working"), "invalid_frame"),
    "an event without type": (frame("event", request_id="req_1", event={}), "invalid_frame"),
    "a type of an event that is no text": (event(kind=["progress"]), "invalid_frame"),
}


@pytest.mark.parametrize("is_open", [False, True])
def test_a_frame_that_ends_the_conversation(is_open: bool) -> None:
    def check(_: str, row: tuple[Any, str]) -> None:
        conversation = called() if is_open else ready()
        assert breach(hear(conversation, row[0])) == ("malformed_response", row[1])
        assert hear(conversation, succeeded(), row[0]) == []

    check_rows(BREACHES, check)


# While a request is open, and before the first: A34, and unknown ids. Between two requests they harm nobody.
STRANGERS = {
    "a response to an unknown id": succeeded("req_2"),
    "a response to an older id that was none": succeeded("req_0"),
    "digits that only look alike": succeeded("req_\u0661"),
    "a response to a long id": succeeded("req_" + "9" * 5000),
    "the id as a number": succeeded(1),
    "an id that is null": succeeded(None),
    "an array as id": succeeded(["req_1"]),
    "an event for an unknown request": event("req_2"),
    "a long event for an unknown request": event("req_2", message="x" * 100_000),
}


def test_a_frame_for_a_request_that_never_was() -> None:
    def check(_: str, stranger: Any) -> None:
        conversation = called()
        assert breach(hear(conversation, stranger)) == ("malformed_response", "unexpected_frame")
        assert breach(hear(ready(), stranger)) == ("malformed_response", "unexpected_frame")
        idle = called()
        hear(idle, succeeded())
        later = {
            key: value.replace("req_2", "req_3") if isinstance(value, str) else value
            for key, value in stranger.items()
        }
        (notice,) = hear(idle, later)
        assert isinstance(notice, Notice) and notice.value["reason"] == "unexpected_frame"
        assert idle.counters["unexpected"] == 1 and "were dropped" in idle.noise
        idle.call(TOKEN + 1, TOOL)  # it lives on
        assert [type(each) for each in hear(idle, succeeded("req_2"))] == [Reply]

    check_rows(STRANGERS, check)


def test_an_answer_before_the_question_is_a_violation() -> None:
    """As an inspector judges it: the id of the next request can be guessed."""
    for early in (succeeded("req_1"), event("req_1")):
        conversation = ready()
        assert conversation.noise == ""
        assert breach(hear(conversation, early)) == ("malformed_response", "unexpected_frame")
        with pytest.raises(CallRefused):
            conversation.call(TOKEN, TOOL)


# --- requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "operation", "grace", "given_up", "seconds"),
    [
        (TOOL, "tool.invoke", 2.0, 0.3, 20.0),
        (HOOK, "hook.handle", 2.0, 0.3, 15.0),
        (COMPACTOR, "compactor.compact", 5.0, 0.3, 120.0),
        (HARNESS, "harness.run", 10.0, 10.0, 1800.0),  # it may answer with a checkpoint
    ],
)
def test_a_request(call: Call, operation: str, grace: float, given_up: float, seconds: float) -> None:
    conversation = ready()
    (request,) = sent(conversation.call(TOKEN, call))
    assert request == frame("request", id="req_1", op=operation, body=call.input)
    assert (conversation.grace(call), conversation.seconds(call)) == (grace, seconds)
    assert conversation.given_up_grace(call) == given_up
    assert ready(options={"timeout": "1.5"}).seconds(call) == 1.5


@pytest.mark.parametrize("timeout", ["", "soon", "nan", "inf", "-1", "0"])
def test_a_timeout_that_is_none_is_the_exports(timeout: str) -> None:
    assert ready(options={"timeout": timeout}).seconds(TOOL) == 20.0


def test_one_request_at_a_time() -> None:
    """A8."""
    conversation = called()
    with pytest.raises(CallRefused) as refused:
        conversation.call(TOKEN + 1, HOOK)
    fault = refused.value.event
    assert isinstance(fault, Violation)
    assert (fault.code, fault.cause, fault.call) == ("overloaded", "busy", TOKEN + 1)
    assert hear(conversation, succeeded()) == [Reply(TOKEN, {"content": CONTENT})]
    (second,) = sent(conversation.call(TOKEN + 1, HOOK))
    assert second["id"] == "req_2"
    assert hear(conversation, response({"status": "ack"}, "req_2")) == [Reply(TOKEN + 1, {"status": "ack"})]


REFUSED_CALLS: dict[str, tuple[Call, str]] = {
    "another kind": (Call("list", "tools", {}), "unsupported"),
    "a kind that was not chosen": (Call("export", "jira_search", BODY), "unsupported"),
    "not prepared": (Call("tool", "jira_search", None), "not_prepared"),
    "not JSON": (Call("tool", "jira_search", {"input": object()}), "not_json"),
    "no number": (Call("tool", "jira_search", {"input": float("nan")}), "not_json"),
    "too large": (Call("tool", "jira_search", {"input": "x" * BODY_LIMIT}), "too_large"),
}


def test_a_call_that_is_not_sent() -> None:
    def check(_: str, row: tuple[Call, str]) -> None:
        conversation = ready()
        with pytest.raises(CallRefused) as refused:
            conversation.call(TOKEN, row[0])
        fault = refused.value.event
        assert (fault.kind if isinstance(fault, Refusal) else fault.cause) == row[1]
        assert sent(conversation.call(TOKEN, TOOL))[0]["id"] == "req_1"  # nothing is open

    check_rows(REFUSED_CALLS, check)


def test_the_largest_request() -> None:
    spare = len(
        json.dumps(frame("request", id="req_1", op="tool.invoke", body={"i": ""}), separators=(",", ":"))
    )
    (request,) = sent(ready().call(TOKEN, Call("tool", "jira_search", {"i": "x" * (BODY_LIMIT - spare)})))
    assert len(json.dumps(request, separators=(",", ":"))) == BODY_LIMIT


def test_a_plugin_is_told_nothing_and_asks_nothing() -> None:
    with pytest.raises(CallRefused):
        ready().notify("anything", {})
    assert (ready().answer(1, Answer()), ready().emit(1, {}), ready().silence()) == ((), (), ())
    assert ready().health_check is None and not ready().one_shot


# --- A33, §8: after the response ----------------------------------------------------------------------------


def test_messages_after_the_response_are_counted() -> None:
    """The first response wins. A second one and late events are counted, and end nothing."""
    conversation = called()
    assert hear(conversation, succeeded()) == [Reply(TOKEN, {"content": CONTENT})]
    after = (succeeded(other=True), event(message="late"), event(kind="chunk", message="x" * 100_000))
    notices = hear(conversation, *after)
    assert [type(each) for each in notices] == [Notice, Notice]  # for the first and the second of three
    assert conversation.counters == {"late": 0, "unexpected": 3, "events": 0, "dropped_events": 0}
    # Also while the next request is open.
    conversation.call(TOKEN + 1, TOOL)
    assert all(isinstance(each, Notice) for each in hear(conversation, succeeded("req_1"), event("req_1")))
    assert conversation.counters["unexpected"] == 5
    assert hear(conversation, succeeded("req_2")) == [Reply(TOKEN + 1, {"content": CONTENT})]


def test_notices_do_not_grow_with_the_plugins_frames() -> None:
    conversation = called()
    hear(conversation, succeeded())
    assert len(hear(conversation, *[succeeded()] * 1000)) == 10  # 1, 2, 4, … 512
    assert conversation.counters["unexpected"] == 1000


# --- §7, A12: cancel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("no answer in time", "deadline_exceeded"),
        ("cancelled by the host", "user_cancelled"),
        ("deadline_exceeded", "deadline_exceeded"),
        ("user_cancelled", "user_cancelled"),
        ("shutdown", "shutdown"),
        ("binding_disabled", "binding_disabled"),
    ],
)
def test_a_cancel(reason: str, told: str) -> None:
    conversation = called()
    assert sent(conversation.cancel(TOKEN, reason)) == [frame("cancel", request_id="req_1", reason=told)]
    assert conversation.cancel(TOKEN, "shutdown") == ()  # at most one


CANCELLED = response({"status": "cancelled", "result": {"checkpoint": {"kind": "checkpoint", "data": 12}}})


def test_the_answer_to_a_cancelled_request_is_its_normal_answer() -> None:
    """A12. The session decides what a success is worth after the deadline (A10)."""
    conversation = called(HARNESS)
    conversation.cancel(TOKEN, "deadline_exceeded")
    (news,) = hear(conversation, event(message="stopping"))
    assert isinstance(news, Progress) and news.call == TOKEN
    (came,) = hear(conversation, CANCELLED)
    assert isinstance(came, Refusal)
    assert (came.call, came.code, came.kind) == (TOKEN, "cancelled", "cancelled")
    assert came.data["result"]["checkpoint"]["data"] == 12

    conversation = called()
    conversation.cancel(TOKEN, "user_cancelled")
    assert hear(conversation, succeeded()) == [Reply(TOKEN, {"content": CONTENT})]
    assert conversation.cancel(TOKEN, "shutdown") == ()  # it is finished


def test_a_request_that_is_not_open_is_not_cancelled() -> None:
    assert ready().cancel(TOKEN, "user_cancelled") == ()
    conversation = called()
    assert conversation.cancel(TOKEN + 1, "user_cancelled") == ()
    hear(conversation, succeeded())
    assert conversation.cancel(TOKEN, "user_cancelled") == ()


def test_a_request_that_never_left_is_forgotten() -> None:
    conversation = called()
    assert conversation.cancel(TOKEN, NEVER_SENT) == ()
    assert sent(conversation.call(TOKEN + 1, TOOL))[0]["id"] == "req_2"


def test_after_the_grace_an_answer_is_late() -> None:
    conversation = called()
    assert conversation.expired(TOKEN, "no answer") == ()  # the plugin is not told yet: it stays open
    assert len(sent(conversation.cancel(TOKEN, "no answer in time"))) == 1
    with pytest.raises(CallRefused):
        conversation.call(TOKEN + 1, TOOL)
    assert conversation.expired(TOKEN + 1, "another") == ()
    assert conversation.expired(TOKEN, "the grace is over") == ()
    conversation.call(TOKEN + 1, TOOL)
    assert hear(conversation, succeeded("req_1")) == [LateAnswer(TOKEN)]
    assert conversation.counters["late"] == 1
    (notice,) = hear(conversation, succeeded("req_1"))  # and a second one is one too many
    assert isinstance(notice, Notice)
    assert hear(conversation, succeeded("req_2")) == [Reply(TOKEN + 1, {"content": CONTENT})]


def test_requests_that_were_given_up_are_remembered_up_to_a_limit() -> None:
    conversation = ready()
    for token in range(1, 101):
        conversation.call(token, TOOL)
        conversation.cancel(token, "user_cancelled")
        conversation.expired(token, "")
    assert [type(each) for each in hear(conversation, succeeded("req_1"), succeeded("req_100"))] == [
        Notice,
        LateAnswer,
    ]


# --- A13: shutdown ------------------------------------------------------------------------------------------


def test_a_shutdown() -> None:
    conversation = ready()
    for shutdown_steps in (conversation.shutdown_steps(), conversation.shutdown_steps()):
        assert sent(shutdown_steps.frames) == [{"protocol": "vai.rpc.v1", "type": "shutdown"}]
        assert (shutdown_steps.answer, shutdown_steps.exit, shutdown_steps.terminate) == (0.0, 5.0, 1.0)
        assert not shutdown_steps.counts  # how it exits is no part of an answer
    with pytest.raises(CallRefused):
        conversation.call(TOKEN, TOOL)


def test_after_the_shutdown_nothing_is_a_violation() -> None:
    conversation = called()
    conversation.shutdown_steps()
    assert [type(each) for each in hear(conversation, b"bye", HELLO, succeeded("req_7"))] == [Notice, Notice]
    assert conversation.counters["unexpected"] == 3
    assert conversation.cancel(TOKEN, "shutdown") == ()
    assert hear(conversation, succeeded()) == [Reply(TOKEN, {"content": CONTENT})]


# --- §3: the limit of a frame can be set --------------------------------------------------------------------


def test_the_limit_of_a_frame() -> None:
    small, usual = ready(options={"frame_limit": "2K"}), ready()
    raw = json.dumps(succeeded(text="x" * 3000)).encode()
    framed = b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw)
    for conversation, fault in ((small, "frame_too_large"), (usual, None)):
        framer = conversation.framer()
        assert len(framer.feed(framed)) == (0 if fault else 1)
        assert (framer.fault.cause if framer.fault else None) == fault
    with pytest.raises(CallRefused) as caught:
        small.call(TOKEN, TOOL._replace(input={**BODY, "input": "x" * 3000}))
    assert (
        caught.value.event.code == "asset.payload_too_large" and "at most 2048" in caught.value.event.message
    )
    assert sent(small.call(TOKEN, TOOL))  # the control: a short one fits
