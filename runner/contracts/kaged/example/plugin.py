#!/usr/bin/env python3
"""A kaged plugin: JSON-RPC 2.0, one message per line. stdin brings requests, stdout takes answers.

To add a tool, write a function, list it in TOOLS, and describe it in kaged-plugin.yaml.
"""

import json
import os
import sys

NAME, VERSION = "greeter", "0.1.0"  # as in kaged-plugin.yaml
COUNT_FILE = os.path.join(os.environ.get("KAGED_CONFIG_ROOT", "."), "count")  # this folder persists
config = {}


class Refused(Exception):
    """The answer to a request is an error: its code and a message for people."""


def greet(params):
    name = params.get("name")
    if not isinstance(name, str) or not name.strip():
        raise Refused(-32602, "name has to be a text that is not blank")
    number = count(params)["greeted"] + 1
    with open(COUNT_FILE, "w") as file:
        file.write(str(number))
    return {"greeting": f"{config.get('greeting', 'Hello')}, {name.strip()}!"}


def count(params):
    try:
        with open(COUNT_FILE) as file:
            return {"greeted": int(file.read())}
    except FileNotFoundError:
        return {"greeted": 0}


def on_session_start(params):
    who = params["_context"]["agent_path"]  # every call has a _context
    return {"inject": f"The agent {who} can greet people with {NAME}.greet."}


TOOLS = {f"{NAME}.greet": greet, f"{NAME}.count": count}
METHODS = {**TOOLS, "kaged.hook.on_session_start": on_session_start}


# --- The protocol. What is below can stay as it is. ---


def answer(method, params):
    if method == "initialize":
        config.update(params.get("config") or {})
        about = {"name": NAME, "version": VERSION, "api_version": 1}
        return {**about, "methods": [], "notifications": [], "capabilities_used": ["net:[]"]}
    if method in ("health.check", "shutdown"):
        return {"status": "ok"}
    if method not in METHODS:
        raise Refused(-32601, f"there is no method {method!r}")
    return METHODS[method](params)


for line in sys.stdin:  # the host closes it to end the plugin
    try:
        request = json.loads(line)
    except ValueError as error:
        print(f"the host sent a line that is not JSON: {error}", file=sys.stderr)
        continue
    if not isinstance(request, dict) or "id" not in request or "method" not in request:
        continue  # a notification: initialized
    message = {"jsonrpc": "2.0", "id": request["id"]}
    try:
        message["result"] = answer(request["method"], request.get("params") or {})
    except Refused as refused:
        message["error"] = {"code": refused.args[0], "message": refused.args[1]}
    # Only the protocol goes to stdout, and each line at once. print(…, file=sys.stderr) is for people.
    print(json.dumps(message), flush=True)
    if request["method"] == "shutdown":
        break
