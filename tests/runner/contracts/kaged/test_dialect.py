"""The conversation with a kaged plugin, as tables: what is said, and the events that come of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runner
from runner.contracts.kaged.declared import Declared, DeclaredKnob
from runner.contracts.kaged.dialect import FRAME_LIMIT, KagedDialect, make
from runner.contracts.kaged.notifications import DEGRADED_WINDOWS, PER_SECOND
from runner.protocol.dialect import (
    Alive,
    Call,
    CallRefused,
    Dialect,
    Identity,
    LateAnswer,
    Notice,
    Ready,
    Refusal,
    Reply,
    Setting,
    Violation,
)
from tests.runner.contracts.kaged.conversation import (
    DECLARED,
    KEYS,
    NOTES,
    TEXT,
    WELCOME,
    answer,
    dialect,
    error,
    hear,
    plugin,
    ready,
    sent,
    tell,
)
from tests.tables import one_case

CONTEXT = {
    "operator_id": "local",
    "project_id": "proj",
    "agent_path": "primary",
    "session_id": "id-0",
    "request_id": "id-1",
    "project_root": "/srv/proj",
}
ADD = Call("tool", "notes.add", {"text": "x"})
SECRET = "hunter2-hunter2"


def violation(events: Any) -> tuple[str, str]:
    (found,) = [event for event in events if isinstance(event, Violation)]
    return found.code, found.cause


def refusal(conversation: KagedDialect, call: Call) -> Refusal | Violation:
    with pytest.raises(CallRefused) as caught:
        conversation.call(1, call)
    return caught.value.event


# --- Framing -----------------------------------------------------------------------------------------------


NO_MESSAGES = [
    (b"hello", "bad_json"),
    (b'{"jsonrpc": "2.0"} {}', "bad_json"),
    (b'\xef\xbb\xbf{"jsonrpc": "2.0", "method": "x"}', "bom"),
    (b'{"jsonrpc": "2.0", "id": 1, "result": NaN}', "bad_number"),
    (b'{"jsonrpc": "2.0", "id": 1, "id": 2, "result": null}', "duplicate_key"),
    (b"[" * 200 + b"]" * 200, "too_deep"),
    (b"[]", "not_object"),
    (b'[{"jsonrpc": "2.0", "id": 1, "result": null}]', "not_object"),
    (b"1", "not_object"),
    (b"null", "not_object"),
    (b'{"id": 1, "result": null}', "jsonrpc_version"),
    (b'{"jsonrpc": "1.0", "id": 1, "result": null}', "jsonrpc_version"),
    (b'{"jsonrpc": 2.0, "id": 1, "result": null}', "jsonrpc_version"),
    (b'{"jsonrpc": "2.0"}', "not_rpc"),
    (b'{"jsonrpc": "2.0", "method": 7}', "not_rpc"),
    (b'{"jsonrpc": "2.0", "method": ""}', "not_rpc"),
]


@one_case(("line", "cause"), NO_MESSAGES)
@one_case("when", ["handshake", "ready", "leaving"])
def test_a_line_that_is_no_message_ends_it_in_every_phase(line: bytes, cause: str, when: str) -> None:
    if when == "handshake":
        conversation = dialect()
        conversation.opening()
    else:
        conversation = ready()
    if when == "leaving":
        conversation.shutdown_steps()
    assert violation(hear(conversation, line)) == ("malformed_response", cause)
    assert hear(conversation, b"more") == []


# --- Ids ---------------------------------------------------------------------------------------------------


def test_ids_are_integers_from_one() -> None:
    conversation = dialect()
    ids = [frame["id"] for frame in sent(conversation.opening())]
    hear(conversation, answer(1, WELCOME))
    for token in (1, 2):
        ids += [frame["id"] for frame in sent(conversation.call(token, ADD))]
    ids += [frame["id"] for frame in sent(conversation.send_health_check())]
    ids += [frame["id"] for frame in sent(conversation.shutdown_steps().frames)]
    assert ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [0, None])
def test_an_error_without_a_request_is_counted_and_shown(number: Any) -> None:
    conversation = ready()
    (event,) = hear(conversation, error(number, -32600, "Invalid Request"))
    assert event == Notice("unread", "the plugin could not read a message: Invalid Request (-32600)")
    assert (conversation.counters["unknown"], conversation.counters["unread"]) == (1, 1)
    assert hear(conversation, answer(number, "no error")) == []


# --- initialize --------------------------------------------------------------------------------------------

PARAMS = {
    "daemon_version": runner.__version__,
    "api_version": 1,
    "plugin_name": "notes",
    "storage_available": False,
    "projects": ["proj"],
}
KEYED = plugin(DECLARED._replace(system_config_schema=KEYS))
CONFIGURABLE = plugin(DECLARED._replace(config_schema=TEXT, system_config_schema=KEYS))


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ({}, {}),
        ({"services": frozenset({"storage"})}, {"storage_available": True}),
        ({"secrets": {"token": SECRET}}, {"system_config": {"token": SECRET}}),
        ({"secrets": {}}, {"system_config": {}}),
        ({"config": {"text": "x"}}, {"config": {"text": "x"}}),
        (
            {"config": {"text": "x"}, "secrets": {"token": "y"}},
            {"config": {"text": "x"}, "system_config": {"token": "y"}},
        ),
    ],
)
def test_initialize(setting: dict[str, Any], more: dict[str, Any]) -> None:
    requires = None if "config" not in setting else TEXT  # with it, there has to be one
    declared = DECLARED._replace(config_schema=requires, system_config_schema=KEYS)
    conversation = dialect(plugin(declared), **setting)
    (frame,) = sent(conversation.opening())
    assert frame == {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {**PARAMS, **more}}


@pytest.mark.parametrize(
    ("declared", "setting", "cause", "words"),
    [
        (CONFIGURABLE, {}, "config_invalid", "without --config, what the plugin would get does not fit"),
        (CONFIGURABLE, {"config": {"text": 5}}, "config_invalid", "/text"),
        (CONFIGURABLE, {"config": {}}, "config_invalid", "text"),
        (CONFIGURABLE, {"config": []}, "config_invalid", "an object"),
        (NOTES, {"config": {}}, "config_invalid", "no config_schema"),
        (CONFIGURABLE, {"config": {"text": "x" * FRAME_LIMIT}}, "config_invalid", "bytes"),
        (
            CONFIGURABLE,
            {"config": {"text": "x"}, "secrets": {"token": "x" * FRAME_LIMIT}},
            "config_invalid",
            "with the configuration and the secrets, initialize has ",
        ),
        (KEYED, {"secrets": {"token": 123456789}}, "secrets_invalid", "/token"),
        (KEYED, {"secrets": {"toekn": SECRET}}, "secrets_invalid", "toekn"),
        (NOTES, {"secrets": {"token": SECRET}}, "secrets_invalid", "no system_config_schema"),
    ],
)
def test_a_configuration_is_checked_before_anything_is_sent(
    declared: Any, setting: dict[str, Any], cause: str, words: str
) -> None:
    events = dialect(declared, **setting).opening()
    assert violation(events) == ("handshake_failed", cause)
    assert not sent(events)
    assert words in repr(events)
    assert SECRET not in repr(events)
    assert "123456789" not in repr(events)


IDENTITY = Identity(
    "notes",
    "1.2.3",
    "1",
    "notes",
    tools=("notes.add", "notes.list"),
    details={key: WELCOME[key] for key in ("methods", "notifications", "capabilities_used")},
)


def test_initialized_follows_and_it_is_ready() -> None:
    conversation = dialect()
    conversation.opening()
    notification, is_ready = hear(conversation, answer(1, WELCOME))
    assert sent([notification]) == [{"jsonrpc": "2.0", "method": "initialized", "params": {}}]
    assert is_ready == Ready(IDENTITY)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in WELCOME.items() if key not in keys}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        # the shape
        (None, ("handshake_failed", "malformed")),
        ([], ("handshake_failed", "malformed")),
        (without("name"), ("handshake_failed", "malformed")),
        ({**WELCOME, "name": 1}, ("handshake_failed", "malformed")),
        (without("version"), ("handshake_failed", "malformed")),
        (without("api_version"), ("handshake_failed", "malformed")),
        ({**WELCOME, "api_version": True}, ("handshake_failed", "malformed")),
        ({**WELCOME, "api_version": "1"}, ("handshake_failed", "malformed")),
        (without("methods"), ("handshake_failed", "malformed")),
        (without("notifications"), ("handshake_failed", "malformed")),
        (without("capabilities_used"), ("handshake_failed", "malformed")),
        ({**WELCOME, "methods": "all"}, ("handshake_failed", "malformed")),
        ({**WELCOME, "notifications": None}, ("handshake_failed", "malformed")),
        ({**WELCOME, "capabilities_used": [1]}, ("handshake_failed", "malformed")),
        # what it says, in the order of the checks
        ({**WELCOME, "name": "other", "api_version": 2}, ("handshake_failed", "identity_mismatch")),
        ({**WELCOME, "api_version": 2, "methods": []}, ("protocol_version_mismatch", "api_version")),
        ({**WELCOME, "methods": [], "notifications": ["x"]}, ("tool_not_exposed", "method_missing")),
        (
            {**WELCOME, "notifications": ["notes.gone"], "capabilities_used": ["net:*"]},
            ("handshake_failed", "notification_undeclared"),
        ),
        ({**WELCOME, "capabilities_used": ["net:*"]}, ("capability_not_declared", "capability_violation")),
        ({**WELCOME, "capabilities_used": ["net:[] "]}, ("capability_not_declared", "capability_violation")),
    ],
)
def test_an_answer_to_initialize_that_does_not_fit(result: Any, expected: tuple[str, str]) -> None:
    conversation = dialect()
    conversation.opening()
    assert violation(hear(conversation, answer(1, result))) == expected


def test_the_claimed_name_is_in_the_violation() -> None:
    conversation = dialect()
    conversation.opening()
    (found,) = hear(conversation, answer(1, {**WELCOME, "name": "other"}))
    assert isinstance(found, Violation)
    assert found.plugin_id == "other"


def test_initialize_refused() -> None:
    conversation = dialect()
    conversation.opening()
    (found,) = hear(conversation, error(1, -32000, "no\x1b database"))
    assert isinstance(found, Violation)
    assert (found.code, found.cause) == ("handshake_failed", "refused")
    assert "no\\x1b database (-32000)" in found.message


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, []),
        ({"version": "0.1.0"}, ["version_differs"]),
        ({"methods": ["notes.export.all", "notes.add", "notes.list"]}, []),
        ({"methods": ["notes.export.all", "notes.secret", "x"]}, ["methods_ignored"]),
        ({"extra": 1}, []),
    ],
)
def test_what_is_only_worth_a_notice(change: dict[str, Any], kinds: list[str]) -> None:
    conversation = dialect()
    conversation.opening()
    events = hear(conversation, answer(1, {**WELCOME, **change}))
    assert [event.kind for event in events if isinstance(event, Notice)] == kinds
    assert isinstance(events[-1], Ready)


def test_the_time_limits_are_the_manifests() -> None:
    conversation: Dialect = make(Setting(NOTES))
    assert conversation.handshake_seconds == 10.0
    assert conversation.seconds(ADD) == 60.0
    assert conversation.seconds(Call("method", "notes.export.all")) == 60.0
    assert conversation.seconds(Call("hook", "pre_compact")) == 7.0


# --- Calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "method", "params"),
    [
        (ADD, "notes.add", {"text": "x"}),
        (Call("tool", "add", {"text": "x"}), "notes.add", {"text": "x"}),
        (Call("tool", "list"), "notes.list", {}),
        (Call("method", "notes.export.all", {"to": 1}), "notes.export.all", {"to": 1}),
        (Call("method", "notes.export.all"), "notes.export.all", {}),
        (Call("hook", "on_session_start"), "kaged.hook.on_session_start", {}),
        (
            Call("hook", "on_session_idle", {"transcript": "t"}),
            "kaged.hook.on_session_idle",
            {"transcript": "t"},
        ),
        (Call("hook", "pre_compact", {"any": [1]}), "kaged.hook.pre_compact", {"any": [1]}),
        (
            Call(
                "hook",
                "post_compact",
                {
                    "messages_being_compacted": "a",
                    "messages_remaining": "b",
                    "strategy": "drop",
                    "trigger": "token_limit",
                },
            ),
            "kaged.hook.post_compact",
            {
                "messages_being_compacted": "a",
                "messages_remaining": "b",
                "strategy": "drop",
                "trigger": "token_limit",
            },
        ),
    ],
)
def test_requests(call: Call, method: str, params: dict[str, Any]) -> None:
    (frame,) = sent(ready().call(1, call))
    assert frame == {"jsonrpc": "2.0", "id": 2, "method": method, "params": {**params, "_context": CONTEXT}}


def test_the_context_of_a_call() -> None:
    conversation = ready(plugin(DECLARED._replace(project_root="")))
    given = {"operator_id": "op", "agent_path": "primary.subagents.a.subagents.B_2", "request_id": "r"}
    (frame,) = sent(conversation.call(1, Call("tool", "add", {"text": "x"}, given)))
    expected = {**CONTEXT, **given}
    del expected["project_root"]
    assert frame["params"]["_context"] == expected
    # The session keeps its id, and each call has its own.
    (frame,) = sent(conversation.call(2, ADD))
    assert frame["params"]["_context"]["session_id"] == "id-0"
    assert frame["params"]["_context"]["request_id"] == "id-1"


SUBAGENT = {"agent_path": "primary.subagents.a"}
IDLE = {"transcript": "t"}


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (Call("tool", "add", {"text": 5}), "invalid_arguments"),
        (Call("tool", "add"), "invalid_arguments"),
        (Call("tool", "add", []), "invalid_params"),
        (Call("tool", "add", "text"), "invalid_params"),
        (Call("tool", "list", {"_context": {}}), "invalid_params"),
        (Call("method", "notes.export.all", {"_context": {}}), "invalid_params"),
        (Call("method", "notes.export.all", [1]), "invalid_params"),
        (Call("tool", "add", {"text": "x"}, {"agent_id": "a"}), "invalid_context"),
        (Call("tool", "add", {"text": "x"}, {"operator_id": 5}), "invalid_context"),
        (Call("tool", "add", {"text": "x"}, {"agent_path": ""}), "invalid_context"),
        (Call("tool", "add", {"text": "x"}, {"agent_path": "secondary"}), "invalid_context"),
        (Call("tool", "add", {"text": "x"}, {"agent_path": "primary.subagents"}), "invalid_context"),
        (Call("tool", "add", {"text": "x"}, {"agent_path": "primary.subagents."}), "invalid_context"),
        (Call("tool", "add", {"text": "x"}, {"agent_path": "primary.subagents.a\n"}), "invalid_context"),
        (Call("hook", "on_session_start", {"x": 1}), "invalid_params"),
        (Call("hook", "on_session_idle"), "invalid_params"),
        (Call("hook", "on_session_idle", {"transcript": 1}), "invalid_params"),
        (Call("hook", "post_compact", {"strategy": "drop"}), "invalid_params"),
        (Call("hook", "pre_compact", [1]), "invalid_params"),
        (Call("hook", "on_session_start", None, SUBAGENT), "invalid_context"),
        (Call("hook", "on_session_idle", IDLE, SUBAGENT), "invalid_context"),
        (Call("tool", "add", {"text": "x" * FRAME_LIMIT}), "too_large"),
        (Call("hook", "on_session_idle", {"transcript": "x" * FRAME_LIMIT}), "too_large"),
        (Call("tool", "list", {"a": {1, 2}}), "not_json"),
        (Call("tool", "list", {"a": float("nan")}), "not_json"),
        (Call("prompt", "x"), "unsupported"),
        (Call("list", "prompts"), "unsupported"),
    ],
)
def test_calls_that_are_not_sent(call: Call, kind: str) -> None:
    conversation = ready()
    refused = refusal(conversation, call)
    assert isinstance(refused, Refusal)
    assert refused.kind == kind
    # Nothing is open, and the next call is sent.
    assert sent(conversation.call(2, ADD))


@pytest.mark.parametrize(
    ("call", "cause", "hint"),
    [
        (Call("tool", "ad"), "tool", "did you mean 'add'?"),
        (Call("tool", "notes.ad"), "tool", "did you mean 'notes.add'?"),
        (Call("tool", "zzz"), "tool", "there are: add, list"),
        (Call("method", "notes.export"), "method", "did you mean 'notes.export.all'?"),
        (Call("method", "notes.add"), "method", ""),
        (Call("method", "shutdown"), "method", ""),
        (Call("method", "initialize"), "method", ""),
        (Call("method", "kaged.hook.pre_compact"), "method", ""),
        (Call("hook", "pre_compac"), "hook", "did you mean 'pre_compact'?"),
    ],
)
def test_what_the_manifest_does_not_declare(call: Call, cause: str, hint: str) -> None:
    refused = refusal(ready(), call)
    assert isinstance(refused, Violation)
    assert (refused.code, refused.cause) == ("tool_not_exposed", cause)
    assert hint in refused.hint


def test_a_hook_that_the_manifest_does_not_subscribe_to_is_never_sent() -> None:
    conversation = ready(plugin(DECLARED._replace(hooks=())))
    refused = refusal(conversation, Call("hook", "pre_compact"))
    assert isinstance(refused, Violation)
    assert refused.code == "tool_not_exposed"


def test_the_list_of_tools_is_the_manifests() -> None:
    assert ready().call(1, Call("list", "tools")) == (
        Reply(
            1,
            [
                {"name": "notes.add", "description": "Adds.", "input_schema": TEXT},
                {"name": "notes.list", "description": "Lists.", "input_schema": {"type": "object"}},
            ],
        ),
    )
    assert ready().call(1, Call("list", "hooks"))[0] == Reply(1, [{"name": name} for name in DECLARED.hooks])


def test_there_are_no_notifications_to_the_plugin() -> None:
    with pytest.raises(CallRefused):
        ready().notify("notes.changed", {})


# --- Answers to calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 1, "x", [1], {"a": {"b": None}}, False])
def test_a_result_is_any_value(value: Any) -> None:
    conversation = ready()
    conversation.call(7, ADD)
    assert hear(conversation, answer(2, value)) == [Reply(7, value)]


def test_an_answer_without_a_result_is_null() -> None:
    conversation = ready()
    conversation.call(7, ADD)
    assert hear(conversation, {"jsonrpc": "2.0", "id": 2}) == [Reply(7, None)]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-32000, "plugin_error"),
        (-32050, "plugin_error"),
        (-32099, "plugin_error"),
        (-32100, "protocol_error"),
        (-31999, "protocol_error"),
        (-32700, "parse_error"),
        (-32600, "invalid_request"),
        (-32601, "method_not_found"),
        (-32602, "invalid_params"),
        (-32603, "internal"),
        (1, "protocol_error"),
    ],
)
def test_error_answers(code: int, kind: str) -> None:
    conversation = ready()
    conversation.call(7, ADD)
    data = {"code": "content_too_large", "actual_bytes": 2, "max_bytes": 1}
    assert hear(conversation, error(2, code, "too\nlarge", data=data)) == [
        Refusal(7, str(code), "too\\nlarge", kind, data)
    ]


@pytest.mark.parametrize(
    ("fault", "code"), [("text", -32603), ({}, -32603), ({"code": "x", "message": 1}, -32603), ([1], -32603)]
)
def test_errors_that_are_none_are_errors_all_the_same(fault: Any, code: int) -> None:
    conversation = ready()
    conversation.call(7, ADD)
    (event,) = hear(conversation, {"jsonrpc": "2.0", "id": 2, "error": fault})
    assert isinstance(event, Refusal)
    assert (event.code, event.kind) == (str(code), "internal")


def test_what_is_remembered_of_calls_that_were_given_up_is_bounded() -> None:
    conversation = ready()
    for token in range(1, 2000):
        conversation.call(token, ADD)
        conversation.cancel(token, "no answer in time")
    assert len(conversation._owed) == 1024
    assert hear(conversation, answer(2, None), answer(2000, None)) == [LateAnswer(1999)]


# --- Hooks -------------------------------------------------------------------------------------------------

INPUT = {
    "on_session_start": None,
    "on_session_idle": IDLE,
    "pre_compact": {},
    "post_compact": {
        "messages_being_compacted": "",
        "messages_remaining": "",
        "strategy": "",
        "trigger": "",
    },
}


@pytest.mark.parametrize(
    ("hook", "roles", "value", "counts"),
    [
        ("on_session_start", ["observer"], {}, {}),
        ("on_session_start", ["observer"], {"inject": "text"}, {"inject": "text"}),
        ("on_session_start", ["observer"], {"inject": "text", "more": 1}, {"inject": "text"}),
        ("on_session_start", ["observer"], {"inject": 1}, "inject"),
        ("on_session_start", ["observer"], {"inject": None}, "inject"),
        ("on_session_start", ["observer"], {"inject": "x", "retain": 5, "more": 1}, {"inject": "x"}),
        ("on_session_start", ["observer"], None, "object"),
        ("on_session_start", ["observer"], [], "object"),
        ("on_session_idle", ["observer"], None, None),
        ("on_session_idle", ["observer"], {}, "null"),
        ("on_session_idle", ["observer"], "ok", "null"),
        ("pre_compact", ["observer"], None, None),
        ("pre_compact", ["observer"], {"messages": []}, "compactor"),
        ("pre_compact", ["compactor"], {"messages": []}, {"messages": []}),
        ("pre_compact", ["compactor"], None, "object"),
        ("pre_compact", ["compactor"], [], "object"),
        ("pre_compact", ["observer", "compactor"], None, None),
        ("pre_compact", ["observer", "compactor"], {"a": 1}, {"a": 1}),
        ("post_compact", ["observer"], {"retain": []}, {"retain": []}),
        ("post_compact", ["observer"], {"retain": [1], "inject": "x"}, {"retain": [1], "inject": "x"}),
        ("post_compact", ["observer"], {"inject": "x"}, "retain"),
        ("post_compact", ["observer"], {"retain": "all"}, "retain"),
        ("post_compact", ["observer"], {"retain": [], "inject": 5}, "inject"),
        ("post_compact", ["observer"], None, "object"),
    ],
)
def test_the_results_of_hooks(hook: str, roles: list[str], value: Any, counts: Any) -> None:
    conversation = ready(plugin(DECLARED._replace(roles=tuple(roles))))
    conversation.call(1, Call("hook", hook, INPUT[hook]))
    events = hear(conversation, answer(2, value))
    if isinstance(counts, str):  # the fault: nothing is contributed, and the session goes on
        notice, reply = events
        assert isinstance(notice, Notice)
        assert isinstance(reply, Reply)
        assert (notice.kind, notice.value["hook"]) == ("hook_failed", hook)
        assert reply.value is None
        assert counts in reply.failure
        assert conversation.counters["hooks_failed"] == 1
    else:
        assert events == [Reply(1, counts)]
        assert "hooks_failed" not in conversation.counters
    assert conversation.call(2, ADD)


def test_an_error_of_a_hook_is_no_contribution() -> None:
    conversation = ready()
    conversation.call(1, Call("hook", "pre_compact"))
    _, reply = hear(conversation, error(2, -32603, "boom"))
    assert reply == Reply(1, None, "it answered with an error: boom (-32603)")


def test_a_hook_that_takes_too_long_is_no_contribution() -> None:
    conversation = ready()
    conversation.call(1, Call("hook", "pre_compact"))
    assert conversation.expired(1, "no answer within 7s")[-1] == Reply(1, None, "no answer within 7s")
    assert hear(conversation, answer(2, None)) == [LateAnswer(1)]
    assert conversation.counters["late"] == 1


# --- Notifications -----------------------------------------------------------------------------------------

CHANGED = tell("notes.changed", {"n": 1})


def test_a_declared_notification_is_a_notice() -> None:
    conversation = ready()
    expected = Notice("notification", {"method": "notes.changed", "params": {"n": 1}})
    assert hear(conversation, CHANGED) == [expected]
    assert conversation.counters["notifications"] == 1


def test_an_undeclared_notification_is_dropped_with_one_warning() -> None:
    conversation = ready()
    (first, *more) = hear(conversation, tell("notes.gone"), tell("notes.gone"))
    assert isinstance(first, Notice)
    assert (first.kind, first.value["reason"], first.value["method"]) == (
        "dropped",
        "undeclared",
        "notes.gone",
    )
    assert more == []
    assert conversation.counters["notifications_undeclared"] == 2


def test_any_number_of_undeclared_names_is_bounded() -> None:
    conversation = ready()
    events = []
    for number in range(500):
        events += hear(conversation, tell(f"n{number}" * 1000), at=number)
    assert len(events) == 64
    assert all(isinstance(event, Notice) and len(event.value["method"]) <= 200 for event in events)
    assert conversation.counters["notifications_undeclared"] == 500


def test_a_hundred_in_a_second_are_accepted_and_not_one_more() -> None:
    conversation = ready()
    events = hear(conversation, *[CHANGED] * PER_SECOND, at=10.0)
    assert [event.kind for event in events if isinstance(event, Notice)] == ["notification"] * 100
    (warning,) = hear(conversation, *[CHANGED] * 50, at=10.5)
    assert isinstance(warning, Notice)
    assert (warning.kind, warning.value["reason"]) == ("dropped", "rate")
    assert conversation.counters["notifications_dropped"] == 50
    # The window slides: at 10.999 the hundred of 10.0 still count, a second after them they do not.
    assert hear(conversation, CHANGED, at=10.999) == []
    assert len(hear(conversation, CHANGED, at=11.0)) == 1
    assert conversation.counters["notifications_dropped"] == 51


def test_the_window_slides_and_does_not_jump() -> None:
    conversation = ready()
    hear(conversation, *[CHANGED] * 60, at=0.9)
    assert len(hear(conversation, *[CHANGED] * 40, at=1.1)) == 40
    (warning,) = hear(conversation, CHANGED, at=1.8)
    assert isinstance(warning, Notice)
    assert warning.kind == "dropped"
    assert len(hear(conversation, *[CHANGED] * 60, at=1.95)) == 60


def flood(conversation: KagedDialect, seconds: int, begin: float = 0.0) -> list[str]:
    """200 notifications in each second, evenly."""
    kinds = []
    for number in range(200 * seconds):
        for event in hear(conversation, CHANGED, at=begin + number / 200):
            assert isinstance(event, Notice)
            kinds.append(event.kind)
    return kinds


def test_one_warning_for_each_window() -> None:
    kinds = flood(ready(), 5)
    assert kinds.count("dropped") == 5
    assert "degraded" not in kinds


def test_ten_windows_in_a_row_are_degraded_and_not_an_end() -> None:
    conversation = ready()
    kinds = flood(conversation, DEGRADED_WINDOWS + 5)
    assert kinds.count("degraded") == 1
    assert conversation.counters["degraded"] == 1
    assert conversation.call(1, ADD)


def test_a_quiet_second_begins_the_count_anew() -> None:
    conversation = ready()
    for begin in (0.0, 10.0, 20.0):
        assert "degraded" not in flood(conversation, 8, begin)


# --- Requests of the plugin --------------------------------------------------------------------------------


def ask(number: Any, method: str, params: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def test_a_request_before_the_handshake_is_refused() -> None:
    conversation = dialect()
    conversation.opening()
    (reply,) = sent(hear(conversation, ask(5, "kaged.storage.get")))
    assert (reply["id"], reply["error"]["code"]) == (5, -32600)
    assert isinstance(hear(conversation, answer(1, WELCOME))[-1], Ready)


# --- Health and the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply", [answer(2, {"status": "ok"}), error(2, -32601), error(2, 5), answer(2, None)]
)
def test_any_reply_is_life(reply: Any) -> None:
    conversation = ready()
    (frame,) = sent(conversation.send_health_check())
    assert frame == {"jsonrpc": "2.0", "id": 2, "method": "health.check", "params": {}}
    assert hear(conversation, reply) == [Alive()]
    assert conversation.counters["health_checks"] == 1


def test_the_pulse_is_the_manifests() -> None:
    assert ready().health_check == ("health.check", 30.0, 5.0, 60.0)
    assert ready(plugin(lifecycle=())).health_check == ("health.check", 30.0, 5.0, 60.0)


# --- What the operator sets --------------------------------------------------------------------------------

STRICT = {"type": "object", "properties": {"token": {"type": "string"}}, "required": ["token"]}
SETTINGS = {"type": "object", "properties": {"store": {"type": "string"}, "most": {"type": "integer"}}}
KNOBS = {
    "store": DeclaredKnob("path", "store", "", "config:/notes"),
    "most": DeclaredKnob("int_range", "most", "1 to 9", 5),
    "other": DeclaredKnob("text", "other", ""),
}


NOTHING: tuple[Any, ...] = (None, {})


def opened(declared: Declared, **setting: Any) -> Any:
    """The params of initialize, or the violation."""
    events = dialect(plugin(declared), **setting).opening()
    return violation(events) if isinstance(events[0], Violation) else sent(events)[0]["params"]


def test_no_secrets_and_an_empty_object_are_not_the_same() -> None:
    keyed = DECLARED._replace(system_config_schema=STRICT)
    for none in NOTHING:
        assert opened(keyed, secrets=none) == ("handshake_failed", "secrets_invalid")
    assert opened(keyed, secrets={"token": "x"})["system_config"] == {"token": "x"}
    some = DECLARED._replace(system_config_schema=KEYS)
    assert "system_config" not in opened(some) and opened(some, secrets={})["system_config"] == {}
    assert "system_config" not in opened(DECLARED, secrets={})  # there is nothing to check and to send


def test_the_defaults_of_knobs_are_sent() -> None:
    knobs = DECLARED._replace(config_schema=SETTINGS, knobs=KNOBS)
    assert opened(knobs)["config"] == {"store": "config:/notes", "most": 5}
    assert opened(knobs, config={"most": 7})["config"] == {"store": "config:/notes", "most": 7}
    assert opened(knobs, config={"most": "x"}) == ("handshake_failed", "config_invalid")
    # A required setting may have its value from a knob.
    needs = {**SETTINGS, "required": ["store"]}
    for none in NOTHING:
        assert opened(knobs._replace(config_schema=needs), config=none)["config"]["store"] == "config:/notes"
    needs = {**SETTINGS, "required": ["other"]}
    assert opened(knobs._replace(config_schema=needs)) == ("handshake_failed", "config_invalid")
    assert "config" not in opened(DECLARED)


# --- Secrets -----------------------------------------------------------------------------------------------

SPILLS: list[tuple[str, Callable[[KagedDialect], Any]]] = [
    ("error", lambda d: (d.call(1, ADD), hear(d, error(2, -32000, f"bad token {SECRET}", data=[SECRET])))),
    (
        "hook",
        lambda d: (d.call(1, Call("hook", "pre_compact")), hear(d, error(2, -32000, f"bad token {SECRET}"))),
    ),
    ("notification", lambda d: hear(d, tell("notes.changed", {SECRET: [f"it is {SECRET}!"]}))),
    ("undeclared", lambda d: hear(d, tell(f"notes.{SECRET}"))),
    ("unread", lambda d: hear(d, error(0, -32700, SECRET))),
    ("shutdown", lambda d: (d.shutdown_steps(), hear(d, error(2, 1, SECRET)))),
]


@pytest.mark.parametrize(("what", "spill"), SPILLS)
def test_a_secret_that_the_plugin_repeats_is_hidden(what: str, spill: Callable[[KagedDialect], Any]) -> None:
    conversation = ready(KEYED, secrets={"token": SECRET})
    text = repr(spill(conversation))
    assert SECRET not in text
    assert "[secret]" in text
    # The control: without the secret the same text passes.
    assert SECRET in repr(spill(ready(KEYED)))


@pytest.mark.parametrize(
    "welcome",
    [
        error(1, -32000, f"{SECRET} is wrong"),
        answer(1, {**WELCOME, "name": SECRET}),
        answer(1, {**WELCOME, "version": SECRET}),
        answer(1, {**WELCOME, "methods": [*WELCOME["methods"], SECRET]}),  # type: ignore[misc]
        answer(1, {**WELCOME, "notifications": [SECRET]}),
        answer(1, {**WELCOME, "capabilities_used": [SECRET]}),
    ],
)
def test_a_secret_in_the_handshake_is_hidden(welcome: Any) -> None:
    conversation = dialect(KEYED, secrets={"token": SECRET})
    conversation.opening()
    text = repr(hear(conversation, welcome))
    assert SECRET not in text
    assert "[secret]" in text


def refused_hook(d: KagedDialect, text: str) -> Any:
    d.call(1, Call("hook", "pre_compact"))
    return hear(d, error(2, -32000, text))


def refused_call(d: KagedDialect, text: str) -> Any:
    d.call(1, ADD)
    return hear(d, error(2, -32000, text))


def refused_end(d: KagedDialect, text: str) -> Any:
    d.shutdown_steps()
    return hear(d, error(2, 1, text))


def welcomed(**changes: Any) -> Any:
    return answer(1, {**WELCOME, **changes})


# Characters that are shown, and where.
Spill = Callable[[KagedDialect, str], Any]
CUT: list[tuple[str, int, Spill]] = [
    ("error", 2000, refused_call),
    ("hook", 500, refused_hook),
    ("shutdown", 500, refused_end),
    ("unread", 200, lambda d, text: hear(d, error(0, -32700, text))),
    ("undeclared", 200, lambda d, text: hear(d, tell(text))),
]
CUT_WELCOMES: list[tuple[str, int, Spill]] = [
    ("refused", 500, lambda d, text: hear(d, error(1, -32000, text))),
    ("name", 60, lambda d, text: hear(d, welcomed(name=text))),
    ("claimed name", 200, lambda d, text: hear(d, welcomed(name=text))),
    ("version", 200, lambda d, text: hear(d, welcomed(version=text))),
    ("methods", 60, lambda d, text: hear(d, welcomed(methods=["notes.export.all", text]))[0]),
    ("notifications", 60, lambda d, text: hear(d, welcomed(notifications=[text]))),
    ("capabilities", 60, lambda d, text: hear(d, welcomed(capabilities_used=[text]))),
]


@pytest.mark.parametrize(("what", "most", "spill"), CUT + CUT_WELCOMES)
def test_no_beginning_of_a_secret_is_shown_where_a_text_is_cut(what: str, most: int, spill: Spill) -> None:
    begin = SECRET[:8]
    text = "x" * (most - len(begin) - 1) + SECRET

    def shown(**setting: Any) -> str:
        conversation = dialect(KEYED, **setting)
        conversation.opening()
        if (what, most, spill) in CUT:
            hear(conversation, answer(1, WELCOME))
        return repr(spill(conversation, text))

    assert begin not in shown(secrets={"token": SECRET})
    # The control: the cut is in the middle of it.
    assert begin in shown()


# Texts that our messages escape, and Python.
ESCAPED = [
    "hunter2\x07hunter2",
    "hunter2\x1b[0mhunter2",
    "hunter2'hunter2",
    "hunter2\\hunter2",
    "hunter2\nhunter2-",
]


@pytest.mark.parametrize("secret", ESCAPED)
@pytest.mark.parametrize(("what", "most", "spill"), CUT)
def test_a_secret_that_has_to_be_escaped_is_hidden(what: str, most: int, spill: Spill, secret: str) -> None:
    for text in (secret, repr(secret), json.dumps(secret)):
        assert "hunter2" not in repr(spill(ready(KEYED, secrets={"token": secret}), f"<{text}>"))
        assert "hunter2" in repr(spill(ready(KEYED), f"<{text}>"))


PIN = 1234567890
SPILT_PINS: list[tuple[str, Callable[[KagedDialect], Any]]] = [
    ("text", lambda d: refused_call(d, f"the pin {PIN} is wrong")),
    (
        "data",
        lambda d: (d.call(1, ADD), hear(d, error(2, -32000, "no", data={"pin": PIN, "as": [float(PIN)]}))),
    ),
    ("code", lambda d: (d.call(1, ADD), hear(d, error(2, PIN, "")))),
    ("code of a hook", lambda d: (d.call(1, Call("hook", "pre_compact")), hear(d, error(2, PIN)))),
    ("notification", lambda d: hear(d, tell("notes.changed", {"pin": [PIN]}))),
    ("a number that is none", lambda d: hear(d, b'{"jsonrpc": "2.0", "id": %d%s}' % (PIN, b"0" * 60))),
]


@pytest.mark.parametrize(("what", "spill"), SPILT_PINS)
def test_a_secret_that_is_a_number_is_hidden(what: str, spill: Callable[[KagedDialect], Any]) -> None:
    schema = {"type": "object"}
    of = plugin(DECLARED._replace(system_config_schema=schema))
    assert str(PIN) not in repr(spill(ready(of, secrets={"pin": PIN})))
    assert str(PIN) in repr(spill(ready(of)))


def test_no_beginning_of_a_secret_of_digits_is_shown_where_a_number_is_cut() -> None:
    digits = "12345678901234567890" * 3
    said = b'{"jsonrpc": "2.0", "id": %s}' % digits.encode()
    assert digits[:20] not in repr(hear(ready(KEYED, secrets={"token": digits}), said))
    assert digits[:20] in repr(hear(ready(KEYED), said))


def test_a_secret_that_is_also_a_name_breaks_nothing() -> None:
    """What the plugin says is compared as it is, and hidden only where it is shown."""
    secrets = {"token": "notes.changed", "other": "notes.export.all"}
    of = plugin(DECLARED._replace(system_config_schema={"type": "object"}))
    conversation = ready(of, secrets=secrets)
    (told,) = hear(conversation, tell("notes.changed", 1))
    assert told == Notice("notification", {"method": "[secret]", "params": 1})
    assert conversation.counters["notifications"] == 1


def test_a_result_is_the_callers_and_stays_as_it_is() -> None:
    conversation = ready(KEYED, secrets={"token": SECRET})
    conversation.call(1, ADD)
    assert hear(conversation, answer(2, SECRET)) == [Reply(1, SECRET)]


# --- Anything ----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEY = st.sampled_from(("jsonrpc", "id", "method", "params", "result", "error"))
MESSAGE = st.dictionaries(KEY, JSON | st.just("2.0"), max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGE | JSON | st.binary(max_size=20), max_size=5), st.booleans())
def test_nothing_that_a_plugin_sends_raises(messages: list[Any], is_ready: bool) -> None:
    conversation = ready() if is_ready else dialect()
    if not is_ready:
        conversation.opening()
    else:
        conversation.call(1, ADD)
        conversation.call(2, Call("hook", "pre_compact"))
    for message in messages:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        for event in conversation.feed(conversation.read(raw)):
            assert event
