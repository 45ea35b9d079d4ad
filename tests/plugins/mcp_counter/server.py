#!/usr/bin/env python3
"""An MCP server that notes each call in a file, and then answers. The file tells what ran how often."""

import json
import os
import sys

NOTES = os.open(os.path.join(sys.argv[1], "notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
TOOL = {"name": "note", "description": "Notes a call.", "inputSchema": {"type": "object"}}


def answer(method, params):
    if method == "initialize":
        info, version = {"name": "counter", "version": "1"}, params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        call = str(params["arguments"]["call"])
        os.write(NOTES, f"{call}\n".encode())
        return {"content": [{"type": "text", "text": call}], "isError": False}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
