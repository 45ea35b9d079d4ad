"""The rules of MCP on stdio that a server is tried by: see runner/conformance/rules.py.

The handshake is that of the legacy era, which most servers speak. The last rules are about the modern one.
"""

from __future__ import annotations

import re
from typing import Any

from runner.conformance import rpc
from runner.conformance.rules import (
    CALL_MISSING,
    ENDS_WITH_STDIN,
    FIRST,
    OWN,
    PAD,
    Check,
    RuleBook,
    Say,
    See,
    called,
    in_pieces,
    long_request,
    not_blank,
    numbered,
)
from runner.contracts.mcp.dialect import FRAME_LIMIT
from runner.contracts.mcp.handshake import UNSUPPORTED_VERSION
from runner.contracts.mcp.versions import LEGACY, MODERN, PREFIX, envelope, initialize
from runner.protocol.framing import LineFraming
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault

_OLD, _NEW = f"MCP {LEGACY[0]}", f"MCP {MODERN[0]}"
_START, _END = f"{_OLD}, Lifecycle, Initialization", f"{_OLD}, Lifecycle, Shutdown"
_STDIO, _PING = f"{_OLD}, Transports, stdio", f"{_OLD}, Utilities, Ping"
_BASE, _TOOLS = f"{_OLD}, Base protocol, Messages", f"{_OLD}, Server features, Tools"
_CANCEL = f"{_OLD}, Utilities, Cancellation"

_FLOOD = 100  # requests at once
_LONG = 1 << 20  # bytes
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")

_KEPT = (
    ("version", "result.protocolVersion"),
    ("tools capability", "result.capabilities.tools"),
    ("resources capability", "result.capabilities.resources"),
    ("prompts capability", "result.capabilities.prompts"),
)
_INITIALIZED = {
    "protocolVersion": not_blank,
    "capabilities": dict,
    "serverInfo": {"name": str, "version": str},
}
_INITIALIZE = initialize(LEGACY[0], frozenset())
_HANDSHAKE = (
    *rpc.ask("initialize", _INITIALIZE, dict, keep=_KEPT),
    Say(rpc.notice("notifications/initialized")),
)
_ALIVE = rpc.ask("ping", None, object, "#ping", alone=True)
_TOOL = {"name": not_blank, "inputSchema": {"type": "object"}, "description?": str, "outputSchema?": dict}
_BLOCKS = (
    {"type": "text", "text": str},
    *({"type": kind, "data": str, "mimeType": str} for kind in ("image", "audio")),
    {"type": "resource", "resource": dict},
    {"type": "resource_link", "uri": str},
)
_HAS_TOOLS, _HAS_CALL = {"needs": ("tools capability",)}, {"needs": ("tool",)}
_LEGACY = {**FIRST, "unless": ("modern", "version")}
_MODERN_SERVER = {**FIRST, "needs": ("modern",)}
_CALL = rpc.request("tools/call", {"name": "$tool", "arguments": "$input"})


def _modern(version: str = MODERN[0], **more: Any) -> dict[str, Any]:
    return {"_meta": envelope(version, frozenset()), **more}


def _names(tools: Any) -> str:
    names = [each.get("name") for each in tools if isinstance(each, dict)]
    odd = next((each for each in names if not isinstance(each, str) or not _TOOL_NAME.match(each)), None)
    if odd is not None:
        return f"the name {odd!r:.80} is not of 1 to 128 letters, digits and _ . -"
    return "two tools have the same name" if len(set(names)) < len(names) else ""


def _schemas(tools: Any) -> str:
    for each in tools if isinstance(tools, list) else ():
        for key in ("inputSchema", "outputSchema"):
            try:
                if isinstance(each, dict) and isinstance(each.get(key), dict):
                    Schema(each[key])
            except SchemaFault as fault:
                return f"the {key} of {each.get('name')!r:.80} is no JSON Schema: {fault}"
    return ""


def _structured(known: Any) -> str:
    """What is wrong with the structured content of a call, by the schema of its tool."""
    tools = known["tools"] if isinstance(known["tools"], list) else []
    named = [each for each in tools if isinstance(each, dict) and each.get("name") == known["tool"]]
    schema = named[0].get("outputSchema") if named else None
    result = known["result of the call"]
    if not isinstance(schema, dict) or result.get("isError"):
        return ""
    if "structuredContent" not in result:
        return "the tool has an outputSchema, and the result no structuredContent"
    try:
        return "; ".join(Schema(schema).faults(result["structuredContent"])[:3])
    except SchemaFault:
        return ""  # another rule is about the schema


def _reply(value: Any) -> Any:
    """Each side may ping the other."""
    if value.get("method") == "ping":
        return {"jsonrpc": "2.0", "id": value.get("id"), "result": {}}
    return rpc.no_such_method(value)


_RULES = numbered(
    "mcp",
    _OLD,
    (
        "initialize is answered with protocolVersion, capabilities and serverInfo.",
        _START,
        rpc.ask("initialize", _INITIALIZE, _INITIALIZED),
        _LEGACY,
    ),
    (
        "Asked for a version that it has named itself, the server agrees on it.",
        _START,
        rpc.ask("initialize", initialize("$version", frozenset()), {"protocolVersion": "$version"}),
        {**FIRST, "needs": ("version",)},
    ),
    (
        "Asked for a version that does not exist, the server names another one.",
        _START,
        rpc.ask(
            "initialize",
            initialize("1999-01-01", frozenset()),
            {"protocolVersion": lambda said: "" if said != "1999-01-01" else "there is no such version"},
        ),
        _LEGACY,
    ),
    ("A ping before initialize is answered.", _START, rpc.ask("ping", None, object), _LEGACY),
    ("notifications/initialized is not answered.", _BASE, _ALIVE, OWN),
    ("A ping is answered with an object.", _PING, rpc.ask("ping", None, dict)),
    ("An id that is a string comes back as it was.", _BASE, rpc.ask("ping", None, object, "trial-1")),
    rpc.unknown_method("JSON-RPC 2.0 §5.1", "trial/no_such_method"),
    rpc.unanswered(_BASE, "notifications/trial", None, _ALIVE),
    (
        "The cancellation of a request that does not exist is ignored.",
        _CANCEL,
        (Say(rpc.notice("notifications/cancelled", {"requestId": 987654321, "reason": "trial"})), *_ALIVE),
    ),
    (
        "tools/list is answered with tools, each with a name and an inputSchema of type object.",
        f"{_TOOLS}, Listing tools",
        rpc.ask("tools/list", None, {"tools": [_TOOL]}, keep=(("tools", "result.tools"),)),
        _HAS_TOOLS,
    ),
    (
        "Names of tools are distinct, and of letters, digits and _ . - only.",
        f"{_TOOLS}, Tool names",
        Check("tools", _names),
        _HAS_TOOLS,
    ),
    ("The schemas of tools are JSON Schemas.", f"{_TOOLS}, Data types", Check("tools", _schemas), _HAS_TOOLS),
    (
        "A call of a tool that does not exist is answered with the error -32602.",
        f"{_TOOLS}, Error handling",
        rpc.refused("tools/call", {"name": "trial_no_such_tool", "arguments": {}}, -32602),
        _HAS_TOOLS,
    ),
    (
        "resources/list is answered with resources, each with a uri and a name.",
        f"{_OLD}, Server features, Resources",
        rpc.ask("resources/list", None, {"resources": [{"uri": str, "name": str}]}),
        {"needs": ("resources capability",)},
    ),
    (
        "prompts/list is answered with prompts, each with a name.",
        f"{_OLD}, Server features, Prompts",
        rpc.ask("prompts/list", None, {"prompts": [{"name": str}]}),
        {"needs": ("prompts capability",)},
    ),
    (
        "A call that succeeds has content of the known types, and isError is not true.",
        f"{_TOOLS}, Calling tools",
        (
            Say(_CALL),
            See(
                "#1",
                {"result": {"content": [_BLOCKS], "isError?": False}},
                keep=(("result of the call", "result"),),
            ),
        ),
        _HAS_CALL,
    ),
    (
        "structuredContent fits the outputSchema of its tool.",
        f"{_TOOLS}, Output schema",
        Check(("tools", "tool", "result of the call"), _structured),
        {"needs": ("tool", "tools", "result of the call")},
    ),
    (
        "Arguments of the wrong type are answered, with isError or the error -32602.",
        f"{_TOOLS}, Error handling",
        (
            Say(rpc.request("tools/call", {"name": "$tool", "arguments": {"": []}})),
            See("#1", ({"result": dict}, {"error": {"code": -32602}})),
        ),
        _HAS_CALL,
    ),
    (
        "A call that is cancelled has at most one answer, and the server goes on.",
        _CANCEL,
        (Say(_CALL), Say(rpc.notice("notifications/cancelled", {"requestId": "#1"})), *_ALIVE),
        _HAS_CALL,
    ),
    in_pieces(_STDIO, rpc.request("ping"), 7),
    long_request(_STDIO, rpc.request("ping", {"_meta": {"trial": PAD}}), _LONG),
    rpc.flood(_BASE, _FLOOD, "ping"),
    rpc.not_json("JSON-RPC 2.0 §5.1", b"this is not JSON\n", rpc.ask("ping", None, object)),
    ("The end of stdin ends the server.", _END, ENDS_WITH_STDIN, OWN),
    ("Before initialize, the end of stdin ends the server.", _END, ENDS_WITH_STDIN, FIRST),
    *rpc.watched("stdout carries nothing but lines of JSON.", _STDIO, _BASE),
    (
        "server/discover is answered with versions and capabilities, or with an error by a legacy server.",
        f"{_NEW}, server/discover",
        (
            Say(rpc.request("server/discover", _modern())),
            See(
                "#1",
                ({"result": {"supportedVersions": [str], "capabilities": dict}}, {"error": {"code": int}}),
                keep=(("modern", "result.supportedVersions"),),
            ),
        ),
        FIRST,
    ),
    (
        "A modern request needs no initialize.",
        f"{_NEW}, Base protocol",
        rpc.ask("tools/list", _modern(), {"tools": [_TOOL], "resultType?": "complete"}),
        _MODERN_SERVER,
    ),
    (
        f"A version that does not exist is answered with the error {UNSUPPORTED_VERSION} and those known.",
        f"{_NEW}, Versioning",
        (
            Say(rpc.request("tools/list", _modern("1999-01-01"))),
            See("#1", {"error": {"code": UNSUPPORTED_VERSION, "data": {"supported": [str]}}}),
        ),
        _MODERN_SERVER,
    ),
    (
        "A modern request without clientCapabilities is answered with the error -32602.",
        f"{_NEW}, Base protocol",
        rpc.refused("tools/list", {"_meta": {f"{PREFIX}protocolVersion": MODERN[0]}}, -32602),
        _MODERN_SERVER,
    ),
)

BOOK = RuleBook(
    framing=LineFraming(FRAME_LIMIT),
    rules=_RULES,
    handshake=_HANDSHAKE,
    facts=lambda plugin, call: called(call),
    missing={
        "tool": CALL_MISSING,
        "version": "it named no version in its handshake",
        "tools": "it listed no tools",
        "tools capability": "it does not offer tools",
        "resources capability": "it does not offer resources",
        "prompts capability": "it does not offer prompts",
        "result of the call": "the call did not succeed",
        "modern": f"it does not speak {MODERN[0]}",
    },
    excuse=f"it speaks {MODERN[0]} only",
    **{**rpc.FIELDS, "reply": _reply},
)
