#!/usr/bin/python3 -I
"""Speaks kaged as the published plugin does, quirks included:

- it does not know health.check, and answers with an error; it knows `ping`, which nobody sends
- it answers shutdown, and ends only when its stdin is closed
- it claims another version than its manifest, and lists its tools as methods
- it handles one line after the other
- it answers what it cannot read with the id 0

With the argument `hangs` it hangs at the first health.check.
"""

import json
import os
import signal
import sys

NAME = "quirks"
secrets = {}


class Refused(Exception):
    pass


def say(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def initialize(params):
    secrets.update(params.get("system_config") or {})
    token = secrets.get("token", "")
    if secrets.get("spill") == "refuse it":
        raise Refused(-32000, f"the token {token} is not valid", {"token": token})
    return {
        "name": NAME,
        "version": "0.1.0",
        "api_version": 1,
        "methods": [f"{NAME}.{tool}" for tool in ("store", "confuse", "spill")],
        "notifications": [],
        "capabilities_used": ["kaged:storage:read"],
    }


def confuse(params):
    say({"id": 0, "error": {"code": -32700, "message": "Parse error"}})
    return {}


def spill(params):
    token = secrets.get("token", "")
    say({"method": "quirks.checked", "params": {"token": token, token: [token]}})
    say({"method": f"quirks.{token}", "params": {}})
    say({"id": 0, "error": {"code": -32600, "message": f"not {token}"}})
    print("the token is", token, file=sys.stderr, flush=True)
    print(json.dumps({"token": token}), file=sys.stderr, flush=True)
    if params.get("then") == "exit":
        os._exit(3)
    raise Refused(-32000, f"the token {token} is not valid", {"token": token})


METHODS = {
    "initialize": initialize,
    "ping": lambda params: {"status": "ok"},
    "shutdown": lambda params: {"status": "ok"},
    f"{NAME}.store": lambda params: {"got": params},
    f"{NAME}.confuse": confuse,
    f"{NAME}.spill": spill,
    "kaged.hook.on_session_start": lambda params: {"inject": "remember me"},
    "kaged.hook.on_session_idle": lambda params: None,
    "kaged.hook.pre_compact": lambda params: None,
    "kaged.hook.post_compact": lambda params: {"retain": [params["strategy"]], "inject": params["trigger"]},
}


def handle(line):
    try:
        request = json.loads(line)
        number, method = request["id"], request["method"]
    except (ValueError, KeyError, TypeError):
        if '"initialized"' not in line:
            say({"id": 0, "error": {"code": -32600, "message": "Invalid Request"}})
        return
    number = number if isinstance(number, int) else 0
    if method == "health.check":
        say({"method": "quirks.checked", "params": {}})
        while "hangs" in sys.argv:
            signal.pause()
    if method not in METHODS:
        say({"id": number, "error": {"code": -32601, "message": f"Method not found: {method}"}})
        return
    try:
        say({"id": number, "result": METHODS[method](request.get("params") or {})})
    except Refused as refused:
        code, message, data = refused.args
        say({"id": number, "error": {"code": code, "message": message, "data": data}})


for each in sys.stdin:
    if each.strip():
        handle(each)
print("stdin is closed", file=sys.stderr)
