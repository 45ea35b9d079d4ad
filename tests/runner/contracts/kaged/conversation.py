"""What the tests of the conversation share: a plugin made by hand, its lines, and the events of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.contracts.kaged.declared import Declared, DeclaredTool, details_of, exports_of
from runner.contracts.kaged.dialect import KagedDialect
from runner.plugin import Plugin
from runner.protocol.dialect import Event, Ready, Send, Setting
from runner.protocol.secrets import Secrets
from runner.session.state import without_secrets
from sandbox.spec import SandboxSpec

TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 5_000_000}},
    "required": ["text"],
}
KEYS = {"type": "object", "properties": {"token": {"type": "string"}}, "additionalProperties": False}

TOOLS = (
    DeclaredTool("notes.add", "Adds.", TEXT),
    DeclaredTool("notes.list", "Lists.", {"type": "object"}),
)
DECLARED = Declared(
    methods=("notes.export.all",),
    hooks=("on_session_start", "on_session_idle", "pre_compact", "post_compact"),
    tools={tool.name: tool for tool in TOOLS},
    notifications=("notes.changed",),
    roles=("observer",),
    project_id="proj",
    project_root="/srv/proj",
)
WELCOME = {
    "name": "notes",
    "version": "1.2.3",
    "api_version": 1,
    "methods": ["notes.export.all", "notes.add"],
    "notifications": ["notes.changed"],
    "capabilities_used": ["kaged:storage:read"],
}


def plugin(declared: Declared = DECLARED, **more: Any) -> Plugin:
    made = Plugin(
        id="notes",
        version="1.2.3",
        contract="kaged",
        name="notes",
        description="Keeps notes.",
        manifest="/p/kaged-plugin.yaml",
        root="/p",
        entrypoint=None,
        spec=SandboxSpec(),
        exports=exports_of(declared),
        details=details_of(declared),
        capabilities=("kaged:storage:read", "net:[]"),
        timeouts=(("handshake", 10.0), ("call", 60.0), ("hook", 7.0), ("shutdown", 4.0)),
        lifecycle=(("health_interval", 30.0), ("health_answer", 5.0)),
    )
    return made._replace(**more)


NOTES = plugin()


def dialect(of: Plugin = NOTES, **setting: Any) -> KagedDialect:
    numbers = itertools.count()
    return KagedDialect(Setting(of, **setting), ids=lambda: f"id-{next(numbers)}")


def hear(conversation: KagedDialect, *messages: Any, at: float = 0.0) -> list[Event]:
    """What comes of lines of the plugin's: bytes as they are, anything else as JSON. Without secrets, as a
    session takes it."""
    secrets = Secrets(conversation._setting.secrets)
    events: list[Event] = []
    for message in messages:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        heard = conversation.feed(conversation.read(raw)._replace(at=at))
        events += [without_secrets(event, secrets) for event in heard]
    return events


def ready(of: Plugin = NOTES, welcome: Mapping[str, Any] = WELCOME, **setting: Any) -> KagedDialect:
    conversation = dialect(of, **setting)
    conversation.opening()
    assert isinstance(hear(conversation, answer(1, welcome))[-1], Ready)
    return conversation


def answer(number: Any, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def error(number: Any, code: Any, message: Any = "no", **data: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, **data}}


def tell(method: str, params: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params}


def sent(events: Sequence[Event]) -> list[Any]:
    """The frames among the events, each one line."""
    frames = [event.frame for event in events if isinstance(event, Send)]
    assert all(frame.endswith(b"\n") and frame.count(b"\n") == 1 for frame in frames)
    return [json.loads(frame) for frame in frames]
