"""nexo, overheard: lines of a host (>) and of a plugin (<), and the verdict about the plugin's last one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from runner.contracts.nexo.inspector import Inspector, make
from runner.plugin import Plugin
from runner.protocol.dialect import Setting
from runner.protocol.observer import Withheld
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


FINE: Mapping[str, tuple[Lines, Mapping[str, int]]] = {
    "a handshake": (HELLO, {}),
    "ids of text": (
        ((">", ASK.replace(b":1,", b':"a",')), ("<", reply().replace(b'"id": 1', b'"id": "a"'))),
        {},
    ),
    "an allowed topic": ((*HELLO, ("<", publish("plugin.inbound.slack.x"))), {}),
    "the same topic twice": (
        (*HELLO, ("<", publish("plugin.inbound.slack.x", "plugin.inbound.slack.x"))),
        {},
    ),
    "a banner": ((("<", b"hello"), *HELLO, ("<", b"Traceback: {")), {"not_json": 2}),
    "blank lines": ((*HELLO, ("<", b""), ("<", b"\r")), {}),
    "an answer nobody asked for": (
        (*HELLO, ("<", line(id=9, result={})), ("<", line(id=9, result={}))),
        {"unasked": 2},
    ),
    "an answer to the number as text": (
        (*HELLO, (">", line(id=2, method="m")), ("<", line(id="2", result={}))),
        {"unasked": 1},
    ),
    "an answer twice": (
        (*HELLO, (">", line(id=2, method="m")), ("<", line(id=2, result={})), ("<", line(id=2, result={}))),
        {"unasked": 1},
    ),
    "ids that are none": (
        (*HELLO, ("<", line(id=[1], result={})), ("<", line(id=True, result=1))),
        {"unasked": 2},
    ),
    "JSON that is not the protocol": ((*HELLO, ("<", b"[]"), ("<", b"1"), ("<", b"{}")), {"not_rpc": 3}),
    "no topic": ((*HELLO, ("<", publish("")), ("<", line(method="broker.publish"))), {"no_topic": 2}),
    "a question of its own": ((*HELLO, ("<", line(id=1, method="memory.recall", params={}))), {}),
    "a host we cannot read": (((">", b"\xff{"), (">", None), (">", b"3"), *HELLO), {}),
    "bars and logs": (
        (
            *HELLO,
            ("<", b"\r10 %\r20 %"),
            ("<", b'{"level":"info","id":3} done'),
            ("<", b"[1] started {"),
            ("<", b'got {"name":"m"}'),
            ("<", b"1 " * 5_000 + b"{"),
        ),
        {"not_json": 5},
    ),
    "JSON in capital letters": ((*HELLO, ("<", b'{"Verb":"GET","ID":1}')), {"not_rpc": 1}),
    "logs with braces": (
        (
            *HELLO,
            ("<", b"{'level': 'info', 'id': 3, 'methods': ['a'], 'input_method': 1}"),
            ("<", b"Traceback (most recent call last): File \"x.py\", line 3, in f: d = {'a': 1,}"),
            ("<", b"TypeError: method f() of {'a'} takes 1 argument"),
            ("<", b"DEBUG {result: 3, error: none}"),
            ("<", b"INFO {an error of id 3}"),
            ("<", rb"C:\users {\n \u00e9 \x1b[0m \u4e00}"),
            ("<", b"{" + b"9" * 5_000 + b"} items"),
        ),
        {"not_json": 7},
    ),
    "no params, no event": (
        (
            *HELLO,
            ("<", line(method="broker.publish", params=None)),
            ("<", line(method="broker.publish", params={"topic": "plugin.inbound.slack.x"})),
            ("<", line(method="broker.publish", params={"topic": "plugin.inbound.slack.x", "event": None})),
        ),
        {"no_topic": 1},
    ),
    "arrays elsewhere": (
        (*HELLO, ("<", line(method="log", params=["a", {}])), ("<", b'["a","2"]')),
        {"not_rpc": 1},
    ),
    "other methods": (
        (
            *HELLO,
            *(
                ("<", line(method=name))
                for name in ("Broker.Publisher", "broker publish", "LOG", "m" * 5_000)
            ),
        ),
        {},
    ),
    "what JSON allows in a text": (
        (*HELLO, ("<", '{"method":"m","params":"\u2028{}\u2028\u0085[]"}'.encode())),
        {},
    ),
    "blanks around it": ((*HELLO, ("<", b" \r" + line(method="m") + b" \r\r")), {}),
    "what is null": (
        (*HELLO, (">", line(id=2, method="m")), ("<", line(id=2, method=None, result={}, error=None))),
        {},
    ),
    "keys of its own in capital letters": (
        (
            *HELLO,
            (">", line(id=2, method="tool.invoke")),
            ("<", line(id=2, result={"ID": 1, "Name": "x", "Topic": 1, "topic": 2, "a": {"b": 1, "B": 2}})),
        ),
        {},
    ),
    "an array": ((*HELLO, ("<", b"[" + publish("plugin.inbound.slack.x") + b"]")), {"not_rpc": 1}),
}


@pytest.mark.parametrize(("lines", "strays"), FINE.values(), ids=FINE)
def test_fine(lines: Lines, strays: Mapping[str, int]) -> None:
    inspector, said = overhear(*lines)
    assert not any(said) and inspector.strays == strays
    assert inspector.handshaken and not inspector.awaiting


EVIL = publish("agent.intake")
FIELDS: list[Any] = ["id", "2026-01-01T00:00:00Z", "agent.intake", "core", None, {}]


def lenient(old: bytes, new: bytes, raw: bytes = EVIL) -> Lines:
    """The line changed so that it is not JSON for us."""
    assert old in raw
    return (*HELLO, ("<", raw.replace(old, new)))


SLACK = publish("plugin.inbound.slack.x")
OTHER = reply("other")

# What is harmless for one host, and for another the message that must not come through.
AMBIGUOUS: Mapping[str, Lines] = {
    "lines for who ends them at a carriage return": (*HELLO, ("<", b"x\r" + EVIL + b"\rx")),
    "these within an array": (*HELLO, ("<", b"[1,\r" + EVIL + b"\r]")),
    "these within a message": (*HELLO, ("<", b'{"method":"m","params":\r' + EVIL + b"\r}")),
    "lines for str.splitlines": (*HELLO, ("<", "x\u2028".encode() + EVIL)),
    "also by control characters": (*HELLO, ("<", b"x\x0b" + EVIL)),
    "the end of a text in C": (*HELLO, ("<", EVIL + b"\0x")),
    "for who reads a stream of JSON": (*HELLO, ("<", b"{}" + EVIL)),
    "one after numbers and texts": (*HELLO, ("<", b'1 "a" null ' + EVIL + b" x")),
    "an array of them": (*HELLO, ("<", b"{}[" + EVIL + b"]")),
    "more lines than we look at": (*HELLO, ("<", b"{}\r" * 300_000)),
    "more values than we look at": (*HELLO, ("<", b"1 " * 400_000 + b"{")),
    "more of them within a message": (*HELLO, ("<", b"[" + b"1,\r" * 250_000 + b"1]")),
    "capital letters": ((">", ASK), ("<", OTHER.replace(b'"id"', b'"ID"'))),
    "a method of two spellings": (*HELLO, ("<", EVIL.replace(b'"method"', b'"method": "log", "Method"'))),
    "a method with a NUL": (*HELLO, ("<", EVIL.replace(b"broker.publish", b"broker.publish\\u0000"))),
    "a key with a NUL": (*HELLO, ("<", EVIL.replace(b'"topic"', b'"topic\\u0000"'))),
    "a topic of two spellings": (
        *HELLO,
        ("<", SLACK.replace(b'"topic"', b'"Topic": "agent.intake", "topic"')),
    ),
    "a topic in capital letters": (*HELLO, ("<", EVIL.replace(b'"topic"', b'"Topic"'))),
    "a topic of two spellings in the event": (
        *HELLO,
        ("<", SLACK.replace(b'"payload"', b'"TOPIC": "agent.intake", "payload"')),
    ),
    "an event of two spellings": (*HELLO, ("<", SLACK.replace(b'"event"', b'"Event": {}, "event"'))),
    "an id of two spellings": (
        (">", ASK),
        ("<", reply().replace(b'"id": "noted"', b'"id": "noted", "Id": "other"')),
    ),
    "a manifest of two spellings": ((">", ASK), ("<", reply(Manifest={"plugin": {"id": "other"}}))),
    "tools in capital letters": ((">", ASK), ("<", reply(Tools=[tool("noted_rm")]))),
    "a tool of two names": ((">", ASK), ("<", reply(tools=[{**tool("noted_add"), "NAME": "noted_rm"}]))),
    **{
        f"an event that is {event!r}": (
            *HELLO,
            ("<", line(method="broker.publish", params={"topic": "plugin.inbound.slack.x", "event": event})),
        )
        for event in (FIELDS, [], "{}", 1, False)
    },
    **{
        f"params that are {params!r}": (*HELLO, ("<", line(method="broker.publish", params=params)))
        for params in (["agent.intake", {}], [], "agent.intake", 0)
    },
    "a message as an array of its fields": (*HELLO, ("<", b'["2.0",null,"m",{}]')),
    "such an array without a version": (*HELLO, ("<", b'[null,"broker.publish",{"topic":"agent.intake"}]')),
    "in another spelling": (*HELLO, ("<", b'[null,"Broker.Publish",{"topic":"agent.intake"}]')),
    "after an integer that Python does not convert": (
        *HELLO,
        ("<", EVIL.replace(b'{"payload"', b'{"x": ' + b"9" * 5_000 + b', "payload"') + b" x"),
    ),
    "and on a line of its own": (*HELLO, ("<", b"9" * 5_000 + b"\r" + EVIL)),
    "single quotes": lenient(b'"', b"'"),
    "single quotes, an answer": lenient(b'"', b"'", OTHER.replace(b'"jsonrpc": "2.0", ', b"")),
    "no quotes": (*HELLO, ("<", b"{method:broker.publish,params:{topic:agent.intake}}")),
    "no quotes, an answer": (*HELLO, ("<", b"{id /**/ : 1, result/**/: {}}")),
    "a comment": lenient(b'"method"', b'/* */ "method"'),
    "a comment before it": (*HELLO, ("<", b"/* */" + EVIL)),
    "a comma too many": lenient(b"}}}", b"}},}"),
    "a zero too many": lenient(b'"payload": 1', b'"payload": 01'),
    "a tab in a text": lenient(b"agent.intake", b"agent\t.intake"),
    "a byte order mark after a blank": (*HELLO, ("<", b" \xef\xbb\xbf" + EVIL)),
    "a prefix": (*HELLO, ("<", b'got {"method":"m"}')),
    "capital letters and no JSON": (*HELLO, ("<", b'{"Method":"broker.publish",}')),
    **{
        f"letters written {escape.decode()}": (*HELLO, ("<", b"{'" + escape + b"ethod':'m'}"))
        for escape in (
            rb"\u006d",
            rb"\u004D",
            rb"\x6d",
            rb"\u{6D}",
            rb"\u{00006d}",
            rb"\U0000006d",
            rb"\155",
            rb"\m",
        )
    },
    "a letter written as itself": (*HELLO, ("<", b"{'me\\thod':'m'}")),
    "a line continued": (*HELLO, ("<", b"{'me\\\rthod':'m'}")),
    "bytes that are not UTF-8": (*HELLO, ("<", b"{'me\xffthod':'m'}")),
    "more escaped letters than we look at": (*HELLO, ("<", b"{" + rb"\u0041" * 10_001)),
    **{
        f"in {encoding}": (*HELLO, ("<", EVIL.decode().encode(encoding)))
        for encoding in ("utf-16-le", "utf-16-be", "utf-32-be", "utf-16")
    },
    **{
        f"a method spelled {method[:20]!r}": (
            *HELLO,
            ("<", EVIL.replace(b'"broker.publish"', json.dumps(method).encode())),
        )
        for method in (
            *(
                "Broker.Publish",
                " broker.publish",
                "broker.publish\r\n",
                "broker\u200b.publish",
                "\ufeffbroker.publish",
            ),
            *(
                "broker.\xa0publish",
                "broker.publi\u017fh",
                "broker.\ud800publish",
                "broker.publish" + " " * 5_000,
            ),
            *("\u2028broker.publish", "\x7fbroker.publish", "INITIALIZE", " " * 100_000),
        )
    },
    "a method with bytes that are not UTF-8": lenient(b"broker.publish", b"broker.pub\xfflish"),
    "keys in capital letters, no version": (
        *HELLO,
        ("<", b'{"Method":"broker.publish","PARAMS":{"topic":"agent.intake"}}'),
    ),
    "params in capital letters, no version": (
        *HELLO,
        ("<", b'{"method":"m","PARAMS":{"topic":"agent.intake"}}'),
    ),
    "a method of two types": (*HELLO, ("<", b'{"Method":"broker.publish","METHOD":3}')),
    "a method whose key has a NUL": (*HELLO, ("<", b'{"method\\u0000":"broker.publish"}')),
    "an answer in capital letters, no version": (*HELLO, ("<", b'{"ID":1,"Result":{}}')),
    "capital letters in an array": (*HELLO, ("<", b'[{"Method":"broker.publish"}]')),
    "capital letters within a message": (
        *HELLO,
        ("<", b'{"method":"m","params":\r{"Method":"broker.publish"}\r}'),
    ),
    "letters that fold": ((">", ASK), ("<", OTHER.replace(b'"result"', '"re\u017fult"'.encode()))),
}

# Those that a session acts on. They end the plugin, here and there; the others are dropped.
ENDS_IT = (
    *("these within an array", "these within a message", "more of them within a message"),
    *("a method of two spellings", "an id of two spellings", "a manifest of two spellings"),
    *("tools in capital letters", "a tool of two names", "params in capital letters, no version"),
    *("capital letters within a message", "letters that fold"),
)

# Answers of somebody else's to initialize, under numbers that some hosts take for the one they have asked by.
NEARLY = ('"1"', "1.0", "1e0", "true", '" 1"', '"0x1"', '"1.0"', "[1]", '[["1"]]')

WRONG: Mapping[str, tuple[Lines, str, str]] = {
    **{
        name: (lines, "malformed_response" if name in ENDS_IT else "withheld", "ambiguous")
        for name, lines in AMBIGUOUS.items()
    },
    # The contract says that the error counts, and the method. A host may read the result all the same.
    "a yes and a no": (
        ((">", ASK), ("<", OTHER[:-1] + b',"error":{"code":1,"message":"no"}}')),
        "handshake_failed",
        "identity_mismatch",
    ),
    "an answer and a question": (
        ((">", ASK), ("<", OTHER[:-1] + b',"method":"m"}')),
        "handshake_failed",
        "identity_mismatch",
    ),
    **{
        f"nearly the same id: {number}": (
            ((">", ASK), ("<", OTHER.replace(b'"id": 1', b'"id": ' + number.encode()))),
            "handshake_failed",
            "identity_mismatch",
        )
        for number in NEARLY
    },
    "before the question": ((("<", OTHER),), "withheld", "unasked"),
    "before the question, in an array": ((("<", b"[%b]" % OTHER),), "withheld", "unasked"),
    "before another question": (
        ((">", line(id=5, method="m")), ("<", OTHER), (">", ASK)),
        "withheld",
        "unasked",
    ),
    "with an error of no text": (
        ((">", ASK), ("<", OTHER.replace(b'"result"', b'"error": "", "result"'))),
        "handshake_failed",
        "identity_mismatch",
    ),
    "and then the right one": (
        ((">", ASK), ("<", reply().replace(b'"id": 1', b'"id": 1.0')), ("<", OTHER)),
        "handshake_failed",
        "identity_mismatch",
    ),
    "an answer in an array": (((">", ASK), ("<", b"[%b]" % OTHER)), "handshake_failed", "identity_mismatch"),
    "after one in an array": (
        ((">", ASK), ("<", b"[%b]" % reply()), ("<", OTHER)),
        "handshake_failed",
        "identity_mismatch",
    ),
    "a foreign topic in an array": ((*HELLO, ("<", b"[%b]" % EVIL)), "withheld", "topic"),
    "too many in an array": (
        (*HELLO, ("<", b"[%b]" % b",".join([line(method="m")] * 1001))),
        "withheld",
        "ambiguous",
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
    "a foreign topic": ((*HELLO, ("<", publish("plugin.inbound.mail.x"))), "withheld", "topic"),
    "a wildcard": ((*HELLO, ("<", publish("plugin.inbound.slack.>"))), "withheld", "topic"),
    "a foreign topic in the event": (
        (*HELLO, ("<", publish("plugin.inbound.slack.x", "agent.intake"))),
        "withheld",
        "topic",
    ),
    "no text for a topic in the event": (
        (*HELLO, ("<", publish("plugin.inbound.slack.x", ["agent.intake"]))),
        "withheld",
        "topic",
    ),
    "a topic as a question": (
        (*HELLO, ("<", line(id=4, method="broker.publish", params={"topic": "a"}))),
        "withheld",
        "topic",
    ),
    "a topic before the handshake": ((("<", publish("agent.intake")),), "withheld", "not_yet_wired"),
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
    assert len(inspector._observer._open) <= 4096
    assert sum(len(method) for method in inspector._observer._open.values()) <= 4096 * 256
    assert inspector.plugin_frame(line(id=9_999, result=1)) is None and not inspector.strays
    assert inspector.plugin_frame(line(id=2, result=1)) is None and inspector.strays == {"unasked": 1}
