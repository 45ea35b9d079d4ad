"""A host of each contract that keeps all rules, or breaks one: small_host.py CONTRACT FAULT FOLDER COMMAND.

COMMAND is the plugin's program, which gets its arguments here, or several words, which are complete.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

SECONDS = 60.0  # for an answer
SHORT_SECONDS = 2.0  # with faults after which none comes
GRACE = {"rune": 0.6, "nexo": 1.1, "vai": 0.5, "kaged": 2.1, "ainb": 5.1, "mcp": 0.5}
ASKED = {"nexo": -32603, "ainb": -32001}  # the error that answers a plugin's request
RPC: dict[str, Any] = {"jsonrpc": "2.0"}
CONTEXT = dict.fromkeys(("operator_id", "project_id", "agent_path", "session_id", "request_id"), "x")
# Messages that lack what they have to have.
OTHERS: dict[str, list[dict[str, Any]]] = {
    "ainb": [
        {"method": "plugin/handle_key"},
        {"method": "plugin/handle_event"},
        {"id": 8, "method": "plugin/render"},
    ],
    "kaged": [{"id": 8, "method": "kaged.hook.on_session_start"}],
    "mcp": [{"id": 8, "method": "server/discover"}],
    "nexo": [{"method": "broker.event"}],
}
VAI: dict[str, Any] = {"protocol": "vai.rpc.v1"}


def conversation(contract: str) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The messages of a host, and its last one. Those with an id, and the first, are answered."""
    if contract == "rune":
        request = {"type": "request", "request_id": "plugin_req_1", "tool_name": "echo"}
        return [
            {"type": "handshake", "protocol_version": "rterm.plugin.v1"},
            {**request, "context": {}, "input": {}},
        ], None
    if contract == "vai":
        context = {"invocation_id": "i", "trace_id": "t", "deadline_at": "2100-01-01T00:00:00Z"}
        body = {"export_id": "echo", "tool_execution_id": "x", "input": {}, "context": context}
        hello = {**VAI, "type": "hello", "role": "host", "host": {"name": "h", "version": "1"}}
        call = {**VAI, "type": "request", "id": "r1", "op": "tool.invoke", "body": body}
        return [hello, call], {**VAI, "type": "shutdown"}
    first: dict[str, Any]
    if contract == "nexo":
        first = {"method": "initialize", "params": {"nexo_version": "0.1"}}
        params = {"plugin_id": "stand_in", "tool_name": "stand_in_echo", "args": {}, "agent_id": "a"}
        call = {"method": "tool.invoke", "params": params}
        last = {"method": "shutdown", "params": {"reason": "done"}}
    elif contract == "kaged":
        about = {"daemon_version": "1", "api_version": 1, "plugin_name": "stand-in"}
        first = {"method": "initialize", "params": {**about, "storage_available": False, "projects": []}}
        call, last = {"method": "stand-in.echo", "params": {"_context": CONTEXT}}, {"method": "shutdown"}
    elif contract == "ainb":
        about = {"manifest_path": "/m", "granted_capabilities": [], "abi_version": 2}
        first = {"method": "plugin/init", "params": about}
        call = {"method": "plugin/cli_dispatch", "params": {"namespace": "stand_in", "argv": []}}
        last = {"method": "plugin/shutdown", "params": {}}
    else:
        client = {"name": "h", "version": "1"}
        params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
        first = {"method": "initialize", "params": params}
        call, last = {"method": "tools/call", "params": {"name": "echo"}}, {}
    messages = [{**RPC, "id": 1, **first}, {**RPC, "id": 2, **call}]
    if contract in ("kaged", "mcp"):
        prefix = "notifications/" if contract == "mcp" else ""
        messages.insert(1, {**RPC, "method": f"{prefix}initialized"})
    return messages, {**RPC, "id": 3, **last} if last else None


def spoil(fault: str, contract: str, messages: list[dict[str, Any]], last: dict[str, Any] | None) -> None:
    """Let the messages break a rule."""
    if fault == "opening":
        messages[0].pop("params", None) or messages[0].pop("host", None) or messages[0].pop(
            "protocol_version"
        )
    elif fault == "call":
        messages[-1].pop("params", None) or messages[-1].pop("body", None) or messages[-1].pop("input")
    elif fault == "order":
        messages.insert(0, {**messages[-1], "id": "r9" if contract == "vai" else 9})
    elif fault == "same_id":
        messages[-1]["id"] = messages[0]["id"]
    elif fault == "twice":
        messages.append({**messages[-1], "id": "r2"} if contract == "vai" else messages[-1])
    elif fault == "unknown":
        messages.insert(-1, {"jsonrpc": "2.0", **VAI, "method": "unheard.of", "type": "unheard"})
    elif fault == "no_initialized":
        del messages[1]
    elif fault == "initialized":
        messages[1]["id"] = 9
    elif fault == "others":
        messages[-1:-1] = [{**RPC, **message} for message in OTHERS[contract]]
    elif fault == "version":
        for message in (*messages, last or {}):
            message.update(dict.fromkeys({"jsonrpc", "protocol"} & message.keys(), "1.0"))
    elif fault == "goodbye" and last is not None:
        last.pop("id")


class SmallHost:
    def __init__(self, contract: str, fault: str, folder: str, *command: str) -> None:
        self.contract, self.fault = contract, fault
        self.lines = contract not in ("vai", "ainb")
        environ = {} if fault == "variables" else {"STAND_IN": "1"}
        if fault == "inherits":
            environ["HOME"] = "/"
        plain = (contract == "ainb") != (fault == "arguments") or len(command) > 1
        extra = os.open("/dev/null", os.O_RDONLY)
        self.plugin = subprocess.Popen(
            command if plain else [*command, "--stand-in"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if fault == "stderr" else subprocess.DEVNULL,
            cwd="/" if fault == "folder" else folder,
            env=environ,
            pass_fds=[extra] if fault == "descriptors" else [],
        )
        self.held = b""

    def write(self, message: Any) -> None:
        raw = json.dumps(message).encode()
        if self.fault == "framing":
            raw, header = (b"\n" + raw, b"") if self.lines else (raw, b"Content-Type: x\r\n")
        else:
            header = b""
        raw = raw + b"\n" if self.lines else header + b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw)
        assert self.plugin.stdin is not None
        self.plugin.stdin.write(raw)
        self.plugin.stdin.flush()

    def read(self) -> Any:
        """The next message."""
        assert self.plugin.stdout is not None
        while (message := self.cut()) is None:
            if not select.select(
                [self.plugin.stdout], [], [], SHORT_SECONDS if self.fault in ("mute", "stderr") else SECONDS
            )[0]:
                raise TimeoutError
            chunk = os.read(self.plugin.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            self.held += chunk
            if self.fault == "pieces" and not self.held.endswith((b"\n", b"}")):
                raise ValueError("half a message")
            if self.fault == "large" and len(self.held) > 1 << 15:
                raise ValueError("too large")
        return message

    def cut(self) -> Any:
        if self.lines:
            raw, end, rest = self.held.partition(b"\n")
        else:
            header, end, rest = self.held.partition(b"\r\n\r\n")
            length = int(header.split(b":")[1]) if end else 0
            raw, rest, end = rest[:length], rest[length:], end if len(rest) >= length else b""
        if not end:
            return None
        self.held = rest
        return json.loads(raw)

    def answer(self, asked: dict[str, Any]) -> Any:
        """The answer to a request. Those of the plugin are answered before."""
        while True:
            message = self.read()
            if self.fault == "extra" and ("unknown_key" in json.dumps(message) or "unheard" in str(message)):
                raise ValueError("what is that")
            if "method" in message and "id" in message and self.fault != "mute":
                code = ASKED.get(self.contract, -32601)
                reply = (
                    {"result": {}} if self.contract == "mcp" else {"error": {"code": code, "message": "no"}}
                )
                self.write({**RPC, "id": message["id"], **reply})
            elif "method" not in message and message.get("type") != "event":
                return message

    def talk(self) -> None:
        messages, last = conversation(self.contract)
        spoil(self.fault, self.contract, messages, last)
        try:
            for number, message in enumerate(messages):
                self.write(message)
                if self.fault == "early" and number == 0:
                    continue
                if number == 0 or "id" in message or "request_id" in message:
                    answer = self.answer(message)
                    wrong = re.search("somebody.else|some/other|1999", json.dumps(answer))
                    failed = "error" in answer or '"failed"' in json.dumps(answer)
                    if number == 0 and (wrong or failed) and self.fault not in ("credulous", "old"):
                        raise ValueError("an impostor")
                    if failed and self.fault == "gives_up":
                        return
        except KeyboardInterrupt:
            named = "nobody" if self.fault == "cancel" else 2 if self.contract == "mcp" else "r1"
            if self.contract == "mcp":
                self.write({**RPC, "method": "notifications/cancelled", "params": {"requestId": named}})
            elif self.contract == "vai":
                reason = {} if self.fault == "no_reason" else {"reason": "user_cancelled"}
                self.write({**VAI, "type": "cancel", "request_id": named, **reason})
        if last is not None and self.fault != "no_goodbye":
            self.write(last)
            if "id" in last:
                self.answer(last)

    def end(self) -> None:
        assert self.plugin.stdin is not None
        if self.fault == "leaves":
            return
        try:
            if self.fault != "stdin":
                self.plugin.stdin.close()
            self.plugin.wait(0 if self.fault == "kills" else GRACE[self.contract])
        except subprocess.TimeoutExpired:
            if self.contract in ("mcp", "vai") and self.fault != "no_term":
                self.plugin.terminate()
                time.sleep(0.2)
            self.plugin.kill()
            self.plugin.wait()


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    host = SmallHost(*sys.argv[1:])
    try:
        host.talk()
        return 0
    except (ValueError, TimeoutError, EOFError, BrokenPipeError):
        return 1
    finally:
        host.end()


if __name__ == "__main__":
    sys.exit(main())
