"""`runner gateway --via SOCKET`, and `--shared`: the entry of a host is a thin client. Imports little."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from runner.outcome import USAGE_ERROR

IDLE = "10m"  # without a call, a plugin ends; without a client, the hub


def is_thin(words: Sequence[str]) -> bool:
    """Whether a command line of `runner gateway` is that of a client of a hub."""
    return any(word in ("--via", "--shared") or word.startswith("--via=") for word in words)


def gateway_via(words: Sequence[str]) -> int:
    """Returns the exit status. The hub reads all other options."""
    from runner.gateway.via import default_hub, run_via

    given: dict[str, str] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--via", "--idle"):
            given[name] = value if equals else left.pop(0) if left else ""
        elif word != "--shared":
            rest.append(word)
    path = given["--via"] if "--via" in given else default_hub(os.environ)
    if not path or given.get("--idle") == "":
        sys.stderr.write("runner gateway: --via takes the path of a socket, and --idle a time, such as 10m\n")
        return USAGE_ERROR
    path = os.path.abspath(path)
    start = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(words) - 1]]
    hub = ("gateway", "--listen", path, "--idle", given.get("--idle", IDLE))
    return run_via(path, rest, [*start, *hub])
