"""Measure what launches, kills, calls, sessions and networks cost, as root and as an ordinary user.

Alternatives that are compared are interleaved in one run, because a machine's speed changes over minutes.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys

from scripts.benches import call, kill, launch, network
from scripts.benches.caller import Unable, callers

LAUNCHES = 60
KILLS = 100  # the fewest that have a 99th percentile
BOMBS = 20
CALLS = 2000
COLDS = 30
LARGES = 30
SESSIONS = 64
CONNECTIONS = 1000
DOWNLOADS = 20

PARTS = ("launch", "kill", "call", "sessions", "network")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="|".join(PARTS), help="what to measure; everything by default"
    )
    parser.add_argument("--launches", type=_count, default=LAUNCHES, help=f"of each kind ({LAUNCHES})")
    parser.add_argument("--kills", type=_count, default=KILLS, help=f"of an idle plugin ({KILLS})")
    parser.add_argument("--bombs", type=_count, default=BOMBS, help=f"kills of a fork bomb ({BOMBS})")
    parser.add_argument("--calls", type=_count, default=CALLS, help=f"over an open session ({CALLS})")
    parser.add_argument("--colds", type=_count, default=COLDS, help=f"calls that start the plugin ({COLDS})")
    parser.add_argument("--larges", type=_count, default=LARGES, help=f"answers of 4 MiB ({LARGES})")
    parser.add_argument("--sessions", type=_count, default=SESSIONS, help=f"at once ({SESSIONS})")
    parser.add_argument(
        "--connections", type=_count, default=CONNECTIONS, help=f"to a server ({CONNECTIONS})"
    )
    parser.add_argument("--downloads", type=_count, default=DOWNLOADS, help=f"of 256 MiB ({DOWNLOADS})")
    args = parser.parse_args()
    parts = args.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    print(
        f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}, "
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
    )
    os.closerange(3, 1024)  # a descriptor that a shell left open could have the number that bwrap needs
    try:
        with callers() as found:
            for caller in found:
                if "launch" in parts:
                    launch.bench(caller, args.launches)
                if "kill" in parts:
                    kill.bench(caller, args.kills, args.bombs)
                if "call" in parts:
                    call.bench(caller, args.calls, args.colds, args.larges)
                if "sessions" in parts:
                    call.bench_many(caller, args.sessions)
                if "network" in parts:
                    network.bench(caller, args.launches, args.connections, args.downloads)
    except Unable as fault:
        print(f"bench: {fault}", file=sys.stderr)
        return 1
    return 0


def _count(word: str) -> int:
    number = int(word)
    if number < 2:
        raise argparse.ArgumentTypeError("at least 2 samples are needed")
    return number


if __name__ == "__main__":
    sys.exit(main())
