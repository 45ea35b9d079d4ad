"""What the tests of the conversation share: a plugin made by hand, its frames, and the events of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.contracts.ainb.declared import Declared, exports_of
from runner.contracts.ainb.dialect import AinbDialect
from runner.plugin import Allowance, Plugin
from runner.protocol.dialect import Event, Ready, Send, Setting
from sandbox.spec import SandboxSpec

DECLARED = Declared(
    granted=("event_bus", "read_paths"),
    lists={"read_paths": ("~/notes",)},
    screens=("burn",),
    commands=("refresh",),
    cli_namespaces=("burn", "usage"),
    snapshots=("burn.data",),
    subscribes=("sessions.usage",),
    fs_roots=("/home/me/notes",),
)
WELCOME = {"name": "burndown", "version": "2.0.0"}
ONE_CELL = {
    "buffer": {"width": 1, "height": 1, "cells": [[{"x": 0, "y": 0}, {"symbol": "A", "modifier": 0}]]}
}


def plugin(declared: Declared = DECLARED, **more: Any) -> Plugin:
    made = Plugin(
        id="burndown",
        version="2.0.0",
        contract="ainb",
        name="burndown",
        description="Burns down.",
        manifest="/p/burndown/manifest.toml",
        root="/p/burndown",
        entrypoint=None,
        spec=SandboxSpec(),
        exports=exports_of(declared),
        details=declared._asdict(),
        capabilities=declared.granted,
    )
    return made._replace(**more)


BURNDOWN = plugin()


def dialect(of: Plugin = BURNDOWN, **setting: Any) -> AinbDialect:
    granted = {"allowance": Allowance(readable=DECLARED.fs_roots), "allows": lambda method: True}
    return AinbDialect(Setting(of, **{**granted, **setting}))


def hear(conversation: AinbDialect, *messages: Any) -> list[Event]:
    """What comes of frames of the plugin's: bytes as they are, anything else as JSON."""
    events: list[Event] = []
    for message in messages:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        events += conversation.feed(conversation.read(raw))
    return events


def ready(of: Plugin = BURNDOWN, welcome: Mapping[str, Any] = WELCOME, **setting: Any) -> AinbDialect:
    conversation = dialect(of, **setting)
    conversation.opening()
    assert isinstance(hear(conversation, answer(1, welcome))[-1], Ready)
    return conversation


def answer(number: Any, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def error(number: Any, code: Any, message: Any = "no", **data: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, **data}}


def ask(number: Any, method: str, params: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def tell(method: str, params: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params}


def b64(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def body(frame: bytes) -> Any:
    header, separator, raw = frame.partition(b"\r\n\r\n")
    assert separator and header == b"Content-Length: %d" % len(raw)
    return json.loads(raw)


def sent(events: Sequence[Event]) -> list[Any]:
    """The frames among the events, each with its header."""
    return [body(event.frame) for event in events if isinstance(event, Send)]


def lanes(events: Sequence[Event]) -> list[str]:
    return [event.lane for event in events if isinstance(event, Send)]
