"""What clients of MCP servers on stdio have to keep: the stand-in server that they start, and the rules."""

from __future__ import annotations

import json
from typing import Any, Final

from runner.conformance import host_checks as check
from runner.conformance.rules import not_blank
from runner.contracts.mcp.versions import LEGACY, MODERN, PREFIX

_ENTRY: Final = {"command": "./bin/server", "args": ["--stand-in"], "env": {"STAND_IN": "1"}}
_TOOL: Final = {"name": "echo", "description": "Answers.", "inputSchema": {"type": "object"}}
_CONTENT: Final = {"content": [{"type": "text", "text": "$large"}]}
_CACHE: Final = {"ttlMs": 0, "cacheScope": "private"}
_DISCOVERED: Final = {"supportedVersions": list(MODERN), "capabilities": {"tools": {}}, **_CACHE}
_CLIENT: Final = {"name": not_blank, "version": str}
_INITIALIZE: Final = {"protocolVersion": LEGACY, "capabilities": dict, "clientInfo": _CLIENT}
_META: Final = {f"{PREFIX}protocolVersion": MODERN, f"{PREFIX}clientCapabilities": dict}


def _initialized(version: str) -> Any:
    server = {"name": "stand-in", "version": "0.1.0"}
    return check.result_of({"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server})


def _modern(**result: Any) -> Any:
    return check.result_of({"resultType": "complete", **result})


def _opens() -> check.Check:
    """The first message is initialize, or a request that has its version with it."""

    def judge(log: check.PluginLog) -> str | None:
        if not log.messages:
            return None
        opening = log.messages[0]
        params = opening.get("params")
        fits = check.kind_of(opening) == "initialize" or (isinstance(params, dict) and "_meta" in params)
        return "" if fits else f"the first message is {check.kind_of(opening)}"

    return check.each_log(judge, check.NOTHING_SENT)


_ROWS: Final[tuple[check.Row, ...]] = (
    *check.common_rules(
        wire="stdio", large="stdio", unknown="Base protocol", start="Initialization", end="Shutdown"
    ),
    ("Each message is one of JSON-RPC 2.0.", "Messages", check.fields("*", check.JSON_RPC)),
    ("The first message is initialize, or names its version itself.", "Lifecycle", _opens()),
    (
        "initialize has a published version, the capabilities and the client's name.",
        "Initialization",
        check.fields("initialize", {**check.REQUEST, "params": _INITIALIZE}),
    ),
    (
        "notifications/initialized follows the answer, before other requests.",
        "Initialization",
        check.precedes("notifications/initialized", "tools/list", "tools/call", given="initialize"),
    ),
    (
        "initialized is a notification.",
        "Messages",
        check.fields("notifications/initialized", check.NOTIFICATION),
    ),
    (
        "A server of an unknown version is left.",
        "Version Negotiation",
        check.refuses("tools/list", "tools/call"),
    ),
    ("No id of a request is used again.", "Messages", check.unique_ids()),
    (
        "tools/call names a tool.",
        "Tools",
        check.fields("tools/call", {**check.REQUEST, "params": {"name": "echo", "arguments?": dict}}),
    ),
    ("A ping is answered with a result.", "Ping", check.answers()),
    (
        "A cancellation names a running request, and never initialize.",
        "Cancellation",
        check.cancels("notifications/cancelled", "params.requestId", never="initialize"),
    ),
    (
        "server/discover names version and capabilities.",
        "Versioning",
        check.fields("server/discover", {"params": {"_meta": _META}}),
    ),
    (
        "So does every request to a server of 2026-07-28.",
        "Versioning",
        check.fields("tools/call", {"params": {"_meta": _META}}, "modern"),
    ),
    ("The server gets the arguments of its entry.", "stdio", check.started("--stand-in")),
    ("The server gets the variables of its entry.", "stdio", check.has_variables()),
    ("stdin is closed before the server is ended by force.", "Shutdown", check.closes_stdin()),
    ("A server that does not exit is ended, by SIGTERM first.", "Shutdown", check.ends_it(term=True)),
)

STAND_IN: Final = check.StandIn(
    framing="lines",
    # The file pyvenv.cfg makes the folder an installation, which a cage shows as a whole.
    files={"mcp.json": json.dumps({"mcpServers": {"stand-in": _ENTRY}}, indent=2), "pyvenv.cfg": ""},
    program="bin/server",
    about="It is the server stand-in with one tool, echo, which takes any object.",
    replies={
        "server/discover": check.StandInReply(
            check.error_of(-32601), opening=True, other={"modern": _modern(**_DISCOVERED)}
        ),
        "initialize": check.StandInReply(
            _initialized("$params.protocolVersion"),
            opening=True,
            other={
                "impostor": _initialized("1999-01-01"),
                "modern": check.error_of(-32022, data={"supported": list(MODERN), "requested": "older"}),
            },
        ),
        "tools/list": check.StandInReply(
            check.result_of({"tools": [_TOOL]}), other={"modern": _modern(tools=[_TOOL], **_CACHE)}
        ),
        "tools/call": check.StandInReply(
            check.result_of(_CONTENT),
            call=True,
            other={"error": check.error_of(-32603), "modern": _modern(**_CONTENT)},
        ),
        "ping": check.StandInReply(check.result_of({})),
        "*": check.StandInReply(check.error_of(-32601)),
    },
    rules=check.number_rules("mcp", "MCP specification", _ROWS),
    ask={"jsonrpc": "2.0", "id": 900, "method": "ping"},
    extra=(
        {"jsonrpc": "2.0", "method": "notifications/unheard_of", "params": {}},
        {
            "jsonrpc": "2.0",
            "method": "notifications/progress",
            "params": {"progressToken": 77, "progress": 1},
        },
    ),
)
