#!/usr/bin/env python3
"""A rune plugin: one handshake, one request, one response, one JSON object per line. Then it exits.

To add a tool, write a function, list it in TOOLS, and describe it in rterm-plugin.json.
"""

import json
import sys

PROTOCOL = "rterm.plugin.v1"


class Refused(Exception):
    """The response is an error: its code and a message for people."""


def greet(given):
    name = text(given, "name").strip()
    if not name:
        raise Refused("invalid_input", "name is blank")
    return {"greeting": f"Hello, {name}!"}


def count(given):
    return {"words": len(text(given, "text").split())}


def text(given, key):
    if not isinstance(given, dict) or not isinstance(given.get(key), str):
        raise Refused("invalid_input", f"{key} has to be a string")
    return given[key]


TOOLS = {"greet": greet, "count": count}


# --- The protocol. What is below can stay as it is. ---


def receive(kind):
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)  # the host has gone, or has only asked who is there
    try:
        message = json.loads(line)
    except ValueError as error:
        sys.exit(f"the host sent a line that is not JSON: {error}")  # goes to stderr
    if message.get("type") != kind:
        sys.exit(f"expected a message of type {kind}, not {message.get('type')!r}")
    return message


def send(message):
    # Only the protocol goes to stdout, and each line at once. print(…, file=sys.stderr) is for people.
    print(json.dumps(message), flush=True)


def main():
    if receive("handshake").get("protocol_version") != PROTOCOL:
        sys.exit(f"this plugin speaks {PROTOCOL}")
    manifest = {"plugin_id": "greeter", "plugin_version": "0.1.0"}  # as in rterm-plugin.json
    manifest |= {"protocol_version": PROTOCOL, "exposed_tools": list(TOOLS)}
    send({"type": "handshake", "manifest": manifest})
    request = receive("request")
    response = {"type": "response", "request_id": request["request_id"]}
    try:
        if request["tool_name"] not in TOOLS:
            raise Refused("not_found", f"there is no tool {request['tool_name']!r}")
        output = TOOLS[request["tool_name"]](request.get("input"))
        send({**response, "status": "ok", "output": output})
    except Refused as refused:
        code, message = refused.args
        send({**response, "status": "error", "error": {"code": code, "message": message}})


if __name__ == "__main__":
    main()
