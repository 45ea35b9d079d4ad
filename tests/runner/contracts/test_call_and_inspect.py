"""One table of messages, judged by `runner call` and by `exec --inspect`: what breaks a contract for one of
them breaks it for the other, with the same code and cause.

The messages go through each contract's dialect and through its inspector, as bytes from a pipe. What the
dialect sends is what the inspector sees of the host. A row names the cause, or is empty: the message is acted
on or dropped, and the plugin goes on. What the dialect drops is withheld from the host.

Three things are no judgement of a message, and not in the table: an error in answer to the handshake, which
the host sees itself; a result that fails the one call it answers; and the bounds of a session's own memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.contracts.registry import contract_names, find_contract, make_dialect, make_inspector
from runner.manifest.load import load
from runner.plugin import Plugin
from runner.protocol import wire
from runner.protocol.dialect import Call, Notice, Send, Setting, Violation
from runner.protocol.frames import Framer
from runner.protocol.header_frames import header_frame
from runner.protocol.rpc_reader import Rewritten, Withheld
from tests.tables import check_rows

Json = Any  # a message; bytes: the body of a frame as it is; Stream: with its header, or without one
Fault = tuple[str, str]

_HEADERS = ("ainb", "vai")
_DROPS = ("stdout", "dropped")
_CALLS = {
    "ainb": Call("tool", "greeter", {"argv": ["hi"]}),
    "kaged": Call("tool", "greeter.greet", {"name": "Ada"}),
    "mcp": Call("tool", "greet", {"name": "Ada"}),
    "nexo": Call("tool", "greeter_greet", {"name": "Ada"}),
    "rune": Call("tool", "greet", {"name": "Ada"}),
    "vai": Call("tool", "greet", {"input": {}}),
}


class Stream(bytes): ...


def rpc(**fields: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", **fields}


def body(message: Json) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()


class Talk:
    """A plugin of the contract's example, up to its handshake (`stage` 0), after it (1), or in a call (2)."""

    def __init__(self, contract: str, stage: int) -> None:
        self.contract = contract
        self.plugin = _plugin(contract)
        made = find_contract(contract)
        self.dialect = make_dialect(made, Setting(self.plugin, call=_CALLS[contract]))
        self.inspector = make_inspector(made, Setting(self.plugin))
        self.framer: Framer = self.dialect.framer()
        self.cutter = self.inspector.framing.cutter()
        self.skimmer = self.inspector.framing.skimmer(4 << 20)
        self.sent: list[dict[str, Any]] = []
        self.called: Fault | None = None
        self.inspected: Fault | None = None
        self.leaked: list[bytes] = []  # what the dialect drops and the inspector passes on
        self._hear(self.dialect.opening())
        if stage:
            self.say(body(self.hello()))
            assert (self.called, self.inspected) == (None, None)
        if stage == 2:
            self._hear(self.dialect.call(1, _CALLS[contract]))

    @property
    def id(self) -> Any:
        """Of the last request to the plugin."""
        ids = [message.get("id", message.get("request_id")) for message in self.sent]
        return next((number for number in reversed(ids) if number is not None), None)

    def _hear(self, events: Any) -> None:
        for event in events:
            if isinstance(event, Send):
                for frame, _ in self.skimmer.feed(event.frame):
                    assert frame is not None
                    self.inspector.host_frame(frame)
                    self.sent.append(json.loads(frame))
            elif isinstance(event, Violation) and self.called is None and event.cause != "refused":
                if event.call is not None and self.contract != "vai":
                    continue
                self.called = event.code, event.cause

    def say(self, raw: bytes) -> None:
        if not isinstance(raw, Stream):
            raw = header_frame(raw) if self.contract in _HEADERS else raw + b"\n"
        dropped = True
        for frame in self.framer.feed(raw):
            events = list(self.dialect.feed(self.dialect.read(frame)))
            dropped = dropped and all(isinstance(event, Notice) and event.kind in _DROPS for event in events)
            self._hear(events)
        if self.framer.fault is not None and self.called is None:
            self.called = "malformed_response", self.framer.fault.cause
        for cut in self.cutter.cut(raw):
            verdict = self.inspector.plugin_frame(cut.frame)
            if isinstance(verdict, Violation) and self.inspected is None:
                self.inspected = verdict.code, verdict.cause
            if verdict is None and dropped and self.called is None and not _is_the_hosts(cut.frame):
                self.leaked.append(cut.frame)
            assert verdict is None or isinstance(verdict, Violation | Withheld | Rewritten)
        if self.cutter.fault is not None and self.inspected is None:
            self.inspected = "malformed_response", self.cutter.fault.cause

    def hello(self, **more: Any) -> dict[str, Any]:
        """The plugin's part of the handshake. `more`: beside its identity."""
        who = self.plugin
        if self.contract == "rune":
            about = {
                "plugin_id": who.id,
                "plugin_version": who.version,
                "protocol_version": "rterm.plugin.v1",
            }
            return {"type": "handshake", "manifest": {**about, "exposed_tools": ["greet", "count"], **more}}
        if self.contract == "vai":
            about = {"package_id": who.id, "version": who.version, **more}
            return {"protocol": "vai.rpc.v1", "type": "hello", "role": "plugin", "plugin": about}
        shape = {"description": "d", "input_schema": {"type": "object"}}
        tools = [{"name": name, **shape} for name in ("greeter_greet", "greeter_count")]
        lists: dict[str, Any] = {"methods": [], "notifications": [], "capabilities_used": []}
        results: dict[str, dict[str, Any]] = {
            "kaged": {"name": who.id, "version": who.version, "api_version": 1, **lists},
            "ainb": {"name": who.id, "version": who.version},
            "nexo": {"manifest": {"plugin": {"id": who.id, "version": who.version}}, "tools": tools},
            "mcp": {"supportedVersions": ["2026-07-28"], "capabilities": {}},
        }
        return rpc(id=self.id, result={**results[self.contract], **more})


def _is_the_hosts(frame: bytes) -> bool:
    """Whether only the host can judge it: an error that it may have caused, and a question to it."""
    said = wire.message(frame).value
    blank = not frame.strip()
    return blank or (isinstance(said, dict) and ("error" in said or {"id", "method"} <= said.keys()))


_plugins: dict[str, Plugin] = {}


def _plugin(contract: str) -> Plugin:
    if contract not in _plugins:
        read = load(str(Path(runner.__file__).parent / "contracts" / contract / "example"), contract=contract)
        assert read.plugin is not None, read.diagnostics
        _plugins[contract] = read.plugin
    return _plugins[contract]


Make = Callable[[Talk], Iterator[Json] | list[Json]]
Row = tuple[int, Make, str | Mapping[str, str]]  # stage, messages, cause (or causes by contract)

ERROR = {"code": -32000, "message": "no"}
RESULTS: Mapping[str, Mapping[str, Any]] = {
    "kaged": {"x": 1},
    "nexo": {"x": 1},
    "mcp": {"content": []},
    "ainb": {"exit_code": 0, "stdout": "", "stderr": ""},
}


def result(talk: Talk, **more: Any) -> dict[str, Any]:
    return rpc(id=talk.id, result={**RESULTS[talk.contract], **more})


def raw_result(talk: Talk, text: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (talk.id, text)


def by(*, kaged: str = "", nexo: str = "", mcp: str = "", ainb: str = "") -> dict[str, str]:
    return {"kaged": kaged, "nexo": nexo, "mcp": mcp, "ainb": ainb}


def answer_as(number: Any) -> Make:
    return lambda talk: [{**result(talk), "id": number}]


def ask_as(number: Any) -> Make:
    return lambda talk: [rpc(id=number, method="x.y", params={"a": 1})]


NUMBERS = by(kaged="bad_number", nexo="bad_number", mcp="bad_number")  # ainb drops what it cannot read
TWICE = by(kaged="duplicate_key", nexo="duplicate_key", mcp="duplicate_key")
NOT_OURS = by(kaged="not_object")

RPC: Mapping[str, Row] = {
    "an answer": (2, lambda t: [result(t)], ""),
    "an error": (2, lambda t: [rpc(id=t.id, error=ERROR)], ""),
    # nexo and ainb say which of them counts.
    "a result and an error": (
        2,
        lambda t: [{**result(t), "error": ERROR}],
        by(kaged="ambiguous", mcp="ambiguous"),
    ),
    "a result, and null for an error": (2, lambda t: [{**result(t), "error": None}], ""),
    "an error, and null for a result": (2, lambda t: [rpc(id=t.id, result=None, error=ERROR)], ""),
    "neither": (2, lambda t: [rpc(id=t.id)], ""),
    "neither, in the handshake": (
        0,
        lambda t: [rpc(id=t.id)],
        by(kaged="malformed", nexo="identity_missing", ainb="malformed"),
    ),
    "neither, to nobody": (2, lambda t: [rpc(id=77)], ""),
    "a question and an answer": (
        2,
        lambda t: [{**result(t), "method": "x.y"}],
        by(kaged="ambiguous", mcp="ambiguous"),
    ),
    "a question and an error": (
        2,
        lambda t: [rpc(id=t.id, method="x.y", error=ERROR)],
        by(kaged="ambiguous", mcp="ambiguous"),
    ),
    "our own question, with a result": (
        2,
        lambda t: [{**t.sent[-1], "result": 1}],
        by(kaged="ambiguous", nexo="echo", mcp="ambiguous", ainb="echo"),
    ),
    "a handshake with a number for a method": (
        0,
        lambda t: [rpc(id=t.id, method=5, result={})],
        by(kaged="not_rpc", nexo="identity_missing", mcp="ambiguous"),
    ),
    "a question of an odd method, with a bad id": (
        2,
        lambda t: [rpc(id=None, method="a b")],
        by(mcp="bad_id"),
    ),
    "an empty method": (2, lambda t: [{**result(t), "method": ""}], ""),
    "a number for a method": (2, lambda t: [rpc(id=t.id, method=5)], by(kaged="not_rpc")),
    **{
        f"an unknown id: {number!r}": (2, answer_as(number), "")
        for number in (77, -1, None, True, "77", 2.5, [2], {"v": 2})
    },
    "an error for an unknown id": (2, lambda t: [rpc(id=77, error=ERROR)], ""),
    "the id as a text": (2, lambda t: [{**result(t), "id": str(t.id)}], ""),
    "an answer twice": (2, lambda t: [result(t)] * 2, ""),
    "an error that is a text": (2, lambda t: [rpc(id=t.id, error="no")], ""),
    "an error without a code": (2, lambda t: [rpc(id=t.id, error={"message": "no"})], ""),
    "without jsonrpc": (2, lambda t: [{"id": t.id, "result": {}}], by(kaged="jsonrpc_version")),
    "another jsonrpc": (
        2,
        lambda t: [{"jsonrpc": "1.0", "id": t.id, "result": {}}],
        by(kaged="jsonrpc_version"),
    ),
    "an array": (2, lambda t: [[result(t)]], NOT_OURS),
    "an empty array": (2, lambda t: [[]], NOT_OURS),
    "a number": (2, lambda t: [7], NOT_OURS),
    "null": (2, lambda t: [None], NOT_OURS),
    "an empty object": (2, lambda t: [{}], by(kaged="jsonrpc_version")),
    "jsonrpc alone": (2, lambda t: [rpc()], by(kaged="not_rpc")),
    "a line of a log in JSON": (2, lambda t: [{"level": "info"}], by(kaged="jsonrpc_version")),
    "a notification": (2, lambda t: [rpc(method="x.y", params={})], ""),
    "params that are an array": (2, lambda t: [rpc(method="x.y", params=[1])], ""),
    "params that are a text": (2, lambda t: [rpc(method="x.y", params="a")], ""),
    "a question": (2, ask_as(5), ""),
    "a question with a text for an id": (2, ask_as("a"), ""),
    **{
        f"a question with the id {str(number)[:9]!r}": (2, ask_as(number), by(mcp="bad_id"))
        for number in (*(None, 1.5, True), {"a": 1}, "a" * 2000)
    },
    "our own question": (2, lambda t: [t.sent[-1]], "echo"),
    "our own handshake": (0, lambda t: [t.sent[-1]], "echo"),
    "an id twice": (2, lambda t: [b'{"jsonrpc":"2.0","id":2,"id":3,"result":{}}'], TWICE),
    "params twice": (2, lambda t: [b'{"jsonrpc":"2.0","method":"a","params":{},"params":{}}'], TWICE),
    "a key of a result twice": (2, lambda t: [raw_result(t, b'{"a":1,"a":2}')], ""),
    "keys of a result that differ in case": (2, lambda t: [result(t, a=1, A=2, Name=3, Tools=4)], ""),
    "a key of a result with a NUL": (2, lambda t: [result(t, **{"a\0b": 1})], ""),
    "a result of two spellings": (
        2,
        lambda t: [{**result(t), "Result": 1}],
        by(kaged="ambiguous", nexo="ambiguous", mcp="ambiguous"),
    ),
    "an id in capital letters": (
        2,
        lambda t: [{"jsonrpc": "2.0", "ID": 2, "result": 1}],
        by(kaged="not_rpc"),
    ),
    "a method of another spelling": (2, lambda t: [rpc(method="Initialize")], ""),
    "a method with a NUL": (2, lambda t: [rpc(method="x\0y")], ""),
    "NaN": (2, lambda t: [raw_result(t, b"NaN")], NUMBERS),
    "an integer beyond 64 bit": (2, lambda t: [raw_result(t, b"9" * 30)], NUMBERS),
    "too deep": (
        2,
        lambda t: [raw_result(t, b"[" * 200 + b"]" * 200)],
        by(kaged="too_deep", nexo="too_deep", mcp="too_deep"),
    ),
    "bytes that are not UTF-8": (2, lambda t: [raw_result(t, b'{"a":"\xff"}')], ""),
    "half of a surrogate pair": (2, lambda t: [raw_result(t, b'{"a":"\\ud800"}')], ""),
    "a byte order mark": (
        2,
        lambda t: [b"\xef\xbb\xbf" + body(result(t))],
        by(kaged="bom", nexo="bom", mcp="bom"),
    ),
    "text": (2, lambda t: [b"hello"], by(kaged="bad_json")),
    "text that is not UTF-8": (2, lambda t: [b"hello \xff"], by(kaged="bad_json")),
    "two messages in a frame": (2, lambda t: [body(result(t)) * 2], by(kaged="bad_json")),
    "two with a carriage return": (
        2,
        lambda t: [body(result(t)) + b"\r" + body(result(t))],
        by(kaged="bad_json"),
    ),
    "single quotes": (2, lambda t: [b"{'jsonrpc':'2.0','id':2,'result':1}"], by(kaged="bad_json")),
    "half of a message": (2, lambda t: [body(result(t))[:-3]], by(kaged="bad_json")),
    "nothing": (2, lambda t: [b"", b" "], ""),
    "too long": (2, lambda t: [b'"' + b"x" * (17 << 20) + b'"'], "frame_too_large"),
    # Before the handshake.
    "text, and then the handshake": (0, lambda t: [b"hello", t.hello()], by(kaged="bad_json")),
    "an answer to nothing, early": (0, lambda t: [rpc(id=77, result={}), t.hello()], ""),
    "an answer to the next request, early": (0, lambda t: [rpc(id=t.id + 1, result={}), t.hello()], ""),
    "an error to nothing, early": (0, lambda t: [rpc(id=77, error=ERROR), t.hello()], ""),
    "a notification, early": (0, lambda t: [rpc(method="x.y"), t.hello()], ""),
    "a question, early": (0, lambda t: [rpc(id=5, method="x.y", params={}), t.hello()], ""),
    "a refusal": (0, lambda t: [rpc(id=t.id, error=ERROR)], ""),
    "a handshake and a refusal": (
        0,
        lambda t: [{**t.hello(), "error": ERROR}],
        by(kaged="ambiguous", mcp="ambiguous"),
    ),
    "a handshake that is no object": (
        0,
        lambda t: [rpc(id=t.id, result=[])],
        by(kaged="malformed", nexo="identity_missing", ainb="malformed"),
    ),
    "a key of the handshake twice": (
        0,
        lambda t: [body(t.hello(zz=0)).replace(b'"zz"', b'"zz": 1, "zz"')],
        TWICE,
    ),
    "keys of the handshake that differ in case": (
        0,
        lambda t: [t.hello(Name="x", Tools=[])],
        by(kaged="ambiguous", nexo="ambiguous", ainb="ambiguous"),
    ),
    "keys that nobody reads, in two spellings": (0, lambda t: [t.hello(zz=1, ZZ=2)], ""),
    "the id of the handshake as a text": (0, lambda t: [{**t.hello(), "id": str(t.id)}], ""),
}

PUBLISH = {"topic": "plugin.inbound.other", "event": {"payload": {}}}
NEXO: Mapping[str, Row] = {
    "a foreign topic": (2, lambda t: [rpc(method="broker.publish", params=PUBLISH)], ""),
    "a topic, early": (0, lambda t: [rpc(method="broker.publish", params=PUBLISH), t.hello()], ""),
    "no topic": (2, lambda t: [rpc(method="broker.publish", params={})], ""),
    "an array for params": (2, lambda t: [rpc(method="broker.publish", params=["a"])], ""),
    "a publication that wants an answer": (
        2,
        lambda t: [rpc(id=4, method="broker.publish", params=PUBLISH)],
        "",
    ),
    "a topic twice": (
        2,
        lambda t: [b'{"jsonrpc":"2.0","method":"broker.publish","params":{"topic":"a","topic":"b"}}'],
        "duplicate_key",
    ),
}

KAGED: Mapping[str, Row] = {
    "101 notifications at once": (2, lambda t: [rpc(method="x.y") for _ in range(101)], ""),
}


def response(talk: Talk, **more: Any) -> dict[str, Any]:
    said = {"type": "response", "request_id": talk.id, "status": "ok", "output": {"greeting": "x"}}
    return {**said, **more}


RUNE: Mapping[str, Row] = {
    "a response": (2, lambda t: [response(t)], ""),
    "an error": (2, lambda t: [response(t, status="error", error={"code": "a", "message": "m"})], ""),
    "ok and an error": (2, lambda t: [response(t, error={"code": "a", "message": "m"})], "error_with_ok"),
    "an error without one": (2, lambda t: [response(t, status="error")], "error_missing"),
    "neither": (2, lambda t: [{"type": "response", "request_id": t.id}], "status"),
    "an unknown id": (2, lambda t: [response(t, request_id="x")], "request_id"),
    "a number for an id": (2, lambda t: [response(t, request_id=5)], "bad_type"),
    "an array for metadata": (2, lambda t: [response(t, metadata=[])], "bad_type"),
    "twice": (2, lambda t: [response(t)] * 2, ""),
    "text after the response": (2, lambda t: [response(t), b"bye"], ""),
    "a blank line after it": (2, lambda t: [response(t), b""], ""),
    "a blank line": (2, lambda t: [b""], "blank_line"),
    "text": (2, lambda t: [b"hello"], "bad_json"),
    "an array": (2, lambda t: [[1]], "bad_type"),
    # Of two equal keys the last one counts.
    "the status twice": (2, lambda t: [body(response(t)).replace(b'"status"', b'"status":"x","status"')], ""),
    "a key of the handshake twice": (
        0,
        lambda t: [body(t.hello()).replace(b'"plugin_id"', b'"plugin_id":"x","plugin_id"')],
        "",
    ),
    "a status of two spellings": (2, lambda t: [response(t, Status="error")], "ambiguous"),
    "an id of two spellings": (0, lambda t: [t.hello(Plugin_ID="x")], "ambiguous"),
    "keys of the output that differ in case": (2, lambda t: [response(t, output={"a": 1, "A": 2})], ""),
    "too long": (2, lambda t: [b'"' + b"x" * (2 << 20) + b'"'], "frame_too_large"),
    "bytes that are not UTF-8": (2, lambda t: [body(response(t)).replace(b"greeting", b"gr\xff")], ""),
    "NaN": (2, lambda t: [body(response(t)).replace(b'"x"', b"NaN")], "bad_number"),
    "a byte order mark": (2, lambda t: [b"\xef\xbb\xbf" + body(response(t))], "bom"),
    "two with a carriage return": (2, lambda t: [body(response(t)) + b"\r" + body(response(t))], "bad_json"),
    "one within another": (
        2,
        lambda t: [body(response(t)).replace(b'{"greeting": "x"}', b"\r" + body(response(t)) + b"\r")],
        "ambiguous",
    ),
    "a carriage return at the end": (2, lambda t: [body(response(t)) + b"\r"], ""),
    "a response before the request": (1, lambda t: [response(t, request_id="x")], "request_id"),
    "a second handshake": (2, lambda t: [t.hello()], "message_type"),
    "a response for a handshake": (0, lambda t: [response(t, request_id="x")], "message_type"),
    "another plugin": (0, lambda t: [t.hello(plugin_id="x")], "plugin_id_mismatch"),
    "no tools": (0, lambda t: [t.hello(exposed_tools=[])], "exposed_tools_missing"),
}


def vai(kind: str, **fields: Any) -> dict[str, Any]:
    return {"protocol": "vai.rpc.v1", "type": kind, **fields}


def succeeded(talk: Talk, **more: Any) -> dict[str, Any]:
    done = {"status": "succeeded", "result": {"content": [], "is_error": False}}
    return {**vai("response", id=talk.id, ok=True, body=done), **more}


def progress(number: Any, **more: Any) -> dict[str, Any]:
    return {**vai("event", request_id=number, event={"type": "progress", "message": "x"}), **more}


FAILURE = {"code": "a.b", "message": "m", "retryable": False}
VAI: Mapping[str, Row] = {
    "a response": (2, lambda t: [succeeded(t)], ""),
    "a failure": (2, lambda t: [vai("response", id=t.id, ok=False, error=FAILURE)], ""),
    "ok and an error": (2, lambda t: [succeeded(t, error=FAILURE)], "invalid_response"),
    "neither": (2, lambda t: [vai("response", id=t.id)], "invalid_response"),
    "an unknown id": (2, lambda t: [succeeded(t, id="req_9")], "unexpected_frame"),
    "a number for an id": (2, lambda t: [succeeded(t, id=1)], "unexpected_frame"),
    "no id": (2, lambda t: [vai("response", ok=True, body={})], "invalid_frame"),
    "a response twice": (2, lambda t: [succeeded(t)] * 2, ""),
    "an event": (2, lambda t: [progress(t.id)], ""),
    "an event for nothing": (2, lambda t: [progress("req_9")], "unexpected_frame"),
    "an event after the response": (2, lambda t: [succeeded(t), progress(t.id)], ""),
    "an event that is none": (2, lambda t: [progress(t.id, event=5)], "invalid_frame"),
    "an event without a type": (2, lambda t: [progress(t.id, event={})], "invalid_frame"),
    "an event of an odd type": (2, lambda t: [progress(t.id, event={"type": "A B"})], ""),
    "a long event": (2, lambda t: [progress(t.id, event={"type": "progress", "message": "x" * 70_000})], ""),
    "a second hello": (2, lambda t: [t.hello()], "unexpected_frame"),
    "what only a host sends": (2, lambda t: [vai("shutdown")], "unexpected_frame"),
    "an unknown type": (2, lambda t: [vai("x")], "unexpected_frame"),
    "no type": (2, lambda t: [{"protocol": "vai.rpc.v1"}], "invalid_frame"),
    "no protocol": (2, lambda t: [{"type": "response"}], "invalid_frame"),
    "another protocol": (2, lambda t: [succeeded(t, protocol="vai.rpc.v2")], "unsupported_version"),
    "an array": (2, lambda t: [[1]], "invalid_frame"),
    "text": (2, lambda t: [b"hello"], "bad_json"),
    "bytes that are not UTF-8": (2, lambda t: [body(succeeded(t)).replace(b"content", b"\xff")], "bad_json"),
    "NaN": (2, lambda t: [body(succeeded(t)).replace(b"[]", b"NaN")], "bad_number"),
    "an id twice": (2, lambda t: [body(succeeded(t)).replace(b'"id"', b'"id":"a","id"')], "duplicate_key"),
    "a key of a result twice": (
        2,
        lambda t: [body(succeeded(t)).replace(b'"is_error"', b'"is_error":true,"is_error"')],
        "",
    ),
    "ok of two spellings": (2, lambda t: [succeeded(t, OK=False)], "ambiguous"),
    "keys that nobody reads, in two spellings": (2, lambda t: [succeeded(t, zz=1, ZZ=1)], ""),
    "too long": (2, lambda t: [Stream(b"Content-Length: 999999999\r\n\r\n")], "frame_too_large"),
    "no header": (2, lambda t: [Stream(b"hello\r\n\r\n")], "bad_header"),
    "zeros before a length": (2, lambda t: [Stream(b"Content-Length: 02\r\n\r\n{}")], "invalid_frame"),
    "a response before the request": (1, lambda t: [succeeded(t, id="req_1")], "unexpected_frame"),
    "an event before the request": (1, lambda t: [progress("req_1")], "unexpected_frame"),
    "an event for a hello": (0, lambda t: [progress("req_1")], "unexpected_frame"),
    "another package": (0, lambda t: [t.hello(package_id="a/b")], "identity_mismatch"),
    "a package twice": (
        0,
        lambda t: [body(t.hello()).replace(b'"package_id"', b'"package_id":"a","package_id"')],
        "duplicate_key",
    ),
    "a package of two spellings": (0, lambda t: [t.hello(Package_ID="a")], "ambiguous"),
}

AINB: Mapping[str, Row] = {
    "two lengths": (2, lambda t: [Stream(b"Content-Length: 9\r\nContent-Length: 2\r\n\r\n{}")], ""),
    "zeros before a length": (2, lambda t: [Stream(b"Content-Length: 02\r\n\r\n{}")], ""),
    "no header": (2, lambda t: [Stream(b"hello\r\n\r\n")], "bad_header"),
}

TABLES: Mapping[str, Mapping[str, Row]] = {
    "ainb": {**RPC, **AINB},
    "kaged": {**RPC, **KAGED},
    "mcp": RPC,
    "nexo": {**RPC, **NEXO},
    "rune": RUNE,
    "vai": VAI,
}


@pytest.mark.parametrize("contract", contract_names())
def test_call_and_inspect_judge_alike(contract: str) -> None:
    def check(name: str, row: Row) -> None:
        stage, make, causes = row
        talk = Talk(contract, stage)
        for message in make(talk):
            talk.say(body(message))
        cause = causes if isinstance(causes, str) else causes[contract]
        assert talk.called == talk.inspected
        assert (talk.called[1] if talk.called else "") == cause
        assert not talk.leaked, name

    check_rows(TABLES[contract], check)


def test_the_table_would_notice_a_difference() -> None:
    """The control: an inspector that checks nothing."""
    talk = Talk("kaged", 0)
    talk.inspector._reader._judge = lambda *_: None  # type: ignore[attr-defined]
    talk.say(b"[]")
    assert talk.called is not None and talk.inspected is None
