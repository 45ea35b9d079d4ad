"""What hosts of ainb plugins have to keep: the stand-in plugin that they start, and the rules."""

from __future__ import annotations

import base64
from typing import Any, Final

from runner.conformance import host_checks as check

_MANIFEST: Final = """\
[plugin]
name = "stand_in"
version = "0.1.0"
abi_version = 2
description = "A plugin that watches its host."

[provides]
screens = ["stand_in"]
cli_namespaces = ["stand_in"]
"""
_INIT, _SHUTDOWN, _RENDER, _CLI, _KEY, _EVENT, _MOUSE, _ACTION = _KINDS = (
    *("plugin/init", "plugin/shutdown", "plugin/render", "plugin/cli_dispatch"),
    *("plugin/handle_key", "plugin/handle_event", "plugin/handle_mouse", "plugin/handle_action"),
)
_GRANTED: Final = {"manifest_path": str, "granted_capabilities": [str], "abi_version": 2}
_DRAW: Final = {"viewport": {"width": int, "height": int}, "generation": int}
_PRESSED: Final = {"code": {"type": str}, "mods": int, "kind": ("press", "repeat", "release")}


def _empty(value: Any) -> str:
    return "it has more than the manifest asks for" if value else ""


def _base64(value: Any) -> str:
    try:
        base64.b64decode(value, validate=True)
    except (ValueError, TypeError):
        return "it is not base64"
    return ""


_ROWS: Final[tuple[check.Row, ...]] = (
    *check.common_rules(wire="§2", large="§8", unknown="§4.2", start="§7", end="§7"),
    ("Each message is one of JSON-RPC 2.0.", "§3", check.fields("*", check.JSON_RPC)),
    ("The first message is plugin/init.", "§4.1", check.first(_INIT)),
    (
        "plugin/init has manifest, grants and ABI 2.",
        "§4.1",
        check.fields(_INIT, {"id": int, "params": _GRANTED}),
    ),
    (
        "Only what the manifest asks for is granted.",
        "§1",
        check.fields(_INIT, {"params": {"granted_capabilities": _empty}}),
    ),
    ("Only methods of the contract are sent.", "§4.1", check.only(*_KINDS, "answer")),
    ("No id of a request is used again.", "§3", check.unique_ids()),
    (
        "plugin/render has a viewport and a generation.",
        "§4.1",
        check.fields(_RENDER, {"id": int, "params": _DRAW}),
    ),
    (
        "plugin/cli_dispatch has a namespace and words.",
        "§4.1",
        check.fields(_CLI, {"id": int, "params": {"namespace": "stand_in", "argv": [str]}}),
    ),
    (
        "A key has a code, modifiers and a kind.",
        "§5.2",
        check.fields(_KEY, {**check.NOTIFICATION, "params": {"screen_id": str, "key": _PRESSED}}),
    ),
    (
        "An event is a notification with a topic and a payload in base64.",
        "§5.3",
        check.fields(_EVENT, {**check.NOTIFICATION, "params": {"topic": str, "payload": _base64}}),
    ),
    ("What is not granted is denied with -32001.", "§9", check.answers(-32001)),
    ("An error answer does not end the plugin.", "§3", check.says_goodbye(_SHUTDOWN, "error")),
    ("The program gets no arguments.", "§0", check.started()),
    ("plugin/shutdown is the last message.", "§4.1", check.says_goodbye(_SHUTDOWN)),
    ("plugin/shutdown is a request.", "§4.1", check.fields(_SHUTDOWN, {"id": int})),
    ("A plugin has 5 seconds to exit.", "§8", check.grace(5, _SHUTDOWN)),
    ("A plugin that does not exit is ended.", "§7", check.ends_it()),
)

_VIEWPORT: Final = {"width": "$params.viewport.width", "height": "$params.viewport.height"}
_ERROR: Final = {"error": check.error_of(-32603)}

STAND_IN: Final = check.StandIn(
    framing="length",
    files={"manifest.toml": _MANIFEST},
    program="stand_in",
    about="It is the plugin stand_in, with a screen and a command of that name.",
    replies={
        _INIT: check.StandInReply(check.result_of({"name": "stand_in", "version": "0.1.0"}), opening=True),
        _RENDER: check.StandInReply(
            check.result_of({"buffer": {**_VIEWPORT, "cells": []}}), call=True, other=_ERROR
        ),
        _CLI: check.StandInReply(
            check.result_of({"stdout": "$large", "stderr": "", "exit_code": 0}), call=True, other=_ERROR
        ),
        _SHUTDOWN: check.StandInReply(check.result_of({}), exits=True),
        "*": check.StandInReply(check.error_of(-32601)),
    },
    rules=check.number_rules("ainb", "plugin contract v2", _ROWS),
    ask={"jsonrpc": "2.0", "id": 900, "method": "host/snapshot/get", "params": {"topic": "stand_in.topic"}},
    extra=(
        {"jsonrpc": "2.0", "method": "host/log", "params": {"level": "info", "message": "working"}},
        {"jsonrpc": "2.0", "method": "host/unheard_of", "params": {}},
    ),
)
