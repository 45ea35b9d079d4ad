"""The MCP dialect as tables: what is heard, and what comes of it. No process, no clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import __version__
from runner.contracts.mcp import dialect as mcp
from runner.contracts.mcp import handshake, pending_call
from runner.contracts.mcp.dialect import McpDialect
from runner.contracts.mcp.inspector import make as make_inspector
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Event,
    HostCall,
    HostCallCancelled,
    Identity,
    Kind,
    Notice,
    Progress,
    Ready,
    Refusal,
    Reply,
    Send,
    ShutdownSteps,
    Violation,
)
from runner.protocol.jsonrpc import MOST_TICKETS
from runner.protocol.memory import STANDING
from tests.runner.contracts.mcp.pump import setting
from tests.tables import one_case

MODERN, LEGACY = "2026-07-28", "2025-11-25"
META = "io.modelcontextprotocol/"
INFO = {"name": "srv", "version": "1.0"}
CLIENT = {"name": "runner", "version": __version__}
TOOLS: dict[str, Any] = {"tools": {}}

DISCOVERED = {
    "resultType": "complete",
    "supportedVersions": [MODERN],
    "capabilities": TOOLS,
    "instructions": "be nice",
    "ttlMs": 0,
    "cacheScope": "private",
    "_meta": {META + "serverInfo": INFO},
}
INITIALIZED = {"protocolVersion": LEGACY, "capabilities": TOOLS, "serverInfo": INFO}
UNSUPPORTED = {"code": -32022, "message": "no", "data": {"supported": [MODERN], "requested": "x"}}

Said = dict[str, Any]


def said(events: Sequence[Event]) -> list[Any]:
    """Events with the frames they send as values; a frame is one line."""
    shown: list[Any] = []
    for event in events:
        if isinstance(event, Send):
            assert event.frame.endswith(b"\n") and event.frame.count(b"\n") == 1
            message = json.loads(event.frame)
            assert message.pop("jsonrpc") == "2.0"
            shown.append(message)
        else:
            shown.append(event)
    return shown


def hear(dialect: McpDialect, *messages: Any) -> list[Any]:
    """What comes of these; bytes are taken as they are."""
    found: list[Any] = []
    for message in messages:
        if isinstance(message, dict):
            message = {"jsonrpc": "2.0", **message}
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        found += said(dialect.feed(dialect.read(raw)))
    return found


def result(number: int, value: Any) -> Said:
    return {"id": number, "result": value}


def error(number: Any, code: int, message: str = "no", data: Any = None) -> Said:
    return {
        "id": number,
        "error": {"code": code, "message": message, **({} if data is None else {"data": data})},
    }


def modern(*services: str) -> McpDialect:
    dialect = mcp.make(setting(services))
    dialect.opening()
    assert isinstance(hear(dialect, result(1, DISCOVERED))[0], Ready)
    return dialect


def legacy(*services: str, version: str = LEGACY) -> McpDialect:
    dialect = mcp.make(setting(services))
    dialect.opening()
    hear(dialect, error(1, -32601))
    assert isinstance(hear(dialect, result(2, {**INITIALIZED, "protocolVersion": version}))[1], Ready)
    return dialect


# The number of the first call's request.
FIRST = {modern: 2, legacy: 3}
ERAS = (modern, legacy)
Maker = Callable[..., McpDialect]


def asked(dialect: McpDialect, kind: Kind, name: str, given: Any = None, token: int = 7) -> Said:
    (sent,) = said(dialect.call(token, Call(kind, name, given)))
    assert isinstance(sent, dict)
    return sent


# --- the handshake ---------------------------------------------------------------------------------------

READY_MODERN = Ready(Identity("demo", "1.0", MODERN, "srv", "be nice", details=TOOLS))
READY_LEGACY = Ready(Identity("demo", "1.0", LEGACY, "srv", details=TOOLS))
INITIALIZED_SENT = {"method": "notifications/initialized"}


def envelope(**services: Any) -> Said:
    return {
        META + "protocolVersion": MODERN,
        META + "clientCapabilities": services,
        META + "clientInfo": CLIENT,
    }


def probe(number: int = 1) -> Said:
    return {"id": number, "method": "server/discover", "params": {"_meta": envelope()}}


def initialize(number: int = 2, version: str = LEGACY) -> Said:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": CLIENT}
    return {"id": number, "method": "initialize", "params": params}


SILENCE = "silence"


def shake(*steps: Any) -> tuple[McpDialect, list[Any]]:
    """The opening, and what came of each step: a message, or silence."""
    dialect = mcp.make(setting())
    found = said(dialect.opening())
    assert found == [probe()]
    found = []
    for step in steps:
        found += said(dialect.silence()) if step is SILENCE else hear(dialect, step)
    return dialect, found


LEGACY_END = [INITIALIZED_SENT, READY_LEGACY]

NO_INITIALIZE_RESULTS: tuple[Any, ...] = (
    None,
    [],
    "",
    {},
    {**INITIALIZED, "protocolVersion": 1},
    {**INITIALIZED, "capabilities": None},
    {**INITIALIZED, "serverInfo": "x"},
    {**INITIALIZED, "serverInfo": {"name": "x"}},
    {**INITIALIZED, "serverInfo": {"version": "x"}},
)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([result(1, DISCOVERED)], [READY_MODERN], id="modern"),
        pytest.param(
            [result(1, {"supportedVersions": [MODERN], "capabilities": {}})],
            [Ready(Identity("demo", protocol=MODERN))],
            id="modern and silent about itself",
        ),
        pytest.param(
            [result(1, {**DISCOVERED, "supportedVersions": ["2031-01-01", MODERN, LEGACY]})],
            [READY_MODERN],
            id="modern among others",
        ),
        pytest.param(
            [error(1, -32601), result(2, INITIALIZED)],
            [initialize(), *LEGACY_END],
            id="as TS SDK 1.32 answers",
        ),
        pytest.param(
            [error(1, -32602), result(2, INITIALIZED)], [initialize(), *LEGACY_END], id="as Python SDK 1.30"
        ),
        pytest.param([error(1, -32000), result(2, INITIALIZED)], [initialize(), *LEGACY_END], id="any error"),
        pytest.param([error(1, -32022), result(2, INITIALIZED)], [initialize(), *LEGACY_END], id="no data"),
        pytest.param([result(1, {}), result(2, INITIALIZED)], [initialize(), *LEGACY_END], id="empty result"),
        pytest.param([result(1, 5), result(2, INITIALIZED)], [initialize(), *LEGACY_END], id="no object"),
        pytest.param(
            [result(1, {**DISCOVERED, "supportedVersions": [LEGACY]}), result(2, INITIALIZED)],
            [initialize(), *LEGACY_END],
            id="discover names only older versions",
        ),
        pytest.param(
            [error(1, -32022, data={"supported": ["2031-01-01", LEGACY]}), result(2, INITIALIZED)],
            [initialize(), *LEGACY_END],
            id="a modern error that names an older version",
        ),
        pytest.param(
            [error(1, -32022, data={"supported": [MODERN]}), result(2, DISCOVERED)],
            [probe(2), READY_MODERN],
            id="asked again with what it names",
        ),
        pytest.param(
            [
                error(1, -32022, data={"supported": [MODERN]}),
                error(2, -32022, data={"supported": [MODERN]}),
                error(3, -32022, data={"supported": [MODERN]}),
            ],
            [probe(2), initialize(3), "protocol_version_mismatch"],
            id="names what it refuses, for ever",
        ),
        pytest.param(
            [error(1, -32022, data={"supported": ["2031-01-01"]})],
            ["protocol_version_mismatch"],
            id="only newer versions",
        ),
        pytest.param(
            [error(1, -32021, data={"requiredCapabilities": {"sampling": {}}})],
            ["handshake_failed"],
            id="wants capabilities",
        ),
        # silence
        pytest.param(
            [SILENCE, result(2, INITIALIZED)], [initialize(), *LEGACY_END], id="silent, then legacy"
        ),
        pytest.param(
            [SILENCE, error(1, -32601), result(2, INITIALIZED)], [initialize(), *LEGACY_END], id="slow legacy"
        ),
        pytest.param(
            [SILENCE, result(2, INITIALIZED), error(1, -32601)],
            [initialize(), *LEGACY_END],
            id="late error for the probe",
        ),
        pytest.param(
            [SILENCE, result(2, INITIALIZED), result(1, DISCOVERED)],
            [initialize(), *LEGACY_END],
            id="late DiscoverResult: what was agreed on stays",
        ),
        pytest.param(
            [SILENCE, result(1, DISCOVERED), {"id": 2, "error": UNSUPPORTED}],
            [initialize(), READY_MODERN],
            id="slow modern, bound to its era (SDK 2.3)",
        ),
        pytest.param(
            [SILENCE, result(1, DISCOVERED), result(2, INITIALIZED)],
            [initialize(), READY_MODERN],
            id="slow, and answers both: the first counts",
        ),
        pytest.param(
            [SILENCE, {"id": 2, "error": UNSUPPORTED}, result(1, DISCOVERED)],
            [initialize(), READY_MODERN],
            id="slow modern, answers in disorder",
        ),
        pytest.param(
            [SILENCE, error(2, -32601), SILENCE],
            [initialize(), "handshake_failed"],
            id="refuses the one, silent about the other",
        ),
        pytest.param(
            [SILENCE, error(2, -32601), error(1, -32601)],
            [initialize(), "handshake_failed"],
            id="refuses both",
        ),
        pytest.param([SILENCE, SILENCE, SILENCE], [initialize()], id="silence is told once"),
        # initialize refused
        pytest.param([error(1, -32601), error(2, -32603)], [initialize(), "handshake_failed"], id="refused"),
        pytest.param(
            [error(1, -32603), {"id": 2, "error": UNSUPPORTED}, result(3, DISCOVERED)],
            [initialize(), probe(3), READY_MODERN],
            id="modern after all",
        ),
        pytest.param(
            [
                error(1, -32601),
                error(2, -32602, data={"supported": ["2024-11-05"]}),
                result(3, {**INITIALIZED, "protocolVersion": "2024-11-05"}),
            ],
            [
                initialize(),
                initialize(3, "2024-11-05"),
                INITIALIZED_SENT,
                Ready(Identity("demo", "1.0", "2024-11-05", "srv", details=TOOLS)),
            ],
            id="refused with an older version named",
        ),
        pytest.param(
            [error(1, -32601), *(error(number, -32602, data={"supported": [LEGACY]}) for number in (2, 3))],
            [initialize(), initialize(3), "protocol_version_mismatch"],
            id="names what it refuses in the older era, too",
        ),
        pytest.param(
            [error(1, -32601), error(2, -32602, data={"supported": ["1.0"]})],
            [initialize(), "protocol_version_mismatch"],
            id="refused with nothing in common",
        ),
        *(
            pytest.param(
                [error(1, -32601), result(2, {**INITIALIZED, "protocolVersion": version})],
                [
                    initialize(),
                    INITIALIZED_SENT,
                    Ready(Identity("demo", "1.0", version, "srv", details=TOOLS)),
                ],
                id=f"legacy {version}",
            )
            for version in ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
        ),
        *(
            pytest.param(
                [error(1, -32601), result(2, {**INITIALIZED, "protocolVersion": version})],
                [initialize(), "protocol_version_mismatch"],
                id=f"no legacy version: {version}",
            )
            for version in ("1999-01-01", "2026-07-28", "")
        ),
        *(
            pytest.param(
                [error(1, -32601), result(2, wrong)], [initialize(), "handshake_failed"], id=f"{wrong}"
            )
            for wrong in NO_INITIALIZE_RESULTS
        ),
        # whatever else comes before it
        pytest.param(
            [b"Starting server...", b"", b"{}", b"[1]", b'"x"', result(1, DISCOVERED)],
            [
                Notice("stdout", "Starting server..."),
                Notice("stdout", "a JSON object with no keys"),
                Notice("stdout", "a JSON array of 1"),
                Notice("stdout", "'x'"),
                READY_MODERN,
            ],
            id="a banner",
        ),
        pytest.param(
            [{"id": 9, "method": "ping"}, {"id": "a", "method": "roots/list"}],
            [
                {"id": 9, "result": {}},
                {"id": "a", "error": {"code": -32600, "message": "the handshake is not done"}},
            ],
            id="questions before it",
        ),
        pytest.param([result(2, DISCOVERED), {"id": "1", "result": DISCOVERED}], [], id="not our ids"),
    ],
)
def test_handshake(steps: list[Any], expected: list[Any]) -> None:
    _, found = shake(*steps)
    assert [event.code if isinstance(event, Violation) else event for event in found] == expected


def test_a_handshake_ends_once() -> None:
    dialect, found = shake(error(1, -32601), result(2, {}))
    assert found[-1].code == "handshake_failed"
    assert (hear(dialect, result(2, INITIALIZED)), said(dialect.silence()), dialect.patience) == (
        [],
        [],
        None,
    )


def test_a_handshake_that_failed_is_not_mended_by_the_other_answer() -> None:
    dialect, found = shake(SILENCE, error(1, -32021), result(2, INITIALIZED))
    assert [event.code for event in found[1:]] == ["handshake_failed"]
    assert (said(dialect.opening()), dialect.counters["late"]) == ([], 1)


def test_a_mismatch_names_both_sides() -> None:
    _, found = shake(error(1, -32022, data={"supported": ["2031-01-01", 5, "\x1b[31m"]}))
    ours = "2026-07-28, 2025-11-25, 2025-06-18, 2025-03-26, 2024-11-05"
    assert found[0].message == f"the server speaks '2031-01-01', '\\x1b[31m'; the runner speaks {ours}"
    _, found = shake(error(1, -32022, data={"supported": []}))
    assert found[0].message.startswith("the server speaks none;")


def test_the_late_answer_is_counted() -> None:
    dialect, _ = shake(SILENCE, result(1, DISCOVERED), {"id": 2, "error": UNSUPPORTED})
    assert dialect.counters["late"] == 1


@pytest.mark.parametrize(
    ("granted", "declared", "expected"),
    [(None, {}, 3.0), (30.0, {}, 3.0), (6.0, {}, 2.0), (60.0, {"handshake": 3.0}, 1.0)],
)
def test_patience_leaves_time_for_the_rest(
    granted: float | None, declared: dict[str, float], expected: float
) -> None:
    dialect = mcp.make(setting(timeouts=declared, handshake=granted))
    assert [dialect.patience] == [None]
    dialect.opening()
    assert dialect.patience == expected < dialect.handshake_seconds
    dialect.silence()
    assert [dialect.patience] == [None]


def test_who_gives_a_configuration_is_told_that_it_is_not_sent() -> None:
    plain = mcp.make(setting(())).opening()
    *sent, notice = mcp.make(setting(())._replace(config={"a": 1})).opening()
    assert sent == plain and isinstance(notice, Notice) and notice.kind == "config_ignored"


def test_only_what_the_host_has_is_declared() -> None:
    services = ("roots", "sampling", "memory")
    declared: Said = {"roots": {}, "sampling": {}}
    dialect = mcp.make(setting(services))
    (opening,) = said(dialect.opening())
    assert opening["params"]["_meta"][META + "clientCapabilities"] == declared
    (second,) = said(dialect.silence())
    assert second["params"]["capabilities"] == declared


# --- calls ------------------------------------------------------------------------------------------------

CALLS: list[tuple[Kind, str, Any, str, Said | None]] = [
    ("tool", "echo", {"a": 1}, "tools/call", {"name": "echo", "arguments": {"a": 1}}),
    ("tool", "echo", None, "tools/call", {"name": "echo", "arguments": {}}),
    ("prompt", "greet", {"who": "x"}, "prompts/get", {"name": "greet", "arguments": {"who": "x"}}),
    ("resource", "file:///x", None, "resources/read", {"uri": "file:///x"}),
    ("method", "completion/complete", {"ref": 1}, "completion/complete", {"ref": 1}),
    ("method", "logging/setLevel", {"level": "x"}, "logging/setLevel", {"level": "x"}),
]
LISTED: list[tuple[str, str]] = [(name, row[0]) for name, row in pending_call.LISTS.items()]


@pytest.mark.parametrize(("kind", "name", "given", "method", "params"), CALLS)
def test_what_is_sent_in_the_legacy_era(kind: Kind, name: str, given: Any, method: str, params: Said) -> None:
    sent = asked(legacy(), kind, name, given)
    assert sent == {"id": 3, "method": method, "params": {**params, "_meta": {"progressToken": 7}}}


@pytest.mark.parametrize(("kind", "name", "given", "method", "params"), CALLS)
def test_what_is_sent_in_the_modern_era(kind: Kind, name: str, given: Any, method: str, params: Said) -> None:
    sent = asked(modern("roots"), kind, name, given)
    meta = {**envelope(roots={}), "progressToken": 7, META + "logLevel": "info"}
    assert sent == {"id": 2, "method": method, "params": {**params, "_meta": meta}}


@pytest.mark.parametrize(("name", "method"), LISTED)
def test_a_list_is_asked_for_plainly(name: str, method: str) -> None:
    assert asked(legacy(), "list", name) == {"id": 3, "method": method}
    assert asked(modern(), "list", name) == {"id": 2, "method": method, "params": {"_meta": envelope()}}


def test_the_callers_own_meta_is_kept_but_not_what_is_ours() -> None:
    given = {"_meta": {"com.example/x": 1, "progressToken": "mine", META + "protocolVersion": "1"}}
    meta = asked(modern(), "method", "some/thing", given)["params"]["_meta"]
    assert (meta["com.example/x"], meta["progressToken"], meta[META + "protocolVersion"]) == (1, 7, MODERN)


def test_liveness() -> None:
    old, new = legacy(), modern()
    assert asked(old, "method", "ping") == {"id": 3, "method": "ping"}
    assert hear(old, result(3, {})) == [Reply(7, {})]
    assert asked(new, "method", "ping")["method"] == "server/discover"
    assert hear(new, result(2, DISCOVERED)) == [Reply(7, {})]


@pytest.mark.parametrize(
    ("kind", "name", "given"),
    [
        ("tool", "echo", [1]),
        ("tool", "echo", "x"),
        ("tool", "echo", {"x": float("nan")}),
        ("tool", "echo", {"x": object()}),
        ("tool", "\ud800", {}),
        ("prompt", "greet", {"who": 1}),
        ("method", "initialize", {}),
        ("method", "notifications/initialized", {}),
        ("method", "x", [1]),
        ("list", "hooks", None),
        ("hook", "x", None),
        ("channel", "x", None),
        ("llm", "x", None),
        ("memory", "x", None),
    ],
)
@pytest.mark.parametrize("era", ERAS)
def test_what_cannot_be_asked_is_not_sent(era: Maker, kind: Kind, name: str, given: Any) -> None:
    dialect = era()
    with pytest.raises(CallRefused) as refused:
        dialect.call(7, Call(kind, name, given))
    assert isinstance(refused.value.event, Refusal)
    assert refused.value.event[:2] == (7, "-32602")
    assert asked(dialect, "tool", "echo", {})["method"] == "tools/call"  # the token is free again


TEXT = {"content": [{"type": "text", "text": "hello"}]}
SAYS_NO = {"content": [{"type": "text", "text": "no"}, {"type": "image"}, {"type": "text", "text": "!"}]}
FAILED = {**SAYS_NO, "isError": True}
LONG = {"content": [{"type": "text", "text": "x" * 5000}], "isError": True}

# kind, name, answer, what comes of it; a string is the cause of a malformed_response of that call
ANSWERS: list[tuple[Kind, str, Said, Any]] = [
    ("tool", "t", {"result": TEXT}, Reply(7, TEXT)),
    ("tool", "t", {"result": {**TEXT, "isError": False}}, Reply(7, {**TEXT, "isError": False})),
    ("tool", "t", {"result": {"structuredContent": {"a": 1}}}, Reply(7, {"structuredContent": {"a": 1}})),
    ("tool", "t", {"result": FAILED}, Refusal(7, "isError", "no\n!", "tool_error", FAILED)),
    ("tool", "t", {"result": LONG}, Refusal(7, "isError", "x" * 3999 + "…", "tool_error", LONG)),
    (
        "tool",
        "t",
        {"result": {"isError": True}},
        Refusal(7, "isError", "the tool failed", "tool_error", {"isError": True}),
    ),
    (
        "tool",
        "t",
        {"error": {"code": -32602, "message": "Unknown tool"}},
        Refusal(7, "-32602", "Unknown tool", "invalid_arguments"),
    ),
    ("tool", "t", {"error": {"code": 0, "message": "x", "data": [1]}}, Refusal(7, "0", "x", "", [1])),
    (
        "tool",
        "t",
        {"error": "x"},
        Refusal(7, "-32603", "an error that is not an object", "internal_error", "x"),
    ),
    ("tool", "t", {"result": None}, "bad_type"),
    ("tool", "t", {"result": [TEXT]}, "bad_type"),
    ("tool", "t", {"result": {"content": "hello"}}, "bad_type"),
    ("tool", "t", {"result": {"content": ["hello"]}}, "bad_type"),
    ("tool", "t", {"result": {"content": [{"text": "hello"}]}}, "bad_type"),
    ("tool", "t", {"result": {**TEXT, "isError": "yes"}}, "bad_type"),
    ("prompt", "p", {"result": {"messages": []}}, Reply(7, {"messages": []})),
    ("prompt", "p", {"result": {}}, "bad_type"),
    ("prompt", "p", {"result": {"messages": {}}}, "bad_type"),
    ("resource", "r", {"result": {"contents": [{"uri": "r"}]}}, Reply(7, {"contents": [{"uri": "r"}]})),
    ("resource", "r", {"result": {"contents": [1]}}, "bad_type"),
    (
        "resource",
        "r",
        {"error": {"code": -32002, "message": "gone"}},
        Refusal(7, "-32002", "gone", "resource_not_found"),
    ),
    ("method", "x/y", {"result": {"any": "thing"}}, Reply(7, {"any": "thing"})),
    ("method", "x/y", {"result": 5}, "bad_type"),
    ("list", "tools", {"result": {"tools": []}}, Reply(7, [])),
    ("list", "prompts", {"result": {"prompts": [{"name": "a"}]}}, Reply(7, [{"name": "a"}])),
    ("list", "resources", {"result": {"resources": [{"uri": "a"}]}}, Reply(7, [{"uri": "a"}])),
    ("list", "tools", {"result": {}}, "bad_type"),
    ("list", "tools", {"result": {"tools": [{}]}}, "bad_type"),
    ("list", "tools", {"result": {"tools": [{"name": "a", "inputSchema": []}]}}, "bad_type"),
    ("list", "tools", {"result": {"tools": [{"name": "a", "outputSchema": True}]}}, "bad_type"),
    ("list", "tools", {"result": {"tools": [], "nextCursor": 5}}, "bad_type"),
    ("list", "resources", {"result": {"resources": [{"name": "a"}]}}, "bad_type"),
]


def outcome(event: Any) -> Any:
    """A violation of one call by its cause."""
    if isinstance(event, Violation):
        assert (event.code, event.call) == ("malformed_response", 7)
        return event.cause
    return event


@one_case(("kind", "name", "answer", "expected"), ANSWERS)
@one_case("era", ERAS)
def test_each_answer_is_one_event(era: Maker, kind: Kind, name: str, answer: Said, expected: Any) -> None:
    dialect = era()
    number = asked(dialect, kind, name)["id"]
    assert [outcome(event) for event in hear(dialect, {"id": number, **answer})] == [expected]
    # It was answered: a second time is late, and the session goes on.
    assert hear(dialect, {"id": number, **answer}) == []
    assert dialect.counters["late"] == 1
    asked(dialect, "method", "x/z", token=8)
    assert hear(dialect, result(number + 1, TEXT)) == [Reply(8, TEXT)]


def test_a_result_without_content_is_passed_on_and_told_once() -> None:
    dialect = legacy()
    for answer, told in (({"structuredContent": {}}, []), ({"a": 1}, ["no_content"]), ({"a": 2}, [])):
        number = asked(dialect, "tool", "t")["id"]
        *notices, reply = hear(dialect, result(number, answer))
        assert reply == Reply(7, answer)
        assert [each.kind for each in notices if isinstance(each, Notice)] == told
        assert all("the result of 't' has no content" in each.value for each in notices)


def test_structured_content_is_an_object_in_the_legacy_era_and_anything_in_the_modern() -> None:
    answer = {**TEXT, "structuredContent": [1]}
    for era, expected in ((legacy, "bad_type"), (modern, Reply(7, answer))):
        dialect = era()
        number = asked(dialect, "tool", "t")["id"]
        assert [outcome(event) for event in hear(dialect, result(number, answer))] == [expected]


@pytest.mark.parametrize("kind", ["partial", "", 5, None])
def test_a_result_of_an_unknown_type_is_no_result(kind: Any) -> None:
    dialect = modern()
    asked(dialect, "tool", "t")
    assert [outcome(event) for event in hear(dialect, result(2, {**TEXT, "resultType": kind}))] == [
        "result_type"
    ]


def test_the_legacy_era_knows_no_types_of_results() -> None:
    dialect = legacy("roots")
    for kind in ("input_required", "partial"):
        number = asked(dialect, "tool", "t")["id"]
        answer = {**TEXT, "resultType": kind}
        assert hear(dialect, result(number, answer)) == [Reply(7, answer)]


# --- lists ------------------------------------------------------------------------------------------------


def page(number: int, *names: str, cursor: str | None = None) -> Said:
    tools = {"tools": [{"name": name} for name in names]}
    return result(number, tools if cursor is None else {**tools, "nextCursor": cursor})


@pytest.mark.parametrize("era", ERAS)
def test_pages_become_one_list(era: Maker) -> None:
    dialect = era()
    first = asked(dialect, "list", "tools")["id"]
    (second,) = hear(dialect, page(first, "a", "b", cursor="x"))
    (third,) = hear(dialect, page(first + 1, "c", cursor=""))  # an empty cursor is one, too
    assert [(one["id"], one["params"]["cursor"]) for one in (second, third)] == [
        (first + 1, "x"),
        (first + 2, ""),
    ]
    assert hear(dialect, page(first + 2, "d")) == [Reply(7, [{"name": name} for name in "abcd"])]


def pages(dialect: McpDialect, answer: Callable[[int], Said]) -> tuple[str, int]:
    """How a list without an end ends, and after how many pages."""
    number = asked(dialect, "list", "tools")["id"]
    for count in range(1, 1000):
        (event,) = said(dialect.feed(dialect.read(json.dumps({"jsonrpc": "2.0", **answer(number)}).encode())))
        if not isinstance(event, dict):
            return outcome(event), count
        number = event["id"]
    raise AssertionError("it has no end")


@pytest.mark.parametrize(
    ("answer", "cause", "count"),
    [
        (lambda number: page(number, "a", cursor="same"), "cursor_repeats", 2),
        (lambda number: page(number, "a", cursor=str(number)), "too_many_pages", pending_call.MOST_PAGES),
        (lambda number: page(number, *["a"] * 3000, cursor=str(number)), "too_many_items", 4),
        (lambda number: page(number, "a" * 12_000_000, cursor=str(number)), "list_too_large", 3),
    ],
)
def test_a_list_has_an_end(answer: Callable[[int], Said], cause: str, count: int) -> None:
    dialect = legacy()
    assert pages(dialect, answer) == (cause, count)
    asked(dialect, "tool", "t", token=8)  # and the session goes on


def cause_of(event: Any) -> str:
    """Of a violation. Nothing: it is none."""
    return event.cause if isinstance(event, Violation) else ""


def test_lists_on_their_way_share_what_there_is() -> None:
    """One that ends, in whatever way, leaves its part to the others; the tools of the last one stay."""
    dialect = legacy()
    numbers = [asked(dialect, "list", "tools", token=token)["id"] for token in (1, 2, 3)]
    half = "a" * (STANDING * 2 // 5)
    assert [cause_of(hear(dialect, page(number, half, cursor="c"))[0]) for number in numbers[:2]] == ["", ""]
    assert cause_of(hear(dialect, page(numbers[2], half, cursor="c"))[0]) == "list_too_large"
    dialect.cancel(1, "given up")
    number = asked(dialect, "list", "tools", token=4)["id"]
    (event,) = hear(dialect, {"id": number, "result": {"tools": [{"name": half}]}})
    assert isinstance(event, Reply)
    number = asked(dialect, "list", "tools", token=5)["id"]
    assert cause_of(hear(dialect, page(number, half))[0]) == "list_too_large"
    hear(dialect, CHANGED)  # nothing is known of its tools any more
    number = asked(dialect, "list", "tools", token=6)["id"]
    assert cause_of(hear(dialect, page(number, half, cursor="c"))[0]) == ""


def test_a_cursor_is_short() -> None:
    for length, cause in ((pending_call.MOST_CURSOR, ""), (pending_call.MOST_CURSOR + 1, "cursor_too_long")):
        dialect = legacy()
        number = asked(dialect, "list", "tools")["id"]
        assert cause_of(hear(dialect, page(number, "a", cursor="c" * length))[0]) == cause


def test_what_a_server_wants_kept_is_bounded() -> None:
    for length, cause in ((STANDING // 4, ""), (STANDING // 2, "state_too_large")):
        dialect = modern()
        number = asked(dialect, "tool", "t")["id"]
        for _ in range(3):  # each round replaces the one before
            state = {"resultType": "input_required", "requestState": "s" * length}
            (event,) = hear(dialect, result(number, state))
            assert cause_of(event) == cause
            if cause:
                break
            number = event["id"]


def test_what_a_server_says_of_itself_is_bounded() -> None:
    for length, code in ((STANDING // 4, ""), (STANDING, "handshake_failed")):
        dialect = mcp.make(setting(()))
        dialect.opening()
        (event, *_) = hear(dialect, result(1, {**DISCOVERED, "instructions": "x" * length}))
        assert isinstance(event, Violation if code else Ready)
        if isinstance(event, Violation):
            assert (event.code, event.cause) == (code, "too_large")


def listed(dialect: McpDialect, *tools: Said) -> None:
    number = asked(dialect, "list", "tools", token=1000)["id"]
    (event,) = hear(dialect, result(number, {"tools": list(tools)}))
    assert isinstance(event, Reply)


CHANGED = {"method": "notifications/tools/list_changed"}


def test_what_is_not_in_the_list_is_not_called() -> None:
    dialect = legacy()
    listed(dialect, {"name": "echo"}, {"name": "add"})
    with pytest.raises(CallRefused) as refused:
        dialect.call(7, Call("tool", "ecoh"))
    event = refused.value.event
    assert isinstance(event, Violation)
    assert (event.code, event.call, event.hint) == ("tool_not_exposed", 7, "did you mean 'echo'?")
    hear(dialect, {"method": "notifications/prompts/list_changed"})
    with pytest.raises(CallRefused):
        dialect.call(7, Call("tool", "ecoh"))
    asked(dialect, "tool", "echo")
    assert hear(dialect, CHANGED) == [Notice("changed", {"list": "tools"})]
    asked(dialect, "tool", "ecoh", token=8)  # nothing is known any more


def test_a_list_that_changed_under_way_is_not_held_against_anybody() -> None:
    dialect = legacy()
    number = asked(dialect, "list", "tools")["id"]
    hear(dialect, CHANGED, page(number, "echo"))
    asked(dialect, "tool", "other", token=8)


SUM = {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"structuredContent": {"sum": 3}}, None),
        ({"structuredContent": {"sum": "three"}}, "output_schema"),
        ({"structuredContent": {}}, "output_schema"),
        ({"structuredContent": None}, "output_schema"),
        (TEXT, "output_schema"),
    ],
)
@pytest.mark.parametrize("era", ERAS)
def test_a_result_is_held_against_its_schema(era: Maker, answer: Said, expected: str | None) -> None:
    dialect = era()
    listed(dialect, {"name": "add", "outputSchema": SUM}, {"name": "free"})
    for token, name, cause in ((7, "add", expected), (7, "free", None)):
        number = asked(dialect, "tool", name, token=token)["id"]
        (event,) = hear(dialect, result(number, answer))
        assert outcome(event) == (cause or Reply(token, answer))


@pytest.mark.parametrize(
    "schema", [{"type": 5}, {"$ref": "https://example.com/schema"}, {"$ref": "#/nowhere"}]
)
def test_a_schema_of_no_use_is_said_once_and_holds_nothing_up(schema: Said) -> None:
    dialect = legacy()
    listed(dialect, {"name": "add", "outputSchema": schema})
    answer = {"structuredContent": {"sum": 3}}
    number = asked(dialect, "tool", "add")["id"]
    notice, reply = hear(dialect, result(number, answer))
    assert (notice.kind, notice.value["tool"], reply) == ("schema", "add", Reply(7, answer))
    assert asked(dialect, "tool", "add")["id"] == number + 1
    assert hear(dialect, result(number + 1, answer)) == [Reply(7, answer)]


def test_a_failure_is_not_held_against_the_schema() -> None:
    dialect = legacy()
    listed(dialect, {"name": "add", "outputSchema": SUM})
    number = asked(dialect, "tool", "add")["id"]
    assert isinstance(hear(dialect, result(number, FAILED))[0], Refusal)


# --- progress, cancelling, notices ------------------------------------------------------------------------


def progress(**params: Any) -> Said:
    return {"method": "notifications/progress", "params": params}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"progressToken": 7, "progress": 1}, {"progress": 1}),
        (
            {"progressToken": 7, "progress": 0.5, "total": 2, "message": "m", "x": 1},
            {"progress": 0.5, "total": 2, "message": "m"},
        ),
        ({"progressToken": 8, "progress": 1}, None),
        ({"progressToken": "7", "progress": 1}, None),
        ({"progressToken": 7.0, "progress": 1}, None),
        ({"progressToken": True, "progress": 1}, None),
        ({"progressToken": [7], "progress": 1}, None),
        ({"progressToken": 7, "progress": "half"}, None),
        ({"progressToken": 7}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("era", ERAS)
def test_progress(era: Maker, params: Said, expected: Said | None) -> None:
    dialect = era()
    asked(dialect, "tool", "t")
    assert hear(dialect, progress(**params)) == ([] if expected is None else [Progress(7, expected)])
    assert dialect.counters["stray_progress"] == (expected is None)


@pytest.mark.parametrize("era", ERAS)
def test_cancelling(era: Maker) -> None:
    dialect = era()
    number = asked(dialect, "tool", "t")["id"]
    cancelled = {
        "method": "notifications/cancelled",
        "params": {"requestId": number, "reason": "too slow"},
    }
    assert said(dialect.expired(7, "too slow")) == []
    assert said(dialect.cancel(7, "too slow")) == [cancelled]
    assert said(dialect.cancel(7, "again")) == []
    # server-everything goes on like this for a while
    assert hear(dialect, progress(progressToken=7, progress=1), result(number, TEXT)) == []
    assert (dialect.counters["late"], dialect.counters["stray_progress"]) == (1, 1)
    assert said(dialect.cancel(99, "never was")) == []


def test_cancelling_a_list_stops_its_pages() -> None:
    dialect = legacy()
    number = asked(dialect, "list", "tools")["id"]
    hear(dialect, page(number, "a", cursor="x"))
    (sent,) = said(dialect.cancel(7, ""))
    assert sent["params"]["requestId"] == number + 1
    assert hear(dialect, page(number + 1, "b", cursor="y")) == []


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        (
            "notifications/message",
            {"level": "info", "data": [1], "logger": "x", "y": 1},
            Notice("log", {"level": "info", "logger": "x", "data": [1]}),
        ),
        ("notifications/message", None, Notice("log", {})),
        ("notifications/prompts/list_changed", None, Notice("changed", {"list": "prompts"})),
        ("notifications/resources/list_changed", {}, Notice("changed", {"list": "resources"})),
        ("notifications/resources/updated", {"uri": "a:b"}, Notice("changed", {"resource": "a:b"})),
        ("notifications/x", [1], Notice("notification", {"method": "notifications/x", "params": [1]})),
    ],
)
@pytest.mark.parametrize("era", ERAS)
def test_notices(era: Maker, method: str, params: Any, expected: Notice) -> None:
    assert hear(era(), {"method": method, "params": params}) == [expected]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"plain text", Notice("stdout", "plain text")),
        (b"\xff" * 500, Notice("stdout", "\ufffd" * 200)),
        (b'{"jsonrpc": "2.0", "id": 1, "result"', Notice("stdout", '{"jsonrpc": "2.0", "id": 1, "result"')),
        (b'{"log": "json lines"}', Notice("stdout", "a JSON object with 'log'")),
        (b'{"jsonrpc": "1.0", "method": "x"}', Notice("stdout", "a JSON object with 'jsonrpc', 'method'")),
        (b'{"jsonrpc": "2.0"}', Notice("stdout", "a JSON object with 'jsonrpc'")),
        (b'[{"jsonrpc": "2.0", "method": "x"}]', Notice("stdout", "a JSON array of 1")),
        (b"5", Notice("stdout", "5")),
        (b"\xef\xbb\xbf{}", "bom"),
        (b'{"jsonrpc": "2.0", "method": "x", "params": NaN}', "bad_number"),
        (b'{"jsonrpc": "2.0", "method": "x", "params": 1e999}', "bad_number"),
        (b'{"jsonrpc": "2.0", "id": 1, "id": 2, "result": {}}', "duplicate_key"),
        (b"[" * 200 + b"]" * 200, "too_deep"),
    ],
)
@pytest.mark.parametrize("era", ERAS)
def test_lines_that_are_not_the_protocol(era: Maker, raw: bytes, expected: Any) -> None:
    dialect = era()
    (event,) = hear(dialect, raw)
    if isinstance(event, Violation):
        assert (event.code, event.call) == ("malformed_response", None)
        event = event.cause
    assert event == expected
    assert dialect.counters["unreadable"] + dialect.counters["not_rpc"] == isinstance(expected, Notice)


def test_batches_of_the_one_revision_that_has_them() -> None:
    dialect = legacy(version="2025-03-26")
    first, second = asked(dialect, "tool", "t", token=1)["id"], asked(dialect, "tool", "t", token=2)["id"]
    batch = [{"jsonrpc": "2.0", **result(number, TEXT)} for number in (first, second)]
    assert hear(dialect, batch) == [Reply(1, TEXT), Reply(2, TEXT)]
    (violation,) = hear(dialect, [1] * 1001)
    assert (violation.code, violation.cause) == ("malformed_response", "batch_too_large")


# --- questions of a legacy server -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"id": 1, "method": "ping"}, {"id": 1, "result": {}}),
        ({"id": "p", "method": "ping", "params": {}}, {"id": "p", "result": {}}),
        ({"id": 1, "method": "roots/list"}, HostCall(1, "roots/list", None)),
        (
            {"id": 0, "method": "sampling/createMessage", "params": {"x": 1}},
            HostCall(1, "sampling/createMessage", {"x": 1}),
        ),
        ({"id": -5, "method": "elicitation/create", "params": 5}, HostCall(1, "elicitation/create", 5)),
        (
            {"id": 1, "method": "tools/list"},
            {"id": 1, "error": {"code": -32601, "message": "the host has no such method"}},
        ),
        ({"id": None, "method": "ping"}, "bad_id"),
        ({"id": 1.5, "method": "ping"}, "bad_id"),
        ({"id": True, "method": "ping"}, "bad_id"),
        ({"id": [1], "method": "roots/list"}, "bad_id"),
        ({"id": {}, "method": "roots/list"}, "bad_id"),
        ({"id": "x" * 1025, "method": "ping"}, "bad_id"),
        ({"id": "x" * 1024, "method": "ping"}, {"id": "x" * 1024, "result": {}}),
    ],
)
def test_questions_of_a_legacy_server(request_: Said, expected: Any) -> None:
    (event,) = hear(legacy(), request_)
    assert (event.cause if isinstance(event, Violation) else event) == expected


def test_answers_go_back_under_the_servers_id_and_ahead_of_everything() -> None:
    dialect = legacy()
    hear(dialect, {"id": "a", "method": "roots/list"}, {"id": 5, "method": "roots/list"})
    (first,) = dialect.answer(2, Answer({"roots": []}))
    (second,) = dialect.answer(1, Answer(error=(-1, "no", None)))
    assert isinstance(first, Send) and isinstance(second, Send)
    assert (first.lane, second.lane) == ("reply", "reply")
    assert said([first, second]) == [
        {"id": 5, "result": {"roots": []}},
        {"id": "a", "error": {"code": -1, "message": "no"}},
    ]
    assert said(dialect.answer(1, Answer({}))) == said(dialect.answer(99, Answer({}))) == []
    assert hear(dialect, {"id": 5, "method": "roots/list"}) == [HostCall(3, "roots/list", None)]  # free again
    assert list(dialect.emit(1, "part")) == []


def test_a_question_taken_back() -> None:
    dialect = legacy()
    hear(dialect, {"id": 5, "method": "roots/list"})
    cancel = {"method": "notifications/cancelled", "params": {"requestId": 5}}
    assert hear(dialect, {"method": "notifications/cancelled", "params": {"requestId": "5"}}) == []
    assert hear(dialect, {"method": "notifications/cancelled", "params": {"requestId": [5]}}) == []
    assert hear(dialect, {"method": "notifications/cancelled"}) == []
    assert hear(dialect, cancel, cancel) == [HostCallCancelled(1)]
    assert said(dialect.answer(1, Answer({}))) == []
    assert hear(dialect, {"id": 5, "method": "roots/list"}) == [HostCall(2, "roots/list", None)]  # free again


def test_one_id_for_two_open_questions() -> None:
    dialect = legacy()
    hear(dialect, {"id": 5, "method": "roots/list"}, {"id": "5", "method": "roots/list"})
    (violation,) = hear(dialect, {"id": 5, "method": "roots/list"})
    assert (violation.code, violation.cause) == ("malformed_response", "duplicate_id")


def test_notifying() -> None:
    method = "notifications/roots/list_changed"
    assert said(legacy().notify(method, None)) == [{"method": method}]
    for dialect, wrong in ((legacy(), "notifications/x"), (modern(), method), (mcp.make(setting()), method)):
        with pytest.raises(CallRefused):
            dialect.notify(wrong, None)


# --- questions of a modern server -------------------------------------------------------------------------


def needs(number: int, *methods: str, state: Any = "s", **more: Any) -> Said:
    requests = {
        f"k{index}": {"method": method, "params": {"n": index}} for index, method in enumerate(methods)
    }
    value: Said = {"resultType": "input_required", "inputRequests": requests, **more}
    return result(number, value if state is None else {**value, "requestState": state})


def test_input_first_then_the_call_again() -> None:
    dialect = modern("roots", "sampling")
    first = asked(dialect, "tool", "t", {"a": 1})
    questions = hear(dialect, needs(2, "sampling/createMessage", "roots/list"))
    assert questions == [
        HostCall(-1, "sampling/createMessage", {"n": 0}),
        HostCall(-2, "roots/list", {"n": 1}),
    ]
    assert said(dialect.answer(-2, Answer({"roots": []}))) == []
    (again,) = said(dialect.answer(-1, Answer({"model": "m"})))
    answers = {"k0": {"model": "m"}, "k1": {"roots": []}}
    assert again == {
        "id": 3,
        "method": "tools/call",
        "params": {**first["params"], "inputResponses": answers, "requestState": "s"},
    }
    assert said(dialect.answer(-1, Answer({}))) == []  # answered
    assert hear(dialect, result(2, TEXT)) == []  # the old id is over
    # and once more, with other keys and without a state: nothing of the first round is left
    assert hear(dialect, needs(3, "roots/list", state=None)) == [HostCall(-3, "roots/list", {"n": 0})]
    (again,) = said(dialect.answer(-3, Answer({"roots": []})))
    assert again["params"] == {**first["params"], "inputResponses": {"k0": {"roots": []}}}
    assert hear(dialect, result(4, TEXT)) == [Reply(7, TEXT)]


def test_what_a_caller_sent_along_is_for_the_first_round_only() -> None:
    dialect = modern("roots")
    asked(dialect, "method", "tools/call", {"name": "t", "inputResponses": {"old": 1}, "requestState": "old"})
    hear(dialect, needs(2, "roots/list", state=None))
    (again,) = said(dialect.answer(-1, Answer({"roots": []})))
    assert again["params"]["inputResponses"] == {"k0": {"roots": []}}
    assert "requestState" not in again["params"]
    (again,) = hear(dialect, result(3, {"resultType": "input_required", "requestState": "new"}))
    assert again["params"]["requestState"] == "new" and "inputResponses" not in again["params"]


def test_a_state_alone_is_sent_back_at_once() -> None:
    dialect = modern()
    asked(dialect, "resource", "a:b")
    (again,) = hear(dialect, result(2, {"resultType": "input_required", "requestState": "s"}))
    assert again["params"]["requestState"] == "s" and "inputResponses" not in again["params"]


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ({}, "input_required"),
        ({"inputRequests": {}}, "input_required"),
        ({"inputRequests": [1]}, "bad_type"),
        ({"inputRequests": {"k": 1}}, "input_required"),
        ({"inputRequests": {"k": {"method": "tools/call"}}}, "input_required"),
        ({"inputRequests": {"k": {"method": ["roots/list"]}}}, "input_required"),
        ({"inputRequests": {str(n): {"method": "roots/list"} for n in range(33)}}, "input_required"),
        ({"requestState": 5}, "bad_type"),
    ],
)
def test_input_nobody_can_give(value: Said, cause: str) -> None:
    dialect = modern("roots")
    asked(dialect, "tool", "t")
    found = hear(dialect, result(2, {"resultType": "input_required", **value}))
    assert [outcome(event) for event in found] == [cause]


@pytest.mark.parametrize(("kind", "name"), [("list", "tools"), ("method", "x/y")])
def test_only_three_methods_may_need_input(kind: Kind, name: str) -> None:
    dialect = modern("roots")
    asked(dialect, kind, name)
    assert [outcome(event) for event in hear(dialect, needs(2, "roots/list"))] == ["result_type"]


def test_input_is_asked_for_only_so_often() -> None:
    dialect = modern("roots")
    number = asked(dialect, "tool", "t")["id"]
    for _ in range(pending_call.MOST_ROUNDS):
        (question,) = hear(dialect, needs(number, "roots/list"))
        (again,) = said(dialect.answer(question.ticket, Answer({"roots": []})))
        number = again["id"]
    assert [outcome(event) for event in hear(dialect, needs(number, "roots/list"))] == ["too_many_rounds"]


def test_a_refused_input_ends_the_call_and_its_other_questions() -> None:
    dialect = modern("roots")
    asked(dialect, "tool", "t")
    hear(dialect, needs(2, "sampling/createMessage", "roots/list"))
    cancelled, violation = dialect.answer(-1, Answer(error=(-1, "User rejected\x1b[31m", None)))
    assert cancelled == HostCallCancelled(-2)
    assert isinstance(violation, Violation)
    assert violation[:3] == (
        "capability_not_allowed",
        "the server needs sampling/createMessage for this call, which was refused: -1 User rejected\\x1b[31m",
        "input:sampling/createMessage",
    )
    assert violation.call == 7
    assert said(dialect.answer(-2, Answer({"roots": []}))) == []


def test_input_for_many_calls_at_once_has_a_limit() -> None:
    dialect = modern("roots")
    for token in range(MOST_TICKETS // pending_call.MOST_INPUTS):
        number = asked(dialect, "tool", "t", token=token + 100)["id"]
        assert (
            len(hear(dialect, needs(number, *["roots/list"] * pending_call.MOST_INPUTS)))
            == pending_call.MOST_INPUTS
        )
    number = asked(dialect, "tool", "t")["id"]
    assert [outcome(event) for event in hear(dialect, needs(number, "roots/list"))] == ["flood"]
    assert len(dialect.cancel(100, "")) == pending_call.MOST_INPUTS  # makes room again
    number = asked(dialect, "tool", "t")["id"]
    assert isinstance(hear(dialect, needs(number, "roots/list"))[0], HostCall)


def test_an_input_that_is_no_json_ends_the_call() -> None:
    dialect = modern("roots")
    asked(dialect, "tool", "t")
    hear(dialect, needs(2, "roots/list"))
    (violation,) = dialect.answer(-1, Answer({"roots": object()}))
    assert isinstance(violation, Violation) and (violation.code, violation.call) == ("internal", 7)
    asked(dialect, "tool", "t")


def test_cancelling_while_input_is_waited_for() -> None:
    dialect = modern("roots")
    asked(dialect, "tool", "t")
    hear(dialect, needs(2, "roots/list"))
    assert dialect.cancel(7, "") == [HostCallCancelled(-1)]  # nothing is open that the server could stop
    assert said(dialect.answer(-1, Answer({"roots": []}))) == []


def test_a_modern_server_sends_no_requests() -> None:
    dialect = modern("roots")
    (notice,) = hear(dialect, {"id": 1, "method": "roots/list"})
    assert isinstance(notice, Notice) and notice.kind == "dropped"
    assert dialect.counters["dropped"] == 1
    for number in range(MOST_TICKETS + 1):  # and none of them is kept
        assert isinstance(hear(dialect, {"id": number, "method": "ping"})[0], Notice)


def test_a_subscription_ends_by_the_servers_word() -> None:
    dialect = modern()
    number = asked(dialect, "method", "subscriptions/listen", {})["id"]
    asked(dialect, "tool", "t", token=8)
    cancel = {"method": "notifications/cancelled", "params": {"requestId": number + 1}}
    assert hear(dialect, cancel) == []  # a call is not the server's to cancel
    cancel["params"]["requestId"] = number  # type: ignore[index]
    assert hear(dialect, cancel, cancel) == [Reply(7, {})]


# --- times and limits ---------------------------------------------------------------------------------------


def test_times() -> None:
    dialect = mcp.make(setting())
    call = Call("tool", "t")
    assert (
        (dialect.handshake_seconds, dialect.seconds(call))
        == (handshake.SECONDS, mcp.CALL_SECONDS)
        == (30, 60)
    )
    declared = mcp.make(setting(timeouts={"handshake": 5.0, "call": 6.0}))
    assert (declared.handshake_seconds, declared.seconds(call)) == (5, 6)
    # The contract has no time for its handshake, so a limit may also raise it.
    assert mcp.make(setting(handshake=90.0)).handshake_seconds == 90 and dialect.handshake_is_raisable
    assert make_inspector(setting(handshake=90.0)).handshake_seconds == 90
    assert dialect.shutdown_steps() == ShutdownSteps(exit=2.0, terminate=2.0)
    assert not dialect.one_shot


# --- anything at all ----------------------------------------------------------------------------------------

words = st.sampled_from(
    (
        *("jsonrpc", "2.0", "id", "method", "params", "result", "error", "code", "message", "data", "_meta"),
        *("supported", "supportedVersions", "protocolVersion", "capabilities", "serverInfo", "resultType"),
        *("input_required", "inputRequests", "requestState", "complete", "tools", "nextCursor", "content"),
        *("structuredContent", "isError", "type", "text", "progressToken", "progress", "requestId"),
        *("notifications/progress", "notifications/cancelled", "notifications/message", "roots/list", "ping"),
        *(
            "notifications/tools/list_changed",
            "sampling/createMessage",
            "name",
            "uri",
            "messages",
            MODERN,
            LEGACY,
        ),
    )
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=6),
    max_leaves=12,
)
messages = st.one_of(
    anything,
    st.fixed_dictionaries({"id": anything, "method": words | anything}, optional={"params": anything}),
    st.fixed_dictionaries({"method": words}, optional={"params": anything}),
    st.fixed_dictionaries({"id": st.integers(0, 12)}, optional={"result": anything, "error": anything}),
    st.fixed_dictionaries(
        {"id": st.integers(1, 12), "result": st.dictionaries(words, anything, min_size=1, max_size=6)}
    ),
    st.sampled_from(
        (result(1, DISCOVERED), error(1, -32601), result(2, INITIALIZED), needs(2, "roots/list"))
    ),
)
frames = st.binary(max_size=40) | messages.map(
    lambda value: json.dumps({"jsonrpc": "2.0", **value} if isinstance(value, dict) else value).encode()
)
schema_words = st.sampled_from(
    (
        "type",
        "properties",
        "items",
        "$ref",
        "$defs",
        "allOf",
        "anyOf",
        "not",
        "pattern",
        "required",
        "enum",
        "$id",
    )
)
schemas = st.recursive(
    anything | st.sampled_from(("#", "#/$defs/type", "object", "string", "(a+)+$")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(schema_words, inner, max_size=4),
    max_leaves=8,
)
KNOWN_EVENTS = (*(Send, Ready, Reply, Refusal, Progress, HostCall, HostCallCancelled, Notice, Violation),)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(("new", "silent", "modern", "legacy")),
    st.lists(frames | st.none(), max_size=12),
    st.booleans(),
)
def test_whatever_comes_has_a_defined_outcome(start: str, heard: list[bytes | None], answers: bool) -> None:
    """None among the frames is silence. Calls are open all the time, and the host answers or refuses."""
    dialect = {"modern": modern, "legacy": legacy}.get(start, lambda: mcp.make(setting()))()
    if start in ("new", "silent"):
        dialect.opening()
        if start == "silent":
            dialect.silence()
    calls: tuple[tuple[Kind, str], ...] = (("tool", "t"), ("list", "tools"), ("prompt", "p"), ("method", "m"))
    opened = ended = 0
    if start in ("modern", "legacy"):
        for kind, name in calls:
            dialect.call(opened, Call(kind, name))
            opened += 1
    for frame in heard:
        events = dialect.silence() if frame is None else dialect.feed(dialect.read(frame))
        while events:
            assert all(isinstance(event, KNOWN_EVENTS) for event in events)
            said(events)
            ended += sum(isinstance(event, Reply | Refusal) for event in events)
            ended += sum(isinstance(event, Violation) and event.call is not None for event in events)
            answer = Answer({"roots": []}) if answers else Answer(error=(-1, "no", None))
            tickets = [event.ticket for event in events if isinstance(event, HostCall)]
            events = [event for ticket in tickets for event in dialect.answer(ticket, answer)]
    assert ended <= opened
    for token in range(opened):
        said(dialect.cancel(token, "over"))
    assert all(count >= 0 for count in dialect.counters.values())


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(schema_words, schemas, max_size=5), anything)
def test_whatever_a_schema_is(document: Said, content: Any) -> None:
    dialect = modern()
    listed(dialect, {"name": "t", "outputSchema": document})
    number = asked(dialect, "tool", "t")["id"]
    found = hear(dialect, result(number, {"structuredContent": content}))
    assert [type(event) for event in found] in ([Reply], [Violation], [Notice, Reply])
