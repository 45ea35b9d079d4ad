"""rterm.plugin.v1 as a table: what a plugin says, and what that means. A new case is a new row."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts.rune import manifest
from runner.contracts.rune.dialect import RuneDialect, allow_list, make, objection
from runner.contracts.rune.exchange import LINE_LIMIT, ExchangeFramer
from runner.contracts.rune.terms import PROTOCOL, TIMEOUTS
from runner.manifest.load import load
from runner.plugin import Entrypoint, Plugin
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Dialect,
    Event,
    Identity,
    Notice,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    ShutdownSteps,
    Violation,
)
from sandbox.spec import Limits, SandboxSpec
from tests.conftest import ROOT
from tests.tables import one_case

ECHO = ROOT / "tests/plugins/rune_echo"
NAME = "demo"
TOOL = "demo.echo"
REQUEST_ID = "plugin_req_0001020304050607"
TOKEN = 7
GONE = object()  # a key that is left out
GRANTED = ("fs.write", "workspace:read")


def plugin(**changes: Any) -> Plugin:
    made = Plugin(
        id=NAME,
        version="1",
        contract="rune",
        name="Demo",
        description="",
        manifest="/bundles/demo/rterm-plugin.json",
        root="/bundles/demo",
        entrypoint=Entrypoint("/bundles/demo/plugin.py", (), "/bundles/demo", bare_environment=True),
        spec=SandboxSpec(enabled=True),
        exports=(("tools", (TOOL, "demo.other")),),
        timeouts=tuple(TIMEOUTS.items()),
    )
    return made._replace(**changes)


def setting(**changes: Any) -> Setting:
    return Setting(plugin=plugin(), call=Call("tool", TOOL))._replace(**changes)


def capable(**changes: Any) -> Setting:
    """A plugin that may declare two capabilities."""
    return setting(plugin=plugin(capabilities=GRANTED), declare=("*",))._replace(**changes)


def fresh(where: Setting | None = None) -> RuneDialect:
    return RuneDialect(where or setting(), random=lambda count: bytes(range(count)))


def opened(where: Setting | None = None) -> RuneDialect:
    machine = fresh(where)
    machine.opening()
    return machine


def ready(where: Setting | None = None) -> RuneDialect:
    machine = opened(where)
    [event] = hear(machine, encoded(handshake()))
    assert isinstance(event, Ready)
    return machine


def asked(where: Setting | None = None, call: Call | None = None) -> RuneDialect:
    machine = ready(where)
    [event] = machine.call(TOKEN, call or Call("tool", TOOL))
    assert isinstance(event, Send)
    return machine


def handshake(changes: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    said = {
        "plugin_id": NAME,
        "plugin_version": "1",
        "protocol_version": PROTOCOL,
        "exposed_tools": [TOOL],
        **(changes or {}),
    }
    return without({"type": "handshake", "manifest": without(said), **top})


def says(**fields: Any) -> dict[str, Any]:
    """A handshake with such a manifest."""
    return handshake(fields)


def response(**changes: Any) -> dict[str, Any]:
    said = {"type": "response", "request_id": REQUEST_ID, "status": "ok", "output": {"a": 1}}
    return without({**said, **changes})


def without(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not GONE}


def encoded(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n"


def hear(machine: RuneDialect, data: bytes) -> list[Event]:
    """The way of a session: through the framer, then read, then fed."""
    return [event for raw in machine.framer().feed(data) for event in machine.feed(machine.read(raw))]


def hear_last(machine: RuneDialect, data: bytes) -> list[Event]:
    events = hear(machine, data)
    return events + [event for raw in machine.framer().finish() for event in machine.feed(machine.read(raw))]


def violation(events: Sequence[Event]) -> Violation:
    [event] = events
    assert isinstance(event, Violation), event
    assert event.call is None and event.message
    return event


# --- the handshake: one row for each violation, in the contract's order ------------------------------------

GOOD = json.dumps(handshake()).encode()
ONE_OVER = b'"' + b"x" * (LINE_LIMIT - 1) + b'"'
assert len(ONE_OVER) == LINE_LIMIT + 1

FAILED, MISMATCH = "handshake_failed", "protocol_version_mismatch"
NOT_DECLARED, NOT_ALLOWED = "capability_not_declared", "capability_not_allowed"

# name, what is said, cause; whatever was waited for
UNREADABLE: list[tuple[str, bytes, str]] = [
    ("blank line", b"\n", "blank_line"),
    ("line of blanks", b" \t\r\v\f\n", "blank_line"),
    ("line of blanks beyond ascii", "\u00a0\u2003\u3000\x85\n".encode(), "blank_line"),
    ("one byte over", ONE_OVER + b"\n", "frame_too_large"),
    ("one byte over, blanks around it", b"  " + ONE_OVER + b"\n", "frame_too_large"),
    ("text", b"starting up...\n", "bad_json"),
    ("half an object", b'{"type":\n', "bad_json"),
    ("trailing data", GOOD + b" {}\n", "bad_json"),
    ("trailing comma", b'{"type":"handshake",}\n', "bad_json"),
    ("control character", b'{"type":"hand\x01shake"}\n', "bad_json"),
    ("NUL", b"\0" + GOOD + b"\n", "bad_json"),
    ("byte order mark", b"\xef\xbb\xbf" + GOOD + b"\n", "bom"),
    ("byte order mark behind blanks", b"  \xef\xbb\xbf" + GOOD + b"\n", "bom"),
    ("NaN", b'{"x":NaN}\n', "bad_number"),
    ("Infinity", b'{"x":Infinity}\n', "bad_number"),
    ("-Infinity", b'{"x":-Infinity}\n', "bad_number"),
    ("float overflow", b'{"x":1e999}\n', "bad_number"),
    ("5000 digits", b'{"x":' + b"9" * 5000 + b"}\n", "bad_number"),
    ("deep", b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}\n", "too_deep"),
    ("deep without end", b"[" * 200_000 + b"\n", "too_deep"),
    ("array", b"[]\n", "bad_type"),
    ("string", b'"handshake"\n', "bad_type"),
    ("number", b"5\n", "bad_type"),
    ("bool", b"true\n", "bad_type"),
]

WRONG_TYPES: list[tuple[str, dict[str, Any]]] = [
    ("type", handshake(type=5)),
    ("type bool", handshake(type=True)),
    ("manifest array", handshake(manifest=[])),
    ("manifest string", handshake(manifest="demo")),
    ("plugin_id", handshake({"plugin_id": 5})),
    ("plugin_id object", handshake({"plugin_id": {}})),
    ("plugin_version", handshake({"plugin_version": 1.0})),
    ("protocol_version", handshake({"protocol_version": ["rterm.plugin.v1"]})),
    ("exposed_tools string", handshake({"exposed_tools": TOOL})),
    ("exposed_tools object", handshake({"exposed_tools": {}})),
    ("exposed_tools item", handshake({"exposed_tools": [TOOL, 5]})),
    ("exposed_tools nested", handshake({"exposed_tools": [[TOOL]]})),
    ("capabilities string", handshake({"capabilities": "fs.write"})),
    ("capabilities item", handshake({"capabilities": [False]})),
    ("beside a wrong type", handshake({"plugin_id": 5}, type="hello")),
]

# name, what is said, code, cause, the id attached (None: the bound name)
HANDSHAKES: list[tuple[str, Any, str, str, str | None]] = [
    *((name, line, "malformed_response", cause, None) for name, line, cause in UNREADABLE),
    *((f"wrong type: {name}", said, "malformed_response", "bad_type", None) for name, said in WRONG_TYPES),
    ("type missing", handshake(type=GONE), FAILED, "message_type", None),
    ("type null", handshake(type=None), FAILED, "message_type", None),
    ("type other", handshake(type="response"), FAILED, "message_type", None),
    ("type padded", handshake(type="handshake "), FAILED, "message_type", None),
    ("key of other case", handshake(type=GONE, Type="handshake"), FAILED, "message_type", None),
    ("null", b"null\n", FAILED, "message_type", None),
    ("too large in memory", handshake(more=[{}] * 200_000), FAILED, "too_large", None),
    ("empty object", b"{}\n", FAILED, "message_type", None),
    ("the last of two keys", b'{"type":"handshake","type":"x"}\n', FAILED, "message_type", None),
    ("manifest missing", handshake(manifest=GONE), MISMATCH, "protocol_version", ""),
    ("manifest null", handshake(manifest=None), MISMATCH, "protocol_version", ""),
    ("protocol missing", says(protocol_version=GONE), MISMATCH, "protocol_version", NAME),
    (
        "protocol newer",
        handshake({"protocol_version": "rterm.plugin.v2", "plugin_id": "other"}),
        MISMATCH,
        "protocol_version",
        "other",
    ),
    (
        "protocol of another case",
        says(protocol_version="RTERM.plugin.v1"),
        MISMATCH,
        "protocol_version",
        NAME,
    ),
    (
        "protocol padded with what is no blank",
        says(protocol_version=PROTOCOL + "\x1c"),
        MISMATCH,
        "protocol_version",
        NAME,
    ),
    ("id missing", says(plugin_id=GONE), FAILED, "plugin_id_missing", None),
    ("id null", says(plugin_id=None), FAILED, "plugin_id_missing", None),
    ("id blank", says(plugin_id=" \u00a0"), FAILED, "plugin_id_missing", None),
    ("version missing", says(plugin_version=GONE), FAILED, "plugin_version_missing", NAME),
    (
        "version blank",
        handshake({"plugin_version": "\t", "plugin_id": "x"}),
        FAILED,
        "plugin_version_missing",
        "x",
    ),
    ("tools missing", says(exposed_tools=GONE), FAILED, "exposed_tools_missing", NAME),
    ("tools null", says(exposed_tools=None), FAILED, "exposed_tools_missing", NAME),
    ("tools empty", says(exposed_tools=[]), FAILED, "exposed_tools_missing", NAME),
    ("id of another", says(plugin_id="other"), FAILED, "plugin_id_mismatch", "other"),
    ("id padded", says(plugin_id="demo "), FAILED, "plugin_id_mismatch", "demo "),
    ("id of other case", says(plugin_id="Demo"), FAILED, "plugin_id_mismatch", "Demo"),
    (
        "id with bad utf-8",
        json.dumps(says(plugin_id="demo?")).encode().replace(b"?", b"\xff") + b"\n",
        FAILED,
        "plugin_id_mismatch",
        "demo\ufffd",
    ),
    (
        "id with half a surrogate pair",
        says(plugin_id="demo\ud800"),
        FAILED,
        "plugin_id_mismatch",
        "demo\ufffd",
    ),
    ("tool absent", says(exposed_tools=["x"]), "tool_not_exposed", "exposed_tools", NAME),
    ("tool null", says(exposed_tools=[None]), "tool_not_exposed", "exposed_tools", NAME),
    ("tool padded", says(exposed_tools=[TOOL + " "]), "tool_not_exposed", "exposed_tools", NAME),
]

# With an allow-list of two.
CAPABILITIES: list[tuple[str, Any, str, str]] = [
    ("missing", GONE, NOT_DECLARED, "capabilities_missing"),
    ("null", None, NOT_DECLARED, "capabilities_missing"),
    ("none", [], NOT_DECLARED, "capabilities_missing"),
    ("empty", [""], NOT_DECLARED, "capability_blank"),
    ("item null", [None], NOT_DECLARED, "capability_blank"),
    ("padded", ["fs.write "], NOT_DECLARED, "capability_blank"),
    ("padded beyond ascii", ["\u2003fs.write"], NOT_DECLARED, "capability_blank"),
    ("twice", ["fs.write", "fs.write"], NOT_DECLARED, "capability_repeated"),
    ("not listed", ["net"], NOT_ALLOWED, "bundle"),
    ("case", ["FS.write"], NOT_ALLOWED, "bundle"),
    ("a pattern is no capability", ["*"], NOT_ALLOWED, "bundle"),
    ("padded, then not allowed", [" net", "net"], NOT_DECLARED, "capability_blank"),
    ("not allowed, then padded", ["net", " net"], NOT_ALLOWED, "bundle"),
    ("twice, then not allowed", ["fs.write"] * 2 + ["net"], NOT_DECLARED, "capability_repeated"),
    ("not allowed, then twice", ["net", "fs.write", "fs.write"], NOT_ALLOWED, "bundle"),
    ("twice, then padded", ["fs.write"] * 2 + [""], NOT_DECLARED, "capability_repeated"),
    ("padded, then twice", ["fs.write", "", "fs.write"], NOT_DECLARED, "capability_blank"),
    ("not allowed, twice", ["net", "net"], NOT_ALLOWED, "bundle"),
    ("good, then padded", [*GRANTED, " x"], NOT_DECLARED, "capability_blank"),
]


def test_what_the_plugin_is_told_first() -> None:
    [sent] = fresh().opening()
    assert sent == Send(b'{"type":"handshake","protocol_version":"rterm.plugin.v1"}\n')


def test_who_gives_a_configuration_is_told_that_it_is_not_sent() -> None:
    plain = fresh().opening()
    *sent, notice = fresh(setting(config={"a": 1})).opening()
    assert sent == [*plain] and isinstance(notice, Notice) and notice.kind == "config_ignored"


def test_a_good_handshake() -> None:
    machine: Dialect = opened()
    said = handshake({"exposed_tools": ["other", TOOL], "plugin_version": " 1 "})
    [event] = machine.feed(machine.read(encoded(said)))
    assert event == Ready(
        Identity(NAME, " 1 ", PROTOCOL, tools=("other", TOOL), details={"capabilities": []})
    )


@one_case(
    ("said", "code", "cause", "attached"), [row[1:] for row in HANDSHAKES], ids=[row[0] for row in HANDSHAKES]
)
def test_a_wrong_handshake(said: Any, code: str, cause: str, attached: str | None) -> None:
    machine = opened()
    found = violation(hear(machine, encoded(said)))
    assert (found.code, found.cause, found.plugin_id) == (code, cause, attached)
    assert machine.feed(machine.read(encoded(handshake()))) == ()  # a good one does not make up for it
    with pytest.raises(CallRefused):
        machine.call(TOKEN, Call("tool", TOOL))


@pytest.mark.parametrize(
    ("declared", "code", "cause"), [row[1:] for row in CAPABILITIES], ids=[row[0] for row in CAPABILITIES]
)
def test_wrong_capabilities(declared: Any, code: str, cause: str) -> None:
    found = violation(hear(opened(capable()), encoded(handshake({"capabilities": declared}))))
    assert (found.code, found.cause, found.plugin_id) == (code, cause, NAME)


@pytest.mark.parametrize("declared", [["fs.write"], ["workspace:read"], [*GRANTED], [*reversed(GRANTED)]])
def test_a_part_of_what_is_allowed_may_be_declared(declared: list[str]) -> None:
    [event] = hear(opened(capable()), encoded(handshake({"capabilities": declared})))
    assert isinstance(event, Ready) and event.identity.details == {"capabilities": declared}


@pytest.mark.parametrize("declared", [GONE, None, []])
def test_nothing_allowed_and_nothing_declared(declared: Any) -> None:
    [event] = hear(opened(), encoded(handshake({"capabilities": declared})))
    assert isinstance(event, Ready)


def test_nothing_allowed_and_something_declared() -> None:
    found = violation(hear(opened(), encoded(handshake({"capabilities": ["net"]}))))
    assert (found.code, found.cause) == ("capability_not_allowed", "bundle")


@pytest.mark.parametrize(
    ("listed", "patterns", "allowed"),
    [
        (GRANTED, (), set()),
        (GRANTED, ("*",), set(GRANTED)),
        (GRANTED, ("fs.*",), {"fs.write"}),
        (GRANTED, ("FS.*",), set()),
        (GRANTED, ("workspace:read", "net"), {"workspace:read"}),
        ((), ("*",), set()),
    ],
)
def test_the_bundle_asks_and_the_policy_allows(
    listed: tuple[str, ...], patterns: tuple[str, ...], allowed: set[str]
) -> None:
    assert allow_list(plugin(capabilities=listed), patterns) == allowed


@pytest.mark.parametrize("patterns", [(), ("workspace:*",)])
def test_the_policy_cuts_what_the_bundle_lists(patterns: tuple[str, ...]) -> None:
    machine = opened(capable(declare=patterns))
    found = violation(hear(machine, encoded(handshake({"capabilities": ["fs.write"]}))))
    assert (found.code, found.cause) == ("capability_not_allowed", "policy")
    # Who is allowed nothing need not declare anything.
    machine = opened(capable(declare=()))
    assert isinstance(hear(machine, encoded(handshake()))[0], Ready)


# Changes that make a good handshake wrong, in the order they are looked for: (manifest, top level), cause.
IN_ORDER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"capabilities": "x"}, {}, "bad_type"),
    ({}, {"type": "x"}, "message_type"),
    ({"protocol_version": "x"}, {}, "protocol_version"),
    ({"plugin_id": ""}, {}, "plugin_id_missing"),
    ({"plugin_version": ""}, {}, "plugin_version_missing"),
    ({"exposed_tools": []}, {}, "exposed_tools_missing"),
    ({"plugin_id": "other"}, {}, "plugin_id_mismatch"),
    ({"exposed_tools": ["other"]}, {}, "exposed_tools"),
    ({"capabilities": []}, {}, "capabilities_missing"),
    ({"capabilities": [""]}, {}, "capability_blank"),
    ({"capabilities": ["fs.write", "fs.write"]}, {}, "capability_repeated"),
    ({"capabilities": ["net"]}, {}, "bundle"),
]
PAIRS = [
    (first, second)
    for first, second in itertools.combinations(IN_ORDER, 2)
    if not first[0].keys() & second[0].keys()
]


@one_case("turned", [False, True])
@one_case(("first", "second"), PAIRS, ids=[f"{a[2]}-{b[2]}" for a, b in PAIRS])
def test_of_two_faults_the_first_rule_decides(first: Any, second: Any, turned: bool) -> None:
    """Whichever stands first in the text."""
    fields = {"capabilities": ["fs.write"], **first[0], **second[0]}
    top = {**first[1], **second[1]}
    said = handshake(fields, **top)
    if turned:
        said = dict(reversed(said.items()))
        said["manifest"] = dict(reversed(said["manifest"].items()))
    assert violation(hear(opened(capable()), encoded(said))).cause == first[2]


@pytest.mark.parametrize(
    "line",
    [
        GOOD,  # the last line, without a newline
        GOOD + b"\n",
        GOOD + b"\r\n",
        b"   \t" + GOOD + b"\n",
        b"\v\f" + GOOD + b"  \r\n",
        "\u00a0".encode() + GOOD + b"\n",
        GOOD + "\u3000\n".encode(),
        encoded(handshake({"protocol_version": f" {PROTOCOL}\r\n"})),
        encoded(handshake({"x": NAME, "tools": 5}, manifest_version=[], protocol_version=3)),
        encoded(handshake(extra=[[[{}]]])),
        encoded(handshake({"exposed_tools": [None, TOOL]})),
        encoded(handshake({"extra": "\ud800"})),
        json.dumps(handshake({"extra": "?"})).encode().replace(b"?", b"\xff\xfe") + b"\n",
        b'{"type":"x",' + GOOD[1:] + b"\n",  # the last of two keys counts
        b'{"x":9223372036854775807,' + GOOD[1:] + b"\n",
        json.dumps(handshake(), ensure_ascii=True).replace("demo", "\\u0064emo").encode() + b"\n",
    ],
)
def test_lines_that_are_right(line: bytes) -> None:
    [event] = hear_last(opened(), line)
    assert isinstance(event, Ready) and event.identity.id == NAME


def filled(said: dict[str, Any], size: int) -> bytes:
    """A line of exactly `size` bytes that says the same."""
    room = size - len(json.dumps({**said, "pad": ""}))
    line = json.dumps({**said, "pad": "x" * room}).encode()
    assert len(line) == size
    return line


EDGES: list[tuple[str, int, bytes, bytes, bool]] = [
    ("exactly", LINE_LIMIT, b"", b"\n", True),
    ("one over", LINE_LIMIT + 1, b"", b"\n", False),
    ("exactly, CRLF", LINE_LIMIT, b"", b"\r\n", True),
    ("one over, CRLF", LINE_LIMIT + 1, b"", b"\r\n", False),
    ("exactly, blanks before", LINE_LIMIT, b" " * 5000, b"\r\n", True),
    ("one over, blanks before", LINE_LIMIT + 1, b" " * 5000, b"\n", False),
    ("exactly, no newline", LINE_LIMIT, b"", b"", True),
    ("one over, no newline", LINE_LIMIT + 1, b"", b"", False),
]


@pytest.mark.parametrize(
    ("size", "before", "after", "fits"), [row[1:] for row in EDGES], ids=[row[0] for row in EDGES]
)
def test_how_long_a_line_may_be(size: int, before: bytes, after: bytes, fits: bool) -> None:
    for machine, said in ((opened(), handshake()), (asked(), response())):
        events = hear_last(machine, before + filled(said, size) + after)
        fault = machine.framer().fault
        if fits:
            assert fault is None and isinstance(events[0], Ready | Reply)
        elif fault is not None:
            assert not events
        else:
            found = violation(events)
            assert (found.code, found.cause) == ("malformed_response", "frame_too_large")


def test_a_line_without_end_is_found_out_at_once() -> None:
    framer = ExchangeFramer()
    fed = 0
    while framer.fault is None:
        assert framer.feed(b"x" * 1000) == [] and framer.pending <= LINE_LIMIT + 1
        fed += 1000
        assert fed <= LINE_LIMIT + 2000
    assert framer.fault.cause == "frame_too_large"
    assert framer.feed(GOOD + b"\n") == [] and framer.finish() == []


def test_blanks_without_end_are_not_held() -> None:
    framer = ExchangeFramer()
    for _ in range(2048):
        assert framer.feed(b" " * 1024) == [] and framer.pending == 0
    assert framer.fault is None
    assert framer.feed(b"x\n") == [b"x"]


@pytest.mark.parametrize("blanks", [b"", b" ", b" \t\r", "\u00a0".encode()])
def test_blanks_before_the_end_are_an_end_and_no_line(blanks: bytes) -> None:
    assert hear_last(opened(), blanks) == []
    assert hear_last(asked(), blanks) == []


# --- the response ------------------------------------------------------------------------------------------

ERROR = {"code": "not_found", "message": "no such thing"}

RESPONSES: list[tuple[str, Any, str]] = [
    *UNREADABLE,
    ("type number", response(type=5), "bad_type"),
    ("request_id number", response(request_id=5), "bad_type"),
    ("status bool", response(status=True), "bad_type"),
    ("error string", response(error="x"), "bad_type"),
    ("error array", response(error=[]), "bad_type"),
    ("error false", response(error=False), "bad_type"),
    ("error.code number", response(status="error", error={**ERROR, "code": 5}), "bad_type"),
    ("error.message object", response(status="error", error={**ERROR, "message": {}}), "bad_type"),
    ("metadata array", response(metadata=[]), "bad_type"),
    ("metadata string", response(metadata="x"), "bad_type"),
    ("null", b"null\n", "message_type"),
    ("empty object", b"{}\n", "message_type"),
    ("type missing", response(type=GONE), "message_type"),
    ("a second handshake", handshake(), "message_type"),
    ("type padded", response(type=" response"), "message_type"),
    ("id missing", response(request_id=GONE), "request_id"),
    ("id null", response(request_id=None), "request_id"),
    ("id of another", response(request_id="plugin_req_ffffffffffffffff"), "request_id"),
    ("id in capitals", response(request_id=REQUEST_ID.upper()), "request_id"),
    ("id padded", response(request_id=REQUEST_ID + " "), "request_id"),
    ("status missing", response(status=GONE), "status"),
    ("status null", response(status=None), "status"),
    ("status OK", response(status="OK"), "status"),
    ("status padded", response(status="ok "), "status"),
    ("ok with an error", response(error=ERROR), "error_with_ok"),
    ("ok with an empty error", response(error={}), "error_with_ok"),
    ("error without one", response(status="error"), "error_missing"),
    ("error null", response(status="error", error=None), "error_missing"),
    ("error empty", response(status="error", error={}), "error_missing"),
    ("error blank", response(status="error", error={"code": "x", "message": " \n"}), "error_missing"),
    ("error message null", response(status="error", error={"code": "x", "message": None}), "error_missing"),
    # two at once: the first rule decides
    ("type and id", response(type="x", request_id="x"), "message_type"),
    ("type and status", response(type="x", status="x"), "message_type"),
    ("type and error", response(type="x", error={}), "message_type"),
    ("id and status", response(request_id="x", status="x"), "request_id"),
    ("id and error", response(request_id="x", error={}), "request_id"),
    ("status and error", response(status="x", error={}), "status"),
    ("a wrong type and all else", response(metadata=5, type="x", request_id="x", status="x"), "bad_type"),
]


@one_case(("said", "cause"), [row[1:] for row in RESPONSES], ids=[row[0] for row in RESPONSES])
def test_a_wrong_response(said: Any, cause: str) -> None:
    machine = asked()
    found = violation(hear(machine, encoded(said)))
    assert (found.code, found.cause, found.plugin_id) == ("malformed_response", cause, NAME)
    assert machine.feed(machine.read(encoded(response()))) == ()
    assert machine.shutdown_steps() == ShutdownSteps(exit=0.0)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (response(), {"a": 1}),
        (response(output=GONE), {}),
        (response(output=None), None),
        (response(output=[1, "é", None, 1.5]), [1, "é", None, 1.5]),
        (response(output=0), 0),
        (response(output="\ud800"), "\ufffd"),
        (response(error=None), {"a": 1}),
        (response(metadata=None), {"a": 1}),
        (response(metadata={"took": 5}), {"a": 1}),
        (response(extra=[], structured=5, error_code=5, manifest="x"), {"a": 1}),
        (b'{"status":"error",' + json.dumps(response()).encode()[1:], {"a": 1}),
    ],
)
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_good_response(said: Any, value: Any, end: bytes) -> None:
    machine = asked()
    assert hear_last(machine, encoded(said).rstrip() + end) == [Reply(TOKEN, value)]
    assert machine.shutdown_steps() == ShutdownSteps(exit=0.5, terminate=0.0, counts=True)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        ({"code": "invalid_input", "message": "m"}, "invalid_input", "invalid_input"),
        ({"code": "not_found", "message": "m"}, "not_found", "not_found"),
        ({"code": "internal_error", "message": "m"}, "internal_error", "internal_error"),
        ({"code": "Not_Found", "message": "m"}, "Not_Found", "internal_error"),
        ({"code": "", "message": "m"}, "", "internal_error"),
        ({"code": None, "message": "m"}, "", "internal_error"),
        ({"message": "m", "details": 5}, "", "internal_error"),
    ],
)
def test_a_no_is_no_failure(error: dict[str, Any], code: str, kind: str) -> None:
    machine = asked()
    said = response(status="error", error=error, output={"ignored": True})
    assert hear(machine, encoded(said)) == [Refusal(TOKEN, code, "m", kind)]
    assert machine.feed(machine.read(encoded(response()))) == () and machine.counters["late"] == 1
    # The process is ended at once and nobody asks how it went.
    assert machine.shutdown_steps() == ShutdownSteps(exit=0.0, terminate=0.0, counts=False)


def test_what_comes_after_the_response_changes_nothing() -> None:
    machine = asked()
    rest = b"done\n" + b"x" * (LINE_LIMIT * 2) + encoded(response(status="error", error=ERROR))
    assert hear_last(machine, encoded(response()) + rest) == [Reply(TOKEN, {"a": 1})]
    assert machine.framer().fault is None and machine.framer().pending == 0
    assert machine.counters == {"late": 0, "drained": len(rest)}
    assert hear(machine, rest) == [] and machine.counters["drained"] == 2 * len(rest)
    # Also for who cuts lines in another way.
    assert machine.feed(machine.read(b"\xff")) == () == machine.feed(machine.read(encoded(response())))
    assert machine.counters["late"] == 2
    assert machine.shutdown_steps().counts


# --- the request -------------------------------------------------------------------------------------------


def test_a_context_that_is_not_sent_is_refused() -> None:
    call = Call("tool", TOOL, {}, {"workspace_id": "w", "agent_id": "x"})
    found = objection(setting(call=call))
    assert isinstance(found, Refusal) and "'agent_id'" in found.message and "workspace_id" in found.message


@pytest.mark.parametrize(
    ("call", "rest"),
    [
        (Call("tool", TOOL), '"context":{},"input":{}'),
        (Call("tool", TOOL, {}), '"context":{},"input":{}'),
        (Call("tool", TOOL, []), '"context":{},"input":[]'),
        (Call("tool", TOOL, 0), '"context":{},"input":0'),
        (Call("tool", TOOL, False), '"context":{},"input":false'),
        (Call("tool", TOOL, ""), '"context":{},"input":""'),
        (Call("tool", TOOL, {"é": "<&>\n"}), '"context":{},"input":{"é":"<&>\\n"}'),
        (
            Call(
                "tool",
                TOOL,
                2,
                {"mode_id": "m", "role_id": "r", "repo_root": "/r", "widget_id": "g", "workspace_id": "w"},
            ),
            '"context":{"workspace_id":"w","widget_id":"g","repo_root":"/r","role_id":"r","mode_id":"m"},"input":2',
        ),
        (
            Call("tool", TOOL, {}, {"workspace_id": "w", "role_id": "", "mode_id": None}),
            '"context":{"workspace_id":"w"},"input":{}',
        ),
    ],
)
def test_the_request_as_it_is_sent(call: Call, rest: str) -> None:
    [sent] = ready().call(TOKEN, call)
    head = f'{{"type":"request","request_id":"{REQUEST_ID}","tool_name":"{TOOL}",'
    assert sent == Send(f"{head}{rest}}}\n".encode())


def test_an_input_may_be_longer_than_a_line_of_the_plugins() -> None:
    [sent] = ready().call(TOKEN, Call("tool", TOOL, "x" * 2 * LINE_LIMIT))
    assert isinstance(sent, Send) and len(sent.frame) > 2 * LINE_LIMIT


def test_each_request_has_an_id_of_its_own() -> None:
    seen: set[str] = set()
    for _ in range(64):
        machine = make(setting())
        machine.opening()
        machine.feed(machine.read(encoded(handshake())))
        [sent] = machine.call(TOKEN, Call("tool", TOOL))
        assert isinstance(sent, Send)
        name = json.loads(sent.frame)["request_id"]
        prefix, digits = name[:11], name[11:]
        assert prefix == "plugin_req_" and len(bytes.fromhex(digits)) == 8 and digits == digits.lower()
        seen.add(name)
    assert len(seen) == 64


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (Call("tool", ""), "invalid_input"),
        (Call("tool", " \u00a0"), "invalid_input"),
        (Call("hook", TOOL), "invalid_input"),
        (Call("tool", TOOL, float("nan")), "invalid_input"),
        (Call("tool", TOOL, {"a": object()}), "invalid_input"),
        (Call("tool", TOOL, "\ud800"), "invalid_input"),
        (Call("tool", TOOL, {}, {"workspace_id": 5}), "invalid_input"),
        (Call("list", "prompts"), "not_found"),
    ],
)
def test_a_call_that_cannot_be_made(call: Call, code: str) -> None:
    machine = ready()
    with pytest.raises(CallRefused) as refused:
        machine.call(TOKEN, call)
    event = refused.value.event
    assert isinstance(event, Refusal) and (event.call, event.code, event.kind) == (TOKEN, code, code)
    # Nothing was sent, so the process still waits for its call.
    assert isinstance(machine.call(TOKEN, Call("tool", TOOL))[0], Send)


def test_another_tool_than_the_one_the_process_is_for() -> None:
    machine = opened(setting(call=None))  # then the handshake cannot be held against it
    assert isinstance(hear(machine, encoded(handshake({"exposed_tools": ["x"]})))[0], Ready)
    with pytest.raises(CallRefused) as refused:
        machine.call(TOKEN, Call("tool", TOOL))
    event = refused.value.event
    assert isinstance(event, Violation)
    assert (event.code, event.call, event.plugin_id) == ("tool_not_exposed", TOKEN, NAME)
    assert isinstance(machine.call(TOKEN, Call("tool", "x"))[0], Send)


# --- order of things ---------------------------------------------------------------------------------------


def test_a_response_before_the_request_cannot_be_right() -> None:
    for said in (response(), response(request_id=GONE), response(request_id="")):
        machine = ready()
        assert violation(hear(machine, encoded(said))).cause == "request_id"
        with pytest.raises(CallRefused):
            machine.call(TOKEN, Call("tool", TOOL))


def test_both_lines_at_once() -> None:
    machine = opened()
    events = hear(machine, encoded(handshake()) + encoded(response()))
    assert isinstance(events[0], Ready) and violation(events[1:]).code == "malformed_response"


def test_a_handshake_before_it_was_asked_for() -> None:
    machine = fresh()
    assert isinstance(hear(machine, encoded(handshake()))[0], Ready)
    with pytest.raises(CallRefused):
        machine.call(TOKEN, Call("tool", TOOL))
    assert isinstance(machine.opening()[0], Send)
    assert isinstance(machine.call(TOKEN, Call("tool", TOOL))[0], Send)


def test_nothing_is_said_twice() -> None:
    machine = opened()
    assert machine.opening() == ()
    spoiled = fresh()
    hear(spoiled, b"\n")
    assert spoiled.opening() == ()
    machine = asked()
    for _ in range(2):
        with pytest.raises(CallRefused) as refused:
            machine.call(TOKEN + 1, Call("tool", TOOL))
        event = refused.value.event
        assert isinstance(event, Violation) and (event.code, event.call) == ("internal", TOKEN + 1)
        hear(machine, encoded(response()))


def test_a_call_before_the_handshake() -> None:
    with pytest.raises(CallRefused):
        opened().call(TOKEN, Call("tool", TOOL))


def test_what_is_cancelled_is_not_answered() -> None:
    machine = asked()
    assert machine.cancel(TOKEN + 1, "not this one") == ()
    assert machine.cancel(TOKEN, "changed my mind") == ()
    assert hear(machine, encoded(response())) == [] and machine.counters["late"] == 1
    assert machine.shutdown_steps() == ShutdownSteps(exit=0.0)
    machine = asked()
    machine.cancel(TOKEN + 1, "not this one")
    assert hear(machine, encoded(response())) == [Reply(TOKEN, {"a": 1})]
    machine.cancel(TOKEN, "too late")
    assert machine.shutdown_steps().counts


def test_what_this_contract_has_no_words_for() -> None:
    machine = asked()
    assert machine.one_shot and machine.patience is None
    assert (
        machine.silence()
        == machine.expired(TOKEN, "late")
        == machine.answer(1, Answer())
        == machine.emit(1, {})
        == ()
    )
    with pytest.raises(CallRefused):
        machine.notify("x", {})
    assert hear(machine, encoded(response())) == [Reply(TOKEN, {"a": 1})]


# --- before there is a process, and what only a session sees -----------------------------------------------

BAD_CAPABILITIES = (" x", "x", "x")


@pytest.mark.parametrize(
    ("where", "cause"),
    [
        (setting(), None),
        (capable(), None),
        (setting(call=None), None),
        (setting(plugin=plugin(id=" ", entrypoint=None)), "plugin_id"),
        (setting(plugin=plugin(entrypoint=None), call=Call("tool", "")), "command"),
        (setting(plugin=plugin(entrypoint=Entrypoint("\t"))), "command"),
        (setting(plugin=plugin(capabilities=BAD_CAPABILITIES), call=Call("tool", " ")), "invalid_input"),
        (setting(plugin=plugin(capabilities=BAD_CAPABILITIES)), "capability"),
        (setting(plugin=plugin(capabilities=("",))), "capability"),
        (setting(plugin=plugin(capabilities=("x", "x"))), "capability"),
    ],
)
def test_what_is_refused_before_there_is_a_process(where: Setting, cause: str | None) -> None:
    found = objection(where)
    if cause is None:
        assert found is None and isinstance(fresh(where).opening()[0], Send)
    elif isinstance(found, Refusal):
        assert found.code == cause
    else:
        # None of the contract's nine codes: no plugin has done anything.
        assert found is not None and (found.code, found.cause) == ("manifest_invalid", cause)
        machine = fresh(where)
        assert machine.opening() == (found,)
        assert hear(machine, encoded(handshake())) == []


@pytest.mark.parametrize(
    ("timeouts", "handshake_seconds", "seconds", "teardown"),
    [
        (TIMEOUTS, 2.0, 5.0, 0.5),
        ((), 2.0, 5.0, 0.5),
        ((("handshake", 1.0), ("invocation", 3.0), ("teardown", 0.25)), 1.0, 3.0, 0.25),
        ((("handshake", 0.0), ("invocation", -1.0), ("teardown", 0.0)), 2.0, 5.0, 0.5),
    ],
)
def test_clocks(timeouts: Any, handshake_seconds: float, seconds: float, teardown: float) -> None:
    where = setting(plugin=plugin(timeouts=timeouts))
    machine = asked(where)
    assert machine.handshake_seconds == handshake_seconds
    assert machine.seconds(Call("tool", TOOL)) == seconds
    hear(machine, encoded(response()))
    assert machine.shutdown_steps() == ShutdownSteps(exit=teardown, counts=True)


@pytest.mark.parametrize("granted", [30.0, 1.0])
def test_the_operators_call_limit_takes_the_place_of_the_contracts_clock(granted: float) -> None:
    machine = asked(setting()._replace(limits=Limits(call=granted)))
    assert machine.seconds(Call("tool", TOOL)) == granted
    assert machine.handshake_seconds == 2.0


def test_how_a_plugin_is_let_go_that_had_nothing_to_do() -> None:
    for machine in (fresh(), opened(), ready()):
        assert machine.shutdown_steps() == ShutdownSteps(exit=0.5)
    assert asked().shutdown_steps() == ShutdownSteps(exit=0.0)


# --- the catalogue -----------------------------------------------------------------------------------------

ANYTHING = {"type": "object", "additionalProperties": True}


def bundle(folder: Path, tools: Any) -> Plugin:
    document = {
        "plugin_id": NAME,
        "plugin_version": "1",
        "protocol_version": PROTOCOL,
        "process": {"command": "/bin/true"},
        "tools": tools,
    }
    (folder / "rterm-plugin.json").write_text(json.dumps(document))
    loaded = load(str(folder))
    assert loaded.plugin is not None, loaded.diagnostics
    return loaded.plugin


def test_the_tools_of_a_bundle(tmp_path: Path) -> None:
    found = bundle(
        tmp_path,
        [
            {"name": " a ", "description": "d", "input_schema": {"type": "string"}, "output_schema": {}},
            {"name": "b", "description": "", "input_schema": None},
        ],
    )
    tools = [
        {"name": "a", "description": "d", "input_schema": {"type": "string"}, "output_schema": {}},
        {"name": "b", "input_schema": ANYTHING, "output_schema": ANYTHING},
    ]
    assert manifest.catalogue(found) == tools

    machine = make(setting(plugin=found, call=Call("list", "tools")))
    machine.opening()
    # No tool is asked for, so none has to be exposed.
    assert isinstance(hear(machine, encoded(handshake({"exposed_tools": ["x"]})))[0], Ready)
    assert machine.call(TOKEN, Call("list", "tools")) == (Reply(TOKEN, tools),)
    # It was asked nothing: how it ends says nothing, and neither does what it still says.
    assert machine.shutdown_steps() == ShutdownSteps(exit=0.5, counts=False)
    assert hear(machine, b"startled\n") == [] and machine.counters["late"] == 1


def test_the_catalogue_of_a_bundle_that_has_changed(tmp_path: Path) -> None:
    found = bundle(tmp_path, [{"name": "a", "description": "d"}, {"name": "b"}])
    path = tmp_path / "rterm-plugin.json"
    names = [{"name": "a"}, {"name": "b"}]
    for text in ("", "[]", "{", '{"tools":5}', '{"tools":[5,{"name":5},{"name":"c"}]}'):
        path.write_text(text)
        assert manifest.catalogue(found) == names
    path.write_text('{"tools":[{"name":"a","description":5,"input_schema":[]}]}')
    assert manifest.catalogue(found) == [
        {"name": "a", "input_schema": ANYTHING, "output_schema": ANYTHING},
        {"name": "b"},
    ]
    path.unlink()
    assert manifest.catalogue(found) == names
    os.mkfifo(path)
    assert manifest.catalogue(found) == names


def test_a_list_nobody_prepared_has_the_names() -> None:
    machine = ready()
    assert machine.call(TOKEN, Call("list", "tools")) == (
        Reply(TOKEN, [{"name": TOOL}, {"name": "demo.other"}]),
    )


# --- anything at all ---------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([NAME, "Demo", "demo ", "", "other"])


def some_of(fields: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Fields that are mostly right, sometimes missing, sometimes anything."""
    return st.fixed_dictionaries({}, optional={key: right | values for key, right in fields.items()})


manifests = some_of(
    {
        "plugin_id": names,
        "plugin_version": st.just("1"),
        "protocol_version": st.just(PROTOCOL),
        "exposed_tools": st.just([TOOL]) | st.lists(st.sampled_from([TOOL, "x", None]), max_size=3),
        "capabilities": st.lists(st.sampled_from([*GRANTED, "net", "", " x"]), max_size=3),
    }
)
messages = some_of({"type": st.just("handshake"), "manifest": manifests}) | some_of(
    {
        "type": st.just("response"),
        "request_id": st.sampled_from([REQUEST_ID, REQUEST_ID.upper(), "", "plugin_req_"]),
        "status": st.sampled_from(["ok", "error"]),
        "output": values,
        "error": st.none() | some_of({"code": st.text(max_size=3), "message": st.text(max_size=3)}),
        "metadata": st.none() | st.just({}),
    }
)
lines = (messages | values).map(encoded) | st.binary(max_size=60).map(lambda raw: raw + b"\n")
streams = st.lists(lines | st.sampled_from([encoded(handshake()), encoded(response()), b"\n"]), max_size=5)
steps = st.lists(
    st.sampled_from(["opening", "call", "cancel", "silence", "shutdown_steps", "finish"]), max_size=4
)
CALL = Call("tool", TOOL)


def step(machine: RuneDialect, what: str) -> list[Event]:
    match what:
        case "opening":
            return list(machine.opening())
        case "call":
            try:
                return list(machine.call(TOKEN, CALL))
            except CallRefused:
                return []
        case "cancel":
            return list(machine.cancel(TOKEN, "x"))
        case "silence":
            return list(machine.silence())
        case "finish":
            return hear_last(machine, b"")
        case _:
            machine.shutdown_steps()
            return []


def is_right(line: bytes, key: str, value: str) -> bool:
    """By another reader than ours."""
    try:
        said = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    for part in key.split("."):
        said = said.get(part) if isinstance(said, dict) else None
    return bool(said == value)


@settings(max_examples=400, deadline=None)
@given(streams, st.lists(steps, min_size=6, max_size=6), st.booleans())
def test_anything_at_all_has_a_meaning(
    stream: list[bytes], between: list[list[str]], with_capabilities: bool
) -> None:
    machine = fresh(capable() if with_capabilities else setting())
    ends = sent = 0
    for what in between[0]:
        sent += sum(isinstance(event, Send) for event in step(machine, what))
    for line, after in zip(stream, between[1:], strict=False):
        events = hear(machine, line)
        for event in events:
            assert isinstance(event, Ready | Reply | Refusal | Violation)
            assert ends == 0  # nothing comes after the end
            match event:
                case Ready():
                    assert event.identity.id == NAME
                    assert any(is_right(part, "manifest.plugin_id", NAME) for part in line.split(b"\n"))
                case Reply() | Refusal():
                    assert sent and event.call == TOKEN
                    assert any(is_right(part, "request_id", REQUEST_ID) for part in line.split(b"\n"))
            ends += not isinstance(event, Ready)
        for what in after:
            events = step(machine, what)
            sent += sum(isinstance(event, Send) for event in events)
            ends += sum(isinstance(event, Reply | Refusal | Violation) for event in events)
    assert ends <= 1 and sent <= 2
    assert all(count >= 0 for count in machine.counters.values())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["fresh", "opened", "ready", "asked"]))
def test_any_bytes_at_any_stage(data: bytes, stage: str) -> None:
    machine = {"fresh": fresh, "opened": opened, "ready": ready, "asked": asked}[stage]()
    before = machine.read(data)
    assert machine.read(data) == before or before.value != before.value  # reading changes nothing
    events = hear_last(machine, data)
    assert all(isinstance(event, Violation) for event in events) and len(events) <= 1


@settings(max_examples=200, deadline=None)
@given(streams.map(b"".join), st.data())
def test_lines_are_the_same_however_they_come(data: bytes, draw: st.DataObject) -> None:
    whole = ExchangeFramer()
    expected = whole.feed(data) + whole.finish()
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    pieces = ExchangeFramer()
    found = [
        frame
        for start, end in itertools.pairwise([0, *cuts, len(data)])
        for frame in pieces.feed(data[start:end])
    ]
    assert found + pieces.finish() == expected and len(expected) <= 2
    assert (pieces.drained, pieces.fault) == (whole.drained, whole.fault)


# --- a real plugin -----------------------------------------------------------------------------------------


def converse(path: Path, call: Call, declare: tuple[str, ...] = ()) -> tuple[list[Event], int]:
    """With no cage and no session: one process, two lines each way. All events, and how it ended."""
    loaded = load(str(path))
    assert loaded.plugin is not None and loaded.plugin.entrypoint is not None, loaded.diagnostics
    machine = make(Setting(loaded.plugin, declare=declare, call=call))
    start = loaded.plugin.entrypoint
    heard: list[Event] = []
    with subprocess.Popen(
        [start.command, *start.args],
        cwd=start.directory,
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        events: Sequence[Event] = machine.opening()
        while events:
            heard += events
            for event in events:
                if isinstance(event, Send):
                    process.stdin.write(event.frame)
                    process.stdin.flush()
            if isinstance(events[-1], Ready):
                events = machine.call(TOKEN, call)
            elif isinstance(events[-1], Send):
                events = hear(machine, process.stdout.readline())
            else:
                break
        process.stdin.close()
        assert process.stdout.read() == b""
        return [event for event in heard if not isinstance(event, Send)], process.wait(60)


def test_a_real_plugin_answers() -> None:
    given_input = {"text": "grüß <dich>", "list": [1, 2.5, None]}
    call = Call("tool", "echo", given_input, {"workspace_id": "w"})
    events, status = converse(ECHO, call)
    identity = Identity("rune-echo", "1.0.0", PROTOCOL, "", "", ("echo", "fail"), {"capabilities": []})
    output = {"input": given_input, "context": {"workspace_id": "w"}}
    assert events == [Ready(identity), Reply(TOKEN, output)] and status == 0


def test_a_real_plugin_says_no() -> None:
    events, status = converse(ECHO, Call("tool", "fail", {"code": "not_found", "message": "gone"}))
    assert events[1:] == [Refusal(TOKEN, "not_found", "gone", "not_found")] and status == 0


def test_a_real_plugin_without_the_tool() -> None:
    events, _ = converse(ECHO, Call("tool", "look"))
    assert violation(events).code == "tool_not_exposed"


def test_a_real_plugin_declares_a_capability() -> None:
    call = Call("tool", "look", context={"repo_root": str(ECHO)})
    events, status = converse(ECHO / "declaring.json", call, ("workspace:*",))
    names = {"names": sorted(path.name for path in ECHO.iterdir())}
    assert events[1:] == [Reply(TOKEN, names)] and status == 0
    events, _ = converse(ECHO / "declaring.json", call)
    assert violation(events).code == "capability_not_allowed"
