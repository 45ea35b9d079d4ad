#!/usr/bin/env python3
"""A small kaged plugin. It asks its host what it is told to ask, tries what it is told to try, and takes part
in compactions as its first argument says: observer, compactor, slow, crashing or refusing."""

import base64
import json
import os
import sys
import time

NAME = sys.argv[2]
LISTS = {"methods": [], "notifications": [], "capabilities_used": []}
MODE = sys.argv[1]
told = {}
asked = 0


def ask(params):
    """One question to the host; its whole answer."""
    global asked
    asked += 1
    question = {"jsonrpc": "2.0", "id": f"q{asked}", "method": params["method"]}
    if "params" in params:
        question["params"] = params["params"]
    say(question)
    answer = json.loads(sys.stdin.readline())
    assert answer["id"] == f"q{asked}", answer
    return {key: answer[key] for key in ("result", "error") if key in answer}


def touch(params):
    """Read and write a file of the host directly."""
    found = {}
    for mode in ("rb", "r+b", "wb"):
        try:
            with open(params["path"], mode) as file:
                found[mode] = len(file.read()) if mode == "rb" else "opened"
        except OSError as error:
            found[mode] = error.strerror
    try:
        found["list"] = sorted(os.listdir(os.path.dirname(params["path"])))
    except OSError as error:
        found["list"] = error.strerror
    return found


def plant(params):
    """Write files, with the folders they are in; for each what came of it. Then ask the host, if told to."""
    found = {}
    os.umask(0o077)
    for path, content in params["files"].items():
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(base64.b64decode(content))
            found[path] = "written"
        except OSError as error:
            found[path] = error.strerror
    return {"files": found, "answer": ask(params["ask"]) if "ask" in params else None}


def pre_compact(params):
    if MODE == "slow":
        time.sleep(600)
    if MODE == "crashing":
        os._exit(3)
    if MODE == "refusing":
        raise ValueError("not now")
    if MODE == "compactor":
        return {
            "summary": params["messages_being_compacted"].upper(),
            "agent": params["_context"]["agent_path"],
        }
    return None


def post_compact(params):
    return {"retain": [params["strategy"], params["trigger"]], "inject": f"{NAME} was here"}


METHODS = {
    f"{NAME}.ask": ask,
    f"{NAME}.touch": touch,
    f"{NAME}.plant": plant,
    f"{NAME}.told": lambda params: told,
    "kaged.hook.pre_compact": pre_compact,
    "kaged.hook.post_compact": post_compact,
}


def say(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


while line := sys.stdin.readline():
    request = json.loads(line)
    if "id" not in request:
        continue
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    method, params = request["method"], request.get("params") or {}
    try:
        if method == "initialize":
            told.update(params)
            answer["result"] = {"name": NAME, "version": "1.0.0", "api_version": 1, **LISTS}
        elif method in ("health.check", "shutdown"):
            answer["result"] = {"status": "ok"}
        else:
            answer["result"] = METHODS[method](params)
    except Exception as error:
        answer["error"] = {"code": -32000, "message": str(error)}
    say(answer)
