"""What a hidden credential costs: at the launch, for each request, for each byte and in memory.

The same client speaks TLS with the same server, through the gate alone and with the broker behind it, by
turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import policies
from scripts.benches import launch
from scripts.benches.caller import RUNNER, Caller, Unable
from scripts.benches.launch import Command
from scripts.benches.network import NAME, SERVER, WARM_UP, Client, client, private_bytes
from scripts.benches.rows import PER_SECOND, Against, Row, Table
from scripts.internet.machine import Internet, make_internet

if TYPE_CHECKING:
    from trustme import CA

GATE, HIDDEN = "one host", "one host, with a hidden credential"
OVER_GATE = Against("one host", (GATE,))
BLOCK = 50  # requests of one turn
DOWNLOAD_BYTES = 32 << 20
VALUE = "ghp_0123456789abcdefghijABCDEFGHIJ012345"

# Obeys lines on stdin: `ask N` makes N small requests on one open connection, `download N` N large ones.
CLIENT = """\
import http.client, json, os, ssl, sys, time
context = ssl._create_unverified_context()
headers = {"X-Token": os.environ["TOKEN"]}
line = http.client.HTTPSConnection(sys.argv[1], 443, timeout=60, context=context)
for order in sys.stdin:
    word, count = order.split()
    taken = []
    for _ in range(int(count)):
        start = time.perf_counter()
        line.request("GET", "/big" if word == "download" else "/small", headers=headers)
        line.getresponse().read()
        taken.append(time.perf_counter() - start)
    print(json.dumps(taken), flush=True)
"""


def bench(caller: Caller, launches: int, requests: int, downloads: int) -> list[Table]:
    import trustme  # with the tools for development: only this part needs it

    authority = trustme.CA()
    own = caller.write("authority.pem", authority.cert_pem.bytes().decode())
    commands = {
        name: Command(_exec(caller, own, f"launch-{number}", hides, "/usr/bin/true"), {})
        for number, (name, hides) in enumerate({GATE: False, HIDDEN: True}.items())
    }
    for command in commands.values():
        caller.output_of(command.argv)  # fills the caches
    taken = launch.interleave(caller, commands, launches)
    about = f"{launches} launches of /usr/bin/true each, interleaved"
    tables = launch.tables(
        "credentials", "launch with a credential", caller, about, taken, {GATE: (), HIDDEN: (OVER_GATE,)}
    )
    if os.geteuid() != 0:
        note = "requests are not measured: only root can make the namespaces of their servers"
        return [tables[0]._replace(notes=(*tables[0].notes, note)), *tables[1:]]
    with _internet(caller, authority) as internet:
        return tables + _bench_requests(caller, own, internet, requests, downloads)


def _bench_requests(
    caller: Caller, own: str, internet: Internet, requests: int, downloads: int
) -> list[Table]:
    script = caller.write("client/client.py", CLIENT)
    python = ["/usr/bin/python3", "-I", script, NAME]
    with (
        client(caller, internet, _exec(caller, own, "plain", False, *python)) as plain,
        client(caller, internet, _exec(caller, own, "hides", True, *python)) as hides,
    ):
        clients = {GATE: plain, HIDDEN: hides}
        asked = _by_turns(clients, "ask", BLOCK, -(-requests // BLOCK))
        memory = max(map(private_bytes, _beside(hides.pid)))
        loaded = _by_turns(clients, "download", 1, downloads)
    times = {name: [each * 1e6 for each in taken] for name, taken in asked.items()}
    size = DOWNLOAD_BYTES >> 20
    rates = {name: [size / each for each in taken] for name, taken in loaded.items()}
    unit = f"MiB {PER_SECOND}"
    return [
        Table(
            "credentials",
            "requests",
            caller.name,
            f"{len(times[GATE])} each on one connection with TLS, by turns",
            [Row(GATE, "µs", times[GATE]), Row(HIDDEN, "µs", times[HIDDEN], (OVER_GATE,))],
        ),
        Table(
            "credentials",
            "download",
            caller.name,
            f"{len(rates[GATE])} answers of {size} MiB each with TLS, by turns",
            [Row(GATE, unit, rates[GATE]), Row(HIDDEN, unit, rates[HIDDEN], (OVER_GATE,))],
        ),
        Table(
            "credentials",
            "memory of the broker",
            caller.name,
            "what is private to its process, after the requests",
            [Row("the broker", "kB", [memory / 1024])],
        ),
    ]


def _by_turns(clients: dict[str, Client], word: str, count: int, rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in clients}
    for turn in range(WARM_UP + rounds):
        for name in clients if turn % 2 else reversed(clients):
            seconds = clients[name].ask(word, count)
            if turn >= WARM_UP:
                taken[name] += seconds
    return taken


def _beside(pid: int) -> list[int]:
    """The gate and the broker: the forks of `runner exec`."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(each) for each in children if Path(f"/proc/{each}/cmdline").read_bytes() == words]
    if not found:
        raise Unable(f"the broker is not among the children of {pid}: {children}")
    return found


def _exec(caller: Caller, authority: str, folder: str, hides: bool, *command: str) -> list[str]:
    text = (Path(policies.__file__).parent / "default.toml").read_text()
    changed = text.replace('ceiling = "none"\nhosts = []', 'ceiling = "allowlist"\nhosts = ["*:443"]')
    changed = changed.replace('ceiling = ["LANG",', 'ceiling = ["TOKEN", "LANG",')
    changed += f'\n[credentials.TOKEN]\nhosts = ["{NAME}:443"]\nauthorities = ["{authority}"]\n'
    changed += f'from = "file:{caller.write("token", VALUE)}"\n'
    asked = {"network": [f"{NAME}:443"], **({"hide": [f"TOKEN@{NAME}"]} if hides else {})}
    own = {} if hides else {"env": {"TOKEN": VALUE}}
    entry = {"command": command[0], "args": list(command[1:]), "x-sandbox": asked, **own}
    manifest = caller.write(f"{folder}/mcp.json", json.dumps({"mcpServers": {"bench": entry}}))
    return [RUNNER, "exec", "--policy", caller.write("policies/credentials.toml", changed), manifest]


@contextmanager
def _internet(caller: Caller, authority: CA) -> Iterator[Internet]:
    folder = Path(caller.folder, "internet")
    folder.mkdir(exist_ok=True)
    certificate = authority.issue_cert(NAME)
    certificate.cert_chain_pems[0].write_to_path(str(folder / "chain.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    answers = {f"{NAME}/big": "x" * DOWNLOAD_BYTES, f"{NAME}/small": "x" * 200}
    (folder / "answers.json").write_text(json.dumps(answers))
    tls = {"certificate": folder / "chain.pem", "key": folder / "key.pem", "answers": folder / "answers.json"}
    places = {name: str(path) for name, path in tls.items()}
    servers = [("tls", SERVER, 443)]
    with make_internet(folder, [f"{SERVER}/16"], {NAME: {"A": [SERVER]}}, servers, places) as internet:
        yield internet
