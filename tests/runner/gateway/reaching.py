#!/usr/bin/python3 -I
"""An MCP server whose only tool tries to reach a host."""

import json
import socket
import sys

for line in sys.stdin:
    asked = json.loads(line)
    method, given = asked.get("method"), asked.get("params") or {}
    result = None
    if method == "initialize":
        version, about = given["protocolVersion"], {"name": "reaching", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    elif method == "tools/list":
        result = {"tools": [{"name": "reach", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        try:
            with socket.create_connection((given["arguments"]["host"], 443), 20):
                said = "reached"
        except OSError as error:
            said = f"not reached: {error}"
        result = {"content": [{"type": "text", "text": said}]}
    if "id" in asked:
        refused = {"error": {"code": -32601, "message": "unknown"}}
        answer = refused if result is None else {"result": result}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}) + "\n")
        sys.stdout.flush()
