#!/usr/bin/python3 -I
"""The canaries of ainb's conformance axes. The name of the executable says which one it is: a01, a02, …

It has the manners of the contract's Rust SDK. One task reads stdin. Each request runs in a task of its own,
behind one lock. A notification is handled by the reading task itself, which takes the same lock: while a
request holds it, nothing more is read, and so no answer of the host is. It exits when stdin is closed.
"""

import base64
import json
import os
import sys
import threading
import time

NAME, VERSION = os.path.basename(sys.argv[0]), "0.0.1"
SYMBOLS = {"a03": "M", "a09": "L"}
# Bytes of each write, with a pause between: the host gets a frame in many pieces.
PIECE = 7 if NAME == "a02split" else 0


class Refused(Exception):
    """The answer to a request is an error: code and message."""


class Sdk:
    def __init__(self):
        self.lock = threading.Lock()  # of requests and notifications
        self.writing = threading.Lock()
        self.asked = {}  # id -> (event, answer)
        self.plugin = Canary(self)

    def run(self):
        while (message := self.receive()) is not None:
            if "method" not in message:
                arrived, box = self.asked.pop(message["id"])
                box.append(message)
                arrived.set()
            elif message.get("id") is None:
                with self.lock:
                    self.plugin.tell(message["method"], message["params"])
            else:
                threading.Thread(target=self.answer, args=(message,), daemon=True).start()

    def receive(self):
        length = 0
        while (line := sys.stdin.buffer.readline()) not in (b"\r\n", b""):
            length = int(line.partition(b":")[2])
        return json.loads(sys.stdin.buffer.read(length)) if line else None

    def answer(self, message):
        with self.lock:
            try:
                result = self.plugin.do(message["method"], message["params"])
                self.send({"id": message["id"], "result": result})
            except Refused as refused:
                code, text = refused.args
                self.send({"id": message["id"], "error": {"code": code, "message": text}})

    def ask(self, method, params):
        """The host's answer: {"result": …} or {"error": …}."""
        number = len(self.asked) + 1
        arrived, box = self.asked[number] = threading.Event(), []
        self.send({"id": number, "method": method, "params": params})
        arrived.wait()
        return {key: value for key, value in box[0].items() if key in ("result", "error")}

    def send(self, message):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def write(self, data):
        with self.writing:
            for start in range(0, len(data), PIECE or len(data)):
                sys.stdout.buffer.write(data[start : start + (PIECE or len(data))])
                sys.stdout.buffer.flush()


class Canary:
    def __init__(self, sdk):
        self.sdk = sdk
        self.told = []  # what it was told, in order
        self.pause = 0.0  # seconds that each event takes

    # --- requests -------------------------------------------------------------------------------------------

    def do(self, method, params):
        if method == "plugin/init":
            return self.init(params)
        if method == "plugin/render":
            return self.render(**params["viewport"])
        if method == "plugin/cli_dispatch":
            stdout = self.run(*params["argv"])
            return {"stdout": encode(stdout.encode()), "stderr": "", "exit_code": 0}
        if method == "host/action/invoke":
            return {"payload": encode(self.act(base64.b64decode(params["payload"])))}
        if method == "plugin/shutdown":
            return {}
        raise Refused(-32601, f"method not found: {method}")

    def init(self, params):
        self.params = params
        if NAME == "a06":
            self.publish("cts.a06", b"a06-payload")
        elif NAME in ("a07", "chunks"):
            self.sdk.ask("host/snapshot/subscribe", {"topic": "cts.a07"})
            # A second question, as burndown has: an event in between must not reach the reading task.
            self.sdk.ask("host/snapshot/subscribe", {"topic": "cts.chunks"})
        elif NAME == "a09":
            for level in ("trace", "debug", "info", "warn", "error"):
                self.sdk.send({"method": "host/log", "params": {"level": level, "message": f"at {level}"}})
        if NAME == "a01text":  # as the contract's text has it
            about = {"name": NAME, "version": VERSION, "abi_version": 2}
            return {"manifest": {"plugin": about, "capabilities": {"event_bus": True}}, "abi_version": 2}
        return {"name": NAME, "version": VERSION}

    def act(self, payload):
        """What an action of its own does: [METHOD, PARAMS] in JSON asks the host, other bytes are turned."""
        if payload == b"hang":
            time.sleep(3600)
        if payload.startswith(b"["):
            return json.dumps(self.sdk.ask(*json.loads(payload))).encode()
        return payload[::-1]

    def render(self, width, height):
        def symbol(x, y):
            if NAME.startswith("a02"):
                return str((x + y) % 10)
            return chr(ord("A") + (x + y) % 26) if NAME == "a05" else SYMBOLS.get(NAME, "A")

        whole = NAME[:3] in ("a02", "a05")
        places = [(x, y) for y in range(height) for x in range(width)][: None if whole else 1]
        cells = [[{"x": x, "y": y}, {"symbol": symbol(x, y), "modifier": 0}] for x, y in places]
        return {"buffer": {"width": width, "height": height, "cells": cells}}

    def run(self, word="", *argv):
        """What a cli namespace does: the words after it."""
        if word == "test":
            return "hello\n"
        if word == "fail":
            raise Refused(int(argv[0]), "as it was told")
        if word == "slow":
            time.sleep(3600)
        if word == "ask":  # METHOD PARAMS: an answer of the host
            return json.dumps(self.sdk.ask(argv[0], json.loads(argv[1])))
        if word == "publish":  # TOPIC COUNT BYTES: chunks, back to back
            for number in range(int(argv[1])):
                self.publish(argv[0], b"%d:" % number + bytes(int(argv[2])))
        if word == "write":  # raw bytes instead of an answer
            self.sdk.write(base64.b64decode(argv[0]))
            time.sleep(3600)
        if word == "cat":  # PATH, as it is in the cage
            try:
                with open(os.path.expanduser(argv[0])) as file:
                    return file.read()
            except OSError as error:
                return error.strerror
        if word == "save":  # PATH TEXT
            try:
                path = os.path.expanduser(argv[0])
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as file:
                    file.write(argv[1])
            except OSError as error:
                return error.strerror
        if word == "pause":  # SECONDS
            self.pause = float(argv[0])
        if word == "told":
            return json.dumps(self.told)
        if word == "init":
            return json.dumps(self.params)
        return ""

    # --- notifications --------------------------------------------------------------------------------------

    def tell(self, method, params):
        if method == "plugin/handle_event":
            payload = base64.b64decode(params["payload"])
            time.sleep(self.pause)
            self.told.append([params["topic"], payload.rstrip(b"\0").decode()])
        else:
            self.told.append([method, params])

    def publish(self, topic, payload):
        params = {"topic": topic, "payload": encode(payload)}
        self.sdk.send({"method": "host/snapshot/publish", "params": params})


def encode(data):
    return base64.b64encode(data).decode()


Sdk().run()
