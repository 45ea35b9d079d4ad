"""MCP, overheard: lines of a host (>) and of a server (<), and what the server's last one is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from runner.contracts.mcp.inspector import Inspector, make
from runner.plugin import Plugin
from runner.protocol.dialect import Setting, Violation
from runner.protocol.rpc_reader import Withheld
from sandbox.spec import SandboxSpec

PLUGIN = Plugin("noted", "", "mcp", "noted", "", "/p/mcp.json", None, None, SandboxSpec())


def line(**message: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode()


Changes = Mapping[str, Mapping[str, Any]]

# What can be wrong with the answers, by name.
BAD_INITIALIZED: Changes = {
    "no version": {"protocolVersion": None},
    "a number for a version": {"protocolVersion": 1},
    "no capabilities": {"capabilities": None},
    "nobody": {"serverInfo": None},
    "no name": {"serverInfo": {"version": "1"}},
}
BAD_DISCOVERED: Changes = {
    "no versions": {"supportedVersions": []},
    "one version": {"supportedVersions": "2026-07-28"},
    "numbers for versions": {"supportedVersions": [1]},
    "no capabilities": {"capabilities": []},
}


def initialized(**changes: Any) -> bytes:
    result = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "serverInfo": {"name": "s", "version": "1"},
        **changes,
    }
    return line(id=0, result={key: value for key, value in result.items() if value is not None})


def discovered(**changes: Any) -> bytes:
    return line(id=0, result={"supportedVersions": ["2026-07-28"], "capabilities": {}, **changes})


INITIALIZE = line(id=0, method="initialize", params={"protocolVersion": "2025-11-25"})
DISCOVER = line(id=0, method="server/discover", params={})
LIST = line(id=1, method="tools/list")

Lines = tuple[tuple[str, bytes | None], ...]
LEGACY: Lines = ((">", INITIALIZE), ("<", initialized()))
MODERN: Lines = ((">", DISCOVER), ("<", discovered()))


def overhear(*lines: tuple[str, bytes | None]) -> tuple[Inspector, list[Any]]:
    inspector = make(Setting(PLUGIN))
    said: list[Any] = []
    for direction, raw in lines:
        if direction == ">":
            inspector.host_frame(raw)
        else:
            assert raw is not None
            said.append(inspector.plugin_frame(raw))
    return inspector, said


BATCHED: Lines = ((">", INITIALIZE), ("<", initialized(protocolVersion="2025-03-26")))
NOTE = line(method="notifications/message")
BATCH = b"[%b,%b]" % (line(id=1, result={}), NOTE)

FINE: Mapping[str, tuple[Lines, Mapping[str, int]]] = {
    "legacy": (LEGACY, {}),
    "modern": (MODERN, {}),
    "a version of the future": (((">", INITIALIZE), ("<", initialized(protocolVersion="2030-01-01"))), {}),
    "no handshake at all": (((">", LIST), ("<", line(id=1, result={"tools": []}))), {}),
    "a probe that is refused": (
        ((">", DISCOVER), ("<", line(id=0, error={"code": -32601, "message": "?"})), *LEGACY),
        {},
    ),
    "a probe that is not answered": (
        ((">", DISCOVER.replace(b'"id": 0', b'"id": 7')), *LEGACY),
        {},
    ),
    "a question too long for us, and no handshake": (
        ((">", None), ("<", line(id=1, result={})), (">", LIST)),
        {"unasked": 1},
    ),
    "a question": ((*LEGACY, ("<", line(id=0, method="roots/list"))), {}),
    "keys of a result, twice": (
        (*LEGACY, (">", LIST), ("<", b'{"jsonrpc":"2.0","id":1,"result":{"tools":[],"tools":[1]}}')),
        {},
    ),
    "a batch": ((*BATCHED, (">", LIST), ("<", BATCH)), {}),
    "as many as there may be": ((*BATCHED, ("<", b"[%b]" % b",".join([NOTE] * 1000))), {}),
}


@pytest.mark.parametrize(("lines", "strays"), FINE.values(), ids=FINE)
def test_fine(lines: Lines, strays: Mapping[str, int]) -> None:
    inspector, said = overhear(*lines)
    assert not any(said) and inspector.strays == strays
    assert inspector.handshaken and not inspector.awaiting


WRONG: Mapping[str, tuple[Lines, str, str]] = {
    **{
        f"initialize: {name}": (
            ((">", INITIALIZE), ("<", initialized(**changes))),
            "handshake_failed",
            "bad_initialize_result",
        )
        for name, changes in BAD_INITIALIZED.items()
    },
    "initialize: no object": (
        ((">", INITIALIZE), ("<", line(id=0, result=[]))),
        "handshake_failed",
        "bad_initialize_result",
    ),
    "too many at once": (
        (*BATCHED, ("<", b"[" + b"1," * 1000 + b"1]")),
        "malformed_response",
        "batch_too_large",
    ),
    "no number": ((*LEGACY, ("<", b'{"jsonrpc":"2.0","id":NaN}')), "malformed_response", "bad_number"),
    "two ids": (
        (*LEGACY, ("<", b'{"jsonrpc":"2.0","id":1,"id":2,"result":{}}')),
        "malformed_response",
        "duplicate_key",
    ),
    "a result of two spellings": (
        (*LEGACY, ("<", b'{"jsonrpc":"2.0","id":1,"result":{},"Result":{"content":[]}}')),
        "malformed_response",
        "ambiguous",
    ),
    "a version in capital letters": (
        ((">", INITIALIZE), ("<", initialized().replace(b"protocolVersion", b"ProtocolVersion"))),
        "handshake_failed",
        "bad_initialize_result",
    ),
    **{
        name: (lines, "withheld", kind)
        for name, (lines, kind) in {
            "a banner": ((("<", b"server running"),), "not_json"),
            "single quotes": (((">", INITIALIZE), ("<", initialized().replace(b'"', b"'"))), "not_json"),
            "in UTF-16": (
                ((">", INITIALIZE), ("<", initialized().decode().encode("utf-16-be"))),
                "not_json",
            ),
            "a log": ((*LEGACY, ("<", b'{"level":"info"}')), "not_rpc"),
            "without jsonrpc": (((">", INITIALIZE), ("<", b'{"id":0,"result":{}}')), "not_rpc"),
            "an array of fields": ((*LEGACY, ("<", b'["2.0",0,{}]')), "not_rpc"),
            "a batch where there are none": ((*LEGACY, (">", LIST), ("<", BATCH)), "not_rpc"),
            "a batch with a number": ((*BATCHED, ("<", b"[%b,1]" % NOTE)), "not_rpc"),
            "a method in capital letters": (
                ((">", INITIALIZE), ("<", line(id=1, method="Initialize"))),
                "ambiguous",
            ),
            "a method with blanks": (
                ((">", INITIALIZE), ("<", line(id=1, method="server/discover "))),
                "ambiguous",
            ),
            "before the question": ((("<", initialized()), (">", INITIALIZE)), "unasked"),
            "between the probe and the question": ((*MODERN, ("<", line(id=1, result={}))), "unasked"),
            "after a probe that is refused": (
                ((">", DISCOVER), ("<", line(id=0, error={"code": -32601})), ("<", initialized())),
                "unasked",
            ),
            "to nothing": ((*LEGACY, ("<", line(id=5, result={}))), "unasked"),
            "to nothing, without a handshake": (((">", LIST), ("<", line(id=5, result={}))), "unasked"),
            "to nothing, in a batch": ((*BATCHED, (">", LIST), ("<", BATCH), ("<", BATCH)), "unasked"),
        }.items()
    },
    "a byte order mark": ((("<", b"\xef\xbb\xbf{}"),), "malformed_response", "bom"),
    "too deep": ((*LEGACY, ("<", b"[" * 129 + b"]" * 129)), "malformed_response", "too_deep"),
}


def verdict(last: Any) -> tuple[str, str]:
    return ("withheld", last.kind) if isinstance(last, Withheld) else (last.code, last.cause)


@pytest.mark.parametrize(("lines", "code", "cause"), WRONG.values(), ids=WRONG)
def test_wrong(lines: Lines, code: str, cause: str) -> None:
    _, said = overhear(*lines)
    *before, last = said
    assert not any(before)
    assert verdict(last) == (code, cause)


@pytest.mark.parametrize("changes", BAD_DISCOVERED.values(), ids=BAD_DISCOVERED)
def test_another_answer_to_discover_means_that_the_server_is_not_modern(changes: Mapping[str, Any]) -> None:
    """A host sends initialize then, and so does a session."""
    inspector, said = overhear((">", DISCOVER), ("<", discovered(**changes)))
    assert said == [None] and not inspector.handshaken


def test_ids_of_the_servers_requests() -> None:
    def last(*lines: tuple[str, bytes | None]) -> Any:
        return overhear(*LEGACY, *lines)[1][-1]

    asked = line(id=5, method="roots/list")
    fault = last(("<", asked), ("<", asked))
    assert isinstance(fault, Violation) and fault.cause == "duplicate_id"
    assert last(("<", asked), (">", line(id=5, result={"roots": []})), ("<", asked)) is None
    cancelled = line(method="notifications/cancelled", params={"requestId": 5})
    assert last(("<", asked), ("<", cancelled), ("<", asked)) is None


@pytest.mark.parametrize(
    ("lines", "awaiting"),
    [
        ((), False),
        (((">", INITIALIZE),), True),
        (((">", INITIALIZE), (">", LIST)), True),  # impatient
        (((">", DISCOVER),), False),  # silence is an answer
        (((">", line(id=0, method="ping")), (">", INITIALIZE)), True),
        (((">", line(method="initialize")),), False),  # no question
        (LEGACY, False),
        (((">", INITIALIZE), ("<", line(id=0, error={"code": 1, "message": "no"}))), False),
        (((">", INITIALIZE), ("<", line(id=1, result={}))), True),
    ],
)
def test_when_a_handshake_is_due(lines: Lines, awaiting: bool) -> None:
    assert overhear(*lines)[0].awaiting is awaiting
