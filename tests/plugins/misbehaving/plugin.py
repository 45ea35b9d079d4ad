#!/usr/bin/python3 -I
"""A plugin that misbehaves in one way and is correct in every other.

    plugin.py BEHAVIOUR CONTRACT [MOMENT]

CONTRACT is rune, nexo, mcp (a server of the older protocol, without server/discover), kaged, ainb or vai.
MOMENT is when it misbehaves: at the start, in place of the answer to the handshake (hello), or of the answer
to a call.
BEHAVIOURS, at the end, lists all behaviours with their default moments.
"""

import base64
import json
import os
import signal
import sys
import time

ID = "misbehaving"
PACKAGE = f"test/{ID}"  # its id where one has two parts
TOOL = {
    **dict.fromkeys(("rune", "mcp", "kaged", "ainb", "vai"), "echo"),
    "nexo": "misbehaving_echo",
}
SCHEMA = {"type": "object"}
REQUESTS = 2000
SHUTDOWNS = {"shutdown", "plugin/shutdown"}
MEBI = 1 << 20
# A placeholder in a message, which a behaviour replaces with text that may not be JSON.
HERE = "@here@"
# Returned by a behaviour that continues to read although the conversation would end.
READ_ON = "read on"


def write(data, fd=1):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def live_on():
    while True:
        signal.pause()


# --- The contracts: their messages and the correct answers -------------------------------------------------
#
# moment(message) is "hello" or "call" where a behaviour may apply. answer(message, value) is the correct
# answer with `value` in it. chatter() may be sent at any time. request(n) is a request to the host.


class _Lines:
    """A message is a line."""

    def read(self, stdin):
        return stdin.readline()

    def pack(self, line):
        return line


class _Headers:
    """A message is a frame with a header. What a behaviour makes of a line is the body of a frame."""

    def read(self, stdin):
        """The body of the next frame; empty at the end of the stream."""
        length = 0
        while (line := stdin.readline()) not in (b"\r\n", b""):
            if line.startswith(b"Content-Length: "):
                length = int(line.partition(b":")[2])
        return stdin.read(length) if line else b""

    def pack(self, line):
        return b"Content-Length: %d\r\n\r\n%b" % (len(line), line)


class Rune(_Lines):
    def moment(self, message):
        return {"handshake": "hello", "request": "call"}.get(message.get("type"))

    def answer(self, message, value):
        if message["type"] == "handshake":
            manifest = {
                "plugin_id": ID,
                "plugin_version": "1",
                "protocol_version": message["protocol_version"],
                "exposed_tools": [TOOL["rune"]],
            }
            return {"type": "handshake", "manifest": manifest, "metadata": {"note": value}}
        return {
            "type": "response",
            "request_id": message["request_id"],
            "status": "ok",
            "output": {"input": message["input"], "note": value},
        }

    def over(self, message):
        return message.get("type") == "request"

    def wrong(self, answer):
        if "manifest" in answer:
            return {**answer, "manifest": {**answer["manifest"], "plugin_id": "somebody-else"}}
        return {**answer, "request_id": "plugin_req_0000000000000000"}

    def chatter(self):
        return {"type": "event", "text": "x" * 200}

    def request(self, number):
        return {"type": "request", "request_id": f"r{number}", "tool_name": "x", "context": {}, "input": {}}


class _JsonRpc(_Lines):
    def answer(self, message, value):
        answer = {"jsonrpc": "2.0", "id": message.get("id")}
        result = self.result(message["method"], message.get("params") or {}, value)
        if result is None:
            return {**answer, "error": {"code": -32601, "message": f"no {message['method']} here"}}
        return {**answer, "result": result}

    def over(self, message):
        return message.get("method") == "shutdown"

    def wrong(self, answer):
        return {**answer, "id": 987654}


class Nexo(_JsonRpc):
    def moment(self, message):
        return {"initialize": "hello", "tool.invoke": "call"}.get(message.get("method"))

    def result(self, method, params, value):
        if method == "initialize":
            manifest = {"plugin": {"id": ID, "version": "1.0.0"}}
            tools = [{"name": TOOL["nexo"], "description": "Echo.", "input_schema": SCHEMA}]
            return {"manifest": manifest, "server_version": "1.0.0", "tools": tools, "note": value}
        if method == "tool.invoke":
            return {"input": params.get("args"), "note": value}
        return {"ok": True} if method == "shutdown" else None

    def chatter(self):
        topic = f"{ID}.chatter"
        event = {"topic": topic, "source": ID, "payload": {"text": "x" * 200}}
        return {"jsonrpc": "2.0", "method": "broker.publish", "params": {"topic": topic, "event": event}}

    def request(self, number):
        params = {"agent_id": "a", "query": "x" * 100, "limit": 1}
        return {"jsonrpc": "2.0", "id": number, "method": "memory.recall", "params": params}


class Mcp(_JsonRpc):
    def moment(self, message):
        return {"initialize": "hello", "tools/call": "call"}.get(message.get("method"))

    def result(self, method, params, value):
        if method == "initialize":
            return {
                "protocolVersion": params.get("protocolVersion", "2025-11-25"),
                "capabilities": {"tools": {}, "logging": {}},
                "serverInfo": {"name": ID, "version": "1"},
                "_meta": {"note": value},
            }
        if method == "tools/list":
            return {"tools": [{"name": TOOL["mcp"], "description": "Echo.", "inputSchema": SCHEMA}]}
        if method == "tools/call":
            content = [{"type": "text", "text": json.dumps(params.get("arguments"))}]
            structured = {"input": params.get("arguments"), "note": value}
            return {"content": content, "structuredContent": structured}
        return {} if method == "ping" else None

    def chatter(self):
        params = {"level": "info", "data": "x" * 200}
        return {"jsonrpc": "2.0", "method": "notifications/message", "params": params}

    def request(self, number):
        return {
            "jsonrpc": "2.0",
            "id": number,
            "method": "roots/list",
            "params": {"_meta": {"pad": "x" * 100}},
        }


class Kaged(_JsonRpc):
    def moment(self, message):
        return {"initialize": "hello", f"{ID}.{TOOL['kaged']}": "call"}.get(message.get("method"))

    def result(self, method, params, value):
        if method == "initialize":
            lists = {"methods": [], "notifications": [], "capabilities_used": []}
            return {"name": ID, "version": "1.0.0", "api_version": 1, **lists, "note": value}
        if self.moment({"method": method}) == "call":
            given = {name: each for name, each in params.items() if name != "_context"}
            return {"input": given, "note": value}
        return {"status": "ok"} if method in ("shutdown", "health.check") else None

    def chatter(self):
        return {"jsonrpc": "2.0", "method": f"{ID}.chatter", "params": {"text": "x" * 200}}

    def request(self, number):
        params = {"key": "x" * 100}
        return {"jsonrpc": "2.0", "id": number, "method": "kaged.storage.get", "params": params}


class Ainb(_Headers, _JsonRpc):
    def moment(self, message):
        return {"plugin/init": "hello", "plugin/cli_dispatch": "call"}.get(message.get("method"))

    def result(self, method, params, value):
        if method == "plugin/init":
            return {"name": ID, "version": "1.0.0", "note": value}
        if method == "plugin/cli_dispatch":
            given = json.loads(params["argv"][0])
            stdout = base64.b64encode(json.dumps({"input": given}).encode()).decode()
            return {"stdout": stdout, "stderr": "", "exit_code": 0, "input": given, "note": value}
        return {} if method == "plugin/shutdown" else None

    def over(self, message):
        return False  # it exits when stdin is closed, as plugins of the SDK do

    def chatter(self):
        params = {"level": "error", "message": "x" * 200}
        return {"jsonrpc": "2.0", "method": "host/log", "params": params}

    def request(self, number):
        params = {"topic": "x" * 100}
        return {"jsonrpc": "2.0", "id": number, "method": "host/snapshot/get", "params": params}


class Vai(_Headers):
    def __init__(self):
        self.request_id = "req_0"  # of the last request: events belong to one

    def moment(self, message):
        if message.get("type") == "request":
            self.request_id = message["id"]
        return {"hello": "hello", "request": "call"}.get(message.get("type"))

    def frame(self, kind, **fields):
        return {"protocol": "vai.rpc.v1", "type": kind, **fields}

    def answer(self, message, value):
        if message["type"] == "hello":
            who = {"package_id": PACKAGE, "version": "1.0.0"}
            return self.frame("hello", role="plugin", plugin=who, note=value)
        given = message["body"]["input"]
        content = [{"type": "text", "text": json.dumps(given)}]
        result = {"content": content, "structured_output": {"input": given, "note": value}}
        return self.frame(
            "response", id=message["id"], ok=True, body={"status": "succeeded", "result": result}
        )

    def over(self, message):
        return message.get("type") == "shutdown"

    def wrong(self, answer):
        if answer["type"] == "hello":
            return {**answer, "plugin": {**answer["plugin"], "package_id": "test/somebody-else"}}
        return {**answer, "id": "req_987654"}

    def chatter(self):
        event = {"type": "progress", "message": "x" * 200}
        return self.frame("event", request_id=self.request_id, event=event)

    def request(self, number):
        return self.frame("request", id=f"r{number}", op="tool.invoke", body={"pad": "x" * 100})


CONTRACTS = {"rune": Rune, "nexo": Nexo, "mcp": Mcp, "kaged": Kaged, "ainb": Ainb, "vai": Vai}


class Plugin:
    """The correct part: reads messages, answers them, exits when it should."""

    def __init__(self, contract, behaviour, moment):
        self.contract = contract
        self.behaviour = behaviour
        self.moment = moment
        self.kept = b""  # sent when the next message arrives
        self.stubborn = False

    def frame(self, message, value=None, raw=None):
        """The correct answer as a line. `raw` is text in place of a value."""
        answer = self.contract.answer(message, HERE if raw is not None else value)
        line = json.dumps(answer).encode() + b"\n"
        return line if raw is None else line.replace(json.dumps(HERE).encode(), raw)

    def reply(self, message):
        if message is not None:
            self.send(self.frame(message))

    def send(self, line):
        write(self.pack(line))

    def pack(self, line):
        return self.contract.pack(line)

    def chatter(self):
        return self.pack(json.dumps(self.contract.chatter()).encode() + b"\n")

    def run(self):
        if self.moment == "start":
            self.behaviour(self, None)
        for line in iter(lambda: self.contract.read(sys.stdin.buffer), b""):
            if self.kept:
                write(self.kept)
                self.kept = b""
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if not isinstance(message, dict):
                continue
            moment = self.contract.moment(message)
            if moment is not None and moment == self.moment:
                if self.behaviour(self, message) == READ_ON:
                    continue
            elif self.stubborn and SHUTDOWNS & {message.get("method"), message.get("type")}:
                live_on()
            elif moment is not None or ("method" in message and "id" in message):
                self.reply(message)
            if self.contract.over(message):
                break
        if self.stubborn:
            live_on()
        write(self.kept)


# --- What can be wrong with an answer ----------------------------------------------------------------------


def raw(text):
    """An answer with this text in place of a JSON value."""

    def behave(plugin, message):
        plugin.send(plugin.frame(message, raw=text))

    return behave


def changed(change):
    """The bytes of the correct answer, changed."""

    def behave(plugin, message):
        plugin.send(change(plugin.frame(message)))

    return behave


def wrong_id(plugin, message):
    plugin.send(json.dumps(plugin.contract.wrong(json.loads(plugin.frame(message)))).encode() + b"\n")


def duplicate_key(line):
    """The key with the id (or the type) occurs twice. The correct one is last."""
    answer = json.loads(line)
    key = next(key for key in ("request_id", "id", "type") if key in answer)
    other = "other" if isinstance(answer[key], str) else 987654
    return json.dumps({key: other}).encode()[:-1] + b", " + line[1:]


# --- What can be wrong with the timing and the stream ------------------------------------------------------


def good(plugin, message):
    plugin.reply(message)


def silent(plugin, message):
    """Continues to read, and writes nothing."""
    while message is None and sys.stdin.buffer.readline():
        pass
    return READ_ON


def drip(plugin, message):
    """Answers byte by byte, but in time."""
    for byte in plugin.pack(plugin.frame(message)):
        write(bytes([byte]))
        time.sleep(0.001)


def trickle(plugin, message):
    """Writes byte by byte for ever, and never completes an answer."""
    write(b'{"text": "')
    while True:
        write(b"x")
        time.sleep(0.05)


def banner(plugin, message):
    write(b"Welcome to the plugin, version 1!\n")
    plugin.reply(message)


def half_frame(plugin, message):
    frame = plugin.pack(plugin.frame(message))
    write(frame[: len(frame) // 2])
    os._exit(3)


def unterminated(plugin, message):
    """Writes a complete answer without its last byte, a newline, then exits."""
    write(plugin.pack(plugin.frame(message))[:-1])
    os._exit(0)


def endless_line(plugin, message):
    write(b'{"text": "')
    while True:
        write(b"x" * 65536)


def flood_frames(plugin, message):
    while True:
        write(plugin.chatter() * 256)


def flood_garbage(plugin, message):
    while True:
        write(b"this is no message of any protocol\n" * 1024)


def flood_stderr(plugin, message):
    while True:
        write(b"something is the matter, something is the matter\n" * 1024, 2)


def burst_stderr(plugin, message):
    """More than any pipe holds, then the correct answer. A host that does not read stderr waits for ever."""
    for _ in range(8):
        write(b"e" * (MEBI - 1) + b"\n", 2)
    plugin.reply(message)


def burst_frames(plugin, message):
    """Many unsolicited messages, then the correct answer."""
    write(plugin.chatter() * REQUESTS)
    plugin.reply(message)


def chatter_after(plugin, message):
    """The correct answer, then more than any pipe holds."""
    plugin.reply(message)
    write((b"y" * 99 + b"\n") * (MEBI // 100))


def deaf(plugin, message):
    """Never reads again."""
    plugin.reply(message)
    live_on()


def storm(plugin, message):
    """Sends many requests to its host, and never reads the answers."""
    plugin.reply(message)
    requests = (json.dumps(plugin.contract.request(n)).encode() + b"\n" for n in range(1, REQUESTS + 1))
    write(b"".join(map(plugin.pack, requests)))
    live_on()


def twice(plugin, message):
    plugin.reply(message)
    plugin.reply(message)


def late(plugin, message):
    """Keeps its answer back until another message or the end of stdin arrives."""
    plugin.kept += plugin.pack(plugin.frame(message))
    return READ_ON


def exit_failing(plugin, message):
    write(b"cannot open the database\n", 2)
    os._exit(3)


def exit_zero(plugin, message):
    os._exit(0)


def killed(plugin, message):
    os.kill(os.getpid(), signal.SIGKILL)


def answer_and_exit(plugin, message):
    """Exits right after its answer, which is then still in the pipe."""
    plugin.reply(message)
    os._exit(0)


def answer_and_fail(plugin, message):
    plugin.reply(message)
    os._exit(3)


def orphan(plugin, message):
    """Answers and exits. A child keeps its stdout and stderr open."""
    if os.fork() == 0:
        live_on()
    plugin.reply(message)
    os._exit(0)


def close_stdout(plugin, message):
    os.close(1)
    live_on()


def close_stdin(plugin, message):
    os.close(0)
    plugin.reply(message)
    live_on()


def oom(plugin, message):
    held = []
    while True:
        held.append(b"\1" * (16 * MEBI))


def stop(plugin, message):
    """Stays alive, and never writes again."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stubborn(plugin, message):
    """Works correctly, but ignores every request to exit."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    plugin.stubborn = True
    plugin.reply(message)


BEHAVIOURS = {
    "good": (good, "call"),
    # the text of an answer
    "nan": (raw(b"NaN"), "call"),
    "infinity": (raw(b"-Infinity"), "call"),
    "overflow": (raw(b"1e999"), "call"),
    "huge_int": (raw(b"9" * 5000), "call"),
    "int_65_bit": (raw(b"18446744073709551616"), "call"),
    "deep": (raw(b"[" * 100_000 + b"]" * 100_000), "call"),
    "deep_129": (raw(b"[" * 129 + b"]" * 129), "call"),
    "surrogate": (raw(rb'"\ud800"'), "call"),
    "not_utf8": (raw(b'"\xff\xfe"'), "call"),
    "large": (raw(b'"' + b"x" * (2 * MEBI) + b'"'), "call"),
    "bom": (changed(lambda line: b"\xef\xbb\xbf" + line), "call"),
    "blank": (changed(lambda line: b"\n" + line), "call"),
    "crlf": (changed(lambda line: line[:-1] + b"\r\n"), "call"),
    "trailing": (changed(lambda line: line[:-1] + b" {}\n"), "call"),
    "array": (changed(lambda line: b"[" + line[:-1] + b"]\n"), "call"),
    "duplicate_key": (changed(duplicate_key), "call"),
    "wrong_id": (wrong_id, "call"),
    # when and how it comes
    "silent": (silent, "hello"),
    "drip": (drip, "call"),
    "trickle": (trickle, "call"),
    "banner": (banner, "start"),
    "half_frame": (half_frame, "call"),
    "unterminated": (unterminated, "call"),
    "endless_line": (endless_line, "call"),
    "flood_frames": (flood_frames, "call"),
    "flood_garbage": (flood_garbage, "call"),
    "flood_stderr": (flood_stderr, "call"),
    "burst_stderr": (burst_stderr, "call"),
    "burst_frames": (burst_frames, "call"),
    "chatter_after": (chatter_after, "call"),
    "deaf": (deaf, "hello"),
    "storm": (storm, "hello"),
    "twice": (twice, "call"),
    "late": (late, "call"),
    # its end
    "exit_failing": (exit_failing, "start"),
    "exit_zero": (exit_zero, "hello"),
    "killed": (killed, "call"),
    "answer_and_exit": (answer_and_exit, "call"),
    "answer_and_fail": (answer_and_fail, "call"),
    "orphan": (orphan, "call"),
    "close_stdout": (close_stdout, "call"),
    "close_stdin": (close_stdin, "hello"),
    "oom": (oom, "call"),
    "stop": (stop, "call"),
    "stubborn": (stubborn, "start"),
}


if __name__ == "__main__":
    # A flood whose reader has closed the pipe ends silently.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    name, contract, *moment = sys.argv[1:]
    function, usual = BEHAVIOURS[name]
    Plugin(CONTRACTS[contract](), function, moment[0] if moment else usual).run()
