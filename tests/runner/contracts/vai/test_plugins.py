"""The plugins that other tests call speak the protocol: frames go in, frames come out, without a cage."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.registry import example_folder
from tests.conftest import ROOT

DEVKIT = ROOT / "tests/plugins/vai_devkit"
EXAMPLE = Path(example_folder("vai"))
HELLO = {"type": "hello", "role": "host", "host": {"name": "test", "version": "1"}}
SHUTDOWN = {"type": "shutdown"}
CONTEXT = {"invocation_id": "inv_1", "trace_id": "tr_1"}

Frame = dict[str, Any]


def frame(message: Frame) -> bytes:
    raw = json.dumps({"protocol": "vai.rpc.v1", **message}).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw)


def frames(raw: bytes) -> list[Frame]:
    found = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        length = int(head.removeprefix(b"Content-Length: "))
        found.append(json.loads(rest[:length]))
        raw = rest[length:]
    assert all(each["protocol"] == "vai.rpc.v1" for each in found)
    return found


def converse(folder: Path, *messages: Frame) -> tuple[list[Frame], str]:
    said = b"".join(map(frame, messages))
    done = subprocess.run([folder / "bin/plugin"], input=said, capture_output=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr
    return frames(done.stdout), done.stderr.decode()


def request(op: str, export: str, more: Frame, number: str = "req_1") -> Frame:
    return {
        "type": "request",
        "id": number,
        "op": op,
        "body": {"export_id": export, "context": CONTEXT, **more},
    }


def tool(export: str, given: Frame) -> Frame:
    return request("tool.invoke", export, {"tool_execution_id": "toolx_1", "input": given})


def answer(folder: Path, asked: Frame) -> Frame:
    (hello, *_, response), _ = converse(folder, HELLO, asked, SHUTDOWN)
    assert hello["type"] == "hello" and hello["role"] == "plugin"
    assert (response["type"], response["id"], response["ok"]) == ("response", asked["id"], True)
    body: Frame = response["body"]
    return body


def test_the_example() -> None:
    body = answer(EXAMPLE, tool("greet", {"name": "world"}))
    assert body["status"] == "succeeded"
    assert body["result"]["structured_output"] == {"greeting": "Hello, world!"}
    asked = request("tool.invoke", "greet", {"input": {"name": "world"}, "config": {"greeting": "Good day"}})
    assert answer(EXAMPLE, asked)["result"]["content"] == [{"type": "text", "text": "Good day, world!"}]
    assert answer(EXAMPLE, tool("greet", {"name": " "}))["status"] == "failed"
    assert answer(EXAMPLE, tool("other", {}))["error"]["code"] == "protocol.unknown_export"
    (hello,), _ = converse(EXAMPLE, HELLO)  # it ends with its input
    assert hello["plugin"] == {"package_id": "example/greeter", "version": "0.1.0"}


BLOCK = {"kind": "input", "content": [{"type": "text", "text": "x"}]}
REQUESTS = {
    "tool": tool("search", {"query": "x"}),
    "hook": request(
        "hook.handle", "notify", {"delivery_id": "del_1", "attempt": 1, "event": {"type": "run.completed"}}
    ),
    "compactor": request(
        "compactor.compact",
        "window",
        {"compaction_id": "cmp_1", "source": {"projection": {"transport": "inline", "blocks": [BLOCK]}}},
    ),
    "harness": request("harness.run", "triage", {"mode": "start", "target": {}, "trigger": {"input": []}}),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_each_kind_says_what_it_was_given(kind: str) -> None:
    asked = REQUESTS[kind]
    (hello, response), stderr = converse(DEVKIT, HELLO, asked, SHUTDOWN)
    assert hello["plugin"] == {"package_id": "acme/devkit", "version": "0.1.0"}
    body = response["body"]
    if kind == "hook":
        assert body == {"status": "ack"}
        seen = json.loads(stderr.partition("\n")[0])
    else:
        assert body["status"] == "succeeded"
        seen = {
            "tool": lambda result: result["structured_output"],
            "compactor": lambda result: json.loads(result["summary"]["text"]),
            "harness": lambda result: result["checkpoint"]["data"],
        }[kind](body["result"])
    assert seen["body"] == asked["body"] and seen["served"] == 1 and seen["secrets"] == []
    if kind == "compactor":
        assert body["result"]["seed_blocks"][1:] == [BLOCK]


def test_what_an_input_makes_it_do() -> None:
    said = tool("search", {"do": "progress", "count": 2})
    (_, first, second, response), _ = converse(DEVKIT, HELLO, said, SHUTDOWN)
    assert first == {
        "protocol": "vai.rpc.v1",
        "type": "event",
        "request_id": "req_1",
        "event": {"type": "progress", "message": "step 0"},
    }
    assert second["event"]["message"] == "step 1" and response["body"]["status"] == "succeeded"
    failed = answer(DEVKIT, tool("search", {"do": "fail", "status": "retryable_failure"}))
    assert failed == {
        "status": "retryable_failure",
        "error": {"code": "devkit.asked", "message": "as asked"},
    }
    cancel = {"type": "cancel", "request_id": "req_1", "reason": "user_cancelled"}
    (_, response), _ = converse(DEVKIT, HELLO, tool("search", {"do": "wait"}), cancel, SHUTDOWN)
    assert response["body"]["status"] == "cancelled"
    assert response["body"]["error"]["message"] == "user_cancelled"
