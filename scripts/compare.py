"""What `runner doctor --attack` finds in other sandboxes, as a table for each user. See scripts/compare."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sandbox.attacks.attacks import ATTACKS
from scripts.benches.caller import RUNNER, Caller, Unable, callers
from scripts.benches.launch import Command
from scripts.benches.machine import version_of
from scripts.benches.peers import NEXO, PEERS, FoundPeers, Job, find

ROOT = Path(__file__).parent.parent
DOCS, README = ROOT / "docs/attacks.md", ROOT / "README.md"
BEGIN, END = "<!-- made by scripts/compare -->", "<!-- end of what scripts/compare made -->"
BEGIN_CVES, END_CVES = "<!-- holes, made by scripts/compare -->", "<!-- end of holes -->"
OTHERS = (NEXO, "firejail", "sandbox-runtime", "sandlock", "nono", "codex", "gVisor")
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
_CLONE_NEWNS = 0x00020000
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
            give_account(caller)
            found["root" if caller.uid == 0 else "an ordinary user"] = rows_of(caller, peers)
    versions = [("bubblewrap", version_of(["bwrap", "--version"])), *peers.versions]
    told = ", ".join(f"{name} {version.split()[-1]}" for name, version in versions)
    about = ["", f"{told}; Linux {platform.release()} on {platform.machine()}."]
    about += [f"Not tried: {sentence.replace('--peers', '--install')}" for sentence in peers.missing]
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
    if args.write:
        before, _, rest = DOCS.read_text().partition(BEGIN_CVES)
        DOCS.write_text(before + cve_table() + rest.partition(END_CVES)[2])
    return 0


def cve_table() -> str:
    """The attacks that published holes began with, oldest first."""
    rows = sorted((cve, each) for each in ATTACKS for cve in each.cves)
    lines = [f"| {cve} | {each.tries} | `{each.id}` |" for cve, each in rows]
    return "\n".join([BEGIN_CVES, "", "| hole | attack | id |", "|---|---|---|", *lines, "", END_CVES])


def _totals(found: dict[str, dict[str, list[str]]], name: str) -> list[str]:
    return [rows[name][-1] if name in rows else "–" for rows in found.values()]


def give_account(caller: Caller) -> None:
    """Give the ordinary user an account, if this process may: firejail wants one. Nobody but this process and
    its children sees it, because they get mounts of their own first."""
    if os.geteuid() or not caller.uid or ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        return
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    line = f"runner-compare:x:{caller.uid}:{caller.uid}::{caller.home}:/bin/sh\n"
    accounts = caller.write("passwd", f"{Path('/etc/passwd').read_text().rstrip()}\n{line}")
    subprocess.run(["mount", "--bind", accounts, "/etc/passwd"], check=True)


def table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name, row in rows.items():
        yield f"| {name} | {' | '.join(row)} |"


def rows_of(caller: Caller, peers: FoundPeers) -> dict[str, list[str]]:
    """For each sandbox the attacks that were held, of those that count there: of each class, and of all."""
    found = {
        "no sandbox": cells(caller, ["--against", "env"]),
        "bwrap, host's files read-only": cells(caller, ["--against", *BY_HAND]),
    }
    for peer in peers.peers:
        try:
            line = peer.command(caller, Job(Command(["bwrap"], {}), program=())).argv
        except Unable as fault:
            found[peer.name] = [f"not tried: {fault}"]
            continue
        found[peer.name] = cells(caller, ["--against", *line])
    found["runner, default policy"] = cells(caller, [])
    found["runner, strict policy"] = cells(caller, ["--policy", "strict"])
    return found


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
