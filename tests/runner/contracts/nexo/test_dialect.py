"""nexo's conversation, as tables: what is said, and the events that come of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts.nexo import CONTRACT, manifest
from runner.contracts.nexo import tools as catalogue
from runner.contracts.nexo.dialect import FRAME_LIMIT, NexoDialect, make
from runner.contracts.nexo.events import Stamp, stamp
from runner.contracts.nexo.hooks import CONTINUE
from runner.plugin import Plugin
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Event,
    HostCall,
    Identity,
    Kind,
    Message,
    Notice,
    Progress,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    Violation,
)
from runner.protocol.memory import BoundedCache
from runner.protocol.schema import Schema
from sandbox.document.read import parse

MANIFEST = """\
manifest_version = 2
[plugin]
id = "demo"
version = "1.2.3"
name = "Demo"
description = "A demo."
min_nexo_version = ">=0.1.0"
[plugin.extends]
tools = ["demo_say", "demo_rest", "demo_odd"]
hooks = ["greet"]
channels = ["mail"]
llm_providers = ["cohere", "mistral"]
memory_backends = ["pinecone"]
[[plugin.channels.register]]
kind = "slack"
[plugin.capabilities.broker]
subscribe = ["news.*"]
publish = ["shout.>"]
[plugin.tools]
expose = ["demo_pin", "demo_post"]
[[plugin.tools.outbound]]
name = "demo_pin"
input_schema = '{"type": "object", "required": ["id"]}'
rpc_method = "demo.pin"
timeout_ms = 1500
[[plugin.tools.outbound]]
name = "demo_post"
input_schema = '{"type": "object"}'
"""
CONFIGURED = '[plugin.config_schema]\nschema = \'{"type": "object", "required": ["key"]}\'\n'
LIST_CONFIGURED = CONFIGURED + 'shape = "array"\n'

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SAY = {"name": "demo_say", "description": "Says.", "input_schema": TEXT}
REST = {"name": "demo_rest", "description": "Rests.", "input_schema": {}}
ODD = {"name": "demo_odd", "description": "Odd.", "input_schema": {"type": "no such type"}}
WHO = {"plugin": {"id": "demo", "version": "1.2.3", "name": "Demo"}}
WELCOME = {"manifest": WHO, "server_version": "demo-1.2.3", "tools": [SAY, REST, ODD]}
STAMP = Stamp("00000000-0000-4000-8000-000000000000", "2026-01-01T00:00:00Z")
SESSION = "01940000-0000-0000-0000-000000000099"


def plugin(text: str = "") -> Plugin:
    found, diagnostics = manifest.read(parse("/p/plugin.toml", (MANIFEST + text).encode(), "toml"))
    assert found is not None, [d.text() for d in diagnostics]
    return found


DEMO = plugin()


def dialect(
    of: Plugin = DEMO, *, config: Any = None, environ: Mapping[str, str] | None = None
) -> NexoDialect:
    return NexoDialect(Setting(of, environ=environ or {}, config=config), stamps=lambda: STAMP)


def hear(conversation: NexoDialect, *messages: Any) -> list[Event]:
    """What comes of lines of the plugin's: bytes as they are, anything else as JSON."""
    events: list[Event] = []
    for message in messages:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        events += conversation.feed(conversation.read(raw))
    return events


def answer(number: int, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def error(number: int, code: Any, message: Any = "no", **data: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, **data}}


def ask(number: Any, method: str, params: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def tell(method: str, params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params}


def frames(events: Sequence[Event]) -> list[Any]:
    sent = [event.frame for event in events if isinstance(event, Send)]
    assert all(frame.endswith(b"\n") and frame.count(b"\n") == 1 for frame in sent)
    return [json.loads(frame) for frame in sent]


def ready(of: Plugin = DEMO, *, environ: Mapping[str, str] | None = None) -> NexoDialect:
    conversation = dialect(of, environ=environ)
    conversation.opening()
    assert isinstance(hear(conversation, answer(1, WELCOME))[-1], Ready)
    return conversation


def without(events: Sequence[Event], kind: type) -> list[Event]:
    return [event for event in events if not isinstance(event, kind)]


# --- the handshake ----------------------------------------------------------------------------------------


def test_opening() -> None:
    conversation = make(Setting(DEMO))
    (initialize,) = frames(conversation.opening())
    assert initialize == {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"nexo_version": "0.2.0"},
    }
    assert (
        next(iter(CONTRACT.calls)) == "tool"
        and conversation.one_shot is False
        and conversation.patience is None
    )


def who(name: Any) -> dict[str, Any]:
    return {"manifest": {"plugin": {"id": name}}}


def offers(*tools: Any) -> dict[str, Any]:
    return {"manifest": WHO, "tools": list(tools)}


@pytest.mark.parametrize(
    ("reply", "cause", "words"),
    [
        (error(1, -32603, "no licence"), "refused", "no licence (-32603)"),
        (error(1, "odd", None), "refused", ""),
        (answer(1, None), "identity_missing", ""),
        (answer(1, []), "identity_missing", ""),
        (answer(1, {}), "identity_missing", ""),
        ({"jsonrpc": "2.0", "id": 1}, "identity_missing", ""),
        (answer(1, {"manifest": "demo"}), "identity_missing", ""),
        (answer(1, {"manifest": {"plugin": ["demo"]}}), "identity_missing", ""),
        (answer(1, who(None)), "identity_missing", ""),
        (answer(1, who(7)), "identity_missing", ""),
        (answer(1, who("")), "identity_mismatch", ""),
        (answer(1, who("Demo")), "identity_mismatch", "'Demo'"),
        (answer(1, who("demo.sales")), "identity_mismatch", "'demo.sales'"),
        (answer(1, who("\x1b[2J")), "identity_mismatch", "\\x1b[2J"),
        (answer(1, {"manifest": WHO, "tools": {}}), "tool_catalogue", "not an array"),
        (answer(1, {"manifest": WHO, "tools": None}), "tool_catalogue", "not an array"),
        (answer(1, {"manifest": WHO}), "tools_missing", "has no tools, and its manifest declares 'demo_say'"),
        (answer(1, offers()), "tools_missing", "an empty list"),
        (answer(1, offers("demo_say")), "tool_catalogue", "entry 0"),
        (answer(1, offers(SAY, {**REST, "name": 5})), "tool_catalogue", "entry 1"),
        (answer(1, offers({"name": "demo_say", "input_schema": {}})), "tool_catalogue", "description"),
        (answer(1, offers({"name": "demo_say", "description": "x"})), "tool_catalogue", "input_schema"),
        (answer(1, offers({**SAY, "input_schema": "{}"})), "tool_catalogue", "input_schema"),
        (answer(1, offers({**SAY, "name": "demo_other"})), "tool_catalogue", "'demo_other'"),
        # Exposed is another list: what is only there may not be advertised.
        (answer(1, offers({**SAY, "name": "demo_pin"})), "tool_catalogue", "'demo_pin'"),
        (answer(1, offers(SAY, SAY)), "tool_catalogue", "twice"),
        (answer(1, {**offers(SAY), "more": [{}] * 200_000}), "too_large", "32 MiB"),
    ],
)
def test_a_handshake_that_fails(reply: Any, cause: str, words: str) -> None:
    conversation = dialect()
    conversation.opening()
    (violation,) = hear(conversation, reply)
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause, violation.call) == ("handshake_failed", cause, None)
    assert words in violation.message and violation.message.isprintable()
    # That was the end: nothing is heard any more, and nothing is said.
    assert hear(conversation, answer(1, WELCOME), ask(1, "memory.recall")) == []
    assert conversation.shutdown_steps().frames == ()


def test_a_handshake() -> None:
    conversation = dialect()
    conversation.opening()
    tools = ("demo_pin", "demo_post", "demo_say", "demo_rest", "demo_odd")
    expected = Identity("demo", "1.2.3", "1.10", "Demo", "", tools, {"server_version": "demo-1.2.3"})
    assert hear(conversation, answer(1, WELCOME)) == [Ready(expected)]
    # A second answer to the same question is late, and is counted.
    assert hear(conversation, answer(1, WELCOME)) == [] and conversation.counters["late"] == 1


def test_not_all_schemas_stay_compiled() -> None:
    """Each may take a good part of what there is for all: one that makes room is compiled again."""
    shelf: BoundedCache[Schema] = BoundedCache(40_000)
    tools = [catalogue.Tool(f"t{n}", "", {"enum": list(range(10))}) for n in range(3)]
    kept = []
    for tool in (*tools, tools[0]):
        assert tool.faults(11, shelf) and not tool.faults(1, shelf)
        kept.append([one.name for one in tools if shelf.get(one.name)])
    assert kept == [["t0"], ["t1"], ["t2"], ["t0"]]


def test_tools_that_are_declared_and_not_advertised_are_told_of() -> None:
    conversation = dialect()
    conversation.opening()
    notice, done = hear(conversation, answer(1, {**who("demo"), "tools": [REST]}))
    assert notice == Notice("tools_missing", {"declared_but_not_advertised": ["demo_say", "demo_odd"]})
    assert isinstance(done, Ready) and done.identity.version == ""
    # A plugin that declares none may leave the list out. What only [plugin.tools] exposes is not advertised.
    exports = tuple(each for each in DEMO.exports if each[0] != "extends.tools")
    quiet = dialect(DEMO._replace(exports=exports))
    quiet.opening()
    (done,) = hear(quiet, answer(1, who("demo")))
    assert isinstance(done, Ready) and done.identity.tools == ("demo_pin", "demo_post")


@pytest.mark.parametrize(
    ("expected", "said", "accepted"),
    [
        ("whatsapp.sales", "whatsapp.sales", True),
        ("whatsapp.sales", "whatsapp", True),
        ("whatsapp.sales", "whatsapp.support", False),
        ("whatsapp.sales", "whats", False),
        ("whatsapp.sales", "", False),
        ("whatsapp", "whatsapp.sales", False),
    ],
)
def test_an_instance_may_have_the_name_of_its_base(expected: str, said: str, accepted: bool) -> None:
    conversation = dialect(DEMO._replace(id=expected))
    conversation.opening()
    event = hear(conversation, answer(1, {**who(said), "tools": [SAY]}))[-1]
    assert isinstance(event, Ready if accepted else Violation)


# --- configuration ----------------------------------------------------------------------------------------


def test_who_is_to_be_configured_and_does_not_answer_initialize() -> None:
    environ = {"NEXO_PLUGIN_INIT_TIMEOUT_MS": "250"}
    conversation = dialect(plugin(CONFIGURED), config={"key": 1}, environ=environ)
    conversation.opening()
    assert conversation.patience == 0.25 and conversation.handshake_seconds == 5.25
    (violation,) = conversation.silence()
    assert isinstance(violation, Violation) and (violation.code, violation.cause) == ("timeout", "deadline")
    assert "250ms" in violation.message and "NEXO_PLUGIN_INIT_TIMEOUT_MS" in violation.hint
    assert hear(conversation, answer(1, WELCOME)) == []


@pytest.mark.parametrize(
    ("text", "config", "sent"),
    [
        (CONFIGURED, {"key": 1}, {"key": 1}),
        (LIST_CONFIGURED, [{"key": 1}, {"key": 2}], [{"key": 1}, {"key": 2}]),
        (LIST_CONFIGURED, [], []),
    ],
)
def test_configuring(text: str, config: Any, sent: Any) -> None:
    conversation = dialect(plugin(text), config=config)
    assert conversation.handshake_seconds == 10
    conversation.opening()
    assert conversation.patience == 5  # for initialize alone
    events = hear(conversation, answer(1, WELCOME))
    assert conversation.silence() == ()
    (configure,) = frames(events)
    assert configure == ask(2, "plugin.configure", {"value": sent})
    assert not any(isinstance(event, Ready) for event in events)
    # By now it has shown who it is: what it asks to get its configuration done is asked of the host.
    assert hear(conversation, ask(1, "memory.recall", {})) == [HostCall(1, "memory.recall", {})]
    assert isinstance(hear(conversation, answer(2, {"ok": True}))[0], Ready)


@pytest.mark.parametrize(
    ("text", "config", "cause"),
    [
        (CONFIGURED, {}, "config_invalid"),
        (CONFIGURED, [], "config_invalid"),
        (CONFIGURED, {"key": {1, 2}}, "config_invalid"),
        (CONFIGURED, {"key": "x" * FRAME_LIMIT}, "config_invalid"),
        (LIST_CONFIGURED, {"key": 1}, "config_invalid"),
        (LIST_CONFIGURED, [{"key": 1}, {}], "config_invalid"),
    ],
)
def test_a_configuration_that_does_not_fit_is_not_sent(text: str, config: Any, cause: str) -> None:
    conversation = dialect(plugin(text), config=config)
    conversation.opening()
    (violation,) = hear(conversation, answer(1, WELCOME))
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause) == ("handshake_failed", cause)


@pytest.mark.parametrize(("code", "hinted"), [(-32601, True), (-32603, False)])
def test_a_configuration_that_is_refused(code: int, hinted: bool) -> None:
    conversation = dialect(plugin(CONFIGURED), config={"key": 1})
    conversation.opening()
    hear(conversation, answer(1, WELCOME))
    (violation,) = hear(conversation, error(2, code))
    assert isinstance(violation, Violation) and violation.cause == "configure_refused"
    assert bool(violation.hint) is hinted


@pytest.mark.parametrize(
    ("text", "config", "notices"),
    [("", None, []), (CONFIGURED, None, []), ("", {"a": 1}, ["config_ignored"])],
)
def test_nothing_to_configure(text: str, config: Any, notices: list[str]) -> None:
    conversation = dialect(plugin(text), config=config)
    assert conversation.handshake_seconds == 5
    conversation.opening()
    events = hear(conversation, answer(1, WELCOME))
    assert [event.kind for event in events if isinstance(event, Notice)] == notices
    assert isinstance(events[-1], Ready) and not frames(events)


# --- before it is ready -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, "x", None, 1.5, [], {"a": 1}])
def test_questions_before_the_handshake_is_done_are_turned_away(number: Any) -> None:
    conversation = dialect()
    conversation.opening()
    (event,) = hear(conversation, ask(number, "memory.recall", {}))
    assert isinstance(event, Send) and event.lane == "reply"
    assert frames([event]) == [
        {"jsonrpc": "2.0", "id": number, "error": {"code": -32603, "message": "not yet wired"}}
    ]
    # Its answer to initialize is taken all the same.
    assert isinstance(hear(conversation, answer(1, WELCOME))[-1], Ready)


def test_events_before_the_handshake_is_done_are_dropped() -> None:
    conversation = dialect()
    conversation.opening()
    params = {"topic": "shout.a", "event": {"payload": 1}}
    expected = Notice("dropped", {"reason": "not_yet_wired", "topic": "shout.a", "why": ""})
    assert hear(conversation, tell("broker.publish", params)) == [expected]
    assert conversation.counters["dropped_not_yet_wired"] == 1
    with pytest.raises(CallRefused):
        conversation.notify("broker.event", {"topic": "news.x", "payload": 1})
    with pytest.raises(CallRefused) as refused:
        conversation.call(1, Call("tool", "demo_say", {"text": "x"}))
    assert isinstance(refused.value.event, Violation) and refused.value.event.call == 1


# --- lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"Starting up...", "Starting up..."),
        (b"{not json", "{not json"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 500, "x" * 200),
        (b"42", "42"),
        (b'"text"', '"text"'),
        (b"[]", "[]"),
        (b'[{"jsonrpc":"2.0","id":1,"result":{}}]', '[{"jsonrpc":"2.0","id":1,"result":{}}]'),
        (b'{"level":"info","msg":"hi"}', '{"level":"info","msg":"hi"}'),
        # A line of a log with an id is no answer.
        (b'{"id":2,"msg":"hi"}', '{"id":2,"msg":"hi"}'),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_lines_that_are_not_the_protocol_are_shown(line: bytes, shown: str, early: bool) -> None:
    conversation = dialect() if early else ready()
    if early:
        conversation.opening()
    else:
        conversation.call(7, Call("tool", "demo_rest"))
    assert hear(conversation, line) == [Notice("stdout", shown)]
    assert conversation.counters["stdout"] == 1
    # And the conversation goes on.
    assert hear(conversation, answer(1 if early else 2, WELCOME))


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b'{"jsonrpc":"2.0","id":2,"result":NaN}', "bad_number"),
        (b'{"jsonrpc":"2.0","id":2,"result":99999999999999999999999}', "bad_number"),
        (b'\xef\xbb\xbf{"jsonrpc":"2.0","id":2,"result":1}', "bom"),
        (b'{"jsonrpc":"2.0","id":2,"result":' + b"[" * 200 + b"]" * 200 + b"}", "too_deep"),
        (b'{"jsonrpc":"2.0","id":2,"id":3,"result":1}', "duplicate_key"),
    ],
)
def test_json_that_nobody_should_send_ends_it(line: bytes, cause: str) -> None:
    conversation = ready()
    (violation,) = hear(conversation, line)
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause, violation.call) == ("malformed_response", cause, None)
    assert hear(conversation, ask(1, "memory.recall")) == []


# --- calls ------------------------------------------------------------------------------------------------

TOOL = {"plugin_id": "demo", "agent_id": "runner"}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("call", "method", "params"),
    [
        (
            Call("tool", "demo_say", {"text": "x"}),
            "tool.invoke",
            {**TOOL, "tool_name": "demo_say", "args": {"text": "x"}},
        ),
        (Call("tool", "demo_rest"), "tool.invoke", {**TOOL, "tool_name": "demo_rest", "args": {}}),
        (
            Call("tool", "demo_rest", None, {"agent_id": "shopper", "policy": {"a": 1}}),
            "tool.invoke",
            {
                "plugin_id": "demo",
                "agent_id": "shopper",
                "tool_name": "demo_rest",
                "args": {},
                "policy": {"a": 1},
            },
        ),
        (
            Call("tool", "demo_pin", {"id": 1}),
            "demo.pin",
            {**TOOL, "tool_name": "demo_pin", "args": {"id": 1}},
        ),
        (Call("tool", "demo_post"), "outbound_tool.invoke", {**TOOL, "tool_name": "demo_post", "args": {}}),
        (
            Call("hook", "greet", {"body": "x"}),
            "hook.on_hook",
            {"plugin_id": "demo", "hook_name": "greet", "event": {"body": "x"}},
        ),
        (
            Call("hook", "greet"),
            "hook.on_hook",
            {"plugin_id": "demo", "hook_name": "greet", "event": {}},
        ),
        (Call("channel", "start", {"kind": "mail"}), "channel.start", {"kind": "mail", "instance": None}),
        (
            Call("channel", "channel.start", {"kind": "slack", "instance": "a"}),
            "channel.start",
            {"kind": "slack", "instance": "a"},
        ),
        (Call("channel", "stop", {"kind": "mail"}), "channel.stop", {"kind": "mail"}),
        (
            Call("channel", "send_outbound", {"kind": "mail", "msg": {"kind": "text"}}),
            "channel.send_outbound",
            {"kind": "mail", "msg": {"kind": "text"}},
        ),
        (
            Call("llm", "cohere", {"model": "m", "messages": MESSAGES, "max_tokens": 5}),
            "llm.chat",
            {
                "provider": "cohere",
                "model": "m",
                "stream": False,
                "request": {"model": "m", "messages": MESSAGES, "max_tokens": 5},
            },
        ),
        (
            Call("llm", "chat", {"provider": "mistral", "model": "m", "request": {"messages": MESSAGES}}),
            "llm.chat",
            {
                "provider": "mistral",
                "model": "m",
                "stream": False,
                "request": {"model": "m", "messages": MESSAGES},
            },
        ),
        (
            Call("llm", "cohere", {"stream": True, "model": "m", "messages": []}),
            "llm.chat",
            {
                "provider": "cohere",
                "model": "m",
                "stream": True,
                "request": {"model": "m", "messages": []},
            },
        ),
        (
            Call("memory", "vector_upsert", {"collection": "kb", "records": []}),
            "memory.vector_upsert",
            {"backend": "pinecone", "collection": "kb", "records": []},
        ),
        (
            Call("memory", "memory.vector_search", {"backend": "pinecone", "collection": "kb", "query": {}}),
            "memory.vector_search",
            {"backend": "pinecone", "collection": "kb", "query": {}},
        ),
        (
            Call("memory", "vector_delete", {"collection": "kb", "ids": ["a"]}),
            "memory.vector_delete",
            {"backend": "pinecone", "collection": "kb", "ids": ["a"]},
        ),
        (
            Call("method", "plugin.credentials.list", {"a": [1]}),
            "plugin.credentials.list",
            {"a": [1]},
        ),
    ],
)
def test_calls_on_the_wire(call: Call, method: str, params: Any) -> None:
    conversation = ready()
    (event,) = conversation.call(5, call)
    assert isinstance(event, Send) and event.lane == "request"
    assert frames([event]) == [{"jsonrpc": "2.0", "id": 2, "method": method, "params": params}]
    value = {"abort": False, "x": [1]}
    assert hear(conversation, answer(2, value)) == [Reply(5, value)]


def test_a_method_without_params_has_none() -> None:
    (frame,) = frames(ready().call(5, Call("method", "x.y")))
    assert frame == {"jsonrpc": "2.0", "id": 2, "method": "x.y"}


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (Call("tool", "demo_other"), "tool_not_exposed", "demo_other"),
        (Call("tool", "demo_sai"), "tool_not_exposed", "demo_say"),
        (Call("hook", "other"), "tool_not_exposed", "'other'"),
        (Call("channel", "restart", {"kind": "mail"}), "tool_not_exposed", "'restart'"),
        (Call("channel", "start", {"kind": "irc"}), "tool_not_exposed", "'irc'"),
        (Call("channel", "start", {"kind": 5}), "tool_not_exposed", "channel"),
        (Call("channel", "start"), "-32602", "several channels: slack, mail"),
        (Call("channel", "start", []), "-32602", "object"),
        (Call("channel", "send_outbound", {"kind": "mail", "text": "x"}), "-32602", "msg"),
        (Call("llm", "openai", {"model": "m", "messages": []}), "tool_not_exposed", "'openai'"),
        (Call("llm", "chat", {"model": "m", "messages": []}), "-32602", "provider"),
        (Call("llm", "cohere"), "-32602", "messages"),
        (Call("llm", "cohere", {"messages": []}), "-32602", "model"),
        (Call("llm", "cohere", {"model": "m", "request": []}), "-32602", "messages"),
        (Call("memory", "vector_search", {"backend": "other"}), "tool_not_exposed", "'other'"),
        (Call("memory", "recall", {}), "tool_not_exposed", "'recall'"),
        (Call("method", "initialize"), "-32600", "runner itself"),
        (Call("method", "shutdown"), "-32600", "runner itself"),
        (Call("prompt", "x"), "-32601", "no prompts"),
        (Call("resource", "x"), "-32601", "no resources"),
        (Call("list", "prompts"), "-32601", "'prompts'"),
        (Call("tool", "demo_say", {}), "-33402", "demo_say"),
        (Call("tool", "demo_say", {"text": 5}), "-33402", "demo_say"),
        (Call("tool", "demo_pin", {}), "-33402", "demo_pin"),
        (Call("tool", "demo_odd", {}), "malformed_response", "demo_odd"),
        (Call("method", "x", {"a": {1}}), "-32602", "not JSON"),
        (Call("method", "x", {"a": float("nan")}), "-32602", ""),
        (Call("method", "x", "\ud800"), "-32602", ""),
        (Call("method", "x", "x" * FRAME_LIMIT), "-32602", "1 MiB"),
    ],
)
def test_calls_that_are_not_made(call: Call, code: str, words: str) -> None:
    conversation = ready()
    with pytest.raises(CallRefused) as refused:
        conversation.call(5, call)
    event = refused.value.event
    assert (event.code, event.call) == (code, 5)
    hint = event.hint if isinstance(event, Violation) else ""
    assert words in event.message + hint
    # The session is as it was, but for a number that is never used again.
    (frame,) = frames(conversation.call(6, Call("tool", "demo_rest")))
    assert frame["id"] in (2, 3)
    if frame["id"] == 3:  # nobody waits for the other one
        assert hear(conversation, answer(2, 1)) == [] and conversation.counters["late"] == 1
    assert hear(conversation, answer(frame["id"], 1)) == [Reply(6, 1)]


def test_arguments_that_do_not_fit_come_back_with_details() -> None:
    with pytest.raises(CallRefused) as refused:
        ready().call(5, Call("tool", "demo_say", {"text": 5}))
    event = refused.value.event
    assert isinstance(event, Refusal) and event.kind == "invalid_arguments"
    assert len(event.data["details"]) == 1 and isinstance(event.data["details"][0], str)


def test_a_plugin_that_declares_nothing_has_nothing_to_call() -> None:
    bare = DEMO._replace(exports=(), details={})
    conversation = dialect(bare)
    conversation.opening()
    hear(conversation, answer(1, who("demo")))
    kinds: tuple[tuple[Kind, str], ...] = (
        ("tool", "demo_say"),
        ("hook", "greet"),
        ("channel", "start"),
        ("llm", "chat"),
        ("memory", "vector_search"),
    )
    for kind, name in kinds:
        with pytest.raises(CallRefused) as refused:
            conversation.call(5, Call(kind, name, {}))
        assert refused.value.event.code == "tool_not_exposed"
    assert conversation.call(5, Call("list", "tools")) == (Reply(5, []),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "tools",
            [
                {
                    "name": "demo_pin",
                    "description": "",
                    "input_schema": {"type": "object", "required": ["id"]},
                },
                {"name": "demo_post", "description": "", "input_schema": {"type": "object"}},
                SAY,
                REST,
                ODD,
            ],
        ),
        ("hooks", [{"name": "greet"}]),
        ("channels", [{"name": "slack"}, {"name": "mail"}]),
        ("llms", [{"name": "cohere"}, {"name": "mistral"}]),
        ("memories", [{"name": "pinecone"}]),
    ],
)
def test_lists(name: str, expected: Any) -> None:
    assert ready().call(3, Call("list", name)) == (Reply(3, expected),)


# --- refusals ---------------------------------------------------------------------------------------------

MAIL = Call("channel", "start", {"kind": "mail"})
CHAT = Call("llm", "cohere", {"model": "m", "messages": []})
SEARCH = Call("memory", "vector_search", {"collection": "kb"})
INVOKE = Call("tool", "demo_rest")
PIN = Call("tool", "demo_pin", {"id": 1})
RAW = Call("method", "x")


@pytest.mark.parametrize(
    ("call", "code", "given", "kind", "data"),
    [
        (MAIL, -32601, None, "unsupported", {"feature": "no"}),
        (MAIL, -33001, None, "connection", None),
        (MAIL, -33002, None, "authentication", None),
        (MAIL, -33003, {"recipient": "bob"}, "recipient", {"recipient": "bob", "reason": "no"}),
        (MAIL, -33003, {"reason": "gone"}, "recipient", {"recipient": "", "reason": "gone"}),
        (MAIL, -33004, {"retry_after_secs": 42}, "rate_limited", {"retry_after_secs": 42}),
        (MAIL, -33004, None, "rate_limited", {"retry_after_secs": 0}),
        (MAIL, -33004, "soon", "rate_limited", {"retry_after_secs": 0}),
        (MAIL, -33005, {"feature": "threads"}, "unsupported", {"feature": "threads"}),
        (MAIL, -33999, {"a": 1}, "other", {"a": 1}),
        (MAIL, -32602, None, "invalid_params", None),
        (CHAT, -33101, None, "connection", None),
        (CHAT, -33102, None, "authentication", None),
        (CHAT, -33103, {"retry_after_secs": 30}, "rate_limited", {"retry_after_secs": 30}),
        (CHAT, -33104, None, "model_not_found", None),
        (CHAT, -33105, None, "context_overflow", None),
        (CHAT, -32601, None, "unsupported", None),
        (SEARCH, -33301, {"collection": "kb"}, "collection_not_found", {"collection": "kb"}),
        (SEARCH, -33302, {"expected": 768, "got": 2}, "dimension_mismatch", {"expected": 768, "got": 2}),
        (SEARCH, -33303, {"retry_after_secs": 60}, "rate_limited", {"retry_after_secs": 60}),
        (SEARCH, -33304, None, "write_failed", None),
        (INVOKE, -33401, None, "tool_not_found", None),
        (INVOKE, -33402, {"details": {"a": 1}}, "invalid_arguments", {"details": {"a": 1}}),
        (INVOKE, -33402, None, "invalid_arguments", {"details": None}),
        (INVOKE, -33403, {"trace": "x"}, "execution_failed", {"trace": "x"}),
        (INVOKE, -33404, {"retry_after_ms": 5000}, "unavailable", {"retry_after_ms": 5000}),
        (INVOKE, -33405, None, "denied", None),
        (INVOKE, -32601, None, "unsupported", None),
        (INVOKE, -32603, None, "internal", None),
        (INVOKE, -32000, None, "shutdown_failed", None),
        # A code means something for its own methods only.
        (INVOKE, -33101, None, "other", None),
        (CHAT, -33403, None, "other", None),
        (RAW, -33403, None, "other", None),
        # Tools of the manifest answer with a channel's codes too.
        (PIN, -33003, {"recipient": "x"}, "recipient", {"recipient": "x", "reason": "no"}),
        (PIN, -33405, None, "denied", None),
    ],
)
def test_refusals(call: Call, code: int, given: Any, kind: str, data: Any) -> None:
    conversation = ready()
    conversation.call(5, call)
    reply = error(2, code) if given is None else error(2, code, data=given)
    assert hear(conversation, reply) == [Refusal(5, str(code), "no", kind, data)]


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        ({"jsonrpc": "2.0", "id": 2, "error": "broken"}, "-32603", "an error that is not an object"),
        (error(2, "x", 5), "-32603", "the plugin answered with error -32603"),
        (error(2, True), "-32603", "no"),
        (error(2, -33403, ""), "-33403", "the plugin answered with error -33403"),
        (error(2, -33403, "a\x1b[2Jb\n"), "-33403", "a\\x1b[2Jb\\n"),
        (error(2, -33403, "x" * 5000), "-33403", "x" * 2000),
        # An error counts for more than a result.
        ({**error(2, -33403), "result": 1}, "-33403", "no"),
    ],
)
def test_odd_errors(reply: Any, code: str, message: str) -> None:
    conversation = ready()
    conversation.call(5, INVOKE)
    (refusal,) = hear(conversation, reply)
    assert isinstance(refusal, Refusal) and (refusal.code, refusal.message) == (code, message)


# --- answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replies", "expected", "late", "unknown"),
    [
        ([answer(2, None)], [Reply(5, None)], 0, 0),
        ([{"jsonrpc": "2.0", "id": 2}], [Reply(5, None)], 0, 0),
        ([{"id": 2, "result": 1}], [Reply(5, 1)], 0, 0),
        ([{"jsonrpc": "1.0", "id": 2, "result": 1, "extra": 2}], [Reply(5, 1)], 0, 0),
        ([{"jsonrpc": "2.0", "id": 2, "method": "", "result": 1}], [Reply(5, 1)], 0, 0),
        ([answer(2, 1), answer(2, 2)], [Reply(5, 1)], 1, 0),
        ([answer(1, 1)], [], 1, 0),
        ([answer(3, 1)], [], 0, 1),
        ([answer(-2, 1)], [], 0, 1),
        ([{"jsonrpc": "2.0", "id": "2", "result": 1}], [], 0, 1),
        ([{"jsonrpc": "2.0", "id": 2.0, "result": 1}], [], 0, 1),
        ([{"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "x"}}], [], 0, 1),
        ([{"jsonrpc": "2.0", "id": True, "result": 1}], [], 0, 1),
        ([{"jsonrpc": "2.0", "id": {}, "result": 1}], [], 0, 1),
    ],
)
def test_answers(replies: list[Any], expected: list[Event], late: int, unknown: int) -> None:
    conversation = ready()
    conversation.call(5, INVOKE)
    assert hear(conversation, *replies) == expected
    assert (conversation.counters["late"], conversation.counters["unknown"]) == (late, unknown)


# --- hooks ------------------------------------------------------------------------------------------------

GREET = Call("hook", "greet", {"body": "x"})


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"abort": True, "reason": "PII", "decision": "block"},
        {"abort": False, "decision": "transform", "transformed_body": "x", "override": {"a": 1}},
        {"reason": None, "decision": None, "transformed_body": None, "do_not_reply_again": True, "new": 1},
    ],
)
def test_a_hook_is_heard(result: Any) -> None:
    conversation = ready()
    conversation.call(5, GREET)
    assert hear(conversation, answer(2, result)) == [Reply(5, result)]


@pytest.mark.parametrize("override", ["x", [], 5, True])
def test_an_override_that_is_no_object_is_ignored_and_told(override: Any) -> None:
    conversation = ready()
    conversation.call(5, GREET)
    notice, reply = hear(conversation, answer(2, {"abort": True, "reason": "PII", "override": override}))
    assert isinstance(notice, Notice) and notice.kind == "override_ignored"
    assert notice.value == {"hook": "greet", "why": "override in its answer is not an object"}
    assert reply == Reply(5, {"abort": True, "reason": "PII"})  # the rest counts


@pytest.mark.parametrize(
    "reply",
    [
        error(2, -32601),
        error(2, -33001, "x", data={"retry_after_secs": 1}),
        answer(2, None),
        answer(2, "block"),
        answer(2, [True]),
        answer(2, {"abort": "yes"}),
        answer(2, {"abort": None}),
        answer(2, {"decision": "maybe"}),
        answer(2, {"decision": ["block"]}),
        answer(2, {"reason": 5}),
        answer(2, {"transformed_body": {}}),
        answer(2, {"do_not_reply_again": 1}),
    ],
)
def test_a_hook_that_fails_lets_it_pass(reply: Any) -> None:
    conversation = ready()
    conversation.call(5, GREET)
    notice, done = hear(conversation, reply)
    assert isinstance(notice, Notice) and notice.kind == "hook_failed" and notice.value["hook"] == "greet"
    assert notice.value["why"] and notice.value["on_failure"] == "continue"
    assert done == Reply(5, dict(CONTINUE), notice.value["why"])
    assert conversation.counters["hooks_failed"] == 1


@pytest.mark.parametrize("event", ["x" * FRAME_LIMIT, {1, 2}])
def test_a_hook_that_cannot_be_asked_lets_it_pass(event: Any) -> None:
    conversation = ready()
    notice, done = conversation.call(5, Call("hook", "greet", event))
    assert isinstance(notice, Notice) and done == Reply(5, dict(CONTINUE), notice.value["why"])
    assert conversation.expired(5, "timeout") == ()


def test_a_hook_that_fails_stops_it_where_the_policy_says_so() -> None:
    conversation = NexoDialect(Setting(DEMO, on_hook_failure="abort"), stamps=lambda: STAMP)
    conversation.opening()
    hear(conversation, answer(1, WELCOME))
    conversation.call(5, GREET)
    notice, done = hear(conversation, error(2, -32603, "fell over"))
    assert isinstance(notice, Notice) and notice.value["on_failure"] == "abort"
    assert isinstance(done, Reply) and done.failure == notice.value["why"]
    assert (done.value["abort"], done.value["decision"]) == (True, "block")
    assert "fell over" in done.value["reason"]


def test_a_hook_that_is_late_has_let_it_pass() -> None:
    conversation = ready()
    conversation.call(5, GREET)
    conversation.call(6, INVOKE)
    notice, done = conversation.expired(5, "no answer within 5 s")
    why = "no answer within 5 s"
    assert notice == Notice("hook_failed", {"hook": "greet", "why": why, "on_failure": "continue"})
    assert done == Reply(5, dict(CONTINUE), why)
    assert conversation.expired(5, "again") == ()
    assert hear(conversation, answer(2, {"abort": True})) == [] and conversation.counters["late"] == 1
    # Other calls have no answer for that: they are left to the session.
    assert conversation.expired(6, "no answer") == ()
    assert hear(conversation, answer(3, 1)) == [Reply(6, 1)]


# --- streams ----------------------------------------------------------------------------------------------

STREAM = Call("llm", "cohere", {"model": "m", "messages": [], "stream": True})
DELTA = {"type": "text_delta", "delta": "Hello"}


def delta(number: Any, chunk: Any = DELTA) -> dict[str, Any]:
    return tell("llm.chat.delta", {"request_id": number, "chunk": chunk})


@pytest.mark.parametrize(
    "call", [STREAM, Call("method", "llm.chat", {"provider": "x", "stream": True})], ids=["llm", "method"]
)
def test_a_stream(call: Call) -> None:
    conversation = ready()
    conversation.call(5, call)
    end = {"type": "end", "finish_reason": {"kind": "stop"}}
    assert hear(conversation, delta(2), delta(2, end)) == [Progress(5, DELTA), Progress(5, end)]
    assert hear(conversation, answer(2, {"content": {}})) == [Reply(5, {"content": {}})]
    # After its end there is nothing more of it.
    assert hear(conversation, delta(2)) == [] and conversation.counters["stray_deltas"] == 1


@pytest.mark.parametrize(
    "stray",
    [
        delta(3),
        delta(7),
        delta("2"),
        delta(2.0),
        delta(True),
        delta(None),
        delta([]),
        delta(2, "text"),
        delta(2, None),
        tell("llm.chat.delta", None),
        tell("llm.chat.delta", [2]),
    ],
)
def test_deltas_of_nothing_are_counted(stray: Any) -> None:
    conversation = ready()
    conversation.call(5, STREAM)
    conversation.call(6, CHAT)  # id 3, and no stream
    assert hear(conversation, stray) == [] and conversation.counters["stray_deltas"] == 1


def test_a_stream_that_was_given_up_says_no_more() -> None:
    conversation = ready()
    conversation.call(5, STREAM)
    conversation.cancel(5, "enough")
    assert hear(conversation, delta(2), answer(2, {})) == []


# --- clocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "seconds", "word"),
    [
        (Call("channel", "start"), 30, "CHANNEL"),
        (Call("channel", "stop"), 30, "CHANNEL"),
        (Call("channel", "channel.send_outbound"), 60, "CHANNEL"),
        (Call("llm", "cohere", {}), 60, "LLM"),
        (STREAM, 300, "LLM"),
        (Call("method", "llm.chat", {"stream": True}), 300, "LLM"),
        (Call("hook", "greet"), 5, "HOOK"),
        (Call("memory", "vector_upsert"), 30, "MEMORY"),
        (Call("memory", "vector_search"), 10, "MEMORY"),
        (Call("memory", "memory.vector_delete"), 30, "MEMORY"),
        (Call("tool", "demo_say"), 60, "TOOL"),
        (Call("tool", "nobody"), 60, "TOOL"),
        (Call("tool", "demo_post"), 60, "TOOL"),
        (Call("tool", "demo_pin"), 1.5, ""),
        (Call("method", "plugin.credentials.list"), 5, ""),
        (Call("method", "plugin.credentials.issue"), 1, ""),
        (Call("method", "anything"), 60, ""),
    ],
)
def test_clocks(call: Call, seconds: float, word: str) -> None:
    assert ready().seconds(call) == seconds
    words = ("INIT", "CHANNEL", "LLM", "HOOK", "MEMORY", "TOOL")
    for other in words:
        changed = ready(environ={f"NEXO_PLUGIN_{other}_TIMEOUT_MS": "2500"}).seconds(call)
        assert changed == (2.5 if other == word else seconds)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250", 0.25),
        ("0", 0),
        ("+250", 0.25),
        ("000000000000000000000000250", 0.25),
        ("18446744073709551615", 18446744073709551.615),
        ("18446744073709551616", 5),
        ("9" * 5000, 5),
        ("", 5),
        ("-1", 5),
        ("1.5", 5),
        ("1_000", 5),
        (" 250", 5),
        ("250ms", 5),
        ("٢", 5),
    ],
)
def test_the_operators_clock(text: str, seconds: float) -> None:
    assert dialect(environ={"NEXO_PLUGIN_INIT_TIMEOUT_MS": text}).handshake_seconds == seconds


def test_the_operators_clocks_are_read_once() -> None:
    environ = {"NEXO_PLUGIN_HOOK_TIMEOUT_MS": "100"}
    conversation = dialect(environ=environ)
    environ["NEXO_PLUGIN_HOOK_TIMEOUT_MS"] = "200"
    assert conversation.seconds(GREET) == 0.1


# --- what the plugin publishes ----------------------------------------------------------------------------


def event(**changes: Any) -> dict[str, Any]:
    made = {**STAMP._asdict(), "topic": "shout.a", "source": "demo", "session_id": None, "payload": {"x": 1}}
    return {**made, **changes}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"payload": {"x": 1}}, event()),
        ({"payload": None}, event(payload=None)),
        # As the scripting SDKs send it.
        ({"topic": "shout.a", "source": "demo", "payload": {"x": 1}, "metadata": {}}, event(metadata={})),
        ({"payload": {"x": 1}, "correlation_id": "c"}, event(correlation_id="c")),
        ({"payload": {"x": 1}, "session_id": SESSION}, event(session_id=SESSION)),
        # What it says of itself is not believed.
        ({"payload": {"x": 1}, "source": "agent.coordinator"}, event()),
        ({"payload": {"x": 1}, "topic": "agent.route.all"}, event()),
        ({"payload": {"x": 1}, "id": SESSION, "timestamp": "1999-01-01T00:00:00Z"}, event()),
        ({"payload": {"x": 1}, "id": [], "timestamp": 5, "source": None, "topic": {}}, event()),
        ({"payload": {"x": 1}, "trusted": True}, event()),
    ],
)
def test_published(sent: Any, expected: Any) -> None:
    conversation = ready()
    events = hear(conversation, tell("broker.publish", {"topic": "shout.a", "event": sent}))
    assert events == [HostCall(-1, "broker.publish", expected, expects_answer=False)]
    assert conversation.answer(-1, Answer(None)) == (Notice("published", expected),)  # when it is
    assert conversation.answer(-1, Answer(None)) == ()


def test_each_event_has_a_number_and_a_stamp_of_its_own() -> None:
    conversation = make(Setting(DEMO))
    conversation.opening()
    hear(conversation, answer(1, WELCOME))
    said = tell("broker.publish", {"topic": "shout.a", "event": {"payload": 1}})
    calls = [event for event in hear(conversation, said, said) if isinstance(event, HostCall)]
    assert [call.ticket for call in calls] == [-1, -2]
    assert calls[0].params["id"] != calls[1].params["id"]
    assert stamp().timestamp.endswith("Z") and len(stamp().id) == 36


GOOD = {"payload": 1}


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (None, "no_topic"),
        ([], "no_topic"),
        ({}, "no_topic"),
        ({"topic": "", "event": GOOD}, "no_topic"),
        ({"topic": 5, "event": GOOD}, "no_topic"),
        ({"topic": ["shout.a"], "event": GOOD}, "no_topic"),
        ({"topic": "shout.>", "event": GOOD}, "no_subject"),
        ({"topic": "shout.*", "event": GOOD}, "no_subject"),
        ({"topic": "shout..a", "event": GOOD}, "no_subject"),
        ({"topic": "shout.a b", "event": GOOD}, "no_subject"),
        ({"topic": "shout.a\r\nPUB agent.route.x 0", "event": GOOD}, "no_subject"),
        ({"topic": "agent.route.all", "event": GOOD}, "not_allowed"),
        ({"topic": "shout", "event": GOOD}, "not_allowed"),
        ({"topic": "Shout.a", "event": GOOD}, "not_allowed"),
        ({"topic": "plugin.inbound.mail", "event": GOOD}, "not_allowed"),
        # To where its own messages come from.
        ({"topic": "plugin.outbound.slack", "event": GOOD}, "not_allowed"),
        ({"topic": "news.x", "event": GOOD}, "not_allowed"),
        # The topic is looked at first, then the event.
        ({"topic": "agent.route.all"}, "not_allowed"),
        ({"topic": "shout.a"}, "no_event"),
        ({"topic": "shout.a", "event": "x"}, "no_event"),
        ({"topic": "shout.a", "event": {}}, "no_event"),
        ({"topic": "shout.a", "event": {**GOOD, "session_id": "x"}}, "no_event"),
        ({"topic": "shout.a", "event": {**GOOD, "session_id": 5}}, "no_event"),
        ({"topic": "shout.a", "event": {**GOOD, "session_id": "1" * 5000}}, "no_event"),
    ],
)
def test_dropped(params: Any, reason: str) -> None:
    conversation = ready()
    (notice,) = hear(conversation, tell("broker.publish", params))
    assert isinstance(notice, Notice) and notice.kind == "dropped"
    assert notice.value["reason"] == reason
    assert conversation.counters[f"dropped_{reason}"] == 1
    # The same conversation lets through what is right.
    (call,) = hear(conversation, tell("broker.publish", {"topic": "shout.a", "event": GOOD}))
    assert isinstance(call, HostCall)


@pytest.mark.parametrize("topic", ["plugin.inbound.slack", "plugin.inbound.slack.team.thread", "shout.a.b"])
def test_topics_of_channels_and_of_capabilities_are_allowed(topic: str) -> None:
    call = hear(ready(), tell("broker.publish", {"topic": topic, "event": GOOD}))[0]
    assert isinstance(call, HostCall) and call.params["topic"] == topic


def test_a_long_topic_is_cut_in_the_notice() -> None:
    (notice,) = hear(ready(), tell("broker.publish", {"topic": "x" * 100_000}))
    assert isinstance(notice, Notice) and notice.value["topic"] == "x" * 200


def test_a_broker_that_fails_is_counted_and_the_plugin_is_not_told() -> None:
    conversation = ready()
    hear(conversation, tell("broker.publish", {"topic": "shout.a", "event": GOOD}))
    (notice,) = conversation.answer(-1, Answer(error=(-32603, "away", None)))
    assert notice == Notice("dropped", {"reason": "broker_error", "topic": "shout.a", "why": "away"})
    assert conversation.answer(-1, Answer(None)) == ()
    assert conversation.counters["dropped_broker_error"] == 1


def test_publishing_is_no_question() -> None:
    conversation = ready()
    events = hear(conversation, ask(3, "broker.publish", {"topic": "shout.a", "event": GOOD}))
    (frame,) = frames(events)
    assert frame["id"] == 3 and frame["error"]["code"] == -32601 and len(events) == 1


# --- what the plugin is sent ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"topic": "news.x", "payload": 1}, {"source": "host", "payload": 1}),
        ({"topic": "news.x", "payload": 1, "source": "agent"}, {"source": "agent", "payload": 1}),
        ({"topic": "news.x"}, {"source": "host", "payload": None}),
        (
            {"topic": "news.x", "event": {"id": "i", "source": "s", "payload": 1, "topic": "other"}},
            {"id": "i", "source": "s", "payload": 1},
        ),
    ],
)
def test_events_on_the_wire(params: Any, expected: Any) -> None:
    (sent,) = ready().notify("broker.event", params)
    assert isinstance(sent, Send) and sent.lane == "event"
    whole = {**STAMP._asdict(), "session_id": None, "topic": "news.x", **expected}
    assert frames([sent]) == [tell("broker.event", {"topic": "news.x", "event": whole})]


@pytest.mark.parametrize(
    ("method", "params", "kind"),
    [
        ("broker.event", {"topic": "plugin.outbound.slack.team"}, None),
        ("broker.event", {"topic": "news.x.y", "payload": 1}, "not_subscribed"),
        ("broker.event", {"topic": "shout.a", "payload": 1}, "not_subscribed"),
        ("broker.event", {"topic": "news.*", "payload": 1}, "not_subscribed"),
        ("broker.event", {"topic": "plugin.outbound.mail", "payload": 1}, "not_subscribed"),
        ("broker.event", {"payload": 1}, "not_subscribed"),
        ("broker.event", None, "not_subscribed"),
        ("broker.event", {"topic": "news.x", "payload": {1}}, "not_json"),
        ("broker.event", {"topic": "news.x", "payload": "x" * FRAME_LIMIT}, "too_large"),
        ("llm.complete.delta", {}, "unsupported"),
        ("shutdown", {}, "unsupported"),
    ],
)
def test_notifications(method: str, params: Any, kind: str | None) -> None:
    conversation = ready()
    if kind is None:
        assert conversation.notify(method, params)
        return
    with pytest.raises(CallRefused) as refused:
        conversation.notify(method, params)
    assert isinstance(refused.value.event, Refusal) and refused.value.event.kind == kind


# --- what the plugin asks ---------------------------------------------------------------------------------


def test_a_number_that_fills_a_line_gets_no_answer() -> None:
    conversation = ready()
    hear(conversation, ask("q" * (FRAME_LIMIT - 70), "m"))
    assert list(conversation.emit(1, "x")) == []
    assert conversation.answer(1, Answer({"some": "thing" * 20})) == ()
    assert conversation.counters["unanswerable"] == 2


def test_deltas_carry_the_plugins_number() -> None:
    conversation = ready()
    hear(conversation, ask(50, "llm.complete", {"stream": True}), ask(None, "llm.complete"))
    (sent,) = conversation.emit(1, "hello")
    assert isinstance(sent, Send) and sent.lane == "reply"
    assert frames([sent]) == [tell("llm.complete.delta", {"request_id": 50, "chunk": "hello"})]
    (frame,) = frames(list(conversation.emit(2, "half a \ud83d")))
    assert frame["params"] == {"request_id": None, "chunk": "half a ?"}
    for ticket, value in ((3, "nobody asked"), (1, {"no": "text"})):
        assert list(conversation.emit(ticket, value)) == []
    assert list(conversation.emit(1, "")) == []


@pytest.mark.parametrize("character", ["x", "\x01", "é", "🙂"])
def test_a_long_delta_is_sent_in_parts(character: str) -> None:
    conversation = ready()
    hear(conversation, ask(1, "llm.complete"))
    events = list(conversation.emit(1, character * 300_000))
    assert all(isinstance(event, Send) and len(event.frame) <= FRAME_LIMIT for event in events)
    assert "".join(frame["params"]["chunk"] for frame in frames(events)) == character * 300_000


def test_other_notifications_are_told() -> None:
    conversation = ready()
    assert hear(conversation, tell("log", {"a": 1})) == [
        Notice("notification", {"method": "log", "params": {"a": 1}})
    ]
    assert conversation.counters["notifications"] == 1


# --- the end ----------------------------------------------------------------------------------------------


def test_handlers_at_work_still_finish_while_it_shuts_down() -> None:
    """Their frames come before the answer."""
    conversation = ready()
    conversation.shutdown_steps()
    assert hear(conversation, tell("broker.publish", {"topic": "shout.a", "event": GOOD}))
    assert isinstance(hear(conversation, ask(1, "memory.recall"))[0], HostCall)


# --- anything at all --------------------------------------------------------------------------------------


def _configuring() -> NexoDialect:
    conversation = dialect(plugin(CONFIGURED), config={"key": 1})
    conversation.opening()
    hear(conversation, answer(1, WELCOME))
    return conversation


def _busy() -> NexoDialect:
    conversation = ready()
    for token, call in enumerate((INVOKE, GREET, STREAM, MAIL, SEARCH, PIN)):
        conversation.call(token, call)
    return conversation


def _leaving() -> NexoDialect:
    conversation = _busy()
    conversation.shutdown_steps()
    return conversation


def _opening() -> NexoDialect:
    conversation = dialect()
    conversation.opening()
    return conversation


STAGES: Mapping[str, Callable[[], NexoDialect]] = {
    "new": dialect,
    "opening": _opening,
    "configuring": _configuring,
    "busy": _busy,
    "leaving": _leaving,
}
SCALARS = st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text(max_size=8)
WORDS = st.sampled_from(
    [
        "initialize",
        "broker.publish",
        "llm.chat.delta",
        "memory.recall",
        "",
        "shout.a",
        "demo",
        "demo_say",
        "end",
        "block",
    ]
)
_NAMES = """
    jsonrpc id method params result error code message data manifest plugin tools name description
    input_schema topic event payload session_id request_id chunk abort decision"""
NAMES = st.sampled_from(_NAMES.split())
VALUES = st.recursive(
    SCALARS | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)
MESSAGES_LIKE = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0"),
        "id": st.integers(0, 9) | SCALARS,
        "method": WORDS | SCALARS,
        "params": VALUES,
        "result": VALUES,
        "error": VALUES,
    },
)
LINES = st.binary(max_size=60) | (MESSAGES_LIKE | VALUES).map(lambda value: json.dumps(value).encode())


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=150, deadline=None)
@given(lines=st.lists(LINES, max_size=8))
def test_nothing_a_plugin_says_raises(stage: str, lines: list[bytes]) -> None:
    conversation = STAGES[stage]()
    ended: set[int] = set()
    for raw in lines:
        message = conversation.read(raw)
        assert isinstance(message, Message)
        for event in conversation.feed(message):
            assert isinstance(event, Event)
            if isinstance(event, Send):
                json.loads(event.frame)
            elif isinstance(event, HostCall):
                conversation.emit(event.ticket, "x")
                conversation.answer(event.ticket, Answer(event.params))
            elif isinstance(event, Reply | Refusal):
                # A call ends once, and only one that was made.
                assert event.call in range(6) and event.call not in ended
                ended.add(event.call)
    assert all(count >= 0 for count in conversation.counters.values())
    conversation.shutdown_steps()


CALL_KINDS: list[Kind] = [*CONTRACT.calls, "list", "prompt"]
_CALL_NAMES = "demo_say demo_pin greet start send_outbound cohere chat tools vector_search llm.chat"
CALL_NAMES = _CALL_NAMES.split()
CALL_KEYS = ("kind", "msg", "provider", "model", "messages", "request", "stream", "backend", "id")
ANY_CALL = st.builds(
    Call,
    st.sampled_from(CALL_KINDS),
    st.sampled_from(CALL_NAMES) | st.text(max_size=5),
    VALUES | st.dictionaries(st.sampled_from(CALL_KEYS), VALUES),
    st.just({}),
)


def made(act: Callable[[], Sequence[Event]]) -> Event | None:
    """The one event that comes of it; None: it was refused."""
    try:
        (event,) = act()
    except CallRefused as refused:
        return None if refused.event.message else refused.event
    return event


@settings(max_examples=300, deadline=None)
@given(call=ANY_CALL)
def test_any_call_is_made_or_refused(call: Call) -> None:
    conversation = ready()
    assert conversation.seconds(call) > 0
    event = made(lambda: conversation.call(5, call))
    assert event is None or isinstance(event, Reply if call.kind == "list" else Send)


@settings(max_examples=100, deadline=None)
@given(method=st.just("broker.event") | st.text(max_size=5), params=VALUES, topic=st.text(max_size=8))
def test_any_notification_is_sent_or_refused(method: str, params: Any, topic: str) -> None:
    whole = {**params, "topic": f"news.{topic}"} if isinstance(params, dict) else params
    event = made(lambda: ready().notify(method, whole))
    assert event is None or (isinstance(event, Send) and event.lane == "event")
