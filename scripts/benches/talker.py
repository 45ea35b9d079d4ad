"""One small plugin for each contract, all with the same answers.

It reads `text` of its arguments: a number is answered with so many characters, "heard" with the frames that
it has read so far, so that others can send the same ones.
"""

from __future__ import annotations

import json
import os
from typing import Any

from sandbox.speed.value import NamedTuple
from scripts.benches.caller import Caller

# argv: lines or headers, and the contract's name.
PROGRAM = r"""#!/usr/bin/python3 -ISE
import base64, json, sys
framing, contract = sys.argv[1:]
read, write, flush = sys.stdin.buffer.readline, sys.stdout.buffer.write, sys.stdout.buffer.flush
heard = []

def receive():
    if framing == "lines":
        body = head = read()
    else:
        head = read()
        body = head and sys.stdin.buffer.read(int(head.split(b":")[1]) + 2)
    if head and len(heard) < 16:
        heard.append((head if framing == "lines" else head + body).decode())
    return json.loads(body) if head else None

def send(message):
    body = json.dumps(message).encode()
    write(body + b"\n" if framing == "lines" else b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    flush()

def said(asked):
    return json.dumps(heard) if asked == "heard" else "x" * int(asked)

def text(asked):
    return [{"type": "text", "text": said(asked)}]

def mcp(method, given):
    if method == "server/discover":
        return {"resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
    return {"resultType": "complete", "content": text(given["arguments"]["text"])}

def nexo(method, given):
    if method == "initialize":
        tool = {"name": "talker_say", "description": "Says it.", "input_schema": {"type": "object"}}
        about = {"plugin": {"id": "talker", "version": "1.0.0", "name": "Talker"}}
        return {"manifest": about, "server_version": "1", "tools": [tool]}
    return {"content": text(given["args"]["text"])} if method == "tool.invoke" else {}

def kaged(method, given):
    if method == "initialize":
        about = {"name": "talker", "version": "1.0.0", "api_version": 1, "methods": [], "notifications": []}
        return {**about, "capabilities_used": ["net:[]"]}
    return {"said": said(given["text"])} if method == "talker.say" else {"status": "ok"}

def ainb(method, given):
    if method == "plugin/init":
        return {"name": "talker", "version": "1.0.0"}
    if method == "plugin/shutdown":
        return {}
    shown = base64.b64encode(said(given["argv"][0]).encode()).decode()
    return {"stdout": shown, "stderr": "", "exit_code": 0}

def vai():
    while (message := receive()) is not None and message["type"] != "shutdown":
        answer = {"protocol": "vai.rpc.v1", "type": "response", "ok": True}
        if message["type"] == "hello":
            about = {"package_id": "bench/talker", "version": "1.0.0"}
            send({"protocol": "vai.rpc.v1", "type": "hello", "role": "plugin", "plugin": about})
        elif message["type"] == "request":
            result = {"content": text(message["body"]["input"]["text"]), "structured_output": {}}
            send({**answer, "id": message["id"], "body": {"status": "succeeded", "result": result}})

def rune():
    receive()
    about = {"plugin_id": "talker", "plugin_version": "1.0.0", "protocol_version": "rterm.plugin.v1"}
    send({"type": "handshake", "manifest": {**about, "exposed_tools": ["say"]}})
    request = receive()
    answer = {"type": "response", "request_id": request["request_id"], "status": "ok"}
    send({**answer, "output": {"said": said(request["input"]["text"])}})

if contract in ("vai", "rune"):
    globals()[contract]()
else:
    respond = globals()[contract]
    while (message := receive()) is not None:
        if message.get("id") is not None and "method" in message:
            result = respond(message["method"], message.get("params") or {})
            send({"jsonrpc": "2.0", "id": message["id"], "result": result})
"""

NEXO = """\
[plugin]
id = "talker"
version = "1.0.0"
name = "Talker"
description = "Says what it is asked to."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "./talker"
args = ["lines", "nexo"]
[plugin.extends]
tools = ["talker_say"]
[plugin.sandbox]
enabled = true
"""
KAGED = """\
name: talker
version: 1.0.0
kaged_api: 1
description: Says what it is asked to.
command: ["./talker", lines, kaged]
capabilities: ["net:[]"]
tools:
  - {name: say, description: Says it., parameters_schema: {type: object}}
"""
AINB = """\
[plugin]
name = "talker"
version = "1.0.0"
abi_version = 2
description = "Says what it is asked to."
[provides]
cli_namespaces = ["talker"]
"""
VAI = """\
api_version = "vai.plugin.v1"
package_id = "bench/talker"
version = "1.0.0"
name = "Talker"
description = "Says what it is asked to."
license = "Apache-2.0"
[runtime]
protocol = "vai.rpc.v1"
entrypoint = ["./talker", "headers", "vai"]
[[exports]]
id = "say"
kind = "tool"
description = "Says it."
[exports.permissions]
network = "none"
filesystem = "none"
[exports.tool]
effect_class = "read_only"
input_schema = "any.json"
"""
RUNE = json.dumps(
    {
        "plugin_id": "talker",
        "display_name": "talker",
        "description": "Says what it is asked to.",
        "plugin_version": "1.0.0",
        "protocol_version": "rterm.plugin.v1",
        "process": {"command": "./talker", "args": ["lines", "rune"]},
        "tools": [
            {
                "name": "say",
                "description": "Says it.",
                "input_schema": {"type": "object"},
                "output_schema": {"type": "object"},
                "approval_tier": "safe",
                "mutating": False,
            }
        ],
    }
)
MCP = json.dumps({"mcpServers": {"talker": {"command": "./talker", "args": ["lines", "mcp"]}}})


class Speech(NamedTuple):
    """The plugin of one contract, and how it is called."""

    contract: str
    framing: str  # lines or headers
    file: str
    manifest: str
    call: str  # the name of what is called
    once: bool = False  # a process answers one call

    def asked(self, text: str) -> Any:
        return {"argv": [text]} if self.contract == "ainb" else {"text": text}


# An ainb plugin's executable has its name, and gets no arguments from its manifest.
SPEECHES = (
    Speech("mcp", "lines", "mcp.json", MCP, "say"),
    Speech("nexo", "lines", "nexo-plugin.toml", NEXO, "talker_say"),
    Speech("kaged", "lines", "kaged-plugin.yaml", KAGED, "say"),
    Speech("vai", "headers", "vai-plugin.toml", VAI, "say", once=True),
    Speech("ainb", "headers", "manifest.toml", AINB, "talker"),
    Speech("rune", "lines", "rterm-plugin.json", RUNE, "say", once=True),
)


def install(caller: Caller, speech: Speech) -> str:
    """Write the plugin. Returns the path of its manifest."""
    folder = f"{speech.contract}/talker"
    program = PROGRAM
    if speech.contract == "ainb":
        program = program.replace("framing, contract = sys.argv[1:]", 'framing, contract = "headers", "ainb"')
    os.chmod(caller.write(f"{folder}/talker", program), 0o755)
    caller.write(f"{folder}/any.json", '{"type": "object"}')
    return caller.write(f"{folder}/{speech.file}", speech.manifest)
