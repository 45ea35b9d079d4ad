#!/usr/bin/python3
"""Every method of the contract, without an SDK, so that no fault of an SDK hides one of ours."""

import json
import sys
import threading
import time

ANY = {"type": "object"}
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
SECONDS = {"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]}

TOOLS = {
    "bare_echo": ("Gives its arguments back.", TEXT),
    "bare_fail": ("Fails with the code, message and data it is told.", ANY),
    "bare_slow": ("Answers after so many seconds.", SECONDS),
    "bare_publish": ("Sends its arguments as the params of broker.publish.", ANY),
    "bare_recall": ("Asks the host with memory.recall; gives back what comes.", ANY),
    "bare_complete": ("Asks the host with llm.complete; gives back what comes, and the deltas.", ANY),
    "bare_seen": ("What was delivered so far: events, configuration, channels.", ANY),
    "bare_print": ("Prints a line that is not the protocol.", TEXT),
}


class Fault(Exception):
    def __init__(self, code, message, data=None):
        super().__init__(message)
        self.error = {"code": code, "message": message}
        if data is not None:
            self.error["data"] = data


class Plugin:
    def __init__(self):
        self.lock = threading.Lock()
        self.number = 0
        self.waiting = {}  # our id -> (event, box)
        self.seen = {"events": [], "config": None, "channels": []}
        self.vectors = {}
        self.at_work = set()

    # --- the wire

    def write(self, message):
        line = json.dumps({"jsonrpc": "2.0", **message}) + "\n"
        with self.lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    def ask(self, method, params):
        """Send a request to the host. Returns the whole response and the deltas before it."""
        with self.lock:
            self.number += 1
            number = self.number
        box = {"deltas": []}
        done = threading.Event()
        self.waiting[number] = (done, box)
        self.write({"id": number, "method": method, "params": params})
        if not done.wait(30):
            raise Fault(-33403, method + " was not answered")
        return box

    def run(self):
        for line in sys.stdin:
            message = json.loads(line)
            method = message.get("method")
            if method is None:
                done, box = self.waiting.pop(message["id"], (None, None))
                if done is not None:
                    box.update({key: message[key] for key in ("result", "error") if key in message})
                    done.set()
            elif method == "llm.complete.delta":
                self.waiting[message["params"]["request_id"]][1]["deltas"].append(message["params"]["chunk"])
            elif method == "broker.event":
                self.on_event(**message["params"])
            elif method == "shutdown":
                for thread in list(self.at_work):
                    thread.join(1)
                self.write({"id": message["id"], "result": {"ok": True}})
                return
            elif "id" in message:
                thread = threading.Thread(target=self.answer, args=(message,), daemon=True)
                self.at_work.add(thread)
                thread.start()

    def answer(self, message):
        handler = getattr(self, "do_" + message["method"].replace(".", "_"), None)
        try:
            if handler is None:
                raise Fault(-32601, "method not found")
            self.write({"id": message["id"], "result": handler(message["id"], message.get("params") or {})})
        except Fault as fault:
            self.write({"id": message["id"], "error": fault.error})
        finally:
            self.at_work.discard(threading.current_thread())

    # --- methods

    def do_initialize(self, number, params):
        self.seen["nexo_version"] = params.get("nexo_version")
        tools = [
            {"name": name, "description": description, "input_schema": schema}
            for name, (description, schema) in TOOLS.items()
        ]
        manifest = {"plugin": {"id": "bare", "version": "1.0.0", "name": "Bare"}}
        return {"manifest": manifest, "server_version": "bare-1.0.0", "tools": tools}

    def do_plugin_configure(self, number, params):
        self.seen["config"] = params["value"]
        return {"ok": True}

    def do_tool_invoke(self, number, params):
        name, args = params["tool_name"], params["args"]
        if name == "bare_echo":
            return {"content": [{"type": "text", "text": args["text"]}], "is_error": False, "params": params}
        if name == "bare_fail":
            raise Fault(args.get("code", -33403), args.get("message", "as told"), args.get("data"))
        if name == "bare_slow":
            time.sleep(args["seconds"])
            return {"slept": args["seconds"]}
        if name == "bare_publish":
            self.write({"method": "broker.publish", "params": args})
            return {"sent": True}
        if name == "bare_recall":
            return self.ask("memory.recall", args)
        if name == "bare_complete":
            return self.ask("llm.complete", args)
        if name == "bare_seen":
            return self.seen
        if name == "bare_print":
            with self.lock:
                sys.stdout.write(args["text"] + "\n")
                sys.stdout.flush()
            return {"printed": True}
        raise Fault(-33401, "no such tool")

    def do_outbound_tool_invoke(self, number, params):
        return {"outbound": params["args"]["text"]}

    def do_hook_on_hook(self, number, params):
        event = params["event"]
        if "sleep" in event:
            time.sleep(event["sleep"])
        if event.get("fail"):
            raise Fault(-32603, "the hook fell over")
        if event.get("nonsense"):
            return {"abort": "perhaps"}
        if "secret" in event.get("body", ""):
            return {"abort": True, "reason": "a secret", "decision": "block"}
        return {}

    def do_channel_start(self, number, params):
        self.seen["channels"].append(params)
        return {"ok": True}

    do_channel_stop = do_channel_start

    def do_channel_send_outbound(self, number, params):
        if params["msg"].get("to") == "nobody":
            raise Fault(-33003, "cannot deliver", {"recipient": "nobody", "reason": "not known"})
        return {"message_id": "m-1", "sent_at_unix": 1741032000}

    def do_llm_chat(self, number, params):
        words = params["request"]["messages"][-1]["content"].split()
        if params["stream"]:
            for word in words:
                chunk = {"type": "text_delta", "delta": word}
                self.write({"method": "llm.chat.delta", "params": {"request_id": number, "chunk": chunk}})
        text = "" if params["stream"] else " ".join(words)
        return {
            "content": {"type": "text", "text": text},
            "usage": {"prompt_tokens": len(words), "completion_tokens": len(words)},
            "finish_reason": {"kind": "stop"},
        }

    def do_memory_vector_upsert(self, number, params):
        shelf = self.vectors.setdefault(params["collection"], {})
        shelf.update({record["id"]: record for record in params["records"]})
        return {"count": len(params["records"])}

    def do_memory_vector_search(self, number, params):
        if params["collection"] not in self.vectors:
            raise Fault(-33301, "no such collection", {"collection": params["collection"]})
        wanted = params["query"]["embedding"]
        for record in self.vectors[params["collection"]].values():
            if len(record["embedding"]) != len(wanted):
                sizes = {"expected": len(record["embedding"]), "got": len(wanted)}
                raise Fault(-33302, "dimension mismatch", sizes)
        found = [
            {
                "id": record["id"],
                "content": record["content"],
                "score": sum(a * b for a, b in zip(wanted, record["embedding"], strict=True)),
                "metadata": record.get("metadata"),
            }
            for record in self.vectors[params["collection"]].values()
        ]
        found.sort(key=lambda match: -match["score"])
        return {"matches": found[: params["query"].get("limit", 10)]}

    def do_memory_vector_delete(self, number, params):
        shelf = self.vectors.get(params["collection"], {})
        return {"count": sum(shelf.pop(key, None) is not None for key in params["ids"])}

    def on_event(self, topic, event):
        self.seen["events"].append(event)
        reply = {"topic": "plugin.inbound.bare", "source": "bare", "payload": {"echo": event["payload"]}}
        self.write({"method": "broker.publish", "params": {"topic": "plugin.inbound.bare", "event": reply}})


if __name__ == "__main__":
    Plugin().run()
