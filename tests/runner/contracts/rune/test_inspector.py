"""rune, overheard: lines of a host (>) and of a plugin (<), and what the plugin's last one is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.contracts.rune.inspector import Inspector, make
from runner.plugin import Plugin
from runner.protocol.dialect import Setting
from runner.protocol.rpc_reader import Rewritten, Withheld
from sandbox.spec import SandboxSpec

PLUGIN = Plugin(
    "noted", "1", "rune", "Noted", "", "/p/rterm-plugin.json", "/p", None, SandboxSpec(), capabilities=("fs",)
)
ASK = b'{"type":"handshake","protocol_version":"rterm.plugin.v1"}'
REQUEST = b'{"type":"request","request_id":"r1","tool_name":"t","context":{},"input":{}}'


def handshake(**changes: Any) -> bytes:
    manifest = {
        "plugin_id": "noted",
        "plugin_version": "1",
        "protocol_version": "rterm.plugin.v1",
        "exposed_tools": ["t"],
        "capabilities": ["fs"],
        **changes,
    }
    return json.dumps({"type": "handshake", "manifest": manifest}).encode()


def response(**changes: Any) -> bytes:
    return json.dumps({"type": "response", "request_id": "r1", "status": "ok", **changes}).encode()


def overhear(
    *lines: tuple[str, bytes | None], declare: tuple[str, ...] = ("*",)
) -> tuple[Inspector, list[Any]]:
    inspector = make(Setting(PLUGIN, declare=declare))
    said: list[Any] = []
    for direction, raw in lines:
        if direction == ">":
            inspector.host_frame(raw)
        else:
            assert raw is not None
            said.append(inspector.plugin_frame(raw))
    return inspector, said


HELLO = ((">", ASK), ("<", handshake()), (">", REQUEST))

FINE = {
    "an exchange": (*HELLO, ("<", response(output=1))),
    "carriage returns": (*HELLO, ("<", response() + b"\r")),
    "a no": (*HELLO, ("<", response(status="error", error={"code": "x", "message": "no"}))),
    "unasked": (("<", handshake()), (">", ASK), (">", REQUEST), ("<", response())),
    "a blank line at the end": (*HELLO, ("<", response()), ("<", b"")),
    "a request too long for us": (
        (">", ASK),
        ("<", handshake()),
        (">", None),
        ("<", response(request_id="?")),
    ),
    "what the host says wrong": ((">", b"\xff"), (">", b"[]"), *HELLO, ("<", response())),
}


@pytest.mark.parametrize("lines", FINE.values(), ids=FINE)
def test_fine(lines: tuple[tuple[str, bytes | None], ...]) -> None:
    inspector, said = overhear(*lines)
    assert not any(said) and inspector.handshaken and not inspector.awaiting


WRONG = {
    "a banner": (((">", ASK), ("<", b"hello")), "malformed_response", "bad_json"),
    "single quotes": (((">", ASK), ("<", handshake().replace(b'"', b"'"))), "malformed_response", "bad_json"),
    "a comma too many": (((">", ASK), ("<", handshake()[:-1] + b",}")), "malformed_response", "bad_json"),
    "one behind a long integer": (
        ((">", ASK), ("<", b"[\r" + handshake(x=0).replace(b'"x": 0', b'"x": ' + b"9" * 5_000) + b"\r]")),
        "malformed_response",
        "bad_number",
    ),
    "a blank line": (((">", ASK), ("<", b" ")), "malformed_response", "blank_line"),
    "a byte order mark": (((">", ASK), ("<", b"\xef\xbb\xbf" + handshake())), "malformed_response", "bom"),
    "no number": (((">", ASK), ("<", b'{"type":NaN}')), "malformed_response", "bad_number"),
    "a response first": (((">", ASK), ("<", response())), "handshake_failed", "message_type"),
    "another plugin": (
        ((">", ASK), ("<", handshake(plugin_id="x"))),
        "handshake_failed",
        "plugin_id_mismatch",
    ),
    "another version": (
        ((">", ASK), ("<", handshake(protocol_version="rterm.plugin.v2"))),
        "protocol_version_mismatch",
        "protocol_version",
    ),
    "undeclared": (
        ((">", ASK), ("<", handshake(capabilities=[]))),
        "capability_not_declared",
        "capabilities_missing",
    ),
    "not of the bundle": (
        ((">", ASK), ("<", handshake(capabilities=["net"]))),
        "capability_not_allowed",
        "bundle",
    ),
    "two handshakes": ((*HELLO, ("<", handshake())), "malformed_response", "message_type"),
    "before it is asked": (
        ((">", ASK), ("<", handshake()), ("<", response())),
        "malformed_response",
        "request_id",
    ),
    "to another request": ((*HELLO, ("<", response(request_id="r2"))), "malformed_response", "request_id"),
    "to the second of two": (
        (*HELLO, (">", REQUEST.replace(b"r1", b"r2")), ("<", response(request_id="r2"))),
        "malformed_response",
        "request_id",
    ),
    "one within another, if a carriage return ends a line": (
        (
            *HELLO,
            ("<", b'{"type":"response","request_id":"r1","status":"ok","output":\r' + response() + b"\r}"),
        ),
        "malformed_response",
        "ambiguous",
    ),
    "a key twice": (
        (*HELLO, ("<", response().replace(b'"status"', b'"request_id": "r2", "status"'))),
        "malformed_response",
        "request_id",
    ),
    "a key of two spellings in the handshake": (
        ((">", ASK), ("<", handshake(Capabilities=["net"]))),
        "malformed_response",
        "ambiguous",
    ),
    "a key in capital letters": (
        (*HELLO, ("<", response().replace(b'"status"', b'"Status"'))),
        "malformed_response",
        "status",
    ),
    "a key with a NUL": (
        (*HELLO, ("<", response().replace(b'"status"', b'"status\\u0000": "error", "status"'))),
        "malformed_response",
        "ambiguous",
    ),
    "no status": ((*HELLO, ("<", response(status=""))), "malformed_response", "status"),
    "twice": ((*HELLO, ("<", response()), ("<", response())), "withheld", "after_response"),
    "more after a no": (
        (*HELLO, ("<", response(status="error", error={"message": "no"})), ("<", b"bye")),
        "withheld",
        "after_response",
    ),
}


@pytest.mark.parametrize(("lines", "code", "cause"), WRONG.values(), ids=WRONG)
def test_wrong(lines: tuple[tuple[str, bytes | None], ...], code: str, cause: str) -> None:
    _, said = overhear(*lines)
    *before, last = said
    assert not any(before)
    said_of_it = ("withheld", last.kind) if isinstance(last, Withheld) else (last.code, last.cause)
    assert said_of_it == (code, cause)


def test_of_two_equal_keys_the_host_gets_the_one_that_counts() -> None:
    """The contract's own host takes the last one. Another host could take the first."""
    said = handshake().replace(b'"plugin_id"', b'"plugin_id": "other", "plugin_id"')
    inspector, (last,) = overhear((">", ASK), ("<", said))
    assert isinstance(last, Rewritten) and last.frame.count(b'"plugin_id"') == 1
    assert json.loads(last.frame) == json.loads(handshake()) and inspector.handshaken


def test_the_policy_has_a_word_in_what_is_declared() -> None:
    _, (said,) = overhear(("<", handshake()), declare=("net.*",))
    assert (said.code, said.cause) == ("capability_not_allowed", "policy")
    assert overhear(("<", handshake()), declare=("f?",))[1] == [None]


def test_when_a_handshake_is_due() -> None:
    assert not overhear()[0].awaiting
    assert overhear((">", ASK))[0].awaiting
    assert not overhear((">", ASK), ("<", handshake()))[0].awaiting
    assert overhear()[0].handshake_seconds == 2.0
    timed = make(Setting(PLUGIN._replace(timeouts=(("handshake", 7.0),))))
    assert timed.handshake_seconds == 7.0
