#!/usr/bin/env python3
"""A nexo plugin: JSON-RPC 2.0, one message per line. stdin brings requests, stdout takes answers.

To add a tool, write a function, list it in TOOLS, and add its name to plugin.toml.
"""

import json
import sys


class Refused(Exception):
    """The answer to a request is an error: its code and a message for people."""


def greet(args):
    name = text(args, "name").strip()
    if not name:
        raise Refused(-33402, "name is blank")
    return {"greeting": f"Hello, {name}!"}


def count(args):
    return {"words": len(text(args, "text").split())}


def text(args, key):
    if not isinstance(args, dict) or not isinstance(args.get(key), str):
        raise Refused(-33402, f"{key} has to be a string")
    return args[key]


def takes_text(key):
    return {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}


TOOLS = {  # name: function, description, JSON Schema of its arguments
    "greeter_greet": (greet, "Greets somebody by name.", takes_text("name")),
    "greeter_count": (count, "Counts the words of a text.", takes_text("text")),
}


# --- The protocol. What is below can stay as it is. ---


def answer(method, params):
    if method == "initialize":
        fields = ("name", "description", "input_schema")
        tools = [dict(zip(fields, (name, *rest))) for name, (_, *rest) in TOOLS.items()]
        plugin = {"id": "greeter", "version": "0.1.0", "name": "greeter"}  # as in plugin.toml
        return {"manifest": {"plugin": plugin}, "server_version": "greeter-0.1.0", "tools": tools}
    if method == "tool.invoke":
        if params.get("tool_name") not in TOOLS:
            raise Refused(-33401, f"there is no tool {params.get('tool_name')!r}")
        return TOOLS[params["tool_name"]][0](params.get("args"))
    if method == "shutdown":
        return {"ok": True}
    raise Refused(-32601, f"there is no method {method!r}")


for line in sys.stdin:  # its end is a shutdown without a word
    try:
        request = json.loads(line)
    except ValueError as error:
        print(f"the host sent a line that is not JSON: {error}", file=sys.stderr)
        continue
    if not isinstance(request, dict) or "id" not in request or "method" not in request:
        continue  # a notification, or an answer: this plugin asks nothing
    message = {"jsonrpc": "2.0", "id": request["id"]}
    try:
        message["result"] = answer(request["method"], request.get("params") or {})
    except Refused as refused:
        message["error"] = {"code": refused.args[0], "message": refused.args[1]}
    # Only the protocol goes to stdout, and each line at once. print(…, file=sys.stderr) is for people.
    print(json.dumps(message), flush=True)
    if request["method"] == "shutdown":
        break
