"""What `runner learn` adds to the start of a server: each call that names a file waits for the observer."""

from __future__ import annotations

import subprocess
import time

from scripts.benches.caller import RUNNER, Caller, failed
from scripts.benches.rows import Against, Row, Table

# What a server in Python imports before it answers: some 600 calls that name a file.
SERVER = """
import asyncio, ctypes, email, http.client, json, logging, sqlite3, ssl, urllib.request, xml.dom
print("ready", flush=True)
input()
"""


def bench(caller: Caller, rounds: int) -> list[Table]:
    verbs = {"runner run": ("run",), "runner learn": ("learn", "--emit", "options")}
    taken: dict[str, list[float]] = {name: [] for name in verbs}
    for _ in range(rounds):
        for name, words in verbs.items():
            taken[name].append(start(caller, [RUNNER, *words, "--", "/usr/bin/python3", "-c", SERVER]))
    rows = [
        Row("runner run", "ms", taken["runner run"]),
        Row("runner learn", "ms", taken["runner learn"], (Against("runner run", ("runner run",)),)),
    ]
    about = f"from the command to the first line of a Python server, {rounds} starts each, interleaved"
    return [Table("learn", "a start under observation", caller.name, about, rows)]


def start(caller: Caller, argv: list[str]) -> float:
    """Start a server and wait until it is ready. Returns milliseconds."""
    began = time.monotonic()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with caller.start(argv, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        taken = time.monotonic() - began
        _, errors = process.communicate(b"\n")
    if line != b"ready\n" or process.returncode:
        raise failed(argv, process.returncode, errors)
    return taken * 1000
