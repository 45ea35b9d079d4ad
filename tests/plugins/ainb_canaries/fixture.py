#!/usr/bin/python3 -I
"""A plugin without the SDK, as the contract's own fixture is: one task, and manners of its own.

It publishes before plugin/init arrives, and exits on plugin/shutdown without an answer.
"""

import base64
import json
import os
import sys

NAME = os.path.basename(sys.argv[0])


def send(**message):
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    sys.stdout.buffer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    sys.stdout.buffer.flush()


def receive():
    length = 0
    while (line := sys.stdin.buffer.readline()) not in (b"\r\n", b""):
        length = int(line.partition(b":")[2])
    return json.loads(sys.stdin.buffer.read(length)) if line else None


send(
    method="host/snapshot/publish",
    params={"topic": "cts.early", "payload": base64.b64encode(b"early").decode()},
)
while (message := receive()) is not None and message.get("method") != "plugin/shutdown":
    if message.get("id") is None or "method" not in message:
        continue
    method, params = message["method"], message["params"]
    if method == "plugin/init":
        send(id=message["id"], result={"name": NAME, "version": "0.0.1"})
    elif method == "host/action/invoke" and params["action"] == "fast":
        send(
            id=message["id"],
            result={"payload": base64.b64encode(base64.b64decode(params["payload"])[::-1]).decode()},
        )
    elif method != "host/action/invoke":  # the action `slow` gets no answer
        send(id=message["id"], error={"code": -32601, "message": f"method not found: {method}"})
