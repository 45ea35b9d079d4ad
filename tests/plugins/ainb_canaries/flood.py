#!/usr/bin/python3 -I
"""A plugin that publishes more than anybody should keep, and asks for more than it ever reads."""

import base64
import json
import os
import signal
import sys

TOPICS = 90
BYTES = 1 << 20
QUESTIONS = 30


def say(**message):
    raw = json.dumps({"jsonrpc": "2.0", **message}).encode()
    sys.stdout.buffer.write(b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw))
    sys.stdout.buffer.flush()


def hear():
    header = sys.stdin.buffer.readline()
    if not header:
        sys.exit(0)
    sys.stdin.buffer.readline()
    return json.loads(sys.stdin.buffer.read(int(header.split(b":")[1])))


def answer(number, text):
    stdout = base64.b64encode(text.encode()).decode()
    say(id=number, result={"stdout": stdout, "stderr": "", "exit_code": 0})


while True:
    asked = hear()
    method = asked.get("method")
    if method == "plugin/init":
        say(id=asked["id"], result={"name": os.path.basename(sys.argv[0]), "version": "0.0.1"})
    elif method == "plugin/shutdown":
        say(id=asked["id"], result={})
    elif method == "plugin/cli_dispatch":
        what = asked["params"]["argv"][0]
        if what == "publish":
            payload = base64.b64encode(bytes(BYTES)).decode()
            for topic in range(TOPICS):
                say(method="host/snapshot/publish", params={"topic": f"t{topic}", "payload": payload})
            answer(asked["id"], "published")
        elif what == "ask":
            answer(asked["id"], "asked")
            for number in range(QUESTIONS):
                say(id=number, method="host/action/invoke", params={"action": "large", "payload": ""})
            signal.pause()  # it reads none of the answers
