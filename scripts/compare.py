"""What `runner doctor --attack` finds in other sandboxes, as a table for each user. See scripts/compare."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sandbox.attacks.attacks import ATTACKS
from scripts.benches.caller import RUNNER, Caller, callers
from scripts.benches.launch import Command
from scripts.benches.machine import version_of
from scripts.benches.peers import NEXO, PEERS, FoundPeers, find

ROOT = Path(__file__).parent.parent
DOCS, README = ROOT / "docs/attacks.md", ROOT / "README.md"
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
    parser.add_argument("--write", action="store_true", help="write the tables into docs and README.md")
    parser.add_argument("--install", action="store_true", help="install sandboxes that are missing")
    args = parser.parse_args()
    peers = find(args.install, tuple(each for each in PEERS if each.name in OTHERS))
    found: dict[str, dict[str, list[str]]] = {}
    with callers() as everybody:
        for caller in everybody:
            with has_account(caller):
                found["root" if caller.uid == 0 else "an ordinary user"] = rows_of(caller, peers)
    versions = [("bubblewrap", version_of(["bwrap", "--version"])), *peers.versions]
    told = ", ".join(f"{name} {version.split()[-1]}" for name, version in versions)
    about = ["", f"{told}; Linux {platform.release()} on {platform.machine()}."]
    about += [f"Not tried: {sentence}" for sentence in peers.missing]
    whole: list[str] = []
    for user, rows in found.items():
        whole += ["", f"As {user}:", "", *table([*GROUPS, "all"], rows)]
    names = dict.fromkeys(name for rows in found.values() for name in rows)
    short = ["", *table([f"as {user}" for user in found], {name: _totals(found, name) for name in names})]
    for page, lines in ((DOCS, whole), (README, short)):
        text = "\n".join([BEGIN, *lines, *about, END])
        if args.write:
            before, _, rest = page.read_text().partition(BEGIN)
            page.write_text(before + text + rest.partition(END)[2])
        else:
            print(text)
    return 0


def _totals(found: dict[str, dict[str, list[str]]], name: str) -> list[str]:
    return [rows[name][-1] if name in rows else "–" for rows in found.values()]


@contextmanager
def has_account(caller: Caller) -> Iterator[None]:
    """Give the ordinary user an account as long as this lasts: firejail wants one. Only this process and its
    children see it, because scripts/compare gave them mounts of their own."""
    namespaces = {os.readlink(f"/proc/{pid}/ns/mnt") for pid in (os.getpid(), os.getppid())}
    if os.geteuid() or not caller.uid or len(namespaces) == 1:
        yield
        return
    accounts = Path("/etc/passwd").read_text()
    line = f"runner-compare:x:{caller.uid}:{caller.uid}::{caller.home}:/bin/sh\n"
    subprocess.run(["mount", "--bind", caller.write("passwd", accounts + line), "/etc/passwd"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "/etc/passwd"], check=True)


def table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name, row in rows.items():
        yield f"| {name} | {' | '.join(row)} |"


def rows_of(caller: Caller, peers: FoundPeers) -> dict[str, list[str]]:
    """For each sandbox the attacks that were held, of those that count there: of each class, and of all."""
    lines: dict[str, Sequence[str]] = {
        "no sandbox": ["--against", "env"],
        "bwrap, host's files read-only": ["--against", *BY_HAND],
    }
    for peer in peers.peers:
        line = [*peer.command(caller, Command(["bwrap"], {})).argv]
        line.remove("/usr/bin/true")
        lines[peer.name] = ["--against", *line]
    lines |= {"runner, default policy": [], "runner, strict policy": ["--policy", "strict"]}
    return {name: cells(caller, words) for name, words in lines.items()}


def cells(caller: Caller, words: Sequence[str]) -> list[str]:
    print(f"compare: {caller.name}: {' '.join(words)[:100]}", file=sys.stderr)
    line = [RUNNER, "doctor", "--attack", "--format", "json", *words]
    with caller.start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate()
    if not out:
        said = err.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        return [f"not tried: {': '.join(said[0].split(': ')[1:3])}"]  # also the cell of all
    rows = json.loads(out)["rows"]
    counted = [[row for row in rows if row["class"] == group] for group in GROUPS]
    return [cell(each) for each in [*counted, rows]]


def cell(rows: Sequence[dict[str, str]]) -> str:
    held = sum(row["verdict"] == "held" for row in rows)
    count = held + sum(row["verdict"] == "not_held" for row in rows)
    return f"{held} of {count}" if count else "–"


if __name__ == "__main__":
    sys.exit(main())
