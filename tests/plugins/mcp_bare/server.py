#!/usr/bin/python3 -I
"""An MCP server without an SDK, of either era: `server.py modern|legacy|silent-legacy`.

A silent-legacy server does not answer methods it does not know, as many small servers do. Each line is served
in a thread of its own, so that a running call can be cancelled and can send requests to its client. With a
second argument, "late", the server starts only after its client has sent two messages.
"""

import itertools
import json
import sys
import threading

ERA = sys.argv[1] if len(sys.argv) > 1 else "modern"
MODERN = ERA == "modern"
VERSIONS = ["2026-07-28"] if MODERN else ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"]
META = "io.modelcontextprotocol/"
INFO = {"name": "bare", "title": "Bare", "version": "1.0.0"}
CAPABILITIES = {"tools": {"listChanged": True}, "prompts": {}, "resources": {}, "logging": {}}
INSTRUCTIONS = "Say echo."
LEVELS = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]

NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
SUM = {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]}
ANYTHING = {"type": "object"}
TOOLS = [
    {"name": "echo", "title": "Echo", "description": "its arguments, structured", "inputSchema": ANYTHING},
    {"name": "add", "description": "a + b", "inputSchema": NUMBERS, "outputSchema": SUM},
    {
        "name": "add_wrong",
        "description": "promises a sum, says a word",
        "inputSchema": NUMBERS,
        "outputSchema": SUM,
    },
    {"name": "fail", "description": "fails as tools fail", "inputSchema": ANYTHING},
    {"name": "slow", "description": "steps, each with progress", "inputSchema": ANYTHING},
    {"name": "sample", "description": "asks the client's model", "inputSchema": ANYTHING},
    {"name": "roots", "description": "asks the client for its roots", "inputSchema": ANYTHING},
    {"name": "log", "description": "logs, then answers", "inputSchema": ANYTHING},
    {"name": "change", "description": "says that the tools have changed", "inputSchema": ANYTHING},
]
PER_PAGE = 3
PROMPT = {"name": "greet", "arguments": [{"name": "who", "required": True}]}
RESOURCE = {"uri": "bare://note", "name": "note", "mimeType": "text/plain"}
TEMPLATE = {"uriTemplate": "bare://note/{n}", "name": "numbered"}
ASKED = {
    "messages": [{"role": "user", "content": {"type": "text", "text": "name a colour"}}],
    "maxTokens": 10,
}

writing = threading.Lock()
cancelled = {}  # id of a request -> Event
waiting = {}  # id of a request of ours -> [Event, answer]


class Failure(Exception):
    def __init__(self, code, message, data=None):
        super().__init__(message)
        self.body = {"code": code, "message": message, **({} if data is None else {"data": data})}


class NeedsInput(Exception):
    """Modern era: a request to the client is the result of the call, and the client repeats the call."""


def send(message):
    with writing:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False) + "\n")
        sys.stdout.flush()


def notify(method, params=None):
    send({"method": method, **({} if params is None else {"params": params})})


def ask(params, key, method, asked=None):
    """Send a request to the client in the way of the era, and return its answer."""
    if MODERN:
        service = method.partition("/")[0]
        if service not in params["_meta"][META + "clientCapabilities"]:
            raise Failure(-32021, f"needs {service}", {"requiredCapabilities": {service: {}}})
        if key in (params.get("inputResponses") or {}):
            if params.get("requestState") != "state of " + key:
                raise Failure(-32602, "the state is not what it was")
            return params["inputResponses"][key]
        raise NeedsInput(key, method, asked)
    number = f"q{len(waiting) + 1}"
    slot = waiting[number] = [threading.Event(), None]
    send({"id": number, "method": method, **({} if asked is None else {"params": asked})})
    slot[0].wait()
    if "error" in slot[1]:
        raise RuntimeError(f"{slot[1]['error']['code']} {slot[1]['error']['message']}")
    return slot[1]["result"]


def text(words, **more):
    return {"content": [{"type": "text", "text": words}], **more}


def echo(arguments, params, stop):
    return text(json.dumps(arguments), structuredContent=arguments)


def add(arguments, params, stop):
    total = arguments["a"] + arguments["b"]
    return text(str(total), structuredContent={"sum": total})


def add_wrong(arguments, params, stop):
    return text("many", structuredContent={"sum": "many"})


def fail(arguments, params, stop):
    raise RuntimeError("it did not work")


def slow(arguments, params, stop):
    token = (params.get("_meta") or {}).get("progressToken")
    steps = arguments.get("steps", 3)
    for step in range(steps):
        if token is not None:
            value = {
                "progressToken": token,
                "progress": step + 1,
                "total": steps,
                "message": f"step {step + 1}",
            }
            notify("notifications/progress", value)
        if stop.wait(arguments.get("seconds", 0.01)):
            return None
    return text("done")


def sample(arguments, params, stop):
    answer = ask(params, "colour", "sampling/createMessage", ASKED)
    return text(answer["content"]["text"])


def roots(arguments, params, stop):
    return text(" ".join(root["uri"] for root in ask(params, "roots", "roots/list")["roots"]))


def log(arguments, params, stop):
    least = "info" if not MODERN else params["_meta"].get(META + "logLevel")
    if least is not None and LEVELS.index(least) <= LEVELS.index("warning"):
        notify(
            "notifications/message", {"level": "warning", "logger": "bare", "data": {"said": "mind the gap"}}
        )
    return text("logged")


def change(arguments, params, stop):
    notify("notifications/tools/list_changed")
    return text("changed")


TOOL = {one.__name__: one for one in (echo, add, add_wrong, fail, slow, sample, roots, log, change)}


def call_tool(params, stop):
    if params.get("name") not in TOOL:
        raise Failure(-32602, f"Unknown tool: {params.get('name')}")
    try:
        return TOOL[params["name"]](params.get("arguments") or {}, params, stop)
    except (Failure, NeedsInput):
        raise
    except Exception as error:
        return text(str(error), isError=True)


def list_tools(params, stop):
    start = int(params.get("cursor") or 0)
    page = {"tools": TOOLS[start : start + PER_PAGE]}
    return {**page, "nextCursor": str(start + PER_PAGE)} if start + PER_PAGE < len(TOOLS) else page


def get_prompt(params, stop):
    if params.get("name") != PROMPT["name"]:
        raise Failure(-32602, "no such prompt")
    words = f"Greet {params['arguments']['who']}."
    return {"messages": [{"role": "user", "content": {"type": "text", "text": words}}]}


def read_resource(params, stop):
    if params.get("uri") != RESOURCE["uri"]:
        raise Failure(-32602 if MODERN else -32002, "Resource not found", {"uri": params.get("uri")})
    return {"contents": [{"uri": RESOURCE["uri"], "mimeType": "text/plain", "text": "a note"}]}


def initialize(params, stop):
    wanted = params["protocolVersion"]
    version = wanted if wanted in VERSIONS else VERSIONS[0]
    said = {"capabilities": CAPABILITIES, "serverInfo": INFO, "instructions": INSTRUCTIONS}
    return {"protocolVersion": version, **said}


def discover(params, stop):
    return {"supportedVersions": VERSIONS, "capabilities": CAPABILITIES, "instructions": INSTRUCTIONS}


METHODS = {
    "tools/list": list_tools,
    "tools/call": call_tool,
    "prompts/list": lambda params, stop: {"prompts": [PROMPT]},
    "prompts/get": get_prompt,
    "resources/list": lambda params, stop: {"resources": [RESOURCE]},
    "resources/templates/list": lambda params, stop: {"resourceTemplates": [TEMPLATE]},
    "resources/read": read_resource,
}
if MODERN:
    METHODS["server/discover"] = discover
else:
    METHODS["initialize"] = initialize
    METHODS["ping"] = lambda params, stop: {}

CACHED = ("server/discover", "tools/list", "prompts/list", "resources/list", "resources/templates/list")


def check_envelope(params):
    meta = params.get("_meta") or {}
    for name in ("protocolVersion", "clientCapabilities"):
        if META + name not in meta:
            raise Failure(-32602, f"_meta has no {name}")
    if meta[META + "protocolVersion"] not in VERSIONS:
        asked = {"supported": VERSIONS, "requested": meta[META + "protocolVersion"]}
        raise Failure(-32022, "Unsupported protocol version", asked)


def result_of(method, params, stop):
    if not MODERN:
        return METHODS[method](params, stop)
    check_envelope(params)
    stamp = {"resultType": "complete", "_meta": {META + "serverInfo": INFO}}
    if method in CACHED:
        stamp |= {"ttlMs": 0, "cacheScope": "private"}
    try:
        result = METHODS[method](params, stop)
    except NeedsInput as need:
        key, wanted, asked = need.args
        question = {"method": wanted, **({} if asked is None else {"params": asked})}
        return {
            **stamp,
            "resultType": "input_required",
            "inputRequests": {key: question},
            "requestState": "state of " + key,
        }
    return None if result is None else {**stamp, **result}


def serve(message, stop):
    number, method = message["id"], message["method"]
    try:
        if method not in METHODS:
            if ERA == "silent-legacy":
                return
            raise Failure(-32601, "Method not found")
        result = result_of(method, message.get("params") or {}, stop)
        if not stop.is_set():
            send({"id": number, "result": result})
    except Failure as failure:
        send({"id": number, "error": failure.body})
    finally:
        cancelled.pop(number, None)


def main():
    # The messages that a slowly starting server finds in its pipe.
    found = [sys.stdin.readline(), sys.stdin.readline()] if "late" in sys.argv[2:] else []
    for line in itertools.chain(found, sys.stdin):
        try:
            message = json.loads(line)
        except ValueError:
            continue
        method, number = message.get("method"), message.get("id")
        if method is None:
            if number in waiting:
                waiting[number][1] = message
                waiting[number][0].set()
        elif number is not None:
            stop = cancelled[number] = threading.Event()
            threading.Thread(target=serve, args=(message, stop), daemon=True).start()
        elif method == "notifications/cancelled" and message["params"]["requestId"] in cancelled:
            cancelled[message["params"]["requestId"]].set()


if __name__ == "__main__":
    main()
