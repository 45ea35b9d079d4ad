#!/usr/bin/python3 -I
"""An MCP server that tells everybody everything: what a call was given goes into its log, its progress, its
stderr and its resources. `who` says which process answers, and with what."""

import json
import os
import sys
import threading

TOKEN = os.urandom(8).hex()
TOOLS = ("who", "tell", "hold", "release", "touch", "ask", "crash")
CAPABILITIES = {"tools": {}, "resources": {"subscribe": True}, "logging": {}}
writing = threading.Lock()
holding = {}  # word -> Event
waiting = {}  # id of a request of ours -> [Event, answer]
heard = []  # methods


def send(message):
    with writing:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def notify(method, **params):
    send({"method": method, "params": params})


def tell(word, token):
    notify("notifications/message", level="error", logger="teller", data={"said": word})
    print(word, file=sys.stderr, flush=True)
    notify("notifications/resources/updated", uri=f"memo://{word}")
    if token is not None:
        notify("notifications/progress", progressToken=token, progress=1, message=word)


def ask(word):
    number = f"q-{word}"
    slot = waiting[number] = [threading.Event(), None]
    params = {"message": word, "requestedSchema": {"type": "object", "properties": {}}}
    send({"id": number, "method": "elicitation/create", "params": params})
    slot[0].wait()
    return json.dumps(slot[1].get("result") or slot[1]["error"])


def call(name, given, meta):
    word = given.get("word", "")
    if name == "who":
        found = {
            "token": TOKEN,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "words": sys.argv[1:],
            "meta": meta,
        }
        return json.dumps({**found, "heard": heard})
    if name in ("tell", "hold", "crash"):
        tell(word, meta.get("progressToken"))
    if name == "hold":
        holding.setdefault(word, threading.Event()).wait()
    if name == "release":
        holding.setdefault(word, threading.Event()).set()
    if name == "touch":
        notify("notifications/resources/updated", uri=word)
    if name == "ask":
        return ask(word)
    if name == "crash":
        print("not the protocol: " + word, flush=True)
        os._exit(3)
    return word


def result(method, params):
    if method == "initialize":
        info = {"name": "teller", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": CAPABILITIES, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
    if method == "resources/list":
        return {"resources": [{"uri": "memo://all", "name": "all"}]}
    if method == "resources/templates/list":
        return {"resourceTemplates": []}
    if method == "tools/call":
        said = call(params["name"], params.get("arguments") or {}, params.get("_meta") or {})
        return {"content": [{"type": "text", "text": said}]}
    return {}


def serve(message):
    send({"id": message["id"], "result": result(message["method"], message.get("params") or {})})


for line in sys.stdin:
    message = json.loads(line)
    if "method" not in message:
        slot = waiting.pop(message["id"])
        slot[1] = message
        slot[0].set()
        continue
    heard.append(message["method"])
    if "id" in message:
        threading.Thread(target=serve, args=(message,), daemon=True).start()
