"""Becomes the broker: `python -m tests.sandbox.broker.broker_host CHANNEL READY CHAIN CHAIN_W ALIVE UID`. The
plan and the values come as JSON on stdin."""

from __future__ import annotations

import json
import os
import sys

from sandbox.broker import tls
from sandbox.broker.authority import run_authority
from sandbox.broker.broker import run_broker
from sandbox.network.credentials import BrokerPlan, Credential, HiddenValue, HostAuthorities
from sandbox.network.rules import parse_rule
from sandbox.plan.brokered import hosts_of

if __name__ == "__main__":
    channel, ready, chain, chain_w, alive, uid = map(int, sys.argv[1:])
    given = json.loads(sys.stdin.read())
    plan = BrokerPlan(
        tuple(Credential(name, tuple(hosts), tuple(where)) for name, hosts, where in given["credentials"]),
        tuple(given["requests"]),
        tuple(HostAuthorities((host,), (file,)) for host, file in given["authorities"].items()),
    )
    tls.__dict__["AUTHORITIES"] = (given["system"],)
    hidden = [
        HiddenValue(name, *(text.encode("latin-1") for text in texts)) for name, *texts in given["hidden"]
    ]
    if os.fork() == 0:
        run_authority(hosts_of([parse_rule(rule) for rule in plan.hosts]), ready, chain_w)
        os._exit(0)
    for fd in (ready, chain_w):
        os.close(fd)
    run_broker(channel, plan, hidden, chain, alive, (uid, uid) if uid >= 0 else None)
