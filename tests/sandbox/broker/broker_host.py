"""Becomes the broker: `python -m tests.sandbox.broker.broker_host CHANNEL READY ALIVE UID`. The plan and the
values come as JSON on stdin."""

from __future__ import annotations

import json
import sys

from sandbox.broker.broker import run_broker
from sandbox.network.credentials import BrokerPlan, Credential, HiddenValue

if __name__ == "__main__":
    channel, ready, alive, uid = map(int, sys.argv[1:])
    given = json.loads(sys.stdin.read())
    plan = BrokerPlan(
        tuple(Credential(name, tuple(hosts), tuple(where)) for name, hosts, where in given["credentials"]),
        tuple(given["requests"]),
        tuple(given["authorities"]),
    )
    hidden = [
        HiddenValue(name, *(text.encode("latin-1") for text in texts)) for name, *texts in given["hidden"]
    ]
    run_broker(channel, plan, hidden, ready, alive, (uid, uid) if uid >= 0 else None)
