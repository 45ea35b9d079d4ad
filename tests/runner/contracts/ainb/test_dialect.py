"""The conversation with an ainb plugin, as tables: a frame of the plugin's, and what comes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.contracts.ainb import CONTRACT
from runner.contracts.ainb.messages import BODY_LIMIT
from runner.contracts.contract import CommandOutput
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    HostCall,
    Notice,
    Ready,
    Refusal,
    Reply,
    Send,
    Violation,
)
from sandbox.spec import Limits
from tests.runner.contracts.ainb.conversation import (
    BURNDOWN,
    DECLARED,
    ONE_CELL,
    WELCOME,
    answer,
    ask,
    b64,
    dialect,
    error,
    hear,
    lanes,
    plugin,
    ready,
    sent,
    tell,
)

TOOL = Call("tool", "burn", {"argv": ["a", "b"]})
RENDER = Call("render", "burn", {"width": 80, "height": 24})
DONE = {"stdout": b64("out\n"), "stderr": "", "exit_code": 0}


def opened(**setting: Any) -> Any:
    conversation = dialect(**setting)
    conversation.opening()
    return conversation


# --- §6 plugin/init -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, {"theme": "dark"}, [1], "x"])
def test_the_first_request(config: Any) -> None:
    (request,) = sent(dialect(config=config).opening())
    assert request == {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "plugin/init",
        "params": {
            "manifest_path": "/p/burndown/manifest.toml",
            "granted_capabilities": ["event_bus", "read_paths"],
            "abi_version": 2,
            "config": config,
            "host": {"kind": "cli", "pid": 1},
        },
    }


def test_a_configuration_that_does_not_fit_a_frame_is_not_sent() -> None:
    (violation,) = dialect(config={"x": "y" * BODY_LIMIT}).opening()
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause) == ("handshake_failed", "config_invalid")


# The answer as the contract's text has it.
TEXT: dict[str, Any] = {"manifest": {"plugin": WELCOME}, "abi_version": 2}


def said(**tables: Any) -> dict[str, Any]:
    return {**TEXT, "manifest": {"plugin": WELCOME, **tables}}


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (None, "malformed"),
        ([], "malformed"),
        ({"name": "burndown"}, "malformed"),
        ({"version": "2.0.0"}, "malformed"),
        ({"name": 1, "version": "2.0.0"}, "malformed"),
        ({"name": "burndown", "version": 2}, "malformed"),
        ({"name": "other", "version": "2.0.0"}, "identity_mismatch"),
        ({"name": "", "version": "2.0.0"}, "identity_mismatch"),
        # The form of the contract's text: what it says has to agree with the manifest, and with itself.
        ({**TEXT, "manifest": []}, "malformed"),
        ({**TEXT, "manifest": {}}, "malformed"),
        ({**TEXT, "manifest": {"plugin": 1}}, "malformed"),
        ({**TEXT, "manifest": {"plugin": {"name": "burndown"}}}, "malformed"),
        ({"manifest": TEXT["manifest"]}, "malformed"),  # it has to say its ABI
        ({**TEXT, "abi_version": True}, "malformed"),
        ({**TEXT, "abi_version": None}, "malformed"),
        ({**TEXT, "abi_version": 3}, "identity_mismatch"),
        (said(plugin={**WELCOME, "abi_version": 1}), "identity_mismatch"),
        (said(plugin={**WELCOME, "name": "other"}), "identity_mismatch"),
        (said(plugin={**WELCOME, "version": "2.1.0"}), "identity_mismatch"),
        ({**TEXT, "name": "other"}, "identity_mismatch"),
        ({**WELCOME, "abi_version": 3}, "identity_mismatch"),
        (said(capabilities={"network": True}), "identity_mismatch"),
        (said(capabilities={"event_bus": ["x"]}), "identity_mismatch"),
        (said(capabilities={"event_bus": 1}), "identity_mismatch"),
        (said(provides={"cli_namespaces": ["burn"]}), "identity_mismatch"),
        (said(subscribes={"snapshots": []}), "identity_mismatch"),
        (said(lifecycle={"spawn": "eager"}), "identity_mismatch"),
    ],
)
def test_an_answer_that_does_not_fit_the_manifest(result: Any, cause: str) -> None:
    conversation = opened()
    (violation,) = hear(conversation, answer(1, result))
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause) == ("handshake_failed", cause)
    assert hear(conversation, answer(1, WELCOME), tell("host/log")) == []  # nothing more counts


def test_the_answer() -> None:
    """Rule 1: name and version, whatever else there is."""
    whole = said(
        plugin={**WELCOME, "abi_version": 2, "description": "Another one."},
        capabilities={"event_bus": True, "network": [], "read_paths": list(DECLARED.lists["read_paths"])},
        provides={"cli_namespaces": ["usage", "burn"], "commands": ["refresh"]},
        subscribes={"snapshots": ["sessions.usage"]},
        lifecycle={"spawn": "lazy", "idle_reap_secs": 600},
        later={"x": 1},
    )
    unset = {**WELCOME, "manifest": None, "abi_version": None}
    for result in ({**WELCOME, "manifest": {}, "more": 7}, unset, TEXT, whole, {**WELCOME, **whole}):
        (came,) = hear(opened(), answer(1, result))
        assert isinstance(came, Ready), result
        identity = came.identity
        assert (identity.id, identity.version, identity.protocol) == ("burndown", "2.0.0", "2")
        assert identity.tools == ("burn", "usage")


def test_another_version_is_a_notice() -> None:
    notice, came = hear(opened(), answer(1, {"name": "burndown", "version": "2.1.0"}))
    assert notice == Notice("version_differs", {"manifest": "2.0.0", "plugin": "2.1.0"})
    assert isinstance(came, Ready)


def test_an_error_is_a_refusal_of_the_handshake() -> None:
    (violation,) = hear(opened(), error(1, -32003, "its manifest\x1b does not parse"))
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause) == ("handshake_failed", "refused")
    assert violation.message == "it refuses plugin/init: its manifest\\x1b does not parse (-32003)"


def test_an_error_of_ours_that_the_plugin_passes_on_is_no_echo() -> None:
    """Both sides count from 1. A plugin whose request was refused answers plugin/init with that error."""
    conversation = opened()
    (asked,) = hear(conversation, ask(1, "host/snapshot/subscribe", {"topic": "t"}))
    assert isinstance(asked, HostCall)
    denied = (-32001, "capability denied: event_bus", None)
    (reply,) = sent(conversation.answer(asked.ticket, Answer(error=denied)))
    (violation,) = hear(conversation, {**reply, "jsonrpc": "2.0"})
    assert isinstance(violation, Violation)
    assert violation.cause == "refused"


@pytest.mark.parametrize("stage", ["new", "init"])
def test_what_a_plugin_asks_before_and_during_init_is_served(stage: str) -> None:
    """Rule 3, and axis A7: a plugin subscribes inside init, and waits for the reply before it answers."""
    conversation = dialect() if stage == "new" else opened()
    published, subscribed = hear(
        conversation,
        tell("host/snapshot/publish", {"topic": "t", "payload": ""}),
        ask(1, "host/snapshot/subscribe", {"topic": "t"}),
    )
    assert isinstance(published, HostCall) and isinstance(subscribed, HostCall)
    assert (published.method, published.expects_answer) == ("host/snapshot/publish", False)
    assert (subscribed.method, subscribed.expects_answer) == ("host/snapshot/subscribe", True)
    events = conversation.answer(subscribed.ticket, Answer({}))
    assert (sent(events), lanes(events)) == ([{"jsonrpc": "2.0", "id": 1, "result": {}}], ["reply"])
    if stage == "init":
        assert isinstance(hear(conversation, answer(1, WELCOME))[-1], Ready)


# --- §5 bodies that are no messages -------------------------------------------------------------------------

CALLED = 2  # the id of the first call


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        b"[]",
        b'[{"jsonrpc":"2.0","id":2,"result":null}]',
        b"7",
        b"null",
        b'{"jsonrpc":"2.0","id":2,"result":null} x',
        b'{"jsonrpc":"2.0","id":2,"result":null}{}',
        b'\xef\xbb\xbf{"jsonrpc":"2.0","id":2,"result":null}',
        b'{"jsonrpc":"2.0","id":2,"result":"\xff"}',
        b'{"jsonrpc":"2.0","id":2,"result":NaN}',
        b'{"jsonrpc":"2.0","id":2,"result":' + b"[" * 129 + b"]" * 129 + b"}",
        b'{"id":2,"result":null}',
        b'{"jsonrpc":"1.0","id":2,"result":null}',
        b'{"jsonrpc":2.0,"id":2,"result":null}',
        b'{"jsonrpc":null,"id":2,"result":null}',
        b'{"jsonrpc":"2.0","id":"2","result":null}',
        b'{"jsonrpc":"2.0","id":2.0,"result":null}',
        b'{"jsonrpc":"2.0","id":-2,"result":null}',
        b'{"jsonrpc":"2.0","id":true,"result":null}',
        b'{"jsonrpc":"2.0","id":[2],"result":null}',
        b'{"jsonrpc":"2.0","id":18446744073709551616,"result":null}',
        b'{"jsonrpc":"2.0","id":2,"id":2,"result":null}',
        b'{"jsonrpc":"2.0","jsonrpc":"2.0","id":2,"result":null}',
        b'{"jsonrpc":"2.0","id":2,"result":1,"result":1}',
        b'{"jsonrpc":"2.0","method":"host/log","params":{},"params":{}}',
        b'{"jsonrpc":"2.0","result":null}',
        b'{"jsonrpc":"2.0","id":null,"result":null}',
        b'{"jsonrpc":"2.0"}',
        b'{"jsonrpc":"2.0","method":7}',
        b'{"jsonrpc":"2.0","method":["host/log"]}',
        b'{"jsonrpc":"2.0","method":"host/log","id":"1"}',
        b'{"jsonrpc":"2.0","method":"host/log","id":1.0}',
        b'{"jsonrpc":"2.0","id":2,"error":"no"}',
        b'{"jsonrpc":"2.0","id":2,"error":{"message":"no"}}',
        b'{"jsonrpc":"2.0","id":2,"error":{"code":-32001}}',
        b'{"jsonrpc":"2.0","id":2,"error":{"code":"1","message":"no"}}',
        b'{"jsonrpc":"2.0","id":2,"error":{"code":1.0,"message":"no"}}',
        b'{"jsonrpc":"2.0","id":2,"error":{"code":2147483648,"message":"no"}}',
        b'{"jsonrpc":"2.0","id":2,"error":{"code":-32001,"message":null}}',
    ],
)
def test_a_frame_that_is_no_message_is_dropped_and_nothing_else_happens(raw: bytes) -> None:
    conversation = ready()
    conversation.call(7, TOOL)
    (notice,) = hear(conversation, raw)
    assert isinstance(notice, Notice) and notice.kind == "dropped"
    assert conversation.counters["frames_dropped"] == 1
    # The call is still open, and the connection up.
    (reply,) = hear(conversation, answer(CALLED, DONE))
    assert isinstance(reply, Reply)


def test_a_call_that_times_out_says_what_was_dropped() -> None:
    conversation = ready()
    assert conversation.noise == ""
    hear(conversation, b"hello", {"jsonrpc": "2.0", "id": "2", "result": {}})
    why = "its id is not an integer from 0 to 2^64-1"
    assert conversation.noise == f"2 of its frames were dropped, the last one because {why}"


def test_notices_of_dropped_frames_are_bounded() -> None:
    conversation = ready()
    events = [event for _ in range(1000) for event in hear(conversation, b"hello")]
    assert [event.value["count"] for event in events if isinstance(event, Notice)] == [
        *(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    ]
    assert conversation.counters["frames_dropped"] == 1000


# --- §5 routing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "expects_answer"),
    [
        ({"method": "host/log"}, False),
        ({"method": "host/log", "id": None}, False),
        ({"method": "host/log", "id": 0}, True),
        ({"method": "host/log", "id": 2**64 - 1}, True),
        ({"method": "host/log", "id": CALLED, "result": {}}, True),  # an id of ours is not an answer to it
        ({"method": "host/log", "id": CALLED, "error": {"code": 1, "message": ""}}, True),
        ({"method": "host/log", "result": 1, "extra": 2}, False),
    ],
)
def test_a_method_wins(message: dict[str, Any], expects_answer: bool) -> None:
    conversation = ready()
    conversation.call(7, TOOL)
    (asked,) = hear(conversation, {"jsonrpc": "2.0", **message})
    assert isinstance(asked, HostCall)
    assert (asked.method, asked.params, asked.expects_answer) == ("host/log", None, expects_answer)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"result": DONE}, Reply),
        ({"result": DONE, "error": None}, Reply),
        ({"result": DONE, "method": None, "extra": 1}, Reply),
        ({}, Violation),  # no result counts as null, and that is no result of this call
        ({"result": DONE, "error": {"code": -32001, "message": "no"}}, Refusal),
        ({"error": {"code": -(2**31), "message": ""}}, Refusal),
    ],
)
def test_answers(message: dict[str, Any], expected: type) -> None:
    conversation = ready()
    conversation.call(7, TOOL)
    (event,) = hear(conversation, {"jsonrpc": "2.0", "id": CALLED, **message})
    assert isinstance(event, expected)


@pytest.mark.parametrize(("number", "counter"), [(1, "late"), (CALLED, "unknown"), (99, "unknown")])
def test_stray_answers_are_counted(number: int, counter: str) -> None:
    conversation = ready()
    assert hear(conversation, answer(number, {}), error(number, 1)) == []
    assert conversation.counters[counter] == 2


def test_a_notification_gets_no_answer() -> None:
    conversation = ready()
    (told,) = hear(conversation, tell("host/unknown"))
    assert isinstance(told, HostCall)
    assert conversation.answer(told.ticket, Answer(error=(-32601, "no", None))) == ()


# --- §6 plugin/cli_dispatch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "argv"),
    [(None, []), ({"argv": []}, []), ({"argv": ["--help", "", "ü"]}, ["--help", "", "ü"])],
)
def test_a_tool_is_a_namespace(given: Any, argv: list[str]) -> None:
    (request,) = sent(ready().call(7, Call("tool", "burn", given)))
    assert request["method"] == "plugin/cli_dispatch"
    assert request["params"] == {"namespace": "burn", "argv": argv}


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (DONE, {"stdout": "out\n", "stderr": "", "exit_code": 0}),
        (
            {"stdout": [104, 105], "stderr": [], "exit_code": -1},
            {"stdout": "hi", "stderr": "", "exit_code": -1},
        ),
        (
            {"stdout": b64(b"\xff\x00"), "stderr": b64("ü"), "exit_code": 2, "more": 1},
            {"stdout": {"base64": "/wA="}, "stderr": "ü", "exit_code": 2},
        ),
    ],
)
def test_the_output_of_a_tool(result: Any, value: Any) -> None:
    conversation = ready()
    conversation.call(7, TOOL)
    assert hear(conversation, answer(CALLED, result)) == [Reply(7, value)]


@pytest.mark.parametrize(
    "result",
    [
        None,
        [],
        {},
        {**DONE, "exit_code": None},
        {**DONE, "exit_code": "0"},
        {**DONE, "exit_code": 0.0},
        {**DONE, "exit_code": True},
        {**DONE, "exit_code": 2**31},
        {**DONE, "stdout": None},
        {**DONE, "stdout": "aGk"},  # without its padding
        {**DONE, "stdout": "aG k="},
        {**DONE, "stdout": "aGl="},  # bits behind the last byte
        {**DONE, "stdout": "-_8="},  # the other alphabet
        {**DONE, "stderr": [256]},
        {**DONE, "stderr": [-1]},
        {**DONE, "stderr": [True]},
    ],
)
def test_output_that_is_none_fails_that_call_only(result: Any) -> None:
    conversation = ready()
    conversation.call(7, TOOL)
    conversation.call(8, TOOL)
    (violation,) = hear(conversation, answer(CALLED, result))
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause, violation.call) == ("malformed_response", "bad_result", 7)
    (reply,) = hear(conversation, answer(CALLED + 1, DONE))
    assert isinstance(reply, Reply) and reply.call == 8


@pytest.mark.parametrize(
    ("value", "output"),
    [
        ({"stdout": "a", "stderr": "ü", "exit_code": 0}, CommandOutput(b"a", "ü".encode(), 0)),
        ({"stdout": {"base64": "/w=="}, "stderr": "", "exit_code": 255}, CommandOutput(b"\xff", b"", 255)),
        # What a shell cannot see of an exit code must not look like success.
        ({"stdout": "", "stderr": "", "exit_code": 256}, CommandOutput(b"", b"", 1)),
        ({"stdout": "", "stderr": "", "exit_code": -1}, CommandOutput(b"", b"", 255)),
    ],
)
def test_the_output_of_a_tool_as_a_commands(value: Any, output: CommandOutput) -> None:
    assert CONTRACT.command_output(TOOL, value) == output
    assert CONTRACT.command_output(RENDER, value) is None


def test_an_error_of_the_plugin_is_a_refusal() -> None:
    """Axes A4 and A10: the plugin's own error reaches the caller."""
    for number, (code, kind) in enumerate(
        [(-32001, "capability_denied"), (-32601, "method_not_found"), (-5, "plugin_error")], CALLED
    ):
        conversation = ready()
        conversation.call(7, TOOL)
        events = hear(conversation, error(CALLED, code, "why\n", data={"a": number}))
        assert events == [Refusal(7, str(code), "why\\n", kind, {"a": number})]


# --- §6 plugin/render ---------------------------------------------------------------------------------------


def test_renders() -> None:
    conversation = ready()
    first, second = (sent(conversation.call(token, RENDER))[0] for token in (7, 8))
    assert first["params"] == {"viewport": {"width": 80, "height": 24}, "generation": 0}
    assert second["params"]["generation"] == 1
    (reply,) = hear(conversation, answer(CALLED + 1, ONE_CELL))  # not in order
    assert isinstance(reply, Reply) and reply.call == 8
    assert (reply.value["width"], reply.value["height"], reply.value["lines"]) == (1, 1, ["A"])


def test_a_large_answer_is_clipped_to_what_was_asked() -> None:
    """It is decoded in a thread, where nobody knows what was asked."""
    cells = [[{"x": x, "y": y}, {"symbol": "x", "modifier": 0}] for y in range(60) for x in range(200)]
    large: dict[str, Any] = {"buffer": {"width": 200, "height": 60, "cells": cells}, "redraw": True}
    assert len(json.dumps(large)) > 256 << 10
    for result in (large, {**large, "buffer": {**large["buffer"], "cells": cells[:300]}}):
        conversation = ready()
        conversation.call(7, Call("render", "", {"width": 10, "height": 1}))
        (reply,) = hear(conversation, answer(CALLED, result))
        assert isinstance(reply, Reply)
        assert (reply.value["width"], reply.value["height"], reply.value["lines"]) == (10, 1, ["x" * 10])
        shown = len(result["buffer"]["cells"])
        assert (reply.value["clipped"], reply.value["redraw"]) == (shown - 10, True)
    # The same frame is no answer to something else.
    conversation = ready()
    conversation.call(7, TOOL)
    (reply,) = hear(conversation, answer(CALLED, {**large, **DONE}))
    assert isinstance(reply, Reply)


@pytest.mark.parametrize("padding", [0, 300_000])
def test_a_render_that_cannot_be_decoded_fails_alone(padding: int) -> None:
    conversation = ready()
    conversation.call(7, RENDER)
    wrong = {"buffer": {"width": -1, "height": 1, "cells": []}, "pad": "x" * padding}
    (violation,) = hear(conversation, answer(CALLED, wrong))
    assert isinstance(violation, Violation)
    assert (violation.cause, violation.call) == ("bad_result", 7)
    conversation.call(8, RENDER)
    assert isinstance(hear(conversation, answer(CALLED + 1, ONE_CELL))[0], Reply)


# --- §6 host/action/invoke ----------------------------------------------------------------------------------


def test_an_action() -> None:
    conversation = ready(limits=Limits(call=5.0))
    (request,) = sent(conversation.call(7, Call("action", "burn", {"text": "go"})))
    assert request["method"] == "host/action/invoke"
    assert request["params"] == {"action": "burn", "payload": b64("go"), "timeout_ms": 5000}
    assert hear(conversation, answer(CALLED, {"payload": b64("ok")})) == [Reply(7, {"payload": "ok"})]


# --- calls that are not sent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (Call("tool", "other"), "tool_not_exposed"),
        (Call("tool", ""), "tool_not_exposed"),
        (Call("render", "other", {"width": 1, "height": 1}), "tool_not_exposed"),
        (Call("action", "other"), "tool_not_exposed"),
        (Call("tool", "burn", []), "-32602"),
        (Call("tool", "burn", {"argv": "a"}), "-32602"),
        (Call("tool", "burn", {"argv": [1]}), "-32602"),
        (Call("tool", "burn", {"args": []}), "-32602"),
        (Call("tool", "burn", {"argv": ["\ud800"]}), "-32602"),
        (Call("tool", "burn", {"argv": ["x" * BODY_LIMIT]}), "-32602"),
        (Call("tool", "burn", None, {"agent": 1}), "-32602"),
        (Call("render", "", None), "-32602"),
        (Call("render", "", {"width": 80}), "-32602"),
        (Call("render", "", {"width": 80, "height": 65536}), "-32602"),
        (Call("render", "", {"width": 80, "height": True}), "-32602"),
        (Call("render", "", {"width": 80, "height": -1}), "-32602"),
        (Call("render", "", {"width": 80, "height": 24, "depth": 1}), "-32602"),
        (Call("action", "burn", "not base64"), "-32602"),
        (Call("action", "burn", {"text": 1}), "-32602"),
        (Call("hook", "burn"), "-32601"),
        (Call("list", "prompts"), "-32601"),
    ],
)
def test_a_call_that_cannot_succeed_is_not_sent(call: Call, code: str) -> None:
    conversation = ready()
    with pytest.raises(CallRefused) as caught:
        conversation.call(7, call)
    assert caught.value.event.code == code
    # It left nothing behind: the next call has the next id, and what is told is sent at once.
    assert sent(conversation.call(7, TOOL))[0]["id"] in (CALLED, CALLED + 1)


def test_lists_come_from_the_manifest() -> None:
    conversation = ready()
    assert conversation.call(7, Call("list", "tools")) == (
        Reply(7, [{"name": name, "description": "Burns down."} for name in ("burn", "usage")]),
    )
    assert conversation.call(8, Call("list", "screens")) == (Reply(8, [{"name": "burn"}]),)


@pytest.mark.parametrize(("kind", "seconds"), [("tool", 60.0), ("render", 2.0), ("action", 60.0)])
def test_the_time_of_a_call(kind: str, seconds: float) -> None:
    assert ready().seconds(Call(kind, "burn")) == seconds


# --- §9 the end ---------------------------------------------------------------------------------------------


def test_the_framer_has_the_contracts_limits() -> None:
    framer = ready().framer()
    assert framer.feed(b"content-length :\t+002\r\nContent-Length: 1\r\n\r\nxContent-Length: 0\r\n\r\n") == [
        b"x",
        b"",
    ]
    assert framer.feed(b"Content-Length: %d\r\n\r\n" % BODY_LIMIT) == []
    assert framer.fault is None
    too_long = ready().framer()
    too_long.feed(b"Content-Length: %d\r\n\r\n" % (BODY_LIMIT + 1))
    assert too_long.fault is not None and too_long.fault.cause == "frame_too_large"


def test_it_is_never_told_what_its_manifest_does_not_say() -> None:
    """The lists of another plugin with nothing are empty, and nothing can be called."""
    from runner.contracts.ainb.declared import Declared

    bare = ready(plugin(Declared()))
    assert bare.call(7, Call("list", "tools")) == (Reply(7, []),)
    with pytest.raises(CallRefused, match="declares no cli_namespaces"):
        bare.call(8, Call("tool", "burn"))
    assert [type(event) for event in bare.call(9, Call("render", "", {"width": 1, "height": 1}))] == [Send]
    assert BURNDOWN.capabilities == ("event_bus", "read_paths")
