#!/usr/bin/python3 -I
"""A correct rune plugin: one handshake, one request, one response, then it exits.

Its arguments are the capabilities it declares. See rterm-plugin.json, which has none, and declaring.json.
"""

import json
import os
import sys

ID, VERSION, PROTOCOL = "rune-echo", "1.0.0", "rterm.plugin.v1"


class Refused(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def echo(request):
    return {"input": request["input"], "context": request["context"]}


def fail(request):
    given = request["input"]
    raise Refused(given.get("code", "internal_error"), given.get("message", "as you wish"))


def look(request):
    try:
        return {"names": sorted(os.listdir(request["context"].get("repo_root") or "."))}
    except OSError as error:
        raise Refused("not_found", error.strerror) from None


TOOLS = {"echo": echo, "fail": fail}
if "workspace:read" in sys.argv[1:]:
    TOOLS["look"] = look


def hear(kind):
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(f"the input ended where a {kind} should be")
    message = json.loads(line)
    if message["type"] != kind:
        sys.exit(f"a message of type {message['type']} where a {kind} should be")
    return message


def say(message):
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def main():
    if hear("handshake")["protocol_version"] != PROTOCOL:
        sys.exit("only " + PROTOCOL + " is spoken here")
    manifest = {
        "plugin_id": ID,
        "plugin_version": VERSION,
        "protocol_version": PROTOCOL,
        "exposed_tools": list(TOOLS),
    }
    if sys.argv[1:]:
        manifest["capabilities"] = sys.argv[1:]
    say({"type": "handshake", "manifest": manifest})
    request = hear("request")
    response = {"type": "response", "request_id": request["request_id"]}
    try:
        say({**response, "status": "ok", "output": TOOLS[request["tool_name"]](request)})
    except Refused as refused:
        say({**response, "status": "error", "error": {"code": refused.code, "message": str(refused)}})


main()
