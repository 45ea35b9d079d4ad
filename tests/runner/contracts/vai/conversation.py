"""What the tests of the conversation share: a package made by hand, its frames, and the events of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.contracts.vai.declared import Declared, DeclaredExport, details_of, exports_of
from runner.contracts.vai.dialect import VaiDialect
from runner.contracts.vai.terms import PROTOCOL
from runner.plugin import Plugin
from runner.protocol.dialect import Call, Event, Ready, Send, Setting
from sandbox.spec import SandboxSpec

DECLARED = Declared(
    (
        DeclaredExport("jira_search", "tool", "Jira Search", timeout=20.0),
        DeclaredExport("tail", "tool", "Tail", timeout=7.0, streaming=True),
        DeclaredExport("slack_notify", "hook", "Slack Notifier", timeout=15.0),
        DeclaredExport("coder_window", "compactor", "Coder Window", timeout=120.0),
        DeclaredExport("triage", "harness", "Triage Harness", timeout=1800.0),
    )
)
DEVKIT = Plugin(
    id="acme/devkit",
    version="0.1.0",
    contract="vai",
    name="Acme Dev Kit",
    description="",
    manifest="/p/devkit/vai-plugin.toml",
    root="/p/devkit",
    entrypoint=None,
    spec=SandboxSpec(),
    exports=exports_of(DECLARED),
    details=details_of(DECLARED),
)
WHO = {"package_id": "acme/devkit", "version": "0.1.0"}

BODY = {"export_id": "jira_search", "context": {"invocation_id": "inv_1"}, "input": {"query": "outage"}}
TOOL = Call("tool", "jira_search", BODY)
STREAM = Call("tool", "tail", {"export_id": "tail"})
HOOK = Call("hook", "slack_notify", {"export_id": "slack_notify"})
COMPACTOR = Call("compactor", "coder_window", {"export_id": "coder_window"})
HARNESS = Call("harness", "triage", {"export_id": "triage"})

CONTENT = [{"type": "text", "text": "Found 3 issues."}]
TOKEN = 41  # the session's number of a call


def frame(kind: str, **fields: Any) -> dict[str, Any]:
    return {"protocol": PROTOCOL, "type": kind, **fields}


HELLO = frame("hello", role="plugin", plugin=WHO)
HOST_HELLO = frame("hello", role="host", host={"name": "other", "version": "9"})


def event(request_id: Any = "req_1", kind: Any = "progress", **fields: Any) -> dict[str, Any]:
    return frame("event", request_id=request_id, event={"type": kind, **fields})


def response(body: Any, number: Any = "req_1") -> dict[str, Any]:
    return frame("response", id=number, ok=True, body=body)


def succeeded(number: Any = "req_1", **result: Any) -> dict[str, Any]:
    return response({"status": "succeeded", "result": {"content": CONTENT, **result}}, number)


def refused(code: Any = "protocol.invalid_frame", message: Any = "missing body") -> dict[str, Any]:
    return frame("response", id="req_1", ok=False, error={"code": code, "message": message})


def dialect(**setting: Any) -> VaiDialect:
    return VaiDialect(Setting(DEVKIT, **setting))


def hear(conversation: VaiDialect, *messages: Any, at: float = 0.0) -> list[Event]:
    """What comes of frames of the plugin's: bytes as they are, anything else as JSON."""
    events: list[Event] = []
    for message in messages:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        events += conversation.feed(conversation.read(raw)._replace(at=at))
    return events


def ready(**setting: Any) -> VaiDialect:
    conversation = dialect(**setting)
    conversation.opening()
    (came,) = hear(conversation, HELLO)
    assert isinstance(came, Ready)
    return conversation


def called(call: Call = TOOL, **setting: Any) -> VaiDialect:
    """A conversation with an open request: req_1."""
    conversation = ready(**setting)
    conversation.call(TOKEN, call)
    return conversation


def sent(events: Sequence[Event]) -> list[Mapping[str, Any]]:
    """The frames among the events, each with its header."""
    found = []
    for each in events:
        if isinstance(each, Send):
            header, separator, raw = each.frame.partition(b"\r\n\r\n")
            assert separator and header == b"Content-Length: %d" % len(raw)
            found.append(json.loads(raw))
    return found
