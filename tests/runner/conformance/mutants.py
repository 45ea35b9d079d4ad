"""Plugins that break one rule each: the starter of a contract, with a few lines of code put in.

A row is a number of a rule, where the code is put in, the code, and the numbers of the rules that are broken
too: an answer that nobody asked for, for example, breaks the rule about answers as well.

    out    for each message `m` that the plugin sends, before it is sent
    got    for each message `m` that it has read
    bad    for each message that it could not read
    start  before anything else
    end    when it exits by itself

`r` is the last message that was read ({} before the first one), and S remembers anything.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Literal, NamedTuple

from runner.contracts.ainb.plugin_watch import SnapshotChunk, make_chunk

Place = Literal["out", "got", "bad", "start", "end"]

PRELUDE = """
import atexit, io, json, os, sys, time
_dumps, _loads, S, r = json.dumps, json.loads, {{}}, {{}}
die, hang = (lambda: os._exit(7)), (lambda: time.sleep(3600))

def raw(text):
    header = "" if {lines} else "Content-Length: %d\\r\\n\\r\\n" % len(text)
    os.write(1, (header + text + ("\\n" if {lines} else "")).encode())

def say(m):
    raw(_dumps(m))

def put(m, path, value):
    *parts, last = path.split(".")
    for part in parts:
        m = m.get(part) if isinstance(m, dict) else None
    if isinstance(m, dict) and last in m:
        m[last] = value

def drop(m, path):
    *parts, last = path.split(".")
    for part in parts:
        m = m.get(part) if isinstance(m, dict) else None
    if isinstance(m, dict):
        m.pop(last, None)

def fail(m, code=-32000):
    m.pop("result", None)
    m["error"] = {{"code": code, "message": "mutant"}}

def tools(m):
    return (m.get("result") or {{}}).get("tools") or []

def modern(m):
    meta = (r.get("params") or {{}}).get("_meta") or {{}}
    version = meta.get("io.modelcontextprotocol/protocolVersion")
    if version is None:
        return
    if version != "2026-07-28":
        fail(m, -32022)
        m["error"]["data"] = {{"supported": ["2026-07-28"]}}
    elif "io.modelcontextprotocol/clientCapabilities" not in meta:
        fail(m, -32602)
    elif r["method"] == "server/discover":
        m.pop("error", None)
        m["result"] = {{"supportedVersions": ["2026-07-28"], "capabilities": {{"tools": {{}}}}}}

class Impatient(io.FileIO):
    "Ends the plugin if a read brings only the beginning of a message."
    def readinto(self, buffer):
        size = super().readinto(buffer)
        data = bytes(buffer[:size or 0])
        is_part = not data.endswith(b"\\n") if {lines} else b"Content-Length: ".startswith(data[:16])
        if 0 < len(data) < 16 and is_part:
            die()
        return size

def in_pieces():
    sys.stdin = io.TextIOWrapper(io.BufferedReader(Impatient(0, closefd=False)))

def cancelled():
    "Whether a cancel waits to be read, or comes within two seconds."
    for _ in range(200):
        os.set_blocking(0, False)
        waiting = b'"cancel"' in sys.stdin.buffer.peek()
        os.set_blocking(0, True)
        if waiting:
            return True
        time.sleep(0.01)

def at_out(m):
    {out}

def at_got(m):
    {got}

def at_bad():
    {bad}

def at_end():
    {end}

def dumps(m):
    at_out(m)
    return _dumps(m)

def loads(text):
    global r
    try:
        m = _loads(text)
    except ValueError:
        S["bad"] = 1
        if (m := at_bad()) is None:
            raise
    r = m if isinstance(m, dict) else {{}}
    S["n"] = S.get("n", 0) + 1
    S["init"] = S.get("init") or r.get("method") in ("initialize", "plugin/init")
    at_got(m)
    return m

json.dumps, json.loads = dumps, loads
atexit.register(at_end)
{start}
"""


class Mutant(NamedTuple):
    number: int  # of the rule
    place: Place
    code: str
    also: tuple[int, ...] = ()  # rules that are broken too
    manifest: tuple[str, str] | None = None  # replaced in the manifest


def mutate(program: str, mutant: Mutant, *, lines: bool) -> str:
    """The source of a mutant. `lines`: its messages are lines."""
    assert program.count("import json\n") == 1
    places = dict.fromkeys(("out", "got", "bad", "end"), "pass") | {"start": ""}
    return program.replace(
        "import json\n", PRELUDE.format(**places | {mutant.place: mutant.code}, lines=lines)
    )


_NULL = """say({"jsonrpc": "2.0", "id": None, "result": {}})"""
_DOUBLE = "say(m)"
_LONG = "len(_dumps(m)) > 99999 and die()"

_RUNE = (
    Mutant(1, "got", """m.get("type") == "handshake" and die()"""),
    Mutant(2, "out", """put(m, "manifest.protocol_version", "rterm.plugin.v9")"""),
    Mutant(3, "out", """put(m, "manifest.plugin_id", "other")"""),
    Mutant(4, "out", """put(m, "manifest.plugin_version", " ")"""),
    Mutant(5, "out", """put(m, "manifest.exposed_tools", ["greet", "count", ""])"""),
    Mutant(6, "out", """put(m, "manifest.exposed_tools", ["greet"])"""),
    Mutant(7, "out", """"manifest" in m and m["manifest"].update(capabilities=["a", "a"])""", (8,)),
    Mutant(8, "out", """"manifest" in m and m["manifest"].update(capabilities=["a"])"""),
    Mutant(9, "out", """m["type"] == "response" and m.update(status="error", error={"message": "no"})"""),
    Mutant(10, "end", "die()"),
    Mutant(11, "start", "in_pieces()"),
    Mutant(12, "got", _LONG),
    Mutant(13, "got", """m.get("input") == 5 and die()"""),
    Mutant(14, "got", """m.get("tool_name") == "no_such_tool" and die()"""),
    Mutant(
        15,
        "got",
        """m.get("protocol_version") == "rterm.plugin.v0" and """
        """(say({"type": "handshake", "manifest": {"protocol_version": "rterm.plugin.v0"}}), die())""",
    ),
    Mutant(16, "bad", """return {"type": "handshake", "protocol_version": "rterm.plugin.v1"}"""),
    Mutant(17, "end", "not r and not S and hang()"),
    Mutant(18, "end", """r.get("protocol_version") == "rterm.plugin.v1" and hang()"""),
    Mutant(19, "start", """raw("starting up")"""),
    Mutant(20, "out", """m.get("status") == "ok" and m.update(error={"message": "and no"})"""),
    Mutant(21, "out", """m["type"] == "response" and say(m)"""),
)

_CALLED = """r.get("method") == "tools/call" and "name" in r["params"].get("arguments", {})"""
_MCP = (
    Mutant(1, "out", """drop(m, "result.serverInfo.version")"""),
    Mutant(
        2,
        "out",
        """put(m, "result.protocolVersion", "2025-06-18" if r.get("params", {}).get("protocolVersion")"""
        """ == "2025-11-25" else "2025-11-25")""",
    ),
    Mutant(3, "out", """put(m, "result.protocolVersion", r.get("params", {}).get("protocolVersion"))"""),
    Mutant(4, "out", """S["init"] or r.get("method") != "ping" or fail(m)"""),
    Mutant(5, "got", f"""r.get("method") == "notifications/initialized" and {_NULL}""", (29,)),
    Mutant(6, "out", """r.get("method") == "ping" and m.update(result=[])"""),
    Mutant(7, "out", """isinstance(m["id"], str) and m.update(id=0)""", (29,)),
    Mutant(8, "out", """r.get("method") == "trial/no_such_method" and fail(m)"""),
    Mutant(9, "got", f"""r.get("method") == "notifications/trial" and {_NULL}"""),
    Mutant(10, "got", """r.get("params", {}).get("requestId") == 987654321 and die()"""),
    Mutant(11, "out", """[each.pop("inputSchema") for each in tools(m)]"""),
    Mutant(12, "out", """tools(m) and tools(m).append({"name": "a b", "inputSchema": {"type": "object"}})"""),
    Mutant(
        13, "out", """[each.update(inputSchema={"type": "object", "required": 5}) for each in tools(m)]"""
    ),
    Mutant(
        14,
        "out",
        """if r.get("params", {}).get("name") == "trial_no_such_tool":
        del m["error"]
        m["result"] = {"content": [], "isError": True}""",
    ),
    Mutant(15, "out", """put(m, "result.capabilities", {"tools": {}, "resources": {}})"""),
    Mutant(16, "out", """put(m, "result.capabilities", {"tools": {}, "prompts": {}})"""),
    Mutant(17, "out", f"""{_CALLED} and m["result"].update(content=[{{"type": "speech"}}])"""),
    Mutant(18, "out", """[each.update(outputSchema={"type": "object"}) for each in tools(m)]"""),
    Mutant(19, "got", """"" in r.get("params", {}).get("arguments", {}) and die()"""),
    Mutant(20, "got", """r.get("params", {}).get("requestId", 987654321) != 987654321 and die()"""),
    Mutant(21, "start", "in_pieces()"),
    Mutant(22, "got", _LONG),
    Mutant(23, "got", """S["n"] > 70 and die()"""),
    Mutant(24, "bad", "die()"),
    Mutant(25, "end", """S.get("init") and hang()"""),
    Mutant(26, "end", "not r and hang()"),
    Mutant(27, "start", """raw("starting up")"""),
    Mutant(28, "out", """m.update(jsonrpc="1.0")"""),
    Mutant(29, "out", _DOUBLE),
    Mutant(30, "out", """r.get("method") == "server/discover" and (m.pop("error"), m.update(result={}))"""),
    Mutant(31, "out", """modern(m); "_meta" in r.get("params", {}) and tools(m) and m.update(result={})"""),
    Mutant(32, "out", """modern(m); put(m, "error.data", {})"""),
    Mutant(33, "out", """modern(m); "_meta" in r.get("params", {}) and put(m, "error.code", -32022)"""),
)

_NEXO = (
    Mutant(1, "out", """drop(m, "result.manifest.plugin.id")"""),
    Mutant(2, "out", """put(m, "result.manifest.plugin.id", "other")"""),
    Mutant(3, "out", """drop(m, "result.tools")"""),
    Mutant(4, "out", """[each.pop("description") for each in tools(m)]"""),
    Mutant(5, "out", """tools(m) and tools(m).append(tools(m)[0] | {"name": "greeter_more"})"""),
    Mutant(6, "out", """tools(m) and tools(m).append(tools(m)[0] | {"name": "more"})""", (5,)),
    Mutant(7, "out", """r.get("method") == "trial.no_such_method" and fail(m)"""),
    Mutant(8, "out", """isinstance(m["id"], str) and m.update(id=0)""", (25,)),
    Mutant(9, "got", f"""r.get("method") == "trial.notice" and {_NULL}"""),
    Mutant(10, "got", f"""r.get("method") == "broker.event" and {_NULL}"""),
    Mutant(11, "out", """m.get("error", {}).get("code") == -33401 and fail(m)"""),
    Mutant(12, "out", """"greeting" in (m.get("result") or {}) and fail(m)"""),
    Mutant(13, "got", """r.get("params", {}).get("args") == 5 and die()"""),
    Mutant(14, "out", "pass", (), ("[plugin.sandbox]", 'hooks = ["before_message"]\n[plugin.sandbox]')),
    Mutant(15, "start", "in_pieces()"),
    Mutant(16, "got", "len(_dumps(m)) > 3000 and die()"),
    Mutant(17, "got", """S["n"] > 50 and die()"""),
    Mutant(18, "bad", "die()"),
    Mutant(19, "got", "isinstance(m, list) and die()"),
    Mutant(20, "out", """put(m, "result.ok", False)"""),
    Mutant(21, "end", """r.get("method") == "shutdown" and die()"""),
    Mutant(22, "end", """r.get("method") == "shutdown" or hang()"""),
    Mutant(23, "start", """raw("starting up")"""),
    Mutant(24, "out", """m.update(jsonrpc="1.0")"""),
    Mutant(25, "out", _DOUBLE),
)

_KAGED = (
    Mutant(1, "out", """drop(m, "result.notifications")"""),
    Mutant(2, "out", """put(m, "result.name", "other")"""),
    Mutant(3, "out", """put(m, "result.version", "9.9.9")"""),
    Mutant(4, "out", """put(m, "result.api_version", 2)"""),
    Mutant(5, "out", "pass", (), ("hooks:", "methods: [greeter.more]\nhooks:")),
    Mutant(6, "out", """put(m, "result.methods", ["system.more"])"""),
    Mutant(7, "out", """put(m, "result.notifications", ["more"])"""),
    Mutant(8, "out", """put(m, "result.capabilities_used", ["net:*"])"""),
    Mutant(9, "got", f"""r.get("method") == "initialized" and {_NULL}""", (25,)),
    Mutant(10, "out", """r.get("method") == "health.check" and fail(m)"""),
    Mutant(11, "out", """r.get("method") == "trial.no_such_method" and fail(m)"""),
    Mutant(12, "got", f"""r.get("method") == "trial.notice" and {_NULL}"""),
    Mutant(13, "out", """"greeting" in (m.get("result") or {}) and fail(m)"""),
    Mutant(14, "got", """"" in r.get("params", {}) and die()"""),
    Mutant(15, "out", """put(m, "result.inject", 5)"""),
    Mutant(16, "start", "in_pieces()"),
    Mutant(17, "got", _LONG),
    Mutant(18, "got", """S["n"] > 70 and die()"""),
    Mutant(19, "bad", "die()"),
    Mutant(20, "out", """r.get("method") == "shutdown" and fail(m)"""),
    Mutant(21, "end", """r.get("method") == "shutdown" and die()"""),
    Mutant(22, "end", """r.get("method") == "shutdown" or hang()"""),
    Mutant(23, "start", """raw("starting up")"""),
    Mutant(24, "out", """m.update(jsonrpc="1.0")"""),
    Mutant(25, "out", _DOUBLE),
)

_VIEW = """r.get("params", {}).get("viewport", {}).get("width")"""


def _ainb_says(method: str, **params: str) -> str:
    """At the notification of rule 6."""
    number = "" if method in ("host/log", "host/snapshot/publish") else """"id": 900, """
    message = f"""{{"jsonrpc": "2.0", {number}"method": {method!r}, "params": {params!r}}}"""
    return f"""r.get("method") == "plugin/trial_notice" and say({message})"""


_CHUNK_1 = base64.b64encode(make_chunk(SnapshotChunk(1, 1))).decode()
_CHUNK_2 = base64.b64encode(make_chunk(SnapshotChunk(1, 2))).decode()
_NEWS = ("[lifecycle]", '[subscribes]\nsnapshots = ["greeter.news"]\n\n[lifecycle]')

_AINB = (
    Mutant(1, "out", """drop(m, "result.version")"""),
    Mutant(2, "out", """put(m, "result.name", "other")"""),
    Mutant(3, "out", """put(m, "result.version", "9.9.9")"""),
    Mutant(4, "out", """"error" in m and S["init"] and put(m, "error.code", -32000)"""),
    Mutant(5, "out", """"error" in m and not S["init"] and fail(m)"""),
    Mutant(6, "got", f"""r.get("method") == "plugin/trial_notice" and {_NULL}"""),
    Mutant(7, "got", f"""r.get("method") == "plugin/handle_event" and {_NULL}"""),
    Mutant(8, "got", f"""r.get("params", {{}}).get("generation") == 1000 and {_NULL}"""),
    Mutant(9, "out", f"""{_VIEW} == 80 and put(m, "result.buffer.cells", [[{{"x": 0}}]])"""),
    Mutant(
        10,
        "out",
        f"""{_VIEW} == 80 and put(m, "result.buffer.cells", [[{{"x": 80, "y": 0}}, {{"symbol": "x"}}]])""",
    ),
    Mutant(11, "out", f"""{_VIEW} == 40 and put(m, "result.buffer.height", S["n"])"""),
    Mutant(12, "got", f"""{_VIEW} == 0 and die()"""),
    Mutant(13, "out", """r.get("params", {}).get("argv") == ["--help"] and put(m, "result.stderr", "***")"""),
    Mutant(
        14,
        "out",
        """r.get("params", {}).get("argv") == ["hello", "world"] and put(m, "result.exit_code", 3)""",
    ),
    Mutant(15, "got", """r.get("params", {}).get("argv") == 5 and r["params"].update(argv=[])"""),
    Mutant(16, "start", "in_pieces()"),
    Mutant(17, "got", _LONG),
    Mutant(18, "got", """r.get("params", {}).get("generation") == 50 and die()"""),
    Mutant(19, "bad", "die()"),
    Mutant(20, "out", """r.get("method") == "plugin/shutdown" and fail(m)"""),
    Mutant(21, "end", """r.get("method") == "plugin/shutdown" and die()"""),
    Mutant(22, "end", """r.get("method") == "plugin/shutdown" or hang()"""),
    Mutant(23, "start", """raw("starting up")"""),
    Mutant(24, "out", """m.update(jsonrpc="1.0")"""),
    Mutant(25, "out", _DOUBLE),
    Mutant(26, "got", """r.get("params", {}).get("granted_capabilities") == [] and die()"""),
    Mutant(27, "got", _ainb_says("host/network/fetch", url="https://a.example/")),
    Mutant(28, "got", _ainb_says("host/fs/read_file", path="/etc/passwd"), (27,)),
    Mutant(29, "got", _ainb_says("host/snapshot/publish", topic="greeter.last", payload="***")),
    Mutant(30, "got", _ainb_says("host/snapshot/publish", topic="greeter.last", payload=_CHUNK_1)),
    Mutant(31, "got", _ainb_says("host/log", level="WARN", message="hot")),
    Mutant(
        32,
        "out",
        """r.get("method") == "host/action/invoke" and """
        """(drop(m, "error"), m.update(result={"payload": "***"}))""",
    ),
    Mutant(33, "got", """r.get("params", {}).get("payload", "").startswith("wSBv") and die()""", (), _NEWS),
    Mutant(34, "got", f"""r.get("params", {{}}).get("payload") == {_CHUNK_2!r} and die()""", (), _NEWS),
    Mutant(
        35,
        "got",
        """kept = os.environ["AINB_HOME"] + "/crash"; """
        """r.get("method") == "plugin/trial_before_crash" and open(kept, "w").close(); """
        """os.path.exists(kept) and r.get("method") == "plugin/init" and die()""",
        (),
        ("[capabilities]", "[capabilities]\nwrite_plugin_data = true"),
    ),
)

_VAI = (
    Mutant(1, "out", """put(m, "role", "host")"""),
    Mutant(2, "out", """put(m, "plugin.package_id", "example/other")"""),
    Mutant(3, "out", """put(m, "plugin.version", "9.9.9")"""),
    Mutant(4, "out", """"result" in m.get("body", {}) and put(m, "body.status", "done")""", (5,)),
    Mutant(5, "out", """drop(m, "body.result.content")"""),
    Mutant(6, "out", """put(m, "body.result.structured_output", {})"""),
    Mutant(7, "got", """r.get("body", {}).get("export_id") == "trial_no_such_export" and die()"""),
    Mutant(8, "got", """r["type"] == "request" and "body" not in r and die()"""),
    Mutant(9, "got", """r.get("op") == "trial.no_such_op" and r.update(op="tool.invoke")"""),
    Mutant(10, "got", """r.get("request_id") == "trial_none" and die()"""),
    Mutant(11, "out", """m["type"] == "response" and cancelled() and die()"""),
    Mutant(12, "start", "in_pieces()"),
    Mutant(13, "got", _LONG),
    Mutant(
        14,
        "got",
        """r["type"] == "trial" and say({"protocol": "vai.rpc.v1", "type": "response", "id": "none","""
        """ "ok": True, "body": {}})""",
    ),
    Mutant(15, "bad", "hang()"),
    Mutant(16, "got", """r["type"] == "shutdown" and hang()"""),
    Mutant(17, "end", """r.get("type") == "hello" and "bad" not in S and hang()"""),
    Mutant(18, "end", "not r and hang()"),
    Mutant(19, "start", """raw("starting up")"""),
    Mutant(20, "out", """put(m, "protocol", "vai.rpc.v0")"""),
    Mutant(21, "out", """m["type"] == "response" and say(m)"""),
)

MUTANTS: Mapping[str, tuple[Mutant, ...]] = {
    "rune": _RUNE,
    "mcp": _MCP,
    "nexo": _NEXO,
    "kaged": _KAGED,
    "ainb": _AINB,
    "vai": _VAI,
}
# Changes that break nothing: both eras, and the newer one only.
HONEST: Mapping[str, tuple[Mutant, ...]] = {
    "mcp": (
        Mutant(0, "out", "modern(m)"),
        # The id of a request to the host looks like a fact of the engine.
        Mutant(
            -2,
            "got",
            """r.get("method") == "ping" and """
            """say({"jsonrpc": "2.0", "id": "$evil", "method": "roots/list"})""",
        ),
        Mutant(-1, "out", """modern(m); r.get("method") in ("initialize", "ping") and fail(m, -32601)"""),
    )
}
