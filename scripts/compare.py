"""What `runner doctor --attack` finds in other sandboxes, as a table for each user. See scripts/compare."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sandbox.attacks.attacks import ATTACKS
from scripts.benches.caller import RUNNER, Caller, Unable, callers
from scripts.benches.launch import Command
from scripts.benches.machine import version_of
from scripts.benches.peers import NEXO, PEERS, find

PAGE = Path(__file__).parent.parent / "docs/attacks.md"
BEGIN, END = "<!-- made by scripts/compare -->", "<!-- end of what scripts/compare made -->"
OTHERS = (NEXO, "firejail", "sandbox-runtime")
# What many people write by hand.
BY_HAND: tuple[str, ...] = (
    "bwrap",
    "--unshare-all",
    "--die-with-parent",
    "--new-session",
    "--ro-bind",
    "/",
    "/",
)
BY_HAND += ("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--")
GROUPS = list(dict.fromkeys(each.group for each in ATTACKS))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/compare")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/attacks.md")
    parser.add_argument("--install", action="store_true", help="install sandboxes that are missing")
    args = parser.parse_args()
    peers = find(args.install, tuple(each for each in PEERS if each.name in OTHERS))
    lines = [BEGIN]
    with callers() as everybody:
        for caller in everybody:
            lines += [
                "",
                f"As {'root' if caller.uid == 0 else 'an ordinary user'}:",
                "",
                *table(caller, peers),
            ]
    versions = [("bubblewrap", version_of(["bwrap", "--version"])), *peers.versions]
    told = ", ".join(f"{name} {version.split()[-1]}" for name, version in versions)
    lines += ["", f"{told}; Linux {platform.release()} on {platform.machine()}.", END]
    text = "\n".join(lines)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + text + rest.partition(END)[2])
    else:
        print(text)
    return 0


def table(caller: Caller, peers: Any) -> Iterator[str]:
    """One row for each sandbox: attacks held, of those that count there."""
    yield f"| | {' | '.join(GROUPS)} | all |"
    yield f"|---|{'---|' * (len(GROUPS) + 1)}"
    rows: list[tuple[str, Sequence[str]]] = [("no sandbox", ["--against", "env"])]
    rows.append(("bwrap, host's files read-only", ["--against", *BY_HAND]))
    for peer in peers.peers:
        try:
            line = [*peer.command(caller, Command(["bwrap"], {})).argv]
        except Unable as fault:
            yield f"| {peer.name} | not tried: {fault} |"
            continue
        line.remove("/usr/bin/true")
        rows.append((peer.name, ["--against", *line]))
    rows += [("runner, default policy", []), ("runner, strict policy", ["--policy", "strict"])]
    for name, words in rows:
        yield f"| {name} | {' | '.join(cells(caller, words))} |"
    yield from (f"| {sentence} |" for sentence in peers.missing)


def cells(caller: Caller, words: Sequence[str]) -> list[str]:
    print(f"compare: {caller.name}: {' '.join(words)[:100]}", file=sys.stderr)
    line = [RUNNER, "doctor", "--attack", "--format", "json", *words]
    with caller.start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate()
    if not out:
        said = err.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        return [f"not tried: {': '.join(said[0].split(': ')[1:3])}"]
    rows = json.loads(out)["rows"]
    counted = [[row for row in rows if row["class"] == group] for group in GROUPS]
    return [cell(each) for each in [*counted, rows]]


def cell(rows: Sequence[dict[str, str]]) -> str:
    held = sum(row["verdict"] == "held" for row in rows)
    count = held + sum(row["verdict"] == "not_held" for row in rows)
    return f"{held} of {count}" if count else "–"


if __name__ == "__main__":
    sys.exit(main())
