"""A toy plugin: prints its hello, then answers each request. Its argument is a word in its answers."""

import json
import sys

word = sys.argv[1] if len(sys.argv) > 1 else "nothing"
if word == "rude":
    print("this is no hello", flush=True)
print(json.dumps({"hello": "bear"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    did = {"tool": asked["do"], "word": word, "with": asked.get("with"), "binding": asked.get("binding")}
    print(json.dumps({"id": asked["id"], "did": did}), flush=True)
