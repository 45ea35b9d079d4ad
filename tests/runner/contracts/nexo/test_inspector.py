"""nexo, overheard: lines of a host (>) and of a plugin (<), and the verdict about the plugin's last one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from runner.contracts.nexo.inspector import Inspector, make
from runner.plugin import Plugin
from runner.protocol.dialect import Setting
from runner.protocol.rpc_reader import Withheld
from sandbox.spec import SandboxSpec
from tests.tables import one_case

PLUGIN = Plugin(
    "noted",
    "1.0.0",
    "nexo",
    "Noted",
    "",
    "/p/nexo-plugin.toml",
    "/p",
    None,
    SandboxSpec(),
    exports=(("extends.tools", ("noted_add",)), ("broker.publish", ("plugin.inbound.slack.>",))),
)
ASK = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"nexo_version":"0.1.0"}}'


def line(**message: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode()


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": "d", "input_schema": {"type": "object"}}


def reply(plugin_id: Any = "noted", **more: Any) -> bytes:
    """Its manifest declares a tool, so it has to advertise some."""
    result = {"manifest": {"plugin": {"id": plugin_id, "version": "1.0.0"}}, "tools": [tool("noted_add")]}
    return line(id=1, result={**result, **more})


def publish(topic: Any, inner: Any = None) -> bytes:
    event = {"payload": 1} if inner is None else {"payload": 1, "topic": inner}
    return line(method="broker.publish", params={"topic": topic, "event": event})


Lines = tuple[tuple[str, bytes | None], ...]
HELLO: Lines = ((">", ASK), ("<", reply()))


def overhear(
    *lines: tuple[str, bytes | None], environ: Mapping[str, str] | None = None
) -> tuple[Inspector, list[Any]]:
    inspector = make(Setting(PLUGIN, environ=environ or {}))
    said: list[Any] = []
    for direction, raw in lines:
        if direction == ">":
            inspector.host_frame(raw)
        else:
            assert raw is not None
            said.append(inspector.plugin_frame(raw))
    return inspector, said


FINE: Mapping[str, Lines] = {
    "a handshake": HELLO,
    "ids of text": ((">", ASK.replace(b":1,", b':"a",')), ("<", reply().replace(b'"id": 1', b'"id": "a"'))),
    "an allowed topic": (*HELLO, ("<", publish("plugin.inbound.slack.x"))),
    "the same topic twice": (*HELLO, ("<", publish("plugin.inbound.slack.x", "plugin.inbound.slack.x"))),
    "blank lines": (*HELLO, ("<", b""), ("<", b"\r")),
    "a question of its own": (*HELLO, ("<", line(id=1, method="memory.recall", params={}))),
    "a host we cannot read": ((">", b"\xff{"), (">", None), (">", b"3"), *HELLO),
    "arrays elsewhere": (*HELLO, ("<", line(method="log", params=["a", {}]))),
    "other methods": (*HELLO, ("<", line(method="Broker.Publisher")), ("<", line(method="LOG"))),
    "what JSON allows in a text": (
        *HELLO,
        ("<", '{"method":"m","params":"\u2028{}\u2028\u0085[]"}'.encode()),
    ),
    "blanks around it": (*HELLO, ("<", b" \r" + line(method="m") + b" \r\r")),
    "what is null": (
        *HELLO,
        (">", line(id=2, method="m")),
        ("<", line(id=2, method=None, result={}, error=None)),
    ),
    "keys of its own in capital letters": (
        *HELLO,
        (">", line(id=2, method="tool.invoke")),
        ("<", line(id=2, result={"ID": 1, "Name": "x", "Topic": 1, "topic": 2, "a": {"b": 1, "B": 2}})),
    ),
}


@pytest.mark.parametrize("lines", FINE.values(), ids=FINE)
def test_fine(lines: Lines) -> None:
    inspector, said = overhear(*lines)
    assert not any(said) and not inspector.strays
    assert inspector.handshaken and not inspector.awaiting


EVIL = publish("agent.intake")
SLACK = publish("plugin.inbound.slack.x")
OTHER = reply("other")

# Not strictly one message, and dropped by a session too.
WITHHELD: Mapping[str, tuple[Lines, str]] = {
    "a banner": ((("<", b"hello"),), "not_json"),
    "a progress bar": ((*HELLO, ("<", b"\r10 %\r20 %")), "not_json"),
    "two lines, if a carriage return ends one": ((*HELLO, ("<", b"x\r" + EVIL + b"\rx")), "not_json"),
    "lines for str.splitlines": ((*HELLO, ("<", "x\u2028".encode() + EVIL)), "not_json"),
    "two values, read as a stream": ((*HELLO, ("<", b"{}" + EVIL)), "not_json"),
    "more lines than we look at": ((*HELLO, ("<", b"{}\r" * 300_000)), "not_json"),
    "single quotes": ((*HELLO, ("<", EVIL.replace(b'"', b"'"))), "not_json"),
    "a comma too many": ((*HELLO, ("<", EVIL.replace(b"}}}", b"}},}"))), "not_json"),
    "a prefix": ((*HELLO, ("<", b"got " + EVIL)), "not_json"),
    "a topic in UTF-16": ((*HELLO, ("<", EVIL.decode().encode("utf-16-be"))), "not_json"),
    "an array": ((*HELLO, ("<", b"[%b]" % EVIL)), "not_rpc"),
    "a message as an array of its fields": ((*HELLO, ("<", b'["2.0",null,"m",{}]')), "not_rpc"),
    "keys in capital letters": (
        (*HELLO, ("<", b'{"Method":"broker.publish","PARAMS":{"topic":"agent.intake"}}')),
        "not_rpc",
    ),
    "an answer in capital letters": ((*HELLO, ("<", b'{"ID":1,"Result":{}}')), "not_rpc"),
    "a method in another spelling": (
        (*HELLO, ("<", EVIL.replace(b"broker.publish", b"Broker.Publish"))),
        "ambiguous",
    ),
    "a method with a NUL": (
        (*HELLO, ("<", EVIL.replace(b"broker.publish", b"broker.publish\\u0000"))),
        "ambiguous",
    ),
    "a method with bytes that are not UTF-8": (
        (*HELLO, ("<", EVIL.replace(b"broker.publish", b"broker.pub\xfflish"))),
        "ambiguous",
    ),
    "a result and an error": (
        ((">", ASK), ("<", OTHER[:-1] + b',"error":{"code":1,"message":"no"}}')),
        "ambiguous",
    ),
    "an answer and a question": (((">", ASK), ("<", OTHER[:-1] + b',"method":"m"}')), "ambiguous"),
    "a key with a NUL": ((*HELLO, ("<", EVIL.replace(b'"topic"', b'"topic\\u0000"'))), "ambiguous"),
    "a topic of two spellings": (
        (*HELLO, ("<", SLACK.replace(b'"topic"', b'"Topic": "agent.intake", "topic"'))),
        "ambiguous",
    ),
    "a topic of two spellings in the event": (
        (*HELLO, ("<", SLACK.replace(b'"payload"', b'"TOPIC": "agent.intake", "payload"'))),
        "ambiguous",
    ),
    "an event of two spellings": (
        (*HELLO, ("<", SLACK.replace(b'"event"', b'"Event": {}, "event"'))),
        "ambiguous",
    ),
    **{
        f"nearly the same id: {number}": (
            ((">", ASK), ("<", OTHER.replace(b'"id": 1', b'"id": ' + number.encode()))),
            "unasked",
        )
        for number in ('"1"', "1.0", "true", "[1]")
    },
    "before the question": ((("<", OTHER),), "unasked"),
    "before another question": (((">", line(id=5, method="m")), ("<", OTHER), (">", ASK)), "unasked"),
    "an answer nobody asked for": ((*HELLO, ("<", line(id=9, result={}))), "unasked"),
    "an answer twice": (
        (*HELLO, (">", line(id=2, method="m")), ("<", line(id=2, result={})), ("<", line(id=2, result={}))),
        "unasked",
    ),
    "no topic": ((*HELLO, ("<", publish(""))), "no_topic"),
    "a topic that is no text": ((*HELLO, ("<", publish(["agent.intake"]))), "no_topic"),
    "params that are an array": (
        (*HELLO, ("<", line(method="broker.publish", params=["agent.intake", {}]))),
        "no_topic",
    ),
    "no event": (
        (*HELLO, ("<", line(method="broker.publish", params={"topic": "plugin.inbound.slack.x"}))),
        "no_event",
    ),
    "an event that is an array": (
        (
            *HELLO,
            (
                "<",
                line(
                    method="broker.publish", params={"topic": "plugin.inbound.slack.x", "event": ["id", {}]}
                ),
            ),
        ),
        "no_event",
    ),
    "a foreign topic": ((*HELLO, ("<", publish("plugin.inbound.mail.x"))), "not_allowed"),
    "a wildcard": ((*HELLO, ("<", publish("plugin.inbound.slack.>"))), "no_subject"),
    "a foreign topic in the event": (
        (*HELLO, ("<", publish("plugin.inbound.slack.x", "agent.intake"))),
        "not_allowed",
    ),
    "no text for a topic in the event": (
        (*HELLO, ("<", publish("plugin.inbound.slack.x", ["agent.intake"]))),
        "not_allowed",
    ),
    "a topic as a question": (
        (*HELLO, ("<", line(id=4, method="broker.publish", params={"topic": "a"}))),
        "not_allowed",
    ),
    "a topic before the handshake": ((("<", EVIL),), "not_yet_wired"),
}

# Those that a session acts on. They end the plugin, here and there.
AMBIGUOUS: Mapping[str, Lines] = {
    "an array of messages, if a carriage return ends a line": (*HELLO, ("<", b"[1,\r" + EVIL + b"\r]")),
    "these within a message": (*HELLO, ("<", b'{"method":"m","params":\r' + EVIL + b"\r}")),
    "more of them within a message": (*HELLO, ("<", b"[" + b"1,\r" * 250_000 + b"1]")),
    "capital letters within a message": (
        *HELLO,
        ("<", b'{"method":"m","params":\r{"Method":"broker.publish"}\r}'),
    ),
    "a method of two spellings": (*HELLO, ("<", EVIL.replace(b'"method"', b'"method": "log", "Method"'))),
    "an id in capital letters": ((">", ASK), ("<", OTHER.replace(b'"result"', b'"ID": 1, "result"'))),
    "letters that fold": ((">", ASK), ("<", OTHER.replace(b'"result"', '"re\u017fult"'.encode()))),
    "an id of two spellings": (
        (">", ASK),
        ("<", reply().replace(b'"id": "noted"', b'"id": "noted", "Id": "other"')),
    ),
    "a manifest of two spellings": ((">", ASK), ("<", reply(Manifest={"plugin": {"id": "other"}}))),
    "tools in capital letters": ((">", ASK), ("<", reply(Tools=[tool("noted_rm")]))),
    "a tool of two names": ((">", ASK), ("<", reply(tools=[{**tool("noted_add"), "NAME": "noted_rm"}]))),
}

WRONG: Mapping[str, tuple[Lines, str, str]] = {
    **{name: (lines, "withheld", kind) for name, (lines, kind) in WITHHELD.items()},
    **{name: (lines, "malformed_response", "ambiguous") for name, lines in AMBIGUOUS.items()},
    "with an error of no text": (
        ((">", ASK), ("<", OTHER.replace(b'"result"', b'"error": "", "result"'))),
        "handshake_failed",
        "identity_mismatch",
    ),
    "two params": (
        (*HELLO, ("<", EVIL[:-1] + b',"params":{"topic":"plugin.inbound.slack.x"}}')),
        "malformed_response",
        "duplicate_key",
    ),
    **{
        f"twice, {where}": ((*before, ("<", raw)), "malformed_response", "duplicate_key")
        for where, before, raw in (
            ("a topic", HELLO, SLACK.replace(b'"topic"', b'"topic": "agent.intake", "topic"')),
            (
                "a topic in escapes",
                HELLO,
                SLACK.replace(b'"topic"', b'"t\\u006fpic": "agent.intake", "topic"'),
            ),
            ("an event", HELLO, SLACK.replace(b'"event"', b'"event": {"topic": "agent.intake"}, "event"')),
            (
                "a topic in the event",
                HELLO,
                publish("plugin.inbound.slack.x", "plugin.inbound.slack.x").replace(
                    b'"payload"', b'"topic": "agent.intake", "payload"'
                ),
            ),
            ("a manifest", ((">", ASK),), reply().replace(b'"manifest"', b'"manifest": {}, "manifest"')),
            ("an id", ((">", ASK),), reply().replace(b'"id": "noted"', b'"id": "other", "id": "noted"')),
        )
    },
    "nobody": (((">", ASK), ("<", line(id=1, result={}))), "handshake_failed", "identity_missing"),
    "not even a text": (((">", ASK), ("<", reply(3))), "handshake_failed", "identity_missing"),
    "somebody else": (((">", ASK), ("<", reply("other"))), "handshake_failed", "identity_mismatch"),
    "tools that are no list": (((">", ASK), ("<", reply(tools={}))), "handshake_failed", "tool_catalogue"),
    "no tools": (((">", ASK), ("<", reply(tools=[]))), "handshake_failed", "tools_missing"),
    "a tool as an array of its fields": (
        ((">", ASK), ("<", reply(tools=[["noted_rm", "d", {}]]))),
        "handshake_failed",
        "tool_catalogue",
    ),
    "a tool that was not declared": (
        ((">", ASK), ("<", reply(tools=[tool("noted_add"), tool("noted_rm")]))),
        "handshake_failed",
        "tool_catalogue",
    ),
    "infinity": (
        (*HELLO, ("<", b'{"jsonrpc":"2.0","method":"m","params":-Infinity}')),
        "malformed_response",
        "bad_number",
    ),
    "a method twice": (
        (*HELLO, ("<", b'{"method":"log","method":"broker.publish"}')),
        "malformed_response",
        "duplicate_key",
    ),
    "a byte order mark": ((("<", b"\xef\xbb\xbf{}"),), "malformed_response", "bom"),
    "too deep": ((*HELLO, ("<", b"[" * 129 + b"]" * 129)), "malformed_response", "too_deep"),
}


def verdict(last: Any) -> tuple[str, str]:
    return ("withheld", last.kind) if isinstance(last, Withheld) else (last.code, last.cause)


@one_case(("lines", "code", "cause"), WRONG.values(), ids=WRONG)
def test_wrong(lines: Lines, code: str, cause: str) -> None:
    _, said = overhear(*lines)
    *before, last = said
    assert not any(before)
    assert verdict(last) == (code, cause)


def test_a_refusal_is_the_hosts_to_judge() -> None:
    inspector, said = overhear((">", ASK), ("<", line(id=1, error={"code": -32603, "message": "no"})))
    assert said == [None] and not inspector.awaiting and not inspector.handshaken


@pytest.mark.parametrize(("environ", "seconds"), [({}, 5.0), ({"NEXO_PLUGIN_INIT_TIMEOUT_MS": "250"}, 0.25)])
def test_the_hosts_clock_is_ours(environ: Mapping[str, str], seconds: float) -> None:
    assert overhear(environ=environ)[0].handshake_seconds == seconds
    assert not overhear((">", line(id=1, method="shutdown")))[0].awaiting
    assert overhear((">", ASK))[0].awaiting


def test_what_is_remembered_of_the_host_is_bounded() -> None:
    """A host may ask without ever being answered."""
    inspector, _ = overhear(*HELLO)
    for number in range(2, 10_000):
        inspector.host_frame(line(id=number, method="m" * 1000))
    inspector.host_frame(line(id="i" * 100_000, method="m"))
    assert len(inspector._reader._open) <= 4096
    assert sum(len(method) for method in inspector._reader._open.values()) <= 4096 * 256
    assert inspector.plugin_frame(line(id=9_999, result=1)) is None and not inspector.strays
    assert inspector.plugin_frame(line(id=2, result=1)) is None and inspector.strays == {"unasked": 1}
