#!/usr/bin/env python3
"""An MCP server: JSON-RPC 2.0, one message per line. To add a tool, write a function and list it in TOOLS."""

import json
import sys

INFO = {"name": "greeter", "version": "0.1.0"}
VERSIONS = ("2025-11-25", "2025-06-18")  # of the protocol, newest first


class Refused(Exception):
    """The answer to a request is an error of the protocol: its code and a message for people."""


def greet(arguments):
    name = text(arguments, "name").strip()
    if not name:
        raise ValueError("name is blank")  # the tool has failed: the model reads why
    return f"Hello, {name}!"


def count(arguments):
    return f"{len(text(arguments, 'text').split())} words"


def text(arguments, key):
    if not isinstance(arguments.get(key), str):
        raise ValueError(f"{key} has to be a string")
    return arguments[key]


def takes_text(key):
    return {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}


TOOLS = {  # name: function, description, JSON Schema of its arguments
    "greet": (greet, "Greets somebody by name.", takes_text("name")),
    "count": (count, "Counts the words of a text.", takes_text("text")),
}


# --- The protocol. What is below can stay as it is. ---


def answer(method, params):
    if method == "initialize":
        asked = params.get("protocolVersion")
        version = asked if asked in VERSIONS else VERSIONS[0]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": INFO}
    if method == "ping":
        return {}
    if method == "tools/list":
        fields = ("name", "description", "inputSchema")
        return {"tools": [dict(zip(fields, (name, *rest))) for name, (_, *rest) in TOOLS.items()]}
    if method == "tools/call":
        if params.get("name") not in TOOLS:
            raise Refused(-32602, f"Unknown tool: {params.get('name')}")
        try:
            said, failed = TOOLS[params["name"]][0](params.get("arguments") or {}), False
        except ValueError as error:
            said, failed = str(error), True
        return {"content": [{"type": "text", "text": said}], "isError": failed}
    raise Refused(-32601, f"Method not found: {method}")


for line in sys.stdin:  # its end is the end of the session
    try:
        request = json.loads(line)
    except ValueError as error:
        print(f"the client sent a line that is not JSON: {error}", file=sys.stderr)
        continue
    if isinstance(request, dict) and "id" in request and "method" in request:  # not a notification
        message = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            message["result"] = answer(request["method"], request.get("params") or {})
        except Refused as refused:
            message["error"] = {"code": refused.args[0], "message": refused.args[1]}
        print(json.dumps(message), flush=True)  # only the protocol goes to stdout, and each line at once
