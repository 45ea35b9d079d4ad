"""What hosts of rune plugins have to keep: the stand-in plugin that they start, and the rules."""

from __future__ import annotations

import json
from typing import Any, Final

from runner.conformance import host_checks as check
from runner.conformance.rules import not_blank

_PROTOCOL: Final = "rterm.plugin.v1"
_MANIFEST: Final = {
    "plugin_id": "stand_in",
    "display_name": "stand_in",
    "description": "A plugin that watches its host.",
    "plugin_version": "0.1.0",
    "protocol_version": _PROTOCOL,
    "process": {"command": "./plugin", "args": ["--stand-in"], "env": ["STAND_IN=1"]},
    "tools": [{"name": "echo", "description": "Answers.", "input_schema": {"type": "object"}}],
}


def _handshake(plugin_id: str) -> Any:
    manifest = {"plugin_id": plugin_id, "plugin_version": "0.1.0", "protocol_version": _PROTOCOL}
    return {"type": "handshake", "manifest": {**manifest, "exposed_tools": ["echo"]}}


def _response(**fields: Any) -> Any:
    return {"type": "response", "request_id": "$request_id", **fields}


_ERROR: Final = {"code": "refused", "message": "the stand-in refuses"}
_REQUEST: Final = {"request_id": not_blank, "tool_name": "echo", "context": dict, "input": object}

_ROWS: Final[tuple[check.Row, ...]] = (
    *check.common_rules(wire="framing", large="framing", unknown="response", start="launch", end="exit"),
    ("The first message is the handshake.", "handshake", check.first("handshake")),
    (
        "The handshake names the protocol version.",
        "handshake",
        check.fields("handshake", {"protocol_version": _PROTOCOL}),
    ),
    ("There are two messages: handshake and request.", "framing", check.only("handshake", "request")),
    ("A process gets one request.", "request", check.at_most_one("request")),
    ("A request has an id, a tool, a context and an input.", "request", check.fields("request", _REQUEST)),
    ("A plugin with another id gets no request.", "handshake response", check.refuses("request")),
    ("The plugin starts in its folder, with its own words.", "launch", check.started("--stand-in", up=0)),
    ("The plugin has no variables but its manifest's.", "launch", check.has_variables(others=False)),
    ("stdin is closed when the exchange is over.", "exit", check.closes_stdin()),
    ("A plugin that answered has half a second to exit.", "exit", check.grace(0.5)),
    ("A plugin that does not exit is ended.", "exit", check.ends_it()),
)

STAND_IN: Final = check.StandIn(
    framing="lines",
    files={"rterm-plugin.json": json.dumps(_MANIFEST, indent=2)},
    program="plugin",
    about="It has one tool, echo, which takes any object.",
    replies={
        "handshake": check.StandInReply(
            _handshake("stand_in"), opening=True, other={"impostor": _handshake("somebody_else")}
        ),
        "request": check.StandInReply(
            _response(status="ok", output={"text": "$large"}),
            call=True,
            exits=True,
            other={"error": _response(status="error", error=_ERROR)},
        ),
    },
    rules=check.number_rules("rune", "plugin protocol", _ROWS),
)
