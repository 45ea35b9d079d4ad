"""Sessions of a host with ten servers each: with a gateway of its own each, and as clients of one hub."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.benches.call import memory, pss
from scripts.benches.caller import Caller
from scripts.benches.gateway import EXAMPLE, Conversation, conversation
from scripts.benches.rows import Against, Row, Table

SESSIONS, SERVERS = 5, 10
_OWN, _CLIENTS, _SHARED = "a gateway each", "one hub, servers not shared", "one hub, servers shared"
_THIN = "of that a client of the hub"


def bench(caller: Caller, starts: int) -> list[Table]:
    """`starts`: how often each is started."""
    sizes: dict[str, list[float]] = {name: [] for name in (_OWN, _CLIENTS, _SHARED, _THIN)}
    times: dict[str, list[float]] = {name: [] for name in (_OWN, _CLIENTS, _SHARED)}
    lasts: dict[str, list[float]] = {name: [] for name in (_OWN, _CLIENTS, _SHARED)}
    for _ in range(starts):
        for name in (_OWN, _CLIENTS, _SHARED):
            with ExitStack() as stack:
                config = _servers(caller, name)
                hub = None if name == _OWN else stack.enter_context(_hub(caller))
                via = () if hub is None else ("--via", str(hub))
                began = time.perf_counter()
                opened: list[Conversation] = []
                for _ in range(SESSIONS):
                    last = time.perf_counter()
                    opened.append(
                        stack.enter_context(conversation(caller, "gateway", *via, "--config", config))
                    )
                    opened[-1].begin()
                    for number in range(SERVERS):
                        given = {"name": f"s{number}__greet", "arguments": {"name": "you"}}
                        opened[-1].ask("tools/call", given)
                times[name].append(1e3 * (time.perf_counter() - began))
                lasts[name].append(1e3 * (time.perf_counter() - last))
                if hub is None:
                    whole = sum(sum(memory(each.pid).values()) for each in opened)
                else:  # which is a child of the client that started it
                    clients = [pss(each.pid) for each in opened]
                    whole = sum(memory(_pid(hub)).values()) + sum(clients)
                    sizes[_THIN] += [clients[-1] / 1024] if name == _SHARED else []
                sizes[name].append(whole / 1024)
    over = (Against(_OWN, (_OWN,)),)
    title = f"{SESSIONS} sessions of a host with {SERVERS} servers each"
    held = [Row(name, "MB", each, () if name in (_OWN, _THIN) else over) for name, each in sizes.items()]
    ready = [Row(name, "ms", each, () if name == _OWN else over) for name, each in times.items()]
    ready += [Row(f"the last session: {name}", "ms", each) for name, each in lasts.items()]
    about = "everything together, also the servers; a page that several processes share is divided (PSS)"
    return [
        Table("gateway", f"memory of {title}", caller.name, about, held),
        Table(
            "gateway",
            f"the start of {title}",
            caller.name,
            "until each server of each has answered a call",
            ready,
        ),
    ]


def _servers(caller: Caller, name: str) -> str:
    folder = "shared" if name == _SHARED else "alone"
    entry = {"command": "./server.py", "x-sandbox": {"shared": name == _SHARED}}
    os.chmod(caller.write(f"{folder}/server.py", (EXAMPLE / "server.py").read_text()), 0o755)
    document = {"mcpServers": {f"s{number}": entry for number in range(SERVERS)}}
    return caller.write(f"{folder}/mcp.json", json.dumps(document))


@contextmanager
def _hub(caller: Caller) -> Iterator[Path]:
    folder = Path(caller.own("hub"))
    folder.chmod(0o700)
    path = folder / "hub.sock"
    try:
        yield path
    finally:
        os.kill(_pid(path), signal.SIGTERM)
        with open(f"{path}.hub", "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)


def _pid(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        found: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return found
